//! System calls and KVM ioctls that only this architecture has, for seccomp filters.

use libc::{c_long, c_void};
use vmm_sys_util::ioctl::ioctl_expr;

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// Encodes the number of a KVM ioctl, as the kernel's macro `_IOC` does. `direction` specifies whether user space reads
/// or writes the argument.
const fn kvm(direction: u32, number: u32, size: usize) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an encoded request has 32 bits, of which 14 are the size of its argument"
    )]
    {
        ioctl_expr(direction, kvm_bindings::KVMIO, number, size as u32) as u32
    }
}

/// Ioctls that a vCPU's thread uses to read the vCPU's registers.
pub const VCPU: [(u32, &str); 2] = [
    (kvm(READ, 0x81, size_of::<kvm_bindings::kvm_regs>()), "KVM_GET_REGS: a vCPU's registers at an exit"),
    (kvm(READ, 0x83, size_of::<kvm_bindings::kvm_sregs>()), "KVM_GET_SREGS: a vCPU's mode at an exit"),
];

/// Ioctls that set up a new VM when the guest boots again after a reset.
pub const BOOT: [(u32, &str); 14] = [
    (kvm(NONE, 0x60, 0), "KVM_CREATE_IRQCHIP: the VM's interrupt controllers"),
    (kvm(WRITE, 0xa3, size_of::<kvm_bindings::kvm_enable_cap>()), "KVM_ENABLE_CAP: disables the VM's hardware PMU"),
    (kvm(WRITE, 0x48, size_of::<u64>()), "KVM_SET_IDENTITY_MAP_ADDR: the VM's identity map"),
    (kvm(NONE, 0x47, 0), "KVM_SET_TSS_ADDR: the VM's TSS"),
    (kvm(READ | WRITE, 0x05, size_of::<u64>()), "KVM_GET_SUPPORTED_CPUID: the CPUID leaves that KVM supports"),
    (kvm(WRITE, 0x90, size_of::<u64>()), "KVM_SET_CPUID2: a vCPU's CPUID"),
    (kvm(NONE, 0xa3, 0), "KVM_GET_TSC_KHZ: the guest's TSC"),
    (kvm(WRITE, 0x8d, size_of::<kvm_bindings::kvm_fpu>()), "KVM_SET_FPU: a vCPU's state"),
    (kvm(WRITE, 0x89, size_of::<u64>()), "KVM_SET_MSRS: a vCPU's state"),
    (kvm(READ, 0x83, size_of::<kvm_bindings::kvm_sregs>()), "KVM_GET_SREGS: a vCPU's state"),
    (kvm(WRITE, 0x84, size_of::<kvm_bindings::kvm_sregs>()), "KVM_SET_SREGS: a vCPU's state"),
    (kvm(WRITE, 0x82, size_of::<kvm_bindings::kvm_regs>()), "KVM_SET_REGS: the boot vCPU's initial registers"),
    (
        kvm(WRITE, 0xe2, size_of::<kvm_bindings::kvm_device_attr>()),
        "KVM_GET_DEVICE_ATTR: the offset of the guest's TSC",
    ),
    (kvm(WRITE, 0xe1, size_of::<kvm_bindings::kvm_device_attr>()), "KVM_SET_DEVICE_ATTR: continues the guest's TSC"),
];

