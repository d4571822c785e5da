//! Traces through rings and areas in guest memory, read back as a program would.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::FromBytes;

use super::*;
use crate::abi::{
    ENGINE_ANY, EXIT_USER, KIND_EXIT_TRACE, Metadata, NOTICE_AUX, NOTICE_WAKEUP, PACKET_EXIT,
    PACKET_PADDING, PACKET_SAMPLE, SYNC_RESUME,
};
use crate::aux::{Area, COLLISION, OVERWRITE, PARTIAL, TRUNCATED};
use crate::clock::Clock;
use crate::output::Output;
use crate::record::{Layout, TYPE_AUX, TYPE_ITRACE_START};
use crate::ring::{Manner, Ring, Wakeup};

const RING: u64 = 0x10_0000;
const AREA: u64 = 0x20_0000;
/// The event that ring and area were mapped with.
const OWNER: u64 = 5;

fn facts(id: u64, kind: u32) -> Facts {
    Facts {
        id,
        owner: OWNER,
        kind,
        config: EXIT_USER,
        flags: 0,
        layout: Layout::default(),
        wakeup: Wakeup::Bytes(1 << 30),
        aux_watermark: 0,
        max_stack: 0,
        engine: ENGINE_ANY,
        shortest_period: 1,
    }
}

/// A ring with an area, and who reads both.
struct Rig {
    memory: GuestMemoryMmap,
    output: Output,
    area: Vec<GuestAddress>,
    ring_tail: u64,
    time: u64,
}

/// A record of the ring: its type and what follows its header.
type Found = (u32, Vec<u64>);

/// A packet of the area.
#[derive(Debug, Clone, PartialEq)]
enum Read {
    Padding,
    Exit(ExitPacket),
    Sample(SamplePacket),
    Sync(SyncPacket),
}

impl Rig {
    /// A ring of 64 pages, and an area of `pages` pages that lie apart.
    fn new(pages: u64, writable: bool, watermark: u32) -> Self {
        Self::with(64, pages, writable, watermark)
    }

