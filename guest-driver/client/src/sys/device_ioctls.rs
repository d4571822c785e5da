//! Device ioctls that perf lacks: persistent events, wakeups, starters and stoppers, flush.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vpmu_abi::{PERSISTENT_NAME, uapi};
use vpmu_perf::bindings;
use vpmu_perf::call::{Scope, ioctl_request};

use super::{by_value, checked};

/// Fills `entries` with persistent events whose ids exceed `after`; returns their number.
pub(crate) fn persistent(
    device: BorrowedFd<'_>,
    after: u64,
    entries: &mut [uapi::PersistentEntry],
) -> io::Result<usize> {
    let request = uapi::Persistent {
        after,
        count: u32::try_from(entries.len()).unwrap_or(u32::MAX),
        reserved: 0,
        entries: entries.as_mut_ptr().expose_provenance() as u64,
    };
    // SAFETY: the driver writes at most `count` entries to `entries`, which has room for them, and is
    // borrowed mutably until the call returns.
    let filled =
        checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_PERSISTENT), &raw const request) })?;
    Ok(usize::try_from(filled).unwrap_or(0).min(entries.len()))
}

/// Makes the event persistent; returns its id.
pub(crate) fn detach(event: BorrowedFd<'_>, name: [u8; PERSISTENT_NAME]) -> io::Result<u64> {
    let mut request = uapi::Detach { id: 0, name };
    // SAFETY: the request reads and writes one uapi::Detach, which outlives the call.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), ioctl_request(uapi::IOC_DETACH), &raw mut request) })?;
    Ok(request.id)
}

pub(crate) fn attach(event: BorrowedFd<'_>) -> io::Result<()> {
    by_value(event, uapi::IOC_ATTACH, 0)
}

/// Sets the wakeup interval, in records or bytes.
pub(crate) fn set_wakeup(event: BorrowedFd<'_>, every: u32, unit: u32) -> io::Result<()> {
    let request = uapi::Wakeup { every: every.into(), unit, reserved: 0 };
    // SAFETY: the driver reads one uapi::Wakeup, which outlives the call.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), ioctl_request(uapi::IOC_WAKEUP), &raw const request) })?;
    Ok(())
}

/// Flushes an event or its group. If called on the device's descriptor, flushes all persistent
/// events.
pub(crate) fn flush(fd: BorrowedFd<'_>, scope: Scope) -> io::Result<()> {
    let flags = match scope {
        Scope::Event => 0,
        Scope::Group => bindings::PERF_IOC_FLAG_GROUP,
    };
    by_value(fd, uapi::IOC_FLUSH, flags.into())
}

/// The effect of an event's overflow on another event.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Starter,
    Stopper,
}

impl Role {
    fn request(self) -> u32 {
        match self {
            Self::Starter => uapi::IOC_SET_STARTER,
            Self::Stopper => uapi::IOC_SET_STOPPER,
        }
    }
}

pub(crate) fn link(event: BorrowedFd<'_>, role: Role, target: BorrowedFd<'_>) -> io::Result<()> {
    let target = i64::from(target.as_raw_fd()).cast_unsigned();
    by_value(event, role.request(), target)
}

/// Calls one of this driver's ioctls on an event of `perf_event_open(2)`.
fn on_perf(device: BorrowedFd<'_>, request: &uapi::Perf) -> io::Result<()> {
    // SAFETY: the driver reads one uapi::Perf, which outlives the call. Its `arg` is a plain number,
    // or the address of a struct that outlives the call.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_PERF), std::ptr::from_ref(request)) })?;
    Ok(())
}

/// Like [`flush`], for an event of `perf_event_open(2)`.
pub(crate) fn flush_perf(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_perf(device, &uapi::Perf { fd: event.as_raw_fd(), call: uapi::IOC_FLUSH, arg: 0 })
}

/// Like [`detach`], for an event of `perf_event_open(2)`.
pub(crate) fn detach_perf(
    device: BorrowedFd<'_>,
    event: BorrowedFd<'_>,
    name: [u8; PERSISTENT_NAME],
) -> io::Result<u64> {
    let mut detach = uapi::Detach { id: 0, name };
    on_perf(
        device,
        &uapi::Perf {
            fd: event.as_raw_fd(),
            call: uapi::IOC_DETACH,
            // The driver reads and writes one uapi::Detach here, which outlives the call.
            arg: std::ptr::from_mut(&mut detach).expose_provenance() as u64,
        },
    )?;
    Ok(detach.id)
}

/// Like [`attach`], for an event of `perf_event_open(2)`.
pub(crate) fn attach_perf(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_perf(device, &uapi::Perf { fd: event.as_raw_fd(), call: uapi::IOC_ATTACH, arg: 0 })
}

/// Like [`link`], for two events of `perf_event_open(2)`.
pub(crate) fn link_perf(
    device: BorrowedFd<'_>,
    event: BorrowedFd<'_>,
    role: Role,
    target: BorrowedFd<'_>,
) -> io::Result<()> {
    on_perf(
        device,
        &uapi::Perf { fd: event.as_raw_fd(), call: role.request(), arg: i64::from(target.as_raw_fd()).cast_unsigned() },
    )
}
