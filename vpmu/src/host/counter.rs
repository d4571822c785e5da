//! One host event on one vCPU's thread.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use vpmu_perf::bindings::{
    PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_SAMPLE_IP, PERF_SAMPLE_PERIOD,
    PERF_SAMPLE_TIME, perf_event_attr,
};

use super::PerfSource;
use super::clock::Clock;
use super::pmus::CpuPmu;
use super::probe::is_clock;
use super::ring::{BATCHED_PAGES, HostRing};
use super::sys;
use super::timers::Timer;
use crate::abi::KIND_SOFTWARE;
use crate::source::{Counter, Engine, Overflows, Rate, Reading, Request};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

#[derive(Debug)]
struct PerfCounter {
    event: HostEvent,
    /// Whether the event is one of perf's software clocks. A clock's rate is always set as a period (see [`at_host`]).
    is_clock: bool,
    /// `None` for an event that does not sample.
    ring: Option<HostRing>,
    clock: Arc<Clock>,
}

#[derive(Debug)]
enum HostEvent {
    Alone(File),
    /// A sampling clock in the timer group of its thread.
    Timed(Timer),
}

impl HostEvent {
    fn file(&self) -> &File {
        match self {
            Self::Alone(event) => event,
            Self::Timed(timer) => timer.event(),
        }
    }
}

/// Opens a host event, but does not start it. If the event samples with [`Engine::Exit`], the host sends the
/// source's signal to `thread` at each overflow.
pub(super) fn open(source: &PerfSource, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>> {
    let is_clock = is_clock(what.kind, what.config);
    let by_exit = what.sampling.is_some_and(|sampling| sampling.engine == Engine::Exit);
    let signal = match (by_exit, source.signal) {
        (true, None) => return Err(io::ErrorKind::Unsupported.into()),
        (true, signal) => signal,
        (false, _) => None,
    };
    // Do not pin timers: they are members of a group, and perf allows only a group's leader to be pinned.
    let timed = is_clock && what.sampling.is_some() && !what.pinned;
    let group = if timed { source.timers.of(thread)? } else { None };
    let event = match group {
        Some(group) => HostEvent::Timed(Timer::open(group, &attr(what, source.pmu()), thread)?),
        None => HostEvent::Alone(sys::open(&attr(what, source.pmu()), thread)?),
    };
    let ring = match what.sampling {
        Some(sampling) => Some(match sampling.engine {
            Engine::Exit => HostRing::short(event.file())?,
            Engine::Batched => HostRing::long(event.file(), BATCHED_PAGES, &source.pool)?,
        }),
        None => None,
    };
    if let Some(signal) = signal {
        sys::announce(event.file(), thread, signal)?;
    }
    Ok(Box::new(PerfCounter { event, is_clock, ring, clock: Arc::clone(&source.clock) }))
}

/// Reads an event that has the attributes of [`attr`].
pub(super) fn reading(mut event: &File) -> io::Result<Reading> {
    let mut words = [0; 24];
    event.read_exact(&mut words)?;
    let (words, _) = words.as_chunks::<8>();
    Ok(Reading {
        value: u64::from_ne_bytes(words[0]),
        enabled: u64::from_ne_bytes(words[1]),
        running: u64::from_ne_bytes(words[2]),
    })
}

/// The host's attributes for `what`.
pub(super) fn attr(what: &Request, pmu: CpuPmu) -> perf_event_attr {
    let (type_, config) = pmu.event(what);
    let mut attr = perf_event_attr {
        type_,
        config,
        read_format: u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED) | u64::from(PERF_FORMAT_TOTAL_TIME_RUNNING),
        ..perf_event_attr::default()
    };
    attr.set_disabled(1);
    attr.set_pinned(what.pinned.into());
    attr.set_exclude_host(what.exclude_host.into());
    if what.kind != KIND_SOFTWARE {
        attr.set_exclude_user(what.exclude_user.into());
        attr.set_exclude_kernel(what.exclude_kernel.into());
    }
    if let Some(sampling) = what.sampling {
        attr.sample_type = u64::from(PERF_SAMPLE_IP | PERF_SAMPLE_TIME | PERF_SAMPLE_PERIOD);
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC_RAW;
        match at_host(sampling.rate, is_clock(what.kind, what.config)) {
            Rate::Period(period) => attr.__bindgen_anon_1.sample_period = period,
            Rate::Frequency(frequency) => {
                attr.set_freq(1);
                attr.__bindgen_anon_1.sample_freq = frequency;
            }
        }
        match sampling.engine {
            Engine::Exit => attr.__bindgen_anon_2.wakeup_events = 1,
            Engine::Batched => {
                // No thread waits for the event's wakeups. The largest watermark makes them as rare as possible.
                attr.set_watermark(1);
                attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
            }
        }
    }
    attr
}

/// Returns the rate in a form that the host accepts. If a clock is opened with a frequency, the host converts the
/// frequency to a period, and then rejects new frequencies for this clock. Therefore, clocks always get a period. A
/// clock's period is in nanoseconds, so it follows from the frequency.
fn at_host(rate: Rate, is_clock: bool) -> Rate {
    match rate {
        Rate::Frequency(frequency) if is_clock => Rate::Period((NANOS_PER_SECOND / frequency.max(1)).max(1)),
        other => other,
    }
}

impl Counter for PerfCounter {
    fn start(&mut self) -> io::Result<()> {
        match &self.event {
            HostEvent::Alone(event) => sys::enable(event),
            HostEvent::Timed(timer) => timer.start(),
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        match &self.event {
            HostEvent::Alone(event) => sys::disable(event),
            HostEvent::Timed(timer) => timer.stop(),
        }
    }

    fn read(&mut self) -> io::Result<Reading> {
        reading(self.event.file())
    }

    fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        let (Rate::Period(value) | Rate::Frequency(value)) = at_host(rate, self.is_clock);
        sys::set_period(self.event.file(), value)
    }

    fn drain(&mut self, into: &mut Overflows) {
        if let Some(ring) = &self.ring {
            ring.drain(&self.clock, into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW};

    #[test]
    fn host_is_excluded_as_requested() {
        for kind in [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW] {
            for exclude_host in [false, true] {
                let request = Request { kind, config: 1, exclude_user: true, exclude_host, ..Request::default() };
                let attr = attr(&request, CpuPmu::default());
                assert_eq!(attr.exclude_host(), u64::from(exclude_host));
                assert_eq!((attr.exclude_user(), attr.exclude_kernel()), (1, 0));
            }
        }
    }
}
