//! The host's perf events as a [`Source`]: the only place that names `perf_event_open`, and the
//! only one with unsafe code.

mod clock;
mod counter;
mod probe;
pub mod records;
mod ring;
mod sys;

use std::io;
use std::sync::Arc;

use libc::c_int;

use self::clock::Clock;
use self::ring::Pool;
use crate::source::{Counter, Offer, Request, Source};

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
        Ok(Self {
            signal,
            clock: Arc::new(Clock::new()),
            pool: Arc::new(Pool::new()),
            offers: probe::offers(),
        })
    }
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
        counter::open(what, thread, self.signal, &self.clock, &self.pool)
    }
}
