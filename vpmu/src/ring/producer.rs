//! The producer's side of a ring's data: free space, losses and wakeups. A guest that writes wrong values to the
//! ring can only lose its own data.

use std::sync::atomic::Ordering;

use super::SavedRing;
use crate::abi::{Metadata, PAGE_SIZE};
use crate::pages::{self, Pages};
use crate::record::{Layout, Record, SampleId};
use crate::saved::Fault;

pub(super) const DATA_HEAD: usize = std::mem::offset_of!(Metadata, data_head);
pub(super) const DATA_TAIL: usize = std::mem::offset_of!(Metadata, data_tail);

/// In a saved ring, the largest valid count of records or bytes since the last wakeup. No real ring reaches it, and a
/// count that starts at this limit does not overflow before the next wakeup.
const MOST_PRODUCED: u64 = u64::MAX >> 1;

/// The condition on which the reader is woken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) enum Wakeup {
    /// Wake the reader when a record crosses a page boundary of the data.
    #[default]
    Page,
    /// After this many samples.
    Records(u32),
    /// After this many bytes.
    Bytes(u32),
}

/// The properties of the event that a record belongs to. Events that share a ring may have different properties.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteContext<'a> {
    /// The layout of the event's records.
    pub(crate) layout: &'a Layout,
    /// The record's sample id. A `PERF_RECORD_LOST` that is written just before the record gets the same sample id.
    pub(crate) sample_id: &'a SampleId,
    pub(crate) wakeup: Wakeup,
    /// Whether each sample wakes the reader. The counts for `wakeup` go on as without this.
    pub(crate) prompt: bool,
}

/// The result of writing a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Outcome {
    pub(crate) written: bool,
    /// Whether to wake the reader.
    pub(crate) wake: bool,
}

/// Whether the reader stores its tail, and the direction in which the ring is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingMode {
    /// Whether the reader mapped the ring writable. If so, unread data is kept. Otherwise, new records
    /// overwrite the oldest ones.
    pub(crate) writable: bool,
    /// Whether the ring is written from the end of the data towards the beginning. If so, the head is the start
    /// of the newest record.
    pub(crate) backward: bool,
}

/// The state of one ring's data.
#[derive(Debug)]
pub(super) struct Producer {
    /// Size of the data in bytes. It is a power of two, or zero.
    size: u64,
    mode: RingMode,
    paused: bool,
    /// Position of the next record, modulo 2^64. In a backward ring, the position of the newest record.
    head: u64,
    /// The last published head.
    published: u64,
    /// The value that the head had when the reader was last woken.
    roused: u64,
    /// The tail, as last read from the metadata page. If it is stale, the free space appears smaller than it really is.
    tail: u64,
    /// Number of lost samples that no record has reported yet.
    lost: u64,
    /// Whether the reader was woken for the lost samples.
    loss_told: bool,
    /// Samples since [`Wakeup::Records`] last caused a wakeup. Counts only samples of events with this kind of wakeup.
    records: u64,
    /// Bytes since [`Wakeup::Bytes`] last caused a wakeup. Counts the records of all events.
    bytes: u64,
    loss: Record,
}

impl Producer {
    pub(super) fn new(size: u64, mode: RingMode) -> Self {
        Self {
            size,
            mode,
            paused: false,
            head: 0,
            published: 0,
            roused: 0,
            tail: 0,
            lost: 0,
            loss_told: false,
            records: 0,
            bytes: 0,
            loss: Record::default(),
        }
    }

    /// Copies the current state to `into`. Call this only between two sessions, when everything that was written is
    /// published.
    pub(super) fn save(&self, into: &mut SavedRing) {
        let RingMode { writable, backward } = self.mode;
        into.writable = writable;
        into.backward = backward;
        into.paused = self.paused;
        into.head = self.head;
        into.roused = self.roused;
        into.tail = self.tail;
        into.lost = self.lost;
        into.loss_told = self.loss_told;
        into.records = self.records;
        into.bytes = self.bytes;
    }

