//! The last part of the demo: a guest panics on purpose, and its flight recorder shows the guest's last events.

use super::DemoError;
use crate::arch::Arch;
use crate::boot::Boot;
use crate::cache::Cache;
use crate::kernel::{Kernel, Sources};
use crate::kvm_host::{KvmHost, KvmHostChoice};
use crate::post_run::PostRun;
use crate::prerequisites::{self, Prerequisite};
use crate::third_party;

/// Number of marks that the guest places before it panics, with the values 1, 2, ...
const MARKS: u64 = 40;
/// Events that the flight recorder records.
const EVENTS: [&str; 2] = ["marks", "cpu-clock,freq=100"];
/// The line between the output that is shown to the user and the output that the demo checks.
const CHECKED: &str = "@@marks";
/// The path in the lab of the guest kernel's symbols.
const LAB_SYMBOLS: &str = "guest/System.map";

/// Makes a guest panic on `kvm_host` and checks its recording.
///
/// # Errors
/// [`DemoError`]: the recording cannot be read, or lacks marks.
pub(super) fn run(kvm_host: &KvmHost) -> Result<(), DemoError> {
    let (choice, lab) = match kvm_host {
        KvmHost::Direct | KvmHost::BesideQemu { .. } => (KvmHostChoice::Direct, false),
        KvmHost::Lab { .. } => (KvmHostChoice::Lab, true),
    };
    println!("\nThe last part: a guest panics, and the host reads the guest's flight recorder");
    prerequisites::ensure(&[Prerequisite::Perf]).map_err(third_party::ThirdPartyError::from)?;
    let mut arguments: Vec<String> =
        EVENTS.iter().flat_map(|event| ["--persistent", event]).map(str::to_owned).collect();
    let cache = Cache::user()?;
    let symbols = Kernel::get(cache, &Sources::default())?.symbols(cache)?;
    let mut files = Vec::new();
    if let Some(symbols) = &symbols {
        let path = match lab {
            true => format!("/{LAB_SYMBOLS}"),
            false => symbols.to_string_lossy().into_owned(),
        };
        arguments.extend(["--symbols".to_owned(), path]);
    }
    if lab {
        files.extend(third_party::perf(Arch::default())?);
        if let Some(symbols) = &symbols {
            files.push((LAB_SYMBOLS.to_owned(), third_party::read(symbols)?));
        }
    }
    let outcome = Boot {
        command: guest(),
        kvm_host: choice,
        echo: true,
        vmm_args: arguments,
        post_run: Some(PostRun { command: host_command(), files }),
        ..Boot::default()
    }
    .run()?;
    if outcome.report["ending"] != "guest-panic" {
        return Err(DemoError::NoPanic(outcome.status));
    }
    let check = outcome.post_run.unwrap_or_default();
    let (shown, checked) = check.output.split_once(CHECKED).unwrap_or((&check.output, ""));
    println!("{}", shown.trim_end());
    if check.status != 0 {
        return Err(DemoError::Recording(shown.trim_end().to_owned()));
    }
    let found = values(checked);
    if !found.iter().copied().eq(1..=MARKS) {
        let wanted = MARKS;
        return Err(DemoError::Marks { wanted, found });
    }
    println!("\nAll {MARKS} marks are in the recording, in order; it took {:.1} s", outcome.wall.as_secs_f64());
    Ok(())
}

/// Commands typed in the guest.
fn guest() -> String {
    format!(
        r#"show() {{ echo; echo "guest# $*"; "$@"; }}
show workload marks {MARKS} 1 --step 1
echo; echo "guest# echo c > /proc/sysrq-trigger"
echo c > /proc/sysrq-trigger
"#
    )
}

/// Commands typed on the host.
fn host_command() -> String {
    format!(
        r#"show() {{ echo; echo "host# $1"; eval "$1"; }}
set -e
show "perf script -i perf.data -F tid,cpu,time,event,addr,ip,sym > script"
show "grep marks script | tail -n 4"
show "tail -n 12 script"
echo {CHECKED}
exec perf script -i perf.data -F event,addr
"#
    )
}

/// The values of the marks that perf lists, one sample per line.
fn values(script: &str) -> Vec<u64> {
    let value = |line: &str| {
        let (event, address) = line.trim().split_once(char::is_whitespace)?;
        event.starts_with("marks").then_some(())?;
        u64::from_str_radix(address.trim(), 16).ok()
    };
    script.lines().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_distinguished_from_other_samples() {
        let script = "\n   marks-0:                1\ncpu-clock-1:     7\n  marks-1:      1f\n\nmarks";
        assert_eq!(values(script), [1, 31]);
    }
}
