//! The work of one vCPU: its events, and one step of work on them.

use std::io;

use vpmu::abi::*;
use vpmu::{Access, Exit, ExitReason};
use vpmu_testkit::{DriverQueue, command, commands, open_of, replies, size_of_replies};
use zerocopy::IntoBytes;

use crate::device::Seat;
use crate::vcpu::VcpuThread;

/// Events of a vCPU with [`Load::Samples`].
const SAMPLING: u64 = 4;
/// Value of the marks.
const VALUE: u32 = 7;
const IP_TID_TIME: u64 = 0b111;
/// A write to a port.
const EXIT: Exit =
    Exit { reason: ExitReason::Io, access: Some(Access { address: 0x80, size: 1, write: true, count: 1 }) };

/// The kind of work that a vCPU does in each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// Schedules this many counting events of a task in and out, in two notifications.
    Switches(usize),
    /// Makes a mark, which one event samples and another event counts.
    Marks,
    /// Makes an exit, which a trace records.
    Exits,
    /// Notifies the device, which then writes the samples of the vCPU's events.
    Samples,
}

/// The events of one vCPU, and its queue.
#[derive(Debug)]
pub(crate) struct Work {
    load: Load,
    queue: DriverQueue,
    /// Index of the queue.
    index: u16,
    events: Vec<u64>,
    steps: u64,
}

impl Work {
    /// Opens and enables the vCPU's events, and enters the guest. Must be called on the vCPU's thread. `software` holds
    /// the configs for the events of [`Load::Switches`]. If there are more events than configs, the configs repeat.
    pub(crate) fn begin(load: Load, mut seat: Seat, vcpu: &mut VcpuThread, software: &[u64]) -> io::Result<Self> {
        let index = u16::try_from(u32::from(QUEUE_VCPU) + seat.vcpu).map_err(io::Error::other)?;
        seat.device.name_task(seat.vcpu)?;
        let events = open(load, &seat, software)?;
        let enable = commands(COMMAND_ENABLE, &events);
        replies(&seat.queue.exchange(enable.as_bytes(), size_of_replies(&enable), || vcpu.kick(index)))?;
        let lay = |slot, commands: &[Command]| seat.queue.lay(slot, commands.as_bytes(), size_of_replies(commands));
        match load {
            Load::Switches(_) => {
                lay(0, &commands(COMMAND_IN, &events));
                lay(2, &commands(COMMAND_OUT, &events));
                seat.queue.place_in_turn(&[0, 2]);
            }
            Load::Samples => {
                lay(0, &[command(COMMAND_READ, events[0])]);
                seat.queue.place_in_turn(&[0]);
            }
            Load::Marks | Load::Exits => {}
        }
        vcpu.enter();
        Ok(Self { load, queue: seat.queue, index, events, steps: 0 })
    }

    pub(crate) fn step(&mut self, vcpu: &mut VcpuThread) -> io::Result<()> {
        self.steps += 1;
        match self.load {
            Load::Switches(_) => {
                self.notify(vcpu)?;
                self.notify(vcpu)
            }
            Load::Samples => self.notify(vcpu),
            Load::Marks => {
                vcpu.leave(ExitReason::Mmio);
                vcpu.mark(VALUE);
                vcpu.enter();
                Ok(())
            }
            Load::Exits => {
                vcpu.leave(EXIT);
                vcpu.enter();
                Ok(())
            }
        }
    }

    /// Leaves the guest, offers the next chain of the queue, notifies the device, and enters the guest again.
    fn notify(&mut self, vcpu: &mut VcpuThread) -> io::Result<()> {
        vcpu.leave(ExitReason::Mmio);
        self.queue.offer_placed();
        vcpu.kick(self.index);
        if !self.queue.reclaim_all() {
            return Err(io::Error::other("the device did not answer"));
        }
        vcpu.enter();
        Ok(())
    }

    /// Leaves the guest. Returns an error if an event lost samples or trace bytes, or if a count does not match the
    /// number of steps. The events of [`Load::Switches`] do not count steps. With this load, returns an error if the
    /// clock's count is zero, or if one of the last commands that schedule the events in or out failed.
    pub(crate) fn end(mut self, vcpu: &mut VcpuThread) -> io::Result<()> {
        let read = commands(COMMAND_READ, &self.events);
        let room = size_of_replies(&read);
        if let Load::Switches(_) = self.load {
            for answer in [1, 3] {
                replies(&self.queue.written(answer, room))?;
            }
        }
        vcpu.leave(ExitReason::Mmio);
        let replies = replies(&self.queue.exchange(read.as_bytes(), room, || vcpu.kick(self.index)))?;
        let counts = |reply: &Reply, least: u64| reply.value.get() >= least;
        let whole = match self.load {
            // The first event is a clock.
            Load::Switches(_) => counts(&replies[0], 1),
            Load::Marks => replies.iter().all(|reply| reply.value.get() == self.steps),
            Load::Exits => counts(&replies[0], self.steps * size_of::<ExitPacket>() as u64),
            Load::Samples => replies.iter().all(|reply| counts(reply, self.steps)),
        };
        if !whole || replies.iter().any(|reply| reply.lost.get() != 0) {
            let what = format!("{:?}: lost data or wrong counts after {} steps: {replies:?}", self.load, self.steps);
            return Err(io::Error::other(what));
        }
        Ok(())
    }
}

/// Opens the events of a load and maps their rings and AUX areas. Leaves the events disabled.
fn open(load: Load, seat: &Seat, software: &[u64]) -> io::Result<Vec<u64>> {
    let (device, vcpu) = (&seat.device, seat.vcpu);
    let counting = |kind, config| open_of(kind, config, vcpu);
    let sampling = |kind, config, engine: u32| OpenRequest {
        period: 1.into(),
        sample_type: IP_TID_TIME.into(),
        engine: engine.into(),
        ..counting(kind, config)
    };
    let with_ring = |request: &OpenRequest, index| {
        let event = device.open(request)?;
        device.map_ring(vcpu, event, index).map(|()| event)
    };
    match load {
        Load::Switches(events) => {
            let task = |&config: &u64| device.open(&open_of(KIND_SOFTWARE, config, CONTEXT_TASK));
            software.iter().cycle().take(events).map(task).collect()
        }
        Load::Marks => {
            let value = u64::from(VALUE);
            let sampled = with_ring(&sampling(KIND_MARK, value, ENGINE_EXIT), 0)?;
            Ok(vec![sampled, device.open(&counting(KIND_MARK, value))?])
        }
        Load::Exits => {
            let trace = with_ring(&counting(KIND_EXIT_TRACE, EXIT_USER), 0)?;
            device.map_area(vcpu, trace).map(|()| vec![trace])
        }
        Load::Samples => {
            let request = sampling(KIND_HARDWARE, 0, ENGINE_BATCHED);
            let one = |index| with_ring(&request, index);
            (0..SAMPLING).map(one).collect()
        }
    }
}
