//! The command line and its subcommands. The module that runs a subcommand defines the subcommand's arguments.

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use vpmu_export::ExportArgs;

use crate::check::CheckArgs;
use crate::config::RunArgs;
use crate::ctl::CtlArgs;
use crate::serve::ServeArgs;

/// A minimal VMM for KVM that gives its guests a paravirtual PMU.
#[derive(Debug, Parser)]
#[command(
    name = "vmm",
    version,
    after_help = "\
Examples:
  vmm check
      See what this machine can do
  vmm run --kernel vmlinux --initramfs rootfs.cpio.gz
      Boot Linux, its console on this terminal; Ctrl-A x ends it
  vmm ctl --socket vm.sock list
      See the persistent events of a machine that runs with --ctl vm.sock
  vmm ctl --socket vm.sock snapshot here
      Save that machine; 'vmm run --restore here' continues it from there
  vmm export perf.data --to svg -o flames.svg
      Draw a flame graph of a recording; see 'vmm export --help' for other formats
  vmm serve --socket pmu.sock --vcpus 2
      Give a guest of QEMU or Cloud Hypervisor the PMU; see 'vmm serve --help'

'vmm run --help' lists every option and exit status."
)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a guest until it ends
    Run(Box<RunArgs>),
    /// Check what this host supports, and what that means for guests
    Check(CheckArgs),
    /// Carry the PMU of a virtual machine that another VMM runs
    Serve(Box<ServeArgs>),
    /// List, start and end the persistent events of a running machine, or save the machine
    Ctl(CtlArgs),
    /// Write a recording in the format of another profiler: flame graph, Firefox, pprof, Perfetto
    #[command(after_help = EXPORT_HELP)]
    Export(ExportArgs),
}

const EXPORT_HELP: &str = "\
Examples:
  vmm export perf.data --to svg -o flames.svg
      Draw a flame graph of a guest; open it in a browser
  vmm export perf.data --to firefox -o guest.json
      Then 'Load a profile from file' at profiler.firefox.com
  vmm export perf.data --to folded --event marks
      Print the stacks at the guest's marks
  vmm export perf.data --to pprof --vmlinux System.map --symfs rootfs -o guest.pb.gz
      Name functions from the guest's files; then 'go tool pprof -http : guest.pb.gz'

A recording of 'vmm run --symbols' names the kernel's functions by itself. Names of others come from
files that you have: --vmlinux for the kernel, --symfs for programs.

Exit status:
  0  the profile was written
  1  the recording cannot be read, or the profile cannot be written
  2  wrong usage";

/// Parses the arguments of this process.
///
/// # Errors
/// The error in one line. If the user asked for help or for the version, this function prints the text that the user
/// asked for, and the error is `None`.
pub fn parse() -> Result<Cli, Option<String>> {
    Cli::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A failure to print cannot be reported.
            let _ = error.print();
            (error.exit_code() != 0).then(|| "no command: must be one of those listed above".to_owned())
        }
        _ => Some(one_line(&error.render().to_string())),
    })
}

/// Returns the parser's error message in one line, without the usage text, and with a reference to `--help`.
fn one_line(report: &str) -> String {
    let message: Vec<&str> = report
        .lines()
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"))
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let message = message.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    format!("{message}; see 'vmm --help' and 'vmm COMMAND --help'")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definition_holds() {
        Cli::command().debug_assert();
    }

    #[test]
    fn mistakes_are_reported_in_one_line() {
        let wrong: [&[&str]; 4] = [
            &["vmm", "run", "--kernle", "x"],
            &["vmm", "walk"],
            &["vmm", "run", "--vcpus", "many"],
            &["vmm", "run", "--memory"],
        ];
        for args in wrong {
            let error = Cli::try_parse_from(args).expect_err("wrong usage");
            let line = one_line(&error.render().to_string());
            assert!(!line.contains('\n') && !line.starts_with("error"), "{line}");
        }
    }
}
