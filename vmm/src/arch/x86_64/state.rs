//! The state of a PC in KVM: vCPUs, interrupt controllers and clocks. It is saved while no vCPU runs,
//! and restored into a new VM whose vCPUs have not run yet.

use kvm_bindings::{
    CpuId, KVM_CLOCK_HOST_TSC, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::clock::{self, GuestClock};
use super::cpus::Controller;
use crate::kvm::KvmError;

/// Errors from saving and restoring state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// KVM refuses a part of the state.
    #[error("KVM cannot {action} {what}")]
    Kvm {
        /// `save` or `restore`.
        action: &'static str,
        /// The part.
        what: &'static str,
        /// KVM's error.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// A model-specific register does not accept its saved value.
    #[error("KVM does not accept {value:#x} for the model-specific register {index:#x}")]
    Msr {
        /// The register's number.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// A vCPU runs a nested guest.
    #[error("the guest runs a hypervisor of its own, whose state vmm cannot save")]
    Nested,
    /// There are more entries than KVM's interface can hold.
    #[error("too many {0}")]
    TooMany(&'static str, #[source] vmm_sys_util::fam::Error),
    /// The guest's CPUID shows a feature that this host does not have.
    #[error(
        "the guest's processors have features that this host lacks (CPUID leaf {leaf:#x}): restore the \
         snapshot on a host with the same processor"
    )]
    Cpuid {
        /// The leaf with these features.
        leaf: u32,
    },
    /// The host's TSC has a different frequency.
    #[error(
        "the guest's TSC runs at {saved} kHz, this host's at {host} kHz: restore the snapshot on a host \
         with the same TSC frequency"
    )]
    Tsc {
        /// The guest's frequency.
        saved: u32,
        /// This host's frequency.
        host: u32,
    },
    /// The saved state does not describe a valid machine.
    #[error("the saved {0} is not valid")]
    Malformed(&'static str),
}

/// Tolerated difference between TSC frequencies. Linux measures the frequency at each boot, and the results differ by a
/// few parts per million.
const TSC_TOLERANCE_PPM: u64 = 250;
const MSR_TSC: u32 = 0x10;
/// Maximum number of model-specific registers that one `KVM_GET_MSRS` reads.
const MSRS_AT_ONCE: usize = 64;
const EFER_SVME: u64 = 1 << 12;
const CR4_VMXE: u64 = 1 << 13;

/// The numbers of the model-specific registers that this KVM can save.
#[derive(Debug)]
pub(crate) struct Saver {
    msrs: Vec<u32>,
}

/// The state of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
    mp: kvm_mp_state,
    tsc_khz: u32,
    /// Guest TSC minus host TSC, if KVM reports it.
    tsc_offset: Option<u64>,
}

/// The state of the VM, except for the vCPUs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmState {
    irqchips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
    /// The host's TSC at the moment of `clock`.
    host_tsc: u64,
}

/// KVM's clock and the host's TSC at one moment. The guest compares KVM's clock with its TSCs. If the two were read
/// separately, the time between the two reads would cause an error in this comparison.
#[derive(Debug, Clone, Copy)]
struct Moment {
    clock: kvm_clock_data,
    host_tsc: u64,
    /// Upper bound on the time between the reads of `clock` and `host_tsc`, in TSC ticks. Zero if KVM read both at
    /// once.
    apart: u64,
}

impl Moment {
    /// Maximum number of attempts to read KVM's clock and the host's TSC without a preemption between the two reads.
    const ATTEMPTS: u32 = 16;

    fn read(vm: &VmFd) -> Result<Self, kvm_ioctls::Error> {
        let mut best = Self::attempt(vm)?;
        for _ in 1..Self::ATTEMPTS {
            if best.apart == 0 {
                break;
            }
            let other = Self::attempt(vm)?;
            if other.apart < best.apart {
                best = other;
            }
        }
        Ok(best)
    }

    fn attempt(vm: &VmFd) -> Result<Self, kvm_ioctls::Error> {
        let before = host_tsc();
        let clock = vm.get_clock()?;
        let apart = host_tsc().wrapping_sub(before);
        // Since Linux 5.16, KVM also reports the host's TSC, if KVM's clock is based on the TSC.
        Ok(match clock.flags & KVM_CLOCK_HOST_TSC {
            0 => Self { clock, host_tsc: before.wrapping_add(apart / 2), apart },
            _ => Self { clock, host_tsc: clock.host_tsc, apart: 0 },
        })
    }

