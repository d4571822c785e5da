//! Memory that guests can access: RAM at the architecture's addresses, and the window. This module allocates both, and
//! registers them with KVM.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use libc::c_int;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    Address, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionCollectionError, GuestRegionMmap, MmapRegion,
};

use crate::arch::layout::{self, WINDOW};

/// Errors of guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host refused to reserve guest memory of this size.
    #[error("cannot reserve {mib} MiB for the guest: reduce --memory")]
    Reserve {
        /// The requested size.
        mib: u64,
        /// The allocator's reason.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
    /// The host refused the window.
    #[error("cannot reserve a window of {bytes} bytes: reduce --window")]
    ReserveWindow {
        /// The requested size.
        bytes: u64,
        /// The allocator's reason.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
    /// The host cannot map the memory of a snapshot.
    #[error("cannot map the memory of the snapshot")]
    Map(#[source] MmapRegionError),
    /// The regions of the memory are not valid, which is a bug.
    #[error("cannot place the memory of the snapshot")]
    Place(#[source] GuestRegionCollectionError),
    /// `madvise` failed for guest memory.
    #[error("cannot keep the guest's memory out of core dumps")]
    Guard(#[source] io::Error),
    /// The host refused to free guest memory.
    #[error("cannot free the guest's memory")]
    Empty(#[source] io::Error),
    /// KVM refused the region.
    #[error("KVM refuses guest memory at {address:#x}")]
    Register {
        /// The region's start address.
        address: u64,
        /// KVM's reason.
        #[source]
        source: kvm_ioctls::Error,
    },
}

/// Reserves `mib` MiB of guest memory. The host allocates pages on first access. `madvise` excludes guest memory from
/// core dumps of the VMM. This also keeps the kernel from merging guest memory with the VMM's own mappings, so that
/// [`Footprint`](crate::footprint::Footprint) can distinguish them.
///
/// # Errors
/// [`MemoryError::Reserve`], [`MemoryError::Guard`].
pub fn allocate(mib: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let ranges = ranges(mib);
    let memory = GuestMemoryMmap::from_ranges(&ranges).map_err(|source| MemoryError::Reserve { mib, source })?;
    advise(&memory, libc::MADV_DONTDUMP).map_err(MemoryError::Guard)?;
    Ok(memory)
}

fn ranges(mib: u64) -> Vec<(GuestAddress, usize)> {
    let ranges = layout::ram(mib << 20).into_iter();
    ranges
        .map(|(start, size)| {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            (GuestAddress(start), size)
        })
        .collect()
}

/// Like [`allocate`], but maps `file` copy-on-write: the host reads a page from the file on first access, and copies it
/// on first write. The VMM never writes to the file. The file must not change while it is mapped.
///
/// # Errors
/// [`MemoryError`].
pub(crate) fn map(mib: u64, file: &File) -> Result<GuestMemoryMmap, MemoryError> {
    let memory = map_ranges(&ranges(mib), file, 0)?;
    advise(&memory, libc::MADV_DONTDUMP).map_err(MemoryError::Guard)?;
    Ok(memory)
}

/// Like [`window`], but maps `file` copy-on-write, starting at `offset`.
///
/// # Errors
/// [`MemoryError`].
pub(crate) fn map_window(bytes: u64, file: &File, offset: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    let window = map_ranges(&[(GuestAddress(WINDOW), size)], file, offset)?;
    for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        advise(&window, advice).map_err(MemoryError::Guard)?;
    }
    Ok(window)
}

const PROTECTION: c_int = libc::PROT_READ | libc::PROT_WRITE;
const COPY_ON_WRITE: c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;

fn map_ranges(ranges: &[(GuestAddress, usize)], file: &File, mut offset: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let file = file.try_clone().map_err(MmapRegionError::Mmap);
    let file = Arc::new(file.map_err(MemoryError::Map)?);
    let regions = ranges.iter().map(|&(start, size)| {
        let place = FileOffset::from_arc(Arc::clone(&file), offset);
        offset += size as u64;
        let region = MmapRegion::build(Some(place), size, PROTECTION, COPY_ON_WRITE).map_err(MemoryError::Map)?;
        GuestRegionMmap::new(region, start).ok_or(MemoryError::Place(GuestRegionCollectionError::MemoryRegionOverlap))
    });
    let regions: Vec<_> = regions.collect::<Result<_, _>>()?;
    GuestMemoryMmap::from_regions(regions).map_err(MemoryError::Place)
}

/// Reserves a window of `bytes` bytes. The host allocates pages on first access. Like [`allocate`], excludes the window
/// from core dumps. Also sets `MADV_DONTFORK`. The kernel merges only mappings with the same flags, so it does not
/// merge the window's mapping with an adjacent mapping of guest memory. The VMM has no child processes, so the flag has
/// no other effect.
///
/// # Errors
/// [`MemoryError::ReserveWindow`], [`MemoryError::Guard`].
pub fn window(bytes: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    let window = GuestMemoryMmap::from_ranges(&[(GuestAddress(WINDOW), size)])
        .map_err(|source| MemoryError::ReserveWindow { bytes, source })?;
    for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        advise(&window, advice).map_err(MemoryError::Guard)?;
    }
    Ok(window)
}

/// Frees the pages of `memory`. Afterwards, the memory reads as zeros.
///
/// # Errors
/// [`MemoryError::Empty`], [`MemoryError::Guard`].
pub fn empty(memory: &GuestMemoryMmap) -> Result<(), MemoryError> {
    for region in memory.iter().filter(|it| it.file_offset().is_some()) {
        // After MADV_DONTNEED, the pages would be read from the file again, so replace the mapping instead.
        let size = usize::try_from(region.len()).unwrap_or(usize::MAX);
        let flags = COPY_ON_WRITE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: the call replaces exactly the region's own mapping, with the same protection. All code that reads
        // guest memory expects the memory to change at any time.
        let mapped = unsafe { libc::mmap(region.as_ptr().cast(), size, PROTECTION, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(MemoryError::Empty(io::Error::last_os_error()));
        }
    }
    // A new mapping does not inherit the `madvise` flags of the mapping that it replaces.
    advise(memory, libc::MADV_DONTDUMP).map_err(MemoryError::Guard)?;
    // At this point, all mappings are private and anonymous, so the kernel guarantees that freed pages read as zeros.
    advise(memory, libc::MADV_DONTNEED).map_err(MemoryError::Empty)
}

fn advise(memory: &GuestMemoryMmap, advice: c_int) -> io::Result<()> {
    for region in memory.iter() {
        let size = usize::try_from(region.len()).unwrap_or(usize::MAX);
        // SAFETY: the region is mapped with that size and stays mapped. All code that reads guest memory expects the
        // memory to change at any time.
        if unsafe { libc::madvise(region.as_ptr().cast(), size, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Registers each region of `memories` with KVM, in consecutive slots that start at `first`. If `tracked` is true, KVM
/// logs the guest's writes.
///
/// # Errors
/// [`MemoryError::Register`].
pub fn register(vm: &VmFd, memories: &[&GuestMemoryMmap], first: u32, tracked: bool) -> Result<(), MemoryError> {
    let flags = if tracked { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
    let regions = memories.iter().flat_map(|memory| memory.iter());
    for (slot, region) in (first..).zip(regions) {
        let address = region.start_addr().raw_value();
        let registration = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: address,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region is mapped with that size, and the caller keeps it mapped for as long as vCPUs run, because
        // `Vm::run` returns only after the vCPUs have stopped.
        unsafe { vm.set_user_memory_region(registration) }
            .map_err(|source| MemoryError::Register { address, source })?;
    }
    Ok(())
}

/// A thread that registers memory with KVM. For each slot, KVM waits for an SRCU grace period, which takes milliseconds
/// on some hosts. Dropping the value waits for the thread.
#[derive(Debug)]
pub struct Registration(Option<JoinHandle<Result<(), MemoryError>>>);

impl Registration {
    /// Starts a thread that calls [`register`] with `memory`.
    ///
    /// # Errors
    /// The host cannot start another thread.
    pub fn begin(vm: Arc<VmFd>, memory: GuestMemoryMmap, first: u32, tracked: bool) -> io::Result<Self> {
        let thread = thread::Builder::new().name("memory".to_owned());
        let thread = thread.spawn(move || register(&vm, &[&memory], first, tracked))?;
        Ok(Self(Some(thread)))
    }

    /// Waits for the thread, and returns the result of [`register`].
    ///
    /// # Errors
    /// See [`register`].
    pub fn finish(mut self) -> Result<(), MemoryError> {
        self.join().unwrap_or(Ok(()))
    }

    fn join(&mut self) -> Option<Result<(), MemoryError>> {
        let ended = self.0.take()?.join();
        Some(ended.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // If `finish` was not called, the caller is already returning another error.
        let _ = self.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_where_the_layout_has_it_and_nowhere_else() {
        use vm_memory::GuestMemoryBackend;
        let memory = allocate((3 << 10) + 1).expect("3 GiB + 1 MiB of address space");
        let bytes: u64 = memory.iter().map(GuestMemoryRegion::len).sum();
        assert_eq!(bytes, (3 << 30) + (1 << 20));
        for (start, size) in layout::ram(bytes) {
            assert!(memory.address_in_range(GuestAddress(start)));
            assert!(memory.address_in_range(GuestAddress(start + size - 1)));
            assert!(!memory.address_in_range(GuestAddress(start + size)));
        }
    }

    /// `VmFlags` of the mapping that contains the first byte of `memory`.
    fn flags(memory: &GuestMemoryMmap) -> String {
        let first = memory.iter().next().expect("a region").as_ptr() as u64;
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut inside = false;
        for line in maps.lines() {
            let (word, rest) = line.split_once(' ').expect("two words");
            if let Some((start, end)) = word.split_once('-') {
                let [start, end] = [start, end].map(|hex| u64::from_str_radix(hex, 16).expect("an address"));
                inside = (start..end).contains(&first);
            } else if inside && word == "VmFlags:" {
                return rest.trim().to_owned();
            }
        }
        panic!("no mapping at {first:#x}");
    }

    /// The kernel merges adjacent mappings with the same flags.
    #[test]
    fn memory_and_window_stay_out_of_core_dumps_and_apart() {
        let memory = flags(&allocate(1).expect("1 MiB"));
        let window = flags(&window(1 << 20).expect("1 MiB"));
        for flags in [&memory, &window] {
            assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
        }
        assert_ne!(memory, window);
    }

    #[test]
    fn emptied_memory_is_all_zeros() {
        use vm_memory::Bytes;
        let memory = allocate(1).expect("1 MiB");
        let place = memory.iter().next().expect("a region").start_addr();
        memory.write_obj(0xa5a5_u16, place).expect("in range");
        empty(&memory).expect("emptied");
        assert_eq!(memory.read_obj::<u16>(place).expect("in range"), 0);
    }

    #[test]
    fn memory_of_a_file_is_copied_on_write_and_emptied_for_good() {
        use std::os::unix::fs::FileExt;
        use vm_memory::Bytes;
        let file = tempfile::tempfile().expect("a file");
        file.set_len(2 << 20).expect("room");
        file.write_all_at(&[7, 8], 0x1000).expect("room");
        file.write_all_at(&[9], (1 << 20) + 0x2000).expect("room");
        let memory = map(1, &file).expect("mapped");
        let window = map_window(1 << 20, &file, 1 << 20).expect("mapped");
        let start = memory.iter().next().expect("a region").start_addr();
        let place = GuestAddress(start.raw_value() + 0x1000);
        assert_eq!(memory.read_obj::<[u8; 2]>(place).expect("in range"), [7, 8]);
        let in_window = GuestAddress(WINDOW + 0x2000);
        assert_eq!(window.read_obj::<u8>(in_window).expect("in range"), 9);
        memory.write_obj(1u8, place).expect("in range");
        let other = map(1, &file).expect("mapped");
        assert_eq!(other.read_obj::<[u8; 2]>(place).expect("in range"), [7, 8]);
        empty(&memory).expect("emptied");
        assert_eq!(memory.read_obj::<[u8; 2]>(place).expect("in range"), [0, 0]);
        let flags = flags(&memory);
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn window_lies_outside_memory_at_its_place() {
        use vm_memory::GuestMemoryBackend;
        let window = window(4096).expect("a page");
        assert!(window.address_in_range(GuestAddress(WINDOW)));
        let all = layout::ram(1 << 40);
        let inside = |&(start, size): &(u64, u64)| (start..start + size).contains(&WINDOW);
        assert!(!all.iter().any(inside));
    }
}
