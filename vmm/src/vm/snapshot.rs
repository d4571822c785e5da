//! Saves the machine while it runs: everything is stopped, saved, and continued.

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
use crate::snapshot::desk::{Desk, Wanted, Whole};
use crate::snapshot::dirty::DiffError;
use crate::snapshot::memory::WriteError;
use crate::snapshot::{self, Facts, State, Taken};
use crate::terminal;
use crate::vcpu::Closed;

/// Errors of saving the machine, which continues.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    /// The end of the run is announced.
    #[error("the machine is ending")]
    Ends,
    /// The embedder emulates registers, whose state the VMM does not know.
    #[error("the machine has registers that its embedder emulates, which are not saved")]
    Emulated,
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
    /// Handles a finished snapshot, and answers a request to save the machine in its `boot`.
    pub(super) fn answer_desk(&self, boot: &Boot) {
        let desk = &self.control.desk;
        if let Some(whole) = desk.take_finished() {
            self.settle(&whole);
            if let Err(why) = whole {
                log::warn!("a snapshot of the machine is incomplete: {why}");
            }
        }
        let Some(asked) = desk.take() else {
            return;
        };
        match self.take(boot, &asked.wanted, &asked.file) {
            Ok((taken, still)) if asked.wanted.then_exit => {
                desk.answer(asked, Ok(taken));
                self.end_with_snapshot(still);
            }
            Ok((taken, still)) => {
                drop(still);
                desk.answer(asked, Ok(taken));
            }
            Err(error) => desk.answer(asked, Err(vpmu_errors::chain(&error))),
        }
    }

    /// Keeps the machine stopped until the client has the complete snapshot, and then ends the run. The
    /// machine continues if the snapshot fails.
    fn end_with_snapshot(&self, still: Still<'_>) {
        let (desk, end) = (&self.control.desk, &self.shared.end);
        loop {
            let finished = desk.take_finished();
            if let Some(whole) = &finished {
                self.settle(whole);
            }
            match finished {
                Some(Ok(())) => {
                    // Announce this before a vCPU can pass the gate.
                    end.announce(Ok(Ending::ByHand));
                    break;
                }
                Some(Err(why)) => {
                    log::warn!("the machine goes on: its snapshot is incomplete: {why}");
                    break;
                }
                None => {}
            }
            if let Some(signal) = self.signals.read() {
                end.announce(Ok(Ending::Signal(signal)));
                break;
            }
            let others = [self.signals.as_raw_fd(), end.event().as_raw_fd()];
            match terminal::wait_readable(desk.as_raw_fd(), others) {
                Ok(true) => desk.heard(),
                Ok(false) if end.reached() => break,
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("the machine goes on: it cannot wait for its snapshot: {error}");
                    break;
                }
            }
        }
        drop(still);
    }

    /// Ends the last snapshot: if it is complete, it becomes the base of the next diff.
    fn settle(&self, whole: &Whole) {
        if let Some(tracker) = &self.tracker {
            tracker.finish(whole.is_ok());
        }
    }

    /// Saves the machine, and writes its memory to `file`. The vCPUs and the drain thread are stopped until the
    /// returned value is dropped. The other thread that accesses guest memory, the control socket's, waits for
    /// the result of this call.
    fn take(
        &self,
        boot: &Boot,
        wanted: &Wanted,
        file: &File,
    ) -> Result<(Taken, Still<'_>), TakeError> {
        let shared = &self.shared;
        if shared.emulation.is_some() {
            return Err(TakeError::Emulated);
        }
        match (&wanted.base, &self.tracker) {
            (Some(base), Some(tracker)) => tracker.check(&base.id)?,
            (Some(_), None) => return Err(DiffError::Untracked.into()),
            (None, _) => {}
        }
        let start = Instant::now();
        let vcpus = self.config.vcpus;
        let closed = shared.gate.close(vcpus, &shared.threads, &shared.end);
        let (closed, states) = closed.ok_or(TakeError::Ends)?;
        let quiet = self.pmu.as_ref().map(|pmu| pmu.hold());
        // Save the device first: this writes its pending samples to memory, and may interrupt the guest.
        let pmu = self.pmu.as_ref().map(Pmu::save).transpose()?;
        // All writes are known now: KVM's log has the guest's writes, and the device has just made its last
        // write.
        let tracker = self.tracker.as_ref();
        let changed = tracker
            .map(|tracker| tracker.changed(&boot.vm))
            .transpose()?;
        let state = State {
            changed: changed.filter(|_| wanted.base.is_some()),
            vcpus: states.into_iter().collect::<Result<_, _>>()?,
            vm: boot.save()?,
            console: self.console.serial.save(),
            pmu,
        };
        let facts = Facts::from(&self.config);
        let text = snapshot::text(&wanted.id, facts, wanted.base.clone(), &state)?;
        let memories = reached(&self.memory, self.window.as_ref());
        let goes_on = || {
            if let Some(signal) = self.signals.read() {
                shared.end.announce(Ok(Ending::Signal(signal)));
            }
            !shared.end.reached()
        };
        let changed = state.changed.as_deref();
        let written = snapshot::memory::write(&memories, file, &wanted.id, changed, goes_on)?;
        if let Some(tracker) = tracker {
            tracker.taken(&wanted.id);
        }
        let memory = memories
            .iter()
            .map(|memory| snapshot::memory::length(memory))
            .sum();
        let taken = Taken {
            state: text,
            memory,
            written,
            paused_ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        };
        let still = Still {
            _quiet: quiet,
            _closed: closed,
        };
        Ok((taken, still))
    }
}

