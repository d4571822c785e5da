//! Writes the records and packets of one vCPU's events to the events' sinks, counts the results, and collects
//! notices for the driver.

use std::sync::Arc;

use crate::area::Refused;
use crate::notices::{NoticeChange, Notices};
use crate::record::{Reading, Record, Sample, SampleId};
use crate::ring::{Outcome, WriteContext};
use crate::sink::{Flush, Output, Produced, Sink};
use crate::spec::EventSpec;
use crate::trace::{Packet, Trace};

/// Writes the records and packets of one vCPU's events.
#[derive(Debug)]
pub(crate) struct Writer {
    notices: Arc<Notices>,
    /// Notices to publish before the shard is unlocked, but after all records are written, because a woken reader must
    /// find its records.
    changes: Vec<NoticeChange>,
    /// The record under construction.
    pub(super) record: Record,
    pub(crate) tally: Tally,
}

/// Totals of samples, wakeups, AUX bytes and AUX records since the device was created.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) written: u64,
    pub(crate) lost: u64,
    pub(crate) throttled: u64,
    pub(crate) wakeups: u64,
    /// Bytes written to AUX areas.
    pub(crate) aux_written: u64,
    /// Bytes that traces lost.
    pub(crate) aux_lost: u64,
    pub(crate) aux_records: u64,
}

/// A record other than a sample.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Note<'a> {
    Throttle,
    Unthrottle,
    /// The counts of a closing event.
    Read(Reading<'a>),
}

impl Writer {
    pub(crate) fn new(notices: Arc<Notices>) -> Self {
        Self { notices, changes: Vec::new(), record: Record::default(), tally: Tally::default() }
    }

    /// Keeps a notice until [`Writer::publish_notices`].
    pub(crate) fn notice(&mut self, change: NoticeChange) {
        self.changes.push(change);
    }

    /// Hands the kept notices to [`Notices`].
    pub(crate) fn publish_notices(&mut self) {
        if !self.changes.is_empty() {
            self.notices.apply(self.changes.drain(..));
        }
    }

    /// Writes a sample of an event. Returns whether it was written.
    pub(crate) fn sample(
        &mut self,
        output: &Output,
        spec: &EventSpec,
        sample_id: &SampleId,
        sample: &Sample<'_>,
    ) -> bool {
        let written = self.write(output, spec, sample_id, |record, context, sink| {
            sink.write(|ring, memory| match record.sample(&spec.request.layout, sample_id, sample) {
                Ok(sample) => ring.write(memory, sample, context),
                Err(_) => ring.lose(1),
            })
        });
        self.count_sample(written);
        written
    }

    /// Counts a sample, written or lost.
    pub(crate) fn count_sample(&mut self, written: bool) {
        if written {
            self.tally.written += 1;
        } else {
            self.tally.lost += 1;
        }
    }

    /// Counts overflows for which no record can be made.
    pub(crate) fn lose(&mut self, output: &Output, spec: &EventSpec, overflows: u64) {
        self.tally.lost = self.tally.lost.saturating_add(overflows);
        self.write(output, spec, &SampleId::default(), |_, _, sink| sink.write(|ring, _| ring.lose(overflows)));
    }

    /// Writes a record other than a sample, if it fits.
    pub(crate) fn note(&mut self, output: &Output, spec: &EventSpec, sample_id: &SampleId, note: &Note<'_>) {
        self.write(output, spec, sample_id, |record, context, sink| {
            let built = match note {
                Note::Throttle => Ok(record.throttle(context.layout, sample_id)),
                Note::Unthrottle => Ok(record.unthrottle(context.layout, sample_id)),
                Note::Read(reading) => record.read(context.layout, sample_id, reading),
            };
            built.map_or_else(
                |_| Outcome::default(),
                |bytes| sink.write(|ring, memory| ring.note(memory, bytes, context)),
            )
        });
    }

    /// Writes the pending records of an event's ring that fit.
    pub(crate) fn flush(&mut self, output: &Output, spec: &EventSpec, sample_id: &SampleId, how: Flush) {
        let Some(sink) = output.sink() else {
            return;
        };
        let context = output.context(spec, sample_id);
        let produced = sink.flush(&mut self.record, spec.is_trace(), how, &context);
        self.count_produced(output, spec, &produced);
    }

