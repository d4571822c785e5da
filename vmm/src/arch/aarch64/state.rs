//! The state of a machine in KVM: vCPUs, their interrupt controller and their counter. It is saved while no vCPU
//! runs, and restored into a new VM whose vCPUs have not run yet.

use kvm_bindings::{RegList, kvm_mp_state, kvm_vcpu_events, kvm_vcpu_init};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vpmu_kvm::arch::reg;

use super::clock::{self, GuestClock};
use super::cpus::Controller;
use super::gic::{Part, SavedGic};
use crate::kvm::KvmError;

/// Errors from saving and restoring state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// KVM lacks a capability.
    #[error("this KVM lacks {0}")]
    Lacks(&'static str),
    /// KVM refuses a part of the state.
    #[error("KVM cannot {action} {what}")]
    Kvm {
        /// `save` or `restore`.
        action: &'static str,
        /// The part.
        what: &'static str,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// KVM refuses a register of a vCPU.
    #[error("KVM cannot {action} the register {id:#x}")]
    Register {
        /// `save` or `restore`.
        action: &'static str,
        /// KVM's id of the register.
        id: u64,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// KVM refuses a register of the interrupt controller.
    #[error("KVM cannot {action} the {part}'s register {register:#x}")]
    Gic {
        /// `save` or `restore`.
        action: &'static str,
        /// The part of the controller.
        part: Part,
        /// The register's offset, or the encoding of a system register.
        register: u32,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// There are more registers than KVM's interface can hold.
    #[error("too many registers")]
    TooMany(#[source] vmm_sys_util::fam::Error),
    /// This host's KVM offers a different kind of processor.
    #[error("the snapshot comes from a different kind of processor: restore it on a host with the same processor")]
    Processor,
    /// The host's counter has a different frequency.
    #[error(
        "the guest's counter runs at {saved} Hz, this host's at {host} Hz: restore the snapshot on a host with \
         the same counter frequency"
    )]
    Counter {
        /// The guest's frequency.
        saved: u64,
        /// This host's frequency.
        host: u64,
    },
    /// The saved state does not describe a valid machine.
    #[error("the saved {0} is not valid")]
    Malformed(&'static str),
}

/// Maximum number of a vCPU's registers: the limit of kvm-bindings.
const MAX_REGISTERS: usize = 500;
/// Size in bytes of the largest register, a vector register.
const MAX_BYTES: usize = 16;

/// Capabilities that are needed to save and restore, in addition to the capabilities that every machine needs.
const NEEDED: [(Cap, &str); 2] =
    [(Cap::MpState, "the run states of vCPUs"), (Cap::VcpuEvents, "the pending exceptions of vCPUs")];

/// Proof that this KVM has the capabilities for a save.
#[derive(Debug)]
pub(crate) struct Saver(());

/// The state of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VcpuState {
    /// For each register: its id in KVM, then the low half and the high half of its value.
    registers: Vec<(u64, u64, u64)>,
    mp: kvm_mp_state,
    serror: Option<SError>,
}

/// A pending SError.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SError {
    /// The syndrome, if KVM has one.
    syndrome: Option<u64>,
}

/// The state of the VM, except for the vCPUs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmState {
    /// The kind of processor and its features.
    processor: kvm_vcpu_init,
    gic: SavedGic,
    /// The value of the guest's counter at the save, while the VM was stopped.
    counter: u64,
    hertz: u64,
}

fn save(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    cannot("save", what)
}

fn restore(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    cannot("restore", what)
}

fn cannot(action: &'static str, what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { action, what, source }
}

fn refused(action: &'static str, id: u64) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Register { action, id, source }
}

impl Saver {
    /// Checks that `kvm` has the capabilities for a save.
    ///
    /// # Errors
    /// [`StateError::Lacks`].
    pub(crate) fn new(kvm: &Kvm) -> Result<Self, StateError> {
        let lacks = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap));
        match lacks {
            None => Ok(Self(())),
            Some((_, what)) => Err(StateError::Lacks(what)),
        }
    }

    /// Saves the state of a vCPU. The vCPU's last `KVM_RUN` must have returned, and its last access must be complete.
    ///
    /// # Errors
    /// [`StateError`].
    #[expect(clippy::unused_self, reason = "it proves that KVM can save a vCPU")]
    pub(crate) fn vcpu(&self, fd: &VcpuFd) -> Result<VcpuState, StateError> {
        let mut list = RegList::new(MAX_REGISTERS).map_err(StateError::TooMany)?;
        fd.get_reg_list(&mut list).map_err(save("the list of registers"))?;
        // Read the registers before the run state: if another vCPU has just started this vCPU, reading the registers
        // makes KVM reset this vCPU.
        let registers = list.as_slice().iter().map(|&id| {
            let (low, high) = get(fd, id).map_err(refused("save", id))?;
            Ok((id, low, high))
        });
        let registers = registers.collect::<Result<_, _>>()?;
        let events = fd.get_vcpu_events().map_err(save("pending exceptions"))?;
        let exception = events.exception;
        Ok(VcpuState {
            registers,
            mp: fd.get_mp_state().map_err(save("the run state"))?,
            serror: (exception.serror_pending != 0)
                .then(|| SError { syndrome: (exception.serror_has_esr != 0).then_some(exception.serror_esr) }),
        })
    }
}

