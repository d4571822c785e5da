//! The guest's devices as firmware tables or a device tree describe them.

use crate::config::Config;

/// The guest's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Whether the virtio device is present.
    pub virtio: bool,
    /// Bytes of its window; zero without one.
    pub window: u64,
    /// Whether its processors have a PMU of their own.
    pub pmu: bool,
}

impl From<&Config> for Machine {
    fn from(config: &Config) -> Self {
        Self {
            vcpus: config.vcpus,
            virtio: config.vpmu,
            window: if config.vpmu { config.window } else { 0 },
            pmu: config.guest_pmu,
        }
    }
}
