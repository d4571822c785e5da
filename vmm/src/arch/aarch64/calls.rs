//! System calls and KVM ioctls that only this architecture has, for seccomp filters.

use libc::{c_long, c_void};
use vmm_sys_util::ioctl::ioctl_expr;

const WRITE: u32 = 1;
const READ: u32 = 2;

/// Encodes the number of a KVM ioctl, as the kernel's macro `_IOC` does. `direction` specifies whether user space reads
/// or writes the argument.
const fn kvm(direction: u32, number: u32, size: usize) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an ioctl request number has 32 bits, of which 14 hold the size of the argument"
    )]
    {
        ioctl_expr(direction, kvm_bindings::KVMIO, number, size as u32) as u32
    }
}

const GET_ONE_REG: u32 = kvm(WRITE, 0xab, size_of::<kvm_bindings::kvm_one_reg>());

/// Ioctls that a vCPU's thread uses to read the vCPU's registers and to inject an abort.
pub const VCPU: [(u32, &str); 2] = [
    (GET_ONE_REG, "KVM_GET_ONE_REG: a vCPU's registers at an exit"),
    (
        kvm(WRITE, 0xa0, size_of::<kvm_bindings::kvm_vcpu_events>()),
        "KVM_SET_VCPU_EVENTS: injects an abort for an access that KVM does not decode",
    ),
];

/// Ioctls that set up a new VM when the guest boots again after a reset.
pub const BOOT: [(u32, &str); 8] = [
    (
        kvm(WRITE, 0xa3, size_of::<kvm_bindings::kvm_enable_cap>()),
        "KVM_ENABLE_CAP: makes KVM pass undecoded accesses to the VMM",
    ),
    (
        kvm(READ, 0xaf, size_of::<kvm_bindings::kvm_vcpu_init>()),
        "KVM_ARM_PREFERRED_TARGET: the kind of vCPU that KVM offers",
    ),
    (kvm(WRITE, 0xae, size_of::<kvm_bindings::kvm_vcpu_init>()), "KVM_ARM_VCPU_INIT: a vCPU's state"),
    (
        kvm(READ | WRITE, 0xe0, size_of::<kvm_bindings::kvm_create_device>()),
        "KVM_CREATE_DEVICE: the VM's interrupt controller",
    ),
    (
        kvm(WRITE, 0xe1, size_of::<kvm_bindings::kvm_device_attr>()),
        "KVM_SET_DEVICE_ATTR: the controller's address; the interrupt of a vCPU's PMU",
    ),
    (GET_ONE_REG, "KVM_GET_ONE_REG: a vCPU's affinity; the guest's counter"),
    (
        kvm(WRITE, 0xac, size_of::<kvm_bindings::kvm_one_reg>()),
        "KVM_SET_ONE_REG: the boot vCPU's initial registers; the guest's counter",
    ),
    (
        kvm(WRITE, 0xb5, size_of::<kvm_bindings::kvm_arm_counter_offset>()),
        "KVM_ARM_SET_COUNTER_OFFSET: continues the guest's counter",
    ),
];

/// Ioctls that a vCPU's thread uses to save the vCPU's state, in addition to the ioctls in [`VCPU`].
pub const SAVE_VCPU: [(u32, &str); 3] = [
    (kvm(READ | WRITE, 0xb0, size_of::<u64>()), "KVM_GET_REG_LIST: a snapshot"),
    (kvm(READ, 0x98, size_of::<kvm_bindings::kvm_mp_state>()), "KVM_GET_MP_STATE: a snapshot"),
    (kvm(READ, 0x9f, size_of::<kvm_bindings::kvm_vcpu_events>()), "KVM_GET_VCPU_EVENTS: a snapshot"),
];

/// Ioctls with which the thread of a restored vCPU starts the counters of KVM's own PMU: none.
pub const START_COUNTERS: [(u32, &str); 0] = [];

/// Ioctls that the main thread uses to save the VM's state, except for the state of the vCPUs.
pub const SAVE_VM: [(u32, &str); 2] = [
    (
        kvm(WRITE, 0x42, size_of::<kvm_bindings::kvm_dirty_log>()),
        "KVM_GET_DIRTY_LOG: the pages that were written, for a snapshot",
    ),
    (
        kvm(WRITE, 0xe2, size_of::<kvm_bindings::kvm_device_attr>()),
        "KVM_GET_DEVICE_ATTR: the interrupt controller, for a snapshot",
    ),
];

/// The system call that a thread uses to wait for descriptors. It depends on the architecture.
pub const POLL: (c_long, &str) = (libc::SYS_ppoll, "ppoll");
/// See [`POLL`].
pub const EPOLL_WAIT: (c_long, &str) = (libc::SYS_epoll_pwait, "epoll_pwait");

/// The second argument of the system call that a filter refused. `context` is the signal context of the SIGSYS.
///
/// # Safety
/// `context` must be the pointer that the kernel passed to a signal handler that has not returned yet.
#[expect(unsafe_code, reason = "a signal's context is a pointer")]
pub unsafe fn second_argument(context: *const c_void) -> u64 {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: upheld by the caller.
    let registers = unsafe { &(*context).uc_mcontext.regs };
    registers[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_numbered_as_in_the_kernels_header() {
        assert_eq!(VCPU.map(|(number, _)| number), [0x4010_aeab, 0x4040_aea0]);
        let boot = BOOT.map(|(number, _)| number);
        assert_eq!(boot[..4], [0x4068_aea3, 0x8020_aeaf, 0x4020_aeae, 0xc00c_aee0]);
        assert_eq!(boot[4..], [0x4018_aee1, 0x4010_aeab, 0x4010_aeac, 0x4010_aeb5]);
        let save = SAVE_VCPU.map(|(number, _)| number);
        assert_eq!(save, [0xc008_aeb0, 0x8004_ae98, 0x8040_ae9f]);
        let save = SAVE_VM.map(|(number, _)| number);
        assert_eq!(save, [0x4010_ae42, 0x4018_aee2]);
    }
}
