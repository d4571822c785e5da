//! Persistent events: made, listed, opened again.
#![expect(unsafe_code, reason = "the edge to the kernel")]

use std::io;
use std::mem;
use std::os::fd::AsRawFd;

use perf_event_open_sys::bindings::perf_event_attr;

use super::{Device, Event, How, checked};

const IOC_PERSISTENT: u64 = 0x4018_b605;
const IOC_FLUSH: u64 = 0xb606;
const IOC_DETACH: u64 = 0xc030_b607;
const IOC_ATTACH: u64 = 0xb608;

const NAME: usize = 40;
const ATTR: usize = 128;

/// [`Entry::flags`]: the host's.
pub(crate) const OPERATORS: u32 = 1 << 0;
/// [`Entry::flags`]: its ring outlives a reset.
pub(crate) const IN_WINDOW: u32 = 1 << 1;
/// [`Entry::flags`]: its ring is mapped read-only.
pub(crate) const OVERWRITES: u32 = 1 << 2;

/// `struct vpmu_detach`.
#[repr(C)]
struct RawDetach {
    id: u64,
    name: [u8; NAME],
}

/// `struct vpmu_persistent`.
#[repr(C)]
struct RawList {
    after: u64,
    count: u32,
    reserved: u32,
    entries: u64,
}

/// `struct vpmu_persistent_entry`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    name: [u8; NAME],
    pub(crate) cpu: u32,
    pub(crate) pages: u32,
    pub(crate) engine: u32,
    pub(crate) flags: u32,
    attr: [u8; ATTR],
}

impl Entry {
    /// As sysfs lists it.
    pub(crate) fn name(&self) -> String {
        let name = self.name.split(|&byte| byte == 0).next().unwrap_or(&[]);
        String::from_utf8_lossy(name).into_owned()
    }

    /// What the ring's data pages are to be mapped as.
    pub(crate) fn data_pages(&self) -> Option<usize> {
        (self.pages as usize).checked_sub(1)
    }

    /// What it was opened by.
    pub(crate) fn attr(&self) -> perf_event_attr {
        let mut attr = perf_event_attr::default();
        let bytes = mem::size_of::<perf_event_attr>().min(ATTR);
        // SAFETY: both are at least that long and hold integers; they do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.attr.as_ptr(),
                std::ptr::from_mut(&mut attr).cast::<u8>(),
                bytes,
            );
        }
        attr
    }
}

impl Device {
    /// At most `count` persistent events with ids above `after`.
    pub(crate) fn list(&self, after: u64, count: u32) -> io::Result<Vec<Entry>> {
        self.list_raw(after, count, 0)
    }

    /// The same with a word that has to be zero.
    pub(crate) fn list_raw(&self, after: u64, count: u32, reserved: u32) -> io::Result<Vec<Entry>> {
        let none = Entry {
            id: 0,
            name: [0; NAME],
            cpu: 0,
            pages: 0,
            engine: 0,
            flags: 0,
            attr: [0; ATTR],
        };
        let mut entries = vec![none; count as usize];
        let request = RawList {
            after,
            count,
            reserved,
            entries: entries.as_mut_ptr().expose_provenance() as u64,
        };
        // SAFETY: at most `count` entries are written where there is room for as many.
        let filled =
            checked(unsafe { libc::ioctl(self.as_raw_fd(), IOC_PERSISTENT, &raw const request) })?;
        entries.truncate(usize::try_from(filled).map_err(io::Error::other)?);
        Ok(entries)
    }

    /// All of them.
    pub(crate) fn persistent(&self) -> io::Result<Vec<Entry>> {
        self.list(0, 4096)
    }

    /// The one of that id, if there is.
    pub(crate) fn entry(&self, id: u64) -> io::Result<Option<Entry>> {
        Ok(self.persistent()?.into_iter().find(|entry| entry.id == id))
    }

    /// The attr that opens it again.
    pub(crate) fn reopening(&self, id: u64) -> perf_event_attr {
        perf_event_attr {
            type_: self.info.persistent_type,
            config: id,
            ..perf_event_attr {
                size: u32::try_from(mem::size_of::<perf_event_attr>()).unwrap_or(u32::MAX),
                ..perf_event_attr::default()
            }
        }
    }

    /// A new descriptor of it.
    pub(crate) fn reopen(&self, id: u64, cpu: i32) -> io::Result<Event> {
        self.open_event(&self.reopening(id), How::on_cpu(cpu))
    }

    /// Flushes every persistent event.
    pub(crate) fn flush(&self) -> io::Result<i32> {
        // SAFETY: the request takes its argument by value.
        checked(unsafe { libc::ioctl(self.as_raw_fd(), IOC_FLUSH, 0) })
    }
}

impl Event {
    /// Makes it persistent, under this name if it is not empty; the id.
    pub(crate) fn detach(&self, name: &str) -> io::Result<u64> {
        let mut bytes = [0; NAME];
        let fits = name.len().min(NAME);
        bytes[..fits].copy_from_slice(&name.as_bytes()[..fits]);
        self.detach_raw(bytes)
    }

    /// The same with any bytes for a name.
    pub(crate) fn detach_raw(&self, name: [u8; NAME]) -> io::Result<u64> {
        let mut request = RawDetach { id: 0, name };
        // SAFETY: the request reads and writes one RawDetach.
        checked(unsafe { libc::ioctl(self.as_raw_fd(), IOC_DETACH, &raw mut request) })?;
        Ok(request.id)
    }

    /// Makes it end with its last user again.
    pub(crate) fn attach(&self) -> io::Result<i32> {
        // SAFETY: the request takes no argument.
        checked(unsafe { libc::ioctl(self.as_raw_fd(), IOC_ATTACH, 0) })
    }
}
