//! A source that logs overflows of the host's counters. Each log entry describes an overflow that started or stopped
//! the target, which is another event.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu::Source;
use vpmu::host::PerfSource;
use vpmu::source::{Counter, CounterSet, Mode, Offer, Overflow, Overflows, Rate, Reading, Request};

/// Config of the target: perf's `PERF_COUNT_SW_TASK_CLOCK`.
pub(crate) const TARGET: u64 = 1;

/// An overflow and its effect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acted {
    /// Whether the vCPU was in the guest.
    pub(crate) in_guest: bool,
    /// Instruction pointer at the overflow.
    pub(crate) from: u64,
    /// Instruction pointer at the exit.
    pub(crate) to: u64,
    /// Ticks of the host's TSC from the overflow until the target has started or stopped.
    pub(crate) ticks: u64,
}

#[derive(Debug, Default)]
struct Log {
    exit_ip: u64,
    overflow: Option<Overflow>,
    acted: Vec<Acted>,
}

/// The log, shared with the thread that runs the guest.
#[derive(Debug, Clone, Default)]
pub(crate) struct Watch(Arc<Mutex<Log>>);

impl Watch {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the vCPU left the guest at `ip`.
    pub(crate) fn left(&self, ip: u64) {
        self.log().exit_ip = ip;
    }

    pub(crate) fn acted(&self) -> Vec<Acted> {
        self.log().acted.clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.log().acted.len()
    }
}

#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) source: PerfSource,
    pub(crate) watch: Watch,
}

#[derive(Debug)]
struct WatchedCounter {
    counter: Box<dyn Counter>,
    clock: PerfSource,
    watch: Watch,
    is_target: bool,
}

impl WatchedCounter {
    fn changed(&self) {
        let now = self.clock.tsc();
        let mut log = self.watch.log();
        let Some(overflow) = log.overflow.take().filter(|_| self.is_target) else {
            return;
        };
        let acted = Acted {
            in_guest: overflow.mode == Mode::Guest,
            from: overflow.ip,
            to: log.exit_ip,
            ticks: now.saturating_sub(overflow.tsc),
        };
        log.acted.push(acted);
    }
}

impl Counter for WatchedCounter {
    fn start(&mut self) -> io::Result<()> {
        self.counter.start()?;
        self.changed();
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        self.counter.stop()?;
        self.changed();
        Ok(())
    }

    fn read(&mut self) -> io::Result<Reading> {
        self.counter.read()
    }

    fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        self.counter.set_rate(rate)
    }

    fn drain(&mut self, into: &mut Overflows) {
        let before = into.samples.len();
        self.counter.drain(into);
        // If a drain returns several overflows, the log omits them, because there is no way to know which one acts on
        // the target.
        self.watch.log().overflow = match into.samples.get(before..) {
            Some([one]) => Some(*one),
            _ => None,
        };
    }
}

impl Source for Watched {
    fn tsc(&self) -> u64 {
        self.source.tsc()
    }

    fn thread(&self) -> i32 {
        self.source.thread()
    }

    fn thread_time(&self) -> Option<u64> {
        self.source.thread_time()
    }

    fn offers(&self) -> &[Offer] {
        self.source.offers()
    }

    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>> {
        Ok(Box::new(WatchedCounter {
            counter: self.source.open(what, thread)?,
            clock: PerfSource::new(vmm_sys_util::signal::SIGRTMIN()).map_err(io::Error::other)?,
            watch: self.watch.clone(),
            is_target: what.config == TARGET,
        }))
    }

    fn counters(&self, thread: i32) -> Box<dyn CounterSet> {
        self.source.counters(thread)
    }
}
