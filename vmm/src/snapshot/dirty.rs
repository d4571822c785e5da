//! Tracks the pages written since the last snapshot. KVM logs the guest's writes, and the PMU device marks its own
//! writes in bitmaps. The VMM itself writes to guest memory only before the guest boots.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::VmFd;
use vm_memory::bitmap::{AtomicBitmap, BS, Bitmap};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestRegionCollectionError, MemoryRegionAddress, VolatileSlice,
};

use super::id::Id;
use super::memory::{PAGE, Run};

/// The reason why a diff against a base is not possible.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiffError {
    /// The machine does not track writes.
    #[error("the machine does not track which pages are written: start it with --track-dirty")]
    Untracked,
    /// Writes are tracked since a different snapshot.
    #[error(
        "this base is not the machine's last snapshot: --diff must be the directory of the last one; \
         without it, omit --diff"
    )]
    Base,
    /// The machine has had no snapshot since it started, or since its last reset.
    #[error("no snapshot was taken since the machine was started or reset: omit --diff")]
    None,
    /// KVM's log cannot be read.
    #[error("KVM cannot report which pages the guest has written")]
    Log(#[source] kvm_ioctls::Error),
}

/// A bitmap with one bit per page of a region.
type Pages = Vec<u64>;

/// Tracks the written pages of a machine's regions. The regions are in the order of KVM's slots.
#[derive(Debug)]
pub(crate) struct Tracker {
    regions: Vec<Region>,
    since: Mutex<Since>,
}

#[derive(Debug)]
struct Region {
    start: GuestAddress,
    len: u64,
    /// Pages that the device has written.
    marked: Arc<AtomicBitmap>,
}

#[derive(Debug, Default)]
struct Since {
    /// The id of the last complete snapshot.
    base: Option<Id>,
    /// For each region, the pages written since `base`.
    pages: Vec<Pages>,
}

impl Tracker {
    /// Tracks `memories`. If there is a `base`, `memories` must have the contents of that snapshot.
    pub(crate) fn new(memories: &[&GuestMemoryMmap], base: Option<Id>) -> Self {
        let regions = memories.iter().flat_map(|memory| memory.iter());
        let regions: Vec<Region> = regions.map(Region::new).collect();
        let since = Since { base, pages: regions.iter().map(Region::none).collect() };
        Self { regions, since: Mutex::new(since) }
    }

    /// Wraps one of the tracked memories for a device, so that the device's writes are marked.
    ///
    /// # Errors
    /// The memory is not tracked, which is a bug.
    pub(crate) fn watched(
        &self,
        memory: &GuestMemoryMmap,
    ) -> Result<GuestRegionCollection<Watched>, GuestRegionCollectionError> {
        let regions = self.regions.iter().filter_map(|region| {
            memory.find_region(region.start)?;
            Some(Watched {
                memory: memory.clone(),
                start: region.start,
                len: region.len,
                marked: Arc::clone(&region.marked),
            })
        });
        GuestRegionCollection::from_regions(regions.collect())
    }

    /// Checks that writes are tracked since the snapshot `base`.
    ///
    /// # Errors
    /// [`DiffError`].
    pub(crate) fn check(&self, base: Id) -> Result<(), DiffError> {
        match self.since().base {
            Some(last) if last == base => Ok(()),
            Some(_) => Err(DiffError::Base),
            None => Err(DiffError::None),
        }
    }

    /// Returns the pages that were written since the base, as runs of pages in the memory file. Call this while the
    /// vCPUs of `vm` and the device are stopped.
    ///
    /// # Errors
    /// [`DiffError::Log`].
    pub(crate) fn changed(&self, vm: &VmFd) -> Result<Vec<Run>, DiffError> {
        let mut since = self.since();
        for ((slot, region), pages) in (0u32..).zip(&self.regions).zip(&mut since.pages) {
            let len = usize::try_from(region.len).unwrap_or(usize::MAX);
            let log = vm.get_dirty_log(slot, len).map_err(DiffError::Log)?;
            merge(pages, &log);
            merge(pages, &region.marked.get_and_reset());
        }
        let mut runs = Vec::new();
        let mut first = 0;
        for (region, pages) in self.regions.iter().zip(&since.pages) {
            let count = region.pages();
            push_runs(&mut runs, first, pages, count);
            first += count;
        }
        Ok(runs)
    }

    /// Makes the snapshot `id` the base of the next diff.
    pub(crate) fn taken(&self, id: Id) {
        let mut since = self.since();
        since.base = Some(id);
        since.pages = self.regions.iter().map(Region::none).collect();
    }

    /// Drops the base, because the guest boots again in new memory. No diff is possible until the next full
    /// snapshot, which clears the recorded pages.
    pub(crate) fn forget(&self) {
        let mut since = self.since();
        since.base = None;
    }

    fn since(&self) -> MutexGuard<'_, Since> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn merge(pages: &mut Pages, others: &[u64]) {
    for (word, other) in pages.iter_mut().zip(others) {
        *word |= other;
    }
}

/// Adds the written pages of a region to `runs`. `first` is the region's first page in the memory file.
fn push_runs(runs: &mut Vec<Run>, first: u64, pages: &Pages, count: u64) {
    let written = (0..count).filter(|page| {
        let word = usize::try_from(page / 64).ok();
        let word = word.and_then(|word| pages.get(word)).copied();
        word.is_some_and(|word| word >> (page % 64) & 1 != 0)
    });
    for page in written {
        match runs.last_mut() {
            Some(Run(start, length)) if *start + *length == first + page => *length += 1,
            _ => runs.push(Run(first + page, 1)),
        }
    }
}

