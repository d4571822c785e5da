//! `vperf list`: the events that this host can count.

use std::io::{self, Write};

use clap::Args;
use vpmu_client::device::DeviceError;
use vpmu_client::trace::Format;
use vpmu_client::{Entry, Info, Vpmu};

use crate::format::{Align, table};

/// Show what this host can count.
///
/// For each event, the table shows its name for -e, its source, and exactly what it counts. It also
/// shows what can be recorded (samples with vperf record, every exit with vperf exits), and whether
/// the event excludes or includes the host's work for this machine. An event that is not in the
/// table cannot be counted here.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print one JSON object: "device", and "events" with their names, units and sources.
    #[arg(long)]
    json: bool,
}

/// An error of the list.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cannot write the list")]
    Write(#[source] io::Error),
}

#[derive(serde::Serialize)]
struct List<'a> {
    device: &'a Info,
    events: &'a [Entry],
}

pub(crate) fn run(args: &ListArgs) -> Result<(), ListError> {
    let vpmu = Vpmu::open()?;
    let entries = vpmu.catalogue().entries();
    let text = if args.json {
        let list = List { device: vpmu.info(), events: entries };
        let json = serde_json::to_string(&list).map_err(|error| ListError::Write(error.into()))?;
        json + "\n"
    } else {
        to_table(entries)
    };
    io::stdout().write_all(text.as_bytes()).map_err(ListError::Write)
}

fn to_table(entries: &[Entry]) -> String {
    let header = ["EVENT", "UNIT", "RECORDS", "HOST WORK", "SOURCE", "COUNTS"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(entries.iter().map(|entry| {
        let value = if entry.takes_value { "=N" } else { "" };
        vec![
            format!("{}{value}", entry.name),
            entry.unit.clone(),
            records(entry).into(),
            if entry.guest_only { "left out" } else { "counted" }.into(),
            entry.source.clone(),
            entry.counts.clone(),
        ]
    }));
    table(&[Align::Left; 6], &rows)
}

/// The kind of records that the event makes.
fn records(entry: &Entry) -> &'static str {
    match entry.trace {
        Some(Format::Exits) => "every exit",
        Some(_) => "trace",
        None if entry.samples => "samples",
        None => "-",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_has_a_line() {
        let mark = Entry {
            name: "mark".into(),
            unit: String::new(),
            counts: "marks of the value N".into(),
            source: "device".into(),
            samples: true,
            guest_only: true,
            takes_value: true,
            excludes: false,
            trace: None,
            kind: 0x104,
            config: 0,
        };
        let trace = Entry {
            name: "exit-trace-user".into(),
            unit: "bytes".into(),
            counts: "packets".into(),
            takes_value: false,
            trace: Some(Format::Exits),
            ..mark.clone()
        };
        assert_eq!(
            to_table(&[mark, trace]),
            "EVENT            UNIT   RECORDS     HOST WORK  SOURCE  COUNTS\n\
             mark=N                  samples     left out   device  marks of the value N\n\
             exit-trace-user  bytes  every exit  left out   device  packets\n"
        );
    }
}
