//! The reader of a ring: the host writes records and the head, this side reads them and
//! moves the tail. One acquire load of the head, one release store of the tail per record.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::map::Mapping;
use crate::metadata;
pub use crate::metadata::Metadata;
use crate::reading::Reading;
use crate::record::{Header, Layout, Record, RecordError};

/// What a page is in the device's interface, and in every guest that can have one.
pub const PAGE_SIZE: usize = 4096;

pub(crate) const WORD: usize = 8;

// Byte offsets in perf's metadata page.
pub(crate) const DATA_HEAD: usize = 1024;
pub(crate) const DATA_TAIL: usize = 1032;

/// What is wrong with a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The kernel refused the mapping.
    #[error("mapping {pages} data pages of the event{}", hint(source))]
    Map {
        /// Data pages asked for.
        pages: usize,
        /// Why.
        source: io::Error,
    },
    /// More pages than a machine has.
    #[error("a ring of 2^{0} pages is too large")]
    TooLarge(u32),
    /// Head and tail are further apart than the ring is long: records were written over.
    #[error(
        "the ring's head {head:#x} is not within {size:#x} bytes after {tail:#x}: `skip` to go on"
    )]
    Overrun {
        /// Bytes produced.
        head: u64,
        /// Bytes consumed.
        tail: u64,
        /// Bytes of the ring.
        size: u64,
    },
    /// What stands at the tail is not a record.
    #[error(
        "no record of {size} bytes can stand at {tail:#x} with {available} bytes to read: `skip` to go on"
    )]
    Malformed {
        /// Where.
        tail: u64,
        /// As its header says.
        size: u16,
        /// Up to the head.
        available: u64,
    },
    /// A record that is not what its header says; the next call reads the one after it.
    #[error("at {tail:#x} of the ring")]
    Record {
        /// Where.
        tail: u64,
        /// What is wrong.
        source: RecordError,
    },
    /// The metadata never stood still.
    #[error("the ring's metadata page is always being written")]
    Busy,
    /// A hardware counter holds a part of the count.
    #[error("a register holds a part of this count: read the event instead")]
    Register,
}

/// What to do about a refusal, where the error number alone would leave a person guessing.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (this user may not lock so much memory: take fewer pages, raise `ulimit -l` or, as root, the driver's parameter mlock_kb)"
        }
        Some(libc::EINVAL) => {
            " (the pages are not a power of two, or it is mapped in another size already)"
        }
        Some(libc::ENOMEM) => " (there is not so much memory: take fewer pages)",
        Some(libc::ENOSPC | libc::E2BIG) => {
            " (the host allows no more ring pages to this machine: take fewer)"
        }
        _ => "",
    }
}

/// A mapped ring and this reader's place in it.
#[derive(Debug)]
pub struct Ring {
    /// Shared with an AUX area, whose head and tail stand in the metadata page.
    mapping: Arc<Mapping>,
    layout: Layout,
    /// Bytes consumed; the shared tail is a copy that is never read back.
    tail: u64,
}

impl Ring {
    /// Maps the metadata page and `data_pages` of `event`; the size of the data is that of
    /// the mapping, never what the shared page says.
    pub(crate) fn new(
        event: BorrowedFd<'_>,
        data_pages: usize,
        layout: Layout,
    ) -> Result<Self, RingError> {
        let mapping = map(event, data_pages, Mapping::new)?;
        let tail = mapping.load(DATA_TAIL, Ordering::Relaxed);
        Ok(Self {
            mapping: Arc::new(mapping),
            layout,
            tail,
        })
    }

    /// The metadata page and the data.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Bytes of data; zero if the metadata page alone is mapped.
    #[must_use]
    pub fn size(&self) -> u64 {
        (self.mapping.len() - PAGE_SIZE) as u64
    }

