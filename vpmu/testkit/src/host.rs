//! The parts of a VMM that a test, a benchmark or an example does not care about, and the process that runs it.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vpmu::{Interrupt, Machine};

/// A machine whose hypervisor has no statistics for exits and halts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bare {
    /// Whether the host's samples have guest addresses.
    pub guest_ips: bool,
}

impl Machine for Bare {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn reports_guest_ips(&self) -> bool {
        self.guest_ips
    }
}

/// Discards interrupts: the driver polls.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Interrupt for Silent {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a lock that makes a program's tests run one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs a handler for the overflow signal. The handler does nothing, so a signal only interrupts a system call.
pub fn ignore_signals() {
    extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), ignore).expect("a handler");
}

/// Returns whether to run the benchmark `name`. The arguments must contain `--bench`, which cargo passes when it
/// runs benchmarks. If they also contain a filter, the filter must be a part of `name`.
pub fn selects(name: &str) -> bool {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let bench = arguments.iter().any(|argument| argument == "--bench");
    bench && filter.is_none_or(|filter| name.contains(filter.as_str()))
}
