//! Safe functions for the system calls that the tests need: processes, signals, limits.
#![expect(unsafe_code, reason = "system calls that have no safe wrapper")]

use perf_event_open_sys::bindings::perf_event_attr;

use crate::Outcome;
use crate::ensure::ensure_eq;
use std::ffi::CStr;
use std::fs;
use std::io::{self, PipeReader, PipeWriter, Write};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Unloads a module, if nobody uses it.
pub(crate) fn unload(module: &CStr) -> io::Result<()> {
    // SAFETY: the string is valid for the whole call, and the flags are a number.
    let done = unsafe { libc::syscall(libc::SYS_delete_module, module.as_ptr(), libc::O_NONBLOCK) };
    checked(i32::try_from(done).map_err(io::Error::other)?)?;
    Ok(())
}

/// Loads a kernel and its initramfs for [`start_kernel`].
pub(crate) fn load_kernel(kernel: BorrowedFd<'_>, initramfs: BorrowedFd<'_>, command_line: &CStr) -> io::Result<()> {
    let words = command_line.to_bytes_with_nul();
    // SAFETY: the files are open, and the string has that length and is valid for the whole call. There are no flags.
    let done = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initramfs.as_raw_fd(),
            words.len(),
            words.as_ptr(),
            0_u64,
        )
    };
    checked(i32::try_from(done).map_err(io::Error::other)?)?;
    Ok(())
}

/// Replaces this kernel with the kernel that [`load_kernel`] has loaded. Returns only if this fails.
pub(crate) fn start_kernel() -> io::Error {
    // SAFETY: the call takes only a number. If the call succeeds, this process no longer exists.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    io::Error::last_os_error()
}

/// Returns how long this kernel has been running, in nanoseconds.
pub(crate) fn uptime() -> io::Result<u64> {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, and `now` is a timespec.
    checked(unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) })?;
    let nanoseconds = now.tv_sec * 1_000_000_000 + now.tv_nsec;
    u64::try_from(nanoseconds).map_err(io::Error::other)
}

/// Loads the module in `file`, without parameters.
pub(crate) fn load(file: BorrowedFd<'_>) -> io::Result<()> {
    let none = c"";
    // SAFETY: the file is open, and the string is valid for the whole call.
    let done = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), none.as_ptr(), 0) };
    checked(i32::try_from(done).map_err(io::Error::other)?)?;
    Ok(())
}

/// The signal that the tests request. It is a real-time signal. The kernel queues such signals, so none of them is
/// lost.
pub(crate) fn signal() -> i32 {
    libc::SIGRTMIN() + 3
}

/// A signal as it arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// `POLL_IN`, `POLL_ERR` or `POLL_HUP`.
    pub(crate) code: i32,
    pub(crate) fd: i32,
}

/// `si_code` of a signal that is sent because there are records to read.
pub(crate) const POLL_IN: i32 = 1;
/// `si_code` of a signal that is sent because the event is in the error state.
pub(crate) const POLL_ERR: i32 = 4;
/// `si_code` of a signal that is sent because no more records will follow.
pub(crate) const POLL_HUP: i32 = 6;

fn signals() -> libc::sigset_t {
    // SAFETY: all zeros are a valid value. The next call makes it an empty set.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: a valid address.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: a valid set and a real signal.
    unsafe { libc::sigaddset(&raw mut set, signal()) };
    set
}

/// Blocks [`signal`] in this thread and in the threads that it starts. The signal stays pending for [`wait_signal`].
pub(crate) fn block_signal() -> io::Result<()> {
    let set = signals();
    // SAFETY: the set is valid. The pointer for the old set is null, so the call writes nothing.
    checked(unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) })?;
    Ok(())
}

// This constant is in <fcntl.h>, but is missing in the crate `libc`.
const F_SETSIG: i32 = 10;
const F_SETOWN_EX: i32 = 15;
const F_OWNER_TID: i32 = 0;

/// `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: i32,
    id: libc::pid_t,
}

/// Makes `fd` send its signals to this thread, with `F_SETOWN_EX`, `F_SETSIG` and `O_ASYNC`.
pub(crate) fn signal_from(fd: BorrowedFd<'_>) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // SAFETY: cannot fail and touches no memory.
    let thread = unsafe { libc::gettid() };
    let owner = Owner { kind: F_OWNER_TID, id: thread };
    // SAFETY: the address is valid for the whole call.
    checked(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: takes its argument by value.
    checked(unsafe { libc::fcntl(fd, F_SETSIG, signal()) })?;
    // SAFETY: as above.
    let flags = checked(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) })?;
    Ok(())
}

