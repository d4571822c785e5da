//! Tests compose recordings byte by byte and compare the text that is displayed.

use std::path::PathBuf;

use clap::Parser;
use serde_json::Value;
use tempfile::TempDir;
use vpmu_abi::{KIND_EXIT_TRACE, PACKET_CUT, PACKET_IP, PACKET_USER};
use vpmu_client::Packet;
use vpmu_client::trace::Packets;
use vpmu_perfdata::{ATTR_WRITE_BACKWARD, Event, Rate, SAMPLE_FIELDS, SAMPLE_RAW, event_type};

use super::composed;
use super::*;
use crate::recording::composed::{clock, process, sample, written};
use crate::recording::exit_sample;

const USER_IP: u8 = PACKET_USER | PACKET_IP;
const KERNEL_IP: u64 = 0xffff_f000_0000_0010;

fn trace(id: u64, flags: u64) -> Event {
    Event {
        name: format!("trace-of-{id}"),
        kind: event_type(KIND_EXIT_TRACE),
        config: id,
        rate: Some(Rate::Period(1)),
        sample_type: SAMPLE_FIELDS | SAMPLE_RAW,
        flags,
        id,
    }
}

/// A directory with a recording that has these packets.
fn recorded(packets: &[composed::Exit], lost: u64) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("perf.data");
    written(&path, vec![trace(1, 0), trace(2, ATTR_WRITE_BACKWARD)], |output| {
        // vperf writes processes after the exits that made it look them up.
        for packet in packets {
            let bytes = packet.bytes();
            let Some(Ok(Packet::Exit(exit))) = Packets::new(64, &bytes).next() else { panic!("{bytes:?}") };
            output.sample(0, &exit_sample(exit), &bytes).unwrap();
        }
        output.change(&process(7, "work", &[(0x4000, "/nonexistent/work")])).unwrap();
        if lost > 0 {
            output.lost(0, lost, 1).unwrap();
        }
    });
    (dir, path)
}

fn exit(flags: u8, reason: u16, outside: u64) -> composed::Exit {
    composed::Exit {
        flags,
        reason,
        time: 5_000 + outside,
        ip: if flags & 1 == 0 { KERNEL_IP } else { 0x4010 },
        outside,
        pid: 7,
        ..composed::Exit::default()
    }
}

/// Two port writes by a kernel function, a memory read, a halt, and an exit whose packet is marked
/// `PACKET_CUT`.
fn packets() -> Vec<composed::Exit> {
    let port = composed::Exit { qualification: 0x3f8, detail: 1 | 1 << 8 | 1 << 32, ..exit(PACKET_IP, 2, 1_000) };
    let memory = composed::Exit { qualification: 0xd000_0000, detail: 4, vcpu: 1, ..exit(USER_IP, 3, 5_000) };
    let longer = composed::Exit { outside: 3_000, ..port };
    vec![port, longer, memory, exit(0, 4, 90_000), exit(8 | PACKET_CUT | PACKET_IP, 0x72, 1_000)]
}

fn args(line: &str, input: &std::path::Path) -> report::ReportArgs {
    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: report::ReportArgs,
    }
    let words = ["report", "-i", input.to_str().unwrap()];
    let words = words.into_iter().chain(line.split_whitespace());
    Line::try_parse_from(words).unwrap().args
}

fn json(line: &str, input: &std::path::Path) -> Value {
    serde_json::from_str(&report::render(&args(line, input)).unwrap()).unwrap()
}

#[test]
fn exits_report_shows_reason_task_and_time() {
    let (_dir, path) = recorded(&packets(), 3);
    let text = report::render(&args("", &path)).unwrap();
    let (head, tables) = text.split_once("\n\n").unwrap();
    assert!(head.starts_with("# Recorded by: "), "{head}");
    assert!(
        head.ends_with(
            "#\n# trace-of-1: 5 exits, 100.000 us outside of the guest, 3 lost\n\
             # 1 exits were not traced to their end: their times are lower bounds."
        ),
        "{head}"
    );
    let expected = "\
         EXITS  %EXITS       TIME   %TIME       MEAN      WORST  REASON\n\
         \u{20}   1  20.00%  90.000 us  90.00%  90.000 us  90.000 us  hlt\n\
         \u{20}   1  20.00%   5.000 us   5.00%   5.000 us   5.000 us  mmio\n\
         \u{20}   2  40.00%   4.000 us   4.00%   2.000 us   3.000 us  io\n\
         \u{20}   1  20.00%   1.000 us   1.00%   1.000 us   1.000 us  HARDWARE\n\
         \n\
         EXITS  %EXITS       TIME   %TIME       MEAN      WORST  REASON  WHAT                            TASK  SYMBOL\n\
         \u{20}   1  20.00%  90.000 us  90.00%  90.000 us  90.000 us  hlt     -                               work  [unknown]\n\
         \u{20}   1  20.00%   5.000 us   5.00%   5.000 us   5.000 us  mmio    memory 0xd0000000 read 4 bytes  work  [.] [work]\n\
         \u{20}   2  40.00%   4.000 us   4.00%   2.000 us   3.000 us  io      port 0x3f8 write 1 byte         work  [k] [kernel]\n";
    // The processor of this machine names the hardware's exit.
    let hardware = json("--json --sort reason", &path)["traces"][0]["tables"][0]["rows"][3]["reason"].clone();
    let expected = expected.replace("HARDWARE", hardware.as_str().unwrap());
    let compact = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert!(compact(tables).starts_with(&compact(&expected)), "{tables}");
    assert!(
        text.contains("# trace-of-2: 0 exits, 0 ns outside of the guest, 0 lost\n# A snapshot: the newest"),
        "{text}"
    );
    let short = report::render(&args("--sort cpu --top 1", &path)).unwrap();
    let line = "    4  80.00%  95.000 us  95.00%  23.750 us  90.000 us  0\n(1 more: --top 2)\n";
    assert!(short.contains(line), "{short}");
}

