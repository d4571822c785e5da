//! Safe functions around perf_event_open(2) for the PMU's host and guest code: calls on events, mappings of their
//! pages, and the records in their rings.
//!
//! The callers choose the events and interpret the records.

pub mod call;
pub mod field;
mod mapping;
pub mod page;
pub mod record;

pub use self::mapping::Mapping;
pub use perf_event_open_sys::bindings;
