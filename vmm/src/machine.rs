//! Which devices a guest finds, for what tells it: firmware tables or a device tree.

use crate::config::Config;

/// Which devices a guest finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// How many vCPUs it has.
    pub vcpus: u8,
    /// Whether the virtio device is there.
    pub virtio: bool,
    /// Bytes of its window; zero: it has none.
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
