//! The data that a kernel boots with: the initramfs, and the device tree with the command line.

use std::fs::File;
use std::ops::Range;

use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap};

use super::fdt;
use super::kernel::Loaded;
use super::layout;
use crate::boot_data::{self, DataError};
use crate::machine::Machine;

/// Errors from writing the boot data.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The initramfs or the command line is not suitable.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The device tree cannot be built.
    #[error("cannot build the device tree")]
    Fdt(#[source] vm_fdt::Error),
    /// A write to guest memory failed.
    #[error("cannot write the boot data")]
    Write(#[source] GuestMemoryError),
}

/// Writes the data that `kernel` needs to boot on `machine`.
///
/// # Errors
/// [`BootError`]: a part does not fit, or cannot be read.
pub fn write(
    memory: &GuestMemoryMmap,
    kernel: &Loaded,
    initramfs: Option<&mut File>,
    cmdline: &str,
    machine: &Machine,
) -> Result<(), BootError> {
    boot_data::check_cmdline(cmdline, layout::CMDLINE_MAX)?;
    let initramfs =
        initramfs.map(|file| boot_data::load_initramfs(memory, initramfs_room(memory, kernel), file)).transpose()?;
    let end = memory.last_addr().raw_value() + 1;
    let tree = fdt::build(machine, end - layout::RAM, cmdline, initramfs);
    memory.write_slice(&tree.map_err(BootError::Fdt)?, GuestAddress(layout::FDT)).map_err(BootError::Write)
}

/// The address range for the initramfs. It starts at the end of the kernel. It ends at the end of memory, or at the end
/// of the range in which Linux accepts an initramfs, whichever is lower.
fn initramfs_room(memory: &GuestMemoryMmap, kernel: &Loaded) -> Range<u64> {
    let end = memory.last_addr().raw_value() + 1;
    kernel.end..end.min(layout::RAM + layout::INITRAMFS_REACH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const MACHINE: Machine = Machine { vcpus: 1, virtio: true, window: 0, pmu: false };

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(layout::RAM), 8 << 20)]).expect("8 MiB")
    }

    fn kernel() -> Loaded {
        Loaded { entry: layout::KERNEL, end: layout::RAM + 4 * MIB + 5 }
    }

    #[test]
    fn initramfs_has_the_room_between_kernel_and_end_of_memory() {
        let room = initramfs_room(&memory(), &kernel());
        assert_eq!(room, layout::RAM + 4 * MIB + 5..layout::RAM + 8 * MIB);
    }

    #[test]
    fn command_line_too_long_or_with_nul_is_refused() {
        let write = |cmdline: &str| write(&memory(), &kernel(), None, cmdline, &MACHINE);
        let longest = "x".repeat(layout::CMDLINE_MAX - 1);
        assert!(write(&longest).is_ok());
        assert!(matches!(
            write(&format!("{longest}x")),
            Err(BootError::Data(DataError::CmdlineTooLong { len: 2048, .. }))
        ));
        assert!(matches!(write("a\0b"), Err(BootError::Data(DataError::CmdlineZero))));
    }

    #[test]
    fn device_tree_is_at_the_address_that_the_kernel_gets() {
        let memory = memory();
        write(&memory, &kernel(), None, "quiet", &MACHINE).expect("written");
        let magic: u32 = memory.read_obj(GuestAddress(layout::FDT)).expect("there");
        assert_eq!(u32::from_be(magic), 0xd00d_feed);
    }
}
