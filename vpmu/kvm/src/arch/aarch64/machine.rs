//! The vCPU of a micro machine: starts at EL1 or EL0, with the MMU off.

use kvm_bindings::{KVM_ARM_VCPU_PSCI_0_2, kvm_vcpu_init};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::{code, reg};
use crate::micro::{Machine, MachineError, Ring};

/// Default size of a VM's guest-physical addresses in bits.
const ADDRESS_BITS: u32 = 40;

/// Creates a VM without vCPUs and without an interrupt controller.
///
/// # Errors
/// The error of `KVM_CREATE_VM`.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    // This is zero if KVM supports only the default size.
    let most = u32::try_from(kvm.get_host_ipa_limit()).unwrap_or(0);
    match most {
        1..ADDRESS_BITS => kvm.create_vm_with_ipa_size(most),
        _ => kvm.create_vm_with_type(0),
    }
}

/// Returns the vCPU type that KVM prefers on this host, with PSCI 0.2 enabled.
///
/// # Errors
/// The error of `KVM_ARM_PREFERRED_TARGET`.
pub fn preferred(vm: &VmFd) -> Result<kvm_vcpu_init, kvm_ioctls::Error> {
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)?;
    target.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    Ok(target)
}

/// Creates the VM's vCPU.
pub(crate) fn create_vcpu(_kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd, MachineError> {
    let vcpu = vm.create_vcpu(0).map_err(MachineError::kvm("KVM_CREATE_VCPU"))?;
    let target = preferred(vm).map_err(MachineError::kvm("KVM_ARM_PREFERRED_TARGET"))?;
    vcpu.vcpu_init(&target).map_err(MachineError::kvm("KVM_ARM_VCPU_INIT"))?;
    Ok(vcpu)
}

impl Machine {
    /// Sets the registers to run the program in `ring`.
    pub(crate) fn enter(&mut self, ring: Ring) -> Result<(), MachineError> {
        let pstate = match ring {
            Ring::Kernel => reg::PSTATE_EL1,
            Ring::User => reg::PSTATE_EL0,
        };
        for (number, value) in
            [(reg::PC, code::PROGRAM), (reg::PSTATE, pstate), (reg::VBAR_EL1, code::VECTORS), (reg::x(0), code::WINDOW)]
        {
            self.set(number, value)?;
        }
        Ok(())
    }

    /// Sets a register. `number` is KVM's number for the register, as in [`reg`](super::reg).
    ///
    /// # Errors
    /// KVM refuses the register or the value.
    pub fn set(&self, number: u64, value: u64) -> Result<(), MachineError> {
        reg::set(&self.vcpu, number, value).map_err(MachineError::kvm("KVM_SET_ONE_REG"))
    }

    /// Reads a register.
    ///
    /// # Errors
    /// KVM refuses the register.
    pub fn get(&self, number: u64) -> Result<u64, MachineError> {
        reg::get(&self.vcpu, number).map_err(MachineError::kvm("KVM_GET_ONE_REG"))
    }
}
