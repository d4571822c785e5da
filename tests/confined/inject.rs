//! Makes system calls in a thread of another process, under the filters and privileges of that thread.

#![expect(unsafe_code, reason = "ptrace has no safe wrapper")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;

use libc::{c_int, c_long, c_uint, c_void, pid_t, user_regs_struct};

/// Bytes of the `syscall` instruction.
const INSTRUCTION: u64 = 2;
/// Arguments are placed below the thread's stack pointer, and below the 128 bytes there that functions may use.
const BELOW_STACK: u64 = 4096;

/// The filter of the thread refused the call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused;

/// A stopped thread. It continues where it was when this value is dropped.
#[derive(Debug)]
pub(crate) struct Stopped {
    thread: pid_t,
    saved: user_regs_struct,
    memory: File,
}

impl Stopped {
    /// Stops `thread`, which must be in a system call.
    pub(crate) fn attach(thread: u32) -> Self {
        let thread = pid_t::try_from(thread).expect("an id");
        let memory = format!("/proc/{thread}/mem");
        let memory = OpenOptions::new().read(true).write(true).open(memory);
        request(libc::PTRACE_ATTACH, thread, 0, ptr::null_mut());
        await_stop(thread, libc::SIGSTOP);
        let stopped = Self { thread, saved: registers(thread), memory: memory.expect("the thread's memory") };
        let mut code = [0; 2];
        let at = stopped.saved.rip - INSTRUCTION;
        let read = stopped.memory.read_exact_at(&mut code, at);
        read.expect("the thread's code");
        assert_eq!(code, [0x0f, 0x05], "the thread is not in a system call");
        stopped
    }

    /// Places `bytes` in the thread's memory, `offset` bytes into the space for arguments. Returns the address.
    pub(crate) fn place(&self, offset: u64, bytes: &[u8]) -> u64 {
        let at = self.saved.rsp - BELOW_STACK + offset;
        self.memory.write_all_at(bytes, at).expect("a stack");
        at
    }

    /// Makes a system call. Returns its result, which is negative if the kernel returned an error.
    pub(crate) fn call(&self, number: c_long, arguments: &[u64]) -> Result<i64, Refused> {
        let mut argument = arguments.iter().copied().chain(std::iter::repeat(0));
        let mut next = || argument.next().unwrap_or_default();
        let mut registers_then = user_regs_struct {
            rip: self.saved.rip - INSTRUCTION,
            rax: u64::try_from(number).expect("a number"),
            // Keeps the kernel from starting the interrupted call again.
            orig_rax: u64::MAX,
            ..self.saved
        };
        registers_then.rdi = next();
        registers_then.rsi = next();
        registers_then.rdx = next();
        registers_then.r10 = next();
        registers_then.r8 = next();
        registers_then.r9 = next();
        set_registers(self.thread, &mut registers_then);
        let mut result = Ok(());
        loop {
            request(libc::PTRACE_SINGLESTEP, self.thread, 0, ptr::null_mut());
            match next_stop(self.thread) {
                // The end of the step.
                libc::SIGTRAP => return result.map(|()| registers(self.thread).rax.cast_signed()),
                // The thread never gets the signal, so the machine goes on.
                libc::SIGSYS => result = Err(Refused),
                // A kick has no effect on a thread that is outside the guest.
                _ => {}
            }
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        set_registers(self.thread, &mut self.saved);
        request(libc::PTRACE_DETACH, self.thread, 0, ptr::null_mut());
    }
}

fn request(what: c_uint, thread: pid_t, address: usize, data: *mut c_void) {
    // SAFETY: `data` is null, or points to the registers that the request reads or writes.
    let result = unsafe { libc::ptrace(what, thread, address, data) };
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
}

fn registers(thread: pid_t) -> user_regs_struct {
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    request(libc::PTRACE_GETREGS, thread, 0, (&raw mut registers).cast());
    registers
}

fn set_registers(thread: pid_t, registers: &mut user_regs_struct) {
    request(libc::PTRACE_SETREGS, thread, 0, ptr::from_mut(registers).cast());
}

/// Waits until the thread stops with `signal`. Drops other signals.
fn await_stop(thread: pid_t, signal: c_int) {
    while next_stop(thread) != signal {
        request(libc::PTRACE_CONT, thread, 0, ptr::null_mut());
    }
}

/// Waits until the thread stops. Returns the signal.
fn next_stop(thread: pid_t) -> c_int {
    let mut status = 0;
    // SAFETY: the kernel writes one status.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    assert_eq!(waited, thread, "{}", io::Error::last_os_error());
    assert!(libc::WIFSTOPPED(status), "the thread ended: {status:#x}");
    libc::WSTOPSIG(status)
}
