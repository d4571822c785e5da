//! A vCPU's thread as the device knows it: its entries and exits, its marks, its queue.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::machine::{Exit, Registers};
use crate::metrics::ExitCounts;
use crate::shard::{Answer, CommandBuffer, ExitView, Shard, State};
use crate::shared::Shared;
use crate::vcpu::{ExitStamp, Hook};

/// One vCPU while a thread runs it, from [`Vpmu::attach`](crate::Vpmu::attach) until it is dropped.
///
/// The device counts on the thread that attached: the session stays there. It takes the lock of its own
/// vCPU's part of the device. Another vCPU's, and the control plane's, it takes only for a command about
/// an event of another vCPU, and for effects of its events on those: a leader's on members, a trigger's
/// on targets.
#[derive(Debug)]
pub struct VcpuSession {
    shared: Arc<Shared>,
    index: u32,
    /// Traces may hold the exit that it is in until its end: then it is published.
    in_traced_exit: bool,
    buffer: CommandBuffer,
    /// One thread at a time may use it.
    _not_sync: PhantomData<Cell<()>>,
}

impl VcpuSession {
    pub(crate) fn new(shared: Arc<Shared>, index: u32) -> Self {
        Self {
            shared,
            index,
            in_traced_exit: false,
            buffer: CommandBuffer::default(),
            _not_sync: PhantomData,
        }
    }

    /// The vCPU's index.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.index
    }

    /// Right before the run call. [`VcpuSession::leave`] follows it, also when the call fails.
    pub fn enter(&mut self) {
        let shared = &*self.shared;
        let Some(shard) = shared.shard(self.index) else {
            return;
        };
        // Before the thread's time is read: writing packets takes no time of the guest's.
        if std::mem::take(&mut self.in_traced_exit) {
            shared.on(shard, |state| state.end_exit(false));
            shared.notices.deliver(false);
        }
        shard.vcpu.enter(&*shared.backend.source);
        if shared.flushes.is_waiting() {
            // Not while someone takes what the vCPU holds.
            shard.wait();
        }
    }

    /// Right after the run call. `exit` may be an [`ExitReason`](crate::ExitReason) alone; traces then
    /// have no more of it.
    pub fn leave(&mut self, exit: impl Into<Exit>, regs: &mut dyn Registers) {
        let shared = &*self.shared;
        let Some(shard) = shared.shard(self.index) else {
            return;
        };
        let (exit, vcpu) = (exit.into(), &shard.vcpu);
        let hooks = vcpu.hooks();
        let traced = hooks.has(Hook::Traced);
        // At once: what the VMM does from here on is time outside the guest.
        let tsc = traced.then(|| vcpu.guest_tsc(&*shared.backend.source));
        vcpu.leave(exit.reason, &*shared.backend.source);
        let mut view = ExitView::new(regs, None);
        if std::mem::take(&mut self.in_traced_exit) {
            // The guest was never entered from that exit: it is over now.
            shared.on(shard, |state| state.end_exit(true));
        }
        if let Some(tsc) = tsc {
            let stamp = ExitStamp {
                exit,
                tsc,
                regs: view.regs(),
            };
            view.stamped(&stamp);
            vcpu.open_exit().publish(&stamp);
            self.in_traced_exit = true;
        }
        if hooks.needs_shard() {
            shared.on(shard, |state| state.leave(&exit, &mut view));
        }
        shared.notices.deliver(false);
        vcpu.exit_done();
        shared.flushes.vcpu_left();
    }

    /// The vCPU wrote `value` to the doorbell.
    pub fn mark(&mut self, value: u32, regs: &mut dyn Registers) {
        let shared = &*self.shared;
        if let Some(shard) = shared.shard(self.index) {
            shard.vcpu.count_mark();
            let mut view = ExitView::new(regs, Some(value));
            shared.on(shard, |state| state.mark(value, &mut view));
            shared.notices.deliver(false);
        }
    }

    /// The vCPU notified `queue`, one of the vCPUs': its commands are carried out before this returns.
    pub fn kick(&mut self, queue: u16) {
        let shared = &*self.shared;
        let of = shared
            .queue_of(queue)
            .and_then(|of| Some((of, shared.shard(of)?)));
        let Some((of, shard)) = of else {
            log::debug!(
                "queue {queue} was notified by vCPU {}, but is no vCPU's",
                self.index
            );
            return;
        };
        shard.vcpu.count_kick();
        let (by, buffer) = (self.index, &mut self.buffer);
        let mut answer = shared.on(shard, |state| {
            buffer.begin(state);
            buffer.serve(state, by)
        });
        let interrupt = loop {
            let command = match answer {
                Answer::Done(interrupt) => break interrupt,
                Answer::Elsewhere(command) => command,
            };
            let resets = buffer.resets();
            let reply = shared.control.lock().command(&command, of, by, resets);
            buffer.reply(&reply);
            answer = shared.on(shard, |state| buffer.serve(state, by));
        };
        shared.notices.deliver(interrupt);
    }

    /// Whether an active event may ask for registers at the next exit.
    #[must_use]
    pub fn wants_registers(&self) -> bool {
        let hooks = self.shard().map(|shard| shard.vcpu.hooks());
        hooks.is_some_and(|hooks| hooks.has(Hook::HostSamples) || hooks.has(Hook::Registers))
    }

    /// Exact exits by reason since the start.
    #[must_use]
    pub fn exits(&self) -> ExitCounts {
        let exits = self.shard().map(|shard| shard.vcpu.exits());
        exits.unwrap_or_default()
    }

    fn shard(&self) -> Option<&Shard> {
        self.shared.shard(self.index)
    }
}

impl Drop for VcpuSession {
    /// The thread is about to end, and does not enter any more. Events that are started from now on
    /// wait for the thread that attaches next; those that count here go on then too.
    fn drop(&mut self) {
        if let Some(shard) = self.shared.shard(self.index) {
            // A thread that panicked in the guest has left it, too.
            shard.vcpu.exit_done();
            self.shared.flushes.vcpu_left();
            // Whoever opens a counter on the thread holds the shard.
            self.shared.on(shard, State::detach);
            shard.vcpu.give_back();
            self.shared.notices.deliver(false);
        }
    }
}
