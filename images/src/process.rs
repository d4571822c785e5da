//! Runs other programs to their end, with their complaints kept for the error.

use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

use crate::sys;

/// How a program we need failed us.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// Not there, or not executable.
    #[error("cannot start {program}")]
    Start {
        /// Its name.
        program: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// It ran and reported failure.
    #[error(transparent)]
    Failed(Box<Failure>),
}

/// A program's own report of failure.
#[derive(Debug, Error)]
#[error("{program} failed ({status}): {complaint}")]
pub struct Failure {
    /// Its name.
    pub program: String,
    /// Its exit status.
    pub status: ExitStatus,
    /// The line of its output that says most.
    pub complaint: String,
    /// All of its output.
    pub everything: String,
}

/// Runs `command` without input; returns its stdout.
///
/// # Errors
/// [`ProcessError`], also when it exits with another code than 0.
pub fn output(command: &mut Command) -> Result<Vec<u8>, ProcessError> {
    let program = name(command);
    let output = sys::dies_with_us(command)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ProcessError::Start {
            program: program.clone(),
            source,
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let everything = text(&output.stdout) + &text(&output.stderr);
    let complaint = complaint(&everything);
    let status = output.status;
    Err(ProcessError::Failed(Box::new(Failure {
        program,
        status,
        complaint,
        everything,
    })))
}

/// The program's file name.
pub fn name(command: &Command) -> String {
    let program = Path::new(command.get_program());
    program
        .file_name()
        .unwrap_or(program.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// The first line that names an error, or else the last line.
fn complaint(output: &str) -> String {
    let lines = || output.lines().map(str::trim).filter(|l| !l.is_empty());
    let names_error =
        |l: &&str| l.contains("error:") || l.starts_with("E: ") || l.starts_with("error");
    lines()
        .find(names_error)
        .or_else(|| lines().next_back())
        .unwrap_or("it said nothing")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_failures() {
        assert_eq!(
            output(Command::new("sh").args(["-c", "echo hi"])).unwrap(),
            b"hi\n"
        );
        let script = "echo making; echo 'a.c:1: error: bad' >&2; echo done >&2; exit 3";
        let failed = output(Command::new("sh").args(["-c", script])).unwrap_err();
        assert_eq!(
            failed.to_string(),
            "sh failed (exit status: 3): a.c:1: error: bad"
        );
        let missing = output(&mut Command::new("/no/such/program")).unwrap_err();
        assert!(matches!(missing, ProcessError::Start { .. }));
    }

    #[test]
    fn without_an_error_line_the_last_one_speaks() {
        assert_eq!(complaint("one\ntwo\n\n"), "two");
        assert_eq!(complaint(""), "it said nothing");
    }
}
