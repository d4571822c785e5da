//! The host's perf events as a [`Source`]: the only place that names `perf_event_open`.

use libc::c_int;

use crate::source::Source;

/// Why the host cannot serve as a source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The overflow signal is none that a process may use so.
    #[error("signal {0} cannot announce overflows: use a real-time signal")]
    Signal(c_int),
}

/// The host's perf events, counted on vCPU threads.
#[derive(Debug)]
pub struct PerfSource {
    signal: c_int,
}

impl PerfSource {
    /// Probes what this host counts. `signal` is sent to a vCPU's thread when one of its sampling
    /// events overflows; the VMM's handler makes the run call return.
    ///
    /// # Errors
    /// [`Error::Signal`] for a signal number out of range.
    pub fn new(signal: c_int) -> Result<Self, Error> {
        if !(1..=64).contains(&signal) {
            return Err(Error::Signal(signal));
        }
        Ok(Self { signal })
    }
}

impl Source for PerfSource {
    fn tsc(&self) -> u64 {
        u64::from(self.signal.unsigned_abs())
    }
}
