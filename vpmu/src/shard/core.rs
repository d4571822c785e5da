//! The needs of an operation on one event besides the event: the vCPU, its guest, the writer of records, the hooks of the
//! active events, and the list of work for other shards. The operations here leave all other events alone.

use std::io;
use std::sync::Arc;

use super::Errand;
use super::counts::Counts;
use super::guest::Guest;
use super::hooks::HookCounts;
use super::writer::{Note, Writer};
use crate::cpu::{Cpu, Lease};
use crate::event::Event;
use crate::kind::Kind;
use crate::notices::NoticeChange;
use crate::producer::AuxError;
use crate::record::SampleId;
use crate::sink::{Flush, Output, Sink};
use crate::spec::Context;
use crate::vcpu::Hook;

/// The parts of a shard that an operation on any of its events may use.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) cpu: Cpu,
    pub(super) writer: Writer,
    pub(super) guest: Guest,
    /// The hooks of exactly the events that are active. An active event changes only within [`Core::change`], so that
    /// this holds also after a change of what the event needs.
    hooks: HookCounts,
    /// Work that waits until the shard is unlocked.
    errands: Vec<Errand>,
    pub(super) metrics: ShardMetrics,
}

/// Totals of a shard since the device was created. [`Metrics`](crate::Metrics) documents the numbers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ShardMetrics {
    pub(super) commands: u64,
    pub(super) bad_requests: u64,
    pub(super) host_overflows: u64,
    pub(super) host_throttles: u64,
    pub(super) samples_unnamed: u64,
    pub(super) samples_over_budget: u64,
    pub(super) counter_waits: u64,
    pub(super) sampling_throttles: u64,
    pub(super) overflow_exits: u64,
}

impl Core {
    pub(super) fn new(cpu: Cpu, writer: Writer) -> Self {
        Self {
            cpu,
            writer,
            guest: Guest::default(),
            hooks: HookCounts::default(),
            errands: Vec::new(),
            metrics: ShardMetrics::default(),
        }
    }

    /// Starts the counters that were held back, and publishes the notices. Must be called before the shard is unlocked.
    /// Returns the work that was deferred to other shards.
    pub(super) fn finish(&mut self) -> Vec<Errand> {
        self.cpu.release_own();
        self.writer.publish_notices();
        std::mem::take(&mut self.errands)
    }

    /// Defers work to another shard.
    pub(super) fn defer(&mut self, errand: Errand) {
        self.errands.push(errand);
    }

    /// Releases shared counters. Defers the release of another vCPU's counter.
    pub(super) fn release(&mut self, leases: Vec<(u32, Lease)>) {
        for (vcpu, lease) in leases {
            if vcpu == self.cpu.index {
                self.cpu.release(lease);
            } else {
                self.defer(Errand::Release(vcpu, lease));
            }
        }
    }

    // Hooks.

    pub(super) fn has(&self, hook: Hook) -> bool {
        self.hooks.has(hook)
    }

    /// The active events to visit at exits, marks and drains, by ascending id. Charges the examination of all of them.
    pub(super) fn watched(&self) -> &[u64] {
        self.hooks.watched()
    }

    /// Adds the hooks of an event that became active.
    pub(super) fn hook(&mut self, event: &Event) {
        self.hooks.add(event, &self.cpu.vcpu);
    }

    /// Removes the hooks of an event that is no longer active.
    pub(super) fn unhook(&mut self, event: &Event) {
        self.hooks.remove(event, &self.cpu.vcpu);
    }

    /// Changes an event, and updates its hooks. The vCPU may read the hooks during the update, so hooks that the event
    /// needs before and after the change stay set throughout.
    pub(super) fn change<T>(&mut self, event: &mut Event, change: impl FnOnce(&mut Event, &mut Cpu) -> T) -> T {
        let before = event.active_on().map(|_| event.hooks());
        let changed = change(event, &mut self.cpu);
        if let Some(before) = before {
            self.hooks.want(event.hooks(), &self.cpu.vcpu);
            self.hooks.drop(before, &self.cpu.vcpu);
        }
        changed
    }

    // Counts.

    /// Writes an event's counts, as of its last update, to the metadata page of the event's own ring, if there is one.
    pub(crate) fn show(&self, event: &Event) {
        if let Some(sink) = event.output.sink.as_ref().filter(|_| event.is_shown()) {
            sink.update_page(&event.counts(self.cpu.backend.clock));
        }
    }

    /// Publishes an event's counts to its group and its metadata page, and writes its pending records.
    pub(super) fn publish(&mut self, event: &Event) {
        event.publish_counts();
        if event.output.sink.is_some() {
            self.show(event);
            self.flush(event);
        }
    }

    /// Writes an event's pending records, and puts the event in the error state. Reports the error to the driver, and
    /// returns true, unless the event was in that state before. The event's hooks must have been removed.
    pub(super) fn fail(&mut self, event: &mut Event, error: &io::Error) -> bool {
        self.flush(event);
        if event.has_failed() {
            return false;
        }
        let id = event.spec.id;
        log::warn!("event {id} is in the error state: {error}");
        self.release(event.fail());
        let refusal = self.cpu.take_refusal();
        self.writer.notice(NoticeChange::Fail(id, refusal));
        true
    }

    // Records.

    /// The sample id (task, vCPU, time and event) of a record that the event would write now.
    fn sample_id(&self, event: &Event) -> SampleId {
        self.sample_id_at(event, self.cpu.time())
    }

