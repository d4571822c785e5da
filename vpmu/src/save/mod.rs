//! The state of a device outside its host: plain data that a VMM stores with its machine, and gives to a new
//! device. It comes back from a file that anyone may have written: the owner of each part checks it as a
//! request of the guest's.

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
