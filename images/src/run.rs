//! The run of one machine: splits its console output into parts as it arrives, and decides whether the run succeeded.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::boot::Boot;
use crate::console_protocol::{Frames, Transcript};
use crate::error::BootError;
use crate::file_error::FileError;
use crate::kvm_host::KvmHost;
use crate::machine::{self, Ended};
use crate::post_run::PostRunOutput;
use crate::programs;

/// The result of a command.
#[derive(Debug)]
pub struct Outcome {
    /// The command's output on the console, with `\n` at the end of lines.
    pub output: String,
    /// The command's exit code. It is -1 if the guest's kernel panicked before the command had ended and
    /// `Boot::post_run` is set. Without `Boot::post_run`, such a run is an error.
    pub status: i32,
    /// The result of the command that ran afterwards, if any.
    pub post_run: Option<PostRunOutput>,
    /// The machine that the command ran on.
    pub kvm_host: KvmHost,
    /// The VMM's report.
    pub report: serde_json::Value,
    /// Run time of the machine, the lab included.
    pub wall: Duration,
}

/// A machine that has ended.
pub(crate) struct Run {
    pub(crate) ended: Ended,
    pub(crate) transcript: Transcript,
    pub(crate) console: Console,
    pub(crate) wall: Duration,
}

/// A machine's console output, which is written to a file if the run fails.
pub(crate) struct Console {
    directory: PathBuf,
    bytes: Vec<u8>,
}

impl Console {
    pub(crate) fn keep(self) -> Result<PathBuf, BootError> {
        let path = self.directory.join("console.log");
        let written = fs::create_dir_all(&self.directory).and_then(|()| {
            let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
            file.write_all(&self.bytes)?;
            file.persist(&path).map_err(|error| error.error)
        });
        written.map_err(FileError::at(&path))?;
        Ok(path)
    }
}

/// Runs the machine and splits its console.
pub(crate) fn watch(boot: &Boot, command: &mut Command, mark: &str, kvm_host: &KvmHost) -> Result<Run, BootError> {
    let mut frames = Frames::new(mark);
    let mut console = Console { directory: programs::target(), bytes: Vec::new() };
    let started = Instant::now();
    let ended = machine::run(command, boot.timeout, |bytes| {
        console.bytes.extend_from_slice(bytes);
        let output = frames.push(bytes);
        if boot.echo {
            let mut stdout = io::stdout().lock();
            // Ignore errors: the reader of our stdout may have closed it.
            let _ = stdout.write_all(&output).and_then(|()| stdout.flush());
        }
    });
    let wall = started.elapsed();
    match ended {
        Ok(ended) => Ok(Run { ended, transcript: frames.finish(), console, wall }),
        Err(source) => {
            let console = console.keep()?;
            let output = frames.finish().output;
            Err(BootError::Machine {
                kvm_host: kvm_host.clone(),
                console,
                output: String::from_utf8_lossy(&output).into_owned(),
                source,
            })
        }
    }
}

/// The VMM's exit code when the guest's kernel has panicked.
const PANICKED: i32 = 5;

/// The outcome of a run. A run is an error unless its command ended and its VMM succeeded. There is one exception: if
/// another command runs afterwards, the guest's kernel may panic before the first command has ended.
pub(crate) fn outcome(
    boot: &Boot,
    transcript: Transcript,
    kvm_host: KvmHost,
    wall: Duration,
    console: Console,
) -> Result<Outcome, BootError> {
    let log = String::from_utf8_lossy(&transcript.log);
    let report = serde_json::from_slice(&transcript.report);
    let status = match (transcript.status, transcript.vmm) {
        (None, Some(PANICKED)) if boot.post_run.is_some() => Some(-1),
        (status, Some(0)) => status,
        _ => None,
    };
    let what = match (status, transcript.vmm, report) {
        (Some(status), _, Ok(report)) => {
            let output = String::from_utf8_lossy(&transcript.output).into_owned();
            return Ok(Outcome {
                output,
                status,
                post_run: transcript.host_status.map(|status| PostRunOutput {
                    output: String::from_utf8_lossy(&transcript.host).into_owned(),
                    status,
                }),
                kvm_host,
                report,
                wall,
            });
        }
        (Some(_), _, Err(error)) => format!("the VMM's report cannot be read ({error})"),
        (_, code, _) => {
            let when = match (transcript.status, transcript.begun) {
                (Some(_), _) => "after the command had ended",
                (None, true) => "before the command had ended",
                (None, false) => "before the command began",
            };
            let error = log.lines().last().map(|line| format!(": {line}")).unwrap_or_default();
            let end = match kvm_host {
                KvmHost::Beside { .. } => ending_of_other(code),
                KvmHost::Direct | KvmHost::Lab { .. } => ending(code),
            };
            format!("{end} {when}{error}")
        }
    };
    Err(BootError::Ended {
        kvm_host,
        what,
        console: console.keep()?,
        output: String::from_utf8_lossy(&transcript.output).into_owned(),
    })
}

