//! Producers of AUX data that are the VMM's own: what the guest is told of them, and how they write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::FORMAT_VMM;
use crate::aux::Refused;
use crate::device::Vpmu;
use crate::sink::Sink;

/// Most bytes of a name, and of a text, in the catalogue.
const LONGEST_NAME: usize = 39;
const LONGEST_TEXT: usize = 127;

/// What the guest is told of a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuxProducer {
    /// In the catalogue; at most 39 bytes, and no other producer's.
    pub name: &'static str,
    /// What it writes, in the catalogue; at most 127 bytes.
    pub counts: &'static str,
    /// The format of what it writes, on which the VMM and its guests have agreed: from
    /// [`FORMAT_VMM`](crate::abi::FORMAT_VMM) on.
    pub format: u8,
}

impl AuxProducer {
    pub(crate) fn is_sound(&self) -> bool {
        (1..=LONGEST_NAME).contains(&self.name.len())
            && self.counts.len() <= LONGEST_TEXT
            && u16::from(self.format) >= FORMAT_VMM
    }
}

/// Why a producer cannot write.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuxError {
    /// There is no trace of the VMM's producers with this id.
    #[error("event {0} is no trace of the VMM's")]
    NoEvent(u64),
    /// The trace is off, paused, or its task does not run.
    #[error("trace {0} is not active")]
    Inactive(u64),
    /// No area is mapped with the trace, or it has gone since.
    #[error("the trace has no area")]
    NoArea,
    /// Another writer has begun, and has not ended.
    #[error("the area is being written to")]
    Nested,
    /// The guest has not read so much yet; or so much was not written.
    #[error("the area has no room for it")]
    NoRoom,
    /// Whole words are written alone.
    #[error("{0} bytes are not a number of 64-bit words")]
    Words(u64),
    /// The area is no guest memory any more.
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

/// The place of a writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuxPlace {
    /// Bytes ever written to the area before the next one, modulo 2^64; in the area modulo its size.
    pub position: u64,
    /// Bytes from there on that hold nothing unread, as far as the guest had said when it was last
    /// asked: at the beginning, and when something found no room.
    pub room: u64,
}

/// One writing to the AUX area of a trace, from [`Vpmu::aux_begin`] to [`AuxWriter::end`]: the guest is
/// shown it as one piece, with a `PERF_RECORD_AUX`. Dropped without an end, it shows nothing.
///
/// The guest is not held up meanwhile. If it closes the trace or takes the area away, what follows fails.
///
/// ```no_run
/// # fn tick(vpmu: &vpmu::Vpmu) -> Result<(), vpmu::AuxError> {
/// use vpmu::AuxError;
/// // Of a device made with `.with_aux_producers(vec![AuxProducer { name: "watchdog", .. }])`:
/// // the traces of producer 0 on vCPU 1.
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
    /// Of this writing, whatever becomes of the area meanwhile.
    token: u64,
    written: u64,
    over: bool,
}

impl<'a> AuxWriter<'a> {
    pub(crate) fn begin(vpmu: &'a Vpmu, trace: u64) -> Result<Self, AuxError> {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let token = TOKENS.fetch_add(1, Ordering::Relaxed);
        let sink = vpmu.control(|control| control.claim(trace, token))?;
        Ok(Self {
            vpmu,
            trace,
            sink,
            token,
            written: 0,
            over: false,
        })
    }

    /// The place of the next byte; `None`: the area has gone.
    #[must_use]
    pub fn get(&self) -> Option<AuxPlace> {
        let window = self.sink.claimed(self.token)?;
        Some(AuxPlace {
            position: window.head,
            room: window.room,
        })
    }

    /// Bytes written and left out so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes words, little-endian, behind what was written before.
    ///
    /// # Errors
    /// [`AuxError::NoRoom`]: nothing was written, and less may still fit; [`AuxError::NoArea`],
    /// [`AuxError::Unwritable`].
    pub fn put(&mut self, words: &[u64]) -> Result<(), AuxError> {
        self.write(0, words)
    }

    /// Leaves out so many bytes, for what has to be aligned: they are zero.
    ///
    /// # Errors
    /// As [`AuxWriter::put`]; [`AuxError::Words`].
    pub fn skip(&mut self, bytes: u64) -> Result<(), AuxError> {
        self.write(whole_words(bytes)?, &[])
    }

    /// Counts bytes that found no room as lost by the trace, which the guest is told.
    pub fn lose(&mut self, bytes: u64) {
        self.vpmu
            .control(|control| control.lose_aux(self.trace, bytes));
    }

    /// Ends the writing, and shows the guest the first `size` bytes of it; the rest is given up. They
    /// stand in the area before its head moves.
    ///
    /// # Errors
    /// [`AuxError::NoRoom`] for more than was written, [`AuxError::Words`]; [`AuxError::NoEvent`] and
    /// [`AuxError::NoArea`] if the guest has closed the trace, or taken its area. Nothing is shown then.
    pub fn end(mut self, size: u64) -> Result<(), AuxError> {
        let (trace, token, size) = (self.trace, self.token, whole_words(size)?);
        let released = |sink: &Sink| {
            self.vpmu
                .control(|control| control.release(trace, sink, token, size))
        };
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
