//! Guest memory of any type. The rest of the device does not depend on the VMM's memory type, because it accesses
//! memory through a [`View`]. After each write, a view marks the written bytes in the dirty bitmap of their region, so
//! that a live migration copies their pages again.

use std::any::TypeId;
use std::cmp::Reverse;
use std::fmt::{Debug, Formatter};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::bitmap::Bitmap;
use vm_memory::{
    AtomicAccess, Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend, GuestMemoryError,
    GuestMemoryRegion, Permissions, VolatileSlice,
};

use crate::abi::PAGE_SIZE;

const WORD: usize = size_of::<u64>();
const PAGE_WORDS: usize = PAGE_SIZE / WORD;

/// Guest memory that the VMM passes to the device. It can be any type that implements vm-memory's traits, with any
/// bitmap.
///
/// Addresses are guest-physical. The device also reads the guest's page tables through this memory. To create a
/// `Memory`, use `into` for memory whose regions are fixed, and [`Memory::space`] for memory whose regions change.
#[derive(Clone, Default)]
pub struct Memory(Arc<Parts>);

#[derive(Clone, Default)]
struct Parts {
    guest: Option<Backing>,
    /// The pages of the window. They take precedence over guest memory at the same addresses.
    window: Option<Extent>,
}

/// A range of guest-physical addresses that is backed by memory other than the guest's RAM.
#[derive(Clone)]
struct Extent {
    first: u64,
    len: u64,
    memory: Arc<Fixed>,
}

/// The VMM's memory with its type erased.
#[derive(Clone)]
enum Backing {
    Fixed(Arc<Fixed>),
    Changing(Arc<dyn Space>),
}

impl Memory {
    /// Memory whose regions may change while the device exists. Each access uses the current regions of `space`. If
    /// pages of a ring or area are removed, the device can no longer write some records, and counts these as lost. The
    /// driver can use added pages for rings and areas immediately.
    ///
    /// Pass vm-memory's `GuestMemoryAtomic`. Do not pass an `Arc` of a guest memory, because all vCPUs would contend
    /// for its reference count.
    #[must_use]
    pub fn space<S>(space: S) -> Self
    where
        S: GuestAddressSpace + Send + Sync + 'static,
    {
        Self::new(Backing::Changing(Arc::new(Changing(space))))
    }

    fn new(guest: Backing) -> Self {
        Self(Arc::new(Parts { guest: Some(guest), window: None }))
    }

    /// Returns the same memory with a separate reference count, so that threads do not contend for the cache line of a
    /// shared count.
    pub(crate) fn apart(&self) -> Self {
        Self(Arc::new(Parts::clone(&self.0)))
    }

    /// Returns memory that maps `window` at the `len` guest-physical addresses starting at `first`, and `self` at all
    /// other addresses. The regions of `window` must be fixed.
    pub(crate) fn with(&self, window: &Self, first: GuestAddress, len: u64) -> Self {
        let extent = match &window.0.guest {
            Some(Backing::Fixed(memory)) => Some(Extent { first: first.0, len, memory: Arc::clone(memory) }),
            Some(Backing::Changing(_)) | None => None,
        };
        Self(Arc::new(Parts { guest: self.0.guest.clone(), window: extent }))
    }

    /// Returns a view of the current regions for one step of work. Regions that are removed during this step stay
    /// mapped until the view is dropped.
    #[inline]
    pub(crate) fn view(&self) -> View<'_> {
        let Parts { guest, window } = &*self.0;
        View {
            guest: match guest {
                Some(Backing::Fixed(fixed)) => Held::Fixed(fixed),
                Some(Backing::Changing(space)) => Held::Snapshot(space.hold()),
                None => Held::Nothing,
            },
            window: window.as_ref(),
        }
    }
}

impl Debug for Memory {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl<M: GuestMemory + Send + Sync + 'static> From<M> for Memory {
    fn from(memory: M) -> Self {
        Self::new(Backing::Fixed(Arc::new(Fixed::new(memory))))
    }
}

