//! Targets count and record exactly the work between a start and a stop.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, open_of};

use super::{START, STOP, between_marks, paused, paused_sampling, trigger};

const WORK: u32 = 5;

/// Starts and stops a region ten thousand times. Calls `work` before, inside and after each region, and returns the
/// number of calls inside regions.
fn regions(fixture: &Fixture, mut work: impl FnMut(&Fixture)) -> u64 {
    let mut inside = 0;
    for region in 0..10_000 {
        work(fixture);
        fixture.mark(0, START, 1);
        for _ in 0..region % 5 {
            work(fixture);
            inside += 1;
        }
        fixture.mark(0, STOP, 1);
        work(fixture);
    }
    inside
}

#[test]
fn marks_are_exact_in_ten_thousand_regions() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(KIND_MARK, WORK.into()));
    let user = open_of(KIND_EXITS, EXIT_IO, 0).flags(OPEN_ENABLED | OPEN_PAUSED | OPEN_EXCLUDE_KERNEL);
    let user = between_marks(&mut fixture, &user);
    let inside = regions(&fixture, |fixture| {
        fixture.mark(0, WORK, 1);
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.exit(0, ExitReason::Io, &mut At(u64::MAX));
    });
    assert_eq!((fixture.value(0, target), inside), (20_000, 20_000));
    assert_eq!(fixture.value(0, user), inside);
}

#[test]
fn exits_are_exact_in_ten_thousand_regions() {
    let mut fixture = Fixture::new();
    let [io, all] = [EXIT_IO, EXIT_USER].map(|config| {
        let request = paused(KIND_EXITS, config);
        between_marks(&mut fixture, &request)
    });
    let inside = regions(&fixture, |fixture| fixture.exit(0, ExitReason::Io, &mut At(1)));
    assert_eq!(fixture.value(0, io), inside);
    // Each region also counts the exit that its stopping mark causes, but not the exit that its starting mark causes.
    assert_eq!(fixture.value(0, all), inside + 10_000);
}

/// VPMU-D-6.11-1.
#[test]
fn mark_counts_in_the_event_that_it_stops_and_not_in_the_one_that_it_starts() {
    let mut fixture = Fixture::new();
    let any = between_marks(&mut fixture, &paused(KIND_MARK, MARK_ANY));
    for _ in 0..100 {
        fixture.mark(0, START, 1);
        fixture.mark(0, START, 1);
        fixture.mark(0, STOP, 1);
        fixture.mark(0, STOP, 1);
    }
    assert_eq!(fixture.value(0, any), 200, "each region counts its second starting mark and its first stopping mark");
}

/// VPMU-D-6.11-2.
#[test]
fn sampling_target_records_only_between_start_and_stop() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused_sampling(KIND_EXITS, EXIT_IO, 3));
    let mut ring = fixture.map(target, 4);
    let exits = |fixture: &Fixture, ips: std::ops::Range<u64>| {
        ips.for_each(|ip| fixture.exit(0, ExitReason::Io, &mut At(ip)));
    };
    exits(&fixture, 0..10);
    fixture.mark(0, START, 1);
    exits(&fixture, 10..14);
    fixture.mark(0, STOP, 1);
    exits(&fixture, 14..30);
    fixture.mark(0, START, 1);
    exits(&fixture, 30..34);
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [12, 31], "the second period has one exit before the pause and two after it");
    assert_eq!(fixture.value(0, target), 8);
}

#[test]
fn stop_at_the_targets_own_overflow_is_recorded_by_both() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused_sampling(KIND_EXITS, EXIT_IO, 1));
    let start = trigger(&mut fixture, START, 1);
    fixture.link(start, target, LINK_STARTER).expect("linked");
    // The stopper is opened after the target. Therefore the stopper's overflow takes effect after the target's
    // overflow.
    let stop = fixture.opened(&paused_sampling(KIND_EXITS, EXIT_IO, 1).flags(OPEN_ENABLED));
    fixture.link(stop, target, LINK_STOPPER).expect("linked");
    let rings = [target, stop].map(|id| fixture.map(id, 4));
    fixture.mark(0, START, 1);
    for ip in 1..4 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    let [own, stopper] = rings.map(|mut ring| {
        let samples = ring.samples();
        samples.iter().map(|sample| sample.ip).collect::<Vec<_>>()
    });
    assert_eq!((own, stopper), (vec![1], vec![1, 2, 3]));
}

#[test]
fn chained_links_act_in_order() {
    let mut fixture = Fixture::new();
    // The mark starts a counter of exits. This counter overflows at its third exit and starts another counter.
    let last = fixture.opened(&paused(KIND_MARK, WORK.into()));
    let middle = fixture.opened(&paused_sampling(KIND_EXITS, EXIT_IO, 3));
    let first = trigger(&mut fixture, START, 1);
    fixture.link(first, middle, LINK_STARTER).expect("linked");
    fixture.link(middle, last, LINK_STARTER).expect("linked");
    let mut seen = Vec::new();
    for _ in 0..5 {
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.mark(0, WORK, 1);
        seen.push(fixture.value(0, last));
    }
    assert_eq!(seen, [0; 5]);
    fixture.mark(0, START, 1);
    seen.clear();
    for _ in 0..5 {
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.mark(0, WORK, 1);
        seen.push(fixture.value(0, last));
    }
    assert_eq!(seen, [0, 0, 1, 2, 3]);
}

#[test]
fn one_event_starts_many() {
    let mut fixture = Fixture::new();
    let start = trigger(&mut fixture, START, 1);
    let targets: Vec<u64> = (0..100)
        .map(|_| {
            let target = fixture.opened(&paused(KIND_MARK, WORK.into()));
            fixture.link(start, target, LINK_STARTER).expect("linked");
            target
        })
        .collect();
    fixture.mark(0, WORK, 1);
    fixture.mark(0, START, 1);
    fixture.mark(0, WORK, 1);
    assert!(targets.iter().all(|&id| fixture.value(0, id) == 1));
}

#[test]
fn starter_that_is_also_the_stopper_toggles() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_EXITS, EXIT_IO));
    let toggle = fixture.opened(&paused_sampling(KIND_EXITS, EXIT_IO, 10).flags(OPEN_ENABLED));
    for role in [LINK_STARTER, LINK_STOPPER] {
        fixture.link(toggle, target, role).expect("linked");
    }
    let mut counts = Vec::new();
    for _ in 0..6 {
        for _ in 0..10 {
            fixture.exit(0, ExitReason::Io, &mut At(1));
        }
        counts.push(fixture.value(0, target));
    }
    // The target counts during every second interval of ten exits.
    assert_eq!(counts, [0, 10, 10, 20, 20, 30]);
}

#[test]
fn every_nth_region() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, WORK.into()));
    let starter = trigger(&mut fixture, START, 4);
    let stopper = trigger(&mut fixture, STOP, 1);
    fixture.link(starter, target, LINK_STARTER).expect("linked");
    fixture.link(stopper, target, LINK_STOPPER).expect("linked");
    let mut counts = Vec::new();
    for region in 1..=10_000_u64 {
        fixture.mark(0, START, 1);
        (0..region % 7).for_each(|_| fixture.mark(0, WORK, 1));
        fixture.mark(0, STOP, 1);
        if region % 1000 == 0 {
            counts.push(fixture.value(0, target));
        }
    }
    let expected: Vec<u64> = (1..=10)
        .map(|thousands| {
            let fourth = (1..=thousands * 1000).filter(|region| region % 4 == 0);
            fourth.map(|region| region % 7).sum()
        })
        .collect();
    assert_eq!(counts, expected);
}
