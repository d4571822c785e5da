//! Records as they stand in a ring, taken apart. Trusts no byte of them: what is wrong comes
//! back as an error, never as a panic.

use crate::attr::{
    SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD, SAMPLE_STREAM_ID,
    SAMPLE_TID, SAMPLE_TIME,
};

/// perf's `PERF_RECORD_LOST`.
const TYPE_LOST: u32 = 2;
/// perf's `PERF_RECORD_SAMPLE`.
const TYPE_SAMPLE: u32 = 9;
/// perf's `PERF_RECORD_MISC_CPUMODE_MASK`.
const MODE_MASK: u16 = 7;
/// perf's `PERF_RECORD_MISC_USER`.
const MODE_USER: u16 = 2;

const SAMPLE_KNOWN: u64 = SAMPLE_IP
    | SAMPLE_TID
    | SAMPLE_TIME
    | SAMPLE_ID
    | SAMPLE_CPU
    | SAMPLE_PERIOD
    | SAMPLE_STREAM_ID
    | SAMPLE_IDENTIFIER;

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

/// One overflow of an event. Fields that the sample type leaves out are zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Where the guest was.
    pub ip: u64,
    /// Process id.
    pub pid: u32,
    /// Thread id.
    pub tid: u32,
    /// Nanoseconds of the guest's clock; see [`crate::Info::time_of`].
    pub time: u64,
    /// Which CPU.
    pub cpu: u32,
    /// How much this sample stands for.
    pub period: u64,
    /// The event, or the one it was inherited from.
    pub id: u64,
    /// The event itself.
    pub stream_id: u64,
    /// The guest was in user mode.
    pub user: bool,
}

/// One record.
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

impl Record {
    /// Takes `body`, the words after `header`, apart.
    pub(crate) fn parse(
        header: Header,
        body: &[u64],
        sample_type: u64,
    ) -> Result<Self, RecordError> {
        let mut words = body.iter().copied();
        let mut next = || {
            words.next().ok_or_else(|| RecordError::Short {
                record_type: header.record_type,
                bytes: usize::from(header.size),
            })
        };
        match header.record_type {
            TYPE_LOST => Ok(Self::Lost {
                id: next()?,
                lost: next()?,
            }),
            TYPE_SAMPLE => {
                let user = header.misc & MODE_MASK == MODE_USER;
                Ok(Self::Sample(parse_sample(user, sample_type, next)?))
            }
            record_type => Ok(Self::Unknown {
                record_type,
                misc: header.misc,
                body: body.to_vec(),
            }),
        }
    }
}

/// The fields stand in perf's order, a word each.
#[expect(clippy::cast_possible_truncation, reason = "takes words' halves apart")]
fn parse_sample(
    user: bool,
    sample_type: u64,
    mut next: impl FnMut() -> Result<u64, RecordError>,
) -> Result<Sample, RecordError> {
    if sample_type & !SAMPLE_KNOWN != 0 {
        return Err(RecordError::SampleType(sample_type));
    }
    let mut field = |bit| {
        if sample_type & bit == 0 {
            Ok(0)
        } else {
            next()
        }
    };
    let identifier = field(SAMPLE_IDENTIFIER)?;
    let ip = field(SAMPLE_IP)?;
    let task = field(SAMPLE_TID)?;
    let time = field(SAMPLE_TIME)?;
    let id = field(SAMPLE_ID)?;
    let stream_id = field(SAMPLE_STREAM_ID)?;
    let cpu = field(SAMPLE_CPU)?;
    let period = field(SAMPLE_PERIOD)?;
    Ok(Sample {
        ip,
        pid: task as u32,
        tid: (task >> 32) as u32,
        time,
        cpu: cpu as u32,
        period,
        id: if sample_type & SAMPLE_ID == 0 {
            identifier
        } else {
            id
        },
        stream_id,
        user,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attr::SAMPLE_DEFAULT;

    fn header(record_type: u32, misc: u16, words: usize) -> Header {
        Header {
            record_type,
            misc,
            size: u16::try_from(8 + 8 * words).unwrap(),
        }
    }

    #[test]
    fn a_header_is_type_misc_size() {
        let header = Header::from_word(0x0018_0002_0000_0009);
        assert_eq!(
            header,
            Header {
                record_type: 9,
                misc: 2,
                size: 24
            }
        );
    }

    #[test]
    fn a_sample_has_its_fields_in_perfs_order() {
        let body = [0x1000, 8 << 32 | 7, 99, 42, 1, 50];
        let record = Record::parse(header(9, 2, 6), &body, SAMPLE_DEFAULT).unwrap();
        let sample = Sample {
            ip: 0x1000,
            pid: 7,
            tid: 8,
            time: 99,
            cpu: 1,
            period: 50,
            id: 42,
            stream_id: 0,
            user: true,
        };
        assert_eq!(record, Record::Sample(sample));
        let everything = SAMPLE_KNOWN;
        let body = [5, 0x1000, 8 << 32 | 7, 99, 42, 43, 1, 50];
        let record = Record::parse(header(9, 1, 8), &body, everything).unwrap();
        let expected = Sample {
            user: false,
            stream_id: 43,
            ..sample
        };
        assert_eq!(record, Record::Sample(expected));
    }

    #[test]
    fn an_identifier_stands_for_a_missing_id() {
        let record = Record::parse(header(9, 1, 1), &[5], SAMPLE_IDENTIFIER).unwrap();
        assert_eq!(
            record,
            Record::Sample(Sample {
                id: 5,
                ..Sample::default()
            })
        );
    }

    #[test]
    fn records_cut_short_are_errors() {
        for words in 0..6 {
            let result = Record::parse(header(9, 2, words), &[0; 6][..words], SAMPLE_DEFAULT);
            let bytes = 8 + 8 * words;
            assert_eq!(
                result,
                Err(RecordError::Short {
                    record_type: 9,
                    bytes
                })
            );
        }
        let result = Record::parse(header(2, 0, 1), &[0], 0);
        assert_eq!(
            result,
            Err(RecordError::Short {
                record_type: 2,
                bytes: 16
            })
        );
    }

    #[test]
    fn other_types_and_fields_are_not_guessed() {
        let record = Record::parse(header(77, 3, 1), &[5], 0).unwrap();
        assert_eq!(
            record,
            Record::Unknown {
                record_type: 77,
                misc: 3,
                body: vec![5]
            }
        );
        let result = Record::parse(header(9, 2, 1), &[5], 1 << 5);
        assert_eq!(result, Err(RecordError::SampleType(1 << 5)));
    }

    #[test]
    fn losses_are_told() {
        let record = Record::parse(header(2, 0, 3), &[42, 17, 0], SAMPLE_DEFAULT).unwrap();
        assert_eq!(record, Record::Lost { id: 42, lost: 17 });
    }
}
