//! The events of one vCPU, and the operations on them. The caller must hold the shard's lock. Commands come from
//! the vCPU's queue, exits and marks from the vCPU's session, and all other calls from the control plane.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::sync::Arc;

use super::Errand;
use super::commands::has_no_operand;
use super::hooks::HookCounts;
use super::merge::{Merge, Recorded as MergeEntry};
use super::moment::{ExitView, Moment, Overflows, Periods};
use super::waits::Waits;
use super::writer::{Note, Writer, context, woken};
use crate::abi::{
    COMMAND_IN, COMMAND_OUT, COMMAND_READ, Command, ExitPacket, KIND_EXITS, KIND_MARK, KIND_SAMPLE_TRACE,
    KIND_VMM_TRACE, MARK_ANY, OPEN_INHERIT_STAT, PACE_EXITS, PACKET_ALIGN, PACKET_CUT, PACKET_EXIT, PACKET_HARDWARE,
    PACKET_IP, PACKET_USER, Reply, SYNC_START, SamplePacket,
};
use crate::area::Refused;
use crate::clock::Clock;
use crate::cpu::{Cpu, Lease};
use crate::errno::{Denied, Errno, status};
use crate::event::{Event, Group, GroupEvent};
use crate::links::Effect;
use crate::machine::{Exit, ExitReason, GuestRegs};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::notices::NoticeChange;
use crate::pages::GuestPages;
use crate::period::Period;
use crate::producer::AuxError;
use crate::queues::{DeviceQueue, QueueState, SavedQueue};
use crate::record::{
    MODE_KERNEL, MODE_UNKNOWN, MODE_USER, Member, Reading, SAMPLE_CALLCHAIN, SAMPLE_IP, SAMPLE_READ, SAMPLE_REGS_INTR,
    SAMPLE_REGS_USER, SAMPLE_STACK_USER, SAMPLE_TID, Sample, SampleId,
};
use crate::ring::{CountSnapshot, Session, Wakeup};
use crate::sink::{Flush, Sink};
use crate::source::{HostExit, Mode, Overflows as HostOverflows, Rate, Recorded};
use crate::spec::{Context, EventSpec};
use crate::tasks::{Task, TaskHistory, Tasks};
use crate::throttle::{BudgetShare, SamplingTime, Verdict};
use crate::trace::{OpenExit, OverflowBatch, Packet};
use crate::unwind::{CpuContext, SampleCapture};
use crate::vcpu::{ExitStamp, Hook, exit_matches};
use crate::work;
use vpmu_perf::field::FORMAT_GROUP;

/// Milliseconds that a host may take to store a record in its ring. When records are collected while the vCPU
/// runs, records younger than this are held back, in case an older record arrives in another ring.
const HOLD_BACK: u64 = 1;
/// Start of the kernel's half of the address space. If the host recorded an overflow while the vCPU kept
/// running, the guest's mode is derived from the IP: kernel mode in this half, user mode below.
const KERNEL_HALF: u64 = 1 << 63;
/// If more overflows than this are held (about a megabyte), all of them are written before the next host ring
/// is read, even though that ring may contain older overflows. Without this limit, a guest could make its host hold
/// an unbounded number of overflows.
const MOST_HELD: usize = 16_384;
/// Fields of a sample that need the guest's registers.
const PLACES: u64 = SAMPLE_IP | SAMPLE_CALLCHAIN | SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR;

/// Hashes event ids. The device assigns ids in order, so a guest cannot force collisions.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

type Events = HashMap<u64, Event, BuildHasherDefault<IdHasher>>;

/// How to handle the overflows that the host still holds when an event stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PendingOverflows {
    Written,
    Discarded,
}

/// The number of the exit for which the traces were last looked up, and the traces that still have to record
/// that exit.
#[derive(Debug, Default)]
struct ClaimedExit {
    number: u64,
    traces: Vec<u64>,
}

/// Overflows that were found but have not been applied yet.
#[derive(Debug, Default)]
struct OverflowQueue {
    overflows: VecDeque<Overflows>,
    /// Whether a call of [`State::run_overflows`] is already in progress. That call will also apply overflows that are
    /// queued during the call.
    running: bool,
    /// The counts of groups, by leader, that were read for records of this exit. Later records of the exit use the same
    /// counts, because the time to read a group is proportional to the group's size.
    read: HashMap<u64, Arc<[Member]>, BuildHasherDefault<IdHasher>>,
}

/// The counts of an event or of its group at one moment. The leader's count is first.
#[derive(Debug, Default)]
struct Counts {
    time_enabled: u64,
    time_running: u64,
    members: Arc<[Member]>,
}

impl Counts {
    fn reading(&self) -> Reading<'_> {
        Reading { time_enabled: self.time_enabled, time_running: self.time_running, members: &self.members }
    }
}

/// The state of an event at one moment, for the driver or the operator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(crate) enabled: bool,
    pub(crate) rate: Option<Rate>,
    pub(crate) state: i32,
    pub(crate) counts: CountSnapshot,
    pub(crate) lost: u64,
}

/// The events of one vCPU, and the state needed to count, sample and trace them.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) cpu: Cpu,
    pub(super) writer: Writer,
    pub(super) hooks: HookCounts,
    pub(super) queue: DeviceQueue,
    /// Number of device resets. A session compares this number with its value at the start of a notification, to
    /// detect that a reset has removed the notified queue.
    pub(super) resets: u64,
    pub(super) metrics: Metrics,
    events: Events,
    overflows: OverflowQueue,
    /// The number of the last exit at which host counters were sampling, and the vCPU's state at that exit.
    sampled_exit: (u64, Option<CpuContext>),
    open_exit: ClaimedExit,
    /// Callchain, registers and stack of the sample under construction.
    capture: SampleCapture,
    /// Overflows that the host recorded and that must be written to rings.
    merge: Merge,
    /// Buffer for the overflows that are being written. It is kept so that its memory can be reused.
    batch: Vec<MergeEntry>,
    /// Whether periodic drains were requested from the machine.
    collecting: bool,
    errands: Vec<Errand>,
    /// Events whose counters wait for room.
    waits: Waits,
    /// The part of the guest's sampling budget that this shard has taken but not used yet.
    budget_share: BudgetShare,
    /// Time that the vCPU spent on samples of the guest's events.
    sampling: SamplingTime,
    /// The host's TSC at the earliest overflow of the guest's events that was found at this exit.
    first_overflow: Option<u64>,
}

impl State {
    pub(super) fn new(cpu: Cpu, writer: Writer) -> Self {
        Self {
            cpu,
            writer,
            hooks: HookCounts::default(),
            queue: DeviceQueue::default(),
            resets: 0,
            metrics: Metrics::default(),
            events: Events::default(),
            overflows: OverflowQueue::default(),
            sampled_exit: (0, None),
            open_exit: ClaimedExit::default(),
            capture: SampleCapture::default(),
            merge: Merge::default(),
            batch: Vec::new(),
            collecting: false,
            errands: Vec::new(),
            waits: Waits::default(),
            budget_share: BudgetShare::default(),
            sampling: SamplingTime::default(),
            first_overflow: None,
        }
    }

    /// Discards the readings that were cached while the shard was last locked. Must be called after locking the shard.
    pub(super) fn begin(&mut self) {
        self.cpu.invalidate();
    }

    /// Starts waiting counters if places were freed, and publishes the notices. Must be called before the shard is
    /// unlocked. Returns the work that was deferred to other shards.
    pub(super) fn finish(&mut self) -> Vec<Errand> {
        if !self.waits.is_empty() && self.cpu.take_freed() {
            self.end_waits();
        }
        self.cpu.release_own();
        self.writer.publish_notices();
        std::mem::take(&mut self.errands)
    }

    /// The current state of the vCPU's queue.
    pub(crate) fn queue_state(&self) -> QueueState {
        self.queue.state()
    }

    /// Activates the shard for a driver. `memory` is the guest's RAM, and `queue` is the driver's queue for this vCPU.
    pub(crate) fn activate(&mut self, memory: Memory, queue: DeviceQueue) {
        self.writer.set_guest(memory);
        self.queue = queue;
    }

    /// Sets the vCPU's task page.
    pub(crate) fn set_tasks(&mut self, tasks: Tasks) {
        self.writer.set_tasks(tasks);
    }

    /// Updates all events and writes their overflows to their rings. The caller must keep the vCPU out of the guest
    /// until the state is saved. Traces record the current exit of the vCPU up to this moment.
    pub(crate) fn quiesce(&mut self) {
        self.flush_batched();
        self.end_exit(true);
        for id in self.ids(|_| true) {
            self.write_held(id);
            // An event whose counter the host revoked enters the error state, and is saved in that state.
            let _ = self.update(id);
        }
    }

    /// The address of the vCPU's task page, and the positions of the vCPU's queue.
    pub(crate) fn save_driver(&self) -> (Option<u64>, Option<SavedQueue>) {
        let page = self.writer.tasks().page();
        (page.map(|page| page.0), self.queue.save())
    }

    /// Restores the positions of the vCPU's queue.
    pub(crate) fn restore_queue(&mut self, saved: &SavedQueue) {
        self.queue.restore(saved);
    }

    /// Writes an event's counts, as of its last update, to the metadata page of its own ring.
    pub(crate) fn update_page(&self, id: u64) {
        if let Some(event) = self.events.get(&id) {
            update_page(event, self.cpu.backend.clock);
        }
    }

