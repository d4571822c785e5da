//! `vperf exits`: VM exits of this machine.

mod reasons;
mod record;
mod recorded;
mod report;
mod timeline;
mod totals;

use clap::{Args, Subcommand};

use crate::workload::WorkloadError;

/// Show every VM exit: its reason, the task that caused it, and how long the host took.
///
/// A CPU of a virtual machine leaves the guest whenever its host must act: an access to a device, a
/// halt, a page that is not mapped yet. The host writes the time, reason, instruction and duration of
/// each exit straight into pages of this machine. `vperf exits COMMAND` records a command and
/// shows the report; `record`, `report` and `timeline` do one step each.
///
/// Examples:
///   vperf exits -- dd if=/dev/vda of=/dev/null count=1000
///   vperf exits record -a -- sleep 5              all CPUs, into perf.data
///   vperf exits report                            which exits, how long, caused by whom
///   vperf exits report --sort task,symbol
///   vperf exits timeline -o trace.json            for chrome://tracing or ui.perfetto.dev
#[derive(Debug, Args)]
#[command(verbatim_doc_comment, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ExitsArgs {
    #[command(subcommand)]
    command: Option<ExitsCommand>,
    #[command(flatten)]
    record: record::RecordArgs,
}

// The description of each command is on its argument struct.
#[derive(Debug, Subcommand)]
enum ExitsCommand {
    Record(record::RecordArgs),
    Report(report::ReportArgs),
    Timeline(timeline::TimelineArgs),
}

/// An error of the command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExitsError {
    #[error(transparent)]
    Record(#[from] record::RecordError),
    #[error(transparent)]
    Report(#[from] report::ReportError),
    #[error(transparent)]
    Timeline(#[from] timeline::TimelineError),
}

impl ExitsError {
    /// The error of the measured command; `None` if `self` is another error.
    pub(crate) fn workload(&self) -> Option<&WorkloadError> {
        match self {
            Self::Record(record::RecordError::Workload(error)) => Some(error),
            _ => None,
        }
    }
}

pub(crate) fn run(args: &ExitsArgs) -> Result<u8, ExitsError> {
    match &args.command {
        None => {
            let code = record::run(&args.record)?;
            report::show(args.record.output())?;
            Ok(code)
        }
        Some(ExitsCommand::Record(args)) => Ok(record::run(args)?),
        Some(ExitsCommand::Report(args)) => Ok(report::run(args).map(|()| 0)?),
        Some(ExitsCommand::Timeline(args)) => Ok(timeline::run(args).map(|()| 0)?),
    }
}

#[cfg(test)]
#[path = "../../../trace/composed.rs"]
mod composed;

#[cfg(test)]
mod tests;
