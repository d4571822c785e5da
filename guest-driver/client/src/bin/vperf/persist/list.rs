//! `vperf persist ls`: lists persistent events.

use std::io::{self, Write};

use clap::Args;
use vpmu_client::{Catalogue, Persistent, Vpmu};

use super::PersistError;
use crate::format::{Align, grouped, table};

const PAGE: u64 = 4096;

/// List persistent events.
///
/// RING is the size of an event's ring. KEEPS shows whether a full ring keeps the newest samples or
/// the unread ones. A ring in the host's memory outlives a reset of this machine (OUTLIVES RESET).
/// COUNT needs CAP_PERFMON.
#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

/// A displayed event.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
struct Row {
    id: u64,
    name: String,
    cpu: u32,
    event: String,
    /// Events between samples, or samples per second; zero if the event only counts.
    period: u64,
    freq: bool,
    enabled: bool,
    /// Bytes of data; null without a ring.
    ring: Option<u64>,
    overwrites: bool,
    outlives_reset: bool,
    operators: bool,
    /// Null if this user lacks the permission.
    count: Option<u64>,
}

impl Row {
    fn new(catalogue: &Catalogue, pmu_type: u32, event: &Persistent, count: Option<u64>) -> Self {
        Self {
            id: event.id,
            name: event.name.clone(),
            cpu: event.cpu,
            event: catalogue.spec(pmu_type, &event.attr),
            period: event.attr.period,
            freq: event.attr.freq,
            enabled: !event.attr.disabled,
            ring: event.data_pages.map(|pages| u64::from(pages) * PAGE),
            overwrites: event.overwrites,
            outlives_reset: event.outlives_reset,
            operators: event.is_operators,
            count,
        }
    }

    fn cells(&self) -> Vec<String> {
        let samples = match (self.period, self.freq) {
            (0, _) => "-".into(),
            (rate, true) => format!("{} Hz", grouped(rate)),
            (period, false) => format!("1 in {}", grouped(period)),
        };
        let keeps = match (self.ring, self.overwrites) {
            (None, _) => "-",
            (_, true) => "newest",
            (_, false) => "unread",
        };
        vec![
            self.id.to_string(),
            self.name.clone(),
            self.cpu.to_string(),
            self.event.clone(),
            samples,
            self.ring.map_or_else(|| "-".into(), |bytes| format!("{} KiB", grouped(bytes >> 10))),
            keeps.into(),
            if self.outlives_reset { "yes" } else { "no" }.into(),
            if self.enabled { "on" } else { "off" }.into(),
            if self.operators { "host" } else { "guest" }.into(),
            self.count.map_or_else(|| "-".into(), grouped),
        ]
    }
}

fn to_table(rows: &[Row]) -> String {
    let header =
        ["ID", "NAME", "CPU", "EVENT", "SAMPLES", "RING", "KEEPS", "OUTLIVES RESET", "STATE", "OWNER", "COUNT"];
    let mut cells = vec![header.map(String::from).to_vec()];
    cells.extend(rows.iter().map(Row::cells));
    let mut columns = [Align::Left; 11];
    for right in [0, 2, 4, 5, 10] {
        columns[right] = Align::Right;
    }
    table(&columns, &cells)
}

/// Prints the events as a table or JSON.
pub(super) fn show(vpmu: &Vpmu, events: &[Persistent], as_json: bool) -> Result<(), PersistError> {
    let count = |event| vpmu.reopen(event).ok()?.read().ok();
    let rows: Vec<Row> = events
        .iter()
        .map(|event| {
            let count = count(event).map(|reading| reading.value);
            Row::new(vpmu.catalogue(), vpmu.info().pmu_type, event, count)
        })
        .collect();
    let text = if as_json {
        serde_json::to_string(&rows).map_err(|error| PersistError::Write(error.into()))? + "\n"
    } else {
        to_table(&rows)
    };
    io::stdout().write_all(text.as_bytes()).map_err(PersistError::Write)
}

pub(super) fn run(args: &ListArgs) -> Result<(), PersistError> {
    let vpmu = Vpmu::open()?;
    let events = vpmu.persistent()?;
    if events.is_empty() && !args.json {
        crate::recording::say("no persistent events: `vperf persist new` makes them");
        return Ok(());
    }
    show(&vpmu, &events, args.json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_has_a_line() {
        let flight = Row {
            id: 5,
            name: "flight-0".into(),
            cpu: 0,
            event: "task-clock".into(),
            period: 1000,
            freq: true,
            enabled: true,
            ring: Some(256 << 10),
            overwrites: true,
            outlives_reset: true,
            operators: true,
            count: Some(1_234_567),
        };
        let count = Row {
            id: 12,
            name: "event12".into(),
            cpu: 1,
            event: "mark=7".into(),
            period: 0,
            freq: false,
            enabled: false,
            ring: None,
            overwrites: false,
            outlives_reset: false,
            operators: false,
            count: None,
        };
        let unread = Row { period: 1_000_000, ring: Some(4096), ..count.clone() };
        assert_eq!(
            to_table(&[flight, count, unread]),
            "ID  NAME      CPU  EVENT              SAMPLES     RING  KEEPS   OUTLIVES RESET  STATE  OWNER      COUNT\n \
             5  flight-0    0  task-clock        1,000 Hz  256 KiB  newest  yes             on     host   1,234,567\n\
             12  event12     1  mark=7                   -        -  -       no              off    guest          -\n\
             12  event12     1  mark=7      1 in 1,000,000    4 KiB  unread  no              off    guest          -\n"
        );
    }
}
