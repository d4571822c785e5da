//! Parses records from a ring. Does not trust their bytes: malformed records lead to errors, never to
//! panics.

mod layout;
mod sample;

pub(crate) use layout::Layout;
pub use sample::{Frame, Registers, Sample, SampleId};

use vpmu_perf::bindings;
use vpmu_perf::record::{
    Header, MODE_USER, TYPE_AUX, TYPE_ITRACE_START, TYPE_LOST, TYPE_READ, TYPE_SAMPLE, TYPE_THROTTLE, TYPE_UNTHROTTLE,
    Words, halves,
};

use crate::attr::FORMAT_GROUP;
use crate::reading::{self, Reading};

/// A record that cannot be parsed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// Too few bytes for its fields.
    #[error("a record of type {record_type} has {bytes} bytes, too few for its fields")]
    Short {
        /// Its type.
        record_type: u32,
        /// Its length.
        bytes: usize,
    },
    /// The sample type has fields that this library cannot parse.
    #[error("samples of type {0:#x} have fields that this library does not know")]
    SampleType(u64),
}

/// One record. Records other than samples have a task and a time only with `sample_id_all`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record {
    /// An overflow.
    Sample(Sample),
    /// Records lost because the ring was full.
    Lost {
        /// The event's id.
        id: u64,
        /// The number of lost records.
        lost: u64,
        /// Present with `sample_id_all`.
        who: Option<SampleId>,
    },
    /// The event overflows too often: its sampling pauses here.
    Throttle(Throttle),
    /// The event's sampling resumes here.
    Unthrottle(Throttle),
    /// The counts of a child at its exit.
    Read {
        /// Its process id.
        pid: u32,
        /// Its thread id.
        tid: u32,
        /// Its final count.
        count: Reading,
        /// Present with `sample_id_all`.
        who: Option<SampleId>,
    },
    /// The AUX area contains new bytes of a trace.
    Aux(Aux),
    /// A trace with an AUX area begins.
    ItraceStart {
        /// The running process.
        pid: u32,
        /// The running thread.
        tid: u32,
        /// Present with `sample_id_all`.
        who: Option<SampleId>,
    },
    /// A type that this library does not parse.
    Unknown {
        /// perf's `PERF_RECORD_*`.
        record_type: u32,
        /// perf's `PERF_RECORD_MISC_*`.
        misc: u16,
        /// The words after the header.
        body: Vec<u64>,
    },
}

/// The time at which an event's sampling was throttled or resumed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttle {
    /// Nanoseconds of the guest's clock.
    pub time: u64,
    /// Id of the event, or of its parent if the event was inherited.
    pub id: u64,
    /// Id of the event itself, even if it was inherited.
    pub stream_id: u64,
    /// Present with `sample_id_all`.
    pub who: Option<SampleId>,
}

/// A record that reports one chunk of new bytes in an AUX area.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Aux {
    /// Bytes written to the area before the chunk.
    pub offset: u64,
    /// Bytes in the chunk.
    pub size: u64,
    /// perf's `PERF_AUX_FLAG_*`.
    pub flags: u64,
    /// Present with `sample_id_all`.
    pub who: Option<SampleId>,
}

impl Aux {
    /// Whether a full area cut the chunk short.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_TRUNCATED) != 0
    }

    /// Whether the area is in overwrite mode.
    #[must_use]
    pub fn overwrites(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_OVERWRITE) != 0
    }

    /// Whether packets are missing before or within the chunk.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_PARTIAL) != 0
    }

    /// Whether a packet in the chunk represents several overflows.
    #[must_use]
    pub fn has_collision(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_COLLISION) != 0
    }
}

impl Record {
    /// Parses `body`, the words after `header`.
    pub(crate) fn parse(header: Header, body: &[u64], layout: &Layout) -> Result<Self, RecordError> {
        let record_type = header.kind;
        if record_type == TYPE_SAMPLE && layout.sample_type & !layout::MASKS.all != 0 {
            return Err(RecordError::SampleType(layout.sample_type));
        }
        known(header, Words::new(body), layout)
            .unwrap_or_else(|| Some(Self::Unknown { record_type, misc: header.misc, body: body.to_vec() }))
            .ok_or_else(|| RecordError::Short { record_type, bytes: usize::from(header.size) })
    }
}

/// Parses a record. Returns `None` for a type that this library does not parse, and `Some(None)` for a
/// truncated record.
fn known(header: Header, mut words: Words<'_>, layout: &Layout) -> Option<Option<Record>> {
    if header.kind == TYPE_SAMPLE {
        let user = header.mode() == MODE_USER;
        return Some(sample::parse(user, layout, &mut words).map(Record::Sample));
    }
    let take_apart = match header.kind {
        TYPE_LOST => lost,
        TYPE_THROTTLE | TYPE_UNTHROTTLE => throttle,
        TYPE_READ => read,
        TYPE_AUX => aux,
        TYPE_ITRACE_START => itrace_start,
        _ => return None,
    };
    let mut who = None;
    if layout.sample_id_all {
        let trailer = words.take_last(layout.trailer());
        who = trailer.and_then(|trailer| sample::parse_id(layout, trailer));
        if who.is_none() {
            return Some(None);
        }
    }
    Some(take_apart(header, words, layout, who))
}

fn lost(_: Header, mut words: Words<'_>, _: &Layout, who: Option<SampleId>) -> Option<Record> {
    Some(Record::Lost { id: words.next()?, lost: words.next()?, who })
}

fn throttle(header: Header, mut words: Words<'_>, _: &Layout, who: Option<SampleId>) -> Option<Record> {
    let throttle = Throttle { time: words.next()?, id: words.next()?, stream_id: words.next()?, who };
    Some(if header.kind == TYPE_THROTTLE { Record::Throttle(throttle) } else { Record::Unthrottle(throttle) })
}

fn read(_: Header, mut words: Words<'_>, layout: &Layout, who: Option<SampleId>) -> Option<Record> {
    let (pid, tid) = halves(words.next()?);
    // The record has the count of one event, even if read(2) returns the whole group.
    let format = layout.read_format & !FORMAT_GROUP;
    let count = reading::parse(format, &mut words)?.pop()?;
    Some(Record::Read { pid, tid, count, who })
}

fn aux(_: Header, mut words: Words<'_>, _: &Layout, who: Option<SampleId>) -> Option<Record> {
    Some(Record::Aux(Aux { offset: words.next()?, size: words.next()?, flags: words.next()?, who }))
}

fn itrace_start(_: Header, mut words: Words<'_>, _: &Layout, who: Option<SampleId>) -> Option<Record> {
    let (pid, tid) = halves(words.next()?);
    Some(Record::ItraceStart { pid, tid, who })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
