//! The guest's clocks: sampling events, each with its own ring.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{VcpuSession, Vpmu};
use vpmu_testkit::{Driver, Layout, commands, open_of};

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
pub(crate) struct Clocks {
    memory: GuestMemoryMmap,
    driver: Driver,
    events: Vec<u64>,
}

impl Clocks {
    /// Activates the device, and opens `number` events that sample the vCPU's clock.
    pub(crate) fn open(vpmu: &Arc<Vpmu>, memory: &GuestMemoryMmap, number: u64, engine: u32) -> io::Result<Self> {
        let mut driver = Driver::activate(vpmu, memory, Layout::SMALL, FEATURES).map_err(io::Error::other)?;
        let mut events = Vec::new();
        for index in 0..number {
            let event = driver.open(&OpenRequest {
                period: PERIOD.into(),
                sample_type: IP_TID_TIME.into(),
                engine: engine.into(),
                ..open_of(KIND_SOFTWARE, 0, 0)
            })?;
            driver.map(CONTROL_MAP, event, MAP_WRITABLE, ring(index), 1 + DATA)?;
            events.push(event);
        }
        Ok(Self { memory: memory.clone(), driver, events })
    }

    /// Closes every event.
    pub(crate) fn close(&mut self) -> io::Result<()> {
        for event in std::mem::take(&mut self.events) {
            self.driver.close(event)?;
        }
        Ok(())
    }

    /// Enables all events if `on` is true, and otherwise disables them. Uses one notification on the vCPU's thread.
    pub(crate) fn turn(&mut self, session: &mut VcpuSession, on: bool) -> io::Result<()> {
        let op = if on { COMMAND_ENABLE } else { COMMAND_DISABLE };
        self.driver.commands(session, &commands(op, &self.events)).map(|_| ())
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
