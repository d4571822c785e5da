//! One event: what it counts, its state, its count and times. Knows nothing of rings, queues or
//! other events.

use std::io;

use crate::abi::{
    EXIT_ALL, KIND_EXITS, KIND_GUEST_TIME, KIND_HALTS, KIND_MARK, KIND_TSC, STATE_ACTIVE,
    STATE_ERROR, STATE_INACTIVE, STATE_OFF,
};
use crate::clock::Clock;
use crate::machine::Machine;
use crate::period::Period;
use crate::record::Layout;
use crate::ring::{Face, Wakeup};
use crate::source::{Counter, Engine, Overflows, Rate, Reading, Request, Sampling, Source};
use crate::tasks::Task;
use crate::vcpu::{Need, Vcpu};

/// What an event's figures come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host<'a> {
    pub(crate) source: &'a dyn Source,
    pub(crate) machine: &'a dyn Machine,
    pub(crate) vcpus: &'a [Vcpu],
}

impl Host<'_> {
    /// The guest's TSC on `vcpu`.
    pub(crate) fn guest_tsc(&self, vcpu: u32) -> u64 {
        self.vcpus[vcpu as usize].guest_tsc(self.source)
    }
}

/// Where an event counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Context {
    /// On one vCPU, whoever runs there.
    Vcpu(u32),
    /// With a task, on the vCPU that the driver last scheduled it in on.
    Task(Option<u32>),
}

/// A host counter of one event on one vCPU's thread, with its last reading.
#[derive(Debug)]
struct HostCounter {
    vcpu: u32,
    counter: Box<dyn Counter>,
    last: Reading,
}

#[derive(Debug)]
enum Backing {
    Host(Vec<HostCounter>),
    Tsc,
    AllExits,
    Exits,
    Halts,
    GuestTime,
    Mark,
}

/// An event while it counts.
#[derive(Debug, Clone, Copy)]
struct Active {
    vcpu: u32,
    since: u64,
    base: Reading,
}

/// What never changes about an event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) id: u64,
    /// The event whose ring and id its records use: itself, or its parent.
    pub(crate) owner: u64,
    pub(crate) kind: u32,
    pub(crate) config: u64,
    pub(crate) exclude_user: bool,
    pub(crate) exclude_kernel: bool,
    pub(crate) sample_type: u64,
    pub(crate) wakeup: Wakeup,
    /// The shortest period that its backing keeps: 1 at least.
    pub(crate) shortest_period: u64,
}

impl Facts {
    /// What its records hold.
    pub(crate) fn layout(&self) -> Layout {
        Layout {
            sample_type: self.sample_type,
            ..Layout::default()
        }
    }
}

/// An open event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) facts: Facts,
    pub(crate) context: Context,
    /// Who ran when it was scheduled in: an overflow found as its task leaves is still that
    /// task's, though the task page names the next one by then.
    pub(crate) task: Option<Task>,
    pub(crate) enabled: bool,
    pub(crate) period: Option<Period>,
    failed: bool,
    backing: Backing,
    active: Option<Active>,
    marks: u64,
    count: u64,
    enabled_ticks: u64,
    running_ticks: u64,
}

impl Event {
    pub(crate) fn new(facts: Facts, context: Context, period: Option<Period>) -> Self {
        let backing = match (facts.kind, facts.config) {
            (KIND_TSC, _) => Backing::Tsc,
            (KIND_EXITS, EXIT_ALL) => Backing::AllExits,
            (KIND_EXITS, _) => Backing::Exits,
            (KIND_HALTS, _) => Backing::Halts,
            (KIND_GUEST_TIME, _) => Backing::GuestTime,
            (KIND_MARK, _) => Backing::Mark,
            _ => Backing::Host(Vec::new()),
        };
        Self {
            facts,
            context,
            task: None,
            enabled: false,
            period,
            failed: false,
            backing,
            active: None,
            marks: 0,
            count: 0,
            enabled_ticks: 0,
            running_ticks: 0,
        }
    }

