//! The guest's devices as firmware tables or a device tree describe them.

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
