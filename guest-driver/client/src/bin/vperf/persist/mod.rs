//! `vperf persist`: events that outlive a program. This file has the subcommands; `list` displays events, and `render`
//! displays their records.

mod attach;
mod dump;
mod list;
mod new;
mod render;

use std::io;

use clap::{Args, Subcommand};
use vpmu_client::device::DeviceError;
use vpmu_client::event::EventError;
use vpmu_client::history::HistoryError;
use vpmu_client::persistent::PersistentError;
use vpmu_client::{Error, Persistent, Vpmu};

use crate::recording::FileError;
use crate::sampling::SamplingError;
use crate::target::TargetError;

/// Make, list, read and end events that outlive the program that made them.
///
/// A persistent event counts and samples a CPU until it is ended, and any number of programs can
/// open it. Its ring keeps the newest samples (or, with --until-full, the unread ones) and outlives
/// a reset of this machine if the host has memory for it. The host's operator may have started
/// events before this machine booted: read them here, end them on the host (`vmm ctl`). All events
/// are listed in /sys/bus/event_source/devices/persistent/events. Making, reading and ending events
/// requires CAP_PERFMON.
///
/// Examples:
///   vperf persist new -e task-clock -F 100 --name flight   from now on, on each CPU
///   vperf persist ls
///   vperf persist dump                  the records of all events, as text
///   vperf persist dump flight-0 -o flight.data && vperf report -i flight.data
///   vperf persist attach flight-0       its samples as they come; Ctrl-C ends the event
///   vperf persist rm flight-0 flight-1
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct PersistArgs {
    #[command(subcommand)]
    command: Command,
}

// The description of each command is on its argument struct.
#[derive(Debug, Subcommand)]
enum Command {
    Ls(list::ListArgs),
    New(new::NewArgs),
    Attach(attach::AttachArgs),
    Dump(dump::DumpArgs),
    Rm(RmArgs),
}

/// End persistent events.
///
/// If other programs have an event open, the event ends when the last program closes it.
#[derive(Debug, Args)]
struct RmArgs {
    /// Ids or names, as `vperf persist ls` shows them.
    #[arg(required = true, value_name = "ID|NAME")]
    events: Vec<String>,
}

/// An error of the command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PersistError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Persistent(#[from] PersistentError),
    #[error(transparent)]
    Client(#[from] Error),
    #[error("{name:?} belongs to the operator: end it on the host, with `vmm ctl --socket PATH end {name}`")]
    Operators { name: String },
    #[error("{name:?} has no ring: it only counts, and `vperf persist ls` shows the count")]
    NoRing { name: String },
    #[error(
        "{name:?} counts on CPU {cpu}, which is offline: put it online first (echo 1 > /sys/devices/system/cpu/cpu{cpu}/online), or read the ring as it is with `vperf persist dump {name}`"
    )]
    Away { name: String, cpu: u32 },
    #[error("event {name:?}")]
    History { name: String, source: HistoryError },
    #[error("event {name:?}")]
    Event { name: String, source: EventError },
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("event {name:?} on CPU {cpu}")]
    New { name: String, cpu: u32, source: Error },
    #[error("--name {0}: there must be only one event with -e; several events cannot share a name")]
    Names(String),
    #[error(transparent)]
    File(#[from] FileError),
    #[error("cannot write the output")]
    Write(#[source] io::Error),
}

pub(crate) fn run(args: &PersistArgs) -> Result<(), PersistError> {
    match &args.command {
        Command::Ls(args) => list::run(args),
        Command::New(args) => new::run(args),
        Command::Attach(args) => attach::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Rm(args) => remove(args),
    }
}

/// Returns the named events, each once; all events if `names` is empty.
fn named(vpmu: &Vpmu, names: &[String]) -> Result<Vec<Persistent>, PersistentError> {
    if names.is_empty() {
        return vpmu.persistent();
    }
    let mut events: Vec<Persistent> = Vec::new();
    for name in names {
        let event = vpmu.find_persistent(name)?;
        if events.iter().all(|other| other.id != event.id) {
            events.push(event);
        }
    }
    Ok(events)
}

/// Fails for the operator's events, which the guest cannot end.
fn not_operators(event: &Persistent) -> Result<(), PersistError> {
    if event.is_operators { Err(PersistError::Operators { name: event.name.clone() }) } else { Ok(()) }
}

fn remove(args: &RmArgs) -> Result<(), PersistError> {
    let vpmu = Vpmu::open()?;
    // Look all events up before the first ends: if a name is mistyped, no event ends.
    let events = named(&vpmu, &args.events)?;
    events.iter().try_for_each(not_operators)?;
    for event in &events {
        vpmu.reopen(event)?.attach()?;
    }
    Ok(())
}
