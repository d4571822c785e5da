//! The system calls behind the perf source, each wrapped once.
#![expect(
    unsafe_code,
    reason = "perf_event_open, its ioctls and mappings have no safe form"
)]

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_ulong};
use perf_event_open_sys as perf;
use perf_event_open_sys::bindings::{PERF_FLAG_FD_CLOEXEC, perf_event_attr};

/// `fcntl` operations and owner kind that `libc` does not name for every target.
const F_SETSIG: c_int = 10;
const F_SETOWN_EX: c_int = 15;
const F_OWNER_TID: c_int = 0;

/// Descriptors of the process that events leave free: a guest opens as many events as it may, and
/// its host still needs files and clients.
pub(super) const LEFT_TO_OTHERS: u64 = 32;

/// `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: c_int,
    pid: c_int,
}

/// Opens a perf event on `thread` (0: the calling one), on any CPU.
pub(super) fn open(attr: &perf_event_attr, thread: i32) -> io::Result<File> {
    open_in(attr, thread, -1)
}

/// The same in the group of `leader`: it counts while the leader is enabled.
pub(super) fn open_member(attr: &perf_event_attr, thread: i32, leader: &File) -> io::Result<File> {
    open_in(attr, thread, leader.as_raw_fd())
}

fn open_in(attr: &perf_event_attr, thread: i32, group: c_int) -> io::Result<File> {
    let mut attr = *attr;
    let flags = c_ulong::from(PERF_FLAG_FD_CLOEXEC);
    // SAFETY: `attr` is a whole, initialised struct that outlives the call.
    let fd = unsafe { perf::perf_event_open(&raw mut attr, thread, -1, group, flags) };
    check(fd)?;
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    let event = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    match u64::try_from(fd).is_ok_and(|fd| fd < most_descriptors()) {
        true => Ok(event),
        false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
    }
}

/// Events get only descriptors below this number: the lowest are assigned first.
fn most_descriptors() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one rlimit to `limit`.
    match check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }) {
        Ok(()) => limit.rlim_cur.saturating_sub(LEFT_TO_OTHERS),
        Err(_) => u64::MAX,
    }
}

pub(super) fn enable(event: &File) -> io::Result<()> {
    // SAFETY: an ioctl without a pointer, on a descriptor that `event` owns.
    check(unsafe { perf::ioctls::ENABLE(event.as_raw_fd(), 0) })
}

pub(super) fn disable(event: &File) -> io::Result<()> {
    // SAFETY: see `enable`.
    check(unsafe { perf::ioctls::DISABLE(event.as_raw_fd(), 0) })
}

pub(super) fn set_period(event: &File, period: u64) -> io::Result<()> {
    let argument = (&raw const period).expose_provenance() as u64;
    // SAFETY: the kernel reads one u64 at the address, which lives until the call returns.
    check(unsafe { perf::ioctls::PERIOD(event.as_raw_fd(), argument) })
}

/// Redirects the event's records to the ring of `target`.
pub(super) fn redirect(event: &File, target: &File) -> io::Result<()> {
    // SAFETY: no pointer; both descriptors are owned by their files.
    check(unsafe { perf::ioctls::SET_OUTPUT(event.as_raw_fd(), target.as_raw_fd()) })
}

/// Makes the event's overflows send `signal` to `thread`.
pub(super) fn announce(event: &File, thread: i32, signal: c_int) -> io::Result<()> {
    let fd = event.as_raw_fd();
    let owner = Owner {
        kind: F_OWNER_TID,
        pid: thread,
    };
    // SAFETY: the kernel reads one `f_owner_ex` at the address, which lives until then.
    check(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: no pointer.
    check(unsafe { libc::fcntl(fd, F_SETSIG, signal) })?;
    // SAFETY: no pointer.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })
}

/// The calling thread's id.
pub(super) fn thread() -> i32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::gettid() }
}

/// CPUs of the largest supported set; Linux has none larger.
const MOST_CPUS: u32 = 8192;

/// The CPUs that the calling thread may run on.
pub(super) fn affinity() -> io::Result<BTreeSet<u32>> {
    let mut words = [0_u64; MOST_CPUS as usize / 64];
    // SAFETY: the kernel writes at most the given size, which is that of `words`.
    check(unsafe { libc::sched_getaffinity(0, size_of_val(&words), words.as_mut_ptr().cast()) })?;
    let has = |&cpu: &u32| {
        let word = words.get(cpu as usize / 64);
        word.is_some_and(|word| word >> (cpu % 64) & 1 != 0)
    };
    Ok((0..MOST_CPUS).filter(has).collect())
}

/// `_LINUX_CAPABILITY_VERSION_3`: two words of each set.
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

/// The effective capabilities of the calling thread, one bit each.
pub(super) fn effective_capabilities() -> io::Result<u64> {
    let mut header = CapabilityHeader {
        version: CAPABILITIES_VERSION,
        pid: 0,
    };
    let mut data = [CapabilityData::default(); 2];
    // SAFETY: the kernel reads and writes the header, and writes two elements, as this version
    // specifies; both outlive the call.
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

/// The calling thread's id, cached after the first call. A child of a fork inherits its parent's.
pub(super) fn known_thread() -> i32 {
    THREAD.with(|&thread| thread)
}

/// CPU time of the calling thread in nanoseconds.
pub(super) fn thread_time() -> Option<u64> {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of the clock in host records; zero on a host without it, where sampling events
/// cannot be opened either.
pub(super) fn raw_time() -> u64 {
    clock(libc::CLOCK_MONOTONIC_RAW).unwrap_or(0)
}

fn clock(which: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one timespec to `time`.
    check(unsafe { libc::clock_gettime(which, &raw mut time) }).ok()?;
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u64::try_from(time.tv_nsec).ok()?;
    Some(seconds * 1_000_000_000 + nanoseconds)
}

/// The size of the host's pages.
pub(super) fn page_size() -> io::Result<usize> {
    // SAFETY: takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).map_err(|_| io::Error::last_os_error())
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A mapping shared with the kernel, read and written in aligned words.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, and is only touched through atomics.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a perf event, a multiple of the page size.
    pub(super) fn new(event: &File, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, len })
    }

    /// The word at byte `offset`; 0 beyond the mapping.
    pub(super) fn load(&self, offset: usize, order: Ordering) -> u64 {
        self.word(offset).map_or(0, |word| word.load(order))
    }

    /// Sets the word at byte `offset`; nothing beyond the mapping.
    pub(super) fn store(&self, offset: usize, value: u64, order: Ordering) {
        if let Some(word) = self.word(offset) {
            word.store(value, order);
        }
    }

    fn word(&self, offset: usize) -> Option<&AtomicU64> {
        let index = offset / size_of::<AtomicU64>();
        if index >= self.len / size_of::<AtomicU64>() {
            return None;
        }
        // SAFETY: the index was just found to be inside the mapping.
        let word = unsafe { self.start.add(index) };
        // SAFETY: the mapping begins at a page, so the word is aligned; it lives as long as `self`,
        // and both sides access it atomically.
        Some(unsafe { word.as_ref() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}
