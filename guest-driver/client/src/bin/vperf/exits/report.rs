//! `vperf exits report`: exits by reason, duration and cause.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::recorded::{Recorded, RecordedError};
use super::totals::{Key, Row, Totals, name};
use crate::format::{Align, duration, grouped, table};

/// Columns of the table of causes.
const CALLERS: [Key; 4] = [Key::Reason, Key::What, Key::Task, Key::Symbol];
const DEFAULT_TOP: usize = 10;

/// Show why this machine's CPUs left the guest, for how long, and what they executed then.
///
/// The first table lists reasons; the second lists accesses with process and function. TIME is the
/// total time outside the guest; for a halt it is idle time. `[.]` marks a function of a program,
/// `[k]` a function of the kernel. The names of a program's functions come from its file, so run
/// the report on the machine that was recorded.
///
/// Examples:
///   vperf exits report
///   vperf exits report --sort task,reason --top 20
///   vperf exits report -i boot.data --json
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ReportArgs {
    /// The recording to read.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    input: PathBuf,
    /// Show one table, with exits grouped by these fields.
    #[arg(long, value_enum, value_name = "KEY,...", value_delimiter = ',')]
    sort: Vec<Key>,
    /// Show at most this many lines of each table.
    #[arg(long, alias = "limit", value_name = "N", default_value_t = DEFAULT_TOP)]
    top: usize,
    /// Print one JSON object with all lines of each table.
    #[arg(long)]
    json: bool,
}

/// An error of the report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    #[error("cannot write the report")]
    Write(#[source] io::Error),
}

#[derive(serde::Serialize)]
struct Report<'a> {
    command: &'a str,
    traces: Vec<Traced<'a>>,
}

/// The exits of one trace.
#[derive(Debug, serde::Serialize)]
struct Traced<'a> {
    trace: &'a str,
    snapshot: bool,
    exits: u64,
    total_ns: u64,
    cut: u64,
    lost: u64,
    tables: Vec<Table>,
}

#[derive(Debug, serde::Serialize)]
struct Table {
    #[serde(serialize_with = "names")]
    keys: Vec<Key>,
    rows: Vec<Row>,
}

fn names<S: serde::Serializer>(keys: &[Key], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(keys.iter().map(|&key| name(key)))
}

/// Shows the default report.
pub(super) fn show(input: &Path) -> Result<(), ReportError> {
    run(&ReportArgs { input: input.into(), sort: Vec::new(), top: DEFAULT_TOP, json: false })
}

pub(super) fn run(args: &ReportArgs) -> Result<(), ReportError> {
    let text = render(args)?;
    io::stdout().write_all(text.as_bytes()).map_err(ReportError::Write)
}

pub(super) fn render(args: &ReportArgs) -> Result<String, ReportError> {
    let recorded = Recorded::read(&args.input)?;
    let keys: Vec<Vec<Key>> =
        if args.sort.is_empty() { vec![vec![Key::Reason], CALLERS.to_vec()] } else { vec![args.sort.clone()] };
    let report = Report { command: recorded.command(), traces: add_up(&recorded, &keys) };
    if args.json {
        let json = serde_json::to_string(&report);
        return Ok(json.map_err(|error| ReportError::Write(error.into()))? + "\n");
    }
    Ok(to_text(&report, recorded.nameless(), args.top))
}

fn add_up<'a>(recorded: &'a Recorded, keys: &[Vec<Key>]) -> Vec<Traced<'a>> {
    let traces = recorded.traces().map(|(index, event)| {
        let mut totals: Vec<Totals> = keys.iter().map(|keys| Totals::by(keys)).collect();
        for exit in recorded.exits(index) {
            totals.iter_mut().for_each(|totals| totals.add(&exit, recorded.processor));
        }
        let all = totals.first().map(|totals| totals.all).unwrap_or_default();
        let tables = keys.iter().zip(totals).map(|(keys, totals)| Table { keys: keys.clone(), rows: totals.rows() });
        Traced {
            trace: &event.name,
            snapshot: event.is_newest_only,
            exits: all.exits,
            total_ns: all.total_ns,
            cut: all.cut,
            lost: event.lost,
            tables: tables.collect(),
        }
    });
    traces.collect()
}

fn to_text(report: &Report<'_>, nameless: u64, top: usize) -> String {
    let mut text = format!("# Recorded by: {}\n", report.command);
    if nameless > 0 {
        text.push_str(&format!(
            "# {} frames of the kernel have no name: record as root, or set kernel.kptr_restrict to 0.\n",
            grouped(nameless)
        ));
    }
    for trace in &report.traces {
        text.push_str(&heading(trace));
        for table in &trace.tables {
            text.push('\n');
            text.push_str(&to_table(table, top));
        }
        text.push('\n');
    }
    text
}

fn heading(trace: &Traced<'_>) -> String {
    let mut text = format!(
        "#\n# {}: {} exits, {} outside of the guest, {} lost\n",
        trace.trace,
        grouped(trace.exits),
        duration(trace.total_ns),
        grouped(trace.lost),
    );
    if trace.snapshot {
        text.push_str("# A snapshot: the newest exits only.\n");
    }
    if trace.cut > 0 {
        text.push_str(&format!(
            "# {} exits were not traced to their end: their times are lower bounds.\n",
            grouped(trace.cut)
        ));
    }
    text
}

fn to_table(table_of: &Table, top: usize) -> String {
    const HEADS: [&str; 6] = ["EXITS", "%EXITS", "TIME", "%TIME", "MEAN", "WORST"];
    let keys = table_of.keys.iter().map(|&key| name(key).to_uppercase());
    let mut lines = vec![HEADS.iter().map(|&head| head.to_owned()).chain(keys).collect()];
    for row in table_of.rows.iter().take(top) {
        let mut cells: Vec<String> = vec![
            grouped(row.exits),
            format!("{:.2}%", row.exits_percent),
            duration(row.total_ns),
            format!("{:.2}%", row.time_percent),
            duration(row.mean_ns),
            duration(row.worst_ns),
        ];
        cells.extend(row.cells.iter().map(|cell| match cell.as_str() {
            "" => "-".to_owned(),
            cell => cell.to_owned(),
        }));
        lines.push(cells);
    }
    let mut columns = vec![Align::Right; HEADS.len()];
    columns.resize(HEADS.len() + table_of.keys.len(), Align::Left);
    let mut text = table(&columns, &lines);
    let left_out = table_of.rows.len().saturating_sub(top);
    if left_out > 0 {
        text.push_str(&format!("({left_out} more: --top {})\n", table_of.rows.len()));
    }
    text
}
