//! A VMM producer's write to the AUX area of a trace. The write keeps the area's sink, so that its data does not pass
//! through the control plane, but it begins and ends there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::producer::AuxError;
use crate::shared::Shared;
use crate::sink::Sink;

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

/// One write to the AUX area of a trace, from [`Vpmu::aux_begin`](crate::Vpmu::aux_begin) to [`AuxWriter::end`]. The guest sees the write as
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
    shared: &'a Shared,
    trace: u64,
    sink: Arc<Sink>,
    /// Identifies this write, even if the area is replaced before the write ends.
    token: u64,
    written: u64,
    over: bool,
}

impl<'a> AuxWriter<'a> {
    pub(crate) fn begin(shared: &'a Shared, trace: u64) -> Result<Self, AuxError> {
        static TOKENS: AtomicU64 = AtomicU64::new(0);
        let token = TOKENS.fetch_add(1, Ordering::Relaxed);
        let sink = shared.control_plane(|control| control.claim(trace, token))?;
        Ok(Self { shared, trace, sink, token, written: 0, over: false })
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
        self.shared.control_plane(|control| control.lose_aux(self.trace, bytes));
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
        let released =
            |sink: &Arc<Sink>| self.shared.control_plane(|control| control.release(trace, sink, token, size));
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
    if bytes.is_multiple_of(8) { Ok(bytes) } else { Err(AuxError::Words(bytes)) }
}
