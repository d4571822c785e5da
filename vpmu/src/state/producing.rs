//! What traces hold: which exits and samples, from when on and until when. Where their packets go is
//! not known here.

use std::io;

use super::State;
use super::exit::Exit;
use super::overflow::Moment;
use crate::abi::SamplePacket;
use crate::event::{Event, Host};
use crate::machine;
use crate::output::Note;
use crate::record::Origin;
use crate::throttle::Verdict;
use crate::trace::{Found, Lasting, Packet};
use crate::vcpu::exit_matches;

/// The exit that a vCPU is in, as far as traces wait for its end.
#[derive(Debug, Default)]
pub(super) struct Awaited {
    exit: Option<Lasting>,
    traces: Vec<u64>,
}

impl State {
    /// A vCPU left the guest: the traces that are active and not paused at this moment hold the exit.
    pub(super) fn trace_exit(&mut self, host: &Host<'_>, exit: &mut Exit<'_>, why: &machine::Exit) {
        let vcpu = exit.vcpu;
        // One that was never entered from again is over now.
        self.end_exit(host, vcpu, true);
        let mut traces = std::mem::take(&mut self.awaited[vcpu as usize].traces);
        let mut blind = Vec::new();
        for &id in &self.active[vcpu as usize] {
            let Some(event) = self.events.get(&id) else {
                continue;
            };
            let facts = &event.facts;
            if !facts.traces_exits() || event.is_paused() || !exit_matches(facts.config, why.reason)
            {
                continue;
            }
            if facts.excludes_any() {
                match exit.regs() {
                    Some(regs) if facts.excludes(regs.user) => continue,
                    Some(_) => {}
                    None => {
                        blind.push(id);
                        continue;
                    }
                }
            }
            traces.push(id);
        }
        let awaited = &mut self.awaited[vcpu as usize];
        awaited.exit = (!traces.is_empty()).then(|| {
            let tsc = exit.tsc(host);
            Lasting {
                exit: *why,
                vcpu,
                tsc,
                time: self.clock.nanoseconds(tsc),
                regs: exit.regs(),
                task: self.output.running(vcpu),
            }
        });
        awaited.traces = traces;
        if awaited.exit.is_some() {
            host.vcpus[vcpu as usize].await_entry();
        }
        for id in blind {
            self.fail(host, id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// `vcpu` is about to enter the guest while a trace waits for it.
    pub(crate) fn enter(&mut self, host: &Host<'_>, vcpu: u32) {
        self.end_exit(host, vcpu, false);
    }

    /// A trace ends, or its area goes: of the exit that it is in it holds what there is.
    pub(super) fn cut(&mut self, host: &Host<'_>, id: u64) {
        let on = self.events.get(&id).and_then(Event::active_on);
        let Some(vcpu) = on else {
            return;
        };
        let awaited = &mut self.awaited[vcpu as usize];
        let (Some(exit), Some(at)) = (
            awaited.exit,
            awaited.traces.iter().position(|&trace| trace == id),
        ) else {
            return;
        };
        awaited.traces.remove(at);
        let now = self.now(host, vcpu);
        self.write_exit(host, id, &exit, now, true);
    }

    /// As [`State::cut`], for every trace that writes to the area mapped with `area`.
    pub(crate) fn cut_all(&mut self, host: &Host<'_>, area: u64) {
        let writes = |event: &&Event| self.output.area_of(event.facts.owner) == Some(area);
        let writers = self.events.values().filter(writes);
        for id in writers.map(|event| event.facts.id).collect::<Vec<_>>() {
            self.cut(host, id);
        }
    }

    /// A trace of samples overflowed after each of `periods`, all found at one moment: one packet
    /// stands for those that its rate and its limit allow.
    pub(super) fn trace_sample(
        &mut self,
        host: &Host<'_>,
        id: u64,
        periods: impl Iterator<Item = u64>,
        moment: &Moment,
    ) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        let (limit, origin) = (event.limit, moment.origin(event));
        let (mut overflows, mut counted, mut last) = (0, 0_u64, false);
        let mut silenced = Ok(());
        for period in periods {
            if limit > 0 && overflows == limit {
                break;
            }
            self.trigger(host, id);
            let Some((verdict, result)) = self.admit(host, id, moment) else {
                return;
            };
            silenced = silenced.and(result);
            if verdict == Verdict::Beyond {
                self.output.tally.throttled += 1;
                continue;
            }
            overflows += 1;
            counted = counted.saturating_add(period);
            last |= verdict == Verdict::Last;
        }
        if overflows == 0 {
            return;
        }
        self.write_sample(id, &origin, moment, overflows, counted);
        if self.events.get(&id).is_some_and(Event::is_paused) {
            // Nothing follows that would show it.
            self.flush(host, id);
        }
        if last {
            self.note(id, &origin, &Note::Throttle);
            // A vCPU whose host counter is silent may not come here for long.
            self.start_collecting(host);
        }
        if let Err(error) = silenced {
            self.fail(host, id, error);
            return;
        }
        for _ in 0..overflows {
            if self.reaches_limit(host, id) {
                break;
            }
        }
    }

    /// The exit that a vCPU is in is over, or to be taken as over: the traces that wait for that
    /// have its packet.
    fn end_exit(&mut self, host: &Host<'_>, vcpu: u32, cut: bool) {
        let awaited = &mut self.awaited[vcpu as usize];
        let Some(exit) = awaited.exit.take() else {
            return;
        };
        let mut traces = std::mem::take(&mut awaited.traces);
        let now = self.now(host, vcpu);
        for id in traces.drain(..) {
            self.write_exit(host, id, &exit, now, cut);
        }
        // Its room serves the next exit.
        self.awaited[vcpu as usize].traces = traces;
    }

    /// Writes the packet of an exit that is over at `now`.
    fn write_exit(&mut self, host: &Host<'_>, id: u64, exit: &Lasting, now: u64, cut: bool) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let task = event.task.unwrap_or(exit.task);
        let origin = Origin {
            pid: task.pid,
            tid: task.tid,
            time: exit.time,
            id: event.facts.owner,
            stream_id: event.facts.id,
            vcpu: exit.vcpu,
        };
        let packet = exit.packet(task, now, cut);
        let paused = event.is_paused();
        if let Some(trace) = &mut event.trace {
            let packet = Packet::Exit(&packet);
            self.output
                .aux_produce(&event.facts, &origin, exit.tsc, trace, packet);
        }
        if paused {
            // Nothing follows that would show it.
            self.flush(host, id);
        }
    }

    /// Writes the packet of overflows of a trace that were found together, `period` in all. One that
    /// would tell of a mode that is excluded, or of a vCPU that runs on, is lost.
    fn write_sample(
        &mut self,
        id: u64,
        origin: &Origin,
        moment: &Moment,
        overflows: u64,
        period: u64,
    ) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let facts = &event.facts;
        let Some(trace) = &mut event.trace else {
            return;
        };
        let told = moment
            .place
            .filter(|place| !facts.excludes(place.regs.user));
        let Some(place) = told else {
            let len = size_of::<SamplePacket>() as u64;
            self.output.aux_lose(facts, trace, 1, len);
            return;
        };
        let found = Found {
            place,
            overflows,
            period,
        };
        let packet = found.packet(origin);
        self.output
            .aux_produce(facts, origin, moment.tsc, trace, Packet::Sample(&packet));
    }
}