/// Ioctls that a vCPU's thread uses to save the vCPU's state, in addition to the ioctls in [`VCPU`].
pub const SAVE_VCPU: [(u32, &str); 11] = [
    (kvm(READ, 0x98, size_of::<kvm_bindings::kvm_mp_state>()), "KVM_GET_MP_STATE: a snapshot"),
    (kvm(READ, 0xa4, size_of::<kvm_bindings::kvm_xsave>()), "KVM_GET_XSAVE: a snapshot"),
    (kvm(READ, 0xa6, size_of::<kvm_bindings::kvm_xcrs>()), "KVM_GET_XCRS: a snapshot"),
    (kvm(READ, 0xa1, size_of::<kvm_bindings::kvm_debugregs>()), "KVM_GET_DEBUGREGS: a snapshot"),
    (kvm(READ, 0x8e, size_of::<kvm_bindings::kvm_lapic_state>()), "KVM_GET_LAPIC: a snapshot"),
    (kvm(READ | WRITE, 0x91, size_of::<u64>()), "KVM_GET_CPUID2: a snapshot"),
    (kvm(READ | WRITE, 0x88, size_of::<u64>()), "KVM_GET_MSRS: a snapshot"),
    (kvm(NONE, 0xa3, 0), "KVM_GET_TSC_KHZ: a snapshot"),
    (
        kvm(WRITE, 0xe2, size_of::<kvm_bindings::kvm_device_attr>()),
        "KVM_GET_DEVICE_ATTR: the offset of the guest's TSC, for a snapshot",
    ),
    (kvm(READ, 0x9f, size_of::<kvm_bindings::kvm_vcpu_events>()), "KVM_GET_VCPU_EVENTS: a snapshot"),
    (kvm(NONE, 0xad, 0), "KVM_KVMCLOCK_CTRL: notifies the guest of a pause"),
];

/// Ioctls with which the thread of a restored vCPU starts the counters of KVM's own PMU.
pub const START_COUNTERS: [(u32, &str); 1] =
    [(kvm(WRITE, 0x89, size_of::<u64>()), "KVM_SET_MSRS: the counters of a restored PMU")];

/// Ioctls that the main thread uses to save the VM's state, except for the state of the vCPUs.
pub const SAVE_VM: [(u32, &str); 3] = [
    (
        kvm(WRITE, 0x42, size_of::<kvm_bindings::kvm_dirty_log>()),
        "KVM_GET_DIRTY_LOG: the pages that were written, for a snapshot",
    ),
    (kvm(READ, 0x7c, size_of::<kvm_bindings::kvm_clock_data>()), "KVM_GET_CLOCK: a snapshot"),
    (kvm(READ | WRITE, 0x62, size_of::<kvm_bindings::kvm_irqchip>()), "KVM_GET_IRQCHIP: a snapshot"),
];

/// The system call that a thread uses to wait for descriptors. It depends on the architecture.
pub const POLL: (c_long, &str) = (libc::SYS_poll, "poll");
/// See [`POLL`].
pub const EPOLL_WAIT: (c_long, &str) = (libc::SYS_epoll_wait, "epoll_wait");

/// The second argument of the system call that a filter refused. `context` is the signal context of the SIGSYS.
///
/// # Safety
/// `context` must be the pointer that the kernel passed to a signal handler that has not returned yet.
#[expect(unsafe_code, reason = "a signal's context is a pointer")]
pub unsafe fn second_argument(context: *const c_void) -> u64 {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: upheld by the caller.
    let registers = unsafe { &(*context).uc_mcontext.gregs };
    let register = usize::try_from(libc::REG_RSI).ok();
    let value = register.and_then(|register| registers.get(register));
    value.map_or(0, |value| value.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_numbered_as_in_the_kernels_header() {
        let numbers = VCPU.map(|(number, _)| number);
        assert_eq!(numbers, [0x8090_ae81, 0x8138_ae83]);
        let boot = BOOT.map(|(number, _)| number);
        assert_eq!(boot[..2], [0xae60, 0x4068_aea3]);
        assert_eq!(boot[2..7], [0x4008_ae48, 0xae47, 0xc008_ae05, 0x4008_ae90, 0xaea3]);
        assert_eq!(boot[7..10], [0x41a0_ae8d, 0x4008_ae89, 0x8138_ae83]);
        assert_eq!(boot[10..], [0x4138_ae84, 0x4090_ae82, 0x4018_aee2, 0x4018_aee1]);
        let save = SAVE_VCPU.map(|(number, _)| number);
        assert_eq!(save[..5], [0x8004_ae98, 0x9000_aea4, 0x8188_aea6, 0x8080_aea1, 0x8400_ae8e]);
        assert_eq!(save[5..], [0xc008_ae91, 0xc008_ae88, 0xaea3, 0x4018_aee2, 0x8040_ae9f, 0xaead]);
        let save = SAVE_VM.map(|(number, _)| number);
        assert_eq!(save, [0x4010_ae42, 0x8030_ae7c, 0xc208_ae62]);
    }
}
