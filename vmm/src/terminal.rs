//! The user's terminal. It is raw while the guest uses it. The VMM restores it at the end of the run, and after a
//! panic, a crash or a refused system call.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{c_int, c_short, termios};

/// The terminal's state before [`Raw`] changed it. Null while there is nothing to restore.
static BEFORE: AtomicPtr<termios> = AtomicPtr::new(ptr::null_mut());

/// Signals that a crash causes. The VMM restores the terminal before they take their default action.
const CRASHES: [c_int; 5] = [libc::SIGABRT, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE];

/// Restores the terminal. It is safe to call this from anywhere, any number of times.
pub fn restore() {
    let before = BEFORE.swap(ptr::null_mut(), Ordering::SeqCst);
    if !before.is_null() {
        // SAFETY: the pointer refers to a value that `Raw::new` has leaked. The swap removed the pointer from `BEFORE`,
        // so no other call uses the value. `tcsetattr` may be called in a signal handler.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, before) };
    }
}

extern "C" fn on_crash(signal: c_int) {
    restore();
    // SAFETY: `raise` may be called in a signal handler. The kernel removed this handler before the call
    // (`SA_RESETHAND`), so the raised signal takes its default action.
    unsafe { libc::raise(signal) };
}

/// Keeps the terminal on standard input raw until this value is dropped.
#[derive(Debug)]
pub struct Raw(());

impl Raw {
    /// Makes the terminal raw. `None` if standard input is not a terminal.
    ///
    /// # Errors
    /// The terminal's error.
    pub fn new() -> io::Result<Option<Self>> {
        // SAFETY: the call only queries a descriptor number, which may be closed.
        if unsafe { libc::isatty(libc::STDIN_FILENO) } != 1 {
            return Ok(None);
        }
        let mut before = MaybeUninit::<termios>::uninit();
        // SAFETY: the kernel fills the structure, or reports an error.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, before.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: filled above.
        let before = unsafe { before.assume_init() };
        let mut raw = before;
        // SAFETY: the call only changes the structure.
        unsafe { libc::cfmakeraw(&raw mut raw) };
        // Output processing stays on, so that the VMM's own messages start at the left margin.
        raw.c_oflag = before.c_oflag;
        install();
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::SeqCst);
        // SAFETY: the structure is whole.
        if unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw const raw) } != 0 {
            let error = io::Error::last_os_error();
            restore();
            return Err(error);
        }
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Makes panics and crashes restore the terminal before anything else.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            report(panic);
        }));
        for signal in CRASHES {
            // SAFETY: all zeros is a valid value of this plain structure.
            let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
            action.sa_sigaction = on_crash as *const () as usize;
            action.sa_flags = libc::SA_RESETHAND | libc::SA_NODEFER | libc::SA_ONSTACK;
            // SAFETY: the handler makes only calls that are allowed in signal handlers.
            if unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } != 0 {
                log::warn!("no handler for signal {signal}: a crash may leave the terminal raw");
            }
        }
    });
}

/// Waits until `output` is writable, or one of `unless` is readable. Returns whether `output` is writable.
///
/// # Errors
/// The kernel's error.
pub fn wait_writable(output: c_int, unless: [c_int; 2]) -> io::Result<bool> {
    let [first, second] = unless;
    wait([(output, libc::POLLOUT), (first, libc::POLLIN), (second, libc::POLLIN)])
}

/// Waits until `input` or one of `unless` is readable. Returns whether `input` is readable.
///
/// # Errors
/// The kernel's error.
pub(crate) fn wait_readable(input: c_int, unless: [c_int; 2]) -> io::Result<bool> {
    let [first, second] = unless;
    wait([input, first, second].map(|fd| (fd, libc::POLLIN)))
}

/// Waits for one of three descriptors. Returns whether the first descriptor is ready.
fn wait(all: [(c_int, c_short); 3]) -> io::Result<bool> {
    let mut all = all.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    // SAFETY: `all` is an array of three `pollfd`s that outlives the call.
    if unsafe { libc::poll(all.as_mut_ptr(), 3, -1) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // If the first descriptor has an error, it counts as ready. The caller gets the error when it uses the descriptor.
    Ok(all[0].revents != 0)
}