/// The low and the high half of a register.
fn get(fd: &VcpuFd, id: u64) -> Result<(u64, u64), kvm_ioctls::Error> {
    let mut value = [0; MAX_BYTES];
    fd.get_one_reg(id, &mut value)?;
    let value = u128::from_le_bytes(value);
    #[expect(clippy::cast_possible_truncation, reason = "the casts split the value")]
    let halves = (value as u64, (value >> 64) as u64);
    Ok(halves)
}

/// The saved registers that a vCPU's thread restores: none. KVM on arm64 opens the host's events of its own PMU when the
/// guest programs a counter, so the counters stand still after a restore until the guest does so.
#[derive(Debug, Default)]
pub(crate) struct CounterStarts(());

impl CounterStarts {
    /// Does nothing.
    pub(crate) fn restore(&self, _fd: &VcpuFd) -> Result<(), StateError> {
        Ok(())
    }
}

/// Does nothing: KVM on arm64 cannot notify the guest that the VM was paused.
pub(crate) fn paused(_fd: &VcpuFd) {}

impl VcpuState {
    /// The registers that [`VmState::restore`] leaves to the vCPU's thread.
    #[expect(clippy::unused_self, reason = "other architectures have such registers")]
    pub(crate) fn counter_starts(&self) -> CounterStarts {
        CounterStarts::default()
    }

    /// Restores this state into `fd`, which must not have run yet.
    fn restore(&self, fd: &VcpuFd) -> Result<(), StateError> {
        if self.registers.len() > MAX_REGISTERS {
            return Err(StateError::Malformed("set of registers"));
        }
        for &(id, low, high) in &self.registers {
            // `VmState::clock` sets the counters of all vCPUs.
            if [reg::TIMER_COUNT, reg::PHYSICAL_COUNT].contains(&id) {
                continue;
            }
            // Skip a register that already has the saved value: many registers are read-only.
            if get(fd, id).map_err(refused("restore", id))? == (low, high) {
                continue;
            }
            let value = u128::from(high) << 64 | u128::from(low);
            fd.set_one_reg(id, &value.to_le_bytes()).map_err(refused("restore", id))?;
        }
        let mut events = kvm_vcpu_events::default();
        if let Some(serror) = &self.serror {
            events.exception.serror_pending = 1;
            events.exception.serror_has_esr = serror.syndrome.is_some().into();
            events.exception.serror_esr = serror.syndrome.unwrap_or_default();
        }
        fd.set_vcpu_events(&events).map_err(restore("pending exceptions"))?;
        fd.set_mp_state(self.mp).map_err(restore("the run state"))
    }
}

impl VmState {
    /// Saves the state of the VM: the state of its `controller`, and the counter value of `clock`. The VM's vCPUs must
    /// be stopped.
    ///
    /// # Errors
    /// [`StateError::Gic`].
    pub(crate) fn save(_vm: &VmFd, controller: &Controller, clock: &GuestClock) -> Result<Self, StateError> {
        Ok(Self {
            processor: controller.processor,
            gic: controller.gic.save()?,
            counter: clock.count(),
            hertz: clock::hertz(),
        })
    }

    /// Restores this state into `vm` and its `controller`. Also restores each element of `vcpus` into the vCPU at the
    /// same index of `fds`.
    ///
    /// # Errors
    /// [`StateError`].
    pub(crate) fn restore(
        &self,
        vm: &VmFd,
        controller: &Controller,
        fds: &[VcpuFd],
        vcpus: &[VcpuState],
    ) -> Result<(), StateError> {
        let lacks = NEEDED.iter().find(|(cap, _)| !vm.check_extension(*cap));
        if let Some((_, what)) = lacks {
            return Err(StateError::Lacks(what));
        }
        if fds.len() != vcpus.len() {
            return Err(StateError::Malformed("set of vCPUs"));
        }
        if self.processor != controller.processor {
            return Err(StateError::Processor);
        }
        let host = clock::hertz();
        if self.hertz != host {
            return Err(StateError::Counter { saved: self.hertz, host });
        }
        for (fd, state) in fds.iter().zip(vcpus) {
            state.restore(fd)?;
        }
        controller.gic.restore(&self.gic)
    }

    /// Makes `vcpus` continue the saved counter. The caller must have restored the vCPUs' states first.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub(crate) fn clock(
        &self,
        kvm: &Kvm,
        vm: &VmFd,
        vcpus: &[VcpuFd],
        _states: &[VcpuState],
    ) -> Result<GuestClock, KvmError> {
        GuestClock::at(self.counter).resume(kvm, vm, vcpus)
    }
}