/// Returns the next signal that arrives within `limit`, or `None` if no signal arrives.
pub(crate) fn wait_signal(limit: Duration) -> io::Result<Option<Arrived>> {
    let set = signals();
    let limit = libc::timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: limit.subsec_nanos().into() };
    // SAFETY: a plain structure of integers.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    // SAFETY: all three addresses are valid for the whole call.
    let got = unsafe { libc::sigtimedwait(&raw const set, &raw mut info, &raw const limit) };
    if got < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(None),
            _ => Err(error),
        };
    }
    // In the siginfo of a SIGPOLL, `si_fd` follows signo, errno, code, padding and the band, which is a long.
    let words = (&raw const info).cast::<i32>();
    // SAFETY: the word is inside siginfo_t, which is 128 bytes of integers.
    let fd = unsafe { words.add(6) };
    // SAFETY: as above; the word is aligned.
    let fd = unsafe { fd.read() };
    Ok(Some(Arrived { code: info.si_code, fd }))
}

/// Waits until the console's driver has sent all output of this program, because sending causes exits.
pub(crate) fn drain_console() {
    // SAFETY: the call accesses no memory. If the output is not a terminal, there is nothing to wait for.
    unsafe { libc::tcdrain(libc::STDOUT_FILENO) };
}

/// Mounts a virtual file system of the kernel.
pub(crate) fn mount(kind: &CStr, at: &CStr) -> io::Result<()> {
    let (kind, at) = (kind.as_ptr(), at.as_ptr());
    // SAFETY: the strings are valid for the whole call, and this kind of file system takes no data.
    checked(unsafe { libc::mount(kind, at, kind, 0, ptr::null()) })?;
    Ok(())
}

/// Mounts the cgroup hierarchy that counts perf events.
pub(crate) fn mount_groups(at: &CStr) -> io::Result<()> {
    let kind = c"cgroup".as_ptr();
    let options = c"perf_event".as_ptr().cast();
    // SAFETY: the strings are valid for the whole call.
    checked(unsafe { libc::mount(kind, at.as_ptr(), kind, 0, options) })?;
    Ok(())
}

/// Returns whether a process ends within `limit`. The caller sleeps until then, because polling every few milliseconds
/// would take CPU time from the process.
pub(crate) fn ends_within(process: u32, limit: Duration) -> io::Result<bool> {
    // SAFETY: the call accesses no memory, and returns a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(checked(fd)?) };
    let mut asked = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let limit = i32::try_from(limit.as_millis()).map_err(io::Error::other)?;
    // SAFETY: the array has one element, which is valid for the whole call.
    let ready = checked(unsafe { libc::poll(&raw mut asked, 1, limit) })?;
    Ok(ready > 0)
}

/// Runs `child` in a forked process and returns its exit code. The calling process must have only one thread.
pub(crate) fn forked(child: impl FnOnce() -> i32) -> io::Result<i32> {
    Forked::start(child)?.wait()
}

/// Runs `act` in a forked process, which must succeed. Its error goes to stderr. The calling process must have only one
/// thread.
pub(crate) fn in_child(act: impl FnOnce() -> Outcome) -> Outcome {
    let code = forked(|| match act() {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            1
        }
    })?;
    ensure_eq!(code, 0, "the child's exit code");
    Ok(())
}

/// A child process that runs a function. It is killed when dropped.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: libc::pid_t,
    running: bool,
}

impl Forked {
    /// Runs `child` in a forked process, whose exit code is the function's result. The calling process must have only
    /// one thread.
    pub(crate) fn start(child: impl FnOnce() -> i32) -> io::Result<Self> {
        // SAFETY: the process has only this thread, which continues in the child.
        let pid = checked(unsafe { libc::fork() })?;
        if pid == 0 {
            let code = child();
            // SAFETY: the call ends the child before the child can return from this function.
            unsafe { libc::_exit(code) };
        }
        Ok(Self { pid, running: true })
    }

