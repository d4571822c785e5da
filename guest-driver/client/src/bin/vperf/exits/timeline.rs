//! `vperf exits timeline`: exits on a time axis, for Chrome's trace viewer and Perfetto.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vpmu_client::trace::Exit;

use super::reasons;
use super::recorded::{Labels, Recorded, RecordedError};
use crate::data::Processor;
use crate::format::grouped;
use crate::names::Key;
use crate::symbols::Programs;

/// Write exits on a time axis, for chrome://tracing or ui.perfetto.dev.
///
/// Each CPU is a line. Each exit is a bar, labelled with its reason, access and task. The bar's
/// length is the time that the CPU was outside the guest.
///
/// Examples:
///   vperf exits timeline
///   vperf exits timeline -i boot.data -o boot.json
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct TimelineArgs {
    /// The recording to read.
    #[arg(short, long, value_name = "FILE", default_value = "vperf.data")]
    pub(super) input: PathBuf,
    /// The file to write.
    #[arg(short, long, value_name = "FILE", default_value = "trace.json")]
    pub(super) output: PathBuf,
}

/// An error of the timeline.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TimelineError {
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    #[error("{}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// An entry of the timeline, with the format's short names.
#[derive(Debug, Serialize)]
struct Event<'a> {
    name: &'a str,
    /// `X` for an interval, `M` for the name of a process or thread.
    ph: char,
    /// The trace.
    pid: usize,
    /// The CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<u32>,
    /// The start, in microseconds. `dur`, the duration, is also in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    args: Arguments<'a>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Arguments<'a> {
    Name {
        name: &'a str,
    },
    Exit {
        #[serde(skip_serializing_if = "String::is_empty")]
        what: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        ip: Option<String>,
        symbol: &'a str,
        task: &'a str,
        pid: u32,
        tid: u32,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        cut: bool,
    },
}

pub(super) fn run(args: &TimelineArgs) -> Result<(), TimelineError> {
    let recorded = Recorded::read(&args.input)?;
    let error = |source| TimelineError::Write { path: args.output.clone(), source };
    let mut file = BufWriter::new(File::create(&args.output).map_err(error)?);
    let exits = write(&recorded, &mut file)?.map_err(error)?;
    let _ = writeln!(
        io::stderr(),
        "vperf: {} exits written to {}: open it in chrome://tracing or ui.perfetto.dev",
        grouped(exits),
        args.output.display()
    );
    Ok(())
}

/// Writes the timeline and returns the number of exits. The outer error comes from reading the
/// recording, the inner error from writing to `file`.
fn write(recorded: &Recorded, file: &mut impl Write) -> Result<io::Result<u64>, TimelineError> {
    let mut programs = Programs::default();
    let mut labels = recorded.labels(&mut programs);
    let mut seen = BTreeSet::new();
    let mut exits = 0u64;
    let mut failed = file.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[").err();
    let mut separator = "\n";
    let mut put = |failed: &mut Option<io::Error>, event: &Event<'_>| {
        if failed.is_none() {
            let written =
                file.write_all(separator.as_bytes()).and_then(|()| Ok(serde_json::to_writer(&mut *file, event)?));
            *failed = written.err();
            separator = ",\n";
        }
    };
    recorded.exits(|trace, exit| {
        let processor = recorded.traces[trace].line.processor;
        seen.insert((trace, exit.vcpu()));
        exits += 1;
        with_event(trace, exit, processor, recorded.began, &mut labels, |event| {
            put(&mut failed, event);
        });
    })?;
    let traces = recorded.traces.iter().enumerate();
    for (trace, line) in traces.filter(|(_, trace)| trace.has_exits()) {
        let name = format!("{} of {}", line.line.name, recorded.target);
        put(&mut failed, &named("process_name", trace, None, &name));
    }
    for (trace, cpu) in seen {
        let name = format!("vCPU {cpu}");
        put(&mut failed, &named("thread_name", trace, Some(cpu), &name));
    }
    let ended = failed.map_or_else(|| file.write_all(b"\n]}\n").and_then(|()| file.flush()), Err);
    Ok(ended.map(|()| exits))
}

fn named<'a>(what: &'a str, trace: usize, tid: Option<u32>, name: &'a str) -> Event<'a> {
    Event { name: what, ph: 'M', pid: trace, tid, ts: None, dur: None, args: Arguments::Name { name } }
}

fn with_event(
    trace: usize,
    exit: &Exit,
    processor: Processor,
    began: u64,
    labels: &mut Labels<'_>,
    put: impl FnOnce(&Event<'_>),
) {
    let reason = reasons::reason(exit, processor);
    let symbol = labels.of(exit, Key::Symbol).to_owned();
    let task = labels.of(exit, Key::Comm);
    put(&Event {
        name: &reason,
        ph: 'X',
        pid: trace,
        tid: Some(exit.vcpu()),
        // The result may be negative: packets of two CPUs in one area may be slightly out of order,
        // so that some precede the origin.
        ts: Some(microseconds(exit.time().wrapping_sub(began).cast_signed())),
        dur: Some(microseconds(exit.outside().cast_signed())),
        args: Arguments::Exit {
            what: reasons::what(exit, processor),
            ip: exit.ip().map(|ip| format!("{ip:#x}")),
            symbol: &symbol,
            task,
            pid: exit.pid(),
            tid: exit.tid(),
            cut: exit.is_cut(),
        },
    });
}

#[expect(clippy::cast_precision_loss, reason = "exact to the nanosecond for a hundred days")]
fn microseconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1000.0
}
