//! Targets and triggers of each kind: traces, and events counted by the device, by the hypervisor's statistics, or by
//! host counters of either engine.

use vpmu::ExitReason;
use vpmu::abi::*;

use super::{START, STOP, between_marks, paused, paused_sampling};
use crate::rig::{ALL_FEATURES, Rig, limits, open_of, sampling, thread};
use crate::world::{At, CYCLES, FAULTS};

#[test]
fn statistics_and_clock_counts_stop_in_a_pause() {
    let mut rig = Rig::new();
    let [exits, tsc, time] =
        [(KIND_EXITS, EXIT_ALL), (KIND_TSC, 0), (KIND_GUEST_TIME, 0)].map(|(kind, config)| {
            let request = paused(kind, config);
            between_marks(&mut rig, &request)
        });
    let work = |rig: &Rig| {
        rig.world.add_exits(10);
        rig.world.pass(1_000_000);
        rig.vcpus.enter(0);
        rig.world.spend(500);
        rig.exit(0, ExitReason::Io, &mut At(1));
    };
    for _ in 0..100 {
        work(&rig);
        rig.mark(0, START, 1);
        work(&rig);
        rig.mark(0, STOP, 1);
        work(&rig);
    }
    assert_eq!(rig.value(0, exits), 1000);
    assert_eq!(rig.value(0, time), 50_000);
    let ticks = rig.value(0, tsc);
    // Each read of the clock advances it by a tick.
    assert!(
        (100_000_000..100_010_000).contains(&ticks),
        "{ticks} ticks in the regions"
    );
    for id in [exits, tsc, time] {
        let reply = rig.read(0, id);
        assert!(reply.time_running.get() >= 300_000_000);
    }
}

#[test]
fn host_counter_counts_only_between_start_and_stop() {
    let mut rig = Rig::new();
    let target = between_marks(&mut rig, &paused(FAULTS.0, FAULTS.1));
    for _ in 0..100 {
        rig.world.work(thread(0), 3, 4);
        rig.mark(0, START, 1);
        // Between the two marks, the host lets the counter count only half of the events.
        rig.world.work(thread(0), 40, 2);
        rig.mark(0, STOP, 1);
        rig.world.work(thread(0), 3, 4);
    }
    let reply = rig.read(0, target);
    assert_eq!(reply.value.get(), 2000);
    assert!(reply.time_running < reply.time_enabled);
    rig.command(0, COMMAND_DISABLE, target);
    rig.command(0, COMMAND_ENABLE, target);
    rig.world.work(thread(0), 5, 4);
    assert_eq!(
        rig.value(0, target),
        2000,
        "`COMMAND_ENABLE` does not end the pause"
    );
    rig.close(target).expect("closed");
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn sampling_host_counter_writes_overflows_before_the_stop() {
    let mut rig = Rig::new();
    let target = between_marks(&mut rig, &paused_sampling(CYCLES.0, CYCLES.1, 100));
    let mut ring = rig.map(target, 4);
    for region in 0..100 {
        rig.world.work(thread(0), 70, 4);
        rig.mark(0, START, 1);
        rig.world.work(thread(0), 50, 4);
        rig.exit(0, ExitReason::Signal, &mut At(1000 + region));
        // These events happen between the exit at which the device finds the overflow and the exit of the mark.
        rig.world.work(thread(0), 50, 4);
        rig.mark(0, STOP, 2000 + region);
    }
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, (2000..2100).collect::<Vec<_>>());
    let reply = rig.read(0, target);
    assert_eq!((reply.value.get(), reply.lost.get()), (10_000, 0));
}

#[test]
fn host_counter_starts_and_stops_at_its_overflow_exit() {
    let mut rig = Rig::new();
    let target = rig.open(&paused(KIND_MARK, 5)).expect("open");
    let toggle = rig
        .open(&OpenRequest {
            flags: OPEN_ENABLED.into(),
            ..paused_sampling(CYCLES.0, CYCLES.1, 100)
        })
        .expect("open");
    for role in [LINK_STARTER, LINK_STOPPER] {
        rig.link(toggle, target, role).expect("linked");
    }
    let mut counts = Vec::new();
    for _ in 0..4 {
        rig.world.work(thread(0), 100, 4);
        rig.exit(0, ExitReason::Signal, &mut At(1));
        (0..10).for_each(|_| rig.mark(0, 5, 1));
        counts.push(rig.value(0, target));
    }
    assert_eq!(counts, [10, 10, 20, 20]);
    // The device finds two overflows at the same exit. They toggle the target twice, which changes nothing.
    rig.world.work(thread(0), 200, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, target), 20);
}

#[test]
fn counters_that_stop_each_other_at_one_exit_both_write() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..paused_sampling(CYCLES.0, CYCLES.1, 100)
    };
    let [one, other] = [(), ()].map(|()| rig.open(&request).expect("open"));
    rig.link(one, other, LINK_STOPPER).expect("linked");
    rig.link(other, one, LINK_STOPPER).expect("linked");
    let mut rings = [one, other].map(|id| rig.map(id, 4));
    rig.world.work(thread(0), 100, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.world.work(thread(0), 100, 4);
    rig.exit(0, ExitReason::Signal, &mut At(2));
    for ring in &mut rings {
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [1]);
    }
    assert_eq!([one, other].map(|id| rig.value(0, id)), [100, 100]);
}

