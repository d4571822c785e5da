//! `vperf report`: the hot functions of a recording.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;

use crate::data::{self, DataError};
use crate::format::{Align, grouped, table};
use crate::names::{Key, name};
use crate::profile::{Profile, Recording};

/// Show the functions in which the samples of `vperf record` lie.
///
/// `[.]` is a function of a program, whose file is looked into for names, `[k]` one of the kernel.
/// An address that has no name shows as the page it lies in. Run it where it was recorded:
/// that is where the programs are.
///
/// Examples:
///   vperf report
///   vperf report --sort symbol --limit 10
///   vperf report -i io.data --sort comm,cpu --json
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ReportArgs {
    /// The recording.
    #[arg(short, long, value_name = "FILE", default_value = "vperf.data")]
    input: PathBuf,
    /// What samples are told apart by.
    #[arg(long, value_enum, value_name = "KEY,...", value_delimiter = ',',
          default_values = ["comm", "object", "symbol"])]
    sort: Vec<Key>,
    /// Show so many lines of each event.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// As one JSON object.
    #[arg(long)]
    json: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error("{}{}", path.display(), hint(source))]
    Data { path: PathBuf, source: DataError },
    #[error("writing the report")]
    Write(#[source] io::Error),
}

fn hint(error: &DataError) -> &'static str {
    match error {
        DataError::Open(error) if error.kind() == io::ErrorKind::NotFound => {
            " (record one with `vperf record -- COMMAND`, or name it with -i)"
        }
        _ => "",
    }
}

#[derive(serde::Serialize)]
struct Report<'a> {
    target: &'a str,
    complete: bool,
    samples: usize,
    lost: u64,
    events: &'a [Profile],
}

pub(crate) fn run(args: &ReportArgs) -> Result<(), ReportError> {
    let mut recording = Recording::default();
    let cut = data::read(&args.input, |line| recording.add(line)).map_err(|source| {
        ReportError::Data {
            path: args.input.clone(),
            source,
        }
    })?;
    recording.complete &= !cut;
    let mut profiles = recording.profiles(&args.sort);
    for profile in &mut profiles {
        profile.rows.truncate(args.limit.unwrap_or(usize::MAX));
    }
    let text = if args.json {
        let report = Report {
            target: &recording.target,
            complete: recording.complete,
            samples: recording.sample_count(),
            lost: profiles
                .iter()
                .fold(0, |sum, profile| sum.saturating_add(profile.lost)),
            events: &profiles,
        };
        serde_json::to_string(&report).map_err(|error| ReportError::Write(error.into()))? + "\n"
    } else {
        to_text(&recording, &profiles, &args.sort)
    };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(ReportError::Write)
}

fn to_text(recording: &Recording, profiles: &[Profile], keys: &[Key]) -> String {
    let mut text = format!("# Recording of {}\n", recording.target);
    if !recording.complete {
        text.push_str("# It was cut off before its end: this is what it holds.\n");
    }
    if recording.kernel_is_hidden() {
        text.push_str(
            "# The kernel hid its addresses: record as root, or set kernel.kptr_restrict to 0.\n",
        );
    }
    for profile in profiles {
        let unit = if profile.unit.is_empty() { "" } else { " " };
        let host = if profile.guest_only {
            "left out"
        } else {
            "included"
        };
        text.push_str(&format!(
            "#\n# {}: {} samples, one every {}{unit}{}, {} lost\n# counted by {}, host's work {host}\n\n",
            profile.event,
            grouped(profile.samples),
            grouped(profile.every),
            profile.unit,
            grouped(profile.lost),
            profile.source,
        ));
        text.push_str(&to_table(profile, keys));
        text.push('\n');
    }
    text
}

fn to_table(profile: &Profile, keys: &[Key]) -> String {
    let mut header = vec!["SHARE".to_owned(), "SAMPLES".to_owned()];
    header.extend(keys.iter().map(|&key| name(key).to_uppercase()));
    let mut rows = vec![header];
    for row in &profile.rows {
        let mut cells = vec![format!("{:.2}%", row.percent), grouped(row.samples)];
        cells.extend(row.cells.iter().cloned());
        rows.push(cells);
    }
    let mut columns = vec![Align::Right; 2];
    columns.resize(2 + keys.len(), Align::Left);
    table(&columns, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{EventLine, Header, Line, Sample};

    fn recording() -> Recording {
        let mut recording = Recording::default();
        recording.add(Line::Header(Header {
            version: 1,
            target: "'x'".into(),
        }));
        recording.add(Line::Event(EventLine {
            name: "task-clock".into(),
            unit: "ns".into(),
            period: 1_000_000,
            source: "a source".into(),
            guest_only: false,
        }));
        for pid in [7, 7, 7, 9] {
            recording.add(Line::Sample(Sample(
                0, 0x1000, pid, pid, 1, 0, 1_000_000, true,
            )));
        }
        recording
    }

    #[test]
    fn the_report_says_what_it_rests_on() {
        let recording = recording();
        let keys = [Key::Pid, Key::Symbol];
        assert_eq!(
            to_text(&recording, &recording.profiles(&keys), &keys),
            "# Recording of 'x'\n\
             # It was cut off before its end: this is what it holds.\n\
             #\n# task-clock: 4 samples, one every 1,000,000 ns, 0 lost\n\
             # counted by a source, host's work included\n\n\
             \u{20}SHARE  SAMPLES  PID  SYMBOL\n\
             75.00%        3  7    [.] 0x1000-0x1fff\n\
             25.00%        1  9    [.] 0x1000-0x1fff\n\n"
        );
    }

    #[test]
    fn json_names_the_keys() {
        let profiles = recording().profiles(&[Key::Symbol]);
        let json = serde_json::to_value(&profiles).unwrap();
        assert_eq!(json[0]["rows"][0]["symbol"], "[.] 0x1000-0x1fff");
        assert_eq!(json[0]["rows"][0]["percent"], 100.0);
        assert_eq!(json[0]["rows"][0]["samples"], 4);
    }
}