/// Keeps the machine stopped until it is dropped.
#[derive(Debug)]
struct Still<'a> {
    _quiet: Option<Held<'a>>,
    _closed: Closed<'a>,
}

/// A machine's control socket and desk. Dropping the value stops both.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) desk: Arc<Desk>,
    server: Option<Server>,
}

impl Control {
    /// Serves `socket`, if there is one: `desk` gets requests for snapshots, `operator` all other requests.
    ///
    /// # Errors
    /// [`ServerError`].
    pub(super) fn start(
        desk: Desk,
        socket: Option<Socket>,
        operator: Option<Arc<Operator>>,
        confinement: &Confinement,
    ) -> Result<Self, ServerError> {
        let desk = Arc::new(desk);
        let server = socket.map(|socket| {
            let desk = Arc::clone(&desk);
            let serve = move |request, file| serve(&desk, operator.as_deref(), request, file);
            Server::start(socket, Box::new(serve), confinement)
        });
        Ok(Self {
            server: server.transpose()?,
            desk,
        })
    }

    /// Stops serving clients.
    pub(super) fn end(&mut self) {
        // Otherwise the server's thread could wait at the desk forever, and could not be joined.
        self.desk.close();
        self.server = None;
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.end();
    }
}

fn serve(desk: &Desk, operator: Option<&Operator>, request: Request, file: Option<File>) -> Reply {
    match (request, operator) {
        (
            Request::Snapshot {
                id,
                then_exit,
                base,
            },
            _,
        ) => {
            let is_file = |file: &File| file.metadata().is_ok_and(|status| status.is_file());
            let Some(file) = file.filter(is_file) else {
                return Reply::Error(OperatorError::NoFile.to_string());
            };
            let wanted = Wanted {
                id,
                then_exit,
                base,
            };
            match desk.ask(wanted, file) {
                Ok(taken) => Reply::Ok(Answer::Snapshot(taken)),
                Err(error) => Reply::Error(error),
            }
        }
        (Request::Finish { id, error }, _) => match desk.finish(&id, error.map_or(Ok(()), Err)) {
            Ok(()) => Reply::Ok(Answer::Done),
            Err(error) => Reply::Error(error),
        },
        (request, Some(operator)) => operator.serve(request, file),
        (_, None) => Reply::Error("this machine has no PMU, and no events".to_owned()),
    }
}
