//! Commands on a paused event, and throttling that starts or ends during a pause.

use vpmu::ExitReason;
use vpmu::abi::*;

use super::{START, STOP, between_marks, paused_sampling};
use crate::reader::{Reader, SAMPLE, THROTTLE, UNTHROTTLE};
use crate::rig::{ALL_FEATURES, Rig, limits, thread};
use crate::world::{At, CYCLES};

/// Kind and config of the targets. The device counts marks, and a host counter counts cycles.
const BACKINGS: [(u32, u64); 2] = [(KIND_MARK, 5), CYCLES];

/// Causes `times` cycles and `times` marks, of which the target counts only one kind (see [`BACKINGS`]). Then causes an
/// exit at which the device finds the target's overflows.
fn happen(rig: &Rig, times: u64, ip: u64) {
    rig.world.work(thread(0), times, 4);
    (0..times).for_each(|_| rig.mark(0, 5, ip));
    rig.exit(0, ExitReason::Signal, &mut At(ip));
}

fn ips(ring: &mut Reader) -> Vec<u64> {
    ring.samples().iter().map(|sample| sample.ip).collect()
}

/// Returns a device with an event that samples with period 20. The event has counted 15 and is now paused.
fn paused_after_fifteen(kind: u32, config: u64) -> (Rig, u64, Reader) {
    let mut rig = Rig::new();
    let target = between_marks(&mut rig, &paused_sampling(kind, config, 20));
    let ring = rig.map(target, 4);
    rig.mark(0, START, 1);
    happen(&rig, 15, 1);
    rig.mark(0, STOP, 1);
    (rig, target, ring)
}

#[test]
fn count_reset_in_a_pause_keeps_its_period() {
    for (kind, config) in BACKINGS {
        let (mut rig, target, mut ring) = paused_after_fifteen(kind, config);
        happen(&rig, 100, 2);
        assert_eq!(rig.value(0, target), 15);
        rig.command(0, COMMAND_RESET, target);
        happen(&rig, 100, 3);
        assert_eq!(rig.value(0, target), 0);
        rig.mark(0, START, 1);
        happen(&rig, 5, 4);
        assert_eq!(rig.value(0, target), 5);
        assert_eq!(
            ips(&mut ring),
            [4],
            "15 before the pause and 5 now complete the period"
        );
    }
}

#[test]
fn period_set_in_a_pause_begins_at_its_end() {
    for (kind, config) in BACKINGS {
        let (mut rig, target, mut ring) = paused_after_fifteen(kind, config);
        assert_eq!(rig.valued(0, COMMAND_PERIOD, target, 30), 0);
        happen(&rig, 100, 2);
        rig.mark(0, START, 1);
        happen(&rig, 29, 3);
        happen(&rig, 1, 4);
        assert_eq!(ips(&mut ring), [4], "{kind}");
        assert_eq!(rig.value(0, target), 45);
    }
}

#[test]
fn limit_is_not_used_up_in_a_pause() {
    for (kind, config) in BACKINGS {
        let mut rig = Rig::new();
        let request = OpenRequest {
            flags: OPEN_PAUSED.into(),
            ..paused_sampling(kind, config, 10)
        };
        let target = between_marks(&mut rig, &request);
        let mut ring = rig.map(target, 4);
        assert_eq!(rig.valued(0, COMMAND_REFRESH, target, 1), 0);
        happen(&rig, 50, 1);
        assert_eq!(rig.valued(0, COMMAND_REFRESH, target, 1), 0);
        assert_eq!(rig.read(0, target).state.get(), STATE_ACTIVE);
        rig.mark(0, START, 1);
        happen(&rig, 10, 2);
        happen(&rig, 10, 3);
        happen(&rig, 10, 4);
        assert_eq!(ips(&mut ring), [2, 3]);
        assert_eq!(rig.read(0, target).state.get(), STATE_OFF);
    }
}

#[test]
fn throttle_that_ends_in_a_pause_is_lifted_after_it() {
    let limits = limits().with(|limits| {
        // One record each 10 ms.
        limits.max_sample_rate = 100;
    });
    for (kind, config) in BACKINGS {
        let mut rig = Rig::with(limits.clone(), ALL_FEATURES);
        let target = between_marks(&mut rig, &paused_sampling(kind, config, 10));
        let mut ring = rig.map(target, 4);
        let mut kinds = || -> Vec<u64> {
            let records = ring.raw().into_iter();
            records.map(|record| record.kind).collect()
        };
        rig.world.pass(1_000_000_000);
        rig.mark(0, START, 1);
        happen(&rig, 20, 1);
        rig.mark(0, STOP, 1);
        assert_eq!(kinds(), [SAMPLE, THROTTLE]);
        rig.world.pass(1_000_000_000);
        happen(&rig, 20, 2);
        assert_eq!(kinds(), [UNTHROTTLE]);
        rig.mark(0, START, 1);
        happen(&rig, 10, 3);
        assert_eq!(kinds(), [SAMPLE, THROTTLE]);
    }
}
