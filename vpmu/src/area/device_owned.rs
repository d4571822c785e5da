//! An area that the device manages. The reader's tail determines how much space is free. The device reports chunks to
//! the reader, and decides where each chunk ends.

use std::sync::atomic::Ordering;

use super::writer::{AUX_HEAD, AUX_TAIL, Refused, Window, Writer};
use super::{Appended, COLLISION, Chunk, Entry, OVERWRITE, PARTIAL, SavedKeeper, TRUNCATED};
use crate::pages::{GuestPages, Pages, Unwritable};
use crate::saved::Fault;

#[derive(Debug)]
pub(super) struct DeviceOwned {
    writer: Writer,
    /// The reader is woken at multiples of this many bytes, except in overwrite mode.
    watermark: u64,
    /// Flags of the chunk being written.
    flags: u64,
    /// Whether the last entry could not be written. The reader was woken for the first such entry, and is not
    /// woken again until an entry has been written.
    full: bool,
    /// The open write of a producer in the VMM, if any.
    claim: Option<Claim>,
}

/// A producer's write, from its start to its end.
#[derive(Debug, Clone, Copy)]
struct Claim {
    token: u64,
    begun: u64,
    /// Whether some of the producer's data did not fit.
    short: bool,
}

impl DeviceOwned {
    pub(super) fn new(size: u64, overwrite: bool, watermark: u64) -> Self {
        Self { writer: Writer::new(size, overwrite), watermark, flags: 0, full: false, claim: None }
    }

    /// Resets both positions in the metadata page, which may still hold the positions of the ring's previous
    /// area.
    pub(super) fn clear(&self, pages: &impl Pages) -> Result<(), Unwritable> {
        pages.store(AUX_TAIL, 0, Ordering::Relaxed)?;
        pages.store(AUX_HEAD, self.writer.head(), Ordering::Release)
    }

    pub(super) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(super) fn watermark(&self) -> u64 {
        self.watermark
    }

    /// Returns the current state for saving. `None` while a producer in the VMM writes.
    pub(super) fn save(&self) -> Option<SavedKeeper> {
        self.claim.is_none().then_some(SavedKeeper::Device { flags: self.flags, full: self.full })
    }

