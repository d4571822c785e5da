//! Page tables of EL1 for 4 KiB pages and 48-bit addresses, or 52-bit addresses with FEAT_LPA2. Stock kernels use these
//! tables. This module does not walk other tables.

use vm_memory::GuestAddress;

use crate::arch::Page;
use crate::memory::View;

/// SCTLR_EL1: addresses are translated.
pub(super) const SCTLR_MMU: u64 = 1 << 0;

/// The fields of TCR_EL1 that hold, for each half of the address space, the number of upper address bits that are not
/// translated.
const TCR_SIZE_MASK: u64 = 0x3f;
const TCR_T1_SHIFT: u32 = 16;
/// The fields of TCR_EL1 that hold the granule of each half. The two halves encode the same granule differently.
const TCR_TG0_SHIFT: u32 = 14;
const TCR_TG0_4K: u64 = 0b00;
const TCR_TG1_SHIFT: u32 = 30;
const TCR_TG1_4K: u64 = 0b10;
const TCR_GRANULE_MASK: u64 = 0b11;
/// If set, the half's tables are not walked.
const TCR_EPD0: u64 = 1 << 7;
const TCR_EPD1: u64 = 1 << 23;
/// If set, the top byte of each address in the half is a tag and is ignored.
const TCR_TBI0: u64 = 1 << 37;
const TCR_TBI1: u64 = 1 << 38;
/// If set, descriptors and TTBRs hold 52-bit addresses (FEAT_LPA2).
const TCR_DS: u64 = 1 << 59;
/// Selects 48-bit addresses and 4 KiB pages in both halves.
#[cfg(any(test, feature = "internals"))]
pub(super) const TCR_48_BITS: u64 = 16 | 16 << TCR_T1_SHIFT | TCR_TG1_4K << TCR_TG1_SHIFT;

pub(super) const VALID: u64 = 1 << 0;
/// Above the last level, this bit means that the entry points to a table. In the last level, it means that the entry is
/// for a page.
pub(super) const TABLE: u64 = 1 << 1;
pub(super) const USER: u64 = 1 << 6;
const KERNEL_NEVER_EXECUTES: u64 = 1 << 53;
/// Flags of an entry that points to a table. They apply to all pages below that table: the first keeps programs from
/// accessing these pages, the second keeps the kernel from executing them.
const TABLE_NO_USER: u64 = 1 << 61;
const TABLE_KERNEL_NEVER_EXECUTES: u64 = 1 << 59;

/// The bits of an entry that hold an address, without and with [`TCR_DS`]. With [`TCR_DS`], the entry's bits
/// [`ADDRESS_DS_HIGH`] hold bits 51 and 50 of the address.
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;
const ADDRESS_DS: u64 = 0x0003_ffff_ffff_f000;
const ADDRESS_DS_HIGH: u64 = 0b11 << 8;
const ADDRESS_DS_HIGH_SHIFT: u32 = 42;
/// The address in a TTBR. It need not be page-aligned, because a top table with few entries is smaller than a page.
const ROOT: u64 = 0x0000_ffff_ffff_ffc0;
const ROOT_DS_HIGH: u64 = 0b1111 << 2;
const ROOT_DS_HIGH_SHIFT: u32 = 46;

const PAGE_BITS: u32 = 12;
/// Number of address bits that each level of tables resolves. The top level resolves the remaining bits.
const INDEX_BITS: u32 = 9;
/// The bit that selects an address's half.
const HALF: u32 = 55;
const TAG: u64 = 0xff << 56;

/// Whether `address` is in the lower half of the address space, which programs use.
pub(crate) fn is_user_address(address: u64) -> bool {
    address >> HALF & 1 == 0
}

/// The system registers that control address translation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Control {
    pub(super) sctlr: u64,
    pub(super) tcr: u64,
    pub(super) ttbr0: u64,
    pub(super) ttbr1: u64,
}

