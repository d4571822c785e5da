//! The memory of a ring. The ring's algorithm accesses memory only through [`Pages`], so that a
//! model of memory can replace the guest's; nothing is decided here, memory order included.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, VolatileMemory,
    VolatileMemoryError, VolatileSlice,
};

use zerocopy::IntoBytes;

use crate::abi::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;
const WORD: usize = size_of::<u64>();
/// Copies of at most this many words go word by word. A record has just been built word by word,
/// and a CPU forwards pending stores only to loads of the same width: wider ones would stall.
const SHORT: usize = 16;

/// A ring's pages are not writable memory, or no longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unwritable {
    #[error("no guest memory there")]
    Unmapped(#[source] GuestMemoryError),
    #[error("beyond the page")]
    Beyond(#[source] VolatileMemoryError),
    #[error("there is no such page")]
    NoPage,
}

/// The pages of one ring: the words of the first, shared with the reader, and the data.
pub(crate) trait Pages {
    /// The word at `field` of the metadata page.
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable>;

    /// Stores the word at `field` of the metadata page.
    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable>;

    /// Stores the half word at `field` of the metadata page.
    fn store_half(&self, field: usize, value: u32, order: Ordering) -> Result<(), Unwritable>;

    /// A fence between those accesses.
    fn fence(&self, order: Ordering);

    /// Copies `words` to `position`, a multiple of 8, modulo the size of the data.
    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable>;
}

/// Pages of guest memory. Each is looked up at its first write and cached until another one is
/// written: a burst of records costs a look-up per page, not per record.
#[derive(Debug)]
pub(crate) struct GuestPages<'a> {
    memory: &'a GuestMemoryMmap,
    /// `None` if it is not accessed.
    metadata: Option<VolatileSlice<'a>>,
    /// A power of two of pages, or none.
    data: &'a [GuestAddress],
    /// The page last written to, and its number.
    current: Option<(u64, VolatileSlice<'a>)>,
}

impl<'a> GuestPages<'a> {
    /// # Errors
    /// The metadata page is not guest memory.
    pub(crate) fn new(
        memory: &'a GuestMemoryMmap,
        metadata: GuestAddress,
        data: &'a [GuestAddress],
    ) -> Result<Self, Unwritable> {
        Ok(Self {
            memory,
            metadata: Some(page(memory, metadata)?),
            data,
            current: None,
        })
    }

    /// Data whose metadata page the device must not access.
    pub(crate) fn of_data(memory: &'a GuestMemoryMmap, data: &'a [GuestAddress]) -> Self {
        Self {
            memory,
            metadata: None,
            data,
            current: None,
        }
    }

    fn metadata(&self) -> Result<&VolatileSlice<'a>, Unwritable> {
        self.metadata.as_ref().ok_or(Unwritable::NoPage)
    }

    /// Copies `words` to `position`, across any number of pages.
    #[cold]
    fn put_any(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable> {
        let (mut position, mut rest) = (position, words);
        while !rest.is_empty() {
            if size_of_val(rest) > PAGE_SIZE {
                let now = self.put_run(position, rest.as_bytes())?;
                position = position.wrapping_add(now as u64);
                rest = rest.split_at(now / WORD).1;
                continue;
            }
            let slice = self.look_up(position / PAGE)?;
            let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
            let (now, later) = rest.split_at(rest.len().min((PAGE_SIZE - offset) / WORD));
            if now.len() <= SHORT {
                put_short(slice, offset, now)?;
            } else {
                let place = slice.offset(offset).map_err(Unwritable::Beyond)?;
                place.copy_from(now.as_bytes());
            }
            position = position.wrapping_add(size_of_val(now) as u64);
            rest = later;
        }
        Ok(())
    }

    /// Copies a prefix of `bytes` to `position` at once, as long as the pages from there on are
    /// contiguous in memory; returns its length, a multiple of 8.
    fn put_run(&mut self, position: u64, bytes: &[u8]) -> Result<usize, Unwritable> {
        let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
        let number = (position / PAGE).checked_rem(self.data.len() as u64);
        let from = number
            .and_then(|number| usize::try_from(number).ok())
            .and_then(|number| self.data.get(number..))
            .unwrap_or_default();
        let first = from.first().ok_or(Unwritable::NoPage)?;
        let wanted = (offset + bytes.len()).div_ceil(PAGE_SIZE);
        let run = from
            .iter()
            .zip((first.0..).step_by(PAGE_SIZE))
            .take(wanted)
            .take_while(|(page, next)| page.0 == *next)
            .count();
        let now = bytes.len().min(run * PAGE_SIZE - offset);
        let mut rest = bytes.split_at(now).0;
        let start = GuestAddress(first.0.wrapping_add(offset as u64));
        for slice in self.memory.get_slices(start, now) {
            let slice = slice.map_err(Unwritable::Unmapped)?;
            slice.copy_from(rest);
            rest = rest.split_at(rest.len().min(slice.len())).1;
        }
        Ok(now)
    }

    /// The data page with this number, modulo their number.
    fn look_up(&mut self, number: u64) -> Result<VolatileSlice<'a>, Unwritable> {
        if let Some((held, slice)) = self.current
            && held == number
        {
            return Ok(slice);
        }
        let index = number.checked_rem(self.data.len() as u64);
        let address = index
            .and_then(|index| usize::try_from(index).ok())
            .and_then(|index| self.data.get(index))
            .ok_or(Unwritable::NoPage)?;
        let slice = page(self.memory, *address)?;
        self.current = Some((number, slice));
        Ok(slice)
    }
}

impl Pages for GuestPages<'_> {
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable> {
        let value = self.metadata()?.load::<u64>(field, order);
        value.map(u64::from_le).map_err(Unwritable::Beyond)
    }

    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable> {
        let stored = self.metadata()?.store(value.to_le(), field, order);
        stored.map_err(Unwritable::Beyond)
    }

    fn store_half(&self, field: usize, value: u32, order: Ordering) -> Result<(), Unwritable> {
        let stored = self.metadata()?.store(value.to_le(), field, order);
        stored.map_err(Unwritable::Beyond)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }

    #[inline]
    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable> {
        // Less than a page, so it fits any integer.
        let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
        match self.current {
            Some((held, slice))
                if held == position / PAGE
                    && words.len() <= SHORT
                    && offset + size_of_val(words) <= PAGE_SIZE =>
            {
                put_short(slice, offset, words)
            }
            _ => self.put_any(position, words),
        }
    }
}

#[inline]
fn put_short(slice: VolatileSlice<'_>, offset: usize, words: &[u64]) -> Result<(), Unwritable> {
    for (at, &word) in (offset..).step_by(WORD).zip(words) {
        let place = slice.get_atomic_ref::<AtomicU64>(at);
        place
            .map_err(Unwritable::Beyond)?
            .store(word, Ordering::Relaxed);
    }
    Ok(())
}

/// One page of guest memory.
pub(crate) fn page(
    memory: &GuestMemoryMmap,
    address: GuestAddress,
) -> Result<VolatileSlice<'_>, Unwritable> {
    memory
        .get_slice(address, PAGE_SIZE)
        .map_err(Unwritable::Unmapped)
}
