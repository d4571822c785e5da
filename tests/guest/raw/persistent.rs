//! Persistent events: made, listed, opened again.
#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::mem;
use std::ops::Deref;
use std::os::fd::AsRawFd;

use perf_event_open_sys::bindings::perf_event_attr;

use vpmu_abi::{PERSISTENT_NAME, PERSISTENT_OPERATOR, uapi};

use super::{Device, Event, How, checked};

/// Flag of an [`Entry`]: the event is the operator's.
pub(crate) const OPERATORS: u32 = PERSISTENT_OPERATOR;
/// Flag of an [`Entry`]: the event's ring is in the window, and survives a reset of the guest.
pub(crate) const IN_WINDOW: u32 = uapi::PERSISTENT_WINDOW;
/// Flag of an [`Entry`]: new records overwrite the oldest ones, and programs map the ring read-only.
pub(crate) const OVERWRITES: u32 = uapi::PERSISTENT_OVERWRITE;

/// A persistent event as the driver lists it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Entry(uapi::PersistentEntry);

impl Deref for Entry {
    type Target = uapi::PersistentEntry;

    fn deref(&self) -> &uapi::PersistentEntry {
        &self.0
    }
}

impl Entry {
    /// Its name in sysfs.
    pub(crate) fn name(&self) -> String {
        let name = self.name.split(|&byte| byte == 0).next().unwrap_or(&[]);
        String::from_utf8_lossy(name).into_owned()
    }

    /// Returns the number of data pages of the ring, or `None` if the event has no ring.
    pub(crate) fn data_pages(&self) -> Option<usize> {
        (self.pages as usize).checked_sub(1)
    }

    /// Returns the attributes with which the event was opened, except that `disabled` has the event's current state.
    pub(crate) fn attr(&self) -> perf_event_attr {
        let mut attr = perf_event_attr::default();
        let bytes = mem::size_of::<perf_event_attr>().min(uapi::ATTR_SIZE);
        // SAFETY: both structures have at least `bytes` bytes, contain only integers, and do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(self.attr.as_ptr(), std::ptr::from_mut(&mut attr).cast::<u8>(), bytes);
        }
        attr
    }
}

impl Device {
    /// Lists at most `count` persistent events with ids above `after`.
    pub(crate) fn list(&self, after: u64, count: u32) -> io::Result<Vec<Entry>> {
        self.list_raw(after, count, 0)
    }

    /// Like [`Device::list`], but sets the request's reserved word, for which the driver accepts only zero.
    pub(crate) fn list_raw(&self, after: u64, count: u32, reserved: u32) -> io::Result<Vec<Entry>> {
        let mut entries = vec![Entry(uapi::PersistentEntry::default()); count as usize];
        let request =
            uapi::Persistent { after, count, reserved, entries: entries.as_mut_ptr().expose_provenance() as u64 };
        // SAFETY: the driver writes at most `count` entries, and `entries` has room for `count`.
        let filled =
            checked(unsafe { libc::ioctl(self.as_raw_fd(), uapi::IOC_PERSISTENT.into(), &raw const request) })?;
        entries.truncate(usize::try_from(filled).map_err(io::Error::other)?);
        Ok(entries)
    }

    /// All persistent events.
    pub(crate) fn persistent(&self) -> io::Result<Vec<Entry>> {
        self.list(0, 4096)
    }

    /// Returns the persistent event with this id, if it exists.
    pub(crate) fn entry(&self, id: u64) -> io::Result<Option<Entry>> {
        Ok(self.persistent()?.into_iter().find(|entry| entry.id == id))
    }

    /// Returns the attr that opens persistent event `id` again.
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

    /// Opens a new descriptor of persistent event `id`.
    pub(crate) fn reopen(&self, id: u64, cpu: i32) -> io::Result<Event> {
        self.open_event(&self.reopening(id), How::on_cpu(cpu))
    }

    /// Flushes every persistent event.
    pub(crate) fn flush(&self) -> io::Result<i32> {
        // SAFETY: the request takes its argument by value.
        checked(unsafe { libc::ioctl(self.as_raw_fd(), uapi::IOC_FLUSH.into(), 0) })
    }
}

impl Event {
    /// Makes the event persistent, and gives it this name unless the name is empty. Returns the event's id.
    pub(crate) fn detach(&self, name: &str) -> io::Result<u64> {
        let mut bytes = [0; PERSISTENT_NAME];
        let fits = name.len().min(PERSISTENT_NAME);
        bytes[..fits].copy_from_slice(&name.as_bytes()[..fits]);
        self.detach_raw(bytes)
    }

    /// Like [`Event::detach`], with any bytes for a name.
    pub(crate) fn detach_raw(&self, name: [u8; PERSISTENT_NAME]) -> io::Result<u64> {
        let mut request = uapi::Detach { id: 0, name };
        self.call(uapi::IOC_DETACH, (&raw mut request).expose_provenance() as u64)?;
        self.becomes_persistent();
        Ok(request.id)
    }

    /// Attaches the event. From then on, the event ends when its last user is gone.
    pub(crate) fn attach(&self) -> io::Result<i32> {
        self.call(uapi::IOC_ATTACH, 0)
    }
}
