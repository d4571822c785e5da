//! Kicks in a process whose queue of real-time signals is full. The limit applies to the whole process, so this test
//! is a separate program.
#![expect(unsafe_code, reason = "sigpending")]

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmm_sys_util::signal::{SIGRTMIN, block_signal, create_sigset};
use vpmu_kvm::{Threads, kick};

#[test]
fn thread_without_queued_signals_is_kicked() {
    let none = Rlimit { current: Some(0), ..getrlimit(Resource::Sigpending) };
    setrlimit(Resource::Sigpending, none).expect("a lower limit");
    kick::install(SIGRTMIN()).expect("a handler");
    // A blocked signal remains pending, so the test can look for it.
    block_signal(libc::SIGIO).expect("a mask");
    let threads = Threads::new(1, SIGRTMIN());
    let _joined = threads.join(0);
    threads.kick(0).expect("a kick");
    let mut pending = create_sigset(&[]).expect("an empty set");
    // SAFETY: the kernel writes one set to `pending`.
    assert_eq!(unsafe { libc::sigpending(&raw mut pending) }, 0);
    // SAFETY: `pending` is a valid set.
    let arrived = unsafe { libc::sigismember(&raw const pending, libc::SIGIO) };
    assert_eq!(arrived, 1);
}
