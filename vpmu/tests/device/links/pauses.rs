//! Commands on a paused event, and throttling that starts or ends during a pause.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, At, CYCLES, Fields, Fixture, Reader, SAMPLE, THROTTLE, UNTHROTTLE, limits, thread};

use super::{START, STOP, between_marks, paused_sampling};

/// Kind and config of the targets. The device counts marks, and a host counter counts cycles.
const BACKINGS: [(u32, u64); 2] = [(KIND_MARK, 5), CYCLES];

/// Causes `times` cycles and `times` marks, of which the target counts only one kind (see [`BACKINGS`]). Then causes an
/// exit at which the device finds the target's overflows.
fn count_and_exit(fixture: &Fixture, times: u64, ip: u64) {
    fixture.host.work(thread(0), times, 4);
    (0..times).for_each(|_| fixture.mark(0, 5, ip));
    fixture.exit(0, ExitReason::Signal, &mut At(ip));
}

fn ips(ring: &mut Reader) -> Vec<u64> {
    ring.samples().iter().map(|sample| sample.ip).collect()
}

/// Returns a device with an event that samples with period 20. The event has counted 15 and is now paused.
fn paused_after_fifteen(kind: u32, config: u64) -> (Fixture, u64, Reader) {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused_sampling(kind, config, 20));
    let ring = fixture.map(target, 4);
    fixture.mark(0, START, 1);
    count_and_exit(&fixture, 15, 1);
    fixture.mark(0, STOP, 1);
    (fixture, target, ring)
}

#[test]
fn count_reset_in_a_pause_keeps_its_period() {
    for (kind, config) in BACKINGS {
        let (mut fixture, target, mut ring) = paused_after_fifteen(kind, config);
        count_and_exit(&fixture, 100, 2);
        assert_eq!(fixture.value(0, target), 15);
        fixture.command(0, COMMAND_RESET, target);
        count_and_exit(&fixture, 100, 3);
        assert_eq!(fixture.value(0, target), 0);
        fixture.mark(0, START, 1);
        count_and_exit(&fixture, 5, 4);
        assert_eq!(fixture.value(0, target), 5);
        assert_eq!(ips(&mut ring), [4], "15 before the pause and 5 now complete the period");
    }
}

#[test]
fn period_set_in_a_pause_begins_at_its_end() {
    for (kind, config) in BACKINGS {
        let (mut fixture, target, mut ring) = paused_after_fifteen(kind, config);
        assert_eq!(fixture.valued(0, COMMAND_PERIOD, target, 30), 0);
        count_and_exit(&fixture, 100, 2);
        fixture.mark(0, START, 1);
        count_and_exit(&fixture, 29, 3);
        count_and_exit(&fixture, 1, 4);
        assert_eq!(ips(&mut ring), [4], "{kind}");
        assert_eq!(fixture.value(0, target), 45);
    }
}

#[test]
fn limit_is_not_used_up_in_a_pause() {
    for (kind, config) in BACKINGS {
        let mut fixture = Fixture::new();
        let request = paused_sampling(kind, config, 10).flags(OPEN_PAUSED);
        let target = between_marks(&mut fixture, &request);
        let mut ring = fixture.map(target, 4);
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, target, 1), 0);
        count_and_exit(&fixture, 50, 1);
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, target, 1), 0);
        assert_eq!(fixture.read(0, target).state.get(), STATE_ACTIVE);
        fixture.mark(0, START, 1);
        count_and_exit(&fixture, 10, 2);
        count_and_exit(&fixture, 10, 3);
        count_and_exit(&fixture, 10, 4);
        assert_eq!(ips(&mut ring), [2, 3]);
        assert_eq!(fixture.read(0, target).state.get(), STATE_OFF);
    }
}

#[test]
fn throttle_that_ends_in_a_pause_is_lifted_after_it() {
    let limits = limits().with(|limits| {
        // One record each 10 ms.
        limits.max_sample_rate = 100;
    });
    for (kind, config) in BACKINGS {
        let mut fixture = Fixture::with(limits.clone(), ALL_FEATURES);
        let target = between_marks(&mut fixture, &paused_sampling(kind, config, 10));
        let mut ring = fixture.map(target, 4);
        let mut kinds = || -> Vec<u64> {
            let records = ring.raw().into_iter();
            records.map(|record| record.kind).collect()
        };
        fixture.host.pass(1_000_000_000);
        fixture.mark(0, START, 1);
        count_and_exit(&fixture, 20, 1);
        fixture.mark(0, STOP, 1);
        assert_eq!(kinds(), [SAMPLE, THROTTLE]);
        fixture.host.pass(1_000_000_000);
        count_and_exit(&fixture, 20, 2);
        assert_eq!(kinds(), [UNTHROTTLE]);
        fixture.mark(0, START, 1);
        count_and_exit(&fixture, 10, 3);
        assert_eq!(kinds(), [SAMPLE, THROTTLE]);
    }
}
