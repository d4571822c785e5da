//! KVM on aarch64: the VM of a machine, and its requirements.

use kvm_ioctls::{Cap, Kvm, VmFd};

use super::exits;
use crate::kvm::KvmError;

/// The kernel modules of KVM here, besides its own: none, it is built in.
pub const MODULES: &[&str] = &[];

/// The remedy for a host without KVM.
pub const REMEDY: &str = "the host's kernel must have been started at EL2, with KVM built in";

/// The reason why processors cannot have a PMU of their own, if they cannot.
pub const NO_GUEST_PMU: Option<&str> = None;

/// Capabilities that every machine needs here, besides those that all architectures need.
pub const NEEDED: &[(Cap, &str)] = &[
    (Cap::OneReg, "single registers"),
    (Cap::DeviceCtrl, "devices in the kernel"),
    (Cap::ArmPsci02, "PSCI 0.2"),
];

/// A VM; it has interrupt controllers once it has vCPUs.
///
/// # Errors
/// [`KvmError::Refused`].
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, KvmError> {
    let vm = vpmu_kvm::arch::create_vm(kvm).map_err(KvmError::refused("create a VM"))?;
    exits::ask_for_undecoded(&vm);
    Ok(vm)
}