    fn with(ring_pages: u64, pages: u64, writable: bool, watermark: u32) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x40_0000)]).expect("memory");
        let mut output = Output::new(memory.clone().into(), 2);
        let ring: Vec<_> = (0..=ring_pages)
            .map(|page| GuestAddress(RING + page * PAGE))
            .collect();
        let manner = Manner {
            writable: true,
            backward: false,
        };
        let clock = Clock::new(1_000_000).expect("ticks");
        output.add_ring(
            OWNER,
            Ring::new(&memory, &ring, manner, clock).expect("laid"),
        );
        let area: Vec<_> = (0..pages)
            .map(|page| GuestAddress(AREA + (pages - page) * 2 * PAGE))
            .collect();
        let laid = Area::new(&memory, area.clone(), Some(ring[0]), writable, watermark);
        output.add_area(OWNER, laid.expect("laid"));
        Self {
            memory,
            output,
            area,
            ring_tail: 0,
            time: 0,
        }
    }

    fn size(&self) -> u64 {
        self.area.len() as u64 * PAGE
    }

    fn origin(&self, facts: &Facts) -> Origin {
        Origin {
            pid: 7,
            tid: 8,
            time: self.time,
            id: facts.owner,
            stream_id: facts.id,
            vcpu: 1,
        }
    }

    fn exit(&mut self, facts: &Facts, trace: &mut Trace) -> bool {
        self.time += 1;
        let packet = ExitPacket {
            kind: PACKET_EXIT,
            time: self.time.into(),
            ip: (self.time * 16).into(),
            ..ExitPacket::default()
        };
        let origin = self.origin(facts);
        let packet = Packet::Exit(&packet);
        self.output
            .aux_produce(facts, &origin, self.time + 1000, trace, packet)
    }

    fn sample(&mut self, facts: &Facts, trace: &mut Trace, flags: u8) -> bool {
        self.time += 1;
        let packet = SamplePacket {
            kind: PACKET_SAMPLE,
            flags,
            time: self.time.into(),
            ..SamplePacket::default()
        };
        let origin = self.origin(facts);
        let packet = Packet::Sample(&packet);
        self.output
            .aux_produce(facts, &origin, self.time + 1000, trace, packet)
    }

    fn commit(&mut self, facts: &Facts) {
        let origin = self.origin(facts);
        self.output.aux_commit(facts, &origin);
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
        self.memory
            .store(value, at, Ordering::Release)
            .expect("memory");
    }

    fn set_aux_tail(&self, tail: u64) {
        self.set(offset_of!(Metadata, aux_tail), tail);
    }

    /// Every record since the last look.
    fn records(&mut self) -> Vec<Found> {
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
            found.push((
                u32::try_from(header & 0xffff_ffff).expect("32 bits"),
                body.collect(),
            ));
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
                PACKET_EXIT => (
                    Read::Exit(ExitPacket::read_from_bytes(&first).expect("64")),
                    64,
                ),
                PACKET_SYNC => (
                    Read::Sync(SyncPacket::read_from_bytes(&first).expect("64")),
                    64,
                ),
                PACKET_SAMPLE => {
                    let all: [u8; 256] = self.bytes(at);
                    (
                        Read::Sample(SamplePacket::read_from_bytes(&all).expect("256")),
                        256,
                    )
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

#[test]
fn a_trace_begins_with_a_sync_packet_that_says_everything() {
    let mut rig = Rig::new(4, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    assert!(rig.exit(&facts, &mut trace));
    assert!(rig.exit(&facts, &mut trace));
    assert_eq!(rig.aux_head(), 0, "not before it is shown");
    rig.commit(&facts);
    assert_eq!((rig.aux_head(), trace.count(), trace.lost()), (192, 192, 0));
    let packets = rig.packets(0, 192);
    let sync = SyncPacket {
        kind: PACKET_SYNC,
        flags: SYNC_START | SYNC_PAGE,
        format: FORMAT_EXITS.into(),
        vcpu: 1.into(),
        magic: SYNC_MAGIC.into(),
        event: OWNER.into(),
        time: 1.into(),
        tsc: 1001.into(),
        sequence: 0.into(),
        lost: 0.into(),
        config: EXIT_USER.into(),
    };
    assert_eq!(sync.magic.as_ref(), b"VPMUSYNC");
    assert_eq!(packets[0].1, Read::Sync(sync));
    let sequences: Vec<u64> = packets[1..]
        .iter()
        .map(|(_, packet)| match packet {
            Read::Exit(exit) => {
                assert_eq!(exit.ip.get(), exit.time.get() * 16, "as it was made");
                exit.sequence.get()
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sequences, [0, 1]);
    assert_eq!(rig.records(), [(TYPE_AUX, vec![0, 192, 0])]);
    rig.commit(&facts);
    assert_eq!(rig.records(), [], "nothing since");
}

#[test]
fn a_packet_that_would_cross_a_page_begins_the_next() {
    let mut rig = Rig::new(2, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_SAMPLE_TRACE), Trace::new());
    // A sync packet and fifteen samples leave 192 bytes of the page.
    for _ in 0..16 {
        assert!(rig.sample(&facts, &mut trace, 0));
    }
    rig.commit(&facts);
    let packets = rig.packets(0, rig.aux_head());
    let kinds: Vec<(u64, u8)> = packets[16..]
        .iter()
        .map(|(at, packet)| {
            let kind = match packet {
                Read::Padding => PACKET_PADDING,
                Read::Sync(sync) => {
                    assert_eq!((sync.flags, sync.sequence.get()), (SYNC_PAGE, 15));
                    assert_eq!(sync.format.get(), FORMAT_SAMPLES);
                    PACKET_SYNC
                }
                _ => PACKET_SAMPLE,
            };
            (*at, kind)
        })
        .collect();
    let expected = [
        (3904, PACKET_PADDING),
        (3968, PACKET_PADDING),
        (4032, PACKET_PADDING),
        (4096, PACKET_SYNC),
        (4160, PACKET_SAMPLE),
    ];
    assert_eq!(kinds, expected);
    assert_eq!(
        trace.count(),
        4416,
        "padding and sync packets are bytes of it"
    );
}

#[test]
fn a_loss_is_counted_by_packets_and_told_when_there_is_room() {
    let mut rig = Rig::new(1, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    let written = (0..70).filter(|_| rig.exit(&facts, &mut trace)).count();
    assert_eq!(written, 63);
    assert_eq!((trace.count(), trace.lost()), (4096 + 7 * 64, 7 * 64));
    assert_eq!(
        rig.records(),
        [
            (TYPE_AUX, vec![0, 2048, 0]),
            (TYPE_AUX, vec![2048, 2048, 0]),
            (TYPE_AUX, vec![4096, 0, TRUNCATED]),
        ]
    );
    rig.set_aux_tail(4096);
    assert!(rig.exit(&facts, &mut trace));
    rig.commit(&facts);
    assert_eq!(rig.records(), [(TYPE_AUX, vec![4096, 128, PARTIAL])]);
    let packets = rig.packets(4096, 4224);
    let Read::Sync(sync) = &packets[0].1 else {
        panic!("{packets:?}");
    };
    assert_eq!(sync.flags, SYNC_LOSS | SYNC_PAGE);
    assert_eq!((sync.sequence.get(), sync.lost.get()), (70, 7 * 64));
    let tally = rig.output.tally;
    assert_eq!(
        (tally.aux_written, tally.aux_lost, tally.aux_records),
        (4224, 448, 4)
    );
}

#[test]
fn wakeups_come_at_half_the_area_and_at_a_loss() {
    let mut rig = Rig::new(1, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    let mut woken = Vec::new();
    for packet in 1..=70 {
        rig.exit(&facts, &mut trace);
        if let Some(notice) = rig.output.notices.next() {
            assert_eq!(
                (notice.kind.get(), notice.event.get()),
                (NOTICE_WAKEUP, OWNER)
            );
            rig.output.notices.delivered();
            woken.push(packet);
        }
    }
    assert_eq!(woken, [31, 63, 64]);
    assert_eq!(rig.output.tally.wakeups, 3);
}

#[test]
fn what_the_ring_has_no_room_for_is_told_with_the_next() {
    // 128 records of 32 bytes fill the ring.
    let mut rig = Rig::with(1, 8, true, 64);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    for _ in 0..140 {
        assert!(rig.exit(&facts, &mut trace));
    }
    let head = rig.aux_head();
    let records = rig.records();
    assert_eq!(records.len(), 128);
    let told: u64 = records.iter().map(|(_, words)| words[1]).sum();
    assert!(told < head);
    rig.commit(&facts);
    assert_eq!(rig.records(), [(TYPE_AUX, vec![told, head - told, 0])]);
}

#[test]
fn an_area_that_is_overwritten_tells_when_it_is_asked() {
    let mut rig = Rig::new(2, false, 64);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    for _ in 0..1000 {
        assert!(rig.exit(&facts, &mut trace));
    }
    assert_eq!(rig.records(), []);
    rig.commit(&facts);
    let head = rig.aux_head();
    assert_eq!(rig.records(), [(TYPE_AUX, vec![0, head, OVERWRITE])]);
    assert_eq!((trace.count(), trace.lost()), (head, 0));
    // The newest are there; a reader begins at the first page that is whole.
    let packets = rig.packets(head.next_multiple_of(PAGE) - rig.size(), head);
    let last = packets.iter().rev().find_map(|(_, packet)| match packet {
        Read::Exit(exit) => Some(exit.sequence.get()),
        _ => None,
    });
    assert_eq!(last, Some(999));
}

#[test]
fn a_collision_is_said_of_its_piece() {
    let mut rig = Rig::new(2, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_SAMPLE_TRACE), Trace::new());
    rig.sample(&facts, &mut trace, 0);
    rig.sample(&facts, &mut trace, PACKET_COLLISION);
    rig.commit(&facts);
    assert_eq!(rig.records(), [(TYPE_AUX, vec![0, 576, COLLISION])]);
}

#[test]
fn a_pause_and_a_new_beginning_are_told_together() {
    let mut rig = Rig::new(2, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    rig.exit(&facts, &mut trace);
    trace.sync(SYNC_RESUME);
    trace.sync(SYNC_START);
    rig.exit(&facts, &mut trace);
    rig.exit(&facts, &mut trace);
    rig.commit(&facts);
    let flags: Vec<u8> = rig
        .packets(0, rig.aux_head())
        .iter()
        .filter_map(|(_, packet)| match packet {
            Read::Sync(sync) => Some(sync.flags),
            _ => None,
        })
        .collect();
    assert_eq!(flags, [SYNC_START | SYNC_PAGE, SYNC_START | SYNC_RESUME]);
}

#[test]
fn a_beginning_is_announced_once() {
    let mut rig = Rig::new(2, true, 0);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    for _ in 0..2 {
        let origin = rig.origin(&facts);
        rig.output.aux_announce(&facts, &origin, &mut trace);
    }
    assert_eq!(rig.records(), [(TYPE_ITRACE_START, vec![8 << 32 | 7])]);
}

#[test]
fn without_an_area_everything_is_lost() {
    let mut rig = Rig::new(1, true, 0);
    rig.output.remove_area(OWNER);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    let origin = rig.origin(&facts);
    rig.output.aux_announce(&facts, &origin, &mut trace);
    assert!(!trace.announced);
    assert!(!rig.exit(&facts, &mut trace));
    rig.commit(&facts);
    assert_eq!((trace.count(), trace.lost()), (64, 64));
    assert_eq!(rig.records(), []);
}

#[test]
fn a_driver_keeps_an_area() {
    let mut rig = Rig::new(1, true, 0);
    rig.output.remove_ring(OWNER);
    let driven = Area::new(&rig.memory, rig.area.clone(), None, true, 0).expect("laid");
    rig.output.add_area(OWNER, driven);
    let (facts, mut trace) = (facts(OWNER, KIND_EXIT_TRACE), Trace::new());
    assert!(!rig.exit(&facts, &mut trace), "nobody has begun");
    rig.output.aux_begin(&facts, 3968, 256).expect("begun");
    let written: Vec<bool> = (0..4).map(|_| rig.exit(&facts, &mut trace)).collect();
    // A sync packet that tells of the loss and a packet, then those of the next page.
    assert_eq!(written, [true, true, false, false]);
    assert_eq!(rig.output.aux_finish(&facts).expect("begun"), (4224, 128));
    assert_eq!((trace.count(), trace.lost()), (64 + 256 + 128, 64 + 128));
    let notice = rig.output.notices.next().expect("one");
    assert_eq!((notice.kind.get(), notice.event.get()), (NOTICE_AUX, OWNER));
    rig.output.notices.delivered();
    assert_eq!(rig.output.notices.next(), None);
    let packets = rig.packets(3968, 4096);
    assert!(matches!(&packets[0].1, Read::Sync(sync) if sync.flags == SYNC_START | SYNC_LOSS));
}

#[derive(Debug, Clone)]
enum Step {
    Exits(u64),
    Samples(u64),
    Commit,
    /// The reader moves on by this share of what it can.
    Consume(u64),
    Due(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..90).prop_map(Step::Exits),
        4 => (1_u64..30).prop_map(Step::Samples),
        2 => Just(Step::Commit),
        4 => (0_u64..=4).prop_map(Step::Consume),
        1 => prop_oneof![Just(SYNC_START), Just(SYNC_RESUME)].prop_map(Step::Due),
    ]
}

/// What a reader of one event's packets knows.
#[derive(Default)]
struct Seen {
    next: u64,
    lost: u64,
    packets: u64,
    began: bool,
}

impl Seen {
    fn packet(&mut self, sequence: u64) {
        assert!(self.began, "a sync packet comes first");
        assert_eq!(sequence, self.next, "no hole that no sync packet told of");
        self.next += 1;
        self.packets += 1;
    }

    fn sync(&mut self, sync: &SyncPacket) {
        self.began = true;
        let (next, lost) = (sync.sequence.get(), sync.lost.get());
        if sync.flags & SYNC_LOSS == 0 {
            assert_eq!((next, lost), (self.next, self.lost), "nothing missing");
        }
        assert!(next >= self.next && lost >= self.lost);
        (self.next, self.lost) = (next, lost);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Two traces in one area, with a reader of any speed: every byte is told once, every packet is
    /// there or counted.
    #[test]
    fn count_is_what_is_in_the_area_and_what_was_lost(
        steps in prop::collection::vec(step(), 1..60),
        power in 0_u32..4,
        watermark in prop_oneof![Just(0), 64_u32..9000],
        ring in 0_u32..2,
    ) {
        let mut rig = Rig::with(u64::from(ring), 1 << power, true, watermark);
        let exits = facts(OWNER, KIND_EXIT_TRACE);
        let samples = facts(6, KIND_SAMPLE_TRACE);
        let (mut exiting, mut sampling) = (Trace::new(), Trace::new());
        let (mut seen_exits, mut seen_samples) = (Seen::default(), Seen::default());
        let (mut produced, mut read, mut told) = ((0, 0), 0, 0);
        let mut steps = steps;
        // At the end everything is read.
        steps.extend([Step::Commit, Step::Consume(4), Step::Commit]);
        for step in steps {
            match step {
                Step::Exits(number) => {
                    produced.0 += number;
                    (0..number).for_each(|_| { rig.exit(&exits, &mut exiting); });
                }
                Step::Samples(number) => {
                    produced.1 += number;
                    (0..number).for_each(|_| { rig.sample(&samples, &mut sampling, 0); });
                }
                Step::Commit => rig.commit(&exits),
                Step::Due(flags) => exiting.sync(flags),
                Step::Consume(share) => {
                    let head = rig.aux_head();
                    let until = read + (head - read) * share / 4;
                    let packets = rig.packets(read, head);
                    for (at, packet) in packets.into_iter().take_while(|(at, _)| *at < until) {
                        read = at + match packet {
                            Read::Padding => 64,
                            Read::Exit(exit) => {
                                seen_exits.packet(exit.sequence.get());
                                64
                            }
                            Read::Sample(sample) => {
                                seen_samples.packet(sample.sequence.get());
                                256
                            }
                            Read::Sync(sync) => {
                                match sync.event.get() {
                                    OWNER => seen_exits.sync(&sync),
                                    _ => seen_samples.sync(&sync),
                                }
                                64
                            }
                        };
                    }
                    rig.set_aux_tail(read);
                    for (kind, words) in rig.records() {
                        prop_assert_eq!((kind, words[0]), (TYPE_AUX, told));
                        told += words[1];
                    }
                }
            }
        }
        let head = rig.aux_head();
        prop_assert_eq!(read, head);
        prop_assert_eq!(exiting.count() + sampling.count(), head + exiting.lost() + sampling.lost());
        let packets_lost = (produced.0 - seen_exits.packets, produced.1 - seen_samples.packets);
        prop_assert_eq!((exiting.lost(), sampling.lost()), (packets_lost.0 * 64, packets_lost.1 * 256));
        for (_, words) in rig.records() {
            prop_assert_eq!(words[0], told);
            told += words[1];
        }
        prop_assert_eq!(told, if ring == 0 { 0 } else { head });
    }
}
