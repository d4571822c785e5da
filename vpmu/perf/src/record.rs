//! The records in a ring, or in a copy of its bytes, oldest first.
//!
//! A ring's contents may be forged. Whatever its head, tail and lengths are, a walk stays inside the
//! ring and ends. This module reads headers and words; callers interpret the fields.

use perf_event_open_sys::bindings as perf;

/// perf's `PERF_RECORD_*`.
pub const TYPE_MMAP: u32 = perf::PERF_RECORD_MMAP;
/// See above.
pub const TYPE_LOST: u32 = perf::PERF_RECORD_LOST;
/// See above.
pub const TYPE_COMM: u32 = perf::PERF_RECORD_COMM;
/// See above.
pub const TYPE_THROTTLE: u32 = perf::PERF_RECORD_THROTTLE;
/// See above.
pub const TYPE_UNTHROTTLE: u32 = perf::PERF_RECORD_UNTHROTTLE;
/// See above.
pub const TYPE_FORK: u32 = perf::PERF_RECORD_FORK;
/// See above.
pub const TYPE_READ: u32 = perf::PERF_RECORD_READ;
/// See above.
pub const TYPE_SAMPLE: u32 = perf::PERF_RECORD_SAMPLE;
/// See above.
pub const TYPE_AUX: u32 = perf::PERF_RECORD_AUX;
/// See above.
pub const TYPE_ITRACE_START: u32 = perf::PERF_RECORD_ITRACE_START;
/// See above.
pub const TYPE_KSYMBOL: u32 = perf::PERF_RECORD_KSYMBOL;

/// [`Header::mode`] without an answer.
pub const MODE_UNKNOWN: u16 = 0;
/// [`Header::mode`] of the kernel.
pub const MODE_KERNEL: u16 = 1;
/// [`Header::mode`] of programs.
pub const MODE_USER: u16 = 2;
/// [`Header::mode`] of a guest's kernel.
pub const MODE_GUEST_KERNEL: u16 = 4;
/// [`Header::mode`] of a guest's programs.
pub const MODE_GUEST_USER: u16 = 5;

/// The mode in perf's `PERF_RECORD_MISC_*`.
pub const MODE_MASK: u16 = 7;

const WORD: u64 = 8;

/// A record's first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// perf's `PERF_RECORD_*`.
    pub kind: u32,
    /// perf's `PERF_RECORD_MISC_*`.
    pub misc: u16,
    /// Bytes of the record, this word included.
    pub size: u16,
}

impl Header {
    /// Takes the word apart.
    #[inline]
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the word's fields")]
    pub const fn from_word(word: u64) -> Self {
        Self {
            kind: word as u32,
            misc: (word >> 32) as u16,
            size: (word >> 48) as u16,
        }
    }

    /// The header of a record at the start of `available` bytes.
    ///
    /// # Errors
    /// [`Broken::Malformed`]: no record of that length is there.
    #[inline]
    pub fn within(word: u64, available: u64) -> Result<Self, Broken> {
        let header = Self::from_word(word);
        let size = u64::from(header.size);
        match size >= WORD && size <= available && size.is_multiple_of(WORD) {
            true => Ok(header),
            false => Err(Broken::Malformed {
                size: header.size,
                available,
            }),
        }
    }

    /// The mode that the CPU was in: one of `MODE_*`.
    #[inline]
    #[must_use]
    pub const fn mode(self) -> u16 {
        self.misc & MODE_MASK
    }
}

/// A word's lower and upper half.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the word's halves")]
pub const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Bytes that cannot be records. They end a walk: the start of the next record is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// More bytes between tail and head than the ring has.
    Overrun,
    /// A length that no record has here, or a tail or head within a word.
    Malformed {
        /// The length in the header.
        size: u16,
        /// Bytes up to the head.
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
    /// Records of a ring of `size` bytes, a multiple of 8. `word` returns the word at an offset that
    /// is a multiple of 8 below `size`. Positions grow without wrapping at `size`.
    #[inline]
    pub fn new(word: &'a W, size: u64, tail: u64, head: u64) -> Self {
        Self {
            word,
            size,
            position: tail,
            head,
        }
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
        let header = match (position | self.head).is_multiple_of(WORD) {
            true => Header::within(word, available),
            false => Err(Broken::Malformed {
                size: Header::from_word(word).size,
                available,
            }),
        };
        let next = header.map(|header| Record {
            header,
            position,
            size: self.size,
            word: self.word,
        });
        self.position = match header {
            Ok(header) => position.wrapping_add(header.size.into()),
            Err(_) => self.head,
        };
        Some(next)
    }
}

/// The word of a ring of `size` bytes at `position`, rounded down to a word.
#[inline]
fn word_at(word: impl Fn(u64) -> u64, size: u64, position: u64) -> u64 {
    word((position % size) & !(WORD - 1))
}

/// A record in a ring; its words are loaded on demand.
#[derive(Debug)]
pub struct Record<'a, W> {
    /// Its first word.
    pub header: Header,
    /// Its position.
    pub position: u64,
    size: u64,
    word: &'a W,
}

impl<W: Fn(u64) -> u64> Record<'_, W> {
    /// Words behind the header.
    #[inline]
    #[must_use]
    pub fn words(&self) -> u64 {
        u64::from(self.header.size) / WORD - 1
    }

    /// Word `index` behind the header; zero beyond the record.
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

    /// The words behind the header.
    #[must_use]
    pub fn body(&self) -> Vec<u64> {
        (0..self.words()).map(|index| self.word(index)).collect()
    }
}

/// The bytes of each whole record in `bytes`, header included. What follows them is left out.
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

/// The words behind the header of each whole record in `words`, and the record's position if the
/// first is at `position`. What follows them is left out.
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

/// Iterates over the words of a record's body.
#[derive(Debug, Clone, Copy)]
pub struct Words<'a>(&'a [u64]);

impl<'a> Words<'a> {
    /// All of `words`.
    #[must_use]
    pub fn new(words: &'a [u64]) -> Self {
        Self(words)
    }

    /// The next word.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator's own `take` and `skip` would be called instead"
    )]
    pub fn next(&mut self) -> Option<u64> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// The next word if the format has the field, else zero.
    pub fn next_if(&mut self, there: bool) -> Option<u64> {
        if there { self.next() } else { Some(0) }
    }

    /// The next `count` words; `count` is an untrusted number from the record.
    pub fn take(&mut self, count: u64) -> Option<&'a [u64]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Like [`Words::take`], without the words.
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

    /// Whether all words were taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests;
