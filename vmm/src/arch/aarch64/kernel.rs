//! Loads kernel images. First checks an image's format and header, and whether the image fits into guest memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use linux_loader::loader::{KernelLoader, PE};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::layout;

/// The known kinds of images.
pub const KINDS: &str = "an arm64 Image";

/// Whether all kernels have frame pointers.
pub const HAVE_FRAME_POINTERS: bool = true;

/// Errors from loading a kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file cannot be read.
    #[error("cannot read it")]
    Read(#[source] io::Error),
    /// The file is not of a known kind.
    #[error("not a kernel: must be {KINDS}")]
    NotKernel,
    /// A kernel in a format for boot loaders or debuggers. The fields are the format's name and how to get an Image.
    #[error("{0}: must be {KINDS}, {1}")]
    OtherForm(&'static str, &'static str),
    /// A big-endian kernel, which this VMM cannot boot.
    #[error("a big-endian kernel: must be little-endian")]
    BigEndian,
    /// A kernel from before Linux 3.17, whose header has no size.
    #[error("an Image without a size: must be a kernel of version 3.17 or later")]
    NoSize,
    /// The file ends within the header.
    #[error("the file is truncated: it has {has} bytes, but at least {needs} are needed")]
    Truncated {
        /// Bytes in the file.
        has: u64,
        /// Bytes of the header.
        needs: u64,
    },
    /// The image reaches beyond guest memory.
    #[error("it needs {needs_mib} MiB of memory, and the guest has {has_mib} MiB: raise --memory")]
    TooBig {
        /// MiB of memory that the image needs.
        needs_mib: u64,
        /// MiB of the guest's memory.
        has_mib: u64,
    },
    /// The loader returns an error.
    #[error("cannot load it")]
    Load(#[source] linux_loader::loader::Error),
}

/// A kernel in guest memory.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The address of its first instruction.
    pub entry: u64,
    /// End of the memory that the kernel uses before it reads the device tree.
    pub end: u64,
}

/// Size in bytes of the header of an Image. Linux's Documentation/arch/arm64/booting.rst describes the header.
const HEADER: usize = 64;
const MAGIC_AT: usize = 0x38;
const MAGIC: &[u8] = b"ARM\x64";
const TEXT_OFFSET_AT: usize = 8;
const SIZE_AT: usize = 16;
const FLAGS_AT: usize = 24;
const FLAG_BIG_ENDIAN: u64 = 1;

