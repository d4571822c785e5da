//! Loads kernel images. First checks an image's format and size, and whether the image fits into guest memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap};

use super::layout;

/// The known kinds of images.
pub const KINDS: &str = "an x86-64 ELF vmlinux or a bzImage";

/// Whether all kernels have frame pointers.
pub const HAVE_FRAME_POINTERS: bool = false;

/// Errors from loading a kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("cannot read it")]
    Read(#[source] io::Error),
    /// The file is not of a known kind.
    #[error("not a kernel: must be {KINDS}")]
    NotKernel,
    /// An ELF file for another architecture, or a 32-bit ELF file.
    #[error("an ELF file, but not for x86-64")]
    OtherMachine,
    /// An ELF file without a loadable segment, or with an entry outside its segments.
    #[error("an ELF file without a loadable segment at its entry {0:#x}")]
    NoEntry(u64),
    /// A bzImage without a 64-bit entry.
    #[error("a bzImage without a 64-bit entry: must be a 64-bit kernel of version 3.8 or later")]
    Not64Bit,
    /// The file is truncated.
    #[error("the file is truncated: it has {has} bytes, but at least {needs} are needed")]
    Truncated {
        /// Bytes in the file.
        has: u64,
        /// Bytes that its headers specify.
        needs: u64,
    },
    /// The image would overwrite the boot tables.
    #[error("it loads at {0:#x}, below 1 MiB, where the boot tables are")]
    TooLow(u64),
    /// The image reaches beyond guest memory.
    #[error("it needs memory up to {needs_mib} MiB, and the guest has {has_mib} MiB: raise --memory")]
    TooBig {
        /// End of the memory that the image needs, in MiB.
        needs_mib: u64,
        /// End of the guest's memory, in MiB.
        has_mib: u64,
    },
    /// The loader returns an error.
    #[error("cannot load it")]
    Load(#[source] linux_loader::loader::Error),
}

/// A kernel in guest memory.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The address of its first instruction, in 64-bit mode.
    pub entry: u64,
    /// End of the memory that the kernel uses before it reads the memory map.
    pub end: u64,
    /// The header of a bzImage; `None` for ELF.
    pub header: Option<setup_header>,
}

const ELF_MAGIC: &[u8; 4] = b"\x7fELF";
const ELF_CLASS_64: u8 = 2;
const ELF_LITTLE_ENDIAN: u8 = 1;
const ELF_MACHINE_X86_64: u16 = 62;
const ELF_PROGRAM_HEADER: usize = 56;
const ELF_SEGMENT_LOAD: u32 = 1;

const BZIMAGE_HEADER: usize = 0x1f1;
const BZIMAGE_MAGIC: u32 = 0x5372_6448;
const BZIMAGE_BOOT_FLAG: u16 = 0xaa55;
/// Protocol 2.12: the first with `xloadflags`.
const BZIMAGE_VERSION: u16 = 0x020c;
const BZIMAGE_KERNEL_64: u16 = 1;
const BZIMAGE_ENTRY_64: u64 = 0x200;

/// Loads `file` into `memory`.
///
/// # Errors
/// [`KernelError`]: the file or the memory is not suitable.
pub fn load(memory: &GuestMemoryMmap, file: &mut File) -> Result<Loaded, KernelError> {
    let mut start = Vec::new();
    file.rewind().map_err(KernelError::Read)?;
    file.by_ref().take(0x268).read_to_end(&mut start).map_err(KernelError::Read)?;
    if start.starts_with(ELF_MAGIC) {
        load_elf(memory, file, &start)
    } else if u32_at(&start, 0x202) == Some(BZIMAGE_MAGIC) && u16_at(&start, 0x1fe) == Some(BZIMAGE_BOOT_FLAG) {
        load_bzimage(memory, file, &start)
    } else {
        Err(KernelError::NotKernel)
    }
}

/// End of the memory below the gap. The kernel and the initramfs are below this.
pub(super) fn low_end(memory: &GuestMemoryMmap) -> u64 {
    layout::GAP.min(memory.last_addr().raw_value() + 1)
}

fn fits(memory: &GuestMemoryMmap, start: u64, end: u64) -> Result<(), KernelError> {
    if start < layout::HIGH_MEMORY {
        return Err(KernelError::TooLow(start));
    }
    let has = low_end(memory);
    if end > has || end < start {
        return Err(KernelError::TooBig { needs_mib: end.div_ceil(1 << 20), has_mib: has >> 20 });
    }
    Ok(())
}

