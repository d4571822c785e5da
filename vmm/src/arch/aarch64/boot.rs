//! What a kernel finds beside itself: initramfs, and the device tree with the command line.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};

use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
};

use super::fdt;
use super::kernel::Loaded;
use super::layout::{self, PAGE};
use crate::machine::Machine;

/// Why a guest cannot be given what it boots with.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The initramfs cannot be read.
    #[error("cannot read the initramfs")]
    ReadInitramfs(#[source] io::Error),
    /// There is nothing in it.
    #[error("the initramfs is empty")]
    EmptyInitramfs,
    /// It does not fit between the kernel and the end of memory.
    #[error(
        "the initramfs of {size} bytes does not fit: {room} bytes of guest memory are left; raise --memory"
    )]
    InitramfsTooBig {
        /// Its size.
        size: u64,
        /// What the kernel leaves.
        room: u64,
    },
    /// The command line is longer than Linux takes.
    #[error("the command line has {0} bytes, and Linux takes {max}", max = layout::CMDLINE_MAX - 1)]
    CmdlineTooLong(usize),
    /// The command line holds what no command line can.
    #[error("the command line holds a zero byte")]
    CmdlineZero,
    /// The device tree cannot be made.
    #[error("cannot make the device tree")]
    Fdt(#[source] vm_fdt::Error),
    /// Guest memory refuses a write.
    #[error("cannot write the boot data")]
    Write(#[source] GuestMemoryError),
}

/// Writes everything that `kernel` finds beside itself, on `machine`.
///
/// # Errors
/// [`BootError`], each with what does not fit or cannot be read.
pub fn write(
    memory: &GuestMemoryMmap,
    kernel: &Loaded,
    initramfs: Option<&mut File>,
    cmdline: &str,
    machine: &Machine,
) -> Result<(), BootError> {
    if cmdline.len() >= layout::CMDLINE_MAX {
        return Err(BootError::CmdlineTooLong(cmdline.len()));
    }
    if cmdline.contains('\0') {
        return Err(BootError::CmdlineZero);
    }
    let initramfs = initramfs
        .map(|file| load_initramfs(memory, kernel, file))
        .transpose()?;
    let end = memory.last_addr().raw_value() + 1;
    let tree = fdt::build(machine, end - layout::RAM, cmdline, initramfs);
    memory
        .write_slice(&tree.map_err(BootError::Fdt)?, GuestAddress(layout::FDT))
        .map_err(BootError::Write)
}

/// Puts it as high as it may lie, so that the kernel has room to grow; address and size.
fn load_initramfs(
    memory: &GuestMemoryMmap,
    kernel: &Loaded,
    file: &mut File,
) -> Result<(u64, u64), BootError> {
    let size = file
        .seek(SeekFrom::End(0))
        .map_err(BootError::ReadInitramfs)?;
    file.rewind().map_err(BootError::ReadInitramfs)?;
    if size == 0 {
        return Err(BootError::EmptyInitramfs);
    }
    let end = memory.last_addr().raw_value() + 1;
    let end = end.min(layout::RAM + layout::INITRAMFS_REACH);
    let floor = kernel.end.next_multiple_of(PAGE);
    let room = end.saturating_sub(floor);
    let start = end.saturating_sub(size) & !(PAGE - 1);
    if size > room || start < floor {
        return Err(BootError::InitramfsTooBig { size, room });
    }
    let bytes = usize::try_from(size).unwrap_or(usize::MAX);
    memory
        .read_exact_volatile_from(GuestAddress(start), file, bytes)
        .map_err(BootError::Write)?;
    Ok((start, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const MIB: u64 = 1 << 20;
    const MACHINE: Machine = Machine {
        vcpus: 1,
        virtio: true,
        window: 0,
        pmu: false,
    };

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(layout::RAM), 8 << 20)]).expect("8 MiB")
    }

    fn kernel() -> Loaded {
        Loaded {
            entry: layout::KERNEL,
            end: layout::RAM + 4 * MIB + 5,
        }
    }

    fn file(size: usize) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(&vec![0xa5; size]).expect("written");
        file
    }

    #[test]
    fn initramfs_lies_at_the_end_of_memory() {
        let placed = load_initramfs(&memory(), &kernel(), &mut file(5000)).expect("fits");
        assert_eq!(placed, (layout::RAM + 8 * MIB - 8192, 5000));
    }

    #[test]
    fn initramfs_that_would_touch_the_kernel_is_refused() {
        let room = usize::try_from(4 * MIB - 4096).expect("small");
        assert!(load_initramfs(&memory(), &kernel(), &mut file(room)).is_ok());
        assert!(matches!(
            load_initramfs(&memory(), &kernel(), &mut file(room + 1)),
            Err(BootError::InitramfsTooBig { .. })
        ));
        assert!(matches!(
            load_initramfs(&memory(), &kernel(), &mut file(0)),
            Err(BootError::EmptyInitramfs)
        ));
    }

    #[test]
    fn command_line_is_bounded_and_whole() {
        let write = |cmdline: &str| write(&memory(), &kernel(), None, cmdline, &MACHINE);
        let longest = "x".repeat(layout::CMDLINE_MAX - 1);
        assert!(write(&longest).is_ok());
        assert!(matches!(
            write(&format!("{longest}x")),
            Err(BootError::CmdlineTooLong(2048))
        ));
        assert!(matches!(write("a\0b"), Err(BootError::CmdlineZero)));
    }

    #[test]
    fn device_tree_lies_where_the_kernel_is_told() {
        let memory = memory();
        write(&memory, &kernel(), None, "quiet", &MACHINE).expect("written");
        let magic: u32 = memory.read_obj(GuestAddress(layout::FDT)).expect("there");
        assert_eq!(u32::from_be(magic), 0xd00d_feed);
    }
}
