//! Targets and triggers of each kind: traces, and events counted by the device, by the hypervisor's statistics, or by
//! host counters of either engine.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, At, CYCLES, FAULTS, Fields, Fixture, limits, open_of, thread};

use super::{START, STOP, between_marks, paused, paused_sampling};

#[test]
fn statistics_and_clock_counts_stop_in_a_pause() {
    let mut fixture = Fixture::new();
    let [exits, tsc, time] = [(KIND_EXITS, EXIT_ALL), (KIND_TSC, 0), (KIND_GUEST_TIME, 0)].map(|(kind, config)| {
        let request = paused(kind, config);
        between_marks(&mut fixture, &request)
    });
    let work = |fixture: &Fixture| {
        fixture.host.add_exits(10);
        fixture.host.pass(1_000_000);
        fixture.vcpus.enter(0);
        fixture.host.spend(500);
        fixture.exit(0, ExitReason::Io, &mut At(1));
    };
    for _ in 0..100 {
        work(&fixture);
        fixture.mark(0, START, 1);
        work(&fixture);
        fixture.mark(0, STOP, 1);
        work(&fixture);
    }
    assert_eq!(fixture.value(0, exits), 1000);
    assert_eq!(fixture.value(0, time), 50_000);
    let ticks = fixture.value(0, tsc);
    // Each read of the clock advances it by a tick.
    assert!((100_000_000..100_010_000).contains(&ticks), "{ticks} ticks in the regions");
    for id in [exits, tsc, time] {
        let reply = fixture.read(0, id);
        assert!(reply.time_running.get() >= 300_000_000);
    }
}

#[test]
fn host_counter_counts_only_between_start_and_stop() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(FAULTS.0, FAULTS.1));
    for _ in 0..100 {
        fixture.host.work(thread(0), 3, 4);
        fixture.mark(0, START, 1);
        // Between the two marks, the host lets the counter count only half of the events.
        fixture.host.work(thread(0), 40, 2);
        fixture.mark(0, STOP, 1);
        fixture.host.work(thread(0), 3, 4);
    }
    let reply = fixture.read(0, target);
    assert_eq!(reply.value.get(), 2000);
    assert!(reply.time_running < reply.time_enabled);
    fixture.command(0, COMMAND_DISABLE, target);
    fixture.command(0, COMMAND_ENABLE, target);
    fixture.host.work(thread(0), 5, 4);
    assert_eq!(fixture.value(0, target), 2000, "`COMMAND_ENABLE` does not end the pause");
    fixture.close(target).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn sampling_host_counter_writes_overflows_before_the_stop() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused_sampling(CYCLES.0, CYCLES.1, 100));
    let mut ring = fixture.map(target, 4);
    for region in 0..100 {
        fixture.host.work(thread(0), 70, 4);
        fixture.mark(0, START, 1);
        fixture.host.work(thread(0), 50, 4);
        fixture.exit(0, ExitReason::Signal, &mut At(1000 + region));
        // These events happen between the exit at which the device finds the overflow and the exit of the mark.
        fixture.host.work(thread(0), 50, 4);
        fixture.mark(0, STOP, 2000 + region);
    }
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, (2000..2100).collect::<Vec<_>>());
    let reply = fixture.read(0, target);
    assert_eq!((reply.value.get(), reply.lost.get()), (10_000, 0));
}

#[test]
fn host_counter_starts_and_stops_at_its_overflow_exit() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, 5));
    let toggle = fixture.opened(&paused_sampling(CYCLES.0, CYCLES.1, 100).flags(OPEN_ENABLED));
    for role in [LINK_STARTER, LINK_STOPPER] {
        fixture.link(toggle, target, role).expect("linked");
    }
    let mut counts = Vec::new();
    for _ in 0..4 {
        fixture.host.work(thread(0), 100, 4);
        fixture.exit(0, ExitReason::Signal, &mut At(1));
        (0..10).for_each(|_| fixture.mark(0, 5, 1));
        counts.push(fixture.value(0, target));
    }
    assert_eq!(counts, [10, 10, 20, 20]);
    // The device finds two overflows at the same exit. They toggle the target twice, which changes nothing.
    fixture.host.work(thread(0), 200, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 20);
}

#[test]
fn counters_that_stop_each_other_at_one_exit_both_write() {
    let mut fixture = Fixture::new();
    let request = paused_sampling(CYCLES.0, CYCLES.1, 100).flags(OPEN_ENABLED);
    let [one, other] = [(), ()].map(|()| fixture.opened(&request));
    fixture.link(one, other, LINK_STOPPER).expect("linked");
    fixture.link(other, one, LINK_STOPPER).expect("linked");
    let mut rings = [one, other].map(|id| fixture.map(id, 4));
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(2));
    for ring in &mut rings {
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [1]);
    }
    assert_eq!([one, other].map(|id| fixture.value(0, id)), [100, 100]);
}

