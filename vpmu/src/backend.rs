//! The things that all parts of a device share: its settings, clock, event source and machine, and the limits that
//! apply to the whole guest.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use vpmu_orc::OrcTable;

use crate::catalogue::{Catalogue, Entry};
use crate::clock::Clock;
use crate::kind::is_hardware;
use crate::locks::{DRAIN, Lock};
use crate::machine::Machine;
use crate::policy::EventMatch;
use crate::producer::AuxProducer;
use crate::refusal::Refusal;
use crate::settings::Settings;
use crate::slots::{CounterPool, RunLimit};
use crate::source::{Request, Source};
use crate::throttle::{Budget, RateLimit, TimeLimit};

/// The environment of one device. Its settings, clock, source and machine never change.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) source: Box<dyn Source>,
    pub(crate) machine: Arc<dyn Machine>,
    /// Limit on the rate of each event's samples.
    pub(crate) rate_limit: RateLimit,
    /// Limit on the share of time that a vCPU may spend on samples.
    pub(crate) time_limit: TimeLimit,
    /// Limit on the samples and bytes that all events of the guest together may write.
    pub(crate) budget: Budget,
    /// The host counters of the guest's events.
    pub(crate) counters: CounterPool,
    /// The producers of AUX data in the VMM, by number.
    producers: OnceLock<Vec<AuxProducer>>,
    /// The tables with which callers in the guest's kernel are found.
    orc: OnceLock<OrcTable>,
    /// A bit set of the host's refusal reasons that were already logged.
    refusals: AtomicU32,
    catalogue: OnceLock<Catalogue>,
    guest_ips: OnceLock<bool>,
    /// Number of shards that need draining.
    draining: Lock<usize, DRAIN>,
}

impl Backend {
    pub(crate) fn new(settings: Settings, clock: Clock, source: Box<dyn Source>, machine: Arc<dyn Machine>) -> Self {
        let rate_limit = RateLimit::new(settings.limits.max_sample_rate);
        Self {
            rate_limit,
            time_limit: TimeLimit::new(rate_limit, settings.limits.max_sampling_percent),
            budget: Budget::new(settings.limits.max_samples, settings.limits.max_record_bytes),
            counters: CounterPool::new(settings.limits.max_host_counters),
            settings,
            clock,
            source,
            machine,
            producers: OnceLock::new(),
            orc: OnceLock::new(),
            refusals: AtomicU32::new(0),
            catalogue: OnceLock::new(),
            guest_ips: OnceLock::new(),
            draining: Lock::new(0),
        }
    }

    /// Limits on one vCPU's sampling counters: the number of counters that run at the same time, and the
    /// total rate of interrupts from the counters whose rate is known.
    pub(crate) fn run_limit(&self) -> RunLimit {
        let limits = &self.settings.limits;
        RunLimit { counters: limits.max_active_counters, rate: limits.max_sample_rate.into() }
    }

    /// The catalogue, built by the first call. The machine's vCPUs and their statistics must exist before
    /// that call.
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

    /// Registers the VMM's producers. Call this before the catalogue is first used.
    ///
    /// # Errors
    /// Returns the producers if other producers were registered before.
    pub(crate) fn set_producers(&self, producers: Vec<AuxProducer>) -> Result<(), Vec<AuxProducer>> {
        self.producers.set(producers)
    }

    /// Registers the ORC tables of the guest's kernel.
    ///
    /// # Errors
    /// Returns the tables if other tables were registered before.
    pub(crate) fn set_orc(&self, table: OrcTable) -> Result<(), OrcTable> {
        self.orc.set(table)
    }

    /// The ORC tables of the guest's kernel, if the VMM has them.
    pub(crate) fn orc(&self) -> Option<&OrcTable> {
        self.orc.get()
    }

    /// Returns the catalogue. `None` before the first call of [`Backend::catalogue`].
    pub(crate) fn known_catalogue(&self) -> Option<&Catalogue> {
        self.catalogue.get()
    }

    /// Refuses a hardware event, from the guest or the operator, if the operator disabled hardware events.
    ///
    /// # Errors
    /// `ENOENT`, as for any event that is not in the catalogue.
    pub(crate) fn permit(&self, request: &Request) -> io::Result<()> {
        if self.settings.hardware.events || !is_hardware(request.kind) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOENT))
        }
    }

    /// Returns the reason why a counter was refused. Logs each reason only once, because a guest can
    /// request counters at any rate and must not be able to fill the log.
    pub(crate) fn refused(&self, error: &io::Error) -> Refusal {
        let refusal = Refusal::of(error);
        let bit = 1 << Refusal::wire(Some(refusal));
        if self.refusals.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            log::warn!("the host refused a counter for an event ({error}): {refusal}");
        }
        refusal
    }

    /// Returns the reason why the guest cannot open any event of `kind`. `None` if the guest can open such events.
    /// `kind` must be a kind that the host counts.
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

    /// The result of [`Machine::reports_guest_ips`]; `None` before [`Backend::ask_guest_ips`].
    pub(crate) fn guest_ips(&self) -> Option<bool> {
        self.guest_ips.get().copied()
    }

    /// Calls [`Machine::reports_guest_ips`], unless an earlier call has done so. The machine may run a
    /// small guest to find the answer, so the caller must hold no lock.
    pub(crate) fn ask_guest_ips(&self) {
        self.guest_ips.get_or_init(|| self.machine.reports_guest_ips());
    }

    /// Adds a shard that needs draining.
    pub(crate) fn begin_draining(&self) {
        let mut shards = self.draining.lock();
        *shards += 1;
        if *shards == 1 {
            self.machine.draining(true);
        }
    }

    /// Whether a shard needs draining. If none does, the host holds no records of the batched engine.
    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.lock() > 0
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
