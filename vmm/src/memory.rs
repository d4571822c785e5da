//! Memory that guests can access: RAM at the architecture's addresses, and the window; its
//! registration with KVM.

#![allow(unsafe_code)]

use std::io;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use libc::c_int;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::arch::layout::{self, WINDOW};

/// Errors of guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The host refused that much address space.
    #[error("cannot reserve {mib} MiB for the guest: give it less with --memory")]
    Reserve {
        /// The requested size.
        mib: u64,
        /// The allocator's reason.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
    /// The host refused the window.
    #[error("cannot reserve a window of {bytes} bytes: give it less with --window")]
    ReserveWindow {
        /// The requested size.
        bytes: u64,
        /// The allocator's reason.
        #[source]
        source: vm_memory::mmap::FromRangesError,
    },
    /// The host refused the advice on guest memory.
    #[error("cannot keep the guest's memory out of core dumps")]
    Guard(#[source] io::Error),
    /// The host refused to free guest memory.
    #[error("cannot empty the guest's memory")]
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

/// Reserves `mib` MiB; the host allocates pages on first access. Guest memory is excluded from core
/// dumps of the VMM. The advice also keeps the kernel from merging it with the VMM's own mappings,
/// so that [`Footprint`](crate::footprint::Footprint) can distinguish them.
///
/// # Errors
/// [`MemoryError::Reserve`].
pub fn allocate(mib: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let ranges: Vec<_> = layout::ram(mib << 20)
        .into_iter()
        .map(|(start, size)| {
            (
                GuestAddress(start),
                usize::try_from(size).unwrap_or(usize::MAX),
            )
        })
        .collect();
    let memory = GuestMemoryMmap::from_ranges(&ranges)
        .map_err(|source| MemoryError::Reserve { mib, source })?;
    advise(&memory, libc::MADV_DONTDUMP).map_err(MemoryError::Guard)?;
    Ok(memory)
}

/// Reserves the window of `bytes` bytes; the host allocates pages on first access. It is excluded
/// from core dumps, too, and from child processes, which the VMM does not have: the kernel merges
/// adjacent mappings with equal advice, and would otherwise merge it with guest memory.
///
/// # Errors
/// [`MemoryError::ReserveWindow`].
pub fn window(bytes: u64) -> Result<GuestMemoryMmap, MemoryError> {
    let size = usize::try_from(bytes).unwrap_or(usize::MAX);
    let window = GuestMemoryMmap::from_ranges(&[(GuestAddress(WINDOW), size)])
        .map_err(|source| MemoryError::ReserveWindow { bytes, source })?;
    for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
        advise(&window, advice).map_err(MemoryError::Guard)?;
    }
    Ok(window)
}

/// Frees the pages of `memory`, which reads as zeros afterwards.
///
/// # Errors
/// [`MemoryError::Empty`].
pub fn empty(memory: &GuestMemoryMmap) -> Result<(), MemoryError> {
    // Private and anonymous memory, for which the kernel guarantees zeros.
    advise(memory, libc::MADV_DONTNEED).map_err(MemoryError::Empty)
}

fn advise(memory: &GuestMemoryMmap, advice: c_int) -> io::Result<()> {
    for region in memory.iter() {
        let size = usize::try_from(region.len()).unwrap_or(usize::MAX);
        // SAFETY: the region is mapped with that size and stays mapped; all of its readers expect
        // concurrent changes by a guest.
        if unsafe { libc::madvise(region.as_ptr().cast(), size, advice) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Registers each of `memories` with KVM.
///
/// # Errors
/// [`MemoryError::Register`].
pub fn register(vm: &VmFd, memories: &[&GuestMemoryMmap]) -> Result<(), MemoryError> {
    let regions = memories.iter().flat_map(|memory| memory.iter());
    for (slot, region) in (0u32..).zip(regions) {
        let address = region.start_addr().raw_value();
        let registration = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: address,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region is mapped with that size, and the caller keeps the memory for as long
        // as vCPUs run: `Vm::run` joins their threads first.
        unsafe { vm.set_user_memory_region(registration) }
            .map_err(|source| MemoryError::Register { address, source })?;
    }
    Ok(())
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

    /// `VmFlags` of the mapping that holds the first byte of `memory`.
    fn flags(memory: &GuestMemoryMmap) -> String {
        let first = memory.iter().next().expect("a region").as_ptr() as u64;
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut inside = false;
        for line in maps.lines() {
            let (word, rest) = line.split_once(' ').expect("two words");
            if let Some((start, end)) = word.split_once('-') {
                let [start, end] =
                    [start, end].map(|hex| u64::from_str_radix(hex, 16).expect("an address"));
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
    fn window_lies_outside_memory_at_its_place() {
        use vm_memory::GuestMemoryBackend;
        let window = window(4096).expect("a page");
        assert!(window.address_in_range(GuestAddress(WINDOW)));
        let all = layout::ram(1 << 40);
        let inside = |&(start, size): &(u64, u64)| (start..start + size).contains(&WINDOW);
        assert!(!all.iter().any(inside));
    }
}
