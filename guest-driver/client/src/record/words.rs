//! Iterates over a record's words. Knows no field.

/// The unparsed rest of a record's body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words<'a>(&'a [u64]);

impl<'a> Words<'a> {
    pub(crate) fn new(words: &'a [u64]) -> Self {
        Self(words)
    }

    pub(crate) fn next(&mut self) -> Option<u64> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// The next word if the format has the field, else zero.
    pub(crate) fn next_if(&mut self, there: bool) -> Option<u64> {
        if there { self.next() } else { Some(0) }
    }

    /// The next `count` words; `count` is an untrusted number from the record.
    pub(crate) fn take(&mut self, count: u64) -> Option<&'a [u64]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Splits off the last `count` words.
    pub(crate) fn take_last(&mut self, count: usize) -> Option<Self> {
        let at = self.0.len().checked_sub(count)?;
        let (rest, taken) = self.0.split_at_checked(at)?;
        self.0 = rest;
        Some(Self(taken))
    }
}

/// A word's lower and upper half.
#[expect(
    clippy::cast_possible_truncation,
    reason = "takes the word's halves apart"
)]
pub(crate) fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}
