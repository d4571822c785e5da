//! The contents of a shard's lock: the events of one vCPU, and the vCPU's queue. Commands come from that queue, and all
//! other calls from the control plane.

use std::sync::Arc;

use super::Errand;
use super::commands::has_no_operand;
use super::core::Core;
use super::events::Events;
use super::map::EventMap;
use super::writer::Writer;
use crate::abi::{COMMAND_IN, COMMAND_OUT, COMMAND_READ, Command, OPEN_INHERIT_STAT, Reply};
use crate::clock::Clock;
use crate::cpu::{Cpu, Lease};
use crate::errno::{Denied, Errno, status};
use crate::event::{Event, Group};
use crate::kind::Kind;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::notices::NoticeChange;
use crate::period::Period;
use crate::queues::{DeviceQueue, QueueState, SavedQueue};
use crate::ring::CountSnapshot;
use crate::source::Rate;
use crate::tasks::Tasks;

/// The state of an event at one moment, for the driver or the operator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) enabled: bool,
    pub(crate) rate: Option<Rate>,
    pub(crate) state: i32,
    pub(crate) counts: CountSnapshot,
    pub(crate) lost: u64,
}

/// The events of one vCPU, and the vCPU's queue.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) events: Events,
    pub(super) queue: DeviceQueue,
    /// Number of device resets. A session compares this number with its value at the start of a notification, to
    /// detect that a reset has removed the notified queue.
    resets: u64,
}

impl State {
    pub(super) fn new(cpu: Cpu, writer: Writer) -> Self {
        Self { events: Events::new(cpu, writer), queue: DeviceQueue::default(), resets: 0 }
    }

    /// Discards the readings that were cached while the shard was last locked. Must be called after locking the shard.
    pub(super) fn begin(&mut self) {
        self.core_mut().cpu.invalidate();
    }

    /// Must be called before the shard is unlocked. Returns the work that was deferred to other shards.
    pub(super) fn finish(&mut self) -> Vec<Errand> {
        self.events.finish()
    }

    pub(crate) fn core(&self) -> &Core {
        self.events.core()
    }

    pub(super) fn core_mut(&mut self) -> &mut Core {
        self.events.parts().0
    }

    fn map_mut(&mut self) -> &mut EventMap {
        self.events.parts().1
    }

    /// The event with this id, if it is in this shard.
    pub(crate) fn event(&self, id: u64) -> Option<&Event> {
        self.events.map().get(id)
    }

    /// Calls `act` on an event, if it is in this shard. Only for changes that affect no other event, and that change
    /// neither the event's state nor, outside [`Core`], its hooks.
    pub(crate) fn with<T>(&mut self, id: u64, act: impl FnOnce(&mut Core, &mut Event) -> T) -> Option<T> {
        let (core, map) = self.events.parts();
        map.get_mut(id).map(|event| act(core, event))
    }

    // The device's life.

    pub(super) fn resets(&self) -> u64 {
        self.resets
    }

    /// The current state of the vCPU's queue.
    pub(crate) fn queue_state(&self) -> QueueState {
        self.queue.state()
    }

    /// Activates the shard for a driver. `memory` is the guest's RAM, and `queue` is the driver's queue for this vCPU.
    pub(crate) fn activate(&mut self, memory: Memory, queue: DeviceQueue) {
        self.core_mut().guest.set_memory(memory);
        self.queue = queue;
    }

    /// Resets the shard. Closes every event except those that `outlives` selects, and drops the driver's memory and
    /// queue. Writes nothing to guest memory.
    pub(crate) fn reset(&mut self, outlives: impl Fn(u64) -> bool) {
        self.events.reset(outlives);
        self.resets += 1;
        self.activate(Memory::default(), DeviceQueue::default());
        self.events.rest_if_idle();
    }

    /// Sets the vCPU's task page.
    pub(crate) fn set_tasks(&mut self, tasks: Tasks) {
        self.core_mut().guest.set_tasks(tasks);
    }

