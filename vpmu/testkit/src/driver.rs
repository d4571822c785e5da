//! A driver that polls its queues, for a device that the caller creates.

use std::io;
use std::sync::Arc;

use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::{QueueState, Turn, VcpuSession, Vpmu};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::host::Silent;
use crate::queue::{DriverQueue, Layout};
use crate::requests::{header, map_request, outcome, structs};

#[derive(Debug)]
pub struct Driver {
    vpmu: Arc<Vpmu>,
    /// The control queue, the event queue, and a queue for each vCPU.
    pub queues: Vec<DriverQueue>,
}

impl Driver {
    /// Sets up the queues of a device, and calls `activate` to pass them to the device.
    pub fn new<E>(
        vpmu: &Arc<Vpmu>,
        memory: &GuestMemoryMmap,
        layout: Layout,
        activate: impl FnOnce(&[QueueState]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let (queues, states) = layout.set_up(memory);
        activate(&states)?;
        Ok(Self { vpmu: Arc::clone(vpmu), queues })
    }

    /// Sets up the queues of a device, activates the device, and asks for no interrupts.
    pub fn activate(
        vpmu: &Arc<Vpmu>,
        memory: &GuestMemoryMmap,
        layout: Layout,
        features: u64,
    ) -> Result<Self, vpmu::Error> {
        let activate = |states: &[QueueState]| vpmu.activate(memory.clone(), features, states, Arc::new(Silent));
        let driver = Self::new(vpmu, memory, layout, activate)?;
        for queue in &driver.queues {
            queue.want_no_interrupt();
        }
        Ok(driver)
    }

    /// Sends a control request whose answer is a `T`.
    pub fn ask<T: FromBytes>(&mut self, request: &(impl IntoBytes + Immutable + ?Sized)) -> T {
        let queue = &mut self.queues[usize::from(QUEUE_CONTROL)];
        let answer = queue.exchange(request.as_bytes(), size_of::<T>(), || {
            let _ = self.vpmu.notify(QUEUE_CONTROL);
        });
        T::read_from_bytes(&answer).expect("a reply")
    }

    /// Sends a control request whose answer is only a status.
    pub fn request(&mut self, request: &(impl IntoBytes + Immutable + ?Sized)) -> io::Result<()> {
        let reply: ControlReply = self.ask(request);
        outcome(reply.status.get()).map_err(io::Error::from_raw_os_error)
    }

    /// Opens an event. Returns the id of the event.
    pub fn open(&mut self, request: &OpenRequest) -> io::Result<u64> {
        let reply: OpenReply = self.ask(&OpenRequest { header: header(CONTROL_OPEN, 0), ..*request });
        outcome(reply.status.get()).map_err(io::Error::from_raw_os_error)?;
        Ok(reply.id.get())
    }

    /// Maps a ring for `event` if `op` is [`CONTROL_MAP`], or an AUX area if `op` is [`CONTROL_MAP_AUX`]. The memory is
    /// `count` pages long and starts at address `from`.
    pub fn map(&mut self, op: u32, event: u64, flags: u32, from: u64, count: u64) -> io::Result<()> {
        let pages: Vec<u64> = (0..count).map(|page| from + page * PAGE_SIZE as u64).collect();
        self.request(map_request(op, event, flags, &pages).as_slice())
    }

    pub fn close(&mut self, event: u64) -> io::Result<()> {
        self.request(&header(CONTROL_CLOSE, event))
    }

    /// Sends commands with one notification on the thread of vCPU `session`. Returns the replies.
    pub fn commands(&mut self, session: &mut VcpuSession, commands: &[Command]) -> io::Result<Vec<Reply>> {
        let index = QUEUE_VCPU + u16::try_from(session.vcpu()).expect("few");
        let answer = self.queues[usize::from(index)].exchange(commands.as_bytes(), size_of_replies(commands), || {
            session.kick(index);
            while session.resume() == Turn::Unfinished {}
        });
        replies(&answer)
    }
}

/// Number of bytes of the replies to `commands`.
pub fn size_of_replies(commands: &[Command]) -> usize {
    commands.len() * size_of::<Reply>()
}

/// Parses replies. Returns an error if one of the commands failed.
pub fn replies(answer: &[u8]) -> io::Result<Vec<Reply>> {
    let replies: Vec<Reply> = structs(answer);
    for reply in &replies {
        outcome(reply.status.get()).map_err(io::Error::from_raw_os_error)?;
    }
    Ok(replies)
}
