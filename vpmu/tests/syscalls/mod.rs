//! Counts a thread's system calls exactly. As with strace, another process traces the thread.
#![expect(unsafe_code, reason = "fork and ptrace have no safe wrapper")]

use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;

use libc::{c_int, c_long, c_uint, c_ulong, pid_t};

/// The system call that marks the start and the end of the counted part. No other code makes this call.
const MARKER: c_long = libc::SYS_getppid;
/// The signal of a system-call stop, if `PTRACE_O_TRACESYSGOOD` is set.
const SYSCALL_STOP: c_int = libc::SIGTRAP | 0x80;
const PTRACE_GET_SYSCALL_INFO: c_uint = 0x420e;
/// `op` of `struct ptrace_syscall_info` at a call's entry.
const ENTRY: u8 = 1;

/// Counts the system calls that the calling thread makes in `act`. Does not count system calls of other threads, or
/// clock reads that the vDSO answers without a system call.
pub(crate) fn count(act: impl FnOnce()) -> usize {
    let (mut reader, writer) = io::pipe().expect("a pipe");
    let thread = this_thread();
    allow_tracers(c_ulong::MAX);
    // SAFETY: the child runs only `trace`, which makes system calls. It does not take locks or allocate memory, because
    // another thread may have held a lock during the fork.
    let tracer = match unsafe { libc::fork() } {
        0 => trace(thread, writer),
        tracer => Tracer(tracer),
    };
    drop(writer);
    let mut attached = [0];
    let read = reader.read_exact(&mut attached);
    read.expect("cannot trace the parent process: set /proc/sys/kernel/yama/ptrace_scope to 0 or 1");
    mark();
    act();
    mark();
    let mut counted = [0; size_of::<usize>()];
    reader.read_exact(&mut counted).expect("a count");
    allow_tracers(0);
    drop(tracer);
    usize::from_ne_bytes(counted)
}

/// The tracing process. Dropping this value kills the process if it is still running.
struct Tracer(pid_t);

impl Drop for Tracer {
    fn drop(&mut self) {
        // SAFETY: the call takes no pointer. Nothing has waited for the child yet, so its id has not been reused.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: the status pointer is null, so the kernel writes nothing.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

fn this_thread() -> pid_t {
    // SAFETY: the call takes no argument.
    unsafe { libc::gettid() }
}

fn mark() {
    // SAFETY: the call takes no argument.
    unsafe { libc::getppid() };
}

/// Under Yama, allows process `who` to trace this process. Without Yama, the call fails but is not needed.
fn allow_tracers(who: c_ulong) {
    // SAFETY: the call takes no pointer.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, who, 0, 0, 0) };
}

/// Runs in the tracing process. Attaches to `thread`, writes a byte to `to`, counts the system calls, and writes the
/// count to `to`.
fn trace(thread: pid_t, mut to: PipeWriter) -> ! {
    close_others(&to);
    let done = attach(thread).and_then(|()| {
        to.write_all(&[1])?;
        let count = counted(thread)?;
        to.write_all(&count.to_ne_bytes())
    });
    // SAFETY: the call ends the process immediately, without running exit handlers.
    unsafe { libc::_exit(done.is_err().into()) }
}

/// Closes this process's copies of all descriptors except one. Otherwise, the traced process's perf events would stay
/// open, because an event ends only when the last copy of its descriptor is closed.
fn close_others(kept: &PipeWriter) {
    let kept = kept.as_raw_fd().unsigned_abs();
    for (first, last) in [(0, kept.saturating_sub(1)), (kept + 1, c_uint::MAX)] {
        // SAFETY: nothing in this process uses these descriptors any longer.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

/// Stops the thread, and makes it stop at each later system call.
fn attach(thread: pid_t) -> io::Result<()> {
    let options = usize::try_from(libc::PTRACE_O_TRACESYSGOOD).unwrap_or(0);
    ptrace(libc::PTRACE_SEIZE, thread, 0, options)?;
    ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
    wait(thread)?;
    ptrace(libc::PTRACE_SYSCALL, thread, 0, 0)
}

/// Counts the calls between two markers, and detaches at the second marker.
fn counted(thread: pid_t) -> io::Result<usize> {
    let mut count = None;
    loop {
        let status = wait(thread)?;
        let stop = libc::WSTOPSIG(status);
        match (stop == SYSCALL_STOP).then(|| entered(thread)).transpose()? {
            Some(Some(MARKER)) => match count {
                Some(count) => {
                    ptrace(libc::PTRACE_DETACH, thread, 0, 0)?;
                    return Ok(count);
                }
                None => count = Some(0),
            },
            Some(Some(_)) => count = count.map(|count| count + 1),
            _ => {}
        }
        // Deliver signals to the thread. A stop that ptrace itself causes is not a signal.
        let is_signal = stop != SYSCALL_STOP && status >> 16 == 0;
        let signal = if is_signal { stop.unsigned_abs() } else { 0 };
        ptrace(libc::PTRACE_SYSCALL, thread, 0, signal as usize)?;
    }
}

/// Returns the number of the call that the thread is entering, or `None` if it is leaving a call.
fn entered(thread: pid_t) -> io::Result<Option<c_long>> {
    // In `struct ptrace_syscall_info`, `op` is the first byte and `entry.nr` is the fourth word.
    let mut info = [0_u64; 12];
    let address = (&raw mut info).expose_provenance();
    ptrace(PTRACE_GET_SYSCALL_INFO, thread, size_of_val(&info), address)?;
    let is_entry = info[0].to_ne_bytes()[0] == ENTRY;
    Ok(is_entry.then(|| c_long::try_from(info[3]).unwrap_or(-1)))
}

/// Waits until the thread stops. Returns the thread's status.
fn wait(thread: pid_t) -> io::Result<c_int> {
    let mut status = 0;
    // SAFETY: the kernel writes one int to `status`.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    if waited == thread && libc::WIFSTOPPED(status) { Ok(status) } else { Err(io::ErrorKind::NotFound.into()) }
}

fn ptrace(request: c_uint, thread: pid_t, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: among the requests in this file, only PTRACE_GET_SYSCALL_INFO writes to this process's memory. It writes
    // at most `address` bytes to the buffer at `data`. `entered` passes a buffer and the size of this buffer.
    match unsafe { libc::ptrace(request, thread, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
