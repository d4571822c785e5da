//! The system calls that the device makes on each thread. A VMM that embeds the device can use this data for its
//! seccomp filter.
//!
//! Each entry names a call and the reason for it, and may have conditions on the arguments. A call with several entries
//! is allowed if any of them matches. The lists cover the calls of the crate itself, and the calls that the standard
//! library and the C library make on its behalf for locks, memory and clocks. The VMM adds the calls of its
//! [`Machine`](crate::Machine), its logger and its own event loop.
//!
//! The GNU C library's allocator opens `/proc/sys/vm/overcommit_memory` when the arena of a thread other than the main
//! thread shrinks. The lists omit that call. A VMM avoids it by calling `mallopt(M_ARENA_MAX, 1)` before it starts its
//! first thread.
//!
//! The lists name the threads on which events are opened, so a filter is made when the vCPUs' threads exist
//! ([`Process`]). The filter must not let a thread start another one: the host could give the new thread's id, or the id
//! of a thread that has ended, to anybody.
//!
//! The lists do not cover the setup: [`HostFiles::read`](crate::host::HostFiles::read) reads files, and
//! [`PerfSource::confined`](crate::host::PerfSource::confined) starts a thread. Call both before you install
//! the filter.

use crate::host;
use crate::host::calls::{closing, counters};
use crate::settings::Settings;
use crate::syscall::call;
pub use crate::syscall::{Argument, Call, Process};

/// The purpose of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Thread {
    /// Runs a vCPU with its [`VcpuSession`](crate::VcpuSession).
    Vcpu,
    /// Passes the transport's notifications and resets, or the operator's requests, to the
    /// [`Vpmu`](crate::Vpmu).
    Service,
    /// Calls [`Vpmu::drain`](crate::Vpmu::drain).
    Drain,
    /// Closes host counters. This thread belongs to the crate, and is started by
    /// [`PerfSource`](crate::host::PerfSource).
    Closer,
}

/// Returns the calls that the crate makes on a thread of this kind.
#[must_use]
pub fn calls(thread: Thread, process: &Process) -> Vec<Call> {
    let mut calls = match thread {
        // Each of these threads may start an event on any vCPU through a command, a request, or an overflow of another
        // event.
        Thread::Vcpu | Thread::Service | Thread::Drain => counters(process),
        Thread::Closer => Vec::new(),
    };
    calls.extend(closing());
    calls.extend(runtime(process.id));
    calls
}

/// Maximum number of descriptors that the device opens.
#[must_use]
pub fn descriptors(settings: &Settings) -> u64 {
    host::descriptors(settings.vcpus, settings.limits.max_host_counters)
}

/// Maximum number of bytes that the host locks for the device: the rings and metadata pages of host counters. Without
/// `CAP_IPC_LOCK`, `RLIMIT_MEMLOCK` limits the memory that exceeds `kernel.perf_event_mlock_kb`. If that limit is too
/// low, the device uses shorter rings, and events can fail to open.
#[must_use]
pub fn locked_memory(settings: &Settings) -> u64 {
    host::locked_memory(settings.vcpus, settings.limits.max_host_counters)
}

/// The calls that the standard library and the C library make on any thread of the process `id`. [`calls`] includes
/// them.
#[must_use]
pub fn runtime(id: u32) -> Vec<Call> {
    vec![
        call!(futex, SYS_futex, [], "locks and channels"),
        call!(sched_yield, SYS_sched_yield, [], "spinning while another thread uses a channel"),
        call!(mmap, SYS_mmap, [Argument::without(2, libc::PROT_EXEC)], "memory; the rings of host counters"),
        call!(mprotect, SYS_mprotect, [Argument::without(2, libc::PROT_EXEC)], "an allocator's arena grows"),
        call!(mremap, SYS_mremap, [], "a large allocation grows"),
        call!(brk, SYS_brk, [], "memory"),
        call!(madvise, SYS_madvise, [], "memory that is freed"),
        call!(sched_getaffinity, SYS_sched_getaffinity, [], "the number of an allocator's arenas"),
        call!(getrandom, SYS_getrandom, [], "keys of hash tables"),
        call!(clock_gettime, SYS_clock_gettime, [], "clocks; the vDSO cannot read CPU-time clocks"),
        call!(clock_nanosleep, SYS_clock_nanosleep, [], "a wait with a time-out"),
        call!(restart_syscall, SYS_restart_syscall, [], "a wait that was interrupted"),
        call!(rt_sigreturn, SYS_rt_sigreturn, [], "the end of a signal handler"),
        call!(rt_sigprocmask, SYS_rt_sigprocmask, [], "signals are blocked while a thread ends or aborts"),
        call!(rt_sigaction, SYS_rt_sigaction, [], "the handler of a fatal signal restores the default action"),
        call!(sigaltstack, SYS_sigaltstack, [], "a thread that ends removes its signal stack"),
        call!(gettid, SYS_gettid, [], "an abort signals its own thread"),
        call!(getpid, SYS_getpid, [], "an abort signals its own process"),
        call!(tgkill, SYS_tgkill, [Argument::int(0, id), Argument::int(2, libc::SIGABRT.cast_unsigned())], "an abort"),
        call!(write, SYS_write, [Argument::int(0, libc::STDERR_FILENO.cast_unsigned())], "the message of a panic"),
        call!(writev, SYS_writev, [Argument::int(0, libc::STDERR_FILENO.cast_unsigned())], "the message of a panic"),
        call!(munmap, SYS_munmap, [], "memory; the stack of a thread"),
        call!(close, SYS_close, [], "a descriptor whose owner is dropped"),
        call!(
            fcntl,
            SYS_fcntl,
            [Argument::int(1, libc::F_GETFD.cast_unsigned())],
            "the standard library, built with debug assertions, checks a descriptor that it closes"
        ),
        call!(exit, SYS_exit, [], "the end of a thread"),
        call!(exit_group, SYS_exit_group, [], "the end of the process"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: [Thread; 4] = [Thread::Vcpu, Thread::Service, Thread::Drain, Thread::Closer];

    #[test]
    fn conditions_compare_bits_of_arguments_that_there_are() {
        let process = Process { id: 7, vcpus: vec![8], signal: Some(34) };
        let of = |thread| calls(thread, &process);
        for call in THREADS.into_iter().flat_map(of) {
            assert!(!call.reason.is_empty(), "{}", call.name);
            for argument in &call.arguments {
                assert!(argument.index < 6, "{call:?}");
                assert_eq!(argument.value & !argument.mask, 0, "{call:?}");
                assert_ne!(argument.mask, 0, "{call:?}");
            }
        }
    }
}
