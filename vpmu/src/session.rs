//! The device's API for the threads of vCPUs. A vCPU's thread reports entries, exits, marks and notifications.

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

/// A vCPU and its attached thread, from [`Vpmu::attach`](crate::Vpmu::attach) until the session is dropped.
///
/// The device counts events on the attached thread, so the session must stay on that thread. Usually, a session locks
/// only the shard of its own vCPU. It locks other shards and the control plane in three cases: to serve another vCPU's
/// queue, to execute a command for another vCPU's event, and when an event of its own vCPU affects an event of another
/// vCPU. A leader affects its members, and a trigger affects its targets.
#[derive(Debug)]
pub struct VcpuSession {
    shared: Arc<Shared>,
    index: u32,
    /// Whether the current exit is published. Traces record a published exit when it ends.
    in_traced_exit: bool,
    buffer: CommandBuffer,
    /// A notification that still has commands to execute.
    serving: Option<Serving>,
    /// Only one thread at a time may use a session.
    _not_sync: PhantomData<Cell<()>>,
}

/// A notification of a vCPU queue.
#[derive(Debug, Clone, Copy)]
struct Serving {
    /// The vCPU that the queue belongs to.
    of: u32,
    /// Whether the command buffer has been prepared for this notification.
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

    /// Call this right before the run call. Call [`VcpuSession::leave`] after the run call, even if the run call fails.
    /// This call first executes any commands that remain from a notification.
    pub fn enter(&mut self) {
        while self.resume() == Turn::Unfinished {}
        let shared = &*self.shared;
        let Some(shard) = shared.shard(self.index) else {
            return;
        };
        // End the exit before `Vcpu::enter` reads the thread's time, because the time for writing packets must not
        // count as guest time.
        if std::mem::take(&mut self.in_traced_exit) {
            shared.on(shard, |state| state.events.end_exit(false));
            shared.notices.deliver(None);
        }
        shard.vcpu.enter(&*shared.backend.source);
        if shared.flushes.is_waiting() {
            // If another thread is collecting the vCPU's samples, wait for it.
            shard.wait();
        }
    }

    /// Call this right after the run call. If `exit` is just an [`ExitReason`](crate::ExitReason), traces lack the
    /// details of the guest's I/O access ([`Exit::access`]).
    pub fn leave(&mut self, exit: impl Into<Exit>, regs: &mut dyn Registers) {
        let shared = &*self.shared;
        let Some(shard) = shared.shard(self.index) else {
            return;
        };
        let (exit, vcpu) = (exit.into(), &shard.vcpu);
        let hooks = vcpu.hooks();
        let traced = hooks.has(Hook::Traced);
        // Read the TSC first, because from here on the VMM's work is time outside the guest.
        let tsc = traced.then(|| vcpu.guest_tsc(&*shared.backend.source));
        vcpu.leave(exit.reason, &*shared.backend.source);
        let mut view = ExitView::new(regs, None);
        if std::mem::take(&mut self.in_traced_exit) {
            // The VMM has not called `enter` since the previous exit, so end that exit now.
            shared.on(shard, |state| state.events.end_exit(true));
        }
        if let Some(tsc) = tsc {
            let stamp = ExitStamp { exit, tsc, regs: view.regs() };
            view.stamped(&stamp);
            vcpu.open_exit().publish(&stamp);
            self.in_traced_exit = true;
        }
        if hooks.needs_shard() {
            let before = Work::so_far();
            shared.on(shard, |state| state.events.leave(&exit, &mut view));
            vcpu.count_work(before.since(), Turn::Done);
        }
        shared.notices.deliver(None);
        vcpu.exit_done();
        shared.flushes.vcpu_left();
    }

    /// Counts a mark. The vCPU made it by writing `value` to the doorbell.
    pub fn mark(&mut self, value: u32, regs: &mut dyn Registers) {
        let shared = &*self.shared;
        if let Some(shard) = shared.shard(self.index) {
            shard.vcpu.count_mark();
            let mut view = ExitView::new(regs, Some(value));
            let before = Work::so_far();
            shared.on(shard, |state| state.events.mark(value, &mut view));
            shard.vcpu.count_work(before.since(), Turn::Done);
            shared.notices.deliver(None);
        }
    }

