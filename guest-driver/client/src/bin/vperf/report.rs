//! `vperf report`: the hot functions of a recording.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use vpmu_profile::{Names, Profile, ReadError};

use crate::call_tree::{Call, Direction};
use crate::format::{Align, grouped, table};
use crate::labels::{Key, name};
use crate::profile::{EventProfile, Row, View, has_chains, profiles};

/// Show the functions that the samples of a recording hit: one of vperf, of perf, or of the host.
///
/// `[.]` marks a function of a program, `[k]` a function of the kernel. The names of a program's
/// functions come from its file, so run the report on the machine that was recorded. Where a name is
/// unknown, the file is shown in brackets.
///
/// With --call-graph, for a recording made with -g, each function is shown below its caller, with
/// its own share (SELF) and its share with all callees (CHILDREN); with --call-graph=up, callers
/// are shown below the functions that they called.
///
/// Examples:
///   vperf report
///   vperf report --call-graph
///   vperf report --children --sort symbol --limit 10
///   vperf report -i io.data --sort comm,cpu --json
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ReportArgs {
    /// The recording to read.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    input: PathBuf,
    /// Group samples by these fields.
    #[arg(long, value_enum, value_name = "KEY,...", value_delimiter = ',',
          default_values = ["comm", "object", "symbol"])]
    sort: Vec<Key>,
    /// Show the call tree instead: down, from the outermost callers to the functions that they call,
    /// or up, from the sampled functions to their callers.
    #[arg(short = 'g', long, value_enum, value_name = "DIRECTION", num_args = 0..=1,
          require_equals = true, default_missing_value = "down")]
    call_graph: Option<Direction>,
    /// Also show each line's share with all callees, and sort by this share.
    #[arg(long, conflicts_with = "call_graph")]
    children: bool,
    /// Omit calls below this percentage from the tree. JSON has all calls.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.5, value_parser = percent)]
    least: f64,
    /// Show at most this many lines of each event.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// An error of the report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(
        "{}: the recording has no call chains: record them with `vperf record -g`", .0.display()
    )]
    NoChains(PathBuf),
    #[error("cannot write the report")]
    Write(#[source] io::Error),
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err("not a number from 0 to 100".into()),
    }
}

/// An error of reading a recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("{}{}", path.display(), hint(source))]
    Open { path: PathBuf, source: io::Error },
    #[error("{}: it must be a recording, which is a regular file", .0.display())]
    NotFile(PathBuf),
    #[error("{}", path.display())]
    Read { path: PathBuf, source: ReadError },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => " (record one with `vperf record -- COMMAND`, or name it with -i)",
        _ => "",
    }
}

/// Reads a recording. Functions that it does not name are named by this machine's files.
pub(crate) fn read(path: &Path) -> Result<Profile, OpenError> {
    let open = |source| OpenError::Open { path: path.to_owned(), source };
    let file = File::open(path).map_err(open)?;
    if !file.metadata().map_err(open)?.is_file() {
        return Err(OpenError::NotFile(path.to_owned()));
    }
    Profile::read(file, Names::here()).map_err(|source| OpenError::Read { path: path.to_owned(), source })
}

#[derive(serde::Serialize)]
struct Report<'a> {
    command: &'a str,
    samples: usize,
    lost: u64,
    events: &'a [EventProfile],
}

pub(crate) fn run(args: &ReportArgs) -> Result<(), ReportError> {
    let recording = read(&args.input)?;
    let view = View { children: args.children, calls: args.call_graph };
    let wants_chains = view.children || view.calls.is_some();
    if wants_chains && !recording.samples.is_empty() && !has_chains(&recording) {
        return Err(ReportError::NoChains(args.input.clone()));
    }
    let mut profiles = profiles(&recording, &args.sort, view);
    let limit = args.limit.unwrap_or(usize::MAX);
    for profile in &mut profiles {
        profile.rows.truncate(limit);
        if let Some(calls) = &mut profile.calls {
            calls.truncate(limit);
        }
    }
    let text = if args.json {
        let report = Report {
            command: &recording.command,
            samples: recording.samples.len(),
            lost: profiles.iter().fold(recording.lost, |sum, profile| sum.saturating_add(profile.lost)),
            events: &profiles,
        };
        serde_json::to_string(&report).map_err(|error| ReportError::Write(error.into()))? + "\n"
    } else {
        to_text(&recording, &profiles, args)
    };
    io::stdout().write_all(text.as_bytes()).map_err(ReportError::Write)
}

