//! The guest's time stamp counter: its frequency, and its offset from the host's.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
pub(super) use vpmu_kvm::arch::{clock_offset as offset, set_clock_offset as set_offset};

use crate::kvm::KvmError;

/// The counters from which a guest reads the time: its vCPUs' TSCs.
#[derive(Debug, Clone)]
pub struct GuestClock {
    khz: u32,
    /// Guest TSC minus host TSC of each vCPU; `None` where KVM does not report it.
    offsets: Vec<Option<u64>>,
}

impl GuestClock {
    /// Reads the frequency and the offsets of the TSCs of `vcpus`, which must not have run yet.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn new(_kvm: &Kvm, _vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        let offsets = vcpus.iter().map(|vcpu| {
            offset(vcpu)
                .inspect_err(|error| log::debug!("no TSC offset: {error}"))
                .ok()
        });
        Ok(Self {
            offsets: offsets.collect(),
            khz: vcpus.first().map_or(Ok(0), khz)?,
        })
    }

    /// Continues these counters on `vcpus`, which belong to a new VM and have not run yet. Returns
    /// the counters.
    ///
    /// # Errors
    /// [`KvmError::Refused`].
    pub fn go_on(&self, kvm: &Kvm, vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self, KvmError> {
        for (vcpu, offset) in vcpus.iter().zip(&self.offsets) {
            // If KVM did not report an offset, times in records are converted with an offset of zero, so this
            // vCPU's TSC must stay as it is.
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

    /// The guest's counter minus the host's on a vCPU; zero if KVM does not report it, as before
    /// Linux 5.16.
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
    vcpu.get_tsc_khz()
        .map_err(KvmError::refused("report the TSC frequency"))
}
