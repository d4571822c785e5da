//! The producer's side of a ring in guest memory. The guest owns the pages and lies about
//! whatever it likes; what decides where a byte goes is kept here.

use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::FromZeros;
use zerocopy::IntoBytes;

use crate::abi::{Metadata, PAGE_SIZE};
use crate::clock::Clock;
use crate::record::{Burst, LOST_SIZE, Sample, sample_size};

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes of the page up to its reserved ones; less than a page.
#[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
const HEADER_SIZE: u32 = std::mem::offset_of!(Metadata, reserved) as u32;
const LOCK: u64 = std::mem::offset_of!(Metadata, lock) as u64;
const COUNT: u64 = std::mem::offset_of!(Metadata, offset) as u64;
const CAPABILITIES: u64 = std::mem::offset_of!(Metadata, capabilities) as u64;
const TIME_OFFSET: u64 = std::mem::offset_of!(Metadata, time_offset) as u64;
const DATA_HEAD: u64 = std::mem::offset_of!(Metadata, data_head) as u64;
const DATA_TAIL: u64 = std::mem::offset_of!(Metadata, data_tail) as u64;

const CAP_BIT0_IS_DEPRECATED: u64 = 1 << 1;
const CAP_USER_TIME: u64 = 1 << 3;
const CAP_USER_TIME_ZERO: u64 = 1 << 4;

/// When the reader wants to be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wakeup {
    /// A record crossed a page boundary of the data.
    Page,
    /// Every so many samples.
    Records(u32),
    /// Every so many bytes.
    Bytes(u32),
}

/// What became of one sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) written: bool,
    pub(crate) wake: bool,
}

/// The count and times that the metadata page shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Face {
    pub(crate) count: u64,
    pub(crate) time_enabled: u64,
    pub(crate) time_running: u64,
    /// Guest time of these figures while they grow, `None` while they stand still.
    pub(crate) growing_since: Option<u64>,
}

