//! The measured command: forked, but held before its exec until its events are open.
#![expect(unsafe_code, reason = "the child is held between fork and exec")]

use std::ffi::OsString;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::thread::JoinHandle;

use crate::os::{self, Process};

/// An error of the command.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("cannot start {program:?}")]
    Start { program: OsString, source: io::Error },
    #[error("cannot run {program:?}")]
    Run { program: OsString, source: io::Error },
    #[error("cannot wait for the workload")]
    Wait(#[source] io::Error),
}

impl WorkloadError {
    /// The exit code, following env(1).
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Run { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Run { .. } => 126,
            _ => crate::FAILED,
        }
    }
}

/// A child that waits before its exec. If a `Held` is dropped, the child exits without an exec.
#[derive(Debug)]
pub(crate) struct Held {
    program: OsString,
    pid: i32,
    go: Option<PipeWriter>,
    // Command::spawn returns only after the exec, so it is called in a thread.
    spawning: Option<JoinHandle<io::Result<Child>>>,
}

impl Held {
    /// Forks a child for `command`, which has at least one word.
    pub(crate) fn start(command: &[OsString]) -> Result<Self, WorkloadError> {
        let (program, arguments) = command.split_first().ok_or_else(|| WorkloadError::Start {
            program: OsString::new(),
            source: io::ErrorKind::InvalidInput.into(),
        })?;
        let error = |source| WorkloadError::Start { program: program.clone(), source };
        let (ready, tell_ready) = io::pipe().map_err(error)?;
        let (wait_go, go) = io::pipe().map_err(error)?;
        let mut command = Command::new(program);
        command.args(arguments);
        hold_before_exec(&mut command, &go, tell_ready, wait_go);
        let spawning =
            std::thread::Builder::new().name("workload".into()).spawn(move || command.spawn()).map_err(error)?;
        let mut held = Self { program: program.clone(), pid: 0, go: Some(go), spawning: Some(spawning) };
        held.pid = read_pid(ready).map_err(|source| {
            // If no pid arrives, the fork has failed, and the thread returns the cause.
            error(held.finish().err().unwrap_or(source))
        })?;
        Ok(held)
    }

    /// Process id of the child.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Releases the child and returns after its exec.
    pub(crate) fn release(mut self) -> Result<Running, WorkloadError> {
        let error = |source| WorkloadError::Run { program: self.program.clone(), source };
        if let Some(mut go) = self.go.take() {
            match go.write_all(&[1]) {
                // The child was killed before its release; its exit status contains the signal.
                Err(broken) if broken.kind() == io::ErrorKind::BrokenPipe => {}
                written => written.map_err(error)?,
            }
        }
        let child = self.finish().map_err(|source| WorkloadError::Run { program: self.program.clone(), source })?;
        let process = Process::open(self.pid).map_err(WorkloadError::Wait)?;
        Ok(Running { child, process })
    }

    fn finish(&mut self) -> io::Result<Child> {
        drop(self.go.take());
        let thread = self.spawning.take().ok_or(io::ErrorKind::NotFound)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The child reads end-of-file from the pipe and exits, so the spawn fails, as intended.
        let _ = self.finish();
    }
}

fn read_pid(mut ready: PipeReader) -> io::Result<i32> {
    let mut bytes = [0; 4];
    ready.read_exact(&mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// Makes the child send its pid and then wait for a byte. If the child reads end-of-file instead, it exits.
fn hold_before_exec(command: &mut Command, go: &PipeWriter, mut tell_ready: PipeWriter, mut wait_go: PipeReader) {
    let go = go.as_raw_fd();
    let hold = move || {
        // Close the child's own copy of the pipe's write end: while any copy is open, the child does
        // not read end-of-file. SAFETY: the child inherited the descriptor and does not use it otherwise.
        unsafe { libc::close(go) };
        let pid = i32::try_from(std::process::id()).map_err(|_| io::ErrorKind::InvalidData)?;
        tell_ready.write_all(&pid.to_ne_bytes())?;
        wait_go.read_exact(&mut [0])?;
        os::unblock_signals()
    };
    // SAFETY: `hold` makes system calls only: it takes no lock and allocates nothing.
    unsafe { command.pre_exec(hold) };
}

/// A child that runs its program.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    process: Process,
}

impl Running {
    /// The child's pidfd, for poll(2) and signals. It is readable once the child has exited.
    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Waits for the child's exit.
    pub(crate) fn wait(mut self) -> Result<ExitStatus, WorkloadError> {
        self.child.wait().map_err(WorkloadError::Wait)
    }
}

/// The exit code as a shell reports it: the program's own, or 128 + the terminating signal.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn held_child_runs_only_after_release() {
        let held = Held::start(&words("/bin/true")).unwrap();
        let exe = std::fs::read_link(format!("/proc/{}/exe", held.pid())).unwrap();
        assert_eq!(exe, std::env::current_exe().unwrap());
        let pid = held.pid();
        let running = held.release().unwrap();
        assert_eq!(i32::try_from(running.child.id()).unwrap(), pid);
        assert_eq!(exit_code(running.wait().unwrap()), 0);
    }

    #[test]
    fn dropped_held_child_never_runs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ran");
        let held = Held::start(&["touch".into(), file.clone().into()]).unwrap();
        drop(held);
        assert!(!file.exists());
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let run = |line| Held::start(&words(line)).and_then(Held::release);
        assert_eq!(exit_code(run("/bin/false").unwrap().wait().unwrap()), 1);
        let sleeper = run("sleep 1000").unwrap();
        sleeper.process().signal(libc::SIGTERM).unwrap();
        assert_eq!(exit_code(sleeper.wait().unwrap()), 128 + 15);
        assert_eq!(run("/nonexistent/program").unwrap_err().exit_code(), 127);
        assert_eq!(run("/etc/passwd").unwrap_err().exit_code(), 126);
    }

    #[test]
    fn command_killed_before_its_release_has_its_signals_exit_code() {
        let held = Held::start(&words("/bin/true")).unwrap();
        let process = Process::open(held.pid()).unwrap();
        process.signal(libc::SIGKILL).unwrap();
        // Wait until the thread that spawned the child has ended: the pipe then has no reader left,
        // and `release` cannot write to it.
        while !held.spawning.as_ref().unwrap().is_finished() {
            std::thread::yield_now();
        }
        let running = held.release().unwrap();
        assert_eq!(exit_code(running.wait().unwrap()), 128 + 9);
    }
}