    /// Returns the child's exit code when it ends, or the negative number of the signal that ended it.
    pub(crate) fn wait(&mut self) -> io::Result<i32> {
        let mut status = 0;
        // SAFETY: the address is valid, and the child belongs to this process.
        checked(unsafe { libc::waitpid(self.pid, &raw mut status, 0) })?;
        self.running = false;
        Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) })
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if self.running {
            // SAFETY: the process is our child, and nobody has waited for it yet.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            // The child ends in any case.
            let _ = self.wait();
        }
    }
}

/// Returns a pipe that is filled with `bytes` bytes and therefore occupies that much kernel memory. `bytes` must be a
/// power of two and at least a page.
pub(crate) fn full_pipe(bytes: usize) -> io::Result<(PipeReader, PipeWriter)> {
    let size = i32::try_from(bytes).map_err(io::Error::other)?;
    let (reader, mut writer) = io::pipe()?;
    // SAFETY: the descriptor is open, and the argument is a number.
    checked(unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, size) })?;
    writer.write_all(&vec![0; bytes])?;
    Ok((reader, writer))
}

/// Whether anything is mapped at `address`.
pub(crate) fn is_mapped(address: *mut u8) -> bool {
    let mut resident = 0;
    // SAFETY: the call checks one page, and writes one byte to `resident`.
    unsafe { libc::mincore(address.cast(), 4096, &raw mut resident) == 0 }
}

/// Returns whether the kernel can read the byte at `address`. Returns false if a program's read would raise SIGBUS.
pub(crate) fn is_readable(address: *const u8) -> io::Result<bool> {
    let mut ends = [-1; 2];
    // SAFETY: two descriptors are written there.
    checked(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: the pipe's descriptors are new, and nothing else owns them.
    let [_read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    // SAFETY: the kernel checks the address.
    let written = unsafe { libc::write(write.as_raw_fd(), address.cast(), 1) };
    match (written, io::Error::last_os_error()) {
        (1, _) => Ok(true),
        (_, error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(false),
        (_, error) => Err(error),
    }
}

/// Calls munmap(2) for a part of a mapping. The call must be refused.
pub(crate) fn unmap(address: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: the caller expects a refusal. Later accesses to the mapping are atomic reads. If the call unmaps pages
    // after all, these reads raise a fault.
    checked(unsafe { libc::munmap(address.cast(), bytes) })?;
    Ok(())
}

/// mprotect(2) that makes read-only pages writable.
pub(crate) fn make_writable(address: *mut u8, bytes: usize) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller expects a refusal. The pages are shared memory, which is accessed only atomically.
    checked(unsafe { libc::mprotect(address.cast(), bytes, protection) })?;
    Ok(())
}

/// Makes this process run as the user `nobody`, without capabilities.
pub(crate) fn become_nobody() -> io::Result<()> {
    const NOBODY: u32 = 65534;
    // SAFETY: the call changes this process's identity and accesses no memory.
    checked(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) })?;
    // SAFETY: as above.
    checked(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) })?;
    Ok(())
}

/// `CAP_PERFMON`'s number.
pub(crate) const CAP_PERFMON: u32 = 38;

/// Drops every capability except those with these numbers.
pub(crate) fn keep_capabilities(kept: &[u32]) -> io::Result<()> {
    // `_LINUX_CAPABILITY_VERSION_3` for the calling thread.
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut data = [[0_u32; 3]; 2];
    for &capability in kept {
        let word = &mut data[usize::from(capability >= 32)];
        // Effective and permitted.
        word[0] |= 1 << (capability % 32);
        word[1] |= 1 << (capability % 32);
    }
    // SAFETY: the kernel reads a header and two elements, which are valid for the whole call.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) };
    checked(i32::try_from(set).map_err(io::Error::other)?)?;
    Ok(())
}

/// Makes this process run as the user `nobody`, with only these capabilities.
pub(crate) fn become_nobody_with(kept: &[u32]) -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    checked(unsafe { libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0) })?;
    become_nobody()?;
    keep_capabilities(kept)
}

/// Sets whether other processes of the same user may trace this process.
pub(crate) fn set_dumpable(dumpable: bool) -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    checked(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, i32::from(dumpable), 0, 0, 0) })?;
    Ok(())
}

/// Sets the limit on this process's number of file descriptors.
pub(crate) fn allow_descriptors(most: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the address is valid for the whole call.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(())
}

