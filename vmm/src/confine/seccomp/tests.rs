//! Installs filters in child processes, and checks how these processes end.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;

use super::*;
use crate::arch::calls;
use crate::config::MAX_VCPUS;
use crate::signal;
use vpmu::confine::Process;

const REFUSED: c_int = EXIT_REFUSED_CALL as c_int;

/// A plan with a PMU, restarts and recordings. Standard input serves as the descriptor of the directory of recordings.
fn plan() -> Plan {
    Plan {
        process: Process { id: std::process::id(), vcpus: vec![17, 18], signal: Some(signal::kick_signal()) },
        pmu: true,
        remote: false,
        restarts: true,
        restored_pmu: false,
        recordings: Some(libc::STDIN_FILENO),
        socket: None,
    }
}

/// The exit status and messages of a process that calls `act` under the filter for `kind`.
fn process(kind: ThreadKind, act: fn()) -> (c_int, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    let filters = Filters::compile(&plan()).unwrap();
    // SAFETY: the child process has only this thread. It takes no lock that another thread of the parent may have
    // held at the fork: `act` only makes system calls and allocates, and the C library keeps its allocator
    // consistent across a fork.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: touches no memory.
        unsafe { libc::dup2(writer.as_raw_fd(), libc::STDERR_FILENO) };
        let installed = report_refused_calls().and_then(|()| filters.install(kind));
        let status = c_int::from(installed.is_err());
        act();
        // SAFETY: ends the process immediately.
        unsafe { libc::_exit(status) };
    }
    drop(writer);
    let mut messages = String::new();
    File::from(std::os::fd::OwnedFd::from(reader)).read_to_string(&mut messages).unwrap();
    let mut status = 0;
    // SAFETY: the kernel writes one status.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(libc::WIFEXITED(status), "status {status:#x}: {messages}");
    (libc::WEXITSTATUS(status), messages)
}

#[test]
fn refused_call_ends_the_process_and_is_named() {
    let socket = || {
        // SAFETY: touches no memory.
        unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) };
    };
    for (kind, name) in [
        (ThreadKind::Main, "main"),
        (ThreadKind::Vcpu, "vCPU"),
        (ThreadKind::Drain, "drain"),
        (ThreadKind::Ctl, "ctl"),
        (ThreadKind::Closer, "closer"),
    ] {
        let (status, messages) = process(kind, socket);
        assert_eq!(status, REFUSED, "{messages}");
        let expected = format!("vmm: {name} thread: system call {} (socket), second argument 0x1", libc::SYS_socket);
        assert!(messages.starts_with(&expected), "{messages}");
        assert!(messages.contains("--no-seccomp"), "{messages}");
        assert_eq!(messages.lines().count(), 1, "{messages}");
    }
}

#[test]
fn unlisted_ioctl_is_refused_and_its_request_is_named() {
    let request = || {
        // SAFETY: the filter refuses the call. Without the filter, the kernel would try to read one byte at the null
        // pointer, and return an error.
        unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCSTI, 0) };
    };
    let (status, messages) = process(ThreadKind::Vcpu, request);
    assert_eq!(status, REFUSED, "{messages}");
    assert!(messages.contains("(ioctl), second argument 0x5412"), "{messages}");
}

#[test]
fn filters_of_the_largest_machine_compile() {
    // Ids that have nothing in common.
    let threads = (0..MAX_VCPUS).map(|number| 1000 + number * 7919).collect();
    let filters = Filters::compile(&plan().on(threads)).unwrap();
    // The most instructions that the kernel accepts.
    let longest = filters.0.values().map(Vec::len).max();
    assert!(longest.unwrap() <= 4096, "{longest:?}");
}

#[test]
fn requests_of_a_restart_are_allowed_to_the_main_thread() {
    let requests = || {
        for (request, _) in calls::BOOT {
            // SAFETY: -1 is not a descriptor, so the kernel returns an error before it uses the argument.
            unsafe { libc::ioctl(-1, request.into(), 0) };
        }
    };
    let (status, messages) = process(ThreadKind::Main, requests);
    assert_eq!((status, messages.as_str()), (0, ""));
}

#[test]
fn executable_mapping_is_refused() {
    let map = || {
        let (all, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that nothing uses.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, all, flags, -1, 0) };
    };
    let (status, messages) = process(ThreadKind::Drain, map);
    assert_eq!(status, REFUSED, "{messages}");
    assert!(messages.contains("(mmap)"), "{messages}");
}

#[test]
fn open_of_an_existing_file_is_refused_on_recording_threads_too() {
    let open = || drop(File::open("/etc/passwd"));
    for kind in [ThreadKind::Main, ThreadKind::Ctl, ThreadKind::Vcpu] {
        let (status, messages) = process(kind, open);
        assert_eq!(status, REFUSED, "{messages}");
        assert!(messages.contains("(openat)"), "{messages}");
    }
}

#[test]
fn listed_calls_succeed() {
    let calls = || {
        let words: Vec<u64> = (0..1 << 20).collect();
        std::thread::yield_now();
        let text = format!("{}\n", words.len());
        // SAFETY: the kernel reads the text only during the call.
        unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    };
    let (status, messages) = process(ThreadKind::Closer, calls);
    assert_eq!((status, messages.as_str()), (0, "1048576\n"));
}

#[test]
fn line_holds_numbers_and_drops_what_does_not_fit() {
    let mut line = Line::new();
    line.number(0, 10);
    line.text(" ");
    line.number(u64::MAX, 16);
    assert_eq!(line.bytes(), b"0 ffffffffffffffff");
    line.text(&"x".repeat(1000));
    assert_eq!(line.bytes().len(), 256);
}
