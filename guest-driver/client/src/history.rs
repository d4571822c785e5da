//! A ring's contents, copied while its writer and other readers continue. Nothing is paused or
//! consumed. The copy omits bytes that the writer may have overwritten during the copy.
//!
//! The device may have written records beyond the head that it last published. A flush of the event publishes a head
//! that includes them. So the event is flushed again after the copy, and the new head shows which bytes the device may
//! have overwritten during the copy.

use std::sync::atomic::{Ordering, fence};

use vpmu_perf::Mapping;
use vpmu_perf::page::{DATA_HEAD, DATA_TAIL};
use vpmu_perf::record::in_words;

use crate::event::{Event, EventError};
use crate::record::{Layout, Record};
use crate::ring::{self, PAGE_SIZE, RingError};

const WORD: usize = 8;

/// An error of reading a ring's history.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The ring cannot be mapped, or its head and tail are inconsistent.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The event cannot be flushed.
    #[error(transparent)]
    Event(#[from] EventError),
    /// A ring in overwrite mode that is written forwards: the start of its oldest record is unknown.
    #[error(
        "the event's ring overwrites the oldest records, but is not written backwards: the start of its oldest record is unknown"
    )]
    Forward,
    /// A ring that is written backwards, but is not in overwrite mode.
    #[error("cannot read the event's ring: it is written backwards, but does not overwrite the oldest records")]
    Backward,
}

/// The direction and mode in which the ring is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Written backwards, in overwrite mode: the newest record begins at the head.
    Newest,
    /// Written forwards, without overwriting unread records: the oldest record begins at the tail.
    Unread,
}

/// A ring that is read without disturbing its writer and other readers.
#[derive(Debug)]
pub struct History<'a> {
    event: &'a Event,
    mapping: Mapping,
    layout: Layout,
    mode: Mode,
}

/// Contents of a ring at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RingSnapshot {
    /// The records, oldest first.
    pub records: Vec<Record>,
    /// Position after the newest record, for [`History::since`].
    pub position: u64,
    /// Bytes between the requested position and the oldest returned record. They were overwritten
    /// or, in a ring that keeps unread records, consumed by another reader.
    pub missed: u64,
    /// Records that could not be parsed.
    pub unreadable: u64,
}

impl<'a> History<'a> {
    /// Maps a ring of `data_pages` data pages to copy its records while the writer and other
    /// readers continue: nothing is paused or consumed. `overwrites` is true if the ring is in
    /// overwrite mode; for a persistent event, pass [`crate::Persistent::overwrites`].
    ///
    /// # Errors
    /// See [`Event::map`]; [`HistoryError::Forward`]; [`HistoryError::Backward`].
    pub fn map(event: &'a Event, data_pages: u32, overwrites: bool) -> Result<Self, HistoryError> {
        let mode = match (overwrites, event.is_backward()) {
            (true, true) => Mode::Newest,
            (false, false) => Mode::Unread,
            (true, false) => return Err(HistoryError::Forward),
            (false, true) => return Err(HistoryError::Backward),
        };
        let pages = usize::try_from(data_pages).unwrap_or(usize::MAX);
        let mapping = ring::map(event.map_fd(pages)?, pages, Mapping::new_read_only)?;
        Ok(Self { event, mapping, layout: event.layout(), mode })
    }

    /// Reads the ring's contents after a flush of the event.
    ///
    /// # Errors
    /// [`HistoryError::Event`] if the event cannot be flushed, and [`HistoryError::Ring`] if the
    /// ring's head and tail are inconsistent. A failed flush of an event in the error state or on
    /// an offline CPU is ignored, because such an event has no pending samples.
    pub fn read(&self) -> Result<RingSnapshot, HistoryError> {
        self.snapshot(None)
    }

    /// Like [`History::read`], but only for records after `position`, an earlier
    /// [`RingSnapshot::position`].
    ///
    /// # Errors
    /// See [`History::read`].
    pub fn since(&self, position: u64) -> Result<RingSnapshot, HistoryError> {
        self.snapshot(Some(position))
    }

    fn snapshot(&self, since: Option<u64>) -> Result<RingSnapshot, HistoryError> {
        let Self { mapping, layout, .. } = self;
        let barrier = || settled(self.event.flush());
        match self.mode {
            Mode::Newest => Ok(newest(mapping, layout, since, barrier)?),
            Mode::Unread => unread(mapping, layout, since, barrier),
        }
    }
}

