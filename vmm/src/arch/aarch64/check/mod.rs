//! The small guests of `vmm check`: a few instructions at EL1 and EL0, without address translation.

mod code;
mod facts;
mod guest;

use kvm_bindings::{
    KVM_CAP_ARM_PMU_V3, KVM_CAP_ARM_PSCI_0_2, KVM_CAP_BINARY_STATS_FD, KVM_CAP_COUNTER_OFFSET, KVM_CAP_DEVICE_CTRL,
    KVM_CAP_IMMEDIATE_EXIT, KVM_CAP_IOEVENTFD, KVM_CAP_IRQCHIP, KVM_CAP_IRQFD, KVM_CAP_ONE_REG, KVM_CAP_USER_MEMORY,
};

pub use facts::Guest;
#[cfg(test)]
pub(crate) use facts::tests::has_hardware_virtualisation;
pub(crate) use guest::{is_emulated, probe};

/// The capabilities to look up. Each has a name, a number, and whether guests need the capability.
pub(crate) const CAPABILITIES: &[(&str, u32, bool)] = &[
    ("arm_pmu_v3", KVM_CAP_ARM_PMU_V3, false),
    ("arm_psci_0_2", KVM_CAP_ARM_PSCI_0_2, true),
    ("binary_stats", KVM_CAP_BINARY_STATS_FD, false),
    ("counter_offset", KVM_CAP_COUNTER_OFFSET, false),
    ("device_ctrl", KVM_CAP_DEVICE_CTRL, true),
    ("immediate_exit", KVM_CAP_IMMEDIATE_EXIT, true),
    ("ioeventfd", KVM_CAP_IOEVENTFD, true),
    ("irqchip", KVM_CAP_IRQCHIP, true),
    ("irqfd", KVM_CAP_IRQFD, true),
    ("one_reg", KVM_CAP_ONE_REG, true),
    ("user_memory", KVM_CAP_USER_MEMORY, true),
];
