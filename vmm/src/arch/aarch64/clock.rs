//! The guest's virtual counter: its frequency, and its offset from the host's counter.
#![expect(unsafe_code, reason = "a register that programs may read, and a request that kvm-ioctls does not wrap")]

use kvm_bindings::{KVM_CAP_COUNTER_OFFSET, kvm_arm_counter_offset};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vpmu_kvm::arch::{host_ticks, reg};
use vpmu_kvm::clock_offset;

use crate::kvm::KvmError;

mod request {
    vmm_sys_util::ioctl_iow_nr!(
        KVM_ARM_SET_COUNTER_OFFSET,
        kvm_bindings::KVMIO,
        0xb5,
        kvm_bindings::kvm_arm_counter_offset
    );
}

/// The counter from which a guest reads the time. All of the guest's vCPUs share it.
#[derive(Debug, Clone)]
pub struct GuestClock {
    /// The guest's counter minus the host's counter.
    offset: u64,
}

impl GuestClock {
    /// Starts the counter of `vcpus` at zero. The vCPUs must not have run yet.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn new(kvm: &Kvm, vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        Self::at(0).resume(kvm, vm, vcpus)
    }

    /// A counter whose current value is `count`. It takes effect in a VM only when [`Self::resume`] is called.
    pub(crate) fn at(count: u64) -> Self {
        Self { offset: count.wrapping_sub(host_ticks()) }
    }

    /// The counter's current value.
    pub(crate) fn count(&self) -> u64 {
        host_ticks().wrapping_add(self.offset)
    }

    /// Makes `vcpus` continue this counter. They must belong to a new VM and must not have run yet. Returns the counter
    /// with the offset that it has in that VM.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn resume(&self, kvm: &Kvm, vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        if kvm.check_extension_raw(KVM_CAP_COUNTER_OFFSET.into()) > 0 {
            set_offset(vm, self.offset).map_err(KvmError::refused("set the offset of the guest's counter"))?;
            return Ok(self.clone());
        }
        // Before Linux 6.4, KVM lets the VMM set the counter's value, but not its offset. So set the value, then
        // measure the offset.
        let Some(first) = vcpus.first() else {
            return Ok(self.clone());
        };
        reg::set(first, reg::TIMER_COUNT, self.count()).map_err(KvmError::refused("set the guest's counter"))?;
        let offset = clock_offset(first).map_err(KvmError::refused("read the guest's counter"))?;
        Ok(Self { offset })
    }

    /// The counter's frequency in kHz.
    #[must_use]
    pub fn khz(&self) -> u32 {
        u32::try_from(hertz() / 1000).unwrap_or(u32::MAX)
    }

    /// The guest's counter minus the host's counter. The difference is the same on every vCPU.
    #[must_use]
    pub fn offset(&self, _vcpu: usize) -> u64 {
        self.offset
    }
}

/// The frequency in Hz of the host's counter and of every guest's counter.
pub(super) fn hertz() -> u64 {
    let hertz: u64;
    // SAFETY: reads the counter's frequency, which Linux lets user mode read.
    unsafe {
        core::arch::asm!("mrs {}, cntfrq_el0", out(reg) hertz, options(nomem, nostack));
    }
    hertz
}

/// Makes the guest's counter equal to the host's counter plus `offset`.
fn set_offset(vm: &VmFd, offset: u64) -> Result<(), kvm_ioctls::Error> {
    let request = kvm_arm_counter_offset {
        // KVM subtracts this from the host's counter.
        counter_offset: offset.wrapping_neg(),
        reserved: 0,
    };
    // SAFETY: the kernel reads the structure, which outlives the call.
    if unsafe { ioctl_with_ref(vm, request::KVM_ARM_SET_COUNTER_OFFSET(), &request) } < 0 {
        return Err(kvm_ioctls::Error::last());
    }
    Ok(())
}
