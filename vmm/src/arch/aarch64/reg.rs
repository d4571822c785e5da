//! Registers of a vCPU by KVM's numbers.

use std::mem::offset_of;

use kvm_bindings::{
    KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_U64, kvm_regs, user_pt_regs,
};
use kvm_ioctls::VcpuFd;

/// A core register at this byte of `struct kvm_regs`.
const fn core(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
}

const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    let number = op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64 | number
}

/// Xn, n up to 30.
pub(super) const fn x(n: usize) -> u64 {
    core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs) + 8 * n)
}
pub(super) const SP_EL0: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, sp));
pub(super) const SP_EL1: u64 = core(offset_of!(kvm_regs, sp_el1));
pub(super) const PC: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc));
pub(super) const PSTATE: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pstate));

pub(super) const MPIDR_EL1: u64 = system(3, 0, 0, 0, 5);
pub(super) const SCTLR_EL1: u64 = system(3, 0, 1, 0, 0);
pub(super) const TTBR0_EL1: u64 = system(3, 0, 2, 0, 0);
pub(super) const TTBR1_EL1: u64 = system(3, 0, 2, 0, 1);
pub(super) const TCR_EL1: u64 = system(3, 0, 2, 0, 2);
pub(super) const VBAR_EL1: u64 = system(3, 0, 12, 0, 0);
/// The virtual counter, under the number that KVM's interface has given it by mistake.
pub(super) const TIMER_COUNT: u64 = system(3, 3, 14, 3, 2);

/// PSTATE at EL1 and EL0, every interrupt masked.
pub(super) const PSTATE_EL1: u64 = 0x3c5;
pub(super) const PSTATE_EL0: u64 = 0x3c0;

/// A register's value.
pub(super) fn get(vcpu: &VcpuFd, number: u64) -> Result<u64, kvm_ioctls::Error> {
    let mut bytes = [0; 8];
    vcpu.get_one_reg(number, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Sets a register.
pub(super) fn set(vcpu: &VcpuFd, number: u64, value: u64) -> Result<(), kvm_ioctls::Error> {
    vcpu.set_one_reg(number, &value.to_le_bytes()).map(|_| ())
}

/// The affinity that KVM gives vCPU `index`: 16 in a group, as its interrupt controller can address.
pub(super) fn mpidr(index: u8) -> u64 {
    let index = u64::from(index);
    index & 0xf | (index >> 4) << 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_numbered_as_in_the_kernels_documentation() {
        assert_eq!(x(0), 0x6030_0000_0010_0000);
        assert_eq!(x(30), 0x6030_0000_0010_003c);
        assert_eq!(SP_EL0, 0x6030_0000_0010_003e);
        assert_eq!(PC, 0x6030_0000_0010_0040);
        assert_eq!(PSTATE, 0x6030_0000_0010_0042);
        assert_eq!(SP_EL1, 0x6030_0000_0010_0044);
        assert_eq!(TIMER_COUNT, 0x6030_0000_0013_df1a);
    }

    #[test]
    fn affinities_are_of_groups_of_sixteen() {
        assert_eq!([0, 15, 16, 253].map(mpidr), [0, 0xf, 0x100, 0xf0d]);
    }
}