    /// Restores a saved area.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(super) fn restore(writer: Writer, watermark: u64, flags: u64, full: bool) -> Result<Self, Fault> {
        if flags & !(TRUNCATED | OVERWRITE | PARTIAL | COLLISION) != 0 {
            return Err("the area has unknown flags");
        }
        Ok(Self { writer, watermark, flags, full, claim: None })
    }

    pub(super) fn head(&self) -> u64 {
        self.writer.head()
    }

    /// Returns whether there is an open chunk that the device may end. Returns `false` while a producer in the VMM
    /// writes, because the producer ends its own chunk.
    pub(super) fn is_begun(&self) -> bool {
        self.claim.is_none() && self.writer.get().is_some()
    }

    /// Writes an entry. The open chunk ends if the entry cannot be written. Outside overwrite mode, it also ends if the
    /// head crosses a multiple of the watermark.
    pub(super) fn append(&mut self, pages: &mut impl Pages, entry: &Entry<'_>) -> Appended {
        if self.claim.is_some() {
            // A producer in the VMM is writing, so this entry is lost.
            self.flags |= PARTIAL;
            return Appended::default();
        }
        let before = self.writer.head();
        let placed = self.place(pages, entry);
        let written = self.writer.head().wrapping_sub(before);
        if let Err(refused) = placed {
            if !matches!(refused, Refused::NoRoom) {
                log::debug!("AUX area: {refused}");
            }
            // Wake the reader only for the first loss. Without this wakeup, the reader of a full area would sleep
            // forever, because the head does not reach the next multiple of the watermark.
            let first = !std::mem::replace(&mut self.full, true);
            let chunk = self.end(pages, if first { TRUNCATED } else { 0 });
            self.flags |= PARTIAL;
            return Appended { whole: false, written, chunk, wake: first };
        }
        self.full = false;
        if entry.collision {
            self.flags |= COLLISION;
        }
        let wake = !self.writer.overwrites() && self.crosses(before);
        Appended { whole: true, written, chunk: wake.then(|| self.end(pages, 0)).flatten(), wake }
    }

    /// Records that data before the next entry is missing.
    pub(super) fn miss(&mut self) {
        self.flags |= PARTIAL;
    }

    /// Publishes the written data. An empty chunk is reported only if `extra` has flags.
    pub(super) fn end(&mut self, pages: &impl Pages, extra: u64) -> Option<Chunk> {
        let written = self.writer.end(Some(pages)).ok()?;
        if written.size == 0 && extra == 0 {
            return None;
        }
        let own = match written.size {
            0 => 0,
            _ => std::mem::take(&mut self.flags),
        };
        let overwrite = if self.writer.overwrites() { OVERWRITE } else { 0 };
        Some(Chunk { offset: written.offset, size: written.size, flags: own | extra | overwrite })
    }

    /// Gives a producer exclusive use of the area. If a chunk was open, ends and returns it.
    ///
    /// # Errors
    /// [`Refused::Nested`] while another producer writes; [`Refused::Unwritable`].
    pub(super) fn claim(&mut self, pages: &impl Pages, token: u64) -> Result<Option<Chunk>, Refused> {
        if self.claim.is_some() {
            return Err(Refused::Nested);
        }
        let ended = self.end(pages, 0);
        let begun = self.writer.head();
        if let Err(refused) = self.writer.begin(pages) {
            log::debug!("AUX area: {refused}");
            return Err(refused);
        }
        self.claim = Some(Claim { token, begun, short: false });
        Ok(ended)
    }

    /// The producer's next position and room.
    pub(super) fn claimed(&self, token: u64) -> Option<Window> {
        self.claim.filter(|claim| claim.token == token)?;
        self.writer.get()
    }

    /// Skips `skip` bytes, then writes the producer's words.
    ///
    /// # Errors
    /// [`Refused::NotBegun`]; [`Refused::NoRoom`]: nothing was written; [`Refused::Unwritable`].
    pub(super) fn put(&mut self, pages: &mut impl Pages, token: u64, skip: u64, words: &[u64]) -> Result<(), Refused> {
        let claim = self.claim.as_mut().filter(|claim| claim.token == token);
        let claim = claim.ok_or(Refused::NotBegun)?;
        let entry = Entry { skip, parts: [&[], words], collision: false };
        if entry.len() > self.writer.room() {
            self.writer.look(pages)?;
        }
        let written = self.writer.write(pages, &entry);
        claim.short |= matches!(written, Err(Refused::NoRoom));
        written
    }

    /// Ends the producer's write, and publishes its first `size` bytes.
    ///
    /// # Errors
    /// [`Refused::NotBegun`]; [`Refused::NoRoom`] if the producer has written less than `size`, or if `size` is not a
    /// multiple of 8. After [`Refused::NoRoom`], the producer may continue to write.
    pub(super) fn release(&mut self, pages: &impl Pages, token: u64, size: u64) -> Result<Appended, Refused> {
        let claim = self.claim.filter(|claim| claim.token == token);
        let claim = claim.ok_or(Refused::NotBegun)?;
        self.writer.cut(size)?;
        self.claim = None;
        let crosses = !self.writer.overwrites() && self.crosses(claim.begun);
        // As in `append`, only the first loss wakes the reader.
        let first = claim.short && !self.full;
        self.full = claim.short;
        let chunk = self.end(pages, if claim.short { TRUNCATED } else { 0 });
        if claim.short {
            self.flags |= PARTIAL;
        }
        Ok(Appended { whole: true, written: size, chunk, wake: crosses || first })
    }

    /// Discards the producer's data without a report.
    pub(super) fn give_up(&mut self, token: u64) {
        let Some(claim) = self.claim.filter(|claim| claim.token == token) else {
            return;
        };
        self.claim = None;
        if claim.short {
            self.flags |= PARTIAL;
        }
        let ended = self.writer.cut(0);
        let ended = ended.and_then(|()| self.writer.end(None::<&GuestPages<'_>>));
        if let Err(refused) = ended {
            log::debug!("AUX area: {refused}");
        }
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
