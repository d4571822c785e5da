//! Passes snapshot requests from the control socket's thread to the main thread. Only the main thread can stop the
//! whole machine.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::{Base, Files, Id, Taken};

/// A request for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotRequest {
    /// The snapshot's name.
    pub(crate) id: Id,
    /// Whether the run ends after the snapshot.
    pub(crate) then_exit: bool,
    /// The base of a diff. `None` for a full snapshot.
    pub(crate) base: Option<Base>,
}

/// A request, and the channel for its answer.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) request: SnapshotRequest,
    pub(crate) files: Arc<Files>,
    answer: SyncSender<Result<Written, String>>,
}

impl PendingRequest {
    /// Answers the request. The error is the reason why the snapshot was not taken.
    pub(crate) fn answer(self, written: Result<Written, String>) {
        if self.answer.send(written).is_err() {
            log::warn!("the control socket's thread no longer waits for its snapshot");
        }
    }
}

/// A snapshot whose memory is written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) taken: Taken,
    /// The text of the state file. `None` if both files are complete.
    pub(crate) state: Option<String>,
}

#[derive(Debug, Default)]
struct Slot {
    pending: Option<PendingRequest>,
    /// Whether the main thread takes no more requests. New requests are then refused.
    closed: bool,
}

/// Passes one snapshot request at a time to the main thread, and the answer back to the client.
#[derive(Debug)]
pub(crate) struct Mailbox {
    slot: Mutex<Slot>,
    event: EventFd,
}

const ENDS: &str = "the machine is ending";

impl Mailbox {
    /// An empty mailbox. It signals `event` when there is a request.
    pub(crate) fn new(event: EventFd) -> Self {
        Self { slot: Mutex::new(Slot::default()), event }
    }

    /// Requests a snapshot in `files`, and waits for the answer.
    ///
    /// # Errors
    /// The reason why the snapshot was not taken.
    pub(crate) fn request(&self, request: SnapshotRequest, files: Arc<Files>) -> Result<Written, String> {
        let (answer, answered) = sync_channel(1);
        {
            let mut slot = self.slot();
            if slot.closed {
                return Err(ENDS.to_owned());
            }
            slot.pending = Some(PendingRequest { request, files, answer });
        }
        if let Err(error) = self.event.write(1) {
            self.slot().pending = None;
            return Err(format!("cannot pass the request to the machine: {error}"));
        }
        answered.recv().unwrap_or_else(|_| Err(ENDS.to_owned()))
    }

    /// Whether a request is pending.
    pub(crate) fn has_mail(&self) -> bool {
        self.slot().pending.is_some()
    }

    /// Clears the event.
    pub(crate) fn clear(&self) {
        // The read fails if the event is already clear.
        let _ = self.event.read();
    }

    /// Takes the request.
    pub(crate) fn take(&self) -> Option<PendingRequest> {
        self.slot().pending.take()
    }

    /// Refuses the waiting request and all later requests, because the main thread no longer takes them.
    pub(crate) fn close(&self) {
        let mut slot = self.slot();
        slot.closed = true;
        slot.pending = None;
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRawFd for Mailbox {
    /// The descriptor is readable when there is a request.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn mailbox() -> Mailbox {
        Mailbox::new(EventFd::new(libc::EFD_NONBLOCK).expect("an event descriptor"))
    }

    fn request() -> SnapshotRequest {
        SnapshotRequest { id: Id(1), then_exit: false, base: None }
    }

    fn files() -> Arc<Files> {
        let [memory, state] = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
        Arc::new(Files { memory, state })
    }

    #[test]
    fn request_waits_until_it_is_answered() {
        let mailbox = mailbox();
        let taken = Taken { memory: 1, written: 1, paused_ns: 1 };
        for answer in [Err("no".to_owned()), Ok(taken)] {
            let written = || answer.clone().map(|taken| Written { taken, state: None });
            thread::scope(|scope| {
                let requesting = scope.spawn(|| mailbox.request(request(), files()));
                while !mailbox.has_mail() {
                    thread::yield_now();
                }
                let pending = mailbox.take().expect("pending");
                assert_eq!(pending.request, request());
                pending.answer(written());
                assert_eq!(requesting.join().expect("no panic"), written());
            });
            assert!(!mailbox.has_mail());
        }
    }

    #[test]
    fn closed_mailbox_answers_waiting_and_later_requests() {
        let mailbox = mailbox();
        thread::scope(|scope| {
            let requesting = scope.spawn(|| mailbox.request(request(), files()));
            while !mailbox.has_mail() {
                thread::yield_now();
            }
            mailbox.close();
            let answer = requesting.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), ENDS);
        });
        let answer = mailbox.request(request(), files());
        assert_eq!(answer.expect_err("refused"), ENDS);
    }
}
