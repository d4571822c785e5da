//! One event: its specification, state, count and times. This module does not access queues. It accesses other events
//! only if they are in the event's group.

mod backing;
mod counting;
mod group;
mod overflows;
mod schedule;

use std::io;
use std::sync::Arc;

use self::backing::Backing;
use self::counting::{Counting, Order};
use self::group::Membership;
pub(crate) use self::group::{Group, GroupEvent, LastCounts};
use self::overflows::OverflowControl;
use self::schedule::Schedule;
use crate::abi::{
    OPEN_AUX_START_PAUSED, OPEN_PAUSED, STATE_ACTIVE, STATE_ERROR, STATE_INACTIVE, STATE_OFF, SYNC_RESUME, SYNC_START,
};
use crate::clock::Clock;
use crate::cpu::{Cpu, Lease};
use crate::kind::Kind;
use crate::links::Effect;
use crate::period::{Completed, Period, SavedPeriod};
use crate::ring::CountSnapshot;
use crate::saved::{Fault, saved};
use crate::settings::Engines;
use crate::sink::Output;
use crate::slots::RunLimit;
use crate::spec::{Context, EventSpec, Wakeups};
use crate::tasks::Task;
use crate::throttle::RateLimit;
use crate::trace::{SavedTrace, Trace};
use crate::vcpu::Hook;
use crate::work;

/// The owner of a persistent event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persistent {
    Guest,
    /// Owned by the operator. The guest cannot change the event.
    Operator,
}

/// An open event. It belongs to the shard of the vCPU on which it is placed. A task event that is scheduled out stays
/// in its last shard.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) spec: Arc<EventSpec>,
    pub(crate) schedule: Schedule,
    /// The event's place in a group. The event counts only while the group's leader is enabled.
    pub(crate) membership: Membership,
    enabled: bool,
    /// Whether the event is in the error state. It is then not active and has no counters.
    failed: bool,
    /// Overflows without a record.
    pub(crate) lost: u64,
    /// The owner, if the event is persistent.
    pub(crate) persistent: Option<Persistent>,
    pub(crate) output: Output,
    /// The events that this event's overflows start, stop or toggle, by id.
    pub(crate) effects: Vec<(u64, Effect)>,
    /// The state of a trace, which includes its number of bytes. `None` for other events.
    pub(crate) trace: Option<Trace>,
    pub(crate) overflows: OverflowControl,
    pub(crate) counting: Counting,
}

saved! {
    /// The state of an event at one moment.
    pub(crate) struct SavedLife {
        pub(crate) enabled: bool,
        pub(crate) paused: bool,
        pub(crate) failed: bool,
        /// Whether each of its samples causes a wakeup.
        pub(crate) prompt: bool,
        /// Whether its overflows make no records.
        pub(crate) throttled: bool,
        /// The task that was last scheduled in for the event, and the last vCPU that this task ran on.
        pub(crate) task: Option<Task>,
        pub(crate) last_vcpu: u32,
        pub(crate) limit: u64,
        pub(crate) lost: u64,
        pub(crate) period: Option<SavedPeriod>,
        pub(crate) trace: Option<SavedTrace>,
        pub(crate) count: u64,
        /// The unit is ticks of a TSC with the frequency [`SavedState::tsc_khz`].
        pub(crate) enabled_ticks: u64,
        pub(crate) running_ticks: u64,
    }
}

impl Event {
    pub(crate) fn new(spec: Arc<EventSpec>, wakeups: Wakeups, context: Context, period: Option<Period>) -> Self {
        let paused = spec.has(OPEN_PAUSED | OPEN_AUX_START_PAUSED);
        Self {
            schedule: Schedule::new(context),
            membership: Membership::new(spec.id),
            enabled: false,
            failed: false,
            lost: 0,
            persistent: None,
            output: Output::new(wakeups),
            effects: Vec::new(),
            trace: spec.is_trace().then(Trace::new),
            overflows: OverflowControl::new(period),
            counting: Counting::new(&spec, period.is_some(), paused),
            spec,
        }
    }

    /// Returns the event's state at its last update, for saving.
    pub(crate) fn save(&self) -> SavedLife {
        SavedLife {
            enabled: self.enabled,
            paused: self.counting.is_paused(),
            failed: self.failed,
            prompt: self.output.wakeups.prompt,
            throttled: self.overflows.is_throttled(),
            task: self.schedule.task,
            last_vcpu: self.schedule.last_vcpu,
            limit: self.overflows.limit,
            lost: self.lost,
            period: self.overflows.period.map(Period::save),
            trace: self.trace.as_ref().map(Trace::save),
            count: self.counting.count,
            enabled_ticks: self.counting.enabled_ticks,
            running_ticks: self.counting.running_ticks,
        }
    }

