//! Areas that the driver owns. In each span, the driver lets one trace write a limited number of bytes, and then reads
//! them.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, Fields, Fixture, Packet, command, header, map_aux, open_of, thread};

use super::{exits, pages, trace};

/// Opens a trace of a task, with an area that the driver owns.
fn driven(fixture: &mut Fixture, count: u64, flags: u32) -> (u64, AreaReader) {
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, CONTEXT_TASK).flags(OPEN_ENABLED));
    let area = pages(fixture, count);
    map_aux(fixture, event, MAP_DRIVER_OWNED | flags, &area).expect("an area");
    // The device does not use a metadata page for such an area, so the reader can use any page.
    let metadata = pages(fixture, 1)[0];
    (event, AreaReader::new(fixture, metadata, area))
}

fn begin(event: u64, head: u64, room: u64) -> Command {
    Command { value: head.into(), room: room.into(), ..command(COMMAND_AUX_BEGIN, event) }
}

#[test]
fn task_is_traced_from_switch_to_switch() {
    let mut fixture = Fixture::new();
    let (event, mut area) = driven(&mut fixture, 2, MAP_WRITABLE);
    let (mut head, mut reported) = (0, 0);
    for span in 0..10 {
        let came = [command(COMMAND_IN, event), begin(event, head, 8192)];
        let replies = fixture.commands(0, &came);
        assert!(replies.iter().all(|reply| reply.status.get() == 0));
        exits(&fixture, 0, 5);
        let went = [command(COMMAND_OUT, event), command(COMMAND_AUX_END, event)];
        let replies = fixture.commands(0, &went);
        let (out, end) = (replies[0], replies[1]);
        assert_eq!((out.status.get(), end.status.get()), (0, 0));
        assert_eq!((end.lost.get(), end.state.get()), (0, STATE_INACTIVE));
        assert_eq!(end.value.get(), out.value.get(), "bytes in the span, compared with those produced");
        head = end.value.get();
        area.set_head(head);
        let packets = area.take();
        // The notification that ends the span is itself an exit. It is the last exit in the trace.
        let seen: Vec<(u64, u8)> = packets
            .iter()
            .filter_map(|packet| match packet {
                Packet::Exit(exit) => Some((exit.sequence.get(), exit.flags & PACKET_CUT)),
                _ => None,
            })
            .collect();
        let expected: Vec<(u64, u8)> = (span * 6..span * 6 + 6)
            .map(|sequence| (sequence, if sequence % 6 == 5 { PACKET_CUT } else { 0 }))
            .collect();
        assert_eq!(seen, expected);
        reported += packets.len() as u64 * 64;
    }
    assert_eq!(reported, head);
}

#[test]
fn driver_is_notified_once_per_span() {
    let mut fixture = Fixture::new();
    let (event, _) = driven(&mut fixture, 2, MAP_WRITABLE);
    fixture.commands(0, &[command(COMMAND_IN, event), begin(event, 0, 512)]);
    exits(&fixture, 0, 20);
    for slot in 0..4 {
        fixture.post_notice(slot, 64);
    }
    assert_eq!(fixture.notice(), Some((NOTICE_AUX, event)));
    assert_eq!(fixture.notice(), None);
    // The driver responds to the notice by sending `COMMAND_AUX_END` and `COMMAND_AUX_BEGIN` in one notification.
    let answer = [command(COMMAND_AUX_END, event), begin(event, 512, 8192)];
    let replies = fixture.commands(0, &answer);
    // A sync packet and seven exits fit.
    assert_eq!(replies[0].value.get(), 512);
    assert_eq!(replies[0].lost.get(), 13 * 64);
    let before = fixture.read(0, event);
    assert_eq!(before.lost.get(), 13 * 64);
    exits(&fixture, 0, 1);
    assert_eq!(fixture.notice(), None);
    exits(&fixture, 0, 60);
    assert_eq!(fixture.notice(), Some((NOTICE_AUX, event)), "the notice for an area that is half full");
    assert_eq!(fixture.notice(), None);
}

