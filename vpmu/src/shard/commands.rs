//! Serves the vCPU queues. The driver sends commands with interrupts off. When a vCPU notifies a queue, the vCPU's
//! thread executes the commands on that queue before the notifying instruction retires.

use std::io::{Read, Write};

use zerocopy::{FromBytes, IntoBytes};

use super::state::State;
use crate::abi::{
    COMMAND_AUX_BEGIN, COMMAND_AUX_END, COMMAND_DISABLE, COMMAND_ENABLE, COMMAND_FLUSH, COMMAND_IN, COMMAND_OUT,
    COMMAND_PERIOD, COMMAND_PROMPT, COMMAND_READ, COMMAND_REFRESH, COMMAND_RESET, COMMAND_VCPU, Command, PACKET_ALIGN,
    Reply,
};
use crate::area::Refused;
use crate::errno::{Errno, status};
use crate::event::Event;
use crate::queues::{BadChain, Chain};
use crate::spec::Context;
use crate::work::{self, Work};

/// Maximum number of commands in one notification. With the default limit on open events, this is enough to schedule
/// all events in and out.
const MAX_COMMANDS: usize = 2048;

/// The buffer of commands that a session executes. It is kept so that its memory can be reused.
#[derive(Debug, Default)]
pub(crate) struct CommandBuffer {
    chain: Option<Chain>,
    bytes: Vec<u8>,
    replies: Vec<u8>,
    /// Number of commands in this buffer that have been executed.
    done: usize,
    /// Number of commands that this notification may still take from the queue.
    left: usize,
    /// Number of buffers that this notification may still take from the queue.
    buffers: u16,
    /// Number of resets when the notification began.
    resets: u64,
    served: bool,
    /// [`Work::so_far`] of the session's thread when the turn began.
    turn: Work,
}

/// The next step for a session.
#[derive(Debug)]
pub(crate) enum Answer {
    /// All commands have been executed. The value is true if the driver wants an interrupt.
    Done(bool),
    /// Execute this command in its event's shard, then call [`CommandBuffer::reply`].
    Elsewhere(Command),
    /// The turn has ended, but commands remain.
    Unfinished,
}

impl CommandBuffer {
    /// Begins to serve a notification.
    pub(crate) fn begin(&mut self, state: &mut State) {
        self.chain = None;
        self.left = MAX_COMMANDS;
        self.buffers = state.queue.bound();
        self.resets = state.resets();
        self.served = false;
        state.queue.notified();
        // Samples taken earlier must be in their rings when the notification returns.
        state.events.flush_batched();
    }

    /// Begins a turn; returns [`Work::so_far`].
    pub(crate) fn begin_turn(&mut self) -> Work {
        self.turn = Work::so_far();
        self.turn
    }

    /// Executes the commands on the queue of `state`. The vCPU `by` notified this queue. Stops before a command whose
    /// event is not in this shard, or when the turn ends.
    pub(crate) fn serve(&mut self, state: &mut State, by: u32) -> Answer {
        if state.resets() != self.resets {
            // A reset has removed the notified queue.
            self.chain = None;
            return Answer::Done(false);
        }
        loop {
            if self.turn.since().fills_a_turn() {
                return Answer::Unfinished;
            }
            if self.chain.is_none() {
                if !self.next(state) {
                    return Answer::Done(self.served && state.queue.wants_interrupt());
                }
                // The buffer may be malformed or long, so check whether the turn ends.
                continue;
            }
            let mut rest = self.bytes.get(self.done * size_of::<Command>()..).unwrap_or_default();
            while let Ok((command, later)) = Command::ref_from_prefix(rest) {
                if self.turn.since().fills_a_turn() {
                    return Answer::Unfinished;
                }
                work::charge(1);
                let Some(reply) = carry_out(state, command, by) else {
                    return Answer::Elsewhere(*command);
                };
                self.replies.extend_from_slice(reply.as_bytes());
                self.done += 1;
                rest = later;
            }
            self.give_back(state);
        }
    }

    /// Number of resets of the device when the notification began.
    pub(crate) fn resets(&self) -> u64 {
        self.resets
    }

    /// Appends the reply to a command that was executed elsewhere.
    pub(crate) fn reply(&mut self, reply: &Reply) {
        self.replies.extend_from_slice(reply.as_bytes());
        self.done += 1;
    }

    /// Takes the next buffer, and returns it at once if it is not valid. Returns `false` if the queue is empty, or if as
    /// many buffers were taken as one notification allows.
    fn next(&mut self, state: &mut State) -> bool {
        let Some(left) = self.buffers.checked_sub(1) else {
            return false;
        };
        self.buffers = left;
        let Some(chain) = state.queue.take() else {
            return false;
        };
        self.served = true;
        self.done = 0;
        self.replies.clear();
        match self.read(&chain) {
            Ok(()) => {
                let commands = self.bytes.len() / size_of::<Command>();
                self.left -= commands;
                state.core_mut().metrics.commands += commands as u64;
                self.chain = Some(chain);
            }
            Err(BadChain) => {
                state.core_mut().metrics.bad_requests += 1;
                state.queue.give_back(chain, 0);
            }
        }
        true
    }

    /// Copies the commands out of a buffer. Fails if the buffer contains too many commands, or too little space for the
    /// replies.
    fn read(&mut self, chain: &Chain) -> Result<(), BadChain> {
        let (len, mut reader) = chain.reader()?;
        let (room, _) = chain.writer()?;
        let commands = len / size_of::<Command>();
        if len % size_of::<Command>() != 0 || commands > self.left || room < commands * size_of::<Reply>() {
            return Err(BadChain);
        }
        self.bytes.resize(len, 0);
        reader.read_exact(&mut self.bytes).map_err(|_| BadChain)
    }

