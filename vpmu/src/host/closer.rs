//! Closes counters on a separate thread if closing them takes long. Before the host closes a tracepoint, it
//! waits until no CPU runs the tracepoint's code. The wait takes tens of milliseconds, which would delay a
//! vCPU's thread.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use crate::source::{Counter, Overflows, Rate, Reading};

/// Maximum number of queued counters. When the queue is full, the thread that drops a counter closes it itself, which
/// slows down a guest that opens and closes counters in a loop.
const WAITING: usize = 64;

/// The queue of a thread that closes counters. The thread ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Closer(SyncSender<Box<dyn Send>>);

/// A counter that goes to the closing thread when this value is dropped.
#[derive(Debug)]
pub(super) struct ClosedLater {
    /// `None` only during the drop.
    counter: Option<Box<dyn Counter>>,
    closer: Arc<Closer>,
}

impl Closer {
    /// Starts the thread, which calls `begin` first.
    ///
    /// # Errors
    /// The host's error if the thread cannot be started, or the error that `begin` returns.
    pub(super) fn start(begin: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<Self> {
        let (sender, receiver) = sync_channel::<Box<dyn Send>>(WAITING);
        let (tell, begun) = sync_channel(1);
        let closing = thread::Builder::new().name("vpmu closer".to_owned());
        closing.spawn(move || {
            let ready = begin();
            let goes_on = ready.is_ok();
            // `start` waits for this result.
            let _ = tell.send(ready);
            if goes_on {
                receiver.iter().for_each(drop);
            }
        })?;
        let died = |_| io::Error::other("the thread panicked");
        begun.recv().map_err(died)??;
        Ok(Self(sender))
    }

    /// Drops `what` on the closing thread, or on the calling thread if the queue is full.
    fn close(&self, what: Box<dyn Send>) {
        // If the queue is full, the error contains `what`, so dropping the error drops `what`.
        drop(self.0.try_send(what));
    }
}

impl ClosedLater {
    pub(super) fn new(counter: Box<dyn Counter>, closer: &Arc<Closer>) -> Self {
        Self { counter: Some(counter), closer: Arc::clone(closer) }
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
            // The queue may delay the close, so stop the counter now. If that fails, the close will stop it.
            let _ = counter.stop();
            self.closer.close(Box::new(counter));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::thread::ThreadId;

    use super::*;

    #[test]
    fn everything_is_closed() {
        let closer = Closer::start(|| Ok(())).expect("a thread");
        // The reader of a pipe notices when the writer is closed.
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

    /// Reports the thread that drops it.
    struct Dropped(SyncSender<ThreadId>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.send(thread::current().id()).expect("the test waits");
        }
    }

    #[test]
    fn counter_is_closed_on_the_thread_that_began_at_the_start() {
        let (tell, reported) = sync_channel(2);
        let begun = tell.clone();
        let begin = move || begun.send(thread::current().id()).map_err(io::Error::other);
        let closer = Closer::start(begin).expect("a thread");
        closer.close(Box::new(Dropped(tell)));
        let made = reported.recv().expect("it begins before `start` returns");
        assert_eq!(reported.recv().expect("closed"), made);
        assert_ne!(made, thread::current().id());
    }

    #[test]
    fn thread_that_may_not_begin_is_an_error() {
        let refused = Closer::start(|| Err(io::ErrorKind::PermissionDenied.into()));
        let refused = refused.expect_err("refused").kind();
        assert_eq!(refused, io::ErrorKind::PermissionDenied);
    }
}
