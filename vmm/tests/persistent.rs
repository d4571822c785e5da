//! The operator's persistent events sample from the guest's first instruction on. They are recorded no matter how the
//! run ends.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs;
use std::process::Command;

use common::{
    Bench, HALT, SPIN, TRIPLE_FAULT, kill, mark, messages, out, power_off, read_report, run, running, terminate, values,
};

/// The command `vmm run` for a kernel that consists of `code`, with a persistent event that samples all marks. The
/// command writes the recording and the report to `bench`.
fn recorded(bench: &Bench, code: &[u8]) -> Command {
    let mut command = run(&bench.kernel(code));
    command
        .args(["--persistent", "marks,name=steps", "--recording"])
        .arg(bench.path("perf.data"))
        .arg("--report")
        .arg(bench.path("report.json"));
    command
}

/// Code that places marks with the values 1 to `count`.
fn marks(count: u32) -> Vec<u8> {
    (1..=count).flat_map(mark).collect()
}

#[test]
fn every_end_of_a_guest_leaves_a_recording() {
    let ends = [(power_off(), 0), (out(0xcf9, 0x06), 3), (TRIPLE_FAULT.to_vec(), 4), (out(0x505, 1), 5)];
    for (end, status) in ends {
        let bench = Bench::new();
        let code = [marks(100), end, HALT.to_vec()].concat();
        let output = recorded(&bench, &code).output().expect("vmm starts");
        assert_eq!(output.status.code(), Some(status), "{}", messages(&output));
        assert_eq!(messages(&output), "");
        let reported: Vec<u64> = (1..=100).collect();
        assert_eq!(values(&bench.path("perf.data")), reported);
        let report = read_report(&bench.path("report.json"));
        assert_eq!(report["recording"]["samples"], 100);
    }
}

#[test]
fn signal_leaves_a_recording() {
    let bench = Bench::new();
    let code = [marks(3), out(0x3f8, b'!'), SPIN.to_vec()].concat();
    terminate(running(&mut recorded(&bench, &code)));
    assert_eq!(values(&bench.path("perf.data")), [1, 2, 3]);
}

#[test]
fn without_persistent_events_there_is_nothing_to_record() {
    let bench = Bench::new();
    let output =
        run(&bench.kernel(&[marks(3), power_off()].concat())).arg("--recording").arg(bench.path("perf.data")).output();
    assert_eq!(output.expect("vmm starts").status.code(), Some(0));
    assert!(!bench.path("perf.data").exists());
}

#[test]
fn failed_recording_keeps_the_exit_status() {
    let bench = Bench::new();
    let directory = bench.path("gone");
    fs::create_dir(&directory).expect("our own directory");
    let code = [out(0x3f8, b'!'), SPIN.to_vec()].concat();
    let mut command = run(&bench.kernel(&code));
    command.args(["--persistent", "marks", "--recording"]).arg(directory.join("perf.data"));
    let child = running(&mut command);
    fs::remove_dir(&directory).expect("empty");
    kill("-TERM", &child);
    let output = child.wait_with_output();
    assert_eq!(output.status.code(), Some(6));
    let text = messages(&output);
    assert!(text.contains("gone") && text.contains("--recording"), "{text}");
}

#[test]
fn resets_are_gone_on_from_with_the_same_event() {
    let bench = Bench::new();
    // Count the boots in the window's last page: inc dword [rbx]; cmp dword [rbx], 3; jae past the reset.
    let mut code = marks(5);
    code.extend([0xbb, 0x00, 0xf0, 0x2f, 0xd0, 0xff, 0x03, 0x83, 0x3b, 0x03]);
    let reset = [out(0xcf9, 0x06), HALT.to_vec()].concat();
    code.extend([0x73, u8::try_from(reset.len()).expect("short")]);
    code.extend(reset);
    code.extend(power_off());
    let output = recorded(&bench, &code)
        .args(["--on-reset", "restart", "--window", "1M", "--vcpus", "1"])
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    let once = [1, 2, 3, 4, 5];
    assert_eq!(values(&bench.path("perf.data")), once.repeat(3));
    // This is the recording of the second reset. It has replaced the recording of the first reset.
    assert_eq!(values(&bench.path("perf.data.old")), once.repeat(2));
    let report = read_report(&bench.path("report.json"));
    assert_eq!((&report["boots"], &report["vpmu"]["events_opened"]), (&3.into(), &1.into()));
}

#[test]
fn transport_reports_the_window() {
    let bench = Bench::new();
    // The guest selects shared memory region 1. For each register, it then prints 1 if the register has the expected
    // value, and 0 otherwise.
    let mut code = vec![0xbb, 0x00, 0x00, 0x00, 0xd0];
    code.extend([0xc7, 0x83, 0xac, 0, 0, 0, 1, 0, 0, 0]);
    let mut tell = |register: u8, value: u32| {
        // mov eax, [rbx + register]; mov ecx, value; cmp eax, ecx; sete al; add al, '0'; out
        code.extend([0x8b, 0x83, register, 0, 0, 0, 0xb9]);
        code.extend(value.to_le_bytes());
        code.extend([0x39, 0xc8, 0x0f, 0x94, 0xc0, 0x04, 0x30]);
        code.extend([0x66, 0xba, 0xf8, 0x03, 0xee]);
    };
    tell(0xb0, 1 << 20);
    tell(0xb4, 0);
    tell(0xb8, 0xd020_0000);
    tell(0xbc, 0);
    tell(0xb0, u32::MAX);
    tell(0xb8, u32::MAX);
    code.extend(power_off());
    let kernel = bench.kernel(&code);
    for (window, reported) in [("1M", "111100"), ("0", "000011")] {
        let output = run(&kernel).args(["--window", window]).output();
        let output = output.expect("vmm starts");
        assert_eq!(String::from_utf8_lossy(&output.stdout), reported, "{window}");
    }
}

#[test]
fn impossible_persistent_event_is_refused_before_the_guest_runs() {
    let bench = Bench::new();
    let kernel = bench.kernel(&power_off());
    let refused = |args: &[&str], words: &[&str]| {
        let output = run(&kernel).args(args).output().expect("vmm starts");
        common::refused(&output, 1, words);
    };
    refused(&["--persistent", "nonsense"], &["nonsense"]);
    refused(&["--persistent", "marks,cpu=1"], &["no vCPU 1", "has 1"]);
    refused(&["--persistent", "marks", "--window", "0"], &["--window"]);
    refused(&["--persistent", "marks,size=32K", "--window", "32K"], &["--window", "size"]);
    refused(&["--persistent", "marks", "--persistent", "exits,name=marks"], &["`marks` already"]);
    refused(&["--persistent", "marks", "--recording", "/nonexistent/perf.data"], &["/nonexistent", "--recording"]);
}
