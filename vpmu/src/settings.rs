//! What an operator decides about one VM's device.

use std::collections::BTreeSet;

use crate::policy::Policy;

/// The fixed facts of one device: [`Settings::new`], and what differs from the default.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Number of vCPUs, and so of vCPU queues.
    pub vcpus: u32,
    /// Guest TSC frequency in kHz.
    pub tsc_khz: u32,
    /// What one guest may use up.
    pub limits: Limits,
    /// What makes the samples of host counters.
    pub engines: Engines,
    /// What hardware counts for the guest and its operator.
    pub hardware: Hardware,
    /// The events that the guest may open.
    pub policy: Policy,
}

impl Settings {
    /// A device of `vcpus` vCPUs in a guest whose TSC makes `tsc_khz` ticks a millisecond, by default in all
    /// else.
    #[must_use]
    pub fn new(vcpus: u32, tsc_khz: u32) -> Self {
        Self {
            vcpus,
            tsc_khz,
            limits: Limits::default(),
            engines: Engines::default(),
            hardware: Hardware::default(),
            policy: Policy::default(),
        }
    }

    /// With these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// With these engines.
    #[must_use]
    pub fn with_engines(self, engines: Engines) -> Self {
        Self { engines, ..self }
    }

    /// With what hardware counts.
    #[must_use]
    pub fn with_hardware(self, hardware: Hardware) -> Self {
        Self { hardware, ..self }
    }

    /// With the events that the guest may open.
    #[must_use]
    pub fn with_policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }
}

/// What the host's hardware counts for a guest, and for its operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// Whether it counts anything. While such an event is open, Linux starts no VM with a mediated PMU on
    /// the host.
    pub events: bool,
    /// Why it counts nothing, if it does: its owner leaves it to VMs with a mediated PMU.
    pub left_to_mediated: bool,
    /// Whose work its events count.
    pub count_mode: CountMode,
    /// The raw events ([`KIND_RAW`](crate::abi::KIND_RAW)) that there may be.
    pub raw: RawEvents,
    /// Whether its events are pinned on the host, the operator's and the guest's alike: they never share a
    /// counter with others, and one that finds none is in error. Each is then read by a call of its own.
    pub pinned: bool,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            events: true,
            left_to_mediated: false,
            count_mode: CountMode::default(),
            raw: RawEvents::default(),
            pinned: false,
        }
    }
}

/// The raw events that a guest may have: numbers of the host's PMU, by which it can count what its kernel has
/// no name for. Some of them see more than this guest, such as what a shared cache does for others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RawEvents {
    /// These, each found to open before it is listed.
    Listed(BTreeSet<u64>),
    /// Whatever the PMU takes as an event and a unit mask.
    All,
}

impl RawEvents {
    /// Whether the operator allows `config`.
    #[must_use]
    pub fn allow(&self, config: u64) -> bool {
        match self {
            Self::Listed(configs) => configs.contains(&config),
            Self::All => true,
        }
    }
}

impl Default for RawEvents {
    fn default() -> Self {
        Self::Listed(BTreeSet::new())
    }
}

/// Whose work the events that hardware counts hold. Those that sample hold the guest's alone, always: the
/// host's work for one sample would bring about the next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CountMode {
    /// The guest's alone.
    #[default]
    Guest,
    /// The host's for the vCPU, too: all that the vCPU's thread does.
    Vcpu,
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
    /// kind; those that sample have counters of their own.
    pub max_events: u32,
    /// Most host counters that events which sample hold open, on all vCPUs together: each takes a
    /// descriptor and two pages, some of them more, but never more than 8 MiB together. An event keeps
    /// one for each vCPU that it ran on while there are some to spare.
    pub max_host_counters: u32,
    /// Most of these that run on one vCPU at once; the events of others wait. Not zero.
    pub max_active_counters: u32,
    /// Most data pages of one ring, a power of two.
    pub max_ring_pages: u32,
    /// Most pages of one AUX area, a power of two.
    pub max_aux_pages: u32,
    /// Most guest pages that all rings and AUX areas together name; each costs the host eight bytes.
    pub max_pages: u32,
    /// Most persistent events of the guest's own.
    pub max_persistent: u32,
    /// Most pages of the window that rings of the guest's own lie in; the rest is the operator's.
    pub max_window_pages: u32,
    /// Most samples that one event makes in a second, and most interrupts in a second of all host clocks
    /// that run on one vCPU; not zero.
    pub max_sample_rate: u32,
    /// Most samples that all events of the guest together make in a second; not zero.
    pub max_samples: u32,
    /// Most bytes of sample records of all events of the guest together in a second, but for the records
    /// that go beyond; not zero.
    pub max_record_bytes: u64,
    /// Most of each vCPU's time, in percent, that samples of host counters may take by
    /// [`Engine::Exit`](crate::source::Engine::Exit), from the overflow until the vCPU enters again. 100:
    /// as much as they take; not zero.
    pub max_sampling_percent: u32,
    /// The shortest period of events that hardware counts; not zero.
    pub min_hardware_period: u64,
}

/// A limit that no device can have.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LimitsError {
    /// Pages of a ring or an area are a power of two.
    #[error("{limit} must be a power of two, not {given}")]
    PowerOfTwo {
        /// Which one, as the field is called.
        limit: &'static str,
        /// What was given.
        given: u32,
    },
    /// With zero the guest could not sample at all.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// There is no more than all.
    #[error("{limit} must be at most 100, not {given}")]
    Percent {
        /// As above.
        limit: &'static str,
        /// As above.
        given: u32,
    },
}

impl Limits {
    /// Checks what a device needs of them.
    ///
    /// # Errors
    /// [`LimitsError`], of the first that does not serve.
    pub fn check(&self) -> Result<(), LimitsError> {
        for (limit, given) in [
            ("max_ring_pages", self.max_ring_pages),
            ("max_aux_pages", self.max_aux_pages),
        ] {
            if !given.is_power_of_two() {
                return Err(LimitsError::PowerOfTwo { limit, given });
            }
        }
        for (limit, given) in [
            ("max_active_counters", self.max_active_counters.into()),
            ("max_sample_rate", self.max_sample_rate.into()),
            ("max_samples", self.max_samples.into()),
            ("max_record_bytes", self.max_record_bytes),
            ("max_sampling_percent", self.max_sampling_percent.into()),
            ("min_hardware_period", self.min_hardware_period),
        ] {
            if given == 0 {
                return Err(LimitsError::Zero(limit));
            }
        }
        if self.max_sampling_percent > 100 {
            return Err(LimitsError::Percent {
                limit: "max_sampling_percent",
                given: self.max_sampling_percent,
            });
        }
        Ok(())
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_events: 1024,
            max_host_counters: 1024,
            max_active_counters: 64,
            max_ring_pages: 4096,
            max_aux_pages: 16_384,
            max_pages: 1 << 17,
            max_persistent: 64,
            max_window_pages: 3072,
            max_sample_rate: 100_000,
            max_samples: 400_000,
            max_record_bytes: 256 << 20,
            // As much as Linux lets samples take by default: kernel.perf_cpu_time_max_percent.
            max_sampling_percent: 25,
            min_hardware_period: 1000,
        }
    }
}