/// The tables of one half.
#[derive(Debug, Clone, Copy)]
struct Half {
    root: u64,
    /// Number of translated bits of an address.
    bits: u32,
    /// Whether the top byte of an address is ignored.
    tagged: bool,
}

impl Half {
    /// Returns the half whose tables are at `ttbr`. `untranslated` is the number of address bits that are not
    /// translated. `None` if the granule or `untranslated` is not supported.
    fn new(ttbr: u64, is_4k: bool, untranslated: u64, tagged: bool, wide: bool) -> Option<Self> {
        let bits = match (untranslated, wide) {
            (16, _) => 48,
            (12, true) => 52,
            _ => return None,
        };
        let high = if wide { ttbr & ROOT_DS_HIGH } else { 0 };
        is_4k.then_some(Self {
            root: ttbr & ROOT & !if wide { ROOT_DS_HIGH } else { 0 } | high << ROOT_DS_HIGH_SHIFT,
            bits,
            tagged,
        })
    }
}

/// The page tables that a vCPU uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables {
    lower: Option<Half>,
    upper: Option<Half>,
    /// Whether entries hold 52-bit addresses.
    wide: bool,
}

impl Tables {
    /// Returns the tables that `control` selects. `None` if translation is off.
    pub(super) fn new(control: &Control) -> Option<Self> {
        if control.sctlr & SCTLR_MMU == 0 {
            return None;
        }
        let tcr = control.tcr;
        let wide = tcr & TCR_DS != 0;
        let granule = |shift: u32| tcr >> shift & TCR_GRANULE_MASK;
        let half = |off, ttbr, is_4k, shift: u32, tag| match tcr & off {
            0 => Half::new(ttbr, is_4k, tcr >> shift & TCR_SIZE_MASK, tcr & tag != 0, wide),
            _ => None,
        };
        let lower_is_4k = granule(TCR_TG0_SHIFT) == TCR_TG0_4K;
        let upper_is_4k = granule(TCR_TG1_SHIFT) == TCR_TG1_4K;
        Some(Self {
            lower: half(TCR_EPD0, control.ttbr0, lower_is_4k, 0, TCR_TBI0),
            upper: half(TCR_EPD1, control.ttbr1, upper_is_4k, TCR_T1_SHIFT, TCR_TBI1),
            wide,
        })
    }

    /// Translates through the tables. Reads at most one entry per level, no matter what the tables contain.
    pub(super) fn walk(&self, memory: &View<'_>, address: u64) -> Option<Page> {
        let is_upper = !is_user_address(address);
        let half = if is_upper { self.upper? } else { self.lower? };
        let tag = if half.tagged { TAG } else { 0 };
        let sign = if is_upper { u64::MAX } else { 0 };
        if (address ^ sign) & !tag & u64::MAX << half.bits != 0 {
            return None;
        }
        let translated = address & ((1 << half.bits) - 1);
        let mut table = half.root;
        let (mut user, mut executable) = (true, true);
        let levels = (half.bits - PAGE_BITS).div_ceil(INDEX_BITS);
        for level in (0..levels).rev() {
            let shift = PAGE_BITS + level * INDEX_BITS;
            let index = translated >> shift & ((1 << INDEX_BITS) - 1);
            let mut entry = [0; 8];
            let at = GuestAddress(table.checked_add(index * 8)?);
            memory.read(&mut entry, at).ok()?;
            let entry = u64::from_le_bytes(entry);
            let leads_on = entry & TABLE != 0;
            if entry & VALID == 0 {
                return None;
            }
            if leads_on && level > 0 {
                user &= entry & TABLE_NO_USER == 0;
                executable &= entry & TABLE_KERNEL_NEVER_EXECUTES == 0;
                table = self.address(entry);
                continue;
            }
            // The last level has only pages. Blocks larger than 1 GiB exist only with 52-bit addresses.
            let largest = if self.wide { 3 } else { 2 };
            if !leads_on && level == 0 || level > largest {
                return None;
            }
            let mask = (1 << shift) - 1;
            return Some(Page {
                first: address & !mask,
                mask,
                physical: self.address(entry) & !mask,
                user: user && entry & USER != 0,
                executable: executable && entry & KERNEL_NEVER_EXECUTES == 0,
            });
        }
        None
    }

