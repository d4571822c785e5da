//! A guest that uses up the VMM's descriptors does not affect the operator's events.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use common::driver::opening;
use common::{Bench, SPIN, TRIPLE_FAULT, ctl, messages, running, terminate, vmm};

/// Number of events that the guest opens. It exceeds the number of free descriptors that the VMM has.
const EVENTS: u16 = 100;
const DESCRIPTORS_ALLOWED: u32 = 120;

/// The sampling period in nanoseconds. Each event that samples needs its own host counter.
const PERIOD: u64 = 1_000_000_000;

/// A kernel that opens more sampling events than the device accepts, and continues with the code in `then`.
fn greedy(then: &[u8]) -> Vec<u8> {
    opening(EVENTS, 0, PERIOD, then)
}

/// The command `vmm run` for `kernel`, with few descriptors.
fn poor(kernel: &Path) -> Command {
    let run = vmm(["run", "--memory", "16", "--kernel"]);
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -n {DESCRIPTORS_ALLOWED}; exec \"$@\"")])
        .arg("sh")
        .arg(run.get_program())
        .args(run.get_args())
        .arg(kernel)
        .env_remove("RUST_LOG");
    command
}

#[test]
fn recording_is_written_without_free_descriptors() {
    let bench = Bench::new();
    let recording = bench.path("perf.data");
    let output = poor(&bench.kernel(&greedy(&TRIPLE_FAULT)))
        .args(["--persistent", "exits-io", "--recording"])
        .arg(&recording)
        .arg("--report")
        .arg(bench.path("report.json"))
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(4), "{}", messages(&output));
    assert_eq!(output.stdout, b"!");
    assert_eq!(messages(&output), "");
    assert!(recording.exists());
    let report = std::fs::read(bench.path("report.json")).expect("a report");
    let report: serde_json::Value = serde_json::from_slice(&report).expect("JSON");
    // Of the 120 descriptors, the VMM uses 72, the vCPU 10 and the operator 15. The guest gets the other 23.
    assert_eq!(report["vpmu"]["host_counters"], 23);
}

#[test]
fn control_socket_is_served_without_descriptors() {
    let bench = Bench::new();
    let socket = bench.path("vm.sock");
    let mut command = poor(&bench.kernel(&greedy(&SPIN)));
    let machine = running(command.arg("--ctl").arg(&socket));
    let waiting: Vec<_> = (0..15).map(|_| UnixStream::connect(&socket).expect("answers")).collect();
    let dumped = bench.path("now.data");
    let dumped = dumped.to_str().expect("a plain path");
    for words in [&["list"] as &[&str], &["dump", dumped]] {
        let output = ctl(&socket, words);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }
    drop(waiting);
    terminate(machine);
}
