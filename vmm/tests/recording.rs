//! Tests the flight recorder with real runs. The events of a small guest are in a file that other programs can read, no
//! matter how the guest ended.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output};

use common::driver::opening;
use common::{Bench, TRIPLE_FAULT, messages, outs, power_off, refused, run, vmm};
use linux_perf_data::linux_perf_event_reader::EventRecord;
use linux_perf_data::{PerfFileReader, PerfFileRecord};
use vmm::arch::layout::DOORBELL;
use vpmu::abi::OPEN_PERSISTENT;

/// Code that places marks with the values 1 to `count`.
fn marks(count: u32) -> Vec<u8> {
    let mut code = vec![0xbf];
    code.extend(u32::try_from(DOORBELL).unwrap().to_le_bytes());
    code.extend([0xb9, 1, 0, 0, 0]);
    // mov [rdi], ecx; inc ecx; cmp ecx, count + 1; jne
    code.extend([0x89, 0x0f, 0xff, 0xc1, 0x81, 0xf9]);
    code.extend((count + 1).to_le_bytes());
    code.extend([0x75, 0xf4]);
    code
}

/// The samples of a recording: event name, time, address.
fn samples(path: &Path) -> Vec<(String, u64, u64)> {
    let file = File::open(path).expect("a recording");
    let PerfFileReader { mut perf_file, mut record_iter } = PerfFileReader::parse_file(file).expect("a perf.data");
    let names: Vec<String> =
        perf_file.event_attributes().iter().map(|attribute| attribute.name().unwrap_or_default().to_owned()).collect();
    let mut samples = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).expect("a record") {
        if let PerfFileRecord::EventRecord { attr_index, record } = record
            && let EventRecord::Sample(sample) = record.parse().expect("of a known kind")
        {
            let (time, address) = (sample.timestamp.unwrap(), sample.addr.unwrap());
            samples.push((names[attr_index].clone(), time, address));
        }
    }
    samples
}

fn addresses(samples: &[(String, u64, u64)], name: &str) -> Vec<u64> {
    let of = samples.iter().filter(|(event, ..)| event == name);
    of.map(|&(.., address)| address).collect()
}

/// Runs a guest that consists of `code`, and checks that `vmm` ends with the status `exit`.
fn recorded(bench: &Bench, code: &[u8], exit: i32, args: &[&str]) {
    let output = run(&bench.kernel(code))
        .args(args)
        .arg("--recording")
        .arg(bench.path("perf.data"))
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(exit), "{}", messages(&output));
}

#[test]
fn ten_thousand_numbered_marks_are_all_there() {
    let bench = Bench::new();
    let code = [marks(10_000), power_off()].concat();
    let args = [
        // This guest places more marks per second than the default sample rate allows.
        "--max-sample-rate",
        "10000000",
        "--persistent",
        "marks,size=1M",
        "--persistent",
        "mark=77,name=one",
    ];
    recorded(&bench, &code, 0, &args);
    let samples = samples(&bench.path("perf.data"));
    let numbers: Vec<u64> = (1..=10_000).collect();
    assert_eq!(addresses(&samples, "marks"), numbers);
    assert_eq!(addresses(&samples, "one"), [77]);
    assert!(samples.windows(2).all(|pair| pair[0].1 <= pair[1].1));
}

#[test]
fn newest_records_are_kept() {
    let bench = Bench::new();
    let code = [marks(1000), power_off()].concat();
    let args = ["--max-sample-rate", "10000000", "--persistent", "marks,size=4K"];
    recorded(&bench, &code, 0, &args);
    let samples = samples(&bench.path("perf.data"));
    // The ring of 4 KiB has room for 64 records of 64 bytes.
    let newest: Vec<u64> = (1000 - 63..=1000).collect();
    assert_eq!(addresses(&samples, "marks"), newest);
}

#[test]
fn guest_that_dies_leaves_its_recording() {
    let bench = Bench::new();
    let code = [marks(100), outs(20), TRIPLE_FAULT.to_vec()].concat();
    let args = ["--persistent", "marks", "--persistent", "exits-io"];
    recorded(&bench, &code, 4, &args);
    let found = samples(&bench.path("perf.data"));
    let numbers: Vec<u64> = (1..=100).collect();
    assert_eq!(addresses(&found, "marks"), numbers);
    assert_eq!(addresses(&found, "exits-io").len(), 20);
    // Another run keeps this run's recording as `perf.data.old`.
    recorded(&bench, &power_off(), 0, &["--persistent", "marks"]);
    assert_eq!(samples(&bench.path("perf.data")), []);
    assert_eq!(samples(&bench.path("perf.data.old")), found);
}

#[test]
fn each_vcpus_events_are_named_after_it() {
    let bench = Bench::new();
    let code = [marks(3), power_off()].concat();
    let args = ["--vcpus", "2", "--persistent", "marks,name=m"];
    recorded(&bench, &code, 0, &args);
    let samples = samples(&bench.path("perf.data"));
    assert_eq!(addresses(&samples, "m-0"), [1, 2, 3]);
    assert_eq!(addresses(&samples, "m-1"), [0; 0]);
}

