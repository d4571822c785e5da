//! The VMM with an architectural PMU in addition to the paravirtual PMU. The guest's own CPU PMU driver uses the
//! architectural PMU. All of the driver's accesses to the counters are trapped and emulated here.
//!
//! `trapped run --pmu amd-v2 …` accepts the options of `vmm run`. Benchmarks
//! compare the vPMU with this trapped PMU.

mod counter;
mod layout;
mod pmu;
mod rdpmc;

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use vmm::cli::{Cli, Command};
use vmm::config::Config;
use vmm::confine::Inherited;
use vmm::exit::{EXIT_FAILURE, EXIT_USAGE};
use vmm::logger;
use vmm::report::{Destination, Report};
use vmm::vm::Vm;

use layout::Layout;
use pmu::TrappedPmu;

type Failure = (u8, Box<dyn Error>);

fn main() -> ExitCode {
    logger::start();
    match run() {
        Ok(code) => code.into(),
        Err((code, error)) => {
            eprintln!("trapped: {}", vpmu_errors::chain(error.as_ref()));
            code.into()
        }
    }
}

fn usage(error: impl Into<Box<dyn Error>>) -> Failure {
    (EXIT_USAGE, error.into())
}

fn failure(error: impl Into<Box<dyn Error>>) -> Failure {
    (EXIT_FAILURE, error.into())
}

fn run() -> Result<u8, Failure> {
    let inherited = Inherited::find();
    let mut words: Vec<String> = std::env::args().collect();
    let option = words.iter().position(|word| word == "--pmu");
    let layout = option
        .and_then(|at| words.drain(at..(at + 2).min(words.len())).nth(1))
        .and_then(|name| Layout::named(&name))
        .ok_or_else(|| usage(format!("--pmu expects one of {}", Layout::names())))?;
    let Command::Run(args) = Cli::try_parse_from(words).map_err(usage)?.command else {
        return Err(usage("only `run` is supported"));
    };
    let mut config = Config::try_from(args.as_ref()).map_err(usage)?;
    // Run without seccomp filters. The filters allow only the system calls of the project's VMM, which has no emulated
    // PMU.
    config.confinement.seccomp = false;
    let destination = config.report.as_deref().map(Destination::open).transpose();
    let destination = destination.map_err(failure)?;
    let pmu = Arc::new(TrappedPmu::new(layout));
    let ran = Vm::with_emulation(config, inherited, pmu).map_err(failure)?.run();
    let report = Report::of_run(&ran);
    if let Some(destination) = destination {
        destination.write(&report).map_err(failure)?;
    }
    ran.ending.map_err(|error| (report.exit_code, error.into()))?;
    Ok(report.exit_code)
}