/// Opens a counting event of the calling thread by `perf_event_open(2)`. `kind` is one of perf's own event types
/// (`PERF_TYPE_*`).
pub(crate) fn open_perf_event(kind: u32, config: u64) -> io::Result<OwnedFd> {
    open_perf_attr(&perf_event_attr {
        type_: kind,
        // The first version's size.
        size: 64,
        config,
        ..perf_event_attr::default()
    })
}

/// Opens an event of this task by `perf_event_open(2)`.
pub(crate) fn open_perf_attr(attr: &perf_event_attr) -> io::Result<OwnedFd> {
    let attr: *const perf_event_attr = attr;
    // SAFETY: the kernel reads as many bytes as the attr's size field says. They are valid for the whole call.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, attr, 0, -1, -1, 0) };
    let fd = checked(i32::try_from(fd).map_err(io::Error::other)?)?;
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A BPF program that counts how often it runs.
#[derive(Debug)]
pub(crate) struct BpfCounter {
    map: OwnedFd,
    program: OwnedFd,
}

impl BpfCounter {
    /// Loads a program that can be attached to perf events. `records` selects whether an overflow still writes a record
    /// after the program has run.
    pub(crate) fn load(records: bool) -> io::Result<Self> {
        const MAP_CREATE: i32 = 0;
        const PROG_LOAD: i32 = 5;
        const PERF_EVENT: u32 = 7;
        // Creates an array map with one element. The words hold the map's type, the size of a key, the size of a value,
        // and the number of elements.
        let map = bpf(MAP_CREATE, &[2 | 4 << 32, 8 | 1 << 32])?;
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        let map = unsafe { OwnedFd::from_raw_fd(map) };
        let minus_four = u32::MAX - 3;
        let map_number = map.as_raw_fd().cast_unsigned();
        let code = [
            // Store the key 0 on the stack, and make r2 point to it.
            instruction(0x62, 10, 0, u16::MAX - 3, 0),
            instruction(0xbf, 2, 10, 0, 0),
            instruction(0x07, 2, 0, 0, minus_four),
            instruction(0x18, 1, 1, 0, map_number),
            0,
            // The lookup returns the element's address in r0. The verifier requires a check for null. If r0 is null,
            // the check skips the addition.
            instruction(0x85, 0, 0, 0, 1),
            instruction(0x15, 0, 0, 2, 0),
            instruction(0xb7, 1, 0, 0, 1),
            instruction(0xdb, 0, 1, 0, 0),
            instruction(0xb7, 0, 0, 0, records.into()),
            instruction(0x95, 0, 0, 0, 0),
        ];
        let words = [
            u64::from(PERF_EVENT) | (code.len() as u64) << 32,
            code.as_ptr().expose_provenance() as u64,
            c"GPL".as_ptr().expose_provenance() as u64,
        ];
        let program = bpf(PROG_LOAD, &words)?;
        // SAFETY: as above.
        let program = unsafe { OwnedFd::from_raw_fd(program) };
        Ok(Self { map, program })
    }

    /// Attaches the program to an event's overflows.
    pub(crate) fn attach(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        attach_bpf(event, self.program.as_fd())
    }

    /// How often the program has run.
    pub(crate) fn runs(&self) -> io::Result<u64> {
        let mut value = 0_u64;
        look_up_bpf(self.map.as_fd(), (&raw mut value).expose_provenance())?;
        // SAFETY: the kernel has written the value through the address above.
        Ok(unsafe { (&raw const value).read_volatile() })
    }
}

/// The counts that a [`BpfReader`] has read so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct BpfCounts {
    /// How often the program read the event.
    pub(crate) reads: u64,
    /// How often the kernel refused to read it, for example on another CPU than the event's.
    pub(crate) refused: u64,
    /// The last count.
    pub(crate) greatest: u64,
    /// How often a count was less than the one before.
    pub(crate) decreased: u64,
}

/// A BPF program for probes, which reads an event's count.
#[derive(Debug)]
pub(crate) struct BpfReader {
    counts: OwnedFd,
    _events: OwnedFd,
    program: OwnedFd,
}

