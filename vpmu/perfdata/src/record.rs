//! Checks one record of a guest's ring and rebuilds it in the common format of the file.
//!
//! The guest can write to its rings, so a record may contain anything. This module leaves out records that perf would
//! act on (mapped files, task names) or fail on (a sample with missing fields), and records that the file does not
//! need. A sample is parsed and rebuilt. Of a THROTTLE or UNTHROTTLE record, only the type and the time are kept.

use vpmu::PersistentStatus;
use vpmu::source::Rate;
use vpmu_perf::field::{
    FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING, Masks, SAMPLE_ADDR as ADDR,
    SAMPLE_CALLCHAIN as CALLCHAIN, SAMPLE_CPU as CPU, SAMPLE_ID as ID, SAMPLE_IDENTIFIER as IDENTIFIER,
    SAMPLE_IP as IP, SAMPLE_PERIOD as PERIOD, SAMPLE_READ as READ, SAMPLE_STREAM_ID as STREAM_ID, SAMPLE_TID as TID,
    SAMPLE_TIME as TIME, WORDS, Word, masks,
};
use vpmu_perf::record::{
    Header, MODE_USER, TYPE_AUX, TYPE_ITRACE_START, TYPE_LOST, TYPE_READ, TYPE_SAMPLE, TYPE_THROTTLE, TYPE_UNTHROTTLE,
    Words,
};

/// perf's `PERF_RECORD_FINISHED_ROUND`.
pub(crate) const TYPE_FINISHED_ROUND: u32 = 68;

/// Fields of every sample of a file: perf prints only the fields that all events have.
const ALWAYS: u64 = IDENTIFIER | IP | TID | TIME | ADDR | CPU | PERIOD;
/// Registers and stacks. They are dropped, because reports do not show them. They are the last fields of a sample, so
/// they need not be parsed.
const LEFT_OFF: u64 = MASKS.described;
const MASKS: Masks = masks();

/// perf's `PERF_CONTEXT_MAX`. In a call chain, this value and all higher values are not addresses: they mark the mode
/// of the addresses that follow.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

/// Layout of an event's records.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    id: u64,
    vcpu: u32,
    /// The sample type in the ring.
    sample_type: u64,
    read_format: u64,
    /// The period of samples that lack the field.
    period: u64,
}

/// A record for the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// One of `TYPE_*`.
    pub(crate) kind: u32,
    /// The mode that the guest was in.
    pub(crate) misc: u16,
    /// Guest time in nanoseconds.
    pub(crate) time: u64,
    /// The body, without the trailer that all records except samples have.
    pub(crate) body: Vec<u64>,
    /// Kernel addresses in the record.
    pub(crate) kernel: Vec<u64>,
}

impl Record {
    /// Whether it is a sample.
    pub(crate) fn is_sample(&self) -> bool {
        self.kind == TYPE_SAMPLE
    }
}

/// The classification of a ring's record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RingRecord {
    /// A record for the file.
    Record(Record),
    /// A valid record of a type that is left out. LOST is left out because the file has the device's own count of
    /// losses, and records about AUX areas because the file does not contain these areas. READ is also left out.
    Other,
    /// Not a record of this event: the guest forged it, or it belongs to another event that writes to the same ring.
    Foreign,
}

impl Form {
    /// Returns the layout of `event`'s records.
    pub(crate) fn of(event: &PersistentStatus) -> Self {
        Self {
            id: event.id,
            vcpu: event.vcpu,
            sample_type: event.sample_type,
            read_format: event.read_format,
            period: match event.rate {
                Some(Rate::Period(period)) => period,
                Some(Rate::Frequency(_)) | None => 1,
            },
        }
    }

    /// Returns the sample fields in the file. Each sample begins with its event's id, because perf
    /// requires the id at the same position in the samples of all events. Counts (`PERF_SAMPLE_READ`) are omitted:
    /// perf would use the difference of two counts as the period of a sample.
    pub(crate) fn sample_type(&self) -> u64 {
        self.sample_type & (MASKS.words | CALLCHAIN) | ALWAYS
    }

