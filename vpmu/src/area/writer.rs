//! Writes the bytes of an AUX area. Only one write is open at a time. The writer does not overwrite unread
//! data, except in overwrite mode. This module handles positions and pages, but not packets, records or
//! notifications.

use std::sync::atomic::Ordering;

use super::{Entry, SavedArea};
use crate::abi::Metadata;
use crate::pages::{self, Pages};
use crate::saved::Fault;

pub(super) const AUX_HEAD: usize = std::mem::offset_of!(Metadata, aux_head);
pub(super) const AUX_TAIL: usize = std::mem::offset_of!(Metadata, aux_tail);

/// Zeros for skipped bytes, written in blocks.
const BLANK: [u64; 64] = [0; 64];

/// Errors of the writer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    /// Another write is still open.
    #[error("another write to the area is still open")]
    Nested,
    /// No write is open.
    #[error("no write to the area is open")]
    NotBegun,
    /// Unread data would be overwritten.
    #[error("the area has no room for the data")]
    NoRoom,
    /// The pages were guest memory when the area was created, but no longer are.
    #[error("cannot access the area's pages")]
    Unwritable(#[source] pages::Unwritable),
}

/// Room to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// Position of the next byte, modulo 2^64. Its offset in the area is the position modulo the area's size.
    pub(crate) head: u64,
    /// Number of free bytes from `head` on.
    pub(crate) room: u64,
}

/// The data written between begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) offset: u64,
    pub(super) size: u64,
}

/// The writer of one area.
#[derive(Debug)]
pub(super) struct Writer {
    /// Size of the area in bytes. It is a power of two, and at least a page.
    size: u64,
    /// Whether the area is in overwrite mode. In this mode, new data overwrites the oldest data, so data always fits.
    overwrite: bool,
    /// Position of the next byte.
    head: u64,
    /// The reader's position, as last read from the metadata page. If the position is stale, the free space appears
    /// smaller than it is.
    tail: u64,
    /// Start of the open write.
    begun: Option<u64>,
}

impl Writer {
    pub(super) fn new(size: u64, overwrite: bool) -> Self {
        Self { size, overwrite, head: 0, tail: 0, begun: None }
    }

