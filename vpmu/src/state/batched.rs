//! The batched engine: what the host recorded while vCPUs ran on is taken from its rings, put in
//! order, told in guest terms and made into samples.

use std::collections::BTreeMap;

use super::State;
use super::overflow::Moment;
use crate::event::{Event, Host};
use crate::machine::GuestRegs;
use crate::merge::Found;
use crate::record::SAMPLE_TID;
use crate::source::Mode;
use crate::tasks::Task;
use crate::vcpu::{Need, Vcpu};
use crate::walk::Place;

/// Milliseconds that a host may take to put a record into its ring: when some are collected while
/// vCPUs run, those that are younger wait, lest an older one of another ring come after them.
const HOLD_BACK: u64 = 1;
/// Where the half of the address space begins that kernels keep to themselves: the mode of a guest
/// whose vCPU ran on is told by its address.
pub(super) const KERNEL_HALF: u64 = 1 << 63;
/// Overflows that are held at once, but for those of one host ring more: a megabyte. Beyond that
/// they are written as they come, for a guest must not have its host keep what it likes.
const MOST_HELD: usize = 16_384;

impl State {
    /// Collects what the host has recorded, while vCPUs run on.
    pub(crate) fn collect(&mut self, host: &Host<'_>) {
        let hold_back = HOLD_BACK * u64::from(self.settings.tsc_khz);
        let until = host.source.tsc().saturating_sub(hold_back);
        self.metrics.drains += 1;
        self.gather(host);
        self.write_until(host, until);
        for (vcpu, on) in (0..).zip(host.vcpus) {
            if on.needs(Need::Throttled) {
                self.lift_all(host, vcpu);
                // Up to here everything is written: what is to come is not of that window.
                let time = self.clock.nanoseconds(on.to_guest(until));
                for id in self.throttled(vcpu, true) {
                    self.lift_at(host, id, time);
                }
            }
        }
        self.rest_if_idle(host);
    }

    /// Has nobody collect any more when there is nothing to collect, and nothing throttled.
    pub(super) fn rest_if_idle(&mut self, host: &Host<'_>) {
        let busy = |on: &Vcpu| on.needs(Need::Collecting) || on.needs(Need::Throttled);
        if self.collecting && self.merge.is_empty() && !host.vcpus.iter().any(busy) {
            self.collecting = false;
            host.machine.draining(false);
        }
    }

    /// Writes whatever the host has recorded up to now: of a vCPU that stands still, everything.
    pub(crate) fn settle(&mut self, host: &Host<'_>) {
        if !self.collecting {
            return;
        }
        self.gather(host);
        self.write_until(host, host.source.tsc());
    }

    /// As [`State::settle`], for an event that has just ceased to count on `vcpu`.
    pub(super) fn settle_last(&mut self, host: &Host<'_>, id: u64, vcpu: u32) {
        self.take(host, id, vcpu);
        self.write_until(host, host.source.tsc());
    }

    /// Drops what the host recorded of an event that has ceased to count on `vcpu`.
    pub(super) fn drop_recorded(&mut self, id: u64, vcpu: u32) {
        if let Some(event) = self.events.get_mut(&id) {
            event.drain(vcpu);
        }
        self.merge.forget(id);
    }

    /// Sees to it that the host's records are collected while an event of the engine counts, and
    /// that throttled events are looked at.
    pub(super) fn start_collecting(&mut self, host: &Host<'_>) {
        if !self.collecting {
            self.collecting = true;
            host.machine.draining(true);
        }
    }

    /// Takes the records of every event of the engine.
    fn gather(&mut self, host: &Host<'_>) {
        for (vcpu, on) in (0..).zip(host.vcpus) {
            if !on.needs(Need::Collecting) {
                continue;
            }
            let batched = |id: &u64| self.events.get(id).is_some_and(Event::is_batched);
            let active = self.active[vcpu as usize].iter().copied();
            for id in active.filter(batched).collect::<Vec<_>>() {
                self.take(host, id, vcpu);
                if self.merge.len() > MOST_HELD {
                    self.write_until(host, host.source.tsc());
                }
            }
        }
    }

    /// Takes the records of one event. What the vCPU's thread did for the host is none of the
    /// guest's.
    pub(super) fn take(&mut self, host: &Host<'_>, id: u64, vcpu: u32) {
        let Some(event) = self.events.get_mut(&id) else {
            return;
        };
        let overflows = event.drain(vcpu);
        let now = host.source.tsc();
        for overflow in &overflows.samples {
            if overflow.mode == Mode::Host {
                self.metrics.host_overflows += 1;
                continue;
            }
            self.merge.add(Found {
                event: id,
                vcpu,
                // It has happened, whatever a clock that was converted says.
                tsc: overflow.tsc.min(now),
                regs: GuestRegs {
                    ip: overflow.ip,
                    user: overflow.ip < KERNEL_HALF,
                },
                period: overflow.period,
            });
        }
        self.write_exits(host, id, vcpu, &overflows.exits);
        self.metrics.host_throttles += overflows.throttles;
        self.lose(id, overflows.lost);
    }

    /// Makes samples of what was taken, up to the host's TSC `until`.
    fn write_until(&mut self, host: &Host<'_>, until: u64) {
        // Read after the records were taken, so they hold every switch before those.
        let mut histories = BTreeMap::new();
        while let Some(found) = self.merge.next(until) {
            let Some(event) = self.events.get(&found.event) else {
                continue;
            };
            let (named, task) = (event.facts.layout.has(SAMPLE_TID), event.task);
            let tsc = host.vcpus[found.vcpu as usize].to_guest(found.tsc);
            let task = match task {
                None if named => {
                    let history = histories
                        .entry(found.vcpu)
                        .or_insert_with(|| self.output.history(found.vcpu));
                    history.at(tsc).unwrap_or_else(|| {
                        self.metrics.samples_unnamed += 1;
                        Task::default()
                    })
                }
                known => known.unwrap_or_default(),
            };
            let moment = Moment {
                vcpu: found.vcpu,
                tsc,
                time: self.clock.nanoseconds(tsc),
                place: Some(Place {
                    regs: found.regs,
                    cpu: None,
                }),
                task,
                addr: 0,
            };
            self.overflow(host, found.event, found.period, &moment);
        }
    }
}