    /// Classifies one record of the ring, which includes its header. `before` is the time of the previous record.
    pub(crate) fn look(&self, record: &[u8], before: u64) -> RingRecord {
        let (words, cut) = record.as_chunks();
        let Some((header, body)) = words.split_first().filter(|_| cut.is_empty()) else {
            return RingRecord::Foreign;
        };
        let header = Header::from_word(u64::from_le_bytes(*header));
        let body: Vec<u64> = body.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let body = Words::new(&body);
        let found = match header.kind {
            TYPE_SAMPLE => self.sample(header.mode(), body, before),
            kind @ (TYPE_THROTTLE | TYPE_UNTHROTTLE) => self.throttle(kind, body),
            TYPE_LOST | TYPE_READ | TYPE_AUX | TYPE_ITRACE_START => return RingRecord::Other,
            _ => None,
        };
        found.map_or(RingRecord::Foreign, RingRecord::Record)
    }

    fn sample(&self, misc: u16, mut from: Words<'_>, before: u64) -> Option<Record> {
        // The device writes only samples whose mode is unknown, kernel or user. Higher values are perf's hypervisor and
        // guest modes.
        if misc > MODE_USER {
            return None;
        }
        let mut body = Vec::with_capacity(WORDS.len());
        let mut time = before;
        let mut kernel = Vec::new();
        for (bit, word) in WORDS {
            if self.sample_type & bit == 0 {
                if ALWAYS & bit != 0 {
                    body.push(self.unsaid(word, before));
                }
                continue;
            }
            let value = from.next()?;
            match word {
                Word::Identifier | Word::Id | Word::StreamId => (value == self.id).then_some(())?,
                Word::Cpu => (value == u64::from(self.vcpu)).then_some(())?,
                Word::Time => time = value,
                Word::Ip => kernel.extend(kernel_address(value)),
                Word::Tid | Word::Addr | Word::Period => {}
            }
            body.push(value);
        }
        if self.sample_type & READ != 0 {
            self.skip_counts(&mut from)?;
        }
        if self.sample_type & CALLCHAIN != 0 {
            let length = from.next()?;
            body.push(length);
            for _ in 0..length {
                let address = from.next()?;
                kernel.extend(kernel_address(address));
                body.push(address);
            }
        }
        if self.sample_type & LEFT_OFF == 0 && from.next().is_some() {
            return None;
        }
        Some(Record { kind: TYPE_SAMPLE, misc, time, body, kernel })
    }

    /// Returns the substitute for a field that the event's samples lack: a known value, or perf's own
    /// placeholder.
    fn unsaid(&self, word: Word, before: u64) -> u64 {
        match word {
            Word::Identifier | Word::Id | Word::StreamId => self.id,
            Word::Cpu => self.vcpu.into(),
            Word::Period => self.period,
            // The time of the previous record is a lower bound.
            Word::Time => before,
            // Unknown task.
            Word::Tid => u64::MAX,
            Word::Ip | Word::Addr => 0,
        }
    }

    fn skip_counts(&self, from: &mut Words<'_>) -> Option<()> {
        let words = |bits: u64| (self.read_format & bits).count_ones();
        let first = from.next()?;
        let each = 1 + words(FORMAT_ID | FORMAT_LOST);
        let rest = match self.read_format & FORMAT_GROUP {
            0 => u64::from(each - 1),
            _ => first.checked_mul(u64::from(each))?,
        };
        let times = words(FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING);
        from.skip(rest.checked_add(u64::from(times))?)
    }

    /// Rebuilds a THROTTLE or UNTHROTTLE record with the time of the original. `None` if the original is too short,
    /// or belongs to another event.
    fn throttle(&self, kind: u32, mut from: Words<'_>) -> Option<Record> {
        let time = from.next()?;
        (from.next()? == self.id).then(|| Record {
            kind,
            misc: 0,
            time,
            body: vec![time, self.id, self.id],
            kernel: Vec::new(),
        })
    }

    /// Returns the trailer of records other than samples: task, time, id and CPU.
    pub(crate) fn trailer(&self, time: u64) -> Vec<u64> {
        let fields = [
            // No particular task.
            (TID, 0),
            (TIME, time),
            (ID, self.id),
            (STREAM_ID, self.id),
            (CPU, u64::from(self.vcpu)),
            (IDENTIFIER, self.id),
        ];
        let has = |&(field, _): &(u64, u64)| self.sample_type() & field != 0;
        fields.into_iter().filter(has).map(|(_, value)| value).collect()
    }
}

/// Returns `address` if it is a kernel address: it is in the upper half of the address space, and is not a
/// `PERF_CONTEXT_*` value.
fn kernel_address(address: u64) -> Option<u64> {
    (1 << 63..FIRST_CONTEXT).contains(&address).then_some(address)
}
