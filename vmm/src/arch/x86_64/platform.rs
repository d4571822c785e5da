//! KVM on x86-64: the VM of a PC, and its requirements.

use kvm_bindings::{KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE, kvm_enable_cap};
use kvm_ioctls::{Cap, Kvm, VmFd};

use super::layout;
use crate::kvm::{Host, KvmError};
use crate::machine::Machine;

/// The host features that a machine on x86-64 requires.
pub const HOST: Host = Host {
    remedy: "enable virtualisation in the firmware and load kvm-intel or kvm-amd",
    modules: &["kvm_intel", "kvm_amd", "kvm_pvm"],
    needed: &[(Cap::SetTssAddr, "the TSS address"), (Cap::ExtCpuid, "CPUID tables")],
};

/// Creates a VM with interrupt controllers. Disables the VM's hardware PMU if `machine` has none and KVM can do so.
///
/// # Errors
/// [`KvmError::Refused`].
pub fn create_vm(kvm: &Kvm, machine: &Machine) -> Result<VmFd, KvmError> {
    let vm = kvm.create_vm().map_err(KvmError::refused("create a VM"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).map_err(KvmError::refused("place the VM's identity map"))?;
    vm.set_tss_address(layout::KVM_TSS).map_err(KvmError::refused("place the VM's TSS"))?;
    vm.create_irq_chip().map_err(KvmError::refused("create interrupt controllers"))?;
    let capability = kvm.check_extension_raw(u64::from(KVM_CAP_PMU_CAPABILITY));
    let can_disable = u32::try_from(capability).is_ok_and(|bits| bits & KVM_PMU_CAP_DISABLE != 0);
    if can_disable && !machine.pmu {
        let mut disable = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, ..Default::default() };
        disable.args[0] = u64::from(KVM_PMU_CAP_DISABLE);
        vm.enable_cap(&disable).map_err(KvmError::refused("disable the VM's hardware PMU"))?;
    }
    Ok(vm)
}