    /// Restores a saved writer of an area of `size` bytes.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(super) fn restore(size: u64, saved: &SavedArea) -> Result<Self, Fault> {
        let begun = saved.begun.unwrap_or(saved.head);
        if !saved.head.is_multiple_of(8) || !begun.is_multiple_of(8) {
            return Err("the head is between two words");
        }
        Ok(Self { size, overwrite: saved.overwrite, head: saved.head, tail: saved.tail, begun: saved.begun })
    }

    /// Start of the open write.
    pub(super) fn begun(&self) -> Option<u64> {
        self.begun
    }

    pub(super) fn tail(&self) -> u64 {
        self.tail
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn overwrites(&self) -> bool {
        self.overwrite
    }

    pub(super) fn head(&self) -> u64 {
        self.head
    }

    /// Starts a write at the head. Returns the number of bytes that can be written before the write reaches unread
    /// data.
    ///
    /// # Errors
    /// [`Refused::Nested`]; [`Refused::Unwritable`] if the reader's position cannot be read.
    pub(super) fn begin(&mut self, pages: &impl Pages) -> Result<u64, Refused> {
        if self.begun.is_some() {
            return Err(Refused::Nested);
        }
        self.look(pages)?;
        self.begun = Some(self.head);
        Ok(self.room())
    }

    /// Like [`Writer::begin`], but the caller determines the position and the number of bytes that can be written.
    /// `room` must not exceed the area's size.
    pub(super) fn begin_at(&mut self, head: u64, room: u64) -> Result<(), Refused> {
        if self.begun.is_some() {
            return Err(Refused::Nested);
        }
        self.head = head;
        self.tail = head.wrapping_sub(self.size.saturating_sub(room));
        self.begun = Some(head);
        Ok(())
    }

    /// The room of the open write.
    pub(super) fn get(&self) -> Option<Window> {
        self.begun.map(|_| Window { head: self.head, room: self.room() })
    }

    /// Reads the reader's position again, because the reader may have freed room.
    pub(super) fn look(&mut self, pages: &impl Pages) -> Result<(), Refused> {
        if self.overwrite {
            return Ok(());
        }
        // This acquire pairs with the reader's release of the tail. After it, the data before the tail may be
        // overwritten.
        let tail = pages.load(AUX_TAIL, Ordering::Acquire);
        self.tail = tail.map_err(Refused::Unwritable)?;
        Ok(())
    }

    /// Writes at the head, and advances it.
    ///
    /// # Errors
    /// See [`Refused`]. After an error, the head is unchanged.
    #[inline]
    pub(super) fn put(&mut self, pages: &mut impl Pages, words: &[u64]) -> Result<(), Refused> {
        let len = size_of_val(words) as u64;
        self.check(len)?;
        pages.put(self.head, words).map_err(Refused::Unwritable)?;
        self.head = self.head.wrapping_add(len);
        Ok(())
    }

    /// Skips `bytes`, a multiple of 8, for alignment, and fills them with zeros.
    ///
    /// # Errors
    /// See [`Writer::put`]. If a page is not writable, the head stays after the bytes that were already skipped.
    pub(super) fn skip(&mut self, pages: &mut impl Pages, bytes: u64) -> Result<(), Refused> {
        self.check(bytes)?;
        let mut words = bytes / 8;
        while words > 0 {
            let some = words.min(BLANK.len() as u64);
            let blank = BLANK.split_at(usize::try_from(some).unwrap_or(0)).0;
            self.put(pages, blank)?;
            words -= some;
        }
        Ok(())
    }

    /// Writes an entry, or nothing if the entry does not fit as a whole.
    ///
    /// # Errors
    /// Like [`Writer::skip`].
    pub(super) fn write(&mut self, pages: &mut impl Pages, entry: &Entry<'_>) -> Result<(), Refused> {
        self.check(entry.len())?;
        self.skip(pages, entry.skip)?;
        entry.parts.iter().try_for_each(|part| self.put(pages, part))
    }

    /// Discards all but the first `size` bytes of the open write.
    ///
    /// # Errors
    /// [`Refused::NotBegun`]; [`Refused::NoRoom`] if less than `size` was written, or if `size` is not a
    /// multiple of 8.
    pub(super) fn cut(&mut self, size: u64) -> Result<(), Refused> {
        let begun = self.begun.ok_or(Refused::NotBegun)?;
        if size > self.head.wrapping_sub(begun) || !size.is_multiple_of(8) {
            return Err(Refused::NoRoom);
        }
        self.head = begun.wrapping_add(size);
        Ok(())
    }

    /// Ends the open write, and returns the written data. If there are `pages`, also publishes the data to the reader.
    ///
    /// # Errors
    /// [`Refused::NotBegun`].
    pub(super) fn end(&mut self, pages: Option<&impl Pages>) -> Result<Written, Refused> {
        let offset = self.begun.take().ok_or(Refused::NotBegun)?;
        let size = self.head.wrapping_sub(offset);
        if let Some(pages) = pages.filter(|_| size > 0) {
            // Pairs with the reader's acquire of the head, so that the data is stored before the head moves.
            if let Err(error) = pages.store(AUX_HEAD, self.head, Ordering::Release) {
                log::debug!("head of an AUX area: {error}");
            }
        }
        Ok(Written { offset, size })
    }

    /// Returns the number of free bytes, according to the tail that was last read. Zero if that tail is not a valid
    /// position.
    pub(super) fn room(&self) -> u64 {
        if self.overwrite {
            return self.size;
        }
        self.size.saturating_sub(self.head.wrapping_sub(self.tail))
    }

    fn check(&self, len: u64) -> Result<(), Refused> {
        if self.begun.is_none() {
            return Err(Refused::NotBegun);
        }
        if len > self.room() {
            return Err(Refused::NoRoom);
        }
        Ok(())
    }
}
