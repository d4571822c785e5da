//! The window, which is VMM memory for rings that survive a reset. This module only tracks which pages are allocated,
//! and does not depend on rings.

use std::collections::BTreeMap;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::abi::PAGE_SIZE;
use crate::locks::{Lock, WINDOW};
use crate::memory::{Memory, View};
use crate::work;

const PAGE: u64 = PAGE_SIZE as u64;

/// The owner of a run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    Guest,
    Operator,
}

/// The first page and the length of each allocated run.
type Taken = Lock<BTreeMap<u32, u32>, WINDOW>;

/// Contiguous pages of the window that are allocated. They are freed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Run {
    first: u32,
    pages: u32,
    /// Guest-physical address of the first page.
    start: GuestAddress,
    taken: Arc<Taken>,
}

/// One region of memory, and the runs of pages that are allocated in it.
#[derive(Debug)]
pub(crate) struct Window {
    memory: Memory,
    /// Guest-physical address of the first page.
    first: GuestAddress,
    pages: u32,
    /// The first page reserved for the operator.
    operators: u32,
    taken: Arc<Taken>,
}

impl Window {
    /// Creates a window in `memory`, with at most `guests` pages for the guest. Returns `None` if `memory` is not one
    /// region of whole pages.
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
            taken: Arc::new(Lock::new(BTreeMap::new())),
        })
    }

    /// The window's memory, without the guest's.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// `guest` with the window added.
    pub(crate) fn beside(&self, guest: &Memory) -> Memory {
        guest.with(&self.memory, self.first, u64::from(self.pages) * PAGE)
    }

    /// Whether the first or last byte of one of the window's pages is in guest memory.
    pub(crate) fn overlaps(&self, guest: &View<'_>) -> bool {
        let pages = (0..u64::from(self.pages)).map(|page| self.first.0 + page * PAGE);
        pages.flat_map(|page| [page, page + PAGE - 1]).any(|byte| guest.is_readable(GuestAddress(byte), 1))
    }

    /// Allocates the first run of `pages` contiguous free pages, and zeroes them. Returns `None` if there is no such
    /// run. If `holder` is the operator, first searches the pages that are reserved for the operator.
    pub(crate) fn take(&mut self, pages: u32, holder: Holder) -> Option<Run> {
        let first = match holder {
            Holder::Guest => self.first_fit(pages, 0, self.operators),
            Holder::Operator => {
                self.first_fit(pages, self.operators, self.pages).or_else(|| self.first_fit(pages, 0, self.pages))
            }
        };
        let run = self.run(first?, pages);
        let view = self.memory.view();
        work::charge(pages.into());
        for page in run.addresses() {
            view.write(&[0; PAGE_SIZE], page).ok()?;
        }
        Some(run)
    }

    /// Allocates the run of `pages` pages that starts with page `first`, and keeps their contents. Returns `None` if
    /// one of the pages is in use or not available to `holder`.
    pub(crate) fn retake(&mut self, first: u32, pages: u32, holder: Holder) -> Option<Run> {
        let end = first.checked_add(pages)?;
        let most = match holder {
            Holder::Guest => self.operators,
            Holder::Operator => self.pages,
        };
        let taken = self.taken.lock();
        let before = taken.range(..end).next_back();
        let free = before.is_none_or(|(&other, &len)| other + len <= first);
        drop(taken);
        (pages > 0 && end <= most && free).then(|| self.run(first, pages))
    }

    /// Allocates `pages` pages, starting with page `first`. The caller must have checked that they are free.
    fn run(&self, first: u32, pages: u32) -> Run {
        self.taken.lock().insert(first, pages);
        Run {
            first,
            pages,
            start: GuestAddress(self.first.0 + u64::from(first) * PAGE),
            taken: Arc::clone(&self.taken),
        }
    }

    /// Returns the first page of the first run of `pages` free pages. Searches the pages from `from` to `until` - 1.
    fn first_fit(&self, pages: u32, from: u32, until: u32) -> Option<u32> {
        let mut free = from;
        let taken = self.taken.lock();
        work::charge_examined(taken.len());
        for (&first, &len) in &*taken {
            if first.saturating_sub(free) >= pages {
                break;
            }
            free = free.max(first + len);
        }
        (pages > 0 && until.saturating_sub(free) >= pages).then_some(free)
    }
}

impl Run {
    /// The number of the first page.
    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    /// The pages, in order.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = GuestAddress> + use<> {
        let start = self.start.0;
        (0..u64::from(self.pages)).map(move |page| GuestAddress(start + page * PAGE))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.taken.lock().remove(&self.first);
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

