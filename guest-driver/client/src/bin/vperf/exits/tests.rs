//! Tests compose recordings byte by byte and compare the text that is displayed.

use std::path::PathBuf;

use clap::Parser;
use serde_json::Value;
use tempfile::TempDir;
use vpmu_abi::{PACKET_CUT, PACKET_IP, PACKET_USER};
use vpmu_client::trace::Format;

use super::composed::{self, sync};
use super::*;
use crate::data::{Aux, End, Kernel, Line, Map, Process, Processor, Symbol, TraceLine, Traced, Writer};

const USER_IP: u8 = PACKET_USER | PACKET_IP;

/// A directory with a recording under the default name.
fn recorded(complete: bool, traces: &[(Format, Vec<Vec<u8>>)]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vperf.data");
    let mut writer = Writer::create(&path, "all CPUs").unwrap();
    let mut line = |line| writer.line(&line).unwrap();
    for (index, (format, _)) in traces.iter().enumerate() {
        line(Line::Trace(TraceLine {
            name: format!("trace-{index}"),
            format: *format,
            source: "a source".into(),
            processor: Processor::Svm,
            ..TraceLine::default()
        }));
    }
    for (trace, (_, packets)) in traces.iter().enumerate() {
        let data = packets.concat();
        line(Line::Aux(Aux { trace, place: 0, position: 0, bytes: data.len() as u64, data }));
    }
    // vperf writes the processes after the exits.
    line(Line::Process(Process {
        pid: 7,
        comm: "work".into(),
        time: 0,
        maps: vec![Map { start: 0x4000, end: 0x5000, offset: 0, path: "/nonexistent/work".into() }],
    }));
    if complete {
        line(Line::Traced(Traced { trace: 0, place: 0, produced: 10_000, lost: 192, written: 9_808 }));
        line(Line::Kernel(Kernel {
            symbols: vec![Symbol { start: 0xf000, end: 0xf100, name: "write_port".into() }],
            hidden: false,
        }));
        line(Line::End(End { elapsed_ns: 2_000_000, ..End::default() }));
    }
    writer.flush().unwrap();
    (dir, path)
}

fn exit(flags: u8, reason: u16, outside: u64) -> composed::Exit {
    composed::Exit {
        flags,
        reason,
        time: 5_000 + outside,
        ip: if flags & 1 == 0 { 0xf010 } else { 0x4010 },
        outside,
        pid: 7,
        ..composed::Exit::default()
    }
}

/// Two port writes by a kernel function, a memory read, a halt, and an exit whose packet is marked
/// `PACKET_CUT`.
fn packets() -> Vec<Vec<u8>> {
    let port = composed::Exit { qualification: 0x3f8, detail: 1 | 1 << 8 | 1 << 32, ..exit(PACKET_IP, 2, 1_000) };
    let memory = composed::Exit { qualification: 0xd000_0000, detail: 4, vcpu: 1, ..exit(USER_IP, 3, 5_000) };
    let longer = composed::Exit { outside: 3_000, ..port };
    vec![
        sync(1, 0, 0),
        port.bytes(),
        longer.bytes(),
        memory.bytes(),
        vec![0; 64],
        exit(0, 4, 90_000).bytes(),
        exit(8 | PACKET_CUT | PACKET_IP, 0x72, 1_000).bytes(),
        sync(2, 9, 192),
    ]
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
    let (_dir, path) = recorded(true, &[(Format::Exits, packets())]);
    let text = report::render(&args("", &path)).unwrap();
    assert_eq!(
        text,
        "# Exits of all CPUs, recorded for 2.000 ms\n\
         #\n\
         # trace-0: 5 exits, 100.000 us outside of the guest, 192 bytes lost\n\
         # traced by a source\n\
         # 1 exits were not traced to their end: their times are lower bounds.\n\
         \n\
         EXITS  %EXITS       TIME   %TIME       MEAN      WORST  REASON\n\
         \u{20}   1  20.00%  90.000 us  90.00%  90.000 us  90.000 us  hlt\n\
         \u{20}   1  20.00%   5.000 us   5.00%   5.000 us   5.000 us  mmio\n\
         \u{20}   2  40.00%   4.000 us   4.00%   2.000 us   3.000 us  io\n\
         \u{20}   1  20.00%   1.000 us   1.00%   1.000 us   1.000 us  cpuid\n\
         \n\
         EXITS  %EXITS       TIME   %TIME       MEAN      WORST  REASON  WHAT                            TASK  SYMBOL\n\
         \u{20}   1  20.00%  90.000 us  90.00%  90.000 us  90.000 us  hlt     -                               work  [unknown]\n\
         \u{20}   1  20.00%   5.000 us   5.00%   5.000 us   5.000 us  mmio    memory 0xd0000000 read 4 bytes  work  [.] 0x4000-0x4fff\n\
         \u{20}   2  40.00%   4.000 us   4.00%   2.000 us   3.000 us  io      port 0x3f8 write 1 byte         work  [k] write_port\n\
         \u{20}   1  20.00%   1.000 us   1.00%   1.000 us   1.000 us  cpuid   -                               work  [k] write_port\n\
         \n"
    );
    let short = report::render(&args("--sort cpu --top 1", &path)).unwrap();
    assert!(
        short.ends_with("  CPU\n    4  80.00%  95.000 us  95.00%  23.750 us  90.000 us  0\n(1 more: --top 2)\n\n"),
        "{short}"
    );
}