#[test]
fn json_has_every_row() {
    let (_dir, path) = recorded(&packets(), 3);
    let report = json("--json --sort reason,symbol --top 1", &path);
    let trace = &report["traces"][0];
    for (key, expected) in [("exits", 5), ("total_ns", 100_000), ("cut", 1), ("lost", 3)] {
        assert_eq!(trace[key], expected, "{key}");
    }
    assert_eq!((&trace["snapshot"], &report["traces"][1]["snapshot"]), (&false.into(), &true.into()));
    let table = &trace["tables"][0];
    assert_eq!(table["keys"], serde_json::json!(["reason", "symbol"]));
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[2]["reason"], "io");
    assert_eq!(rows[2]["symbol"], "[k] [kernel]");
    assert_eq!((&rows[2]["exits"], &rows[2]["mean_ns"]), (&2.into(), &2_000.into()));
}

#[test]
fn recordings_without_exits_name_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("perf.data");
    written(&path, vec![clock()], |output| output.sample(0, &sample(7, 1), &[]).unwrap());
    let error = report::render(&args("", &path)).unwrap_err().to_string();
    assert!(error.contains("vperf exits record"), "{error}");
    let error = report::render(&args("", &path.with_extension("none"))).unwrap_err();
    assert!(error.to_string().contains("name it with -i"), "{error}");
}

#[test]
fn timeline_is_chrome_trace_json() {
    let (dir, input) = recorded(&packets(), 0);
    let output = dir.path().join("trace.json");
    timeline::run(&timeline::TimelineArgs { input: input.clone(), output: output.clone() }).unwrap();
    let trace: Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |ph: &str| -> Vec<&Value> { events.iter().filter(|event| event["ph"] == ph).collect() };
    let exits = of("X");
    assert_eq!(exits.len(), 5);
    // The time axis begins with the first exit.
    let expected = serde_json::json!({
        "name": "io", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1.0,
        "args": {
            "what": "port 0x3f8 write 1 byte", "ip": format!("{KERNEL_IP:#x}"), "symbol": "[k] [kernel]",
            "task": "work", "pid": 7, "tid": 8,
        },
    });
    assert_eq!(exits[0], &expected);
    assert_eq!(exits.iter().filter(|exit| exit["tid"] == 1).count(), 1);
    assert_eq!(exits.iter().filter(|exit| exit["args"]["cut"] == true).count(), 1);
    let named = of("M");
    let names: Vec<(&str, &str)> =
        named.iter().filter_map(|event| Some((event["name"].as_str()?, event["args"]["name"].as_str()?))).collect();
    assert_eq!(
        names,
        [
            ("process_name", "trace-of-1"),
            ("thread_name", "vCPU 0"),
            ("thread_name", "vCPU 1"),
            ("process_name", "trace-of-2"),
        ]
    );
    // An unwritable file is named in the error.
    let run = |output: &std::path::Path| {
        timeline::run(&timeline::TimelineArgs { input: input.clone(), output: output.into() })
    };
    let error = run(&dir.path().join("no/such")).unwrap_err().to_string();
    assert!(error.contains("no/such"), "{error}");
    assert!(matches!(run(std::path::Path::new("/dev/full")), Err(timeline::TimelineError::Write { .. })));
}

#[test]
fn exits_alone_records_and_shows() {
    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: ExitsArgs,
    }
    let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.args);
    let alone = parse("exits --reason io -- report -i x").unwrap();
    assert!(alone.command.is_none());
    assert_eq!(alone.record.target.command, ["report", "-i", "x"]);
    assert!(matches!(parse("exits report -i x").unwrap().command, Some(ExitsCommand::Report(_))));
    assert!(matches!(parse("exits record -a -- true").unwrap().command, Some(ExitsCommand::Record(_))));
    assert!(parse("exits report --sort colour").is_err());
}
