//! What an operator decides about one VM's device.

/// The fixed facts of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Number of vCPUs, and so of vCPU queues.
    pub vcpus: u32,
    /// Guest TSC frequency in kHz.
    pub tsc_khz: u32,
    /// What one guest may use up.
    pub limits: Limits,
    /// What makes the samples of host counters.
    pub engines: Engines,
}

/// What makes the samples of host counters, where the guest leaves the choice to the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Engines {
    /// The batched engine where [`Machine::reports_guest_ips`](crate::Machine::reports_guest_ips)
    /// and the event allow it, else the exit engine.
    #[default]
    Auto,
    /// The batched engine, asked or not; what it cannot make is refused.
    Batched,
    /// The exit engine; the batched one is refused.
    Exit,
}

/// What one guest may use up of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most events open at once. Events that only count share one host file descriptor per vCPU and
    /// kind; each event that samples holds one, and two pages, per vCPU that it ran on, some of them
    /// more, but never more than 8 MiB together.
    pub max_events: u32,
    /// Most data pages of one ring, a power of two.
    pub max_ring_pages: u32,
    /// Most pages of one AUX area, a power of two.
    pub max_aux_pages: u32,
    /// Most guest pages that all rings and AUX areas together name; each costs the host eight bytes.
    pub max_pages: u32,
    /// Most persistent events of the guest's own.
    pub max_persistent: u32,
    /// Most samples that one event makes in a second; not zero.
    pub max_sample_rate: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_events: 1024,
            max_ring_pages: 4096,
            max_aux_pages: 16_384,
            max_pages: 1 << 17,
            max_persistent: 64,
            max_sample_rate: 100_000,
        }
    }
}
