//! As much of a driver as it takes: opens sampling events, maps their rings, turns them on and off.

use std::io;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::Vpmu;
use vpmu::abi::*;
use zerocopy::{FromBytes, IntoBytes};

const QUEUES: u64 = 0x1_0000;
const QUEUE_BYTES: u64 = 0x8000;
const QUEUE_SIZE: u16 = 16;
const RINGS: u64 = 0x10_0000;
/// Data pages of each ring.
const DATA: u64 = 16;
const FEATURES: u64 = 1 << 32 | 7;
/// A sample a millisecond.
const PERIOD: u64 = 1_000_000;
const IP_TID_TIME: u64 = 0b111;
const DATA_HEAD: u64 = 1024;
const DATA_TAIL: u64 = 1032;

#[derive(Debug)]
pub(crate) struct Driver {
    vpmu: Arc<Vpmu>,
    memory: GuestMemoryMmap,
    served: [u16; 3],
    events: Vec<u64>,
}

fn failed(what: &str, status: u32) -> io::Error {
    io::Error::other(format!("{what}: errno {status}"))
}

impl Driver {
    /// Brings the device up.
    pub(crate) fn new(vpmu: &Arc<Vpmu>, memory: &GuestMemoryMmap) -> io::Result<Self> {
        let queues = (0..3)
            .map(|index| queue(QUEUES + index * QUEUE_BYTES))
            .collect::<Result<_, _>>()
            .map_err(io::Error::other)?;
        vpmu.activate(memory.clone(), FEATURES, queues)
            .map_err(io::Error::other)?;
        Ok(Self {
            vpmu: Arc::clone(vpmu),
            memory: memory.clone(),
            served: [0; 3],
            events: Vec::new(),
        })
    }

    /// Opens `number` events of the vCPU's clock, each with its ring.
    pub(crate) fn open(&mut self, number: u64, engine: u32) -> io::Result<()> {
        for index in 0..number {
            let request = OpenRequest {
                header: header(CONTROL_OPEN, 0),
                kind: KIND_SOFTWARE.into(),
                period: PERIOD.into(),
                sample_type: IP_TID_TIME.into(),
                engine: engine.into(),
                ..OpenRequest::default()
            };
            let answer = self.exchange(0, request.as_bytes(), size_of::<OpenReply>())?;
            let reply = OpenReply::read_from_bytes(&answer).map_err(|_| failed("open", 0))?;
            if reply.status.get() != 0 {
                return Err(failed("open", reply.status.get()));
            }
            let event = reply.id.get();
            let map = MapRequest {
                header: header(CONTROL_MAP, event),
                pages: u32::try_from(1 + DATA).map_err(io::Error::other)?.into(),
                flags: MAP_WRITABLE.into(),
            };
            let mut bytes = map.as_bytes().to_vec();
            for page in 0..=DATA {
                bytes.extend((ring(index) + page * PAGE_SIZE as u64).to_le_bytes());
            }
            self.simple("map", &bytes)?;
            self.events.push(event);
        }
        Ok(())
    }

    /// Closes every event.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        for event in std::mem::take(&mut self.events) {
            self.simple("close", header(CONTROL_CLOSE, event).as_bytes())?;
        }
        Ok(())
    }

    /// Turns every event on or off, in one notification, on the vCPU's thread.
    pub(crate) fn turn(&mut self, on: bool) -> io::Result<()> {
        let op = if on { COMMAND_ENABLE } else { COMMAND_DISABLE };
        let bytes: Vec<u8> = self
            .events
            .iter()
            .flat_map(|&event| {
                let command = Command {
                    op: op.into(),
                    event: event.into(),
                    ..Command::default()
                };
                command.as_bytes().to_vec()
            })
            .collect();
        let room = self.events.len() * size_of::<Reply>();
        self.exchange(2, &bytes, room).map(|_| ())
    }

    /// Reads all that stands in the rings: bytes.
    pub(crate) fn read_rings(&self) -> io::Result<u64> {
        let mut bytes = 0;
        for index in 0..self.events.len() as u64 {
            let at = |offset| GuestAddress(ring(index) + offset);
            let head: u64 = self
                .memory
                .read_obj(at(DATA_HEAD))
                .map_err(io::Error::other)?;
            let tail: u64 = self
                .memory
                .read_obj(at(DATA_TAIL))
                .map_err(io::Error::other)?;
            self.memory
                .write_obj(head, at(DATA_TAIL))
                .map_err(io::Error::other)?;
            bytes += head - tail;
        }
        Ok(bytes)
    }

    fn simple(&mut self, what: &str, request: &[u8]) -> io::Result<()> {
        let answer = self.exchange(0, request, size_of::<ControlReply>())?;
        let reply = ControlReply::read_from_bytes(&answer).map_err(|_| failed(what, 0))?;
        match reply.status.get() {
            0 => Ok(()),
            status => Err(failed(what, status)),
        }
    }

    /// One buffer on a queue, answered at once.
    fn exchange(&mut self, index: u16, request: &[u8], room: usize) -> io::Result<Vec<u8>> {
        let base = QUEUES + u64::from(index) * QUEUE_BYTES;
        let (available, used) = (base + 0x1000, base + 0x2000);
        let (asked, answered) = (base + 0x3000, base + 0x5000);
        let words = |len: usize| u32::try_from(len).map_err(io::Error::other);
        let put = |at: u64, bytes: &[u8]| {
            let written = self.memory.write_slice(bytes, GuestAddress(at));
            written.map_err(io::Error::other)
        };
        put(asked, request)?;
        let descriptor = |at: u64, len: u32, flags: u16, next: u16| {
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            bytes
        };
        put(base, &descriptor(asked, words(request.len())?, 1, 1))?;
        put(base + 16, &descriptor(answered, words(room)?, 2, 0))?;
        let served = &mut self.served[usize::from(index)];
        let slot = u64::from(*served % QUEUE_SIZE);
        *served = served.wrapping_add(1);
        put(available + 4 + 2 * slot, &0_u16.to_le_bytes())?;
        put(available + 2, &served.to_le_bytes())?;
        self.vpmu.notify(index, (index >= QUEUE_VCPU).then_some(0));
        let done: u16 = self
            .memory
            .read_obj(GuestAddress(used + 2))
            .map_err(io::Error::other)?;
        if done != *served {
            return Err(failed("no answer", 0));
        }
        let mut answer = vec![0; room];
        self.memory
            .read_slice(&mut answer, GuestAddress(answered))
            .map_err(io::Error::other)?;
        Ok(answer)
    }
}

fn header(op: u32, event: u64) -> ControlHeader {
    ControlHeader {
        op: op.into(),
        reserved: 0.into(),
        event: event.into(),
    }
}

fn ring(index: u64) -> u64 {
    RINGS + index * (DATA + 1) * PAGE_SIZE as u64
}

/// A queue as the device takes it, its parts one page apart.
fn queue(base: u64) -> Result<Queue, virtio_queue::Error> {
    let mut queue = Queue::new(QUEUE_SIZE)?;
    queue.set_size(QUEUE_SIZE);
    queue.try_set_desc_table_address(GuestAddress(base))?;
    queue.try_set_avail_ring_address(GuestAddress(base + 0x1000))?;
    queue.try_set_used_ring_address(GuestAddress(base + 0x2000))?;
    queue.set_ready(true);
    Ok(queue)
}