#[test]
fn json_has_every_row_and_the_bytes() {
    let (_dir, path) = recorded(true, &[(Format::Exits, packets())]);
    let report = json("--json --sort reason,symbol --top 1", &path);
    assert_eq!(report["complete"], true);
    let trace = &report["traces"][0];
    for (key, expected) in [
        ("exits", 5),
        ("total_ns", 100_000),
        ("cut", 1),
        ("produced_bytes", 10_000),
        ("lost_bytes", 192),
        ("written_bytes", 512),
        ("unreadable_pages", 0),
    ] {
        assert_eq!(trace[key], expected, "{key}");
    }
    let table = &trace["tables"][0];
    assert_eq!(table["keys"], serde_json::json!(["reason", "symbol"]));
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[2]["reason"], "io");
    assert_eq!(rows[2]["symbol"], "[k] write_port");
    assert_eq!((&rows[2]["exits"], &rows[2]["mean_ns"]), (&2.into(), &2_000.into()));
}

#[test]
fn truncated_recording_takes_loss_from_packets() {
    let (_dir, path) = recorded(false, &[(Format::Exits, packets())]);
    let report = json("--json", &path);
    assert_eq!(report["complete"], false);
    assert_eq!(report["traces"][0]["lost_bytes"], 192);
    assert_eq!(report["traces"][0]["produced_bytes"], 512 + 192);
    let text = report::render(&args("", &path)).unwrap();
    assert!(text.contains("The recording is truncated."), "{text}");
}

#[test]
fn garbage_costs_a_page_and_is_reported() {
    let mut stream = packets().concat();
    stream.resize(4096, 0xee);
    stream.extend(sync(8, 9, 0));
    stream.extend(exit(0, 4, 1).bytes());
    let (_dir, path) = recorded(true, &[(Format::Exits, vec![stream])]);
    let report = json("--json", &path);
    assert_eq!(report["traces"][0]["unreadable_pages"], 1);
    assert_eq!(report["traces"][0]["exits"], 6);
    let text = report::render(&args("", &path)).unwrap();
    assert!(text.contains("# 1 unreadable pages."), "{text}");
}

#[test]
fn recordings_without_exits_name_what_to_do() {
    let (_dir, path) = recorded(true, &[]);
    let error = report::render(&args("", &path)).unwrap_err().to_string();
    assert!(error.contains("vperf exits record"), "{error}");
    let (_dir, path) = recorded(true, &[(Format::Samples, Vec::new())]);
    assert!(report::render(&args("", &path)).is_err());
    let error = report::render(&args("", &path.with_extension("none"))).unwrap_err();
    assert!(error.to_string().contains("name it with -i"), "{error}");
}

#[test]
fn timeline_is_chrome_trace_json() {
    let traces = [(Format::Exits, packets()), (Format::Samples, Vec::new()), (Format::Exits, Vec::new())];
    let (dir, input) = recorded(true, &traces);
    let output = dir.path().join("trace.json");
    timeline::run(&timeline::TimelineArgs { input, output: output.clone() }).unwrap();
    let trace: Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |ph: &str| -> Vec<&Value> { events.iter().filter(|event| event["ph"] == ph).collect() };
    let exits = of("X");
    assert_eq!(exits.len(), 5);
    // The time axis begins at 5 ns, the time of the first sync.
    let expected = serde_json::json!({
        "name": "io", "ph": "X", "pid": 0, "tid": 0, "ts": 5.995, "dur": 1.0,
        "args": {
            "what": "port 0x3f8 write 1 byte", "ip": "0xf010", "symbol": "[k] write_port",
            "task": "work", "pid": 7, "tid": 8,
        },
    });
    assert_eq!(exits[0], &expected);
    assert_eq!(exits[2]["tid"], 1);
    assert_eq!(exits[4]["args"]["cut"], true);
    let named = of("M");
    let names: Vec<(&str, &str)> =
        named.iter().filter_map(|event| Some((event["name"].as_str()?, event["args"]["name"].as_str()?))).collect();
    assert_eq!(
        names,
        [
            ("process_name", "trace-0 of all CPUs"),
            ("process_name", "trace-2 of all CPUs"),
            ("thread_name", "vCPU 0"),
            ("thread_name", "vCPU 1"),
        ]
    );
    // An empty recording has a timeline, too. An unwritable file is named in the error.
    let (dir, input) = recorded(true, &[(Format::Exits, Vec::new())]);
    let run = |output: &std::path::Path| {
        timeline::run(&timeline::TimelineArgs { input: input.clone(), output: output.into() })
    };
    let output = dir.path().join("empty.json");
    run(&output).unwrap();
    let empty: Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    assert_eq!(empty["traceEvents"].as_array().map(Vec::len), Some(1));
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