    /// Handles a notification that the vCPU sent for `queue`, a vCPU queue. All commands on the queue are executed
    /// before the next guest entry: this call executes the first turn, and [`VcpuSession::resume`] executes the rest.
    pub fn kick(&mut self, queue: u16) {
        let Some(of) = self.shared.queue_of(queue) else {
            let vcpu = self.index;
            log::debug!("vCPU {vcpu} notified queue {queue}, which is not a vCPU queue");
            return;
        };
        // Execute the commands of an earlier notification that the VMM left unfinished.
        while self.resume() == Turn::Unfinished {}
        if let Some(shard) = self.shared.shard(of) {
            shard.vcpu.count_kick();
        }
        self.serving = Some(Serving { of, begun: false });
        // The commands left after this turn are executed before the next guest entry.
        let _ = self.resume();
    }

    /// Runs one more turn of a notification's commands. No lock is held between turns. Before [`VcpuSession::enter`],
    /// repeat this call until it returns [`Turn::Done`], and check between the calls whether the vCPU must stop.
    pub fn resume(&mut self) -> Turn {
        let Some(serving) = self.serving.take() else {
            return Turn::Done;
        };
        let before = self.buffer.begin_turn();
        let served = self.serve(serving);
        let turn = match served {
            Some(_) => Turn::Done,
            None => {
                self.serving = Some(Serving { begun: true, ..serving });
                Turn::Unfinished
            }
        };
        let interrupt = served == Some(true);
        // The conversion cannot fail, because the number was made from a queue index.
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

    /// Serves a notification. Returns whether the driver wants an interrupt for it. Returns `None` if the turn's budget
    /// is used up and commands remain. In this case, call this again to continue.
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

    /// Pauses the vCPU until the returned value is dropped. Stops the vCPU's sampling clocks, because their overflows
    /// would send signals to the vCPU's thread. The vCPU must not enter the guest while it is paused.
    pub fn pause(&mut self) -> Paused<'_> {
        self.settle_pause("paused", |source, thread| source.pause(thread));
        Paused(self)
    }

    fn settle_pause(&self, what: &str, act: impl FnOnce(&dyn Source, i32) -> io::Result<()>) {
        let source = &*self.shared.backend.source;
        let thread = self.shard().and_then(|shard| shard.vcpu.thread());
        if let Some(Err(error)) = thread.map(|thread| act(source, thread)) {
            // This error is not fatal. At worst, overflows signal the paused thread, or are late.
            log::debug!("the clocks of vCPU {} cannot be {what}: {error}", self.index);
        }
    }

    /// Whether an active event may need registers at the next exit.
    #[must_use]
    pub fn wants_registers(&self) -> bool {
        let hooks = self.shard().map(|shard| shard.vcpu.hooks());
        hooks.is_some_and(|hooks| hooks.has(Hook::HostSamples) || hooks.has(Hook::Registers))
    }

    /// The exact number of the vCPU's exits for each reason. A reset does not zero these numbers. A restored device
    /// continues from the saved numbers.
    #[must_use]
    pub fn exits(&self) -> ExitCounts {
        let exits = self.shard().map(|shard| shard.vcpu.exits());
        exits.unwrap_or_default()
    }

    fn shard(&self) -> Option<&Shard> {
        self.shared.shard(self.index)
    }
}

/// A paused vCPU, from [`VcpuSession::pause`] until this value is dropped.
#[derive(Debug)]
#[must_use = "the vCPU continues when this value is dropped"]
pub struct Paused<'a>(&'a mut VcpuSession);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.settle_pause("started again", |source, thread| source.resume(thread));
    }
}

impl Drop for VcpuSession {
    /// Detaches the thread, which is no longer in the guest. Events that counted on this thread wait for the vCPU's
    /// next thread. Events that are started later also wait for that thread.
    fn drop(&mut self) {
        if let Some(shard) = self.shared.shard(self.index) {
            // Even a thread that panicked between `enter` and `leave` has left the guest.
            shard.vcpu.exit_done();
            self.shared.flushes.vcpu_left();
            // Detach while the shard is locked, because other threads hold this lock while they open counters on this
            // thread.
            self.shared.on(shard, State::detach);
            shard.vcpu.set_unserved(false);
            shard.vcpu.give_back();
            self.shared.notices.deliver(None);
        }
    }
}