    /// Adds this shard's metrics to the metrics of the device.
    pub(crate) fn add_to(&self, metrics: &mut Metrics) {
        let tally = &self.writer.tally;
        metrics.commands += self.metrics.commands;
        metrics.bad_requests += self.metrics.bad_requests;
        metrics.host_overflows += self.metrics.host_overflows;
        metrics.host_throttles += self.metrics.host_throttles;
        metrics.samples_unnamed += self.metrics.samples_unnamed;
        metrics.samples_over_budget += self.metrics.samples_over_budget;
        metrics.counter_waits += self.metrics.counter_waits;
        metrics.sampling_time += self.sampling.total();
        metrics.sampling_throttles += self.metrics.sampling_throttles;
        metrics.overflow_exits += self.metrics.overflow_exits;
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
        self.flush_batched();
        for id in self.ids(|event| event.active_on().is_some()) {
            // An event that cannot be stopped enters the error state.
            let _ = self.stop(id);
        }
        let vcpu = self.cpu.index;
        self.cpu.release_own();
        self.forget_thread(vcpu);
        self.cpu.drop_counters();
        self.cpu.vcpu.attach(thread, tsc_offset);
        // The cached time uses the previous offset.
        self.cpu.invalidate();
        for id in self.ids(|event| event.placed_on() == Some(vcpu)) {
            if let Err(errno) = self.start(id) {
                let errno = errno.get();
                log::debug!("event {id} cannot start on the thread of vCPU {vcpu}: errno {errno}");
            }
        }
    }

    /// Ends the open exit, and detaches the vCPU's thread, which will not enter the guest again.
    pub(crate) fn detach(&mut self) {
        self.end_exit(true);
        self.cpu.release_own();
        self.cpu.vcpu.detach();
    }

    /// Drops the counters that events have on the previous thread of `vcpu`.
    pub(crate) fn forget_thread(&mut self, vcpu: u32) {
        for event in self.events.values_mut() {
            event.forget_thread(vcpu);
        }
    }

    // Opening and closing of events.

    /// The event with this id, if it is in this shard.
    pub(crate) fn event(&self, id: u64) -> Option<&Event> {
        self.events.get(&id)
    }

    /// Like [`State::event`], but mutable. Only for changes that touch neither the event's state nor its hooks.
    pub(crate) fn event_mut(&mut self, id: u64) -> Option<&mut Event> {
        self.events.get_mut(&id)
    }

    /// Ids of the selected events, ascending.
    pub(crate) fn ids(&self, which: impl Fn(&Event) -> bool) -> Vec<u64> {
        work::charge_examined(self.events.len());
        let events = self.events.values().filter(|event| which(event));
        let mut ids: Vec<u64> = events.map(|event| event.spec.id).collect();
        ids.sort_unstable();
        ids
    }

    /// Adds an event, opens its host counter, and starts the event if it is enabled. For an operator's event
    /// on a vCPU without a thread, the counter is opened when a thread attaches.
    ///
    /// # Errors
    /// The host's error; the event is then not added.
    pub(crate) fn open(&mut self, mut event: Event) -> Result<(), Denied> {
        let id = event.spec.id;
        self.cpu.take_refusal();
        if !event.is_operators() || self.cpu.thread().is_some() {
            let prepared = event.prepare(&mut self.cpu);
            prepared.map_err(|error| self.deny(error.into()))?;
        }
        self.events.insert(id, event);
        let started = self.start(id);
        if started.is_err() {
            self.events.remove(&id);
            self.writer.notice(NoticeChange::Forget(id));
        }
        started.map_err(|errno| self.deny(errno))
    }

    /// The error for a failed open request. Includes the host's reason if the host refused a counter.
    fn deny(&mut self, errno: Errno) -> Denied {
        Denied { errno, refusal: self.cpu.take_refusal() }
    }

    /// Removes and returns a task event that is not placed on a vCPU, for another shard to receive.
    pub(crate) fn give(&mut self, id: u64) -> Option<Event> {
        let event = self.events.get(&id)?;
        match event.placed_on() {
            None => self.events.remove(&id),
            Some(_) => None,
        }
    }

    /// Adds an event from another shard.
    pub(crate) fn receive(&mut self, event: Event) {
        self.events.insert(event.spec.id, event);
    }

    /// Stops an event, writes its pending records, and removes it.
    pub(crate) fn end(&mut self, id: u64) {
        // If the event cannot be stopped, it enters the error state, and is removed anyway.
        let _ = self.stop(id);
        self.write_counts(id);
        self.flush(id);
        let Some(mut event) = self.events.remove(&id) else {
            return;
        };
        self.writer.notice(NoticeChange::Forget(id));
        // The driver may have granted space to the event, in an area that the driver manages. End this grant, so that
        // the driver can grant space to other events of the same family.
        let _ = event.sink.as_ref().map(|sink| sink.finish(id));
        let leases = event.take_counters();
        self.release(leases);
    }

    /// Resets the shard. Closes every event except those that `outlives` selects, and drops the driver's memory and
    /// queue. Writes nothing to guest memory.
    pub(crate) fn reset(&mut self, outlives: impl Fn(u64) -> bool) {
        for id in self.ids(|event| !outlives(event.spec.id)) {
            let Some(mut event) = self.events.remove(&id) else {
                continue;
            };
            if event.active_on().is_some() {
                self.hooks.remove(&event, &self.cpu.vcpu);
            }
            if event.is_batched() {
                self.merge.forget(id);
            }
            let leases = event.take_counters();
            self.release(leases);
        }
        if let Some((number, _)) = self.cpu.vcpu.open_exit().get() {
            self.open_exit.number = number;
        }
        self.open_exit.traces.clear();
        self.resets += 1;
        self.activate(Memory::default(), DeviceQueue::default());
        self.rest_if_idle();
    }

    /// Releases shared counters. Defers the release of another vCPU's counter as an errand.
    fn release(&mut self, leases: Vec<(u32, Lease)>) {
        for (vcpu, lease) in leases {
            if vcpu == self.cpu.index {
                self.cpu.release(lease);
            } else {
                self.errands.push(Errand::Release(vcpu, lease));
            }
        }
    }

    // Starting and stopping of events.

    /// Starts an event if it is enabled and placed on this vCPU. Does nothing while the vCPU has no thread, or while
    /// the event has a leader that is disabled or in the error state.
    pub(crate) fn start(&mut self, id: u64) -> Result<(), Errno> {
        self.unthrottle(id);
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if event.is_watched() {
            // The open exit began before this event starts, so this event must not record it. Therefore, look up now
            // which traces record this exit. The lookup can put a trace in the error state, and that trace can be this
            // event's leader.
            self.claim_exit();
        }
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        if event.placed_on() != Some(self.cpu.index) || !event.is_enabled() || event.active_on().is_some() {
            return Ok(());
        }
        if event.has_failed() {
            return Err(Errno::EIO);
        }
        if !event.is_led_on() || self.cpu.thread().is_none() {
            return Ok(());
        }
        if let Err(error) = event.start(&mut self.cpu) {
            return Err(self.fail(id, error));
        }
        self.hooks.add(event, &self.cpu.vcpu);
        let collects = event.is_batched() || event.is_throttled();
        let traces = event.spec.is_trace();
        update_page(event, self.cpu.backend.clock);
        self.note_wait(id);
        if collects {
            self.start_collecting();
        }
        if traces {
            self.announce(id);
        }
        Ok(())
    }

    /// Queues an event if it is now waiting for room.
    fn note_wait(&mut self, id: u64) {
        if self.events.get(&id).is_some_and(Event::is_waiting) {
            self.metrics.counter_waits += 1;
            let events = &self.events;
            let number = self.waits.begin(id, events.len(), |wait| {
                let event = events.get(&wait.event);
                event.is_some_and(|event| event.is_in_wait(wait.number))
            });
            if let Some(event) = self.events.get_mut(&id) {
                event.begin_wait(number);
            }
        }
    }

    /// Starts as many of the waiting counters as there is room for.
    fn end_waits(&mut self) {
        let mut lasting = Vec::new();
        for wait in self.waits.take() {
            let id = wait.event;
            let event = self.events.get_mut(&id);
            let Some(event) = event.filter(|event| event.is_in_wait(wait.number)) else {
                continue;
            };
            match event.stop_waiting(&mut self.cpu) {
                Ok(true) => lasting.push(wait),
                Ok(false) => {}
                Err(error) => {
                    self.fail(id, error);
                }
            }
        }
        self.waits.put_back(lasting.into_iter());
    }

    /// Stops an event, and writes its pending records.
    pub(crate) fn stop(&mut self, id: u64) -> Result<(), Errno> {
        self.halt(id, PendingOverflows::Written)
    }

    /// Stops an event. `pending` selects what to do with the overflows that the host still holds.
    fn halt(&mut self, id: u64, pending: PendingOverflows) -> Result<(), Errno> {
        let active = self.deactivate(id)?;
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let stopped = event.stop(&mut self.cpu);
        if active && event.is_sampled_by_host() {
            match pending {
                PendingOverflows::Written if event.is_batched() => self.flush_last_batch(id),
                // The guest has not run since the exit, so overflows found now belong to that exit.
                PendingOverflows::Written => self.run_overflows(|state| {
                    state.drain_overflows(id);
                }),
                PendingOverflows::Discarded => self.discard_recorded(id),
            }
        }
        self.publish(id, stopped)
    }