fn to_text(recording: &Profile, profiles: &[EventProfile], args: &ReportArgs) -> String {
    let mut text = String::new();
    if !recording.command.is_empty() {
        text.push_str(&format!("# Recorded by: {}\n", recording.command));
    }
    let (kernel, _) = recording.nameless;
    if kernel > 0 {
        text.push_str(&format!(
            "# {} frames of the kernel have no name: record as root, or set kernel.kptr_restrict to 0.\n",
            grouped(kernel)
        ));
    }
    for profile in profiles {
        let every = every(profile);
        let host = if profile.guest_only { "left out" } else { "included" };
        text.push_str(&format!(
            "#\n# {}: {} samples{every}, {} lost, host's work {host}\n",
            profile.event,
            grouped(profile.samples),
            grouped(profile.lost),
        ));
        if profile.are_exits {
            text.push_str("# `vperf exits report` shows their reasons and times.\n");
        }
        if profile.throttled > 0 {
            text.push_str(&format!("# Throttled {} times: samples are missing.\n", grouped(profile.throttled)));
        }
        text.push('\n');
        match &profile.calls {
            Some(calls) => text.push_str(&to_tree(calls, args)),
            None => text.push_str(&rows_table(&profile.rows, &args.sort, args.children)),
        }
        text.push('\n');
    }
    text
}

/// The sampling period as text, after a comma; empty if it is unknown.
fn every(profile: &EventProfile) -> String {
    let every = grouped(profile.every);
    match (profile.every, profile.freq, profile.unit) {
        (0, ..) => String::new(),
        (_, true, _) => format!(", about {every} a second"),
        (_, false, "") => format!(", one every {every}"),
        (_, false, unit) => format!(", one every {every} {unit}"),
    }
}

/// Rows as a table with column heads.
pub(crate) fn rows_table(rows: &[Row], keys: &[Key], children: bool) -> String {
    let mut header = vec!["SHARE".to_owned(), "SAMPLES".to_owned()];
    if children {
        header[0] = "SELF".into();
        header.insert(0, "CHILDREN".into());
    }
    let numbers = header.len();
    header.extend(keys.iter().map(|&key| name(key).to_uppercase()));
    let mut lines = vec![header];
    for row in rows {
        let with_children = row.children_percent.map(|share| format!("{share:.2}%"));
        let mut cells: Vec<String> = with_children.into_iter().collect();
        cells.extend([format!("{:.2}%", row.percent), grouped(row.samples)]);
        cells.extend(row.cells.iter().cloned());
        lines.push(cells);
    }
    let mut columns = vec![Align::Right; numbers];
    columns.resize(numbers + keys.len(), Align::Left);
    table(&columns, &lines)
}

/// Formats a call tree. Omits calls below the minimum share. This also omits their subtrees, in
/// which no share is larger.
fn to_tree(calls: &[Call], args: &ReportArgs) -> String {
    // An upward tree has no SELF column: it would repeat SHARE for sampled functions, and be zero
    // for their callers.
    let up = args.call_graph == Some(Direction::Up);
    let heads: &[&str] = if up { &["SHARE", "CALLED FROM"] } else { &["CHILDREN", "SELF", "CALLS"] };
    let mut rows = vec![heads.iter().map(|&head| head.to_owned()).collect()];
    let shown = calls.iter().filter(|call| call.percent >= args.least);
    rows.extend(shown.map(|call| {
        let mut cells = vec![format!("{:.2}%", call.percent)];
        if !up {
            cells.push(format!("{:.2}%", call.self_percent));
        }
        cells.push("  ".repeat(call.depth) + &call.name);
        cells
    }));
    let left_out = calls.len() + 1 - rows.len();
    let mut columns = vec![Align::Right; heads.len() - 1];
    columns.push(Align::Left);
    let mut text = table(&columns, &rows);
    if left_out > 0 {
        text.push_str(&format!("({left_out} calls with less than {}% each are left out)\n", args.least));
    }
    text
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
