//! The command line: `vmm` reports each mistake in one line, and its exit status depends on how the guest ended.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::io::Write;
use std::process::Stdio;

use common::{
    Bench, HALT, Running, SPIN, TRIPLE_FAULT, elf, kill, messages, out, outs, power_off, read_output, read_report, run,
    running, terminate, vmm,
};

/// Runs `vmm` with `args`, and checks that it fails with status `code` and prints one line that contains all `words`.
#[track_caller]
fn refused(args: &[&str], code: i32, words: &[&str]) {
    common::refused(&vmm(args).output().expect("vmm starts"), code, words);
}

#[test]
fn missing_command_lists_the_commands() {
    for (args, listed) in [(&[][..], ["check", "export"]), (&["ctl"], ["flush", "snapshot"])] {
        let output = vmm(args).output().expect("vmm starts");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        let line = text.lines().last().unwrap_or_default();
        assert_eq!(line, "vmm: no command: must be one of those listed above", "{args:?}");
        for command in listed {
            let is_listed = text.lines().any(|line| line.trim_start().starts_with(command));
            assert!(is_listed, "{command}: {text}");
        }
    }
}

#[test]
fn recording_that_cannot_be_exported_is_reported_with_the_remedy() {
    let bench = Bench::new();
    let other = bench.file("other", b"not a recording");
    let other = other.to_str().expect("text");
    refused(&["export", other], 2, &["--to"]);
    refused(&["export", other, "--to", "png"], 2, &["png", "folded", "svg", "firefox", "pprof", "perfetto"]);
    refused(&["export", other, "--to", "svg"], 1, &["other", "not a perf.data file", "perf record"]);
    refused(&["export", "/nonexistent", "--to", "svg"], 1, &["/nonexistent"]);
    refused(&["export", "/dev/zero", "--to", "svg"], 1, &["/dev/zero", "regular file"]);
    refused(&["export", other, "--to", "svg", "--vmlinux", other], 1, &["other", "unstripped vmlinux"]);
    refused(&["export", other, "--to", "svg", "--symfs", other], 1, &["other", "not a directory"]);
}

#[test]
fn wrong_usage_is_reported_in_one_line() {
    refused(&["run", "--kernle", "x"], 2, &["--kernle", "--help"]);
    refused(&["walk"], 2, &["walk", "--help"]);
    refused(&["run"], 2, &["--kernel"]);
    refused(&["run", "--kernel", "x", "--vcpus", "0"], 2, &["0 vCPUs", "--vcpus"]);
    refused(&["run", "--kernel", "x", "--vcpus", "255"], 2, &["255", "254"]);
    refused(&["run", "--kernel", "x", "--vcpus", "two"], 2, &["two", "--vcpus"]);
    refused(&["run", "--kernel", "x", "--memory", "1"], 2, &["1 MiB", "--memory"]);
    refused(&["run", "--kernel", "x", "--max-sample-rate", "0"], 2, &["1 or more", "--max-sample-rate"]);
    refused(&["run", "--kernel", "x", "--max-aux-pages", "3"], 2, &["--max-aux-pages 3", "power of two"]);
    for (window, word) in [("4097", "4097"), ("513M", "512M"), ("1G", "K or M")] {
        refused(&["run", "--kernel", "x", "--window", window], 2, &[word, "--window"]);
    }
    refused(&["run", "--kernel", "x", "--user", "nobody"], 2, &["nobody", "--user", "1000:1000"]);
    refused(&["run", "--kernel", "x", "--max-persistent", "few"], 2, &["few", "--max-persistent"]);
    refused(&["run", "--kernel", "x", "--on-reset", "again"], 2, &["again", "--on-reset", "restart"]);
    for (args, words) in [
        (&["--allow-event", "instrutions"][..], ["instrutions", "did you mean instructions?"]),
        (&["--deny-event", "raw:r11"], ["raw:r11", "KIND:CONFIG/MASK"]),
        (&["--pmu", "all"], ["--pmu", "standard"]),
        (&["--pmu", "off", "--persistent", "marks"], ["--persistent", "--pmu off"]),
        (&["--pmu", "clocks", "--no-vpmu"], ["--pmu clocks", "--no-vpmu"]),
        (&["--allow-event", "cycles", "--deny-event", "hardware"], ["--allow-event cycles", "--deny-event hardware"]),
        (&["--raw-events", "0x11", "--no-hardware-events"], ["--raw-events", "--no-hardware-events"]),
        (&["--hardware-events", "--no-hardware-events"], ["--hardware-events", "--no-hardware-events"]),
    ] {
        refused(&[&["run", "--kernel", "x"], args].concat(), 2, &words);
    }
    refused(&["check", "--pmu", "full", "--no-hardware-events"], 2, &["--pmu full", "--no-hardware-events"]);
    refused(&["run", "--kernel", "x", "--memory", "9T"], 2, &["9T", "MiB"]);
    refused(&["run", "--kernel", "x", "--engine", "fast"], 2, &["fast", "--engine", "batched"]);
    refused(&["run", "--kernel", "x", "--persistent", "marks,size=3K"], 2, &["--persistent", "size=3K", "4K"]);
    refused(&["run", "--kernel", "x", "--persistent", "marks", "--no-vpmu"], 2, &["--persistent", "--no-vpmu"]);
    refused(&["run", "--config", "/nonexistent.json"], 2, &["/nonexistent.json"]);
}

