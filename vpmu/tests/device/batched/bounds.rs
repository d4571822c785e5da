//! Limits of the batched engine: losses, event limits, rates and memory.

use super::*;

/// VPMU-D-6.6-8.
#[test]
fn records_dropped_by_the_host_are_lost() {
    let mut rig = rig();
    let (event, mut ring) = batched(&mut rig, &cycles(0));
    rig.world.pass(10 * HOLD_BACK);
    rig.world.drop_overflows(thread(0), 17);
    record(&rig, 0, &[5_000_000]);
    rig.vpmu.drain();
    let lost = Record::Lost {
        id: event,
        lost: 17,
    };
    let records = ring.take(usize::MAX);
    assert_eq!(records.len(), 2);
    assert_eq!(records[0], lost);
    assert_eq!(rig.read(0, event).lost.get(), 17);
}

/// VPMU-D-6.6-5.
#[test]
fn limit_is_exact_to_the_record() {
    let mut rig = rig();
    let event = rig.open(&cycles(0)).expect("open");
    let mut ring = rig.map(event, 2);
    let refresh = Command {
        value: 5.into(),
        ..command(COMMAND_REFRESH, event)
    };
    assert_eq!(rig.commands(0, &[refresh])[0].status.get(), 0);
    rig.world.pass(10 * HOLD_BACK);
    rig.post_notice(0, 16);
    record(&rig, 0, &[5_000_000, 4_000_000, 3_000_000]);
    rig.vpmu.drain();
    // With these four overflows, there are seven in total, but the limit is five. The last one is too young to be
    // written.
    record(&rig, 0, &[2_900_000, 2_800_000, 2_700_000, 100]);
    rig.vpmu.drain();
    assert_eq!(ring.samples().len(), 5);
    assert_eq!(rig.notice(), Some((NOTICE_LIMIT, event)));
    assert_eq!(rig.read(0, event).state.get(), STATE_OFF);
    rig.world.pass(10 * HOLD_BACK);
    rig.vpmu.drain();
    assert_eq!(ring.samples(), []);
    assert!(!rig.world.draining());
}

#[test]
fn rate_limit_is_kept() {
    let limits = limits().with(|limits| limits.max_sample_rate = 1000);
    let mut rig = Rig::with(limits, ALL_FEATURES);
    rig.world.know_ips();
    // Advance the clock to the start of a time window of 10 ms. Each window allows ten samples.
    rig.world.pass(100_000_000 - TSC_OFFSET - rig.world.now());
    let (event, ring) = batched(&mut rig, &cycles(0));
    rig.world.pass(5_000_000);
    record(&rig, 0, &[3_000_000; 25]);
    rig.vpmu.drain();
    let metrics = rig.vpmu.metrics();
    assert_eq!(
        (metrics.samples_written, metrics.samples_throttled),
        (10, 15)
    );
    let before = ring.head();
    rig.world.pass(10_000_000);
    rig.vpmu.drain();
    assert!(ring.head() > before, "no unthrottle record is written");
    record(&rig, 0, &[10]);
    rig.read(0, event);
    assert_eq!(rig.vpmu.metrics().samples_written, 11);
}

#[test]
fn throttle_ends_after_the_records_of_its_window() {
    let limits = limits().with(|limits| limits.max_sample_rate = 1000);
    let mut rig = Rig::with(limits, ALL_FEATURES);
    rig.world.know_ips();
    rig.world.pass(100_000_000 - TSC_OFFSET - rig.world.now());
    let (_, mut ring) = batched(&mut rig, &cycles(0));
    rig.world.pass(5_000_000);
    record(&rig, 0, &[3_000_000; 10]);
    rig.vpmu.drain();
    assert_eq!(ring.raw().pop().map(|record| record.kind), Some(THROTTLE));
    // The next time window has just started. The overflow recorded below happened in the previous window, and is still
    // held back.
    rig.world.pass(5_300_000);
    record(&rig, 0, &[HOLD_BACK / 2]);
    rig.vpmu.drain();
    rig.exit(0, ExitReason::Hlt, &mut At(1));
    assert_eq!(ring.raw(), []);
    rig.world.pass(2 * HOLD_BACK);
    rig.vpmu.drain();
    let raw = ring.raw();
    assert_eq!(raw.len(), 1);
    assert_eq!(raw[0].kind, UNTHROTTLE);
    let metrics = rig.vpmu.metrics();
    assert_eq!(
        (metrics.samples_written, metrics.samples_throttled),
        (10, 1),
        "no more samples than allowed"
    );
}

#[test]
fn held_records_of_a_guest_are_bounded() {
    let mut rig = rig();
    let (_, ring) = batched(&mut rig, &cycles(0));
    rig.world.pass(10 * HOLD_BACK);
    // All these records are too young to be written.
    record(&rig, 0, &[HOLD_BACK / 2; 16_384]);
    rig.vpmu.drain();
    assert_eq!(ring.head(), 0);
    record(&rig, 0, &[10]);
    rig.vpmu.drain();
    let metrics = rig.vpmu.metrics();
    assert_eq!(metrics.samples_written + metrics.samples_lost, 16_385);
}
