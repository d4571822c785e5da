//! Passes snapshot requests from the control socket's thread to the main thread, the only one that can
//! stop the whole machine.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::{Base, Taken};

/// A request for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The snapshot's name.
    pub(crate) id: String,
    /// Whether the run ends after the snapshot.
    pub(crate) then_exit: bool,
    /// The base of a diff; `None` for a full snapshot.
    pub(crate) base: Option<Base>,
}

/// A request with the channel for its answer.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) wanted: Wanted,
    /// The file for the memory.
    pub(crate) file: File,
    answer: SyncSender<Result<Taken, String>>,
}

/// Whether a snapshot's files are complete; the error is the reason why they are not.
pub(crate) type Whole = Result<(), String>;

#[derive(Debug, Default)]
struct Slot {
    asked: Option<Asked>,
    /// The id of the answered snapshot until its client has finished it.
    unfinished: Option<String>,
    finished: Option<Whole>,
    /// Whether requests are refused because the main thread no longer takes them.
    closed: bool,
}

/// The slot for one snapshot at a time.
#[derive(Debug)]
pub(crate) struct Desk {
    slot: Mutex<Slot>,
    event: EventFd,
}

const ENDS: &str = "the machine is ending";
/// The error of a snapshot whose client has closed its connection.
pub(crate) const GONE: &str = "its client is gone";
const BUSY: &str = "another client writes a snapshot of this machine";

impl Desk {
    /// An empty slot, which signals `event`.
    pub(crate) fn new(event: EventFd) -> Self {
        Self {
            slot: Mutex::new(Slot::default()),
            event,
        }
    }

    /// Requests a snapshot, and waits for the answer.
    ///
    /// # Errors
    /// The reason why the snapshot was not taken.
    pub(crate) fn ask(&self, wanted: Wanted, file: File) -> Result<Taken, String> {
        let (answer, answered) = sync_channel(1);
        {
            let mut slot = self.slot();
            if slot.closed {
                return Err(ENDS.to_owned());
            }
            // The main thread handles a finished snapshot before it takes the next request.
            if slot.unfinished.is_some() {
                return Err(BUSY.to_owned());
            }
            slot.asked = Some(Asked {
                wanted,
                file,
                answer,
            });
        }
        if let Err(error) = self.event.write(1) {
            self.slot().asked = None;
            return Err(format!("cannot pass the request to the machine: {error}"));
        }
        answered.recv().unwrap_or_else(|_| Err(ENDS.to_owned()))
    }

    /// Answers a request. From here on, the client must finish the snapshot.
    pub(crate) fn answer(&self, asked: Asked, taken: Result<Taken, String>) {
        let Asked { wanted, answer, .. } = asked;
        if taken.is_ok() {
            self.slot().unfinished = Some(wanted.id);
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
    /// No snapshot with this id waits to be finished, or the main thread cannot be notified.
    pub(crate) fn finish(&self, id: &str, whole: Whole) -> Result<(), String> {
        {
            let mut slot = self.slot();
            if slot.unfinished.as_deref() != Some(id) {
                return match slot.closed {
                    // The machine ends, as requested or not: the snapshot is complete anyway.
                    true => Ok(()),
                    false => Err("this machine writes no such snapshot".to_owned()),
                };
            }
            slot.unfinished = None;
            slot.finished = Some(whole);
        }
        let told = self.event.write(1);
        told.map_err(|error| format!("cannot notify the machine: {error}"))
    }

    /// Whether a request waits, or a snapshot was finished.
    pub(crate) fn has_news(&self) -> bool {
        let slot = self.slot();
        slot.asked.is_some() || slot.finished.is_some()
    }

    /// Takes the client's result for the last snapshot.
    pub(crate) fn take_finished(&self) -> Option<Whole> {
        self.slot().finished.take()
    }

    /// Clears the event.
    pub(crate) fn heard(&self) {
        // An event that is already clear is fine.
        let _ = self.event.read();
    }

    /// Takes the request.
    pub(crate) fn take(&self) -> Option<Asked> {
        self.slot().asked.take()
    }

    /// Refuses the waiting request and later requests, because the main thread no longer takes them.
    pub(crate) fn close(&self) {
        let mut slot = self.slot();
        slot.closed = true;
        slot.asked = None;
        slot.unfinished = None;
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRawFd for Desk {
    /// Readable after a request, or a finished snapshot.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn desk() -> Desk {
        Desk::new(EventFd::new(libc::EFD_NONBLOCK).expect("an event descriptor"))
    }

    fn wanted() -> Wanted {
        Wanted {
            id: "one".to_owned(),
            then_exit: false,
            base: None,
        }
    }

    #[test]
    fn request_waits_until_it_is_answered() {
        let desk = desk();
        let file = tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let asking = scope.spawn(|| desk.ask(wanted(), file));
            while !desk.has_news() {
                thread::yield_now();
            }
            let asked = desk.take().expect("asked");
            assert_eq!(asked.wanted, wanted());
            desk.answer(asked, Err("no".to_owned()));
            let answer = asking.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), "no");
        });
    }

    #[test]
    fn snapshot_is_its_clients_to_finish_before_the_next() {
        let desk = desk();
        let file = || tempfile::tempfile().expect("a file");
        let taken = Taken {
            state: String::new(),
            memory: 1,
            written: 1,
            paused_ns: 1,
        };
        thread::scope(|scope| {
            let asking = scope.spawn(|| desk.ask(wanted(), file()));
            while !desk.has_news() {
                thread::yield_now();
            }
            let asked = desk.take().expect("asked");
            desk.answer(asked, Ok(taken.clone()));
            let answer = asking.join().expect("no panic");
            assert_eq!(answer.expect("taken"), taken);
        });
        assert!(!desk.has_news());
        assert_eq!(desk.ask(wanted(), file()).expect_err("refused"), BUSY);
        assert!(desk.finish("other", Ok(())).is_err());
        let whole = Err("no room".to_owned());
        desk.finish("one", whole.clone()).expect("that one");
        assert!(desk.has_news());
        assert_eq!(desk.take_finished(), Some(whole));
        assert!(desk.finish("one", Ok(())).is_err(), "once");
        assert!(!desk.has_news() && desk.take_finished().is_none());
    }

    #[test]
    fn closed_desk_answers_waiting_and_later_requests() {
        let desk = desk();
        let file = || tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let asking = scope.spawn(|| desk.ask(wanted(), file()));
            while !desk.has_news() {
                thread::yield_now();
            }
            desk.close();
            let answer = asking.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), ENDS);
        });
        let answer = desk.ask(wanted(), file());
        assert_eq!(answer.expect_err("refused"), ENDS);
    }
}