const PAGE_BYTES: NonZeroUsize = match NonZeroUsize::new(PAGE) {
    Some(bytes) => bytes,
    None => NonZeroUsize::MIN,
};

impl Region {
    fn new<R: GuestMemoryRegion>(region: &R) -> Self {
        let len = usize::try_from(region.len()).unwrap_or(usize::MAX);
        Self { start: region.start_addr(), len: region.len(), marked: Arc::new(AtomicBitmap::new(len, PAGE_BYTES)) }
    }

    fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE as u64)
    }

    fn none(&self) -> Pages {
        let words = self.pages().div_ceil(64);
        vec![0; usize::try_from(words).unwrap_or_default()]
    }
}

/// A region of guest memory that marks the pages that the device writes.
#[derive(Debug)]
pub(crate) struct Watched {
    /// Keeps the region mapped.
    memory: GuestMemoryMmap,
    start: GuestAddress,
    len: u64,
    marked: Arc<AtomicBitmap>,
}

impl GuestMemoryRegion for Watched {
    type B = AtomicBitmap;

    fn len(&self) -> u64 {
        self.len
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, AtomicBitmap> {
        self.marked.slice_at(0)
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, AtomicBitmap>>, GuestMemoryError> {
        let region = self.memory.find_region(self.start);
        let region = region.ok_or(GuestMemoryError::InvalidGuestAddress(self.start))?;
        let slice = region.get_slice(offset, count)?;
        let at = usize::try_from(offset.0).unwrap_or(usize::MAX);
        let bitmap = self.marked.slice_at(at);
        #[expect(unsafe_code, reason = "a slice with a different bitmap")]
        // SAFETY: the pointer and the length come from `slice`, and `self.memory` keeps these bytes mapped for as long
        // as `self` is borrowed.
        let slice = unsafe { VolatileSlice::with_bitmap(slice.ptr_guard_mut().as_ptr(), slice.len(), bitmap, None) };
        Ok(slice)
    }
}

impl GuestMemoryRegionBytes for Watched {}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    fn memories() -> [GuestMemoryMmap; 2] {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 100 * PAGE)]);
        let window = GuestMemoryMmap::from_ranges(&[(GuestAddress(1 << 32), 4 * PAGE)]);
        [memory, window].map(|memory| memory.expect("pages"))
    }

    fn pages(tracker: &Tracker) -> Vec<Run> {
        let mut since = tracker.since();
        for (region, pages) in tracker.regions.iter().zip(&mut since.pages) {
            merge(pages, &region.marked.get_and_reset());
        }
        let mut runs = Vec::new();
        push_runs(&mut runs, 0, &since.pages[0], 100);
        push_runs(&mut runs, 100, &since.pages[1], 4);
        runs
    }

    #[test]
    fn writes_through_watched_memory_are_marked_page_by_page() {
        let [memory, window] = memories();
        let tracker = Tracker::new(&[&memory, &window], None);
        let watched = tracker.watched(&memory).expect("a region");
        let page = |page: u64| GuestAddress(page * PAGE as u64);
        watched.write_obj(7u8, page(3)).expect("in range");
        // A write that crosses the end of a page.
        let end = GuestAddress(page(65).0 - 1);
        watched.write_obj([8u8; 2], end).expect("in range");
        let watched = tracker.watched(&window).expect("a region");
        let at = GuestAddress(1 << 32);
        watched.write_obj(9u8, at).expect("in range");
        assert_eq!(memory.read_obj::<u8>(page(3)).expect("in range"), 7);
        assert_eq!(window.read_obj::<u8>(at).expect("in range"), 9);
        // A read does not mark a page.
        assert_eq!(watched.read_obj::<u8>(GuestAddress(at.0 + 4096)).expect("in range"), 0);
        assert_eq!(pages(&tracker), [Run(3, 1), Run(64, 2), Run(100, 1)]);
    }

    #[test]
    fn pages_of_a_snapshot_that_failed_are_in_the_next() {
        let [memory, window] = memories();
        let tracker = Tracker::new(&[&memory, &window], Some(Id(1)));
        let watched = tracker.watched(&memory).expect("a region");
        let write = |page: u64| {
            let written = watched.write_obj(1u8, GuestAddress(page * PAGE as u64));
            written.expect("in range");
        };
        write(1);
        assert_eq!(pages(&tracker), [Run(1, 1)]);
        // This snapshot failed, so it was not reported to the tracker.
        write(5);
        tracker.check(Id(1)).expect("still the base");
        assert_eq!(pages(&tracker), [Run(1, 1), Run(5, 1)]);
        tracker.taken(Id(3));
        write(6);
        tracker.check(Id(3)).expect("the base now");
        assert!(matches!(tracker.check(Id(1)), Err(DiffError::Base)));
        assert_eq!(pages(&tracker), [Run(6, 1)]);
    }

    #[test]
    fn machine_that_was_reset_has_no_base() {
        let [memory, window] = memories();
        let tracker = Tracker::new(&[&memory, &window], Some(Id(1)));
        tracker.taken(Id(2));
        tracker.forget();
        for base in [Id(1), Id(2)] {
            assert!(matches!(tracker.check(base), Err(DiffError::None)));
        }
    }
}