    /// The vCPU that it counts on now.
    pub(crate) fn active_on(&self) -> Option<u32> {
        self.active.map(|active| active.vcpu)
    }

    /// The vCPU that it would count on if it were enabled.
    pub(crate) fn placed_on(&self) -> Option<u32> {
        match self.context {
            Context::Vcpu(vcpu) => Some(vcpu),
            Context::Task(vcpu) => vcpu,
        }
    }

    pub(crate) fn state(&self) -> i32 {
        match (self.failed, self.enabled, self.active) {
            (true, _, _) => STATE_ERROR,
            (_, false, _) => STATE_OFF,
            (_, _, None) => STATE_INACTIVE,
            (_, _, Some(_)) => STATE_ACTIVE,
        }
    }

    /// What it makes its vCPU's thread do while active.
    pub(crate) fn needs(&self) -> Option<Need> {
        match (&self.backing, self.period) {
            (Backing::GuestTime, _) => Some(Need::GuestTime),
            (Backing::Host(_), Some(_)) => Some(Need::HostSamples),
            (Backing::Exits, Some(_)) => Some(Need::ExitSamples),
            (Backing::Mark, Some(_)) => Some(Need::Registers),
            _ => None,
        }
    }

    /// Opens the host counter for `vcpu`, if this event has such and it is not open yet.
    ///
    /// # Errors
    /// The host's, or `ESRCH` before the vCPU's thread has introduced itself.
    pub(crate) fn prepare(&mut self, host: &Host<'_>, vcpu: u32) -> io::Result<()> {
        let request = self.request();
        let Backing::Host(counters) = &mut self.backing else {
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
            counter: host.source.open(&request, thread)?,
            last: Reading::default(),
        });
        Ok(())
    }

    /// Begins to count on `vcpu`.
    ///
    /// # Errors
    /// The host's; the caller then calls [`Event::fail`].
    pub(crate) fn start(&mut self, host: &Host<'_>, vcpu: u32) -> io::Result<()> {
        self.prepare(host, vcpu)?;
        let base = match self.counter(vcpu) {
            Some(open) => {
                open.counter.start()?;
                open.last
            }
            None => self.read(host, vcpu)?,
        };
        self.active = Some(Active {
            vcpu,
            since: host.guest_tsc(vcpu),
            base,
        });
        Ok(())
    }

    /// Brings count and times up to now.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn update(&mut self, host: &Host<'_>) -> io::Result<()> {
        let Some(active) = self.active else {
            return Ok(());
        };
        let reading = self.read(host, active.vcpu)?;
        let now = host.guest_tsc(active.vcpu);
        self.fold(&active, reading, now);
        self.active = Some(Active {
            since: now.max(active.since),
            base: reading,
            ..active
        });
        Ok(())
    }

    /// Ceases to count.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn stop(&mut self, host: &Host<'_>) -> io::Result<()> {
        let Some(active) = self.active.take() else {
            return Ok(());
        };
        if let Some(open) = self.counter(active.vcpu) {
            open.counter.stop()?;
        }
        let reading = self.read(host, active.vcpu)?;
        self.fold(&active, reading, host.guest_tsc(active.vcpu));
        Ok(())
    }

    /// Its backing was lost: it stands still for good, and nothing of it is left on the host.
    pub(crate) fn fail(&mut self) {
        if let Backing::Host(counters) = &mut self.backing {
            counters.clear();
        }
        self.active = None;
        self.failed = true;
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    /// The count becomes zero, the times stay.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn reset(&mut self, host: &Host<'_>) -> io::Result<()> {
        self.update(host)?;
        self.count = 0;
        Ok(())
    }

    /// A new period, from now.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn set_period(&mut self, length: u64) -> io::Result<()> {
        if let Backing::Host(counters) = &mut self.backing {
            for open in counters {
                open.counter.set_rate(Rate::Period(length))?;
            }
        }
        self.period = Some(Period::new(length));
        Ok(())
    }

    /// A mark of this event's value was placed on its vCPU; how many periods that completes.
    pub(crate) fn mark(&mut self) -> u64 {
        self.marks += 1;
        self.grow(1)
    }

    /// Its count grew by `more`; how many periods that completes.
    pub(crate) fn grow(&mut self, more: u64) -> u64 {
        self.period.as_mut().map_or(0, |period| period.grow(more))
    }

    /// Takes the overflows of its host counter on `vcpu`.
    pub(crate) fn drain(&mut self, vcpu: u32) -> Overflows {
        let mut overflows = Overflows::default();
        if let Some(open) = self.counter(vcpu) {
            open.counter.drain(&mut overflows);
        }
        overflows
    }

    /// Count and times as of the last update.
    pub(crate) fn face(&self, clock: Clock) -> Face {
        Face {
            count: self.count,
            time_enabled: clock.nanoseconds(self.enabled_ticks),
            time_running: clock.nanoseconds(self.running_ticks),
            growing_since: self.active.map(|active| clock.nanoseconds(active.since)),
        }
    }

    fn request(&self) -> Request {
        Request {
            kind: self.facts.kind,
            config: self.facts.config,
            sampling: self.period.map(|period| Sampling {
                rate: Rate::Period(period.length()),
                engine: Engine::Exit,
            }),
            exclude_user: self.facts.exclude_user,
            exclude_kernel: self.facts.exclude_kernel,
            pinned: false,
        }
    }

    fn counter(&mut self, vcpu: u32) -> Option<&mut HostCounter> {
        match &mut self.backing {
            Backing::Host(counters) => counters.iter_mut().find(|open| open.vcpu == vcpu),
            _ => None,
        }
    }

    fn read(&mut self, host: &Host<'_>, vcpu: u32) -> io::Result<Reading> {
        let on = &host.vcpus[vcpu as usize];
        let gone = || io::Error::from_raw_os_error(libc::EIO);
        let value = match &self.backing {
            Backing::Host(_) => {
                let open = self.counter(vcpu).ok_or_else(gone)?;
                open.last = open.counter.read()?;
                return Ok(open.last);
            }
            Backing::Tsc => host.guest_tsc(vcpu),
            Backing::AllExits => host.machine.exits(vcpu).ok_or_else(gone)?,
            Backing::Exits => on.exits_of(self.facts.config),
            Backing::Halts => host.machine.halts(vcpu).ok_or_else(gone)?,
            Backing::GuestTime => on.guest_time(),
            Backing::Mark => self.marks,
        };
        Ok(Reading {
            value,
            ..Reading::default()
        })
    }

    fn fold(&mut self, active: &Active, reading: Reading, now: u64) {
        let ticks = now.saturating_sub(active.since);
        self.count = self
            .count
            .wrapping_add(reading.value.wrapping_sub(active.base.value));
        self.enabled_ticks = self.enabled_ticks.wrapping_add(ticks);
        self.running_ticks = self.running_ticks.wrapping_add(share(
            ticks,
            reading.running.saturating_sub(active.base.running),
            reading.enabled.saturating_sub(active.base.enabled),
        ));
    }
}

/// The part of `ticks` that `running` is of `enabled`; all of them where the host measured no
/// time at all, as for what it does not multiplex.
fn share(ticks: u64, running: u64, enabled: u64) -> u64 {
    if running >= enabled {
        return ticks;
    }
    let share = u128::from(ticks) * u128::from(running) / u128::from(enabled);
    // Less than `ticks`, for `running` is less than `enabled`.
    u64::try_from(share).unwrap_or(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_is_the_hosts_share_of_enabled() {
        assert_eq!(share(1000, 0, 0), 1000);
        assert_eq!(share(1000, 50, 50), 1000);
        assert_eq!(share(1000, 25, 100), 250);
        assert_eq!(share(1000, 0, 100), 0);
        assert_eq!(share(u64::MAX, u64::MAX - 1, u64::MAX), u64::MAX - 1);
    }
}
