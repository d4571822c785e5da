//! What a ring holds, read while its writer writes and others read: nothing is paused and
//! nothing taken. It is copied, and what may have been written over meanwhile is left out.
//!
//! The device can be in the middle of writing what no head tells yet. A flush of the event
//! waits for that, so the head after a flush that follows the copy bounds what was touched.

use std::os::fd::AsFd;
use std::sync::atomic::{Ordering, fence};

use crate::event::{Event, EventError};
use crate::map::Mapping;
use crate::record::{Header, Layout, Record};
use crate::ring::{self, DATA_HEAD, DATA_TAIL, PAGE_SIZE, RingError, WORD};

/// Why a ring's history cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The ring cannot be mapped, or its head and tail are nonsense.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The event cannot be flushed.
    #[error(transparent)]
    Event(#[from] EventError),
    /// Of a ring that is overwritten forwards, nobody can tell where its oldest record begins.
    #[error(
        "its ring overwrites the oldest records, but is not written backwards: such a ring cannot be read"
    )]
    Forward,
}

/// How the ring is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Backwards, over the oldest: the newest record begins at the head.
    Newest,
    /// Forwards up to what nobody has read: the oldest record begins at the tail.
    Unread,
}

/// A ring, beside its other readers.
#[derive(Debug)]
pub struct History<'a> {
    event: &'a Event,
    mapping: Mapping,
    layout: Layout,
    manner: Manner,
}

/// What a ring held at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Past {
    /// The oldest first.
    pub records: Vec<Record>,
    /// How far they go, for [`History::since`].
    pub position: u64,
    /// Bytes between the position asked for and the oldest record: they were written over.
    pub missed: u64,
    /// Records that could not be taken apart.
    pub unreadable: u64,
}

impl<'a> History<'a> {
    pub(crate) fn new(
        event: &'a Event,
        data_pages: u32,
        layout: Layout,
        (overwrites, backward): (bool, bool),
    ) -> Result<Self, HistoryError> {
        let manner = match (overwrites, backward) {
            (true, true) => Manner::Newest,
            (false, false) => Manner::Unread,
            _ => return Err(HistoryError::Forward),
        };
        let pages = usize::try_from(data_pages).unwrap_or(usize::MAX);
        Ok(Self {
            event,
            mapping: ring::map(event.as_fd(), pages, Mapping::new_read_only)?,
            layout,
            manner,
        })
    }

    /// What the ring holds, after a flush of the event.
    ///
    /// # Errors
    /// [`HistoryError::Event`] if the event cannot be flushed, [`HistoryError::Ring`]. One in
    /// error, or whose CPU is offline, is read as far as it came.
    pub fn read(&self) -> Result<Past, HistoryError> {
        self.past(None)
    }

    /// As [`History::read`], of what came after a [`Past::position`].
    ///
    /// # Errors
    /// As [`History::read`].
    pub fn since(&self, position: u64) -> Result<Past, HistoryError> {
        self.past(Some(position))
    }

    fn past(&self, since: Option<u64>) -> Result<Past, HistoryError> {
        let Self {
            mapping, layout, ..
        } = self;
        let barrier = || settled(self.event.flush());
        match self.manner {
            Manner::Newest => Ok(newest(mapping, layout, since, barrier)?),
            Manner::Unread => unread(mapping, layout, since, barrier),
        }
    }
}

/// An event in error has nothing more to write, nor has one whose CPU is offline: what it recorded
/// before can be read.
fn settled(flushed: Result<(), EventError>) -> Result<(), EventError> {
    match flushed {
        Err(EventError::Flush(error))
            if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV)) =>
        {
            Ok(())
        }
        flushed => flushed,
    }
}

/// Of a ring written backwards. `barrier` returns when all that was being written stands behind
/// the head.
fn newest(
    mapping: &Mapping,
    layout: &Layout,
    since: Option<u64>,
    barrier: impl Fn() -> Result<(), EventError>,
) -> Result<Past, EventError> {
    let size = size(mapping);
    barrier()?;
    let head = mapping.load(DATA_HEAD, Ordering::Acquire);
    // It counts down from zero.
    let asked = since.unwrap_or(0).wrapping_sub(head);
    let held = copy(mapping, head, asked.min(size));
    fence(Ordering::Acquire);
    barrier()?;
    let after = mapping.load(DATA_HEAD, Ordering::Relaxed);
    let touched = head.wrapping_sub(after);
    let whole = words(size.saturating_sub(touched)).min(held.len());
    let (mut past, bytes) = gather(walk(&held[..whole], head, layout));
    past.records.reverse();
    past.missed = since.map_or(0, |_| asked.saturating_sub(bytes));
    past.position = head;
    Ok(past)
}

/// Of a ring written forwards, whose readers move the tail.
fn unread(
    mapping: &Mapping,
    layout: &Layout,
    since: Option<u64>,
    barrier: impl Fn() -> Result<(), EventError>,
) -> Result<Past, HistoryError> {
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
    // What others have taken out meanwhile may be written over; what was asked for may begin
    // later than that.
    let taken = mapping
        .load(DATA_TAIL, Ordering::Relaxed)
        .wrapping_sub(tail);
    let known = since.map_or(0, |since| since.wrapping_sub(tail));
    let known = if known > available { 0 } else { known };
    let from = taken.max(known);
    let start = tail.wrapping_add(from);
    let rest = held.get(words(from)..).unwrap_or_default();
    let (mut past, _) = gather(walk(rest, start, layout));
    let missed = since.map_or(0, |since| start.wrapping_sub(since).cast_signed());
    past.missed = missed.max(0).cast_unsigned();
    past.position = head;
    Ok(past)
}

fn size(mapping: &Mapping) -> u64 {
    (mapping.len() - PAGE_SIZE) as u64
}

fn words(bytes: u64) -> usize {
    usize::try_from(bytes / WORD as u64).unwrap_or(usize::MAX)
}

/// The words of data from `position` on.
pub(crate) fn copy(mapping: &Mapping, position: u64, bytes: u64) -> Vec<u64> {
    let size = size(mapping);
    let positions = (0..bytes / WORD as u64).map(|index| index * WORD as u64);
    positions
        .map(|offset| ring::data_word(mapping, size, position.wrapping_add(offset)))
        .collect()
}

/// The records one after another, each with its length, as far as they are whole. `position`
/// is that of the first.
pub(crate) fn walk<'a>(
    held: &'a [u64],
    position: u64,
    layout: &'a Layout,
) -> impl Iterator<Item = (Result<Record, RingError>, u64)> + 'a {
    let mut read = 0;
    std::iter::from_fn(move || {
        let rest = held.get(read..)?;
        let header = Header::from_word(*rest.first()?);
        let length = usize::from(header.size);
        if length == 0 || !length.is_multiple_of(WORD) {
            return None;
        }
        let body = rest.get(1..length / WORD)?;
        let tail = position.wrapping_add((read * WORD) as u64);
        let record = Record::parse(header, body, layout);
        read += length / WORD;
        Some((
            record.map_err(|source| RingError::Record { tail, source }),
            length as u64,
        ))
    })
}

/// The records, and how many bytes they have.
fn gather(records: impl Iterator<Item = (Result<Record, RingError>, u64)>) -> (Past, u64) {
    let mut past = Past::default();
    let mut bytes = 0;
    for (record, length) in records {
        bytes += length;
        match record {
            Ok(record) => past.records.push(record),
            Err(_) => past.unreadable += 1,
        }
    }
    (past, bytes)
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
