//! Starters and stoppers: events whose overflows start or stop other events before the guest's next
//! instruction.
//!
//! Count the exits that a program makes between its marks 1 and 2:
//! ```no_run
//! # fn main() -> Result<(), vpmu_client::Error> {
//! let vpmu = vpmu_client::Vpmu::open()?;
//! let exits = vpmu.open_event(&vpmu.attr("exits-io")?.enabled_on_starter())?;
//! let begin = vpmu.open_event(&vpmu.attr("mark=1")?.triggering(1))?;
//! let end = vpmu.open_event(&vpmu.attr("mark=2")?.triggering(1))?;
//! begin.set_starter_of(&exits)?;
//! end.set_stopper_of(&exits)?;
//! for event in [&exits, &end, &begin] {
//!     event.enable()?;
//! }
//! // ... the program places the marks ...
//! println!("{} exits", exits.read()?.value);
//! # Ok(())
//! # }
//! ```

use std::io;
use std::os::fd::AsFd;

use crate::device::Vpmu;
use crate::event::Event;
use crate::sys::{self, Role};

/// An error of linking two events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TriggerError {
    /// The event cannot be a starter of the target.
    #[error("making the event the starter of the target{}", hint(.0))]
    Starter(#[source] io::Error),
    /// The event cannot be a stopper of the target.
    #[error("making the event the stopper of the target{}", hint(.0))]
    Stopper(#[source] io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (two different events must measure the same task or CPU, and the starter or stopper must sample)"
        }
        Some(libc::EEXIST) => " (the two events are linked already)",
        Some(libc::EBUSY) => " (another event has this role already)",
        Some(libc::EBADF) => " (the target is not a vPMU event)",
        Some(libc::EOPNOTSUPP) => {
            " (the starter or stopper must be sampled on VM exits: `Engine::Exit`, `EventAttr::triggering`)"
        }
        Some(libc::EPERM) => " (the operator's events can neither act on events nor be targets)",
        _ => "",
    }
}

impl Event {
    /// Makes each overflow of this event start `target` before the guest's next instruction, if
    /// `target` is paused: opened with [`crate::EventAttr::enable_on_starter`], or stopped by a
    /// stopper.
    ///
    /// # Errors
    /// [`TriggerError::Starter`]: `EEXIST` if this event is the starter already, `EBUSY` if another
    /// is, `EINVAL` if `target` is this event or measures another task or CPU, or if this event
    /// does not sample, `EOPNOTSUPP` if the batched engine samples this event.
    pub fn set_starter_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Starter, target.as_fd()).map_err(TriggerError::Starter)
    }

    /// Makes each overflow of this event stop `target` before the guest's next instruction. An
    /// event that is both starter and stopper of another toggles it.
    ///
    /// # Errors
    /// [`TriggerError::Stopper`]; see [`Event::set_starter_of`].
    pub fn set_stopper_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Stopper, target.as_fd()).map_err(TriggerError::Stopper)
    }
}

/// Calls on events of [`crate::perf::PerfPmu`]. They go through the device, since perf core does
/// not let a PMU add ioctls.
impl Vpmu {
    /// Like [`Event::set_starter_of`], for two events opened with `perf_event_open(2)`.
    ///
    /// # Errors
    /// See [`Event::set_starter_of`]; `EBADF` if either was not opened on the vPMU with
    /// `perf_event_open(2)`, `EOPNOTSUPP` if tasks inherit either.
    pub fn set_perf_starter(&self, starter: &Event, target: &Event) -> Result<(), TriggerError> {
        sys::link_perf(self.as_fd(), starter.as_fd(), Role::Starter, target.as_fd())
            .map_err(TriggerError::Starter)
    }

    /// Like [`Event::set_stopper_of`], for two events opened with `perf_event_open(2)`.
    ///
    /// # Errors
    /// See [`Vpmu::set_perf_starter`].
    pub fn set_perf_stopper(&self, stopper: &Event, target: &Event) -> Result<(), TriggerError> {
        sys::link_perf(self.as_fd(), stopper.as_fd(), Role::Stopper, target.as_fd())
            .map_err(TriggerError::Stopper)
    }
}