fn load_elf(memory: &GuestMemoryMmap, file: &mut File, start: &[u8]) -> Result<Loaded, KernelError> {
    let has = file.seek(SeekFrom::End(0)).map_err(KernelError::Read)?;
    if start.len() < 64 {
        return Err(KernelError::Truncated { has, needs: 64 });
    }
    let kind = (start[4], start[5], u16_at(start, 18));
    if kind != (ELF_CLASS_64, ELF_LITTLE_ENDIAN, Some(ELF_MACHINE_X86_64)) {
        return Err(KernelError::OtherMachine);
    }
    let field = |offset| u64_at(start, offset).unwrap_or(0);
    let (entry, headers) = (field(24), field(32));
    let count = u64::from(u16_at(start, 56).unwrap_or(0));
    let whole = |needs: Option<u64>| match needs {
        Some(needs) if needs <= has => Ok(()),
        needs => Err(KernelError::Truncated { has, needs: needs.unwrap_or(u64::MAX) }),
    };
    whole(headers.checked_add(count * ELF_PROGRAM_HEADER as u64))?;
    let mut entered = false;
    for index in 0..count {
        let mut header = [0; ELF_PROGRAM_HEADER];
        file.read_exact_at(&mut header, headers + index * ELF_PROGRAM_HEADER as u64).map_err(KernelError::Read)?;
        let field = |offset| u64_at(&header, offset).unwrap_or(0);
        let (offset, address, in_file, in_memory) = (field(8), field(24), field(32), field(40));
        if u32_at(&header, 0) != Some(ELF_SEGMENT_LOAD) || in_memory == 0 {
            continue;
        }
        whole(offset.checked_add(in_file))?;
        let end = address.saturating_add(in_memory.max(in_file));
        fits(memory, address, end)?;
        entered |= (address..end).contains(&entry);
    }
    if !entered {
        return Err(KernelError::NoEntry(entry));
    }
    let loaded = Elf::load(memory, None, file, None).map_err(KernelError::Load)?;
    Ok(Loaded { entry, end: loaded.kernel_end, header: None })
}

