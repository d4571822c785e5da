//! The reader of a ring: the host writes records and the head, this side reads them and
//! moves the tail. One acquire load of the head, one release store of the tail per record.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};

use crate::map::Mapping;
use crate::record::{Header, Record, RecordError};

/// What a page is in the device's interface, and in every guest that can have one.
pub const PAGE_SIZE: usize = 4096;

const WORD: usize = 8;

// Byte offsets in perf's metadata page.
const LOCK_INDEX: usize = 8;
const OFFSET: usize = 16;
const TIME_ENABLED: usize = 24;
const TIME_RUNNING: usize = 32;
const CAPABILITIES: usize = 40;
const TIME_CONVERSION: usize = 48;
const TIME_ZERO: usize = 64;
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

/// Times that a reader of the metadata page lets the writer go first.
const SEQUENCE_TRIES: u32 = 1000;

/// What is wrong with a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The kernel refused the mapping.
    #[error("mapping {pages} data pages of the event")]
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
}

/// What the metadata page tells, of one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Metadata {
    /// The hardware counter's index, zero if there is none to read.
    pub index: u32,
    /// The count, if there is no hardware counter to add.
    pub offset: u64,
    /// Nanoseconds enabled.
    pub time_enabled: u64,
    /// Nanoseconds counted.
    pub time_running: u64,
    /// perf's `cap_*` bits.
    pub capabilities: u64,
    /// Shift of the conversion from TSC to time.
    pub time_shift: u16,
    /// Multiplier of it.
    pub time_mult: u32,
    /// Zero of it.
    pub time_zero: u64,
}

/// A mapped ring and this reader's place in it.
#[derive(Debug)]
pub struct Ring {
    mapping: Mapping,
    sample_type: u64,
    /// Bytes consumed; the shared tail is a copy that is never read back.
    tail: u64,
}

impl Ring {
    /// Maps the metadata page and `data_pages` of `event`; the size of the data is that of
    /// the mapping, never what the shared page says.
    pub(crate) fn new(
        event: BorrowedFd<'_>,
        data_pages: usize,
        sample_type: u64,
    ) -> Result<Self, RingError> {
        let bytes = data_pages
            .checked_add(1)
            .and_then(|pages| pages.checked_mul(PAGE_SIZE));
        let mapping = bytes
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
            .and_then(|bytes| Mapping::new(event, bytes))
            .map_err(|source| RingError::Map {
                pages: data_pages,
                source,
            })?;
        let tail = mapping.load(DATA_TAIL, Ordering::Relaxed);
        Ok(Self {
            mapping,
            sample_type,
            tail,
        })
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
        let record = Record::parse(header, &body, self.sample_type);
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
        for _ in 0..SEQUENCE_TRIES {
            let before = self.mapping.load(LOCK_INDEX, Ordering::Acquire);
            let metadata = self.metadata_unlocked(before);
            fence(Ordering::Acquire);
            let after = self.mapping.load(LOCK_INDEX, Ordering::Relaxed);
            if before == after && before & 1 == 0 {
                return Ok(metadata);
            }
            std::hint::spin_loop();
        }
        Err(RingError::Busy)
    }

    #[expect(clippy::cast_possible_truncation, reason = "takes words' halves apart")]
    fn metadata_unlocked(&self, lock_index: u64) -> Metadata {
        let load = |offset| self.mapping.load(offset, Ordering::Relaxed);
        let conversion = load(TIME_CONVERSION);
        Metadata {
            index: (lock_index >> 32) as u32,
            offset: load(OFFSET),
            time_enabled: load(TIME_ENABLED),
            time_running: load(TIME_RUNNING),
            capabilities: load(CAPABILITIES),
            time_shift: (conversion >> 16) as u16,
            time_mult: (conversion >> 32) as u32,
            time_zero: load(TIME_ZERO),
        }
    }

    /// The word of data at `position`, which counts on round and round the ring; the caller
    /// knows that there is data.
    fn word(&self, position: u64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "less than the mapping's length"
        )]
        let offset = (position % self.size()) as usize;
        self.mapping.load(PAGE_SIZE + offset, Ordering::Relaxed)
    }

    fn consume(&mut self, tail: u64) {
        self.tail = tail;
        // Release: the host may write there only after all loads of the record are done.
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
    }
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
