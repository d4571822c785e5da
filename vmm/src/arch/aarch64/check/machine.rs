//! A machine of one vCPU and 64 KiB, at EL1 or EL0 from its first instruction.
//!
//! It has no firmware, no devices and no interrupt controller. Knows how to run a few instructions
//! and say how that ended, not what they are to prove.

#![expect(unsafe_code, reason = "registers memory with KVM")]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::super::{cpus, platform, reg};
use super::code;
use crate::check::{Ring, Watch};
use crate::kvm::KvmError;

/// Why a machine could not be built or run.
#[derive(Debug, thiserror::Error)]
pub(super) enum MachineError {
    /// KVM refused a step of building it.
    #[error("{0} failed")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// The same, of a step that every machine takes.
    #[error(transparent)]
    Platform(#[from] KvmError),
    /// Its memory could not be mapped.
    #[error("cannot map 64 KiB of guest memory")]
    Map(#[source] vm_memory::mmap::FromRangesError),
    /// Its memory could not be filled.
    #[error("cannot fill guest memory")]
    Fill(#[source] vm_memory::GuestMemoryError),
    /// The bound on its time could not be set.
    #[error("KVM_SET_SIGNAL_MASK failed")]
    Guard(#[source] std::io::Error),
}

/// How one run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Exit {
    /// A store into the device window: offset and value.
    Store(u64, u64),
    /// The probe's time was over.
    Stopped,
    /// Anything else, in words.
    Other(String),
}

impl Exit {
    /// In words, for a finding.
    pub(super) fn describe(&self) -> String {
        match self {
            Exit::Store(code::EXCEPTION, class) => {
                format!("raised an exception of class {class:#x}")
            }
            Exit::Store(offset, value) => format!("stored {value:#x} at offset {offset:#x}"),
            Exit::Stopped => "was still running when its time was over".into(),
            Exit::Other(what) => format!("ended in {what}"),
        }
    }
}

/// One vCPU with its VM. The fields drop in this order: KVM lets go of the memory first.
#[derive(Debug)]
pub(super) struct Machine {
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: GuestMemoryMmap,
    watch: Watch,
}

impl Machine {
    /// A machine about to execute `program` in `ring`, bounded by `watch`.
    pub(super) fn new(
        kvm: &Kvm,
        watch: &Watch,
        ring: Ring,
        program: &[u32],
    ) -> Result<Self, MachineError> {
        let step = |name| move |e| MachineError::Kvm(name, e);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), code::RAM)])
            .map_err(MachineError::Map)?;
        let vectors = code::vectors();
        for (at, program) in vectors.into_iter().chain([(code::PROGRAM, program)]) {
            memory
                .write_slice(&code::bytes(program), GuestAddress(at))
                .map_err(MachineError::Fill)?;
        }
        let vm = platform::create_vm(kvm)?;
        let host = memory
            .get_host_address(GuestAddress(0))
            .map_err(MachineError::Fill)?;
        let region = kvm_userspace_memory_region {
            memory_size: code::RAM as u64,
            userspace_addr: host as u64,
            ..Default::default()
        };
        // SAFETY: the region is the whole of a mapping that the machine owns and unmaps only
        // after the VM is gone.
        unsafe { vm.set_user_memory_region(region) }.map_err(step("KVM_SET_USER_MEMORY_REGION"))?;

        let vcpu = vm.create_vcpu(0).map_err(step("KVM_CREATE_VCPU"))?;
        watch.guard(&vcpu).map_err(MachineError::Guard)?;
        vcpu.vcpu_init(&cpus::preferred(&vm)?)
            .map_err(step("KVM_ARM_VCPU_INIT"))?;
        let machine = Machine {
            vcpu,
            _vm: vm,
            _memory: memory,
            watch: watch.clone(),
        };
        let pstate = match ring {
            Ring::Kernel => reg::PSTATE_EL1,
            Ring::User => reg::PSTATE_EL0,
        };
        for (number, value) in [
            (reg::PC, code::PROGRAM),
            (reg::PSTATE, pstate),
            (reg::VBAR_EL1, code::VECTORS),
            (reg::x(0), code::WINDOW),
        ] {
            machine.set(number, value)?;
        }
        Ok(machine)
    }

    /// Sets a register.
    pub(super) fn set(&self, number: u64, value: u64) -> Result<(), MachineError> {
        reg::set(&self.vcpu, number, value).map_err(|e| MachineError::Kvm("KVM_SET_ONE_REG", e))
    }

    /// A register's value.
    pub(super) fn get(&self, number: u64) -> Result<u64, MachineError> {
        reg::get(&self.vcpu, number).map_err(|e| MachineError::Kvm("KVM_GET_ONE_REG", e))
    }

    /// Runs the guest to its next exit, or until its time is over.
    pub(super) fn run(&mut self) -> Exit {
        self.run_until(|| false)
    }

    /// The same, but no longer than until `done`, which is asked at the start and after each signal.
    pub(super) fn run_until(&mut self, mut done: impl FnMut() -> bool) -> Exit {
        loop {
            if self.watch.over() || done() {
                return Exit::Stopped;
            }
            return match self.vcpu.run() {
                Ok(VcpuExit::MmioWrite(at, data)) if at >= code::WINDOW => {
                    let mut value = [0; 8];
                    let length = data.len().min(8);
                    value[..length].copy_from_slice(&data[..length]);
                    Exit::Store(at - code::WINDOW, u64::from_le_bytes(value))
                }
                Ok(other) => Exit::Other(format!("{other:?}")),
                // Someone else's signal, unless the watch says otherwise.
                Err(e) if e.errno() == libc::EINTR => {
                    self.watch.take_signals();
                    continue;
                }
                Err(e) => Exit::Other(format!("KVM_RUN: {e}")),
            };
        }
    }
}
