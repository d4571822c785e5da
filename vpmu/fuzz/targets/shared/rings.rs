//! A guest program that reads rings whose pages only the device writes. Whatever the driver does, the program must find
//! only whole records, and heads must never move backwards.

use std::collections::BTreeSet;
use std::mem::offset_of;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::{Metadata, PAGE_SIZE};

const DATA_HEAD: u64 = offset_of!(Metadata, data_head) as u64;
const DATA_TAIL: u64 = offset_of!(Metadata, data_tail) as u64;
const PAGE: u64 = PAGE_SIZE as u64;
const HEADER: u64 = 8;
const LOST: u32 = 2;
const THROTTLE: u32 = 5;
const UNTHROTTLE: u32 = 6;
/// The types of records that the device writes: LOST, THROTTLE, UNTHROTTLE, READ, SAMPLE, AUX, ITRACE_START.
const KINDS: [u32; 7] = [LOST, THROTTLE, UNTHROTTLE, 8, 9, 11, 12];

/// A ring of pages that no other ring uses.
#[derive(Debug)]
pub(crate) struct OwnRing {
    pub(crate) event: u64,
    pages: Vec<u64>,
    writable: bool,
    backward: bool,
    tail: u64,
    /// The head at the last read.
    head: u64,
    /// Sum of the losses that the ring's records report.
    pub(crate) lost: u64,
    /// The events that LOST, THROTTLE and UNTHROTTLE records name.
    pub(crate) named: BTreeSet<u64>,
}

impl OwnRing {
    /// A newly mapped ring.
    pub(crate) fn new(event: u64, pages: Vec<u64>, writable: bool, backward: bool) -> Self {
        Self { event, pages, writable, backward, tail: 0, head: 0, lost: 0, named: BTreeSet::new() }
    }

    /// Address of the metadata page.
    pub(crate) fn metadata(&self) -> u64 {
        self.pages[0]
    }

    fn size(&self) -> u64 {
        (self.pages.len() as u64 - 1) * PAGE
    }

    /// The current head.
    pub(crate) fn head(&self, memory: &GuestMemoryMmap) -> u64 {
        let head = GuestAddress(self.pages[0] + DATA_HEAD);
        memory.load(head, Ordering::Acquire).expect("in memory")
    }

    /// Checks the ring and consumes its records. `written` is true if other threads may make the device write to the
    /// ring during the call.
    pub(crate) fn read(&mut self, memory: &GuestMemoryMmap, written: bool) {
        let head = self.head(memory);
        let grown = if self.backward { self.head.wrapping_sub(head) } else { head.wrapping_sub(self.head) };
        assert!(grown < 1 << 63, "head went from {:#x} to {head:#x}", self.head);
        assert!(grown.is_multiple_of(HEADER), "head {head:#x}");
        self.head = head;
        if self.size() == 0 {
            return;
        }
        if self.backward {
            if written {
                return;
            }
            // The newest record is at the head. Check from there to the oldest record that is not cut off.
            let len = 0_u64.wrapping_sub(head).min(self.size());
            self.records(memory, head, len, false);
        } else if self.writable {
            let len = head.wrapping_sub(self.tail);
            assert!(len <= self.size(), "more unread bytes than the ring holds");
            self.records(memory, self.tail, len, true);
            self.tail = head;
            let tail = GuestAddress(self.pages[0] + DATA_TAIL);
            memory.store(head, tail, Ordering::Release).expect("in memory");
        }
    }

    /// Checks the records in `len` bytes from `at` on. If `whole`, the last record must end exactly where
    /// these bytes end.
    fn records(&mut self, memory: &GuestMemoryMmap, at: u64, len: u64, whole: bool) {
        let mut done = 0;
        while done < len {
            let header = self.word(memory, at.wrapping_add(done));
            let kind = u32::try_from(header & 0xffff_ffff).expect("32 bits");
            let size = header >> 48;
            assert!(KINDS.contains(&kind), "unexpected record of type {kind}");
            assert!(size >= HEADER && size.is_multiple_of(8), "{size} bytes");
            if size > len - done {
                assert!(!whole, "the last record is incomplete");
                return;
            }
            if whole && [LOST, THROTTLE, UNTHROTTLE].contains(&kind) {
                let [first, second, third] = [1, 2, 3].map(|word| self.word(memory, at.wrapping_add(done + 8 * word)));
                if kind == LOST {
                    self.named.insert(first);
                    self.lost += second;
                } else {
                    self.named.extend([second, third]);
                }
            }
            done += size;
        }
    }

    fn word(&self, memory: &GuestMemoryMmap, position: u64) -> u64 {
        let offset = position % self.size();
        let index = usize::try_from(offset / PAGE).expect("small");
        let at = GuestAddress(self.pages[1 + index] + offset % PAGE);
        memory.read_obj(at).expect("in memory")
    }
}
