//! Saves a running machine: stops everything, saves the state, and lets the machine continue.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::boot::Boot;
use super::pmu::Pmu;
use super::{Vm, reached};
use crate::arch::state::StateError;
use crate::confine::Confinement;
use crate::ctl::{Answer, Reply, Request, Server, ServerError, Socket};
use crate::exit::Ending;
use crate::operator::{Operator, OperatorError};
use crate::snapshot::dirty::DiffError;
use crate::snapshot::mailbox::{Mailbox, SnapshotRequest, Written};
use crate::snapshot::memory::WriteError;
use crate::snapshot::{self, Facts, Files, State, Taken};

/// Errors from saving the machine. After an error, the machine continues, unless its run is ending.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    /// The run is ending.
    #[error("the machine is ending")]
    Ends,
    /// The PMU device cannot be saved.
    #[error("the PMU device cannot be saved")]
    Pmu(#[from] vpmu::SaveError),
    /// KVM's state cannot be saved.
    #[error("the machine cannot be saved")]
    State(#[from] StateError),
    /// Memory cannot be written.
    #[error(transparent)]
    Memory(#[from] WriteError),
    /// A diff is not possible.
    #[error(transparent)]
    Diff(#[from] DiffError),
    /// The state cannot be written as JSON.
    #[error("the machine's state cannot be written as JSON")]
    Json(#[from] serde_json::Error),
    /// The files cannot be brought to disk.
    #[error("cannot write the snapshot's files to disk")]
    Disk(#[source] io::Error),
}

impl Vm {
    /// Takes a snapshot if there is a request for one. `boot` is the current boot.
    pub(super) fn answer_mailbox(&self, boot: &Boot) {
        if let Some(pending) = self.control.mailbox.take() {
            let written = self.take(boot, &pending.request, &pending.files);
            pending.answer(written.map_err(|error| vpmu_errors::chain(&error)));
        }
    }

    /// Saves the machine, and writes its memory to a file. If the run ends with the snapshot, also writes the state, and
    /// ends the run when both files are on disk. Otherwise the caller writes the state, so that the machine continues
    /// while the host writes to its disk.
    ///
    /// The vCPUs and the drain thread are stopped meanwhile. The control socket's thread can access guest memory, too,
    /// but it is waiting for the result of this call.
    fn take(&self, boot: &Boot, request: &SnapshotRequest, files: &Files) -> Result<Written, TakeError> {
        let shared = &self.shared;
        match (&request.base, &self.tracker) {
            (Some(base), Some(tracker)) => tracker.check(base.id)?,
            (Some(_), None) => return Err(DiffError::Untracked.into()),
            (None, _) => {}
        }
        let start = Instant::now();
        let vcpus = self.config.vcpus;
        let closed = shared.gate.close(vcpus, &shared.threads, &shared.end);
        let (_closed, states) = closed.ok_or(TakeError::Ends)?;
        let _quiet = self.pmu.as_ref().map(|pmu| pmu.hold());
        // Save the device first, because this writes its pending samples to memory, and may raise an interrupt.
        let pmu = self.pmu.as_ref().map(Pmu::save).transpose()?;
        // At this point, all writes are known: KVM's log has the guest's writes, and the device has just made its last
        // write.
        let tracker = self.tracker.as_ref();
        let changed = tracker.map(|tracker| tracker.changed(&boot.vm)).transpose()?;
        let state = State {
            changed: changed.filter(|_| request.base.is_some()),
            vcpus: states.into_iter().collect::<Result<_, _>>()?,
            vm: boot.save()?,
            console: self.console.serial.save(),
            pmu,
        };
        let facts = Facts::from(&self.config);
        let text = snapshot::text(request.id, facts, request.base.clone(), &state)?;
        let memories = reached(&self.memory, self.window.as_ref());
        let goes_on = || {
            if let Some(signal) = self.signals.read() {
                shared.end.announce(Ok(Ending::Signal(signal)));
            }
            !shared.end.reached()
        };
        let changed = state.changed.as_deref();
        let written = snapshot::memory::write(&memories, &files.memory, request.id, changed, goes_on)?;
        let text = if request.then_exit {
            files.complete(&text).map_err(TakeError::Disk)?;
            // Announce the end of the run before the gate opens, so that no vCPU enters the guest again.
            shared.end.announce(Ok(Ending::ByHand));
            None
        } else {
            Some(text)
        };
        if let Some(tracker) = tracker {
            tracker.taken(request.id);
        }
        let memory = memories.iter().map(|memory| snapshot::memory::length(memory)).sum();
        let taken = Taken { memory, written, paused_ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX) };
        Ok(Written { taken, state: text })
    }
}

/// A machine's control socket, and the mailbox for its snapshot requests. Dropping this value closes both.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) mailbox: Arc<Mailbox>,
    server: Option<Server>,
}

impl Control {
    /// Serves `socket`, if there is one. Snapshot requests go to `mailbox`, and all other requests to `operator`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub(super) fn start(
        mailbox: Mailbox,
        socket: Option<Socket>,
        operator: Option<Arc<Operator>>,
        confinement: &Confinement,
    ) -> Result<Self, ServerError> {
        let mailbox = Arc::new(mailbox);
        let server = socket.map(|socket| {
            let mailbox = Arc::clone(&mailbox);
            let serve = move |request, files| serve(&mailbox, operator.as_deref(), request, files);
            Server::start(socket, Box::new(serve), confinement)
        });
        Ok(Self { server: server.transpose()?, mailbox })
    }

    /// Stops serving clients.
    pub(super) fn end(&mut self) {
        // Close the mailbox first. Otherwise the server's thread could wait for an answer forever, and could not be
        // joined.
        self.mailbox.close();
        self.server = None;
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.end();
    }
}

fn serve(mailbox: &Mailbox, operator: Option<&Operator>, request: Request, files: Vec<File>) -> Reply {
    match (request, operator) {
        (Request::Snapshot { id, then_exit, base }, _) => {
            match save(mailbox, SnapshotRequest { id, then_exit, base }, files) {
                Ok(taken) => Reply::Ok(Answer::Snapshot(taken)),
                Err(error) => Reply::Error(error),
            }
        }
        (request, Some(operator)) => operator.serve(request, files),
        (_, None) => Reply::Error("this machine has no PMU, so it has no events".to_owned()),
    }
}

/// Saves the machine to `files`, the files for its memory and its state. The error is the reason for the client.
fn save(mailbox: &Mailbox, request: SnapshotRequest, files: Vec<File>) -> Result<Taken, String> {
    // A pipe or a device could block this thread.
    let are_files = |files: &[File; 2]| files.iter().all(|file| file.metadata().is_ok_and(|status| status.is_file()));
    let files = <[File; 2]>::try_from(files).ok().filter(are_files);
    let [memory, state] = files.ok_or_else(|| OperatorError::NoFile.to_string())?;
    let files = Arc::new(Files { memory, state });
    let Written { taken, state } = mailbox.request(request, Arc::clone(&files))?;
    if let Some(state) = state {
        files.complete(&state).map_err(|source| vpmu_errors::chain(&TakeError::Disk(source)))?;
    }
    Ok(taken)
}
