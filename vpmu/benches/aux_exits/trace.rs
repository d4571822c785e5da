//! The guest's driver: opens a trace with a ring and an AUX area, enables and disables the trace, and reads
//! the area after each slice.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{VcpuSession, Vpmu};
use vpmu_testkit::{Driver, Layout, command, open_of};

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

#[derive(Debug)]
pub(crate) struct Trace {
    memory: GuestMemoryMmap,
    driver: Driver,
    event: u64,
    /// The trace's byte count, from the last reply.
    count: u64,
    read: u64,
}

impl Trace {
    /// Activates the device. Opens a trace of every exit that reaches the VMM, and maps the trace's ring and
    /// area. The trace is still disabled.
    pub(crate) fn open(vpmu: &Arc<Vpmu>, memory: &GuestMemoryMmap) -> io::Result<Self> {
        let mut driver = Driver::activate(vpmu, memory, Layout::SMALL, FEATURES).map_err(io::Error::other)?;
        let event = driver.open(&open_of(KIND_EXIT_TRACE, EXIT_USER, 0))?;
        driver.map(CONTROL_MAP, event, MAP_WRITABLE, RING, RING_PAGES)?;
        driver.map(CONTROL_MAP_AUX, event, MAP_WRITABLE, AREA, AREA_PAGES)?;
        Ok(Self { memory: memory.clone(), driver, event, count: 0, read: 0 })
    }

    /// Enables or disables the trace.
    pub(crate) fn turn(&mut self, session: &mut VcpuSession, on: bool) -> io::Result<()> {
        let op = if on { COMMAND_ENABLE } else { COMMAND_DISABLE };
        let reply = self.driver.commands(session, &[command(op, self.event)])?[0];
        assert_eq!(reply.lost.get(), 0, "{reply:?}");
        self.count = reply.value.get();
        Ok(())
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
}
