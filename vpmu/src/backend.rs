//! The fixed surroundings of a device, shared by all of its parts: settings, clock, source,
//! machine.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use crate::catalogue::{Catalogue, Entry, is_hardware};
use crate::clock::Clock;
use crate::locks::{DRAIN, Lock};
use crate::machine::Machine;
use crate::policy::EventMatch;
use crate::producer::AuxProducer;
use crate::refusal::Refusal;
use crate::settings::Settings;
use crate::shard::{CounterPool, RoomLimit};
use crate::source::{Request, Source};
use crate::throttle::{Budget, RateLimit, TimeLimit};

/// The fixed surroundings of one device.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) source: Box<dyn Source>,
    pub(crate) machine: Arc<dyn Machine>,
    /// Limit of the rate of each event's samples.
    pub(crate) rate_limit: RateLimit,
    /// Limit of the share of a vCPU's time that its samples may take.
    pub(crate) time_limit: TimeLimit,
    /// Limit of all data that the guest's events write.
    pub(crate) budget: Budget,
    /// The host counters of the guest's events.
    pub(crate) counters: CounterPool,
    /// The VMM's own producers of AUX data, by number.
    producers: OnceLock<Vec<AuxProducer>>,
    /// Bit set of the host's refusals that were logged.
    refusals: AtomicU32,
    catalogue: OnceLock<Catalogue>,
    guest_ips: OnceLock<bool>,
    /// Number of shards that need draining.
    draining: Lock<usize, DRAIN>,
}

impl Backend {
    pub(crate) fn new(
        settings: Settings,
        clock: Clock,
        source: Box<dyn Source>,
        machine: Arc<dyn Machine>,
    ) -> Self {
        let rate_limit = RateLimit::new(settings.limits.max_sample_rate);
        Self {
            rate_limit,
            time_limit: TimeLimit::new(rate_limit, settings.limits.max_sampling_percent),
            budget: Budget::new(
                settings.limits.max_samples,
                settings.limits.max_record_bytes,
            ),
            counters: CounterPool::new(settings.limits.max_host_counters),
            settings,
            clock,
            source,
            machine,
            producers: OnceLock::new(),
            refusals: AtomicU32::new(0),
            catalogue: OnceLock::new(),
            guest_ips: OnceLock::new(),
            draining: Lock::new(0),
        }
    }

    /// Limits of one vCPU.
    pub(crate) fn room_limit(&self) -> RoomLimit {
        let limits = &self.settings.limits;
        RoomLimit {
            counters: limits.max_active_counters,
            rate: limits.max_sample_rate.into(),
        }
    }

    /// The catalogue, made at the first call; by then, the machine must have its vCPUs and their
    /// statistics.
    pub(crate) fn catalogue(&self) -> &Catalogue {
        self.catalogue.get_or_init(|| {
            let producers = self.producers.get().map_or(&[][..], Vec::as_slice);
            Catalogue::new(&*self.source, &*self.machine, &self.settings, producers)
        })
    }

    /// The catalogue entries that the policy allows the guest, in the same order at every call.
    pub(crate) fn guest_entries(&self) -> impl Iterator<Item = &Entry> {
        self.catalogue().entries(&self.settings.policy)
    }

    /// Registers the VMM's producers; call it before the catalogue is first used.
    pub(crate) fn set_producers(&self, producers: Vec<AuxProducer>) {
        // Called once, when the device is made.
        let _ = self.producers.set(producers);
    }

    /// The catalogue, if it was made.
    pub(crate) fn known_catalogue(&self) -> Option<&Catalogue> {
        self.catalogue.get()
    }

    /// Refuses hardware events, the guest's and the operator's, if the operator disabled them.
    ///
    /// # Errors
    /// `ENOENT`, because the catalogue does not list such an event either.
    pub(crate) fn permit(&self, request: &Request) -> io::Result<()> {
        match self.settings.hardware.events || !is_hardware(request.kind) {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOENT)),
        }
    }

    /// The host's reason for refusing a counter. Each reason is logged once: a guest can request
    /// counters at any rate.
    pub(crate) fn refused(&self, error: &io::Error) -> Refusal {
        let refusal = Refusal::of(error);
        let bit = 1 << Refusal::wire(Some(refusal));
        if self.refusals.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            log::warn!("the host refused a counter for a guest's event ({error}): {refusal}");
        }
        refusal
    }

    /// The reason why the guest cannot open events of the host kind `kind`; `None` if it can.
    pub(crate) fn refusal(&self, kind: u32) -> Option<Refusal> {
        let hardware = &self.settings.hardware;
        let unused = is_hardware(kind) && !hardware.events;
        let allowed = self.settings.policy.allows_some(&EventMatch::kind(kind));
        match (unused, allowed) {
            (_, false) => Some(Refusal::Policy),
            (true, _) if hardware.left_to_mediated => Some(Refusal::Mediated),
            (true, _) => Some(Refusal::Policy),
            (false, _) => self.source.refusal(kind),
        }
    }

    /// The result of [`Machine::reports_guest_ips`], after [`Backend::ask_guest_ips`].
    pub(crate) fn guest_ips(&self) -> Option<bool> {
        self.guest_ips.get().copied()
    }

    /// Queries the machine, once. The machine may run a guest for that, so the caller must hold no
    /// lock.
    pub(crate) fn ask_guest_ips(&self) {
        self.guest_ips
            .get_or_init(|| self.machine.reports_guest_ips());
    }

    /// Adds a shard that needs draining.
    pub(crate) fn begin_draining(&self) {
        let mut shards = self.draining.lock();
        *shards += 1;
        if *shards == 1 {
            self.machine.draining(true);
        }
    }

    /// Removes a shard that needs draining.
    pub(crate) fn end_draining(&self) {
        let mut shards = self.draining.lock();
        *shards -= 1;
        if *shards == 0 {
            self.machine.draining(false);
        }
    }
}
