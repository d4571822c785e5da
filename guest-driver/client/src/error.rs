//! The library's error type for callers that use several modules, and [`chain`], which formats an
//! error and its causes in one line.

pub use vpmu_errors::chain;

use crate::{area, attr, catalogue, device, event, history, marks, overwrite, perf, persistent, ring, tasks, trigger};

/// An error of this library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(clippy::error_impl_error, reason = "the crate's error type, like io::Error")]
pub enum Error {
    /// From the device file.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// From an event's name.
    #[error(transparent)]
    Catalogue(#[from] catalogue::CatalogueError),
    /// From an event's description.
    #[error(transparent)]
    Attr(#[from] attr::AttrError),
    /// From an open event.
    #[error(transparent)]
    Event(#[from] event::EventError),
    /// From an event's ring.
    #[error(transparent)]
    Ring(#[from] ring::RingError),
    /// From a ring in overwrite mode.
    #[error(transparent)]
    Overwrite(#[from] overwrite::OverwriteError),
    /// From a trace's AUX area.
    #[error(transparent)]
    Area(#[from] area::AreaError),
    /// From a ring shared with other readers.
    #[error(transparent)]
    History(#[from] history::HistoryError),
    /// From persistent events.
    #[error(transparent)]
    Persistent(#[from] persistent::PersistentError),
    /// From starters and stoppers.
    #[error(transparent)]
    Trigger(#[from] trigger::TriggerError),
    /// From marks.
    #[error(transparent)]
    Marks(#[from] marks::MarksError),
    /// From perf core.
    #[error(transparent)]
    Perf(#[from] perf::PerfError),
    /// From following tasks.
    #[error(transparent)]
    Tasks(#[from] tasks::TasksError),
}
