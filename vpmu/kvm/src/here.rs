//! Accesses of the vCPU that runs on the calling thread, for buses that do not say which vCPU makes an access.
//!
//! They are carried out when the thread's [`VcpuThread`](crate::VcpuThread) runs the vCPU next, before it
//! enters the guest: the guest sees no difference to [`AtExit::mark`](crate::AtExit::mark) and
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
    /// In their order, not carried out yet: at most those of one exit. `None`: no vCPU runs on this thread.
    static WAITING: RefCell<Option<Vec<Access>>> = const { RefCell::new(None) };
}

/// The vCPU wrote `value` to the doorbell; whether a vCPU with a session runs on this thread.
pub fn mark(value: u32) -> bool {
    wait(Access::Mark(value))
}

/// The vCPU notified `queue`, one of the vCPUs'; whether a vCPU with a session runs on this thread.
pub fn kick(queue: u16) -> bool {
    wait(Access::Kick(queue))
}

fn wait(access: Access) -> bool {
    WAITING.with_borrow_mut(|waiting| {
        let waiting = waiting.as_mut().map(|waiting| waiting.push(access));
        waiting.is_some()
    })
}

/// While it lives, a vCPU with a session runs on this thread.
#[derive(Debug)]
pub(crate) struct Accesses(PhantomData<*const ()>);

impl Accesses {
    pub(crate) fn begin() -> Self {
        WAITING.set(Some(Vec::new()));
        Self(PhantomData)
    }

    /// Carries out the accesses since the last time. The vCPU has not entered the guest since they were made.
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
