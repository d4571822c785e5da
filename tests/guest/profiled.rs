//! A guest that counts and samples its own marks while the host profiles it. After each round, it prints how many marks
//! were counted and how many were sampled.

use crate::end_scenarios::say;
use crate::perf_command::{MARK_3, perf, record, script};
use crate::programs::text;
use crate::raw::Device;
use crate::{Fallible, Outcome};

/// The value of the mark at the end of each round.
const ROUND_END: u64 = 1000;

/// Rounds until the host ends the machine.
pub(crate) fn rounds() -> Outcome {
    let device = Device::open()?;
    for round in 1_u32.. {
        let marks = ["--", "guest-tests", "mark", "3"];
        let counted = counted(&[&marks[..], &["500"]].concat())?;
        record("round", &[&["-e", MARK_3, "-c", "1"], &marks[..], &["200"]].concat())?;
        let sampled = script("round", "comm")?.len();
        device.mark(ROUND_END)?;
        say(&format!("round {round}: {counted} {sampled}"));
    }
    Ok(())
}

fn counted(command: &[&str]) -> Fallible<String> {
    let output = perf(&[&["stat", "-x,", "-e", MARK_3], command].concat())?;
    let said = text(&output.stderr);
    Ok(said.split(',').next().unwrap_or_default().to_owned())
}