impl BpfReader {
    /// Loads a program that reads `event` whenever it runs on `cpu`.
    pub(crate) fn load(cpu: usize, event: BorrowedFd<'_>) -> io::Result<Self> {
        const ARRAY: u64 = 2;
        const EVENT_ARRAY: u64 = 4;
        const MAP_CREATE: i32 = 0;
        const MAP_UPDATE: i32 = 2;
        const PROG_LOAD: i32 = 5;
        const KPROBE: u64 = 2;
        const COUNTS: u64 = size_of::<BpfCounts>() as u64;
        // The words hold a map's type, the size of a key, the size of a value, and the number of elements.
        let counts = bpf(MAP_CREATE, &[ARRAY | 4 << 32, COUNTS | 1 << 32])?;
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        let counts = unsafe { OwnedFd::from_raw_fd(counts) };
        let elements = cpu as u64 + 1;
        let events = bpf(MAP_CREATE, &[EVENT_ARRAY | 4 << 32, 4 | elements << 32])?;
        // SAFETY: as above.
        let events = unsafe { OwnedFd::from_raw_fd(events) };
        let key = u32::try_from(cpu).map_err(io::Error::other)?;
        let value = event.as_raw_fd();
        bpf(
            MAP_UPDATE,
            &[
                events.as_raw_fd().cast_unsigned().into(),
                (&raw const key).expose_provenance() as u64,
                (&raw const value).expose_provenance() as u64,
                0,
            ],
        )?;
        let minus = |bytes: u16| bytes.wrapping_neg();
        let minus_wide = |bytes: u32| bytes.wrapping_neg();
        let of = |fd: &OwnedFd| fd.as_raw_fd().cast_unsigned();
        let code = [
            // bpf_perf_event_read_value(events, BPF_F_CURRENT_CPU, stack - 24, 24)
            instruction(0x18, 1, 1, 0, of(&events)),
            0,
            instruction(0xb4, 2, 0, 0, u32::MAX),
            instruction(0xbf, 3, 10, 0, 0),
            instruction(0x07, 3, 0, 0, minus_wide(24)),
            instruction(0xb7, 4, 0, 0, 24),
            instruction(0x85, 0, 0, 0, 55),
            instruction(0xbf, 7, 0, 0, 0),
            // The address of the counts, which is never null, but the verifier requires a check.
            instruction(0x62, 10, 0, minus(28), 0),
            instruction(0xbf, 2, 10, 0, 0),
            instruction(0x07, 2, 0, 0, minus_wide(28)),
            instruction(0x18, 1, 1, 0, of(&counts)),
            0,
            instruction(0x85, 0, 0, 0, 1),
            instruction(0x15, 0, 0, 11, 0),
            instruction(0xb7, 3, 0, 0, 1),
            // A failed read adds one to the second word.
            instruction(0x55, 7, 0, 6, 0),
            instruction(0x79, 1, 10, minus(24), 0),
            instruction(0x79, 2, 0, 16, 0),
            instruction(0x7b, 0, 1, 16, 0),
            instruction(0x3d, 1, 2, 1, 0),
            instruction(0xdb, 0, 3, 24, 0),
            instruction(0x05, 0, 0, 2, 0),
            instruction(0xdb, 0, 3, 8, 0),
            instruction(0x05, 0, 0, 1, 0),
            instruction(0xdb, 0, 3, 0, 0),
            instruction(0xb7, 0, 0, 0, 0),
            instruction(0x95, 0, 0, 0, 0),
        ];
        let words = [
            KPROBE | (code.len() as u64) << 32,
            code.as_ptr().expose_provenance() as u64,
            c"GPL".as_ptr().expose_provenance() as u64,
        ];
        let program = bpf(PROG_LOAD, &words)?;
        // SAFETY: as above.
        let program = unsafe { OwnedFd::from_raw_fd(program) };
        Ok(Self { counts, _events: events, program })
    }

    /// Attaches the program to a probe's event.
    pub(crate) fn attach(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        attach_bpf(event, self.program.as_fd())
    }

    /// The counts so far.
    pub(crate) fn seen(&self) -> io::Result<BpfCounts> {
        let mut value = BpfCounts::default();
        look_up_bpf(self.counts.as_fd(), (&raw mut value).expose_provenance())?;
        // SAFETY: the kernel has written the value through the address above.
        Ok(unsafe { (&raw const value).read_volatile() })
    }
}

/// Encodes a BPF instruction with its opcode, two registers, offset and immediate value.
fn instruction(code: u64, to: u64, from: u64, offset: u16, value: u32) -> u64 {
    code | to << 8 | from << 12 | u64::from(offset) << 16 | u64::from(value) << 32
}

