//! A vCPU's thread as the device knows it: its entries and exits, its marks, its queue.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::abi::QUEUE_VCPU;
use crate::machine::{Exit, Registers};
use crate::metrics::ExitCounts;
use crate::shard::{Answer, CommandBuffer, ExitView, Shard, State};
use crate::shared::Shared;
use crate::source::Source;
use crate::vcpu::{ExitStamp, Hook};
use crate::work::{Turn, Work};

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
    /// The notification that has yet to be served whole.
    serving: Option<Serving>,
    /// One thread at a time may use it.
    _not_sync: PhantomData<Cell<()>>,
}

/// A notification of a vCPU queue.
#[derive(Debug, Clone, Copy)]
struct Serving {
    /// The vCPU whose queue it is.
    of: u32,
    /// The buffer has what it needs of it.
    begun: bool,
}

impl VcpuSession {
    pub(crate) fn new(shared: Arc<Shared>, index: u32) -> Self {
        Self {
            shared,
            index,
            in_traced_exit: false,
            buffer: CommandBuffer::default(),
            serving: None,
            _not_sync: PhantomData,
        }
    }

    /// The vCPU's index.
    #[must_use]
    pub fn vcpu(&self) -> u32 {
        self.index
    }

    /// Right before the run call. [`VcpuSession::leave`] follows it, also when the call fails. Work that
    /// a notification left is carried out first.
    pub fn enter(&mut self) {
        while self.resume() == Turn::Unfinished {}
        let shared = &*self.shared;
        let Some(shard) = shared.shard(self.index) else {
            return;
        };
        // Before the thread's time is read: writing packets takes no time of the guest's.
        if std::mem::take(&mut self.in_traced_exit) {
            shared.on(shard, |state| state.end_exit(false));
            shared.notices.deliver(None);
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
            let before = Work::so_far();
            shared.on(shard, |state| state.leave(&exit, &mut view));
            vcpu.count_work(before.since(), Turn::Done);
        }
        shared.notices.deliver(None);
        vcpu.exit_done();
        shared.flushes.vcpu_left();
    }

    /// The vCPU wrote `value` to the doorbell.
    pub fn mark(&mut self, value: u32, regs: &mut dyn Registers) {
        let shared = &*self.shared;
        if let Some(shard) = shared.shard(self.index) {
            shard.vcpu.count_mark();
            let mut view = ExitView::new(regs, Some(value));
            let before = Work::so_far();
            shared.on(shard, |state| state.mark(value, &mut view));
            shard.vcpu.count_work(before.since(), Turn::Done);
            shared.notices.deliver(None);
        }
    }

    /// The vCPU notified `queue`, one of the vCPUs': its commands are carried out before the vCPU enters
    /// again, as many as a turn allows before this returns. [`VcpuSession::resume`] goes on with the
    /// rest.
    pub fn kick(&mut self, queue: u16) {
        let Some(of) = self.shared.queue_of(queue) else {
            let vcpu = self.index;
            log::debug!("queue {queue} was notified by vCPU {vcpu}, but is no vCPU's");
            return;
        };
        // An earlier one, if the VMM has not seen to it.
        while self.resume() == Turn::Unfinished {}
        if let Some(shard) = self.shared.shard(of) {
            shard.vcpu.count_kick();
        }
        self.serving = Some(Serving { of, begun: false });
        // The rest of it is carried out before the vCPU enters again.
        let _ = self.resume();
    }

    /// One more turn at the work that a notification left. Between two turns the locks are free. A VMM
    /// calls this before [`VcpuSession::enter`] until it returns [`Turn::Done`], to look meanwhile
    /// whether the vCPU is to stop.
    pub fn resume(&mut self) -> Turn {
        let Some(serving) = self.serving.take() else {
            return Turn::Done;
        };
        let before = self.buffer.begin_turn();
        let served = self.serve(serving);
        let turn = match served {
            Some(_) => Turn::Done,
            None => {
                self.serving = Some(Serving {
                    begun: true,
                    ..serving
                });
                Turn::Unfinished
            }
        };
        let interrupt = served == Some(true);
        // Its number fits: it has been made of a queue's.
        let queue = u16::try_from(serving.of).ok();
        let queue = queue.and_then(|of| of.checked_add(QUEUE_VCPU));
        self.shared.notices.deliver(queue.filter(|_| interrupt));
        if let Some(shard) = self.shard() {
            if serving.begun || turn == Turn::Unfinished {
                shard.vcpu.set_unserved(turn == Turn::Unfinished);
            }
            shard.vcpu.count_work(before.since(), turn);
        }
        turn
    }

    /// Serves a notification: whether the driver wants an interrupt for it; `None`: the turn is over.
    fn serve(&mut self, Serving { of, begun }: Serving) -> Option<bool> {
        let shared = &*self.shared;
        let Some(shard) = shared.shard(of) else {
            return Some(false);
        };
        let (by, buffer) = (self.index, &mut self.buffer);
        let mut answer = shared.on(shard, |state| {
            if !begun {
                buffer.begin(state);
            }
            buffer.serve(state, by)
        });
        loop {
            let command = match answer {
                Answer::Done(interrupt) => return Some(interrupt),
                Answer::Unfinished => return None,
                Answer::Elsewhere(command) => command,
            };
            let resets = buffer.resets();
            let reply = shared.control.lock().command(&command, of, by, resets);
            buffer.reply(&reply);
            answer = shared.on(shard, |state| buffer.serve(state, by));
        }
    }

    /// Until the value is dropped, the vCPU is paused: clocks that sample, whose overflows would signal its thread,
    /// stand still. It does not enter the guest meanwhile.
    pub fn pause(&mut self) -> Paused<'_> {
        self.settle_pause("paused", |source, thread| source.pause(thread));
        Paused(self)
    }

    fn settle_pause(&self, what: &str, act: impl FnOnce(&dyn Source, i32) -> io::Result<()>) {
        let source = &*self.shared.backend.source;
        let thread = self.shard().and_then(|shard| shard.vcpu.thread());
        if let Some(Err(error)) = thread.map(|thread| act(source, thread)) {
            // Its overflows come all the same, or late.
            log::debug!("clocks of vCPU {} are not {what}: {error}", self.index);
        }
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

/// A paused vCPU, by [`VcpuSession::pause`].
#[derive(Debug)]
#[must_use = "the vCPU goes on when it is dropped"]
pub struct Paused<'a>(&'a mut VcpuSession);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0
            .settle_pause("started again", |source, thread| source.go_on(thread));
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
            shard.vcpu.set_unserved(false);
            shard.vcpu.give_back();
            self.shared.notices.deliver(None);
        }
    }
}
