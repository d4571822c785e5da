//! `vperf exits record`: writes every exit from AUX areas to a file.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use vpmu_abi::KIND_EXIT_TRACE;
use vpmu_client::device::DeviceError;
use vpmu_client::trace::Format;
use vpmu_client::{Entry, Vpmu};

use crate::events::Chosen;
use crate::os::SNAPSHOT;
use crate::recording::{Recording, RecordingError, Sources};
use crate::session::Session;
use crate::target::{TargetArgs, TargetError};
use crate::tracing::{self, AreaChoice, TracingError};
use crate::workload::WorkloadError;

/// Record every exit of a command, tasks, or CPUs.
///
/// The host writes exits into AUX areas in this machine's memory; vperf copies them to a file for
/// `vperf exits report` and `vperf exits timeline`. When an area is full, further exits are lost,
/// and vperf reports the number of lost bytes: enlarge the area (--aux-size) or select fewer exits
/// (--reason).
///
/// With --snapshot, vperf writes only the newest exits in the areas, at the end and on each
/// SIGUSR2.
///
/// Examples:
///   vperf exits record -- make
///   vperf exits record -a --reason io,mmio -- sleep 5
///   vperf exits record -C 0 --snapshot --aux-size 1M     kill -USR2 writes the newest exits
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RecordArgs {
    /// The exits to record. [default: all if the host can trace the exits that its kernel handles,
    /// else user]
    #[arg(long, value_enum, value_name = "REASON,...", value_delimiter = ',')]
    reason: Vec<Reason>,
    /// Bytes of each AUX area, a power of two such as 64K or 4M. [default: 4M, or the device's
    /// limit]
    #[arg(short = 'm', long, alias = "aux", value_name = "SIZE",
          value_parser = tracing::area_size)]
    aux_size: Option<u32>,
    /// Keep only the newest exits, and write them at the end and on each SIGUSR2.
    #[arg(long)]
    snapshot: bool,
    /// The file to write; an existing one is kept as FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    output: PathBuf,
    #[command(flatten)]
    pub(crate) target: TargetArgs,
}

/// Exits to record. Each value selects an exit trace of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Reason {
    /// Every exit, with the hardware's reason.
    All,
    /// Exits that reach the host's user space.
    User,
    /// Accesses to I/O ports.
    Io,
    /// Accesses to device memory.
    Mmio,
    /// HLT instructions.
    Hlt,
    /// Signals to a vCPU's thread.
    Signal,
    /// All other exits to user space.
    Other,
}

