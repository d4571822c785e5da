//! One event: what it counts, its state, its count and times. Knows nothing of rings, queues or
//! other events.

mod backing;
mod facts;
mod outliving;
mod pausing;

use std::io;

use self::backing::Backing;
pub(crate) use self::facts::{Context, Facts, is_trace, pace};
use crate::abi::{
    ENGINE_BATCHED, KIND_EXITS, KIND_SAMPLE_TRACE, OPEN_AUX_START_PAUSED, OPEN_PAUSED, OPEN_PINNED,
    STATE_ACTIVE, STATE_ERROR, STATE_INACTIVE, STATE_OFF,
};
use crate::clock::Clock;
use crate::machine::Machine;
use crate::period::{Completed, Period};
use crate::persistent::Persistence;
use crate::ring::Face;
use crate::source::{Engine, Overflows, Reading, Request, Sampling, Source};
use crate::tasks::Task;
use crate::throttle::{Allowance, Throttle, Verdict};
use crate::trace::Trace;
use crate::vcpu::{Need, Vcpu};

/// What an event's figures come from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host<'a> {
    pub(crate) source: &'a dyn Source,
    pub(crate) machine: &'a dyn Machine,
    pub(crate) vcpus: &'a [Vcpu],
    /// What [`Machine::reports_guest_ips`] said, once it has been asked.
    pub(crate) guest_ips: Option<bool>,
}

impl Host<'_> {
    /// The guest's TSC on `vcpu`.
    pub(crate) fn guest_tsc(&self, vcpu: u32) -> u64 {
        self.vcpus[vcpu as usize].guest_tsc(self.source)
    }
}

/// An event while it counts.
#[derive(Debug, Clone, Copy)]
struct Active {
    vcpu: u32,
    since: u64,
    base: Reading,
}

/// An open event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) facts: Facts,
    pub(crate) context: Context,
    /// Whom it is counted with: it counts while that one is enabled.
    pub(crate) leader: Option<u64>,
    /// Who ran when it was scheduled in: an overflow found as its task leaves is still that
    /// task's, though the task page names the next one by then.
    pub(crate) task: Option<Task>,
    /// Where its task ran last: a record of it may be written when it has left.
    pub(crate) last_vcpu: u32,
    pub(crate) enabled: bool,
    /// Overflows until it is turned off; zero: no limit.
    pub(crate) limit: u64,
    /// Overflows of it that no record was written of.
    pub(crate) lost: u64,
    /// It lives on without a handle, under a name.
    pub(crate) persistence: Option<Persistence>,
    /// A metadata page shows its figures.
    pub(crate) shown: bool,
    /// What it traced, if it is a trace: its count then is the bytes of that.
    pub(crate) trace: Option<Trace>,
    /// Nothing is counted or made until it is resumed. Its state and times go on.
    paused: bool,
    pub(crate) period: Option<Period>,
    throttle: Throttle,
    failed: bool,
    backing: Backing,
    active: Option<Active>,
    count: u64,
    enabled_ticks: u64,
    running_ticks: u64,
}

