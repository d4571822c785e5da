//! A minimal driver: opens sampling events, maps their rings, enables and disables them.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{VcpuSession, Vpmu};
use zerocopy::IntoBytes;

use crate::common::{Control, DriverQueue, Silent, commands, header};

const QUEUES: u64 = 0x1_0000;
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
    memory: GuestMemoryMmap,
    control: Control,
    vcpu: DriverQueue,
    events: Vec<u64>,
}

impl Driver {
    /// Activates the device.
    pub(crate) fn new(vpmu: &Arc<Vpmu>, memory: &GuestMemoryMmap) -> io::Result<Self> {
        let at = |index| DriverQueue::new(memory, QUEUES + index * DriverQueue::BYTES);
        let (control, event, vcpu) = (at(0)?, at(1)?, at(2)?);
        vpmu.activate(memory.clone(), FEATURES, &[control.1, event.1, vcpu.1], Arc::new(Silent))
            .map_err(io::Error::other)?;
        Ok(Self {
            memory: memory.clone(),
            control: Control::new(vpmu, control.0, |vpmu| {
                let _ = vpmu.notify(QUEUE_CONTROL);
            }),
            vcpu: vcpu.0,
            events: Vec::new(),
        })
    }

    /// Opens `number` events that sample the vCPU's clock, each with its own ring.
    pub(crate) fn open(&mut self, number: u64, engine: u32) -> io::Result<()> {
        for index in 0..number {
            let event = self.control.open(&OpenRequest {
                kind: KIND_SOFTWARE.into(),
                period: PERIOD.into(),
                sample_type: IP_TID_TIME.into(),
                engine: engine.into(),
                ..OpenRequest::default()
            })?;
            let ring = ring(index);
            self.control.map(CONTROL_MAP, event, MAP_WRITABLE, ring, 1 + DATA)?;
            self.events.push(event);
        }
        Ok(())
    }

    /// Closes every event.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        for event in std::mem::take(&mut self.events) {
            let request = header(CONTROL_CLOSE, event);
            self.control.request("close", request.as_bytes())?;
        }
        Ok(())
    }

    /// Enables all events if `on` is true, and otherwise disables them. Uses one notification on the vCPU's thread.
    pub(crate) fn turn(&mut self, session: &mut VcpuSession, on: bool) -> io::Result<()> {
        let op = if on { COMMAND_ENABLE } else { COMMAND_DISABLE };
        let request = commands(op, &self.events);
        let room = self.events.len() * size_of::<Reply>();
        let notify = || session.kick(QUEUE_VCPU);
        self.vcpu.exchange(&request, room, notify).map(|_| ())
    }

    /// Consumes the records in all rings. Returns their total size in bytes.
    pub(crate) fn read_rings(&self) -> io::Result<u64> {
        let mut bytes = 0;
        for index in 0..self.events.len() as u64 {
            let at = |offset| GuestAddress(ring(index) + offset);
            let head: u64 = self.memory.read_obj(at(DATA_HEAD)).map_err(io::Error::other)?;
            let tail: u64 = self.memory.read_obj(at(DATA_TAIL)).map_err(io::Error::other)?;
            self.memory.write_obj(head, at(DATA_TAIL)).map_err(io::Error::other)?;
            bytes += head - tail;
        }
        Ok(bytes)
    }
}

fn ring(index: u64) -> u64 {
    RINGS + index * (DATA + 1) * PAGE_SIZE as u64
}
