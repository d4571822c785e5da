//! Records as they stand in a ring, taken apart. Trusts no byte of them: what is wrong comes
//! back as an error, never as a panic.

mod layout;
mod sample;
mod words;

pub(crate) use layout::Layout;
pub use sample::{Frame, Registers, Sample, SampleId};
pub(crate) use words::{Words, halves};

use perf_event_open_sys::bindings;

use crate::attr::FORMAT_GROUP;
use crate::reading::{self, Reading};

const TYPE_LOST: u32 = bindings::PERF_RECORD_LOST;
const TYPE_THROTTLE: u32 = bindings::PERF_RECORD_THROTTLE;
const TYPE_UNTHROTTLE: u32 = bindings::PERF_RECORD_UNTHROTTLE;
const TYPE_READ: u32 = bindings::PERF_RECORD_READ;
const TYPE_SAMPLE: u32 = bindings::PERF_RECORD_SAMPLE;
const TYPE_AUX: u32 = bindings::PERF_RECORD_AUX;
const TYPE_ITRACE_START: u32 = bindings::PERF_RECORD_ITRACE_START;
/// perf's `PERF_RECORD_MISC_CPUMODE_MASK`.
const MODE_MASK: u16 = 7;
/// perf's `PERF_RECORD_MISC_USER`.
const MODE_USER: u16 = 2;

/// A record that does not hold what its type says.
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
    /// The sample type has fields whose place is not known here.
    #[error("samples of type {0:#x} have fields that this library does not know")]
    SampleType(u64),
}

/// What a record begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) record_type: u32,
    pub(crate) misc: u16,
    /// Bytes of the record, the header included.
    pub(crate) size: u16,
}

impl Header {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "takes the word's fields apart"
    )]
    pub(crate) fn from_word(word: u64) -> Self {
        Self {
            record_type: word as u32,
            misc: (word >> 32) as u16,
            size: (word >> 48) as u16,
        }
    }
}

/// One record. What is no sample says whose it is with `sample_id_all` alone.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record {
    /// An overflow.
    Sample(Sample),
    /// Records for which the ring had no room.
    Lost {
        /// Whose.
        id: u64,
        /// How many.
        lost: u64,
        /// With `sample_id_all`.
        who: Option<SampleId>,
    },
    /// The event overflows too often: no samples of it from here on.
    Throttle(Throttle),
    /// It is sampled again.
    Unthrottle(Throttle),
    /// The counts of a child that has ended.
    Read {
        /// Its process id.
        pid: u32,
        /// Its thread id.
        tid: u32,
        /// What it had counted.
        count: Reading,
        /// With `sample_id_all`.
        who: Option<SampleId>,
    },
    /// Bytes of a trace stand in the AUX area.
    Aux(Aux),
    /// A trace begins that has an AUX area.
    ItraceStart {
        /// The process that runs.
        pid: u32,
        /// The thread that runs.
        tid: u32,
        /// With `sample_id_all`.
        who: Option<SampleId>,
    },
    /// Of a type that is not taken apart here.
    Unknown {
        /// perf's `PERF_RECORD_*`.
        record_type: u32,
        /// perf's `PERF_RECORD_MISC_*`.
        misc: u16,
        /// What follows the header, in words.
        body: Vec<u64>,
    },
}

/// When which event's sampling was stopped or went on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Throttle {
    /// Nanoseconds of the guest's clock.
    pub time: u64,
    /// The event, or the one it was inherited from.
    pub id: u64,
    /// The event itself.
    pub stream_id: u64,
    /// With `sample_id_all`.
    pub who: Option<SampleId>,
}

/// Which bytes of an AUX area were written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Aux {
    /// Bytes that the area had got before these.
    pub offset: u64,
    /// How many.
    pub size: u64,
    /// perf's `PERF_AUX_FLAG_*`.
    pub flags: u64,
    /// With `sample_id_all`.
    pub who: Option<SampleId>,
}

impl Aux {
    /// They end where there was no more room.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_TRUNCATED) != 0
    }

    /// The area overwrites its oldest.
    #[must_use]
    pub fn overwrites(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_OVERWRITE) != 0
    }

    /// Packets are missing before them or among them.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_PARTIAL) != 0
    }

    /// A packet of theirs stands for several overflows.
    #[must_use]
    pub fn has_collision(&self) -> bool {
        self.flags & u64::from(bindings::PERF_AUX_FLAG_COLLISION) != 0
    }
}

impl Record {
    /// Takes `body`, the words after `header`, apart.
    pub(crate) fn parse(
        header: Header,
        body: &[u64],
        layout: &Layout,
    ) -> Result<Self, RecordError> {
        let record_type = header.record_type;
        if record_type == TYPE_SAMPLE && layout.sample_type & !layout::KNOWN != 0 {
            return Err(RecordError::SampleType(layout.sample_type));
        }
        known(header, Words::new(body), layout)
            .unwrap_or_else(|| {
                Some(Self::Unknown {
                    record_type,
                    misc: header.misc,
                    body: body.to_vec(),
                })
            })
            .ok_or_else(|| RecordError::Short {
                record_type,
                bytes: usize::from(header.size),
            })
    }
}

/// The outer `None` is a type that is not taken apart, the inner one a record cut short.
fn known(header: Header, mut words: Words<'_>, layout: &Layout) -> Option<Option<Record>> {
    if header.record_type == TYPE_SAMPLE {
        let user = header.misc & MODE_MASK == MODE_USER;
        return Some(sample::parse(user, layout, &mut words).map(Record::Sample));
    }
    let take_apart = match header.record_type {
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
    Some(Record::Lost {
        id: words.next()?,
        lost: words.next()?,
        who,
    })
}

fn throttle(
    header: Header,
    mut words: Words<'_>,
    _: &Layout,
    who: Option<SampleId>,
) -> Option<Record> {
    let throttle = Throttle {
        time: words.next()?,
        id: words.next()?,
        stream_id: words.next()?,
        who,
    };
    Some(if header.record_type == TYPE_THROTTLE {
        Record::Throttle(throttle)
    } else {
        Record::Unthrottle(throttle)
    })
}

fn read(_: Header, mut words: Words<'_>, layout: &Layout, who: Option<SampleId>) -> Option<Record> {
    let (pid, tid) = halves(words.next()?);
    // Of one event, also where its group is read at once.
    let format = layout.read_format & !FORMAT_GROUP;
    let count = reading::parse(format, &mut words)?.pop()?;
    Some(Record::Read {
        pid,
        tid,
        count,
        who,
    })
}

fn aux(_: Header, mut words: Words<'_>, _: &Layout, who: Option<SampleId>) -> Option<Record> {
    Some(Record::Aux(Aux {
        offset: words.next()?,
        size: words.next()?,
        flags: words.next()?,
        who,
    }))
}

fn itrace_start(
    _: Header,
    mut words: Words<'_>,
    _: &Layout,
    who: Option<SampleId>,
) -> Option<Record> {
    let (pid, tid) = halves(words.next()?);
    Some(Record::ItraceStart { pid, tid, who })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
