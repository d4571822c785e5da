//! Tests of the rules for packets and AUX records, one rule at a time.

use super::*;
use crate::abi::{FORMAT_SAMPLES, KIND_SAMPLE_TRACE, NOTICE_AUX, NOTICE_WAKEUP};
use crate::area::{COLLISION, OVERWRITE, PARTIAL, TRUNCATED};
use crate::memory::{Memory, View};
use crate::record::TYPE_ITRACE_START;

#[test]
fn trace_begins_with_a_sync_packet() {
    let mut fixture = Fixture::new(4, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    assert!(fixture.exit(&spec, &mut trace));
    assert!(fixture.exit(&spec, &mut trace));
    assert_eq!(fixture.aux_head(), 0, "nothing is visible before the commit");
    fixture.commit(&spec);
    assert_eq!((fixture.aux_head(), trace.count(), trace.lost()), (192, 192, 0));
    let packets = fixture.packets(0, 192);
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
                assert_eq!(exit.ip.get(), exit.time.get() * 16, "unchanged");
                exit.sequence.get()
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sequences, [0, 1]);
    assert_eq!(fixture.records(), [(TYPE_AUX, vec![0, 192, 0])]);
    fixture.commit(&spec);
    assert_eq!(fixture.records(), [], "no further record");
}

#[test]
fn packet_that_would_cross_a_page_begins_the_next() {
    let mut fixture = Fixture::new(2, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_SAMPLE_TRACE), Trace::new());
    // A sync packet and fifteen samples leave 192 bytes of the page, which is too little for the sixteenth sample.
    for _ in 0..16 {
        assert!(fixture.sample(&spec, &mut trace, 0));
    }
    fixture.commit(&spec);
    let packets = fixture.packets(0, fixture.aux_head());
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
    assert_eq!(trace.count(), 4416, "the count includes padding and sync packets");
}

