//! Guest memory, however the VMM keeps it. The type of the VMM's memory ends here: the device sees a
//! [`View`]. Every write through a view is marked in the bitmap of the region that it went to, after the
//! write, so that a VMM that copies memory meanwhile copies the page again.

use std::any::TypeId;
use std::fmt::{Debug, Formatter};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::bitmap::Bitmap;
use vm_memory::{
    AtomicAccess, Bytes, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemoryBackend,
    GuestMemoryError, GuestMemoryRegion, Permissions, VolatileSlice,
};

use crate::abi::PAGE_SIZE;

/// Guest memory as a VMM hands it over: any memory of vm-memory, with any bitmap.
///
/// Addresses are guest-physical: the guest's page tables are read through it, too. Memory whose regions
/// stay as they are converts by itself; for regions that come and go there is [`Memory::space`].
#[derive(Clone, Default)]
pub struct Memory(Arc<Parts>);

#[derive(Clone, Default)]
struct Parts {
    guest: Option<Arc<dyn Space>>,
    /// Pages that come before the guest's.
    window: Option<Extent>,
}

/// A piece of memory by itself.
#[derive(Clone)]
struct Extent {
    first: u64,
    len: u64,
    memory: Arc<dyn Space>,
}

impl Memory {
    /// Memory whose regions come and go while the device lives: each use of it sees the regions that
    /// `space` has then. A ring or area on pages that are gone loses its records, and counts them; pages
    /// that were added can be mapped at once.
    ///
    /// Of vm-memory's own, `GuestMemoryAtomic` suits: an `Arc` would have all vCPUs count their
    /// references to it in one place.
    #[must_use]
    pub fn space<S>(space: S) -> Self
    where
        S: GuestAddressSpace + Send + Sync + 'static,
    {
        Self::new(Changing(space))
    }

    fn new(guest: impl Space + 'static) -> Self {
        Self(Arc::new(Parts {
            guest: Some(Arc::new(guest)),
            window: None,
        }))
    }

    /// The same memory, its references counted by themselves: users on several threads do not share a
    /// cache line.
    pub(crate) fn apart(&self) -> Self {
        Self(Arc::new(Parts::clone(&self.0)))
    }

    /// The same memory with `len` bytes from `first` on out of `window`.
    pub(crate) fn with(&self, window: &Self, first: GuestAddress, len: u64) -> Self {
        let extent = window.0.guest.clone().map(|memory| Extent {
            first: first.0,
            len,
            memory,
        });
        Self(Arc::new(Parts {
            guest: self.0.guest.clone(),
            window: extent,
        }))
    }

    /// The regions as they are now. Held for a step of work: regions that are taken away meanwhile stay
    /// until it is dropped.
    pub(crate) fn view(&self) -> View<'_> {
        let Parts { guest, window } = &*self.0;
        View {
            guest: guest.as_deref().map(Space::hold),
            window: window.as_ref().map(|extent| Part {
                first: extent.first,
                len: extent.len,
                memory: extent.memory.hold(),
            }),
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
        Self::new(Fixed(memory))
    }
}

/// Memory that can be looked at.
trait Space: Send + Sync {
    fn hold(&self) -> Held<'_>;
}

struct Fixed<M>(M);

impl<M: GuestMemory + Send + Sync + 'static> Space for Fixed<M> {
    fn hold(&self) -> Held<'_> {
        Held::Fixed(&self.0)
    }
}

struct Changing<S>(S);

impl<S: GuestAddressSpace + Send + Sync + 'static> Space for Changing<S> {
    fn hold(&self) -> Held<'_> {
        Held::Snapshot(Box::new(Snapshot(self.0.memory())))
    }
}

/// Memory that stays as it is while this lives.
enum Held<'a> {
    Fixed(&'a dyn Mapping),
    Snapshot(Box<dyn Mapping + 'a>),
}

impl<'a> Held<'a> {
    fn mapping(&self) -> &(dyn Mapping + 'a) {
        match self {
            Self::Fixed(memory) => *memory,
            Self::Snapshot(memory) => &**memory,
        }
    }
}

/// Guest memory at a moment.
pub(crate) struct View<'a> {
    guest: Option<Held<'a>>,
    window: Option<Part<'a>>,
}