    /// Bytes produced so far, as the host says.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.mapping.load(DATA_HEAD, Ordering::Acquire)
    }

    /// Bytes that this reader has consumed.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Takes the next record out of the ring and gives its room back; `None` if there is
    /// none yet.
    ///
    /// # Errors
    /// [`RingError::Record`] for a record that cannot be taken apart: its room was given
    /// back. [`RingError::Overrun`] and [`RingError::Malformed`] stay until
    /// [`Ring::skip`].
    pub fn next_record(&mut self) -> Result<Option<Record>, RingError> {
        let (head, tail, size) = (self.head(), self.tail, self.size());
        let available = head.wrapping_sub(tail);
        if available == 0 {
            return Ok(None);
        }
        if available > size {
            return Err(RingError::Overrun { head, tail, size });
        }
        let header = Header::from_word(self.word(tail));
        let length = u64::from(header.size);
        // Every record begins and ends at a word, so tail and head do.
        let aligned = (length | tail | head).is_multiple_of(WORD as u64);
        if length == 0 || length > available || !aligned {
            return Err(RingError::Malformed {
                tail,
                size: header.size,
                available,
            });
        }
        let body: Vec<u64> = (1..u64::from(header.size) / WORD as u64)
            .map(|index| self.word(tail.wrapping_add(index * WORD as u64)))
            .collect();
        let record = Record::parse(header, &body, &self.layout);
        self.consume(tail.wrapping_add(length));
        record
            .map(Some)
            .map_err(|source| RingError::Record { tail, source })
    }

    /// The records that stand in the ring now and those that come while reading. Ends at the
    /// first that cannot be passed over.
    pub fn records(&mut self) -> Records<'_> {
        Records {
            ring: self,
            broken: false,
        }
    }

    /// Gives up what stands in the ring, up to the head; returns how many bytes.
    pub fn skip(&mut self) -> u64 {
        let head = self.head();
        let skipped = head.wrapping_sub(self.tail);
        self.consume(head);
        skipped
    }

    /// Writes any value as the shared tail and leaves this reader's own place as it is: for
    /// tests of what the host makes of a lie. The next record read stores the truth again.
    pub fn set_tail_raw(&self, tail: u64) {
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
    }

    /// The metadata page, read under its sequence lock.
    ///
    /// # Errors
    /// [`RingError::Busy`] if it is never left in peace.
    pub fn metadata(&self) -> Result<Metadata, RingError> {
        let (metadata, _) = metadata::read(&self.mapping).ok_or(RingError::Busy)?;
        Ok(metadata)
    }

    /// The count and the times as the metadata page tells them: with no system call and no
    /// VM exit. Of events that the device itself counts (marks, exits that reach the VMM)
    /// they are those of this moment, of others those of the event's last command. The id and
    /// the loss are not in the page.
    ///
    /// # Errors
    /// [`RingError::Busy`]; [`RingError::Register`] of another PMU's event.
    pub fn reading(&self) -> Result<Reading, RingError> {
        let (metadata, tsc) = metadata::read(&self.mapping).ok_or(RingError::Busy)?;
        metadata.reading(tsc).ok_or(RingError::Register)
    }

    fn word(&self, position: u64) -> u64 {
        data_word(&self.mapping, self.size(), position)
    }

    fn consume(&mut self, tail: u64) {
        self.tail = tail;
        // Release: the host may write there only after all loads of the record are done.
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
    }
}

/// Maps the metadata page and `data_pages` by `mapper`.
pub(crate) fn map<'fd>(
    event: BorrowedFd<'fd>,
    data_pages: usize,
    mapper: fn(BorrowedFd<'fd>, usize) -> io::Result<Mapping>,
) -> Result<Mapping, RingError> {
    let bytes = data_pages
        .checked_add(1)
        .and_then(|pages| pages.checked_mul(PAGE_SIZE));
    bytes
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
        .and_then(|bytes| mapper(event, bytes))
        .map_err(|source| RingError::Map {
            pages: data_pages,
            source,
        })
}

/// The word of data at `position`, which counts on round and round the `size` bytes of the
/// ring; the caller knows that there is data.
pub(crate) fn data_word(mapping: &Mapping, size: u64, position: u64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the mapping's length"
    )]
    let offset = (position % size) as usize;
    mapping.load(PAGE_SIZE + offset, Ordering::Relaxed)
}

/// See [`Ring::records`].
#[derive(Debug)]
pub struct Records<'a> {
    ring: &'a mut Ring,
    broken: bool,
}

impl Iterator for Records<'_> {
    type Item = Result<Record, RingError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.broken {
            return None;
        }
        let next = self.ring.next_record().transpose();
        self.broken = matches!(
            next,
            Some(Err(RingError::Overrun { .. } | RingError::Malformed { .. }))
        );
        next
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