/// Memory whose regions may change.
trait Space: Send + Sync {
    fn hold(&self) -> Box<dyn Mapping + '_>;
}

/// Memory with fixed regions. The device looks up their host addresses only once, because such look-ups would cause
/// most of the cost of a short record.
struct Fixed {
    regions: Vec<Region>,
    /// Owns the regions, which never move.
    memory: Arc<dyn Mapping + Send + Sync>,
    watched: bool,
}

impl Fixed {
    fn new<M: GuestMemory + Send + Sync + 'static>(memory: M) -> Self {
        let memory = Arc::new(memory);
        Self { regions: Region::all(&*memory), watched: Mapping::is_watched(&*memory), memory }
    }
}

/// A region with its host address.
#[derive(Debug)]
struct Region {
    first: u64,
    len: u64,
    host: *mut u8,
}

#[expect(unsafe_code, reason = "the address of memory that all threads share")]
// SAFETY: `host` is only used through a VolatileSlice, and the memory that it points into is Send and Sync.
unsafe impl Send for Region {}

#[expect(unsafe_code, reason = "the address of memory that all threads share")]
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Returns the regions of `memory`, largest first. The list is empty for memory with its own address translation.
    fn all<M: GuestMemory>(memory: &M) -> Vec<Self> {
        let backend = memory.physical_memory();
        let regions = backend.into_iter().flat_map(GuestMemoryBackend::iter);
        let mut regions: Vec<Self> = regions.filter_map(Self::of).collect();
        regions.sort_unstable_by_key(|region| Reverse(region.len));
        regions
    }

    fn of<R: GuestMemoryRegion>(region: &R) -> Option<Self> {
        let slice = region.as_volatile_slice().ok()?;
        Some(Self { first: region.start_addr().0, len: slice.len() as u64, host: slice.ptr_guard_mut().as_ptr() })
    }
}

/// A slice of `len` bytes within one of the regions.
#[inline]
#[expect(unsafe_code, reason = "a slice of memory that has been looked up before")]
fn of_regions(regions: &[Region], at: GuestAddress, len: usize) -> Option<VolatileSlice<'_>> {
    // Search linearly: regions are sorted by size, and the first one or two regions hold nearly all memory.
    let inside = |region: &&Region| at.0.wrapping_sub(region.first) < region.len;
    let region = regions.iter().find(inside)?;
    let offset = at.0 - region.first;
    if len as u64 > region.len - offset {
        return None;
    }
    let offset = usize::try_from(offset).ok()?;
    // SAFETY: the bytes are in the region. The region's memory lives at least as long as `regions`, because `Fixed`
    // owns both. `Fixed` keeps the memory in an `Arc`, so nothing moves or replaces it.
    Some(unsafe { VolatileSlice::new(region.host.wrapping_add(offset), len) })
}

struct Changing<S>(S);

impl<S: GuestAddressSpace + Send + Sync + 'static> Space for Changing<S> {
    fn hold(&self) -> Box<dyn Mapping + '_> {
        Box::new(Snapshot(self.0.memory()))
    }
}

/// Guest memory whose regions do not change during `'a`.
enum Held<'a> {
    Nothing,
    Fixed(&'a Fixed),
    Snapshot(Box<dyn Mapping + 'a>),
    #[cfg(any(test, feature = "internals"))]
    Lent(&'a dyn Mapping),
}

/// Guest memory at one moment. Views are small, because the device makes one for each record.
pub(crate) struct View<'a> {
    guest: Held<'a>,
    window: Option<&'a Extent>,
}

impl Debug for View<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}

