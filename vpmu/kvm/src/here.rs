//! Reports accesses of the vCPU that runs on the calling thread. It is for VMMs whose buses do not report which vCPU
//! makes an access.
//!
//! The thread's [`VcpuThread`](crate::VcpuThread) carries out the accesses at its next run call, before the vCPU enters
//! the guest. For the guest, this has the same effect as [`AtExit::mark`](crate::AtExit::mark) and
//! [`AtExit::kick`](crate::AtExit::kick).

use std::cell::RefCell;
use std::marker::PhantomData;

use vpmu::{Registers, VcpuSession};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Mark(u32),
    Kick(u16),
}

thread_local! {
    /// The accesses of the last exit that are still to be carried out, in order. `None` if no vCPU runs on this thread.
    static WAITING: RefCell<Option<Vec<Access>>> = const { RefCell::new(None) };
}

/// Reports that this thread's vCPU wrote `value` to the doorbell. Returns `false` if no vCPU with a session runs on
/// this thread.
pub fn mark(value: u32) -> bool {
    wait(Access::Mark(value))
}

/// Reports that this thread's vCPU notified the vCPU queue `queue`. Returns `false` if no vCPU with a session runs on
/// this thread.
pub fn kick(queue: u16) -> bool {
    wait(Access::Kick(queue))
}

fn wait(access: Access) -> bool {
    WAITING.with_borrow_mut(|waiting| {
        let waiting = waiting.as_mut().map(|waiting| waiting.push(access));
        waiting.is_some()
    })
}

/// A guard. While it exists, [`mark`] and [`kick`] accept accesses on this thread.
#[derive(Debug)]
pub(crate) struct Accesses(PhantomData<*const ()>);

impl Accesses {
    pub(crate) fn begin() -> Self {
        WAITING.set(Some(Vec::new()));
        Self(PhantomData)
    }

    /// Carries out the pending accesses. The vCPU must not have entered the guest since it made these accesses.
    pub(crate) fn carry_out(&self, session: &mut VcpuSession, registers: &mut dyn Registers) {
        let mut accesses = WAITING.with_borrow_mut(|waiting| match waiting {
            Some(waiting) if !waiting.is_empty() => std::mem::take(waiting),
            _ => Vec::new(),
        });
        for access in accesses.drain(..) {
            match access {
                Access::Mark(value) => session.mark(value, registers),
                Access::Kick(queue) => session.kick(queue),
            }
        }
    }
}

impl Drop for Accesses {
    fn drop(&mut self) {
        WAITING.set(None);
    }
}
