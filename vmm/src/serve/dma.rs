//! The guest's memory, as the VMM shares it: files that this process maps at the guest's addresses.

use std::fs::File;
use std::sync::Arc;

use vm_memory::guest_memory::GuestMemoryBackend;
use vm_memory::mmap::MmapRegion;
use vm_memory::{
    FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};
use vpmu::Memory;

use super::message::{Range, Refused};

/// Maximum number of ranges. A VMM shares a few.
const MOST_RANGES: usize = 512;

/// The ranges of guest memory that the device can reach now.
#[derive(Debug)]
pub(super) struct Dma(GuestMemoryAtomic<GuestMemoryMmap>);

impl Dma {
    pub(super) fn new() -> Self {
        Self(GuestMemoryAtomic::new(GuestMemoryMmap::new()))
    }

    /// The memory, for the device. The device sees later changes.
    pub(super) fn memory(&self) -> Memory {
        Memory::space(self.0.clone())
    }

    /// Adds a range of guest memory, which is `file` from `offset` on. Ranges that the VMM does not share as a file, or
    /// that cannot be written, such as a ROM, have nothing for the device: they are left out.
    ///
    /// # Errors
    /// [`Refused`].
    pub(super) fn map(&self, range: Range, writable: bool, offset: u64, file: Option<File>) -> Result<(), Refused> {
        let (Some(file), true) = (file, writable) else {
            return Ok(());
        };
        let now = self.0.memory();
        if now.num_regions() >= MOST_RANGES {
            return Err(Refused::Memory);
        }
        // An access beyond the end of a file would end this process.
        let end = offset.checked_add(range.size).ok_or(Refused::Invalid)?;
        let length = file.metadata().map_err(|_| Refused::Invalid)?.len();
        let size = usize::try_from(range.size).map_err(|_| Refused::Invalid)?;
        if size == 0 || end > length {
            return Err(Refused::Invalid);
        }
        let region = MmapRegion::from_file(FileOffset::new(file, offset), size).map_err(|error| {
            log::error!("cannot map {size:#x} bytes of guest memory: {error}");
            Refused::Memory
        })?;
        let region = GuestRegionMmap::new(region, GuestAddress(range.address)).ok_or(Refused::Invalid)?;
        self.replace(now.insert_region(Arc::new(region)).map_err(|_| Refused::Invalid)?);
        Ok(())
    }

    /// Removes the ranges that lie in `range`, or all ranges. The rings in them are lost to the device.
    pub(super) fn unmap(&self, range: Option<Range>) {
        let mut memory = (*self.0.memory()).clone();
        let inside = |region: &GuestRegionMmap| {
            range.is_none_or(|range| {
                let start = region.start_addr().0;
                start >= range.address && start - range.address < range.size
            })
        };
        let gone: Vec<_> =
            memory.iter().filter(|region| inside(region)).map(|it| (it.start_addr(), it.len())).collect();
        for (start, size) in gone {
            if let Ok((rest, _)) = memory.remove_region(start, size) {
                memory = rest;
            }
        }
        self.replace(memory);
    }

    fn replace(&self, memory: GuestMemoryMmap) {
        // A thread that panicked with the lock has replaced nothing.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).replace(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64) -> Option<File> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(size).expect("a size");
        Some(file)
    }

    fn range(address: u64, size: u64) -> Range {
        Range { address, size }
    }

    fn ranges(dma: &Dma) -> Vec<(u64, u64)> {
        dma.0.memory().iter().map(|region| (region.start_addr().0, region.len())).collect()
    }

    #[test]
    fn ranges_come_and_go() {
        let dma = Dma::new();
        dma.map(range(0, 0x4000), true, 0x1000, file(0x5000)).expect("mapped");
        dma.map(range(0x1_0000, 0x1000), true, 0, file(0x1000)).expect("mapped");
        assert_eq!(ranges(&dma), [(0, 0x4000), (0x1_0000, 0x1000)]);
        dma.unmap(Some(range(0, 0x4000)));
        assert_eq!(ranges(&dma), [(0x1_0000, 0x1000)]);
        dma.unmap(None);
        assert_eq!(ranges(&dma), []);
    }

    #[test]
    fn range_that_is_no_shared_memory_is_left_out() {
        let dma = Dma::new();
        dma.map(range(0, 0x1000), false, 0, file(0x1000)).expect("left out");
        dma.map(range(0, 0x1000), true, 0, None).expect("left out");
        assert_eq!(ranges(&dma), []);
    }

    #[test]
    fn range_beyond_its_file_or_over_another_is_refused() {
        let dma = Dma::new();
        dma.map(range(0, 0x1000), true, 0, file(0x1000)).expect("mapped");
        for (at, size, offset) in [(0x8000, 0x2000, 0), (0x8000, 0x1000, 0x1000), (0x8000, 0, 0), (0x8000, 1, u64::MAX)]
        {
            dma.map(range(at, size), true, offset, file(0x1000)).expect_err("beyond the file");
        }
        dma.map(range(0, 0x1000), true, 0, file(0x1000)).expect_err("taken");
        assert_eq!(ranges(&dma), [(0, 0x1000)]);
    }
}
