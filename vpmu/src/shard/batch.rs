//! The batched engine: overflows that the host recorded while the vCPU ran. They are taken from the host's rings, merged
//! by time, and written to the guest's rings in bursts.

use std::sync::Arc;

use super::core::Core;
use super::exits::write_recorded;
use super::map::EventMap;
use super::merge::{Merge, Recorded};
use super::moment::Moment;
use super::sampler::{Sampler, misc};
use crate::event::Event;
use crate::pages::GuestPages;
use crate::record::{SAMPLE_TID, Sample};
use crate::ring::Session;
use crate::sink::Sink;
use crate::source::{Mode, Overflow};
use crate::tasks::TaskHistory;
use crate::unwind::CpuContext;
use crate::work;

/// If more overflows than this are held (about a megabyte), all of them are written before the next host ring
/// is read, even though that ring may contain older overflows. Without this limit, a guest could make its host hold
/// an unbounded number of overflows.
const MOST_HELD: usize = 16_384;

/// The overflows of one vCPU that the host recorded.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Overflows that were taken from the host and must be written to rings. Those of an event that is gone or that has
    /// reached its limit are removed.
    merge: Merge,
    /// Memory for the next [`Due`].
    spare: Vec<Recorded>,
    /// Whether periodic drains were requested from the machine. True while an event of the batched engine counts, an
    /// event is throttled, or `merge` holds overflows.
    collecting: bool,
}

/// The overflows that [`Batch::next`] writes or returns.
#[derive(Debug)]
pub(super) struct Due {
    until: u64,
    /// The tasks of the vCPU. Empty if no event needs them.
    history: TaskHistory,
    /// The overflows in the order in which they are written, if no overflow can stop an event. Otherwise, they stay in
    /// the merge, because the later overflows of an event that is stopped must be dropped.
    burst: Option<Vec<Recorded>>,
    /// Number of overflows of `burst` that have been handled.
    done: usize,
}

/// An event with overflows to write.
#[derive(Debug, Clone, Copy)]
struct Overflowed {
    event: u64,
    sink: Option<u64>,
    /// Whether its samples name the task that ran.
    named: bool,
    /// Whether its overflows can stop no event.
    alone: bool,
}

impl Overflowed {
    fn new(id: u64, event: Option<&Event>) -> Self {
        Self {
            event: id,
            sink: event.and_then(|event| event.output.sink.as_ref()).map(|sink| sink.id()),
            named: event
                .is_some_and(|event| event.schedule.task.is_none() && event.spec.request.layout.has(SAMPLE_TID)),
            alone: event.is_none_or(|event| event.overflows.limit() == 0 && event.membership.group().is_none()),
        }
    }
}

impl Batch {
    pub(super) fn is_collecting(&self) -> bool {
        self.collecting
    }

    /// Requests periodic draining, which is needed while an event of the batched engine counts or an event is
    /// throttled.
    pub(super) fn start_collecting(&mut self, core: &Core) {
        if !self.collecting {
            self.collecting = true;
            core.cpu.backend.begin_draining();
        }
    }

    /// Ends periodic draining if `busy` is false and all collected overflows are written.
    pub(super) fn rest_if_idle(&mut self, core: &Core, busy: bool) {
        if self.collecting && self.merge.is_empty() && !busy {
            self.collecting = false;
            core.cpu.backend.end_draining();
        }
    }

    /// Whether the held overflows must be written before more are taken.
    pub(super) fn is_full(&self) -> bool {
        self.merge.len() > MOST_HELD
    }

    /// Takes the host's records of one event, and drops overflows that happened during the host's own work. Writes the
    /// packets of exits at once.
    pub(super) fn take(&mut self, core: &mut Core, event: &mut Event) {
        let overflows = event.counting.drain(core.cpu.index);
        work::charge_examined(overflows.samples.len());
        let now = core.cpu.backend.source.tsc();
        for overflow in overflows.samples {
            if overflow.mode == Mode::Host {
                core.metrics.host_overflows += 1;
                continue;
            }
            // The overflow happened before `now`, even if the conversion of the host's clock gives a later time.
            let overflow = Overflow { tsc: overflow.tsc.min(now), ..overflow };
            self.merge.add(Recorded { event: event.spec.id, overflow });
        }
        write_recorded(core, event, &overflows.exits);
        core.metrics.host_throttles += overflows.throttles;
        core.lose(event, overflows.lost);
    }

    /// Drops the held overflows of an event.
    pub(super) fn forget(&mut self, id: u64) {
        self.merge.forget(id);
    }

    /// Begins to write the held overflows up to the host's TSC `until`. `None` if no overflow is held.
    pub(super) fn begin(&mut self, core: &Core, map: &EventMap, until: u64) -> Option<Due> {
        if self.merge.is_empty() {
            return None;
        }
        let events = overflowed(self.merge.due(until), map);
        // Read the history after the records were taken, so that it includes every switch before them.
        let named = events.iter().any(|event| event.named);
        let history = if named { core.guest.history() } else { TaskHistory::default() };
        let alone = events.iter().all(|event| event.alone);
        let burst = alone.then(|| {
            let mut burst = std::mem::take(&mut self.spare);
            burst.extend(std::iter::from_fn(|| self.merge.next(until)));
            sort_by_sink(&mut burst, &events);
            burst
        });
        Some(Due { until, history, burst, done: 0 })
    }

