//! Overflows that were found: what becomes of them, and the samples that are made of them. Where the
//! vCPU stood is known by then.

use std::io;

use super::triggers::Found;
use super::{Late, State};
use crate::abi::SamplePacket;
use crate::event::{Event, Host};
use crate::machine::GuestRegs;
use crate::output::Note;
use crate::record::{
    MISC_KERNEL, MISC_UNKNOWN, MISC_USER, Origin, SAMPLE_CALLCHAIN, SAMPLE_IP, SAMPLE_REGS_INTR,
    SAMPLE_REGS_USER, SAMPLE_STACK_USER, Sample,
};
use crate::source::{Overflow, Overflows};
use crate::tasks::Task;
use crate::throttle::Verdict;
use crate::walk::Place;

/// Fields of a sample that tell where the guest was.
const PLACES: u64 =
    SAMPLE_IP | SAMPLE_CALLCHAIN | SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR;

/// Where and when an overflow was, and who ran: the same for all that one exit finds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) vcpu: u32,
    /// The guest's.
    pub(super) tsc: u64,
    /// The same in guest nanoseconds.
    pub(super) time: u64,
    /// `None` where the hypervisor would not tell.
    pub(super) place: Option<Place>,
    pub(super) task: Task,
    /// The value of the mark that it was, else zero.
    pub(super) addr: u64,
}

impl Moment {
    /// Whose record or packet it is that an event writes of it.
    pub(super) fn origin(&self, event: &Event) -> Origin {
        let task = event.task.unwrap_or(self.task);
        Origin {
            pid: task.pid,
            tid: task.tid,
            time: self.time,
            id: event.facts.owner,
            stream_id: event.facts.id,
            vcpu: self.vcpu,
        }
    }
}

/// What the count grew by for each of some overflows that were found together.
#[derive(Debug)]
pub(super) enum Periods {
    /// Those that the device counted.
    Equal { overflows: u64, length: u64 },
    /// Those that the host recorded.
    Each(std::vec::IntoIter<Overflow>),
}

impl Iterator for Periods {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match self {
            Self::Equal { overflows: 0, .. } => None,
            Self::Equal { overflows, length } => {
                *overflows -= 1;
                Some(*length)
            }
            Self::Each(overflows) => overflows.next().map(|overflow| overflow.period),
        }
    }
}

impl State {
    /// Takes the overflows of one host counter, to act at the exit that its vCPU is at; how many there
    /// were.
    pub(super) fn find(&mut self, host: &Host<'_>, id: u64, vcpu: u32) -> u64 {
        let Some(event) = self.events.get_mut(&id) else {
            return 0;
        };
        let Overflows { samples, lost, .. } = event.drain(vcpu);
        let overflows = samples.len() as u64;
        if overflows > 0 {
            // What came before on this vCPU is to stand before it.
            self.settle(host);
            let tsc = host.guest_tsc(vcpu);
            let moment = Moment {
                vcpu,
                tsc,
                time: self.clock.nanoseconds(tsc),
                place: self.place_at_exit(host, vcpu),
                task: self.output.running(vcpu),
                addr: 0,
            };
            let periods = Periods::Each(samples.into_iter());
            self.found(Found {
                id,
                periods,
                moment,
            });
        }
        self.lose(id, lost);
        overflows
    }

    /// Overflows of an event act: on those that it starts and stops, and on its own records.
    pub(super) fn overflows(&mut self, host: &Host<'_>, found: Found) {
        let Found {
            id,
            mut periods,
            moment,
        } = found;
        let Some(event) = self.events.get(&id) else {
            return;
        };
        if event.facts.is_trace() {
            self.trace_sample(host, id, periods, &moment);
        } else {
            periods.all(|period| self.overflow(host, id, period, &moment));
        }
    }

    /// An overflow at `moment`: what becomes of it, and of the host's counter with the last of a
    /// share.
    pub(super) fn admit(
        &mut self,
        host: &Host<'_>,
        id: u64,
        moment: &Moment,
    ) -> Option<(Verdict, io::Result<()>)> {
        self.lift_at(host, id, moment.time);
        let allowance = self.allowance;
        self.with_needs(host, id, |event| event.admit(allowance, moment.time))
    }

