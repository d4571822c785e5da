//! Tests that write traces to rings and areas in guest memory, and read them back as a program would.

mod properties;
mod rules;

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::FromBytes;

use super::*;
use crate::abi::{
    ENGINE_ANY, EXIT_USER, KIND_EXIT_TRACE, Metadata, PACKET_EXIT, PACKET_PADDING, PACKET_SAMPLE, SYNC_RESUME,
};
use crate::area::Area;
use crate::clock::Clock;
use crate::kind::Kind;
use crate::memory::Memory;
use crate::notices::{Notices, PendingNotices};
use crate::record::{Layout, TYPE_AUX};
use crate::ring::{Ring, RingMode, Wakeup};
use crate::shard::Writer;
use crate::sink::{Flush, Output, Sink};
use crate::spec::EventRequest;

const RING: u64 = 0x10_0000;
const AREA: u64 = 0x20_0000;
/// The event with the ring and area.
const OWNER: u64 = 5;

fn spec(id: u64, kind: u32) -> EventSpec {
    EventSpec {
        id,
        owner: OWNER,
        kind: Kind::parse(kind, EXIT_USER).expect("a kind with this config"),
        request: EventRequest {
            kind,
            config: EXIT_USER,
            flags: 0,
            layout: Layout::default(),
            aux_watermark: 0,
            max_stack: 0,
            engine: ENGINE_ANY,
        },
        shortest_period: 1,
        by_clock: false,
    }
}

/// A ring and an area, with a reader of both.
struct Fixture {
    memory: GuestMemoryMmap,
    output: Output,
    notices: Arc<Notices>,
    writer: Writer,
    area: Vec<GuestAddress>,
    ring_tail: u64,
    time: u64,
}

/// A record of the ring: its type and the words after its header.
type ParsedRecord = (u32, Vec<u64>);

/// A packet of the area.
#[derive(Debug, Clone, PartialEq)]
enum Read {
    Padding,
    Exit(ExitPacket),
    Sample(SamplePacket),
    Sync(SyncPacket),
}

impl Fixture {
    /// A ring of 64 pages, and an area of `pages` scattered pages.
    fn new(pages: u64, writable: bool, watermark: u32) -> Self {
        Self::with(64, pages, writable, watermark)
    }