/// Attaches a BPF program to an event.
fn attach_bpf(event: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    const SET_BPF: u64 = 0x4004_2408;
    let program = program.as_raw_fd();
    // SAFETY: the call takes a descriptor, and accesses no memory.
    checked(unsafe { libc::ioctl(event.as_raw_fd(), SET_BPF, program) })?;
    Ok(())
}

/// Reads the first element of a map to `address`, which must have room for an element.
fn look_up_bpf(map: BorrowedFd<'_>, address: usize) -> io::Result<()> {
    const LOOKUP: i32 = 1;
    let key = 0_u32;
    bpf(
        LOOKUP,
        &[map.as_raw_fd().cast_unsigned().into(), (&raw const key).expose_provenance() as u64, address as u64],
    )?;
    Ok(())
}

/// A BPF program with a known number of instructions, which the kernel runs on request. BPF's JIT compiler turns each
/// addition into one instruction.
#[derive(Debug)]
pub(crate) struct KernelCode(OwnedFd);

impl KernelCode {
    /// Code with `count` additions to a register.
    pub(crate) fn additions(count: usize) -> io::Result<Self> {
        const PROG_LOAD: i32 = 5;
        const SOCKET_FILTER: u64 = 1;
        const SET_R0: u64 = 0xb7;
        const ADD_ONE_TO_R0: u64 = 0x07 | 1 << 32;
        const EXIT: u64 = 0x95;
        let additions = std::iter::repeat_n(ADD_ONE_TO_R0, count);
        let code: Vec<u64> = [SET_R0].into_iter().chain(additions).chain([EXIT]).collect();
        let words = [
            SOCKET_FILTER | (code.len() as u64) << 32,
            code.as_ptr().expose_provenance() as u64,
            c"GPL".as_ptr().expose_provenance() as u64,
        ];
        let program = bpf(PROG_LOAD, &words)?;
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(program) }))
    }

    /// Runs the code `times` times.
    pub(crate) fn run(&self, times: u32) -> io::Result<()> {
        const PROG_TEST_RUN: i32 = 10;
        // An Ethernet header, and a byte.
        let packet = [0_u8; 15];
        let words = [
            self.0.as_raw_fd().cast_unsigned().into(),
            packet.len() as u64,
            packet.as_ptr().expose_provenance() as u64,
            0,
            times.into(),
        ];
        bpf(PROG_TEST_RUN, &words).map(drop)
    }
}

/// Calls `bpf(2)`. The attributes begin with `words`, and the rest of them are zero.
fn bpf(call: i32, words: &[u64]) -> io::Result<i32> {
    // SAFETY: the kernel reads only `words`, because the call states their size. It also accesses the memory to which
    // pointers in `words` point. It does both only during the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, call, words.as_ptr(), size_of_val(words)) };
    checked(i32::try_from(result).map_err(io::Error::other)?)
}

/// Sets `kernel.perf_event_paranoid`.
pub(crate) fn set_paranoid(level: i32) -> io::Result<()> {
    fs::write(PARANOID, level.to_string())
}

/// `kernel.perf_event_paranoid`.
pub(crate) const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";

/// Whether a thread of this process sleeps.
pub(crate) fn is_asleep(thread: u32) -> io::Result<bool> {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat"))?;
    // The state follows the name. The name is in parentheses.
    Ok(stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
}

/// Words of memory that this process shares with its children.
#[derive(Debug)]
pub(crate) struct SharedWords(*mut AtomicU64);

/// The size of [`SharedWords`].
const SHARED: usize = 4096;

impl SharedWords {
    pub(crate) fn map() -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses an unused address, so no existing mapping is replaced.
        let base = unsafe { libc::mmap(ptr::null_mut(), SHARED, protection, flags, -1, 0) };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Self(base.cast())),
        }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < SHARED / size_of::<u64>(), "word {index}");
        // SAFETY: the assertion ensures that the word is inside the mapping, which is valid as long as `self` is.
        let word = unsafe { self.0.add(index) };
        // SAFETY: aligned, and accessed only atomically.
        unsafe { &*word }
    }

    pub(crate) fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::SeqCst)
    }

    pub(crate) fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::SeqCst);
    }

    pub(crate) fn add(&self, index: usize, value: u64) {
        self.word(index).fetch_add(value, Ordering::SeqCst);
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: this is exactly the mapped range, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.0.cast(), SHARED) };
    }
}

