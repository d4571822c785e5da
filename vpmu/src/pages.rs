//! The memory of a ring or an AUX area. The ring and area code accesses memory only through [`Pages`], so that
//! tests can substitute a memory model. Implementations of the trait make no decisions: even the memory ordering
//! is passed by the caller.

use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, VolatileMemoryError};
use zerocopy::IntoBytes;

use crate::abi::PAGE_SIZE;
use crate::memory::{Page, View};

const PAGE: u64 = PAGE_SIZE as u64;
const WORD: usize = size_of::<u64>();
/// The largest number of words that are copied word by word. The source is a record that was stored word by word just
/// before the copy. A CPU can forward a pending store only to a load that is not wider than the store, so wider loads
/// would stall.
const SHORT: usize = 16;

/// A page of a ring or area is not writable guest memory, or is no longer writable guest memory.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unwritable {
    #[error("not guest memory")]
    Unmapped(#[source] GuestMemoryError),
    #[error("beyond the page")]
    Beyond(#[source] VolatileMemoryError),
    #[error("there is no such page")]
    NoPage,
}

/// The pages of one ring or area: the metadata page, shared with the reader, and the data pages.
pub(crate) trait Pages {
    /// Loads the word at `field` of the metadata page.
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable>;

    /// Stores the word at `field` of the metadata page.
    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable>;

    /// Stores the half word at `field` of the metadata page.
    fn store_half(&self, field: usize, value: u32, order: Ordering) -> Result<(), Unwritable>;

    /// A fence between accesses to the metadata page.
    fn fence(&self, order: Ordering);

    /// Copies `words` to the data pages, starting at `position` modulo the size of the data. `position` is a multiple
    /// of 8.
    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable>;
}

/// Pages of guest memory. This value remembers the page that was last written to, so that a burst of records
/// needs one look-up per page, not per record. A page is marked as dirty after the last write to it: when the next
/// page is looked up, or when this value is dropped.
#[derive(Debug)]
pub(crate) struct GuestPages<'a> {
    memory: &'a View<'a>,
    /// The metadata page. `None` if the device must not access it.
    metadata: Option<(GuestAddress, Page<'a>)>,
    /// Whether the metadata page has been written to.
    stored: Cell<bool>,
    /// The data pages. Their number is zero or a power of two.
    data: &'a [GuestAddress],
    /// The page that was last written to, and its number.
    current: Option<(u64, Page<'a>)>,
    /// Whether the memory has a bitmap of written pages.
    watched: bool,
}

impl<'a> GuestPages<'a> {
    /// # Errors
    /// The metadata page is not guest memory.
    pub(crate) fn new(
        memory: &'a View<'a>,
        metadata: GuestAddress,
        data: &'a [GuestAddress],
    ) -> Result<Self, Unwritable> {
        Ok(Self {
            memory,
            metadata: Some((metadata, page(memory, metadata)?)),
            stored: Cell::new(false),
            data,
            current: None,
            watched: memory.is_watched(),
        })
    }

    /// Creates pages whose metadata page the device must not access.
    pub(crate) fn of_data(memory: &'a View<'a>, data: &'a [GuestAddress]) -> Self {
        Self { memory, metadata: None, stored: Cell::new(false), data, current: None, watched: memory.is_watched() }
    }

    fn metadata(&self) -> Result<Page<'a>, Unwritable> {
        self.metadata.map(|(_, page)| page).ok_or(Unwritable::NoPage)
    }

    /// Returns the metadata page for writing, and records that the page must be marked as dirty.
    fn stored(&self) -> Result<Page<'a>, Unwritable> {
        self.stored.set(true);
        self.metadata()
    }

    /// Marks the page last written to.
    fn mark(&self) {
        if let Some((number, _)) = self.current
            && let Some(address) = self.address(number)
        {
            self.memory.mark(address, PAGE_SIZE);
        }
    }

    /// Returns the address of data page `number`. `number` is taken modulo the number of data pages.
    fn address(&self, number: u64) -> Option<GuestAddress> {
        let index = number.checked_rem(self.data.len() as u64)?;
        self.data.get(usize::try_from(index).ok()?).copied()
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
            let page = self.look_up(position / PAGE)?;
            let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
            let (now, later) = rest.split_at(rest.len().min((PAGE_SIZE - offset) / WORD));
            if now.len() <= SHORT {
                put_short(page, offset, now)?;
            } else {
                let place = page.bytes().offset(offset).map_err(Unwritable::Beyond)?;
                place.copy_from(now.as_bytes());
            }
            position = position.wrapping_add(size_of_val(now) as u64);
            rest = later;
        }
        Ok(())
    }

    /// Copies the first part of `bytes` to `position`: as much as fits into pages that are contiguous in memory.
    /// Returns the length of that part, which is a multiple of 8.
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
        let rest = bytes.split_at(now).0;
        let start = GuestAddress(first.0.wrapping_add(offset as u64));
        let written = self.memory.write(rest, start);
        written.map_err(Unwritable::Unmapped)?;
        Ok(now)
    }

    /// Returns data page `number`. `number` is taken modulo the number of data pages.
    #[inline]
    fn look_up(&mut self, number: u64) -> Result<Page<'a>, Unwritable> {
        match self.current {
            Some((held, page)) if held == number => Ok(page),
            _ => self.turn_to(number),
        }
    }

    fn turn_to(&mut self, number: u64) -> Result<Page<'a>, Unwritable> {
        let address = self.address(number).ok_or(Unwritable::NoPage)?;
        let page = page(self.memory, address)?;
        if self.watched {
            self.mark();
        }
        self.current = Some((number, page));
        Ok(page)
    }
}

impl Pages for GuestPages<'_> {
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable> {
        let word = self.metadata()?.word(field).ok_or(Unwritable::NoPage)?;
        Ok(u64::from_le(word.load(order)))
    }

    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable> {
        let word = self.stored()?.word(field).ok_or(Unwritable::NoPage)?;
        word.store(value.to_le(), order);
        Ok(())
    }

    fn store_half(&self, field: usize, value: u32, order: Ordering) -> Result<(), Unwritable> {
        let stored = self.stored()?.bytes().store(value.to_le(), field, order);
        stored.map_err(Unwritable::Beyond)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }

    #[inline]
    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable> {
        // The conversion cannot fail: the offset is less than a page.
        let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
        if words.len() > SHORT || offset + size_of_val(words) > PAGE_SIZE {
            return self.put_any(position, words);
        }
        let page = self.look_up(position / PAGE)?;
        put_short(page, offset, words)
    }
}

#[inline]
fn put_short(page: Page<'_>, offset: usize, words: &[u64]) -> Result<(), Unwritable> {
    let places = page.words(offset, words.len()).ok_or(Unwritable::NoPage)?;
    for (place, &word) in places.iter().zip(words) {
        place.store(word, Ordering::Relaxed);
    }
    Ok(())
}

impl Drop for GuestPages<'_> {
    fn drop(&mut self) {
        if !self.watched {
            return;
        }
        self.mark();
        if let (true, Some((page, _))) = (self.stored.get(), self.metadata) {
            self.memory.mark(page, PAGE_SIZE);
        }
    }
}

/// One page of guest memory. The caller must mark the page after writing to it.
pub(crate) fn page<'a>(memory: &'a View<'_>, address: GuestAddress) -> Result<Page<'a>, Unwritable> {
    memory.page(address).map_err(Unwritable::Unmapped)
}