impl<'a> View<'a> {
    /// A view of `memory`.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn of<M: GuestMemory + 'static>(memory: &'a M) -> Self {
        Self { guest: Held::Lent(memory), window: None }
    }

    /// The memory that contains `at`: the window if `at` is in it, and guest memory otherwise. `None` if guest memory
    /// is needed but is missing, or if its regions are not fixed.
    #[inline]
    fn fixed(&self, at: GuestAddress) -> Option<&Fixed> {
        if let Some(extent) = self.window
            && at.0.wrapping_sub(extent.first) < extent.len
        {
            return Some(&extent.memory);
        }
        match self.guest {
            Held::Fixed(fixed) => Some(fixed),
            _ => None,
        }
    }

    fn at(&self, at: GuestAddress) -> Result<&(dyn Mapping + 'a), GuestMemoryError> {
        if let Some(fixed) = self.fixed(at) {
            return Ok(&*fixed.memory);
        }
        match &self.guest {
            Held::Snapshot(memory) => Ok(&**memory),
            #[cfg(any(test, feature = "internals"))]
            Held::Lent(memory) => Ok(*memory),
            Held::Fixed(_) | Held::Nothing => Err(GuestMemoryError::InvalidGuestAddress(at)),
        }
    }

    /// A slice of `len` bytes that are contiguous in host memory. After a write, the caller must call [`View::mark`].
    #[inline]
    pub(crate) fn slice(&self, at: GuestAddress, len: usize) -> Result<VolatileSlice<'_>, GuestMemoryError> {
        let fixed = self.fixed(at);
        if let Some(slice) = fixed.and_then(|fixed| of_regions(&fixed.regions, at, len)) {
            return Ok(slice);
        }
        let slice = self.at(at)?.slice(at, len);
        slice.ok_or(GuestMemoryError::InvalidGuestAddress(at))
    }

    /// The page at `at`. The caller marks writes with [`View::mark`].
    #[inline]
    pub(crate) fn page(&self, at: GuestAddress) -> Result<Page<'_>, GuestMemoryError> {
        let page = Page::of(&self.slice(at, PAGE_SIZE)?);
        page.ok_or(GuestMemoryError::InvalidGuestAddress(at))
    }

    /// Whether any of the memory has a bitmap.
    pub(crate) fn is_watched(&self) -> bool {
        let window = self.window.is_some_and(|extent| extent.memory.watched);
        let guest = match &self.guest {
            Held::Nothing => false,
            Held::Fixed(fixed) => fixed.watched,
            Held::Snapshot(memory) => memory.is_watched(),
            #[cfg(any(test, feature = "internals"))]
            Held::Lent(memory) => memory.is_watched(),
        };
        window || guest
    }

    /// Marks written bytes in the bitmap.
    pub(crate) fn mark(&self, at: GuestAddress, len: usize) {
        if let Ok(memory) = self.at(at)
            && memory.is_watched()
        {
            memory.mark(at, len);
        }
    }

    /// Whether the device may write all of these bytes.
    pub(crate) fn is_writable(&self, at: GuestAddress, len: usize) -> bool {
        self.at(at).is_ok_and(|memory| memory.has(at, len, Permissions::ReadWrite))
    }

    /// Whether `at` is the start of a page that the device may write.
    pub(crate) fn is_page(&self, at: GuestAddress) -> bool {
        at.0.is_multiple_of(PAGE_SIZE as u64) && self.is_writable(at, PAGE_SIZE)
    }

    /// Whether the device may read all of these bytes.
    pub(crate) fn is_readable(&self, at: GuestAddress, len: usize) -> bool {
        self.at(at).is_ok_and(|memory| memory.has(at, len, Permissions::Read))
    }

    /// Reads memory into `bytes`.
    pub(crate) fn read(&self, bytes: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.at(at)?.read(bytes, at)
    }

    /// Writes `bytes` and marks them.
    pub(crate) fn write(&self, bytes: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.at(at)?.write(bytes, at)
    }

    /// Loads an integer of at most eight bytes. Does not convert the byte order.
    pub(crate) fn load<T: AtomicAccess>(&self, at: GuestAddress, order: Ordering) -> Result<T, GuestMemoryError> {
        Ok(self.slice(at, size_of::<T>())?.load(0, order)?)
    }

    /// Stores an integer, in memory byte order, and marks it.
    pub(crate) fn store<T: AtomicAccess>(
        &self,
        value: T,
        at: GuestAddress,
        order: Ordering,
    ) -> Result<(), GuestMemoryError> {
        self.slice(at, size_of::<T>())?.store(value, 0, order)?;
        self.mark(at, size_of::<T>());
        Ok(())
    }
}

