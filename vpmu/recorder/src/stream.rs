//! One event's records for the file, each with its time. The records are not kept in memory: each pass rebuilds them
//! one by one from the copy of the ring. So memory use does not depend on what the guest writes to the ring.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use vpmu::{History, PersistentStatus};
use vpmu_perf::record::TYPE_LOST;
use vpmu_perfdata::{RECORD_MAX, append};

use crate::record::{Form, Record, RingRecord};

/// One event's share of a file.
#[derive(Debug)]
pub(crate) struct Stream<'a> {
    pub(crate) event: &'a PersistentStatus,
    pub(crate) form: Form,
    history: &'a History,
    /// Bytes of the event's records in the file.
    pub(crate) size: u64,
    pub(crate) samples: u64,
    pub(crate) left_out: u64,
}

impl<'a> Stream<'a> {
    /// Scans a history once. Calls `see` with each kernel address in its records.
    pub(crate) fn new(history: &'a History, mut see: impl FnMut(u64)) -> Self {
        let mut stream =
            Self { event: &history.event, form: Form::of(&history.event), history, size: 0, samples: 0, left_out: 0 };
        let mut now = 0;
        for record in history.iter() {
            match stream.form.look(record, now) {
                RingRecord::Record(record) => {
                    now = record.time;
                    match stream.length(&record) {
                        Some(length) => {
                            stream.size += length;
                            stream.samples += u64::from(record.is_sample());
                            record.kernel.iter().for_each(|&address| see(address));
                        }
                        None => stream.left_out += 1,
                    }
                }
                RingRecord::Other => {}
                RingRecord::Foreign => stream.left_out += 1,
            }
        }
        if let Some(lost) = stream.lost(now) {
            stream.size += stream.length(&lost).unwrap_or(0);
        }
        stream
    }

    /// Rebuilds the records in the order of the ring. If any records of the event were lost or left out, adds a final
    /// record with their number.
    fn records(&self) -> impl Iterator<Item = Record> + use<'a> {
        let (form, mut now) = (self.form.clone(), 0);
        let mut ring: Box<dyn Iterator<Item = &'a [u8]>> = Box::new(self.history.iter());
        let (event, left_out) = (self.event, self.left_out);
        let mut ended = false;
        std::iter::from_fn(move || {
            for record in ring.by_ref() {
                if let RingRecord::Record(record) = form.look(record, now) {
                    now = record.time;
                    if length(&form, &record).is_some() {
                        return Some(record);
                    }
                }
            }
            let last = !std::mem::replace(&mut ended, true);
            lost(event, left_out, now).filter(|_| last)
        })
    }

    /// Returns the record that reports the event's lost and left-out records, if there are any.
    fn lost(&self, now: u64) -> Option<Record> {
        lost(self.event, self.left_out, now)
    }

    fn length(&self, record: &Record) -> Option<u64> {
        length(&self.form, record)
    }
}

fn lost(event: &PersistentStatus, left_out: u64, now: u64) -> Option<Record> {
    let lost = event.lost.saturating_add(left_out);
    (lost > 0).then(|| Record { kind: TYPE_LOST, misc: 0, time: now, body: vec![event.id, lost], kernel: Vec::new() })
}

/// Returns the size of a record in the file, in bytes; `None` if it exceeds [`RECORD_MAX`].
fn length(form: &Form, record: &Record) -> Option<u64> {
    let trailer = if record.is_sample() { 0 } else { form.trailer(record.time).len() };
    let size = 8 + 8 * (record.body.len() + trailer);
    (size <= RECORD_MAX).then_some(size as u64)
}

/// Merges all streams by time. Selects the stream whose next record has the earliest time, calls `put` with the bytes
/// of this record, and repeats this until no stream has a next record. If the times are equal, selects the first of
/// the streams. The records of one stream stay in their order.
///
/// # Errors
/// Errors of `put`.
pub(crate) fn in_order<E>(streams: &[Stream<'_>], mut put: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
    let mut rings: Vec<_> = streams.iter().map(Stream::records).collect();
    let mut next: Vec<Option<Record>> = rings.iter_mut().map(Iterator::next).collect();
    let head = |at: usize, record: &Record| Reverse((record.time, at));
    let heads = next.iter().enumerate();
    let mut order: BinaryHeap<_> =
        heads.filter_map(|(at, record)| record.as_ref().map(|record| head(at, record))).collect();
    let mut bytes = Vec::new();
    while let Some(Reverse((time, at))) = order.pop() {
        let (Some(ring), Some(slot)) = (rings.get_mut(at), next.get_mut(at)) else {
            continue;
        };
        let following = ring.next();
        order.extend(following.as_ref().map(|record| head(at, record)));
        if let (Some(record), Some(stream)) = (std::mem::replace(slot, following), streams.get(at)) {
            let trailer = if record.is_sample() { Vec::new() } else { stream.form.trailer(time) };
            bytes.clear();
            append(&mut bytes, record.kind, record.misc, &record.body, &trailer);
            put(&bytes)?;
        }
    }
    Ok(())
}
