//! Where a ring's bytes lie. The ring's algorithm sees no more of memory than [`Pages`], so that
//! a model of memory can stand in for the guest's; it decides nothing here.

use std::sync::atomic::Ordering;

use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    VolatileMemoryError, VolatileSlice,
};

use crate::abi::{Metadata, PAGE_SIZE};

const PAGE: u64 = PAGE_SIZE as u64;
const DATA_HEAD: usize = std::mem::offset_of!(Metadata, data_head);
const DATA_TAIL: usize = std::mem::offset_of!(Metadata, data_tail);

/// A ring's pages are not writable memory (any more).
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no guest memory there")]
    Unmapped(#[source] GuestMemoryError),
    #[error("beyond the page")]
    Beyond(#[source] VolatileMemoryError),
    #[error("the ring has no such page")]
    NoPage,
}

/// The pages of one ring: the words shared with the reader, and the data.
pub(crate) trait Pages {
    /// What the reader has read up to. An acquire load: what it has read may be overwritten.
    fn tail(&self) -> Result<u64, Error>;

    /// Lets the reader see what stands before `head` (behind it, for a ring written backwards).
    /// A release store: it sees what was put there.
    fn publish(&mut self, head: u64) -> Result<(), Error>;

    /// Copies `bytes` to `position` and on, modulo the size of the data.
    fn put(&mut self, position: u64, bytes: &[u8]) -> Result<(), Error>;
}

/// Pages of guest memory. Each is looked up when it is first written to and kept until another
/// is: a burst of records costs a look-up per page, not per record.
#[derive(Debug)]
pub(crate) struct GuestPages<'a> {
    memory: &'a GuestMemoryMmap,
    metadata: VolatileSlice<'a>,
    /// A power of two of them, or none.
    data: &'a [GuestAddress],
    /// The page last written to, by its number.
    current: Option<(usize, VolatileSlice<'a>)>,
}

impl<'a> GuestPages<'a> {
    /// # Errors
    /// The metadata page is no guest memory.
    pub(crate) fn new(
        memory: &'a GuestMemoryMmap,
        metadata: GuestAddress,
        data: &'a [GuestAddress],
    ) -> Result<Self, Error> {
        Ok(Self {
            memory,
            metadata: page(memory, metadata)?,
            data,
            current: None,
        })
    }

    /// The data page with this number, taken modulo how many there are.
    fn data_page(&mut self, number: u64) -> Result<&VolatileSlice<'a>, Error> {
        let last = (self.data.len() as u64)
            .checked_sub(1)
            .ok_or(Error::NoPage)?;
        let index = usize::try_from(number & last).map_err(|_| Error::NoPage)?;
        if self.current.as_ref().is_none_or(|&(held, _)| held != index) {
            let address = *self.data.get(index).ok_or(Error::NoPage)?;
            self.current = Some((index, page(self.memory, address)?));
        }
        self.current
            .as_ref()
            .map(|(_, slice)| slice)
            .ok_or(Error::NoPage)
    }
}

impl Pages for GuestPages<'_> {
    fn tail(&self) -> Result<u64, Error> {
        let tail = self.metadata.load::<u64>(DATA_TAIL, Ordering::Acquire);
        tail.map(u64::from_le).map_err(Error::Beyond)
    }

    fn publish(&mut self, head: u64) -> Result<(), Error> {
        let head = head.to_le();
        let stored = self.metadata.store(head, DATA_HEAD, Ordering::Release);
        stored.map_err(Error::Beyond)
    }

    fn put(&mut self, position: u64, bytes: &[u8]) -> Result<(), Error> {
        let (mut position, mut rest) = (position, bytes);
        while !rest.is_empty() {
            let slice = self.data_page(position / PAGE)?;
            // Less than a page, so any integer holds it.
            let offset = usize::try_from(position % PAGE).map_err(|_| Error::NoPage)?;
            let (now, later) = rest.split_at(rest.len().min(PAGE_SIZE - offset));
            slice.offset(offset).map_err(Error::Beyond)?.copy_from(now);
            position = position.wrapping_add(now.len() as u64);
            rest = later;
        }
        Ok(())
    }
}

/// One page of guest memory.
pub(crate) fn page(
    memory: &GuestMemoryMmap,
    address: GuestAddress,
) -> Result<VolatileSlice<'_>, Error> {
    memory
        .get_slice(address, PAGE_SIZE)
        .map_err(Error::Unmapped)
}