fn load_bzimage(memory: &GuestMemoryMmap, file: &mut File, start: &[u8]) -> Result<Loaded, KernelError> {
    let has = file.seek(SeekFrom::End(0)).map_err(KernelError::Read)?;
    let byte = |offset: usize| start.get(offset).copied().unwrap_or(0);
    let version = u16_at(start, 0x206).unwrap_or(0);
    let xloadflags = u16_at(start, 0x236).unwrap_or(0);
    if version < BZIMAGE_VERSION || xloadflags & BZIMAGE_KERNEL_64 == 0 {
        return Err(KernelError::Not64Bit);
    }
    let sectors = match byte(BZIMAGE_HEADER) {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let protected = u64::from(u32_at(start, 0x1f4).unwrap_or(0)) * 16;
    let needs = (sectors + 1) * 512 + protected;
    if has < needs {
        return Err(KernelError::Truncated { has, needs });
    }
    // The kernel unpacks itself at its preferred address and needs `init_size` bytes there.
    let preferred = u64_at(start, 0x258).unwrap_or(0).max(layout::HIGH_MEMORY);
    let unpacked = u64::from(u32_at(start, 0x260).unwrap_or(0));
    let end = preferred.saturating_add(unpacked).max(layout::HIGH_MEMORY + protected);
    fits(memory, preferred, end)?;
    let loaded = BzImage::load(memory, None, file, None).map_err(KernelError::Load)?;
    Ok(Loaded {
        entry: loaded.kernel_load.raw_value() + BZIMAGE_ENTRY_64,
        end: end.max(loaded.kernel_end),
        header: loaded.setup_header,
    })
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    let bytes = bytes.get(offset..offset + 2)?;
    Some(u16::from_le_bytes(bytes.try_into().ok()?))
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let bytes = bytes.get(offset..offset + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let bytes = bytes.get(offset..offset + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::{Bytes, GuestAddress};

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).expect("8 MiB")
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(bytes).expect("written");
        file
    }

    fn elf(machine: u16, address: u64, code: &[u8], in_memory: u64) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[24..32].copy_from_slice(&address.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&1u32.to_le_bytes());
        bytes[72..80].copy_from_slice(&120u64.to_le_bytes());
        bytes[88..96].copy_from_slice(&address.to_le_bytes());
        bytes[96..104].copy_from_slice(&(code.len() as u64).to_le_bytes());
        bytes[104..112].copy_from_slice(&in_memory.to_le_bytes());
        bytes.extend_from_slice(code);
        bytes
    }

    #[test]
    fn elf_is_loaded_at_its_addresses() {
        let memory = memory();
        let image = elf(62, 0x20_0000, b"code", 4096);
        let loaded = load(&memory, &mut file(&image)).expect("loads");
        assert_eq!((loaded.entry, loaded.end), (0x20_0000, 0x20_1000));
        let mut code = [0; 4];
        memory.read_slice(&mut code, GuestAddress(0x20_0000)).expect("in range");
        assert_eq!(&code, b"code");
    }

    #[test]
    fn file_that_is_not_a_kernel_is_refused() {
        let load = |bytes: &[u8]| load(&memory(), &mut file(bytes));
        assert!(matches!(load(b""), Err(KernelError::NotKernel)));
        assert!(matches!(load(&[0x55; 4096]), Err(KernelError::NotKernel)));
        let arm = elf(183, 0x20_0000, b"code", 4);
        assert!(matches!(load(&arm), Err(KernelError::OtherMachine)));
        assert!(matches!(load(&arm[..30]), Err(KernelError::Truncated { has: 30, needs: 64 })));
        let whole = elf(62, 0x20_0000, b"code", 4);
        assert!(matches!(load(&whole[..122]), Err(KernelError::Truncated { has: 122, needs: 124 })));
        let low = elf(62, 0x8000, b"code", 4);
        assert!(matches!(load(&low), Err(KernelError::TooLow(0x8000))));
        let big = elf(62, 0x20_0000, b"code", 64 << 20);
        assert!(matches!(load(&big), Err(KernelError::TooBig { needs_mib: 66, has_mib: 8 })));
        let wrapping = elf(62, u64::MAX - 1, b"code", 4);
        assert!(matches!(load(&wrapping), Err(KernelError::TooBig { .. })));
        let empty = elf(62, 0x20_0000, b"", 0);
        assert!(matches!(load(&empty), Err(KernelError::NoEntry(0x20_0000))));
    }

    fn bzimage(protected_bytes: usize, xloadflags: u16, init_size: u32) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        bytes[0x1f1] = 1;
        let paragraphs = u32::try_from(protected_bytes / 16).expect("small");
        bytes[0x1f4..0x1f8].copy_from_slice(&paragraphs.to_le_bytes());
        bytes[0x1fe..0x200].copy_from_slice(&0xaa55u16.to_le_bytes());
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        bytes[0x211] = 1;
        bytes[0x214..0x218].copy_from_slice(&0x10_0000u32.to_le_bytes());
        bytes[0x236..0x238].copy_from_slice(&xloadflags.to_le_bytes());
        bytes[0x258..0x260].copy_from_slice(&0x20_0000u64.to_le_bytes());
        bytes[0x260..0x264].copy_from_slice(&init_size.to_le_bytes());
        bytes.extend(std::iter::repeat_n(0xcc, protected_bytes));
        bytes
    }

    #[test]
    fn bzimage_is_entered_past_its_32_bit_code() {
        let image = bzimage(4096, 1, 1 << 20);
        let loaded = load(&memory(), &mut file(&image)).expect("loads");
        assert_eq!(loaded.entry, 0x10_0200);
        assert_eq!(loaded.end, 0x30_0000);
        assert!(loaded.header.is_some());
    }

    #[test]
    fn bad_bzimage_is_refused() {
        let load = |bytes: &[u8]| load(&memory(), &mut file(bytes));
        let image = bzimage(4096, 1, 1 << 20);
        assert!(matches!(load(&image[..2000]), Err(KernelError::Truncated { has: 2000, needs: 5120 })));
        assert!(matches!(load(&bzimage(4096, 0, 1 << 20)), Err(KernelError::Not64Bit)));
        assert!(matches!(load(&bzimage(4096, 1, 64 << 20)), Err(KernelError::TooBig { .. })));
    }
}