impl Event {
    pub(crate) fn new(facts: Facts, context: Context, period: Option<Period>) -> Self {
        Self {
            backing: Backing::new(&facts),
            facts,
            context,
            leader: None,
            task: None,
            last_vcpu: 0,
            enabled: false,
            limit: 0,
            lost: 0,
            persistence: None,
            shown: false,
            trace: facts.is_trace().then(Trace::new),
            paused: facts.has(OPEN_PAUSED | OPEN_AUX_START_PAUSED),
            period,
            throttle: Throttle::default(),
            failed: false,
            active: None,
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
    pub(crate) fn needs(&self) -> impl Iterator<Item = Need> + use<> {
        let goes = !self.paused;
        let samples = self.period.is_some() && goes;
        let exits = matches!(self.facts.kind, KIND_EXITS | KIND_SAMPLE_TRACE) && goes;
        let traced = self.facts.traces_exits() && goes;
        let wants = |need, wanted: bool| wanted.then_some(need);
        let needs = match &self.backing {
            Backing::GuestTime => [Some(Need::GuestTime), None],
            Backing::Host(_) if self.is_batched() => [Some(Need::Collecting), None],
            Backing::Host(_) => [wants(Need::HostSamples, samples), None],
            Backing::Exits => [
                wants(Need::Exits, samples || self.shown && goes),
                wants(Need::Registers, samples),
            ],
            Backing::Happened(_) => [
                wants(Need::Exits, exits),
                wants(
                    Need::Registers,
                    samples || self.facts.excludes_any() && goes,
                ),
            ],
            Backing::Traced => [wants(Need::Traced, traced), wants(Need::Registers, traced)],
            _ => [None, None],
        };
        let throttled = wants(Need::Throttled, self.throttle.is_closed());
        let wants_state = self.facts.traces_samples()
            || !self.facts.is_trace() && self.facts.wish().wants_state();
        let state = wants(Need::State, samples && wants_state);
        needs.into_iter().flatten().chain(throttled).chain(state)
    }

    /// Whether the device itself sees its count grow, one by one.
    pub(crate) fn is_kept(&self) -> bool {
        matches!(self.backing, Backing::Exits | Backing::Happened(_))
    }

    /// Whether host counters make its samples, or packets.
    pub(crate) fn is_sampled_by_host(&self) -> bool {
        let makes_any = self.period.is_some() || self.is_batched();
        matches!(self.backing, Backing::Host(_)) && makes_any
    }

    /// Whether the host records its overflows, to be collected later.
    pub(crate) fn is_batched(&self) -> bool {
        self.facts.engine == ENGINE_BATCHED
    }

    /// Opens the host counter for `vcpu`, if this event has such and it is not open yet.
    ///
    /// # Errors
    /// The host's, or `ESRCH` before the vCPU's thread has introduced itself.
    pub(crate) fn prepare(&mut self, host: &Host<'_>, vcpu: u32) -> io::Result<()> {
        let (kind, config) = self.facts.counted();
        let request = Request {
            kind,
            config,
            sampling: self.period.map(|period| Sampling {
                rate: period.rate(),
                engine: match self.is_batched() {
                    true => Engine::Batched,
                    false => Engine::Exit,
                },
            }),
            exclude_user: self.facts.excludes(true),
            exclude_kernel: self.facts.excludes(false),
            pinned: self.facts.has(OPEN_PINNED),
        };
        self.backing.prepare(host, vcpu, &request)
    }

    /// Begins to count on `vcpu`.
    ///
    /// # Errors
    /// The host's; the caller then calls [`Event::fail`].
    pub(crate) fn start(&mut self, host: &Host<'_>, vcpu: u32) -> io::Result<()> {
        self.prepare(host, vcpu)?;
        let base = match self.backing.counter(vcpu) {
            Some(open) => {
                if !self.paused {
                    open.counter.start()?;
                }
                open.last
            }
            None => self.backing.read(host, vcpu, &self.facts)?,
        };
        if let Some(period) = &mut self.period {
            period.resume();
        }
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
        let reading = self.backing.read(host, active.vcpu, &self.facts)?;
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
        if let Some(open) = self.backing.counter(active.vcpu) {
            open.counter.stop()?;
        }
        let reading = self.backing.read(host, active.vcpu, &self.facts)?;
        self.fold(&active, reading, host.guest_tsc(active.vcpu));
        Ok(())
    }

    /// Its backing was lost: it stands still for good, and nothing of it is left on the host.
    pub(crate) fn fail(&mut self) {
        self.backing.drop_counters();
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
        if let Some(trace) = &mut self.trace {
            trace.reset();
        }
        Ok(())
    }

    /// A new period, or a new frequency for an event that has one, from now.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn set_period(&mut self, period: Period) -> io::Result<()> {
        // The host is told when the throttle is lifted.
        if !self.throttle.is_closed() || period.is_frequency() {
            self.backing.set_rate(period.rate())?;
        }
        self.period = Some(period);
        Ok(())
    }

    /// What this event counts happened once; `now` tells guest nanoseconds.
    pub(crate) fn happen(&mut self, now: impl FnOnce() -> u64) -> Option<Completed> {
        if let Backing::Happened(times) = &mut self.backing {
            *times += 1;
        }
        self.period.as_mut()?.grow(1, now)
    }

    /// An overflow at `time`: what becomes of it. With the last of its share, the host is asked
    /// for no more.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn admit(&mut self, allowance: Allowance, time: u64) -> (Verdict, io::Result<()>) {
        let verdict = self.throttle.admit(allowance, time);
        // A frequency is no higher than the rate, and the host keeps to it.
        let silence = verdict == Verdict::Last && !self.period.is_some_and(Period::is_frequency);
        let silenced = match silence {
            true => self.backing.silence(),
            false => Ok(()),
        };
        (verdict, silenced)
    }

    /// Whether overflows make no records for now.
    pub(crate) fn is_throttled(&self) -> bool {
        self.throttle.is_closed()
    }

    /// At `time`: whether its overflows make records again from now.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn lift(&mut self, allowance: Allowance, time: u64) -> io::Result<bool> {
        if !self.throttle.lift(allowance, time) {
            return Ok(false);
        }
        match self.period.filter(|period| !period.is_frequency()) {
            Some(period) => self.backing.set_rate(period.rate()).map(|()| true),
            None => Ok(true),
        }
    }

    /// Takes the overflows of its host counter on `vcpu`.
    pub(crate) fn drain(&mut self, vcpu: u32) -> Overflows {
        self.backing.drain(vcpu)
    }

    /// Count and times as of the last update.
    pub(crate) fn face(&self, clock: Clock) -> Face {
        Face {
            count: self.trace.as_ref().map_or(self.count, Trace::count),
            time_enabled: clock.nanoseconds(self.enabled_ticks),
            time_running: clock.nanoseconds(self.running_ticks),
            growing_since: self.active.map(|active| clock.nanoseconds(active.since)),
        }
    }

    /// Overflows of it that no record was written of; of a trace, bytes that were lost.
    pub(crate) fn lost(&self) -> u64 {
        self.trace.as_ref().map_or(self.lost, Trace::lost)
    }

    fn fold(&mut self, active: &Active, reading: Reading, now: u64) {
        let ticks = now.saturating_sub(active.since);
        if !self.paused {
            self.count = self
                .count
                .wrapping_add(reading.value.wrapping_sub(active.base.value));
        }
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
