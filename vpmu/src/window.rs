//! The window: the VMM's memory for rings that outlive a reset, and its allocated pages. Knows
//! nothing of rings.

use std::collections::BTreeMap;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::abi::PAGE_SIZE;
use crate::memory::{Memory, View};

const PAGE: u64 = PAGE_SIZE as u64;

/// The owner of a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    Guest,
    Operator,
}

/// One region of memory, with its allocated runs of pages.
#[derive(Debug)]
pub(crate) struct Window {
    memory: Memory,
    /// Where the guest sees it.
    first: GuestAddress,
    pages: u32,
    /// The first page reserved for the operator.
    operators: u32,
    /// The first page of each run, and its length.
    taken: BTreeMap<u32, u32>,
}

impl Window {
    /// The window that `memory` is, of which the guest takes `guests` pages at most; `None` if it is not
    /// one region of whole pages.
    pub(crate) fn new<M>(memory: M, guests: u32) -> Option<Self>
    where
        M: GuestMemoryBackend + Send + Sync + 'static,
    {
        let mut regions = memory.iter();
        let (region, None) = (regions.next()?, regions.next()) else {
            return None;
        };
        let (first, len) = (region.start_addr(), region.len());
        if !first.0.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return None;
        }
        let pages = u32::try_from(len / PAGE).ok()?;
        drop(regions);
        Some(Self {
            memory: Memory::from(memory),
            first,
            pages,
            operators: guests.min(pages),
            taken: BTreeMap::new(),
        })
    }

    /// Its memory alone.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// `guest` with the window in it.
    pub(crate) fn beside(&self, guest: &Memory) -> Memory {
        guest.with(&self.memory, self.first, u64::from(self.pages) * PAGE)
    }

    /// Whether one of its pages begins or ends in memory of the guest's.
    pub(crate) fn overlaps(&self, guest: &View<'_>) -> bool {
        let pages = (0..u64::from(self.pages)).map(|page| self.first.0 + page * PAGE);
        pages
            .flat_map(|page| [page, page + PAGE - 1])
            .any(|byte| guest.is_readable(GuestAddress(byte), 1))
    }

    /// Allocates the first run of `pages` free pages and zeroes them; `None` if there is none. The
    /// operator has reserved pages, and allocates those first.
    pub(crate) fn take(&mut self, pages: u32, holder: Holder) -> Option<Vec<GuestAddress>> {
        let first = match holder {
            Holder::Guest => self.first_fit(pages, 0, self.operators),
            Holder::Operator => self
                .first_fit(pages, self.operators, self.pages)
                .or_else(|| self.first_fit(pages, 0, self.pages)),
        };
        let first = first?;
        let base = self.first.0 + u64::from(first) * PAGE;
        let addresses = (0..u64::from(pages)).map(|page| GuestAddress(base + page * PAGE));
        let addresses: Vec<GuestAddress> = addresses.collect();
        let view = self.memory.view();
        for &page in &addresses {
            view.write(&[0; PAGE_SIZE], page).ok()?;
        }
        self.taken.insert(first, pages);
        Some(addresses)
    }

    /// Takes the run of `pages` pages that begins with page `first`, with the bytes that are there; `None`
    /// where `holder` could not have been given it.
    pub(crate) fn retake(
        &mut self,
        first: u32,
        pages: u32,
        holder: Holder,
    ) -> Option<Vec<GuestAddress>> {
        let end = first.checked_add(pages)?;
        let most = match holder {
            Holder::Guest => self.operators,
            Holder::Operator => self.pages,
        };
        let before = self.taken.range(..end).next_back();
        let free = before.is_none_or(|(&other, &len)| other + len <= first);
        if pages == 0 || end > most || !free {
            return None;
        }
        self.taken.insert(first, pages);
        let base = self.first.0 + u64::from(first) * PAGE;
        let addresses = (0..u64::from(pages)).map(|page| GuestAddress(base + page * PAGE));
        Some(addresses.collect())
    }

    /// Frees the run that begins with page `first`.
    pub(crate) fn give_back(&mut self, first: u32) {
        self.taken.remove(&first);
    }

    /// The number of the page at `address`, if it is in the window.
    pub(crate) fn page(&self, address: GuestAddress) -> Option<u32> {
        let offset = address.checked_offset_from(self.first)?;
        let page = u32::try_from(offset / PAGE).ok()?;
        (page < self.pages).then_some(page)
    }

    /// The first of `pages` free ones between the pages `from` and `until`.
    fn first_fit(&self, pages: u32, from: u32, until: u32) -> Option<u32> {
        let mut free = from;
        for (&first, &len) in &self.taken {
            if first.saturating_sub(free) >= pages {
                break;
            }
            free = free.max(first + len);
        }
        (pages > 0 && until.saturating_sub(free) >= pages).then_some(free)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestMemoryMmap};

    use super::*;

    const START: u64 = 0x10_0000;

    fn memory(pages: usize) -> GuestMemoryMmap {
        let range = (GuestAddress(START), pages * PAGE_SIZE);
        GuestMemoryMmap::from_ranges(&[range]).expect("memory")
    }

    fn first(taken: Option<Vec<GuestAddress>>) -> Option<u64> {
        taken.map(|pages| (pages[0].0 - START) / PAGE)
    }

    #[test]
    fn the_first_run_that_fits_is_taken() {
        let mut window = Window::new(memory(10), u32::MAX).expect("a window");
        assert_eq!(first(window.take(3, Holder::Guest)), Some(0));
        assert_eq!(first(window.take(3, Holder::Guest)), Some(3));
        assert_eq!(first(window.take(3, Holder::Guest)), Some(6));
        assert_eq!(first(window.take(3, Holder::Guest)), None);
        window.give_back(3);
        assert_eq!(first(window.take(4, Holder::Guest)), None);
        assert_eq!(first(window.take(1, Holder::Guest)), Some(3));
        assert_eq!(first(window.take(2, Holder::Guest)), Some(4));
        assert_eq!(first(window.take(2, Holder::Guest)), None);
        assert_eq!(first(window.take(1, Holder::Guest)), Some(9));
        assert_eq!(first(window.take(0, Holder::Guest)), None);
        assert_eq!(first(window.take(u32::MAX, Holder::Guest)), None);
    }

    #[test]
    fn guest_leaves_the_operators_pages() {
        let mut window = Window::new(memory(10), 6).expect("a window");
        assert_eq!(first(window.take(7, Holder::Guest)), None);
        assert_eq!(first(window.take(2, Holder::Operator)), Some(6));
        assert_eq!(first(window.take(3, Holder::Operator)), Some(0));
        assert_eq!(first(window.take(3, Holder::Guest)), Some(3));
        assert_eq!(first(window.take(1, Holder::Guest)), None);
        assert_eq!(first(window.take(2, Holder::Operator)), Some(8));
        assert_eq!(first(window.take(1, Holder::Operator)), None);
    }

    #[test]
    fn pages_are_taken_blank() {
        let memory = memory(2);
        let mut window = Window::new(memory.clone(), u32::MAX).expect("a window");
        let old = [7; 2 * PAGE_SIZE];
        memory
            .write_slice(&old, GuestAddress(START))
            .expect("in memory");
        let pages = window.take(1, Holder::Guest).expect("free");
        let mut bytes = [1; 2 * PAGE_SIZE];
        memory.read_slice(&mut bytes, pages[0]).expect("in memory");
        let (taken, free) = bytes.split_at(PAGE_SIZE);
        assert!(taken == [0; PAGE_SIZE] && free == [7; PAGE_SIZE]);
    }

    #[test]
    fn pages_of_the_window_have_numbers() {
        let window = Window::new(memory(2), u32::MAX).expect("a window");
        let numbers = [START - 1, START, START + PAGE, START + 2 * PAGE, u64::MAX]
            .map(|address| window.page(GuestAddress(address)));
        assert_eq!(numbers, [None, Some(0), Some(1), None, None]);
    }

    #[test]
    fn window_of_several_regions_or_partial_pages_is_refused() {
        let memory = |ranges: &[(u64, usize)]| {
            let ranges: Vec<_> = ranges
                .iter()
                .map(|&(at, len)| (GuestAddress(at), len))
                .collect();
            GuestMemoryMmap::<()>::from_ranges(&ranges).expect("memory")
        };
        assert!(Window::new(GuestMemoryMmap::<()>::new(), u32::MAX).is_none());
        assert!(Window::new(memory(&[(0, 4096), (0x10_0000, 4096)]), u32::MAX).is_none());
        assert!(Window::new(memory(&[(512, 4096)]), u32::MAX).is_none());
        assert!(Window::new(memory(&[(0, 4095)]), u32::MAX).is_none());
        assert!(Window::new(memory(&[(0, 4096)]), u32::MAX).is_some());
    }

    proptest! {
        #[test]
        fn no_page_is_taken_twice_nor_forgotten(steps in prop::collection::vec((0_u32..6, any::<prop::sample::Index>()), 0..60)) {
            let mut window = Window::new(memory(16), u32::MAX).expect("a window");
            let mut held: Vec<Vec<u32>> = Vec::new();
            for (pages, which) in steps {
                if pages == 0 {
                    if !held.is_empty() {
                        let run = held.swap_remove(which.index(held.len()));
                        window.give_back(run[0]);
                    }
                    continue;
                }
                let free = |first: u32| !held.iter().flatten().any(|&page| (first..first + pages).contains(&page));
                let fit = (0..=16 - pages).find(|&first| free(first));
                let taken = window.take(pages, Holder::Guest);
                let taken = taken.map(|run| run.iter().filter_map(|&page| window.page(page)).collect::<Vec<_>>());
                prop_assert_eq!(&taken, &fit.map(|first| (first..first + pages).collect()));
                held.extend(taken);
            }
        }
    }
}