/// The device's accesses to memory of any type.
trait Mapping {
    /// Returns `None` if the bytes are not within one region.
    fn slice(&self, at: GuestAddress, len: usize) -> Option<VolatileSlice<'_>>;
    /// Whether the memory has a bitmap.
    fn is_watched(&self) -> bool;
    fn mark(&self, at: GuestAddress, len: usize);
    fn has(&self, at: GuestAddress, len: usize, access: Permissions) -> bool;
    fn read(&self, bytes: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError>;
    fn write(&self, bytes: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError>;
}

impl<M: GuestMemory + 'static> Mapping for M {
    fn slice(&self, at: GuestAddress, len: usize) -> Option<VolatileSlice<'_>> {
        if let Some(memory) = self.physical_memory() {
            let (region, at) = memory.to_region_addr(at)?;
            return Some(without_bitmap(&region.get_slice(at, len).ok()?));
        }
        let slices = self.get_slices(at, len, Permissions::ReadWrite).ok();
        let first = slices?.next()?.ok()?;
        (first.len() == len).then(|| without_bitmap(&first))
    }

    fn is_watched(&self) -> bool {
        TypeId::of::<M::Bitmap>() != TypeId::of::<()>()
    }

    fn mark(&self, at: GuestAddress, len: usize) {
        let Ok(slices) = self.get_slices(at, len, Permissions::ReadWrite) else {
            return;
        };
        for slice in slices.map_while(Result::ok) {
            slice.bitmap().mark_dirty(0, slice.len());
        }
    }

    fn has(&self, at: GuestAddress, len: usize, access: Permissions) -> bool {
        self.check_range(at, len, access)
    }

    fn read(&self, bytes: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.read_slice(bytes, at)
    }

    fn write(&self, bytes: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.write_slice(bytes, at)
    }
}

/// The memory of an address space at one moment.
struct Snapshot<T>(T);

impl<T: Deref<Target: GuestMemory + Sized + 'static>> Mapping for Snapshot<T> {
    fn slice(&self, at: GuestAddress, len: usize) -> Option<VolatileSlice<'_>> {
        Mapping::slice(&*self.0, at, len)
    }

    fn is_watched(&self) -> bool {
        Mapping::is_watched(&*self.0)
    }

    fn mark(&self, at: GuestAddress, len: usize) {
        Mapping::mark(&*self.0, at, len);
    }

    fn has(&self, at: GuestAddress, len: usize, access: Permissions) -> bool {
        Mapping::has(&*self.0, at, len, access)
    }

    fn read(&self, bytes: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        Mapping::read(&*self.0, bytes, at)
    }

    fn write(&self, bytes: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        Mapping::write(&*self.0, bytes, at)
    }
}

/// Returns `slice` without its bitmap. The caller must mark writes.
#[expect(unsafe_code, reason = "there is no safe way to drop a slice's bitmap")]
fn without_bitmap<'a, B: vm_memory::bitmap::BitmapSlice>(slice: &VolatileSlice<'a, B>) -> VolatileSlice<'a> {
    // SAFETY: the pointer and the length describe `slice`, whose bytes stay mapped for 'a.
    unsafe { VolatileSlice::new(slice.ptr_guard_mut().as_ptr(), slice.len()) }
}

/// A page of guest memory as words shared with the guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Page<'a>(&'a [AtomicU64; PAGE_WORDS]);

impl<'a> Page<'a> {
    /// `None` if `slice` is not a whole page or not aligned.
    #[inline]
    #[expect(unsafe_code, reason = "one check for all the words of a page")]
    fn of(slice: &VolatileSlice<'a>) -> Option<Self> {
        let words = slice.ptr_guard_mut().as_ptr().cast::<[AtomicU64; PAGE_WORDS]>();
        if slice.len() != PAGE_SIZE || !words.is_aligned() {
            return None;
        }
        // SAFETY: `words` is an aligned page that is mapped for 'a. Its other users, such as the guest, write whole
        // words.
        Some(Self(unsafe { &*words }))
    }