struct Part<'a> {
    first: u64,
    len: u64,
    memory: Held<'a>,
}

impl Debug for View<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}

impl<'a> View<'a> {
    /// `memory` itself.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn of<M: GuestMemory + 'static>(memory: &'a M) -> Self {
        Self {
            guest: Some(Held::Fixed(memory)),
            window: None,
        }
    }

    fn at(&self, at: GuestAddress) -> Result<&(dyn Mapping + 'a), GuestMemoryError> {
        let inside = |part: &&Part<'_>| at.0.wrapping_sub(part.first) < part.len;
        let window = self.window.as_ref().filter(inside).map(|part| &part.memory);
        let held = window.or(self.guest.as_ref());
        held.map(Held::mapping)
            .ok_or(GuestMemoryError::InvalidGuestAddress(at))
    }

    /// `len` bytes that lie one behind the other in the host's memory, too. Writes to them are marked by
    /// the caller: [`View::mark`].
    pub(crate) fn slice(
        &self,
        at: GuestAddress,
        len: usize,
    ) -> Result<VolatileSlice<'_>, GuestMemoryError> {
        let slice = self.at(at)?.slice(at, len);
        slice.ok_or(GuestMemoryError::InvalidGuestAddress(at))
    }

    /// Whether it has bitmaps to mark.
    pub(crate) fn is_watched(&self) -> bool {
        let watched = |held: &Held<'_>| held.mapping().is_watched();
        let window = self.window.as_ref();
        self.guest.as_ref().is_some_and(watched) || window.is_some_and(|part| watched(&part.memory))
    }

    /// Marks bytes that have been written.
    pub(crate) fn mark(&self, at: GuestAddress, len: usize) {
        if let Ok(memory) = self.at(at) {
            memory.mark(at, len);
        }
    }

    /// Whether all of these bytes are memory that the device may write.
    pub(crate) fn is_writable(&self, at: GuestAddress, len: usize) -> bool {
        self.at(at)
            .is_ok_and(|memory| memory.has(at, len, Permissions::ReadWrite))
    }

    /// Whether a page that the device may write begins here.
    pub(crate) fn is_page(&self, at: GuestAddress) -> bool {
        at.0.is_multiple_of(PAGE_SIZE as u64) && self.is_writable(at, PAGE_SIZE)
    }

    /// Whether all of these bytes are memory.
    pub(crate) fn is_readable(&self, at: GuestAddress, len: usize) -> bool {
        self.at(at)
            .is_ok_and(|memory| memory.has(at, len, Permissions::Read))
    }

    /// Fills `bytes`.
    pub(crate) fn read(&self, bytes: &mut [u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.at(at)?.read(bytes, at)
    }

    /// Writes `bytes`, and marks them.
    pub(crate) fn write(&self, bytes: &[u8], at: GuestAddress) -> Result<(), GuestMemoryError> {
        self.at(at)?.write(bytes, at)
    }

    /// A number of eight bytes at most, as it lies in memory.
    pub(crate) fn load<T: AtomicAccess>(
        &self,
        at: GuestAddress,
        order: Ordering,
    ) -> Result<T, GuestMemoryError> {
        Ok(self.slice(at, size_of::<T>())?.load(0, order)?)
    }

    /// Stores a number as it is to lie in memory, and marks it.
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

/// What the device does with memory, whatever its type.
trait Mapping {
    /// `None`: not all of it is memory of one region.
    fn slice(&self, at: GuestAddress, len: usize) -> Option<VolatileSlice<'_>>;
    /// Whether it has a bitmap to mark.
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

/// What an address space has shown.
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

/// The same bytes, with nobody to mark what is written to them.
#[expect(unsafe_code, reason = "no safe way to leave a bitmap behind")]
fn without_bitmap<'a, B: vm_memory::bitmap::BitmapSlice>(
    slice: &VolatileSlice<'a, B>,
) -> VolatileSlice<'a> {
    // SAFETY: the very bytes of `slice`, which its memory keeps mapped for 'a.
    unsafe { VolatileSlice::new(slice.ptr_guard_mut().as_ptr(), slice.len()) }
}
