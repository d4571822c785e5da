//! The gate at which vCPUs wait while the machine is saved. A waiting vCPU has returned from its run call,
//! completed its last access, and saved its state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use vpmu_kvm::Threads;

use crate::arch::state::{StateError, VcpuState};
use crate::exit::{StopLatch, VcpuError};

type Saved = Result<VcpuState, StateError>;

/// The gate that vCPUs pass before each entry into the guest.
#[derive(Debug, Default)]
pub struct Gate {
    /// Written while `waiting` is locked. vCPUs read it without the lock.
    closed: AtomicBool,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// The vCPUs at a gate.
#[derive(Debug, Default)]
struct Waiting {
    /// Number of times that the gate was closed. If the gate closes again before a released vCPU wakes up, the vCPU
    /// sees that the number has changed. It then returns from [`Gate::pass`], and saves its new state when it calls
    /// [`Gate::pass`] again.
    closings: u64,
    /// For each vCPU, the saved state if the vCPU is waiting.
    states: Vec<Option<Saved>>,
}

/// Opens the gate when it is dropped.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    /// Makes all vCPUs leave the guest. They wait until the returned [`Closed`] is dropped. Also returns their states.
    /// `vcpus` is the number of vCPUs. Returns `None` if the run ends before every vCPU has reached the gate.
    pub(crate) fn close(&self, vcpus: u8, threads: &Threads, end: &StopLatch) -> Option<(Closed<'_>, Vec<Saved>)> {
        let mut waiting = self.waiting();
        waiting.closings += 1;
        waiting.states = (0..vcpus).map(|_| None).collect();
        self.closed.store(true, Ordering::SeqCst);
        drop(waiting);
        let closed = Closed(self);
        for vcpu in 0..u32::from(vcpus) {
            // The kick fails if the vCPU has no thread yet. That vCPU checks the gate before it enters the guest.
            if let Err(error) = threads.kick(vcpu) {
                log::debug!("vCPU {vcpu} is not in the guest: {error}");
            }
        }
        let missing = |waiting: &mut Waiting| !end.reached() && waiting.states.iter().any(Option::is_none);
        let waiting = self.changed.wait_while(self.waiting(), missing);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        let states = waiting.states.iter_mut().map(Option::take).collect::<Option<_>>()?;
        drop(waiting);
        Some((closed, states))
    }

    /// Whether vCPUs must leave the guest.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// If the gate is closed, stores the state of `vcpu`, which `save` returns, and waits. Returns whether it waited.
    pub(super) fn pass(&self, vcpu: u32, save: impl FnOnce() -> Saved) -> bool {
        if !self.is_closed() {
            return false;
        }
        let mut waiting = self.waiting();
        if !self.is_closed() {
            return false;
        }
        let closing = waiting.closings;
        let place = usize::try_from(vcpu).ok();
        if let Some(place) = place.and_then(|place| waiting.states.get_mut(place)) {
            *place = Some(save());
        }
        self.changed.notify_all();
        let this = |waiting: &mut Waiting| self.is_closed() && waiting.closings == closing;
        drop(self.changed.wait_while(waiting, this));
        true
    }

    /// Wakes [`Gate::close`], so that it stops waiting for vCPUs. Call this after the end of the run has been
    /// announced.
    pub(super) fn left(&self) {
        let _waiting = self.waiting();
        self.changed.notify_all();
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A poisoned lock is harmless, because a vCPU that panics announces the end of the run and its state stays
        // `None`.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped when a thread stops running its vCPU, either at the end of the run or after a panic. The drop announces the
/// panic, if there was one, and wakes [`Gate::close`]. Otherwise the run, or [`Gate::close`], would wait for the vCPU
/// forever.
#[derive(Debug)]
pub(super) struct Leaving<'a> {
    vcpu: u32,
    end: &'a StopLatch,
    gate: &'a Gate,
}

impl<'a> Leaving<'a> {
    /// Create this on the thread that runs `vcpu`, before the first entry.
    pub(super) fn new(vcpu: u32, end: &'a StopLatch, gate: &'a Gate) -> Self {
        Self { vcpu, end, gate }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.end.announce(Err(VcpuError::Panicked(self.vcpu)));
        }
        self.gate.left();
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let _waiting = self.0.waiting();
        self.0.closed.store(false, Ordering::SeqCst);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use super::*;
    use crate::exit::Ending;
    use crate::signal::kick_signal;

    #[test]
    fn run_that_ends_is_not_waited_for() {
        let (gate, threads) = (Gate::default(), Threads::new(2, kick_signal()));
        let end = StopLatch::new().expect("event descriptors");
        thread::scope(|scope| {
            let closing = scope.spawn(|| gate.close(2, &threads, &end).is_none());
            while !gate.is_closed() {
                thread::yield_now();
            }
            end.announce(Ok(Ending::Poweroff));
            gate.left();
            assert!(closing.join().expect("no panic"));
        });
        assert!(!gate.is_closed(), "the gate stays closed");
    }

    #[test]
    fn vcpu_that_panics_is_not_waited_for() {
        let (gate, threads) = (Gate::default(), Threads::new(1, kick_signal()));
        let end = StopLatch::new().expect("event descriptors");
        let (tell, closed) = sync_channel(1);
        thread::scope(|scope| {
            scope.spawn(|| tell.send(gate.close(1, &threads, &end).is_none()));
            while !gate.is_closed() {
                thread::yield_now();
            }
            // The closing thread is already waiting, or it checks for the end before it waits.
            let vcpu = AssertUnwindSafe(|| {
                let _leaving = Leaving::new(0, &end, &gate);
                panic!("the vCPU's thread");
            });
            catch_unwind(vcpu).expect_err("a panic");
            let gone = closed.recv_timeout(Duration::from_secs(10));
            gate.left();
            assert_eq!(gone, Ok(true), "the closing thread still waits");
        });
    }

    #[test]
    fn vcpus_wait_until_the_gate_opens() {
        let (gate, threads) = (Gate::default(), Threads::new(1, kick_signal()));
        let end = StopLatch::new().expect("event descriptors");
        let (tell, passed) = sync_channel(1);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !gate.pass(0, || Err(StateError::Malformed("vCPU"))) {
                    thread::yield_now();
                }
                tell.send(()).expect("the test waits");
            });
            let (closed, states) = gate.close(1, &threads, &end).expect("one vCPU");
            assert!(matches!(states.as_slice(), [Err(_)]));
            assert!(passed.try_recv().is_err(), "the vCPU does not wait");
            drop(closed);
            passed.recv().expect("the vCPU continues");
        });
    }

    #[test]
    fn gate_that_closes_again_at_once_has_each_vcpus_state() {
        const TIMES: usize = 1000;
        let (gate, threads) = (Gate::default(), Threads::new(1, kick_signal()));
        let end = StopLatch::new().expect("event descriptors");
        let (tell, closed) = sync_channel(TIMES);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !end.reached() {
                    gate.pass(0, || Err(StateError::Malformed("vCPU")));
                }
            });
            scope.spawn(|| {
                while let Some((_closed, states)) = gate.close(1, &threads, &end) {
                    if tell.try_send(states.len()).is_err() {
                        break;
                    }
                }
            });
            let found: Vec<usize> =
                (0..TIMES).map_while(|_| closed.recv_timeout(Duration::from_secs(10)).ok()).collect();
            end.announce(Ok(Ending::Poweroff));
            gate.left();
            assert_eq!(found, [1; TIMES], "the vCPU still waits");
        });
    }
}