    fn address(&self, entry: u64) -> u64 {
        if self.wide {
            entry & ADDRESS_DS | (entry & ADDRESS_DS_HIGH) << ADDRESS_DS_HIGH_SHIFT
        } else {
            entry & ADDRESS
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestMemoryMmap};

    use super::*;

    const PAGE: u64 = VALID | TABLE;
    const ROOT_AT: u64 = 0x1000;
    const KERNEL: u64 = 0xffff_8000_1234_5000;
    const PROGRAM: u64 = 0x0000_aaaa_1234_5000;
    const WIDE: u64 = 12 | 12 << TCR_T1_SHIFT | TCR_TG1_4K << TCR_TG1_SHIFT | TCR_DS;

    /// Memory with tables under construction.
    struct Guest {
        memory: GuestMemoryMmap,
        next: u64,
    }

    impl Guest {
        fn new() -> Self {
            let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]);
            Self { memory: memory.expect("memory"), next: ROOT_AT + 0x1000 }
        }

        fn put(&self, at: u64, entry: u64) {
            let put = self.memory.write_obj(entry.to_le(), GuestAddress(at));
            put.expect("in memory");
        }

        fn get(&self, at: u64) -> u64 {
            let entry = self.memory.read_obj::<u64>(GuestAddress(at));
            u64::from_le(entry.expect("in memory"))
        }

        /// Writes `entry` into the table at `level` that maps `address`, in a hierarchy of `levels` levels. Adds the
        /// flags `bits` to each entry that points to a table.
        fn map(mut self, (address, levels): (u64, u32), level: u32, entry: u64, bits: u64) -> Self {
            let all = if levels == 5 { 52 } else { 48 };
            let place = |level: u32| (address & ((1 << all) - 1)) >> (12 + 9 * level) & 511;
            let mut table = ROOT_AT;
            for above in (level + 1..levels).rev() {
                let at = table + place(above) * 8;
                if self.get(at) == 0 {
                    self.put(at, self.next | VALID | TABLE | bits);
                    self.next += 0x1000;
                }
                table = self.get(at) & ADDRESS;
            }
            self.put(table + place(level) * 8, entry);
            self
        }