    /// Like [`Core::sample_id`], but at `time`, in guest nanoseconds.
    pub(super) fn sample_id_at(&self, event: &Event, time: u64) -> SampleId {
        let task = match event.schedule.context {
            Context::Vcpu(_) => self.guest.running(),
            // Unknown if its task has never run.
            Context::Task(_) => event.schedule.task.unwrap_or_default(),
        };
        let vcpu = event.schedule.recorded();
        event.spec.sample_id(task, vcpu, time)
    }

    pub(super) fn note(&mut self, event: &Event, sample_id: &SampleId, note: &Note<'_>) {
        self.writer.note(&event.output, &event.spec, sample_id, note);
    }

    /// Writes `PERF_RECORD_READ` with the counts of an event that is about to close.
    pub(super) fn note_counts(&mut self, event: &Event, counts: &Counts) {
        let sample_id = self.sample_id(event);
        self.note(event, &sample_id, &Note::Read(counts.reading()));
    }

    /// Counts overflows for which no record or packet can be made.
    pub(super) fn lose(&mut self, event: &mut Event, overflows: u64) {
        if overflows == 0 {
            return;
        }
        if let Some(trace) = &mut event.trace {
            let bytes = overflows.saturating_mul(super::sampler::PACKET);
            self.writer.lose_packets(event.output.sink(), trace, overflows, bytes);
        } else {
            event.lost = event.lost.saturating_add(overflows);
            self.writer.lose(&event.output, &event.spec, overflows);
        }
    }

    /// Publishes what an event has written to its AUX area. Also writes the pending `PERF_RECORD_LOST` and
    /// `PERF_RECORD_AUX` to the event's ring, if they fit.
    pub(super) fn flush(&mut self, event: &Event) {
        let sink = event.output.sink.as_ref();
        if sink.is_some_and(|sink| sink.owes(event.spec.is_trace())) {
            self.flush_as(event, Flush::Owed);
        }
    }

    /// Like [`Core::flush`], and wakes the event's reader unless it has already been woken for everything.
    pub(super) fn flush_and_wake(&mut self, event: &Event) {
        self.flush_as(event, Flush::Rouse);
    }

    fn flush_as(&mut self, event: &Event, how: Flush) {
        let sample_id = self.sample_id(event);
        self.writer.flush(&event.output, &event.spec, &sample_id, how);
    }

    // Sinks.

    /// Redirects an event to `sink`, after publishing everything that it wrote to its previous sink.
    pub(crate) fn set_sink(&mut self, event: &mut Event, sink: Option<Arc<Sink>>) {
        self.flush(event);
        self.change(event, |event, _| event.output.sink = sink);
    }

    /// Publishes everything that was written to the area of an event's sink, and removes the area. Also writes a record
    /// of the published data to the ring, if the record fits.
    pub(crate) fn close_area(&mut self, event: &Event) {
        self.flush_as(event, Flush::CloseArea);
    }

    /// Prepares a trace for its new area. Writes a sync packet at the start of the area. Also writes
    /// `PERF_RECORD_ITRACE_START` to the ring if the trace has not written that record before.
    pub(crate) fn begin_area(&mut self, event: &mut Event) {
        event.sync();
        self.announce(event);
    }

    /// Writes `PERF_RECORD_ITRACE_START` to the ring of an active trace if the device manages an area for the trace.
    /// Writes the record only once.
    pub(super) fn announce(&mut self, event: &mut Event) {
        let due = event.trace.as_ref().is_some_and(|trace| !trace.announced);
        if !due || event.active_on().is_none() {
            return;
        }
        let sample_id = self.sample_id(event);
        if let Some(trace) = &mut event.trace {
            self.writer.announce(&event.output, &event.spec, &sample_id, trace);
        }
    }

    // Producers in the VMM.

    /// Begins a write to a trace by a producer in the VMM. The trace must be active and not paused. Returns the trace's
    /// sink.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn claim_aux(&mut self, event: &Event, token: u64) -> Result<Arc<Sink>, AuxError> {
        let id = event.spec.id;
        if !matches!(event.spec.kind, Kind::VmmTrace(_)) {
            return Err(AuxError::NoEvent(id));
        }
        if event.active_on().is_none() || event.counting.is_paused() {
            return Err(AuxError::Inactive(id));
        }
        let sink = event.output.sink.clone().ok_or(AuxError::NoArea)?;
        let sample_id = self.sample_id(event);
        self.writer.claim(&event.output, &event.spec, &sample_id, token)?;
        Ok(sink)
    }

    /// Ends the producer's write to `sink`, and publishes the first `size` bytes of that write. The event may have
    /// another sink by now.
    ///
    /// # Errors
    /// [`AuxError`].
    pub(crate) fn release_aux(
        &mut self,
        event: &mut Event,
        sink: &Arc<Sink>,
        token: u64,
        size: u64,
    ) -> Result<(), AuxError> {
        let sample_id = self.sample_id(event);
        let output = Output { sink: Some(Arc::clone(sink)), wakeups: event.output.wakeups };
        let trace = event.trace.as_mut().ok_or(AuxError::NoEvent(event.spec.id))?;
        self.writer.release(&output, &event.spec, &sample_id, trace, token, size)?;
        Ok(())
    }

    /// Counts bytes that a producer in the VMM could not write.
    pub(crate) fn lose_aux(&mut self, event: &mut Event, bytes: u64) {
        if let Some(trace) = &mut event.trace {
            self.writer.lose_packets(event.output.sink(), trace, 0, bytes);
        }
    }
}
