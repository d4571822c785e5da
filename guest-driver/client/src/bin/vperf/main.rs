//! `vperf`: the command-line tool of the paravirtual PMU for guests.

mod call_tree;
mod counts;
mod events;
mod exits;
mod flush;
mod format;
mod frames;
mod labels;
mod list;
mod os;
mod period;
mod persist;
mod processes;
mod profile;
mod record;
mod recording;
mod region;
mod report;
mod sampling;
mod session;
mod stat;
mod target;
mod terminal;
mod top;
mod tracing;
mod workload;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vpmu_client::error::chain;
use vpmu_export::{ExportArgs, ExportError, Names};

use crate::recording::say;
use crate::workload::WorkloadError;

const EXPORT_HELP: &str = "\
Examples:
  vperf export perf.data --to svg -o flames.svg
      Draw a flame graph; open it in a browser
  vperf export perf.data --to firefox -o profile.json
      Then 'Load a profile from file' at profiler.firefox.com
  vperf export perf.data --to pprof -o profile.pb.gz
      Then 'go tool pprof -http : profile.pb.gz'

The names of functions that the recording lacks come from this machine: export on the machine that was
recorded, or give its files with --vmlinux and --symfs.";

/// The exit code if vperf itself fails. Otherwise stat, record, top and exits return the workload's exit code, which is
/// seldom 125.
const FAILED: u8 = 125;

/// Count and sample this virtual machine with the counters of its host.
///
/// Examples:
///   vperf list                          what this host can count
///   vperf stat -- make                  counts of a command and its children
///   vperf stat -e exits,halts -a        ... of all CPUs, until Ctrl-C
///   vperf record -- make                samples of a command, into perf.data
///   vperf report                        hot functions in perf.data
///   vperf record -g -- make             ... with their callers
///   vperf report --call-graph
///   vperf export perf.data --to svg     a flame graph; also for other profilers
///   vperf top                           hot functions of the whole machine, live
///   vperf exits -- make                 VM exits of a command: reasons, times, causes
///   vperf stat --from 7 --to 8 -- prog  counts between the marks 7 and 8 of prog
///   vperf persist new -F 100            a flight recorder: samples each CPU from now on
///   vperf persist dump                  samples in the flight recorder
///
/// Exit codes: stat, record, top and exits return the exit code of their workload (128 + N if
/// signal N ended it, 126 if it cannot be run, 127 if it is not found). 125 means that vperf
/// itself failed or that an option is wrong.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

// The description of each command is on its argument struct.
#[derive(Debug, Subcommand)]
enum Command {
    List(list::ListArgs),
    Stat(stat::StatArgs),
    Record(record::RecordArgs),
    Report(report::ReportArgs),
    /// Write a recording in the format of another profiler: flame graph, Firefox, pprof, Perfetto
    #[command(after_help = EXPORT_HELP)]
    Export(ExportArgs),
    Top(top::TopArgs),
    Exits(exits::ExitsArgs),
    Persist(persist::PersistArgs),
    Flush(flush::FlushArgs),
}

/// An error that ends vperf early.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error(transparent)]
    List(#[from] list::ListError),
    #[error(transparent)]
    Stat(#[from] stat::StatError),
    #[error(transparent)]
    Record(#[from] record::RecordError),
    #[error(transparent)]
    Report(#[from] report::ReportError),
    #[error(transparent)]
    Export(#[from] ExportError),
    #[error(transparent)]
    Top(#[from] top::TopError),
    #[error(transparent)]
    Exits(#[from] exits::ExitsError),
    #[error(transparent)]
    Persist(#[from] persist::PersistError),
    #[error(transparent)]
    Flush(#[from] flush::FlushError),
}

impl CliError {
    fn exit_code(&self) -> u8 {
        self.workload().map_or(FAILED, WorkloadError::exit_code)
    }

    fn workload(&self) -> Option<&WorkloadError> {
        match self {
            Self::Stat(stat::StatError::Workload(error))
            | Self::Record(record::RecordError::Workload(error))
            | Self::Top(top::TopError::Workload(error)) => Some(error),
            Self::Exits(error) => error.workload(),
            _ => None,
        }
    }

    /// Whether vperf ends because the reader of its standard output has closed the pipe, as in
    /// `vperf report | head`. That is not a failure. An error of the workload always is a failure,
    /// even if its cause is a broken pipe.
    fn is_broken_pipe(&self) -> bool {
        if self.workload().is_some() {
            return false;
        }
        let mut cause: Option<&dyn std::error::Error> = Some(self);
        while let Some(error) = cause {
            let io = error.downcast_ref::<io::Error>();
            if io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
                return true;
            }
            cause = error.source();
        }
        false
    }
}

fn run(command: &Command) -> Result<u8, CliError> {
    match command {
        Command::List(args) => list::run(args)?,
        Command::Stat(args) => return Ok(stat::run(args)?),
        Command::Record(args) => return Ok(record::run(args)?),
        Command::Report(args) => report::run(args)?,
        Command::Export(args) => {
            for note in vpmu_export::run(args, Names::here())? {
                say(&note);
            }
        }
        Command::Top(args) => return Ok(top::run(args)?),
        Command::Exits(args) => return Ok(exits::run(args)?),
        Command::Persist(args) => persist::run(args)?,
        Command::Flush(args) => flush::run(args)?,
    }
    Ok(0)
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Ignore an error: if the output is closed, nothing can show it.
            let _ = error.print();
            return if error.use_stderr() { FAILED.into() } else { ExitCode::SUCCESS };
        }
    };
    match run(&cli.command) {
        Ok(code) => code.into(),
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "vperf: {}", chain(&error));
            error.exit_code().into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_passes_clap_checks() {
        Cli::command().debug_assert();
    }

    #[test]
    fn workload_keeps_its_options() {
        for line in ["vperf stat -e a,b ls -l --json", "vperf stat -e a,b -- ls -l --json"] {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let Command::Stat(args) = cli.command else { panic!("{line}") };
            assert_eq!(args.target.command, ["ls", "-l", "--json"], "{line}");
            assert_eq!(args.events.specs, ["a", "b"], "{line}");
            assert!(!args.json, "{line}");
        }
    }

    #[test]
    fn values_may_stand_right_after_their_options() {
        let cli = Cli::try_parse_from(["vperf", "stat", "-x,", "-ecycles", "-C0", "true", "-x"]);
        let Command::Stat(args) = cli.unwrap().command else { panic!() };
        assert_eq!(args.target.command, ["true", "-x"]);
        assert_eq!(args.events.specs, ["cycles"]);
        let cli = Cli::try_parse_from(["vperf", "record", "-m64", "-c1000", "true"]);
        assert!(cli.is_ok(), "{cli:?}");
        let unknown = Cli::try_parse_from(["vperf", "stat", "-z", "true"]);
        assert!(unknown.is_err(), "an unknown option is not a command");
    }

    #[test]
    fn broken_pipe_is_silent_only_for_own_output() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let output = CliError::from(list::ListError::Write(broken()));
        assert!(output.is_broken_pipe());
        let program = "true".into();
        let source = broken();
        let workload = WorkloadError::Run { program, source };
        let error = CliError::from(stat::StatError::Workload(workload));
        assert!(!error.is_broken_pipe(), "{}", chain(&error));
    }
}
