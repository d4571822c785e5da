//! A guest program that reads an AUX area.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use zerocopy::{FromBytes, IntoBytes};

use crate::fixture::Fixture;
use crate::requests::Errno;

const AUX_HEAD: u64 = 1056;
const AUX_TAIL: u64 = 1064;

/// A packet without its padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packet {
    Sync(SyncPacket),
    Exit(ExitPacket),
    Sample(SamplePacket),
}

/// The reader of one area and of its metadata page.
#[derive(Debug)]
pub struct AreaReader {
    memory: GuestMemoryMmap,
    metadata: u64,
    pages: Vec<u64>,
    tail: u64,
}

/// Maps a ring of 2 data pages and a writable AUX area of `pages` pages for a trace.
pub fn map_area(fixture: &mut Fixture, event: u64, pages: u64) -> AreaReader {
    let metadata = fixture.next_ring;
    fixture.map(event, 2);
    let pages: Vec<u64> = (0..pages).map(|page| fixture.next_ring + page * 0x1000).collect();
    fixture.next_ring += (pages.len() as u64 + 1) * 0x1000;
    map_aux(fixture, event, MAP_WRITABLE, &pages).expect("an area");
    AreaReader::new(fixture, metadata, pages)
}

/// Maps an area that consists of `pages`. Returns the device's answer.
pub fn map_aux(fixture: &mut Fixture, event: u64, flags: u32, pages: &[u64]) -> Result<(), Errno> {
    fixture.map_as(CONTROL_MAP_AUX, event, flags, pages)
}

impl AreaReader {
    /// Creates a reader of the area that consists of `pages`. The area's metadata page is at `metadata`.
    pub fn new(fixture: &Fixture, metadata: u64, pages: Vec<u64>) -> Self {
        Self { memory: fixture.memory.clone(), metadata, pages, tail: 0 }
    }

    /// Maps this area's pages again, for `event`. Returns a reader of the new area.
    pub fn again(&self, fixture: &mut Fixture, event: u64) -> Self {
        map_aux(fixture, event, MAP_WRITABLE, &self.pages).expect("an area");
        Self::new(fixture, self.metadata, self.pages.clone())
    }

    /// Returns the head in the metadata page, which is the number of bytes written so far.
    pub fn head(&self) -> u64 {
        self.memory.load(GuestAddress(self.metadata + AUX_HEAD), Ordering::Acquire).expect("in memory")
    }

    /// Sets the head, as a driver that owns the area does.
    pub fn set_head(&self, head: u64) {
        self.store(AUX_HEAD, head);
    }

    /// Sets the tail, which may be invalid.
    pub fn set_tail(&self, tail: u64) {
        self.store(AUX_TAIL, tail);
    }

    /// Skips data before `position`.
    pub fn skip_to(&mut self, position: u64) {
        self.tail = position;
    }

    /// Returns true if the device has not written to the pages just before and just after the area.
    pub fn is_alone(&self, fixture: &Fixture) -> bool {
        let (Some(first), Some(last)) = (self.pages.first(), self.pages.last()) else {
            return false;
        };
        [first - 0x1000, last + 0x1000].into_iter().all(|page| {
            let mut bytes = [0; 4096];
            fixture.memory.read_slice(&mut bytes, GuestAddress(page)).expect("in memory");
            bytes == [0; 4096]
        })
    }

    fn store(&self, field: u64, value: u64) {
        self.memory.store(value, GuestAddress(self.metadata + field), Ordering::Release).expect("in memory");
    }

    /// Reads and consumes all packets.
    pub fn take(&mut self) -> Vec<Packet> {
        let head = self.head();
        let mut packets = Vec::new();
        while self.tail < head {
            let mut first = [0];
            self.copy(&mut first);
            let len = match first[0] {
                PACKET_PADDING => {
                    let mut padding = [0; PACKET_ALIGN];
                    self.copy(&mut padding);
                    assert_eq!(padding, [0; PACKET_ALIGN], "padding is zero");
                    PACKET_ALIGN
                }
                PACKET_SYNC => {
                    let sync: SyncPacket = self.packet();
                    assert_eq!(sync.magic.get(), SYNC_MAGIC);
                    packets.push(Packet::Sync(sync));
                    size_of::<SyncPacket>()
                }
                PACKET_EXIT => {
                    packets.push(Packet::Exit(self.packet()));
                    size_of::<ExitPacket>()
                }
                PACKET_SAMPLE => {
                    packets.push(Packet::Sample(self.packet()));
                    size_of::<SamplePacket>()
                }
                other => panic!("a packet of kind {other} at {}", self.tail),
            };
            self.tail += len as u64;
        }
        assert_eq!(self.tail, head, "the last packet ends at the head");
        self.set_tail(self.tail);
        packets
    }

    /// Like [`AreaReader::take`], for exit packets only.
    pub fn exits(&mut self) -> Vec<ExitPacket> {
        let exit = |packet| match packet {
            Packet::Exit(exit) => Some(exit),
            _ => None,
        };
        self.take().into_iter().filter_map(exit).collect()
    }

    /// Like [`AreaReader::take`], for sample packets only.
    pub fn samples(&mut self) -> Vec<SamplePacket> {
        let sample = |packet| match packet {
            Packet::Sample(sample) => Some(sample),
            _ => None,
        };
        self.take().into_iter().filter_map(sample).collect()
    }

    fn packet<T: FromBytes + IntoBytes>(&self) -> T {
        let mut packet = T::new_zeroed();
        self.copy(packet.as_mut_bytes());
        packet
    }

    /// Fills `bytes` with data from the area, starting at the tail. Needs only one read, because packets are aligned
    /// and do not cross a page boundary.
    fn copy(&self, bytes: &mut [u8]) {
        let page = usize::try_from(self.tail / 4096).expect("small") % self.pages.len();
        let at = self.pages[page] + self.tail % 4096;
        self.memory.read_slice(bytes, GuestAddress(at)).expect("in memory");
    }
}
