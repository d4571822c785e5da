//! `vmm check`: reports the features of the host, and what they mean for guests.
//!
//! Most results come from experiments: the program runs guests of a few instructions, and opens events and counts with
//! them. Other programs read the JSON to decide where a stock kernel can run. Each probe has a time limit, so the
//! program does not hang on a broken hypervisor. Instead, its table shows the failure.

mod events;
mod facts;
mod kvm;
mod perf;
mod serving;
mod table;
#[cfg(test)]
mod tests;
mod verdict;

use std::io::{self, Write};

pub use events::Offered;
pub use facts::{AutoEngine, Event, HostTrace, Kvm, Perf, Survey};
pub use serving::Serving;

use vpmu::Hardware;
use vpmu::host::HostFiles;

use crate::arch::check as guest;
use crate::confine::Available;
use crate::host_kernel;
use crate::policy::{Decision, PolicyArgs, PolicyError};

/// Arguments of `vmm check`.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = HELP)]
pub struct CheckArgs {
    /// Print the survey as JSON with stable keys, instead of a table
    #[arg(long)]
    pub json: bool,

    /// The events to survey; each tier by default.
    #[command(flatten)]
    pub policy: PolicyArgs,
}

const HELP: &str = "\
Examples:
  vmm check
  vmm check --json | jq .stock_kernel
  vmm check --pmu clocks --allow-event 'l1-dcache-*'
      See which events a guest with that list has here

Most results come from experiments: small guests are run, and events are opened and counted. The
survey takes about a second, changes nothing and leaves nothing behind.

Exit status:
  0  a guest runs here, even if it is only a small one
  1  no guest runs here; the survey is printed all the same
  2  wrong usage";

/// Errors of `vmm check`.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// Guests cannot run here. The survey has been printed.
    #[error("no guest runs on this machine: {0}")]
    NoGuest(String),
    /// The list of events contradicts itself.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The survey cannot be written as JSON.
    #[error("cannot write the survey as JSON")]
    Json(#[source] serde_json::Error),
    /// Standard output cannot be written.
    #[error("cannot write the survey to standard output")]
    Output(#[source] io::Error),
}

/// Surveys the machine and prints the results on standard output.
///
/// # Errors
/// [`CheckError`]. If not even the smallest guest runs, prints the results and returns [`CheckError::NoGuest`].
pub fn run(args: &CheckArgs) -> Result<(), CheckError> {
    let survey = survey(&events::asked(&args.policy)?);
    let text = if args.json {
        serde_json::to_string_pretty(&survey).map_err(CheckError::Json)? + "\n"
    } else {
        table::render(&survey.checks)
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        // The reader closed the output early.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.map_err(CheckError::Output)?,
    }
    match (&survey.guest, survey.kvm.error) {
        (Some(guest), _) if guest.runs() => Ok(()),
        (Some(guest), _) => Err(CheckError::NoGuest(guest.failure().to_owned())),
        (None, error) => Err(CheckError::NoGuest(error.unwrap_or_default())),
    }
}

/// Runs every probe. This takes about a second, or a few seconds if KVM is broken.
///
/// Uses the real-time signal `SIGRTMIN + 9`.
fn survey(asked: &[Decision]) -> Survey {
    let kvm = kvm::probe();
    let guest = kvm.usable.then(guest::probe);
    let perf = perf::probe(guest.as_ref().is_some_and(guest::Guest::runs));
    let mediated = host_kernel::mediated_pmu();
    let statistics = kvm.capabilities.get("binary_stats") == Some(&true);
    let files = HostFiles::read(&Hardware::default());
    let confinement = Available::find(files.need_capability(true));
    let pmu = events::offered(asked, statistics, mediated);
    let mut checks = verdict::checks(&kvm, guest.as_ref(), &perf);
    // Insert these lines before the verdict, which must stay the last line.
    let end = checks.len().saturating_sub(1);
    let more = [events::mediated(mediated)].into_iter();
    let serving = Serving::find(files.need_capability(false));
    let more = more.chain(confinement.checks()).chain(serving.checks());
    checks.splice(end..end, more.chain(events::checks(&pmu)));
    Survey {
        stock_kernel: verdict::stock_kernel(&kvm, guest.as_ref()),
        checks,
        mediated_pmu: mediated,
        confinement,
        serving,
        pmu,
        kvm,
        guest,
        perf,
    }
}
