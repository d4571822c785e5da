//! Readers of AUX areas. The host writes a trace and moves the head. The reader copies the trace and moves the tail or,
//! in overwrite mode, copies only the newest part. Readers do not parse packets.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vpmu_perf::Mapping;
use vpmu_perf::page::{AUX_HEAD, AUX_OFFSET, AUX_SIZE, AUX_TAIL};

use crate::event::{Event, EventError};
use crate::ring::{PAGE_SIZE, Ring};
use crate::trace::{ALIGN, Chunk};

/// Maximum number of bytes that one read copies. Each read frees the space of the bytes that it copied, so the host can
/// reuse this space before the reader has read the rest of the area.
const MOST: u64 = 1 << 20;
/// Maximum number of attempts to copy a snapshot. An attempt fails if the host overwrites the whole
/// area during the copy.
const TRIES: u32 = 10;

const PAGE: u64 = PAGE_SIZE as u64;

/// An error of an AUX area.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AreaError {
    /// The kernel refused the mapping.
    #[error("cannot map an AUX area of {pages} pages{}", hint(source))]
    Map {
        /// Pages requested.
        pages: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// A size in bytes that `usize` cannot hold.
    #[error("an AUX area of 2^{0} pages is too large")]
    TooLarge(u32),
    /// The head is invalid: the distance from the tail to the head exceeds the area's size or is
    /// not a multiple of the packet alignment.
    #[error(
        "the AUX area's head {head:#x} is invalid for tail {tail:#x} and size {size:#x}: call `skip` to discard the area's contents"
    )]
    Overrun {
        /// Bytes produced.
        head: u64,
        /// Bytes consumed.
        tail: u64,
        /// Bytes of the area.
        size: u64,
    },
    /// The event cannot be flushed or read.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The host overwrote the whole area during every attempt to copy it.
    #[error("the AUX area is written faster than it can be copied: map a larger one")]
    TooFast,
}

/// A hint to append to the error text if the error number alone does not suggest a remedy.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (this user may not lock so much memory: map fewer pages, raise `ulimit -l` or, as root, the driver's parameter mlock_kb)"
        }
        Some(libc::EINVAL) => " (the area is already mapped with another size, or the ring is gone)",
        Some(libc::EOPNOTSUPP) => " (the event is not a trace: `vperf list` shows the traces)",
        Some(libc::ENOMEM | libc::ENOSPC) => {
            " (the guest lacks memory, or the area exceeds the host's limit for this machine: map fewer pages)"
        }
        _ => "",
    }
}

/// A mapped area and its ring. The ring's metadata page holds the area's head and tail.
#[derive(Debug)]
struct AreaMapping {
    mapping: Mapping,
    /// The ring's mapping, kept alive because its first page holds the head and the tail.
    ring: Arc<Mapping>,
}

impl AreaMapping {
    /// Stores the area's offset and size in the ring's metadata page, as perf requires, and then
    /// maps the area. In the event's file, the area starts where the ring ends.
    fn new(event: &Event, ring: &Ring, pages_log2: u32, writable: bool) -> Result<Self, AreaError> {
        let bytes = 1usize
            .checked_shl(pages_log2)
            .and_then(|pages| pages.checked_mul(PAGE_SIZE))
            .ok_or(AreaError::TooLarge(pages_log2))?;
        let ring = Arc::clone(ring.mapping());
        let offset = ring.len() as u64;
        ring.store(AUX_OFFSET, offset, Ordering::Relaxed);
        ring.store(AUX_SIZE, bytes as u64, Ordering::Relaxed);
        let mapping = event.ring_fd().and_then(|fd| Mapping::map(fd, offset, bytes, writable));
        let mapping = mapping.map_err(|source| AreaError::Map { pages: bytes / PAGE_SIZE, source })?;
        Ok(Self { mapping, ring })
    }

    fn size(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn head(&self) -> u64 {
        self.ring.load(AUX_HEAD, Ordering::Acquire)
    }

    /// Copies the bytes from `from` up to `to`. Both are multiples of 8, and their difference is at
    /// most the area's size.
    #[expect(clippy::cast_possible_truncation, reason = "less than the mapping's length")]
    fn copy(&self, from: u64, to: u64, chunk: &mut Chunk) {
        chunk.position = from;
        chunk.bytes.clear();
        let first = from % self.size();
        let length = to.wrapping_sub(from);
        let before_end = length.min(self.size() - first);
        let bytes = &mut chunk.bytes;
        self.mapping.copy(first as usize, before_end as usize, bytes);
        self.mapping.copy(0, (length - before_end) as usize, bytes);
    }
}

/// A mapped AUX area and this reader's position in it.
#[derive(Debug)]
pub struct Area {
    mapping: AreaMapping,
    /// Bytes consumed. The tail in the ring's metadata page is a copy of this number for the host.
    /// This reader loads the copy once, when the area is mapped, and afterwards only stores it.
    tail: u64,
}

impl Area {
    /// Maps an AUX area of 2^`pages_log2` pages for a trace whose ring is `ring`. Reading the area
    /// frees its space.
    ///
    /// # Errors
    /// [`AreaError::Map`], with `EOPNOTSUPP` if the event is not a trace and `EINVAL` if its area
    /// has another size; [`AreaError::TooLarge`].
    pub fn map(event: &Event, ring: &Ring, pages_log2: u32) -> Result<Self, AreaError> {
        let mapping = AreaMapping::new(event, ring, pages_log2, true)?;
        let tail = mapping.ring.load(AUX_TAIL, Ordering::Relaxed);
        Ok(Self { mapping, tail })
    }

