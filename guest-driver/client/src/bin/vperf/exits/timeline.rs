//! `vperf exits timeline`: exits on a time axis, for Chrome's trace viewer and Perfetto.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::reasons;
use super::recorded::{NamedExit, Recorded, RecordedError};
use crate::format::grouped;

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
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
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
    let exits = write(&recorded, &mut file).map_err(error)?;
    let _ = writeln!(
        io::stderr(),
        "vperf: {} exits written to {}: open it in chrome://tracing or ui.perfetto.dev",
        grouped(exits),
        args.output.display()
    );
    Ok(())
}

/// Writes the timeline and returns the number of exits.
fn write(recorded: &Recorded, file: &mut impl Write) -> io::Result<u64> {
    file.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut exits = 0;
    let mut separator = "\n";
    let mut put = |event: &Event<'_>| {
        file.write_all(separator.as_bytes())?;
        separator = ",\n";
        Ok::<_, io::Error>(serde_json::to_writer(&mut *file, event)?)
    };
    for (trace, event) in recorded.traces() {
        let mut cpus = BTreeSet::new();
        for exit in recorded.exits(trace) {
            cpus.insert(exit.exit.vcpu());
            exits += 1;
            let reason = reasons::reason(exit.exit, recorded.processor);
            put(&bar(trace, &exit, &reason, recorded))?;
        }
        put(&named("process_name", trace, None, &event.name))?;
        for cpu in cpus {
            put(&named("thread_name", trace, Some(cpu), &format!("vCPU {cpu}")))?;
        }
    }
    file.write_all(b"\n]}\n")?;
    file.flush()?;
    Ok(exits)
}

fn named<'a>(what: &'a str, trace: usize, tid: Option<u32>, name: &'a str) -> Event<'a> {
    Event { name: what, ph: 'M', pid: trace, tid, ts: None, dur: None, args: Arguments::Name { name } }
}

fn bar<'a>(trace: usize, of: &'a NamedExit<'_>, reason: &'a str, recorded: &Recorded) -> Event<'a> {
    let exit = of.exit;
    Event {
        name: reason,
        ph: 'X',
        pid: trace,
        tid: Some(exit.vcpu()),
        ts: Some(microseconds(exit.time().wrapping_sub(recorded.began()))),
        dur: Some(microseconds(exit.outside())),
        args: Arguments::Exit {
            what: reasons::what(exit, recorded.processor),
            ip: exit.ip().map(|ip| format!("{ip:#x}")),
            symbol: &of.symbol,
            task: of.task,
            pid: exit.pid(),
            tid: exit.tid(),
            cut: exit.is_cut(),
        },
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact to the nanosecond for a hundred days")]
fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1000.0
}
