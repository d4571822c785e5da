//! The `vmm` program: parses arguments, runs the command, and returns the exit status.

use std::error::Error;
use std::process::ExitCode;

use vmm::cli::{self, Command};
use vmm::config::{Config, RunArgs};
use vmm::confine::Inherited;
use vmm::exit::{EXIT_FAILURE, EXIT_USAGE, Ending};
use vmm::printable::Printable;
use vmm::report::{self, Destination, Report};
use vmm::serve::{self, Served};
use vmm::{check, ctl, logger, vm::Vm};
use vpmu_export::Names;

fn main() -> ExitCode {
    logger::start();
    let cli = match cli::parse() {
        Ok(cli) => cli,
        Err(None) => return ExitCode::SUCCESS,
        Err(Some(mistake)) => {
            return complain(&mistake, EXIT_USAGE).into();
        }
    };
    match cli.command {
        Command::Run(args) => run(&args).into(),
        Command::Serve(args) => match serve::run(&args) {
            Ok(Served::Disconnected) => ExitCode::SUCCESS,
            Ok(Served::Signal(signal)) => Ending::Signal(signal).exit_code().into(),
            Err(error) => fail(&error, error.exit_code()).into(),
        },
        Command::Check(args) => match check::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error @ check::CheckError::Policy(_)) => fail(&error, EXIT_USAGE).into(),
            Err(error) => fail(&error, EXIT_FAILURE).into(),
        },
        Command::Ctl(args) => match ctl::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error, EXIT_FAILURE).into(),
        },
        Command::Export(args) => match vpmu_export::run(&args, Names::none()) {
            Ok(notes) => {
                for note in notes {
                    complain(&note, 0);
                }
                ExitCode::SUCCESS
            }
            Err(error) => fail(&error, EXIT_FAILURE).into(),
        },
    }
}

fn fail(error: &dyn Error, code: u8) -> u8 {
    complain(&vpmu_errors::chain(error), code)
}

/// Parts of `message` may come from a stranger's file or process.
fn complain(message: &str, code: u8) -> u8 {
    eprint!("{}", Printable::line(format_args!("vmm: {message}")));
    code
}

fn run(args: &RunArgs) -> u8 {
    let inherited = Inherited::find();
    let config = match Config::try_from(args) {
        Ok(config) => config,
        Err(error) => return fail(&error, error.exit_code()),
    };
    let inherited = match inherited.leave_namespace(&config.confinement) {
        Ok(inherited) => inherited,
        Err(error) => return fail(&error, EXIT_FAILURE),
    };
    let destination = match config.report.as_deref().map(Destination::open).transpose() {
        Ok(destination) => destination,
        Err(error) => return fail(&error, EXIT_FAILURE),
    };
    logger::limit(config.limits.log_lines);
    let (report, ending) = match Vm::new(config.clone(), inherited) {
        Ok(vm) => {
            let ran = vm.run();
            let report = Report::of_run(&ran);
            (report, ran.ending)
        }
        Err(error) => (Report::of_failure(&error), Err(error)),
    };
    let mut code = report.exit_code;
    if let Err(error) = &ending {
        fail(error, code);
    }
    if config.summary {
        eprint!("{}", report::summary(&report, ending.as_ref().ok().copied()));
    }
    if let Some(destination) = destination
        && let Err(error) = destination.write(&report)
    {
        code = fail(&error, EXIT_FAILURE);
    }
    code
}
