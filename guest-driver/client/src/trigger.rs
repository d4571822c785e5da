//! Starters and stoppers: events whose overflows make others count, or cease to, before the
//! guest's next instruction.
//!
//! Count the exits that a program makes between its marks 1 and 2, and nowhere else:
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
//! // ... what places the marks ...
//! println!("{} exits", exits.read()?.value);
//! # Ok(())
//! # }
//! ```

use std::io;
use std::os::fd::AsFd;

use crate::device::Vpmu;
use crate::event::Event;
use crate::sys::{self, Role};

/// Why two events cannot be linked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TriggerError {
    /// The one cannot start the other.
    #[error("making the event the starter of the other{}", hint(.0))]
    Starter(#[source] io::Error),
    /// The one cannot stop the other.
    #[error("making the event the stopper of the other{}", hint(.0))]
    Stopper(#[source] io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (both must measure the same task or CPU, be two, and the one that acts must sample)"
        }
        Some(libc::EEXIST) => " (it is so already)",
        Some(libc::EBUSY) => " (the other has one already)",
        Some(libc::EBADF) => " (the other is no event of the vPMU)",
        Some(libc::EOPNOTSUPP) => {
            " (the one that acts must be sampled on VM exits: `Engine::Exit`, `EventAttr::triggering`)"
        }
        Some(libc::EPERM) => " (one of them is the operator's, which starts and stops nothing)",
        _ => "",
    }
}

impl Event {
    /// Each overflow of this event has `target` count from the guest's next instruction on, if
    /// it was paused: opened with [`crate::EventAttr::enable_on_starter`], or stopped.
    ///
    /// # Errors
    /// [`TriggerError::Starter`]: `EEXIST` if it is the starter already, `EBUSY` if another
    /// is, `EINVAL` for itself, another task or CPU, or if this event does not sample.
    pub fn set_starter_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Starter, target.as_fd()).map_err(TriggerError::Starter)
    }

    /// Each overflow of this event pauses `target` before the guest's next instruction. An
    /// event that is both starter and stopper of another switches it to and fro.
    ///
    /// # Errors
    /// [`TriggerError::Stopper`], as [`Event::set_starter_of`].
    pub fn set_stopper_of(&self, target: &Event) -> Result<(), TriggerError> {
        sys::link(self.as_fd(), Role::Stopper, target.as_fd()).map_err(TriggerError::Stopper)
    }
}

/// Perf core gives a PMU no calls of its own: for an event of [`crate::perf::PerfPmu`] the device
/// makes them.
impl Vpmu {
    /// As [`Event::set_starter_of`], for two events of `perf_event_open(2)`.
    ///
    /// # Errors
    /// As there; `EBADF` if either is not an event of the vPMU that `perf_event_open(2)` opened,
    /// `EOPNOTSUPP` if tasks inherit either.
    pub fn set_perf_starter(&self, starter: &Event, target: &Event) -> Result<(), TriggerError> {
        sys::link_perf(self.as_fd(), starter.as_fd(), Role::Starter, target.as_fd())
            .map_err(TriggerError::Starter)
    }

    /// As [`Event::set_stopper_of`], for two events of `perf_event_open(2)`.
    ///
    /// # Errors
    /// As [`Vpmu::set_perf_starter`].
    pub fn set_perf_stopper(&self, stopper: &Event, target: &Event) -> Result<(), TriggerError> {
        sys::link_perf(self.as_fd(), stopper.as_fd(), Role::Stopper, target.as_fd())
            .map_err(TriggerError::Stopper)
    }
}