/// The VMM's exit codes in words.
fn ending(code: Option<i32>) -> String {
    match code {
        Some(0) => "the guest powered off".to_owned(),
        Some(3) => "the guest asked for a reset".to_owned(),
        Some(4) => "the guest's processor shut down (triple fault)".to_owned(),
        Some(PANICKED) => "the guest's kernel panicked".to_owned(),
        Some(6) => "the operator ended the guest".to_owned(),
        Some(8) => "KVM could not continue the guest".to_owned(),
        Some(code) => format!("the VMM failed (exit code {code})"),
        None => "the VMM was killed".to_owned(),
    }
}

/// The exit codes of other VMMs in words. QEMU also ends with 0 when the guest resets.
fn ending_of_other(code: Option<i32>) -> String {
    match code {
        Some(0) => "the guest powered off or reset".to_owned(),
        Some(code) => format!("the VMM failed (exit code {code})"),
        None => "the VMM was killed".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn console(directory: &Path) -> Console {
        Console { directory: directory.to_owned(), bytes: b"console\n".to_vec() }
    }

    fn outcome_of(transcript: Transcript) -> Result<Outcome, BootError> {
        ended(Boot::default(), transcript)
    }

    fn ended(boot: Boot, transcript: Transcript) -> Result<Outcome, BootError> {
        let directory = tempfile::tempdir().unwrap();
        outcome(&boot, transcript, KvmHost::Direct, Duration::ZERO, console(directory.path()))
    }

    fn good() -> Transcript {
        let (status, vmm) = (Some(3), Some(0));
        let output = b"hello\n".to_vec();
        Transcript { output, status, vmm, report: b"{\"a\": 1}".to_vec(), begun: true, ..Transcript::default() }
    }

    #[test]
    fn failing_guest_command_is_an_outcome() {
        let outcome = outcome_of(good()).unwrap();
        assert_eq!((outcome.status, outcome.output.as_str()), (3, "hello\n"));
        assert_eq!(outcome.report["a"], 1);
    }

    #[test]
    fn panic_is_an_outcome_if_a_command_runs_afterwards() {
        let transcript =
            || Transcript { status: None, vmm: Some(5), host: b"looked".to_vec(), host_status: Some(1), ..good() };
        let boot = Boot { post_run: Some(crate::PostRun::default()), ..Boot::default() };
        let outcome = ended(boot.clone(), transcript()).unwrap();
        let check = outcome.post_run.unwrap();
        assert_eq!((outcome.status, check.status, check.output.as_str()), (-1, 1, "looked"));
        assert!(ended(Boot::default(), transcript()).is_err());
        let reset = Transcript { vmm: Some(3), ..transcript() };
        assert!(ended(boot, reset).is_err());
    }

    #[test]
    fn failed_run_is_explained_in_one_line() {
        let cases = [
            (Transcript { status: None, ..good() }, "powered off before the command had ended"),
            (Transcript { vmm: Some(5), status: None, ..good() }, "panicked before the command had"),
            (Transcript { vmm: Some(1), log: b"a\nno memory\n".to_vec(), ..good() }, "no memory"),
            (Transcript { report: Vec::new(), ..good() }, "report cannot be read"),
            (Transcript { vmm: None, ..Transcript::default() }, "killed before the command began"),
        ];
        for (transcript, expected) in cases {
            let printed = String::from_utf8(transcript.output.clone()).unwrap();
            let error = outcome_of(transcript).unwrap_err();
            assert_eq!(error.output(), printed, "the output before the failure");
            let error = error.to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
        }
    }
}
