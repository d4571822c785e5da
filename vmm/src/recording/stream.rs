//! One event's records on their way into the file, each with its time.

use std::ops::Range;

use vpmu::{History, PersistentStatus};

use super::record::{Form, Found, Record, TYPE_LOST};

/// perf's records say their length in 16 bits.
const RECORD_MAX: usize = 65_528;

/// What one event adds to a file.
#[derive(Debug)]
pub(super) struct Stream<'a> {
    pub(super) event: &'a PersistentStatus,
    pub(super) form: Form,
    /// Records as they stand in the file, one after another.
    bytes: Vec<u8>,
    /// When each came about, and where in `bytes` it lies.
    records: Vec<(u64, Range<usize>)>,
    /// Addresses in the guest's kernel that they name.
    pub(super) kernel_addresses: Vec<u64>,
    pub(super) samples: u64,
    pub(super) left_out: u64,
}

impl<'a> Stream<'a> {
    pub(super) fn new(history: &'a History) -> Self {
        let form = Form::of(&history.event);
        let mut stream = Self {
            event: &history.event,
            form,
            bytes: Vec::new(),
            records: Vec::new(),
            kernel_addresses: Vec::new(),
            samples: 0,
            left_out: 0,
        };
        let mut now = 0;
        for record in history.iter() {
            match form.look(record, now) {
                Found::Record(record) => now = stream.take(&record),
                Found::Other => {}
                Found::Foreign => stream.left_out += 1,
            }
        }
        let lost = history.event.lost.saturating_add(stream.left_out);
        if lost > 0 {
            stream.push(TYPE_LOST, 0, now, &[history.event.id, lost], true);
        }
        stream
    }

    /// Takes a record that goes into the file; when it came about.
    fn take(&mut self, record: &Record) -> u64 {
        let trailed = !record.is_sample();
        if self.push(record.kind, record.misc, record.time, &record.body, trailed) {
            self.samples += u64::from(record.is_sample());
            self.kernel_addresses.extend(&record.kernel);
        } else {
            self.left_out += 1;
        }
        record.time
    }

    /// Appends a record, if its length can be told.
    fn push(&mut self, kind: u32, misc: u16, time: u64, body: &[u64], trailed: bool) -> bool {
        let trailer = match trailed {
            true => self.form.trailer(time),
            false => Vec::new(),
        };
        let start = self.bytes.len();
        let written = append(&mut self.bytes, kind, misc, &[body, &trailer].concat());
        if written {
            self.records.push((time, start..self.bytes.len()));
        }
        written
    }
}

/// Appends a record of these words to `bytes`, if its length can be told.
pub(super) fn append(bytes: &mut Vec<u8>, kind: u32, misc: u16, words: &[u64]) -> bool {
    let size = 8 + 8 * words.len();
    let Some(size) = u16::try_from(size).ok().filter(|_| size <= RECORD_MAX) else {
        return false;
    };
    let header = u64::from(kind) | u64::from(misc) << 32 | u64::from(size) << 48;
    bytes.extend(header.to_le_bytes());
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    true
}

/// The records of all, by their times; of equal times those of the first stream come first.
pub(super) fn in_order<'a>(streams: &'a [Stream<'_>]) -> Vec<&'a [u8]> {
    let mut all: Vec<(u64, &[u8])> = streams
        .iter()
        .flat_map(|stream| {
            let slice = |range: &Range<usize>| stream.bytes.get(range.clone()).unwrap_or_default();
            let records = stream.records.iter();
            records.map(move |(time, range)| (*time, slice(range)))
        })
        .collect();
    all.sort_by_key(|&(time, _)| time);
    all.into_iter().map(|(_, bytes)| bytes).collect()
}
