//! The reader of a ring: the host writes records and advances the head; this reader reads the records
//! and advances the tail. Each record costs one acquire load of the head and one release store of the
//! tail.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vpmu_perf::Mapping;
use vpmu_perf::page::{DATA_HEAD, DATA_TAIL};
use vpmu_perf::record::{Broken, Records as Walk};

use crate::metadata;
pub use crate::metadata::Metadata;
use crate::reading::Reading;
use crate::record::{Layout, Record, RecordError};

/// Page size of the device's interface and of every supported guest.
pub const PAGE_SIZE: usize = 4096;

/// An error of a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The kernel refused the mapping.
    #[error("cannot map {pages} data pages of the event{}", hint(source))]
    Map {
        /// Data pages requested.
        pages: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// A page count that `usize` cannot hold.
    #[error("a ring of 2^{0} pages is too large")]
    TooLarge(u32),
    /// The distance from tail to head exceeds the ring: records were overwritten.
    #[error(
        "the ring's head {head:#x} is not within {size:#x} bytes after the tail {tail:#x}: call `skip` to continue"
    )]
    Overrun {
        /// Bytes produced.
        head: u64,
        /// Bytes consumed.
        tail: u64,
        /// Bytes of the ring.
        size: u64,
    },
    /// The bytes at the tail are not a record.
    #[error(
        "the record at {tail:#x} has an invalid size of {size} bytes; {available} bytes are unread: call `skip` to continue"
    )]
    Malformed {
        /// Its position.
        tail: u64,
        /// Its size according to its header.
        size: u16,
        /// Bytes up to the head.
        available: u64,
    },
    /// A record that cannot be parsed. It is consumed: the next call reads the record after it.
    #[error("cannot parse the record at {tail:#x} of the ring")]
    Record {
        /// Its position.
        tail: u64,
        /// The cause.
        source: RecordError,
    },
    /// The metadata page was written during every attempt to read it.
    #[error("the ring's metadata page was written during every attempt to read it")]
    Busy,
    /// A hardware counter holds part of the count.
    #[error("a hardware counter holds part of this count: read the event instead")]
    Register,
}

/// A hint to append to the error text if the error number alone does not suggest a remedy.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            " (this user may not lock so much memory: map fewer pages, raise `ulimit -l` or, as root, the driver's parameter mlock_kb)"
        }
        Some(libc::EINVAL) => " (the data pages are not a power of two, or the event is mapped with another size)",
        Some(libc::ENOMEM) => " (the guest lacks memory: map fewer pages)",
        Some(libc::ENOSPC | libc::E2BIG) => {
            " (the host's limit on ring pages for this machine is reached: map fewer pages)"
        }
        _ => "",
    }
}

/// A mapped ring and this reader's position in it.
#[derive(Debug)]
pub struct Ring {
    /// Shared with an AUX area, whose head and tail are in the metadata page.
    mapping: Arc<Mapping>,
    layout: Layout,
    /// Bytes consumed. The tail in the metadata page is a copy for the host. This reader loads that
    /// copy only once, when it maps the ring.
    tail: u64,
}

impl Ring {
    /// Maps the metadata page of `event` and `data_pages` data pages. [`Ring::size`] comes from the
    /// length of the mapping: the size in the metadata page is not trusted.
    pub(crate) fn new(event: BorrowedFd<'_>, data_pages: usize, layout: Layout) -> Result<Self, RingError> {
        let mapping = map(event, data_pages, Mapping::new)?;
        let tail = mapping.load(DATA_TAIL, Ordering::Relaxed);
        Ok(Self { mapping: Arc::new(mapping), layout, tail })
    }

    /// The metadata page and the data.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Bytes of data; zero if only the metadata page is mapped.
    #[must_use]
    pub fn size(&self) -> u64 {
        (self.mapping.len() - PAGE_SIZE) as u64
    }

