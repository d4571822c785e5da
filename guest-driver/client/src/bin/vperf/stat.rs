//! `vperf stat`: counts. `target` selects the measured tasks, `counts` formats the result.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use vpmu_client::device::DeviceError;
use vpmu_client::error::chain;
use vpmu_client::{Reading, Vpmu};

use crate::counts::{Count, Counts};
use crate::events::{Chosen, EventArgs, EventsError};
use crate::region::{Region, RegionArgs, RegionError};
use crate::session::Session;
use crate::target::{Opened, Target, TargetArgs, TargetError};
use crate::workload::WorkloadError;

/// Count events of a command, of tasks, or of CPUs.
///
/// The table goes to standard error, so that it does not mix with the command's output. JSON and
/// separated lines go to standard output, for programs. If an event was counted only part of the
/// time, the table shows that part as a percentage, and an estimate of the count for the whole
/// time. A star marks events whose source cannot exclude the host's work.
///
/// Examples:
///   vperf stat -- make -j2
///   vperf stat -e task-clock,exits-io -- dd if=/dev/zero of=/dev/vda count=1
///   vperf stat -e '{exits,tsc}' -a -- sleep 5
///   vperf stat -p 42 --json -o counts.json
///   vperf stat --from 7 --to 8 -- program       between the program's marks 7 and 8
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct StatArgs {
    #[command(flatten)]
    pub(crate) events: EventArgs,
    /// Print one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a line for each event, with this text between the fields: count, unit, event, the time
    /// in ns for which the event was counted, and that time as a percentage of the time for which
    /// it was enabled.
    #[arg(short = 'x', long, value_name = "SEPARATOR", conflicts_with = "json")]
    separator: Option<String>,
    /// Write the counts to a file instead.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    region: RegionArgs,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}

/// An error of counting.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StatError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("event {name:?}")]
    Open { name: String, source: vpmu_client::Error },
    #[error(transparent)]
    Events(#[from] EventsError),
    #[error("none of the default events can be counted here (last refusal: {0}): name events with -e")]
    NoDefault(String),
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("cannot write {}", path.display())]
    Output { path: PathBuf, source: io::Error },
    #[error("cannot write the counts")]
    Write(#[source] io::Error),
}

impl From<TargetError> for StatError {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Workload(error) => Self::Workload(error),
            error => Self::Target(error),
        }
    }
}

pub(crate) fn run(args: &StatArgs) -> Result<u8, StatError> {
    let vpmu = Vpmu::open()?;
    let mut chosen = args.events.to_count(&vpmu)?;
    for event in &mut chosen {
        event.attr = args.region.apply(event.attr.clone());
    }
    // Open the output before the measurement, so that a wrong path does not lose the counts.
    let mut output: Box<dyn Write> = match &args.output {
        None if args.json || args.separator.is_some() => Box::new(io::stdout()),
        None => Box::new(io::stderr()),
        Some(path) => Box::new(File::create(path).map_err(|source| StatError::Output { path: path.clone(), source })?),
    };
    let target = args.target.prepare()?;
    let (opened, refused) = open_all(&vpmu, &target, &chosen, args.events.explicit())?;
    let region = args.region.open(&vpmu, &target, &opened)?;
    let started = Instant::now();
    let marks = region.iter().flat_map(Region::events);
    let mut session = Session::start(target, opened.iter().chain(marks))?;
    while !session.wait(&[], None, &mut Vec::new())? {}
    let elapsed = started.elapsed();
    session.stop(&opened)?;
    let counts = Counts {
        target: args.target.describe() + &args.region.place(),
        elapsed_ns: u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
        region: region.as_ref().map(Region::passages).transpose()?,
        events: read_all(&chosen, &opened, refused),
        exit_code: session.finish()?,
    };
    let text = match &args.separator {
        _ if args.json => counts.to_json().map_err(|error| StatError::Write(error.into()))?,
        Some(separator) => counts.to_separated(separator),
        None => counts.to_table(),
    };
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(StatError::Write)?;
    Ok(counts.exit_code)
}

/// For each event, by index, the reason why it was refused.
type Refused = Vec<Option<String>>;

/// Opens the selected events. A refusal is an error only for an event that the user named.
fn open_all(
    vpmu: &Vpmu,
    target: &Target,
    chosen: &[Chosen],
    explicit: bool,
) -> Result<(Vec<Opened>, Refused), StatError> {
    let mut opened = Vec::new();
    let mut refused = Vec::new();
    for (index, event) in chosen.iter().enumerate() {
        let events = match event.leader {
            None => target.open(index, &event.attr, |_, attr| vpmu.open_event(attr)),
            Some(leader) => open_members(vpmu, target, index, event, &of(&opened, leader)),
        };
        match events {
            Ok(events) => {
                opened.extend(events);
                refused.push(None);
            }
            Err(source) if explicit => {
                return Err(StatError::Open { name: event.name.clone(), source });
            }
            Err(error) => refused.push(Some(chain(&error))),
        }
    }
    if opened.is_empty() {
        let last = refused.pop().flatten();
        return Err(StatError::NoDefault(last.unwrap_or_else(|| "the catalogue is empty".into())));
    }
    Ok((opened, refused))
}

/// The `index`th event on its targets, in order.
fn of(opened: &[Opened], index: usize) -> Vec<&Opened> {
    opened.iter().filter(|opened| opened.index == index).collect()
}

/// Opens an event as a member of its leader's group, on each target of the leader. Members are
/// opened enabled: they count while their leader is enabled.
fn open_members(
    vpmu: &Vpmu,
    target: &Target,
    index: usize,
    event: &Chosen,
    leaders: &[&Opened],
) -> Result<Vec<Opened>, vpmu_client::Error> {
    target.open(index, &event.attr, |place, attr| {
        let leader = leaders.iter().find(|leader| leader.place == place);
        let Some(leader) = leader else {
            // The CPU came online after the leader was opened. The event counts there without a
            // leader, and starts when the other events start.
            return vpmu.open_event(attr);
        };
        let member = attr.clone().with(|attr| {
            attr.disabled = false;
            attr.enable_on_exec = false;
        });
        vpmu.open_member(&member, &leader.event)
    })
}

/// Adds up each event's counts. An event that can no longer be read is reported as refused.
fn read_all(chosen: &[Chosen], opened: &[Opened], mut refused: Refused) -> Vec<Count> {
    let mut sums = vec![Reading::default(); chosen.len()];
    for opened in opened {
        match opened.event.read() {
            Ok(reading) => add(&mut sums[opened.index], &reading),
            Err(error) => refused[opened.index] = Some(chain(&error)),
        }
    }
    let counts = chosen.iter().zip(sums).zip(refused);
    counts.map(|((event, sum), refused)| Count::new(event, sum, refused)).collect()
}

fn add(sum: &mut Reading, reading: &Reading) {
    sum.value = sum.value.wrapping_add(reading.value);
    sum.time_enabled = sum.time_enabled.saturating_add(reading.time_enabled);
    sum.time_running = sum.time_running.saturating_add(reading.time_running);
}
