//! The events of one device and what happens to them, with the device's lock held. Requests come
//! from `control` and `command`, exits and marks from `device`.

mod attach;
mod batched;
mod closing;
mod exit;
mod flushing;
mod group;
mod hardware;
mod operator;
mod overflow;
mod persistent;
mod producing;
mod reset;
mod throttling;
mod tracing;
mod triggers;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use vm_memory::{GuestMemoryMmap, GuestRegionCollectionError};

pub(crate) use self::operator::Held;
use self::producing::Awaited;
use self::triggers::Pending;
use crate::abi::{F_AUX, F_RING, SYNC_START};
use crate::clock::Clock;
use crate::errno::Errno;
use crate::event::{Context, Event, Host};
use crate::links::Links;
use crate::merge::Merge;
use crate::metrics::Metrics;
use crate::output::Output;
use crate::period::Period;
use crate::queues::Queues;
use crate::record::Origin;
use crate::settings::Settings;
use crate::source::Rate;
use crate::throttle::Allowance;
use crate::walk::{Capture, Place};

/// Everything that the device knows, as long as it lives. What a driver brings lies in `features`,
/// `queues` and `output`, and goes with its reset: before the first driver and between two of them no
/// feature is negotiated, there is no queue, and no guest memory.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) features: u64,
    pub(crate) queues: Queues,
    pub(crate) output: Output,
    pub(crate) events: BTreeMap<u64, Event>,
    /// The next event's id: ids are never used again.
    pub(crate) next_id: u64,
    pub(crate) metrics: Metrics,
    /// Which events start and stop which others.
    pub(crate) links: Links,
    /// Overflows that have yet to act.
    pending: Pending,
    /// How often each event may sample.
    allowance: Allowance,
    /// Active events of each vCPU.
    active: Vec<BTreeSet<u64>>,
    /// Where each vCPU stood at its last exit that host counters sampled, and which exit.
    exit_places: Vec<(u64, Option<Place>)>,
    /// Of each vCPU the exit that traces are to know the end of.
    awaited: Vec<Awaited>,
    /// What the sample that is being made says of its place.
    capture: Capture,
    /// Overflows that the host recorded, on their way to rings.
    merge: Merge,
    /// The machine has been asked to have such collected.
    collecting: bool,
}

/// What becomes of overflows that are found when an event has been stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    Written,
    Dropped,
}

impl State {
    pub(crate) fn new(settings: Settings, clock: Clock) -> Self {
        let vcpus = settings.vcpus as usize;
        Self {
            allowance: Allowance::new(settings.limits.max_sample_rate),
            settings,
            clock,
            features: 0,
            queues: Queues::default(),
            output: Output::new(vcpus),
            events: BTreeMap::new(),
            next_id: 1,
            metrics: Metrics::default(),
            links: Links::default(),
            pending: Pending::default(),
            active: vec![BTreeSet::new(); vcpus],
            exit_places: vec![(0, None); vcpus],
            awaited: (0..vcpus).map(|_| Awaited::default()).collect(),
            capture: Capture::default(),
            merge: Merge::new(vcpus),
            collecting: false,
        }
    }

    /// A driver is there, with features and queues that have been checked.
    ///
    /// # Errors
    /// The window lies in its memory.
    pub(crate) fn activate(
        &mut self,
        memory: GuestMemoryMmap,
        features: u64,
        queues: Vec<virtio_queue::Queue>,
    ) -> Result<(), GuestRegionCollectionError> {
        let memory = Arc::new(memory);
        self.output.activate(Arc::clone(&memory))?;
        self.queues = Queues::new(memory, queues);
        self.features = features;
        Ok(())
    }

    /// What it did since the start.
    pub(crate) fn totals(&self) -> Metrics {
        Metrics {
            samples_written: self.output.tally.written,
            samples_lost: self.output.tally.lost,
            samples_throttled: self.output.tally.throttled,
            wakeups: self.output.tally.wakeups,
            aux_written: self.output.tally.aux_written,
            aux_lost: self.output.tally.aux_lost,
            aux_records: self.output.tally.aux_records,
            ..self.metrics.clone()
        }
    }

