//! The data that a kernel boots with: initramfs, command line, memory map, boot parameters.

use std::fs::File;
use std::ops::Range;

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap};

use super::kernel::{Loaded, low_end};
use super::{acpi, layout, regs};
use crate::boot_data::{self, DataError};
use crate::machine::Machine;

/// Errors from writing the boot data.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The initramfs or the command line is not suitable.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A write to guest memory failed.
    #[error("cannot write the boot data")]
    Write(#[source] GuestMemoryError),
    /// The ACPI tables could not be written to guest memory.
    #[error("cannot write the ACPI tables")]
    Acpi(#[source] GuestMemoryError),
    /// The boot vCPU's descriptor table and page tables could not be written to guest memory.
    #[error(transparent)]
    Tables(#[from] regs::RegisterError),
    /// The boot parameters could not be written to guest memory.
    #[error("cannot write the boot parameters")]
    Params(#[source] linux_loader::configurator::Error),
}

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
const KERNEL_ALIGNMENT: u32 = 0x100_0000;

/// Real-mode code for the reset vector: requests a reset through [`layout::RESET_PORT`], and waits for it. A kernel
/// that has no other reset method jumps to the vector. Without this code, it would execute empty memory forever.
const RESET_CODE: [u8; 9] = {
    let [low, high] = layout::RESET_PORT.to_le_bytes();
    // mov dx, port; mov al, value; out dx, al; hlt; jmp back to the hlt
    [0xba, low, high, 0xb0, layout::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

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
    let mut params = boot_params::default();
    if let Some(header) = kernel.header {
        params.hdr = header;
    }
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    if params.hdr.kernel_alignment == 0 {
        params.hdr.kernel_alignment = KERNEL_ALIGNMENT;
    }
    params.hdr.cmd_line_ptr = low(layout::CMDLINE);
    params.hdr.cmdline_size = low(write_cmdline(memory, cmdline)?);
    if let Some(file) = initramfs {
        let (start, size) = boot_data::load_initramfs(memory, initramfs_room(memory, kernel), file)?;
        params.hdr.ramdisk_image = low(start);
        params.hdr.ramdisk_size = low(size);
    }
    memory.write_slice(&RESET_CODE, GuestAddress(layout::RESET_VECTOR)).map_err(BootError::Write)?;
    params.acpi_rsdp_addr = layout::ACPI;
    let map = memory_map(low_end(memory), memory.last_addr().raw_value() + 1);
    for (entry, slot) in map.iter().zip(params.e820_table.iter_mut()) {
        *slot = *entry;
        params.e820_entries += 1;
    }
    LinuxBootConfigurator::write_bootparams(&BootParams::new(&params, GuestAddress(layout::ZERO_PAGE)), memory)
        .map_err(BootError::Params)?;
    acpi::write(memory, machine).map_err(BootError::Acpi)?;
    Ok(regs::write_tables(memory)?)
}

/// Converts an address or a size below the gap to a 32-bit field of the boot protocol.
#[expect(clippy::cast_possible_truncation, reason = "addresses and sizes below the gap at 3 GiB")]
fn low(value: u64) -> u32 {
    value as u32
}

fn write_cmdline(memory: &GuestMemoryMmap, cmdline: &str) -> Result<u64, BootError> {
    boot_data::check_cmdline(cmdline, layout::CMDLINE_MAX)?;
    let mut bytes = cmdline.as_bytes().to_vec();
    bytes.push(0);
    memory.write_slice(&bytes, GuestAddress(layout::CMDLINE)).map_err(BootError::Write)?;
    Ok(cmdline.len() as u64)
}

/// The address range for the initramfs. It starts at the end of the kernel. It ends at the end of low memory, or at the
/// limit in the kernel's header, whichever is lower.
fn initramfs_room(memory: &GuestMemoryMmap, kernel: &Loaded) -> Range<u64> {
    let limit = match kernel.header {
        Some(header) if header.initrd_addr_max != 0 => u64::from(header.initrd_addr_max) + 1,
        _ => layout::GAP,
    };
    kernel.end..low_end(memory).min(limit)
}

fn memory_map(low_end: u64, end: u64) -> Vec<boot_e820_entry> {
    let entry = |addr: u64, end: u64, r#type: u32| boot_e820_entry { addr, size: end - addr, r#type };
    let mut map = vec![
        entry(0, layout::LOW_MEMORY_END, E820_RAM),
        entry(layout::ACPI, layout::FIRMWARE_END, E820_RESERVED),
        entry(layout::HIGH_MEMORY, low_end, E820_RAM),
    ];
    if end > layout::GAP_END {
        map.push(entry(layout::GAP_END, end, E820_RAM));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).expect("8 MiB")
    }

    fn kernel() -> Loaded {
        Loaded { entry: MIB, end: 4 * MIB + 5, header: None }
    }

    #[test]
    fn initramfs_has_the_room_between_kernel_and_end_of_memory() {
        let room = initramfs_room(&memory(), &kernel());
        assert_eq!(room, 4 * MIB + 5..8 * MIB);
    }

    #[test]
    fn command_line_too_long_or_with_nul_is_refused() {
        let longest = "x".repeat(layout::CMDLINE_MAX - 1);
        assert!(write_cmdline(&memory(), &longest).is_ok());
        assert!(matches!(
            write_cmdline(&memory(), &format!("{longest}x")),
            Err(BootError::Data(DataError::CmdlineTooLong { len: 2048, .. }))
        ));
        assert!(matches!(write_cmdline(&memory(), "a\0b"), Err(BootError::Data(DataError::CmdlineZero))));
    }

    #[test]
    fn memory_map_excludes_the_gap() {
        let ram = |map: Vec<boot_e820_entry>| -> u64 {
            map.iter().filter(|entry| { entry.r#type } == E820_RAM).map(|entry| entry.size).sum()
        };
        let hidden = layout::HIGH_MEMORY - layout::LOW_MEMORY_END;
        assert_eq!(ram(memory_map(64 * MIB, 64 * MIB)), 64 * MIB - hidden);
        let big = memory_map(layout::GAP, layout::GAP_END + MIB);
        assert_eq!(ram(big), layout::GAP + MIB - hidden);
    }
}
