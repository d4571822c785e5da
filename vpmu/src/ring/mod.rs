//! A ring in guest memory: its metadata page and its data. The guest owns the pages and lies
//! about whatever it likes; what decides where a byte goes is kept here.

mod face;
mod history;
mod producer;

use vm_memory::{GuestAddress, GuestMemoryMmap};
use zerocopy::IntoBytes;

pub(crate) use self::face::Face;
pub(crate) use self::producer::{Author, Manner, Outcome, Session, Wakeup};

use self::producer::Producer;
use crate::abi::PAGE_SIZE;
use crate::clock::Clock;
use crate::pages::{self, GuestPages};

const PAGE: u64 = PAGE_SIZE as u64;

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
    ) -> Result<Self, pages::Unwritable> {
        let (&metadata, data) = pages.split_first().ok_or(pages::Unwritable::NoPage)?;
        for &address in data {
            pages::page(memory, address)?;
        }
        let size = data.len() as u64 * PAGE;
        let blank = face::blank(size, clock);
        // Nothing that the page held before is left in it.
        let mut bytes = [0; PAGE_SIZE];
        for (to, from) in bytes.iter_mut().zip(blank.as_bytes()) {
            *to = *from;
        }
        pages::page(memory, metadata)?.copy_from(&bytes);
        Ok(Self {
            metadata,
            data: data.to_vec(),
            producer: Producer::new(size, manner),
            sequence: 0,
        })
    }

    /// Every page, the metadata page first.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = GuestAddress> {
        std::iter::once(self.metadata).chain(self.data.iter().copied())
    }

    pub(crate) fn metadata(&self) -> GuestAddress {
        self.metadata
    }

    /// Whether its reader says how far it has read.
    pub(crate) fn is_writable(&self) -> bool {
        self.producer.manner().writable
    }

    /// Number of guest pages held.
    pub(crate) fn pages(&self) -> usize {
        1 + self.data.len()
    }

    /// Number of data pages.
    pub(crate) fn data_pages(&self) -> u32 {
        // Bounded by a limit of 32 bits.
        u32::try_from(self.data.len()).unwrap_or(u32::MAX)
    }

    /// Whether it has room for any record at all.
    pub(crate) fn has_data(&self) -> bool {
        self.producer.size() > 0
    }

    /// Whether samples were lost that no record tells of yet.
    pub(crate) fn has_loss(&self) -> bool {
        self.producer.has_loss()
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
    ) -> Result<Session<'a, GuestPages<'a>>, pages::Unwritable> {
        let pages = GuestPages::new(memory, self.metadata, &self.data)?;
        Ok(Session::new(&mut self.producer, pages))
    }

    /// Writes one sample, or counts it as lost; for more, begin a [`Ring::session`].
    pub(crate) fn write(
        &mut self,
        memory: &GuestMemoryMmap,
        sample: &[u64],
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
        record: &[u64],
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

    /// Whether anything was written since the reader was last woken; it is to be woken then.
    pub(crate) fn rouse(&mut self) -> bool {
        self.producer.rouse()
    }

    /// Shows a count and its times in the metadata page.
    pub(crate) fn show(&mut self, memory: &GuestMemoryMmap, face: &Face) {
        let shown = GuestPages::new(memory, self.metadata, &self.data)
            .and_then(|pages| face::show(&pages, &mut self.sequence, face));
        if let Err(error) = shown {
            log::debug!("a ring's metadata page: {error}");
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod model;