    /// Updates all events and writes their overflows to their rings. The caller must keep the vCPU out of the guest
    /// until the state is saved. Traces record the current exit of the vCPU up to this moment.
    pub(crate) fn quiesce(&mut self) {
        self.events.flush_batched();
        self.events.end_exit(true);
        for id in self.events.map().ids(|_| true) {
            self.events.write_held(id);
            // An event whose counter the host revoked enters the error state, and is saved in that state.
            let _ = self.events.update(id);
        }
    }

    /// The address of the vCPU's task page, and the positions of the vCPU's queue.
    pub(crate) fn save_driver(&self) -> (Option<u64>, Option<SavedQueue>) {
        let page = self.core().guest.tasks().page();
        (page.map(|page| page.0), self.queue.save())
    }

    /// Restores the positions of the vCPU's queue.
    pub(crate) fn restore_queue(&mut self, saved: &SavedQueue) {
        self.queue.restore(saved);
    }

    /// Adds this shard's metrics to the metrics of the device.
    pub(crate) fn add_to(&self, metrics: &mut Metrics) {
        let core = self.core();
        let (own, tally) = (&core.metrics, &core.writer.tally);
        metrics.commands += own.commands;
        metrics.bad_requests += own.bad_requests;
        metrics.host_overflows += own.host_overflows;
        metrics.host_throttles += own.host_throttles;
        metrics.samples_unnamed += own.samples_unnamed;
        metrics.samples_over_budget += own.samples_over_budget;
        metrics.counter_waits += own.counter_waits;
        metrics.sampling_time += self.events.sampling_time();
        metrics.sampling_throttles += own.sampling_throttles;
        metrics.overflow_exits += own.overflow_exits;
        metrics.samples_written += tally.written;
        metrics.samples_lost = metrics.samples_lost.saturating_add(tally.lost);
        metrics.samples_throttled += tally.throttled;
        metrics.wakeups += tally.wakeups;
        metrics.aux_written += tally.aux_written;
        metrics.aux_lost = metrics.aux_lost.saturating_add(tally.aux_lost);
        metrics.aux_records += tally.aux_records;
    }

    // The vCPU's thread.

    /// Attaches `thread` to the vCPU, with guest TSC = host TSC + `tsc_offset`. Events keep their counts from an
    /// earlier thread, and continue on this thread.
    pub(crate) fn attach(&mut self, thread: i32, tsc_offset: u64) {
        self.events.flush_batched();
        for id in self.events.map().ids(|event| event.active_on().is_some()) {
            // An event that cannot be stopped enters the error state.
            let _ = self.events.stop(id);
        }
        let (core, map) = self.events.parts();
        let cpu = &mut core.cpu;
        let vcpu = cpu.index;
        cpu.release_own();
        map.forget_thread(vcpu);
        cpu.drop_counters();
        cpu.vcpu.attach(thread, tsc_offset);
        // The cached time uses the previous offset.
        cpu.invalidate();
        for id in self.events.map().ids(|event| event.schedule.on() == Some(vcpu)) {
            if let Err(errno) = self.events.start(id) {
                let errno = errno.get();
                log::debug!("event {id} cannot start on the thread of vCPU {vcpu}: errno {errno}");
            }
        }
    }

    /// Ends the open exit, and detaches the vCPU's thread, which will not enter the guest again.
    pub(crate) fn detach(&mut self) {
        self.events.end_exit(true);
        let cpu = &mut self.core_mut().cpu;
        cpu.release_own();
        cpu.vcpu.detach();
    }

    /// Drops the counters that events have on the previous thread of `vcpu`.
    pub(crate) fn forget_thread(&mut self, vcpu: u32) {
        self.map_mut().forget_thread(vcpu);
    }

    // Opening and closing of events.

    /// Adds an event, opens its host counter, and starts the event if it is enabled. For an operator's event
    /// on a vCPU without a thread, the counter is opened when a thread attaches.
    ///
    /// # Errors
    /// The host's error, with the host's reason if it refused a counter; the event is then not added.
    pub(crate) fn open(&mut self, event: Event) -> Result<(), Denied> {
        let opened = self.try_open(event);
        opened.map_err(|errno| Denied { errno, refusal: self.core_mut().cpu.take_refusal() })
    }

