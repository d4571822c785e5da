//! The events of one device and what happens to them, with the device's lock held. Requests come
//! from `control` and `command`, exits and marks from `device`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vm_memory::GuestMemoryMmap;

use crate::abi::{F_RING, KIND_EXITS, KIND_MARK};
use crate::clock::Clock;
use crate::errno::Errno;
use crate::event::{Context, Event, Host};
use crate::machine::{ExitReason, GuestRegs, Registers};
use crate::metrics::Metrics;
use crate::output::{Moment, Output};
use crate::period::Period;
use crate::queues::Queues;
use crate::settings::Settings;
use crate::vcpu::{Need, exit_matches};

/// Everything between a driver's `DRIVER_OK` and its reset.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) settings: Settings,
    pub(crate) clock: Clock,
    pub(crate) features: u64,
    pub(crate) queues: Queues,
    pub(crate) output: Output,
    pub(crate) events: BTreeMap<u64, Event>,
    /// The next event's id; outlives the state, for ids are never used again.
    pub(crate) next_id: u64,
    pub(crate) metrics: Metrics,
    /// Active events of each vCPU.
    active: Vec<BTreeSet<u64>>,
    /// Registers at the last exit of each vCPU that host counters sampled, and which exit.
    exit_regs: Vec<(u64, Option<GuestRegs>)>,
}

impl State {
    pub(crate) fn new(
        settings: Settings,
        clock: Clock,
        memory: GuestMemoryMmap,
        features: u64,
        queues: Vec<virtio_queue::Queue>,
        next_id: u64,
    ) -> Self {
        let vcpus = settings.vcpus as usize;
        let memory = Arc::new(memory);
        Self {
            settings,
            clock,
            features,
            queues: Queues::new(Arc::clone(&memory), queues),
            output: Output::new(memory, vcpus),
            events: BTreeMap::new(),
            next_id,
            metrics: Metrics::default(),
            active: vec![BTreeSet::new(); vcpus],
            exit_regs: vec![(0, None); vcpus],
        }
    }

    /// What this activation did.
    pub(crate) fn totals(&self) -> Metrics {
        Metrics {
            samples_written: self.output.tally.written,
            samples_lost: self.output.tally.lost,
            wakeups: self.output.tally.wakeups,
            ..self.metrics.clone()
        }
    }

    pub(crate) fn has_rings(&self) -> bool {
        self.features & 1 << F_RING != 0
    }

    /// Makes an event count if its state says that it should.
    pub(crate) fn start(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let (Some(vcpu), true, None) = (event.placed_on(), event.enabled, event.active_on()) else {
            return Ok(());
        };
        if event.has_failed() {
            return Err(Errno::EIO);
        }
        if let Err(error) = event.start(host, vcpu) {
            return Err(self.fail(id, error));
        }
        self.active[vcpu as usize].insert(id);
        if let Some(need) = event.needs() {
            host.vcpus[vcpu as usize].add_need(need);
        }
        self.output.show(id, &event.face(self.clock));
        Ok(())
    }

    /// Makes an event stand still, what is pending for its ring written.
    pub(crate) fn stop(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = if let Some(vcpu) = event.active_on() {
            self.active[vcpu as usize].remove(&id);
            if let Some(need) = event.needs() {
                host.vcpus[vcpu as usize].drop_need(need);
            }
            let stopped = event.stop(host);
            if event.needs() == Some(Need::HostSamples) {
                // Overflows since the exit belong to the exit: the guest has not run on.
                let regs = self.exit_regs(host, vcpu);
                self.drain(host, id, vcpu, regs);
            }
            stopped
        } else {
            Ok(())
        };
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        self.output.flush(&event.facts);
        self.output.show(id, &event.face(self.clock));
        result.map_err(|error| self.fail(id, error))
    }

    /// Brings an event's figures up to now, a pending loss written.
    pub(crate) fn update(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.update(host);
        self.output.flush(&event.facts);
        self.output.show(id, &event.face(self.clock));
        result.map_err(|error| self.lost(host, id, error))
    }

    /// Its count becomes zero.
    pub(crate) fn reset_count(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        let result = event.reset(host);
        self.output.show(id, &event.face(self.clock));
        result.map_err(|error| self.lost(host, id, error))
    }

