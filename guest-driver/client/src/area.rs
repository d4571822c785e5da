//! The reader of an AUX area: the host writes a trace and the head, this side copies it out
//! and moves the tail; or, of an area that nobody empties, copies the newest. Knows nothing of
//! what the packets say.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::event::{Event, EventError};
use crate::map::Mapping;
use crate::ring::{PAGE_SIZE, Ring};
use crate::trace::{ALIGN, Chunk};

// Byte offsets in perf's metadata page.
const AUX_HEAD: usize = 1056;
const AUX_TAIL: usize = 1064;
const AUX_OFFSET: usize = 1072;
const AUX_SIZE: usize = 1080;

/// Most bytes read at once: room goes back to the host while the rest is read.
const MOST: u64 = 1 << 20;
/// Times that a snapshot lets the host write its whole area over while it is copied.
const TRIES: u32 = 10;

const PAGE: u64 = PAGE_SIZE as u64;

/// What is wrong with an area.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AreaError {
    /// The kernel refused the mapping.
    #[error("mapping an AUX area of {pages} pages{}", hint(source))]
    Map {
        /// Pages asked for.
        pages: usize,
        /// Why.
        source: io::Error,
    },
    /// More pages than a machine has.
    #[error("an AUX area of 2^{0} pages is too large")]
    TooLarge(u32),
    /// Between head and tail there is no number of whole packets that the area can hold.
    #[error(
        "the AUX area's head {head:#x} does not lead to packets within {size:#x} bytes after {tail:#x}: `skip` to go on"
    )]
    Overrun {
        /// Bytes produced.
        head: u64,
        /// Bytes consumed.
        tail: u64,
        /// Bytes of the area.
        size: u64,
    },
    /// The host cannot be asked to write out what it has.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The area was written over, whole, whenever it was copied.
    #[error("the AUX area is written faster than it can be copied: take a larger one")]
    TooFast,
}

/// What to do about a refusal, where the error number alone would leave a person guessing.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (this user may not lock so much memory: take fewer pages, raise `ulimit -l` or, as root, the driver's parameter mlock_kb)"
        }
        Some(libc::EINVAL) => " (it is mapped in another size already, or the ring is gone)",
        Some(libc::EOPNOTSUPP) => " (the event is no trace: `vperf list` shows which are)",
        Some(libc::ENOMEM | libc::ENOSPC) => {
            " (there is not so much memory, or the host allows no more to this machine: take fewer pages)"
        }
        _ => "",
    }
}

/// Where an area lies, and where its head and tail do.
#[derive(Debug)]
struct Place {
    mapping: Mapping,
    /// Mapped as long as this lives: its first page has the head and the tail.
    ring: Arc<Mapping>,
}

impl Place {
    /// The area follows the ring's data in the event's address space, which the ring is told
    /// first.
    fn new(
        event: BorrowedFd<'_>,
        ring: &Ring,
        pages_log2: u32,
        writable: bool,
    ) -> Result<Self, AreaError> {
        let bytes = 1usize
            .checked_shl(pages_log2)
            .and_then(|pages| pages.checked_mul(PAGE_SIZE))
            .ok_or(AreaError::TooLarge(pages_log2))?;
        let ring = Arc::clone(ring.mapping());
        let offset = ring.len() as u64;
        ring.store(AUX_OFFSET, offset, Ordering::Relaxed);
        ring.store(AUX_SIZE, bytes as u64, Ordering::Relaxed);
        let mapping = Mapping::map(event, offset, bytes, writable);
        let mapping = mapping.map_err(|source| AreaError::Map {
            pages: bytes / PAGE_SIZE,
            source,
        })?;
        Ok(Self { mapping, ring })
    }

    fn size(&self) -> u64 {
        self.mapping.len() as u64
    }

    fn head(&self) -> u64 {
        self.ring.load(AUX_HEAD, Ordering::Acquire)
    }

    /// Copies what stands from `from` up to `to`, multiples of 8 and at most the area's size
    /// apart.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the mapping's length"
    )]
    fn copy(&self, from: u64, to: u64, chunk: &mut Chunk) {
        chunk.position = from;
        chunk.bytes.clear();
        let first = from % self.size();
        let length = to.wrapping_sub(from);
        let before_end = length.min(self.size() - first);
        let bytes = &mut chunk.bytes;
        self.mapping
            .copy(first as usize, before_end as usize, bytes);
        self.mapping.copy(0, (length - before_end) as usize, bytes);
    }
}

