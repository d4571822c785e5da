//! From guest-virtual to guest-physical addresses, through the guest's own page tables.

use vm_memory::GuestAddress;

use crate::arch::{CpuState, Tables, is_user_address};
use crate::memory::View;

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
pub(crate) struct Page {
    /// Its first address.
    pub(crate) first: u64,
    /// One less than its size.
    pub(crate) mask: u64,
    /// Its place in the guest's memory.
    pub(crate) physical: u64,
    /// Whether programs may read it.
    pub(crate) user: bool,
    /// Whether the kernel may execute it.
    pub(crate) executable: bool,
}

/// The memory that a vCPU sees. Translations are kept while this value lives: the vCPU must
/// stand still for so long.
#[derive(Debug)]
pub(super) struct AddressSpace<'a> {
    memory: &'a View<'a>,
    tables: Tables,
    /// The pages met last: frames lie close together, and so does the code that they return to.
    data: Option<Page>,
    code: Option<Page>,
}

impl<'a> AddressSpace<'a> {
    /// As `cpu` sees `memory`; `None` in a mode whose tables are not walked.
    pub(super) fn new(memory: &'a View<'a>, cpu: &CpuState) -> Option<Self> {
        Some(Self {
            memory,
            tables: Tables::new(cpu)?,
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
            if self.memory.read(part, physical).is_err() {
                break;
            }
            done += len;
        }
        done
    }

    /// Whether the guest's kernel could run at `address`.
    pub(super) fn is_kernel_code(&mut self, address: u64) -> bool {
        if !self.code.is_some_and(|page| page.holds(address)) {
            self.code = self.tables.walk(self.memory, address);
        }
        self.code.is_some_and(|page| page.executable && !page.user)
    }

    fn data(&mut self, address: u64) -> Option<Page> {
        if !self.data.is_some_and(|page| page.holds(address)) {
            self.data = self.tables.walk(self.memory, address);
        }
        self.data
    }
}

impl Page {
    fn holds(&self, address: u64) -> bool {
        address & !self.mask == self.first
    }

    fn allows(&self, address: u64, rights: Rights) -> bool {
        match rights {
            Rights::User => self.user && is_user_address(address),
            Rights::Kernel => true,
        }
    }
}
