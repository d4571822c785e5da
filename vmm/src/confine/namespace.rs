//! A PID namespace of the machine's own, in which no other process has an id.
//!
//! Only children of the process that makes the namespace are in it, so `vmm run` forks: the child is the VMM, and the
//! parent waits for it. The parent passes on signals and the exit status. If one of the two dies, the other one does
//! too.

#![expect(unsafe_code, reason = "fork, waiting for signals, and taking a signal's default action")]

use std::io::{self, PipeReader, Read, pipe};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;

use libc::{c_int, pid_t, sigset_t};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use rustix::thread::{CapabilitySet, UnshareFlags};

use super::privileges::{self, User};
use crate::exit::EXIT_FAILURE;
use crate::signal::ENDING;

/// Signals that stop a process. The child, as the first process of its namespace, ignores them.
const STOPPING: [c_int; 3] = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];

/// This process is in a PID namespace of its own, and its parent waits for it.
#[derive(Debug)]
pub(super) struct Namespace {
    /// Is at its end when the parent is dead.
    parent: PipeReader,
}

/// Whether this process may make a PID namespace, and its parent could then signal it.
pub(crate) fn is_possible(user: Option<User>) -> bool {
    let held = rustix::thread::capabilities(None);
    held.is_ok_and(|held| {
        held.effective.contains(CapabilitySet::SYS_ADMIN)
            && (user.is_none() || held.effective.contains(CapabilitySet::KILL))
    })
}

impl Namespace {
    /// Continues in a child process in a new PID namespace, if the host allows it. The parent never returns from this
    /// function. Call this while the process has only one thread.
    ///
    /// # Errors
    /// The host's error.
    pub(super) fn enter(user: Option<User>) -> io::Result<Option<Self>> {
        if !is_possible(user) {
            return Ok(None);
        }
        // SAFETY: changes no memory and no descriptor of this process, only the namespace of its children.
        match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) } {
            Ok(()) => {}
            // The kernel has no such namespaces, allows no more of them, or a policy forbids them.
            Err(error @ (Errno::INVAL | Errno::NOSPC | Errno::PERM)) => {
                log::info!("the machine has no PID namespace of its own: {error}");
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        }
        let (reader, writer) = pipe()?;
        let before = block();
        // SAFETY: this process has only one thread, so the child has the whole process.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(writer);
                set_mask(&before);
                let namespace = Self { parent: reader };
                namespace.die_with_parent()?;
                Ok(Some(namespace))
            }
            child => {
                drop(reader);
                release(user.is_some(), &writer);
                // `writer` stays open until this process ends.
                wait_for(child, &before)
            }
        }
    }

    /// Makes the host kill this process when its parent dies. A change of the user undoes this.
    ///
    /// # Errors
    /// The parent is already dead.
    pub(super) fn die_with_parent(&self) -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        rustix::io::ioctl_fionbio(&self.parent, true)?;
        match (&self.parent).read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(io::Error::other("the parent process has died")),
        }
    }
}

/// The signals for which the parent waits.
fn awaited() -> sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: fills the whole set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: filled above.
    let mut set = unsafe { set.assume_init() };
    let more = [libc::SIGCHLD, libc::SIGCONT];
    for signal in ENDING.into_iter().chain(STOPPING).chain(more) {
        // SAFETY: changes only the set.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

/// Blocks the awaited signals, so that none is lost between the fork and the wait. Returns the previous mask.
fn block() -> sigset_t {
    // If children were ignored, the host would forget the child's exit status.
    default_action(libc::SIGCHLD);
    let mut before = awaited();
    // SAFETY: the kernel reads one set and writes the other.
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const before, &raw mut before) };
    before
}

fn set_mask(mask: &sigset_t) {
    // SAFETY: the kernel only reads the set.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, ptr::from_ref(mask), ptr::null_mut()) };
}

fn default_action(signal: c_int) {
    // SAFETY: replaces a handler by the default action, so no code of this process can be interrupted by it.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Drops what the parent does not need: all capabilities, except the one to signal a child that is another user, and all
/// descriptors except standard error and `kept`. The child's pipes close with the child.
fn release(is_other_user: bool, kept: &impl AsRawFd) {
    let left = if is_other_user { CapabilitySet::KILL } else { CapabilitySet::empty() };
    if let Err(error) = privileges::keep_only(left) {
        eprintln!("vmm: warning: the waiting process keeps its privileges: {error}");
    }
    let kept = kept.as_raw_fd();
    for standard in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: this process uses neither standard input nor output again. Both become copies of `kept`.
        unsafe { libc::dup2(kept, standard) };
    }
    // SAFETY: this process uses no other descriptor than standard error again, and never returns to code that would.
    unsafe { libc::syscall(libc::SYS_close_range, libc::STDERR_FILENO + 1, c_int::MAX, 0) };
}

/// Waits until the child has ended, and ends in the same way.
fn wait_for(child: pid_t, before: &sigset_t) -> ! {
    let set = awaited();
    let Some(child) = Pid::from_raw(child) else {
        std::process::exit(EXIT_FAILURE.into());
    };
    loop {
        // SAFETY: the kernel only reads the set, and writes no information without a place for it.
        let signal = unsafe { libc::sigwaitinfo(&raw const set, ptr::null_mut()) };
        match signal {
            // Interrupted by a stop.
            -1 => {}
            libc::SIGCHLD => end_like(child, before),
            signal if STOPPING.contains(&signal) => {
                send(child, libc::SIGSTOP);
                // SAFETY: stops this process until somebody continues it.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            signal => send(child, signal),
        }
    }
}

/// Sends a signal to the child, which is not reaped yet.
fn send(child: Pid, signal: c_int) {
    // SAFETY: the call touches no memory.
    if unsafe { libc::kill(child.as_raw_nonzero().get(), signal) } != 0 {
        let error = io::Error::last_os_error();
        eprintln!("vmm: warning: cannot pass on signal {signal}: {error}");
    }
}

/// Ends this process like the child, if the child has ended.
fn end_like(child: Pid, before: &sigset_t) {
    let status = match rustix::process::waitpid(Some(child), WaitOptions::NOHANG) {
        Ok(Some((_, status))) => status,
        Ok(None) => return,
        Err(error) => {
            eprintln!("vmm: the VMM's process is lost: {error}");
            std::process::exit(EXIT_FAILURE.into());
        }
    };
    if let Some(signal) = status.terminating_signal() {
        // The child's core dump, if any, is the one that counts.
        let _ = privileges::no_core_dump();
        default_action(signal);
        set_mask(before);
        // SAFETY: takes the default action of a signal that has ended the child.
        unsafe { libc::raise(signal) };
    }
    std::process::exit(exit_code(status));
}

fn exit_code(status: WaitStatus) -> c_int {
    status.exit_status().unwrap_or_else(|| EXIT_FAILURE.into())
}
