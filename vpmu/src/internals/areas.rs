//! An AUX area whose reader keeps up with the writer, for benchmarks of writes to the area.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::abi::{
    ENGINE_ANY, EXIT_USER, ExitPacket, KIND_EXIT_TRACE, KIND_SAMPLE_TRACE, Metadata, PACKET_EXIT, PACKET_SAMPLE,
    PAGE_SIZE, SamplePacket,
};
use crate::area::{Area, Entry};
use crate::clock::Clock;
use crate::kind::Kind;
use crate::memory::{Memory, View};
use crate::notices::Notices;
use crate::record::{Layout, SampleId};
use crate::ring::{Ring, RingMode, Wakeup};
use crate::shard::Writer;
use crate::sink::{Flush, Output, Sink};
use crate::spec::{EventRequest, EventSpec};
use crate::trace::{Packet, Trace};

const AUX_HEAD: u64 = offset_of!(Metadata, aux_head) as u64;
const AUX_TAIL: u64 = offset_of!(Metadata, aux_tail) as u64;
const DATA_HEAD: u64 = offset_of!(Metadata, data_head) as u64;
const DATA_TAIL: u64 = offset_of!(Metadata, data_tail) as u64;
const PAGE: u64 = PAGE_SIZE as u64;
const RING_PAGES: u64 = 16;
const EVENT: u64 = 1;

/// An area of 2^n pages. Its metadata page is the first page of the memory.
#[derive(Debug)]
pub struct AuxArea {
    memory: GuestMemoryMmap,
    area: Area,
}

/// Returns a number of bytes of memory that is enough for any area of `pages` pages.
#[must_use]
pub fn aux_memory(pages: u64) -> usize {
    // A scattered area uses every other page, so it spans twice as much memory.
    usize::try_from((1 + RING_PAGES + 2 * pages) * PAGE).unwrap_or(0)
}

/// Returns the pages of an area. They are contiguous, or have a gap after each page if `apart` is set.
fn pages(pages: u64, apart: bool) -> Vec<GuestAddress> {
    let step = if apart { 2 } else { 1 };
    (0..pages).map(|page| GuestAddress((1 + RING_PAGES + page * step) * PAGE)).collect()
}

/// Makes the reader consume everything.
fn keep_up(memory: &GuestMemoryMmap) {
    for (head, tail) in [(AUX_HEAD, AUX_TAIL), (DATA_HEAD, DATA_TAIL)] {
        let head = memory.load::<u64>(GuestAddress(head), Ordering::Acquire);
        let read = head.and_then(|head| memory.store(head, GuestAddress(tail), Ordering::Release));
        debug_assert!(read.is_ok(), "the metadata page is memory");
    }
}

impl AuxArea {
    /// Creates an area of `count` pages in `memory`. [`aux_memory`] returns how many bytes `memory` needs.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, count: u64, apart: bool) -> Option<Self> {
        let pages = pages(count, apart);
        let area = Area::new(&View::of(&memory), pages, Some(GuestAddress(0)), true, 0).ok()?;
        Some(Self { memory, area })
    }

    /// Makes the reader consume everything, then writes and publishes `words`. Returns whether the write succeeded.
    pub fn write(&mut self, words: &[u64]) -> bool {
        keep_up(&self.memory);
        let entry = Entry { skip: 0, parts: [&[], words], collision: false };
        let written = self.area.append(&View::of(&self.memory), EVENT, &entry).whole;
        self.area.end(&View::of(&self.memory));
        written
    }
}

/// A trace with a ring and an area.
#[derive(Debug)]
pub struct Tracer {
    memory: GuestMemoryMmap,
    output: Output,
    writer: Writer,
    spec: EventSpec,
    trace: Trace,
    time: u64,
}

impl Tracer {
    /// Creates a trace of exits, or of samples if `samples` is set. The trace writes to an area of `count` pages in
    /// `memory`. [`aux_memory`] returns how many bytes `memory` needs.
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, count: u64, samples: bool) -> Option<Self> {
        let ring: Vec<_> = (0..=RING_PAGES).map(|page| GuestAddress(page * PAGE)).collect();
        let mode = RingMode { writable: true, backward: false };
        let shared = Memory::from(memory.clone());
        let sink = Sink::new(EVENT);
        let clock = Clock::new(1_000_000)?;
        sink.set_ring(Ring::new(&shared.view(), &ring, mode, clock).ok()?, &shared);
        let metadata = ring.first().copied();
        let area = Area::new(&shared.view(), pages(count, true), metadata, true, 0).ok()?;
        sink.set_area(area, &shared);
        let kind = if samples { KIND_SAMPLE_TRACE } else { KIND_EXIT_TRACE };
        let spec = EventSpec {
            id: EVENT,
            owner: EVENT,
            kind: Kind::parse(kind, EXIT_USER)?,
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
        };
        let output = Output { sink: Some(Arc::new(sink)), wakeups: Wakeup::Page.into() };
        Some(Self { memory, output, writer: Writer::new(Arc::new(Notices::new())), spec, trace: Trace::new(), time: 0 })
    }

    /// Makes and writes `packets` packets, then makes the reader consume everything. Returns the number of packets
    /// written.
    pub fn burst(&mut self, packets: u64) -> u64 {
        let samples = matches!(self.spec.kind, Kind::SampleTrace(_));
        let mut written = 0;
        for _ in 0..packets {
            self.time += 1;
            let sample_id = SampleId { pid: 1, tid: 2, time: self.time, id: EVENT, stream_id: EVENT, vcpu: 0 };
            let exit;
            let sample;
            let packet = if samples {
                sample = SamplePacket { kind: PACKET_SAMPLE, time: self.time.into(), ..SamplePacket::default() };
                Packet::Sample(&sample)
            } else {
                exit = ExitPacket { kind: PACKET_EXIT, time: self.time.into(), ..ExitPacket::default() };
                Packet::Exit(&exit)
            };
            let trace = &mut self.trace;
            let whole = self.writer.produce(&self.output, &self.spec, &sample_id, self.time, trace, packet);
            written += u64::from(whole);
        }
        let sample_id = SampleId::default();
        self.writer.flush(&self.output, &self.spec, &sample_id, Flush::Owed);
        keep_up(&self.memory);
        written
    }
}
