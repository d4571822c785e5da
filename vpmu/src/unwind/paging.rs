//! Translates guest-virtual to guest-physical addresses with the guest's own page tables.

use vm_memory::GuestAddress;

use crate::arch::{CpuState, Page, Tables, is_user_address};
use crate::memory::View;

/// The rights of a memory read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// The rights of a guest program. It can access user addresses on pages that all levels of the page tables mark as
    /// accessible to programs.
    User,
    /// The rights of the guest's kernel, which can access every mapped address.
    Kernel,
}

/// Memory as a vCPU addresses it. Translations are cached while this value exists, so the vCPU must not enter the guest
/// during that time.
#[derive(Debug)]
pub(super) struct AddressSpace<'a> {
    memory: &'a View<'a>,
    tables: Tables,
    /// The translations last used for data and for code. Later reads often need the same pages, because frames are
    /// close together, and so are their return addresses.
    data: Option<Page>,
    code: Option<Page>,
}

impl<'a> AddressSpace<'a> {
    /// The address space of `cpu` in `memory`; `None` if `cpu` is in a mode whose page tables this module does not
    /// support.
    pub(super) fn new(memory: &'a View<'a>, cpu: &CpuState) -> Option<Self> {
        Some(Self { memory, tables: Tables::new(cpu)?, data: None, code: None })
    }

    /// Returns consecutive words at any address. `None` if one of them cannot be read.
    pub(super) fn words<const N: usize, const SIZE: usize>(
        &mut self,
        address: u64,
        rights: Rights,
    ) -> Option<[[u8; SIZE]; N]> {
        let mut words = [[0; SIZE]; N];
        let bytes = words.as_flattened_mut();
        (self.read(address, rights, bytes) == bytes.len()).then_some(words)
    }

    /// Reads memory into `bytes`, from `address` up to the first unreadable page. Returns the number of bytes read.
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
            // The number of bytes to the end of the page. If that number does not fit into `usize`, use `usize::MAX`,
            // which no slice exceeds.
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

    /// Returns whether `address` is in a page that the guest's kernel can execute and that programs cannot access.
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
