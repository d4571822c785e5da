//! The last part of the demo: a guest panics on purpose, and its flight recorder shows the guest's last events, as text
//! and as pictures.

use std::fs;
use std::path::PathBuf;

use super::DemoError;
use crate::arch::Arch;
use crate::boot::Boot;
use crate::cache::Cache;
use crate::file_error::FileError;
use crate::kernel::{Kernel, Sources};
use crate::kvm_host::{KvmHost, KvmHostChoice};
use crate::post_run::PostRun;
use crate::prerequisites::{self, Prerequisite};
use crate::programs;
use crate::third_party;

/// Number of marks that the guest places before it panics, with the values 1, 2, ...
const MARKS: u64 = 40;
/// Events that the flight recorder records.
const EVENTS: [&str; 2] = ["marks", "cpu-clock,freq=100,call-graph"];
/// The line between the output that is shown to the user and the output that the demo checks.
const CHECKED: &str = "@@marks";
/// The beginning of a line before each picture, which names it. Its bytes follow in hexadecimal digits.
const PICTURE: &str = "@@picture ";
/// The recording's pictures: format, file, and how to look at it.
const PICTURES: [(&str, &str, &str); 2] =
    [("svg", "flames.svg", "open it in a browser"), ("firefox", "guest.json", "load it at profiler.firefox.com")];
/// The path in the lab of the guest kernel's symbols.
const LAB_SYMBOLS: &str = "guest/System.map";

/// Makes a guest panic on `kvm_host` and checks its recording.
///
/// # Errors
/// [`DemoError`]: the recording cannot be read, or lacks marks.
pub(super) fn run(kvm_host: &KvmHost) -> Result<(), DemoError> {
    let (choice, lab) = match kvm_host {
        KvmHost::Direct | KvmHost::Beside { .. } => (KvmHostChoice::Direct, false),
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
        let path = if lab { format!("/{LAB_SYMBOLS}") } else { symbols.to_string_lossy().into_owned() };
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
        orc: true,
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
    let (checked, pictures) = checked.split_once(PICTURE).unwrap_or((checked, ""));
    let found = values(checked);
    if !found.iter().copied().eq(1..=MARKS) {
        let wanted = MARKS;
        return Err(DemoError::Marks { wanted, found });
    }
    println!();
    for (name, bytes) in pictures.split(PICTURE).filter_map(picture) {
        let how = PICTURES.iter().find(|(_, file, _)| *file == name).map_or("", |(_, _, how)| how);
        println!("{}: {how}", keep(name, &bytes)?.display());
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
    let of_each = |line: fn(&str, &str) -> String| PICTURES.map(|(format, file, _)| line(format, file)).concat();
    let export = of_each(|format, file| format!("show \"vmm export perf.data --to {format} -o {file}\"\n"));
    let print = of_each(|_, file| format!("echo '{PICTURE}{file}'; od -An -v -t x1 {file}\n"));
    format!(
        r#"show() {{ echo; echo "host# $1"; eval "$1"; }}
set -e
show "perf script -i perf.data -F tid,cpu,time,event,addr,ip,sym > script"
show "grep marks script | tail -n 4"
show "awk 'BEGIN {{ RS = \"\" }} / panic/ {{ last = \$0 }} END {{ print last }}' script | tail -n 32"
{export}echo {CHECKED}
perf script -i perf.data -F event,addr
{print}"#
    )
}

/// The picture's name and its bytes.
fn picture(text: &str) -> Option<(&str, Vec<u8>)> {
    let (name, digits) = text.split_once('\n')?;
    let bytes: Option<Vec<u8>> = digits.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    Some((name.trim(), bytes?))
}

/// Writes a picture to a file; returns its path.
fn keep(name: &str, bytes: &[u8]) -> Result<PathBuf, FileError> {
    let directory = programs::target().join("demo");
    fs::create_dir_all(&directory).map_err(FileError::at(&directory))?;
    let path = directory.join(name);
    fs::write(&path, bytes).map_err(FileError::at(&path))?;
    Ok(path)
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
    fn picture_has_its_name_and_its_bytes() {
        assert_eq!(picture("a.svg\r\n 3c 73\n 76\n"), Some(("a.svg", b"<sv".to_vec())));
        assert_eq!(picture("a.svg\n 3c zz\n"), None);
    }

    #[test]
    fn marks_are_distinguished_from_other_samples() {
        let script = "\n   marks-0:                1\ncpu-clock-1:     7\n  marks-1:      1f\n\nmarks";
        assert_eq!(values(script), [1, 31]);
    }
}