    fn give_back(&mut self, state: &mut State) {
        let Some(chain) = self.chain.take() else {
            return;
        };
        let written = chain.writer().and_then(|(_, mut writer)| {
            writer.write_all(&self.replies).map_err(|_| BadChain)?;
            u32::try_from(self.replies.len()).map_err(|_| BadChain)
        });
        let len = written.unwrap_or_else(|BadChain| {
            state.core_mut().metrics.bad_requests += 1;
            0
        });
        state.queue.give_back(chain, len);
    }
}

/// Executes a command from the vCPU `by` on this shard's queue. Returns `None` if the event may be in another shard.
fn carry_out(state: &mut State, command: &Command, by: u32) -> Option<Reply> {
    let (op, id) = (command.op.get(), command.event.get());
    if op == COMMAND_VCPU {
        let clean = id == 0 && has_no_operand(command);
        let result = if clean { Ok(()) } else { Err(Errno::EINVAL) };
        return Some(Reply { status: status(&result).into(), value: u64::from(by).into(), ..Reply::default() });
    }
    if by == state.core().cpu.index
        && let Some(reply) = state.switch_plain(command)
    {
        return Some(reply);
    }
    let flushes_all = op == COMMAND_FLUSH && id == 0;
    let here = flushes_all || state.event(id).is_some();
    here.then(|| event_command(state, command, by, by == state.core().cpu.index))
}

/// Executes a command from the vCPU `by`. `own` is true if the command was on that vCPU's own queue.
pub(crate) fn event_command(state: &mut State, command: &Command, by: u32, own: bool) -> Reply {
    let id = command.event.get();
    if own && command.op.get() == COMMAND_AUX_END {
        return aux_end_command(state, command);
    }
    let result = if own { run_command(state, command, by) } else { Err(Errno::EXDEV) };
    state.reply(id, result)
}

/// Executes `COMMAND_AUX_END`, which withdraws the space granted to a trace in an area that the driver manages. The
/// reply contains the head that the trace reached, and the number of bytes that the trace lost.
fn aux_end_command(state: &mut State, command: &Command) -> Reply {
    let id = command.event.get();
    let ended = if has_no_operand(command) { aux_end(state.event(id)) } else { Err(Errno::EINVAL) };
    match ended {
        Ok((head, lost)) => Reply { value: head.into(), lost: lost.into(), ..state.reply(id, Ok(())) },
        Err(errno) => state.reply(id, Err(errno)),
    }
}

/// Grants a trace `room` bytes, starting at `head`, in an area that the driver manages.
fn aux_begin(event: Option<&Event>, head: u64, room: u64) -> Result<(), Errno> {
    let event = event.ok_or(Errno::ENOENT)?;
    if !head.is_multiple_of(PACKET_ALIGN as u64) {
        return Err(Errno::EINVAL);
    }
    let sink = event.output.sink.as_deref().ok_or(Errno::EINVAL)?;
    sink.begin(event.spec.id, head, room).map_err(|_: Refused| Errno::EINVAL)
}

/// Withdraws the space granted to a trace. Returns the head that the trace reached, and the number of lost bytes.
fn aux_end(event: Option<&Event>) -> Result<(u64, u64), Errno> {
    let event = event.ok_or(Errno::ENOENT)?;
    let sink = event.output.sink.as_deref().ok_or(Errno::EINVAL)?;
    sink.finish(event.spec.id).map_err(|_: Refused| Errno::EINVAL)
}

fn run_command(state: &mut State, command: &Command, by: u32) -> Result<(), Errno> {
    let (op, id) = (command.op.get(), command.event.get());
    let has_value = command.value.get() != 0;
    let takes_value = matches!(op, COMMAND_PERIOD | COMMAND_REFRESH | COMMAND_AUX_BEGIN | COMMAND_PROMPT);
    let has_room = command.room.get() != 0 && op != COMMAND_AUX_BEGIN;
    if command.reserved.get() != 0 || has_room || has_value && !takes_value {
        return Err(Errno::EINVAL);
    }
    if op == COMMAND_FLUSH {
        return state.flush_command(id, by);
    }
    let event = state.event(id).ok_or(Errno::ENOENT)?;
    let changes = matches!(
        op,
        COMMAND_ENABLE | COMMAND_DISABLE | COMMAND_RESET | COMMAND_PERIOD | COMMAND_REFRESH | COMMAND_PROMPT
    );
    if changes && event.is_operators() {
        return Err(Errno::EPERM);
    }
    let context = event.schedule.context;
    state.events.unthrottle(id, None);
    match op {
        COMMAND_ENABLE => state.enable(id),
        COMMAND_DISABLE => state.disable(id),
        COMMAND_REFRESH => state.enable_for(id, command.value.get()),
        COMMAND_IN if by == state.core().cpu.index => state.schedule_in(id),
        COMMAND_OUT if context == Context::Task(Some(by)) => state.schedule_out(id),
        COMMAND_READ => state.events.update(id),
        COMMAND_RESET => state.reset_count(id),
        COMMAND_AUX_BEGIN => aux_begin(state.event(id), command.value.get(), command.room.get()),
        COMMAND_PERIOD => state.set_period(id, command.value.get()),
        COMMAND_PROMPT => match command.value.get() {
            0 => state.set_prompt(id, false),
            1 => state.set_prompt(id, true),
            _ => Err(Errno::EINVAL),
        },
        _ => Err(Errno::EINVAL),
    }
}

fn is_clean(command: &Command) -> bool {
    command.reserved.get() == 0 && command.room.get() == 0
}

pub(super) fn has_no_operand(command: &Command) -> bool {
    is_clean(command) && command.value.get() == 0
}