    /// Writes overflows in bursts until one needs the general path, and returns that one. `None` if all are handled.
    pub(super) fn next(
        &mut self,
        due: &mut Due,
        core: &mut Core,
        map: &mut EventMap,
        sampler: &mut Sampler,
    ) -> Option<(Recorded, Moment)> {
        let recorded = match &due.burst {
            Some(burst) => loop {
                let rest = burst.get(due.done..).unwrap_or_default();
                let first = rest.first()?;
                let sink = map.get(first.event).and_then(|event| event.output.sink.clone());
                let mut burst = Burst { core, map, sampler, history: &due.history };
                let written = sink.and_then(|sink| sink.burst(|session| burst.write(session, &sink, rest)));
                match written.unwrap_or(0) {
                    // The overflow needs the general path, or its event has no ring.
                    0 => {
                        due.done += 1;
                        break *first;
                    }
                    written => {
                        work::charge(written as u64);
                        due.done += written;
                    }
                }
            },
            None => self.merge.next(due.until)?,
        };
        Some((recorded, moment(core, &recorded, &due.history)))
    }

    /// Keeps the memory of `due` for the next batch.
    pub(super) fn end(&mut self, due: Due) {
        if let Some(mut burst) = due.burst {
            burst.clear();
            self.spare = burst;
        }
    }
}

/// Writes the samples of plain overflows to one sink.
struct Burst<'a> {
    core: &'a mut Core,
    map: &'a mut EventMap,
    sampler: &'a mut Sampler,
    history: &'a TaskHistory,
}

impl Burst<'_> {
    /// Writes samples to `sink`. Stops before the first overflow that needs the general path. Returns the number of
    /// overflows handled, including those whose sample was lost. The sink is locked, so this function must write to the
    /// sink only through `session`.
    fn write(&mut self, session: &mut Session<'_, GuestPages<'_>>, sink: &Arc<Sink>, entries: &[Recorded]) -> usize {
        let Self { core, map, sampler, history } = self;
        for (index, entry) in entries.iter().enumerate() {
            let moment = moment(core, entry, history);
            let Some(event) = map.get_mut(entry.event) else {
                return index;
            };
            let own = event.output.sink.as_ref().is_some_and(|own| Arc::ptr_eq(own, sink));
            let regs = entry.regs();
            if !own || event.spec.excludes(regs.user) || event.overflows.is_throttled() {
                return index;
            }
            if !sampler.admit_plain(core, event, moment.time) {
                return index;
            }
            core.metrics.samples_unnamed += u64::from(moment.is_unnamed(event));
            let spec = &event.spec;
            let sample_id = moment.sample_id(event);
            let period = entry.overflow.period;
            let sample = Sample { misc: misc(Some(regs)), ip: regs.ip, period, ..Sample::default() };
            let context = event.output.context(spec, &sample_id);
            let outcome = match core.writer.record.sample(&spec.request.layout, &sample_id, &sample) {
                Ok(record) => {
                    sampler.spend(event, size_of_val(record));
                    session.write(record, &context)
                }
                Err(_) => session.lose(1),
            };
            if outcome.wake {
                core.writer.wake(&event.output, spec);
            }
            core.writer.count_sample(outcome.written);
            if !outcome.written {
                event.lost = event.lost.saturating_add(1);
            }
        }
        entries.len()
    }
}

/// Returns the events of `due`, by ascending id. Looks each event up once.
fn overflowed<'a>(due: impl Iterator<Item = &'a Recorded>, map: &EventMap) -> Vec<Overflowed> {
    let mut events: Vec<Overflowed> = Vec::new();
    let mut last = None;
    for recorded in due {
        let id = recorded.event;
        if last.replace(id) != Some(id)
            && let Err(at) = events.binary_search_by_key(&id, |event| event.event)
        {
            events.insert(at, Overflowed::new(id, map.get(id)));
        }
    }
    events
}

/// Sorts overflows by the sinks of their events, so that each sink gets one burst. This changes the order of records
/// across rings, but readers rely only on the order within a ring, which stays the order of time.
fn sort_by_sink(burst: &mut [Recorded], events: &[Overflowed]) {
    let one_sink = events.windows(2).all(|two| two[0].sink == two[1].sink);
    if !one_sink {
        burst.sort_by_cached_key(|recorded| {
            let at = events.binary_search_by_key(&recorded.event, |event| event.event);
            at.ok().and_then(|at| events[at].sink)
        });
    }
}

/// The moment of an overflow that the host recorded.
fn moment(core: &Core, recorded: &Recorded, history: &TaskHistory) -> Moment {
    let tsc = core.cpu.vcpu.to_guest(recorded.overflow.tsc);
    Moment {
        vcpu: core.cpu.index,
        tsc,
        time: core.cpu.backend.clock.nanoseconds(tsc),
        place: Some(CpuContext { regs: recorded.regs(), cpu: None }),
        task: history.at(tsc),
        addr: 0,
    }
}
