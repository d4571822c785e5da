//! From the start of measuring to its end: the end of a command or of processes, or a signal.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use vpmu_client::event::{EventError, Ready, poll};

use crate::os::{Process, SNAPSHOT, Signals};
use crate::target::{Opened, TargetError};
use crate::workload::{self, Running};

/// What is being measured.
#[derive(Debug)]
pub(crate) struct Measuring {
    signals: Signals,
    processes: Vec<Process>,
    child: Option<Running>,
    signalled: bool,
    snapshots: u32,
}

impl Measuring {
    /// Of processes, or for as long as `child` lives.
    pub(crate) fn new(signals: Signals, processes: Vec<Process>, child: Option<Running>) -> Self {
        Self {
            signals,
            processes,
            child,
            signalled: false,
            snapshots: 0,
        }
    }

    /// A command runs, whose output may go where this program's does.
    pub(crate) fn has_command(&self) -> bool {
        self.child.is_some()
    }

    /// How often a snapshot was asked for since the last call.
    pub(crate) fn snapshots(&mut self) -> u32 {
        std::mem::take(&mut self.snapshots)
    }

    /// Waits for the end or until any of `others` is ready, whose answers come in `ready`;
    /// true at the end.
    pub(crate) fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
        ready: &mut Vec<Ready>,
    ) -> Result<bool, TargetError> {
        let mut fds = vec![self.signals.as_fd()];
        match &self.child {
            Some(child) => fds.push(child.process().as_fd()),
            None => fds.extend(self.processes.iter().map(AsFd::as_fd)),
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
        if self.child.is_some() {
            return Ok(ended[0]);
        }
        let had_processes = !self.processes.is_empty();
        let mut ended = ended.into_iter();
        self.processes.retain(|_| !ended.next().unwrap_or(false));
        Ok(had_processes && self.processes.is_empty())
    }

    /// A signal to vperf goes to its child, whose end is then waited for; the second kills
    /// it. True if there is no child: then it ends the measuring.
    fn pass_signal(&mut self) -> Result<bool, TargetError> {
        let signal = self.signals.next().map_err(TargetError::Signals)?;
        if signal == SNAPSHOT {
            self.snapshots += 1;
            return Ok(false);
        }
        let Some(child) = &self.child else {
            return Ok(true);
        };
        let signal = if self.signalled {
            libc::SIGKILL
        } else {
            signal
        };
        child
            .process()
            .signal(signal)
            .map_err(TargetError::Signals)?;
        self.signalled = true;
        Ok(false)
    }

    /// Stops counting. What children that live on inherited cannot be stopped: it counts up
    /// to its reading. What has gone with its CPU has stopped.
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

    /// Ends a command that still runs, which then gives no exit code but 0: to end it early
    /// is no failure. A signal meanwhile kills it. One that has ended gives its own.
    pub(crate) fn end(mut self) -> Result<u8, TargetError> {
        let Some(child) = &self.child else {
            return Ok(0);
        };
        let process = child.process();
        let ended = poll(&[process.as_fd()], Some(Duration::ZERO))?;
        if ended.iter().any(|ready| ready.readable) {
            return self.finish();
        }
        process
            .signal(libc::SIGTERM)
            .map_err(TargetError::Signals)?;
        self.signalled = true;
        while !self.wait(&[], None, &mut Vec::new())? {}
        self.finish()?;
        Ok(0)
    }

    /// The exit code to end with: the command's, else 0.
    pub(crate) fn finish(self) -> Result<u8, TargetError> {
        match self.child {
            Some(child) => Ok(workload::exit_code(child.wait()?)),
            None => Ok(0),
        }
    }
}
