//! Device ioctls that perf lacks: persistent events, wakeups, starters and stoppers, flush.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vpmu_abi::{PERSISTENT_NAME, uapi};
use vpmu_perf::call::ioctl_request;

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

/// Sets the wakeup interval, in records or bytes.
pub(crate) fn set_wakeup(event: BorrowedFd<'_>, every: u32, unit: u32) -> io::Result<()> {
    let request = uapi::Wakeup { every: every.into(), unit, reserved: 0 };
    // SAFETY: the driver reads one uapi::Wakeup, which outlives the call.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), ioctl_request(uapi::IOC_WAKEUP), &raw const request) })?;
    Ok(())
}

/// Flushes all persistent events.
pub(crate) fn flush(device: BorrowedFd<'_>) -> io::Result<()> {
    by_value(device, uapi::IOC_FLUSH, 0)
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

/// Makes one of the driver's calls for an event.
fn on_event(device: BorrowedFd<'_>, event: BorrowedFd<'_>, call: u32, arg: u64) -> io::Result<()> {
    let request = uapi::Perf { fd: event.as_raw_fd(), call, arg };
    // SAFETY: the driver reads one uapi::Perf, which outlives the call. Its `arg` is a plain number, or the address of
    // a struct that the caller lends for the call.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_PERF), &raw const request) })?;
    Ok(())
}

/// Returns the event's id and engine.
pub(crate) fn event(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<uapi::EventState> {
    let mut state = uapi::EventState::default();
    // The driver writes one uapi::EventState here, which outlives the call.
    on_event(device, event, uapi::IOC_EVENT, std::ptr::from_mut(&mut state).expose_provenance() as u64)?;
    Ok(state)
}

pub(crate) fn flush_event(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_event(device, event, uapi::IOC_FLUSH, 0)
}

/// Makes the event persistent; returns its id.
pub(crate) fn detach(device: BorrowedFd<'_>, event: BorrowedFd<'_>, name: [u8; PERSISTENT_NAME]) -> io::Result<u64> {
    let mut detach = uapi::Detach { id: 0, name };
    // The driver reads and writes one uapi::Detach here, which outlives the call.
    on_event(device, event, uapi::IOC_DETACH, std::ptr::from_mut(&mut detach).expose_provenance() as u64)?;
    Ok(detach.id)
}

pub(crate) fn attach(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
    on_event(device, event, uapi::IOC_ATTACH, 0)
}

pub(crate) fn link(
    device: BorrowedFd<'_>,
    event: BorrowedFd<'_>,
    role: Role,
    target: BorrowedFd<'_>,
) -> io::Result<()> {
    on_event(device, event, role.request(), i64::from(target.as_raw_fd()).cast_unsigned())
}