#[test]
fn batched_target_is_collected_at_its_stop() {
    let mut rig = Rig::new();
    rig.world.know_ips();
    let request = OpenRequest {
        engine: ENGINE_BATCHED.into(),
        ..paused_sampling(CYCLES.0, CYCLES.1, 100)
    };
    let target = between_marks(&mut rig, &request);
    let mut ring = rig.map(target, 4);
    let record = |rig: &Rig, ip| {
        rig.world.record(
            thread(0),
            vpmu::source::Overflow {
                tsc: rig.world.now(),
                ip,
                mode: vpmu::source::Mode::Guest,
                period: 100,
            },
        );
    };
    for region in 0..10 {
        record(&rig, 999);
        rig.mark(0, START, 1);
        record(&rig, region);
        rig.mark(0, STOP, 1);
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [region], "the stop collects the records");
        record(&rig, 999);
    }
    assert!(rig.world.draining());
    rig.close(target).expect("closed");
}

#[test]
fn throttled_overflow_still_acts_on_its_targets() {
    let limits = limits().with(|limits| {
        // One record each 10 ms.
        limits.max_sample_rate = 100;
    });
    let mut rig = Rig::with(limits, ALL_FEATURES);
    let target = between_marks(&mut rig, &paused(KIND_MARK, 5));
    for _ in 0..1000 {
        rig.mark(0, START, 1);
        rig.mark(0, 5, 1);
        rig.mark(0, STOP, 1);
        rig.mark(0, 5, 1);
    }
    assert_eq!(rig.value(0, target), 1000);
    assert!(rig.vpmu.metrics().samples_throttled > 1900);
}

#[test]
fn trigger_acts_up_to_its_limit() {
    let mut rig = Rig::new();
    let target = rig.open(&paused(KIND_MARK, 5)).expect("open");
    let toggle = rig
        .open(&OpenRequest {
            flags: 0.into(),
            ..paused_sampling(CYCLES.0, CYCLES.1, 100)
        })
        .expect("open");
    for role in [LINK_STARTER, LINK_STOPPER] {
        rig.link(toggle, target, role).expect("linked");
    }
    assert_eq!(rig.valued(0, COMMAND_REFRESH, toggle, 3), 0);
    // The device finds four overflows at the same exit, but the limit is three. Three toggles change the target.
    rig.world.work(thread(0), 400, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, target), 1);
    assert_eq!(rig.read(0, toggle).state.get(), STATE_OFF);
}

#[test]
fn paused_target_does_not_use_up_its_limit() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        flags: OPEN_PAUSED.into(),
        ..paused_sampling(KIND_EXITS, EXIT_IO, 1)
    };
    let target = between_marks(&mut rig, &request);
    let mut ring = rig.map(target, 4);
    assert_eq!(rig.valued(0, COMMAND_REFRESH, target, 2), 0);
    for ip in 0..5 {
        rig.exit(0, ExitReason::Io, &mut At(100));
        rig.mark(0, START, 1);
        rig.exit(0, ExitReason::Io, &mut At(ip));
        rig.mark(0, STOP, 1);
    }
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0, 1]);
    assert_eq!(rig.read(0, target).state.get(), STATE_OFF);
}

#[test]
fn group_counts_while_its_leader_is_paused() {
    let mut rig = Rig::new();
    let leader = between_marks(&mut rig, &paused(KIND_MARK, 5));
    let member = rig
        .open(&OpenRequest {
            leader: leader.into(),
            flags: OPEN_ENABLED.into(),
            ..open_of(KIND_MARK, 5, 0)
        })
        .expect("open");
    // A pause does not change the state of the event or of its group.
    rig.mark(0, 5, 1);
    rig.mark(0, START, 1);
    rig.mark(0, 5, 1);
    assert_eq!([leader, member].map(|id| rig.value(0, id)), [1, 2]);
    rig.command(0, COMMAND_DISABLE, leader);
    rig.mark(0, STOP, 1);
    rig.mark(0, 5, 1);
    assert_eq!([leader, member].map(|id| rig.value(0, id)), [1, 2]);
}

#[test]
fn trigger_in_a_group_acts_while_its_leader_is_enabled() {
    let mut rig = Rig::new();
    let target = rig.open(&paused(KIND_MARK, 5)).expect("open");
    let leader = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let start = rig
        .open(&OpenRequest {
            leader: leader.into(),
            flags: OPEN_ENABLED.into(),
            ..sampling(open_of(KIND_MARK, START.into(), 0), 1)
        })
        .expect("open");
    rig.link(start, target, LINK_STARTER).expect("linked");
    let mut counts = Vec::new();
    for op in [COMMAND_READ, COMMAND_ENABLE] {
        rig.command(0, op, leader);
        rig.mark(0, START, 1);
        rig.mark(0, 5, 1);
        counts.push(rig.value(0, target));
    }
    assert_eq!(counts, [0, 1]);
}

#[test]
fn sample_reads_the_count_of_a_paused_event() {
    const READ: u64 = 1 << 4;
    const GROUP: u64 = 1 << 3;
    let mut rig = Rig::new();
    let leader = rig
        .open(&OpenRequest {
            sample_type: READ.into(),
            read_format: GROUP.into(),
            ..sampling(open_of(KIND_MARK, 6, 0), 1)
        })
        .expect("open");
    rig.command(0, COMMAND_ENABLE, leader);
    let member = OpenRequest {
        leader: leader.into(),
        read_format: GROUP.into(),
        ..paused(KIND_TSC, 0)
    };
    let member = between_marks(&mut rig, &member);
    let mut ring = rig.map(leader, 1);
    rig.mark(0, START, 1);
    rig.world.pass(1000);
    rig.mark(0, STOP, 1);
    let counted = rig.value(0, member);
    rig.world.pass(1000);
    rig.mark(0, 6, 1);
    let words = ring.raw().pop().map(|record| record.words);
    assert_eq!(words, Some(vec![2, 1, counted]));
}
