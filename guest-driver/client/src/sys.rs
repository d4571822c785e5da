//! Safe wrappers of system calls: the ioctls of `/dev/vpmu` and of its events, and poll(2). Passes the
//! driver's structs through without interpreting them. Perf's ioctls are in `vpmu_perf`.
#![expect(unsafe_code, reason = "system calls")]

mod device_ioctls;

pub(crate) use device_ioctls::*;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use vpmu_abi::uapi;
use vpmu_perf::call::ioctl_request;

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass a descriptor that the kernel has just created for them and that has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn info(device: BorrowedFd<'_>) -> io::Result<uapi::Info> {
    let mut info = uapi::Info::default();
    // SAFETY: the request writes one uapi::Info, which `info` has room for.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_INFO), &raw mut info) })?;
    Ok(info)
}

/// Returns the number of `entries` filled.
pub(crate) fn catalogue(device: BorrowedFd<'_>, first: u32, entries: &mut [uapi::CatalogueEntry]) -> io::Result<usize> {
    let request = uapi::Catalogue {
        first,
        count: u32::try_from(entries.len()).unwrap_or(u32::MAX),
        entries: entries.as_mut_ptr().expose_provenance() as u64,
    };
    // SAFETY: the driver writes at most `count` entries to `entries`, which has room for them, and is
    // borrowed mutably until the call returns.
    let filled =
        checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_CATALOGUE), &raw const request) })?;
    Ok(usize::try_from(filled).unwrap_or(0).min(entries.len()))
}

pub(crate) fn mark(device: BorrowedFd<'_>, value: u32) -> io::Result<()> {
    let value = libc::c_ulong::from(value);
    // SAFETY: the request passes its argument by value, so the kernel accesses no memory through
    // it.
    checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_MARK), value) })?;
    Ok(())
}

/// Returns the descriptor of the ring of `event`.
pub(crate) fn ring(device: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request passes its argument by value, so the kernel accesses no memory through it.
    let fd = checked(unsafe { libc::ioctl(device.as_raw_fd(), ioctl_request(uapi::IOC_RING), event.as_raw_fd()) })?;
    Ok(owned(fd))
}

/// Calls an ioctl whose argument is passed by value.
fn by_value(event: BorrowedFd<'_>, request: u32, value: u64) -> io::Result<()> {
    // SAFETY: the callers' requests pass their argument by value, so the kernel accesses no memory
    // through it.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), ioctl_request(request), value) })?;
    Ok(())
}

/// Polls all of `fds` for input; a `timeout` of `None` waits without limit. Returns each `revents`
/// in the order of `fds`; all are zero if a signal ends the wait.
pub(crate) fn poll(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Vec<PollFlags>> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    // A timeout beyond the kernel's range becomes infinite.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(&mut polled, timeout.as_ref()) {
        Err(error) if error != Errno::INTR => Err(error.into()),
        _ => Ok(polled.iter().map(PollFd::revents).collect()),
    }
}

/// `CLOCK_MONOTONIC_RAW` in nanoseconds.
pub(crate) fn monotonic_raw() -> u64 {
    let now = clock_gettime(ClockId::MonotonicRaw);
    let (seconds, nanoseconds) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds.wrapping_mul(1_000_000_000).wrapping_add(nanoseconds)
}
