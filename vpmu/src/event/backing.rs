//! The sources from which an event's count is computed: host counters, counts that are kept per vCPU, or occurrences
//! that the device itself counts.

use std::io;

use crate::cpu::{Cpu, Lease};
use crate::kind::{Exits, Kind, Pace, Reported};
use crate::slots::OpenSlot;
use crate::source::{Counter, Overflows, Rate, Reading, Request};
use crate::spec::EventSpec;
use crate::work;

/// A period so long that a host counter never overflows.
const NEVER: u64 = u64::MAX >> 1;

/// A host counter owned by one event on one vCPU's thread, with its last reading.
#[derive(Debug)]
pub(super) struct OwnCounter {
    vcpu: u32,
    counter: Box<dyn Counter>,
    pub(super) last: Reading,
    /// The counter's share of the limit on open host counters. `None` for an operator's event, which does not
    /// count towards that limit.
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
    /// One host counter on each vCPU that the event ran on. The counters take samples or trace VM exits, so the event
    /// does not share them with other events.
    Own(Vec<OwnCounter>),
    /// One host counter on each vCPU that the event ran on. Events with equal requests share these counters.
    Shared(Vec<(u32, Lease)>),
    Tsc,
    AllExits,
    /// Exits that reached the VMM. The vCPU's own thread counts them.
    Exits(Reported),
    Halts,
    GuestTime,
    /// Occurrences that the device counts one by one: marks, exits of an event that excludes user or kernel mode, or
    /// exits that pace a trace.
    Happened(u64),
    /// No backing. The count is the number of bytes that the trace has produced, including lost bytes.
    Traced,
}

impl Backing {
    /// `samples` is true if the event has a period, or if it is a trace whose exits the host records.
    pub(super) fn new(spec: &EventSpec, samples: bool) -> Self {
        match spec.kind {
            Kind::Tsc => Self::Tsc,
            Kind::Halts => Self::Halts,
            Kind::GuestTime => Self::GuestTime,
            Kind::Exits(Exits::All) => Self::AllExits,
            Kind::Exits(Exits::Reported(exits)) if !spec.excludes_any() => Self::Exits(exits),
            Kind::Exits(Exits::Reported(_)) | Kind::Mark(_) | Kind::SampleTrace(Pace::Exits) => Self::Happened(0),
            Kind::ExitTrace(Exits::Reported(_)) | Kind::VmmTrace(_) => Self::Traced,
            Kind::Host(_)
            | Kind::SampleTrace(Pace::CpuClock | Pace::Cycles | Pace::Instructions)
            | Kind::ExitTrace(Exits::All) => {
                if samples {
                    Self::Own(Vec::new())
                } else {
                    Self::Shared(Vec::new())
                }
            }
        }
    }

    /// Returns whether the event has a host counter on `vcpu` or does not need one.
    pub(super) fn is_prepared(&self, vcpu: u32) -> bool {
        match self {
            Self::Own(counters) => counters.iter().any(|open| open.vcpu == vcpu),
            Self::Shared(leases) => leases.iter().any(|&(on, _)| on == vcpu),
            _ => true,
        }
    }

    /// Opens the event's host counter on `cpu`, where the event must not have one yet. `operators` is true if the
    /// operator owns the event.
    ///
    /// # Errors
    /// The error that the host returned, or `EMFILE` if the guest's open counters have reached the operator's limit and
    /// this event has no counter yet. An event that already has counters closes its oldest counter instead of failing.
    pub(super) fn prepare(&mut self, cpu: &mut Cpu, request: &Request, operators: bool) -> io::Result<()> {
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

    /// Replaces the event's own counters by one counter on `cpu`, which is opened with `request` but not started. The
    /// replaced counters must be stopped. Does nothing if the event has no counters. If the vCPU has no thread, closes
    /// the counters of other vCPUs, and keeps the counter of the thread that has ended: the next thread gets a new one.
    ///
    /// # Errors
    /// The error that the host returned. The event then has no counters.
    pub(super) fn replace(&mut self, cpu: &mut Cpu, request: &Request) -> io::Result<()> {
        let Self::Own(counters) = self else {
            return Ok(());
        };
        counters.iter().for_each(|_| work::charge_host_call());
        if cpu.thread().is_none() {
            counters.retain(|open| open.vcpu == cpu.index);
            return Ok(());
        }
        // The new counter keeps the share of an old one, so that no other event can take it.
        let slot = std::mem::take(counters).into_iter().next().map(|open| open.slot);
        if let Some(slot) = slot {
            counters.push(OwnCounter { vcpu: cpu.index, counter: cpu.open(request)?, last: Reading::default(), slot });
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

    /// Closes the event's own counters. Returns the event's leases of shared counters. The caller must release each
    /// lease on the lease's vCPU.
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

    /// Sets a new rate for each of the event's own counters. The rate must be of the same type as before: a period
    /// cannot replace a frequency, and a frequency cannot replace a period.
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

    /// Returns the current count and times on `cpu`. They never decrease.
    pub(super) fn read(&mut self, cpu: &mut Cpu) -> io::Result<Reading> {
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
            &mut Self::Exits(exits) => cpu.vcpu.exits_of(exits),
            Self::Halts => cpu.halts().ok_or_else(gone)?,
            Self::GuestTime => cpu.vcpu.guest_time(),
            Self::Happened(times) => *times,
            Self::Traced => 0,
        };
        Ok(Reading { value, ..Reading::default() })
    }
}