    /// Restores a saved producer over `size` bytes.
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(super) fn restore(size: u64, saved: &SavedRing) -> Result<Self, Fault> {
        let mode = RingMode { writable: saved.writable, backward: saved.backward };
        if !saved.head.is_multiple_of(8) || size == 0 && saved.head != 0 {
            return Err("the head is not a multiple of 8, or not zero without data");
        }
        if saved.records.max(saved.bytes) > MOST_PRODUCED {
            return Err("a count since the last wakeup is too large");
        }
        Ok(Self {
            paused: saved.paused,
            head: saved.head,
            published: saved.head,
            roused: saved.roused,
            tail: saved.tail,
            lost: saved.lost,
            loss_told: saved.loss_told,
            records: saved.records,
            bytes: saved.bytes,
            ..Self::new(size, mode)
        })
    }

    pub(super) fn mode(&self) -> RingMode {
        self.mode
    }

    /// Whether lost samples are not yet recorded.
    pub(super) fn has_loss(&self) -> bool {
        self.lost > 0
    }

    /// Pauses or resumes writing.
    pub(super) fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Resets to zero the counts of records and bytes since the last wakeup.
    pub(super) fn restart_wakeups(&mut self) {
        self.records = 0;
        self.bytes = 0;
    }

    /// Counts samples that could not be written, or for which no record could be made. Returns whether to wake the
    /// reader. The first loss wakes the reader. Without this wakeup, the reader of a full ring would sleep forever,
    /// because no record can be written that would wake it. A reader that paused its ring does not need a wakeup.
    pub(super) fn lose(&mut self, samples: u64) -> bool {
        let wake = samples > 0 && !self.loss_told && !self.paused && self.size > 0;
        self.loss_told |= wake;
        if wake {
            self.roused = self.head;
        }
        self.lost = self.lost.saturating_add(samples);
        wake
    }

    /// Returns whether anything was written since the reader was last woken. If so, the caller must wake the
    /// reader, and this call counts as that wakeup.
    pub(super) fn rouse(&mut self) -> bool {
        std::mem::replace(&mut self.roused, self.head) != self.head
    }

    /// Stores a record at the head. If a loss is pending, stores its `PERF_RECORD_LOST` first. The next
    /// [`Producer::publish`] makes both visible.
    #[inline]
    fn append(&mut self, pages: &mut impl Pages, record: &[u64], samples: u64, context: &WriteContext<'_>) -> Outcome {
        if !self.has_loss() {
            return self.place(pages, &[], record, samples, context);
        }
        let mut loss = std::mem::take(&mut self.loss);
        let before = loss.lost(context.layout, context.sample_id, self.lost);
        let outcome = self.place(pages, before, record, samples, context);
        self.loss = loss;
        outcome
    }

    #[inline]
    fn place(
        &mut self,
        pages: &mut impl Pages,
        loss: &[u64],
        record: &[u64],
        samples: u64,
        context: &WriteContext<'_>,
    ) -> Outcome {
        let len = size_of_val(loss) as u64 + size_of_val(record) as u64;
        if self.paused || !self.has_room(pages, len) {
            return Outcome::default();
        }
        let (start, head) = if self.mode.backward {
            (self.head.wrapping_sub(len), self.head.wrapping_sub(len))
        } else {
            (self.head, self.head.wrapping_add(len))
        };
        if !loss.is_empty()
            && let Err(error) = pages.put(start, loss)
        {
            return unwritable(&error);
        }
        let after = start.wrapping_add(size_of_val(loss) as u64);
        if let Err(error) = pages.put(after, record) {
            return unwritable(&error);
        }
        let before = self.produced();
        self.head = head;
        if !loss.is_empty() {
            self.lost = 0;
            self.loss_told = false;
        }
        self.bytes += len;
        let due = match context.wakeup {
            Wakeup::Page => before / PAGE_SIZE as u64 != self.produced() / PAGE_SIZE as u64,
            Wakeup::Records(every) => {
                self.records += samples;
                take(&mut self.records, every)
            }
            Wakeup::Bytes(every) => take(&mut self.bytes, every),
        };
        let wake = due || context.prompt && samples > 0;
        if wake {
            self.roused = self.head;
        }
        Outcome { written: true, wake }
    }

    /// Bytes ever written, modulo 2^64.
    #[inline]
    fn produced(&self) -> u64 {
        if self.mode.backward { self.head.wrapping_neg() } else { self.head }
    }

    /// Whether `len` more bytes fit without overwriting unread data.
    #[inline]
    fn has_room(&mut self, pages: &impl Pages, len: u64) -> bool {
        if self.mode.writable { len <= self.room() || len <= self.look(pages) } else { len <= self.size }
    }

