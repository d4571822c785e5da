//! AUX areas across a save and restore.

use vpmu::abi::*;
use vpmu::{AuxProducer, ExitReason, SaveError};
use vpmu_testkit::{AreaReader, At, Fields, Fixture, Packet, command, map_aux, open_of};

/// Opens a trace, maps a ring and an area for it, and enables the trace.
fn traced(fixture: &mut Fixture, request: &OpenRequest, flags: u32) -> (u64, AreaReader) {
    let event = fixture.opened(request);
    let first = fixture.next_ring;
    fixture.next_ring += 10 * 0x1000;
    let page = |number: u64| first + number * 0x1000;
    let ring: Vec<u64> = (0..5).map(page).collect();
    let area: Vec<u64> = (5..9).map(page).collect();
    fixture.map_pages(event, MAP_WRITABLE, &ring).expect("a ring");
    map_aux(fixture, event, flags, &area).expect("an area");
    fixture.command(0, COMMAND_ENABLE, event);
    (event, AreaReader::new(fixture, ring[0], area))
}

fn io() -> OpenRequest {
    open_of(KIND_EXIT_TRACE, EXIT_IO, 0)
}

fn exits(fixture: &Fixture, from: u64, count: u64) {
    for ip in from..from + count {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
}

#[test]
fn packet_numbers_continue_after_a_restore() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, &io(), MAP_WRITABLE);
    let mut read = Vec::new();
    for turn in 0..20 {
        exits(&fixture, turn * 5, 5);
        fixture.move_on();
        if turn % 2 == 0 {
            fixture.command(0, COMMAND_READ, event);
            read.extend(area.exits());
        }
    }
    fixture.command(0, COMMAND_READ, event);
    read.extend(area.exits());
    let seen: Vec<_> = read.iter().map(|one| (one.sequence.get(), one.ip.get())).collect();
    assert!((0..100).map(|n| (n, n)).eq(seen));
    assert_eq!(fixture.vpmu.metrics().aux_lost, 0);
}

#[test]
fn full_area_stays_full_after_a_restore() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, &io(), MAP_WRITABLE);
    exits(&fixture, 0, 400);
    let lost = fixture.read(0, event).lost.get();
    assert!(lost > 0);
    fixture.move_on();
    assert_eq!(fixture.read(0, event).lost.get(), lost);
    exits(&fixture, 400, 1);
    let packet = size_of::<ExitPacket>() as u64;
    assert_eq!(fixture.read(0, event).lost.get(), lost + packet, "the area is still full");
    let before = area.exits().len() as u64;
    exits(&fixture, 500, 1);
    fixture.command(0, COMMAND_READ, event);
    let after = area.exits();
    assert_eq!(before * packet + lost + packet, 401 * packet);
    assert_eq!((after.len(), after[0].sequence.get()), (1, 401));
}

#[test]
fn snapshot_area_wraps_after_a_restore() {
    let mut fixture = Fixture::new();
    let (event, _) = traced(&mut fixture, &io(), 0);
    exits(&fixture, 0, 300);
    fixture.move_on();
    exits(&fixture, 300, 300);
    let reply = fixture.read(0, event);
    assert_eq!(reply.lost.get(), 0);
    let packet = size_of::<ExitPacket>() as u64;
    assert!(reply.value.get() >= 600 * packet, "fewer bytes counted than 600 packets have");
}

#[test]
fn turn_of_the_driver_continues_after_a_restore() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, CONTEXT_TASK).flags(OPEN_ENABLED));
    let first = fixture.next_ring;
    fixture.next_ring += 4 * 0x1000;
    let pages = [first + 0x1000, first + 0x2000];
    map_aux(&mut fixture, event, MAP_DRIVER_OWNED | MAP_WRITABLE, &pages).expect("an area");
    let mut area = AreaReader::new(&fixture, first, pages.to_vec());
    let begin = Command { value: 0.into(), room: 8192.into(), ..command(COMMAND_AUX_BEGIN, event) };
    fixture.commands(0, &[command(COMMAND_IN, event), begin]);
    exits(&fixture, 0, 5);
    fixture.move_on();
    exits(&fixture, 5, 5);
    let end = [command(COMMAND_OUT, event), command(COMMAND_AUX_END, event)];
    let reply = fixture.commands(0, &end)[1];
    assert_eq!((reply.status.get(), reply.lost.get()), (0, 0));
    area.set_head(reply.value.get());
    let ips: Vec<u64> = area.exits().iter().map(|exit| exit.ip.get()).collect();
    assert!((0..10).eq(ips));
}

#[test]
fn child_that_is_no_trace_keeps_its_turn() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, CONTEXT_TASK));
    let page = fixture.next_ring;
    fixture.next_ring += 2 * 0x1000;
    map_aux(&mut fixture, event, MAP_DRIVER_OWNED | MAP_WRITABLE, &[page]).expect("an area");
    let child = fixture.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK).parent(event));
    let begin = Command { room: 4096.into(), ..command(COMMAND_AUX_BEGIN, child) };
    assert_eq!(fixture.commands(0, &[begin])[0].status.get(), 0);
    fixture.move_on();
    let reply = fixture.command(0, COMMAND_AUX_END, child);
    assert_eq!((reply.status.get(), reply.value.get()), (0, 0));
}

/// VPMU-D-6.13-9.
#[test]
fn open_exit_is_cut_by_a_save() {
    let mut fixture = Fixture::new();
    let user = open_of(KIND_EXIT_TRACE, EXIT_SIGNAL, 0);
    let (event, mut area) = traced(&mut fixture, &user, MAP_WRITABLE);
    // The vCPU leaves the guest so that the device can be saved, and the trace records this exit.
    fixture.move_on();
    fixture.command(0, COMMAND_READ, event);
    let packets = area.take();
    let exits = packets.iter().filter_map(|packet| match packet {
        Packet::Exit(exit) => Some((exit.sequence.get(), exit.flags & PACKET_CUT)),
        _ => None,
    });
    assert_eq!(exits.collect::<Vec<_>>(), [(0, PACKET_CUT)]);
}

#[test]
fn save_is_refused_while_a_producer_writes() {
    let producer = AuxProducer { name: "watchdog", counts: "frames", format: 130 };
    let mut fixture = Fixture::producing(&[producer]);
    let (event, _) = traced(&mut fixture, &open_of(KIND_VMM_TRACE, 0, 0), MAP_WRITABLE);
    fixture.halt();
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    assert!(matches!(fixture.vpmu.save(), Err(SaveError::Producing(id)) if id == event));
    writer.put(&[7; 8]).expect("room");
    writer.end(64).expect("ended");
    fixture.move_on();
    let mut writer = fixture.vpmu.aux_begin(event).expect("begun");
    writer.put(&[7; 8]).expect("room");
    writer.end(64).expect("ended");
    assert_eq!(fixture.value(0, event), 128);
}
