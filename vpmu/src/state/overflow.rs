//! What happens at an exit: counts grow, periods are over, samples are made.

use std::io;

use super::{Pending, State};
use crate::abi::{KIND_EXITS, KIND_MARK, KIND_SAMPLE_TRACE, PACE_EXITS, SamplePacket};
use crate::event::{Event, Facts, Host};
use crate::machine::{self, CpuState, ExitReason, GuestRegs, Registers};
use crate::output::Note;
use crate::record::{
    MISC_KERNEL, MISC_UNKNOWN, MISC_USER, Origin, SAMPLE_CALLCHAIN, SAMPLE_IP, SAMPLE_REGS_INTR,
    SAMPLE_REGS_USER, SAMPLE_STACK_USER, Sample,
};
use crate::tasks::Task;
use crate::throttle::Verdict;
use crate::vcpu::{Need, exit_matches};
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

/// A vCPU just out of the guest, its registers and the time read when first asked for.
pub(super) struct Exit<'a> {
    pub(super) vcpu: u32,
    registers: &'a mut dyn Registers,
    regs: Option<Option<GuestRegs>>,
    cpu: Option<Option<CpuState>>,
    tsc: Option<u64>,
}

impl<'a> Exit<'a> {
    fn new(vcpu: u32, registers: &'a mut dyn Registers) -> Self {
        Self {
            vcpu,
            registers,
            regs: None,
            cpu: None,
            tsc: None,
        }
    }

    pub(super) fn regs(&mut self) -> Option<GuestRegs> {
        *self.regs.get_or_insert_with(|| self.registers.registers())
    }

    /// With all of the state where an event of the vCPU wants it.
    fn place(&mut self, host: &Host<'_>) -> Option<Place> {
        let regs = self.regs()?;
        let cpu = if host.vcpus[self.vcpu as usize].needs(Need::State) {
            *self.cpu.get_or_insert_with(|| self.registers.state())
        } else {
            None
        };
        Some(Place { regs, cpu })
    }

    pub(super) fn tsc(&mut self, host: &Host<'_>) -> u64 {
        let vcpu = self.vcpu;
        *self.tsc.get_or_insert_with(|| host.guest_tsc(vcpu))
    }

    pub(super) fn moment(&mut self, state: &State, host: &Host<'_>) -> Moment {
        let tsc = self.tsc(host);
        Moment {
            vcpu: self.vcpu,
            tsc,
            time: state.clock.nanoseconds(tsc),
            place: self.place(host),
            task: state.output.running(self.vcpu),
        }
    }
}

impl State {
    /// A mark was placed on `vcpu`.
    pub(crate) fn mark(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        value: u32,
        regs: &mut dyn Registers,
    ) {
        let exit = &mut Exit::new(vcpu, regs);
        self.happen(host, exit, |facts| {
            facts.kind == KIND_MARK && facts.config == u64::from(value)
        });
    }

    /// `vcpu` left the guest while events there look at exits; `left`: its TSC at that moment, read
    /// where a trace asks for it.
    pub(crate) fn leave(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        why: &machine::Exit,
        left: Option<u64>,
        regs: &mut dyn Registers,
    ) {
        let on = &host.vcpus[vcpu as usize];
        let exit = &mut Exit::new(vcpu, regs);
        exit.tsc = left;
        if on.needs(Need::Throttled) {
            self.lift_all(host, vcpu);
        }
        if on.needs(Need::HostSamples) {
            // Where a command may come next, whose stop finds overflows after this.
            let exits = on.exits().total();
            self.exit_places[vcpu as usize] = (exits, exit.place(host));
        }
        if left.is_some() {
            // Before any overflow: the exit that pauses a trace is the last that it holds.
            self.trace_exit(host, exit, why);
        }
        if on.needs(Need::Exits) {
            self.happen(host, exit, |facts| match (facts.kind, facts.config) {
                (KIND_EXITS, config) => exit_matches(config, why.reason),
                kind_and_pace => kind_and_pace == (KIND_SAMPLE_TRACE, PACE_EXITS),
            });
        }
        if on.needs(Need::HostSamples) {
            self.drain_all(host, why.reason, exit);
        }
    }

