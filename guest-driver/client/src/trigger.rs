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

/// An error of linking two events.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TriggerError {
    /// The event cannot be the starter of the target.
    #[error("cannot make the event the starter of the target{}", hint(.0))]
    Starter(#[source] io::Error),
    /// The event cannot be the stopper of the target.
    #[error("cannot make the event the stopper of the target{}", hint(.0))]
    Stopper(#[source] io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EINVAL) => {
            " (the two events must be different and measure the same task or CPU, and the starter or stopper must sample)"
        }
        Some(libc::EEXIST) => " (the two events are linked already)",
        Some(libc::EBUSY) => " (the target already has another event in this role)",
        Some(libc::EBADF) => " (the target is not a vPMU event)",
        Some(libc::EOPNOTSUPP) => {
            " (the starter or stopper must be sampled on VM exits: `Engine::Exit`, `EventAttr::triggering`)"
        }
        Some(libc::EPERM) => " (the operator's events can neither act on events nor be targets)",
        _ => "",
    }
}
