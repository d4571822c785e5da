//! Passes snapshot requests from the control socket's thread to the main thread. Only the main thread can stop the
//! whole machine.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::{Base, Id, Taken};

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
    /// The file for the memory.
    pub(crate) file: File,
    answer: SyncSender<Result<Taken, String>>,
}

/// Whether a snapshot's files are complete. If not, the error is the reason.
pub(crate) type Completion = Result<(), String>;

#[derive(Debug, Default)]
struct Slot {
    pending: Option<PendingRequest>,
    /// The id of a snapshot whose memory has been written, but whose files the client has not completed yet.
    unfinished: Option<Id>,
    finished: Option<Completion>,
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
/// The error for a snapshot whose client has closed its connection.
pub(crate) const GONE: &str = "its client has disconnected";
const BUSY: &str = "another client is writing a snapshot of this machine";

impl Mailbox {
    /// An empty mailbox. It signals `event` when there is a request or a finished snapshot.
    pub(crate) fn new(event: EventFd) -> Self {
        Self { slot: Mutex::new(Slot::default()), event }
    }

    /// Requests a snapshot, and waits for the answer.
    ///
    /// # Errors
    /// The reason why the snapshot was not taken.
    pub(crate) fn request(&self, request: SnapshotRequest, file: File) -> Result<Taken, String> {
        let (answer, answered) = sync_channel(1);
        {
            let mut slot = self.slot();
            if slot.closed {
                return Err(ENDS.to_owned());
            }
            // There is no need to check `finished`, because the main thread handles a finished snapshot before it takes
            // the next request.
            if slot.unfinished.is_some() {
                return Err(BUSY.to_owned());
            }
            slot.pending = Some(PendingRequest { request, file, answer });
        }
        if let Err(error) = self.event.write(1) {
            self.slot().pending = None;
            return Err(format!("cannot pass the request to the machine: {error}"));
        }
        answered.recv().unwrap_or_else(|_| Err(ENDS.to_owned()))
    }

    /// Answers a request. If the snapshot was taken, no other snapshot can be requested until the client has finished
    /// this one.
    pub(crate) fn answer(&self, pending: PendingRequest, taken: Result<Taken, String>) {
        let PendingRequest { request, answer, .. } = pending;
        if taken.is_ok() {
            self.slot().unfinished = Some(request.id);
        }
        if answer.send(taken).is_err() {
            log::warn!("the client of the snapshot has disconnected");
            let mut slot = self.slot();
            if slot.unfinished.take().is_some() {
                slot.finished = Some(Err(GONE.to_owned()));
            }
        }
    }

    /// Records that the client of the snapshot `id` has finished the snapshot, or has failed to finish it.
    ///
    /// # Errors
    /// No snapshot with this id is waiting to be finished, or the main thread cannot be notified.
    pub(crate) fn finish(&self, id: Id, completion: Completion) -> Result<(), String> {
        {
            let mut slot = self.slot();
            if slot.unfinished.take_if(|known| *known == id).is_none() {
                return Err("this machine is not waiting for this snapshot".to_owned());
            }
            slot.finished = Some(completion);
        }
        let notified = self.event.write(1);
        notified.map_err(|error| format!("cannot notify the machine: {error}"))
    }

    /// Whether a request is pending, or a client has finished a snapshot.
    pub(crate) fn has_mail(&self) -> bool {
        let slot = self.slot();
        slot.pending.is_some() || slot.finished.is_some()
    }

    /// Takes the client's result for the last snapshot.
    pub(crate) fn take_finished(&self) -> Option<Completion> {
        self.slot().finished.take()
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

    /// Refuses the waiting request and all later requests, because the main thread no longer takes them. If a snapshot
    /// request was already answered, its client can still finish the snapshot, because the machine has already written
    /// the memory.
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
    /// The descriptor is readable when there is a request or a finished snapshot.
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

    #[test]
    fn request_waits_until_it_is_answered() {
        let mailbox = mailbox();
        let file = tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let requesting = scope.spawn(|| mailbox.request(request(), file));
            while !mailbox.has_mail() {
                thread::yield_now();
            }
            let pending = mailbox.take().expect("pending");
            assert_eq!(pending.request, request());
            mailbox.answer(pending, Err("no".to_owned()));
            let answer = requesting.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), "no");
        });
    }

    /// Takes the snapshot 1, which its client must then finish.
    fn take_one(mailbox: &Mailbox) {
        let file = tempfile::tempfile().expect("a file");
        let taken = Taken { state: String::new(), memory: 1, written: 1, paused_ns: 1 };
        thread::scope(|scope| {
            let requesting = scope.spawn(|| mailbox.request(request(), file));
            while !mailbox.has_mail() {
                thread::yield_now();
            }
            let pending = mailbox.take().expect("pending");
            mailbox.answer(pending, Ok(taken.clone()));
            let answer = requesting.join().expect("no panic");
            assert_eq!(answer.expect("taken"), taken);
        });
    }

    #[test]
    fn snapshot_is_finished_by_its_client_before_the_next() {
        let mailbox = mailbox();
        take_one(&mailbox);
        assert!(!mailbox.has_mail());
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(mailbox.request(request(), file).expect_err("refused"), BUSY);
        assert!(mailbox.finish(Id(2), Ok(())).is_err());
        let completion = Err("no room".to_owned());
        mailbox.finish(Id(1), completion.clone()).expect("that one");
        assert!(mailbox.has_mail());
        assert_eq!(mailbox.take_finished(), Some(completion));
        assert!(mailbox.finish(Id(1), Ok(())).is_err(), "once");
        assert!(!mailbox.has_mail() && mailbox.take_finished().is_none());
    }

    #[test]
    fn closed_mailbox_answers_waiting_and_later_requests() {
        let mailbox = mailbox();
        let file = || tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let requesting = scope.spawn(|| mailbox.request(request(), file()));
            while !mailbox.has_mail() {
                thread::yield_now();
            }
            mailbox.close();
            let answer = requesting.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), ENDS);
        });
        let answer = mailbox.request(request(), file());
        assert_eq!(answer.expect_err("refused"), ENDS);
    }

    #[test]
    fn snapshot_taken_before_the_machine_ended_can_be_finished() {
        let mailbox = mailbox();
        take_one(&mailbox);
        mailbox.close();
        assert!(mailbox.finish(Id(2), Ok(())).is_err());
        mailbox.finish(Id(1), Ok(())).expect("that one");
        assert!(mailbox.finish(Id(1), Ok(())).is_err(), "once");
    }
}
