//! Page tables of long mode, with four or five levels. This module does not walk tables of other modes.

use vm_memory::GuestAddress;

use super::CpuState;
use crate::arch::Page;
use crate::memory::View;

const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

const PRESENT: u64 = 1 << 0;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// The bits of a table entry and of CR3 that hold an address. An address with more bits than the processor supports
/// needs no check, because it is not in guest memory and the walk reads only guest memory.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const PAGE_BITS: u32 = 12;
/// Number of address bits that each level of tables resolves.
const INDEX_BITS: u32 = 9;

/// Flags of page-table entries that let user mode access a page. The first value is for an entry that points to a
/// table, and the second value is for an entry that maps a page.
#[cfg(feature = "internals")]
pub(crate) const ENTRIES: [u64; 2] = [PRESENT | USER, PRESENT | USER];

/// Whether `address` is in the lower half of the address space, which programs use.
pub(crate) fn is_user_address(address: u64) -> bool {
    address >> 63 == 0
}

/// The page tables that a vCPU uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables {
    root: u64,
    levels: u32,
}

impl Tables {
    /// Returns the tables of `cpu`. `None` outside long mode.
    pub(crate) fn new(cpu: &CpuState) -> Option<Self> {
        let long = cpu.efer & EFER_LMA != 0 && cpu.cr4 & CR4_PAE != 0 && cpu.cr0 & CR0_PG != 0;
        long.then_some(Self { root: cpu.cr3 & ADDRESS, levels: if cpu.cr4 & CR4_LA57 != 0 { 5 } else { 4 } })
    }

    /// Translates through the tables. Reads at most one entry per level, no matter what the tables contain.
    pub(crate) fn walk(&self, memory: &View<'_>, address: u64) -> Option<Page> {
        let bits = PAGE_BITS + self.levels * INDEX_BITS;
        if !is_canonical(address, bits) {
            return None;
        }
        let mut table = self.root;
        let (mut user, mut executable) = (true, true);
        for level in (0..self.levels).rev() {
            let shift = PAGE_BITS + level * INDEX_BITS;
            let index = address >> shift & ((1 << INDEX_BITS) - 1);
            let mut entry = [0; 8];
            let at = GuestAddress(table + index * 8);
            memory.read(&mut entry, at).ok()?;
            let entry = u64::from_le_bytes(entry);
            if entry & PRESENT == 0 {
                return None;
            }
            user &= entry & USER != 0;
            executable &= entry & NO_EXECUTE == 0;
            // Above the level of 1 GiB pages, the bit `LARGE` is reserved.
            let large = entry & LARGE != 0 && level > 0;
            if large && level > 2 {
                return None;
            }
            if large || level == 0 {
                let mask = (1 << shift) - 1;
                return Some(Page {
                    first: address & !mask,
                    mask,
                    physical: entry & ADDRESS & !mask,
                    user,
                    executable,
                });
            }
            table = entry & ADDRESS;
        }
        None
    }
}

/// Returns whether `address` is canonical. In a canonical address, all bits above the `bits` translated bits equal the
/// highest translated bit.
fn is_canonical(address: u64, bits: u32) -> bool {
    let above = address >> (bits - 1);
    above == 0 || above == u64::MAX >> (bits - 1)
}
