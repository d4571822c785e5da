//! The guest's time stamp counter: its frequency, and its offset from the host's counter.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
pub(super) use vpmu_kvm::arch::{clock_offset as offset, set_clock_offset as set_offset};

use crate::kvm::KvmError;

/// The counters from which a guest reads the time: the TSCs of its vCPUs.
#[derive(Debug, Clone)]
pub struct GuestClock {
    khz: u32,
    /// For each vCPU, guest TSC minus host TSC, or `None` if KVM does not report it.
    offsets: Vec<Option<u64>>,
}

impl GuestClock {
    /// Reads the frequency and the offsets of the TSCs of `vcpus`, which must not have run yet.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn new(_kvm: &Kvm, _vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        let offsets =
            vcpus.iter().map(|vcpu| offset(vcpu).inspect_err(|error| log::debug!("no TSC offset: {error}")).ok());
        Ok(Self { offsets: offsets.collect(), khz: vcpus.first().map_or(Ok(0), khz)? })
    }

    /// Makes `vcpus` continue these counters. They must belong to a new VM and must not have run yet. Returns the
    /// counters.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn resume(&self, kvm: &Kvm, vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        for (vcpu, offset) in vcpus.iter().zip(&self.offsets) {
            // If KVM did not report an offset, the times in records are converted with an offset of zero. So leave this
            // vCPU's TSC unchanged.
            if let Some(offset) = offset
                && let Err(error) = set_offset(vcpu, *offset)
            {
                log::warn!("the guest's time restarts: KVM cannot set the TSC offset: {error}");
            }
        }
        Self::new(kvm, vm, vcpus)
    }

    /// Sets the frequency to `khz`, which the guest learned when it booted, possibly on another host.
    pub(crate) fn set_khz(&mut self, khz: u32) {
        self.khz = khz;
    }

    /// The counter's frequency in kHz.
    #[must_use]
    pub fn khz(&self) -> u32 {
        self.khz
    }

    /// The guest's counter minus the host's counter on a vCPU. Zero if KVM does not report the offset, as is the case
    /// before Linux 5.16.
    #[must_use]
    pub fn offset(&self, vcpu: usize) -> u64 {
        self.offsets.get(vcpu).copied().flatten().unwrap_or(0)
    }
}

/// The frequency of a vCPU's TSC in kHz.
///
/// # Errors
/// [`KvmError::Refused`].
pub(super) fn khz(vcpu: &VcpuFd) -> Result<u32, KvmError> {
    vcpu.get_tsc_khz().map_err(KvmError::refused("report the TSC frequency"))
}