    /// Removes the hooks of an active event without stopping its counter. If the event is an exit trace,
    /// first writes the open exit to the trace. Returns whether hooks were removed.
    fn deactivate(&mut self, id: u64) -> Result<bool, Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if event.active_on().is_none() {
            return Ok(false);
        }
        if event.spec.traces_exits() {
            self.cut(id);
        }
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if event.active_on().is_none() {
            // If recording the open exit failed, the event is in the error state.
            return Ok(false);
        }
        self.hooks.remove(event, &self.cpu.vcpu);
        Ok(true)
    }

    /// Updates an event's counts, publishes them, and writes the event's pending records.
    pub(crate) fn update(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.update(&mut self.cpu);
        self.publish(id, result)
    }

    /// Sets an event's count to zero.
    pub(super) fn reset_count(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.reset(&mut self.cpu);
        self.publish(id, result)
    }

    /// Sets the period or the frequency of a sampling event.
    pub(super) fn set_period(&mut self, id: u64, asked: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let period = event.period.ok_or(Errno::EINVAL)?;
        let highest = u64::from(self.cpu.backend.settings.limits.max_sample_rate);
        let period = match period.rate() {
            Rate::Frequency(_) if (1..=highest).contains(&asked) => Period::frequency(asked),
            // perf does not accept a period whose top bit is set.
            Rate::Period(_) if asked >> 63 == 0 && asked >= event.spec.shortest_period => Period::new(asked),
            _ => return Err(Errno::EINVAL),
        };
        let changed = event.set_period(period, self.cpu.backend.run_limit());
        if event.is_waiting() {
            // If the new rate is lower, it may fit within the limit on the total rate.
            self.cpu.look_again();
        }
        self.flush(id);
        match changed {
            // The host refuses a rate above its own limit, which can be lower than the operator's limit. The event
            // then keeps its previous rate.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(Errno::EINVAL),
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => Err(Errno::ENOSPC),
            result => result.map_err(|error| self.fail(id, error)),
        }
    }

    /// Enables an event. If it leads a group, also starts the enabled members.
    pub(crate) fn enable(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let was_enabled = event.set_enabled(true);
        if let Some(trace) = event.trace.as_mut().filter(|_| !was_enabled) {
            trace.sync(SYNC_START);
        }
        let started = self.start(id);
        self.each_member(id, Self::start, Errand::Start);
        started
    }

    /// Disables an event. If it leads a group, also stops the members.
    pub(super) fn disable(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        event.set_enabled(false);
        let stopped = self.stop(id);
        self.each_member(id, Self::stop, Errand::Stop);
        stopped
    }

    /// Adds `overflows` to the event's overflow limit, and enables the event.
    pub(super) fn enable_for(&mut self, id: u64, overflows: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        if overflows == 0 || event.period.is_none() {
            return Err(Errno::EINVAL);
        }
        event.limit = event.limit.saturating_add(overflows);
        self.enable(id)
    }

    /// Schedules a task event in on this vCPU.
    pub(super) fn schedule_in(&mut self, id: u64) -> Result<(), Errno> {
        let vcpu = self.cpu.index;
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let Context::Task(None) = event.context else {
            return Err(Errno::EINVAL);
        };
        event.context = Context::Task(Some(vcpu));
        event.task = Some(self.writer.running());
        event.last_vcpu = vcpu;
        self.start(id)
    }

    /// Schedules a task event out from this vCPU.
    pub(super) fn schedule_out(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        event.context = Context::Task(None);
        self.stop(id)
    }

    /// Stops an event because its leader, on another vCPU, was disabled. Does nothing if the leader has been enabled
    /// again, or if the event has left the leader's group.
    pub(crate) fn stop_led(&mut self, id: u64) -> Result<(), Errno> {
        match self.events.get(&id).is_some_and(Event::is_led_on) {
            true => Ok(()),
            false => self.stop(id),
        }
    }

    /// Calls `act` for each member of the group that `leader` leads. If a member is in another shard, defers the work
    /// as an errand instead. If `act` fails for a member, the member enters the error state.
    fn each_member(
        &mut self,
        leader: u64,
        act: impl Fn(&mut Self, u64) -> Result<(), Errno>,
        errand: impl Fn(u64) -> Errand,
    ) {
        let event = self.events.get(&leader).filter(|event| event.leads());
        let Some(group) = event.and_then(|event| event.group.clone()) else {
            return;
        };
        for id in group.members() {
            work::charge(1);
            if !self.events.contains_key(&id) {
                self.errands.push(errand(id));
            } else if let Err(errno) = act(self, id) {
                log::debug!("event {id} cannot start or stop with its leader {leader}: errno {}", errno.get());
            }
        }
    }

    /// Moves an event into a group or out of it.
    pub(crate) fn join(&mut self, id: u64, group: Option<Arc<Group>>) {
        let leaves = group.is_none();
        if let Some(event) = self.events.get_mut(&id) {
            event.join(group);
        }
        if leaves && let Err(errno) = self.start(id) {
            log::debug!("event {id} cannot start after it left its group: errno {}", errno.get());
        }
    }

    /// Changes an event, and updates its hooks. The vCPU may read the hooks during the update, so hooks that
    /// the event needs before and after the change stay set throughout.
    fn with_hooks<T>(&mut self, id: u64, change: impl FnOnce(&mut Event, &mut Cpu) -> T) -> Option<T> {
        let event = self.events.get_mut(&id)?;
        let before = event.active_on().map(|_| event.hooks());
        let changed = change(event, &mut self.cpu);
        if let Some(before) = before {
            self.hooks.want(event.hooks(), &self.cpu.vcpu);
            self.hooks.drop(before, &self.cpu.vcpu);
        }
        Some(changed)
    }

    /// Completes a change of an event: publishes its counts, and writes its pending records. If `result` is an error,
    /// for example because the host has revoked the counter, puts the event in the error state.
    fn publish(&mut self, id: u64, result: io::Result<()>) -> Result<(), Errno> {
        if let Some(event) = self.events.get(&id) {
            event.publish_counts();
            if event.sink.is_some() {
                update_page(event, self.cpu.backend.clock);
                self.flush(id);
            }
        }
        result.map_err(|error| self.fail(id, error))
    }

    /// Puts an event in the error state, and returns the errno. If the event was not in the error state before, also
    /// reports the error to the driver, and stops the members that the event leads.
    fn fail(&mut self, id: u64, error: io::Error) -> Errno {
        // The event may be inactive, or closed.
        let _ = self.deactivate(id);
        self.flush(id);
        let errno = Errno::from_raw(&error);
        if let Some(event) = self.events.get_mut(&id)
            && !event.has_failed()
        {
            log::warn!("event {id} is in the error state: {error}");
            let leases = event.fail();
            self.release(leases);
            let refusal = self.cpu.take_refusal();
            self.writer.notice(NoticeChange::Fail(id, refusal));
            self.each_member(id, Self::stop, Errand::Stop);
        }
        errno
    }

    /// The current state of an event.
    pub(crate) fn view(&mut self, id: u64) -> Option<View> {
        // An event whose counter the host revoked is in the error state. The view shows that state.
        let _ = self.update(id);
        self.glance(id)
    }

    /// The state of an event at its last update.
    pub(crate) fn glance(&self, id: u64) -> Option<View> {
        let event = self.events.get(&id)?;
        Some(View {
            enabled: event.is_enabled(),
            rate: event.period.map(Period::rate),
            state: event.state(),
            counts: event.counts(self.cpu.backend.clock),
            lost: event.lost(),
        })
    }

    // Sinks.

    /// Redirects an event to `sink`, after publishing everything that it wrote to its previous sink.
    pub(crate) fn set_sink(&mut self, id: u64, sink: Option<Arc<Sink>>) {
        self.flush(id);
        self.with_hooks(id, |event, _| event.sink = sink);
    }

    /// Publishes everything that was written to the area of an event's sink, and removes the area. Also writes a record
    /// of the published data to the ring, if the record fits.
    pub(crate) fn close_area(&mut self, id: u64) {
        if let Some(event) = self.events.get(&id) {
            let sample_id = self.sample_id(event);
            let sink = event.sink.as_deref();
            self.writer.flush(sink, &event.spec, &sample_id, Flush::CloseArea);
        }
    }

    /// The sample id (task, vCPU, time and event) of a record that the event would write now.
    fn sample_id(&self, event: &Event) -> SampleId {
        let task = match event.context {
            Context::Vcpu(_) => self.writer.running(),
            // Unknown if its task has never run.
            Context::Task(_) => event.task.unwrap_or_default(),
        };
        SampleId {
            pid: task.pid,
            tid: task.tid,
            time: self.cpu.time(),
            id: event.spec.owner,
            stream_id: event.spec.id,
            vcpu: event.placed_on().unwrap_or(event.last_vcpu),
        }
    }

    /// Sets the wakeup interval of an event's records.
    pub(crate) fn set_wakeup(&mut self, id: u64, wakeup: Wakeup) {
        if let Some(event) = self.events.get_mut(&id) {
            event.spec.wakeup = wakeup;
        }
    }

    /// Sets whether the wakeups of an event's family have notices of their own. The caller must do the same for all
    /// events of the family.
    pub(crate) fn set_own_notices(&mut self, id: u64, own: bool) {
        if let Some(event) = self.events.get_mut(&id) {
            event.spec.own_notices = own;
        }
    }

    /// Makes each sample of an event cause a wakeup, or restores the family's wakeup interval. While each sample causes
    /// a wakeup, the exit engine takes the samples of an event that was opened with the batched engine, unless the
    /// operator requires the batched engine.
    pub(crate) fn set_prompt(&mut self, id: u64, prompt: bool) -> Result<(), Errno> {
        let engines = self.cpu.backend.settings.engines;
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        if event.period.is_none() || event.spec.is_trace() {
            return Err(Errno::EINVAL);
        }
        if event.spec.prompt == prompt {
            return Ok(());
        }
        let batched = event.would_batch(prompt, engines);
        if batched == event.is_batched() {
            event.spec.prompt = prompt;
            return Ok(());
        }
        let stopped = event.stop_counter(&mut self.cpu);
        if event.active_on().is_some() {
            // Take the overflows before the counter is closed. They happened before the command, so their records cause
            // wakeups as before.
            match batched {
                false => self.flush_last_batch(id),
                true => self.run_overflows(|state| {
                    state.drain_overflows(id);
                }),
            }
        }
        // One of these overflows may have reached the event's limit, and stopped the event.
        let changed = self.with_hooks(id, |event, cpu| {
            event.spec.prompt = prompt;
            stopped.and_then(|()| event.change_engine(cpu, batched))
        });
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if batched && event.active_on().is_some() {
            self.start_collecting();
        }
        self.publish(id, changed.unwrap_or(Ok(())))
    }

    /// Makes an event that outlives its driver forget the driver's requests for notices and wakeups.
    pub(crate) fn forget_requests(&mut self, id: u64) {
        self.set_own_notices(id, false);
        // If the host refuses the event's counter, the event is in the error state, which the next driver can see.
        // Events that do not sample are not prompt.
        let _ = self.set_prompt(id, false);
    }

    /// Begins a write to a trace by a producer in the VMM. The trace must be active and not paused. Returns the trace's
    /// sink.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn claim_aux(&mut self, id: u64, token: u64) -> Result<Arc<Sink>, AuxError> {
        let event = self.events.get(&id).ok_or(AuxError::NoEvent(id))?;
        if event.spec.kind != KIND_VMM_TRACE {
            return Err(AuxError::NoEvent(id));
        }
        if event.active_on().is_none() || event.is_paused() {
            return Err(AuxError::Inactive(id));
        }
        let sink = event.sink.clone().ok_or(AuxError::NoArea)?;
        let sample_id = self.sample_id(event);
        self.writer.claim(&sink, &event.spec, &sample_id, token)?;
        Ok(sink)
    }

    /// Ends the producer's write to `sink`, and publishes the first `size` bytes of that write.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn release_aux(&mut self, id: u64, sink: &Sink, token: u64, size: u64) -> Result<(), AuxError> {
        let event = self.events.get(&id).ok_or(AuxError::NoEvent(id))?;
        let sample_id = self.sample_id(event);
        let event = self.events.get_mut(&id).ok_or(AuxError::NoEvent(id))?;
        let trace = event.trace.as_mut().ok_or(AuxError::NoEvent(id))?;
        self.writer.release(sink, &event.spec, &sample_id, trace, token, size)?;
        Ok(())
    }

    /// Counts bytes that a producer in the VMM could not write.
    pub(crate) fn lose_aux(&mut self, id: u64, bytes: u64) {
        if let Some(event) = self.events.get_mut(&id)
            && let Some(trace) = &mut event.trace
        {
            let sink = event.sink.as_deref();
            self.writer.lose_packets(sink, trace, 0, bytes);
        }
    }

    /// Returns the traces of a producer in the VMM that are active on `vcpu` and not paused.
    pub(crate) fn produced_for(&self, producer: u64, vcpu: u32) -> Vec<u64> {
        self.ids(|event| {
            let traced = (event.spec.kind, event.spec.config) == (KIND_VMM_TRACE, producer);
            traced && event.active_on() == Some(vcpu) && !event.is_paused()
        })
    }

    /// Publishes what an event has written to its AUX area. Also writes the pending `PERF_RECORD_LOST` and
    /// `PERF_RECORD_AUX` to the event's ring, if they fit.
    pub(crate) fn flush(&mut self, id: u64) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        let sink = event.sink.as_ref();
        if sink.is_some_and(|sink| sink.owes(event.spec.is_trace())) {
            let sample_id = self.sample_id(event);
            self.writer.flush(event.sink.as_deref(), &event.spec, &sample_id, Flush::Owed);
        }
    }

    /// Writes `PERF_RECORD_ITRACE_START` to the ring of an active trace if the device manages an area for the trace.
    /// Writes the record only once.
    pub(crate) fn announce(&mut self, id: u64) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        let due = event.trace.as_ref().is_some_and(|trace| !trace.announced);
        if !due || event.active_on().is_none() {
            return;
        }
        let sample_id = self.sample_id(event);
        if let Some(event) = self.events.get_mut(&id)
            && let Some(trace) = &mut event.trace
        {
            let sink = event.sink.as_deref();
            self.writer.announce(sink, &event.spec, &sample_id, trace);
        }
    }

    /// Prepares a trace for its new area. Writes a sync packet at the start of the area. Also writes
    /// `PERF_RECORD_ITRACE_START` to the ring if the trace has not written that record before.
    pub(crate) fn begin_area(&mut self, id: u64) {
        if let Some(trace) = self.events.get_mut(&id).and_then(|event| event.trace.as_mut()) {
            trace.sync(SYNC_START);
        }
        self.announce(id);
    }

    /// Grants a trace `room` bytes, starting at `head`, in an area that the driver manages.
    pub(super) fn aux_begin(&mut self, id: u64, head: u64, room: u64) -> Result<(), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if !head.is_multiple_of(PACKET_ALIGN as u64) {
            return Err(Errno::EINVAL);
        }
        let sink = event.sink.as_deref().ok_or(Errno::EINVAL)?;
        let begun = sink.begin(id, head, room);
        begun.map_err(|_: Refused| Errno::EINVAL)
    }

    /// Withdraws the space granted to a trace. Returns the head that the trace reached, and the number of lost bytes.
    pub(super) fn aux_end(&mut self, id: u64) -> Result<(u64, u64), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let sink = event.sink.as_deref().ok_or(Errno::EINVAL)?;
        sink.finish(id).map_err(|_: Refused| Errno::EINVAL)
    }

    /// Writes `PERF_RECORD_READ` with the counts of an inherited event that is about to close, if the event was
    /// opened with `OPEN_INHERIT_STAT`.
    fn write_counts(&mut self, id: u64) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        if !event.spec.is_child() || !event.spec.has(OPEN_INHERIT_STAT) {
            return;
        }
        let sample_id = self.sample_id(event);
        let counts = self.counts(id);
        if let Some(event) = self.events.get(&id) {
            let note = Note::Read(counts.reading());
            self.writer.note(event.sink.as_deref(), &event.spec, &sample_id, &note);
        }
    }

    /// The current counts for a record of an event: the event's own counts or, if `read_format` requires it, the
    /// counts of its whole group. A group is read only once for all records of an exit.
    fn counts(&mut self, id: u64) -> Counts {
        let Some(event) = self.events.get(&id) else {
            return Counts::default();
        };
        let grouped = event.spec.layout.read_format & FORMAT_GROUP != 0;
        let (owner, group) = (event.spec.owner, event.group.clone());
        let members = match group.filter(|_| grouped) {
            Some(group) => self.read_group(&group),
            None => self.read_event(id, owner).into_iter().collect(),
        };
        let clock = self.cpu.backend.clock;
        let times = self.events.get(&id).map(|event| event.counts(clock));
        Counts {
            time_enabled: times.map_or(0, |times| times.time_enabled),
            time_running: times.map_or(0, |times| times.time_running),
            members,
        }
    }

    /// Returns the counts of a group. The leader's count is first. The counts of members in other shards are the counts
    /// at their last update.
    fn read_group(&mut self, group: &Group) -> Arc<[Member]> {
        if let Some(members) = self.overflows.read.get(&group.leader) {
            return Arc::clone(members);
        }
        let read = |event: &GroupEvent| {
            let elsewhere = || {
                work::charge(1);
                let (value, lost) = event.counts.get();
                let id = event.owner;
                Member { value, id, lost }
            };
            let here = self.read_event(event.id, event.owner);
            here.unwrap_or_else(elsewhere)
        };
        let members: Arc<[Member]> = group.events.iter().map(read).collect();
        if self.overflows.running {
            self.overflows.read.insert(group.leader, Arc::clone(&members));
        }
        members
    }

    /// Returns the current count of an event. `None` if the event is not in this shard.
    fn read_event(&mut self, id: u64, owner: u64) -> Option<Member> {
        let clock = self.cpu.backend.clock;
        let event = self.events.get_mut(&id)?;
        let updated = event.update(&mut self.cpu);
        let member = Member { value: event.counts(clock).count, id: owner, lost: event.lost() };
        if let Err(error) = updated {
            self.fail(id, error);
        }
        Some(member)
    }

    // Exits and marks.

    /// Counts a mark.
    pub(crate) fn mark(&mut self, value: u32, exit: &mut ExitView<'_>) {
        self.run_overflows(|state| {
            state.count_occurrence(exit, |spec| {
                spec.kind == KIND_MARK && [u64::from(value), MARK_ANY].contains(&spec.config)
            });
        });
    }

    /// Handles an exit while events need exits.
    pub(crate) fn leave(&mut self, why: &Exit, exit: &mut ExitView<'_>) {
        if self.hooks.has(Hook::Throttled) {
            // Exclude events of the batched engine. Overflows that happened while such an event was throttled may not
            // have been collected yet.
            for id in self.throttled(false) {
                self.unthrottle(id);
            }
        }
        if self.hooks.has(Hook::HostSamples) {
            // Keep the vCPU's state, because a command during this exit may stop an event and then find further
            // overflows that belong to the exit.
            let exits = self.cpu.vcpu.exits().total();
            self.sampled_exit = (exits, exit.place(self));
            self.account_samples();
        }
        // Look up the traces that record this exit before any overflow is applied. If an overflow at this exit pauses a
        // trace, the trace must still record this exit, as its last one.
        self.claim_exit();
        self.run_overflows(|state| {
            if state.hooks.has(Hook::Exits) {
                state.count_occurrence(exit, |spec| match (spec.kind, spec.config) {
                    (KIND_EXITS, config) => exit_matches(config, why.reason),
                    kind_and_pace => kind_and_pace == (KIND_SAMPLE_TRACE, PACE_EXITS),
                });
            }
            if state.hooks.has(Hook::HostSamples) {
                state.drain_all_overflows(why.reason);
            }
        });
        if let Some(first) = self.first_overflow.take()
            && why.reason == ExitReason::Signal
        {
            self.cpu.vcpu.begin_sample(first);
        }
    }

    /// Samples may use only a share of the vCPU's time. Charges the time of the last sample to that share, unless this
    /// sample has already been charged. Once the share is used up, throttles all of the guest's events whose overflows
    /// cause exits.
    fn account_samples(&mut self) {
        self.first_overflow = None;
        let backend = Arc::clone(&self.cpu.backend);
        let time = self.cpu.time();
        if let Some((spent, guest)) = self.cpu.vcpu.take_sample() {
            // `spent` is CPU time, but `guest` is elapsed time, which includes any time in which the host ran other
            // threads. The charge can therefore be too low, but never too high.
            let took = spent.saturating_sub(backend.clock.nanoseconds(guest));
            self.sampling.charge(backend.time_limit, time, took);
        }
        if !self.sampling.is_used_up(backend.time_limit, time) {
            return;
        }
        let goes = |id: &u64| {
            let event = self.events.get(id);
            event.is_some_and(|event| event.takes_time() && !event.is_throttled())
        };
        let watched = self.hooks.watched().iter().copied();
        let ids: Vec<u64> = watched.filter(goes).collect();
        self.metrics.sampling_throttles += u64::from(!ids.is_empty());
        for id in ids {
            let rested = self.with_hooks(id, |event, _| event.rest(backend.rate_limit, time));
            let sample_id = self.events.get(&id).map(|event| SampleId { time, ..self.sample_id(event) });
            if let Some(sample_id) = sample_id {
                self.note(id, &sample_id, &Note::Throttle);
            }
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.start_collecting();
            if let Some(Err(error)) = rested {
                self.fail(id, error);
            }
        }
    }

    /// Counts an exit or a mark in each event for whose spec `matches` returns true. First updates the counts of all
    /// of these events, so that a record of one event contains the new counts of the others. Then handles the overflows
    /// of the events whose period has elapsed.
    fn count_occurrence(&mut self, exit: &mut ExitView<'_>, matches: impl Fn(&EventSpec) -> bool) {
        let (mut grown, mut completed, mut blind) = (Vec::new(), Vec::new(), Vec::new());
        let clock = self.cpu.backend.clock;
        for &id in self.hooks.watched() {
            let Some(event) = self.events.get_mut(&id) else {
                continue;
            };
            if !event.is_kept() || event.is_paused() || !matches(&event.spec) {
                continue;
            }
            if event.spec.excludes_any() {
                match exit.regs() {
                    Some(regs) if event.spec.excludes(regs.user) => continue,
                    Some(_) => {}
                    None => {
                        blind.push(id);
                        continue;
                    }
                }
            }
            let cpu = &self.cpu;
            let done = event.count_one(|| clock.nanoseconds(exit.tsc(cpu)));
            completed.extend(done.map(|done| (id, done)));
            // The new count must be visible immediately to readers of the event's metadata page, and to other vCPUs
            // that read the event's group.
            let seen = event.is_shown() || event.group.is_some();
            grown.extend(seen.then_some(id));
        }
        for id in grown {
            self.show_now(id);
        }
        if !completed.is_empty() {
            // First write the overflows that the host recorded, because they happened earlier.
            self.flush_batched();
        }
        for (id, done) in completed {
            let periods = Periods::Equal { overflows: done.overflows, length: done.length };
            let moment = exit.moment(self);
            self.queue_overflows(id, periods, moment);
        }
        for id in blind {
            self.fail(id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// Updates and publishes an event's counts before the vCPU continues.
    fn show_now(&mut self, id: u64) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let updated = event.update(&mut self.cpu);
        update_page(event, self.cpu.backend.clock);
        if let Err(error) = updated {
            self.fail(id, error);
        }
    }

    // The open exit.

    /// Looks up, once for each exit, the active, unpaused traces that record the session's open exit. Called
    /// before a trace starts, stops, pauses or resumes, and when the exit ends.
    fn claim_exit(&mut self) {
        let Some((number, stamp)) = self.cpu.vcpu.open_exit().get() else {
            return;
        };
        if number == self.open_exit.number {
            return;
        }
        self.open_exit.number = number;
        self.open_exit.traces.clear();
        let mut blind = Vec::new();
        for &id in self.hooks.watched() {
            let Some(event) = self.events.get(&id) else {
                continue;
            };
            let spec = &event.spec;
            if !spec.traces_exits() || event.is_paused() || !exit_matches(spec.config, stamp.exit.reason) {
                continue;
            }
            match stamp.regs {
                Some(regs) if spec.excludes(regs.user) => {}
                None if spec.excludes_any() => blind.push(id),
                _ => self.open_exit.traces.push(id),
            }
        }
        for id in blind {
            self.fail(id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// Ends the session's open exit, and writes the exit's packet to the traces that record it. If `cut` is true, the
    /// time at which the exit ended is unknown.
    pub(crate) fn end_exit(&mut self, cut: bool) {
        self.claim_exit();
        if let Some((number, stamp)) = self.cpu.vcpu.open_exit().get()
            && number == self.open_exit.number
        {
            let mut traces = std::mem::take(&mut self.open_exit.traces);
            let now = self.cpu.time();
            for id in traces.drain(..) {
                self.write_open_exit(id, &stamp, now, cut);
            }
            // Reuse its memory for the next exit.
            self.open_exit.traces = traces;
        }
        self.cpu.vcpu.open_exit().withdraw();
    }

    /// Writes the open exit, up to this moment, to a trace that stops or that loses its ring or area.
    pub(crate) fn cut(&mut self, id: u64) {
        self.claim_exit();
        let Some((number, stamp)) = self.cpu.vcpu.open_exit().get() else {
            return;
        };
        if number != self.open_exit.number {
            return;
        }
        let traces = &mut self.open_exit.traces;
        let Some(at) = traces.iter().position(|&trace| trace == id) else {
            return;
        };
        traces.remove(at);
        let now = self.cpu.time();
        self.write_open_exit(id, &stamp, now, true);
    }

    /// Writes the packet of an exit that ended at `now`.
    fn write_open_exit(&mut self, id: u64, stamp: &ExitStamp, now: u64, cut: bool) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let task = event.task.unwrap_or_else(|| self.writer.running());
        let exit = OpenExit {
            exit: stamp.exit,
            vcpu: self.cpu.index,
            tsc: stamp.tsc,
            time: self.cpu.backend.clock.nanoseconds(stamp.tsc),
            regs: stamp.regs,
        };
        let sample_id = SampleId {
            pid: task.pid,
            tid: task.tid,
            time: exit.time,
            id: event.spec.owner,
            stream_id: event.spec.id,
            vcpu: exit.vcpu,
        };
        let packet = exit.packet(task, now, cut);
        let paused = event.is_paused();
        if let Some(trace) = &mut event.trace {
            let (sink, packet) = (event.sink.as_deref(), Packet::Exit(&packet));
            self.writer.produce(sink, &event.spec, &sample_id, exit.tsc, trace, packet);
        }
        if paused {
            // Publish the packet now. The trace is paused, so no later write of this trace would publish the packet.
            self.flush(id);
        }
    }

    // Overflows.

    /// Calls `find`, then applies all overflows in the order in which they were found. Overflows found while others
    /// are being applied go to the end of the queue, so a chain of events that trigger one another does not become a
    /// chain of nested calls.
    fn run_overflows(&mut self, find: impl FnOnce(&mut Self)) {
        let outermost = !std::mem::replace(&mut self.overflows.running, true);
        find(self);
        if !outermost {
            return;
        }
        // Discard group counts that were read before all events had counted the exit.
        self.overflows.read.clear();
        while let Some(found) = self.overflows.overflows.pop_front() {
            self.overflows_act(found);
        }
        self.overflows.running = false;
        self.overflows.read.clear();
    }

    /// Queues overflows, which the enclosing [`State::run_overflows`] then applies.
    fn queue_overflows(&mut self, event: u64, periods: Periods, moment: Moment) {
        self.overflows.overflows.push_back(Overflows { event, periods, moment });
    }

    /// Takes the overflows of one host counter, and queues them with the moment of the current exit. Returns the number
    /// of overflows.
    fn drain_overflows(&mut self, id: u64) -> u64 {
        let vcpu = self.cpu.index;
        let Some(event) = self.events.get_mut(&id) else {
            return 0;
        };
        let HostOverflows { samples, lost, .. } = event.drain(vcpu);
        let overflows = samples.len() as u64;
        work::charge_examined(samples.len());
        if let Some(first) = samples.first().filter(|_| event.takes_time()) {
            let first = self.first_overflow.map_or(first.tsc, |before| before.min(first.tsc));
            self.first_overflow = Some(first);
        }
        if overflows > 0 {
            // First write the overflows that the host recorded, because they happened earlier.
            self.flush_batched();
            let tsc = self.cpu.tsc();
            let moment = Moment {
                vcpu,
                tsc,
                time: self.cpu.backend.clock.nanoseconds(tsc),
                place: self.place_at_exit(),
                task: self.writer.running(),
                addr: 0,
            };
            self.queue_overflows(id, Periods::Each(samples.into_iter()), moment);
        }
        self.lose(id, lost);
        overflows
    }

    /// Takes the overflows of every active host counter of the exit engine.
    fn drain_all_overflows(&mut self, reason: ExitReason) {
        let sampled = |id: &u64| {
            let event = self.events.get(id);
            event.is_some_and(|event| event.is_sampled_by_host() && !event.is_batched())
        };
        let watched = self.hooks.watched().iter().copied();
        let ids: Vec<u64> = watched.filter(sampled).collect();
        let mut overflows = 0;
        for id in ids {
            overflows += self.drain_overflows(id);
        }
        if overflows > 0 && reason == ExitReason::Signal {
            self.metrics.overflow_exits += 1;
        }
    }

    /// The vCPU's state at the current exit. `None` if the state was not read, or if the vCPU has run since the exit.
    /// The vCPU may have run if the caller executes a command of another vCPU or a control request.
    fn place_at_exit(&self) -> Option<CpuContext> {
        let vcpu = &self.cpu.vcpu;
        let (exit, place) = self.sampled_exit;
        place.filter(|_| !vcpu.is_inside() && exit == vcpu.exits().total())
    }

    /// Applies overflows of an event. Starts and stops the events linked to it, and writes its records or its packet.
    fn overflows_act(&mut self, found: Overflows) {
        let Overflows { event: id, mut periods, moment } = found;
        let Some(event) = self.events.get(&id) else {
            return;
        };
        if event.spec.is_trace() {
            self.trace_sample(id, periods, &moment);
        } else {
            periods.all(|period| self.overflow(id, period, &moment));
        }
    }

    /// Decides whether the device writes a record for an overflow at `moment`. Returns `None` if the event does not
    /// exist. If this overflow uses up the event's rate limit, or if the guest's budget is used up, also disables
    /// overflows of the host counter, unless the event has a frequency. If disabling them fails, the second value of
    /// the result is the host's error.
    fn admit(&mut self, id: u64, moment: &Moment) -> Option<(Verdict, io::Result<()>)> {
        self.unthrottle_at(id, moment.time);
        let limit = self.cpu.backend.rate_limit;
        let event = self.events.get(&id)?;
        if !event.is_throttled() && !self.allows(event.is_operators(), moment.time) {
            return self.with_hooks(id, |event, _| (Verdict::Exhausted, event.exhaust(limit, moment.time)));
        }
        self.with_hooks(id, |event, _| event.admit(limit, moment.time))
    }

    /// Whether a sample of an event may be written at `time`. Always true for the operator's events (`operators`). For
    /// the guest's events, the guest's budget decides, and each permitted sample is charged to the budget.
    fn allows(&mut self, operators: bool, time: u64) -> bool {
        operators || self.budget_share.admit(&self.cpu.backend.budget, time)
    }

    /// Handles one overflow of an event that writes records. `period` is the growth of the count since the previous
    /// overflow. If this is the last overflow that the event's overflow limit allows, disables the event. Returns
    /// whether the event is still enabled and not in the error state.
    fn overflow(&mut self, id: u64, period: u64, moment: &Moment) -> bool {
        self.trigger(id);
        let Some((verdict, silenced)) = self.admit(id, moment) else {
            return false;
        };
        let wakeups = self.writer.tally.wakeups;
        let sample_id = match verdict {
            Verdict::Throttled => {
                self.writer.tally.throttled += 1;
                return true;
            }
            Verdict::Exhausted => {
                self.writer.tally.throttled += 1;
                self.metrics.samples_over_budget += 1;
                self.events.get(&id).map(|event| moment.sample_id(event))
            }
            Verdict::Within | Verdict::Last => self.sample(id, period, moment),
        };
        let is_last = matches!(verdict, Verdict::Last | Verdict::Exhausted);
        if let Some(sample_id) = sample_id.filter(|_| is_last) {
            self.note(id, &sample_id, &Note::Throttle);
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.start_collecting();
        }
        if let Err(error) = silenced {
            self.fail(id, error);
            return false;
        }
        let woke = self.writer.tally.wakeups - wakeups;
        verdict == Verdict::Exhausted || !self.reaches_limit(id, woke)
    }

    /// Writes the record of one overflow, or counts the record as lost. Returns the record's sample id.
    fn sample(&mut self, id: u64, period: u64, moment: &Moment) -> Option<SampleId> {
        work::charge(1);
        let counts = match self.events.get(&id) {
            Some(event) if event.spec.layout.has(SAMPLE_READ) => self.counts(id),
            _ => Counts::default(),
        };
        let event = self.events.get_mut(&id)?;
        let spec = &event.spec;
        let sample_id = moment.sample_id(event);
        // If the registers are unknown, a record that must contain an IP would be wrong. Registers from an excluded
        // mode would leak data. They are possible because the device finds the overflow only at a later exit, and the
        // vCPU may be in an excluded mode by then.
        let regs = moment.place.map(|place| place.regs);
        // A remote device never knows the registers at a mark. A mark's sample then has an IP of zero and no mode, because
        // its data is the mark itself.
        let without = self.cpu.backend.settings.remote && spec.kind == KIND_MARK;
        let allowed = regs.map_or(without, |regs| !spec.excludes(regs.user));
        if !allowed && spec.layout.sample_type & PLACES != 0 {
            self.lose(id, 1);
            return Some(sample_id);
        }
        let wanted = spec.capture();
        let capture = &mut self.capture;
        if let Some(place) = moment.place.filter(|_| wanted.wants_state()) {
            let user_regs = self.writer.user_regs();
            capture.take(&self.writer.guest(), &place, user_regs, &wanted);
        }
        let sample = Sample {
            misc: misc(regs),
            ip: regs.map_or(0, |regs| regs.ip),
            addr: moment.addr,
            period,
            read: counts.reading(),
            chain: capture.chain(),
            regs_user: capture.regs_user(),
            stack: capture.stack(),
            regs_intr: capture.regs_intr(),
        };
        if !self.writer.sample(event.sink.as_deref(), spec, &sample_id, &sample) {
            event.lost = event.lost.saturating_add(1);
        } else if !event.is_operators() {
            self.budget_share.spend(self.writer.record.size());
        }
        Some(sample_id)
    }

    /// Counts overflows for which no record or packet can be made.
    fn lose(&mut self, id: u64, overflows: u64) {
        let Some(event) = self.events.get_mut(&id).filter(|_| overflows > 0) else {
            return;
        };
        if let Some(trace) = &mut event.trace {
            let bytes = overflows.saturating_mul(size_of::<SamplePacket>() as u64);
            self.writer.lose_packets(event.sink.as_deref(), trace, overflows, bytes);
        } else {
            event.lost = event.lost.saturating_add(overflows);
            self.writer.lose(event.sink.as_deref(), &event.spec, overflows);
        }
    }

    /// Counts an overflow towards the overflow limit of its event. If the limit is reached, disables the event and
    /// notifies the driver. `woke` is the number of wakeups that the overflow caused. The notice replaces these
    /// wakeups. Returns whether the event was disabled.
    fn reaches_limit(&mut self, id: u64, woke: u64) -> bool {
        let Some(event) = self.events.get_mut(&id).filter(|event| event.limit > 0) else {
            return false;
        };
        event.limit -= 1;
        if event.limit > 0 {
            return false;
        }
        event.set_enabled(false);
        // If the event cannot be stopped, `halt` puts it in the error state and notifies the driver. Discard the
        // overflows that the host still holds, because they are beyond the limit.
        let _ = self.halt(id, PendingOverflows::Discarded);
        self.each_member(id, Self::stop, Errand::Stop);
        if let Some(event) = self.events.get(&id) {
            let of = woken(event.sink.as_deref(), &event.spec);
            let limit = NoticeChange::Limit { event: id, of, woke };
            self.writer.notice(limit);
        }
        true
    }

    fn note(&mut self, id: u64, sample_id: &SampleId, note: &Note<'_>) {
        if let Some(event) = self.events.get(&id) {
            self.writer.note(event.sink.as_deref(), &event.spec, sample_id, note);
        }
    }

    /// Starts, stops or toggles the targets of an event after that event has overflowed.
    fn trigger(&mut self, id: u64) {
        let Some(event) = self.events.get_mut(&id).filter(|event| !event.effects.is_empty()) else {
            return;
        };
        let effects = std::mem::take(&mut event.effects);
        work::charge_examined(effects.len());
        for &(target, effect) in &effects {
            if self.events.contains_key(&target) {
                self.apply(target, effect);
            } else {
                self.errands.push(Errand::Trigger(target, effect));
            }
        }
        if let Some(event) = self.events.get_mut(&id) {
            event.effects = effects;
        }
    }

    /// Resumes or pauses an active target after an overflow of its trigger.
    pub(crate) fn apply(&mut self, target: u64, effect: Effect) {
        let event = self.events.get(&target);
        let Some(event) = event.filter(|event| event.active_on().is_some()) else {
            return;
        };
        let paused = match effect {
            Effect::Start => false,
            Effect::Stop => true,
            Effect::Toggle => !event.is_paused(),
        };
        if event.is_paused() != paused {
            self.set_paused(target, paused);
        }
    }

    /// Pauses or resumes an active event. Overflows from before a pause are still written.
    fn set_paused(&mut self, id: u64, paused: bool) {
        self.claim_exit();
        let Some(changed) = self.with_hooks(id, |event, cpu| event.pause(cpu, paused)) else {
            return;
        };
        self.note_wait(id);
        let sampled = |event: &&Event| paused && event.is_sampled_by_host() && event.active_on().is_some();
        match self.events.get(&id).filter(sampled) {
            Some(event) if event.is_batched() => self.flush_last_batch(id),
            Some(_) => self.run_overflows(|state| {
                state.drain_overflows(id);
            }),
            None => {}
        }
        // If the change failed, a notice reports that the event is in the error state.
        let _ = self.publish(id, changed);
    }

    /// Handles overflows of a sample trace that were found at one moment. There is one overflow for each of `periods`.
    /// Drops overflows that exceed the trace's rate limit, its overflow limit or the guest's budget. Writes a single
    /// packet for all remaining overflows.
    fn trace_sample(&mut self, id: u64, periods: impl Iterator<Item = u64>, moment: &Moment) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        let (limit, sample_id) = (event.limit, moment.sample_id(event));
        let (mut overflows, mut counted, mut last) = (0, 0_u64, false);
        let mut silenced = Ok(());
        for period in periods {
            if limit > 0 && overflows == limit {
                break;
            }
            self.trigger(id);
            let Some((verdict, result)) = self.admit(id, moment) else {
                return;
            };
            silenced = silenced.and(result);
            if matches!(verdict, Verdict::Throttled | Verdict::Exhausted) {
                self.writer.tally.throttled += 1;
                self.metrics.samples_over_budget += u64::from(verdict == Verdict::Exhausted);
                last |= verdict == Verdict::Exhausted;
                continue;
            }
            overflows += 1;
            counted = counted.saturating_add(period);
            last |= verdict == Verdict::Last;
        }
        let wakeups = self.writer.tally.wakeups;
        if overflows > 0 {
            self.write_sample_packet(id, &sample_id, moment, overflows, counted);
        }
        if self.events.get(&id).is_some_and(Event::is_paused) {
            // Publish the packet now. The trace is paused, so no later write of this trace would publish the packet.
            self.flush(id);
        }
        if last {
            self.note(id, &sample_id, &Note::Throttle);
            // A throttled event might not cause another exit, so a periodic drain must lift the throttle.
            self.start_collecting();
        }
        if let Err(error) = silenced {
            self.fail(id, error);
            return;
        }
        let woke = self.writer.tally.wakeups - wakeups;
        for _ in 0..overflows {
            if self.reaches_limit(id, woke) {
                break;
            }
        }
    }

    /// Writes one packet for the overflows of a trace that were found together. `period` is the sum of their periods.
    /// The packet is lost if the vCPU is in an excluded mode, or if its state is unknown, for example because the
    /// vCPU has run since the exit.
    fn write_sample_packet(&mut self, id: u64, sample_id: &SampleId, moment: &Moment, overflows: u64, period: u64) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let spec = &event.spec;
        let Some(trace) = &mut event.trace else {
            return;
        };
        work::charge(1);
        let sink = event.sink.as_deref();
        let place = moment.place;
        let Some(place) = place.filter(|place| !spec.excludes(place.regs.user)) else {
            let len = size_of::<SamplePacket>() as u64;
            self.writer.lose_packets(sink, trace, 1, len);
            return;
        };
        let found = OverflowBatch { place, overflows, period };
        let packet = found.packet(sample_id);
        self.writer.produce(sink, spec, sample_id, moment.tsc, trace, Packet::Sample(&packet));
    }

    // Throttles.

    /// Returns the throttled events of the batched engine if `batched` is true, or all other throttled events if it is
    /// false.
    fn throttled(&self, batched: bool) -> Vec<u64> {
        let throttled = |id: &u64| {
            let event = self.events.get(id);
            event.is_some_and(|event| event.is_throttled() && event.is_batched() == batched)
        };
        let watched = self.hooks.watched().iter().copied();
        watched.filter(throttled).collect()
    }

    /// Lifts an event's throttle if the window of guest time in which the throttle began has ended, and the vCPU has
    /// time left for samples.
    pub(super) fn unthrottle(&mut self, id: u64) {
        if self.events.get(&id).is_some_and(Event::is_throttled) {
            let time = self.cpu.time();
            self.unthrottle_at(id, time);
        }
    }

    /// Like [`State::unthrottle`], but at `time`, in guest nanoseconds.
    fn unthrottle_at(&mut self, id: u64, time: u64) {
        let Some(event) = self.events.get(&id).filter(|event| event.is_throttled()) else {
            return;
        };
        let limit = self.cpu.backend.rate_limit;
        if event.takes_time() && self.sampling.is_used_up(self.cpu.backend.time_limit, time) {
            return;
        }
        match self.with_hooks(id, |event, _| event.unthrottle(limit, time)) {
            Some(Ok(true)) => {
                let sample_id = self.events.get(&id).map(|event| SampleId { time, ..self.sample_id(event) });
                if let Some(sample_id) = sample_id {
                    self.note(id, &sample_id, &Note::Unthrottle);
                }
            }
            Some(Err(error)) => {
                self.fail(id, error);
            }
            Some(Ok(false)) | None => {}
        }
    }

    // Switches.

    /// The fast path of a task switch, for plain events ([`Event::is_plain`]). Schedules the event in or out, or reads
    /// it. Returns `None` if the caller must use the general path.
    pub(super) fn switch_plain(&mut self, command: &Command) -> Option<Reply> {
        let op = command.op.get();
        if !matches!(op, COMMAND_IN | COMMAND_OUT | COMMAND_READ) || !has_no_operand(command) {
            return None;
        }
        let vcpu = self.cpu.index;
        let event = self.events.get_mut(&command.event.get())?;
        if !event.is_plain() {
            return None;
        }
        let counted = match (op, event.context) {
            (COMMAND_IN, Context::Task(None)) => {
                event.context = Context::Task(Some(vcpu));
                event.task = Some(self.writer.running());
                event.last_vcpu = vcpu;
                match event.is_enabled() && event.is_led_on() && self.cpu.thread().is_some() {
                    true => event.start(&mut self.cpu),
                    false => Ok(()),
                }
            }
            (COMMAND_OUT, Context::Task(Some(on))) if on == vcpu => {
                event.context = Context::Task(None);
                event.stop(&mut self.cpu)
            }
            (COMMAND_READ, _) => event.update(&mut self.cpu),
            _ => return None,
        };
        if let Err(error) = counted {
            let id = command.event.get();
            let errno = self.fail(id, error);
            return Some(self.reply(id, Err(errno)));
        }
        Some(reply(event, self.cpu.backend.clock, 0))
    }

    /// Returns the reply to a command for an event, which contains the event's current state.
    pub(super) fn reply(&self, id: u64, result: Result<(), Errno>) -> Reply {
        let status = status(&result);
        match self.events.get(&id) {
            Some(event) => reply(event, self.cpu.backend.clock, status),
            None => Reply { status: status.into(), ..Reply::default() },
        }
    }

    // Flushes.

    /// Flushes an event for a command from the vCPU `by`. If `id` is zero, flushes every persistent event placed on
    /// that vCPU.
    pub(super) fn flush_command(&mut self, id: u64, by: u32) -> Result<(), Errno> {
        let ids = match id {
            0 => self.ids(|event| event.persistent.is_some() && event.placed_on() == Some(by)),
            id => {
                let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
                if event.active_on().is_some_and(|on| on != by) {
                    // The event is active on another vCPU, and its overflows can be found only while that vCPU is
                    // outside the guest.
                    return Err(Errno::EXDEV);
                }
                vec![id]
            }
        };
        let mut flushed = Ok(());
        for id in ids {
            self.write_held(id);
            let published = self.publish_all(id);
            flushed = flushed.and(published);
        }
        flushed
    }

    /// Writes the overflows that the host holds for an event whose vCPU is outside the guest.
    pub(crate) fn write_held(&mut self, id: u64) {
        if self.holds(id) {
            self.run_overflows(|state| {
                state.drain_overflows(id);
            });
        }
    }

    /// Whether the host may hold overflows of an event that is active and uses the exit engine. These overflows
    /// can be taken only while the event's vCPU is outside the guest.
    pub(crate) fn holds(&self, id: u64) -> bool {
        let event = self.events.get(&id);
        let sampled = event.filter(|event| event.is_sampled_by_host() && !event.is_batched());
        sampled.is_some_and(|event| event.active_on().is_some())
    }

    /// Publishes an event's records and counts. Wakes the event's reader unless it has already been woken for all
    /// records.
    pub(crate) fn publish_all(&mut self, id: u64) -> Result<(), Errno> {
        let updated = self.update(id);
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let sample_id = self.sample_id(event);
        self.writer.flush(event.sink.as_deref(), &event.spec, &sample_id, Flush::Rouse);
        match event.has_failed() {
            true => Err(Errno::EIO),
            false => updated,
        }
    }

    // The batched engine.

    /// Collects the host's records while the vCPU runs.
    pub(crate) fn collect(&mut self) {
        if !self.collecting {
            return;
        }
        let backend = Arc::clone(&self.cpu.backend);
        let hold_back = HOLD_BACK * u64::from(backend.settings.tsc_khz);
        let until = backend.source.tsc().saturating_sub(hold_back);
        self.gather();
        self.write_until(until);
        if self.hooks.has(Hook::Throttled) {
            for id in self.throttled(false) {
                self.unthrottle(id);
            }
            // All records up to `until` are written. Therefore, each window of guest time that ended before `until` is
            // complete.
            let time = backend.clock.nanoseconds(self.cpu.vcpu.to_guest(until));
            for id in self.throttled(true) {
                self.unthrottle_at(id, time);
            }
        }
        self.rest_if_idle();
    }

    /// Converts the records that the host has stored so far to samples. If the vCPU is outside the guest, the host
    /// has already stored all of the vCPU's records.
    pub(crate) fn flush_batched(&mut self) {
        if !self.collecting {
            return;
        }
        self.gather();
        self.write_until(self.cpu.backend.source.tsc());
    }

    /// Ends periodic draining if no active event uses the batched engine, no event is throttled, and all collected
    /// overflows are written.
    fn rest_if_idle(&mut self) {
        let busy = self.hooks.has(Hook::Collecting) || self.hooks.has(Hook::Throttled);
        if self.collecting && self.merge.is_empty() && !busy {
            self.collecting = false;
            self.cpu.backend.end_draining();
        }
    }

    /// Requests periodic draining, which is needed while an event of the batched engine counts or an event is
    /// throttled.
    fn start_collecting(&mut self) {
        if !self.collecting {
            self.collecting = true;
            self.cpu.backend.begin_draining();
        }
    }

    /// Like [`State::flush_batched`], but for an event that has just stopped counting.
    fn flush_last_batch(&mut self, id: u64) {
        self.take_recorded(id);
        self.write_until(self.cpu.backend.source.tsc());
    }

    /// Drops the host's records of an event that no longer counts.
    fn discard_recorded(&mut self, id: u64) {
        if let Some(event) = self.events.get_mut(&id) {
            event.drain(self.cpu.index);
        }
        self.merge.forget(id);
    }

    /// Takes the records of every event of the batched engine.
    fn gather(&mut self) {
        if !self.hooks.has(Hook::Collecting) {
            return;
        }
        let batched = |id: &u64| self.events.get(id).is_some_and(Event::is_batched);
        let watched = self.hooks.watched().iter().copied();
        for id in watched.filter(batched).collect::<Vec<_>>() {
            self.take_recorded(id);
            if self.merge.len() > MOST_HELD {
                self.write_until(self.cpu.backend.source.tsc());
            }
        }
    }

    /// Takes the host's records of one event, and drops overflows that happened during the host's own work.
    fn take_recorded(&mut self, id: u64) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let overflows = event.drain(self.cpu.index);
        work::charge_examined(overflows.samples.len());
        let now = self.cpu.backend.source.tsc();
        for overflow in &overflows.samples {
            if overflow.mode == Mode::Host {
                self.metrics.host_overflows += 1;
                continue;
            }
            self.merge.add(MergeEntry {
                event: id,
                // The overflow happened before `now`, even if the conversion of the host's clock gives a later
                // time.
                tsc: overflow.tsc.min(now),
                regs: GuestRegs { ip: overflow.ip, user: overflow.ip < KERNEL_HALF },
                period: overflow.period,
            });
        }
        self.write_exits(id, &overflows.exits);
        self.metrics.host_throttles += overflows.throttles;
        self.lose(id, overflows.lost);
    }

    /// Makes samples of the taken records, up to the host's TSC `until`.
    fn write_until(&mut self, until: u64) {
        if self.merge.is_empty() {
            return;
        }
        let events = &self.events;
        let named = |entry: &MergeEntry| {
            let event = events.get(&entry.event);
            event.is_some_and(|event| event.task.is_none() && event.spec.layout.has(SAMPLE_TID))
        };
        // Read the history after the records were taken, so that it includes every switch before them.
        let history = match self.merge.due(until).any(named) {
            true => self.writer.history(),
            false => TaskHistory::default(),
        };
        let alone = |entry: &MergeEntry| {
            let event = events.get(&entry.event);
            event.is_none_or(|event| event.limit == 0 && event.group.is_none())
        };
        if self.merge.due(until).all(alone) {
            let mut batch = std::mem::take(&mut self.batch);
            batch.extend(std::iter::from_fn(|| self.merge.next(until)));
            self.write_batch(&mut batch, &history);
            batch.clear();
            self.batch = batch;
        } else {
            // An overflow can reach its event's limit, which stops the event and the members that it leads. Their
            // later overflows must then be dropped, so take one overflow at a time.
            while let Some(entry) = self.merge.next(until) {
                self.overflow_recorded(&entry, &history);
            }
        }
    }

    /// Writes overflows in one burst per sink. The caller must have checked that no overflow can stop an event.
    /// The bursts change the order of records across rings, but readers rely only on the order within a ring.
    fn write_batch(&mut self, batch: &mut [MergeEntry], history: &TaskHistory) {
        batch.sort_by_key(|entry| {
            let event = self.events.get(&entry.event);
            event.and_then(|event| event.sink.as_ref()).map(|sink| sink.id())
        });
        let mut rest = &*batch;
        while let Some((first, others)) = rest.split_first() {
            let event = self.events.get(&first.event);
            let written = event
                .and_then(|event| event.sink.clone())
                .and_then(|sink| sink.burst(|session| self.write_burst(session, &sink, rest, history)));
            rest = match written.unwrap_or(0) {
                // The first overflow needs the general path, or its event has no ring.
                0 => {
                    self.overflow_recorded(first, history);
                    others
                }
                written => {
                    work::charge(written as u64);
                    rest.split_at(written).1
                }
            };
        }
    }

    /// Applies an overflow recorded by the host.
    fn overflow_recorded(&mut self, entry: &MergeEntry, history: &TaskHistory) {
        if let Some(moment) = self.recorded_moment(entry, history) {
            self.overflow(entry.event, entry.period, &moment);
        }
    }

    /// Writes samples of overflows to one sink. Stops before the first overflow that [`State::overflow_recorded`] must
    /// handle. Returns the number of overflows handled, including those whose sample was lost. The sink is locked, so
    /// this function must write to the sink only through `session`.
    fn write_burst(
        &mut self,
        session: &mut Session<'_, GuestPages<'_>>,
        sink: &Arc<Sink>,
        entries: &[MergeEntry],
        history: &TaskHistory,
    ) -> usize {
        let limit = self.cpu.backend.rate_limit;
        for (index, entry) in entries.iter().enumerate() {
            let time = self.guest_time(entry);
            let Some(event) = self.events.get_mut(&entry.event) else {
                return index;
            };
            let own = event.sink.as_ref().is_some_and(|own| Arc::ptr_eq(own, sink));
            let regs = entry.regs;
            let guests = !event.is_operators();
            if !own || event.spec.excludes(regs.user) || event.is_throttled() {
                return index;
            }
            let budget = &self.cpu.backend.budget;
            if guests && !self.budget_share.admit(budget, time) {
                return index;
            }
            if !event.admit_plain(limit, time) {
                if guests {
                    self.budget_share.give_back();
                }
                return index;
            }
            let Some(moment) = self.recorded_moment(entry, history) else {
                return index;
            };
            let Some(event) = self.events.get_mut(&entry.event) else {
                return index;
            };
            let spec = &event.spec;
            let sample_id = moment.sample_id(event);
            let sample = Sample { misc: misc(Some(regs)), ip: regs.ip, period: entry.period, ..Sample::default() };
            let context = context(spec, &sample_id);
            let outcome = match self.writer.record.sample(&spec.layout, &sample_id, &sample) {
                Ok(record) => {
                    if guests {
                        self.budget_share.spend(size_of_val(record));
                    }
                    session.write(record, &context)
                }
                Err(_) => session.lose(1),
            };
            if outcome.wake {
                self.writer.wake(Some(sink), &event.spec);
            }
            self.writer.count_sample(outcome.written);
            if !outcome.written {
                event.lost = event.lost.saturating_add(1);
            }
        }
        entries.len()
    }

    /// Returns the time of an overflow that the host recorded, in guest nanoseconds.
    fn guest_time(&self, entry: &MergeEntry) -> u64 {
        let tsc = self.cpu.vcpu.to_guest(entry.tsc);
        self.cpu.backend.clock.nanoseconds(tsc)
    }

    /// Returns the moment of an overflow that the host recorded. `None` if the overflow's event is gone.
    fn recorded_moment(&mut self, entry: &MergeEntry, history: &TaskHistory) -> Option<Moment> {
        let event = self.events.get(&entry.event)?;
        let tsc = self.cpu.vcpu.to_guest(entry.tsc);
        let task = match event.task {
            None if event.spec.layout.has(SAMPLE_TID) => history.at(tsc),
            known => Some(known.unwrap_or_default()),
        };
        if task.is_none() {
            self.metrics.samples_unnamed += 1;
        }
        Some(Moment {
            vcpu: self.cpu.index,
            tsc,
            time: self.cpu.backend.clock.nanoseconds(tsc),
            place: Some(CpuContext { regs: entry.regs, cpu: None }),
            task: task.unwrap_or_default(),
            addr: 0,
        })
    }

    /// Writes packets for the exits that the host recorded for a trace, oldest first. These include exits
    /// that the host kernel handled itself.
    fn write_exits(&mut self, id: u64, recorded: &[Recorded]) {
        let Some(event) = self.events.get_mut(&id).filter(|_| !recorded.is_empty()) else {
            return;
        };
        let Some(trace) = &mut event.trace else {
            return;
        };
        let (spec, sink) = (&event.spec, event.sink.as_deref());
        let (clock, vcpu) = (self.cpu.backend.clock, &self.cpu.vcpu);
        // Read the history after the exits were taken, so that it includes every switch before them.
        let history = event.task.is_none().then(|| self.writer.history());
        let now = self.cpu.backend.source.tsc();
        let mut left = recorded.len();
        work::charge(recorded.len() as u64);
        for one in recorded {
            left -= 1;
            let exit = match one {
                Recorded::Exit(exit) => exit,
                Recorded::Lost(exits) => {
                    let bytes = exits.saturating_mul(size_of::<ExitPacket>() as u64);
                    self.writer.lose_packets(sink, trace, *exits, bytes);
                    continue;
                }
            };
            // The exit happened before `now`, even if the conversion of the host's clock gives a later time.
            let tsc = vcpu.to_guest(exit.tsc.min(now));
            let task = event.task.unwrap_or_else(|| {
                let known = history.as_ref().and_then(|history| history.at(tsc));
                known.unwrap_or_else(|| {
                    self.metrics.samples_unnamed += 1;
                    Task::default()
                })
            });
            let sample_id = SampleId {
                pid: task.pid,
                tid: task.tid,
                time: clock.nanoseconds(tsc),
                id: spec.owner,
                stream_id: spec.id,
                vcpu: self.cpu.index,
            };
            // If the last exit has not ended yet, count its time outside the guest up to this moment.
            let until = exit.back.or_else(|| (left == 0).then_some(now));
            let until = until.map_or(tsc, |tsc| vcpu.to_guest(tsc.min(now)));
            let outside = clock.nanoseconds(until).saturating_sub(sample_id.time);
            let packet = exit_packet(exit, &sample_id, outside);
            let packet = Packet::Exit(&packet);
            self.writer.produce(sink, spec, &sample_id, tsc, trace, packet);
        }
    }
}

