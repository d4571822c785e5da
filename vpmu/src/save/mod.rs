//! The saved state of a device, independent of the host. It is plain data that a VMM stores with the state of its
//! machine, and later restores into a new device. Because the state comes from a file that anyone may have written,
//! each module that restores a part of the state checks that part like a request from the guest.

mod error;
mod state;

pub(crate) use self::error::Fault;
pub use self::error::{RestoreError, SaveError};
pub use self::state::SavedState;
pub(crate) use self::state::{
    FORMAT, SavedArea, SavedDriver, SavedEvent, SavedFamily, SavedKeeper, SavedLife, SavedLink, SavedNotice,
    SavedPendingAux, SavedPeriod, SavedPersistence, SavedQueue, SavedRing, SavedSink, SavedSpan, SavedSpec, SavedTrace,
    SavedVcpu,
};
