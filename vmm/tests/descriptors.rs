//! A guest that uses up its VMM's descriptors keeps nobody from what is the operator's.

#![allow(clippy::expect_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use common::driver::opening;
use common::{Bench, SPIN, TRIPLE_FAULT, kill, messages, running, vmm};

/// More events than descriptors that the VMM may have.
const EVENTS: u16 = 100;
const DESCRIPTORS_ALLOWED: u32 = 120;

/// Nanoseconds: each event that samples has a counter of its own.
const PERIOD: u64 = 1_000_000_000;

/// A kernel that opens counters until it may have no more, and goes on with `then`.
fn greedy(then: &[u8]) -> Vec<u8> {
    opening(EVENTS, 0, PERIOD, then)
}

/// `vmm run` of `kernel`, which may have few descriptors.
fn poor(kernel: &Path) -> Command {
    let run = vmm(["run", "--memory", "16", "--kernel"]);
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("ulimit -n {DESCRIPTORS_ALLOWED}; exec \"$@\""),
        ])
        .arg("sh")
        .arg(run.get_program())
        .args(run.get_args())
        .arg(kernel)
        .env_remove("RUST_LOG");
    command
}

#[test]
fn its_flight_recorder_is_written_all_the_same() {
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
    // The guest had what 120 descriptors leave: 72 are the VMM's, 10 a vCPU's, 15 the operator's.
    assert_eq!(report["vpmu"]["host_counters"], 23);
}

#[test]
fn the_control_socket_is_served_all_the_same() {
    let bench = Bench::new();
    let socket = bench.path("vm.sock");
    let mut command = poor(&bench.kernel(&greedy(&SPIN)));
    let mut machine = running(command.arg("--ctl").arg(&socket));
    let waiting: Vec<_> = (0..15)
        .map(|_| UnixStream::connect(&socket).expect("answers"))
        .collect();
    let dumped = bench.path("now.data");
    let dumped = dumped.to_str().expect("a plain path");
    for words in [&["list"] as &[&str], &["dump", dumped]] {
        let mut ask = vmm(["ctl", "--socket"]);
        let output = ask.arg(&socket).args(words).output().expect("vmm starts");
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }
    drop(waiting);
    kill("-TERM", &machine);
    assert_eq!(machine.wait().expect("a child").code(), Some(6));
}
