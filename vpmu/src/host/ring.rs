//! The consumer's side of a small host ring: how many overflows there were, and how many of
//! them the host dropped. What the records say is the host's and stays here.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::sync::atomic::Ordering;

use perf_event_open_sys::bindings::perf_event_mmap_page;

use super::sys::{self, Mapping};
use crate::record::{TYPE_LOST, TYPE_SAMPLE};
use crate::source::Overflows;

const DATA_HEAD: usize = offset_of!(perf_event_mmap_page, data_head);
const DATA_TAIL: usize = offset_of!(perf_event_mmap_page, data_tail);
/// Where `PERF_RECORD_LOST` has its number.
const LOST_NUMBER: u64 = 16;

/// One metadata page, one data page.
#[derive(Debug)]
pub(super) struct HostRing {
    mapping: Mapping,
    page: usize,
}

impl HostRing {
    pub(super) fn new(event: &File) -> io::Result<Self> {
        let page = sys::page_size()?;
        Ok(Self {
            mapping: Mapping::new(event, 2 * page)?,
            page,
        })
    }

    /// Takes every record that stands there.
    pub(super) fn drain(&self) -> Overflows {
        // Pairs with the kernel's release: the records stand before the head moves.
        let head = self.mapping.load(DATA_HEAD, Ordering::Acquire);
        let mut tail = self.mapping.load(DATA_TAIL, Ordering::Relaxed);
        let mut overflows = Overflows::default();
        while tail < head {
            let header = self.word(tail);
            let size = header >> 48;
            match u32::try_from(header & 0xffff_ffff).unwrap_or(0) {
                TYPE_SAMPLE => overflows.samples += 1,
                TYPE_LOST => overflows.lost += self.word(tail + LOST_NUMBER),
                _ => {}
            }
            if size == 0 {
                // The kernel writes no such record; better to lose the rest than to stand still.
                tail = head;
            } else {
                tail += size;
            }
        }
        // Pairs with the kernel's acquire: the words above were read before they are reused.
        self.mapping.store(DATA_TAIL, tail, Ordering::Release);
        overflows
    }

    fn word(&self, position: u64) -> u64 {
        let offset = usize::try_from(position % self.page as u64).unwrap_or(0);
        self.mapping.load(self.page + offset, Ordering::Relaxed)
    }
}
