//! Where the control socket's thread hands a request to the main thread, which alone can have the whole
//! machine stand still.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use crate::ctl::Taken;

/// A request for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The snapshot's name.
    pub(crate) id: String,
    /// The run ends when it is taken.
    pub(crate) then_exit: bool,
}

/// A request, and where its answer goes.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) wanted: Wanted,
    /// The file that memory is written to.
    pub(crate) file: File,
    answer: SyncSender<Result<Taken, String>>,
}

impl Asked {
    /// Answers.
    pub(crate) fn answer(self, taken: Result<Taken, String>) {
        if self.answer.send(taken).is_err() {
            log::warn!("nobody waits for the snapshot any more");
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    asked: Option<Asked>,
    /// Nobody looks here any more.
    closed: bool,
}

/// The place for one request.
#[derive(Debug)]
pub(crate) struct Desk {
    slot: Mutex<Slot>,
    event: EventFd,
}

const ENDS: &str = "the machine ends";

impl Desk {
    /// An empty one, which signals `event`.
    pub(crate) fn new(event: EventFd) -> Self {
        Self {
            slot: Mutex::new(Slot::default()),
            event,
        }
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// Why there is no snapshot.
    pub(crate) fn ask(&self, wanted: Wanted, file: File) -> Result<Taken, String> {
        let (answer, answered) = sync_channel(1);
        {
            let mut slot = self.slot();
            if slot.closed {
                return Err(ENDS.to_owned());
            }
            slot.asked = Some(Asked {
                wanted,
                file,
                answer,
            });
        }
        if let Err(error) = self.event.write(1) {
            self.slot().asked = None;
            return Err(format!("the machine cannot be asked: {error}"));
        }
        answered.recv().unwrap_or_else(|_| Err(ENDS.to_owned()))
    }

    /// Whether somebody asks.
    pub(crate) fn is_asked(&self) -> bool {
        self.slot().asked.is_some()
    }

    /// The event is no news any more.
    pub(crate) fn heard(&self) {
        // Nothing to read is as good.
        let _ = self.event.read();
    }

    /// Takes the request.
    pub(crate) fn take(&self) -> Option<Asked> {
        self.slot().asked.take()
    }

    /// Refuses all further requests: nobody serves them any more.
    pub(crate) fn close(&self) {
        let mut slot = self.slot();
        slot.closed = true;
        slot.asked = None;
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRawFd for Desk {
    /// Readable when somebody has asked.
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
        }
    }

    #[test]
    fn request_waits_until_it_is_answered() {
        let desk = desk();
        let file = tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let asking = scope.spawn(|| desk.ask(wanted(), file));
            while !desk.is_asked() {
                thread::yield_now();
            }
            let asked = desk.take().expect("asked");
            assert_eq!(asked.wanted, wanted());
            asked.answer(Err("no".to_owned()));
            let answer = asking.join().expect("no panic");
            assert_eq!(answer.expect_err("refused"), "no");
        });
    }

    #[test]
    fn closed_desk_answers_who_waits_and_who_comes() {
        let desk = desk();
        let file = || tempfile::tempfile().expect("a file");
        thread::scope(|scope| {
            let asking = scope.spawn(|| desk.ask(wanted(), file()));
            while !desk.is_asked() {
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
