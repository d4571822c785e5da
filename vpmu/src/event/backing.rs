//! The source of an event's count: host counters, figures of a vCPU, or occurrences in the device.

use std::io;

use super::EventSpec;
use crate::abi::{
    EXIT_ALL, KIND_EXIT_TRACE, KIND_EXITS, KIND_GUEST_TIME, KIND_HALTS, KIND_MARK,
    KIND_SAMPLE_TRACE, KIND_TSC, KIND_VMM_TRACE, PACE_EXITS,
};
use crate::shard::{Cpu, Lease, OpenSlot};
use crate::source::{Counter, Overflows, Rate, Reading, Request};
use crate::work;

/// A period so long that a host counter never overflows.
const NEVER: u64 = u64::MAX >> 1;

/// A host counter owned by one event on one vCPU's thread, with its last reading.
#[derive(Debug)]
pub(super) struct OwnCounter {
    vcpu: u32,
    counter: Box<dyn Counter>,
    pub(super) last: Reading,
    /// `None` for a counter of the operator.
    slot: Option<OpenSlot>,
}

impl OwnCounter {
    pub(super) fn start(&mut self) -> io::Result<()> {
        work::charge_host_call();
        self.counter.start()
    }

    pub(super) fn stop(&mut self) -> io::Result<()> {
        work::charge_host_call();
        self.counter.stop()
    }

    fn read(&mut self) -> io::Result<Reading> {
        work::charge_host_call();
        self.last = self.counter.read()?;
        Ok(self.last)
    }

    fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        work::charge_host_call();
        self.counter.set_rate(rate)
    }
}

#[derive(Debug)]
pub(super) enum Backing {
    /// Host counters of only this event: one on each vCPU that the event ran on. The counters sample, or they
    /// record exits.
    Own(Vec<OwnCounter>),
    /// Host counters shared by equal events of a vCPU: one on each vCPU that the event ran on.
    Shared(Vec<(u32, Lease)>),
    Tsc,
    AllExits,
    /// Exits that reached the VMM, which the vCPU counts itself.
    Exits,
    Halts,
    GuestTime,
    /// Occurrences that the device counts one by one: marks, exits of one mode, exits that pace a
    /// trace.
    Happened(u64),
    /// No backing: the count of a trace is the bytes that it has written.
    Traced,
}

impl Backing {
    /// `samples` is whether host counters make samples, or record exits, for this event.
    pub(super) fn new(spec: &EventSpec, samples: bool) -> Self {
        match (spec.kind, spec.config) {
            (KIND_TSC, _) => Self::Tsc,
            (KIND_EXITS, EXIT_ALL) => Self::AllExits,
            (KIND_EXITS, _) if !spec.excludes_any() => Self::Exits,
            (KIND_MARK | KIND_EXITS, _) | (KIND_SAMPLE_TRACE, PACE_EXITS) => Self::Happened(0),
            (KIND_EXIT_TRACE, config) if config != EXIT_ALL => Self::Traced,
            (KIND_VMM_TRACE, _) => Self::Traced,
            (KIND_HALTS, _) => Self::Halts,
            (KIND_GUEST_TIME, _) => Self::GuestTime,
            _ if samples => Self::Own(Vec::new()),
            _ => Self::Shared(Vec::new()),
        }
    }

    /// Whether the event has a host counter on `vcpu`, or needs none.
    pub(super) fn is_prepared(&self, vcpu: u32) -> bool {
        match self {
            Self::Own(counters) => counters.iter().any(|open| open.vcpu == vcpu),
            Self::Shared(leases) => leases.iter().any(|&(on, _)| on == vcpu),
            _ => true,
        }
    }

    /// Opens a host counter, which must not exist yet, on `cpu` for the guest or the operator.
    ///
    /// # Errors
    /// The host's error; `EMFILE` for the first counter of a guest's event when the operator's
    /// limit is reached. At the limit, an event that has counters gives up its oldest one for the new one.
    pub(super) fn prepare(
        &mut self,
        cpu: &mut Cpu,
        request: &Request,
        operators: bool,
    ) -> io::Result<()> {
        match self {
            Self::Own(counters) => {
                let slot = match operators {
                    true => None,
                    false => match cpu.backend.counters.take() {
                        None if counters.is_empty() => {
                            return Err(io::Error::from_raw_os_error(libc::EMFILE));
                        }
                        None => counters.remove(0).slot,
                        slot => slot,
                    },
                };
                counters.push(OwnCounter {
                    vcpu: cpu.index,
                    counter: cpu.open(request)?,
                    last: Reading::default(),
                    slot,
                });
            }
            Self::Shared(leases) => leases.push((cpu.index, cpu.share(request)?)),
            _ => {}
        }
        Ok(())
    }

    /// Whether the event owns its counters.
    pub(super) fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// The event's own host counter on `vcpu`.
    pub(super) fn counter(&mut self, vcpu: u32) -> Option<&mut OwnCounter> {
        match self {
            Self::Own(counters) => counters.iter_mut().find(|open| open.vcpu == vcpu),
            _ => None,
        }
    }

    /// Drops the counters of `vcpu`, whose thread has ended.
    pub(super) fn forget(&mut self, vcpu: u32) {
        match self {
            Self::Own(counters) => counters.retain(|open| open.vcpu != vcpu),
            Self::Shared(leases) => leases.retain(|&(on, _)| on != vcpu),
            _ => {}
        }
    }

    /// Closes the event's own counters; returns the shared ones, for their vCPUs to release.
    pub(super) fn take_counters(&mut self) -> Vec<(u32, Lease)> {
        match self {
            Self::Own(counters) => {
                counters.clear();
                Vec::new()
            }
            Self::Shared(leases) => std::mem::take(leases),
            _ => Vec::new(),
        }
    }

    /// Sets the rate of each of the event's own counters, from now; the kind of rate must not
    /// change.
    pub(super) fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        match self {
            Self::Own(counters) => counters.iter_mut().try_for_each(|open| open.set_rate(rate)),
            _ => Ok(()),
        }
    }

    /// Disables overflows of host counters with a period, until the next [`Backing::set_rate`].
    pub(super) fn silence(&mut self) -> io::Result<()> {
        self.set_rate(Rate::Period(NEVER))
    }

    /// Takes the overflows of the host counter on `vcpu`.
    pub(super) fn drain(&mut self, vcpu: u32) -> Overflows {
        let mut overflows = Overflows::default();
        if let Some(open) = self.counter(vcpu) {
            open.counter.drain(&mut overflows);
        }
        overflows
    }

    /// The current figures on `cpu`, which only grow.
    pub(super) fn read(&mut self, cpu: &mut Cpu, spec: &EventSpec) -> io::Result<Reading> {
        let gone = || io::Error::from_raw_os_error(libc::EIO);
        let value = match self {
            Self::Own(_) => {
                let open = self.counter(cpu.index).ok_or_else(gone)?;
                return open.read();
            }
            Self::Shared(leases) => {
                let mut on = leases.iter().filter(|(vcpu, _)| *vcpu == cpu.index);
                let &(_, lease) = on.next().ok_or_else(gone)?;
                return cpu.read(lease);
            }
            Self::Tsc => cpu.counting_tsc(),
            Self::AllExits => cpu.all_exits().ok_or_else(gone)?,
            Self::Exits => cpu.vcpu.exits_of(spec.config),
            Self::Halts => cpu.halts().ok_or_else(gone)?,
            Self::GuestTime => cpu.vcpu.guest_time(),
            Self::Happened(times) => *times,
            Self::Traced => 0,
        };
        Ok(Reading {
            value,
            ..Reading::default()
        })
    }
}