#[test]
fn untaken_notices_do_not_accumulate() {
    let mut fixture = Fixture::new();
    let (event, _) = driven(&mut fixture, 1, MAP_WRITABLE);
    fixture.command(0, COMMAND_IN, event);
    for _ in 0..100 {
        fixture.commands(0, &[begin(event, 0, 64)]);
        exits(&fixture, 0, 2);
        fixture.command(0, COMMAND_AUX_END, event);
    }
    for slot in 0..4 {
        fixture.post_notice(slot, 64);
    }
    assert_eq!(fixture.notice(), Some((NOTICE_AUX, event)));
    assert_eq!(fixture.notice(), None);
    fixture.commands(0, &[begin(event, 0, 64)]);
    exits(&fixture, 0, 2);
    assert_eq!(fixture.notice(), Some((NOTICE_AUX, event)), "the notice in a new span");
}

/// VPMU-D-6.8-6.
#[test]
fn invalid_spans_are_refused() {
    let mut fixture = Fixture::new();
    let (event, _) = driven(&mut fixture, 2, MAP_WRITABLE);
    let mark = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let own = fixture.opened(&trace());
    fixture.map(own, 1);
    let area = pages(&mut fixture, 1);
    map_aux(&mut fixture, own, MAP_WRITABLE, &area).expect("an area");
    let batch = [
        (begin(mark, 0, 64), libc::EINVAL),
        (begin(own, 0, 64), libc::EINVAL),
        (begin(99, 0, 64), libc::ENOENT),
        (begin(event, 32, 64), libc::EINVAL),
        (begin(event, 0, 8193), libc::EINVAL),
        (command(COMMAND_AUX_END, event), libc::EINVAL),
        (command(COMMAND_AUX_END, mark), libc::EINVAL),
        (command(COMMAND_AUX_END, 99), libc::ENOENT),
        (begin(event, 64, 8192), 0),
        (begin(event, 64, 8192), libc::EINVAL),
        (Command { value: 1.into(), ..command(COMMAND_AUX_END, event) }, libc::EINVAL),
        (Command { room: 1.into(), ..command(COMMAND_AUX_END, event) }, libc::EINVAL),
        (Command { room: 1.into(), ..command(COMMAND_READ, event) }, libc::EINVAL),
        (Command { reserved: 1.into(), ..begin(event, 64, 64) }, libc::EINVAL),
        (command(COMMAND_AUX_END, event), 0),
    ];
    let commands: Vec<Command> = batch.iter().map(|&(command, _)| command).collect();
    let statuses: Vec<i32> = fixture
        .commands(0, &commands)
        .iter()
        .map(|reply| i32::try_from(reply.status.get()).expect("an errno"))
        .collect();
    let expected: Vec<i32> = batch.iter().map(|&(_, errno)| errno).collect();
    assert_eq!(statuses, expected);
    let elsewhere = fixture.commands_from(0, 1, &[begin(event, 0, 64)]);
    assert_eq!(elsewhere[0].status.get(), libc::EXDEV.unsigned_abs());
    let elsewhere = fixture.commands_from(0, 1, &[command(COMMAND_AUX_END, event)]);
    assert_eq!(elsewhere[0].status.get(), libc::EXDEV.unsigned_abs());
}

/// VPMU-D-6.8-6.
#[test]
fn invalid_room_writes_nothing_outside_the_area() {
    let mut fixture = Fixture::new();
    let (event, area) = driven(&mut fixture, 1, MAP_WRITABLE);
    fixture.command(0, COMMAND_IN, event);
    for head in [0, 64, 4032, 1 << 63, u64::MAX - 63] {
        let before = fixture.commands(0, &[begin(event, head, 4096)]);
        assert_eq!(before[0].status.get(), 0);
        exits(&fixture, 0, 100);
        let end = fixture.command(0, COMMAND_AUX_END, event);
        assert!(end.value.get().wrapping_sub(head) <= 4096);
        assert!(area.is_alone(&fixture), "the device wrote outside the area, head {head:#x}");
    }
}