    pub(crate) fn has_rings(&self) -> bool {
        self.features & 1 << F_RING != 0
    }

    /// Areas are told of in rings, so that they take both.
    pub(crate) fn has_areas(&self) -> bool {
        self.has_rings() && self.features & 1 << F_AUX != 0
    }

    /// Guest nanoseconds on `vcpu` now.
    pub(crate) fn now(&self, host: &Host<'_>, vcpu: u32) -> u64 {
        self.clock.nanoseconds(host.guest_tsc(vcpu))
    }

    /// Makes an event count if its state and its leader's say that it should.
    pub(crate) fn start(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        self.lift(host, id);
        let led = self.is_led_on(id);
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let (Some(vcpu), true, None) = (event.placed_on(), event.enabled, event.active_on()) else {
            return Ok(());
        };
        if event.has_failed() {
            return Err(Errno::EIO);
        }
        if !led || host.vcpus[vcpu as usize].thread().is_none() {
            return Ok(());
        }
        if let Err(error) = event.start(host, vcpu) {
            return Err(self.fail(host, id, error));
        }
        self.active[vcpu as usize].insert(id);
        host.vcpus[vcpu as usize].add_needs(event.needs());
        self.output.show(id, &event.face(self.clock));
        if event.is_batched() {
            self.start_collecting(host);
        }
        self.announce(host, id);
        Ok(())
    }

    /// Makes an event stand still, what is pending for its ring written.
    pub(crate) fn stop(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        self.halt(host, id, Late::Written)
    }

    /// Makes an event stand still.
    fn halt(&mut self, host: &Host<'_>, id: u64, late: Late) -> Result<(), Errno> {
        let vcpu = self.deactivate(host, id)?;
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let stopped = event.stop(host);
        if let Some(vcpu) = vcpu.filter(|_| event.is_sampled_by_host()) {
            match late {
                Late::Written if event.is_batched() => self.settle_last(host, id, vcpu),
                // Overflows since the exit belong to the exit: the guest has not run on.
                Late::Written => self.acting(host, |state| {
                    state.find(host, id, vcpu);
                }),
                Late::Dropped => self.drop_recorded(id, vcpu),
            }
        }
        self.refresh(host, id, stopped)
    }

    /// Brings an event's figures up to now, a pending loss written.
    pub(crate) fn update(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.update(host);
        self.refresh(host, id, result)
    }

    /// Its count becomes zero.
    pub(crate) fn reset_count(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.reset(host);
        self.refresh(host, id, result)
    }

    /// A new period, or frequency, for an event that samples.
    pub(crate) fn set_period(&mut self, host: &Host<'_>, id: u64, asked: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let period = event.period.ok_or(Errno::EINVAL)?;
        let highest = u64::from(self.settings.limits.max_sample_rate);
        let period = match period.rate() {
            Rate::Frequency(_) if (1..=highest).contains(&asked) => Period::frequency(asked),
            // perf takes no period whose top bit is set.
            Rate::Period(_) if asked >> 63 == 0 && asked >= event.facts.shortest_period => {
                Period::new(asked)
            }
            _ => return Err(Errno::EINVAL),
        };
        let changed = event.set_period(period);
        self.flush(host, id);
        match changed {
            // What the host allows can be less than what the operator does: all is as before.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Errno::EINVAL),
            result => result.map_err(|error| self.fail(host, id, error)),
        }
    }

    /// Turns an event on, and with it those that it leads.
    pub(crate) fn enable(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let was_enabled = std::mem::replace(&mut event.enabled, true);
        if let Some(trace) = event.trace.as_mut().filter(|_| !was_enabled) {
            trace.sync(SYNC_START);
        }
        let started = self.start(host, id);
        self.start_members(host, id);
        started
    }