    /// A window with its allocated runs.
    struct Allocated {
        window: Window,
        runs: Vec<Run>,
    }

    impl Allocated {
        fn new(guests: u32) -> Self {
            Self { window: Window::new(memory(10), guests).expect("a window"), runs: Vec::new() }
        }

        /// Allocates `pages` pages. Returns the number of the first page.
        fn take(&mut self, pages: u32, holder: Holder) -> Option<u32> {
            let run = self.window.take(pages, holder)?;
            let first = run.first();
            self.runs.push(run);
            Some(first)
        }
    }

    #[test]
    fn first_run_that_fits_is_taken() {
        let mut window = Allocated::new(u32::MAX);
        assert_eq!(window.take(3, Holder::Guest), Some(0));
        assert_eq!(window.take(3, Holder::Guest), Some(3));
        assert_eq!(window.take(3, Holder::Guest), Some(6));
        assert_eq!(window.take(3, Holder::Guest), None);
        drop(window.runs.remove(1));
        assert_eq!(window.take(4, Holder::Guest), None);
        assert_eq!(window.take(1, Holder::Guest), Some(3));
        assert_eq!(window.take(2, Holder::Guest), Some(4));
        assert_eq!(window.take(2, Holder::Guest), None);
        assert_eq!(window.take(1, Holder::Guest), Some(9));
        assert_eq!(window.take(0, Holder::Guest), None);
        assert_eq!(window.take(u32::MAX, Holder::Guest), None);
    }

    #[test]
    fn guest_leaves_the_operators_pages() {
        let mut window = Allocated::new(6);
        assert_eq!(window.take(7, Holder::Guest), None);
        assert_eq!(window.take(2, Holder::Operator), Some(6));
        assert_eq!(window.take(3, Holder::Operator), Some(0));
        assert_eq!(window.take(3, Holder::Guest), Some(3));
        assert_eq!(window.take(1, Holder::Guest), None);
        assert_eq!(window.take(2, Holder::Operator), Some(8));
        assert_eq!(window.take(1, Holder::Operator), None);
    }

    #[test]
    fn pages_are_taken_blank() {
        let memory = memory(2);
        let mut window = Window::new(memory.clone(), u32::MAX).expect("a window");
        let old = [7; 2 * PAGE_SIZE];
        memory.write_slice(&old, GuestAddress(START)).expect("in memory");
        let run = window.take(1, Holder::Guest).expect("free");
        assert_eq!(run.addresses().collect::<Vec<_>>(), [GuestAddress(START)]);
        let mut bytes = [1; 2 * PAGE_SIZE];
        memory.read_slice(&mut bytes, GuestAddress(START)).expect("in memory");
        let (taken, free) = bytes.split_at(PAGE_SIZE);
        assert!(taken == [0; PAGE_SIZE] && free == [7; PAGE_SIZE]);
    }

    #[test]
    fn run_is_retaken_only_while_its_pages_are_free() {
        let mut window = Window::new(memory(4), 3).expect("a window");
        let run = window.retake(1, 2, Holder::Guest).expect("free");
        let pages: Vec<_> = run.addresses().collect();
        assert_eq!(pages, [1, 2].map(|page| GuestAddress(START + page * PAGE)));
        assert_eq!(run.first(), 1);
        assert!(window.retake(0, 2, Holder::Operator).is_none());
        assert!(window.retake(2, 1, Holder::Guest).is_none());
        assert!(window.retake(3, 1, Holder::Guest).is_none());
        drop(run);
        assert!(window.retake(2, 1, Holder::Guest).is_some());
    }

    #[test]
    fn window_of_several_regions_or_partial_pages_is_refused() {
        let memory = |ranges: &[(u64, usize)]| {
            let ranges: Vec<_> = ranges.iter().map(|&(at, len)| (GuestAddress(at), len)).collect();
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
            let mut held: Vec<Run> = Vec::new();
            for (pages, which) in steps {
                if pages == 0 {
                    if !held.is_empty() {
                        drop(held.swap_remove(which.index(held.len())));
                    }
                    continue;
                }
                let free = |first: u32| held.iter().all(|run| run.first + run.pages <= first || first + pages <= run.first);
                let fit = (0..=16 - pages).find(|&first| free(first));
                let taken = window.take(pages, Holder::Guest);
                prop_assert_eq!(taken.as_ref().map(|run| (run.first, run.pages)), fit.map(|first| (first, pages)));
                held.extend(taken);
            }
        }
    }
}