    /// An event that makes records overflowed after `period`. At the last that its limit allows the
    /// event is turned off; whether it goes on.
    pub(super) fn overflow(
        &mut self,
        host: &Host<'_>,
        id: u64,
        period: u64,
        moment: &Moment,
    ) -> bool {
        self.trigger(host, id);
        let Some((verdict, silenced)) = self.admit(host, id, moment) else {
            return false;
        };
        if verdict == Verdict::Beyond {
            self.output.tally.throttled += 1;
            return true;
        }
        let origin = self.sample(host, id, period, moment);
        if let (Verdict::Last, Some(origin)) = (verdict, origin) {
            self.note(id, &origin, &Note::Throttle);
            // A vCPU whose host counter is silent may not come here for long.
            self.start_collecting(host);
        }
        if let Err(error) = silenced {
            self.fail(host, id, error);
            return false;
        }
        !self.reaches_limit(host, id)
    }

    /// Makes the record of one overflow, or counts it as lost; whose it is.
    fn sample(&mut self, host: &Host<'_>, id: u64, period: u64, moment: &Moment) -> Option<Origin> {
        let snapshot = self.sampled_snapshot(host, id);
        let event = self.events.get_mut(&id)?;
        let facts = &event.facts;
        let origin = moment.origin(event);
        // A record without the IP that was asked for would be a lie, and one from the mode that
        // is excluded a leak: the overflow came there, but the exit that found it came later.
        let regs = moment.place.map(|place| place.regs);
        let tells = regs.is_some_and(|regs| !facts.excludes(regs.user));
        if !tells && facts.layout.sample_type & PLACES != 0 {
            self.lose(id, 1);
            return Some(origin);
        }
        let wish = facts.wish();
        let capture = &mut self.capture;
        if let Some(place) = moment.place.filter(|_| wish.wants_state()) {
            let user_regs = self.output.user_regs(moment.vcpu);
            capture.take(self.output.guest(), &place, user_regs, &wish);
        }
        let sample = Sample {
            misc: match regs {
                Some(GuestRegs { user: true, .. }) => MISC_USER,
                Some(GuestRegs { user: false, .. }) => MISC_KERNEL,
                None => MISC_UNKNOWN,
            },
            ip: regs.map_or(0, |regs| regs.ip),
            addr: moment.addr,
            period,
            read: snapshot.reading(),
            chain: capture.chain(),
            regs_user: capture.regs_user(),
            stack: capture.stack(),
            regs_intr: capture.regs_intr(),
        };
        if !self.output.sample(facts, &origin, &sample) {
            event.lost = event.lost.saturating_add(1);
        }
        Some(origin)
    }

    /// Counts overflows of an event that no record or packet can be made of.
    pub(super) fn lose(&mut self, id: u64, overflows: u64) {
        let Some(event) = self.events.get_mut(&id).filter(|_| overflows > 0) else {
            return;
        };
        match &mut event.trace {
            Some(trace) => {
                let bytes = overflows.saturating_mul(size_of::<SamplePacket>() as u64);
                self.output.aux_lose(&event.facts, trace, overflows, bytes);
            }
            None => {
                event.lost = event.lost.saturating_add(overflows);
                self.output.lose(&event.facts, overflows);
            }
        }
    }

    /// Counts an overflow towards the limit of its event; whether that turned it off.
    pub(super) fn reaches_limit(&mut self, host: &Host<'_>, id: u64) -> bool {
        let Some(event) = self.events.get_mut(&id).filter(|event| event.limit > 0) else {
            return false;
        };
        event.limit -= 1;
        if event.limit > 0 {
            return false;
        }
        event.enabled = false;
        // An event that fails here says so by itself. What the host saw of it since is beyond
        // the limit.
        let _ = self.halt(host, id, Late::Dropped);
        self.stop_members(host, id);
        self.output.notices.limit(id);
        true
    }

    pub(super) fn note(&mut self, id: u64, origin: &Origin, note: &Note<'_>) {
        if let Some(event) = self.events.get(&id) {
            self.output.note(&event.facts, origin, note);
        }
    }
}
