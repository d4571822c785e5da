//! Saves a running machine: stops everything, saves the state, and lets the machine continue.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use super::boot::Boot;
use super::pmu::Pmu;
use super::{Vm, reached};
use crate::arch::state::StateError;
use crate::confine::Confinement;
use crate::ctl::{Answer, Reply, Request, Server, ServerError, Socket};
use crate::devices::vpmu::Held;
use crate::exit::Ending;
use crate::operator::{Operator, OperatorError};
use crate::snapshot::dirty::DiffError;
use crate::snapshot::mailbox::{Completion, Mailbox, SnapshotRequest};
use crate::snapshot::memory::WriteError;
use crate::snapshot::{self, Facts, State, Taken};
use crate::terminal;
use crate::vcpu::Closed;

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
}

impl Vm {
    /// If a client has finished its snapshot, reports the result to the tracker, and logs a failure. If there is a
    /// request for a new snapshot, takes the snapshot. `boot` is the current boot.
    pub(super) fn answer_mailbox(&self, boot: &Boot) {
        let mailbox = &self.control.mailbox;
        if let Some(completion) = mailbox.take_finished() {
            self.settle(&completion);
            if let Err(why) = completion {
                log::warn!("a snapshot of the machine is incomplete: {why}");
            }
        }
        let Some(pending) = mailbox.take() else {
            return;
        };
        match self.take(boot, &pending.request, &pending.file) {
            Ok((taken, still)) if pending.request.then_exit => {
                mailbox.answer(pending, Ok(taken));
                self.end_with_snapshot(still);
            }
            Ok((taken, still)) => {
                drop(still);
                mailbox.answer(pending, Ok(taken));
            }
            Err(error) => mailbox.answer(pending, Err(vpmu_errors::chain(&error))),
        }
    }

    /// Keeps the machine stopped until the client has completed the snapshot, and then ends the run. If the snapshot
    /// fails, the machine continues.
    fn end_with_snapshot(&self, still: Still<'_>) {
        let (mailbox, end) = (&self.control.mailbox, &self.shared.end);
        loop {
            let finished = mailbox.take_finished();
            if let Some(completion) = &finished {
                self.settle(completion);
            }
            match finished {
                Some(Ok(())) => {
                    // Announce the end of the run before the gate opens, so that no vCPU enters the guest again.
                    end.announce(Ok(Ending::ByHand));
                    break;
                }
                Some(Err(why)) => {
                    log::warn!("the machine continues: its snapshot is incomplete: {why}");
                    break;
                }
                None => {}
            }
            if let Some(signal) = self.signals.read() {
                end.announce(Ok(Ending::Signal(signal)));
                break;
            }
            let others = [self.signals.as_raw_fd(), end.event().as_raw_fd()];
            match terminal::wait_readable(mailbox.as_raw_fd(), others) {
                Ok(true) => mailbox.clear(),
                Ok(false) if end.reached() => break,
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("the machine continues: cannot wait for the client of its snapshot: {error}");
                    break;
                }
            }
        }
        drop(still);
    }

    /// Reports the result of the last snapshot to the tracker. A complete snapshot becomes the base of the next
    /// diff.
    fn settle(&self, completion: &Completion) {
        if let Some(tracker) = &self.tracker {
            tracker.finish(completion.is_ok());
        }
    }

    /// Saves the machine, and writes its memory to `file`. The vCPUs and the drain thread are stopped until the
    /// returned value is dropped. The control socket's thread can access guest memory, too, but it is waiting for the
    /// result of this call.
    fn take(&self, boot: &Boot, request: &SnapshotRequest, file: &File) -> Result<(Taken, Still<'_>), TakeError> {
        let shared = &self.shared;
        match (&request.base, &self.tracker) {
            (Some(base), Some(tracker)) => tracker.check(base.id)?,
            (Some(_), None) => return Err(DiffError::Untracked.into()),
            (None, _) => {}
        }
        let start = Instant::now();
        let vcpus = self.config.vcpus;
        let closed = shared.gate.close(vcpus, &shared.threads, &shared.end);
        let (closed, states) = closed.ok_or(TakeError::Ends)?;
        let quiet = self.pmu.as_ref().map(|pmu| pmu.hold());
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
        let written = snapshot::memory::write(&memories, file, request.id, changed, goes_on)?;
        if let Some(tracker) = tracker {
            tracker.taken(request.id);
        }
        let memory = memories.iter().map(|memory| snapshot::memory::length(memory)).sum();
        let taken = Taken {
            state: text,
            memory,
            written,
            paused_ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        let still = Still { _quiet: quiet, _closed: closed };
        Ok((taken, still))
    }
}

/// Keeps the machine stopped until this value is dropped.
#[derive(Debug)]
struct Still<'a> {
    _quiet: Option<Held<'a>>,
    _closed: Closed<'a>,
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
            let serve = move |request, file| serve(&mailbox, operator.as_deref(), request, file);
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

fn serve(mailbox: &Mailbox, operator: Option<&Operator>, request: Request, file: Option<File>) -> Reply {
    match (request, operator) {
        (Request::Snapshot { id, then_exit, base }, _) => {
            let is_file = |file: &File| file.metadata().is_ok_and(|status| status.is_file());
            let Some(file) = file.filter(is_file) else {
                return Reply::Error(OperatorError::NoFile.to_string());
            };
            let request = SnapshotRequest { id, then_exit, base };
            match mailbox.request(request, file) {
                Ok(taken) => Reply::Ok(Answer::Snapshot(taken)),
                Err(error) => Reply::Error(error),
            }
        }
        (Request::Finish { id, error }, _) => match mailbox.finish(id, error.map_or(Ok(()), Err)) {
            Ok(()) => Reply::Ok(Answer::Done),
            Err(error) => Reply::Error(error),
        },
        (request, Some(operator)) => operator.serve(request, file),
        (_, None) => Reply::Error("this machine has no PMU, so it has no events".to_owned()),
    }
}
