//! Producers of AUX data in the VMM: their catalogue entries, and a writer for their data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::FORMAT_VMM;
use crate::area::Refused;
use crate::device::Vpmu;
use crate::sink::Sink;

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

/// The position of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuxPlace {
    /// The position of the next byte: the total number of bytes written to the area so far, modulo 2^64. The byte's
    /// offset in the area is this position modulo the area's size.
    pub position: u64,
    /// Number of free bytes starting at `position`, according to the guest's tail. The device reads the tail at the
    /// beginning of the write, and again when data does not fit.
    pub room: u64,
}

/// One write to the AUX area of a trace, from [`Vpmu::aux_begin`] to [`AuxWriter::end`]. The guest sees the write as
/// one chunk with one `PERF_RECORD_AUX`. Dropping the writer without calling [`AuxWriter::end`] discards the write.
///
/// The write does not block the guest. If the guest closes the trace or removes the area, later calls fail.
///
/// ```no_run
/// # fn tick(vpmu: &vpmu::Vpmu) -> Result<(), vpmu::AuxError> {
/// use vpmu::AuxError;
/// // The device was made with `.with_aux_producers(vec![AuxProducer { name: "watchdog", .. }])`.
/// // Write a frame to each trace of producer 0 on vCPU 1.
/// for trace in vpmu.aux_traces(0, 1) {
///     let mut writer = vpmu.aux_begin(trace)?;
///     // Frames of this producer begin at multiples of 64 bytes.
///     let position = writer.get().ok_or(AuxError::NoArea)?.position;
///     let frame = [0x57; 8];
///     let written = writer
///         .skip(position.wrapping_neg() % 64)
///         .and_then(|()| writer.put(&frame));
///     match written {
///         Ok(()) => {
///             let size = writer.written();
///             writer.end(size)?;
///         }
///         // The guest learns how much it missed.
///         Err(AuxError::NoRoom) => {
///             writer.lose(64);
///             writer.end(0)?;
///         }
///         Err(error) => return Err(error),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AuxWriter<'a> {
    vpmu: &'a Vpmu,
    trace: u64,
    sink: Arc<Sink>,
    /// Identifies this write, even if the area is replaced before the write ends.
    token: u64,
    written: u64,
    over: bool,
}

impl<'a> AuxWriter<'a> {
    pub(crate) fn begin(vpmu: &'a Vpmu, trace: u64) -> Result<Self, AuxError> {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let token = TOKENS.fetch_add(1, Ordering::Relaxed);
        let sink = vpmu.control(|control| control.claim(trace, token))?;
        Ok(Self { vpmu, trace, sink, token, written: 0, over: false })
    }

    /// Returns the position of the next byte. `None` if the area is gone.
    #[must_use]
    pub fn get(&self) -> Option<AuxPlace> {
        let window = self.sink.claimed(self.token)?;
        Some(AuxPlace { position: window.head, room: window.room })
    }

    /// Bytes written and skipped so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Appends words, little-endian.
    ///
    /// # Errors
    /// [`AuxError::NoRoom`]: nothing was written, but fewer words may still fit; [`AuxError::NoArea`],
    /// [`AuxError::Unwritable`].
    pub fn put(&mut self, words: &[u64]) -> Result<(), AuxError> {
        self.write(0, words)
    }

    /// Skips bytes, for alignment, and zeroes them.
    ///
    /// # Errors
    /// Like [`AuxWriter::put`]; [`AuxError::Words`].
    pub fn skip(&mut self, bytes: u64) -> Result<(), AuxError> {
        self.write(whole_words(bytes)?, &[])
    }

    /// Adds `bytes` to the trace's number of lost bytes, which the guest can read. Call this for data that did not fit.
    pub fn lose(&mut self, bytes: u64) {
        self.vpmu.control(|control| control.lose_aux(self.trace, bytes));
    }

    /// Ends the write, publishes its first `size` bytes and discards the rest. The reader sees the area's head move
    /// only after the data is in place.
    ///
    /// # Errors
    /// [`AuxError::NoRoom`] if fewer than `size` bytes were written; [`AuxError::Words`];
    /// [`AuxError::NoEvent`] and [`AuxError::NoArea`] if the guest has closed the trace, or removed its area;
    /// [`AuxError::Unwritable`]. After an error, nothing is published.
    pub fn end(mut self, size: u64) -> Result<(), AuxError> {
        let (trace, token, size) = (self.trace, self.token, whole_words(size)?);
        let released = |sink: &Sink| self.vpmu.control(|control| control.release(trace, sink, token, size));
        let ended = released(&self.sink);
        self.over = ended.is_ok();
        ended
    }

    fn write(&mut self, skip: u64, words: &[u64]) -> Result<(), AuxError> {
        self.sink.put(self.token, skip, words)?;
        self.written += skip + size_of_val(words) as u64;
        Ok(())
    }
}

impl Drop for AuxWriter<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.sink.give_up(self.token);
        }
    }
}

fn whole_words(bytes: u64) -> Result<u64, AuxError> {
    match bytes.is_multiple_of(8) {
        true => Ok(bytes),
        false => Err(AuxError::Words(bytes)),
    }
}
