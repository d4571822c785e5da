#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::Cursor;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::{BpRule, FrameKind, FrameRule, Register, SpRule};

const TEXT: u64 = 0xffff_ffff_8100_0000;
const TEXT_SIZE: usize = 0x1000;
/// Address of `.orc_unwind_ip`.
const AT: u64 = TEXT + 0x10_0000;
/// Debian 13's 6.12.
const TYPED: &[u8] = b"\xfe\x5d\x32\xbf\x58\x1b\xd6\x3b\x2c\xa9\xa5\xc6\x5b\xa5\xa6\x25\xea\xb3\xfe\x24";
/// 7.3 of Debian 13's backports.
const RENUMBERED: &[u8] = b"\x13\x7c\x36\xad\x76\x27\xc4\xdd\x55\x93\x21\x76\xbb\x0e\xcd\xbd\x50\x41\xfc\x82";

/// An entry: base registers of SP and BP, their offsets, and the last byte.
fn entry([sp, bp]: [u8; 2], offsets: [i16; 2], kind: u8) -> [u8; ENTRY] {
    let [a, b] = offsets.map(i16::to_le_bytes);
    [a[0], a[1], b[0], b[1], sp | bp << 4, kind]
}

/// The contents of both sections, for entries at offsets in the text.
fn sections(entries: &[(u64, [u8; ENTRY])]) -> [Vec<u8>; 2] {
    let word = |(index, (offset, _)): (u64, &(u64, _))| {
        let relative = (TEXT + offset).wrapping_sub(AT + index * 4).cast_signed();
        i32::try_from(relative).unwrap().to_le_bytes()
    };
    [(0..).zip(entries).flat_map(word).collect(), entries.iter().flat_map(|(_, entry)| *entry).collect()]
}

/// An ELF file for `machine` with the text of a kernel and the sections of ORC tables.
fn elf(machine: u16, tables: &[(&str, u64, &[u8])]) -> Vec<u8> {
    const HEADER: u64 = 64;
    const PROGBITS: u32 = 1;
    const STRTAB: u32 = 3;
    const ALLOC: u64 = 2;
    const EXECUTE: u64 = 4;
    let (mut names, mut contents) = (vec![0], Vec::new());
    let mut headers = vec![0; 64];
    let mut add = |name: &str, kind: u32, flags: u64, address: u64, data: Option<&[u8]>| {
        headers.extend(u32::try_from(names.len()).unwrap().to_le_bytes());
        names.extend(name.bytes().chain([0]));
        let bytes = data.map_or_else(|| names.clone(), <[u8]>::to_vec);
        headers.extend(kind.to_le_bytes());
        for word in [flags, address, HEADER + contents.len() as u64, bytes.len() as u64, 0, 1, 0] {
            headers.extend(u64::to_le_bytes(word));
        }
        contents.extend(bytes);
    };
    add(".text", PROGBITS, ALLOC | EXECUTE, TEXT, Some(&[0; TEXT_SIZE]));
    for (name, address, data) in tables {
        add(name, PROGBITS, ALLOC, *address, Some(data));
    }
    add(".shstrtab", STRTAB, 0, 0, None);
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0".to_vec();
    bytes.extend(machine.to_le_bytes());
    bytes.extend([1, 0, 0, 0]);
    for word in [0, 0, HEADER + contents.len() as u64] {
        bytes.extend(u64::to_le_bytes(word));
    }
    bytes.extend([0; 4]);
    let count = u16::try_from(headers.len() / 64).unwrap();
    for half in [64, 0, 0, 64, count, count - 1] {
        bytes.extend(u16::to_le_bytes(half));
    }
    [bytes, contents, headers].concat()
}

const X86_64: u16 = 62;

fn kernel(header: Option<&[u8]>, entries: &[(u64, [u8; ENTRY])]) -> Vec<u8> {
    let [addresses, unwind] = sections(entries);
    let mut tables = vec![(ADDRESSES, AT, &addresses[..]), (ENTRIES, AT + 0x1000, &unwind)];
    tables.extend(header.map(|header| (HEADER, AT + 0x2000, header)));
    elf(X86_64, &tables)
}

fn read(bytes: &[u8]) -> Result<OrcTable, OrcError> {
    OrcTable::read(Cursor::new(bytes))
}

fn frame(sp: SpRule, bp: BpRule, kind: FrameKind, interrupted: bool) -> Option<Rule> {
    Some(Rule::Frame(FrameRule { sp, bp, kind, interrupted }))
}

