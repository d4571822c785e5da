//! The guest's driver: opens a trace with a ring and an AUX area, enables and disables the trace, and reads
//! the area after each slice.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{Interrupt, VcpuSession, Vpmu};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::DriverQueue;

const QUEUES: u64 = 0x1_0000;
const BUFFERS: u64 = 0x2_0000;
const RING: u64 = 0x10_0000;
const RING_PAGES: u64 = 3;
const AREA: u64 = 0x20_0000;
/// Room for a slice and a half.
const AREA_PAGES: u64 = 128;
const FEATURES: u64 = 1 << 32 | 0xf;
const AUX_HEAD: u64 = 1056;
const AUX_TAIL: u64 = 1064;
/// Bytes of a traced exit.
pub(crate) const PACKET: u64 = size_of::<ExitPacket>() as u64;

/// Discards interrupts: the driver polls.
#[derive(Debug)]
struct Silent;

impl Interrupt for Silent {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct Trace {
    memory: GuestMemoryMmap,
    queues: Vec<DriverQueue>,
    event: u64,
    /// The trace's byte count, from the last reply.
    count: u64,
    read: u64,
}

impl Trace {
    /// Activates the device. Opens a trace of every exit that reaches the VMM, and maps the trace's ring and
    /// area. The trace is still disabled.
    pub(crate) fn open(vpmu: &Vpmu, memory: &GuestMemoryMmap) -> Self {
        let (drivers, queues): (Vec<_>, Vec<_>) = (0..3)
            .map(|index| {
                let buffers = BUFFERS + index * 2 * DriverQueue::BUFFER;
                DriverQueue::new(memory, QUEUES + index * 0x1000, buffers)
            })
            .unzip();
        vpmu.activate(memory.clone(), FEATURES, &queues, Arc::new(Silent)).expect("active");
        let mut trace = Self { memory: memory.clone(), queues: drivers, event: 0, count: 0, read: 0 };
        let open = OpenRequest {
            header: header(CONTROL_OPEN, 0),
            kind: KIND_EXIT_TRACE.into(),
            config: EXIT_USER.into(),
            ..OpenRequest::default()
        };
        let answer = trace.ask(vpmu, open.as_bytes(), size_of::<OpenReply>());
        let reply = OpenReply::read_from_bytes(&answer).expect("a reply");
        assert_eq!(reply.status.get(), 0, "opened");
        trace.event = reply.id.get();
        trace.map(vpmu, CONTROL_MAP, RING, RING_PAGES);
        trace.map(vpmu, CONTROL_MAP_AUX, AREA, AREA_PAGES);
        trace
    }

    /// Enables or disables the trace.
    pub(crate) fn turn(&mut self, session: &mut VcpuSession, on: bool) {
        let command = Command {
            op: if on { COMMAND_ENABLE } else { COMMAND_DISABLE }.into(),
            event: self.event.into(),
            ..Command::default()
        };
        let queue = &mut self.queues[usize::from(QUEUE_VCPU)];
        queue.request(command.as_bytes(), size_of::<Reply>());
        session.kick(QUEUE_VCPU);
        let answer = queue.answer().expect("answered immediately");
        let reply = Reply::read_from_bytes(&answer).expect("a reply");
        assert_eq!((reply.status.get(), reply.lost.get()), (0, 0), "{reply:?}");
        self.count = reply.value.get();
    }

    /// Reads the packets written since the last call. Checks that `exits` of them are exit packets. The others are sync
    /// packets and padding.
    pub(crate) fn check(&mut self, exits: u64) {
        let head: u64 = self.memory.read_obj(GuestAddress(RING + AUX_HEAD)).expect("in memory");
        assert_eq!(head, self.count, "the area has every byte of the trace");
        let packets = (self.read..head).step_by(PACKET_ALIGN).filter(|position| {
            let at = GuestAddress(AREA + position % (AREA_PAGES * 4096));
            self.memory.read_obj::<u8>(at).expect("in memory") == PACKET_EXIT
        });
        assert_eq!(packets.count() as u64, exits, "the trace has each exit once");
        self.read = head;
        self.memory.write_obj(head, GuestAddress(RING + AUX_TAIL)).expect("in memory");
    }

    fn map(&mut self, vpmu: &Vpmu, op: u32, from: u64, pages: u64) {
        let request = MapRequest {
            header: header(op, self.event),
            pages: u32::try_from(pages).expect("few").into(),
            flags: MAP_WRITABLE.into(),
        };
        let mut bytes = request.as_bytes().to_vec();
        for page in 0..pages {
            bytes.extend((from + page * PAGE_SIZE as u64).to_le_bytes());
        }
        let answer = self.ask(vpmu, &bytes, size_of::<ControlReply>());
        let reply = ControlReply::read_from_bytes(&answer).expect("a reply");
        assert_eq!(reply.status.get(), 0, "mapped");
    }

    fn ask(&mut self, vpmu: &Vpmu, request: &[u8], room: usize) -> Vec<u8> {
        let queue = &mut self.queues[usize::from(QUEUE_CONTROL)];
        queue.request(request, room);
        let _ = vpmu.notify(QUEUE_CONTROL);
        queue.answer().expect("answered immediately")
    }
}

fn header(op: u32, event: u64) -> ControlHeader {
    ControlHeader { op: op.into(), reserved: 0.into(), event: event.into() }
}
