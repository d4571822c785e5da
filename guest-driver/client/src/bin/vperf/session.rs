//! A measurement, which ends when a command or processes exit, or when a signal arrives.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use vpmu_client::event::{EventError, Ready, poll};

use crate::os::SNAPSHOT;
use crate::target::{Opened, Started, Target, TargetError};
use crate::workload;

/// A running measurement.
#[derive(Debug)]
pub(crate) struct Session {
    started: Started,
    signalled: bool,
    snapshots: u32,
}

impl Session {
    /// Starts `target`, and measures until its command exits. Without a command, measures until all its processes
    /// have exited; with neither, until a signal arrives.
    pub(crate) fn start<'a>(target: Target, opened: impl IntoIterator<Item = &'a Opened>) -> Result<Self, TargetError> {
        Ok(Self { started: target.start(opened)?, signalled: false, snapshots: 0 })
    }

    /// Whether a command runs. Its output may go to the same terminal as this program's output.
    pub(crate) fn has_command(&self) -> bool {
        self.started.child.is_some()
    }

    /// Returns the number of snapshots requested since the last call.
    pub(crate) fn snapshots(&mut self) -> u32 {
        std::mem::take(&mut self.snapshots)
    }

    /// Waits until the measurement ends, any of `others` is ready, or `timeout` has passed; stores
    /// the results for `others` in `ready`. Returns true if the measurement has ended.
    pub(crate) fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
        ready: &mut Vec<Ready>,
    ) -> Result<bool, TargetError> {
        let mut fds = vec![self.started.signals.as_fd()];
        match &self.started.child {
            Some(child) => fds.push(child.process().as_fd()),
            None => fds.extend(self.started.processes.iter().map(AsFd::as_fd)),
        }
        let own = fds.len();
        fds.extend_from_slice(others);
        let answers = poll(&fds, timeout)?;
        ready.clear();
        ready.extend_from_slice(&answers[own..]);
        let ended: Vec<bool> = answers[1..own].iter().map(|ready| ready.readable).collect();
        let signalled = answers[0].readable;
        if signalled && self.pass_signal()? {
            return Ok(true);
        }
        if self.started.child.is_some() {
            return Ok(ended[0]);
        }
        let had_processes = !self.started.processes.is_empty();
        let mut ended = ended.into_iter();
        self.started.processes.retain(|_| !ended.next().unwrap_or(false));
        Ok(had_processes && self.started.processes.is_empty())
    }

    /// Reads a signal. Forwards the first signal to the child, whose exit ends the measurement, and
    /// kills the child on the second signal. Without a child, returns true, because the signal
    /// itself ends the measurement. The signal [`SNAPSHOT`] is only counted.
    fn pass_signal(&mut self) -> Result<bool, TargetError> {
        let signal = self.started.signals.next().map_err(TargetError::Signals)?;
        if signal == SNAPSHOT {
            self.snapshots += 1;
            return Ok(false);
        }
        let Some(child) = &self.started.child else {
            return Ok(true);
        };
        let signal = if self.signalled { libc::SIGKILL } else { signal };
        child.process().signal(signal).map_err(TargetError::Signals)?;
        self.signalled = true;
        Ok(false)
    }

    /// Stops the events. Two errors are ignored: an event on an offline CPU has stopped already,
    /// and the driver cannot stop some events.
    pub(crate) fn stop(&self, opened: &[Opened]) -> Result<(), TargetError> {
        for opened in opened {
            match opened.event.disable() {
                Err(EventError::Disable(error))
                    if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENODEV)) => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Ends the measurement. If the command has already exited, returns its exit code. Otherwise
    /// terminates the command and waits for it, and returns 0: ending a command early is not a
    /// failure. A signal during this wait kills the command.
    pub(crate) fn end(mut self) -> Result<u8, TargetError> {
        let Some(child) = &self.started.child else {
            return Ok(0);
        };
        let process = child.process();
        let ended = poll(&[process.as_fd()], Some(Duration::ZERO))?;
        if ended.iter().any(|ready| ready.readable) {
            return self.finish();
        }
        process.signal(libc::SIGTERM).map_err(TargetError::Signals)?;
        self.signalled = true;
        while !self.wait(&[], None, &mut Vec::new())? {}
        self.finish()?;
        Ok(0)
    }

    /// Returns the command's exit code, or 0 without a command.
    pub(crate) fn finish(self) -> Result<u8, TargetError> {
        match self.started.child {
            Some(child) => Ok(workload::exit_code(child.wait()?)),
            None => Ok(0),
        }
    }
}
