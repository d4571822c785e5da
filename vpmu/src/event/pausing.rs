//! Pauses: a paused event keeps its state and its times go on; nothing is counted or made of it.

use std::io;

use super::{Event, Host};
use crate::abi::SYNC_RESUME;
use crate::period::Period;

impl Event {
    /// Whether it stands still until it is resumed.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Pauses or resumes it: what came before a pause is counted, what passes in one is not.
    ///
    /// # Errors
    /// As [`Event::start`].
    pub(crate) fn pause(&mut self, host: &Host<'_>, paused: bool) -> io::Result<()> {
        if self.paused == paused {
            return Ok(());
        }
        if paused {
            self.run(false)?;
        }
        self.update(host)?;
        self.paused = paused;
        if paused {
            return Ok(());
        }
        self.period.iter_mut().for_each(Period::resume);
        if let Some(trace) = &mut self.trace {
            trace.sync(SYNC_RESUME);
        }
        self.run(true)
    }

    /// Has the host counter of an active event go on, or stand still.
    fn run(&mut self, on: bool) -> io::Result<()> {
        let vcpu = self.active_on();
        match vcpu.and_then(|vcpu| self.backing.counter(vcpu)) {
            Some(open) if on => open.counter.start(),
            Some(open) => open.counter.stop(),
            None => Ok(()),
        }
    }
}