    /// The number of ticks to subtract from the TSC offsets of `saved`. The guest's TSCs have then advanced since the
    /// save by the same time as KVM's clock. `khz` is the frequency of the TSCs.
    fn lag(&self, saved: &VmState, khz: u32) -> u64 {
        let nanoseconds = self.clock.clock.saturating_sub(saved.clock.clock);
        let ticks = u128::from(nanoseconds) * u128::from(khz) / 1_000_000;
        let ticks = u64::try_from(ticks).unwrap_or(u64::MAX);
        let since = self.host_tsc.wrapping_sub(saved.host_tsc);
        since.wrapping_sub(ticks)
    }
}

fn cannot(action: &'static str, what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    move |source| StateError::Kvm { action, what, source }
}

fn save(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    cannot("save", what)
}

fn restore(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> StateError {
    cannot("restore", what)
}

fn host_tsc() -> u64 {
    // SAFETY: every processor with KVM has a TSC, which user mode may read on Linux.
    #[expect(unsafe_code, reason = "an instruction")]
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
}

impl Saver {
    /// Reads the list of model-specific registers that `kvm` can save.
    ///
    /// # Errors
    /// [`StateError::Kvm`].
    pub(crate) fn new(kvm: &Kvm) -> Result<Self, StateError> {
        let list = kvm.get_msr_index_list().map_err(cannot("list", "model-specific registers"))?;
        Ok(Self { msrs: list.as_slice().to_vec() })
    }

    /// Saves the state of a vCPU. The vCPU's last `KVM_RUN` must have returned, and its last access must be complete.
    ///
    /// # Errors
    /// [`StateError`].
    pub(crate) fn vcpu(&self, fd: &VcpuFd) -> Result<VcpuState, StateError> {
        // Read the run state first: this makes KVM process pending INIT and SIPI signals.
        let mp = fd.get_mp_state().map_err(save("the run state"))?;
        let sregs = fd.get_sregs().map_err(save("the system registers"))?;
        if sregs.efer & EFER_SVME != 0 || sregs.cr4 & CR4_VMXE != 0 {
            return Err(StateError::Nested);
        }
        Ok(VcpuState {
            mp,
            sregs,
            regs: fd.get_regs().map_err(save("the registers"))?,
            xsave: fd.get_xsave().map_err(save("the extended state"))?,
            xcrs: fd.get_xcrs().map_err(save("the extended control registers"))?,
            debug: fd.get_debug_regs().map_err(save("the debug registers"))?,
            lapic: fd.get_lapic().map_err(save("the local APIC"))?,
            cpuid: fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(save("CPUID"))?.as_slice().to_vec(),
            msrs: self.msrs(fd)?,
            tsc_khz: fd.get_tsc_khz().map_err(save("the TSC frequency"))?,
            tsc_offset: clock::offset(fd).ok(),
            events: fd.get_vcpu_events().map_err(save("pending events"))?,
        })
    }

    /// The numbers and values of all model-specific registers that KVM can read.
    fn msrs(&self, fd: &VcpuFd) -> Result<Vec<(u32, u64)>, StateError> {
        let mut saved = Vec::with_capacity(self.msrs.len());
        let mut left = self.msrs.as_slice();
        while !left.is_empty() {
            let asked = left.get(..MSRS_AT_ONCE.min(left.len())).unwrap_or(left);
            let values = read_msrs(fd, asked)?;
            // KVM stops at a register that the guest does not have, so skip that register.
            let step = match values.len() {
                count if count < asked.len() => count + 1,
                count => count,
            };
            saved.extend(values);
            left = left.get(step..).unwrap_or_default();
        }
        Ok(saved)
    }
}

/// Reads the registers in `indices`, up to the first register that KVM cannot read. Returns their numbers and values.
fn read_msrs(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, StateError> {
    let entries: Vec<kvm_msr_entry> =
        indices.iter().map(|&index| kvm_msr_entry { index, ..Default::default() }).collect();
    let mut msrs =
        Msrs::from_entries(&entries).map_err(|source| StateError::TooMany("model-specific registers", source))?;
    let read = fd.get_msrs(&mut msrs).map_err(save("model-specific registers"))?;
    let values = msrs.as_slice().iter().take(read);
    Ok(values.map(|entry| (entry.index, entry.data)).collect())
}

/// The saved registers that a vCPU's thread restores: those that start the counters of KVM's own PMU. Before Linux 6.2,
/// KVM opens the host's event of a counter as soon as one of them is set, and the event counts the thread that set it.
#[derive(Debug, Default)]
pub(crate) struct CounterStarts(Vec<(u32, u64)>);

impl CounterStarts {
    /// Restores the registers of the vCPU `fd`, whose other state is restored. The calling thread must be the vCPU's.
    ///
    /// # Errors
    /// [`StateError`].
    pub(crate) fn restore(&self, fd: &VcpuFd) -> Result<(), StateError> {
        self.0.iter().try_for_each(|&(index, value)| set_msr(fd, index, value))
    }
}

/// Whether the register starts a counter: it is one of Intel's event selects, Intel's control of fixed counters, or one of
/// AMD's event selects.
fn starts_counters(index: u32) -> bool {
    match index {
        0x186..=0x18d | 0x38d | 0xc001_0000..=0xc001_0003 => true,
        0xc001_0200..=0xc001_020b => index.is_multiple_of(2),
        _ => false,
    }
}

/// Notifies the guest that the VM was paused, so that its watchdogs do not report a hang.
pub(crate) fn paused(fd: &VcpuFd) {
    // A guest that does not use KVM's clock needs no notification.
    if let Err(error) = fd.kvmclock_ctrl() {
        log::debug!("cannot tell the guest that it was paused: {error}");
    }
}

impl VcpuState {
    /// The registers that [`VmState::restore`] leaves to the vCPU's thread.
    pub(crate) fn counter_starts(&self) -> CounterStarts {
        let starts = self.msrs.iter().filter(|&&(index, value)| value != 0 && starts_counters(index));
        CounterStarts(starts.copied().collect())
    }

    /// Restores this state into `fd`, which must have this machine's CPUID and must not have run yet. `lag` comes from
    /// [`Moment::lag`].
    fn restore(&self, fd: &VcpuFd, lag: u64) -> Result<(), StateError> {
        let own = fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(restore("CPUID"))?;
        compare_features(&self.cpuid, own.as_slice())?;
        let cpuid = CpuId::from_entries(&self.cpuid).map_err(|source| StateError::TooMany("CPUID leaves", source))?;
        fd.set_cpuid2(&cpuid).map_err(restore("CPUID"))?;
        compare_tsc(self.tsc_khz, fd.get_tsc_khz().map_err(restore("the TSC frequency"))?)?;
        let keeps_offset = match self.tsc_offset {
            // The vCPU's TSC continues from its saved value. The differences between the vCPUs' TSCs stay the
            // same.
            Some(offset) => clock::set_offset(fd, offset.wrapping_sub(lag)).is_ok(),
            None => false,
        };
        fd.set_mp_state(self.mp).map_err(restore("the run state"))?;
        fd.set_regs(&self.regs).map_err(restore("the registers"))?;
        fd.set_sregs(&self.sregs).map_err(restore("the system registers"))?;
        set_xsave(fd, &self.xsave)?;
        // A host without XSAVE has no extended control registers, and KVM refuses to set any there.
        if self.xcrs.nr_xcrs > 0 {
            fd.set_xcrs(&self.xcrs).map_err(restore("the extended control registers"))?;
        }
        fd.set_debug_regs(&self.debug).map_err(restore("the debug registers"))?;
        fd.set_lapic(&self.lapic).map_err(restore("the local APIC"))?;
        // Set the MSRs after the local APIC: KVM ignores a TSC deadline unless the APIC's timer is in deadline mode.
        self.set_msrs(fd, keeps_offset)?;
        fd.set_vcpu_events(&self.events).map_err(restore("pending events"))
    }

    fn set_msrs(&self, fd: &VcpuFd, keeps_offset: bool) -> Result<(), StateError> {
        for &(index, value) in &self.msrs {
            if index == MSR_TSC && keeps_offset {
                continue;
            }
            if value != 0 && starts_counters(index) {
                continue;
            }
            // Skip a register that already has the saved value: many registers are read-only.
            if index != MSR_TSC && read_msrs(fd, &[index])?.first() == Some(&(index, value)) {
                continue;
            }
            set_msr(fd, index, value)?;
        }
        Ok(())
    }
}

fn set_msr(fd: &VcpuFd, index: u32, value: u64) -> Result<(), StateError> {
    let entry = kvm_msr_entry { index, data: value, ..Default::default() };
    let one = Msrs::from_entries(&[entry]).map_err(|source| StateError::TooMany("model-specific registers", source))?;
    match fd.set_msrs(&one) {
        Ok(1) => Ok(()),
        Ok(_) => Err(StateError::Msr { index, value }),
        Err(source) => Err(restore("model-specific registers")(source)),
    }
}

#[expect(unsafe_code, reason = "KVM would read past the structure in a VM with larger extended state")]
fn set_xsave(fd: &VcpuFd, xsave: &kvm_xsave) -> Result<(), StateError> {
    // SAFETY: this process never requests permission for dynamic state, so KVM reads only the 4096 bytes that
    // the structure has.
    unsafe { fd.set_xsave(xsave) }.map_err(restore("the extended state"))
}

/// The CPUID leaves that have feature bits, and which registers of each leaf contain the bits.
const FEATURES: [(u32, u32, [bool; 4]); 4] = [
    (0x1, 0, [false, false, true, true]),
    (0x7, 0, [false, true, true, false]),
    (0xd, 1, [true, false, false, false]),
    (0x8000_0001, 0, [false, false, true, true]),
];
/// The feature bits OSXSAVE and OSPKE. These bits are not compared, because they mirror bits of the guest's CR4.
const FOLLOWS_CR4: [(u32, usize, u32); 2] = [(0x1, 2, 1 << 27), (0x7, 2, 1 << 4)];

/// Checks that the host has every feature that CPUID showed to the guest.
fn compare_features(saved: &[kvm_cpuid_entry2], own: &[kvm_cpuid_entry2]) -> Result<(), StateError> {
    let registers = |leaves: &[kvm_cpuid_entry2], leaf: u32, index: u32| {
        let entry = leaves.iter().find(|entry| entry.function == leaf && entry.index == index);
        entry.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
    };
    for (leaf, index, which) in FEATURES {
        let (saved, own) = (registers(saved, leaf, index), registers(own, leaf, index));
        for (place, ((saved, own), wanted)) in saved.into_iter().zip(own).zip(which).enumerate() {
            let follows = FOLLOWS_CR4.iter().find(|(of, at, _)| (*of, *at) == (leaf, place));
            let ignored = follows.map_or(0, |(.., bits)| *bits);
            if wanted && saved & !own & !ignored != 0 {
                return Err(StateError::Cpuid { leaf });
            }
        }
    }
    Ok(())
}

fn compare_tsc(saved: u32, host: u32) -> Result<(), StateError> {
    let tolerated = u64::from(saved) * TSC_TOLERANCE_PPM / 1_000_000;
    if u64::from(saved.abs_diff(host)) <= tolerated { Ok(()) } else { Err(StateError::Tsc { saved, host }) }
}

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl VmState {
    /// Saves the state of `vm`. The vCPUs must be stopped.
    ///
    /// # Errors
    /// [`StateError::Kvm`].
    pub(crate) fn save(vm: &VmFd, _controller: &Controller, _clock: &GuestClock) -> Result<Self, StateError> {
        let Moment { clock, host_tsc, .. } = Moment::read(vm).map_err(save("KVM's clock"))?;
        let irqchips = IRQCHIPS.map(|chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map_err(save("the interrupt controllers"))?;
            Ok(chip)
        });
        Ok(Self { irqchips: irqchips.into_iter().collect::<Result<_, _>>()?, clock, host_tsc })
    }

    /// Restores this state into `vm`. Also restores each element of `vcpus`, but for its [`CounterStarts`], into the vCPU
    /// at the same index of `fds`.
    ///
    /// # Errors
    /// [`StateError`].
    pub(crate) fn restore(
        &self,
        vm: &VmFd,
        _controller: &Controller,
        fds: &[VcpuFd],
        vcpus: &[VcpuState],
    ) -> Result<(), StateError> {
        if fds.len() != vcpus.len() {
            return Err(StateError::Malformed("set of vCPUs"));
        }
        if !self.irqchips.iter().map(|chip| chip.chip_id).eq(IRQCHIPS) {
            return Err(StateError::Malformed("set of interrupt controllers"));
        }
        for chip in &self.irqchips {
            vm.set_irqchip(chip).map_err(restore("the interrupt controllers"))?;
        }
        // Set KVM's clock before the vCPUs' registers, which include the address of the guest's clock. Clear the flags,
        // so that the guest's time continues from the saved time: otherwise KVM would add the time that has passed
        // since the save.
        let clock = kvm_clock_data { flags: 0, ..self.clock };
        vm.set_clock(&clock).map_err(restore("KVM's clock"))?;
        let now = Moment::read(vm).map_err(restore("KVM's clock"))?;
        // Use the same value for all vCPUs, because a guest compares KVM's clock with the TSC of each vCPU.
        let khz = vcpus.first().map_or(0, |first| first.tsc_khz);
        let lag = now.lag(self, khz);
        for (fd, state) in fds.iter().zip(vcpus) {
            state.restore(fd, lag)?;
        }
        Ok(())
    }

    /// Returns the TSCs of `vcpus`. The caller must have restored `states` into them first. The guest keeps the TSC
    /// frequency that it learned at boot. That frequency may differ slightly from this host's frequency.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub(crate) fn clock(
        &self,
        kvm: &Kvm,
        vm: &VmFd,
        vcpus: &[VcpuFd],
        states: &[VcpuState],
    ) -> Result<GuestClock, KvmError> {
        let mut clock = GuestClock::new(kvm, vm, vcpus)?;
        if let Some(first) = states.first() {
            clock.set_khz(first.tsc_khz);
        }
        Ok(clock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tsc_of_another_frequency_is_refused_and_one_measured_anew_is_not() {
        assert!(compare_tsc(2_000_000, 2_000_000).is_ok());
        assert!(compare_tsc(2_000_000, 2_000_500).is_ok());
        assert!(compare_tsc(2_000_000, 1_999_500).is_ok());
        let refused = compare_tsc(2_000_000, 2_000_501).expect_err("too fast");
        assert!(matches!(refused, StateError::Tsc { saved: 2_000_000, host: 2_000_501 }));
        assert!(compare_tsc(u32::MAX, 0).is_err());
    }

    #[test]
    fn feature_that_the_host_lacks_is_refused_with_its_leaf() {
        let leaf = |function, ecx| kvm_cpuid_entry2 { function, ecx, ..Default::default() };
        let own = [leaf(1, 0b101), leaf(0x8000_0001, 0)];
        assert!(compare_features(&[leaf(1, 0b100)], &own).is_ok());
        // OSXSAVE, which the guest has set in its CR4, is ignored.
        assert!(compare_features(&[leaf(1, 0b101 | 1 << 27)], &own).is_ok());
        for (leaf, saved) in [(1, leaf(1, 0b010)), (0x8000_0001, leaf(0x8000_0001, 1))] {
            let refused = compare_features(&[saved], &own).expect_err("the host lacks it");
            assert!(matches!(refused, StateError::Cpuid { leaf: named } if named == leaf));
        }
    }

    #[test]
    fn tsc_advances_with_the_clock_over_a_restore() {
        const KHZ: u32 = 2_000_000;
        const OFFSET: u64 = 123_456;
        let at = |clock, host_tsc| Moment { clock: kvm_clock_data { clock, ..Default::default() }, host_tsc, apart: 0 };
        let Moment { clock, host_tsc, .. } = at(1_000_000_000, 5_000_000_000);
        let saved = VmState { irqchips: Vec::new(), clock, host_tsc };
        for (nanoseconds, host_tsc) in [(0, 77), (1_500, 9_000_000_000), (4_000_000_000, u64::MAX)] {
            let now = at(clock.clock + nanoseconds, host_tsc);
            let offset = OFFSET.wrapping_sub(now.lag(&saved, KHZ));
            let before = saved.host_tsc.wrapping_add(OFFSET);
            let after = host_tsc.wrapping_add(offset);
            assert_eq!(after.wrapping_sub(before), 2 * nanoseconds);
        }
    }
}
