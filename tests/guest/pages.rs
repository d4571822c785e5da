//! Mapped rings, which are accessed word by word. Readers follow the rules of `<linux/perf_event.h>`.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]
#![expect(unsafe_code, reason = "memory shared with the kernel or the host")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::raw::{Event, PAGE};

pub(crate) const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// The protection of a read-only mapping. A reader with such a mapping cannot move the tail, so the host overwrites the
/// oldest records.
pub(crate) const READ: i32 = libc::PROT_READ;

// Offsets in `struct perf_event_mmap_page`.
pub(crate) const LOCK_INDEX: usize = 8;
pub(crate) const OFFSET: usize = 16;
pub(crate) const TIME_ENABLED: usize = 24;
pub(crate) const TIME_RUNNING: usize = 32;
pub(crate) const CAPABILITIES: usize = 40;
pub(crate) const WIDTH_SHIFT_MULT: usize = 48;
pub(crate) const TIME_ZERO: usize = 64;
pub(crate) const DATA_HEAD: usize = 1024;
pub(crate) const DATA_TAIL: usize = 1032;
pub(crate) const DATA_OFFSET: usize = 1040;
pub(crate) const DATA_SIZE: usize = 1048;
pub(crate) const AUX_HEAD: usize = 1056;
pub(crate) const AUX_TAIL: usize = 1064;
pub(crate) const AUX_OFFSET: usize = 1072;
pub(crate) const AUX_SIZE: usize = 1080;

/// A record: the fields of its header, and the rest of the record as words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: u32,
    pub(crate) misc: u16,
    pub(crate) words: Vec<u64>,
}

/// An event's count and its times at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountSnapshot {
    pub(crate) index: u32,
    pub(crate) count: u64,
    pub(crate) enabled: u64,
    pub(crate) running: u64,
}

/// Maps the page at physical address `address`. It stays mapped until the caller unmaps it.
pub(crate) fn map_physical(address: u32) -> io::Result<*mut u8> {
    let memory = File::options().read(true).write(true).open("/dev/mem")?;
    // SAFETY: the kernel chooses an unused address, so no existing mapping is replaced.
    let page =
        unsafe { libc::mmap(ptr::null_mut(), PAGE, READ_WRITE, libc::MAP_SHARED, memory.as_raw_fd(), address.into()) };
    match page {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        page => Ok(page.cast()),
    }
}

/// A mapping of an event. It is unmapped when this value is dropped.
#[derive(Debug)]
pub(crate) struct Pages {
    base: *mut AtomicU64,
    bytes: usize,
    /// This reader's own position.
    tail: u64,
}

// SAFETY: the mapping belongs to the process and is accessed only through atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Calls mmap(2) without checking the arguments first.
    pub(crate) fn map_raw(event: &Event, bytes: usize, protection: i32, flags: i32, offset: i64) -> io::Result<Self> {
        Self::map_at(event.ring(), bytes, protection, flags, offset)
    }

    /// Maps a ring by its descriptor.
    pub(crate) fn map_fd(ring: RawFd, data_pages: usize, protection: i32) -> io::Result<Self> {
        Self::map_at(ring, (1 + data_pages) * PAGE, protection, libc::MAP_SHARED, 0)
    }

    fn map_at(fd: RawFd, bytes: usize, protection: i32, flags: i32, offset: i64) -> io::Result<Self> {
        // SAFETY: the kernel chooses an unused address, so no existing mapping is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut pages = Self { base: base.cast(), bytes, tail: 0 };
        if offset == 0 {
            pages.tail = pages.load(DATA_TAIL);
        }
        Ok(pages)
    }

    /// Maps the metadata page and `data_pages` data pages, shared.
    pub(crate) fn map(event: &Event, data_pages: usize, protection: i32) -> io::Result<Self> {
        Self::map_raw(event, (1 + data_pages) * PAGE, protection, libc::MAP_SHARED, 0)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.bytes, "{offset} of {}", self.bytes);
        // SAFETY: the assertion ensures that the word is inside the mapping, which is valid as long as `self` is.
        let word = unsafe { self.base.add(offset / 8) };
        // SAFETY: aligned, and accessed only atomically.
        unsafe { &*word }
    }

    /// Returns the word at a byte offset from the mapping's beginning.
    pub(crate) fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Relaxed)
    }

    /// Like [`Pages::load`], with acquire ordering: later loads see everything that the host wrote before it wrote this
    /// word.
    pub(crate) fn load_acquire(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Writes a word, after all earlier loads.
    pub(crate) fn store_release(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    pub(crate) fn head(&self) -> u64 {
        self.load_acquire(DATA_HEAD)
    }

    pub(crate) fn tail(&self) -> u64 {
        self.tail
    }

    /// Bytes of data.
    pub(crate) fn size(&self) -> u64 {
        (self.bytes - PAGE) as u64
    }

    /// Bytes of the mapping.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The address of the mapping.
    pub(crate) fn address(&self) -> *mut u8 {
        self.base.cast()
    }

    /// Returns the word at `position` in the data pages. Positions do not wrap at the ring's end.
    fn data(&self, position: u64) -> u64 {
        self.load(PAGE + (position % self.size()) as usize)
    }

    /// The record that begins at `position`.
    pub(crate) fn record_at(&self, position: u64) -> Result<Record, String> {
        let header = self.data(position);
        let size = header >> 48;
        if size < 8 || !size.is_multiple_of(8) || size > self.size() {
            return Err(format!("the record at {position:#x} has the invalid size {size}"));
        }
        Ok(Record {
            kind: header as u32,
            misc: (header >> 32) as u16,
            words: (1..size / 8).map(|word| self.data(position.wrapping_add(8 * word))).collect(),
        })
    }

    /// Consumes the next record. Returns `None` if the ring has no unread record.
    pub(crate) fn next_record(&mut self) -> Result<Option<Record>, String> {
        let available = self.head().wrapping_sub(self.tail);
        if available == 0 {
            return Ok(None);
        }
        if available > self.size() {
            return Err(format!("{available} unread bytes in a ring of {}", self.size()));
        }
        let record = self.record_at(self.tail)?;
        let size = 8 + 8 * record.words.len() as u64;
        if size > available {
            return Err(format!("a record has {size} bytes, but only {available} are published"));
        }
        self.tail = self.tail.wrapping_add(size);
        // The host may overwrite the record only after all of its words have been loaded.
        self.store_release(DATA_TAIL, self.tail);
        Ok(Some(record))
    }

    /// Consumes all records without reading them.
    pub(crate) fn skip(&mut self) {
        self.tail = self.head();
        self.store_release(DATA_TAIL, self.tail);
    }

    /// Takes the records up to the head at the time of the call. During the call, the host may write more records into
    /// the freed space, for example at a task switch. The next call takes these records.
    pub(crate) fn take(&mut self) -> Result<Vec<Record>, String> {
        let head = self.head();
        let mut records = Vec::new();
        while self.tail != head {
            records.extend(self.next_record()?);
        }
        Ok(records)
    }

    /// Reads the count and the times without a system call, as `<linux/perf_event.h>` recommends for self-monitoring.
    pub(crate) fn snapshot(&self) -> CountSnapshot {
        loop {
            let before = self.word(LOCK_INDEX).load(Ordering::Acquire);
            let snapshot = CountSnapshot {
                index: (before >> 32) as u32,
                count: self.load(OFFSET),
                enabled: self.load(TIME_ENABLED),
                running: self.load(TIME_RUNNING),
            };
            fence(Ordering::Acquire);
            if before & 1 == 0 && before == self.load(LOCK_INDEX) {
                return snapshot;
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapped range, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}
