//! KVM on aarch64: the VM of a machine, and its requirements.

use kvm_ioctls::{Cap, Kvm, VmFd};

use super::exits;
use crate::kvm::{Host, KvmError};
use crate::machine::Machine;

/// The host features that a machine on aarch64 requires. On aarch64, KVM is built into the kernel.
pub const HOST: Host = Host {
    remedy: "boot a host kernel that has KVM built in, and boot it at EL2",
    modules: &[],
    needed: &[
        (Cap::OneReg, "single registers"),
        (Cap::DeviceCtrl, "devices in the kernel"),
        (Cap::ArmPsci02, "PSCI 0.2"),
    ],
};

/// Creates a VM without an interrupt controller. The controller is created later, with the vCPUs, and so are their PMUs.
///
/// # Errors
/// [`KvmError::Refused`].
pub fn create_vm(kvm: &Kvm, _machine: &Machine) -> Result<VmFd, KvmError> {
    let vm = vpmu_kvm::arch::create_vm(kvm).map_err(KvmError::refused("create a VM"))?;
    exits::ask_for_undecoded(&vm);
    Ok(vm)
}
