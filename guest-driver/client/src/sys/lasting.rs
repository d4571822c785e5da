//! What perf has no calls for: events that last without a descriptor, links, flush.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use perf_event_open_sys::bindings;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{IOC_READ, IOC_WRITE, Scope, by_value, checked, ioc};

/// Bytes of a persistent event's name.
pub(crate) const NAME_BYTES: usize = 40;
/// Bytes of the attributes that the list tells.
pub(crate) const ATTR_BYTES: usize = 128;

/// `VPMU_FLAG_PERSISTENT`.
pub(crate) const FLAG_PERSISTENT: u64 = 1 << 32;
/// `VPMU_FLAG_ENABLE_ON_STARTER`.
pub(crate) const FLAG_ENABLE_ON_STARTER: u64 = 1 << 33;

/// `VPMU_CONFIG1_PAUSED`: `perf_event_attr::config1` of what waits for its starter.
pub(crate) const CONFIG1_PAUSED: u64 = 1;

/// `struct vpmu_perf`.
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct RawPerf {
    fd: i32,
    call: u32,
    arg: u64,
}

/// `struct vpmu_wakeup`.
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct RawWakeup {
    every: u64,
    unit: u32,
    reserved: u32,
}

/// `VPMU_WAKEUP_RECORDS`.
pub(crate) const WAKEUP_RECORDS: u32 = 1;
/// `VPMU_WAKEUP_BYTES`.
pub(crate) const WAKEUP_BYTES: u32 = 2;

/// `struct vpmu_detach`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawDetach {
    id: u64,
    name: [u8; NAME_BYTES],
}

/// `struct vpmu_persistent`.
#[derive(Debug, Clone, Copy, Default, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawPersistent {
    after: u64,
    count: u32,
    reserved: u32,
    entries: u64,
}

/// `struct vpmu_persistent_entry`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct RawPersistentEntry {
    pub(crate) id: u64,
    pub(crate) name: [u8; NAME_BYTES],
    pub(crate) cpu: u32,
    pub(crate) pages: u32,
    pub(crate) engine: u32,
    pub(crate) flags: u32,
    pub(crate) attr: [u8; ATTR_BYTES],
}

const IOC_PERSISTENT: u32 = ioc(IOC_WRITE, 5, size_of::<RawPersistent>());
const IOC_FLUSH: u32 = ioc(0, 6, 0);
const IOC_DETACH: u32 = ioc(IOC_READ | IOC_WRITE, 7, size_of::<RawDetach>());
const IOC_ATTACH: u32 = ioc(0, 8, 0);
const IOC_SET_STARTER: u32 = ioc(0, 9, 0);
const IOC_SET_STOPPER: u32 = ioc(0, 10, 0);
const IOC_PERF: u32 = ioc(IOC_WRITE, 11, size_of::<RawPerf>());
const IOC_WAKEUP: u32 = ioc(IOC_WRITE, 12, size_of::<RawWakeup>());

/// Returns how many of `entries` were filled, with events whose ids are above `after`.
pub(crate) fn persistent(
    device: BorrowedFd<'_>,
    after: u64,
    entries: &mut [RawPersistentEntry],
) -> io::Result<usize> {
    let request = RawPersistent {
        after,
        count: u32::try_from(entries.len()).unwrap_or(u32::MAX),
        reserved: 0,
        entries: entries.as_mut_ptr().expose_provenance() as u64,
    };
    // SAFETY: the driver writes at most `count` entries at `entries`, which is that long and
    // borrowed mutably until it returns.
    let filled = checked(unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            IOC_PERSISTENT.into(),
            &raw const request,
        )
    })?;
    Ok(usize::try_from(filled).unwrap_or(0).min(entries.len()))
}

/// Returns the id.
pub(crate) fn detach(event: BorrowedFd<'_>, name: [u8; NAME_BYTES]) -> io::Result<u64> {
    let mut request = RawDetach { id: 0, name };
    // SAFETY: the request reads and writes one RawDetach, which outlives the call.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), IOC_DETACH.into(), &raw mut request) })?;
    Ok(request.id)
}

pub(crate) fn attach(event: BorrowedFd<'_>) -> io::Result<()> {
    by_value(event, IOC_ATTACH, 0)
}

/// A wakeup every so many of a unit.
pub(crate) fn set_wakeup(event: BorrowedFd<'_>, every: u32, unit: u32) -> io::Result<()> {
    let request = RawWakeup {
        every: every.into(),
        unit,
        reserved: 0,
    };
    // SAFETY: the driver reads one RawWakeup, which outlives the call.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), IOC_WAKEUP.into(), &raw const request) })?;
    Ok(())
}

