//! Exit traces.

use vpmu::abi::*;
use vpmu::{Access, Exit, ExitReason};
use vpmu_testkit::{AreaReader, At, Fields, Fixture, Nowhere, Packet, TSC_OFFSET, command, map_area, open_of};

const KERNEL_IP: u64 = 0xffff_8000_0000_1000;

/// Opens a trace of the exits of vCPU 0 that `config` selects, maps an area of 4 pages, and enables the trace.
fn traced(fixture: &mut Fixture, config: u64) -> (u64, AreaReader) {
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, config, 0));
    let area = map_area(fixture, event, 4);
    fixture.command(0, COMMAND_ENABLE, event);
    (event, area)
}

fn port(port: u64, size: u8, write: bool, count: u32) -> Exit {
    Exit { reason: ExitReason::Io, access: Some(Access { address: port, size, write, count }) }
}

#[test]
fn packet_describes_the_whole_exit() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 11, 12);
    let (event, mut area) = traced(&mut fixture, EXIT_USER);
    fixture.host.pass(1000);
    let left = fixture.host.now();
    fixture.vcpus.leave(0, port(0x3f8, 2, true, 3), &mut At(0x1234));
    fixture.host.pass(500);
    fixture.vcpus.enter(0);
    fixture.command(0, COMMAND_READ, event);

    let packets = area.take();
    let [Packet::Sync(sync), Packet::Exit(exit)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!(sync.flags, SYNC_START | SYNC_PAGE);
    assert_eq!(sync.format.get(), FORMAT_EXITS);
    assert_eq!((sync.vcpu.get(), sync.event.get()), (0, event));
    assert_eq!((sync.sequence.get(), sync.lost.get()), (0, 0));
    assert_eq!(sync.config.get(), EXIT_USER);
    // A tick is a nanosecond.
    assert_eq!(sync.tsc.get(), left + TSC_OFFSET);
    assert_eq!(sync.time.get(), left + TSC_OFFSET);

    assert_eq!(exit.flags, PACKET_USER | PACKET_IP);
    assert_eq!(u64::from(exit.reason.get()), EXIT_IO);
    assert_eq!((exit.vcpu.get(), exit.sequence.get()), (0, 0));
    assert_eq!(exit.time.get(), left + TSC_OFFSET);
    assert_eq!(exit.ip.get(), 0x1234);
    // The test waited 500 ticks, and the clock read took one more tick.
    assert_eq!(exit.outside.get(), 501);
    assert_eq!(exit.qualification.get(), 0x3f8);
    assert_eq!(exit.detail.get(), 3 << DETAIL_COUNT_SHIFT | DETAIL_WRITE | 2);
    assert_eq!((exit.pid.get(), exit.tid.get()), (11, 12));
}

/// VPMU-D-6.8-7.
#[test]
fn each_exit_is_traced_once_and_in_order() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, EXIT_USER);
    let reasons = [
        (ExitReason::Io, EXIT_IO),
        (ExitReason::Mmio, EXIT_MMIO),
        (ExitReason::Hlt, EXIT_HLT),
        (ExitReason::Signal, EXIT_SIGNAL),
        (ExitReason::Other, EXIT_OTHER),
    ];
    let all = || (0..100).zip(reasons.iter().cycle().copied());
    let mut read = Vec::new();
    for (ip, (reason, _)) in all() {
        fixture.exit(0, reason, &mut At(ip));
        if ip % 30 == 0 {
            fixture.command(0, COMMAND_READ, event);
            read.extend(area.exits());
        }
    }
    fixture.command(0, COMMAND_READ, event);
    read.extend(area.exits());
    assert!((0..104).eq(read.iter().map(|exit| exit.sequence.get())));
    assert!(read.is_sorted_by_key(|exit| exit.time.get()));
    // The test's commands also cause exits, all from kernel mode. Therefore, ignore exits from kernel mode.
    let own = read.iter().filter(|exit| exit.flags & PACKET_USER != 0);
    let own: Vec<_> = own.map(|exit| (exit.ip.get(), u64::from(exit.reason.get()))).collect();
    let expected: Vec<_> = all().map(|(ip, (_, config))| (ip, config)).collect();
    assert_eq!(own, expected);
}

#[test]
fn trace_of_one_reason_contains_no_other() {
    let mut fixture = Fixture::new();
    let (io, mut ios) = traced(&mut fixture, EXIT_IO);
    let (halt, mut halts) = traced(&mut fixture, EXIT_HLT);
    for ip in 0..10 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
        fixture.exit(0, ExitReason::Mmio, &mut At(ip));
    }
    fixture.exit(0, ExitReason::Hlt, &mut At(77));
    fixture.commands(0, &[command(COMMAND_READ, io), command(COMMAND_READ, halt)]);
    let ips = |area: &mut AreaReader| -> Vec<u64> {
        let exits = area.exits();
        exits.iter().map(|exit| exit.ip.get()).collect()
    };
    assert!((0..10).eq(ips(&mut ios)));
    assert_eq!(ips(&mut halts), [77]);
}

#[test]
fn starting_exit_is_not_traced_and_ending_exit_is_cut() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, EXIT_USER);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    let reply = fixture.command(0, COMMAND_DISABLE, event);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    let exits = area.exits();
    let cut = |exit: &ExitPacket| exit.flags & PACKET_CUT != 0;
    let reported: Vec<_> = exits.iter().map(|exit| (exit.ip.get(), cut(exit))).collect();
    assert_eq!(reported, [(1, false), (u64::MAX, true)]);
    assert_eq!(reply.value.get(), area.head(), "the packets of both exits are counted");
    // When the trace is enabled again, it starts with a sync packet, and the numbering continues.
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.exit(0, ExitReason::Io, &mut At(3));
    fixture.command(0, COMMAND_READ, event);
    let packets = area.take();
    let [Packet::Sync(sync), Packet::Exit(exit)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!((sync.flags, sync.sequence.get()), (SYNC_START, 2));
    assert_eq!((exit.ip.get(), exit.sequence.get()), (3, 2));
}

#[test]
fn packet_has_no_ip_without_the_hypervisors_state() {
    let mut fixture = Fixture::new();
    let (event, mut area) = traced(&mut fixture, EXIT_IO);
    fixture.exit(0, ExitReason::Io, &mut Nowhere);
    fixture.command(0, COMMAND_READ, event);
    let exits = area.exits();
    assert_eq!((exits[0].flags, exits[0].ip.get()), (0, 0));
}

#[test]
fn exits_in_excluded_modes_are_not_traced() {
    for (flag, kept) in [(OPEN_EXCLUDE_KERNEL, 0x1000), (OPEN_EXCLUDE_USER, KERNEL_IP)] {
        let mut fixture = Fixture::new();
        let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(flag));
        let mut area = map_area(&mut fixture, event, 1);
        fixture.command(0, COMMAND_ENABLE, event);
        for ip in [0x1000, KERNEL_IP] {
            fixture.exit(0, ExitReason::Io, &mut At(ip));
        }
        fixture.command(0, COMMAND_READ, event);
        let ips: Vec<_> = area.exits().iter().map(|exit| exit.ip.get()).collect();
        assert_eq!(ips, [kept]);
        // The mode at this exit is unknown, so the device cannot tell whether the trace excludes the exit. The trace
        // therefore enters the error state.
        fixture.exit(0, ExitReason::Io, &mut Nowhere);
        let reply = fixture.command(0, COMMAND_READ, event);
        assert_eq!(reply.state.get(), STATE_ERROR);
        assert_eq!(area.exits(), []);
    }
}
