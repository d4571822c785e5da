//! Work beside another thread that repeats an action.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

use crate::{Fallible, cpu};

/// The other thread, as the work sees it.
pub(crate) struct Other<'a> {
    pub(crate) tid: u32,
    calls: &'a AtomicU64,
    has_ended: &'a dyn Fn() -> bool,
}

impl Other<'_> {
    /// The number of actions so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Acquire)
    }

    /// Waits for a number of actions. If the thread has ended with an error, returns at once.
    pub(crate) fn wait_for(&self, calls: u64) {
        while self.calls() < calls && !self.has_ended() {
            thread::yield_now();
        }
    }

    /// Whether the thread has ended, although the work continues. It has failed then.
    pub(crate) fn has_ended(&self) -> bool {
        (self.has_ended)()
    }
}

/// Does `work` while another thread on `cpu` repeats the action that `prepare` returns there. The work begins after the
/// first action. Returns the work's result and the number of actions.
pub(crate) fn work_beside<R, A: FnMut() -> io::Result<()>>(
    cpu: usize,
    prepare: impl FnOnce() -> io::Result<A> + Send,
    work: impl FnOnce(&Other<'_>) -> Fallible<R>,
) -> Fallible<(R, u64)> {
    let (stop, calls, tid) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU32::new(0));
    let done = thread::scope(|scope| -> Fallible<R> {
        let other = scope.spawn(|| -> io::Result<()> {
            cpu::pin(cpu)?;
            tid.store(cpu::thread_id(), Ordering::Relaxed);
            let mut act = prepare()?;
            while !stop.load(Ordering::Relaxed) {
                act()?;
                calls.fetch_add(1, Ordering::Release);
            }
            Ok(())
        });
        let has_ended = || other.is_finished();
        let seen = |tid| Other { tid, calls: &calls, has_ended: &has_ended };
        seen(0).wait_for(1);
        let done = work(&seen(tid.load(Ordering::Relaxed)));
        stop.store(true, Ordering::Relaxed);
        other.join().map_err(|_| "the other thread panicked")??;
        done
    })?;
    Ok((done, calls.into_inner()))
}

/// The action of [`work_beside`] that makes an exit.
pub(crate) fn making_exits() -> io::Result<impl FnMut() -> io::Result<()>> {
    cpu::allow_ports()?;
    Ok(|| {
        cpu::port_write();
        Ok(())
    })
}
