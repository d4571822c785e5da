//! Boot data that every architecture has: the initramfs and the kernel command line.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

/// Alignment of the initramfs: a page of the guest.
const PAGE: u64 = 4096;

/// Errors from loading the initramfs or the command line.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The initramfs cannot be read.
    #[error("cannot read the initramfs")]
    ReadInitramfs(#[source] io::Error),
    /// The initramfs has no bytes.
    #[error("the initramfs is empty")]
    EmptyInitramfs,
    /// The initramfs does not fit between the kernel and the end of memory.
    #[error("the initramfs of {size} bytes does not fit: {room} bytes of guest memory are left; raise --memory")]
    InitramfsTooBig {
        /// Its size.
        size: u64,
        /// Free bytes after the kernel.
        room: u64,
    },
    /// The file cannot be read into guest memory.
    #[error("cannot write the initramfs")]
    WriteInitramfs(#[source] GuestMemoryError),
    /// The command line exceeds Linux's limit.
    #[error("the command line is too long: {len} bytes, and Linux accepts at most {most}")]
    CmdlineTooLong {
        /// Its length.
        len: usize,
        /// Linux's limit, without the terminator.
        most: usize,
    },
    /// The command line contains a zero byte.
    #[error("the command line contains a zero byte")]
    CmdlineZero,
}

/// Checks that Linux accepts `cmdline`. Linux's buffer has `max` bytes, including the terminating zero.
///
/// # Errors
/// [`DataError::CmdlineTooLong`], [`DataError::CmdlineZero`].
pub(crate) fn check_cmdline(cmdline: &str, max: usize) -> Result<(), DataError> {
    if cmdline.len() >= max {
        return Err(DataError::CmdlineTooLong { len: cmdline.len(), most: max - 1 });
    }
    if cmdline.contains('\0') {
        return Err(DataError::CmdlineZero);
    }
    Ok(())
}

/// Loads an initramfs at the end of `room`, so that free memory remains between the kernel and the initramfs. Returns
/// the address and the size.
///
/// # Errors
/// [`DataError`].
pub(crate) fn load_initramfs(
    memory: &GuestMemoryMmap,
    room: Range<u64>,
    file: &mut File,
) -> Result<(u64, u64), DataError> {
    let size = file.seek(SeekFrom::End(0)).map_err(DataError::ReadInitramfs)?;
    file.rewind().map_err(DataError::ReadInitramfs)?;
    if size == 0 {
        return Err(DataError::EmptyInitramfs);
    }
    let floor = room.start.next_multiple_of(PAGE);
    let left = room.end.saturating_sub(floor);
    let start = room.end.saturating_sub(size) & !(PAGE - 1);
    if size > left || start < floor {
        return Err(DataError::InitramfsTooBig { size, room: left });
    }
    let bytes = usize::try_from(size).unwrap_or(usize::MAX);
    memory.read_exact_volatile_from(GuestAddress(start), file, bytes).map_err(DataError::WriteInitramfs)?;
    Ok((start, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const MIB: u64 = 1 << 20;
    const BASE: u64 = 1 << 30;

    fn load(size: usize) -> Result<(u64, u64), DataError> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(BASE), 8 << 20)]);
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&vec![0xa5; size]).expect("written");
        let room = BASE + 4 * MIB + 5..BASE + 8 * MIB;
        load_initramfs(&memory.expect("8 MiB"), room, &mut file)
    }

    #[test]
    fn initramfs_lies_at_the_end_of_its_room() {
        assert_eq!(load(5000).expect("fits"), (BASE + 8 * MIB - 8192, 5000));
    }

    #[test]
    fn initramfs_that_would_touch_the_kernel_is_refused() {
        let room = usize::try_from(4 * MIB - 4096).expect("small");
        assert!(load(room).is_ok());
        assert!(matches!(load(room + 1), Err(DataError::InitramfsTooBig { .. })));
        assert!(matches!(load(0), Err(DataError::EmptyInitramfs)));
    }

    #[test]
    fn command_line_is_bounded_and_has_no_zero_byte() {
        let longest = "x".repeat(99);
        assert!(check_cmdline(&longest, 100).is_ok());
        let error = check_cmdline(&format!("{longest}x"), 100).expect_err("too long");
        assert!(error.to_string().contains("100 bytes, and Linux accepts at most 99"));
        assert!(matches!(check_cmdline("a\0b", 100), Err(DataError::CmdlineZero)));
    }
}
