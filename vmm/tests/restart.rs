//! With `--on-reset restart`, a guest that resets boots again, and the operator's events continue.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::process::Stdio;

use common::{Bench, HALT, Running, TRIPLE_FAULT, messages, out, power_off, read_output, read_report, run, terminate};

/// Writes register `al` to the console.
const PRINT: [u8; 5] = [0x66, 0xba, 0xf8, 0x03, 0xee];

/// A guest that keeps the number of its boots in the window. At each boot it prints three digits: the number of the
/// boot, whether memory had contents, and whether time went backwards. The first two boots end with the code in `end`.
fn booting_thrice(end: &[u8]) -> Vec<u8> {
    let mut code = Vec::new();
    let mut add = |bytes: &[u8]| code.extend_from_slice(bytes);
    // mov ebx, window; inc dword [rbx]; mov al, [rbx]; add al, '0'
    add(&[0xbb, 0x00, 0x00, 0x20, 0xd0, 0xff, 0x03, 0x8a, 0x03, 0x04, 0x30]);
    add(&PRINT);
    // mov ecx, 3 MiB; mov al, [rcx]; add al, '0'; then mov byte [rcx], 1
    add(&[0xb9, 0x00, 0x00, 0x30, 0x00, 0x8a, 0x01, 0x04, 0x30]);
    add(&PRINT);
    add(&[0xc6, 0x01, 0x01]);
    // rdtsc; shl rdx, 32; or rax, rdx; cmp rax, [rbx + 8]; mov [rbx + 8], rax; setb al; add al, '0'
    add(&[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0]);
    add(&[0x48, 0x3b, 0x43, 0x08, 0x48, 0x89, 0x43, 0x08]);
    add(&[0x0f, 0x92, 0xc0, 0x04, 0x30]);
    add(&PRINT);
    // cmp dword [rbx], 3; jae past the reset
    let reset = [end, &HALT].concat();
    let past = u8::try_from(reset.len()).expect("short");
    add(&[0x83, 0x3b, 0x03, 0x73, past]);
    add(&reset);
    add(&power_off());
    code
}

#[test]
fn every_reset_boots_again_with_the_window_and_time_going_on() {
    let bench = Bench::new();
    for end in [out(0xcf9, 0x06), out(0x64, 0xfe), TRIPLE_FAULT.to_vec()] {
        let kernel = bench.kernel(&booting_thrice(&end));
        let report = bench.path("report.json");
        let output = run(&kernel)
            .args(["--on-reset", "restart", "--summary", "--report"])
            .arg(&report)
            .output()
            .expect("vmm starts");
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "100200300");
        assert!(messages(&output).contains("3 boots"));
        let report = read_report(&report);
        assert_eq!((&report["boots"], &report["ending"]), (&3.into(), &"poweroff".into()));
        // There are three I/O exits per boot for the digits, and one for each write that resets or powers off the
        // machine. A triple fault is not an I/O exit.
        let ends = if end == TRIPLE_FAULT { 1 } else { 3 };
        assert_eq!(report["vcpus"][0]["exits"]["io"], 9 + ends);
    }
}

#[test]
fn without_the_word_the_first_reset_ends_the_run() {
    let bench = Bench::new();
    let kernel = bench.kernel(&booting_thrice(&out(0xcf9, 0x06)));
    let output = run(&kernel).output().expect("vmm starts");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "100");
}

#[test]
fn machine_without_the_pmu_reboots() {
    let bench = Bench::new();
    let kernel = bench.kernel(&[out(0x3f8, b'!'), out(0xcf9, 0x06)].concat());
    let mut child = Running::start(
        run(&kernel).args(["--on-reset", "restart", "--no-vpmu", "--vcpus", "2"]).stdout(Stdio::piped()),
    );
    assert_eq!(read_output(&mut child, 20), "!".repeat(20));
    // A guest that keeps resetting can be ended by a signal at any time.
    terminate(child);
}
