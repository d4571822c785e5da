//! Traces as targets, and as triggers.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu::source::{HostExit, Recorded};
use vpmu_testkit::{AreaReader, At, CYCLES, Fields, Fixture, map_area, open_of, thread};

use super::{START, STOP, between_marks, paused, paused_sampling};

fn ips(area: &mut AreaReader) -> Vec<u64> {
    area.exits().iter().map(|exit| exit.ip.get()).collect()
}

#[test]
fn exit_trace_contains_the_exits_of_its_regions() {
    let mut fixture = Fixture::new();
    let trace = between_marks(&mut fixture, &paused(KIND_EXIT_TRACE, EXIT_USER));
    let mut area = map_area(&mut fixture, trace, 16);
    let (mut read, mut expected) = (Vec::new(), Vec::new());
    for region in 0..1000 {
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.mark(0, START, 2);
        for exit in 0..region % 4 {
            fixture.exit(0, ExitReason::Hlt, &mut At(region * 10 + exit));
            expected.push(region * 10 + exit);
        }
        fixture.mark(0, STOP, 3);
        expected.push(3);
        // A stop publishes the data so far.
        read.extend(ips(&mut area));
    }
    assert_eq!(read, expected);
    let reply = fixture.read(0, trace);
    assert_eq!((reply.value.get(), reply.lost.get()), (area.head(), 0));
    assert_eq!(reply.time_enabled, reply.time_running);
}

#[test]
fn host_trace_is_silent_outside_its_regions() {
    let mut fixture = Fixture::new();
    let trace = between_marks(&mut fixture, &paused(KIND_EXIT_TRACE, EXIT_ALL));
    let mut area = map_area(&mut fixture, trace, 4);
    let record = |fixture: &Fixture, ip| {
        let tsc = fixture.host.now();
        let exit = HostExit { tsc, back: Some(tsc), ip, reason: 1, qualification: 0, detail: 0 };
        fixture.host.record_exit(thread(0), Recorded::Exit(exit));
    };
    for region in 0..10 {
        record(&fixture, 1000);
        fixture.mark(0, START, 1);
        record(&fixture, region);
        fixture.mark(0, STOP, 1);
        assert_eq!(ips(&mut area), [region]);
        record(&fixture, 1000);
    }
}

#[test]
fn overflows_of_a_pace_before_a_stop_are_published() {
    let mut fixture = Fixture::new();
    let request = paused(KIND_SAMPLE_TRACE, PACE_CYCLES).period(100);
    let trace = between_marks(&mut fixture, &request);
    let mut area = map_area(&mut fixture, trace, 4);
    for region in 0..20 {
        fixture.host.work(thread(0), 60, 4);
        fixture.mark(0, START, 1);
        fixture.host.work(thread(0), 100, 4);
        fixture.mark(0, STOP, 100 + region);
        let packets = area.samples();
        let seen: Vec<u64> = packets.iter().map(|sample| sample.ip.get()).collect();
        assert_eq!(seen, [100 + region]);
    }
    assert_eq!(fixture.read(0, trace).lost.get(), 0);
}

#[test]
fn exit_that_overflows_and_stops_a_trace_is_its_last() {
    let mut fixture = Fixture::new();
    // The stopper is opened before the trace. Therefore, at the same exit, the stopper's overflow takes effect before
    // the trace's overflow.
    let stop = fixture.opened(&paused_sampling(KIND_EXITS, EXIT_HLT, 1).flags(OPEN_ENABLED));
    let trace = fixture.opened(&open_of(KIND_SAMPLE_TRACE, PACE_EXITS, 0).period(2).flags(OPEN_ENABLED));
    let mut area = map_area(&mut fixture, trace, 4);
    fixture.link(stop, trace, LINK_STOPPER).expect("linked");
    // Mapping and linking did not cause any exits of the vCPU.
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.exit(0, ExitReason::Hlt, &mut At(2));
    fixture.exit(0, ExitReason::Io, &mut At(3));
    fixture.exit(0, ExitReason::Io, &mut At(4));
    let seen: Vec<u64> = area.samples().iter().map(|sample| sample.ip.get()).collect();
    assert_eq!(seen, [2], "published without a command");
}

