//! One record of a guest's ring, checked and brought into the form that all records of a file have.
//!
//! The guest can write to its rings, so that a record may be anything. What perf would act on (maps
//! of files, names of tasks) or stumble over (a sample that is shorter than it says) never passes:
//! a sample is taken apart and put together anew, of any other record only its kind and time stay.

use vpmu::source::Rate;
use vpmu::{PersistentStatus, abi};

/// `PERF_RECORD_LOST`.
pub(crate) const TYPE_LOST: u32 = 2;
const TYPE_THROTTLE: u32 = 5;
const TYPE_UNTHROTTLE: u32 = 6;
const TYPE_READ: u32 = 8;
pub(crate) const TYPE_SAMPLE: u32 = 9;
const TYPE_AUX: u32 = 11;
const TYPE_ITRACE_START: u32 = 12;
/// `PERF_RECORD_KSYMBOL`.
pub(crate) const TYPE_KSYMBOL: u32 = 17;
/// `PERF_RECORD_FINISHED_ROUND`.
pub(crate) const TYPE_FINISHED_ROUND: u32 = 68;

/// `PERF_RECORD_MISC_CPUMODE_MASK`.
const MODE_MASK: u16 = 7;
const MODE_USER: u16 = 2;

const IP: u64 = 1 << 0;
const TID: u64 = 1 << 1;
const TIME: u64 = 1 << 2;
const ADDR: u64 = 1 << 3;
const READ: u64 = 1 << 4;
const CALLCHAIN: u64 = 1 << 5;
const ID: u64 = 1 << 6;
const CPU: u64 = 1 << 7;
const PERIOD: u64 = 1 << 8;
const STREAM_ID: u64 = 1 << 9;
const IDENTIFIER: u64 = 1 << 16;
/// Fields of one word each, in the order in which a sample has them.
const WORDS: [u64; 9] = [IDENTIFIER, IP, TID, TIME, ADDR, ID, STREAM_ID, CPU, PERIOD];
/// What each sample of a file has: of fields that one event lacks, perf prints none of the others'.
const ALWAYS: u64 = IDENTIFIER | IP | TID | TIME | ADDR | CPU | PERIOD;
/// Registers and stacks stand behind all that is taken: no report shows them.
const LEFT_OFF: u64 = abi::SAMPLE_ALLOWED & !(WORD_FIELDS | READ | CALLCHAIN);
const WORD_FIELDS: u64 = IDENTIFIER | IP | TID | TIME | ADDR | ID | STREAM_ID | CPU | PERIOD;

const FORMAT_ENABLED: u64 = 1 << 0;
const FORMAT_RUNNING: u64 = 1 << 1;
const FORMAT_ID: u64 = 1 << 2;
const FORMAT_GROUP: u64 = 1 << 3;
const FORMAT_LOST: u64 = 1 << 4;

/// Chains name the mode with addresses from here on: `PERF_CONTEXT_MAX`.
const FIRST_CONTEXT: u64 = u64::MAX - 4094;

/// What the records of an event hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    id: u64,
    vcpu: u32,
    /// In the ring.
    sample_type: u64,
    read_format: u64,
    /// Of each sample, where samples do not say.
    period: u64,
}

/// A record as it goes into the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// One of `TYPE_*`.
    pub(crate) kind: u32,
    /// The mode that the guest was in.
    pub(crate) misc: u16,
    /// Guest nanoseconds.
    pub(crate) time: u64,
    /// Its body but for what ends records that are no samples.
    pub(crate) body: Vec<u64>,
    /// Addresses in the kernel that it names.
    pub(crate) kernel: Vec<u64>,
}

impl Record {
    /// Whether it is a sample.
    pub(crate) fn is_sample(&self) -> bool {
        self.kind == TYPE_SAMPLE
    }
}

/// What a record of a ring turns out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// One for the file.
    Record(Record),
    /// One that tells nothing there: of losses the device knows more, and areas are not recorded.
    Other,
    /// None of this event's: the guest's own work, or of an event that writes to the same ring.
    Foreign,
}

