//! Producers of AUX data in the VMM: their catalogue entries, and their errors.

use crate::abi::FORMAT_VMM;
use crate::area::Refused;

/// Maximum lengths of a name and of a text in the catalogue, in bytes.
const LONGEST_NAME: usize = 39;
const LONGEST_TEXT: usize = 127;

/// A producer, as the catalogue describes it to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuxProducer {
    /// The producer's name in the catalogue. The name is unique and at most 39 bytes long.
    pub name: &'static str,
    /// The catalogue text that describes its data. At most 127 bytes.
    pub counts: &'static str,
    /// The format of the producer's data, as agreed between the VMM and its guests; at least
    /// [`FORMAT_VMM`](crate::abi::FORMAT_VMM).
    pub format: u8,
}

impl AuxProducer {
    pub(crate) fn is_sound(&self) -> bool {
        (1..=LONGEST_NAME).contains(&self.name.len())
            && self.counts.len() <= LONGEST_TEXT
            && u16::from(self.format) >= FORMAT_VMM
    }
}

/// Errors of a producer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuxError {
    /// The id does not belong to a trace that one of the VMM's producers writes.
    #[error("event {0} is not a trace that the VMM's producers write")]
    NoEvent(u64),
    /// The trace is disabled or paused, or its task is not running.
    #[error("trace {0} is not active")]
    Inactive(u64),
    /// The trace has no area, or no longer has one.
    #[error("the trace has no area")]
    NoArea,
    /// Another writer has started a write to the area and has not ended it yet.
    #[error("another writer is writing to the area")]
    Nested,
    /// The area is full of unread data, or `end` was called for more bytes than were written.
    #[error("the area has no room for the data")]
    NoRoom,
    /// Only whole words can be written.
    #[error("{0} bytes are not a whole number of 64-bit words")]
    Words(u64),
    /// The area is no longer guest memory.
    #[error("the area cannot be written to")]
    Unwritable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<Refused> for AuxError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Nested => Self::Nested,
            Refused::NotBegun => Self::NoArea,
            Refused::NoRoom => Self::NoRoom,
            Refused::Unwritable(source) => Self::Unwritable(Box::new(source)),
        }
    }
}