    /// Bytes produced so far, according to the host.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.mapping.load(DATA_HEAD, Ordering::Acquire)
    }

    /// Bytes that this reader has consumed.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Consumes the next record and frees its space; `None` if the ring has no unread record.
    ///
    /// # Errors
    /// [`RingError::Record`] for a record that cannot be parsed; it is consumed.
    /// [`RingError::Overrun`] and [`RingError::Malformed`] persist until [`Ring::skip`].
    pub fn next_record(&mut self) -> Result<Option<Record>, RingError> {
        let (head, tail, size) = (self.head(), self.tail, self.size());
        let word = |offset| data_word(&self.mapping, offset);
        let (header, body) = match Walk::new(&word, size, tail, head).next() {
            None => return Ok(None),
            Some(Ok(record)) => (record.header, record.body()),
            Some(Err(Broken::Overrun)) => return Err(RingError::Overrun { head, tail, size }),
            Some(Err(Broken::Malformed { size, available })) => {
                return Err(RingError::Malformed { tail, size, available });
            }
        };
        let record = Record::parse(header, &body, &self.layout);
        self.consume(tail.wrapping_add(header.size.into()));
        record.map(Some).map_err(|source| RingError::Record { tail, source })
    }

    /// Iterates over the unread records, including records that arrive during the iteration. Ends
    /// after the first [`RingError::Overrun`] or [`RingError::Malformed`], which only
    /// [`Ring::skip`] clears.
    pub fn records(&mut self) -> Records<'_> {
        Records { ring: self, broken: false }
    }

    /// Discards everything up to the head; returns the number of bytes.
    pub fn skip(&mut self) -> u64 {
        let head = self.head();
        let skipped = head.wrapping_sub(self.tail);
        self.consume(head);
        skipped
    }

    /// Stores any tail in the metadata page without moving this reader's own position. Tests use
    /// this to check how the host reacts to a wrong tail. Reading the next record stores the
    /// correct tail.
    pub fn set_tail_raw(&self, tail: u64) {
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
    }

    /// Reads the metadata page under its sequence lock.
    ///
    /// # Errors
    /// [`RingError::Busy`] if the page was written during every attempt to read it.
    pub fn metadata(&self) -> Result<Metadata, RingError> {
        let (metadata, _) = metadata::read(&self.mapping).ok_or(RingError::Busy)?;
        Ok(metadata)
    }

    /// Reads the count and the times from the metadata page, without a system call or a VM exit.
    /// For events that the device counts itself (marks, exits that reach the VMM), the count is
    /// current; for other events, it is the count as of the last command to the event. While the
    /// event counts, the time since the page was written is added to the time enabled and, if the
    /// event has counted all the time, also to the time running. The page has neither the id nor
    /// the lost count: both are zero in the result.
    ///
    /// # Errors
    /// [`RingError::Busy`]; [`RingError::Register`] for an event of a different PMU, whose hardware
    /// counter holds part of the count.
    pub fn reading(&self) -> Result<Reading, RingError> {
        let (metadata, tsc) = metadata::read(&self.mapping).ok_or(RingError::Busy)?;
        metadata.reading(tsc).ok_or(RingError::Register)
    }

    fn consume(&mut self, tail: u64) {
        self.tail = tail;
        // Release: the host may write there only after all loads of the record are done.
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
    }
}

/// Maps the metadata page and `data_pages` with `mapper`.
pub(crate) fn map<'fd>(
    event: BorrowedFd<'fd>,
    data_pages: usize,
    mapper: fn(BorrowedFd<'fd>, usize) -> io::Result<Mapping>,
) -> Result<Mapping, RingError> {
    let bytes = data_pages.checked_add(1).and_then(|pages| pages.checked_mul(PAGE_SIZE));
    bytes
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
        .and_then(|bytes| mapper(event, bytes))
        .map_err(|source| RingError::Map { pages: data_pages, source })
}

/// The word at `offset` of the data.
pub(crate) fn data_word(mapping: &Mapping, offset: u64) -> u64 {
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    mapping.load(PAGE_SIZE.saturating_add(offset), Ordering::Relaxed)
}

/// Iterator of [`Ring::records`].
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
        self.broken = matches!(next, Some(Err(RingError::Overrun { .. } | RingError::Malformed { .. })));
        next
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
