//! Flushes by the host: vCPUs that may hold samples are made to leave the guest, and waited for.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, PoisonError};

use super::Vpmu;
use crate::errno::Errno;

/// Why a flush is not whole. What could be shown has been.
#[derive(Debug, thiserror::Error)]
pub enum FlushError {
    /// There is no event with this id.
    #[error("there is no event {0}")]
    NoEvent(u64),
    /// The host gave the event up: what it had until then stands there.
    #[error("event {0} is in error")]
    Failed(u64),
    /// Samples may be held on a vCPU that could not be made to leave the guest.
    #[error("vCPU {vcpu} cannot be made to leave the guest")]
    Inside {
        /// Which one.
        vcpu: u32,
        /// The machine's error.
        #[source]
        source: io::Error,
    },
}

/// Those who wait for vCPUs to leave.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    waiting: AtomicUsize,
    left: Condvar,
}

/// A vCPU in the guest, and which of its visits there it is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Visit {
    vcpu: u32,
    number: u64,
}

/// One who waits, counted as long as it lives.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        // Sequentially consistent, as a vCPU's entry and exit are: either it sees that someone waits,
        // or who waits sees where it is.
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Vpmu {
    /// When this returns, what an event (`None`: every persistent event) had sampled and traced before
    /// stands in its ring and area, and its readers are woken. vCPUs that run the guest meanwhile are
    /// made to leave it once where an event may have samples there that only an exit shows.
    ///
    /// Waits for them: not to be called where their exits are held up.
    ///
    /// # Errors
    /// [`FlushError`]; of several events, the first that has one.
    pub fn flush(&self, event: Option<u64>) -> Result<(), FlushError> {
        let waiting = Waiting::new(&self.flushes.waiting);
        let ids = self.events_meant(event)?;
        let mut failed = None;
        let mut awaited = self.begin_flush(&ids);
        awaited.retain(|&Visit { vcpu, .. }| {
            let kicked = self.machine.kick(vcpu);
            let going = kicked.is_ok();
            if let Err(source) = kicked {
                failed.get_or_insert(FlushError::Inside { vcpu, source });
            }
            going
        });
        self.await_exits(&awaited);
        drop(waiting);
        self.with_state(|state, host| {
            state.settle(host);
            for id in ids {
                match state.show_all(host, id) {
                    // Closed meanwhile: then it was flushed.
                    Ok(()) | Err(Errno::ENOENT) => {}
                    Err(_) => {
                        failed.get_or_insert(FlushError::Failed(id));
                    }
                }
            }
            false
        });
        failed.map_or(Ok(()), Err)
    }

    fn events_meant(&self, event: Option<u64>) -> Result<Vec<u64>, FlushError> {
        let state = self.locked();
        match event {
            Some(id) if state.events.contains_key(&id) => Ok(vec![id]),
            Some(id) => Err(FlushError::NoEvent(id)),
            None => Ok(state.persistent_events().map(|(id, _)| id).collect()),
        }
    }

    /// Writes what is held where vCPUs stand still; the visits of those that do not.
    fn begin_flush(&self, ids: &[u64]) -> BTreeSet<Visit> {
        let mut inside = BTreeSet::new();
        self.with_state(|state, host| {
            for &id in ids {
                let Some(vcpu) = state.holds(id) else {
                    continue;
                };
                match host.vcpus[vcpu as usize].visit() {
                    Some(number) => {
                        inside.insert(Visit { vcpu, number });
                    }
                    // It does not enter before this is over.
                    None => state.hand_over(host, id),
                }
            }
            false
        });
        inside
    }

    /// Waits until these visits are over, their exits handled.
    fn await_exits(&self, visits: &BTreeSet<Visit>) {
        let over = |&Visit { vcpu, number }: &Visit| {
            let on = self.vcpu(vcpu);
            on.is_none_or(|on| on.visit() != Some(number))
        };
        let mut state = self.locked();
        while !visits.iter().all(over) {
            let left = self.flushes.left.wait(state);
            state = left.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A vCPU is about to enter: not while someone takes what it holds.
    pub(super) fn let_flushes_by(&self) {
        if self.flushes.waiting.load(Ordering::SeqCst) > 0 {
            drop(self.locked());
        }
    }

    /// A vCPU has left, and all of its exit is handled: whoever waits looks.
    pub(super) fn tell_flushes(&self) {
        if self.flushes.waiting.load(Ordering::SeqCst) > 0 {
            // With the lock, so that it comes to no one who has looked and does not wait yet.
            let state = self.locked();
            self.flushes.left.notify_all();
            drop(state);
        }
    }
}