#[test]
fn loss_of_packets_is_recorded_once_there_is_room() {
    let mut fixture = Fixture::new(1, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    let written = (0..70).filter(|_| fixture.exit(&spec, &mut trace)).count();
    assert_eq!(written, 63);
    assert_eq!((trace.count(), trace.lost()), (4096 + 7 * 64, 7 * 64));
    assert_eq!(
        fixture.records(),
        [(TYPE_AUX, vec![0, 2048, 0]), (TYPE_AUX, vec![2048, 2048, 0]), (TYPE_AUX, vec![4096, 0, TRUNCATED]),]
    );
    fixture.set_aux_tail(4096);
    assert!(fixture.exit(&spec, &mut trace));
    fixture.commit(&spec);
    assert_eq!(fixture.records(), [(TYPE_AUX, vec![4096, 128, PARTIAL])]);
    let packets = fixture.packets(4096, 4224);
    let Read::Sync(sync) = &packets[0].1 else {
        panic!("{packets:?}");
    };
    assert_eq!(sync.flags, SYNC_LOSS | SYNC_PAGE);
    assert_eq!((sync.sequence.get(), sync.lost.get()), (70, 7 * 64));
    let tally = fixture.writer.tally;
    assert_eq!((tally.aux_written, tally.aux_lost, tally.aux_records), (4224, 448, 4));
}

#[test]
fn wakeups_come_at_half_the_area_and_at_a_loss() {
    let mut fixture = Fixture::new(1, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    let mut woken = Vec::new();
    for packet in 1..=70 {
        fixture.exit(&spec, &mut trace);
        let next = fixture.notices().next();
        if let Some(notice) = next {
            assert_eq!((notice.kind.get(), notice.event.get()), (NOTICE_WAKEUP, OWNER));
            fixture.notices().delivered();
            woken.push(packet);
        }
    }
    assert_eq!(woken, [31, 63, 64]);
    assert_eq!(fixture.writer.tally.wakeups, 3);
}

#[test]
fn span_without_room_is_in_the_next_record() {
    // 128 records of 32 bytes fill the ring.
    let mut fixture = Fixture::with(1, 8, true, 64);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    for _ in 0..140 {
        assert!(fixture.exit(&spec, &mut trace));
    }
    let head = fixture.aux_head();
    let records = fixture.records();
    assert_eq!(records.len(), 128);
    let reported: u64 = records.iter().map(|(_, words)| words[1]).sum();
    assert!(reported < head);
    fixture.commit(&spec);
    assert_eq!(fixture.records(), [(TYPE_AUX, vec![reported, head - reported, 0])]);
}

#[test]
fn overwriting_area_has_its_aux_record_at_the_commit() {
    for (pages, exits) in [(2, 1000), (1, 1000), (1, 63), (1, 64)] {
        let mut fixture = Fixture::new(pages, false, 64);
        let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
        for _ in 0..exits {
            assert!(fixture.exit(&spec, &mut trace));
        }
        assert_eq!(fixture.records(), []);
        fixture.commit(&spec);
        let head = fixture.aux_head();
        assert_eq!(fixture.records(), [(TYPE_AUX, vec![0, head, OVERWRITE])]);
        assert_eq!((trace.count(), trace.lost()), (head, 0));
        // The area contains only the newest packets. Part of its oldest page may be overwritten, so a reader begins at
        // the next page boundary.
        let first = head.saturating_sub(fixture.size()).next_multiple_of(PAGE);
        let packets = fixture.packets(first, head);
        let last = packets.iter().rev().find_map(|(_, packet)| match packet {
            Read::Exit(exit) => Some(exit.sequence.get()),
            _ => None,
        });
        assert_eq!(last, Some(exits - 1));
    }
}

#[test]
fn collision_is_flagged_in_the_aux_record() {
    let mut fixture = Fixture::new(2, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_SAMPLE_TRACE), Trace::new());
    fixture.sample(&spec, &mut trace, 0);
    fixture.sample(&spec, &mut trace, PACKET_COLLISION);
    fixture.commit(&spec);
    assert_eq!(fixture.records(), [(TYPE_AUX, vec![0, 576, COLLISION])]);
}

#[test]
fn pause_and_restart_share_a_sync_packet() {
    let mut fixture = Fixture::new(2, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    fixture.exit(&spec, &mut trace);
    trace.sync(SYNC_RESUME);
    trace.sync(SYNC_START);
    fixture.exit(&spec, &mut trace);
    fixture.exit(&spec, &mut trace);
    fixture.commit(&spec);
    let flags: Vec<u8> = fixture
        .packets(0, fixture.aux_head())
        .iter()
        .filter_map(|(_, packet)| match packet {
            Read::Sync(sync) => Some(sync.flags),
            _ => None,
        })
        .collect();
    assert_eq!(flags, [SYNC_START | SYNC_PAGE, SYNC_START | SYNC_RESUME]);
}

#[test]
fn start_of_a_trace_is_recorded_once() {
    let mut fixture = Fixture::new(2, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    for _ in 0..2 {
        let sample_id = fixture.sample_id(&spec);
        fixture.writer.announce(&fixture.output, &spec, &sample_id, &mut trace);
    }
    assert_eq!(fixture.records(), [(TYPE_ITRACE_START, vec![8 << 32 | 7])]);
}

#[test]
fn without_an_area_everything_is_lost() {
    let mut fixture = Fixture::new(1, true, 0);
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    let sample_id = fixture.sample_id(&spec);
    fixture.writer.flush(&fixture.output, &spec, &sample_id, Flush::CloseArea);
    fixture.writer.announce(&fixture.output, &spec, &sample_id, &mut trace);
    assert!(!trace.announced);
    assert!(!fixture.exit(&spec, &mut trace));
    fixture.commit(&spec);
    assert_eq!((trace.count(), trace.lost()), (64, 64));
    assert_eq!(fixture.records(), []);
}

#[test]
fn driver_keeps_an_area() {
    let mut fixture = Fixture::new(1, true, 0);
    fixture.output.sink().expect("a sink").close();
    let driven = Area::new(&View::of(&fixture.memory), fixture.area.clone(), None, true, 0).expect("laid");
    fixture.output.sink().expect("a sink").set_area(driven, &Memory::from(fixture.memory.clone()));
    let (spec, mut trace) = (spec(OWNER, KIND_EXIT_TRACE), Trace::new());
    assert!(!fixture.exit(&spec, &mut trace), "no room is granted yet");
    fixture.output.sink().expect("a sink").begin(spec.id, 3968, 256).expect("begun");
    let written: Vec<bool> = (0..4).map(|_| fixture.exit(&spec, &mut trace)).collect();
    // The granted space consists of the last 128 bytes of the first page and the first 128 bytes of the next page.
    // A sync packet and an exit packet fill each of these two parts. The first sync packet reports the packet that
    // was lost above.
    assert_eq!(written, [true, true, false, false]);
    assert_eq!(fixture.output.sink().expect("a sink").finish(spec.id).expect("begun"), (4224, 128));
    assert_eq!((trace.count(), trace.lost()), (64 + 256 + 128, 64 + 128));
    let notice = fixture.notices().next().expect("one");
    assert_eq!((notice.kind.get(), notice.event.get()), (NOTICE_AUX, OWNER));
    fixture.notices().delivered();
    assert_eq!(fixture.notices().next(), None);
    let packets = fixture.packets(3968, 4096);
    assert!(matches!(&packets[0].1, Read::Sync(sync) if sync.flags == SYNC_START | SYNC_LOSS));
}