    fn try_open(&mut self, mut event: Event) -> Result<(), Errno> {
        let id = event.spec.id;
        let (core, map) = self.events.parts();
        core.cpu.take_refusal();
        if !event.is_operators() || core.cpu.thread().is_some() {
            event.prepare(&mut core.cpu)?;
        }
        map.insert(event);
        let started = self.events.start(id);
        if started.is_err() {
            let (core, map) = self.events.parts();
            map.remove(id);
            core.writer.notice(NoticeChange::Forget(id));
        }
        started
    }

    /// Removes and returns a task event that is not placed on a vCPU, for another shard to receive.
    pub(crate) fn give(&mut self, id: u64) -> Option<Event> {
        let stays = self.event(id)?.schedule.on().is_some();
        if stays { None } else { self.map_mut().remove(id) }
    }

    /// Adds an event from another shard.
    pub(crate) fn receive(&mut self, event: Event) {
        self.map_mut().insert(event);
    }

    /// Releases this vCPU's shared counter, which an event of another shard used.
    pub(crate) fn release(&mut self, lease: Lease) {
        self.core_mut().cpu.release(lease);
    }

    /// Stops an event, writes its pending records, and removes it.
    pub(crate) fn end(&mut self, id: u64) {
        // If the event cannot be stopped, it enters the error state, and is removed anyway.
        let _ = self.events.stop(id);
        let tells = |event: &Event| event.spec.is_child() && event.spec.has(OPEN_INHERIT_STAT);
        let counts = self.event(id).is_some_and(tells).then(|| self.events.read(id));
        let (core, map) = self.events.parts();
        let Some(mut event) = map.remove(id) else {
            return;
        };
        if let Some(counts) = counts {
            core.note_counts(&event, &counts);
        }
        core.flush(&event);
        core.writer.notice(NoticeChange::Forget(id));
        // The driver may have granted space to the event, in an area that the driver manages. End this grant, so that
        // the driver can grant space to other events of the same family.
        let _ = event.output.sink.as_ref().map(|sink| sink.finish(id));
        core.release(event.counting.take_counters());
    }

    /// Moves an event into a group or out of it.
    pub(crate) fn join(&mut self, id: u64, group: Option<Arc<Group>>) {
        let leaves = group.is_none();
        self.with(id, |_, event| event.join(group));
        if leaves && let Err(errno) = self.events.start(id) {
            log::debug!("event {id} cannot start after it left its group: errno {}", errno.get());
        }
    }

    // Commands.

    /// Sets an event's count to zero.
    pub(super) fn reset_count(&mut self, id: u64) -> Result<(), Errno> {
        let reset = self.with(id, |core, event| event.reset(&mut core.cpu));
        self.events.publish(id, reset.ok_or(Errno::ENOENT)?)
    }

    /// Sets the period or the frequency of a sampling event.
    pub(super) fn set_period(&mut self, id: u64, asked: u64) -> Result<(), Errno> {
        let (core, map) = self.events.parts();
        let event = map.get_mut(id).ok_or(Errno::ENOENT)?;
        let period = event.overflows.period().ok_or(Errno::EINVAL)?;
        let highest = u64::from(core.cpu.backend.settings.limits.max_sample_rate);
        let period = match period.rate() {
            Rate::Frequency(_) if (1..=highest).contains(&asked) => Period::frequency(asked),
            // perf does not accept a period whose top bit is set.
            Rate::Period(_) if asked >> 63 == 0 && asked >= event.spec.shortest_period => Period::new(asked),
            _ => return Err(Errno::EINVAL),
        };
        let changed = event.set_period(period, core.cpu.backend.run_limit());
        if event.counting.is_waiting() {
            // If the new rate is lower, it may fit within the limit on the total rate.
            core.cpu.look_again();
        }
        core.flush(event);
        match changed {
            // The host refuses a rate above its own limit, which can be lower than the operator's limit. The event
            // then keeps its previous rate.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Errno::EINVAL),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Err(Errno::ENOSPC),
            result => result.map_err(|error| self.events.fail(id, error)),
        }
    }

