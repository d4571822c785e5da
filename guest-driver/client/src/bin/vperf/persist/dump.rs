//! `vperf persist dump`: shows the contents of persistent events' rings while the events continue.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use vpmu_client::error::chain;
use vpmu_client::history::{HistoryError, RingSnapshot};
use vpmu_client::{History, Persistent, Vpmu};

use super::render::Rendering;
use super::{PersistError, named};
use crate::format::grouped;
use crate::recording::say;

/// Show what persistent events recorded.
///
/// The rings are read while the host writes them: the events continue, the records stay in the
/// rings, and other programs may read them at the same time. Each sample is a line with the process
/// (its present name, if it still runs), the thread, the CPU, seconds of the guest's clock, the
/// sample's period, the event's name, the value of a mark, and the address. If callers were
/// recorded, they follow, one per line.
#[derive(Debug, Args)]
pub(super) struct DumpArgs {
    /// Ids or names, as `vperf persist ls` shows them. [default: all that have a ring]
    #[arg(value_name = "ID|NAME")]
    events: Vec<String>,
    /// Write a file for `vperf report -i FILE` or `perf report` instead; an existing one is kept as FILE.old.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn run(args: &DumpArgs) -> Result<(), PersistError> {
    let vpmu = Vpmu::open()?;
    let mut events = named(&vpmu, &args.events)?;
    if args.events.is_empty() {
        events.retain(|event| event.data_pages.is_some_and(|pages| pages > 0));
    }
    let mut rendering = Rendering::new(&vpmu, &events);
    let mut unreadable = 0;
    for (index, event) in events.iter().enumerate() {
        let snapshot = match history(&vpmu, event) {
            // With all events selected, one failure must not hide the others.
            Err(error) if args.events.is_empty() => {
                say(&chain(&error));
                continue;
            }
            snapshot => snapshot?,
        };
        rendering.add_snapshot(index, &snapshot);
        unreadable += snapshot.unreadable;
    }
    if unreadable > 0 {
        say(&format!("{} records could not be parsed and are omitted", grouped(unreadable)));
    }
    let sums = rendering.sums();
    let Some(path) = &args.output else {
        let text = rendering.take_text(&vpmu)?;
        return io::stdout().write_all(text.as_bytes()).map_err(PersistError::Write);
    };
    rendering.write(&vpmu, path)?;
    say(&format!("{} samples written to {}, {} lost", grouped(sums.samples), path.display(), grouped(sums.lost)));
    Ok(())
}

/// Reads all records in the event's ring.
fn history(vpmu: &Vpmu, event: &Persistent) -> Result<RingSnapshot, PersistError> {
    let name = || event.name.clone();
    let pages = event.data_pages.filter(|&pages| pages > 0);
    let pages = pages.ok_or_else(|| PersistError::NoRing { name: name() })?;
    let handle = vpmu.reopen(event)?;
    let read = || -> Result<RingSnapshot, HistoryError> { History::map(&handle, pages, event.overwrites)?.read() };
    read().map_err(|source| PersistError::History { name: name(), source })
}