/// Writes an event's counts to the metadata page of the event's own ring, if there is one.
fn update_page(event: &Event, clock: Clock) {
    if let Some(sink) = event.sink.as_ref().filter(|_| event.is_shown()) {
        sink.update_page(&event.counts(clock));
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

fn misc(regs: Option<GuestRegs>) -> u16 {
    match regs {
        Some(GuestRegs { user: true, .. }) => MODE_USER,
        Some(GuestRegs { user: false, .. }) => MODE_KERNEL,
        None => MODE_UNKNOWN,
    }
}

fn exit_packet(exit: &HostExit, sample_id: &SampleId, outside: u64) -> ExitPacket {
    let flag = |on: bool, flag| if on { flag } else { 0 };
    ExitPacket {
        kind: PACKET_EXIT,
        flags: PACKET_HARDWARE
            | PACKET_IP
            | flag(exit.ip < KERNEL_HALF, PACKET_USER)
            | flag(exit.back.is_none(), PACKET_CUT),
        reason: exit.reason.into(),
        vcpu: sample_id.vcpu.into(),
        time: sample_id.time.into(),
        ip: exit.ip.into(),
        outside: outside.into(),
        qualification: exit.qualification.into(),
        detail: exit.detail.into(),
        pid: sample_id.pid.into(),
        tid: sample_id.tid.into(),
        ..ExitPacket::default()
    }
}
