//! Keeps the ORC tables of a kernel and leaves out the rest of its ELF file, for a lab, which would have to hold the whole
//! file in memory. With the tables, a VMM finds callers in the kernel (`vmm run --vmlinux`).

use object::{File, Object, ObjectSection, SectionFlags, elf};

/// Sections whose contents are kept.
const TABLES: [&str; 3] = [".orc_header", ".orc_unwind_ip", ".orc_unwind"];
/// Length of the file header and of a section header.
const HEADER: u16 = 64;
/// The file header up to its entry point: a 64-bit little-endian program for x86-64.
const PROGRAM: [u8; 24] = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0";

/// Returns an ELF file with the ORC tables of `vmlinux`, and with headers of the sections of code, without their contents.
/// `None` if there are no tables.
pub(crate) fn tables(vmlinux: &[u8]) -> Option<Vec<u8>> {
    let file = File::parse(vmlinux).ok()?;
    file.section_by_name(TABLES[2])?;
    let (mut contents, mut names) = (Vec::new(), vec![0]);
    let mut headers = vec![0; HEADER.into()];
    let mut add = |name: &str, kind: elf::SectionType, flags: u64, address: u64, size: u64, bytes: &[u8]| {
        headers.extend(u32::try_from(names.len()).ok()?.to_le_bytes());
        names.extend(name.bytes().chain([0]));
        // The section of names is the last one, and has its own name.
        let bytes = if kind == elf::SHT_STRTAB { names.clone() } else { bytes.to_vec() };
        let size = if kind == elf::SHT_STRTAB { names.len() as u64 } else { size };
        headers.extend(kind.0.to_le_bytes());
        for word in [flags, address, (usize::from(HEADER) + contents.len()) as u64, size, 0, 1, 0] {
            headers.extend(word.to_le_bytes());
        }
        contents.extend(bytes);
        Some(())
    };
    for section in file.sections() {
        let (Ok(name), SectionFlags::Elf { sh_flags, .. }) = (section.name(), section.flags()) else {
            continue;
        };
        let (address, size) = (section.address(), section.size());
        if TABLES.contains(&name) {
            add(name, elf::SHT_PROGBITS, sh_flags.0, address, size, section.data().ok()?)?;
        } else if sh_flags.contains(elf::SHF_EXECINSTR) {
            add(name, elf::SHT_NOBITS, sh_flags.0, address, size, &[])?;
        }
    }
    add(".shstrtab", elf::SHT_STRTAB, 0, 0, 0, &[])?;
    let sections = u16::try_from(headers.len() / usize::from(HEADER)).ok()?;
    let mut bytes = PROGRAM.to_vec();
    for word in [0, 0, (usize::from(HEADER) + contents.len()) as u64] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend([0; 4]);
    for half in [HEADER, 0, 0, HEADER, sections, sections - 1] {
        bytes.extend(half.to_le_bytes());
    }
    Some([bytes, contents, headers].concat())
}