    /// Enables an event. If it leads a group, also starts the enabled members.
    pub(crate) fn enable(&mut self, id: u64) -> Result<(), Errno> {
        let enabled = self.with(id, |_, event| {
            let was_enabled = event.set_enabled(true);
            if !was_enabled {
                event.sync();
            }
        });
        enabled.ok_or(Errno::ENOENT)?;
        let started = self.events.start(id);
        self.events.each_member(id, Events::start, Errand::Start);
        started
    }

    /// Disables an event. If it leads a group, also stops the members.
    pub(super) fn disable(&mut self, id: u64) -> Result<(), Errno> {
        let disabled = self.with(id, |_, event| event.set_enabled(false));
        disabled.ok_or(Errno::ENOENT)?;
        let stopped = self.events.stop(id);
        self.events.each_member(id, Events::stop, Errand::Stop);
        stopped
    }

    /// Adds `overflows` to the event's overflow limit, and enables the event.
    pub(super) fn enable_for(&mut self, id: u64, overflows: u64) -> Result<(), Errno> {
        let event = self.map_mut().get_mut(id).ok_or(Errno::ENOENT)?;
        if overflows == 0 || event.overflows.period().is_none() {
            return Err(Errno::EINVAL);
        }
        event.overflows.add_to_limit(overflows);
        self.enable(id)
    }

    /// Schedules a task event in on this vCPU.
    pub(super) fn schedule_in(&mut self, id: u64) -> Result<(), Errno> {
        let placed = self.with(id, |core, event| event.schedule.schedule_in(core.cpu.index, core.guest.running()));
        if placed.ok_or(Errno::ENOENT)? { self.events.start(id) } else { Err(Errno::EINVAL) }
    }

    /// Schedules a task event out from this vCPU.
    pub(super) fn schedule_out(&mut self, id: u64) -> Result<(), Errno> {
        let displaced = self.with(id, |_, event| event.schedule.schedule_out());
        displaced.ok_or(Errno::ENOENT)?;
        self.events.stop(id)
    }

    /// The fast path of a task switch, for plain events ([`Event::is_plain`]). Schedules the event in or out, or reads
    /// it. Returns `None` if the caller must use the general path.
    pub(super) fn switch_plain(&mut self, command: &Command) -> Option<Reply> {
        let op = command.op.get();
        if !matches!(op, COMMAND_IN | COMMAND_OUT | COMMAND_READ) || !has_no_operand(command) {
            return None;
        }
        let id = command.event.get();
        let (core, map) = self.events.parts();
        let event = map.get_mut(id).filter(|event| event.is_plain())?;
        let cpu = &mut core.cpu;
        let counted = match op {
            COMMAND_READ => event.update(cpu),
            COMMAND_OUT if event.schedule.is_in_on(cpu.index) => {
                event.schedule.schedule_out();
                event.stop(cpu)
            }
            COMMAND_IN if event.schedule.schedule_in(cpu.index, core.guest.running()) => {
                let starts = event.is_enabled() && event.membership.is_led_on() && cpu.thread().is_some();
                if starts { event.start(cpu) } else { Ok(()) }
            }
            _ => return None,
        };
        if let Err(error) = counted {
            let errno = self.events.fail(id, error);
            return Some(self.reply(id, Err(errno)));
        }
        Some(reply(event, cpu.backend.clock, 0))
    }

    /// Returns the reply to a command for an event, which contains the event's current state.
    pub(super) fn reply(&self, id: u64, result: Result<(), Errno>) -> Reply {
        let status = status(&result);
        match self.event(id) {
            Some(event) => reply(event, self.core().cpu.backend.clock, status),
            None => Reply { status: status.into(), ..Reply::default() },
        }
    }