#[test]
fn each_format_yields_the_same_rules() {
    const SP: SpRule = SpRule::Sum(Register::Sp, 0x18);
    // The numbers of SP, BP, the previous SP, and of the words at SP and BP.
    let first = [5, 4, 1, 9, 8];
    for (header, [sp, bp, previous, at_sp, at_bp], [call, regs, partial, end]) in [
        (None, first, [0, 1, 2, 4]),
        (Some(TYPED), first, [2, 3 | 8, 4 | 8, 1]),
        (Some(RENUMBERED), [3, 4, 8, 9, 10], [2, 3 | 8, 4 | 8, 1]),
    ] {
        let undefined = if header.is_some() { 0 } else { call };
        let bytes = kernel(
            header,
            &[
                (0x10, entry([sp, 0], [0x18, 0], call)),
                (0x20, entry([bp, previous], [16, -16], call)),
                (0x30, entry([sp, bp], [0x18, -8], call)),
                (0x40, entry([at_sp, 0], [8, 0], call)),
                (0x50, entry([at_bp, 0], [-8, 0], call)),
                (0x60, entry([6, 0], [8, 0], call)),
                (0x70, entry([sp, 0], [0x18, 0], regs)),
                (0x80, entry([sp, 0], [0x18, 0], partial)),
                (0x90, entry([0, 0], [0, 0], end)),
                (0xa0, entry([0, 0], [0, 0], undefined)),
                (0xb0, entry([previous, 0], [0, 0], call)),
            ],
        );
        let table = read(&bytes).unwrap();
        let rule = |offset| table.rule(TEXT + offset);
        assert_eq!(rule(0xf), None, "before the first entry");
        for offset in [0x10, 0x1f] {
            assert_eq!(rule(offset), frame(SP, BpRule::Same, FrameKind::Call, false));
        }
        let old = SpRule::Sum(Register::Bp, 16);
        assert_eq!(rule(0x20), frame(old, BpRule::FromSp(-16), FrameKind::Call, false));
        assert_eq!(rule(0x30), frame(SP, BpRule::FromBp(-8), FrameKind::Call, false));
        let loaded = |register, before, after| SpRule::Loaded { register, before, after };
        assert_eq!(rule(0x40), frame(loaded(Register::Sp, 0, 8), BpRule::Same, FrameKind::Call, false));
        assert_eq!(rule(0x50), frame(loaded(Register::Bp, -8, 0), BpRule::Same, FrameKind::Call, false));
        assert_eq!(rule(0x60), frame(SpRule::Sum(Register::R10, 0), BpRule::Same, FrameKind::Call, false));
        assert_eq!(rule(0x70), frame(SP, BpRule::Same, FrameKind::Regs, true));
        assert_eq!(rule(0x80), frame(SP, BpRule::Same, FrameKind::PartialRegs, true));
        assert_eq!(rule(0x90), Some(Rule::End));
        for unknown in [0xa0, 0xb0, TEXT_SIZE as u64 - 1] {
            assert_eq!(rule(unknown), Some(Rule::Unknown), "{unknown:#x}");
        }
        for outside in [TEXT - 1, TEXT + TEXT_SIZE as u64, 0, u64::MAX, AT] {
            assert_eq!(table.rule(outside), None, "{outside:#x}");
        }
    }
}

#[test]
fn second_of_two_entries_at_one_address_counts() {
    let call = |offset| entry([5, 0], [offset, 0], 0);
    let table = read(&kernel(None, &[(0, call(8)), (0x10, call(16)), (0x10, call(8)), (0x20, call(24))])).unwrap();
    let sp = |offset| match table.rule(TEXT + offset) {
        Some(Rule::Frame(FrameRule { sp: SpRule::Sum(Register::Sp, sp), .. })) => sp,
        other => panic!("{other:?}"),
    };
    assert_eq!([sp(0), sp(0x10), sp(0x1f), sp(0x20)], [8, 8, 8, 24]);
    assert_eq!(table.starts.len(), 2, "equal neighbours are one entry");
}

#[test]
fn files_without_usable_tables_are_refused() {
    let call = entry([5, 0], [8, 0], 0);
    let [addresses, entries] = sections(&[(0, call), (0x10, call)]);
    let tables = |addresses: &[u8], entries: &[u8]| elf(X86_64, &[(ADDRESSES, AT, addresses), (ENTRIES, AT, entries)]);
    let bzimage = [&b"MZ"[..], &[0; 62]].concat();
    for other in [&bzimage[..], b"", b"\x7fELF", &elf(X86_64, &[])[4..]] {
        assert!(matches!(read(other), Err(OrcError::NotElf)));
    }
    assert!(matches!(read(&elf(X86_64, &[])[..0x100]), Err(OrcError::Elf(_))));
    assert!(matches!(read(&elf(183, &[(ADDRESSES, AT, &addresses), (ENTRIES, AT, &entries)])), Err(OrcError::Machine)));
    assert!(matches!(read(&elf(X86_64, &[])), Err(OrcError::NoTables)));
    assert!(matches!(read(&elf(X86_64, &[(ADDRESSES, AT, &addresses)])), Err(OrcError::NoTables)));
    assert!(matches!(read(&tables(&[], &[])), Err(OrcError::NoTables)));
    assert!(matches!(read(&kernel(Some(&[7; 20]), &[(0, call)])), Err(OrcError::Format)));
    assert!(matches!(read(&kernel(Some(&TYPED[..19]), &[(0, call)])), Err(OrcError::Format)));
    let damaged = |bytes: &[u8]| match read(bytes) {
        Err(OrcError::Damaged(why)) => why,
        other => panic!("{other:?}"),
    };
    for (addresses, entries) in [(&addresses[..4], &entries[..]), (&addresses[..7], &entries[..6])] {
        assert!(damaged(&tables(addresses, entries)).contains("lengths"));
    }
    assert!(damaged(&kernel(None, &[(0x10, call), (0, call)])).contains("sorted"));
    // The bit of an interrupted caller, which Linux 6.3 had at another place than its neighbours.
    for wrong in [entry([5, 0], [8, 0], 8), entry([5, 0], [8, 0], 3), entry([10, 0], [8, 0], 0)] {
        assert!(damaged(&kernel(None, &[(0, wrong)])).contains("unknown"), "{wrong:x?}");
    }
}

proptest! {
    #[test]
    fn any_damage_to_a_file_is_refused_or_harmless(
        entries in vec((0..0x20_u64, any::<[u8; ENTRY]>()), 1..8),
        header in prop_oneof![Just(None), Just(Some(TYPED)), Just(Some(RENUMBERED))],
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        looked_up in vec(prop_oneof![any::<u64>(), TEXT - 4..TEXT + 0x30], 0..16),
    ) {
        let mut entries = entries;
        entries.sort_by_key(|(at, _)| *at);
        let mut bytes = kernel(header, &entries);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(table) = read(&bytes) {
            for address in looked_up {
                let _ = table.rule(address);
            }
        }
    }
}
