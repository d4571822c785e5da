//! Writes `perf.data` files that stock perf reads without options.
//!
//! The device's recorder and the guest's `vperf record` know different things about their samples, but write the same
//! kind of file: [`Layout`] has the parts before and after the records, and [`Record`] the records. A file is written
//! in one pass if the size of its records is known beforehand. Otherwise, [`Layout::head`] is written again at the end.
//!
//! Linux describes the format in `tools/perf/Documentation/perf.data-file-format.txt`. The crate opens no files.
//!
//! ```
//! use vpmu_perfdata::{Context, Event, FINISHED_ROUND, Layout, Rate, Record, SAMPLE_FIELDS};
//!
//! let event = Event {
//!     name: "task-clock".to_owned(),
//!     kind: 1,
//!     config: 1,
//!     rate: Some(Rate::Period(1_000_000)),
//!     sample_type: SAMPLE_FIELDS,
//!     flags: 0,
//!     id: 1,
//! };
//! let mut records = Vec::new();
//! let context = Context { pid: 7, tid: 7, time: 5, cpu: 0 };
//! Record::comm(7, 7, "make", false).append(&mut records, &event.trailer(&context));
//! FINISHED_ROUND.append(&mut records, &[]);
//! let layout = Layout { events: vec![event], arch: "x86_64".to_owned(), ..Layout::default() };
//! let size = records.len() as u64;
//! let file = [layout.head(size), records, layout.tail(size)].concat();
//! assert!(file.starts_with(b"PERFILE2"));
//! ```

mod layout;
mod record;

pub use layout::{
    ATTR_EXCLUDE_HOST, ATTR_EXCLUDE_KERNEL, ATTR_EXCLUDE_USER, ATTR_WRITE_BACKWARD, BuildId, Event, Layout, Rate,
    event_type,
};
pub use record::{
    Context, FINISHED_ROUND, Fields, MISC_EXEC, RECORD_MAX, Record, SAMPLE_FIELDS, SAMPLE_RAW, TYPE_FINISHED_ROUND,
    append,
};
