//! The records of a file.

use vpmu_perf::field::{
    SAMPLE_ADDR, SAMPLE_CALLCHAIN, SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD,
    SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME,
};
use vpmu_perf::record::{
    MODE_USER, TYPE_COMM, TYPE_FORK, TYPE_KSYMBOL, TYPE_LOST, TYPE_MMAP, TYPE_SAMPLE, TYPE_THROTTLE,
};

use crate::layout::Event;

/// perf stores a record's length in 16 bits.
pub const RECORD_MAX: usize = 65_528;
/// perf's `PERF_RECORD_FINISHED_ROUND`.
pub const TYPE_FINISHED_ROUND: u32 = 68;
/// perf's `PERF_RECORD_MISC_COMM_EXEC`: the new name is due to an exec.
pub const MISC_EXEC: u16 = 1 << 13;
/// Fields of every sample of a file: perf prints only the fields that all events have. Each sample begins with its
/// event's id, because perf requires the id at the same position in the samples of all events.
pub const SAMPLE_FIELDS: u64 =
    SAMPLE_IDENTIFIER | SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ADDR | SAMPLE_CPU | SAMPLE_PERIOD;
/// perf's `PERF_SAMPLE_RAW`: bytes that only the event's own tools understand.
pub const SAMPLE_RAW: u64 = 1 << 10;

/// The end of the records, whose order perf then restores. perf warns about a file without any record, so it ends the
/// records of every file.
pub const FINISHED_ROUND: Record = Record { kind: TYPE_FINISHED_ROUND, misc: 0, words: Vec::new() };

/// The circumstances of a record: what perf calls its sample id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Context {
    /// The process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The time in nanoseconds.
    pub time: u64,
    /// The CPU.
    pub cpu: u32,
}

/// The fields of a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fields<'a> {
    /// Task, time and CPU.
    pub context: Context,
    /// The address of the instruction.
    pub ip: u64,
    /// The mode, one of `MODE_*` of `vpmu-perf`.
    pub mode: u16,
    /// An address that belongs to the event, such as a mark's value.
    pub addr: u64,
    /// How much the event counted since its last sample.
    pub period: u64,
    /// The call chain, with perf's `PERF_CONTEXT_*` values.
    pub chain: &'a [u64],
    /// Bytes of the field [`SAMPLE_RAW`].
    pub raw: &'a [u8],
}

/// A record without the trailer that all records except samples have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// perf's `PERF_RECORD_*`.
    pub kind: u32,
    /// perf's `PERF_RECORD_MISC_*`.
    pub misc: u16,
    /// The fields.
    pub words: Vec<u64>,
}

impl Event {
    /// Returns the trailer of this event's records other than samples.
    #[must_use]
    pub fn trailer(&self, context: &Context) -> Vec<u64> {
        let fields = [
            (SAMPLE_TID, pair(context.pid, context.tid)),
            (SAMPLE_TIME, context.time),
            (SAMPLE_ID, self.id),
            (SAMPLE_STREAM_ID, self.id),
            (SAMPLE_CPU, u64::from(context.cpu)),
            (SAMPLE_IDENTIFIER, self.id),
        ];
        let has = |&(field, _): &(u64, u64)| self.sample_type & field != 0;
        fields.into_iter().filter(has).map(|(_, value)| value).collect()
    }

    /// Returns a sample with the fields [`SAMPLE_FIELDS`], and with a call chain and [`SAMPLE_RAW`] if the event has them.
    #[must_use]
    pub fn sample(&self, fields: &Fields<'_>) -> Record {
        let Context { pid, tid, time, cpu } = fields.context;
        let mut words = vec![self.id, fields.ip, pair(pid, tid), time, fields.addr, u64::from(cpu), fields.period];
        if self.sample_type & SAMPLE_CALLCHAIN != 0 {
            words.push(fields.chain.len() as u64);
            words.extend(fields.chain);
        }
        if self.sample_type & SAMPLE_RAW != 0 {
            // The field is the size and the bytes, padded to whole words. perf counts the padding as well.
            let room = (4 + fields.raw.len()).next_multiple_of(8) - 4;
            let size = u32::try_from(room).unwrap_or(u32::MAX);
            let mut bytes = size.to_le_bytes().to_vec();
            bytes.extend(fields.raw);
            words.extend(words_of(&bytes));
        }
        Record { kind: TYPE_SAMPLE, misc: fields.mode, words }
    }
}

