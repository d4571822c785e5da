//! What an event is beside its count when it traces: paused or not, and what it lost.

use std::io;

use super::Event;
use crate::abi::SYNC_RESUME;
use crate::trace::Trace;

impl Event {
    /// Whether it is a trace that is paused.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Pauses or resumes a trace; whether that changed anything.
    pub(crate) fn pause(&mut self, paused: bool) -> bool {
        let changed = std::mem::replace(&mut self.paused, paused) != paused;
        if let Some(trace) = self.trace.as_mut().filter(|_| changed && !paused) {
            trace.sync(SYNC_RESUME);
        }
        changed
    }

    /// Has the host of an active event record, or not.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn record(&mut self, on: bool) -> io::Result<()> {
        let vcpu = self.active_on();
        match vcpu.and_then(|vcpu| self.backing.counter(vcpu)) {
            Some(open) if on => open.counter.start(),
            Some(open) => open.counter.stop(),
            None => Ok(()),
        }
    }

    /// Overflows of it that no record was written of; of a trace, bytes that were lost.
    pub(crate) fn lost(&self) -> u64 {
        self.trace.as_ref().map_or(self.lost, Trace::lost)
    }
}
