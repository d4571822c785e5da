//! The records in a ring, or in a copy of its bytes, oldest first.
//!
//! A ring's contents may be forged. For any head, tail and record lengths, a walk terminates and reads nothing outside
//! the ring. This module reads headers and words; callers interpret the fields.

use perf_event_open_sys::bindings as perf;

/// perf's `PERF_RECORD_MMAP`.
pub const TYPE_MMAP: u32 = perf::PERF_RECORD_MMAP;
/// perf's `PERF_RECORD_LOST`.
pub const TYPE_LOST: u32 = perf::PERF_RECORD_LOST;
/// perf's `PERF_RECORD_COMM`.
pub const TYPE_COMM: u32 = perf::PERF_RECORD_COMM;
/// perf's `PERF_RECORD_THROTTLE`.
pub const TYPE_THROTTLE: u32 = perf::PERF_RECORD_THROTTLE;
/// perf's `PERF_RECORD_UNTHROTTLE`.
pub const TYPE_UNTHROTTLE: u32 = perf::PERF_RECORD_UNTHROTTLE;
/// perf's `PERF_RECORD_FORK`.
pub const TYPE_FORK: u32 = perf::PERF_RECORD_FORK;
/// perf's `PERF_RECORD_READ`.
pub const TYPE_READ: u32 = perf::PERF_RECORD_READ;
/// perf's `PERF_RECORD_SAMPLE`.
pub const TYPE_SAMPLE: u32 = perf::PERF_RECORD_SAMPLE;
/// perf's `PERF_RECORD_AUX`.
pub const TYPE_AUX: u32 = perf::PERF_RECORD_AUX;
/// perf's `PERF_RECORD_ITRACE_START`.
pub const TYPE_ITRACE_START: u32 = perf::PERF_RECORD_ITRACE_START;
/// perf's `PERF_RECORD_KSYMBOL`.
pub const TYPE_KSYMBOL: u32 = perf::PERF_RECORD_KSYMBOL;

/// Base of `perf_event_attr::type` for events of the device's own kinds: in a `perf.data` file, their type is this value
/// plus the kind. These types are far above perf's types and the types of a host's PMUs.
pub const OWN_TYPE_BASE: u32 = 0x7670_0000;

/// [`Header::mode`]: unknown.
pub const MODE_UNKNOWN: u16 = 0;
/// [`Header::mode`]: kernel mode.
pub const MODE_KERNEL: u16 = 1;
/// [`Header::mode`]: user mode.
pub const MODE_USER: u16 = 2;
/// [`Header::mode`]: a guest's kernel mode.
pub const MODE_GUEST_KERNEL: u16 = 4;
/// [`Header::mode`]: a guest's user mode.
pub const MODE_GUEST_USER: u16 = 5;

/// Bits of [`Header::misc`] that hold the mode.
pub const MODE_MASK: u16 = 7;

const WORD: u64 = 8;

/// A record's first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// perf's `PERF_RECORD_*`.
    pub kind: u32,
    /// perf's `PERF_RECORD_MISC_*`.
    pub misc: u16,
    /// Bytes of the record, including this word.
    pub size: u16,
}

impl Header {
    /// Splits a record's first word into its fields.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the word's fields")]
    pub const fn from_word(word: u64) -> Self {
        Self { kind: word as u32, misc: (word >> 32) as u16, size: (word >> 48) as u16 }
    }

    /// Splits a record's first word into its fields, and checks that the size is valid and at most `available` bytes.
    ///
    /// # Errors
    /// [`Broken::Malformed`] if the size is below 8, not a multiple of 8, or above `available`.
    #[inline]
    pub fn within(word: u64, available: u64) -> Result<Self, Broken> {
        let header = Self::from_word(word);
        let size = u64::from(header.size);
        if size >= WORD && size <= available && size.is_multiple_of(WORD) {
            Ok(header)
        } else {
            Err(Broken::Malformed { size: header.size, available })
        }
    }

    /// Returns the mode that the CPU was in, one of `MODE_*`.
    #[inline]
    #[must_use]
    pub const fn mode(self) -> u16 {
        self.misc & MODE_MASK
    }
}

/// Returns the lower and the upper half of a word.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the word's halves")]
pub const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Bytes that cannot be a record. They end a walk, because the start of the next record is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// There are more bytes between tail and head than the ring has.
    Overrun,
    /// A record's length is impossible, or the tail or head is not a multiple of 8.
    Malformed {
        /// The length in the header.
        size: u16,
        /// Bytes from the record up to the head.
        available: u64,
    },
}

/// Iterates over the records between a tail and a head. Ends after the first [`Broken`].
#[derive(Debug, Clone)]
pub struct Records<'a, W> {
    word: &'a W,
    size: u64,
    position: u64,
    head: u64,
}