impl Record {
    /// A thread has a new name, from an exec if `is_exec`.
    #[must_use]
    pub fn comm(pid: u32, tid: u32, name: &str, is_exec: bool) -> Self {
        let mut words = vec![pair(pid, tid)];
        words.extend(string(name));
        Self { kind: TYPE_COMM, misc: if is_exec { MISC_EXEC } else { 0 }, words }
    }

    /// A process has mapped `length` bytes of a file as executable at `start`, from `offset` in the file.
    #[must_use]
    pub fn map(pid: u32, start: u64, length: u64, offset: u64, path: &str) -> Self {
        let mut words = vec![pair(pid, pid), start, length, offset];
        words.extend(string(path));
        Self { kind: TYPE_MMAP, misc: MODE_USER, words }
    }

    /// The thread `parent` has created the thread `child`; both are a process and a thread.
    #[must_use]
    pub fn fork(parent: (u32, u32), child: (u32, u32), time: u64) -> Self {
        Self { kind: TYPE_FORK, misc: 0, words: vec![pair(child.0, parent.0), pair(child.1, parent.1), time] }
    }

    /// The kernel has a function of `size` bytes. So perf needs no other symbols, and does not mistake the kernel of the
    /// machine that shows the file for the recorded one.
    #[must_use]
    pub fn function(start: u64, size: u32, name: &str) -> Self {
        // The upper half of the second word is zero: `PERF_RECORD_KSYMBOL_TYPE_UNKNOWN`, no flags.
        let mut words = vec![start, u64::from(size)];
        words.extend(string(name));
        Self { kind: TYPE_KSYMBOL, misc: 0, words }
    }

    /// The event `id` has lost `count` samples.
    #[must_use]
    pub fn lost(id: u64, count: u64) -> Self {
        Self { kind: TYPE_LOST, misc: 0, words: vec![id, count] }
    }

    /// The event `id` was throttled at `time`.
    #[must_use]
    pub fn throttle(id: u64, time: u64) -> Self {
        Self { kind: TYPE_THROTTLE, misc: 0, words: vec![time, id, id] }
    }

    /// Appends the record and its trailer to `bytes`. If it would be longer than [`RECORD_MAX`], appends nothing and
    /// returns `false`.
    pub fn append(&self, bytes: &mut Vec<u8>, trailer: &[u64]) -> bool {
        append(bytes, self.kind, self.misc, &self.words, trailer)
    }
}

/// Appends a record with the fields `words` and a trailer to `bytes`. If it would be longer than [`RECORD_MAX`], appends
/// nothing and returns `false`.
pub fn append(bytes: &mut Vec<u8>, kind: u32, misc: u16, words: &[u64], trailer: &[u64]) -> bool {
    let size = 8 + 8 * (words.len() + trailer.len());
    let Some(size) = u16::try_from(size).ok().filter(|_| size <= RECORD_MAX) else {
        return false;
    };
    let header = u64::from(kind) | u64::from(misc) << 32 | u64::from(size) << 48;
    bytes.extend(header.to_le_bytes());
    bytes.extend(words.iter().chain(trailer).flat_map(|word| word.to_le_bytes()));
    true
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Text as words. A zero byte ends it.
fn string(text: &str) -> Vec<u64> {
    let end = text.bytes().position(|byte| byte == 0).unwrap_or(text.len());
    let bytes: Vec<u8> = text.bytes().take(end).chain([0]).collect();
    words_of(&bytes)
}

/// Bytes as words, padded with zeros.
fn words_of(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 8];
        word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
        u64::from_le_bytes(word)
    };
    bytes.chunks(8).map(word).collect()
}