impl Form {
    /// Of the records of `event`.
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

    /// What samples hold in the file. Each begins with its event's id, for perf reads no file
    /// whose events differ in that. Counts are left out: perf would take the differences between
    /// them for periods.
    pub(crate) fn sample_type(&self) -> u64 {
        self.sample_type & (WORD_FIELDS | CALLCHAIN) | ALWAYS
    }

    /// Looks at one record of the ring, header included; the one before it came about at `before`.
    pub(crate) fn look(&self, record: &[u8], before: u64) -> Found {
        let Some((header, body)) = record.split_at_checked(8) else {
            return Found::Foreign;
        };
        let header = word(header);
        if !body.len().is_multiple_of(8) {
            return Found::Foreign;
        }
        let [k0, k1, k2, k3, m0, m1, ..] = header.to_le_bytes();
        let misc = u16::from_le_bytes([m0, m1]) & MODE_MASK;
        let found = match u32::from_le_bytes([k0, k1, k2, k3]) {
            TYPE_SAMPLE => self.sample(misc, Words(body), before),
            kind @ (TYPE_THROTTLE | TYPE_UNTHROTTLE) => self.throttle(kind, Words(body)),
            TYPE_LOST | TYPE_READ | TYPE_AUX | TYPE_ITRACE_START => return Found::Other,
            _ => None,
        };
        found.map_or(Found::Foreign, Found::Record)
    }

    fn sample(&self, misc: u16, mut from: Words<'_>, before: u64) -> Option<Record> {
        // No hypervisor and no guest: the mode is one of the guest's own.
        if misc > MODE_USER {
            return None;
        }
        let mut body = Vec::with_capacity(WORDS.len());
        let mut time = before;
        let mut kernel = Vec::new();
        for field in WORDS {
            if self.sample_type & field == 0 {
                if ALWAYS & field != 0 {
                    body.push(self.unsaid(field, before));
                }
                continue;
            }
            let value = from.next()?;
            match field {
                IDENTIFIER | ID | STREAM_ID if value != self.id => return None,
                CPU if value != u64::from(self.vcpu) => return None,
                TIME => time = value,
                IP => kernel.extend(kernel_address(value)),
                _ => {}
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
        Some(Record {
            kind: TYPE_SAMPLE,
            misc,
            time,
            body,
            kernel,
        })
    }

    /// What stands for a field that the event's samples do not have: what is known of it anyway, or
    /// what perf itself writes where it knows nothing.
    fn unsaid(&self, field: u64, before: u64) -> u64 {
        match field {
            IDENTIFIER => self.id,
            CPU => self.vcpu.into(),
            PERIOD => self.period,
            // No earlier than this.
            TIME => before,
            // Nobody.
            TID => u64::MAX,
            _ => 0,
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
        let times = words(FORMAT_ENABLED | FORMAT_RUNNING);
        from.skip(rest.checked_add(u64::from(times))?)
    }

    /// Its time, and whose it is.
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

    /// What ends each record that is no sample: whose it is and when it came about.
    pub(crate) fn trailer(&self, time: u64) -> Vec<u64> {
        let fields = [
            // Nobody's work in particular.
            (TID, 0),
            (TIME, time),
            (ID, self.id),
            (STREAM_ID, self.id),
            (CPU, u64::from(self.vcpu)),
            (IDENTIFIER, self.id),
        ];
        let has = |&(field, _): &(u64, u64)| self.sample_type() & field != 0;
        fields
            .into_iter()
            .filter(has)
            .map(|(_, value)| value)
            .collect()
    }
}

/// Only the upper half of the address space is the kernel's.
fn kernel_address(address: u64) -> Option<u64> {
    (1 << 63..FIRST_CONTEXT)
        .contains(&address)
        .then_some(address)
}

/// A record's body, word after word.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_at_checked(8)?;
        self.0 = rest;
        Some(word(first))
    }

    fn skip(&mut self, words: u64) -> Option<()> {
        let bytes = usize::try_from(words).ok()?.checked_mul(8)?;
        self.0 = self.0.get(bytes..)?;
        Some(())
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}
