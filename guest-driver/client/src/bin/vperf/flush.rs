//! `vperf flush`: writes pending samples to the rings.

use clap::Args;
use vpmu_client::device::DeviceError;
use vpmu_client::event::EventError;
use vpmu_client::persistent::PersistentError;
use vpmu_client::{Error, Vpmu};

/// Have the host write pending samples of persistent events to their rings.
///
/// On return, everything sampled and traced before is in the events' rings and AUX areas, and
/// their readers have been woken.
#[derive(Debug, Args)]
pub(crate) struct FlushArgs {
    /// Ids or names, as `vperf persist ls` shows them. [default: all]
    #[arg(value_name = "ID|NAME")]
    events: Vec<String>,
}

/// An error of a flush.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FlushError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Persistent(#[from] PersistentError),
    #[error(transparent)]
    Client(#[from] Error),
    #[error("event {name:?}")]
    Event { name: String, source: EventError },
}

pub(crate) fn run(args: &FlushArgs) -> Result<(), FlushError> {
    let vpmu = Vpmu::open()?;
    if args.events.is_empty() {
        return Ok(vpmu.flush()?);
    }
    // Look all events up before the first flush: if a name is mistyped, no event is flushed.
    let events = args.events.iter().map(|name| vpmu.find_persistent(name));
    for event in events.collect::<Result<Vec<_>, _>>()? {
        let handle = vpmu.reopen(&event)?;
        handle.flush().map_err(|source| FlushError::Event { name: event.name, source })?;
    }
    Ok(())
}
