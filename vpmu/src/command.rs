//! The vCPU queues: commands that the driver gives with interrupts off, carried out on the vCPU's
//! own thread before the notifying instruction retires.

use crate::abi::{
    COMMAND_AUX_BEGIN, COMMAND_AUX_END, COMMAND_DISABLE, COMMAND_ENABLE, COMMAND_FLUSH, COMMAND_IN,
    COMMAND_OUT, COMMAND_PERIOD, COMMAND_READ, COMMAND_REFRESH, COMMAND_RESET, COMMAND_VCPU,
    Command, QUEUE_VCPU, Reply,
};
use crate::errno::{Errno, status};
use crate::event::{Context, Host};
use crate::queues::{BadChain, Chain, put, take};
use crate::state::State;

/// Most commands of one notification: enough for a switch of every event that a guest may open by
/// default, both ways, and a bound on how long one exit lasts.
const MAX_COMMANDS: usize = 2048;

impl State {
    /// Serves the queue of vCPU `of`, notified by `by`; whether the driver wants an interrupt.
    pub(crate) fn serve_commands(&mut self, host: &Host<'_>, of: u32, by: u32) -> bool {
        let index = usize::from(QUEUE_VCPU) + of as usize;
        let mut served = false;
        let mut left = MAX_COMMANDS;
        // Samples from before the notification stand in their rings before it is answered.
        self.settle(host);
        for _ in 0..self.queues.bound(index) {
            let Some(chain) = self.queues.take(index) else {
                break;
            };
            let len = self
                .carry_out(host, &chain, of, by, &mut left)
                .unwrap_or_else(|BadChain| {
                    self.metrics.bad_requests += 1;
                    0
                });
            self.queues.give_back(index, &chain, len);
            served = true;
        }
        served && self.queues.wants_interrupt(index)
    }

    /// Carries out the commands of one buffer, of `left` that this notification may still bring;
    /// bytes of the answers.
    fn carry_out(
        &mut self,
        host: &Host<'_>,
        chain: &Chain,
        of: u32,
        by: u32,
        left: &mut usize,
    ) -> Result<u32, BadChain> {
        let (len, mut reader) = chain.reader()?;
        let (room, mut writer) = chain.writer()?;
        let commands = len / size_of::<Command>();
        let answers = commands * size_of::<Reply>();
        if len % size_of::<Command>() != 0 || commands > *left || room < answers {
            return Err(BadChain);
        }
        *left -= commands;
        for _ in 0..commands {
            let command: Command = take(&mut reader)?;
            self.metrics.commands += 1;
            put(&mut writer, &self.command(host, &command, of, by))?;
        }
        u32::try_from(answers).map_err(|_| BadChain)
    }

    fn command(&mut self, host: &Host<'_>, command: &Command, of: u32, by: u32) -> Reply {
        let id = command.event.get();
        if command.op.get() == COMMAND_VCPU {
            let clean = id == 0 && command.value.get() == 0 && is_clean(command);
            let result = if clean { Ok(()) } else { Err(Errno::EINVAL) };
            return Reply {
                status: status(&result).into(),
                value: u64::from(by).into(),
                ..Reply::default()
            };
        }
        if of == by && command.op.get() == COMMAND_AUX_END {
            return self.aux_end_command(command);
        }
        let result = if of == by {
            self.event_command(host, command, by)
        } else {
            Err(Errno::EXDEV)
        };
        self.reply(id, result)
    }

    /// How far the trace came in an area that the driver keeps.
    fn aux_end_command(&mut self, command: &Command) -> Reply {
        let id = command.event.get();
        let clean = command.value.get() == 0 && is_clean(command);
        let ended = match clean {
            true => self.aux_end(id),
            false => Err(Errno::EINVAL),
        };
        match ended {
            Ok((head, lost)) => Reply {
                value: head.into(),
                lost: lost.into(),
                ..self.reply(id, Ok(()))
            },
            Err(errno) => self.reply(id, Err(errno)),
        }
    }

    /// The answer to a command of an event: how it is now.
    fn reply(&self, id: u64, result: Result<(), Errno>) -> Reply {
        let status = status(&result).into();
        let Some(event) = self.events.get(&id) else {
            return Reply {
                status,
                ..Reply::default()
            };
        };
        let face = event.face(self.clock);
        Reply {
            status,
            state: event.state().into(),
            value: face.count.into(),
            time_enabled: face.time_enabled.into(),
            time_running: face.time_running.into(),
            lost: event.lost().into(),
        }
    }

    fn event_command(
        &mut self,
        host: &Host<'_>,
        command: &Command,
        vcpu: u32,
    ) -> Result<(), Errno> {
        let (op, id) = (command.op.get(), command.event.get());
        let has_value = command.value.get() != 0;
        let takes_value = matches!(op, COMMAND_PERIOD | COMMAND_REFRESH | COMMAND_AUX_BEGIN);
        let has_room = command.room.get() != 0 && op != COMMAND_AUX_BEGIN;
        if command.reserved.get() != 0 || has_room || has_value && !takes_value {
            return Err(Errno::EINVAL);
        }
        let changes = matches!(
            op,
            COMMAND_ENABLE | COMMAND_DISABLE | COMMAND_RESET | COMMAND_PERIOD | COMMAND_REFRESH
        );
        if changes && self.is_operators(id) {
            return Err(Errno::EPERM);
        }
        if op == COMMAND_FLUSH {
            return self.flush_on(host, id, vcpu);
        }
        self.lift(host, id);
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        match op {
            COMMAND_ENABLE => self.enable(host, id),
            COMMAND_DISABLE => self.disable(host, id),
            COMMAND_REFRESH => self.enable_for(host, id, command.value.get()),
            COMMAND_IN => {
                let Context::Task(None) = event.context else {
                    return Err(Errno::EINVAL);
                };
                event.context = Context::Task(Some(vcpu));
                event.task = Some(self.output.running(vcpu));
                event.last_vcpu = vcpu;
                self.start(host, id)
            }
            COMMAND_OUT => {
                if event.context != Context::Task(Some(vcpu)) {
                    return Err(Errno::EINVAL);
                }
                event.context = Context::Task(None);
                self.stop(host, id)
            }
            COMMAND_READ => self.update(host, id),
            COMMAND_RESET => self.reset_count(host, id),
            COMMAND_AUX_BEGIN => self.aux_begin(id, command.value.get(), command.room.get()),
            COMMAND_PERIOD => self.set_period(host, id, command.value.get()),
            _ => Err(Errno::EINVAL),
        }
    }
}

fn is_clean(command: &Command) -> bool {
    command.reserved.get() == 0 && command.room.get() == 0
}
