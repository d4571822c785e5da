//! A process whose queue of real-time signals is full: the kernel sends `SIGIO` for overflows, and refuses to queue
//! kicks. The limit is the whole process's, so these tests have a program of their own.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu_kvm::micro::Ring;
use vpmu_kvm::probe::{Sampling, sample_guest};
use vpmu_kvm::{Threads, kick};

fn fill_signal_queue() {
    let none = Rlimit {
        current: Some(0),
        ..getrlimit(Resource::Sigpending)
    };
    setrlimit(Resource::Sigpending, none).expect("a lower limit");
}

#[test]
fn probe_survives_overflows_without_queued_signals() {
    fill_signal_queue();
    let samples = sample_guest(Ring::User, Sampling::QUICK).expect("a guest");
    assert!(samples.total > 0, "{samples:?}");
}

#[test]
fn probe_ends_at_its_limit_without_queued_signals() {
    fill_signal_queue();
    let samples = sample_guest(Ring::User, Sampling::THOROUGH).expect("a guest");
    assert!(samples.total > 0, "{samples:?}");
}

#[test]
fn thread_without_queued_signals_is_kicked() {
    fill_signal_queue();
    kick::install(SIGRTMIN()).expect("a handler");
    let threads = Threads::new(1, SIGRTMIN());
    let _joined = threads.join(0);
    threads.kick(0).expect("a kick");
}
