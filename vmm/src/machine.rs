//! The guest's devices, as the firmware tables or the device tree describe them.

/// The guest's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Whether the paravirtual PMU, a virtio device, is present.
    pub virtio: bool,
    /// Size of the PMU's window in bytes. Zero if there is no window.
    pub window: u64,
    /// Whether the vCPUs have a hardware PMU.
    pub pmu: bool,
}