#[test]
fn stock_perf_reads_a_runs_recording() {
    images::prerequisites::ensure(&[images::prerequisites::Prerequisite::Perf]).expect("stock perf");
    let bench = Bench::new();
    let code = [marks(5), power_off()].concat();
    recorded(&bench, &code, 0, &["--persistent", "marks"]);
    let output = Command::new(images::prerequisites::perf().expect("stock perf"))
        .args(["script", "-F", "tid,cpu,event,addr", "-i"])
        .arg(bench.path("perf.data"))
        .output()
        .expect("perf starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let words: Vec<&str> = text.split_whitespace().collect();
    let expected: Vec<String> = (1..=5)
        .flat_map(|number| ["0", "[000]", "marks:"].map(str::to_owned).into_iter().chain([number.to_string()]))
        .collect();
    assert_eq!(words, expected, "{text}");
}

#[test]
fn recording_is_exported_in_each_format() {
    let bench = Bench::new();
    let code = [marks(5), outs(20), power_off()].concat();
    recorded(&bench, &code, 0, &["--persistent", "marks", "--persistent", "exits-io"]);
    let export = |to: &str, more: &[&str]| {
        let mut command = vmm(["export", "--to", to]);
        let output = command.arg(bench.path("perf.data")).args(more).output().expect("vmm starts");
        assert!(output.status.success(), "{}", messages(&output));
        output
    };
    let weight = |output: &Output| -> u64 {
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    };
    let folded = export("folded", &[]);
    assert_eq!(weight(&folded), 5);
    assert!(messages(&folded).contains("shows `marks`; --event selects one of: exits-io"), "{}", messages(&folded));
    // The guest powers off by a write to a port.
    assert_eq!(weight(&export("folded", &["--event", "exits-io"])), 21);
    let perfetto: serde_json::Value = serde_json::from_slice(&export("perfetto", &[]).stdout).expect("JSON");
    let events = perfetto["traceEvents"].as_array().expect("events");
    let values: Vec<u64> = events.iter().filter_map(|event| event["args"]["value"].as_u64()).collect();
    assert_eq!(values, [1, 2, 3, 4, 5]);
    let firefox: serde_json::Value = serde_json::from_slice(&export("firefox", &[]).stdout).expect("JSON");
    assert_eq!(firefox["threads"][0]["markers"]["length"], 26);
    assert!(export("pprof", &[]).stdout.starts_with(&[0x1f, 0x8b]));
    let svg = bench.path("flames.svg");
    let written = export("svg", &["-o", svg.to_str().expect("text")]);
    assert!(written.stdout.is_empty());
    assert!(std::fs::read_to_string(&svg).expect("an SVG").contains("marks: 5 samples"));
}

#[test]
fn export_does_not_overwrite_its_recording() {
    let bench = Bench::new();
    recorded(&bench, &[marks(5), power_off()].concat(), 0, &["--persistent", "marks"]);
    let path = bench.path("perf.data");
    let before = std::fs::read(&path).expect("a recording");
    let mut command = vmm(["export", "--to", "svg", "-o"]);
    let output = command.arg(&path).arg(&path).output().expect("vmm starts");
    refused(&output, 1, &["perf.data", "--output"]);
    assert_eq!(std::fs::read(&path).expect("a recording"), before);
}

#[test]
fn nothing_is_written_where_nothing_persists() {
    let bench = Bench::new();
    recorded(&bench, &[marks(5), power_off()].concat(), 0, &[]);
    assert!(!bench.path("perf.data").exists());
}

#[test]
fn impossible_recording_is_refused_before_the_guest_starts() {
    let bench = Bench::new();
    let kernel = bench.kernel(&power_off());
    let symbols = bench.file("System.map", b"ffffffff81000000 D no_function\n");
    let symbols = symbols.to_str().expect("a path");
    for (args, words) in [
        (["--recording", "/nonexistent/perf.data"], "/nonexistent"),
        (["--symbols", "/nonexistent/System.map"], "/nonexistent/System.map"),
        (["--symbols", symbols], "has no function symbols"),
        (["--persistent", "no-such-event"], "vmm check --pmu full"),
        (["--persistent", "marks,size=4K"], "with name="),
        (["--persistent", "marks,cpu=5,name=five"], "vCPU 5"),
        (["--persistent", "marks,name=Seven"], "Seven"),
        (["--persistent", "marks,size=32M,name=big"], "pages"),
    ] {
        let output = vmm(["run", "--memory", "16", "--persistent", "marks"])
            .args(args)
            .arg("--kernel")
            .arg(&kernel)
            .current_dir(kernel.parent().expect("a directory"))
            .output()
            .expect("vmm starts");
        refused(&output, 1, &[words]);
    }
    assert!(!bench.path("perf.data").exists());
}

#[test]
fn hardware_event_of_a_machine_that_opens_none_is_refused_with_the_remedy() {
    let bench = Bench::new();
    let kernel = bench.kernel(&power_off());
    let output = vmm(["run", "--memory", "16", "--no-hardware-events"])
        .args(["--persistent", "cycles,size=0", "--kernel"])
        .arg(&kernel)
        .output()
        .expect("vmm starts");
    let text = messages(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("--hardware-events enables them"), "{text}");
}

#[test]
fn recording_is_written_only_on_request() {
    let bench = Bench::new();
    let kernel = bench.kernel(&opening(3, OPEN_PERSISTENT, 0, &TRIPLE_FAULT));
    let here = bench.path("here");
    std::fs::create_dir(&here).expect("made");
    let ended = |command: &mut Command| {
        let output = command.current_dir(&here).output().expect("vmm starts");
        assert_eq!(output.status.code(), Some(4), "{}", messages(&output));
        assert_eq!(messages(&output), "");
        std::fs::read_dir(&here).expect("a directory").count()
    };
    assert_eq!(ended(&mut run(&kernel)), 0);
    assert_eq!(ended(run(&kernel).args(["--recording", "asked.data"])), 1);
    assert_eq!(ended(run(&kernel).args(["--persistent", "marks"])), 2);
}
