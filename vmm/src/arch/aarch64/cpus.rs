//! Creates and initializes the vCPUs of a VM, and their interrupt controller.

use kvm_bindings::{
    KVM_ARM_VCPU_PMU_V3, KVM_ARM_VCPU_PMU_V3_CTRL, KVM_ARM_VCPU_PMU_V3_INIT, KVM_ARM_VCPU_PMU_V3_IRQ,
    KVM_ARM_VCPU_POWER_OFF, kvm_device_attr, kvm_vcpu_init,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vpmu_kvm::arch::{preferred, reg};

use super::gic::{self, Gic};
use super::layout;
use crate::kvm::KvmError;
use crate::machine::Machine;

/// Errors from creating the vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// KVM returns an error.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// A vCPU's affinity differs between KVM and the device tree.
    #[error("KVM gives vCPU {index} the affinity {is:#x} instead of {expected:#x}")]
    Affinity {
        /// The vCPU's index.
        index: u8,
        /// KVM's affinity.
        is: u64,
        /// The device tree's affinity.
        expected: u64,
    },
    /// `--guest-pmu` was given, but KVM has no PMU for guests.
    #[error("--guest-pmu: this KVM has no PMU for guests: omit it")]
    NoPmu,
}

/// The affinity fields of MPIDR_EL1.
const AFFINITY: u64 = 0xff_00ff_ffff;

/// The vCPUs of a VM, and their interrupt controller.
#[derive(Debug)]
pub struct Cpus {
    /// The vCPUs, by number.
    pub vcpus: Vec<VcpuFd>,
    /// Their interrupt controller.
    pub controller: Controller,
}

/// The interrupt controller of a VM, and the processor type of the VM's vCPUs.
#[derive(Debug)]
pub struct Controller {
    pub(super) gic: Gic,
    /// The argument of KVM_ARM_VCPU_INIT for each vCPU, without the power-off flag.
    pub(super) processor: kvm_vcpu_init,
}

/// Creates the vCPUs of `machine` in `vm`, and their interrupt controller. The memory of `vm` must be set up.
///
/// # Errors
/// [`CpuError`].
pub fn create(kvm: &Kvm, vm: &VmFd, machine: &Machine) -> Result<Cpus, CpuError> {
    if machine.pmu && !kvm.check_extension(Cap::ArmPmuV3) {
        return Err(CpuError::NoPmu);
    }
    let mut processor = preferred(vm).map_err(KvmError::refused("report which processor it offers"))?;
    if machine.pmu {
        processor.features[0] |= 1 << KVM_ARM_VCPU_PMU_V3;
    }
    let vcpus = (0..machine.vcpus).map(|index| create_one(vm, index, &processor));
    let vcpus: Vec<VcpuFd> = vcpus.collect::<Result<_, _>>()?;
    let gic = gic::create(vm, machine.vcpus)?;
    if machine.pmu {
        vcpus.iter().try_for_each(connect_pmu)?;
    }
    Ok(Cpus { vcpus, controller: Controller { gic, processor } })
}

fn create_one(vm: &VmFd, index: u8, processor: &kvm_vcpu_init) -> Result<VcpuFd, CpuError> {
    let fd = vm.create_vcpu(u64::from(index)).map_err(KvmError::refused("create a vCPU"))?;
    let mut processor = *processor;
    if index > 0 {
        // The vCPU stays powered off until the guest's kernel starts it.
        processor.features[0] |= 1 << KVM_ARM_VCPU_POWER_OFF;
    }
    fd.vcpu_init(&processor).map_err(KvmError::refused("set up a vCPU"))?;
    let expected = mpidr(index);
    let is = reg::get(&fd, reg::MPIDR_EL1).map_err(KvmError::refused("report a vCPU's affinity"))?;
    let is = is & AFFINITY;
    if is == expected { Ok(fd) } else { Err(CpuError::Affinity { index, is, expected }) }
}

/// Sets the interrupt of a vCPU's PMU, and initializes the PMU. The VM must have its interrupt controller.
fn connect_pmu(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let interrupt = layout::FIRST_PPI + layout::PMU_PPI;
    let steps = [(KVM_ARM_VCPU_PMU_V3_IRQ, &raw const interrupt as u64), (KVM_ARM_VCPU_PMU_V3_INIT, 0)];
    for (attr, addr) in steps {
        let attribute = kvm_device_attr { group: KVM_ARM_VCPU_PMU_V3_CTRL, attr: attr.into(), addr, flags: 0 };
        vcpu.set_device_attr(&attribute).map_err(KvmError::refused("set up a vCPU's PMU"))?;
    }
    Ok(())
}

/// Makes `first` the boot vCPU, which starts at `entry` with the address of the device tree in X0.
///
/// # Errors
/// [`CpuError::Kvm`].
pub fn enter(first: &VcpuFd, entry: u64) -> Result<(), CpuError> {
    for (number, value) in [(reg::PSTATE, reg::PSTATE_EL1), (reg::PC, entry), (reg::x(0), layout::FDT)] {
        reg::set(first, number, value).map_err(KvmError::refused("set the first vCPU's state"))?;
    }
    Ok(())
}

/// The affinity that KVM assigns to vCPU `index`. Aff0 is the vCPU's place in a group of 16 vCPUs, because a GICv3
/// target list has 16 entries. Aff1 is the group's number.
pub(super) fn mpidr(index: u8) -> u64 {
    let index = u64::from(index);
    index & 0xf | (index >> 4) << 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affinities_are_of_groups_of_sixteen() {
        assert_eq!([0, 15, 16, 253].map(mpidr), [0, 0xf, 0x100, 0xf0d]);
    }
}
