//! Mapped AUX areas, which the tests map and read by the rules of `<linux/perf_event.h>`.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::io;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::fields;
use crate::packets::{self, Placed};
use crate::pages::{AUX_HEAD, AUX_OFFSET, AUX_SIZE, AUX_TAIL, Pages, Record};
use crate::raw::{Event, PAGE};

pub(crate) const AUX: u32 = 11;
pub(crate) const ITRACE_START: u32 = 12;

pub(crate) const TRUNCATED: u64 = 1 << 0;
pub(crate) const OVERWRITE: u64 = 1 << 1;
pub(crate) const PARTIAL: u64 = 1 << 2;
pub(crate) const COLLISION: u64 = 1 << 3;

/// A mapped area; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Area {
    pages: Pages,
    /// This reader's own position.
    tail: u64,
}

/// Announces an area by writing its offset and size to the ring's metadata page. A program must do this before it maps
/// the area.
pub(crate) fn announce(ring: &Pages, offset: u64, size: u64) {
    ring.store_release(AUX_OFFSET, offset);
    ring.store_release(AUX_SIZE, size);
}

impl Area {
    /// Maps an area without announcing it first.
    pub(crate) fn map_raw(event: &Event, bytes: usize, protection: i32, offset: u64) -> io::Result<Self> {
        let flags = libc::MAP_SHARED;
        let pages = Pages::map_raw(event, bytes, protection, flags, offset.cast_signed())?;
        Ok(Self { pages, tail: 0 })
    }

    /// Announces and maps `pages` pages behind the ring.
    pub(crate) fn map(event: &Event, ring: &Pages, pages: usize, protection: i32) -> io::Result<Self> {
        let (offset, bytes) = (PAGE as u64 + ring.size(), pages * PAGE);
        announce(ring, offset, bytes as u64);
        let mut area = Self::map_raw(event, bytes, protection, offset)?;
        area.tail = ring.load(AUX_TAIL);
        Ok(area)
    }

    pub(crate) fn size(&self) -> u64 {
        self.pages.bytes()
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.pages.address()
    }

    /// Returns the word at `position`. Like the head, `position` is not reset to zero at the end of the area.
    pub(crate) fn word(&self, position: u64) -> u64 {
        self.pages.load((position % self.size()) as usize)
    }

    /// Takes the packets up to the area's head.
    pub(crate) fn take(&mut self, ring: &Pages) -> Result<Vec<Placed>, String> {
        let head = ring.load_acquire(AUX_HEAD);
        let available = head.wrapping_sub(self.tail);
        if available > self.size() {
            return Err(format!("{available} unread bytes in an area of {}", self.size()));
        }
        let packets = packets::decode(self.tail, head, |at| self.word(at))?;
        self.tail = head;
        ring.store_release(AUX_TAIL, head);
        Ok(packets)
    }

    /// Returns the packets of a snapshot, starting with the oldest page that is still complete.
    pub(crate) fn newest(&self, ring: &Pages) -> Result<Vec<Placed>, String> {
        let head = ring.load_acquire(AUX_HEAD);
        let oldest = head.saturating_sub(self.size());
        packets::decode(oldest.next_multiple_of(PAGE as u64), head, |at| self.word(at))
    }
}

/// Returns the area's head, which is in the ring's metadata page.
pub(crate) fn head(ring: &Pages) -> u64 {
    ring.load_acquire(AUX_HEAD)
}

/// `PERF_RECORD_AUX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) flags: u64,
}

/// The ring's records about its area.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reported {
    pub(crate) chunks: Vec<Chunk>,
    /// Process and thread of each `PERF_RECORD_ITRACE_START`.
    pub(crate) starts: Vec<(u32, u32)>,
    /// The trailers of the records.
    pub(crate) trailers: Vec<fields::Trailer>,
}

impl Reported {
    /// Bytes of all chunks.
    pub(crate) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.size).sum()
    }

    pub(crate) fn flags(&self) -> Vec<u64> {
        self.chunks.iter().map(|chunk| chunk.flags).collect()
    }
}

/// Parses the records of a ring. Each record must be about the ring's AUX area, that is, a `PERF_RECORD_AUX` or a
/// `PERF_RECORD_ITRACE_START`.
pub(crate) fn reported(records: &[Record], attr: &perf_event_attr) -> Result<Reported, String> {
    let mut reported = Reported::default();
    for record in records {
        let body = match record.kind {
            AUX => 3,
            ITRACE_START => 1,
            _ => return Err(format!("the record is not about the AUX area: {record:?}")),
        };
        let (own, trailer) = fields::trailer(record, body, attr)?;
        match own[..] {
            [offset, size, flags] => reported.chunks.push(Chunk { offset, size, flags }),
            _ => reported.starts.push((own[0] as u32, (own[0] >> 32) as u32)),
        }
        reported.trailers.push(trailer);
    }
    Ok(reported)
}

/// Checks that the first chunk begins at `from`, and that every later chunk begins where the previous chunk ended.
/// Returns the end of the last chunk.
pub(crate) fn contiguous(chunks: &[Chunk], from: u64) -> Result<u64, String> {
    chunks.iter().try_fold(from, |at, chunk| {
        if chunk.offset == at { Ok(at + chunk.size) } else { Err(format!("{chunk:x?} does not begin at {at:#x}")) }
    })
}