/// Why a ring could not be laid.
#[derive(Debug, thiserror::Error)]
#[error("its pages are not writable guest memory")]
pub(crate) struct Unwritable(#[source] vm_memory::GuestMemoryError);

/// A ring: one metadata page, then 2^n data pages or none.
#[derive(Debug)]
pub(crate) struct Ring {
    metadata: GuestAddress,
    data: Vec<GuestAddress>,
    /// The event that owns it: losses carry its id.
    id: u64,
    writable: bool,
    wakeup: Wakeup,
    head: u64,
    lost: u64,
    since_wakeup: u64,
    sequence: u32,
}

impl Ring {
    /// Lays an empty ring over `pages`, metadata first. The caller has checked that there is one
    /// page at least, that the data pages are a power of two or none, and that each page is
    /// aligned and named once.
    pub(crate) fn new(
        memory: &GuestMemoryMmap,
        id: u64,
        pages: &[GuestAddress],
        writable: bool,
        wakeup: Wakeup,
        clock: Clock,
    ) -> Result<Self, Unwritable> {
        let (&metadata, data) = pages.split_first().unwrap_or((&GuestAddress(0), &[]));
        let mut page = Metadata::new_zeroed();
        page.capabilities = (CAP_BIT0_IS_DEPRECATED | CAP_USER_TIME_ZERO).into();
        page.time_mult = clock.mult.into();
        page.time_shift = clock.shift.into();
        page.time_mask = u64::MAX.into();
        page.size = HEADER_SIZE.into();
        page.data_offset = PAGE.into();
        page.data_size = (data.len() as u64 * PAGE).into();
        let mut bytes = [0; PAGE_SIZE];
        bytes[..size_of::<Metadata>()].copy_from_slice(page.as_bytes());
        memory.write_slice(&bytes, metadata).map_err(Unwritable)?;
        Ok(Self {
            metadata,
            data: data.to_vec(),
            id,
            writable,
            wakeup,
            head: 0,
            lost: 0,
            since_wakeup: 0,
            sequence: 0,
        })
    }

    /// Number of guest pages held.
    pub(crate) fn pages(&self) -> usize {
        1 + self.data.len()
    }

    /// Writes a sample, with the loss before it if any; or counts it as lost.
    pub(crate) fn write(
        &mut self,
        memory: &GuestMemoryMmap,
        sample_type: u64,
        sample: &Sample,
    ) -> Outcome {
        let loss = if self.lost > 0 { LOST_SIZE } else { 0 };
        if !self.has_room(memory, loss + sample_size(sample_type)) {
            return self.lose(1);
        }
        let mut burst = Burst::new();
        if self.lost > 0 {
            burst.lost(self.id, self.lost);
        }
        burst.sample(sample_type, sample);
        if !self.publish(memory, burst.as_bytes()) {
            return self.lose(1);
        }
        self.lost = 0;
        let wake = self.advance(burst.as_bytes().len() as u64, 1);
        Outcome {
            written: true,
            wake,
        }
    }

    /// Counts samples that could not be written, or not even be made. The first of them wakes:
    /// a full ring crosses no mark any more, and its reader would sleep for ever.
    pub(crate) fn lose(&mut self, samples: u64) -> Outcome {
        let wake = self.lost == 0 && samples > 0;
        self.lost = self.lost.saturating_add(samples);
        Outcome {
            written: false,
            wake,
        }
    }

    /// Writes the pending loss if there is one and it fits; whether that calls for a wakeup.
    pub(crate) fn flush(&mut self, memory: &GuestMemoryMmap) -> bool {
        if self.lost == 0 || !self.has_room(memory, LOST_SIZE) {
            return false;
        }
        let mut burst = Burst::new();
        burst.lost(self.id, self.lost);
        if !self.publish(memory, burst.as_bytes()) {
            return false;
        }
        self.lost = 0;
        self.advance(LOST_SIZE as u64, 0)
    }

    /// Shows a count and its times in the metadata page.
    pub(crate) fn show(&mut self, memory: &GuestMemoryMmap, face: &Face) {
        let capabilities = CAP_BIT0_IS_DEPRECATED
            | CAP_USER_TIME_ZERO
            | face.growing_since.map_or(0, |_| CAP_USER_TIME);
        let time_offset = face.growing_since.unwrap_or(0).wrapping_neg();
        let at = |offset| self.metadata.0 + offset;
        let put = |offset, value: u64| {
            memory.store(value.to_le(), GuestAddress(at(offset)), Ordering::Relaxed)
        };
        let lock =
            |sequence: u32, order| memory.store(sequence.to_le(), GuestAddress(at(LOCK)), order);
        let odd = self.sequence.wrapping_add(1);
        let shown = lock(odd, Ordering::Relaxed).and_then(|()| {
            // No field may be seen changed while the sequence is still even.
            fence(Ordering::Release);
            put(COUNT, face.count)?;
            put(COUNT + 8, face.time_enabled)?;
            put(COUNT + 16, face.time_running)?;
            put(CAPABILITIES, capabilities)?;
            put(TIME_OFFSET, time_offset)?;
            lock(odd.wrapping_add(1), Ordering::Release)
        });
        self.sequence = odd.wrapping_add(1);
        if let Err(error) = shown {
            log::debug!("the metadata page of event {} is gone: {error}", self.id);
        }
    }

    fn size(&self) -> u64 {
        self.data.len() as u64 * PAGE
    }

    /// Whether `len` more bytes fit before what the reader has not seen.
    fn has_room(&self, memory: &GuestMemoryMmap, len: usize) -> bool {
        let len = len as u64;
        if !self.writable {
            return len <= self.size();
        }
        let tail = GuestAddress(self.metadata.0 + DATA_TAIL);
        // Pairs with the reader's release of the tail: what it has read may be overwritten.
        let Ok(tail) = memory.load::<u64>(tail, Ordering::Acquire) else {
            return false;
        };
        let held = self.head.wrapping_sub(u64::from_le(tail));
        // A tail ahead of the head, or too far behind it, makes `held` larger than the ring.
        self.size()
            .checked_sub(held)
            .is_some_and(|room| len <= room)
    }

    /// Copies `bytes` to the head, page by page, and lets the reader see them.
    fn publish(&self, memory: &GuestMemoryMmap, bytes: &[u8]) -> bool {
        let mut at = self.head;
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some(page) = self.page(at) else {
                return false;
            };
            let offset = at % PAGE;
            let piece = (PAGE - offset).min(rest.len() as u64);
            let Some((now, later)) = usize::try_from(piece)
                .ok()
                .and_then(|piece| rest.split_at_checked(piece))
            else {
                return false;
            };
            if memory
                .write_slice(now, GuestAddress(page.0 + offset))
                .is_err()
            {
                return false;
            }
            at += piece;
            rest = later;
        }
        let head = GuestAddress(self.metadata.0 + DATA_HEAD);
        // Pairs with the reader's acquire of the head: the records stand before it moves.
        memory.store(at.to_le(), head, Ordering::Release).is_ok()
    }

    /// The data page that holds `position`.
    fn page(&self, position: u64) -> Option<GuestAddress> {
        let index = (position / PAGE).checked_rem(self.data.len() as u64)?;
        self.data.get(usize::try_from(index).ok()?).copied()
    }

    /// Moves the private head; whether the reader is to be woken.
    fn advance(&mut self, bytes: u64, records: u64) -> bool {
        let before = self.head;
        self.head += bytes;
        match self.wakeup {
            Wakeup::Page => before / PAGE != self.head / PAGE,
            Wakeup::Records(every) => self.count_down(records, every),
            Wakeup::Bytes(every) => self.count_down(bytes, every),
        }
    }

    fn count_down(&mut self, more: u64, every: u32) -> bool {
        let every = u64::from(every.max(1));
        let grown = self.since_wakeup + more;
        self.since_wakeup = grown % every;
        grown >= every
    }
}

#[cfg(test)]
#[path = "ring/tests.rs"]
mod tests;