#[test]
fn configuration_with_an_unknown_field_is_refused() {
    let bench = Bench::new();
    let config = bench.file("vm.json", br#"{"kernel": "x", "cpus": 2}"#);
    let config = config.to_str().expect("a plain path");
    refused(&["run", "--config", config], 2, &["vm.json", "cpus"]);
}

#[test]
fn bad_files_are_reported_in_one_line() {
    let bench = Bench::new();
    let run = |kernel: &str, more: &[&str], words: &[&str]| {
        let kernel = bench.path(kernel);
        let kernel = kernel.to_str().expect("a plain path");
        let args = [&["run", "--memory", "16", "--kernel", kernel], more].concat();
        refused(&args, 1, words);
    };
    run("absent", &[], &["absent", "No such file"]);
    run("", &[], &["not a file"]);
    bench.file("empty", b"");
    run("empty", &[], &["empty", "not a kernel"]);
    bench.file("text", &b"#!/bin/sh\necho I am no kernel\n".repeat(99));
    run("text", &[], &["text", "not a kernel", "bzImage"]);
    let whole = elf(&HALT, 0);
    bench.file("cut", &whole[..whole.len() - 1]);
    run("cut", &[], &["cut", "truncated"]);
    bench.file("big", &elf(&HALT, 64 << 20));
    run("big", &[], &["big", "66 MiB", "--memory"]);
    let initramfs = bench.file("initramfs", &vec![0; 15 << 20]);
    let initramfs = initramfs.to_str().expect("a plain path");
    bench.file("good", &whole);
    run("good", &["--initramfs", initramfs], &["initramfs", "does not fit", "--memory"]);
    run("good", &["--initramfs", "/nonexistent"], &["initramfs", "/nonexistent"]);
    run("good", &["--cmdline", &"x".repeat(4000)], &["4000", "2047"]);
    run("good", &["--report", "/nonexistent/r.json"], &["report", "/nonexistent/r.json"]);
}

#[test]
fn help_teaches_options_and_exit_statuses() {
    let output = vmm(["run", "--help"]).output().expect("vmm starts");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    for word in [
        "Examples:",
        "--no-vpmu",
        "--engine",
        "--report",
        "--user",
        "--chroot",
        "--no-seccomp",
        "CAP_PERFMON",
        "0x504",
        "Ctrl-A x",
        "triple-faulted",
    ] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn every_ending_has_its_exit_status() {
    let bench = Bench::new();
    let endings = [
        (power_off(), 0, "poweroff"),
        (out(0xcf9, 0x06), 3, "reset"),
        (out(0x64, 0xfe), 3, "reset"),
        (TRIPLE_FAULT.to_vec(), 4, "triple-fault"),
        (out(0x505, 1), 5, "guest-panic"),
    ];
    for (code, status, ending) in endings {
        let kernel = bench.kernel(&[code, HALT.to_vec()].concat());
        let report = bench.path("report.json");
        let output = run(&kernel).arg("--report").arg(&report).output();
        let output = output.expect("vmm starts");
        assert_eq!(output.status.code(), Some(status), "{}", messages(&output));
        let report = read_report(&report);
        assert_eq!(report["ending"], ending);
        assert_eq!(report["exit_code"], status);
        assert_eq!(messages(&output), "");
    }
}

#[test]
fn port_writes_are_counted_exactly() {
    let bench = Bench::new();
    for count in [1, 2, 1000, 12_345] {
        let kernel = bench.kernel(&[outs(count), out(0x504, 1), power_off()].concat());
        let report = bench.path("report.json");
        let output = run(&kernel).arg("--report").arg(&report).output();
        assert_eq!(output.expect("vmm starts").status.code(), Some(0));
        let report = read_report(&report);
        let exits = &report["vcpus"][0]["exits"];
        // The guest writes `count` times to the unused port, and once each to the debug port and the sleep port.
        assert_eq!(exits["io"], count + 2);
        assert_eq!(exits["mmio"], 0);
        assert!(report["boot_to_init_ns"].as_u64() <= report["wall_ns"].as_u64());
        assert!(report["boot_to_init_ns"].is_u64());
    }
}

#[test]
fn failed_machine_writes_its_report() {
    let bench = Bench::new();
    let report = bench.file("report.json", &b"what stood here before, and was longer".repeat(99));
    let output = vmm(["run", "--kernel", "/nonexistent", "--report"]).arg(&report).output().expect("vmm starts");
    assert_eq!(output.status.code(), Some(1));
    let report = read_report(&report);
    assert_eq!(report["ending"], "error");
    let error = report["error"].as_str().expect("text");
    assert!(error.contains("/nonexistent"), "{error}");
}

#[test]
fn overhead_in_the_report_excludes_guest_memory() {
    let bench = Bench::new();
    let kernel = bench.kernel(&power_off());
    let report = bench.path("report.json");
    let output = vmm(["run", "--memory", "64", "--kernel"])
        .arg(&kernel)
        .arg("--initramfs")
        .arg(bench.file("initramfs", &vec![1; 48 << 20]))
        .arg("--report")
        .arg(&report)
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    let bytes = read_report(&report)["vmm_overhead_bytes"].as_u64();
    assert!(bytes.is_some_and(|bytes| bytes < 24 << 20), "{bytes:?}");
}

#[test]
fn machine_without_the_pmu_runs() {
    let bench = Bench::new();
    let kernel = bench.kernel(&power_off());
    let report = bench.path("report.json");
    let output = run(&kernel).args(["--no-vpmu", "--summary", "--report"]).arg(&report).output().expect("vmm starts");
    assert_eq!(output.status.code(), Some(0));
    assert!(messages(&output).contains("the guest powered off"));
    let report = read_report(&report);
    assert!(report["vpmu"].is_null());
    assert!(report["vcpus"][0]["exits"].is_null());
}

#[test]
fn flags_override_the_configuration_file() {
    let bench = Bench::new();
    let kernel = bench.kernel(&out(0x505, 1));
    let text = serde_json::json!({"kernel": kernel, "memory": 16, "vcpus": 2});
    let config = bench.file("vm.json", text.to_string().as_bytes());
    let status = |more: &[&str]| {
        let output = vmm(["run", "--config"]).arg(&config).args(more).output();
        output.expect("vmm starts").status.code()
    };
    assert_eq!(status(&[]), Some(5));
    let other = bench.file("other.elf", &elf(&power_off(), 0));
    let other = other.to_str().expect("a plain path");
    assert_eq!(status(&["--kernel", other]), Some(0), "flags override the file");
}

#[test]
fn prompt_without_a_newline_appears_and_ctrl_a_x_ends() {
    let bench = Bench::new();
    let prompt: Vec<u8> = b"login: ".iter().flat_map(|byte| out(0x3f8, *byte)).collect();
    let kernel = bench.kernel(&[prompt, SPIN.to_vec()].concat());
    let mut child = Running::start(run(&kernel).stdin(Stdio::piped()).stdout(Stdio::piped()));
    assert_eq!(read_output(&mut child, 7), "login: ");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(b"\x01x").expect("the keys");
    assert_eq!(child.wait().expect("a child").code(), Some(6));
}

#[test]
fn reader_that_does_not_read_does_not_delay_the_end() {
    let bench = Bench::new();
    // The guest prints the same byte forever, so the pipe soon fills up.
    let flood = [out(0x3f8, b'!'), vec![0xee, 0xeb, 0xfd]].concat();
    let kernel = bench.kernel(&flood);
    let mut child = Running::start(run(&kernel).stdout(Stdio::piped()).stderr(Stdio::piped()));
    read_output(&mut child, 5000);
    terminate(child);
}

#[test]
fn all_output_arrives_however_slow_its_reader() {
    let bench = Bench::new();
    let mut code = vec![0xb9];
    code.extend(200_000u32.to_le_bytes());
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'x']);
    code.extend([0xee, 0xff, 0xc9, 0x75, 0xfb]);
    let kernel = bench.kernel(&[code, power_off()].concat());
    let output = run(&kernel).stdout(Stdio::piped()).output();
    let output = output.expect("vmm starts");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout.len(), 200_000);
}

#[test]
fn signal_ends_the_run_in_order() {
    let bench = Bench::new();
    let kernel = bench.kernel(&[out(0x3f8, b'!'), SPIN.to_vec()].concat());
    for (signal, number) in [("-TERM", 15), ("-INT", 2), ("-HUP", 1)] {
        let report = bench.path("report.json");
        let mut command = run(&kernel);
        command.arg("--report").arg(&report).arg("--summary");
        let child = running(&mut command);
        kill(signal, &child);
        let ended = child.wait_with_output();
        assert_eq!(ended.status.code(), Some(6));
        assert!(messages(&ended).contains(&format!("signal {number}")));
        assert_eq!(read_report(&report)["ending"], "signal");
    }
}
