//! Records and wakeups for the reader of an area.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, Nowhere, Packet, account_for_exits, command, map_aux, open_of};

use super::{ITRACE_START, Traced, chunks, exits, pages, trace};

const TRUNCATED: u64 = 1;
const OVERWRITE: u64 = 2;
const PARTIAL: u64 = 4;

#[test]
fn written_and_lost_bytes_are_the_count() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 1);
    exits(&fixture, 0, 100);
    let reply = fixture.read(0, traced.event);
    assert_eq!((reply.value.get(), reply.lost.get()), (4096 + 37 * 64, 37 * 64));
    assert_eq!(traced.area.head(), 4096);
    let reported = [[0, 2048, 0], [2048, 2048, 0], [4096, 0, TRUNCATED]];
    assert_eq!(traced.chunks(), reported);
    assert_eq!(traced.area.exits().len(), 63);
    // After the reader makes room, the trace continues and reports the loss.
    exits(&fixture, 0, 10);
    let reply = fixture.read(0, traced.event);
    assert_eq!(reply.value.get(), traced.area.head() + 37 * 64);
    let packets = traced.area.take();
    let [Packet::Sync(sync), Packet::Exit(first), ..] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!((sync.flags, sync.lost.get()), (SYNC_LOSS | SYNC_PAGE, 37 * 64));
    assert_eq!((sync.sequence.get(), first.sequence.get()), (100, 100));
    assert_eq!(traced.chunks(), [[4096, 11 * 64, PARTIAL]]);
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.aux_written, metrics.aux_lost), (4096 + 11 * 64, 37 * 64));
    assert_eq!(metrics.aux_records, 4);
    // `COMMAND_RESET` sets the count to zero, but does not change the number of lost bytes.
    let reply = fixture.command(0, COMMAND_RESET, traced.event);
    assert_eq!((reply.value.get(), reply.lost.get()), (0, 37 * 64));
}

#[test]
fn every_command_to_a_trace_publishes_its_data() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_SAMPLE_TRACE, PACE_EXITS, CONTEXT_TASK).period(1).flags(OPEN_ENABLED);
    let mut traced = Traced::new(&mut fixture, &request, 4, MAP_WRITABLE);
    fixture.command(0, COMMAND_IN, traced.event);
    for op in [COMMAND_READ, COMMAND_PERIOD, COMMAND_RESET, COMMAND_DISABLE, COMMAND_ENABLE, COMMAND_OUT] {
        let shown = traced.area.head();
        exits(&fixture, 0, 2);
        if op != COMMAND_ENABLE {
            assert_eq!(traced.area.head(), shown, "nothing is published without a command");
        }
        match op {
            COMMAND_PERIOD => assert_eq!(fixture.valued(0, op, traced.event, 1), 0),
            _ => assert_eq!(fixture.command(0, op, traced.event).status.get(), 0),
        }
        let grown = traced.area.head() - shown;
        // When `COMMAND_ENABLE` is sent, the trace is still disabled, so there is no new data to publish.
        assert_eq!(grown >= 512, op != COMMAND_ENABLE, "command {op} publishes data");
        let reported: u64 = traced.chunks().iter().map(|[_, size, _]| size).sum();
        assert_eq!(reported, grown, "bytes in the AUX records after command {op}");
    }
    fixture.command(0, COMMAND_IN, traced.event);
    exits(&fixture, 0, 2);
    let shown = traced.area.head();
    fixture.close(traced.event).expect("closed");
    let grown = traced.area.head() - shown;
    assert!(grown >= 512, "the close published no data before it removed the ring");
    let reported: u64 = traced.chunks().iter().map(|[_, size, _]| size).sum();
    assert_eq!(reported, grown);
}