#[test]
fn sample_trace_starts_other_events() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, 5));
    let trace = fixture.opened(&open_of(KIND_SAMPLE_TRACE, PACE_CYCLES, 0).period(100).flags(OPEN_ENABLED));
    for role in [LINK_STARTER, LINK_STOPPER] {
        fixture.link(trace, target, role).expect("linked");
    }
    let mut counts = Vec::new();
    for overflows in [1, 1, 3, 2] {
        fixture.host.work(thread(0), 100 * overflows, 4);
        fixture.exit(0, ExitReason::Signal, &mut At(1));
        fixture.mark(0, 5, 1);
        counts.push(fixture.value(0, target));
    }
    assert_eq!(counts, [1, 1, 2, 3], "each overflow toggles the target, even if no packet is written");
    // A trace without a pace does not overflow.
    let exits = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, 0));
    assert_eq!(fixture.link(exits, target, LINK_STARTER), Err(libc::EINVAL));
}

#[test]
fn link_and_group_members_both_pause_a_trace() {
    let mut fixture = Fixture::new();
    let trace = between_marks(&mut fixture, &paused(KIND_EXIT_TRACE, EXIT_IO));
    let mut area = map_area(&mut fixture, trace, 4);
    let member = |fixture: &mut Fixture, mark: u64, flag: u32| {
        let request = open_of(KIND_MARK, mark, 0).leader(trace).period(1).flags(OPEN_ENABLED | flag);
        fixture.opened(&request)
    };
    let resume = member(&mut fixture, 1, OPEN_AUX_RESUME);
    let pauses = [(); 2].map(|()| member(&mut fixture, 2, OPEN_AUX_PAUSE));
    let steps = [(1, true), (STOP, false), (START, true), (2, false)];
    for (at, (mark, traces)) in steps.into_iter().enumerate() {
        let ip = at as u64;
        fixture.mark(0, mark, 100);
        fixture.exit(0, ExitReason::Io, &mut At(ip));
        fixture.command(0, COMMAND_READ, trace);
        assert_eq!(ips(&mut area) == [ip], traces, "after mark {mark}");
    }
    // A member that resumes the trace already acts as its starter. A member that pauses the trace already acts as its
    // stopper.
    assert_eq!(fixture.link(resume, trace, LINK_STARTER), Err(libc::EEXIST));
    assert_eq!(fixture.link(resume, trace, LINK_STOPPER), Err(libc::EBUSY));
    for member in pauses {
        fixture.close(member).expect("closed");
    }
    fixture.mark(0, START, 100);
    fixture.mark(0, 2, 100);
    fixture.exit(0, ExitReason::Io, &mut At(9));
    fixture.command(0, COMMAND_READ, trace);
    assert_eq!(ips(&mut area), [9]);
}

#[test]
fn host_counter_starts_a_trace_at_its_overflow_exit() {
    let mut fixture = Fixture::new();
    let trace = between_marks(&mut fixture, &paused(KIND_EXIT_TRACE, EXIT_USER));
    let mut area = map_area(&mut fixture, trace, 4);
    let start = fixture.opened(&paused_sampling(CYCLES.0, CYCLES.1, 100).flags(OPEN_ENABLED));
    let other = fixture.opened(&paused(KIND_EXIT_TRACE, EXIT_IO));
    fixture.link(start, other, LINK_STARTER).expect("linked");
    fixture.redirect(other, trace).expect("redirected");
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(2));
    fixture.exit(0, ExitReason::Io, &mut At(3));
    fixture.command(0, COMMAND_READ, other);
    assert_eq!(ips(&mut area), [3]);
}