/// Ignores SIGIO in this process and in its later children.
pub(crate) fn ignore_sigio() -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    match unsafe { libc::signal(libc::SIGIO, libc::SIG_IGN) } {
        libc::SIG_ERR => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Moves this process to a process group: that of `leader`, or with 0, a new one.
pub(crate) fn join_group(leader: libc::pid_t) -> io::Result<()> {
    // SAFETY: the call takes only numbers.
    checked(unsafe { libc::setpgid(0, leader) })?;
    Ok(())
}

/// Makes `fd` send SIGIO to all processes of a group.
pub(crate) fn signal_group_from(fd: BorrowedFd<'_>, leader: libc::pid_t) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // SAFETY: the call takes only numbers.
    checked(unsafe { libc::fcntl(fd, libc::F_SETOWN, -leader) })?;
    // SAFETY: as above.
    let flags = checked(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC) })?;
    Ok(())
}

/// A child process that sleeps until this value is dropped.
#[derive(Debug)]
pub(crate) struct Sleeper {
    pub(crate) pid: libc::pid_t,
}

impl Sleeper {
    /// Forks the child. Returns when `prepare` has succeeded in the child. The child keeps the result of `prepare`.
    pub(crate) fn start<T>(prepare: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        let mut ends = [-1; 2];
        // SAFETY: two descriptors are written there.
        checked(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
        // SAFETY: the pipe's descriptors are new, and nothing else owns them.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        // SAFETY: the process has only this thread, which continues in the child.
        let pid = checked(unsafe { libc::fork() })?;
        if pid == 0 {
            let kept = prepare();
            let code = [u8::from(kept.is_ok())];
            // SAFETY: the buffer has one byte, which is valid for the whole call.
            unsafe { libc::write(write.as_raw_fd(), code.as_ptr().cast(), 1) };
            loop {
                // SAFETY: the call has no arguments. A signal ends the process.
                unsafe { libc::pause() };
            }
        }
        drop(write);
        let sleeper = Self { pid };
        let mut code = [0_u8];
        // SAFETY: the buffer has room for one byte.
        unsafe { libc::read(read.as_raw_fd(), code.as_mut_ptr().cast(), 1) };
        match code {
            [1] => Ok(sleeper),
            _ => Err(io::Error::other("the sleeper could not prepare")),
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: the process is our child, and we have not waited for it yet.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        // SAFETY: the address is valid for the whole call.
        unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
    }
}

/// Returns the number of this thread's voluntary context switches.
pub(crate) fn sleeps() -> io::Result<i64> {
    // SAFETY: all zeros are a valid value of this plain structure.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: room for one structure.
    checked(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) })?;
    Ok(usage.ru_nvcsw)
}

/// Limits this process's locked memory to `bytes`.
pub(crate) fn limit_locked(bytes: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the address is valid for the whole call.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) })?;
    Ok(())
}

/// Sets the limit on the number of signals that are queued for this user's processes.
pub(crate) fn limit_signals(most: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the address is valid for the whole call.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_SIGPENDING, &raw const limit) })?;
    Ok(())
}

/// Yields the CPU to other tasks.
pub(crate) fn yield_cpu() {
    // SAFETY: the call takes no arguments.
    unsafe { libc::sched_yield() };
}

/// An epoll instance for one descriptor.
#[derive(Debug)]
pub(crate) struct Epoll(i32);

impl Epoll {
    pub(crate) fn new(fd: BorrowedFd<'_>, edge: bool) -> io::Result<Self> {
        // SAFETY: the call accesses no memory.
        let epoll = Self(checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?);
        let edge = if edge { libc::EPOLLET } else { 0 };
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | edge).cast_unsigned(), u64: 0 };
        let fd = fd.as_raw_fd();
        // SAFETY: the address is valid for the whole call.
        checked(unsafe { libc::epoll_ctl(epoll.0, libc::EPOLL_CTL_ADD, fd, &raw mut event) })?;
        Ok(epoll)
    }

    /// Waits up to `millis` milliseconds for an event, and returns its bits. Returns zero at the timeout.
    pub(crate) fn wait(&self, millis: i32) -> io::Result<u32> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        checked(unsafe { libc::epoll_wait(self.0, &raw mut event, 1, millis) })?;
        Ok(event.events)
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        // SAFETY: opened by `new`, closed once.
        unsafe { libc::close(self.0) };
    }
}