/// An error of recording.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("this device cannot trace exits; `vperf list` shows its events")]
    NoTrace,
    #[error(
        "--reason {reason}: this host cannot trace these exits; it can trace: {}",
        there.join(", ")
    )]
    NoReason { reason: String, there: Vec<String> },
    #[error(transparent)]
    Tracing(#[from] TracingError),
    #[error(transparent)]
    Workload(WorkloadError),
    #[error(transparent)]
    Target(TargetError),
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

impl From<TargetError> for RecordError {
    fn from(error: TargetError) -> Self {
        match error {
            TargetError::Workload(error) => Self::Workload(error),
            error => Self::Target(error),
        }
    }
}

impl RecordArgs {
    /// The file to write.
    pub(crate) fn output(&self) -> &Path {
        &self.output
    }
}

/// Names of the traces in `entries` for `reasons`. If `reasons` is empty, the trace of all exits
/// or, if the host lacks this trace, the trace of exits to user space.
fn names(entries: &[Entry], reasons: &[Reason]) -> Result<Vec<String>, RecordError> {
    let is_trace = |entry: &&Entry| entry.kind == KIND_EXIT_TRACE && entry.trace == Some(Format::Exits);
    let of = |reason: Reason| {
        let traces = entries.iter().filter(is_trace);
        let entry = traces.into_iter().find(|entry| entry.config == reason as u64);
        entry.map(|entry| entry.name.clone())
    };
    if reasons.is_empty() {
        let first = [Reason::All, Reason::User].into_iter().find_map(of);
        return Ok(vec![first.ok_or(RecordError::NoTrace)?]);
    }
    let called = |reason: Reason| {
        let value = reason.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    };
    let name = |&reason: &Reason| {
        of(reason).ok_or_else(|| RecordError::NoReason {
            reason: called(reason),
            there: Reason::value_variants()
                .iter()
                .filter(|&&reason| of(reason).is_some())
                .map(|&reason| called(reason))
                .collect(),
        })
    };
    reasons.iter().map(name).collect()
}

pub(crate) fn run(args: &RecordArgs) -> Result<u8, RecordError> {
    let vpmu = Vpmu::open()?;
    let names = names(vpmu.catalogue().entries(), &args.reason)?;
    let traced = choose(&vpmu, &names)?;
    let areas = AreaChoice { pages: args.aux_size, snapshot: args.snapshot };
    let signals: &[i32] = if args.snapshot { &[SNAPSHOT] } else { &[] };
    let target = args.target.prepare_catching(signals)?;
    let opened = areas.open(&vpmu, &target, &traced, 0)?;
    let sources = Sources {
        traced: &traced,
        buffers: areas.map(&vpmu, &traced, &opened, 0)?,
        snapshot: args.snapshot,
        ..Sources::default()
    };
    let info = *vpmu.info();
    let mut recording = Recording::begin(&args.output, sources, info, &target)?;
    let mut session = Session::start(target, &opened)?;
    recording.follow(&opened, &mut session)?;
    Ok(recording.finish(&opened, session)?)
}

fn choose(vpmu: &Vpmu, names: &[String]) -> Result<Vec<Chosen>, TracingError> {
    let choose = |name: &String| crate::events::choose(vpmu, name, None);
    Ok(names.iter().map(choose).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn entry(name: &str, config: u64) -> Entry {
        Entry {
            name: name.into(),
            unit: "bytes".into(),
            counts: String::new(),
            source: String::new(),
            samples: false,
            guest_only: true,
            takes_value: false,
            excludes: false,
            trace: Some(Format::Exits),
            kind: KIND_EXIT_TRACE,
            config,
        }
    }

    #[test]
    fn reasons_are_the_catalogues_traces() {
        let mut entries = vec![entry("user", 1), entry("io", 2), entry("mmio", 3)];
        // Exits that can be counted but not traced.
        entries.push(Entry { kind: 0x101, trace: None, ..entry("exits", 0) });
        let of = |reasons: &[Reason]| names(&entries, reasons).map_err(|error| error.to_string());
        assert_eq!(of(&[]), Ok(vec!["user".into()]));
        assert_eq!(of(&[Reason::Mmio, Reason::Io]), Ok(vec!["mmio".into(), "io".into()]));
        assert_eq!(
            of(&[Reason::All]),
            Err("--reason all: this host cannot trace these exits; it can trace: user, io, mmio".into())
        );
        entries.push(entry("every", 0));
        assert_eq!(names(&entries, &[]).unwrap(), ["every"]);
        assert!(matches!(names(&[], &[]), Err(RecordError::NoTrace)));
    }

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: RecordArgs,
    }

    #[test]
    fn command_after_exits_keeps_its_options() {
        let line = Line::try_parse_from("record --reason io,hlt -m 64K -o f ls --reason x".split(' '));
        let args = line.unwrap().args;
        assert_eq!(args.reason, [Reason::Io, Reason::Hlt]);
        assert_eq!((args.aux_size, args.output()), (Some(4), Path::new("f")));
        assert_eq!(args.target.command, ["ls", "--reason", "x"]);
        for wrong in ["record --reason none ls", "record -m 3M ls", "record --aux 1 ls"] {
            assert!(Line::try_parse_from(wrong.split(' ')).is_err(), "{wrong}");
        }
    }
}