    /// Turns an event off, and with it those that it leads.
    pub(crate) fn disable(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        event.enabled = false;
        let stopped = self.stop(host, id);
        self.stop_members(host, id);
        stopped
    }

    /// Turns an event on for `overflows` more.
    pub(crate) fn enable_for(
        &mut self,
        host: &Host<'_>,
        id: u64,
        overflows: u64,
    ) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        if overflows == 0 || event.period.is_none() {
            return Err(Errno::EINVAL);
        }
        event.limit = event.limit.saturating_add(overflows);
        self.enable(host, id)
    }

    /// Whose record it would be that an event wrote now.
    pub(crate) fn origin(&self, host: &Host<'_>, event: &Event) -> Origin {
        let vcpu = event.placed_on().unwrap_or(event.last_vcpu);
        let task = match event.context {
            Context::Vcpu(_) => self.output.running(vcpu),
            // Nobody's, if its task has never run.
            Context::Task(_) => event.task.unwrap_or_default(),
        };
        Origin {
            pid: task.pid,
            tid: task.tid,
            time: self.now(host, vcpu),
            id: event.facts.owner,
            stream_id: event.facts.id,
            vcpu,
        }
    }

    /// Changes what an event needs of its vCPU.
    pub(crate) fn with_needs<T>(
        &mut self,
        host: &Host<'_>,
        id: u64,
        change: impl FnOnce(&mut Event) -> T,
    ) -> Option<T> {
        let event = self.events.get_mut(&id)?;
        let on = event.active_on().map(|vcpu| &host.vcpus[vcpu as usize]);
        if let Some(on) = on {
            on.drop_needs(event.needs());
        }
        let changed = change(event);
        if let Some(on) = on {
            on.add_needs(event.needs());
        }
        Some(changed)
    }

    /// The vCPU that a task event is opened on first, as the likeliest to be used.
    pub(crate) fn first_vcpu(host: &Host<'_>, context: Context) -> u32 {
        match context {
            Context::Vcpu(vcpu) | Context::Task(Some(vcpu)) => vcpu,
            Context::Task(None) => (0..)
                .zip(host.vcpus)
                .find(|(_, vcpu)| vcpu.thread().is_some())
                .map_or(0, |(index, _)| index),
        }
    }

    /// Takes an event off the vCPU that it is active on, though it still counts there: which one.
    fn deactivate(&mut self, host: &Host<'_>, id: u64) -> Result<Option<u32>, Errno> {
        self.cut(host, id);
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let vcpu = event.active_on();
        if let Some(vcpu) = vcpu {
            self.active[vcpu as usize].remove(&id);
            host.vcpus[vcpu as usize].drop_needs(event.needs());
        }
        Ok(vcpu)
    }

    /// After a change: a loss that is pending is written, the figures are shown, and an event
    /// that its host gave up is in error.
    fn refresh(&mut self, host: &Host<'_>, id: u64, result: io::Result<()>) -> Result<(), Errno> {
        self.flush(host, id);
        if let Some(event) = self.events.get(&id) {
            self.output.show(id, &event.face(self.clock));
        }
        result.map_err(|error| self.fail(host, id, error))
    }

    /// Writes what an event's ring owes its reader, as far as it fits: a pending loss, and what traces
    /// wrote.
    pub(crate) fn flush(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        if self.output.owes(&event.facts) {
            let origin = self.origin(host, event);
            self.output.flush(&event.facts, &origin);
        }
    }

    /// The host gave an event up: says so to the driver, once. Those that it leads stand still.
    fn fail(&mut self, host: &Host<'_>, id: u64, error: io::Error) -> Errno {
        // It may be active, or gone.
        let _ = self.deactivate(host, id);
        self.flush(host, id);
        if let Some(event) = self.events.get_mut(&id)
            && !event.has_failed()
        {
            log::warn!("event {id} is in error: {error}");
            event.fail();
            self.output.notices.fail(id);
            self.stop_members(host, id);
        }
        Errno::from(error)
    }
}