#[test]
fn batched_target_is_collected_at_its_stop() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    let request = paused_sampling(CYCLES.0, CYCLES.1, 100).engine(ENGINE_BATCHED);
    let target = between_marks(&mut fixture, &request);
    let mut ring = fixture.map(target, 4);
    let record = |fixture: &Fixture, ip| {
        fixture.host.record(
            thread(0),
            vpmu::source::Overflow { tsc: fixture.host.now(), ip, mode: vpmu::source::Mode::Guest, period: 100 },
        );
    };
    for region in 0..10 {
        record(&fixture, 999);
        fixture.mark(0, START, 1);
        record(&fixture, region);
        fixture.mark(0, STOP, 1);
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [region], "the stop collects the records");
        record(&fixture, 999);
    }
    assert!(fixture.host.draining());
    fixture.close(target).expect("closed");
}

#[test]
fn throttled_overflow_still_acts_on_its_targets() {
    let limits = limits().with(|limits| {
        // One record each 10 ms.
        limits.max_sample_rate = 100;
    });
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let target = between_marks(&mut fixture, &paused(KIND_MARK, 5));
    for _ in 0..1000 {
        fixture.mark(0, START, 1);
        fixture.mark(0, 5, 1);
        fixture.mark(0, STOP, 1);
        fixture.mark(0, 5, 1);
    }
    assert_eq!(fixture.value(0, target), 1000);
    assert!(fixture.vpmu.metrics().samples_throttled > 1900);
}

#[test]
fn trigger_acts_up_to_its_limit() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, 5));
    let toggle = fixture.opened(&paused_sampling(CYCLES.0, CYCLES.1, 100).flags(0));
    for role in [LINK_STARTER, LINK_STOPPER] {
        fixture.link(toggle, target, role).expect("linked");
    }
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, toggle, 3), 0);
    // The device finds four overflows at the same exit, but the limit is three. Three toggles change the target.
    fixture.host.work(thread(0), 400, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 1);
    assert_eq!(fixture.read(0, toggle).state.get(), STATE_OFF);
}

#[test]
fn paused_target_does_not_use_up_its_limit() {
    let mut fixture = Fixture::new();
    let request = paused_sampling(KIND_EXITS, EXIT_IO, 1).flags(OPEN_PAUSED);
    let target = between_marks(&mut fixture, &request);
    let mut ring = fixture.map(target, 4);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, target, 2), 0);
    for ip in 0..5 {
        fixture.exit(0, ExitReason::Io, &mut At(100));
        fixture.mark(0, START, 1);
        fixture.exit(0, ExitReason::Io, &mut At(ip));
        fixture.mark(0, STOP, 1);
    }
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0, 1]);
    assert_eq!(fixture.read(0, target).state.get(), STATE_OFF);
}

#[test]
fn group_counts_while_its_leader_is_paused() {
    let mut fixture = Fixture::new();
    let leader = between_marks(&mut fixture, &paused(KIND_MARK, 5));
    let member = fixture.opened(&open_of(KIND_MARK, 5, 0).leader(leader).flags(OPEN_ENABLED));
    // A pause does not change the state of the event or of its group.
    fixture.mark(0, 5, 1);
    fixture.mark(0, START, 1);
    fixture.mark(0, 5, 1);
    assert_eq!([leader, member].map(|id| fixture.value(0, id)), [1, 2]);
    fixture.command(0, COMMAND_DISABLE, leader);
    fixture.mark(0, STOP, 1);
    fixture.mark(0, 5, 1);
    assert_eq!([leader, member].map(|id| fixture.value(0, id)), [1, 2]);
}

#[test]
fn trigger_in_a_group_acts_while_its_leader_is_enabled() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, 5));
    let leader = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let start = fixture.opened(&open_of(KIND_MARK, START.into(), 0).sampled(1).leader(leader).flags(OPEN_ENABLED));
    fixture.link(start, target, LINK_STARTER).expect("linked");
    let mut counts = Vec::new();
    for op in [COMMAND_READ, COMMAND_ENABLE] {
        fixture.command(0, op, leader);
        fixture.mark(0, START, 1);
        fixture.mark(0, 5, 1);
        counts.push(fixture.value(0, target));
    }
    assert_eq!(counts, [0, 1]);
}

#[test]
fn sample_reads_the_count_of_a_paused_event() {
    const READ: u64 = 1 << 4;
    const GROUP: u64 = 1 << 3;
    let mut fixture = Fixture::new();
    let leader =
        fixture.opened(&open_of(KIND_MARK, 6, 0).sampled(1).sample_type(READ).read_format(GROUP).flags(OPEN_ENABLED));
    let member = paused(KIND_TSC, 0).leader(leader).read_format(GROUP);
    let member = between_marks(&mut fixture, &member);
    let mut ring = fixture.map(leader, 1);
    fixture.mark(0, START, 1);
    fixture.host.pass(1000);
    fixture.mark(0, STOP, 1);
    let counted = fixture.value(0, member);
    fixture.host.pass(1000);
    fixture.mark(0, 6, 1);
    let words = ring.raw().pop().map(|record| record.words);
    assert_eq!(words, Some(vec![2, 1, counted]));
}