/// A mapped AUX area and this reader's place in it.
#[derive(Debug)]
pub struct Area {
    place: Place,
    /// Bytes consumed; the shared tail is a copy that is never read back.
    tail: u64,
}

impl Area {
    pub(crate) fn new(
        event: BorrowedFd<'_>,
        ring: &Ring,
        pages_log2: u32,
    ) -> Result<Self, AreaError> {
        let place = Place::new(event, ring, pages_log2, true)?;
        let tail = place.ring.load(AUX_TAIL, Ordering::Relaxed);
        Ok(Self { place, tail })
    }

    /// Bytes of the area.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.place.size()
    }

    /// Bytes written so far, as the host says.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.place.head()
    }

    /// Bytes that this reader has consumed.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Takes what stands in the area, a part of it where that is much, in place of what is in
    /// `chunk`, and gives its room back; false if there is nothing yet.
    ///
    /// # Errors
    /// [`AreaError::Overrun`], until [`Area::skip`].
    pub fn read(&mut self, chunk: &mut Chunk) -> Result<bool, AreaError> {
        let (head, tail, size) = (self.head(), self.tail, self.size());
        let available = head.wrapping_sub(tail);
        if available > size || !available.is_multiple_of(ALIGN as u64) {
            return Err(AreaError::Overrun { head, tail, size });
        }
        // Up to the end of a page, which no packet crosses.
        let most = MOST - tail % PAGE;
        let end = tail.wrapping_add(available.min(most));
        self.place.copy(tail, end, chunk);
        self.consume(end);
        Ok(available != 0)
    }

    /// Gives up what stands in the area, up to the head; returns how many bytes.
    pub fn skip(&mut self) -> u64 {
        let head = self.head();
        let skipped = head.wrapping_sub(self.tail);
        self.consume(head);
        skipped
    }

    /// Writes any value as the shared tail and leaves this reader's own place as it is: for
    /// tests of what the host makes of a lie. The next reading stores the truth again.
    pub fn set_tail_raw(&self, tail: u64) {
        self.place.ring.store(AUX_TAIL, tail, Ordering::Release);
    }

    fn consume(&mut self, tail: u64) {
        self.tail = tail;
        // Release: the host may write there only after all loads of the bytes are done.
        self.place.ring.store(AUX_TAIL, tail, Ordering::Release);
    }
}

/// An AUX area that nobody empties: it always holds the newest of a trace.
#[derive(Debug)]
pub struct Snapshot<'a> {
    event: &'a Event,
    place: Place,
}

impl<'a> Snapshot<'a> {
    pub(crate) fn new(event: &'a Event, ring: &Ring, pages_log2: u32) -> Result<Self, AreaError> {
        let place = Place::new(event.as_fd(), ring, pages_log2, false)?;
        Ok(Self { event, place })
    }

    /// Bytes of the area.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.place.size()
    }

    /// The newest of the trace, from the beginning of a page of the area (or of the trace) up to
    /// this moment. The trace goes on meanwhile.
    ///
    /// # Errors
    /// [`AreaError::Event`] if the event cannot be read; [`AreaError::TooFast`].
    pub fn take(&self) -> Result<Chunk, AreaError> {
        // A reading has the host publish all that it has written.
        take(&self.place, || Ok(self.event.read().map(|_| ())?))
    }
}

/// What stood in the area before it was copied and was not written over when it had been.
fn take(place: &Place, publish: impl Fn() -> Result<(), AreaError>) -> Result<Chunk, AreaError> {
    let size = place.size();
    let mut chunk = Chunk::default();
    for _ in 0..TRIES {
        publish()?;
        let head = place.head();
        place.copy(head.saturating_sub(size), head, &mut chunk);
        publish()?;
        // What is written by now stands at least so far behind.
        let oldest = place.head().saturating_sub(size);
        let from = oldest.max(chunk.position).checked_next_multiple_of(PAGE);
        let from = from.unwrap_or(u64::MAX);
        let gone = usize::try_from(from - chunk.position).unwrap_or(usize::MAX);
        if gone < chunk.bytes.len() || head == 0 {
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