#[test]
fn snapshot_area_wraps() {
    let mut fixture = Fixture::new();
    let (event, mut area) = driven(&mut fixture, 2, 0);
    fixture.commands(0, &[command(COMMAND_IN, event), begin(event, 0, 8192)]);
    exits(&fixture, 0, 1000);
    let replies = fixture.commands(0, &[command(COMMAND_OUT, event), command(COMMAND_AUX_END, event)]);
    let (head, lost) = (replies[1].value.get(), replies[1].lost.get());
    assert_eq!((head, lost), (replies[0].value.get(), 0));
    assert!(head > 64_000);
    area.set_head(head);
    area.skip_to(head.next_multiple_of(4096) - 8192);
    let last = area.exits().last().map(|exit| exit.sequence.get());
    assert_eq!(last, Some(1000));
    fixture.post_notice(0, 64);
    assert_eq!(fixture.notice(), None);
}

#[test]
fn area_ends_with_its_unmap_or_its_event() {
    let mut fixture = Fixture::new();
    for close in [false, true] {
        let (event, area) = driven(&mut fixture, 2, MAP_WRITABLE);
        fixture.commands(0, &[command(COMMAND_IN, event), begin(event, 0, 8192)]);
        exits(&fixture, 0, 3);
        if close { fixture.close(event) } else { fixture.control(&header(CONTROL_UNMAP_AUX, event)) }.expect("gone");
        let before = fixture.snapshot();
        exits(&fixture, 0, 100);
        assert!(fixture.snapshot() == before);
        drop(area);
        if !close {
            let end = fixture.command(0, COMMAND_AUX_END, event);
            assert_eq!(end.status.get(), libc::EINVAL.unsigned_abs());
            assert_eq!(fixture.command(0, COMMAND_OUT, event).status.get(), 0);
        }
    }
}

#[test]
fn span_ends_with_its_event() {
    let mut fixture = Fixture::new();
    let (event, mut area) = driven(&mut fixture, 2, MAP_WRITABLE);
    let child = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, CONTEXT_TASK).parent(event).flags(OPEN_ENABLED));
    fixture.commands(0, &[command(COMMAND_IN, event), begin(event, 0, 8192)]);
    fixture.close(event).expect("closed");
    // Closing the event ended its span, so the child can begin a span.
    let replies = fixture.commands(0, &[command(COMMAND_IN, child), begin(child, 0, 8192)]);
    assert_eq!(replies[1].status.get(), 0);
    exits(&fixture, 0, 3);
    let end = fixture.command(0, COMMAND_AUX_END, child);
    assert_eq!((end.value.get(), end.lost.get()), (4 * 64, 0));
    area.set_head(end.value.get());
    assert_eq!(area.exits().len(), 3);
}

#[test]
fn span_reports_only_losses_for_lack_of_room() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0).period(100).flags(OPEN_ENABLED | OPEN_EXCLUDE_KERNEL);
    let event = fixture.opened(&request);
    let area = pages(&mut fixture, 1);
    map_aux(&mut fixture, event, MAP_DRIVER_OWNED | MAP_WRITABLE, &area).expect("an area");
    fixture.commands(0, &[begin(event, 0, 4096)]);
    // This sample is lost because its mode is excluded, not because of a lack of room, so `COMMAND_AUX_END` does not
    // report the loss.
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1 << 63));
    fixture.post_notice(0, 64);
    assert_eq!(fixture.notice(), None);
    let replies = fixture.commands(0, &[command(COMMAND_READ, event), command(COMMAND_AUX_END, event)]);
    assert_eq!(replies[0].lost.get(), 256);
    assert_eq!((replies[1].value.get(), replies[1].lost.get()), (0, 0));
}
