//! Checks one record of a guest's ring and rebuilds it in the common format of the file.
//!
//! The guest can write to its rings, so a record may contain anything. This module leaves out records that perf would
//! act on (mapped files, task names) or fail on (a sample with missing fields), and records that the file does not
//! need. A sample is parsed and rebuilt. Of a THROTTLE or UNTHROTTLE record, only the type and the time are kept.

use vpmu::source::Rate;
use vpmu::{PersistentStatus, abi};
use vpmu_perf::field::{
    FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING, Masks,
    SAMPLE_CALLCHAIN as CALLCHAIN, SAMPLE_READ as READ, WORDS, Word, masks,
};
use vpmu_perf::record::{
    Header, MODE_USER, TYPE_AUX, TYPE_ITRACE_START, TYPE_LOST, TYPE_READ, TYPE_SAMPLE, TYPE_THROTTLE, TYPE_UNTHROTTLE,
    Words,
};
use vpmu_perfdata::{
    ATTR_EXCLUDE_KERNEL, ATTR_EXCLUDE_USER, Context, Event, Rate as FileRate, SAMPLE_FIELDS, event_type,
};

/// Registers and stacks. They are dropped, because reports do not show them. They are the last fields of a sample, so
/// they need not be parsed.
const LEFT_OFF: u64 = MASKS.described;
const MASKS: Masks = masks();

/// perf's `PERF_CONTEXT_MAX`. In a call chain, this value and all higher values are not addresses: they mark the mode
/// of the addresses that follow.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

/// Layout of an event's records.
#[derive(Debug, Clone)]
pub(crate) struct Form {
    /// The event in the file.
    pub(crate) event: Event,
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
    /// Returns the layout of `event`'s records. Counts (`PERF_SAMPLE_READ`) are omitted from the file: perf would use the
    /// difference of two counts as the period of a sample.
    pub(crate) fn of(event: &PersistentStatus) -> Self {
        let flag = |bit: u32, flag: u64| if event.flags & bit != 0 { flag } else { 0 };
        Self {
            event: Event {
                name: event.name.clone(),
                kind: event_type(event.kind),
                config: event.config,
                rate: event.rate.map(|rate| match rate {
                    Rate::Period(period) => FileRate::Period(period),
                    Rate::Frequency(rate) => FileRate::Frequency(rate),
                }),
                sample_type: event.sample_type & (MASKS.words | CALLCHAIN) | SAMPLE_FIELDS,
                flags: flag(abi::OPEN_EXCLUDE_USER, ATTR_EXCLUDE_USER)
                    | flag(abi::OPEN_EXCLUDE_KERNEL, ATTR_EXCLUDE_KERNEL),
                id: event.id,
            },
            vcpu: event.vcpu,
            sample_type: event.sample_type,
            read_format: event.read_format,
            period: match event.rate {
                Some(Rate::Period(period)) => period,
                Some(Rate::Frequency(_)) | None => 1,
            },
        }
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
                if SAMPLE_FIELDS & bit != 0 {
                    body.push(self.unsaid(word, before));
                }
                continue;
            }
            let value = from.next()?;
            match word {
                Word::Identifier | Word::Id | Word::StreamId => (value == self.event.id).then_some(())?,
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
            Word::Identifier | Word::Id | Word::StreamId => self.event.id,
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
        (from.next()? == self.event.id).then(|| Record {
            kind,
            misc: 0,
            time,
            body: vec![time, self.event.id, self.event.id],
            kernel: Vec::new(),
        })
    }

    /// Returns the trailer of records other than samples. They belong to no particular task.
    pub(crate) fn trailer(&self, time: u64) -> Vec<u64> {
        self.event.trailer(&Context { time, cpu: self.vcpu, ..Context::default() })
    }
}

/// Returns `address` if it is a kernel address: it is in the upper half of the address space, and is not a
/// `PERF_CONTEXT_*` value.
fn kernel_address(address: u64) -> Option<u64> {
    (1 << 63..FIRST_CONTEXT).contains(&address).then_some(address)
}