    /// Bytes of the area.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.mapping.size()
    }

    /// Bytes written so far, according to the host.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.mapping.head()
    }

    /// Bytes that this reader has consumed.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Replaces the contents of `chunk` with unread bytes, at most 1 MiB of them, and frees their
    /// space in the area. Returns false if the area has no unread bytes.
    ///
    /// # Errors
    /// [`AreaError::Overrun`] if the head is invalid. Later calls fail too, until [`Area::skip`] is
    /// called.
    pub fn read(&mut self, chunk: &mut Chunk) -> Result<bool, AreaError> {
        let (head, tail, size) = (self.head(), self.tail, self.size());
        let available = head.wrapping_sub(tail);
        if available > size || !available.is_multiple_of(ALIGN as u64) {
            return Err(AreaError::Overrun { head, tail, size });
        }
        // Stop at the end of a page: packets do not cross pages.
        let most = MOST - tail % PAGE;
        let end = tail.wrapping_add(available.min(most));
        self.mapping.copy(tail, end, chunk);
        self.consume(end);
        Ok(available != 0)
    }

    /// Discards everything up to the head; returns the number of bytes.
    pub fn skip(&mut self) -> u64 {
        let head = self.head();
        let skipped = head.wrapping_sub(self.tail);
        self.consume(head);
        skipped
    }

    /// Stores `tail` in the ring's metadata page without moving this reader's own position. Tests
    /// use this to check how the host reacts to a wrong tail. The next read stores the correct tail
    /// again.
    pub fn set_tail_raw(&self, tail: u64) {
        self.mapping.ring.store(AUX_TAIL, tail, Ordering::Release);
    }

    fn consume(&mut self, tail: u64) {
        self.tail = tail;
        // Release: the host may overwrite the consumed bytes only after this reader has loaded
        // them.
        self.mapping.ring.store(AUX_TAIL, tail, Ordering::Release);
    }
}

/// An AUX area in overwrite mode: it always holds the newest part of a trace.
#[derive(Debug)]
pub struct Snapshot<'a> {
    event: &'a Event,
    mapping: AreaMapping,
}

impl<'a> Snapshot<'a> {
    /// Maps an AUX area of 2^`pages_log2` pages that keeps the newest part of the trace.
    ///
    /// # Errors
    /// See [`Area::map`].
    pub fn map(event: &'a Event, ring: &Ring, pages_log2: u32) -> Result<Self, AreaError> {
        let mapping = AreaMapping::new(event, ring, pages_log2, false)?;
        Ok(Self { event, mapping })
    }

    /// Bytes of the area.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.mapping.size()
    }

    /// Copies the newest part of the trace while the trace continues. The copy begins at the start
    /// of a page of the area, or at the start of the trace if the area still holds it.
    ///
    /// # Errors
    /// [`AreaError::Event`] if the event cannot be read; [`AreaError::TooFast`] if the host
    /// overwrote the whole area during every attempt to copy it.
    pub fn take(&self) -> Result<Chunk, AreaError> {
        // Reading the event makes the device publish all trace data that the device has written.
        take(&self.mapping, || Ok(self.event.read_any()?))
    }
}

/// Returns the bytes that were in the area before the copy began and that the host had not
/// overwritten when the copy ended.
fn take(mapping: &AreaMapping, publish: impl Fn() -> Result<(), AreaError>) -> Result<Chunk, AreaError> {
    let size = mapping.size();
    let mut chunk = Chunk::default();
    for _ in 0..TRIES {
        publish()?;
        let head = mapping.head();
        if head == 0 {
            return Ok(Chunk::default());
        }
        mapping.copy(head.saturating_sub(size), head, &mut chunk);
        publish()?;
        // The host may have overwritten the oldest bytes during the copy.
        let oldest = mapping.head().saturating_sub(size);
        let from = oldest.max(chunk.position).checked_next_multiple_of(PAGE);
        let from = from.unwrap_or(u64::MAX);
        let gone = usize::try_from(from - chunk.position).unwrap_or(usize::MAX);
        if gone < chunk.bytes.len() {
            chunk.bytes.drain(..gone);
            chunk.position = from;
            return Ok(chunk);
        }
    }
    Err(AreaError::TooFast)
}

#[cfg(test)]
#[path = "area_tests.rs"]
mod tests;
