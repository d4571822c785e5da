//! Page tables of every shape.

use super::*;
use crate::memory::View;

#[test]
fn pages_of_every_size_at_every_depth() {
    for levels in [4, 5] {
        for level in 0..3 {
            let mut guest = Guest::bare(levels);
            let size = 0x1000_u64 << (9 * level);
            let large = if level > 0 { PS } else { 0 };
            let address = 0x4000_0000_0000 + size * 3;
            // Map large pages to physical address zero. The memory may be smaller than a large page, and then it
            // contains no other address with the required alignment.
            let physical = if level == 0 { 0x20_0000 } else { 0 };
            // Bit 12 of a large page's entry is not part of its address.
            let entry = physical | large | (large << 5) | P | U;
            guest.map(address, entry, level, P | U);
            guest.put(physical + 0x1238 % size, 42);
            let at = address + 0x1238 % size;
            assert_eq!(word(&guest, at, Rights::User), Some(42), "{level}");
            assert_eq!(word(&guest, at, Rights::Kernel), Some(42));
            assert_eq!(word(&guest, address - 8, Rights::Kernel), None);
            assert_eq!(word(&guest, address + size, Rights::Kernel), None);
        }
    }
}

#[test]
fn user_access_needs_the_user_bit_at_every_level() {
    let leaf = 0x20_0000 | P;
    for closed in 0..4 {
        let mut guest = Guest::bare(4);
        guest.map(USTACK, leaf | U, 0, P | U);
        // Clears the bit at one level.
        let mut table = 0x1000;
        for level in (0..4).rev() {
            let at = table + (USTACK >> (12 + level * 9) & 511) * 8;
            if level == closed {
                guest.put(at, guest.get(at) & !U);
            }
            table = guest.get(at) & 0x000f_ffff_ffff_f000;
        }
        assert_eq!(word(&guest, USTACK, Rights::User), None);
        assert_eq!(word(&guest, USTACK, Rights::Kernel), Some(0));
    }
    // A program cannot read the upper half of the address space, even if the tables permit it.
    let mut guest = Guest::bare(4);
    guest.map(TEXT, leaf | U, 0, P | U);
    assert_eq!(word(&guest, TEXT, Rights::User), None);
    assert_eq!(word(&guest, TEXT, Rights::Kernel), Some(0));
}

#[test]
fn untranslatable_addresses_are_not_read() {
    let kernel = Rights::Kernel;
    let mut guest = Guest::bare(4);
    // A non-canonical address whose lower 48 bits are mapped.
    guest.map(USTACK, 0x20_0000 | P | U, 0, P | U);
    assert_eq!(word(&guest, USTACK | 1 << 50, kernel), None);
    assert_eq!(word(&guest, u64::MAX, kernel), None);
    // A large page at a level that does not support large pages.
    guest.map(0, P | U | PS, 3, P | U);
    assert_eq!(word(&guest, 0, kernel), None);
    // A page, and tables, beyond memory.
    guest.map(1 << 39, 1 << 40 | P | U, 0, P | U);
    assert_eq!(word(&guest, 1 << 39, kernel), None);
    guest.map(2 << 39, 0x000f_ffff_ffff_f000 | P | U, 3, P | U);
    assert_eq!(word(&guest, 2 << 39, kernel), None);
    let mut cpu = guest.cpu();
    cpu.cr3 = u64::MAX;
    let view = View::of(&guest.memory);
    let mut space = AddressSpace::new(&view, &cpu).expect("long mode");
    assert_eq!(space.words::<1, 8>(USTACK, kernel), None);
    // Modes that are not supported.
    for (cr0, cr4, efer) in [(1, 1 << 5, 1 << 10), (1 << 31, 0, 1 << 10), (1 << 31, 32, 0)] {
        let cpu = CpuState { cr0, cr4, efer, ..guest.cpu() };
        assert!(AddressSpace::new(&View::of(&guest.memory), &cpu).is_none());
    }
}

#[test]
fn tables_that_point_to_themselves_end_like_any() {
    let guest = Guest::bare(4);
    guest.put(0x1000, 0x1000 | P | U);
    // All four levels use the same table, so the page that is read is the table itself.
    assert_eq!(word(&guest, 0, Rights::User), Some(0x1000 | P | U));
    let cpu = guest.in_user(UTEXT, 0);
    assert_eq!(guest.chain(&cpu), [USER, UTEXT, 0]);
}

#[test]
fn words_and_stacks_go_across_pages() {
    let mut guest = Guest::bare(4);
    guest.map(USTACK, 0x20_0000 | P | U, 0, P | U);
    guest.map(USTACK + 0x1000, 0x28_0000 | P | U, 0, P | U);
    guest.put(0x20_0ff8, 0x1122_3344_5566_7788);
    guest.put(0x28_0000, 0x99aa_bbcc_ddee_ff00);
    assert_eq!(word(&guest, USTACK + 0xffc, Rights::User), Some(0xddee_ff00_1122_3344));
}
