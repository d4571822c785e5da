//! The small guests of `vmm check`: a few instructions in long mode, in ring 0 and ring 3.

mod code;
mod facts;
mod guest;
mod verdict;

use kvm_bindings::{
    KVM_CAP_BINARY_STATS_FD, KVM_CAP_EXT_CPUID, KVM_CAP_GET_TSC_KHZ, KVM_CAP_IMMEDIATE_EXIT, KVM_CAP_IOEVENTFD,
    KVM_CAP_IRQCHIP, KVM_CAP_IRQFD, KVM_CAP_PIT2, KVM_CAP_SET_TSS_ADDR, KVM_CAP_SYNC_REGS, KVM_CAP_TSC_DEADLINE_TIMER,
    KVM_CAP_USER_MEMORY, KVM_CAP_VCPU_ATTRIBUTES,
};

pub use facts::{ExitRip, Guest, GuestTsc};
pub(crate) use guest::{is_emulated, probe};
#[cfg(test)]
pub(crate) use verdict::tests::has_hardware_virtualisation;

/// The capabilities to look up. Each has a name, a number, and whether guests need the capability.
pub(crate) const CAPABILITIES: &[(&str, u32, bool)] = &[
    ("binary_stats", KVM_CAP_BINARY_STATS_FD, false),
    ("ext_cpuid", KVM_CAP_EXT_CPUID, true),
    ("get_tsc_khz", KVM_CAP_GET_TSC_KHZ, false),
    ("immediate_exit", KVM_CAP_IMMEDIATE_EXIT, true),
    ("ioeventfd", KVM_CAP_IOEVENTFD, true),
    ("irqchip", KVM_CAP_IRQCHIP, true),
    ("irqfd", KVM_CAP_IRQFD, true),
    ("pit2", KVM_CAP_PIT2, false),
    ("set_tss_addr", KVM_CAP_SET_TSS_ADDR, true),
    ("sync_regs", KVM_CAP_SYNC_REGS, false),
    ("tsc_deadline_timer", KVM_CAP_TSC_DEADLINE_TIMER, false),
    ("user_memory", KVM_CAP_USER_MEMORY, true),
    ("vcpu_attributes", KVM_CAP_VCPU_ATTRIBUTES, false),
];
