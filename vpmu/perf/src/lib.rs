//! perf_event_open(2) behind safe functions, for the host's half of the PMU and the guest's: calls on
//! events, their mappings, the records in their rings.
//!
//! It decides nothing: which events to open, and what their records mean, is its users' business.

pub mod call;
pub mod field;
mod mapping;
pub mod page;
pub mod record;

pub use self::mapping::Mapping;
pub use perf_event_open_sys::bindings;