/// Of an event, its group, or on the device of all persistent ones.
pub(crate) fn flush(fd: BorrowedFd<'_>, scope: Scope) -> io::Result<()> {
    let flags = match scope {
        Scope::Event => 0,
        Scope::Group => bindings::PERF_IOC_FLAG_GROUP,
    };
    by_value(fd, IOC_FLUSH, flags.into())
}

/// What an overflow does to another event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Starter,
    Stopper,
}

impl Role {
    fn request(self) -> u32 {
        match self {
            Self::Starter => IOC_SET_STARTER,
            Self::Stopper => IOC_SET_STOPPER,
        }
    }
}

pub(crate) fn link(event: BorrowedFd<'_>, role: Role, target: BorrowedFd<'_>) -> io::Result<()> {
    let target = i64::from(target.as_raw_fd()).cast_unsigned();
    by_value(event, role.request(), target)
}

/// A call on an event of `perf_event_open(2)`, by the device.
fn on_perf(device: BorrowedFd<'_>, request: &RawPerf) -> io::Result<()> {
    // SAFETY: the driver reads one RawPerf, which outlives the call.
    checked(unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            IOC_PERF.into(),
            std::ptr::from_ref(request),
        )
    })?;
    Ok(())
}

/// As [`flush`], of an event of `perf_event_open(2)`.
pub(crate) fn flush_perf(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_perf(
        device,
        &RawPerf {
            fd: event.as_raw_fd(),
            call: IOC_FLUSH,
            arg: 0,
        },
    )
}

/// As [`detach`], of an event of `perf_event_open(2)`.
pub(crate) fn detach_perf(
    device: BorrowedFd<'_>,
    event: BorrowedFd<'_>,
    name: [u8; NAME_BYTES],
) -> io::Result<u64> {
    let mut detach = RawDetach { id: 0, name };
    on_perf(
        device,
        &RawPerf {
            fd: event.as_raw_fd(),
            call: IOC_DETACH,
            // The driver reads and writes one RawDetach there, which outlives the call.
            arg: std::ptr::from_mut(&mut detach).expose_provenance() as u64,
        },
    )?;
    Ok(detach.id)
}

/// As [`attach`], of an event of `perf_event_open(2)`.
pub(crate) fn attach_perf(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_perf(
        device,
        &RawPerf {
            fd: event.as_raw_fd(),
            call: IOC_ATTACH,
            arg: 0,
        },
    )
}

/// As [`link`], of two events of `perf_event_open(2)`.
pub(crate) fn link_perf(
    device: BorrowedFd<'_>,
    event: BorrowedFd<'_>,
    role: Role,
    target: BorrowedFd<'_>,
) -> io::Result<()> {
    on_perf(
        device,
        &RawPerf {
            fd: event.as_raw_fd(),
            call: role.request(),
            arg: i64::from(target.as_raw_fd()).cast_unsigned(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    // The numbers are those of vpmu_uapi.h on a 64-bit machine.
    #[test]
    fn layouts_are_the_drivers() {
        assert_eq!(size_of::<RawDetach>(), 48);
        assert_eq!(size_of::<RawPerf>(), 16);
        assert_eq!(size_of::<RawWakeup>(), 16);
        assert_eq!(offset_of!(RawWakeup, unit), 8);
        assert_eq!(size_of::<RawPersistent>(), 24);
        assert_eq!(size_of::<RawPersistentEntry>(), 192);
        assert_eq!(offset_of!(RawPersistent, entries), 16);
        assert_eq!(offset_of!(RawPersistentEntry, cpu), 48);
        assert_eq!(offset_of!(RawPersistentEntry, flags), 60);
        assert_eq!(offset_of!(RawPersistentEntry, attr), 64);
    }

    #[test]
    fn ioctl_numbers_are_the_drivers() {
        assert_eq!(IOC_PERSISTENT, 0x4018_b605);
        assert_eq!(IOC_FLUSH, 0xb606);
        assert_eq!(IOC_DETACH, 0xc030_b607);
        assert_eq!(IOC_ATTACH, 0xb608);
        assert_eq!(IOC_SET_STARTER, 0xb609);
        assert_eq!(IOC_SET_STOPPER, 0xb60a);
        assert_eq!(IOC_WAKEUP, 0x4010_b60c);
    }
}
