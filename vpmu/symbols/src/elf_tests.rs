use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const FUNC: u8 = 2;
const OBJECT: u8 = 1;
const NOTYPE: u8 = 0;
const GLOBAL: u8 = 1 << 4;
/// Section index of symbols that the file does not define (`SHN_UNDEF`).
const UNDEFINED: u16 = 0;
const TEXT: u16 = 1;
/// Sizes of the headers.
const FILE_HEADER: u16 = 64;
const PROGRAM_HEADER: u16 = 56;
const SECTION_HEADER: u16 = 64;

/// Name, type, section, address, size.
type Entry<'a> = (&'a str, u8, u16, u64, u64);

/// An ELF file of two segments with a symbol table.
fn file(symbols: &[Entry<'_>]) -> Vec<u8> {
    let mut names = vec![0];
    let mut table = vec![0; 24];
    for &(name, kind, section, address, size) in symbols {
        table.extend(u32::try_from(names.len()).unwrap().to_le_bytes());
        table.extend([GLOBAL | kind, 0]);
        table.extend(section.to_le_bytes());
        table.extend(address.to_le_bytes());
        table.extend(size.to_le_bytes());
        names.extend(name.bytes().chain([0]));
    }
    let segments_at = u64::from(FILE_HEADER);
    let sections_at = segments_at + 2 * u64::from(PROGRAM_HEADER);
    let table_at = sections_at + 4 * u64::from(SECTION_HEADER);
    let names_at = table_at + table.len() as u64;
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // A program for x86-64, version 1.
    bytes.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [0, segments_at, sections_at] {
        bytes.extend(u64::to_le_bytes(word));
    }
    bytes.extend([0; 4]);
    for half in [FILE_HEADER, PROGRAM_HEADER, 2, SECTION_HEADER, 4, 3] {
        bytes.extend(u16::to_le_bytes(half));
    }
    for (offset, address, length) in [(0x1000, 0x40_1000, 0x800), (0x2000, 0x50_0000, 0x10)] {
        bytes.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        for word in [offset, address, address, length, length, 0x1000] {
            bytes.extend(u64::to_le_bytes(word));
        }
    }
    // The section headers: null, .text, .symtab and .strtab. Each has its type, offset, size, link, information and
    // entry size.
    for (kind, offset, size, link, information, entry) in [
        (0, 0, 0, 0, 0, 0),
        (1, 0x1000, 0, 0, 0, 0),
        (2, table_at, table.len() as u64, 3, 1, 24),
        (3, names_at, names.len() as u64, 0, 0, 0),
    ] {
        bytes.extend([0; 4]);
        bytes.extend(u32::to_le_bytes(kind));
        for word in [0, 0, offset, size] {
            bytes.extend(u64::to_le_bytes(word));
        }
        bytes.extend(u32::to_le_bytes(link));
        bytes.extend(u32::to_le_bytes(information));
        for word in [1, entry] {
            bytes.extend(u64::to_le_bytes(word));
        }
    }
    bytes.extend(table);
    bytes.extend(names);
    bytes
}

const SYMBOLS: [Entry<'_>; 8] = [
    ("table", OBJECT, TEXT, 0x40_1400, 0x20),
    ("assembler", FUNC, TEXT, 0x40_1300, 0),
    ("label", NOTYPE, TEXT, 0x40_1310, 0),
    ("inside", OBJECT, TEXT, 0x40_1108, 8),
    ("main", FUNC, TEXT, 0x40_1100, 0x80),
    ("alias", FUNC, TEXT, 0x40_1100, 0x80),
    ("imported", FUNC, UNDEFINED, 0x40_1200, 0x80),
    ("last", FUNC, TEXT, 0x40_1600, 0),
];

#[test]
fn symbol_of_any_kind_has_its_address() {
    let bytes = file(&[
        ("_text", NOTYPE, TEXT, 0x40_1000, 0),
        ("main", FUNC, TEXT, 0x40_1010, 8),
        ("elsewhere", FUNC, UNDEFINED, 0x40_1020, 0),
    ]);
    let elf = Elf::parse(&bytes).unwrap();
    let found = ["_text", "main", "elsewhere", "absent"].map(|name| elf.address_of(name));
    assert_eq!(found, [Some(0x40_1000), Some(0x40_1010), None, None]);
    assert_eq!(elf.build_id(), None);
}

#[test]
fn functions_of_a_file_are_found() {
    let bytes = file(&SYMBOLS);
    let functions = Elf::parse(&bytes).unwrap().functions();
    for (address, expected) in [
        (0x40_1100, Some(("main", 0))),
        (0x40_1110, Some(("main", 0x10))),
        (0x40_1180, None),
        (0x40_1200, None),
        (0x40_13ff, Some(("assembler", 0xff))),
        (0x40_1400, None),
        (0x40_1600, Some(("last", 0))),
        (0x40_2600, None),
    ] {
        let found = functions.at(address).map(|(&name, offset)| (name, offset));
        assert_eq!(found, expected, "{address:#x}");
    }
}

#[test]
fn offset_in_a_segment_has_an_address() {
    let bytes = file(&[]);
    let segments = Elf::parse(&bytes).unwrap().segments();
    assert_eq!(segments.address(0x1000), Some(0x40_1000));
    assert_eq!(segments.address(0x17ff), Some(0x40_17ff));
    assert_eq!(segments.address(0x200f), Some(0x50_000f));
    for outside in [0, 0xfff, 0x1800, 0x2010, u64::MAX] {
        assert_eq!(segments.address(outside), None, "{outside:#x}");
    }
}

#[test]
fn file_without_symbols_has_no_functions() {
    let functions = file(&[]);
    let functions = Elf::parse(&functions).unwrap().functions();
    assert!(functions.is_empty() && !functions.are_hidden());
}

#[test]
fn damaged_file_is_refused() {
    for bytes in [&b""[..], b"\x7fEL", b"MZ and no more", b"!<arch>\n"] {
        assert!(matches!(Elf::parse(bytes), Err(ElfError::NotElf)));
    }
    let cut = b"\x7fELF and no more";
    assert!(matches!(Elf::parse(cut), Err(ElfError::Damaged(_))));
}

proptest! {
    #[test]
    fn forged_file_is_read_or_refused(
        changes in vec((0..800_usize, any::<u8>()), 0..8),
        length in prop_oneof![Just(usize::MAX), 0..800_usize],
        addresses in vec(any::<u64>(), 0..8),
    ) {
        let mut bytes = file(&SYMBOLS);
        for (at, byte) in changes {
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
        }
        bytes.truncate(length);
        if let Ok(elf) = Elf::parse(&bytes) {
            let (functions, segments) = (elf.functions(), elf.segments());
            for address in addresses.into_iter().chain([0x40_1100, u64::MAX]) {
                if let Some((_, offset)) = functions.at(address) {
                    prop_assert!(offset <= address);
                }
                let _ = segments.address(address);
            }
        }
    }
}

#[test]
fn build_id_of_a_file_is_that_of_its_bytes() {
    // The test program itself may have none, but both ways must agree.
    let own = std::env::current_exe().unwrap();
    let bytes = std::fs::read(&own).unwrap();
    let expected = Elf::parse(&bytes).unwrap().build_id().map(<[u8]>::to_vec);
    assert_eq!(build_id(std::fs::File::open(own).unwrap()), expected);
    assert_eq!(build_id(std::io::Cursor::new(b"#!/bin/sh\n")), None);
}
