//! Runs the process of a machine, such as the VMM or QEMU: forwards its console output, kills it on timeout, and
//! never leaves it running.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::{process, sys};

const CHUNK: usize = 4096;
/// Interval between checks whether a program has ended after it closed its streams.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Errors of running a machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The program is missing or not executable.
    #[error("cannot start {program}")]
    Start {
        /// Its name.
        program: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Waiting for the program's end failed.
    #[error("cannot wait for {program}")]
    Wait {
        /// Its name.
        program: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The program took too long and was ended.
    #[error("the machine did not end within {} s", .0.as_secs())]
    Timeout(Duration),
}

/// The end of a machine.
#[derive(Debug)]
pub struct Ended {
    /// Its program's exit status.
    pub status: ExitStatus,
    /// Its program's output on stderr.
    pub stderr: String,
}

/// Kills the child when dropped, unless [`wait`] has already reaped the child.
#[derive(Debug)]
pub(crate) struct Guard(pub(crate) Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Both fail only if the child is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Replaces a timeout that is too long for the clock.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Runs `command` without input until it ends, and passes its stdout to `console` as it arrives.
///
/// # Errors
/// [`MachineError`]. If the program was started, it has been killed.
pub fn run(command: &mut Command, timeout: Duration, mut console: impl FnMut(&[u8])) -> Result<Ended, MachineError> {
    let program = process::name(command);
    let start = |source| MachineError::Start { program: program.clone(), source };
    let now = Instant::now();
    let deadline = now.checked_add(timeout).unwrap_or(now + LONGEST);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Guard(sys::dies_with_us(command).spawn().map_err(start)?);
    let (sender, receiver) = mpsc::channel();
    let stdout = child.0.stdout.take();
    let stderr = child.0.stderr.take();
    let open = sender.clone();
    thread::spawn(move || stdout.map(|stream| forward(stream, &sender)));
    let complaints = thread::spawn(move || {
        // This sender keeps the channel connected until stderr is closed, too.
        let _open = open;
        let mut text = Vec::new();
        // A stream that fails is treated as ended.
        stderr.map(|mut stream| stream.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(bytes) => console(&bytes),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => return Err(MachineError::Timeout(timeout)),
        }
    }
    // The program's streams are closed: either the program is ending, or it closed them itself and continues to run.
    let status = wait(&mut child.0, deadline)
        .map_err(|source| MachineError::Wait { program, source })?
        .ok_or(MachineError::Timeout(timeout))?;
    Ok(Ended { status, stderr: complaints.join().unwrap_or_default() })
}

/// Waits until `child` ends; `None` if it still runs at `deadline`.
pub(crate) fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if status.is_some() || left.is_zero() {
            return Ok(status);
        }
        thread::sleep(left.min(LOOK_EVERY));
    }
}

fn forward(mut stream: impl Read, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = [0; CHUNK];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        if sender.send(buffer[..count].to_vec()).is_err() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn console_status_and_complaints() {
        let mut console = Vec::new();
        let mut command = shell("echo out; echo err >&2; exit 7");
        let timeout = Duration::from_secs(60);
        let ended = run(&mut command, timeout, |bytes| console.extend_from_slice(bytes)).unwrap();
        assert_eq!(console, b"out\n");
        assert_eq!((ended.status.code(), ended.stderr.as_str()), (Some(7), "err\n"));
    }

    #[test]
    fn timeout_beyond_the_clock_is_no_limit() {
        let mut command = shell("exit 7");
        let ended = run(&mut command, Duration::MAX, |_| {}).unwrap();
        assert_eq!(ended.status.code(), Some(7));
    }

    #[test]
    fn machine_beyond_its_timeout_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        // Also after it closed its streams.
        for closed in ["", ">&-", "2>&-", ">&- 2>&-"] {
            let mut command = shell(&format!("echo $$ > {}; exec sleep 1000 {closed}", file.display()));
            let error = run(&mut command, Duration::from_millis(500), |_| {}).unwrap_err();
            assert!(matches!(error, MachineError::Timeout(_)), "{closed:?}");
            let pid = std::fs::read_to_string(&file).unwrap();
            assert!(!std::path::Path::new("/proc").join(pid.trim()).exists());
        }
    }
}
