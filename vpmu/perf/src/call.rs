//! Safe wrappers for the system calls on events. Each function returns the error of its system call.
#![expect(unsafe_code, reason = "perf_event_open and the calls on its descriptors have no safe wrapper")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, c_ulong};
use perf_event_open_sys as perf;
use perf_event_open_sys::bindings::{PERF_FLAG_FD_CLOEXEC, PERF_IOC_FLAG_GROUP, perf_event_attr};

/// `fcntl` operations and an owner kind that `libc` does not define for every target.
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const F_OWNER_TID: c_int = 0;

/// The kernel's `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: c_int,
    pid: c_int,
}

/// Where an event counts.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// A thread id; 0 for the calling thread, -1 for every task on `cpu`.
    pub pid: i32,
    /// A CPU number; -1 for any CPU.
    pub cpu: i32,
    /// The leader of the event's group; the event counts only while its leader is enabled.
    pub leader: Option<BorrowedFd<'a>>,
}

impl Target<'_> {
    /// The calling thread, on any CPU.
    pub const HERE: Self = Self::thread(0);

    /// A thread, on any CPU.
    #[must_use]
    pub const fn thread(pid: i32) -> Self {
        Self { pid, cpu: -1, leader: None }
    }
}

/// Whether a call acts on one event or its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The event.
    Event,
    /// All events of its group.
    Group,
}

impl Scope {
    fn flags(self) -> u32 {
        match self {
            Self::Event => 0,
            Self::Group => PERF_IOC_FLAG_GROUP,
        }
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Opens an event. Ignores `attr.size` and passes the size of `perf_event_attr`. A kernel with a shorter struct accepts
/// this size if the bytes beyond its struct are zero.
///
/// # Errors
/// The error of perf_event_open(2).
pub fn open(attr: &perf_event_attr, place: Target<'_>) -> io::Result<OwnedFd> {
    let mut attr = *attr;
    attr.size = u32::try_from(size_of::<perf_event_attr>()).map_err(io::Error::other)?;
    let group = place.leader.map_or(-1, |leader| leader.as_raw_fd());
    let flags = c_ulong::from(PERF_FLAG_FD_CLOEXEC);
    // SAFETY: `attr` is a whole, initialised struct that outlives the call.
    let fd = unsafe { perf::perf_event_open(&raw mut attr, place.pid, place.cpu, group, flags) };
    check(fd)?;
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Calls an ioctl whose argument is passed by value. `request` must be a perf request whose argument is not a pointer.
fn by_value(event: impl AsFd, request: u32, value: u64) -> io::Result<()> {
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: the callers pass only requests whose argument is a plain value and that access no memory.
    check(unsafe { libc::ioctl(fd, ioctl_request(request), value) })
}

/// Converts the number of an ioctl(2) request to the type that this C library's `ioctl` takes.
#[cfg(not(target_env = "musl"))]
#[must_use]
pub fn ioctl_request(number: u32) -> c_ulong {
    number.into()
}

/// Converts the number of an ioctl(2) request to the type that this C library's `ioctl` takes.
#[cfg(target_env = "musl")]
#[must_use]
pub fn ioctl_request(number: u32) -> c_int {
    number.cast_signed()
}

/// Starts counting.
///
/// # Errors
/// The error of ioctl(2).
pub fn enable(event: impl AsFd, scope: Scope) -> io::Result<()> {
    by_value(event, perf::bindings::ENABLE, scope.flags().into())
}

/// Stops counting.
pub fn disable(event: impl AsFd, scope: Scope) -> io::Result<()> {
    by_value(event, perf::bindings::DISABLE, scope.flags().into())
}

/// Sets the count to zero.
pub fn reset(event: impl AsFd, scope: Scope) -> io::Result<()> {
    by_value(event, perf::bindings::RESET, scope.flags().into())
}

/// Starts counting, and stops after the next `overflows` overflows.
pub fn refresh(event: impl AsFd, overflows: u32) -> io::Result<()> {
    by_value(event, perf::bindings::REFRESH, overflows.into())
}

/// Redirects the event's records to the ring of `target`; `None` restores the event's own ring.
pub fn set_output(event: impl AsFd, target: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let target = target.map_or(-1, |target| target.as_raw_fd());
    let target = i64::from(target).cast_unsigned();
    by_value(event, perf::bindings::SET_OUTPUT, target)
}

/// Makes the kernel stop writing to the event's ring if `paused`, else makes it write again.
pub fn pause_output(event: impl AsFd, paused: bool) -> io::Result<()> {
    by_value(event, perf::bindings::PAUSE_OUTPUT, paused.into())
}

/// Sets the number of events between samples or, for an event opened with a frequency, the frequency.
pub fn set_period(event: impl AsFd, period: u64) -> io::Result<()> {
    let argument = (&raw const period).expose_provenance() as u64;
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: the kernel reads one u64 at the address, which lives until the call returns.
    check(unsafe { perf::ioctls::PERIOD(fd, argument) })
}

/// Makes a tracepoint's event count only the hits that match `filter`, in the kernel's syntax for filters.
///
/// # Errors
/// The error of ioctl(2).
pub fn set_filter(event: impl AsFd, filter: &CStr) -> io::Result<()> {
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: the kernel only reads the text, up to its terminating zero. The text outlives the call.
    check(unsafe { perf::ioctls::SET_FILTER(fd, filter.as_ptr().cast_mut()) })
}

/// Replaces the event's attributes. Unlike [`open`], passes `attr.size` as it is.
pub fn modify(event: impl AsFd, attr: &perf_event_attr) -> io::Result<()> {
    let mut attr = *attr;
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: the request reads the attributes and may write their size. The attributes outlive the call.
    check(unsafe { perf::ioctls::MODIFY_ATTRIBUTES(fd, &raw mut attr) })
}

/// Returns the event's id in records.
pub fn id(event: impl AsFd) -> io::Result<u64> {
    let mut id = 0;
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: the request writes one u64 to `id`.
    check(unsafe { perf::ioctls::ID(fd, &raw mut id) })?;
    Ok(id)
}

/// Makes the event send `signal` to `thread` whenever it wakes its readers.
///
/// # Errors
/// The error of fcntl(2).
pub fn announce(event: impl AsFd, thread: i32, signal: c_int) -> io::Result<()> {
    let fd = event.as_fd().as_raw_fd();
    let owner = Owner { kind: F_OWNER_TID, pid: thread };
    // SAFETY: the kernel reads one `f_owner_ex` at the address; `owner` outlives the call.
    check(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: the call takes no pointer.
    check(unsafe { libc::fcntl(fd, F_SETSIG, signal) })?;
    // SAFETY: the call takes no pointer.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })
}

/// Returns the calling thread's id.
#[must_use]
pub fn thread() -> i32 {
    // SAFETY: the call takes no argument and cannot fail.
    unsafe { libc::gettid() }
}
