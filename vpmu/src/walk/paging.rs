//! From guest-virtual to guest-physical addresses, through the guest's own page tables.
//!
//! Long mode only, with four or five levels. Other modes are not walked.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::machine::CpuState;

const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

const PRESENT: u64 = 1 << 0;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// The address in a table entry and in CR3, wherever the processor's own limit lies: what is
/// beyond guest memory is not read anyway.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const PAGE_BITS: u32 = 12;
/// Address bits that each level of tables resolves.
const INDEX_BITS: u32 = 9;

/// With whose rights memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// As a guest program: user addresses that every level of the tables opens to it.
    User,
    /// As the guest's kernel: whatever is mapped.
    Kernel,
}

/// One translation, of a page of any size.
#[derive(Debug, Clone, Copy)]
struct Page {
    first: u64,
    /// One less than its size.
    mask: u64,
    physical: u64,
    user: bool,
    executable: bool,
}

/// The memory that a vCPU sees. Translations are kept while this value lives: the vCPU must
/// stand still for so long.
#[derive(Debug)]
pub(super) struct AddressSpace<'a> {
    memory: &'a GuestMemoryMmap,
    root: u64,
    levels: u32,
    /// The pages met last: frames lie close together, and so does the code that they return to.
    data: Option<Page>,
    code: Option<Page>,
}

impl<'a> AddressSpace<'a> {
    /// As `cpu` sees `memory`; `None` outside long mode.
    pub(super) fn new(memory: &'a GuestMemoryMmap, cpu: &CpuState) -> Option<Self> {
        let long = cpu.efer & EFER_LMA != 0 && cpu.cr4 & CR4_PAE != 0 && cpu.cr0 & CR0_PG != 0;
        long.then_some(Self {
            memory,
            root: cpu.cr3 & ADDRESS,
            levels: if cpu.cr4 & CR4_LA57 != 0 { 5 } else { 4 },
            data: None,
            code: None,
        })
    }

    /// Words anywhere, one after the other; `None` where one of them cannot be read.
    pub(super) fn words<const N: usize, const SIZE: usize>(
        &mut self,
        address: u64,
        rights: Rights,
    ) -> Option<[[u8; SIZE]; N]> {
        let mut words = [[0; SIZE]; N];
        let bytes = words.as_flattened_mut();
        (self.read(address, rights, bytes) == bytes.len()).then_some(words)
    }

    /// Fills `bytes` from `address` on, up to the first page that cannot be read; how many it
    /// filled.
    pub(super) fn read(&mut self, address: u64, rights: Rights, bytes: &mut [u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let Some(at) = address.checked_add(done as u64) else {
                break;
            };
            let Some(page) = self.data(at).filter(|page| page.allows(at, rights)) else {
                break;
            };
            let offset = at & page.mask;
            // A part of a page, so it fits wherever a slice does.
            let left = usize::try_from(page.mask - offset).map_or(usize::MAX, |left| left + 1);
            let len = left.min(bytes.len() - done);
            let physical = GuestAddress(page.physical + offset);
            let part = &mut bytes[done..done + len];
            if self.memory.read_slice(part, physical).is_err() {
                break;
            }
            done += len;
        }
        done
    }

    /// Whether the guest's kernel could run at `address`.
    pub(super) fn is_kernel_code(&mut self, address: u64) -> bool {
        if !self.code.is_some_and(|page| page.holds(address)) {
            self.code = self.walk(address);
        }
        self.code.is_some_and(|page| page.executable && !page.user)
    }

    fn data(&mut self, address: u64) -> Option<Page> {
        if !self.data.is_some_and(|page| page.holds(address)) {
            self.data = self.walk(address);
        }
        self.data
    }

    /// Translates through the tables: as many reads as there are levels at most, whatever the
    /// tables hold.
    fn walk(&self, address: u64) -> Option<Page> {
        let bits = PAGE_BITS + self.levels * INDEX_BITS;
        if !is_canonical(address, bits) {
            return None;
        }
        let mut table = self.root;
        let (mut user, mut executable) = (true, true);
        for level in (0..self.levels).rev() {
            let shift = PAGE_BITS + level * INDEX_BITS;
            let index = address >> shift & ((1 << INDEX_BITS) - 1);
            let entry: u64 = self
                .memory
                .read_obj(GuestAddress(table + index * 8))
                .map(u64::from_le)
                .ok()?;
            if entry & PRESENT == 0 {
                return None;
            }
            user &= entry & USER != 0;
            executable &= entry & NO_EXECUTE == 0;
            // Above 1 GiB pages the bit is reserved.
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

impl Page {
    fn holds(&self, address: u64) -> bool {
        address & !self.mask == self.first
    }

    fn allows(&self, address: u64, rights: Rights) -> bool {
        match rights {
            Rights::User => self.user && address >> 63 == 0,
            Rights::Kernel => true,
        }
    }
}

/// Whether the bits of `address` from the highest translated one up are all alike.
fn is_canonical(address: u64, bits: u32) -> bool {
    let above = address >> (bits - 1);
    above == 0 || above == u64::MAX >> (bits - 1)
}
