//! Runs the events of one vCPU: starts, stops and fails them, and applies their overflows. An overflow can start and
//! stop other events, and stopping an event writes its last overflows, so both belong to one type. What they need is in
//! the parts of [`Events`], each of which owns its state.

use std::io;
use std::sync::Arc;

use super::Errand;
use super::batch::Batch;
use super::core::Core;
use super::counts::{Counts, GroupCounts};
use super::exits::ExitTracer;
use super::map::EventMap;
use super::moment::{ExitView, Moment, OverflowQueue, Overflows, Periods};
use super::occurrences::{Elapsed, Occurred, count};
use super::sampler::{Sampler, write_packet};
use super::writer::{Note, Writer};
use crate::cpu::Cpu;
use crate::errno::Errno;
use crate::event::Event;
use crate::kind::{Kind, Reported};
use crate::links::Effect;
use crate::machine::{Exit, ExitReason};
use crate::notices::NoticeChange;
use crate::record::SAMPLE_READ;
use crate::throttle::Verdict;
use crate::vcpu::Hook;
use crate::work;

/// Milliseconds that a host may take to store a record in its ring. When records are collected while the vCPU
/// runs, records younger than this are held back, in case an older record arrives in another ring.
const HOLD_BACK: u64 = 1;

/// How to handle the overflows that the host still holds when an event stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PendingOverflows {
    Written,
    Discarded,
}

/// The events of one vCPU, and what counts, samples and traces them.
#[derive(Debug)]
pub(crate) struct Events {
    core: Core,
    map: EventMap,
    /// Overflows that were found but have not been applied yet.
    overflows: OverflowQueue,
    /// Counts that were read for records of this exit. Empty unless `overflows` is being applied.
    counts: GroupCounts,
    sampler: Sampler,
    exits: ExitTracer,
    batch: Batch,
}