/// Ignores the flush errors of an event in the error state or on an offline CPU: such an event has no pending samples,
/// and the records in its ring are readable.
fn settled(flushed: Result<(), EventError>) -> Result<(), EventError> {
    match flushed {
        Err(EventError::Flush(error)) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV)) => Ok(()),
        flushed => flushed,
    }
}

/// Reads a ring written backwards. `barrier` waits until all records that the writer had begun are
/// published.
fn newest(
    mapping: &Mapping,
    layout: &Layout,
    since: Option<u64>,
    barrier: impl Fn() -> Result<(), EventError>,
) -> Result<RingSnapshot, EventError> {
    let size = size(mapping);
    barrier()?;
    let head = mapping.load(DATA_HEAD, Ordering::Acquire);
    // The position counts down from zero.
    let asked = since.unwrap_or(0).wrapping_sub(head);
    let held = copy(mapping, head, asked.min(size));
    fence(Ordering::Acquire);
    barrier()?;
    let after = mapping.load(DATA_HEAD, Ordering::Relaxed);
    let touched = head.wrapping_sub(after);
    let whole = words(size.saturating_sub(touched)).min(held.len());
    let (mut snapshot, bytes) = gather(walk(&held[..whole], head, layout));
    snapshot.records.reverse();
    snapshot.missed = since.map_or(0, |_| asked.saturating_sub(bytes));
    snapshot.position = head;
    Ok(snapshot)
}

/// Reads a ring written forwards, whose readers move the tail. `barrier` is as for [`newest`].
fn unread(
    mapping: &Mapping,
    layout: &Layout,
    since: Option<u64>,
    barrier: impl Fn() -> Result<(), EventError>,
) -> Result<RingSnapshot, HistoryError> {
    let size = size(mapping);
    barrier()?;
    let tail = mapping.load(DATA_TAIL, Ordering::Acquire);
    let head = mapping.load(DATA_HEAD, Ordering::Acquire);
    let available = head.wrapping_sub(tail);
    if available > size {
        return Err(RingError::Overrun { head, tail, size }.into());
    }
    let held = copy(mapping, tail, available);
    fence(Ordering::Acquire);
    barrier()?;
    // Other readers may have consumed records during the copy, and the writer may have overwritten
    // the consumed records. Start at the new tail, or at the requested position if that is later.
    let taken = mapping.load(DATA_TAIL, Ordering::Relaxed).wrapping_sub(tail);
    let known = since.map_or(0, |since| since.wrapping_sub(tail));
    let known = if known > available { 0 } else { known };
    let from = taken.max(known);
    let start = tail.wrapping_add(from);
    let rest = held.get(words(from)..).unwrap_or_default();
    let (mut snapshot, _) = gather(walk(rest, start, layout));
    let missed = since.map_or(0, |since| start.wrapping_sub(since).cast_signed());
    snapshot.missed = missed.max(0).cast_unsigned();
    snapshot.position = head;
    Ok(snapshot)
}

fn size(mapping: &Mapping) -> u64 {
    (mapping.len() - PAGE_SIZE) as u64
}

fn words(bytes: u64) -> usize {
    usize::try_from(bytes / WORD as u64).unwrap_or(usize::MAX)
}

/// Copies `bytes` of the data from `position` on, as words.
pub(crate) fn copy(mapping: &Mapping, position: u64, bytes: u64) -> Vec<u64> {
    let size = size(mapping);
    let positions = (0..bytes / WORD as u64).map(|index| index * WORD as u64);
    positions.map(|offset| ring::data_word(mapping, position.wrapping_add(offset) % size)).collect()
}

/// Iterates over the whole records in `held`, each with its length. The first record is at
/// `position` in the ring.
pub(crate) fn walk<'a>(
    held: &'a [u64],
    position: u64,
    layout: &'a Layout,
) -> impl Iterator<Item = (Result<Record, RingError>, u64)> + 'a {
    in_words(held, position).map(|(header, tail, body)| {
        let record = Record::parse(header, body, layout);
        let record = record.map_err(|source| RingError::Record { tail, source });
        (record, header.size.into())
    })
}

/// Collects the records; returns them with their total size in bytes.
fn gather(records: impl Iterator<Item = (Result<Record, RingError>, u64)>) -> (RingSnapshot, u64) {
    let mut snapshot = RingSnapshot::default();
    let mut bytes = 0;
    for (record, length) in records {
        bytes += length;
        match record {
            Ok(record) => snapshot.records.push(record),
            Err(_) => snapshot.unreadable += 1,
        }
    }
    (snapshot, bytes)
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
