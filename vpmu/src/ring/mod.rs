//! A ring in guest memory: its metadata page and its data. The guest owns the pages and may write anything
//! to them. The device therefore keeps its own copy of the head, and never reads the head back from the page.

mod producer;
mod user_page;

use vm_memory::GuestAddress;
use zerocopy::IntoBytes;

pub(crate) use self::producer::{Outcome, RingMode, Session, Wakeup, WriteContext};
pub(crate) use self::user_page::CountSnapshot;

use self::producer::Producer;
use crate::abi::PAGE_SIZE;
use crate::clock::Clock;
use crate::memory::View;
use crate::pages::{self, GuestPages, Unwritable};
use crate::saved::{Fault, saved};

const PAGE: u64 = PAGE_SIZE as u64;

/// A ring. It consists of one metadata page, followed by 2^n data pages or none.
#[derive(Debug)]
pub(crate) struct Ring {
    metadata: GuestAddress,
    data: Vec<GuestAddress>,
    producer: Producer,
    sequence: u32,
}

saved! {
    /// A ring.
    pub(crate) struct SavedRing {
        /// Addresses of the pages. The metadata page is first.
        pub(crate) pages: Vec<u64>,
        pub(crate) writable: bool,
        pub(crate) backward: bool,
        pub(crate) paused: bool,
        pub(crate) head: u64,
        /// The head when the reader was last woken.
        pub(crate) roused: u64,
        pub(crate) tail: u64,
        pub(crate) lost: u64,
        pub(crate) loss_told: bool,
        pub(crate) records: u64,
        pub(crate) bytes: u64,
        /// The value of the metadata page's sequence lock.
        pub(crate) sequence: u32,
    }
}

impl Ring {
    /// Creates an empty ring in `pages`, the first of which is the metadata page. The caller must have checked that
    /// there is at least one page, that the number of data pages is a power of two or zero, and that each page is
    /// aligned and listed only once.
    ///
    /// # Errors
    /// A page is not guest memory.
    pub(crate) fn new(
        memory: &View<'_>,
        pages: &[GuestAddress],
        mode: RingMode,
        clock: Clock,
    ) -> Result<Self, Unwritable> {
        let (&metadata, data) = pages.split_first().ok_or(Unwritable::NoPage)?;
        for &address in data {
            pages::page(memory, address)?;
        }
        let size = data.len() as u64 * PAGE;
        let blank = user_page::blank(size, clock);
        // Clears the previous contents of the page.
        let mut bytes = [0; PAGE_SIZE];
        for (to, from) in bytes.iter_mut().zip(blank.as_bytes()) {
            *to = *from;
        }
        memory.write(&bytes, metadata).map_err(Unwritable::Unmapped)?;
        Ok(Self { metadata, data: data.to_vec(), producer: Producer::new(size, mode), sequence: 0 })
    }

    /// The current state, to be saved.
    pub(crate) fn save(&self) -> SavedRing {
        let mut saved = SavedRing {
            pages: self.addresses().map(|page| page.0).collect(),
            writable: false,
            backward: false,
            paused: false,
            head: 0,
            roused: 0,
            tail: 0,
            lost: 0,
            loss_told: false,
            records: 0,
            bytes: 0,
            sequence: self.sequence,
        };
        self.producer.save(&mut saved);
        saved
    }

    /// Restores a saved ring in `pages`, without changing the contents of these pages. The caller must have checked
    /// `pages` as for [`Ring::new`].
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(crate) fn restore(memory: &View<'_>, pages: &[GuestAddress], saved: &SavedRing) -> Result<Self, Fault> {
        let (&metadata, data) = pages.split_first().ok_or("the ring has no page")?;
        for &page in pages {
            pages::page(memory, page).map_err(|_| "a page of the ring is not guest memory")?;
        }
        if !saved.sequence.is_multiple_of(2) {
            return Err("the sequence number of the metadata page is odd");
        }
        Ok(Self {
            metadata,
            data: data.to_vec(),
            producer: Producer::restore(data.len() as u64 * PAGE, saved)?,
            sequence: saved.sequence,
        })
    }

    /// Writes the time conversion of `clock` to the metadata page of a restored ring. The page still contains the
    /// saved device's conversion.
    pub(crate) fn retime(&mut self, memory: &View<'_>, clock: Clock) {
        let shown = GuestPages::new(memory, self.metadata, &self.data)
            .and_then(|pages| user_page::retime(&pages, &mut self.sequence, clock));
        if let Err(error) = shown {
            log::debug!("cannot write the metadata page of a ring: {error}");
        }
    }

