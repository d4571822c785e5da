//! The device in a process of its own, `vmm serve`, which another VMM reaches by a socket. The process must listen before
//! that VMM starts, and must not outlive it.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::machine::{self, Guard};
use crate::sys;

/// The time in which the process must listen.
const STARTS_WITHIN: Duration = Duration::from_secs(30);
/// The time in which the process must end after the VMM has disconnected. It may have a recording to write.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The table of the Unix sockets.
const SOCKETS: &str = "/proc/net/unix";
/// The flag of a socket that listens, in that table.
const LISTENS: u32 = 1 << 16;

/// Errors of the device's process.
#[derive(Debug, Error)]
pub enum DaemonError {
    /// The VMM could not be started.
    #[error("cannot start `vmm serve`")]
    Start(#[source] io::Error),
    /// The process could not be observed.
    #[error("cannot observe `vmm serve`")]
    Observe(#[source] io::Error),
    /// The process ended before it listened.
    #[error("`vmm serve` ended before it listened ({status}): {log}")]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// Its output on stderr.
        log: String,
    },
    /// The process did not begin to listen.
    #[error("`vmm serve` did not listen on its socket within {} s: {log}", STARTS_WITHIN.as_secs())]
    Silent {
        /// Its output on stderr.
        log: String,
    },
    /// The process failed after it had listened.
    #[error("`vmm serve` failed ({status}): {log}")]
    Failed {
        /// Its exit status.
        status: ExitStatus,
        /// Its output on stderr.
        log: String,
    },
    /// The process continued to run after the VMM had ended.
    #[error("`vmm serve` was still running {} s after the VMM had ended: {log}", ENDS_WITHIN.as_secs())]
    Stays {
        /// Its output on stderr.
        log: String,
    },
}

/// The device's process. It is killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    process: Guard,
    /// A file, not a pipe: a process that nobody reads from could block, and a child of it could keep a pipe open.
    stderr: File,
}

impl Daemon {
    /// The command for a person or for [`Daemon::start`].
    #[must_use]
    pub fn arguments(socket: &str, vcpus: u32, more: &[String]) -> Vec<String> {
        let ours = ["serve", "--socket", socket, "--vcpus", &vcpus.to_string()].map(str::to_owned);
        ours.into_iter().chain(more.iter().cloned()).collect()
    }

    /// Starts the process; returns when it listens on `socket`.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub fn start(command: &mut Command, socket: &Path) -> Result<Self, DaemonError> {
        let stderr = tempfile::tempfile().map_err(DaemonError::Start)?;
        let write_end = stderr.try_clone().map_err(DaemonError::Start)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(write_end);
        let process = Guard(sys::dies_with_us(command).spawn().map_err(DaemonError::Start)?);
        let mut daemon = Self { process, stderr };
        let deadline = Instant::now() + STARTS_WITHIN;
        loop {
            let table = fs::read_to_string(SOCKETS).map_err(DaemonError::Observe)?;
            if listens(&table, socket) {
                return Ok(daemon);
            }
            if let Some(status) = daemon.child().try_wait().map_err(DaemonError::Observe)? {
                return Err(DaemonError::Ended { status, log: daemon.log() });
            }
            if Instant::now() >= deadline {
                return Err(DaemonError::Silent { log: daemon.log() });
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until the process has ended; returns its output on stderr, in one line. Call it when the VMM has ended.
    ///
    /// # Errors
    /// [`DaemonError`]: the process failed, or continues to run, in which case it has been killed.
    pub fn finish(mut self) -> Result<String, DaemonError> {
        let ended = machine::wait(self.child(), Instant::now() + ENDS_WITHIN).map_err(DaemonError::Observe)?;
        match ended {
            Some(status) if status.success() => Ok(self.log()),
            Some(status) => Err(DaemonError::Failed { status, log: self.log() }),
            None => Err(DaemonError::Stays { log: self.log() }),
        }
    }

    fn child(&mut self) -> &mut Child {
        &mut self.process.0
    }

    /// The output on stderr until now, in one line.
    fn log(&mut self) -> String {
        let mut log = Vec::new();
        // The file is only read, so an error can only shorten the log. Other errors matter more.
        let _ = self.stderr.rewind().and_then(|()| self.stderr.read_to_end(&mut log));
        let log = String::from_utf8_lossy(&log).trim().replace('\n', "; ");
        if log.is_empty() { "it logged nothing".to_owned() } else { log }
    }
}

/// Whether a socket with this path listens, according to the `table` of all sockets. The path exists before the socket
/// listens, so its existence would prove too little.
fn listens(table: &str, socket: &Path) -> bool {
    let flags = |line: &str| line.split_whitespace().nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
    let socket = format!(" {}", socket.display());
    table.lines().filter(|line| line.ends_with(&socket)).filter_map(flags).any(|flags| flags & LISTENS != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn socket_listens_if_the_kernel_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a socket");
        let of = |path: &Path| listens(&fs::read_to_string(SOCKETS).unwrap(), path);
        assert!(!of(&path));
        let listener = UnixListener::bind(&path).unwrap();
        assert!(of(&path));
        drop(listener);
        assert!(path.exists() && !of(&path), "the name of a socket that is gone");
        let bound = "0000000000000000: 00000002 00000000 00000000 0001 01 31337 /s";
        assert!(!listens(bound, Path::new("/s")));
        assert!(listens(&bound.replacen(" 00000000 0001", " 00010000 0001", 1), Path::new("/s")));
    }

    #[test]
    fn daemon_that_ends_at_once_is_reported_with_its_log() {
        let error = Daemon::start(&mut shell("echo no PMU >&2; echo really >&2; exit 7"), Path::new("/no/socket"));
        let error = error.unwrap_err();
        assert!(matches!(error, DaemonError::Ended { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("exit status: 7") && text.ends_with("no PMU; really"), "{text}");
    }

    #[test]
    fn daemon_is_finished_or_killed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let log = Daemon::start(&mut shell("echo bye >&2"), &path).unwrap().finish().unwrap();
        assert_eq!(log, "bye");
        let failed = Daemon::start(&mut shell("exit 1"), &path).unwrap().finish().unwrap_err();
        assert!(failed.to_string().ends_with("it logged nothing"), "{failed}");
        let mut stays = Daemon::start(&mut shell("exec sleep 1000"), &path).unwrap();
        let process = format!("/proc/{}", stays.child().id());
        assert!(Path::new(&process).exists());
        drop(stays);
        assert!(!Path::new(&process).exists());
    }
}
