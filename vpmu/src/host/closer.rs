//! Closes counters that take long to: of a tracepoint the host waits until no CPU passes it any
//! more, tens of milliseconds in which a vCPU's thread has better things to do.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::source::{Counter, Overflows, Rate, Reading};

/// Counters that may wait for it: a guest that opens and closes for ever waits with them.
const WAITING: usize = 64;

/// A thread that closes, from the first counter on that is given to it.
#[derive(Debug, Default)]
pub(super) struct Closer(Mutex<Option<SyncSender<Box<dyn Send>>>>);

/// A counter that is closed elsewhere when it is dropped.
#[derive(Debug)]
pub(super) struct ClosedLater {
    /// `None` only while it is dropped.
    counter: Option<Box<dyn Counter>>,
    closer: Arc<Closer>,
}

impl Closer {
    /// Drops `what` soon; where that cannot be, now.
    fn close(&self, what: Box<dyn Send>) {
        // A sender is there or not; a panic elsewhere does not spoil it.
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            *sender = start();
        }
        if let Some(sender) = &*sender {
            // What is not taken comes back with the error, and goes here.
            drop(sender.try_send(what));
        }
    }
}

/// The thread ends with the sender.
fn start() -> Option<SyncSender<Box<dyn Send>>> {
    let (sender, receiver) = sync_channel(WAITING);
    let closing = thread::Builder::new().name("closer".to_owned());
    let closing = closing.spawn(move || receiver.iter().for_each(drop::<Box<dyn Send>>));
    closing.is_ok().then_some(sender)
}

impl ClosedLater {
    pub(super) fn new(counter: Box<dyn Counter>, closer: &Arc<Closer>) -> Self {
        Self {
            counter: Some(counter),
            closer: Arc::clone(closer),
        }
    }

    fn counter(&mut self) -> io::Result<&mut Box<dyn Counter>> {
        let gone = || io::Error::from_raw_os_error(libc::EBADF);
        self.counter.as_mut().ok_or_else(gone)
    }
}

impl Counter for ClosedLater {
    fn start(&mut self) -> io::Result<()> {
        self.counter()?.start()
    }

    fn stop(&mut self) -> io::Result<()> {
        self.counter()?.stop()
    }

    fn read(&mut self) -> io::Result<Reading> {
        self.counter()?.read()
    }

    fn set_rate(&mut self, rate: Rate) -> io::Result<()> {
        self.counter()?.set_rate(rate)
    }

    fn drain(&mut self, into: &mut Overflows) {
        if let Some(counter) = &mut self.counter {
            counter.drain(into);
        }
    }
}

impl Drop for ClosedLater {
    fn drop(&mut self) {
        if let Some(mut counter) = self.counter.take() {
            // From here on it does nothing; one that cannot be stopped is closed all the same.
            let _ = counter.stop();
            self.closer.close(Box::new(counter));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn everything_is_closed() {
        let closer = Closer::default();
        // The other end of a pipe tells when one end is closed.
        let ends: Vec<_> = (0..2 * WAITING)
            .map(|_| {
                let (reader, writer) = io::pipe().expect("a pipe");
                closer.close(Box::new(writer));
                reader
            })
            .collect();
        for mut reader in ends {
            let mut nothing = Vec::new();
            assert_eq!(reader.read_to_end(&mut nothing).expect("readable"), 0);
        }
    }
}