const ZBOOT_MAGIC_AT: usize = 4;
const ZBOOT_MAGIC: &[u8] = b"zimg";
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Loads `file` into `memory`.
///
/// # Errors
/// [`KernelError`]: the file or the memory is not suitable.
pub fn load(memory: &GuestMemoryMmap, file: &mut File) -> Result<Loaded, KernelError> {
    let mut start = Vec::new();
    file.rewind().map_err(KernelError::Read)?;
    file.by_ref().take(HEADER as u64).read_to_end(&mut start).map_err(KernelError::Read)?;
    let has = file.seek(SeekFrom::End(0)).map_err(KernelError::Read)?;
    if !has_at(&start, MAGIC_AT, MAGIC) {
        return Err(what_else(&start));
    }
    let field = |at: usize| {
        let bytes = start.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    if field(FLAGS_AT) & FLAG_BIG_ENDIAN != 0 {
        return Err(KernelError::BigEndian);
    }
    let size = field(SIZE_AT);
    if size == 0 {
        return Err(KernelError::NoSize);
    }
    if has < HEADER as u64 {
        let needs = HEADER as u64;
        return Err(KernelError::Truncated { has, needs });
    }
    // The size in the header is the kernel's size in memory. The file may be shorter, because it omits the zeroed data
    // at the end.
    let needs = layout::KERNEL.saturating_add(field(TEXT_OFFSET_AT)).saturating_add(size.max(has));
    let end = memory.last_addr().raw_value() + 1;
    if needs > end {
        return Err(KernelError::TooBig {
            needs_mib: (needs - layout::RAM).div_ceil(1 << 20),
            has_mib: (end - layout::RAM) >> 20,
        });
    }
    let base = GuestAddress(layout::KERNEL);
    let loaded = PE::load(memory, Some(base), file, None).map_err(KernelError::Load)?;
    let entry = loaded.kernel_load.raw_value();
    Ok(Loaded { entry, end: loaded.kernel_end.max(entry + size) })
}

fn has_at(bytes: &[u8], at: usize, magic: &[u8]) -> bool {
    bytes.get(at..).is_some_and(|rest| rest.starts_with(magic))
}

/// The error for a file that is not an Image.
fn what_else(start: &[u8]) -> KernelError {
    if has_at(start, 0, GZIP_MAGIC) {
        KernelError::OtherForm("a compressed kernel", "as 'gzip -dc' unpacks it")
    } else if has_at(start, ZBOOT_MAGIC_AT, ZBOOT_MAGIC) {
        KernelError::OtherForm(
            "a compressed kernel for EFI (zboot)",
            "which the kernel's build leaves in arch/arm64/boot",
        )
    } else if has_at(start, 0, ELF_MAGIC) {
        KernelError::OtherForm("an ELF file", "which the kernel's build leaves in arch/arm64/boot")
    } else {
        KernelError::NotKernel
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use vm_memory::Bytes;

    const MEMORY: usize = 16 << 20;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(layout::RAM), MEMORY)]).expect("16 MiB")
    }

    fn image(size: u64, flags: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[SIZE_AT..SIZE_AT + 8].copy_from_slice(&size.to_le_bytes());
        bytes[FLAGS_AT..FLAGS_AT + 8].copy_from_slice(&flags.to_le_bytes());
        bytes[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(MAGIC);
        bytes[4000] = 0xa5;
        bytes
    }

    fn loaded(bytes: &[u8]) -> Result<(GuestMemoryMmap, Loaded), KernelError> {
        let memory = memory();
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(bytes).expect("written");
        load(&memory, &mut file).map(|loaded| (memory, loaded))
    }

    #[test]
    fn image_is_loaded_at_its_offset_and_takes_the_size_in_its_header() {
        let (memory, loaded) = loaded(&image(1 << 20, 0xa)).expect("loads");
        assert_eq!(loaded.entry, layout::KERNEL);
        assert_eq!(loaded.end, layout::KERNEL + (1 << 20));
        let byte: u8 = memory.read_obj(GuestAddress(layout::KERNEL + 4000)).expect("in memory");
        assert_eq!(byte, 0xa5);
    }

    #[test]
    fn image_that_ends_with_the_memory_is_loaded() {
        let room = MEMORY as u64 - (layout::KERNEL - layout::RAM);
        let (memory, loaded) = loaded(&image(room, 0xa)).expect("loads");
        assert_eq!(loaded.end, memory.last_addr().raw_value() + 1);
        assert!(matches!(self::loaded(&image(room + 1, 0xa)), Err(KernelError::TooBig { .. })));
    }

    #[test]
    fn file_of_another_kind_is_refused_by_name() {
        let refused = |bytes: &[u8]| loaded(bytes).expect_err("refused").to_string();
        assert!(refused(b"").contains("not a kernel"));
        assert!(refused(&[0x55; 4096]).contains("not a kernel"));
        assert!(refused(b"\x1f\x8b\x08\0").contains("gzip -dc"));
        assert!(refused(b"MZ\0\0zimg").contains("zboot"));
        assert!(refused(b"\x7fELF").contains("ELF"));
        assert!(refused(&image(1 << 20, FLAG_BIG_ENDIAN)).contains("big-endian"));
        assert!(refused(&image(0, 0)).contains("3.17"));
        assert!(matches!(loaded(&image(64 << 20, 0)), Err(KernelError::TooBig { needs_mib: 66, has_mib: 16 })));
        assert!(matches!(loaded(&image(u64::MAX, 0)), Err(KernelError::TooBig { .. })));
    }
}
