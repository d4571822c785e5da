//! Kicks: the signal that makes a vCPU leave the guest. The kernel sends the same signal when a host counter
//! overflows.
//!
//! A kick that arrives while the thread is outside the guest must not be lost. Therefore the handler sets
//! `immediate_exit` in the vCPU's run page, so that the next run call returns immediately.

#![expect(unsafe_code, reason = "a byte of the run page that a signal handler writes, and tgkill")]

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_int, c_void, siginfo_t};
use vmm_sys_util::signal::register_signal_handler;

thread_local! {
    /// Pointer to `immediate_exit` of the vCPU that runs on this thread.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

extern "C" fn on_kick(_signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: the creator of `Kickable` keeps the byte mapped and writable while the pointer is set. The
        // kernel reads this byte only in a run call of this same thread.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the handler of `signal` for the process. `signal` is the real-time signal that was passed to
/// [`PerfSource`](vpmu::host::PerfSource), and the kernel sends it for overflows. `SIGIO` gets the same handler,
/// because the kernel sends `SIGIO` instead when the queue of real-time signals is full, and by default `SIGIO` ends
/// the process.
///
/// # Errors
/// The error of sigaction(2).
pub fn install(signal: c_int) -> io::Result<()> {
    for signal in [signal, libc::SIGIO] {
        register_signal_handler(signal, on_kick)?;
    }
    Ok(())
}

/// The vCPUs' threads, for callers that must kick a vCPU out of the guest.
#[derive(Debug)]
pub struct Threads {
    signal: c_int,
    /// The thread id of each vCPU, by index; zero for a vCPU without a thread.
    threads: Vec<AtomicI32>,
}

impl Threads {
    /// Creates a table for `vcpus` vCPUs that have no threads yet. Kicks will send `signal`.
    #[must_use]
    pub fn new(vcpus: u32, signal: c_int) -> Self {
        Self { signal, threads: (0..vcpus).map(|_| AtomicI32::new(0)).collect() }
    }

    /// Registers the calling thread as the thread of `vcpu`, until the returned guard is dropped.
    #[must_use]
    pub fn join(&self, vcpu: u32) -> Joined<'_> {
        let slot = self.slot(vcpu);
        if let Some(slot) = slot {
            // SAFETY: the call takes no argument and cannot fail.
            let thread = unsafe { libc::gettid() };
            slot.store(thread, Ordering::SeqCst);
        }
        Joined(slot)
    }

    /// Makes `vcpu` leave the guest soon, or makes its next run call return immediately. [`install`] must
    /// have been called.
    ///
    /// # Errors
    /// `ESRCH` if the vCPU has no thread, or the error of tgkill(2).
    pub fn kick(&self, vcpu: u32) -> io::Result<()> {
        let slot = self.slot(vcpu);
        let thread = slot.map_or(0, |slot| slot.load(Ordering::SeqCst));
        if thread == 0 {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        match send(thread, self.signal) {
            // The queue of real-time signals is full. `SIGIO` is not a real-time signal and does not need the queue.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => send(thread, libc::SIGIO),
            result => result,
        }
    }

    fn slot(&self, vcpu: u32) -> Option<&AtomicI32> {
        self.threads.get(usize::try_from(vcpu).ok()?)
    }
}

fn send(thread: c_int, signal: c_int) -> io::Result<()> {
    let process = std::process::id();
    // SAFETY: the call takes no pointer. If the thread has ended and this process reuses its id, the worst case is that
    // one run call returns early.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A guard. While it exists, its thread is registered with [`Threads`].
#[derive(Debug)]
pub struct Joined<'a>(Option<&'a AtomicI32>);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(0, Ordering::SeqCst);
        }
    }
}

/// A guard. While it exists, kicks to its thread set a vCPU's `immediate_exit`.
#[derive(Debug)]
pub(crate) struct Kickable(*mut u8);

impl Kickable {
    /// Makes kicks to this thread set the byte at `immediate_exit`.
    ///
    /// # Safety
    /// The byte must stay mapped and writable until the returned guard is dropped. The guard must be dropped on this
    /// thread.
    pub(crate) unsafe fn new(immediate_exit: *mut u8) -> Self {
        IMMEDIATE_EXIT.set(immediate_exit);
        Self(immediate_exit)
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        // A later `Kickable` of this thread may have replaced the pointer.
        if IMMEDIATE_EXIT.get() == self.0 {
            IMMEDIATE_EXIT.set(ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::signal::{Killable, SIGRTMIN};

    #[test]
    fn kick_outside_the_guest_is_remembered() {
        install(SIGRTMIN()).expect("a handler");
        let (ready, wait) = std::sync::mpsc::channel();
        let (kicked, resume) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut flag = 0u8;
            // SAFETY: `flag` outlives the guard, on this thread.
            let guard = unsafe { Kickable::new(&raw mut flag) };
            ready.send(()).expect("the test waits");
            resume.recv().expect("the test continues");
            drop(guard);
            // SAFETY: `flag` is this thread's own.
            unsafe { (&raw const flag).read_volatile() }
        });
        wait.recv().expect("the thread runs");
        thread.kill(SIGRTMIN()).expect("a live thread");
        kicked.send(()).expect("the thread waits");
        assert_eq!(thread.join().expect("no panic"), 1);
    }

    #[test]
    fn vcpu_is_kicked_by_its_number_while_it_runs() {
        install(SIGRTMIN()).expect("a handler");
        let threads = Threads::new(1, SIGRTMIN());
        let mut flag = 0u8;
        // SAFETY: `flag` outlives the guard, on this thread.
        let guard = unsafe { Kickable::new(&raw mut flag) };
        let kicked = || {
            // SAFETY: the pointer refers to `flag` until the guard is dropped. Only this thread accesses `flag`,
            // because the signal handler also runs on this thread.
            unsafe { IMMEDIATE_EXIT.get().replace(0) }
        };
        assert!(threads.kick(0).is_err(), "vCPU 0 has no thread yet");
        let joined = threads.join(0);
        assert!(threads.kick(1).is_err(), "no such vCPU");
        assert_eq!(kicked(), 0);
        threads.kick(0).expect("a thread");
        assert_eq!(kicked(), 1);
        drop(joined);
        assert!(threads.kick(0).is_err(), "vCPU 0 no longer has a thread");
        assert_eq!(kicked(), 0);
        drop(guard);
    }
}