    /// Returns the word at `offset`, which must be a multiple of eight. `None` if it is beyond the page.
    #[inline]
    pub(crate) fn word(self, offset: usize) -> Option<&'a AtomicU64> {
        self.0.get(offset / WORD)
    }

    /// Returns `count` words starting at `offset`, which must be a multiple of eight. `None` if they extend beyond the
    /// page.
    #[inline]
    pub(crate) fn words(self, offset: usize, count: usize) -> Option<&'a [AtomicU64]> {
        let first = offset / WORD;
        self.0.get(first..)?.get(..count)
    }

    /// The bytes of the page.
    #[inline]
    #[expect(unsafe_code, reason = "the inverse of Page::of")]
    pub(crate) fn bytes(self) -> VolatileSlice<'a> {
        // SAFETY: atomic words may be written through a shared reference, and all of them are mapped for 'a.
        unsafe { VolatileSlice::new(self.0.as_ptr().cast_mut().cast(), PAGE_SIZE) }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use super::*;

    /// Two regions with a gap of one page between them. The smaller region is first.
    fn memory() -> Memory {
        let ranges = [(GuestAddress(0x1000), 0x1000), (GuestAddress(0x3000), 0x2000)];
        Memory::from(GuestMemoryMmap::<()>::from_ranges(&ranges).expect("memory"))
    }

    #[test]
    fn slice_lies_in_one_region_or_is_refused() {
        let memory = memory();
        let view = memory.view();
        let sliced = |at: u64, len: usize| view.slice(GuestAddress(at), len).is_ok();
        assert!(sliced(0x1000, 0x1000) && sliced(0x3000, 0x2000));
        assert!(sliced(0x1fff, 1) && sliced(0x4ff8, 8));
        for (at, len) in [
            (0xfff, 1),
            (0x1000, 0x1001),
            (0x1fff, 2),
            (0x2000, 1),
            (0x2fff, 2),
            (0x4ff9, 8),
            (0x5000, 1),
            (u64::MAX, 2),
            (0x3000, usize::MAX),
        ] {
            assert!(!sliced(at, len), "{len:#x} bytes at {at:#x}");
        }
    }

    #[test]
    fn page_shows_the_bytes_that_were_written_and_the_reverse() {
        let memory = memory();
        let view = memory.view();
        view.write(&7_u64.to_le_bytes(), GuestAddress(0x4008)).expect("memory");
        let page = view.page(GuestAddress(0x4000)).expect("a page");
        let word = page.word(8).expect("in it");
        let before = word.swap(9_u64.to_le(), Ordering::Relaxed);
        assert_eq!(u64::from_le(before), 7);
        let mut bytes = [0; 8];
        view.read(&mut bytes, GuestAddress(0x4008)).expect("memory");
        assert_eq!(u64::from_le_bytes(bytes), 9);
        let shown = page.bytes().load::<u64>(8, Ordering::Relaxed);
        assert_eq!(shown.map(u64::from_le).expect("in it"), 9);
        assert!(page.word(PAGE_SIZE).is_none() && page.words(PAGE_SIZE - 8, 2).is_none());
        assert!(view.page(GuestAddress(0x4004)).is_err(), "not aligned");
    }

    #[test]
    fn window_lies_before_the_guests_memory() {
        let window =
            Memory::from(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0x8000), 0x1000)]).expect("memory"));
        let both = memory().with(&window, GuestAddress(0x8000), 0x1000);
        let view = both.view();
        view.write(&[1], GuestAddress(0x8fff)).expect("in the window");
        assert!(view.slice(GuestAddress(0x8fff), 2).is_err());
        let mut byte = [0];
        window.view().read(&mut byte, GuestAddress(0x8fff)).expect("memory");
        assert_eq!(byte, [1]);
    }
}
