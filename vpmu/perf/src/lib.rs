//! perf_event_open(2) behind safe functions, for the host's and the guest's half of the PMU: calls on
//! events, mappings of their pages, and the records in their rings.
//!
//! The crate sets no policy: its users choose the events and interpret the records.

pub mod call;
pub mod field;
mod mapping;
pub mod page;
pub mod record;

pub use self::mapping::Mapping;
pub use perf_event_open_sys::bindings;
