//! The host's perf events as a [`Source`]: the only place that names `perf_event_open`, and the
//! only one with unsafe code.

mod aux;
mod clock;
mod closer;
mod counter;
mod group;
mod pmc;
mod probe;
mod readings;
pub mod records;
mod ring;
mod set;
mod sys;
mod timers;
pub(crate) mod tracepoint;

use std::io;
use std::sync::Arc;

use libc::c_int;

pub use self::aux::{HostTrace, host_traces};
use self::clock::Clock;
use self::closer::{ClosedLater, Closer};
use self::ring::Pool;
use self::set::PerfSet;
use self::timers::Timers;
pub use self::tracepoint::Refusal as ExitsRefused;
use self::tracepoint::{Recorder, Tracepoints};
use crate::abi::KIND_EXIT_TRACE;
use crate::source::{Counter, CounterSet, Offer, Request, Source};

/// Why the host cannot serve as a source.
#[derive(Debug, thiserror::Error)]
#[expect(
    clippy::error_impl_error,
    reason = "read with its module before it, as std's are"
)]
pub enum Error {
    /// The overflow signal is none that a process may use so.
    #[error("signal {0} cannot announce overflows: use a real-time signal")]
    Signal(c_int),
}

/// The host's perf events, counted on vCPU threads.
#[derive(Debug)]
pub struct PerfSource {
    signal: c_int,
    clock: Arc<Clock>,
    pool: Arc<Pool>,
    timers: Timers,
    tracepoints: Option<Tracepoints>,
    closer: Arc<Closer>,
    offers: Vec<Offer>,
}

impl PerfSource {
    /// Probes what this host counts: each candidate is opened once on the calling thread.
    ///
    /// `signal` is sent to a vCPU's thread when one of its sampling events overflows. The VMM's
    /// handler makes the run call return; without one the signal's default action ends the
    /// process.
    ///
    /// # Errors
    /// [`Error::Signal`] for anything but a real-time signal.
    pub fn new(signal: c_int) -> Result<Self, Error> {
        if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
            return Err(Error::Signal(signal));
        }
        let tracepoints = Tracepoints::find()
            .inspect_err(|refusal| log::info!("exits that KVM handles cannot be traced: {refusal}"))
            .ok();
        for HostTrace { pmu, refused } in host_traces() {
            log::info!("no guest gets the trace of the host's {pmu}: {refused}");
        }
        let mut offers = probe::offers();
        offers.extend(tracepoints.map(|_| tracepoint::offer()));
        Ok(Self {
            signal,
            clock: Arc::new(Clock::new()),
            pool: Arc::new(Pool::new()),
            timers: Timers::default(),
            tracepoints,
            closer: Arc::default(),
            offers,
        })
    }
}

/// Whether this host's perf can trace the exits that its kernel handles by itself; it is tried on
/// the calling thread.
///
/// # Errors
/// Why it cannot, with the remedy.
pub fn traces_exits() -> Result<(), ExitsRefused> {
    Tracepoints::find()?.probe()
}

impl Source for PerfSource {
    fn tsc(&self) -> u64 {
        sys::tsc()
    }

    fn thread(&self) -> i32 {
        sys::thread()
    }

    fn thread_time(&self) -> Option<u64> {
        sys::thread_time()
    }

    fn offers(&self) -> &[Offer] {
        &self.offers
    }

    fn open(&self, what: &Request, thread: i32) -> io::Result<Box<dyn Counter>> {
        if what.kind == KIND_EXIT_TRACE {
            let tracepoints = self.tracepoints.as_ref();
            let tracepoints = tracepoints.ok_or(io::ErrorKind::Unsupported)?;
            let recorder = Recorder::open(tracepoints, thread, &self.clock, &self.pool)?;
            return Ok(Box::new(ClosedLater::new(recorder, &self.closer)));
        }
        counter::open(self, what, thread)
    }

    fn hold(&self, thread: i32) {
        self.timers.hold(thread);
    }

    fn release(&self, thread: i32) -> io::Result<()> {
        self.timers.release(thread)
    }

    fn counters(&self, thread: i32) -> Box<dyn CounterSet> {
        Box::new(PerfSet::new(thread))
    }
}
