//! A vCPU that left the guest: what is counted then, and which overflows are found.

use std::io;

use super::State;
use super::overflow::{Moment, Periods};
use super::triggers::Found;
use crate::abi::{KIND_EXITS, KIND_MARK, KIND_SAMPLE_TRACE, MARK_ANY, PACE_EXITS};
use crate::event::{Facts, Host};
use crate::machine::{self, CpuState, ExitReason, GuestRegs, Registers};
use crate::vcpu::{Need, exit_matches};
use crate::walk::Place;

/// A vCPU just out of the guest, its registers and the time read when first asked for.
pub(super) struct Exit<'a> {
    pub(super) vcpu: u32,
    registers: &'a mut dyn Registers,
    regs: Option<Option<GuestRegs>>,
    cpu: Option<Option<CpuState>>,
    tsc: Option<u64>,
    /// The value of the mark that it is, if it is one.
    mark: Option<u32>,
}

impl<'a> Exit<'a> {
    fn new(vcpu: u32, registers: &'a mut dyn Registers) -> Self {
        Self {
            vcpu,
            registers,
            regs: None,
            cpu: None,
            tsc: None,
            mark: None,
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
            addr: self.mark.map_or(0, u64::from),
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
        exit.mark = Some(value);
        self.acting(host, |state| {
            state.happen(host, exit, |facts| {
                facts.kind == KIND_MARK && [u64::from(value), MARK_ANY].contains(&facts.config)
            });
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
        self.acting(host, |state| {
            if on.needs(Need::Exits) {
                state.happen(host, exit, |facts| match (facts.kind, facts.config) {
                    (KIND_EXITS, config) => exit_matches(config, why.reason),
                    kind_and_pace => kind_and_pace == (KIND_SAMPLE_TRACE, PACE_EXITS),
                });
            }
            if on.needs(Need::HostSamples) {
                state.find_all(host, vcpu, why.reason);
            }
        });
    }

    /// What events whose facts `matches` count happened: first all of them count it, so that each
    /// finds the others' counts as they are after it; then those whose period is over have overflowed.
    fn happen(&mut self, host: &Host<'_>, exit: &mut Exit<'_>, matches: impl Fn(&Facts) -> bool) {
        let (mut grown, mut completed, mut blind) = (Vec::new(), Vec::new(), Vec::new());
        let ids: Vec<u64> = self.active[exit.vcpu as usize].iter().copied().collect();
        for id in ids {
            let Some(facts) = self.events.get(&id).and_then(|event| {
                let matched = event.is_kept() && !event.is_paused() && matches(&event.facts);
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
            let periods = Periods::Equal {
                overflows: done.overflows,
                length: done.length,
            };
            self.found(Found {
                id,
                periods,
                moment: exit.moment(self, host),
            });
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
    fn find_all(&mut self, host: &Host<'_>, vcpu: u32, reason: ExitReason) {
        let active = self.active[vcpu as usize].iter();
        let sampling: Vec<u64> = active
            .filter(|id| {
                let event = self.events.get(id);
                event.is_some_and(|event| event.is_sampled_by_host() && !event.is_batched())
            })
            .copied()
            .collect();
        let mut overflows = 0;
        for id in sampling {
            overflows += self.find(host, id, vcpu);
        }
        if overflows > 0 && reason == ExitReason::Signal {
            self.metrics.overflow_exits += 1;
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
