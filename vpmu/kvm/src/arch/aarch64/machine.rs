//! Registers of a probe's machine: EL1 or EL0 from its first instruction, addresses not translated.

use kvm_bindings::{KVM_ARM_VCPU_PSCI_0_2, kvm_vcpu_init};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::{code, reg};
use crate::micro::{Machine, MachineError, Ring};

/// Bits of a guest-physical address that KVM gives a VM by default.
const ADDRESS_BITS: u32 = 40;

/// A VM without a vCPU; it has interrupt controllers once it has vCPUs.
///
/// # Errors
/// KVM's.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    // Zero where KVM offers no choice.
    let most = u32::try_from(kvm.get_host_ipa_limit()).unwrap_or(0);
    match most {
        1..ADDRESS_BITS => kvm.create_vm_with_ipa_size(most),
        _ => kvm.create_vm_with_type(0),
    }
}

/// The processor that KVM emulates best on this host, with PSCI.
///
/// # Errors
/// KVM's.
pub fn preferred(vm: &VmFd) -> Result<kvm_vcpu_init, kvm_ioctls::Error> {
    let mut target = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut target)?;
    target.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    Ok(target)
}

/// Its vCPU.
pub(crate) fn create_vcpu(_kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd, MachineError> {
    let vcpu = vm
        .create_vcpu(0)
        .map_err(MachineError::kvm("KVM_CREATE_VCPU"))?;
    let target = preferred(vm).map_err(MachineError::kvm("KVM_ARM_PREFERRED_TARGET"))?;
    vcpu.vcpu_init(&target)
        .map_err(MachineError::kvm("KVM_ARM_VCPU_INIT"))?;
    Ok(vcpu)
}

impl Machine {
    /// Sets the registers to run the program in `ring`.
    pub(crate) fn enter(&mut self, ring: Ring) -> Result<(), MachineError> {
        let pstate = match ring {
            Ring::Kernel => reg::PSTATE_EL1,
            Ring::User => reg::PSTATE_EL0,
        };
        for (number, value) in [
            (reg::PC, code::PROGRAM),
            (reg::PSTATE, pstate),
            (reg::VBAR_EL1, code::VECTORS),
            (reg::x(0), code::WINDOW),
        ] {
            self.set(number, value)?;
        }
        Ok(())
    }

    /// Sets a register.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn set(&self, number: u64, value: u64) -> Result<(), MachineError> {
        reg::set(&self.vcpu, number, value).map_err(MachineError::kvm("KVM_SET_ONE_REG"))
    }

    /// A register's value.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn get(&self, number: u64) -> Result<u64, MachineError> {
        reg::get(&self.vcpu, number).map_err(MachineError::kvm("KVM_GET_ONE_REG"))
    }
}