    /// Reads the reader's tail, and returns the number of free bytes.
    #[cold]
    fn look(&mut self, pages: &impl Pages) -> u64 {
        // Pairs with the reader's release store of the tail. The reader has therefore finished reading the data before
        // the tail, and the device may overwrite it.
        match pages.load(DATA_TAIL, Ordering::Acquire) {
            Ok(tail) => {
                self.tail = tail;
                self.room()
            }
            Err(error) => {
                unwritable(&error);
                0
            }
        }
    }

    /// Returns the number of free bytes, according to the tail that was last read. Zero if that tail is not a valid
    /// position.
    #[inline]
    fn room(&self) -> u64 {
        self.size.saturating_sub(self.unread())
    }

    /// Returns the number of unread bytes, according to the tail that was last read. If that tail is not a valid
    /// position, the number exceeds the size of the data.
    #[inline]
    fn unread(&self) -> u64 {
        if self.mode.backward { self.tail.wrapping_sub(self.head) } else { self.head.wrapping_sub(self.tail) }
    }

    /// Returns the start and the length of the readable records. `None` if older records were overwritten, because then
    /// the start of the oldest remaining record is unknown.
    pub(super) fn held(&self) -> Option<(u64, u64)> {
        let RingMode { writable, backward } = self.mode;
        let start = match (backward, writable) {
            (true, _) => self.head,
            (false, true) => self.tail,
            (false, false) => 0,
        };
        let len = match writable {
            // With an invalid tail, no record is readable.
            true if self.unread() > self.size => 0,
            true => self.unread(),
            false if backward => self.produced().min(self.size),
            false if self.head > self.size => return None,
            false => self.head,
        };
        Some((start, len))
    }

    fn publish(&mut self, pages: &impl Pages) {
        if self.published == self.head {
            return;
        }
        self.published = self.head;
        // Pairs with the reader's acquire load of the head. A reader that sees the new head also sees the records.
        if let Err(error) = pages.store(DATA_HEAD, self.head, Ordering::Release) {
            log::debug!("cannot write the head of a ring: {error}");
        }
    }
}

/// Logs a failed access to a page. The page was writable guest memory when the ring was created, but no longer is.
#[cold]
fn unwritable(error: &pages::Unwritable) -> Outcome {
    log::debug!("cannot access the data of a ring: {error}");
    Outcome::default()
}

/// Returns whether a count has reached `every`. If so, reduces the count modulo `every`.
fn take(count: &mut u64, every: u32) -> bool {
    let every = u64::from(every.max(1));
    let reached = *count >= every;
    if reached {
        *count %= every;
    }
    reached
}

/// A burst of records that is written to one ring. The records are published when the burst ends.
#[derive(Debug)]
pub(crate) struct Session<'a, P: Pages> {
    producer: &'a mut Producer,
    pages: P,
}

impl<'a, P: Pages> Session<'a, P> {
    pub(super) fn new(producer: &'a mut Producer, pages: P) -> Self {
        Self { producer, pages }
    }

    /// Writes a sample, or counts it as lost.
    #[inline]
    pub(crate) fn write(&mut self, sample: &[u64], context: &WriteContext<'_>) -> Outcome {
        let outcome = self.producer.append(&mut self.pages, sample, 1, context);
        if outcome.written { outcome } else { self.lose(1) }
    }

    /// Writes a record that is not a sample, if it fits. Does not count a loss if it does not fit.
    pub(crate) fn note(&mut self, record: &[u64], context: &WriteContext<'_>) -> Outcome {
        self.producer.append(&mut self.pages, record, 0, context)
    }

    /// Counts samples without a record.
    pub(crate) fn lose(&mut self, samples: u64) -> Outcome {
        Outcome { written: false, wake: self.producer.lose(samples) }
    }

    /// Writes the `PERF_RECORD_LOST` of a pending loss, if it fits. Returns whether to wake the reader.
    pub(crate) fn flush(&mut self, context: &WriteContext<'_>) -> bool {
        self.producer.has_loss() && self.producer.append(&mut self.pages, &[], 0, context).wake
    }
}

impl<P: Pages> Drop for Session<'_, P> {
    fn drop(&mut self) {
        self.producer.publish(&self.pages);
    }
}
