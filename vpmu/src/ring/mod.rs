//! A ring in guest memory: its metadata page and its data. The guest owns the pages and lies
//! about whatever it likes; what decides where a byte goes is kept here.

mod producer;

use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, VolatileMemoryError, VolatileSlice};
use zerocopy::FromZeros;
use zerocopy::IntoBytes;

pub(crate) use self::producer::{Author, Manner, Outcome, Session, Wakeup};

use self::producer::Producer;
use crate::abi::{Metadata, PAGE_SIZE};
use crate::clock::Clock;
use crate::pages::{self, GuestPages};

const PAGE: u64 = PAGE_SIZE as u64;
/// Bytes of the page up to its reserved ones; less than a page.
#[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
const HEADER_SIZE: u32 = std::mem::offset_of!(Metadata, reserved) as u32;
const LOCK: usize = std::mem::offset_of!(Metadata, lock);
const COUNT: usize = std::mem::offset_of!(Metadata, offset);
const CAPABILITIES: usize = std::mem::offset_of!(Metadata, capabilities);
const TIME_OFFSET: usize = std::mem::offset_of!(Metadata, time_offset);

const CAP_BIT0_IS_DEPRECATED: u64 = 1 << 1;
const CAP_USER_TIME: u64 = 1 << 3;
const CAP_USER_TIME_ZERO: u64 = 1 << 4;
/// Of the counter that `index` would name: no shift that programs make with it changes a count.
const PMC_WIDTH: u16 = 64;

/// The count and times that the metadata page shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Face {
    pub(crate) count: u64,
    pub(crate) time_enabled: u64,
    pub(crate) time_running: u64,
    /// Guest time of these figures while they grow, `None` while they stand still.
    pub(crate) growing_since: Option<u64>,
}

/// A ring: one metadata page, then 2^n data pages or none.
#[derive(Debug)]
pub(crate) struct Ring {
    metadata: GuestAddress,
    data: Vec<GuestAddress>,
    producer: Producer,
    sequence: u32,
}

impl Ring {
    /// Lays an empty ring over `pages`, metadata first. The caller has checked that there is one
    /// page at least, that the data pages are a power of two or none, and that each page is
    /// aligned and named once.
    ///
    /// # Errors
    /// A page that is not guest memory.
    pub(crate) fn new(
        memory: &GuestMemoryMmap,
        pages: &[GuestAddress],
        manner: Manner,
        clock: Clock,
    ) -> Result<Self, pages::Error> {
        let (&metadata, data) = pages.split_first().ok_or(pages::Error::NoPage)?;
        for &address in data {
            pages::page(memory, address)?;
        }
        let size = data.len() as u64 * PAGE;
        let mut page = Metadata::new_zeroed();
        page.capabilities = (CAP_BIT0_IS_DEPRECATED | CAP_USER_TIME_ZERO).into();
        page.pmc_width = PMC_WIDTH.into();
        page.time_mult = clock.mult.into();
        page.time_shift = clock.shift.into();
        page.time_mask = u64::MAX.into();
        page.size = HEADER_SIZE.into();
        page.data_offset = PAGE.into();
        page.data_size = size.into();
        let mut bytes = [0; PAGE_SIZE];
        bytes[..size_of::<Metadata>()].copy_from_slice(page.as_bytes());
        pages::page(memory, metadata)?.copy_from(&bytes);
        Ok(Self {
            metadata,
            data: data.to_vec(),
            producer: Producer::new(size, manner),
            sequence: 0,
        })
    }

    /// Number of guest pages held.
    pub(crate) fn pages(&self) -> usize {
        1 + self.data.len()
    }

    /// Whether it has room for any record at all.
    pub(crate) fn has_data(&self) -> bool {
        self.producer.size() > 0
    }

    pub(crate) fn manner(&self) -> Manner {
        self.producer.manner()
    }

    /// While paused, every sample is lost.
    pub(crate) fn pause(&mut self, paused: bool) {
        self.producer.pause(paused);
    }

    /// Begins a burst of records.
    ///
    /// # Errors
    /// The metadata page is no guest memory any more.
    pub(crate) fn session<'a>(
        &'a mut self,
        memory: &'a GuestMemoryMmap,
    ) -> Result<Session<'a, GuestPages<'a>>, pages::Error> {
        let pages = GuestPages::new(memory, self.metadata, &self.data)?;
        Ok(Session::new(&mut self.producer, pages))
    }

    /// Writes one sample, or counts it as lost; for more, begin a [`Ring::session`].
    pub(crate) fn write(
        &mut self,
        memory: &GuestMemoryMmap,
        sample: &[u8],
        author: &Author<'_>,
    ) -> Outcome {
        if let Ok(mut session) = self.session(memory) {
            session.write(sample, author)
        } else {
            self.lose(1)
        }
    }

    /// Writes one record that is no sample, if it fits.
    pub(crate) fn note(
        &mut self,
        memory: &GuestMemoryMmap,
        record: &[u8],
        author: &Author<'_>,
    ) -> Outcome {
        self.session(memory).map_or_else(
            |_| Outcome::default(),
            |mut session| session.note(record, author),
        )
    }

    /// Counts samples that could not be written, or not even be made.
    pub(crate) fn lose(&mut self, samples: u64) -> Outcome {
        Outcome {
            written: false,
            wake: self.producer.lose(samples),
        }
    }

    /// Writes the pending loss if there is one and it fits; whether the reader is to be woken.
    pub(crate) fn flush(&mut self, memory: &GuestMemoryMmap, author: &Author<'_>) -> bool {
        self.producer.has_loss()
            && self
                .session(memory)
                .is_ok_and(|mut session| session.flush(author))
    }

    /// Shows a count and its times in the metadata page.
    pub(crate) fn show(&mut self, memory: &GuestMemoryMmap, face: &Face) {
        let shown = pages::page(memory, self.metadata)
            .and_then(|page| show(&page, &mut self.sequence, face).map_err(pages::Error::Beyond));
        if let Err(error) = shown {
            log::debug!("a ring's metadata page: {error}");
        }
    }
}

fn show(
    page: &VolatileSlice<'_>,
    sequence: &mut u32,
    face: &Face,
) -> Result<(), VolatileMemoryError> {
    let capabilities = CAP_BIT0_IS_DEPRECATED
        | CAP_USER_TIME_ZERO
        | face.growing_since.map_or(0, |_| CAP_USER_TIME);
    let time_offset = face.growing_since.unwrap_or(0).wrapping_neg();
    let put = |offset, value: u64| page.store(value.to_le(), offset, Ordering::Relaxed);
    let odd = sequence.wrapping_add(1);
    *sequence = odd.wrapping_add(1);
    page.store(odd.to_le(), LOCK, Ordering::Relaxed)?;
    // No field may be seen changed while the sequence is still even.
    fence(Ordering::Release);
    put(COUNT, face.count)?;
    put(COUNT + 8, face.time_enabled)?;
    put(COUNT + 16, face.time_running)?;
    put(CAPABILITIES, capabilities)?;
    put(TIME_OFFSET, time_offset)?;
    page.store(sequence.to_le(), LOCK, Ordering::Release)
}

#[cfg(test)]
mod tests;
