//! Group members whose overflows pause and resume the trace that leads the group.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, Fields, Fixture, Packet, map_area, open_of, thread};

const PAUSE: u32 = 7;
const RESUME: u32 = 8;

fn steering(leader: u64, kind: u32, config: u64, period: u64, flag: u32) -> OpenRequest {
    open_of(kind, config, 0).leader(leader).period(period).flags(OPEN_ENABLED | flag)
}

/// Opens and enables a trace of exits, with marks that pause and resume it.
fn steered(fixture: &mut Fixture, flags: u32) -> (u64, AreaReader) {
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, 0).flags(flags));
    let area = map_area(fixture, trace, 4);
    for (mark, flag) in [(PAUSE, OPEN_AUX_PAUSE), (RESUME, OPEN_AUX_RESUME)] {
        fixture.opened(&steering(trace, KIND_MARK, mark.into(), 1, flag));
    }
    fixture.command(0, COMMAND_ENABLE, trace);
    (trace, area)
}

fn ips(area: &mut AreaReader) -> Vec<u64> {
    area.exits().iter().map(|exit| exit.ip.get()).collect()
}

#[test]
fn pausing_exit_is_traced_and_resuming_exit_is_not() {
    let mut fixture = Fixture::new();
    let (trace, mut area) = steered(&mut fixture, 0);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.mark(0, PAUSE, 2);
    // A pause publishes the data so far.
    assert_eq!(ips(&mut area), [1, 2]);
    for ip in 3..6 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    fixture.mark(0, PAUSE, 6);
    fixture.mark(0, RESUME, 7);
    fixture.mark(0, RESUME, 8);
    fixture.exit(0, ExitReason::Io, &mut At(9));
    let reply = fixture.read(0, trace);
    assert_eq!(reply.state.get(), STATE_ACTIVE);
    assert_eq!(reply.time_enabled, reply.time_running);
    let packets = area.take();
    let [Packet::Sync(sync), Packet::Exit(first), Packet::Exit(second)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!((sync.flags, sync.sequence.get()), (SYNC_RESUME, 2));
    assert_eq!((first.ip.get(), second.ip.get()), (8, 9));
    assert_eq!(reply.value.get(), area.head());
}

#[test]
fn traced_regions_are_exact_in_every_round() {
    let mut fixture = Fixture::new();
    let (trace, mut area) = steered(&mut fixture, OPEN_AUX_START_PAUSED);
    let mut read = Vec::new();
    for region in 0..1000 {
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.mark(0, RESUME, 2);
        for exit in 0..region % 4 {
            fixture.exit(0, ExitReason::Hlt, &mut At(region * 10 + exit));
        }
        fixture.mark(0, PAUSE, 3);
        read.extend(ips(&mut area));
    }
    let expected: Vec<u64> =
        (0..1000).flat_map(|region| (0..region % 4).map(move |exit| region * 10 + exit).chain([3])).collect();
    assert_eq!(read, expected);
    let reply = fixture.read(0, trace);
    assert_eq!((reply.value.get(), reply.lost.get()), (area.head(), 0));
}

#[test]
fn trace_opened_paused_has_time_and_no_packets() {
    let mut fixture = Fixture::new();
    let (trace, mut area) = steered(&mut fixture, OPEN_AUX_START_PAUSED);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    let reply = fixture.read(0, trace);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 0));
    assert_ne!(reply.time_running.get(), 0);
    assert_eq!(area.take(), []);
    // Disabling and enabling does not resume it.
    fixture.command(0, COMMAND_DISABLE, trace);
    fixture.command(0, COMMAND_ENABLE, trace);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    fixture.mark(0, RESUME, 3);
    fixture.exit(0, ExitReason::Io, &mut At(4));
    fixture.command(0, COMMAND_READ, trace);
    let packets = area.take();
    let [Packet::Sync(sync), Packet::Exit(exit)] = packets[..] else {
        panic!("{packets:?}");
    };
    assert_eq!(sync.flags, SYNC_START | SYNC_RESUME | SYNC_PAGE);
    assert_eq!(exit.ip.get(), 4);
}

