//! The state of a machine that KVM holds: it is not saved on aarch64 yet.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::clock::GuestClock;

/// Why state cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// There is no code for it.
    #[error("machines of aarch64 cannot be saved yet")]
    Unsupported,
    /// The saved state has another shape than a machine.
    #[error("the saved {0} is not valid")]
    Malformed(&'static str),
}

/// Facts of this KVM that saving needs.
#[derive(Debug)]
pub(crate) struct Saver(());

/// State of a vCPU: no value of it exists here.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum VcpuState {}

/// State of the rest of the VM: no value of it exists here.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum VmState {}

impl Saver {
    /// Nothing is asked.
    ///
    /// # Errors
    /// None.
    #[expect(clippy::unnecessary_wraps, reason = "other architectures ask KVM")]
    pub(crate) fn new(_kvm: &Kvm) -> Result<Self, StateError> {
        Ok(Self(()))
    }

    /// The state of a vCPU.
    ///
    /// # Errors
    /// [`StateError::Unsupported`].
    pub(crate) fn vcpu(&self, _fd: &VcpuFd) -> Result<VcpuState, StateError> {
        Err(StateError::Unsupported)
    }
}

/// The VM was paused.
pub(crate) fn paused(_fd: &VcpuFd) {}

impl VmState {
    /// The state of `vm`.
    ///
    /// # Errors
    /// [`StateError::Unsupported`].
    pub(crate) fn save(_vm: &VmFd) -> Result<Self, StateError> {
        Err(StateError::Unsupported)
    }

    /// Puts this state into `vm`.
    ///
    /// # Errors
    /// [`StateError::Unsupported`].
    pub(crate) fn restore(
        &self,
        _vm: &VmFd,
        _fds: &[VcpuFd],
        _vcpus: &[VcpuState],
    ) -> Result<(), StateError> {
        Err(StateError::Unsupported)
    }
}

/// Gives `clock` the frequency of the guest of `vcpus`: always the host's.
pub(crate) fn clock_told(_clock: &mut GuestClock, _vcpus: &[VcpuState]) {}
