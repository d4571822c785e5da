//! Helpers for tests that use this host's perf events.

use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};
use vpmu::{GuestRegs, Machine, Registers};

/// Returns a lock that makes a program's tests run one at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A machine whose hypervisor has no statistics for exits and halts.
#[derive(Debug)]
pub(crate) struct Bare;

impl Machine for Bare {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }
}

/// The registers of a vCPU that is always in user mode, and always at the instruction with this address.
#[derive(Debug)]
pub(crate) struct Still(pub(crate) u64);

impl Registers for Still {
    fn registers(&mut self) -> Option<GuestRegs> {
        Some(GuestRegs { ip: self.0, user: true })
    }
}

/// Installs a handler for the overflow signal. The handler does nothing, so a signal only interrupts a system call.
#[expect(clippy::expect_used, reason = "tests fail by panicking")]
pub(crate) fn ignore_signals() {
    extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), ignore).expect("a handler");
}
