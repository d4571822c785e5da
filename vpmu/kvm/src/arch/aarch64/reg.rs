//! Registers of a vCPU by KVM's numbers.
#![expect(unsafe_code, reason = "ioctls by file descriptor, because kvm-ioctls borrows the vCPU during an exit")]
#![expect(missing_docs, reason = "the architecture's names")]

use std::mem::offset_of;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_REG_ARM_CORE, KVM_REG_ARM64, KVM_REG_ARM64_SYSREG, KVM_REG_SIZE_MASK, KVM_REG_SIZE_U64, kvm_one_reg, kvm_regs,
    user_pt_regs,
};
use vmm_sys_util::ioctl::ioctl_with_ref;

mod request {
    vmm_sys_util::ioctl_iow_nr!(KVM_GET_ONE_REG, kvm_bindings::KVMIO, 0xab, kvm_bindings::kvm_one_reg);
    vmm_sys_util::ioctl_iow_nr!(KVM_SET_ONE_REG, kvm_bindings::KVMIO, 0xac, kvm_bindings::kvm_one_reg);
}

/// Returns KVM's number for the core register at byte `offset` of `struct kvm_regs`.
const fn core(offset: usize) -> u64 {
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | (offset / 4) as u64
}

const fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    let number = op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM64_SYSREG as u64 | number
}

/// Xn, n up to 30.
pub const fn x(n: usize) -> u64 {
    core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, regs) + 8 * n)
}
pub const SP_EL0: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, sp));
pub const SP_EL1: u64 = core(offset_of!(kvm_regs, sp_el1));
pub const PC: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pc));
pub const PSTATE: u64 = core(offset_of!(kvm_regs, regs) + offset_of!(user_pt_regs, pstate));

pub const MPIDR_EL1: u64 = system(3, 0, 0, 0, 5);
pub const SCTLR_EL1: u64 = system(3, 0, 1, 0, 0);
pub const TTBR0_EL1: u64 = system(3, 0, 2, 0, 0);
pub const TTBR1_EL1: u64 = system(3, 0, 2, 0, 1);
pub const TCR_EL1: u64 = system(3, 0, 2, 0, 2);
pub const VBAR_EL1: u64 = system(3, 0, 12, 0, 0);
/// The virtual counter. KVM's interface mistakenly swaps the register numbers of this counter and the timer's compare
/// value.
pub const TIMER_COUNT: u64 = system(3, 3, 14, 3, 2);
/// The physical counter.
pub const PHYSICAL_COUNT: u64 = system(3, 3, 14, 0, 1);

/// PSTATE at EL1 with EL1's own stack pointer (EL1h) and all interrupts masked.
pub const PSTATE_EL1: u64 = 0x3c5;
/// PSTATE at EL0 with all interrupts masked.
pub const PSTATE_EL0: u64 = 0x3c0;

/// Reads the 64-bit register `number` through a vCPU's file descriptor.
///
/// # Errors
/// The error of `KVM_GET_ONE_REG`; `EINVAL` for a register of another size.
pub fn get(vcpu: &impl AsRawFd, number: u64) -> Result<u64, kvm_ioctls::Error> {
    if number & KVM_REG_SIZE_MASK != KVM_REG_SIZE_U64 {
        return Err(kvm_ioctls::Error::new(libc::EINVAL));
    }
    let mut value = 0u64;
    let register = kvm_one_reg { id: number, addr: &raw mut value as u64 };
    // SAFETY: the kernel reads `register`, and writes 64 bits to the address in `register.addr`, which points to
    // `value`.
    if unsafe { ioctl_with_ref(vcpu, request::KVM_GET_ONE_REG(), &register) } < 0 {
        return Err(kvm_ioctls::Error::last());
    }
    Ok(value)
}

/// Sets the 64-bit register `number` through a vCPU's file descriptor.
///
/// # Errors
/// The error of `KVM_SET_ONE_REG`; `EINVAL` for a register of another size.
pub fn set(vcpu: &impl AsRawFd, number: u64, value: u64) -> Result<(), kvm_ioctls::Error> {
    if number & KVM_REG_SIZE_MASK != KVM_REG_SIZE_U64 {
        return Err(kvm_ioctls::Error::new(libc::EINVAL));
    }
    let register = kvm_one_reg { id: number, addr: &raw const value as u64 };
    // SAFETY: the kernel reads `register`, and 64 bits at the address in `register.addr`, which points to `value`.
    if unsafe { ioctl_with_ref(vcpu, request::KVM_SET_ONE_REG(), &register) } < 0 {
        return Err(kvm_ioctls::Error::last());
    }
    Ok(())
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
        assert_eq!(PHYSICAL_COUNT, 0x6030_0000_0013_df01);
    }
}