    /// Makes each sample of an event cause a wakeup, or restores the family's wakeup interval. While each sample causes
    /// a wakeup, the exit engine takes the samples of an event that was opened with the batched engine, unless the
    /// operator requires the batched engine.
    pub(crate) fn set_prompt(&mut self, id: u64, prompt: bool) -> Result<(), Errno> {
        let (core, map) = self.events.parts();
        let event = map.get_mut(id).ok_or(Errno::ENOENT)?;
        if event.overflows.period().is_none() || event.spec.is_trace() {
            return Err(Errno::EINVAL);
        }
        if event.output.wakeups.prompt == prompt {
            return Ok(());
        }
        let batched = event.would_batch(prompt, core.cpu.backend.settings.engines);
        if batched == event.is_batched() {
            event.output.wakeups.prompt = prompt;
            return Ok(());
        }
        self.events.change_engine(id, batched, |event| event.output.wakeups.prompt = prompt)
    }

    /// Makes an event that outlives its driver forget the driver's requests for notices and wakeups.
    pub(crate) fn forget_requests(&mut self, id: u64) {
        self.with(id, |_, event| event.output.wakeups.own_notices = false);
        // If the host refuses the event's counter, the event is in the error state, which the next driver can see.
        // Events that do not sample are not prompt.
        let _ = self.set_prompt(id, false);
    }

    /// Stops an event because its leader, on another vCPU, was disabled. Does nothing if the leader has been enabled
    /// again, or if the event has left the leader's group.
    pub(crate) fn stop_led(&mut self, id: u64) -> Result<(), Errno> {
        if self.event(id).is_some_and(|event| event.membership.is_led_on()) { Ok(()) } else { self.events.stop(id) }
    }

    /// Returns the traces of a producer in the VMM that are active on `vcpu` and not paused.
    pub(crate) fn produced_for(&self, producer: u64, vcpu: u32) -> Vec<u64> {
        self.events.map().ids(|event| {
            event.spec.kind == Kind::VmmTrace(producer)
                && event.active_on() == Some(vcpu)
                && !event.counting.is_paused()
        })
    }

    // Views and flushes.

    /// The current state of an event.
    pub(crate) fn view(&mut self, id: u64) -> Option<View> {
        // An event whose counter the host revoked is in the error state. The view shows that state.
        let _ = self.events.update(id);
        self.glance(id)
    }

    /// The state of an event at its last update.
    pub(crate) fn glance(&self, id: u64) -> Option<View> {
        let event = self.event(id)?;
        Some(View {
            enabled: event.is_enabled(),
            rate: event.overflows.period().map(Period::rate),
            state: event.state(),
            counts: event.counts(self.core().cpu.backend.clock),
            lost: event.lost(),
        })
    }

    /// Flushes an event for a command from the vCPU `by`. If `id` is zero, flushes every persistent event placed on
    /// that vCPU.
    pub(super) fn flush_command(&mut self, id: u64, by: u32) -> Result<(), Errno> {
        let ids = if id == 0 {
            self.events.map().ids(|event| event.persistent.is_some() && event.schedule.on() == Some(by))
        } else {
            let event = self.event(id).ok_or(Errno::ENOENT)?;
            if event.active_on().is_some_and(|on| on != by) {
                // The event is active on another vCPU, and its overflows can be found only while that vCPU is
                // outside the guest.
                return Err(Errno::EXDEV);
            }
            vec![id]
        };
        let mut flushed = Ok(());
        for id in ids {
            self.events.write_held(id);
            let published = self.publish_all(id);
            flushed = flushed.and(published);
        }
        flushed
    }

    /// Publishes an event's records and counts. Wakes the event's reader unless it has already been woken for all
    /// records.
    pub(crate) fn publish_all(&mut self, id: u64) -> Result<(), Errno> {
        let updated = self.events.update(id);
        let failed = self.with(id, |core, event| {
            core.flush_and_wake(event);
            event.has_failed()
        });
        if failed.ok_or(Errno::ENOENT)? { Err(Errno::EIO) } else { updated }
    }
}

/// Returns the reply to a command: the command's status, and the event's state after the command.
fn reply(event: &Event, clock: Clock, status: u32) -> Reply {
    let counts = event.counts(clock);
    Reply {
        status: status.into(),
        state: event.state().into(),
        value: counts.count.into(),
        time_enabled: counts.time_enabled.into(),
        time_running: counts.time_running.into(),
        lost: event.lost().into(),
    }
}