#[test]
fn watermark_wakes_at_every_crossing() {
    let mut fixture = Fixture::new();
    let request = trace().aux_watermark(1024);
    let mut traced = Traced::new(&mut fixture, &request, 4, MAP_WRITABLE);
    fixture.command(0, COMMAND_ENABLE, traced.event);
    fixture.post_notice(0, 64);
    let (mut woken, mut heads) = (0, Vec::new());
    for _ in 0..100 {
        exits(&fixture, 0, 1);
        while let Some(notice) = fixture.notice() {
            assert_eq!(notice, (NOTICE_WAKEUP, traced.event));
            woken += 1;
            heads.push(traced.area.head());
            fixture.post_notice(0, 64);
        }
    }
    // 100 exit packets and the sync packets of two pages occupy 6528 bytes.
    assert_eq!(heads, [1024, 2048, 3072, 4096, 5120, 6144]);
    assert_eq!((woken, fixture.vpmu.metrics().wakeups), (6, 6));
    assert_eq!(traced.chunks().len(), 6);
}

#[test]
fn trace_start_is_recorded_once_with_its_task() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 21, 22);
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, CONTEXT_TASK).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 1);
    fixture.command(0, COMMAND_IN, event);
    let begun = |ring: &mut vpmu_testkit::Reader| {
        let records = ring.raw().into_iter();
        let begun = records.filter(|record| record.kind == ITRACE_START);
        begun.map(|record| record.words).collect::<Vec<_>>()
    };
    assert!(begun(&mut ring).is_empty(), "a trace without an area reports its start");
    let area = pages(&mut fixture, 1);
    map_aux(&mut fixture, event, MAP_WRITABLE, &area).expect("an area");
    assert_eq!(begun(&mut ring), [vec![22 << 32 | 21]]);
    for op in [COMMAND_OUT, COMMAND_IN, COMMAND_DISABLE, COMMAND_ENABLE] {
        fixture.command(0, op, event);
    }
    assert!(begun(&mut ring).is_empty());
}

#[test]
fn trace_records_end_with_perfs_sample_id() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 21, 22);
    let request = OpenRequest {
        flags: (OPEN_ENABLED | OPEN_SAMPLE_ID_ALL).into(),
        // TID, TIME, ID, CPU, IDENTIFIER.
        sample_type: 0x1_00c6.into(),
        ..trace()
    };
    let mut traced = Traced::new(&mut fixture, &request, 1, MAP_WRITABLE);
    exits(&fixture, 0, 1);
    fixture.read(0, traced.event);
    let records = traced.ring.raw();
    let words: Vec<usize> = records.iter().map(|record| record.words.len()).collect();
    assert_eq!(words, [1 + 5, 3 + 5]);
    for record in &records {
        let end = &record.words[record.words.len() - 5..];
        assert_eq!((end[0], end[3]), (22 << 32 | 21, 0));
        assert_eq!((end[2], end[4]), (traced.event, traced.event));
    }
}

/// VPMU-D-6.8-5.
#[test]
fn paused_or_full_ring_gets_its_aux_record_later() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    fixture.pause(traced.event, 1).expect("paused");
    for _ in 0..5 {
        exits(&fixture, 0, 2);
        fixture.read(0, traced.event);
    }
    assert_eq!(traced.area.exits().len(), 10, "a paused ring does not affect the area");
    assert_eq!(traced.chunks(), [] as [[u64; 3]; 0]);
    fixture.pause(traced.event, 0).expect("on");
    fixture.read(0, traced.event);
    assert_eq!(traced.chunks(), [[0, 11 * 64, 0]]);
}

#[test]
fn snapshot_area_has_the_newest_packets() {
    let mut fixture = Fixture::new();
    let request = trace().flags(OPEN_ENABLED);
    let mut traced = Traced::new(&mut fixture, &request, 2, 0);
    exits(&fixture, 0, 1000);
    assert_eq!(traced.area.head(), 0, "data is published only by a command");
    let reply = fixture.command(0, COMMAND_DISABLE, traced.event);
    let head = traced.area.head();
    assert_eq!((reply.value.get(), reply.lost.get()), (head, 0));
    assert_eq!(traced.chunks(), [[0, head, OVERWRITE]]);
    // Part of the oldest page is overwritten, so the reader starts at the beginning of the next page.
    traced.area.skip_to(head.next_multiple_of(4096) - 2 * 4096);
    let packets = traced.area.take();
    assert!(matches!(&packets[0], Packet::Sync(sync) if sync.flags & SYNC_PAGE != 0));
    let last = packets.iter().rev().find_map(|packet| match packet {
        Packet::Exit(exit) => Some(exit.sequence.get()),
        _ => None,
    });
    assert_eq!(last, Some(999));
    assert_eq!(fixture.vpmu.metrics().wakeups, 0);
}