impl Events {
    pub(super) fn new(cpu: Cpu, writer: Writer) -> Self {
        Self {
            core: Core::new(cpu, writer),
            map: EventMap::default(),
            overflows: OverflowQueue::default(),
            counts: GroupCounts::default(),
            sampler: Sampler::default(),
            exits: ExitTracer::default(),
            batch: Batch::default(),
        }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    pub(crate) fn map(&self) -> &EventMap {
        &self.map
    }

    pub(super) fn parts(&mut self) -> (&mut Core, &mut EventMap) {
        (&mut self.core, &mut self.map)
    }

    /// Total time that the vCPU spent on samples.
    pub(super) fn sampling_time(&self) -> u64 {
        self.sampler.total_time()
    }

    /// Starts waiting counters if places were freed, and publishes the notices. Must be called before the shard is
    /// unlocked. Returns the work that was deferred to other shards.
    pub(super) fn finish(&mut self) -> Vec<Errand> {
        if self.map.has_waits() && self.core.cpu.take_freed() {
            let mut lasting = Vec::new();
            for wait in self.map.take_waits() {
                let event = self.map.waiting(wait);
                match event.map(|event| event.stop_waiting(&mut self.core.cpu)) {
                    Some(Ok(true)) => lasting.push(wait),
                    Some(Ok(false)) | None => {}
                    Some(Err(error)) => {
                        self.fail(wait.event, error);
                    }
                }
            }
            self.map.put_back_waits(lasting);
        }
        self.core.finish()
    }

    // Removal.

    /// Removes every event except those that `outlives` selects. Writes nothing to guest memory.
    pub(super) fn reset(&mut self, outlives: impl Fn(u64) -> bool) {
        for id in self.map.ids(|event| !outlives(event.spec.id)) {
            let Some(mut event) = self.map.remove(id) else {
                continue;
            };
            if event.active_on().is_some() {
                self.core.unhook(&event);
            }
            if event.is_batched() {
                self.batch.forget(id);
            }
            self.core.release(event.counting.take_counters());
        }
        self.exits.skip(&self.core.cpu.vcpu);
    }

    // Starting and stopping.

    /// Starts an event if it is enabled and placed on this vCPU. Does nothing while the vCPU has no thread, or while
    /// the event has a leader that is disabled or in the error state.
    pub(crate) fn start(&mut self, id: u64) -> Result<(), Errno> {
        self.unthrottle(id, None);
        let event = self.map.get(id).ok_or(Errno::ENOENT)?;
        if event.is_watched() {
            // The open exit began before this event starts, so this event must not record it. Therefore, look up now
            // which traces record this exit. The lookup can put a trace in the error state, and that trace can be this
            // event's leader.
            self.claim_exit();
        }
        let event = self.map.get_mut(id).ok_or(Errno::ENOENT)?;
        let idle =
            event.schedule.on() == Some(self.core.cpu.index) && event.is_enabled() && event.active_on().is_none();
        if idle && event.has_failed() {
            return Err(Errno::EIO);
        }
        if !idle || !event.membership.is_led_on() || self.core.cpu.thread().is_none() {
            return Ok(());
        }
        if let Err(error) = event.start(&mut self.core.cpu) {
            return Err(self.fail(id, error));
        }
        self.core.hook(event);
        if event.is_batched() || event.overflows.is_throttled() {
            self.batch.start_collecting(&self.core);
        }
        self.core.show(event);
        if event.spec.is_trace() {
            self.core.announce(event);
        }
        if event.counting.is_waiting() {
            self.core.metrics.counter_waits += u64::from(self.map.note_wait(id));
        }
        Ok(())
    }

    /// Stops an event, and writes its pending records.
    pub(crate) fn stop(&mut self, id: u64) -> Result<(), Errno> {
        self.halt(id, PendingOverflows::Written)
    }

    /// Stops an event. `pending` selects what to do with the overflows that the host still holds.
    fn halt(&mut self, id: u64, pending: PendingOverflows) -> Result<(), Errno> {
        let active = self.deactivate(id)?;
        let event = self.map.get_mut(id).ok_or(Errno::ENOENT)?;
        let stopped = event.stop(&mut self.core.cpu);
        if active && event.is_sampled_by_host() {
            match pending {
                PendingOverflows::Written => self.write_last(id),
                PendingOverflows::Discarded => {
                    event.counting.drain(self.core.cpu.index);
                    self.batch.forget(id);
                }
            }
        }
        self.publish(id, stopped)
    }

    /// Removes the hooks of an active event without stopping its counter. If the event is an exit trace,
    /// first writes the open exit to the trace. Returns whether hooks were removed.
    fn deactivate(&mut self, id: u64) -> Result<bool, Errno> {
        let event = self.map.get(id).ok_or(Errno::ENOENT)?;
        if event.active_on().is_none() {
            return Ok(false);
        }
        if event.spec.traces_exits() {
            self.cut(id);
        }
        let event = self.map.get(id).ok_or(Errno::ENOENT)?;
        if event.active_on().is_none() {
            // If recording the open exit failed, the event is in the error state.
            return Ok(false);
        }
        self.core.unhook(event);
        Ok(true)
    }

    /// Updates an event's counts, publishes them, and writes the event's pending records.
    pub(crate) fn update(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.map.get_mut(id).ok_or(Errno::ENOENT)?;
        let result = event.update(&mut self.core.cpu);
        self.publish(id, result)
    }

    /// Completes a change of an event: publishes its counts, and writes its pending records. If `result` is an error,
    /// for example because the host has revoked the counter, puts the event in the error state.
    pub(super) fn publish(&mut self, id: u64, result: io::Result<()>) -> Result<(), Errno> {
        if let Some(event) = self.map.get(id) {
            self.core.publish(event);
        }
        result.map_err(|error| self.fail(id, error))
    }

    /// Puts an event in the error state, and returns the errno. If the event was not in the error state before, also
    /// reports the error to the driver, and stops the members that the event leads.
    pub(super) fn fail(&mut self, id: u64, error: io::Error) -> Errno {
        // The event may be inactive, or closed.
        let _ = self.deactivate(id);
        let errno = Errno::from_raw(&error);
        if let Some(event) = self.map.get_mut(id)
            && self.core.fail(event, &error)
        {
            self.each_member(id, Self::stop, Errand::Stop);
        }
        errno
    }

    /// Calls `act` for each member of the group that `leader` leads. If a member is in another shard, defers the work
    /// as an errand instead. If `act` fails for a member, the member enters the error state.
    pub(super) fn each_member(
        &mut self,
        leader: u64,
        act: impl Fn(&mut Self, u64) -> Result<(), Errno>,
        errand: impl Fn(u64) -> Errand,
    ) {
        let event = self.map.get(leader).filter(|event| event.membership.leads());
        let Some(group) = event.and_then(|event| event.membership.group().cloned()) else {
            return;
        };
        for id in group.members() {
            work::charge(1);
            if !self.map.contains(id) {
                self.core.defer(errand(id));
            } else if let Err(errno) = act(self, id) {
                log::debug!("event {id} cannot start or stop with its leader {leader}: errno {}", errno.get());
            }
        }
    }

    /// Resumes or pauses an active target after an overflow of its trigger.
    pub(crate) fn apply(&mut self, target: u64, effect: Effect) {
        let event = self.map.get(target);
        let Some(event) = event.filter(|event| event.active_on().is_some()) else {
            return;
        };
        let paused = match effect {
            Effect::Start => false,
            Effect::Stop => true,
            Effect::Toggle => !event.counting.is_paused(),
        };
        if event.counting.is_paused() != paused {
            self.set_paused(target, paused);
        }
    }

    /// Pauses or resumes an active event. Overflows from before a pause are still written.
    fn set_paused(&mut self, id: u64, paused: bool) {
        self.claim_exit();
        let Some(event) = self.map.get_mut(id) else {
            return;
        };
        let changed = self.core.change(event, |event, cpu| event.pause(cpu, paused));
        let sampled = paused && event.is_sampled_by_host() && event.active_on().is_some();
        self.core.metrics.counter_waits += u64::from(self.map.note_wait(id));
        if sampled {
            self.write_last(id);
        }
        // If the change failed, a notice reports that the event is in the error state.
        let _ = self.publish(id, changed);
    }

    /// Makes the batched engine or the exit engine take the samples of an event, which `change` records in the event.
    pub(super) fn change_engine(
        &mut self,
        id: u64,
        batched: bool,
        change: impl FnOnce(&mut Event),
    ) -> Result<(), Errno> {
        let event = self.map.get_mut(id).ok_or(Errno::ENOENT)?;
        let stopped = event.stop_counter(&mut self.core.cpu);
        if event.active_on().is_some() {
            // Take the overflows before the counter is closed. They happened before the command, so their records cause
            // wakeups as before.
            self.write_last(id);
        }
        // One of these overflows may have reached the event's limit, and stopped the event.
        let event = self.map.get_mut(id).ok_or(Errno::ENOENT)?;
        let changed = self.core.change(event, |event, cpu| {
            change(event);
            stopped.and_then(|()| event.change_engine(cpu, batched))
        });
        if batched && event.active_on().is_some() {
            self.batch.start_collecting(&self.core);
        }
        self.publish(id, changed)
    }

    /// Returns the current counts for a record of an event. A group is read only once for all records of an exit.
    pub(super) fn read(&mut self, id: u64) -> Counts {
        let keeps = self.overflows.is_running();
        let (counts, revoked) = self.counts.read(&mut self.core, &mut self.map, id, keeps);
        for (id, error) in revoked {
            self.fail(id, error);
        }
        counts
    }

    // Exits and marks.

    /// Counts a mark.
    pub(crate) fn mark(&mut self, value: u32, exit: &mut ExitView<'_>) {
        self.run_overflows(|events| {
            events.count_occurrence(exit, |kind| matches!(kind, Kind::Mark(mark) if mark.includes(value)));
        });
    }

    /// Handles an exit while events need exits.
    pub(crate) fn leave(&mut self, why: &Exit, exit: &mut ExitView<'_>) {
        // Exclude events of the batched engine. Overflows that happened while such an event was throttled may not have
        // been collected yet.
        self.unthrottle_all(false, None);
        if self.core.has(Hook::HostSamples) {
            self.sampler.begin_exit(&self.core, exit);
            self.account_samples();
        }
        // Look up the traces that record this exit before any overflow is applied. If an overflow at this exit pauses a
        // trace, the trace must still record this exit, as its last one.
        self.claim_exit();
        self.run_overflows(|events| {
            if events.core.has(Hook::Exits) {
                let counts = |exits: Reported| exits.includes(why.reason);
                events.count_occurrence(exit, |kind| kind.counted_exits().is_some_and(counts));
            }
            if events.core.has(Hook::HostSamples) {
                let own = |event: &Event| event.is_sampled_by_host() && !event.is_batched();
                let ids = events.map.watched(&events.core, own).into_iter();
                let overflows: u64 = ids.map(|id| events.take_overflows(id)).sum();
                let signalled = overflows > 0 && why.reason == ExitReason::Signal;
                events.core.metrics.overflow_exits += u64::from(signalled);
            }
        });
        if let Some(first) = self.sampler.take_first_overflow()
            && why.reason == ExitReason::Signal
        {
            self.core.cpu.vcpu.begin_sample(first);
        }
    }

    /// Charges the time of the last sample. Once the vCPU has no time left for samples, throttles all of the guest's
    /// events whose overflows cause exits.
    fn account_samples(&mut self) {
        let time = self.core.cpu.time();
        if !self.sampler.charge_time(&self.core, time) {
            return;
        }
        let ids = self.map.watched(&self.core, |event| event.takes_time() && !event.overflows.is_throttled());
        self.core.metrics.sampling_throttles += u64::from(!ids.is_empty());
        for id in ids {
            let Some(event) = self.map.get_mut(id) else {
                continue;
            };
            let rested = Sampler::rest(&mut self.core, event, time);
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.batch.start_collecting(&self.core);
            if let Err(error) = rested {
                self.fail(id, error);
            }
        }
    }

    /// Counts an exit or a mark in each event for whose kind `matches` returns true, and queues the overflows of the
    /// events whose period has elapsed.
    fn count_occurrence(&mut self, exit: &mut ExitView<'_>, matches: impl Fn(Kind) -> bool) {
        let Occurred { completed, revoked, blind } = count(&mut self.core, &mut self.map, exit, matches);
        for (id, error) in revoked {
            self.fail(id, error);
        }
        if !completed.is_empty() {
            // First write the overflows that the host recorded, because they happened earlier.
            self.flush_batched();
        }
        for Elapsed { event, of_trace, periods } in completed {
            let moment = exit.moment(&self.core);
            self.overflows.push(Overflows { event, of_trace, periods, moment });
        }
        for id in blind {
            self.fail(id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// Looks up, once for each exit, the traces that record the session's open exit.
    fn claim_exit(&mut self) {
        for id in self.exits.claim(&self.core, &self.map) {
            self.fail(id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// Ends the session's open exit, and writes the exit's packet to the traces that record it. If `cut` is true, the
    /// time at which the exit ended is unknown.
    pub(crate) fn end_exit(&mut self, cut: bool) {
        self.claim_exit();
        self.exits.end(&mut self.core, &mut self.map, cut);
    }

    /// Writes the open exit, up to this moment, to a trace that stops or that loses its ring or area.
    pub(crate) fn cut(&mut self, id: u64) {
        self.claim_exit();
        if let Some(event) = self.map.get_mut(id) {
            self.exits.cut(&mut self.core, event);
        }
    }

    // Overflows.

    /// Calls `find`, then applies all overflows in the order in which they were found. Overflows found while others
    /// are being applied go to the end of the queue, so a chain of events that trigger one another does not become a
    /// chain of nested calls.
    fn run_overflows(&mut self, find: impl FnOnce(&mut Self)) {
        let outermost = self.overflows.begin();
        find(self);
        if !outermost {
            return;
        }
        // Discard group counts that were read before all events had counted the exit.
        self.counts.clear();
        while let Some(Overflows { event, of_trace, mut periods, moment }) = self.overflows.next() {
            if of_trace {
                self.trace_sample(event, periods, &moment);
            } else {
                periods.all(|period| self.overflow(event, period, &moment));
            }
        }
        self.overflows.end();
        self.counts.clear();
    }

    /// Takes the overflows of one host counter of the exit engine, and queues them with the moment of the current exit.
    /// Returns the number of overflows.
    fn take_overflows(&mut self, id: u64) -> u64 {
        let Some(event) = self.map.get_mut(id) else {
            return 0;
        };
        let of_trace = event.spec.is_trace();
        let taken = self.sampler.take(&self.core, event);
        let overflows = taken.samples.len() as u64;
        if overflows > 0 {
            // First write the overflows that the host recorded, because they happened earlier.
            self.flush_batched();
            let periods = Periods::Each(taken.samples.into_iter());
            let moment = self.sampler.moment(&self.core);
            self.overflows.push(Overflows { event: id, of_trace, periods, moment });
        }
        if taken.lost > 0
            && let Some(event) = self.map.get_mut(id)
        {
            self.core.lose(event, taken.lost);
        }
        overflows
    }

    /// Writes the overflows that the host holds for an event whose counter has just stopped.
    fn write_last(&mut self, id: u64) {
        if let Some(event) = self.map.get_mut(id).filter(|event| event.is_batched()) {
            self.batch.take(&mut self.core, event);
            self.write_until(self.core.cpu.backend.source.tsc());
        } else {
            // The guest has not run since the exit, so overflows found now belong to that exit.
            self.run_overflows(|events| {
                events.take_overflows(id);
            });
        }
    }

    /// Writes the overflows that the host holds for an event whose vCPU is outside the guest.
    pub(crate) fn write_held(&mut self, id: u64) {
        if self.map.get(id).is_some_and(Event::may_hold) {
            self.run_overflows(|events| {
                events.take_overflows(id);
            });
        }
    }

    /// Handles one overflow of an event that writes records. `period` is the growth of the count since the previous
    /// overflow. If this is the last overflow that the event's overflow limit allows, disables the event. Returns
    /// whether the event is still enabled and not in the error state.
    fn overflow(&mut self, id: u64, period: u64, moment: &Moment) -> bool {
        let Some(event) = self.map.get_mut(id) else {
            return false;
        };
        self.core.metrics.samples_unnamed += u64::from(moment.is_unnamed(event));
        let event = if event.is_quiet() {
            event
        } else {
            self.trigger(id);
            self.unthrottle(id, Some(moment.time));
            let Some(event) = self.map.get_mut(id) else {
                return false;
            };
            event
        };
        let (verdict, silenced) = self.sampler.admit(&mut self.core, event, moment.time);
        let wakeups = self.core.writer.tally.wakeups;
        let (event, sample_id) = match verdict {
            Verdict::Throttled => {
                self.core.writer.tally.throttled += 1;
                return true;
            }
            Verdict::Exhausted => {
                self.core.writer.tally.throttled += 1;
                self.core.metrics.samples_over_budget += 1;
                let sample_id = moment.sample_id(event);
                (event, sample_id)
            }
            Verdict::Within | Verdict::Last => {
                let (event, counts) = if event.spec.request.layout.has(SAMPLE_READ) {
                    let counts = self.read(id);
                    let Some(event) = self.map.get_mut(id) else {
                        return false;
                    };
                    (event, counts)
                } else {
                    (event, Counts::default())
                };
                let sample_id = self.sampler.sample(&mut self.core, event, period, moment, &counts);
                (event, sample_id)
            }
        };
        if matches!(verdict, Verdict::Last | Verdict::Exhausted) {
            self.core.note(event, &sample_id, &Note::Throttle);
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.batch.start_collecting(&self.core);
        }
        if let Err(error) = silenced {
            self.fail(id, error);
            return false;
        }
        if verdict == Verdict::Exhausted || event.overflows.limit() == 0 {
            return true;
        }
        let woke = self.core.writer.tally.wakeups - wakeups;
        !self.reaches_limit(id, woke)
    }

    /// Starts, stops or toggles the targets of an event after that event has overflowed.
    fn trigger(&mut self, id: u64) {
        let Some(event) = self.map.get_mut(id).filter(|event| !event.effects.is_empty()) else {
            return;
        };
        let effects = std::mem::take(&mut event.effects);
        work::charge_examined(effects.len());
        for &(target, effect) in &effects {
            if self.map.contains(target) {
                self.apply(target, effect);
            } else {
                self.core.defer(Errand::Trigger(target, effect));
            }
        }
        if let Some(event) = self.map.get_mut(id) {
            event.effects = effects;
        }
    }

    /// Counts an overflow towards the overflow limit of its event. If the limit is reached, disables the event and
    /// notifies the driver. `woke` is the number of wakeups that the overflow caused. The notice replaces these
    /// wakeups. Returns whether the event was disabled.
    fn reaches_limit(&mut self, id: u64, woke: u64) -> bool {
        if !self.map.get_mut(id).is_some_and(Event::use_up_limit) {
            return false;
        }
        // If the event cannot be stopped, `halt` puts it in the error state and notifies the driver. Discard the
        // overflows that the host still holds, because they are beyond the limit.
        let _ = self.halt(id, PendingOverflows::Discarded);
        self.each_member(id, Self::stop, Errand::Stop);
        if let Some(event) = self.map.get(id) {
            let of = event.output.woken(event.spec.owner);
            let limit = NoticeChange::Limit { event: id, of, woke };
            self.core.writer.notice(limit);
        }
        true
    }

    /// Handles overflows of a sample trace that were found at one moment. There is one overflow for each of `periods`.
    /// Drops overflows that exceed the trace's rate limit, its overflow limit or the guest's budget. Writes a single
    /// packet for all remaining overflows.
    fn trace_sample(&mut self, id: u64, periods: impl Iterator<Item = u64>, moment: &Moment) {
        let Some(event) = self.map.get(id) else {
            return;
        };
        let (limit, sample_id) = (event.overflows.limit(), moment.sample_id(event));
        let (mut overflows, mut counted, mut last) = (0, 0_u64, false);
        let mut silenced = Ok(());
        for period in periods {
            if limit > 0 && overflows == limit {
                break;
            }
            let Some(event) = self.map.get_mut(id) else {
                return;
            };
            let event = if event.is_quiet() {
                event
            } else {
                self.trigger(id);
                self.unthrottle(id, Some(moment.time));
                let Some(event) = self.map.get_mut(id) else {
                    return;
                };
                event
            };
            let (verdict, result) = self.sampler.admit(&mut self.core, event, moment.time);
            silenced = silenced.and(result);
            if matches!(verdict, Verdict::Throttled | Verdict::Exhausted) {
                self.core.writer.tally.throttled += 1;
                self.core.metrics.samples_over_budget += u64::from(verdict == Verdict::Exhausted);
                last |= verdict == Verdict::Exhausted;
                continue;
            }
            overflows += 1;
            counted = counted.saturating_add(period);
            last |= verdict == Verdict::Last;
        }
        let wakeups = self.core.writer.tally.wakeups;
        let Some(event) = self.map.get_mut(id) else {
            return;
        };
        if overflows > 0 {
            write_packet(&mut self.core, event, &sample_id, moment, overflows, counted);
        }
        if event.counting.is_paused() {
            // Publish the packet now. The trace is paused, so no later write of this trace would publish the packet.
            self.core.flush(event);
        }
        if last {
            self.core.note(event, &sample_id, &Note::Throttle);
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.batch.start_collecting(&self.core);
        }
        if let Err(error) = silenced {
            self.fail(id, error);
            return;
        }
        let woke = self.core.writer.tally.wakeups - wakeups;
        for _ in 0..overflows {
            if self.reaches_limit(id, woke) {
                break;
            }
        }
    }

    // Throttles.

    /// Lifts an event's throttle if the window of guest time in which the throttle began has ended at `time` (now if
    /// `None`), and the vCPU has time left for samples.
    pub(super) fn unthrottle(&mut self, id: u64, time: Option<u64>) {
        let Some(event) = self.map.get_mut(id).filter(|event| event.overflows.is_throttled()) else {
            return;
        };
        let time = time.unwrap_or_else(|| self.core.cpu.time());
        if let Err(error) = self.sampler.unthrottle(&mut self.core, event, time) {
            self.fail(id, error);
        }
    }

    /// Lifts the throttles of the events of the batched engine if `batched` is true, or of all other events if it is
    /// false. `at` is a time in guest nanoseconds; `None` means now.
    fn unthrottle_all(&mut self, batched: bool, at: Option<u64>) {
        if !self.core.has(Hook::Throttled) {
            return;
        }
        for id in self.map.watched(&self.core, |event| event.overflows.is_throttled() && event.is_batched() == batched)
        {
            self.unthrottle(id, at);
        }
    }

    // The batched engine.

    /// Collects the host's records while the vCPU runs.
    pub(crate) fn collect(&mut self) {
        if !self.batch.is_collecting() {
            return;
        }
        let backend = Arc::clone(&self.core.cpu.backend);
        let hold_back = HOLD_BACK * u64::from(backend.settings.tsc_khz);
        let until = backend.source.tsc().saturating_sub(hold_back);
        self.take_all_recorded();
        self.write_until(until);
        if self.core.has(Hook::Throttled) {
            self.unthrottle_all(false, None);
            // All records up to `until` are written. Therefore, each window of guest time that ended before `until` is
            // complete.
            let time = backend.clock.nanoseconds(self.core.cpu.vcpu.to_guest(until));
            self.unthrottle_all(true, Some(time));
        }
        self.rest_if_idle();
    }

    /// Ends periodic draining if no active event uses the batched engine, no event is throttled, and all collected
    /// overflows are written.
    pub(super) fn rest_if_idle(&mut self) {
        let busy = self.core.has(Hook::Collecting) || self.core.has(Hook::Throttled);
        self.batch.rest_if_idle(&self.core, busy);
    }

    /// Converts the records that the host has stored so far to samples. If the vCPU is outside the guest, the host
    /// has already stored all of the vCPU's records.
    pub(crate) fn flush_batched(&mut self) {
        if self.batch.is_collecting() {
            self.take_all_recorded();
            self.write_until(self.core.cpu.backend.source.tsc());
        }
    }

    /// Takes the records of every event of the batched engine.
    fn take_all_recorded(&mut self) {
        if !self.core.has(Hook::Collecting) {
            return;
        }
        for id in self.map.watched(&self.core, Event::is_batched) {
            if let Some(event) = self.map.get_mut(id) {
                self.batch.take(&mut self.core, event);
            }
            if self.batch.is_full() {
                self.write_until(self.core.cpu.backend.source.tsc());
            }
        }
    }

    /// Makes samples of the taken records, up to the host's TSC `until`.
    fn write_until(&mut self, until: u64) {
        let Some(mut due) = self.batch.begin(&self.core, &self.map, until) else {
            return;
        };
        while let Some((recorded, moment)) = self.batch.next(&mut due, &mut self.core, &mut self.map, &mut self.sampler)
        {
            self.overflow(recorded.event, recorded.overflow.period, &moment);
        }
        self.batch.end(due);
    }
}
