//! The operator's settings of one VM's device.

use std::collections::BTreeSet;

use crate::policy::Policy;

/// The settings of one device. They never change during the device's lifetime. [`Settings::new`] returns the defaults,
/// and the `with_*` methods replace them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Number of vCPUs. This is also the number of vCPU queues.
    pub vcpus: u32,
    /// Guest TSC frequency in kHz.
    pub tsc_khz: u32,
    /// Limits of one guest's resource use.
    pub limits: Limits,
    /// The engines for samples of host counters.
    pub engines: Engines,
    /// How the guest and its operator may use hardware counters.
    pub hardware: Hardware,
    /// The events that the guest may open.
    pub policy: Policy,
    /// Whether the transport has shared memory region 0, the doorbell. Without the doorbell, there are no marks.
    pub doorbell: bool,
    /// Whether the vCPUs' threads belong to another process than the device. The device then sees neither the vCPUs'
    /// exits nor their registers.
    pub remote: bool,
}

impl Settings {
    /// Returns settings for a guest with `vcpus` vCPUs and a TSC of `tsc_khz` kHz. All other settings have their
    /// defaults.
    #[must_use]
    pub fn new(vcpus: u32, tsc_khz: u32) -> Self {
        Self {
            vcpus,
            tsc_khz,
            limits: Limits::default(),
            engines: Engines::default(),
            hardware: Hardware::default(),
            policy: Policy::default(),
            doorbell: true,
            remote: false,
        }
    }

    /// Replaces the limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// Replaces the choice of engines.
    #[must_use]
    pub fn with_engines(self, engines: Engines) -> Self {
        Self { engines, ..self }
    }

    /// Replaces the hardware settings.
    #[must_use]
    pub fn with_hardware(self, hardware: Hardware) -> Self {
        Self { hardware, ..self }
    }

    /// Replaces the policy, which determines the events that the guest may open.
    #[must_use]
    pub fn with_policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// For a device in another process than the VMM. The device then samples host counters only with the batched engine,
    /// and its catalogue lacks all events that need the vCPUs' exits, registers or CPU time inside the run call. Attach
    /// the vCPUs with [`Vpmu::attach_thread`](crate::Vpmu::attach_thread), and count with
    /// [`PerfSource::remote`](crate::host::PerfSource::remote).
    #[must_use]
    pub fn remote(mut self) -> Self {
        self.remote = true;
        self.engines = Engines::Batched;
        self
    }

    /// For a transport without shared memory regions. The device then offers neither the doorbell feature nor the
    /// events that count marks.
    #[must_use]
    pub fn without_doorbell(mut self) -> Self {
        self.doorbell = false;
        self
    }
}

/// How a guest and its operator may use the host's hardware counters.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hardware {
    /// Whether hardware events may be opened. While any hardware event is open, the host cannot start a VM with a
    /// mediated PMU.
    pub events: bool,
    /// Whether hardware events are disabled so that VMs with a mediated PMU can start.
    pub left_to_mediated: bool,
    /// Which work hardware events count.
    pub count_mode: CountMode,
    /// The permitted raw events ([`KIND_RAW`](crate::abi::KIND_RAW)).
    pub raw: RawEvents,
    /// Whether the hardware events of the operator and the guest are pinned on the host. A pinned event never shares a
    /// hardware counter with another event. If it gets no counter, it is in the error state. Each pinned event is read
    /// with its own system call.
    pub pinned: bool,
}

impl Hardware {
    /// Returns the settings after `set` has changed them.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
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

/// The raw events that a guest may open. A raw event is selected by its number in the host's PMU, and needs no
/// name in the kernel. Some raw events also count activity outside the guest, such as other VMs' accesses to a shared
/// cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RawEvents {
    /// Only these configs. Of these, the catalogue lists the ones that the host can open.
    Listed(BTreeSet<u64>),
    /// Any event and unit mask that the PMU accepts.
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

/// Whether hardware events count only the guest's work, or also the host's work. Sampling events always count only the
/// guest's work, because otherwise the work that the host does for one sample would cause the next sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CountMode {
    /// Only the guest's work.
    #[default]
    Guest,
    /// Also the host's work for the vCPU, that is, everything that the vCPU's thread does.
    Vcpu,
}

