//! What an event's count comes from: host counters, a vCPU's figures, or what happened.

use std::io;

use super::{Facts, Host};
use crate::abi::{
    EXIT_ALL, KIND_EXIT_TRACE, KIND_EXITS, KIND_GUEST_TIME, KIND_HALTS, KIND_MARK,
    KIND_SAMPLE_TRACE, KIND_TSC, PACE_EXITS,
};
use crate::source::{Counter, Overflows, Rate, Reading, Request};

/// A period so long that no host counter overflows with it.
const NEVER: u64 = u64::MAX >> 1;

/// A host counter of one event on one vCPU's thread, with its last reading.
#[derive(Debug)]
pub(super) struct HostCounter {
    vcpu: u32,
    pub(super) counter: Box<dyn Counter>,
    pub(super) last: Reading,
}

#[derive(Debug)]
pub(super) enum Backing {
    Host(Vec<HostCounter>),
    Tsc,
    AllExits,
    /// Exits that reached the VMM, as the vCPU counts them by itself.
    Exits,
    Halts,
    GuestTime,
    /// What the device sees happen, one by one: marks, exits of one mode, and those that pace a
    /// trace.
    Happened(u64),
    /// Nothing: what a trace counts is what it wrote.
    Traced,
}

impl Backing {
    pub(super) fn new(facts: &Facts) -> Self {
        match (facts.kind, facts.config) {
            (KIND_TSC, _) => Self::Tsc,
            (KIND_EXITS, EXIT_ALL) => Self::AllExits,
            (KIND_EXITS, _) if !facts.excludes_any() => Self::Exits,
            (KIND_MARK | KIND_EXITS, _) | (KIND_SAMPLE_TRACE, PACE_EXITS) => Self::Happened(0),
            (KIND_EXIT_TRACE, config) if config != EXIT_ALL => Self::Traced,
            (KIND_HALTS, _) => Self::Halts,
            (KIND_GUEST_TIME, _) => Self::GuestTime,
            _ => Self::Host(Vec::new()),
        }
    }

    /// Opens the host counter for `vcpu`, if there is such and it is not open yet.
    pub(super) fn prepare(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        request: &Request,
    ) -> io::Result<()> {
        let Self::Host(counters) = self else {
            return Ok(());
        };
        if counters.iter().any(|open| open.vcpu == vcpu) {
            return Ok(());
        }
        let thread = host.vcpus[vcpu as usize]
            .thread()
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        counters.push(HostCounter {
            vcpu,
            counter: host.source.open(request, thread)?,
            last: Reading::default(),
        });
        Ok(())
    }

    /// The host counter on `vcpu`.
    pub(super) fn counter(&mut self, vcpu: u32) -> Option<&mut HostCounter> {
        match self {
            Self::Host(counters) => counters.iter_mut().find(|open| open.vcpu == vcpu),
            _ => None,
        }
    }

    /// Gives the host counter on `vcpu` back.
    pub(super) fn drop_counter(&mut self, vcpu: u32) {
        if let Self::Host(counters) = self {
            counters.retain(|open| open.vcpu != vcpu);
        }
    }

    /// Gives every host counter back.
    pub(super) fn drop_counters(&mut self) {
        if let Self::Host(counters) = self {
            counters.clear();
        }
    }

    /// Another rate for every host counter, from now; of the kind that it was opened with.
    pub(super) fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        match self {
            Self::Host(counters) => counters
                .iter_mut()
                .try_for_each(|open| open.counter.set_rate(rate)),
            _ => Ok(()),
        }
    }

    /// No overflows of host counters with a period, until the next [`Backing::set_rate`].
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

    /// Its figures on `vcpu` now, only growing.
    pub(super) fn read(
        &mut self,
        host: &Host<'_>,
        vcpu: u32,
        facts: &Facts,
    ) -> io::Result<Reading> {
        let on = &host.vcpus[vcpu as usize];
        let gone = || io::Error::from_raw_os_error(libc::EIO);
        let value = match self {
            Self::Host(_) => {
                let open = self.counter(vcpu).ok_or_else(gone)?;
                open.last = open.counter.read()?;
                return Ok(open.last);
            }
            Self::Tsc => host.guest_tsc(vcpu),
            Self::AllExits => host.machine.exits(vcpu).ok_or_else(gone)?,
            Self::Exits => on.exits_of(facts.config),
            Self::Halts => host.machine.halts(vcpu).ok_or_else(gone)?,
            Self::GuestTime => on.guest_time(),
            Self::Happened(times) => *times,
            Self::Traced => 0,
        };
        Ok(Reading {
            value,
            ..Reading::default()
        })
    }
}