    /// Every page, the metadata page first.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = GuestAddress> {
        std::iter::once(self.metadata).chain(self.data.iter().copied())
    }

    pub(crate) fn metadata(&self) -> GuestAddress {
        self.metadata
    }

    /// Whether the reader stores its tail.
    pub(crate) fn is_writable(&self) -> bool {
        self.producer.mode().writable
    }

    /// Returns the number of guest pages, including the metadata page.
    pub(crate) fn pages(&self) -> usize {
        1 + self.data.len()
    }

    /// Number of data pages.
    pub(crate) fn data_pages(&self) -> u32 {
        // The conversion cannot fail, because the limit on the number of pages is a `u32`.
        u32::try_from(self.data.len()).unwrap_or(u32::MAX)
    }

    /// Whether lost samples are not yet recorded.
    pub(crate) fn has_loss(&self) -> bool {
        self.producer.has_loss()
    }

    /// Pauses or resumes writing. While writing is paused, every sample is lost.
    pub(crate) fn pause(&mut self, paused: bool) {
        self.producer.pause(paused);
    }

    /// Resets to zero the counts of records and bytes since the last wakeup.
    pub(crate) fn restart_wakeups(&mut self) {
        self.producer.restart_wakeups();
    }

    /// Begins a burst of records.
    ///
    /// # Errors
    /// The metadata page is no longer guest memory.
    pub(crate) fn session<'a>(&'a mut self, memory: &'a View<'a>) -> Result<Session<'a, GuestPages<'a>>, Unwritable> {
        let pages = GuestPages::new(memory, self.metadata, &self.data)?;
        Ok(Session::new(&mut self.producer, pages))
    }

    /// Writes one sample, or counts it as lost. To write several samples, use [`Ring::session`].
    pub(crate) fn write(&mut self, memory: &View<'_>, sample: &[u64], context: &WriteContext<'_>) -> Outcome {
        if let Ok(mut session) = self.session(memory) { session.write(sample, context) } else { self.lose(1) }
    }

    /// Writes one record other than a sample, if it fits.
    pub(crate) fn note(&mut self, memory: &View<'_>, record: &[u64], context: &WriteContext<'_>) -> Outcome {
        self.session(memory).map_or_else(|_| Outcome::default(), |mut session| session.note(record, context))
    }

    /// Counts samples that could not be written, or for which no record could be made.
    pub(crate) fn lose(&mut self, samples: u64) -> Outcome {
        Outcome { written: false, wake: self.producer.lose(samples) }
    }

    /// Writes the `PERF_RECORD_LOST` of a pending loss, if it fits. Returns whether to wake the reader.
    pub(crate) fn flush(&mut self, memory: &View<'_>, context: &WriteContext<'_>) -> bool {
        self.producer.has_loss() && self.session(memory).is_ok_and(|mut session| session.flush(context))
    }

    /// Returns whether anything was written since the reader was last woken. If so, the caller must wake the
    /// reader, and this call counts as that wakeup.
    pub(crate) fn rouse(&mut self) -> bool {
        self.producer.rouse()
    }

    /// Whether [`Ring::held`] returns the newest record first.
    pub(crate) fn is_backward(&self) -> bool {
        self.producer.mode().backward
    }

    /// Returns the bytes of the records in the ring. If the ring is mapped writable, these are the unread records,
    /// according to the tail that the device last read. Otherwise, they are all records that have not been overwritten.
    /// If the ring is written backwards, the newest record is first; otherwise, the oldest record is first. The first
    /// record is complete.
    ///
    /// `None` if the start of the first record is unknown, because older records were overwritten, or if the
    /// ring cannot be read.
    pub(crate) fn held(&self, memory: &View<'_>) -> Option<Vec<u8>> {
        let (start, len) = self.producer.held()?;
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        let copied = self.copy(memory, start, &mut bytes);
        if let Err(error) = copied {
            log::warn!("cannot read a ring: {error}");
            return None;
        }
        Some(bytes)
    }

    /// Copies the data that starts at `position`, modulo the size of the data.
    fn copy(&self, memory: &View<'_>, mut position: u64, bytes: &mut [u8]) -> Result<(), Unwritable> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let page = (position / PAGE).checked_rem(self.data.len() as u64);
            let page = page
                .and_then(|page| usize::try_from(page).ok())
                .and_then(|page| self.data.get(page))
                .ok_or(Unwritable::NoPage)?;
            let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
            let (now, later) = rest.split_at_mut(rest.len().min(PAGE_SIZE - offset));
            let page = pages::page(memory, *page)?;
            let slice = page.bytes().offset(offset).map_err(Unwritable::Beyond)?;
            slice.copy_to(now);
            position = position.wrapping_add(now.len() as u64);
            rest = later;
        }
        Ok(())
    }

    /// Writes a count and its times to the metadata page.
    pub(crate) fn update_page(&mut self, memory: &View<'_>, counts: &CountSnapshot) {
        let shown = GuestPages::new(memory, self.metadata, &self.data)
            .and_then(|pages| user_page::update(&pages, &mut self.sequence, counts));
        if let Err(error) = shown {
            log::debug!("cannot write the metadata page of a ring: {error}");
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod model;
