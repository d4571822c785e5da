//! Runs other programs until they end, and keeps their output for error messages.

use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

use crate::sys;

/// Errors of running a program.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// The program is missing or not executable. [`follow`] also returns this if it cannot read the program's output
    /// or wait for the program to exit.
    #[error("cannot start {program}")]
    Start {
        /// Its name.
        program: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The program ran and reported failure.
    #[error(transparent)]
    Failed(Box<Failure>),
}

/// A program that ran and failed.
#[derive(Debug, Error)]
#[error("{program} failed ({status}): {complaint}")]
pub struct Failure {
    /// Its name.
    pub program: String,
    /// Its exit status.
    pub status: ExitStatus,
    /// The line of the program's output that names the error.
    pub complaint: String,
    /// All of the program's output.
    pub everything: String,
}

/// A word as a person types it in a shell: quoted if the shell would otherwise change it.
#[must_use]
pub fn shown(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,./:@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { quote(word) }
}

/// Quotes one word for a shell.
#[must_use]
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Runs `command` without input; returns its stdout.
///
/// # Errors
/// [`ProcessError`], also if it exits with a code other than 0.
pub fn output(command: &mut Command) -> Result<Vec<u8>, ProcessError> {
    let program = name(command);
    let output = sys::dies_with_us(command)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| ProcessError::Start { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let everything = text(&output.stdout) + &text(&output.stderr);
    Err(failure(program, output.status, everything))
}

/// Like [`output`], for a long run: passes each line of output to `line` as it arrives.
///
/// # Errors
/// [`ProcessError`].
pub fn follow(command: &mut Command, mut line: impl FnMut(&str)) -> Result<(), ProcessError> {
    let program = name(command);
    let start = |source| ProcessError::Start { program: program.clone(), source };
    let (reader, writer) = io::pipe().map_err(start)?;
    let mut child = sys::dies_with_us(command)
        .stdin(Stdio::null())
        .stdout(writer.try_clone().map_err(start)?)
        .stderr(writer)
        .spawn()
        .map_err(start)?;
    // Drop the pipe's write ends, which `command` still holds: otherwise the loop below would never read
    // end-of-file.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut everything = String::new();
    for bytes in BufReader::new(reader).split(b'\n') {
        let text = String::from_utf8_lossy(&bytes.map_err(start)?).into_owned();
        line(&text);
        everything.push_str(&text);
        everything.push('\n');
    }
    let status = child.wait().map_err(start)?;
    if status.success() { Ok(()) } else { Err(failure(program, status, everything)) }
}

fn failure(program: String, status: ExitStatus, everything: String) -> ProcessError {
    ProcessError::Failed(Box::new(Failure { program, status, complaint: complaint(&everything), everything }))
}

/// The program's file name.
pub fn name(command: &Command) -> String {
    let program = Path::new(command.get_program());
    program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the first line about a full disk, which may have caused the other errors; else the first line that
/// names an error; else the last line.
fn complaint(output: &str) -> String {
    let lines = || output.lines().map(str::trim).filter(|l| !l.is_empty());
    let full_disk = |l: &&str| l.contains("No space left on device");
    let names_error = |l: &&str| l.contains("error:") || l.starts_with("E: ") || l.starts_with("error");
    lines()
        .find(full_disk)
        .or_else(|| lines().find(names_error))
        .or_else(|| lines().next_back())
        .unwrap_or("no output")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell_and_plain_ones_are_not_quoted() {
        let words = ["it's \"$HOME\" `x` \\ \n;", "", "a b", "q35,memory-backend=ram"];
        for word in words {
            let script = format!("printf %s {}", shown(word));
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(output.stdout, word.as_bytes());
        }
        assert_eq!(shown(words[3]), words[3]);
    }

    #[test]
    fn output_and_failures() {
        assert_eq!(output(Command::new("sh").args(["-c", "echo hi"])).unwrap(), b"hi\n");
        let script = "echo making; echo 'a.c:1: error: bad' >&2; echo done >&2; exit 3";
        let failed = output(Command::new("sh").args(["-c", script])).unwrap_err();
        assert_eq!(failed.to_string(), "sh failed (exit status: 3): a.c:1: error: bad");
        let missing = output(&mut Command::new("/no/such/program")).unwrap_err();
        assert!(matches!(missing, ProcessError::Start { .. }));
    }

    #[test]
    fn lines_are_handed_on() {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; echo error: three; exit 3"]);
        let failed = follow(&mut command, |line| lines.push(line.to_owned())).unwrap_err();
        assert_eq!(lines, ["one", "two", "error: three"]);
        assert_eq!(failed.to_string(), "sh failed (exit status: 3): error: three");
        follow(&mut Command::new("true"), |_| panic!("`true` printed a line")).unwrap();
    }

    #[test]
    fn complaint_names_the_full_disk_behind_an_error() {
        let output = "dpkg-deb: error: tar subprocess returned error exit status 2\n\
                      tar: ./usr/bin/ld: Cannot write: No space left on device\n";
        assert_eq!(complaint(output), "tar: ./usr/bin/ld: Cannot write: No space left on device");
    }

    #[test]
    fn complaint_without_an_error_line_is_the_last_line() {
        assert_eq!(complaint("one\ntwo\n\n"), "two");
        assert_eq!(complaint(""), "no output");
    }
}