    /// Restores a saved event, which is not active yet. The caller must first convert the saved ticks to ticks of
    /// this device's TSC.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(crate) fn restore(
        spec: Arc<EventSpec>,
        mut wakeups: Wakeups,
        context: Context,
        saved: &SavedLife,
        engines: Engines,
    ) -> Result<Self, Fault> {
        let period = match &saved.period {
            Some(period) => Some(Period::restore(period).ok_or("its period is not valid")?),
            None => None,
        };
        let trace = match &saved.trace {
            Some(trace) => Some(Trace::restore(trace).ok_or("its trace is not valid")?),
            None => None,
        };
        if trace.is_some() != spec.is_trace() {
            return Err("its trace contradicts its kind");
        }
        if period.is_none() && (saved.limit > 0 || saved.throttled) {
            return Err("it has a limit or a throttle, but never overflows");
        }
        if saved.prompt && (period.is_none() || spec.is_trace()) {
            return Err("each of its samples causes a wakeup, but it makes no samples");
        }
        wakeups.prompt = saved.prompt;
        if saved.task.is_some() && matches!(context, Context::Vcpu(_)) {
            return Err("it has a task, but its context is a vCPU");
        }
        let mut event = Self::new(spec, wakeups, context, period);
        event.schedule = Schedule { context, task: saved.task, last_vcpu: saved.last_vcpu };
        event.enabled = saved.enabled;
        event.failed = saved.failed;
        event.lost = saved.lost;
        event.trace = trace;
        event.overflows = OverflowControl::restore(period, saved.throttled, saved.limit);
        let batched = event.would_batch(saved.prompt, engines);
        event.counting.restore(saved, batched);
        Ok(event)
    }

    /// Calls `act` with what the event's counter must do.
    fn count<T>(&mut self, act: impl FnOnce(&mut Counting, &Order<'_>) -> T) -> T {
        let (rate, operators) = (self.overflows.rate(), self.is_operators());
        act(&mut self.counting, &Order { spec: &self.spec, rate, operators })
    }

    // State.

    /// The vCPU on which the event currently counts.
    pub(crate) fn active_on(&self) -> Option<u32> {
        self.counting.active_on()
    }

    pub(crate) fn state(&self) -> i32 {
        if self.failed {
            STATE_ERROR
        } else if !self.enabled {
            STATE_OFF
        } else if self.active_on().is_none() || self.counting.is_waiting() {
            STATE_INACTIVE
        } else {
            STATE_ACTIVE
        }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Enables or disables the event. If it leads a group, publishes the change to the group. Returns whether
    /// the event was enabled before.
    pub(crate) fn set_enabled(&mut self, enabled: bool) -> bool {
        let before = std::mem::replace(&mut self.enabled, enabled);
        self.publish_on();
        before
    }

    /// Counts an overflow towards the event's overflow limit, if it has one. Disables the event if the limit is reached,
    /// and returns whether it is.
    pub(crate) fn use_up_limit(&mut self) -> bool {
        let is_last = self.overflows.use_up_limit();
        if is_last {
            self.set_enabled(false);
        }
        is_last
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    // The group.

    /// Makes the event join `group`, or leave its current group if `group` is `None`.
    pub(crate) fn join(&mut self, group: Option<Arc<Group>>) {
        self.membership.join(group);
        self.publish_on();
        self.publish_counts();
    }

    fn publish_on(&self) {
        self.membership.publish_on(self.enabled && !self.failed);
    }

    /// Publishes the event's count and losses to readers of its group on other vCPUs.
    pub(crate) fn publish_counts(&self) {
        let value = self.trace.as_ref().map_or(self.counting.count, Trace::count);
        self.membership.publish_counts(value, self.lost());
    }

    // The event's needs.

    /// Whether the operator owns the event.
    pub(crate) fn is_operators(&self) -> bool {
        self.persistent == Some(Persistent::Operator)
    }

    /// Whether the metadata page of the event's own ring shows the event's count.
    pub(crate) fn is_shown(&self) -> bool {
        let sink = self.output.sink.as_ref();
        sink.is_some_and(|sink| sink.shows(self.spec.id))
    }

    /// The event's hooks while it is active.
    pub(crate) fn hooks(&self) -> impl Iterator<Item = Hook> + use<> {
        let goes = !self.counting.is_paused();
        let samples = self.overflows.period.is_some() && goes;
        let exits = self.spec.kind.counted_exits().is_some() && goes;
        let traced = self.spec.traces_exits() && goes;
        let wants = |hook, wanted: bool| wanted.then_some(hook);
        let hooks = match self.counting.backing() {
            Backing::GuestTime => [Some(Hook::GuestTime), None],
            Backing::Own(_) if self.is_batched() => [Some(Hook::Collecting), None],
            Backing::Own(_) => [wants(Hook::HostSamples, samples), None],
            Backing::Exits(_) => {
                [wants(Hook::Exits, samples || self.is_shown() && goes), wants(Hook::Registers, samples)]
            }
            Backing::Happened(_) => {
                [wants(Hook::Exits, exits), wants(Hook::Registers, samples || self.spec.excludes_any() && goes)]
            }
            Backing::Traced => [wants(Hook::Traced, traced), wants(Hook::Registers, traced)],
            Backing::Shared(_) | Backing::Tsc | Backing::AllExits | Backing::Halts => [None, None],
        };
        let throttled = wants(Hook::Throttled, self.overflows.is_throttled());
        let wants_state = matches!(self.spec.kind, Kind::SampleTrace(_))
            || !self.spec.is_trace() && self.spec.capture().wants_state();
        let state = wants(Hook::State, samples && wants_state);
        hooks.into_iter().flatten().chain(throttled).chain(state)
    }

    /// Returns whether the event's vCPU must handle the event at exits, marks or drains. Returns false for an event
    /// that only counts and whose count can be read at any time.
    pub(crate) fn is_watched(&self) -> bool {
        self.counting.is_watched()
    }

    /// Whether the event only counts, is not in the error state, and has no sink. Such an event starts and stops
    /// without further work.
    pub(crate) fn is_plain(&self) -> bool {
        self.output.sink.is_none() && !self.failed && !self.is_watched()
    }

    /// Whether the event's samples or packets come from host counters.
    pub(crate) fn is_sampled_by_host(&self) -> bool {
        self.counting.backing().is_own()
    }

    /// Whether each of the event's samples causes an exit whose time counts against the limit on the vCPU's
    /// sampling time.
    pub(crate) fn takes_time(&self) -> bool {
        let samples = self.is_sampled_by_host() && self.overflows.period.is_some();
        samples && !self.is_batched() && !self.is_operators()
    }

    /// Whether the host records the event's overflows for a later drain.
    pub(crate) fn is_batched(&self) -> bool {
        self.counting.is_batched()
    }

    /// Returns whether the host records the event's overflows for a later drain if the event is prompt, or if it is
    /// not. `engines` is the operator's choice.
    pub(crate) fn would_batch(&self, prompt: bool, engines: Engines) -> bool {
        // An operator who chooses the batched engine does not want exits for samples.
        self.spec.is_batched() && (!prompt || engines == Engines::Batched)
    }

    /// Whether the host may hold overflows of the event that can be taken only while the event's vCPU is outside the
    /// guest: it is active, and uses the exit engine.
    pub(crate) fn may_hold(&self) -> bool {
        self.is_sampled_by_host() && !self.is_batched() && self.active_on().is_some()
    }

    /// Whether an overflow needs no more than its record: it starts and stops no other event, and lifts no throttle.
    pub(crate) fn is_quiet(&self) -> bool {
        self.effects.is_empty() && !self.overflows.is_throttled()
    }

    /// Begins a new stretch of a trace: its next packet follows a sync packet.
    pub(crate) fn sync(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.sync(SYNC_START);
        }
    }

    // Counting.

    /// Opens a host counter for the event on `cpu`, if the event needs one there and has none yet.
    ///
    /// # Errors
    /// The host's error, or `ESRCH` while the vCPU has no thread.
    pub(crate) fn prepare(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.count(|counting, order| counting.prepare(cpu, order))
    }

    /// Starts counting on `cpu`.
    ///
    /// # Errors
    /// The host's error. The caller must then call [`Event::fail`].
    pub(crate) fn start(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.count(|counting, order| counting.start(cpu, order))?;
        self.overflows.resume();
        Ok(())
    }

    /// Updates count and times.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn update(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.count(|counting, order| counting.update(cpu, order))?;
        self.publish_counts();
        Ok(())
    }

    /// Stops counting.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.count(|counting, order| counting.stop(cpu, order))?;
        self.publish_counts();
        Ok(())
    }

    /// If the event's counter is waiting for room and there is some now, starts the counter. Returns whether it is still
    /// waiting.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop_waiting(&mut self, cpu: &mut Cpu) -> io::Result<bool> {
        let waits = self.count(|counting, order| counting.stop_waiting(cpu, order))?;
        self.publish_counts();
        Ok(waits)
    }

    /// Stops the event's own counter and updates count and times, so that the counter can be replaced
    /// ([`Event::change_engine`]). The event stays active.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn stop_counter(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.count(|counting, order| counting.stop_counter(cpu, order))?;
        self.publish_counts();
        Ok(())
    }

    /// Makes the batched engine or the exit engine take the event's samples from now on. Replaces the event's own
    /// counter, and begins a new period. The counter of an active event must be stopped ([`Event::stop_counter`]), and
    /// the caller must have taken its overflows.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn change_engine(&mut self, cpu: &mut Cpu, batched: bool) -> io::Result<()> {
        self.count(|counting, order| counting.change_engine(cpu, order, batched))?;
        self.overflows.silence_again(&mut self.counting)?;
        self.counting.start_replaced(cpu)
    }

    /// Puts the event in the error state, which stops it permanently. Returns its leases of shared counters. The caller
    /// must release the leases.
    pub(crate) fn fail(&mut self) -> Vec<(u32, Lease)> {
        self.failed = true;
        self.publish_on();
        self.counting.abandon()
    }

    /// Pauses or resumes the event. A paused event does not count.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn pause(&mut self, cpu: &mut Cpu, paused: bool) -> io::Result<()> {
        if self.counting.is_paused() == paused {
            return Ok(());
        }
        self.count(|counting, order| counting.pause(cpu, order, paused))?;
        self.publish_counts();
        if paused {
            return Ok(());
        }
        self.overflows.resume();
        if let Some(trace) = &mut self.trace {
            trace.sync(SYNC_RESUME);
        }
        self.counting.run(cpu, true)
    }

    /// Sets the count to zero. The times keep their values.
    ///
    /// # Errors
    /// See [`Event::start`].
    pub(crate) fn reset(&mut self, cpu: &mut Cpu) -> io::Result<()> {
        self.update(cpu)?;
        self.counting.count = 0;
        if let Some(trace) = &mut self.trace {
            trace.reset();
        }
        Ok(())
    }

    /// Sets a new period, or a new frequency if the event was opened with a frequency.
    ///
    /// # Errors
    /// See [`Event::start`]. `ENOSPC` if the new rate would exceed the vCPU's limit on interrupts. In that case, the
    /// period does not change.
    pub(crate) fn set_period(&mut self, period: Period, limit: RunLimit) -> io::Result<()> {
        let before = self.overflows.rate().map_or(0, |rate| self.spec.interrupts(rate));
        let after = self.spec.interrupts(period.rate());
        if !self.counting.change_rate(limit, after) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let changed = self.overflows.set_period(&mut self.counting, period);
        if changed.is_err() {
            self.counting.change_rate(limit, before);
        }
        changed
    }

    /// Counts one occurrence. Returns the resulting overflow, if any. `now` returns guest nanoseconds.
    pub(crate) fn count_one(&mut self, now: impl FnOnce() -> u64) -> Option<Completed> {
        work::charge(1);
        if let Backing::Happened(times) = self.counting.backing_mut() {
            *times += 1;
        }
        self.overflows.grow(now)
    }

    /// Admits an overflow at `time` that needs no work besides its record. This requires that the event has no overflow
    /// limit, does not start or stop other events, is not throttled, and does not become throttled. For any other
    /// overflow, returns `false` and changes nothing. The caller must then call [`OverflowControl::admit`].
    pub(crate) fn admit_plain(&mut self, limit: RateLimit, time: u64) -> bool {
        self.effects.is_empty() && self.overflows.admit_plain(limit, time)
    }

    /// Count and times at the last update.
    pub(crate) fn counts(&self, clock: Clock) -> CountSnapshot {
        let counting = &self.counting;
        CountSnapshot {
            count: self.trace.as_ref().map_or(counting.count, Trace::count),
            time_enabled: clock.nanoseconds(counting.enabled_ticks),
            time_running: clock.nanoseconds(counting.running_ticks),
            growing_since: counting.since().map(|since| clock.nanoseconds(since)),
        }
    }

    /// Returns the number of overflows without a record. For a trace, returns the number of lost bytes.
    pub(crate) fn lost(&self) -> u64 {
        self.trace.as_ref().map_or(self.lost, Trace::lost)
    }
}