impl<'a, W: Fn(u64) -> u64> Records<'a, W> {
    /// Walks the records of a ring of `size` bytes, a multiple of 8. `word` loads the word at a byte offset, which is a
    /// multiple of 8 below `size`. `tail` and `head` are as in perf's metadata page: they do not wrap at `size`.
    #[inline]
    pub fn new(word: &'a W, size: u64, tail: u64, head: u64) -> Self {
        Self { word, size, position: tail, head }
    }
}

impl<'a, W: Fn(u64) -> u64> Iterator for Records<'a, W> {
    type Item = Result<Record<'a, W>, Broken>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let (position, available) = (self.position, self.head.wrapping_sub(self.position));
        if available == 0 {
            return None;
        }
        if available > self.size {
            self.position = self.head;
            return Some(Err(Broken::Overrun));
        }
        let word = word_at(self.word, self.size, position);
        let header = if (position | self.head).is_multiple_of(WORD) {
            Header::within(word, available)
        } else {
            Err(Broken::Malformed { size: Header::from_word(word).size, available })
        };
        let next = header.map(|header| Record { header, position, size: self.size, word: self.word });
        self.position = match header {
            Ok(header) => position.wrapping_add(header.size.into()),
            Err(_) => self.head,
        };
        Some(next)
    }
}

/// Loads the word that contains `position`, in a ring of `size` bytes.
#[inline]
fn word_at(word: impl Fn(u64) -> u64, size: u64, position: u64) -> u64 {
    word((position % size) & !(WORD - 1))
}

/// A record in a ring; its words are loaded on demand.
#[derive(Debug)]
pub struct Record<'a, W> {
    /// The record's first word.
    pub header: Header,
    /// The record's position in the ring's stream of bytes, like a tail or head.
    pub position: u64,
    size: u64,
    word: &'a W,
}

impl<W: Fn(u64) -> u64> Record<'_, W> {
    /// Returns the number of words after the header.
    #[inline]
    #[must_use]
    pub fn words(&self) -> u64 {
        u64::from(self.header.size) / WORD - 1
    }

    /// Loads word `index` after the header; zero beyond the record.
    #[inline]
    #[must_use]
    pub fn word(&self, index: u64) -> u64 {
        match index < self.words() {
            true => {
                let position = self.position.wrapping_add(WORD + index * WORD);
                word_at(self.word, self.size, position)
            }
            false => 0,
        }
    }

    /// Copies the words after the header.
    #[must_use]
    pub fn body(&self) -> Vec<u64> {
        (0..self.words()).map(|index| self.word(index)).collect()
    }
}

/// Iterates over the records in `bytes`. Each item is the header and all bytes of the record, including its header.
/// Ends at the first incomplete or malformed record.
pub fn in_bytes(bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let first = u64::from_ne_bytes(*rest.first_chunk()?);
        let header = Header::within(first, rest.len() as u64).ok()?;
        let (record, after) = rest.split_at_checked(header.size.into())?;
        rest = after;
        Some((header, record))
    })
}

/// Iterates over the records in `words`; the first record is at `position`. Each item is the record's header, its
/// position, and the words after the header. Ends at the first incomplete or malformed record.
pub fn in_words(words: &[u64], position: u64) -> impl Iterator<Item = (Header, u64, &[u64])> {
    let (mut rest, mut position) = (words, position);
    std::iter::from_fn(move || {
        let (first, after) = rest.split_first()?;
        let header = Header::within(*first, WORD * rest.len() as u64).ok()?;
        let (body, after) = after.split_at_checked(usize::from(header.size / 8 - 1))?;
        let at = position;
        position = at.wrapping_add(header.size.into());
        rest = after;
        Some((header, at, body))
    })
}

/// A cursor over the words of a record's body. Its methods return `None` if too few words are left.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a>(&'a [u64]);

impl<'a> Words<'a> {
    /// Starts at the first of `words`.
    #[must_use]
    pub fn new(words: &'a [u64]) -> Self {
        Self(words)
    }

    /// Takes the next word.
    #[expect(
        clippy::should_implement_trait,
        reason = "`Iterator::take` and `Iterator::skip` would hide the methods below"
    )]
    pub fn next(&mut self) -> Option<u64> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// Takes the next word if `there` is true, that is, if the record has this field. Otherwise returns zero.
    pub fn next_if(&mut self, there: bool) -> Option<u64> {
        if there { self.next() } else { Some(0) }
    }

    /// Takes the next `count` words; `count` may be an untrusted number from the record.
    pub fn take(&mut self, count: u64) -> Option<&'a [u64]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Skips the next `count` words.
    pub fn skip(&mut self, count: u64) -> Option<()> {
        self.take(count).map(|_| ())
    }

    /// Splits off the last `count` words.
    pub fn take_last(&mut self, count: usize) -> Option<Self> {
        let at = self.0.len().checked_sub(count)?;
        let (rest, taken) = self.0.split_at_checked(at)?;
        self.0 = rest;
        Some(Self(taken))
    }

    /// Returns whether all words were taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests;
