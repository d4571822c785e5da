//! CPU and kernel interfaces that the client library does not provide: pinning, ports, and the counter from which times
//! are computed.
#![expect(unsafe_code, reason = "system calls that have no safe wrapper")]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::arch;
pub(crate) use crate::arch::{
    IDLE_PORT, OWN_IN_USER_MODE, PORT_EXITS, PORT_REASON, PORT_WRITTEN, STORE_EXITS, port_write, ticks as tsc,
};

/// Returns the library's name for the event that counts a program's own port accesses.
pub(crate) fn own_port_exits() -> String {
    let modifier = if OWN_IN_USER_MODE { ":u" } else { "" };
    format!("{PORT_EXITS}{modifier}")
}

/// Like [`own_port_exits`], as perf names the event.
pub(crate) fn own_port_exits_of_perf() -> String {
    let modifier = if OWN_IN_USER_MODE { "u" } else { "" };
    format!("vpmu/{PORT_EXITS}/{modifier}")
}

/// Restricts the calling thread to `cpu`.
pub(crate) fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: all zeros is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a valid set, and `CPU_SET` checks that it has a bit for `cpu`.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: `set` is valid during the call, and the size is correct.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps all other tasks off this thread's CPU until the thread sleeps or ends, so that its events are not scheduled
/// out.
pub(crate) fn keep() -> io::Result<()> {
    reserve_nothing()?;
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: the parameter lives through the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes the share of CPU time that the kernel reserves for tasks that are not real-time.
fn reserve_nothing() -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // By default, real-time tasks must leave some CPU time to other tasks.
    set(Path::new("/proc/sys/kernel/sched_rt_runtime_us"), "-1")?;
    // Since Linux 6.12, a deadline server on each CPU runs ordinary tasks even without this reserve. When the servers
    // have no bandwidth, Linux 6.12 refuses every write to the limit above with EBUSY, even if the value is unchanged.
    // Therefore, `set` writes a value only if it differs.
    for server in fair_servers()? {
        set(&server.join("runtime"), "0")?;
    }
    // Every four seconds, the soft lockup detector runs a thread that preempts all tasks.
    set(Path::new("/proc/sys/kernel/soft_watchdog"), "0")
}

/// Writes a kernel setting, unless the setting already has that value.
fn set(file: &Path, value: &str) -> io::Result<()> {
    match fs::read_to_string(file)?.trim_end() == value {
        true => Ok(()),
        false => fs::write(file, value),
    }
}

/// Returns the directories of the CPUs' deadline servers for ordinary tasks. The list is empty if the kernel has none.
fn fair_servers() -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir("/sys/kernel/debug/sched/fair_server") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// The CPU that handles the console's interrupts. Only this CPU exits for them.
const CONSOLE: usize = 0;

/// A CPU on which only programs access ports.
const QUIET: usize = 1;

/// Binds the console's interrupt to [`CONSOLE`]. The next interrupt moves it there.
///
/// The last interrupt for a line of output may arrive long after the line was sent. The handler's port accesses would
/// then be counted for whatever task is running.
pub(crate) fn bind_console() -> io::Result<()> {
    for entry in fs::read_dir("/proc/irq")? {
        let interrupt = entry?.path();
        if interrupt.join("ttyS0").exists() {
            let mask = format!("{:x}", 1 << CONSOLE);
            fs::write(interrupt.join("smp_affinity"), mask)?;
        }
    }
    Ok(())
}

/// Moves this thread, and programs that it starts later, to a CPU that does not handle console interrupts. A thread
/// that may run on only one CPU stays there.
pub(crate) fn leave_console() -> io::Result<()> {
    if thread::available_parallelism()?.get() > QUIET {
        pin(QUIET)?;
    }
    Ok(())
}

/// Gives this thread access to every port, and moves it to a CPU without console interrupts.
pub(crate) fn allow_ports() -> io::Result<()> {
    leave_console()?;
    arch::allow_ports()
}

/// This thread's id.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::gettid() }.cast_unsigned()
}

/// Calls read(2) with a buffer of `len` bytes. Returns the errno if read(2) fails.
pub(crate) fn read(fd: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
    let mut buffer = vec![0_u8; len];
    // SAFETY: the buffer has `len` bytes.
    let got = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), len) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Maps `fd`, and immediately unmaps it again. Returns the errno if mmap(2) fails.
pub(crate) fn try_map(fd: BorrowedFd<'_>, len: usize, flags: i32, offset: i64) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call makes a new mapping at an address that the kernel chooses.
    let address = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), offset) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { libc::munmap(address, len) };
    Ok(())
}
