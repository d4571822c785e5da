//! Safe wrappers for the perf source's system calls on events and on the calling thread. Opening an event
//! fails if it would leave the process too few file descriptors for other uses.
#![expect(unsafe_code, reason = "system calls that have no safe wrapper")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use libc::c_int;
use vpmu_perf::bindings::perf_event_attr;
use vpmu_perf::call::{self, Scope, Target};
pub(super) use vpmu_perf::call::{announce, set_filter, set_period, thread};

/// Number of file descriptors that events leave to the rest of the process. A guest may open as many events as
/// its limits allow, but the VMM must still be able to open files and accept clients.
pub(super) const LEFT_TO_OTHERS: u64 = 32;

/// Opens a perf event that counts `thread` on any CPU. 0 is the calling thread.
pub(super) fn open(attr: &perf_event_attr, thread: i32) -> io::Result<File> {
    open_at(attr, Target::thread(thread))
}

/// Like [`open`], but in the group of `leader`. The event counts only while the leader is also enabled.
pub(super) fn open_member(attr: &perf_event_attr, thread: i32, leader: &File) -> io::Result<File> {
    let leader = Some(leader.as_fd());
    open_at(attr, Target { leader, ..Target::thread(thread) })
}

fn open_at(attr: &perf_event_attr, place: Target<'_>) -> io::Result<File> {
    let event = File::from(call::open(attr, place)?);
    if u64::try_from(event.as_raw_fd()).is_ok_and(|fd| fd < most_descriptors()) {
        Ok(event)
    } else {
        Err(io::Error::from_raw_os_error(libc::EMFILE))
    }
}

/// Events must have descriptors below this number. The kernel assigns the lowest free descriptor, so an event
/// with this number or a higher one would leave fewer than [`LEFT_TO_OTHERS`] for other uses.
fn most_descriptors() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit to `limit`.
    match check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }) {
        Ok(()) => limit.rlim_cur.saturating_sub(LEFT_TO_OTHERS),
        Err(_) => u64::MAX,
    }
}

pub(super) fn enable(event: &File) -> io::Result<()> {
    call::enable(event, Scope::Event)
}

pub(super) fn disable(event: &File) -> io::Result<()> {
    call::disable(event, Scope::Event)
}

/// Redirects the event's records to the ring of `target`.
pub(super) fn redirect(event: &File, target: &File) -> io::Result<()> {
    call::set_output(event, Some(target.as_fd()))
}

/// Maximum number of CPUs in a set. Linux does not support more.
const MOST_CPUS: u32 = 8192;

/// Returns the CPUs on which the calling thread may run.
pub(super) fn affinity() -> io::Result<BTreeSet<u32>> {
    let mut words = [0_u64; MOST_CPUS as usize / 64];
    // SAFETY: the kernel writes at most the given number of bytes, which is the size of `words`.
    check(unsafe { libc::sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr().cast()) })?;
    let has = |&cpu: &u32| {
        let word = words.get(cpu as usize / 64);
        word.is_some_and(|word| word >> (cpu % 64) & 1 != 0)
    };
    Ok((0..MOST_CPUS).filter(has).collect())
}

/// `_LINUX_CAPABILITY_VERSION_3`, in which each capability set has two 32-bit words.
const CAPABILITIES_VERSION: u32 = 0x2008_0522;

/// `struct __user_cap_header_struct`.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: c_int,
}

/// `struct __user_cap_data_struct`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct CapabilityData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Returns the effective capabilities of the calling thread. Each capability is one bit.
pub(super) fn effective_capabilities() -> io::Result<u64> {
    let mut header = CapabilityHeader { version: CAPABILITIES_VERSION, pid: 0 };
    let mut data = [CapabilityData::default(); 2];
    // SAFETY: for this version, the kernel reads and writes the header, and writes two elements of data. The header and
    // the data outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, data.as_mut_ptr()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let [low, high] = data.map(|data| u64::from(data.effective));
    Ok(high << 32 | low)
}

thread_local! {
    static THREAD: i32 = thread();
}

/// Returns the calling thread's id, which is cached after the first call. If the id was cached before a fork, this
/// function still returns the id of the parent's thread in the child.
pub(super) fn known_thread() -> i32 {
    THREAD.with(|&thread| thread)
}

/// Returns the CPU time of the calling thread in nanoseconds.
pub(super) fn thread_time() -> Option<u64> {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Returns the time, in nanoseconds, of the clock that host records use. Zero on a host without that clock. Sampling
/// events cannot be opened on such a host.
pub(super) fn raw_time() -> u64 {
    clock(libc::CLOCK_MONOTONIC_RAW).unwrap_or(0)
}

fn clock(which: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec to `time`.
    check(unsafe { libc::clock_gettime(which, &raw mut time) }).ok()?;
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u64::try_from(time.tv_nsec).ok()?;
    Some(seconds * 1_000_000_000 + nanoseconds)
}

/// The size of the host's pages.
pub(super) fn page_size() -> io::Result<usize> {
    // SAFETY: the call takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).map_err(|_| io::Error::last_os_error())
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
