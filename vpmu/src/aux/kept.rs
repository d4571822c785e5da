//! An area that the device keeps: it looks for room where the reader says, and decides which pieces
//! its reader is told of.

use std::sync::atomic::Ordering;

use super::writer::{AUX_HEAD, AUX_TAIL, Refused, Writer};
use super::{Appended, COLLISION, Chunk, Entry, OVERWRITE, PARTIAL, TRUNCATED};
use crate::pages::{Pages, Unwritable};

#[derive(Debug)]
pub(super) struct Kept {
    writer: Writer,
    /// The reader is woken at each multiple of it.
    watermark: u64,
    /// Of the piece that is being written.
    flags: u64,
    /// The last entry found no room.
    full: bool,
}

impl Kept {
    pub(super) fn new(size: u64, overwrite: bool, watermark: u64) -> Self {
        Self {
            writer: Writer::new(size, overwrite),
            watermark,
            flags: 0,
            full: false,
        }
    }

    /// Writer and reader begin anew, whatever an area of the same ring was like before.
    pub(super) fn clear(&self, pages: &impl Pages) -> Result<(), Unwritable> {
        pages.store(AUX_TAIL, 0, Ordering::Relaxed)?;
        pages.store(AUX_HEAD, self.writer.head(), Ordering::Release)
    }

    pub(super) fn head(&self) -> u64 {
        self.writer.head()
    }

    pub(super) fn is_begun(&self) -> bool {
        self.writer.get().is_some()
    }

    /// Writes an entry. A piece ends where a watermark is crossed, and where there is no room.
    pub(super) fn append(&mut self, pages: &mut impl Pages, entry: &Entry<'_>) -> Appended {
        let before = self.writer.head();
        let placed = self.place(pages, entry);
        let written = self.writer.head().wrapping_sub(before);
        if let Err(refused) = placed {
            if !matches!(refused, Refused::NoRoom) {
                log::debug!("an area: {refused}");
            }
            // The first of several wakes: a full area crosses no mark any more, and its reader would
            // sleep for ever.
            let first = !std::mem::replace(&mut self.full, true);
            let chunk = self.end(pages, if first { TRUNCATED } else { 0 });
            self.flags |= PARTIAL;
            return Appended {
                whole: false,
                written,
                chunk,
                wake: first,
            };
        }
        self.full = false;
        if entry.collision {
            self.flags |= COLLISION;
        }
        let wake = !self.writer.overwrites() && self.crosses(before);
        Appended {
            whole: true,
            written,
            chunk: wake.then(|| self.end(pages, 0)).flatten(),
            wake,
        }
    }

    /// Something is missing that was to be written here next.
    pub(super) fn miss(&mut self) {
        self.flags |= PARTIAL;
    }

    /// Shows the reader what was written. A piece without a byte is told only with flags `extra`.
    pub(super) fn end(&mut self, pages: &impl Pages, extra: u64) -> Option<Chunk> {
        let span = self.writer.end(Some(pages)).ok()?;
        if span.size == 0 && extra == 0 {
            return None;
        }
        let own = match span.size {
            0 => 0,
            _ => std::mem::take(&mut self.flags),
        };
        let overwrite = if self.writer.overwrites() {
            OVERWRITE
        } else {
            0
        };
        Some(Chunk {
            offset: span.offset,
            size: span.size,
            flags: own | extra | overwrite,
        })
    }

    fn place(&mut self, pages: &mut impl Pages, entry: &Entry<'_>) -> Result<(), Refused> {
        if self.writer.get().is_none() {
            self.writer.begin(pages)?;
        } else if entry.len() > self.writer.room() {
            self.writer.look(pages)?;
        }
        self.writer.write(pages, entry)
    }

    fn crosses(&self, before: u64) -> bool {
        before / self.watermark != self.writer.head() / self.watermark
    }
}