    /// Writes the next packet of a trace, after the padding and the sync packet that must precede it. If that
    /// fails, counts the packet as lost. Returns whether the packet was written.
    ///
    /// `packet` is complete except for its number. `sample_id` contains the vCPU, the task and the time, and `tsc` is
    /// the guest's TSC at that time. `trace` belongs to the event that `spec` describes. The reader sees the packet when
    /// a watermark is crossed, or after [`Writer::flush`].
    pub(crate) fn produce(
        &mut self,
        output: &Output,
        spec: &EventSpec,
        sample_id: &SampleId,
        tsc: u64,
        trace: &mut Trace,
        packet: Packet<'_>,
    ) -> bool {
        let (record, context) = (&mut self.record, output.context(spec, sample_id));
        let sink = output.sink();
        let produced = sink.and_then(|sink| sink.produce(record, (spec, &context), tsc, trace, packet));
        let Some(produced) = produced else {
            self.lose_packets(sink, trace, 1, packet.len());
            return false;
        };
        let appended = produced.appended;
        trace.account(packet, &appended);
        self.tally.aux_written += appended.written;
        if !appended.whole {
            self.tally.aux_lost = self.tally.aux_lost.saturating_add(packet.len());
        }
        self.count_produced(output, spec, &produced);
        appended.whole
    }

    /// Begins a write to a trace by a producer in the VMM.
    ///
    /// # Errors
    /// See [`Sink::claim`].
    pub(crate) fn claim(
        &mut self,
        output: &Output,
        spec: &EventSpec,
        sample_id: &SampleId,
        token: u64,
    ) -> Result<(), Refused> {
        let context = output.context(spec, sample_id);
        let sink = output.sink().ok_or(Refused::NotBegun)?;
        let produced = sink.claim(&mut self.record, token, &context)?;
        self.count_produced(output, spec, &produced);
        Ok(())
    }

    /// Ends a write by a producer in the VMM, and publishes its first `size` bytes.
    ///
    /// # Errors
    /// See [`Sink::release`].
    pub(crate) fn release(
        &mut self,
        output: &Output,
        spec: &EventSpec,
        sample_id: &SampleId,
        trace: &mut Trace,
        token: u64,
        size: u64,
    ) -> Result<(), Refused> {
        let context = output.context(spec, sample_id);
        let sink = output.sink().ok_or(Refused::NotBegun)?;
        let produced = sink.release(&mut self.record, token, size, &context)?;
        trace.grow(size);
        self.tally.aux_written += size;
        self.count_produced(output, spec, &produced);
        Ok(())
    }

    /// Counts `packets` packets of a trace, `bytes` bytes in total, that were lost before they could be written.
    pub(crate) fn lose_packets(&mut self, sink: Option<&Sink>, trace: &mut Trace, packets: u64, bytes: u64) {
        trace.lose(packets, bytes);
        self.tally.aux_lost = self.tally.aux_lost.saturating_add(bytes);
        if let Some(sink) = sink {
            sink.miss();
        }
    }

    /// Writes `PERF_RECORD_ITRACE_START` to the ring of a trace if the device manages an area for the trace and the
    /// record fits. Writes the record only once.
    pub(crate) fn announce(&mut self, output: &Output, spec: &EventSpec, sample_id: &SampleId, trace: &mut Trace) {
        let shape = output.sink().map(Sink::shape);
        if trace.announced || shape.is_none_or(|shape| !shape.has_area || shape.driven) {
            return;
        }
        trace.announced = self.write(output, spec, sample_id, |record, context, sink| {
            let start = record.itrace_start(context.layout, sample_id);
            sink.write(|ring, memory| ring.note(memory, start, context))
        });
    }

    /// Wakes the reader of an event's sink.
    pub(crate) fn wake(&mut self, output: &Output, spec: &EventSpec) {
        self.tally.wakeups += 1;
        let of = output.woken(spec.owner);
        match self.changes.last_mut() {
            // Keep one change for all events that wake the same readers at an exit.
            Some(NoticeChange::Wake { of: last, wakeups }) if *last == of => *wakeups += 1,
            _ => self.notice(NoticeChange::Wake { of, wakeups: 1 }),
        }
    }

    fn count_produced(&mut self, output: &Output, spec: &EventSpec, produced: &Produced) {
        self.tally.aux_records += produced.records;
        if !produced.wake {
            return;
        }
        if produced.driven {
            self.notice(NoticeChange::Aux(spec.id));
        } else {
            self.wake(output, spec);
        }
    }

    /// Calls `act` on the sink of an event, if it has one, and wakes the reader if `act` requires that.
    /// Returns whether `act` wrote a record.
    fn write(
        &mut self,
        output: &Output,
        spec: &EventSpec,
        sample_id: &SampleId,
        act: impl FnOnce(&mut Record, &WriteContext<'_>, &Sink) -> Outcome,
    ) -> bool {
        let Some(sink) = output.sink() else {
            return false;
        };
        let outcome = act(&mut self.record, &output.context(spec, sample_id), sink);
        if outcome.wake {
            self.wake(output, spec);
        }
        outcome.written
    }
}
