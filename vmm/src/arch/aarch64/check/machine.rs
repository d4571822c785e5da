//! Registers of a probe's machine: EL1 or EL0 from its first instruction, addresses not translated.

use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use super::super::{cpus, platform, reg};
use super::code;
use crate::check::{Machine, MachineError, Ring};

/// A VM without a vCPU.
pub(crate) fn create_vm(kvm: &Kvm) -> Result<VmFd, MachineError> {
    Ok(platform::create_vm(kvm)?)
}

/// Its vCPU.
pub(crate) fn create_vcpu(_kvm: &Kvm, vm: &VmFd) -> Result<VcpuFd, MachineError> {
    let vcpu = vm
        .create_vcpu(0)
        .map_err(MachineError::kvm("KVM_CREATE_VCPU"))?;
    vcpu.vcpu_init(&cpus::preferred(vm)?)
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
    pub(super) fn set(&self, number: u64, value: u64) -> Result<(), MachineError> {
        reg::set(&self.vcpu, number, value).map_err(MachineError::kvm("KVM_SET_ONE_REG"))
    }

    /// A register's value.
    pub(super) fn get(&self, number: u64) -> Result<u64, MachineError> {
        reg::get(&self.vcpu, number).map_err(MachineError::kvm("KVM_GET_ONE_REG"))
    }
}