    /// What events whose facts `matches` count happened: first all of them count it, so that each
    /// finds the others' counts as they are after it; then those whose period is over sample.
    fn happen(&mut self, host: &Host<'_>, exit: &mut Exit<'_>, matches: impl Fn(&Facts) -> bool) {
        let (mut grown, mut completed, mut blind) = (Vec::new(), Vec::new(), Vec::new());
        let ids: Vec<u64> = self.active[exit.vcpu as usize].iter().copied().collect();
        for id in ids {
            let Some(facts) = self.events.get(&id).and_then(|event| {
                let matched = event.is_kept() && matches(&event.facts);
                matched.then_some(event.facts)
            }) else {
                continue;
            };
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
            let clock = self.clock;
            if let Some(event) = self.events.get_mut(&id) {
                let done = event.happen(|| clock.nanoseconds(exit.tsc(host)));
                completed.extend(done.map(|done| (id, done)));
                grown.extend(event.shown.then_some(id));
            }
        }
        for id in grown {
            self.show(host, id);
        }
        if !completed.is_empty() {
            // What came before on this vCPU is to stand before it.
            self.settle(host);
        }
        for (id, done) in completed {
            let moment = exit.moment(self, host);
            let overflows = (0..done.overflows).map(|_| done.length);
            self.overflows(host, id, overflows, &moment);
        }
        for id in blind {
            self.fail(host, id, io::Error::from_raw_os_error(libc::EIO));
        }
    }

    /// Shows an event's figures as they are now: the vCPU stands still until they stand there.
    fn show(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let updated = event.update(host);
        self.output.show(id, &event.face(self.clock));
        if let Err(error) = updated {
            self.fail(host, id, error);
        }
    }

    /// Takes the overflows of every active host counter on the vCPU.
    fn drain_all(&mut self, host: &Host<'_>, reason: ExitReason, exit: &mut Exit<'_>) {
        let vcpu = exit.vcpu;
        let active = self.active[vcpu as usize].iter();
        let sampling: Vec<u64> = active
            .filter(|id| {
                let event = self.events.get(id);
                event.is_some_and(|event| event.is_sampled_by_host() && !event.is_batched())
            })
            .copied()
            .collect();
        let place = exit.place(host);
        let mut overflows = 0;
        for id in sampling {
            overflows += self.drain(host, id, vcpu, place);
        }
        if overflows > 0 && reason == ExitReason::Signal {
            self.metrics.overflow_exits += 1;
        }
    }

    /// Makes samples of the overflows of one host counter; how many there were.
    pub(super) fn drain(
        &mut self,
        host: &Host<'_>,
        id: u64,
        vcpu: u32,
        place: Option<Place>,
    ) -> u64 {
        let Some(event) = self.events.get_mut(&id) else {
            return 0;
        };
        let overflows = event.drain(vcpu);
        if !overflows.samples.is_empty() {
            // What came before on this vCPU is to stand before it.
            self.settle(host);
            let tsc = host.guest_tsc(vcpu);
            let moment = Moment {
                vcpu,
                tsc,
                time: self.clock.nanoseconds(tsc),
                place,
                task: self.output.running(vcpu),
            };
            let periods = overflows.samples.iter().map(|sample| sample.period);
            self.overflows(host, id, periods, &moment);
        }
        self.lose(id, overflows.lost);
        overflows.samples.len() as u64
    }

    /// An event overflowed after each of `periods`, all found at one moment.
    fn overflows(
        &mut self,
        host: &Host<'_>,
        id: u64,
        mut periods: impl Iterator<Item = u64>,
        moment: &Moment,
    ) {
        let Some(facts) = self.events.get(&id).map(|event| event.facts) else {
            return;
        };
        self.steer(host, &facts);
        if facts.is_trace() {
            self.trace_sample(host, id, periods, moment);
        } else {
            periods.all(|period| self.overflow(host, id, period, moment));
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
            capture.take(self.output.memory(), &place, user_regs, &wish);
        }
        let sample = Sample {
            misc: match regs {
                Some(GuestRegs { user: true, .. }) => MISC_USER,
                Some(GuestRegs { user: false, .. }) => MISC_KERNEL,
                None => MISC_UNKNOWN,
            },
            ip: regs.map_or(0, |regs| regs.ip),
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
        let paused = event.is_paused();
        match &mut event.trace {
            Some(trace) if !paused => {
                let bytes = overflows.saturating_mul(size_of::<SamplePacket>() as u64);
                self.output.aux_lose(&event.facts, trace, overflows, bytes);
            }
            Some(_) => {}
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
        let _ = self.halt(host, id, Pending::Dropped);
        self.stop_members(host, id);
        self.output.notices.limit(id);
        true
    }

    pub(super) fn note(&mut self, id: u64, origin: &Origin, note: &Note<'_>) {
        if let Some(event) = self.events.get(&id) {
            self.output.note(&event.facts, origin, note);
        }
    }

    /// Where the vCPU stood at the exit that is being handled, if that was read. One that has run
    /// on since, while another's command or a request is served, is elsewhere by now.
    pub(super) fn place_at_exit(&self, host: &Host<'_>, vcpu: u32) -> Option<Place> {
        let on = &host.vcpus[vcpu as usize];
        let (exit, place) = self.exit_places[vcpu as usize];
        place.filter(|_| !on.is_inside() && exit == on.exits().total())
    }
}