    fn with(ring_pages: u64, pages: u64, writable: bool, watermark: u32) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x40_0000)]).expect("memory");
        let shared = Memory::from(memory.clone());
        let sink = Sink::new(OWNER);
        let notices = Arc::new(Notices::new());
        let ring: Vec<_> = (0..=ring_pages).map(|page| GuestAddress(RING + page * PAGE)).collect();
        let mode = RingMode { writable: true, backward: false };
        let clock = Clock::new(1_000_000).expect("ticks");
        let laid = Ring::new(&shared.view(), &ring, mode, clock).expect("laid");
        sink.set_ring(laid, &shared);
        let area: Vec<_> = (0..pages).map(|page| GuestAddress(AREA + (pages - page) * 2 * PAGE)).collect();
        let laid = Area::new(&shared.view(), area.clone(), Some(ring[0]), writable, watermark);
        sink.set_area(laid.expect("laid"), &shared);
        let output = Output { sink: Some(Arc::new(sink)), wakeups: Wakeup::Bytes(1 << 30).into() };
        Self { memory, output, writer: Writer::new(Arc::clone(&notices)), notices, area, ring_tail: 0, time: 0 }
    }

    fn notices(&mut self) -> PendingNotices<'_> {
        self.writer.publish_notices();
        self.notices.pending()
    }

    fn size(&self) -> u64 {
        self.area.len() as u64 * PAGE
    }

    fn sample_id(&self, spec: &EventSpec) -> SampleId {
        SampleId { pid: 7, tid: 8, time: self.time, id: spec.owner, stream_id: spec.id, vcpu: 1 }
    }

    fn exit(&mut self, spec: &EventSpec, trace: &mut Trace) -> bool {
        self.time += 1;
        let packet = ExitPacket {
            kind: PACKET_EXIT,
            time: self.time.into(),
            ip: (self.time * 16).into(),
            ..ExitPacket::default()
        };
        let sample_id = self.sample_id(spec);
        let packet = Packet::Exit(&packet);
        let tsc = self.time + 1000;
        self.writer.produce(&self.output, spec, &sample_id, tsc, trace, packet)
    }

    fn sample(&mut self, spec: &EventSpec, trace: &mut Trace, flags: u8) -> bool {
        self.time += 1;
        let packet = SamplePacket { kind: PACKET_SAMPLE, flags, time: self.time.into(), ..SamplePacket::default() };
        let sample_id = self.sample_id(spec);
        let packet = Packet::Sample(&packet);
        let tsc = self.time + 1000;
        self.writer.produce(&self.output, spec, &sample_id, tsc, trace, packet)
    }

    fn commit(&mut self, spec: &EventSpec) {
        let sample_id = self.sample_id(spec);
        self.writer.flush(&self.output, spec, &sample_id, Flush::Owed);
    }

    fn field(&self, offset: usize) -> u64 {
        let at = GuestAddress(RING + offset as u64);
        self.memory.load(at, Ordering::Acquire).expect("memory")
    }

    fn aux_head(&self) -> u64 {
        self.field(offset_of!(Metadata, aux_head))
    }

    fn set(&self, offset: usize, value: u64) {
        let at = GuestAddress(RING + offset as u64);
        self.memory.store(value, at, Ordering::Release).expect("memory");
    }

    fn set_aux_tail(&self, tail: u64) {
        self.set(offset_of!(Metadata, aux_tail), tail);
    }

    /// Every record since the last call.
    fn records(&mut self) -> Vec<ParsedRecord> {
        let head = self.field(offset_of!(Metadata, data_head));
        let data = self.field(offset_of!(Metadata, data_size));
        let word = |at: u64| -> u64 {
            let at = GuestAddress(RING + PAGE + at % data);
            self.memory.read_obj(at).expect("memory")
        };
        let mut found = Vec::new();
        while self.ring_tail < head {
            let header = word(self.ring_tail);
            let words = header >> 51;
            let body = (1..words).map(|index| word(self.ring_tail + index * 8));
            found.push((u32::try_from(header & 0xffff_ffff).expect("32 bits"), body.collect()));
            self.ring_tail += words * 8;
        }
        self.set(offset_of!(Metadata, data_tail), self.ring_tail);
        found
    }

    fn bytes<const N: usize>(&self, position: u64) -> [u8; N] {
        let page = usize::try_from(position % self.size() / PAGE).expect("small");
        let at = GuestAddress(self.area[page].0 + position % PAGE);
        let mut bytes = [0; N];
        self.memory.read_slice(&mut bytes, at).expect("memory");
        bytes
    }

    /// The packets from one position to another.
    fn packets(&self, from: u64, to: u64) -> Vec<(u64, Read)> {
        let (mut at, mut packets) = (from, Vec::new());
        while at < to {
            let first: [u8; 64] = self.bytes(at);
            let (packet, len) = match first[0] {
                PACKET_PADDING => {
                    assert_eq!(first, [0; 64], "padding is zero");
                    (Read::Padding, 64)
                }
                PACKET_EXIT => (Read::Exit(ExitPacket::read_from_bytes(&first).expect("64")), 64),
                PACKET_SYNC => (Read::Sync(SyncPacket::read_from_bytes(&first).expect("64")), 64),
                PACKET_SAMPLE => {
                    let all: [u8; 256] = self.bytes(at);
                    (Read::Sample(SamplePacket::read_from_bytes(&all).expect("256")), 256)
                }
                other => panic!("packet {other} at {at}"),
            };
            assert!(at % PAGE + len <= PAGE, "across pages at {at}");
            if at.is_multiple_of(PAGE) {
                let page = matches!(&packet, Read::Sync(sync) if sync.flags & SYNC_PAGE != 0);
                assert!(page, "a page begins with a sync packet");
            }
            packets.push((at, packet));
            at += len;
        }
        assert_eq!(at, to, "packets are whole");
        packets
    }
}