#[test]
fn exit_members_pause_and_resume_at_their_exit() {
    let mut fixture = Fixture::new();
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0));
    let mut area = map_area(&mut fixture, trace, 1);
    for (config, period, flag) in [(EXIT_HLT, 1, OPEN_AUX_RESUME), (EXIT_IO, 3, OPEN_AUX_PAUSE)] {
        fixture.opened(&steering(trace, KIND_EXITS, config, period, flag));
    }
    fixture.command(0, COMMAND_ENABLE, trace);
    for ip in 0..9 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    // The third exit has paused the trace.
    assert_eq!(ips(&mut area), [0, 1, 2]);
    fixture.exit(0, ExitReason::Hlt, &mut At(50));
    for ip in 10..16 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    assert_eq!(ips(&mut area), [10, 11, 12]);
}

#[test]
fn sample_trace_pauses_with_its_pace() {
    let mut fixture = Fixture::new();
    let trace = fixture.opened(&open_of(KIND_SAMPLE_TRACE, PACE_EXITS, 0).period(10));
    let mut area = map_area(&mut fixture, trace, 4);
    for (mark, flag) in [(PAUSE, OPEN_AUX_PAUSE), (RESUME, OPEN_AUX_RESUME)] {
        fixture.opened(&steering(trace, KIND_MARK, mark.into(), 1, flag));
    }
    fixture.command(0, COMMAND_ENABLE, trace);
    let exits = |fixture: &Fixture, ips: std::ops::Range<u64>| {
        ips.for_each(|ip| fixture.exit(0, ExitReason::Io, &mut At(ip)));
    };
    exits(&fixture, 1..15);
    fixture.mark(0, PAUSE, 15);
    exits(&fixture, 16..32);
    fixture.mark(0, RESUME, 32);
    exits(&fixture, 36..45);
    let reply = fixture.read(0, trace);
    let samples: Vec<_> = area.samples().iter().map(|sample| sample.ip.get()).collect();
    assert_eq!(samples, [10, 40]);
    assert_eq!((reply.value.get(), reply.lost.get()), (area.head(), 0));
}

#[test]
fn member_that_pauses_a_trace_is_sampled_at_its_exit() {
    let mut fixture = Fixture::new();
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0));
    // A member that pauses or resumes must act before the vCPU enters the guest. Only the exit engine can do that.
    let request = steering(trace, KIND_HARDWARE, 0, 100, OPEN_AUX_PAUSE).engine(ENGINE_BATCHED);
    assert_eq!(fixture.open(&request), Err(libc::EOPNOTSUPP));
    let request = request.engine(ENGINE_ANY);
    assert_eq!(fixture.open_reply(&request).engine.get(), ENGINE_EXIT);
}

/// VPMU-D-6.11-1.
#[test]
fn mark_is_the_last_overflow_of_its_exit() {
    let mut fixture = Fixture::new();
    let (trace, mut area) = steered(&mut fixture, 0);
    // A write to the doorbell is an exit and a mark. The exit's overflow takes effect before the mark's overflow,
    // although the member that counts exits was opened later.
    let member = steering(trace, KIND_EXITS, EXIT_MMIO, 1, OPEN_AUX_RESUME);
    fixture.opened(&member);
    fixture.mark(0, PAUSE, 1);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(ips(&mut area), [1]);
    // An exit's overflow also takes effect before a host counter's overflow that the device finds at the same exit,
    // although the member that counts exits was opened later.
    let counter = steering(trace, KIND_HARDWARE, 0, 100, OPEN_AUX_PAUSE);
    fixture.opened(&counter.engine(ENGINE_EXIT));
    fixture.opened(&steering(trace, KIND_EXITS, EXIT_SIGNAL, 1, OPEN_AUX_RESUME));
    fixture.mark(0, RESUME, 3);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(4));
    fixture.exit(0, ExitReason::Io, &mut At(5));
    assert_eq!(ips(&mut area), [4]);
}

#[test]
fn resume_publishes_data_of_other_traces() {
    let mut fixture = Fixture::new();
    let (trace, mut area) = steered(&mut fixture, OPEN_AUX_START_PAUSED);
    let other = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(OPEN_ENABLED));
    fixture.redirect(other, trace).expect("redirected");
    fixture.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(ips(&mut area), [0; 0], "the other trace has not published its data yet");
    fixture.mark(0, RESUME, 2);
    assert_eq!(ips(&mut area), [1]);
}