        /// Returns the translation of `address`, whether programs can read at this address, and whether the kernel can
        /// execute there.
        fn walk(&self, tcr: u64, address: u64) -> Option<(u64, bool, bool)> {
            let control = Control {
                sctlr: SCTLR_MMU,
                tcr,
                // One TTBR has an ASID, the other has the CnP bit.
                ttbr0: ROOT_AT | 0xab << 48,
                ttbr1: ROOT_AT | 1,
            };
            let page = Tables::new(&control)?.walk(&View::of(&self.memory), address)?;
            let place = page.physical + (address & page.mask);
            Some((place, page.user, page.executable))
        }
    }

    fn kernel_page(entry: u64, bits: u64) -> Option<(u64, bool, bool)> {
        let guest = Guest::new().map((KERNEL, 4), 0, entry, bits);
        guest.walk(TCR_48_BITS, KERNEL + 0x678)
    }

    #[test]
    fn page_translates_to_its_memory_with_its_permissions() {
        assert_eq!(kernel_page(0x8_7000 | PAGE, 0), Some((0x8_7678, false, true)));
        let user = 0x8_7000 | PAGE | USER;
        assert_eq!(kernel_page(user, 0), Some((0x8_7678, true, true)));
        let data = 0x8_7000 | PAGE | KERNEL_NEVER_EXECUTES;
        assert_eq!(kernel_page(data, 0), Some((0x8_7678, false, false)));
        let guest = Guest::new().map((PROGRAM, 4), 0, user, 0);
        assert_eq!(guest.walk(TCR_48_BITS, PROGRAM), Some((0x8_7000, true, true)));
    }

    #[test]
    fn table_entry_limits_the_pages_below_it() {
        let entry = 0x8_7000 | PAGE | USER;
        assert_eq!(kernel_page(entry, TABLE_NO_USER), Some((0x8_7678, false, true)));
        assert_eq!(kernel_page(entry, TABLE_KERNEL_NEVER_EXECUTES), Some((0x8_7678, true, false)));
    }

    #[test]
    fn blocks_are_pages_of_2_mib_and_1_gib() {
        for (level, mask) in [(1, (1 << 21) - 1), (2, (1 << 30) - 1)] {
            let guest = Guest::new().map((KERNEL, 4), level, 7 << 30 | VALID, 0);
            let place = 7 << 30 | KERNEL & mask;
            assert_eq!(guest.walk(TCR_48_BITS, KERNEL), Some((place, false, true)));
        }
        let guest = Guest::new().map((KERNEL, 4), 3, VALID, 0);
        assert_eq!(guest.walk(TCR_48_BITS, KERNEL), None);
        // The last level has no blocks.
        assert_eq!(kernel_page(0x8_7000 | VALID, 0), None);
        assert_eq!(kernel_page(0x8_7000 | TABLE, 0), None);
    }

    #[test]
    fn address_outside_both_halves_does_not_translate() {
        let guest = Guest::new().map((KERNEL, 4), 0, 0x8_7000 | PAGE, 0);
        assert_eq!(guest.walk(TCR_48_BITS, KERNEL & !(1 << 50)), None);
        // The top byte is a tag only if the kernel enables tags.
        let tagged = KERNEL ^ 0x5a << 56;
        assert_eq!(guest.walk(TCR_48_BITS, tagged), None);
        let walked = guest.walk(TCR_48_BITS | TCR_TBI1, tagged);
        assert_eq!(walked, Some((0x8_7000, false, true)));
        assert_eq!(guest.walk(TCR_48_BITS | TCR_TBI0, tagged), None);
    }

    #[test]
    fn addresses_of_52_bits_have_five_levels() {
        let address = 0xfff5_8000_1234_5000;
        // Bits 51 and 50 of the address are in bits 9 and 8 of the entry. Without FEAT_LPA2, bits 9 and 8 hold no
        // address bits.
        let entry = 0x3_0000_0008_7000 | 0b11 << 8 | PAGE;
        let guest = Guest::new().map((address, 5), 0, entry, 0);
        assert_eq!(guest.walk(WIDE, address), Some((0xf_0000_0008_7000, false, true)));
        assert_eq!(guest.walk(WIDE & !TCR_DS, address), None);
    }

    #[test]
    fn other_granules_sizes_and_modes_are_not_walked() {
        let guest = Guest::new().map((KERNEL, 4), 0, 0x8_7000 | PAGE, 0);
        assert!(guest.walk(TCR_48_BITS, KERNEL).is_some());
        for tcr in [
            // In this order: a granule of 64 KiB, a granule of 16 KiB, 39-bit addresses, and disabled walks.
            TCR_48_BITS | 0b11 << TCR_TG1_SHIFT,
            TCR_48_BITS ^ 0b11 << TCR_TG1_SHIFT,
            TCR_48_BITS ^ (16 ^ 25) << TCR_T1_SHIFT,
            TCR_48_BITS | TCR_EPD1,
        ] {
            assert_eq!(guest.walk(tcr, KERNEL), None, "{tcr:#x}");
        }
        let off = Control { sctlr: 0, tcr: TCR_48_BITS, ttbr0: ROOT_AT, ttbr1: ROOT_AT };
        assert!(Tables::new(&off).is_none());
    }

    #[test]
    fn address_behind_tables_outside_memory_does_not_translate() {
        let guest = Guest::new().map((KERNEL, 4), 3, 0xffff_ffff_f000 | PAGE, 0);
        assert_eq!(guest.walk(TCR_48_BITS, KERNEL), None);
    }
}
