//! Makes this host's perf refuse events for each possible reason. Then checks which reason the source reports, and
//! which events it still offers.
#![expect(unsafe_code, reason = "lowers a limit and drops capabilities")]

use std::fs;
use std::thread;

use vmm_sys_util::signal::SIGRTMIN;
use vpmu::Hardware;
use vpmu::Refusal;
use vpmu::abi::{KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW, KIND_SOFTWARE};
use vpmu::host::{HostFiles, PerfSource};
use vpmu::source::{Engine, Rate, Request, Sampling, Source};
use vpmu_testkit::alone;

const CPU_CLOCK: u64 = 0;
/// Number of file descriptors that a source leaves free.
const LEFT: u64 = 32;

fn clock() -> Request {
    Request {
        kind: KIND_SOFTWARE,
        config: CPU_CLOCK,
        sampling: Some(Sampling { rate: Rate::Period(1_000_000_000), engine: Engine::Exit }),
        ..Request::default()
    }
}

fn limit_descriptors(soft: Option<u64>) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit to `limit`.
    let got = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(got, 0, "the limit can be read");
    let before = limit.rlim_cur;
    if let Some(soft) = soft {
        limit.rlim_cur = soft;
        // SAFETY: the kernel reads one rlimit.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(set, 0, "the soft limit can be lowered");
    }
    before
}

/// Drops every capability of the calling thread.
fn give_up_capabilities() {
    let header: [u32; 2] = [0x2008_0522, 0];
    let none = [[0_u32; 3]; 2];
    // SAFETY: the kernel reads a header and two elements, which stay valid during the call.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    assert_eq!(set, 0, "capabilities can always be given up");
}

#[test]
fn source_without_descriptors_refuses_for_want_of_them() {
    let _alone = alone();
    let source = PerfSource::new(SIGRTMIN()).expect("a source");
    let open = fs::read_dir("/proc/self/fd").expect("a process").count() as u64;
    let before = limit_descriptors(Some(open + LEFT + 10));
    let mut counters = Vec::new();
    let refused = loop {
        match source.open(&clock(), source.thread()) {
            Ok(counter) => counters.push(counter),
            Err(error) => break error,
        }
        assert!(counters.len() < 100, "the limit of descriptors has no effect");
    };
    limit_descriptors(Some(before));
    assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    let refusal = Refusal::of(&refused);
    assert_eq!(refusal, Refusal::Descriptors);
    assert!(refusal.to_string().contains("ulimit -n"), "the refusal does not name ulimit -n: {refusal}");
    assert!(!counters.is_empty());
}

#[test]
fn thread_without_capabilities_is_refused_by_the_level() {
    let _alone = alone();
    let level = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").expect("perf events");
    let level: i32 = level.trim().parse().expect("a number");
    let (offers, refusal) = thread::spawn(|| {
        give_up_capabilities();
        let source = PerfSource::new(SIGRTMIN()).expect("a source");
        let software = source.offers().iter();
        let software = software.filter(|offer| offer.kind == KIND_SOFTWARE).count();
        (software, source.refusal(KIND_SOFTWARE))
    })
    .join()
    .expect("no panic");
    // If perf_event_paranoid is 2 or higher, an event that counts kernel mode needs a capability.
    let expected = (level > 1).then_some(Refusal::Permission);
    assert_eq!(refusal, expected, "at level {level}");
    assert_eq!(offers == 0, expected.is_some(), "{offers} at level {level}");
    let remedy = Refusal::Permission.to_string();
    assert!(remedy.contains("perf_event_paranoid") && remedy.contains("CAP_PERFMON"));
}

/// VPMU-D-6.2-2.
#[test]
fn source_without_hardware_offers_none_and_does_not_try() {
    let _alone = alone();
    let begin = || Ok(());
    let without = Hardware::default().with(|hardware| hardware.events = false);
    let files = HostFiles::read(&without);
    let source = PerfSource::confined(files, SIGRTMIN(), begin).expect("a source");
    let hardware = [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW];
    assert!(!source.offers().is_empty());
    for offer in source.offers() {
        assert!(!hardware.contains(&offer.kind), "a hardware event is offered: {offer:?}");
    }
    // This source has not tried to open hardware events, so it reports no refusal for them.
    assert_eq!(source.refusal(KIND_HARDWARE), None);
    let asked = PerfSource::new(SIGRTMIN()).expect("a source");
    let offered = asked.offers().iter().any(|offer| offer.kind == KIND_HARDWARE);
    assert_eq!(asked.refusal(KIND_HARDWARE).is_none(), offered);
}
