//! The window of a device in a process of its own: memory that this process shares with the VMM, and the VMM with the
//! guest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// The guest decides where the window is, so the device knows it at an address that no guest has.
const ADDRESS: GuestAddress = GuestAddress(1 << 62);

/// The window's memory.
#[derive(Debug)]
pub(super) struct Window {
    file: File,
    bytes: u64,
}

impl Window {
    /// Reserves a window of `bytes` bytes. Nobody can shrink it: an access to a page that is gone would end the VMM or
    /// this process.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn new(bytes: u64) -> io::Result<Self> {
        let file = rustix::fs::memfd_create("vpmu-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file: file.into(), bytes })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Maps the window for the device.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn map(&self) -> io::Result<GuestMemoryMmap> {
        let size = usize::try_from(self.bytes).map_err(io::Error::other)?;
        let file = FileOffset::new(self.file.try_clone()?, 0);
        GuestMemoryMmap::from_ranges_with_files([(ADDRESS, size, Some(file))]).map_err(io::Error::other)
    }

    /// Reads for a VMM that does not map the window. Bytes beyond its end are zero.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset < self.bytes {
            let read = self.file.read_at(data, offset);
            read.map_or_else(|error| log::warn!("cannot read the window: {error}"), drop);
        }
    }

    /// Writes for a VMM that does not map the window. Bytes beyond its end are dropped.
    pub(super) fn write(&self, offset: u64, data: &[u8]) {
        let room = usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        if let Err(error) = self.file.write_all_at(&data[..data.len().min(room)], offset) {
            log::warn!("cannot write the window: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_keeps_its_size() {
        let window = Window::new(0x2000).expect("a window");
        rustix::fs::ftruncate(window.file(), 0x1000).expect_err("sealed");
        window.write(0x1ffe, &[1, 2, 3]);
        let mut data = [9; 4];
        window.read(0x1ffe, &mut data);
        assert_eq!(data, [1, 2, 0, 0]);
        window.write(u64::MAX, &[1]);
        window.read(u64::MAX, &mut data);
        assert_eq!(data, [0; 4]);
    }
}