    /// A new period for an event that samples.
    pub(crate) fn set_period(
        &mut self,
        host: &Host<'_>,
        id: u64,
        period: u64,
    ) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        // perf takes no period whose top bit is set.
        let too_long = period >> 63 != 0;
        if too_long || period < event.facts.shortest_period || event.period.is_none() {
            return Err(Errno::EINVAL);
        }
        event
            .set_period(period)
            .map_err(|error| self.lost(host, id, error))
    }

    /// Closes an event; its ring goes with the last event that writes to it.
    pub(crate) fn close(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        if let Err(Errno::ENOENT) = self.stop(host, id) {
            return Err(Errno::ENOENT);
        }
        let event = self.events.remove(&id).ok_or(Errno::ENOENT)?;
        self.output.forget(id);
        let owner = event.facts.owner;
        if !self.events.values().any(|other| other.facts.owner == owner) {
            self.output.remove_ring(owner);
            self.output.forget(owner);
        }
        Ok(())
    }

    /// Closes everything, without a write to guest memory.
    pub(crate) fn drop_events(&mut self, host: &Host<'_>) {
        for (id, event) in std::mem::take(&mut self.events) {
            if let Some(vcpu) = event.active_on() {
                self.active[vcpu as usize].remove(&id);
                if let Some(need) = event.needs() {
                    host.vcpus[vcpu as usize].drop_need(need);
                }
            }
        }
    }

    /// A mark was placed on `vcpu`.
    pub(crate) fn mark(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        value: u32,
        regs: &mut dyn Registers,
    ) {
        self.overflow(host, vcpu, regs, |event| {
            (event.facts.kind == KIND_MARK && event.facts.config == u64::from(value))
                .then(|| event.mark())
        });
    }

    /// `vcpu` left the guest while events there sample its exits or host counters.
    pub(crate) fn leave(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        reason: ExitReason,
        regs: &mut dyn Registers,
    ) {
        let on = &host.vcpus[vcpu as usize];
        if on.needs(Need::ExitSamples) {
            self.overflow(host, vcpu, regs, |event| {
                (event.facts.kind == KIND_EXITS && exit_matches(event.facts.config, reason))
                    .then(|| event.grow(1))
            });
        }
        if on.needs(Need::HostSamples) {
            self.drain_all(host, vcpu, reason, regs);
        }
    }

    /// Lets `count` say by how many periods each active event of `vcpu` overflows, and writes
    /// the samples.
    fn overflow(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        regs: &mut dyn Registers,
        mut count: impl FnMut(&mut Event) -> Option<u64>,
    ) {
        let mut moment = None;
        for id in &self.active[vcpu as usize] {
            let Some(event) = self.events.get_mut(id) else {
                continue;
            };
            let Some(overflows) = count(event).filter(|&overflows| overflows > 0) else {
                continue;
            };
            let moment = moment.get_or_insert_with(|| Moment {
                vcpu,
                time: self.clock.nanoseconds(host.guest_tsc(vcpu)),
                regs: regs.registers(),
            });
            let period = event.period.map_or(0, Period::length);
            for _ in 0..overflows {
                self.output.sample(&event.facts, period, event.task, moment);
            }
        }
    }

    /// Takes the overflows of every active host counter on `vcpu`.
    fn drain_all(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        reason: ExitReason,
        regs: &mut dyn Registers,
    ) {
        let sampling: Vec<u64> = self.active[vcpu as usize]
            .iter()
            .filter(|id| {
                self.events
                    .get(id)
                    .is_some_and(|event| event.needs() == Some(Need::HostSamples))
            })
            .copied()
            .collect();
        let regs = regs.registers();
        // Where a command may come next, whose stop finds overflows after this.
        self.exit_regs[vcpu as usize] = (host.vcpus[vcpu as usize].exits().total(), regs);
        let mut overflows = 0;
        for id in sampling {
            overflows += self.drain(host, id, vcpu, regs);
        }
        if overflows > 0 && reason == ExitReason::Signal {
            self.metrics.overflow_exits += 1;
        }
    }

    /// Writes the overflows of one host counter; how many there were.
    fn drain(&mut self, host: &Host<'_>, id: u64, vcpu: u32, regs: Option<GuestRegs>) -> u64 {
        let Some(event) = self.events.get_mut(&id) else {
            return 0;
        };
        let overflows = event.drain(vcpu);
        if !overflows.samples.is_empty() {
            let moment = Moment {
                vcpu,
                time: self.clock.nanoseconds(host.guest_tsc(vcpu)),
                regs,
            };
            let period = event.period.map_or(0, Period::length);
            for _ in &overflows.samples {
                self.output
                    .sample(&event.facts, period, event.task, &moment);
            }
        }
        self.output.lose(&event.facts, overflows.lost);
        overflows.samples.len() as u64
    }

    /// Registers at the exit that is being handled, if they were read.
    fn exit_regs(&self, host: &Host<'_>, vcpu: u32) -> Option<GuestRegs> {
        let (exit, regs) = self.exit_regs[vcpu as usize];
        regs.filter(|_| exit == host.vcpus[vcpu as usize].exits().total())
    }

    /// As [`State::fail`], for an event that may be active.
    fn lost(&mut self, host: &Host<'_>, id: u64, error: std::io::Error) -> Errno {
        if let Some(event) = self.events.get_mut(&id)
            && let Some(vcpu) = event.active_on()
        {
            self.active[vcpu as usize].remove(&id);
            if let Some(need) = event.needs() {
                host.vcpus[vcpu as usize].drop_need(need);
            }
        }
        self.fail(id, error)
    }

    /// The host gave an inactive event up: says so to the driver, once.
    fn fail(&mut self, id: u64, error: std::io::Error) -> Errno {
        if let Some(event) = self.events.get_mut(&id)
            && !event.has_failed()
        {
            log::warn!("event {id} is in error: {error}");
            event.fail();
            self.output.report_error(id);
        }
        Errno::from(error)
    }

    /// The vCPU that a task event is opened on first, as the likeliest to be used.
    pub(crate) fn first_vcpu(host: &Host<'_>, context: Context) -> u32 {
        match context {
            Context::Vcpu(vcpu) | Context::Task(Some(vcpu)) => vcpu,
            Context::Task(None) => (0..)
                .zip(host.vcpus)
                .find(|(_, vcpu)| vcpu.thread().is_some())
                .map_or(0, |(index, _)| index),
        }
    }
}