/// The engine for samples of host counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Engines {
    /// The engine that the guest requests. If the guest requests none, the device uses the batched engine if
    /// [`Machine::reports_guest_ips`](crate::Machine::reports_guest_ips) returns true and the event supports that
    /// engine. Otherwise, the device uses the exit engine.
    #[default]
    Auto,
    /// Only the batched engine. The device refuses events that this engine does not support, and requests for the exit
    /// engine. If the guest asks for a wakeup at each sample after it has opened an event (`COMMAND_PROMPT`), this engine
    /// still takes the event's samples.
    Batched,
    /// Only the exit engine. The device refuses requests for the batched engine.
    Exit,
}

/// Limits on one guest's use of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of open events. Non-sampling events that count the same thing share one host file descriptor per
    /// vCPU. Each sampling event has its own host counters.
    pub max_events: u32,
    /// Maximum number of host counters that the guest's sampling events hold open on all vCPUs together. Each counter
    /// needs a file descriptor (an exit trace needs two) and two pages. Some counters need more pages, at most 8 MiB
    /// for all counters together. As far as this limit allows, an event keeps a counter for each vCPU that it has run
    /// on.
    pub max_host_counters: u32,
    /// Maximum number of host counters of sampling events that run on one vCPU at the same time. Must not be zero.
    /// Events beyond this limit wait, or fail if they are pinned.
    pub max_active_counters: u32,
    /// Maximum number of data pages in one ring. Must be a power of two.
    pub max_ring_pages: u32,
    /// Maximum number of pages in one AUX area. Must be a power of two.
    pub max_aux_pages: u32,
    /// Maximum number of guest pages in all rings and AUX areas together. For each page, the device needs eight bytes
    /// of host memory.
    pub max_pages: u32,
    /// Maximum number of the guest's persistent events.
    pub max_persistent: u32,
    /// Maximum number of window pages for the guest's own rings. The remaining pages are reserved for the operator.
    pub max_window_pages: u32,
    /// Maximum number of samples per second for one event. Also the maximum number of interrupts per second from all
    /// host clocks on one vCPU together. Must not be zero.
    pub max_sample_rate: u32,
    /// Maximum number of samples per second for all of the guest's events together. Must not be zero.
    pub max_samples: u32,
    /// Maximum number of bytes per second in the sample records of all of the guest's events together. Must not be
    /// zero. The record that exceeds the limit is still written.
    pub max_record_bytes: u64,
    /// Maximum share of each vCPU's time, in percent, that samples of host counters may take if they use
    /// [`Engine::Exit`](crate::source::Engine::Exit). Must not be zero. A sample is charged the time from the overflow
    /// to the next guest entry. 100 disables the limit.
    pub max_sampling_percent: u32,
    /// The shortest period of hardware events. Must not be zero.
    pub min_hardware_period: u64,
}

/// An invalid limit.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LimitsError {
    /// The number of pages is not a power of two.
    #[error("{limit} must be a power of two, not {given}")]
    PowerOfTwo {
        /// The field's name.
        limit: &'static str,
        /// The given value.
        given: u32,
    },
    /// The limit is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A percentage above 100.
    #[error("{limit} must be at most 100, not {given}")]
    Percent {
        /// The field's name.
        limit: &'static str,
        /// The given value.
        given: u32,
    },
}

impl Limits {
    /// Returns the limits after `set` has changed them.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Checks the limits.
    ///
    /// # Errors
    /// [`LimitsError`] for the first invalid limit.
    pub fn check(&self) -> Result<(), LimitsError> {
        for (limit, given) in [("max_ring_pages", self.max_ring_pages), ("max_aux_pages", self.max_aux_pages)] {
            if !given.is_power_of_two() {
                return Err(LimitsError::PowerOfTwo { limit, given });
            }
        }
        for (limit, given) in [
            ("max_active_counters", self.max_active_counters.into()),
            ("max_pages", self.max_pages.into()),
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
            return Err(LimitsError::Percent { limit: "max_sampling_percent", given: self.max_sampling_percent });
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
            // Linux's default for samples: kernel.perf_cpu_time_max_percent.
            max_sampling_percent: 25,
            min_hardware_period: 1000,
        }
    }
}
