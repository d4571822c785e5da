//! The state of a device outside its host: plain data that a VMM stores with its machine, and restores into a
//! new device. Anyone may have written the file that the state comes from, so the module that restores a part
//! of the state checks that part like a request from the guest.

mod error;
mod state;

pub(crate) use self::error::Fault;
pub use self::error::{RestoreError, SaveError};
pub use self::state::SavedState;
pub(crate) use self::state::{
    FORMAT, SavedArea, SavedDriver, SavedEvent, SavedFamily, SavedKeeper, SavedLife, SavedLink,
    SavedNotice, SavedPendingAux, SavedPeriod, SavedPersistence, SavedQueue, SavedRing, SavedSink,
    SavedSpec, SavedTrace, SavedTurn, SavedVcpu,
};
