//! Model-specific registers that the embedder emulates instead of KVM, for features that KVM lacks.
//!
//! When the guest accesses such a register, KVM passes the access to the VMM, on the vCPU's thread.

use std::error::Error;
use std::fmt::Debug;
use std::io;
use std::ops::Range;

use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, kvm_cpuid_entry2, kvm_enable_cap};
use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::kvm::KvmError;

/// The emulated registers of a machine.
pub trait MsrDevice: Debug + Send + Sync {
    /// The numbers of the registers, as ranges. KVM accepts at most 16 ranges, each of at most 12,288 registers.
    fn ranges(&self) -> Vec<Range<u32>>;

    /// Changes a vCPU's CPUID leaves.
    fn describe(&self, _leaves: &mut Vec<kvm_cpuid_entry2>) {}

    /// Called at every boot, after the guest's images have been loaded into `memory` and before any vCPU runs.
    ///
    /// # Errors
    /// Any error keeps the guest from booting.
    fn loaded(&self, _memory: &GuestMemoryMmap) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }

    /// Returns the registers of a vCPU. The VMM calls this at every boot, on the vCPU's thread, after the thread's
    /// seccomp filter is installed.
    ///
    /// # Errors
    /// Errors of the host.
    fn vcpu(&self, index: u32) -> io::Result<Box<dyn VcpuMsrs>>;
}

/// The emulated registers of a vCPU. All calls are made on the vCPU's thread.
pub trait VcpuMsrs: Debug {
    /// Returns the register's value. `None` injects a general protection fault into the guest.
    fn read(&mut self, register: u32) -> Option<u64>;

    /// Handles a write by the guest. Returning `false` injects a general protection fault.
    fn write(&mut self, register: u32, value: u64) -> bool;

    /// Called before each entry into the guest, to inject interrupts. If a
    /// [`kick_signal`](crate::signal::kick_signal) arrives after this call, `KVM_RUN` returns immediately.
    ///
    /// # Errors
    /// Errors of the host, which end the run.
    fn enter(&mut self, vcpu: &VcpuFd) -> io::Result<()>;
}

/// Makes `KVM_RUN` return when the guest accesses a register of `device`.
///
/// # Errors
/// [`KvmError::Refused`].
pub(crate) fn trap(vm: &VmFd, device: &dyn MsrDevice) -> Result<(), KvmError> {
    let mut capability = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    capability.args[0] = u64::from(KVM_MSR_EXIT_REASON_FILTER);
    vm.enable_cap(&capability).map_err(KvmError::refused("pass MSR accesses to the VMM"))?;
    // If a register's bit is clear, KVM passes each access to this register on to the VMM.
    let ranges: Vec<(Range<u32>, Vec<u8>)> = device
        .ranges()
        .into_iter()
        .map(|range| {
            let bytes = range.len().div_ceil(8);
            (range, vec![0; bytes])
        })
        .collect();
    let filter: Vec<MsrFilterRange<'_>> = ranges
        .iter()
        .map(|(range, bitmap)| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: range.start,
            msr_count: range.end.saturating_sub(range.start),
            bitmap,
        })
        .collect();
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &filter)
        .map_err(KvmError::refused("filter model-specific registers"))
}
