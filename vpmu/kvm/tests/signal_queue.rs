//! Probes in a process whose queue of real-time signals is full. The kernel then sends `SIGIO` for overflows. The limit
//! applies to the whole process, so these tests are a separate program.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vpmu_kvm::micro::Ring;
use vpmu_kvm::probe::{Sampling, sample_guest};

fn fill_signal_queue() {
    let none = Rlimit { current: Some(0), ..getrlimit(Resource::Sigpending) };
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