#[test]
fn trace_in_error_has_published_its_data() {
    let mut fixture = Fixture::new();
    let request = trace().flags(OPEN_ENABLED | OPEN_EXCLUDE_KERNEL);
    let mut traced = Traced::new(&mut fixture, &request, 1, MAP_WRITABLE);
    exits(&fixture, 0, 3);
    fixture.exit(0, ExitReason::Io, &mut Nowhere);
    assert_eq!(traced.area.exits().len(), 3);
    assert_eq!(traced.chunks(), [[0, 256, 0]]);
    assert_eq!(fixture.read(0, traced.event).state.get(), STATE_ERROR);
}

#[test]
fn several_traces_share_one_area() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    let second = fixture.opened(&trace().flags(OPEN_ENABLED).config(EXIT_USER));
    exits(&fixture, 0, 3);
    fixture.redirect(second, traced.event).expect("redirected");
    exits(&fixture, 0, 3);
    let replies = fixture.commands(0, &[command(COMMAND_READ, traced.event), command(COMMAND_READ, second)]);
    let (count, lost): (Vec<u64>, Vec<u64>) = replies.iter().map(|reply| (reply.value.get(), reply.lost.get())).unzip();
    assert_eq!(lost, [0, 3 * 64], "the second trace lost packets before it had an area");
    let head = traced.area.head();
    assert_eq!(count[0] + count[1], head + lost[1]);
    let whose: Vec<(u64, u64)> = traced
        .area
        .take()
        .iter()
        .filter_map(|packet| match packet {
            Packet::Sync(sync) => Some((sync.event.get(), sync.sequence.get())),
            _ => None,
        })
        .collect();
    assert_eq!(whose, [(traced.event, 0), (second, 3)]);
    let reported: u64 = chunks(&traced.ring.raw()).iter().map(|[_, size, _]| size).sum();
    assert_eq!(reported, head);
}

#[test]
fn trace_redirected_back_reports_missing_packets() {
    let mut fixture = Fixture::new();
    let mut one = Traced::on(&mut fixture, 1);
    let mut two = Traced::on(&mut fixture, 1);
    let third = fixture.opened(&trace().flags(OPEN_ENABLED));
    for target in [one.event, two.event, one.event] {
        fixture.redirect(third, target).expect("redirected");
        exits(&fixture, 0, 2);
    }
    fixture.commands(0, &[command(COMMAND_READ, one.event), command(COMMAND_READ, two.event)]);
    let begun = |traced: &mut Traced| -> Vec<(u8, u64)> {
        let packets = traced.area.take();
        let begun = packets.iter().filter_map(|packet| match packet {
            Packet::Sync(sync) if sync.event.get() == third => Some((sync.flags, sync.sequence.get())),
            _ => None,
        });
        begun.collect()
    };
    assert_eq!(begun(&mut one), [(SYNC_START, 0), (SYNC_START, 4)]);
    assert_eq!(begun(&mut two), [(SYNC_START, 2)]);
}

#[test]
fn children_write_to_their_parents_area_and_outlive_the_parent() {
    let mut fixture = Fixture::new();
    let mut traced = Traced::on(&mut fixture, 4);
    let child = fixture.opened(&trace().flags(OPEN_ENABLED).parent(traced.event));
    exits(&fixture, 0, 2);
    fixture.close(traced.event).expect("closed");
    exits(&fixture, 0, 3);
    fixture.read(0, child);
    let counts = traced.area.exits().len();
    assert_eq!(counts, 2 + 2 + 3);
    let lost = traced.chunks().iter().filter(|chunk| chunk[2] != 0).count();
    assert_eq!(lost, 0);
}

/// VPMU-D-6.8-2.
#[test]
fn packets_are_whole_and_every_byte_is_written_or_lost() {
    let mut fixture = Fixture::new();
    let pages = pages(&mut fixture, 4);
    let bytes = account_for_exits(&mut fixture, 1, &pages[..2], &pages[2..]).expect("accepted");
    assert!(bytes.written > 0 && bytes.lost > 0, "{bytes:?}");
}
