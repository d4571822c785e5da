//! Limits of the batched engine: losses, event limits, rates and memory.

use vpmu_testkit::{Record, THROTTLE, UNTHROTTLE};

use super::*;

/// VPMU-D-6.6-8.
#[test]
fn records_dropped_by_the_host_are_lost() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(10 * HOLD_BACK);
    fixture.host.drop_overflows(thread(0), 17);
    record(&fixture, 0, &[5_000_000]);
    fixture.vpmu.drain();
    let lost = Record::Lost { id: event, lost: 17 };
    let records = ring.take(usize::MAX);
    assert_eq!(records.len(), 2);
    assert_eq!(records[0], lost);
    assert_eq!(fixture.read(0, event).lost.get(), 17);
}

/// VPMU-D-6.6-5.
#[test]
fn limit_is_exact_to_the_record() {
    let mut fixture = fixture();
    let event = fixture.opened(&cycles(0));
    let mut ring = fixture.map(event, 2);
    let refresh = Command { value: 5.into(), ..command(COMMAND_REFRESH, event) };
    assert_eq!(fixture.commands(0, &[refresh])[0].status.get(), 0);
    fixture.host.pass(10 * HOLD_BACK);
    fixture.post_notice(0, 16);
    record(&fixture, 0, &[5_000_000, 4_000_000, 3_000_000]);
    fixture.vpmu.drain();
    // With these four overflows, there are seven in total, but the limit is five. The last one is too young to be
    // written.
    record(&fixture, 0, &[2_900_000, 2_800_000, 2_700_000, 100]);
    fixture.vpmu.drain();
    assert_eq!(ring.samples().len(), 5);
    assert_eq!(fixture.notice(), Some((NOTICE_LIMIT, event)));
    assert_eq!(fixture.read(0, event).state.get(), STATE_OFF);
    fixture.host.pass(10 * HOLD_BACK);
    fixture.vpmu.drain();
    assert_eq!(ring.samples(), []);
    assert!(!fixture.host.draining());
}

#[test]
fn rate_limit_is_kept() {
    let limits = limits().with(|limits| limits.max_sample_rate = 1000);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    // Advance the clock to the start of a time window of 10 ms. Each window allows ten samples.
    fixture.host.pass(100_000_000 - TSC_OFFSET - fixture.host.now());
    let (event, ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(5_000_000);
    record(&fixture, 0, &[3_000_000; 25]);
    fixture.vpmu.drain();
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_written, metrics.samples_throttled), (10, 15));
    let before = ring.head();
    fixture.host.pass(10_000_000);
    fixture.vpmu.drain();
    assert!(ring.head() > before, "no unthrottle record is written");
    record(&fixture, 0, &[10]);
    fixture.read(0, event);
    assert_eq!(fixture.vpmu.metrics().samples_written, 11);
}

#[test]
fn throttle_ends_after_the_records_of_its_window() {
    let limits = limits().with(|limits| limits.max_sample_rate = 1000);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    fixture.host.pass(100_000_000 - TSC_OFFSET - fixture.host.now());
    let (_, mut ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(5_000_000);
    record(&fixture, 0, &[3_000_000; 10]);
    fixture.vpmu.drain();
    assert_eq!(ring.raw().pop().map(|record| record.kind), Some(THROTTLE));
    // The next time window has just started. The overflow recorded below happened in the previous window, and is still
    // held back.
    fixture.host.pass(5_300_000);
    record(&fixture, 0, &[HOLD_BACK / 2]);
    fixture.vpmu.drain();
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    assert_eq!(ring.raw(), []);
    fixture.host.pass(2 * HOLD_BACK);
    fixture.vpmu.drain();
    let raw = ring.raw();
    assert_eq!(raw.len(), 1);
    assert_eq!(raw[0].kind, UNTHROTTLE);
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_written, metrics.samples_throttled), (10, 1), "no more samples than allowed");
}

#[test]
fn held_records_of_a_guest_are_bounded() {
    let mut fixture = fixture();
    let (_, ring) = batched(&mut fixture, &cycles(0));
    fixture.host.pass(10 * HOLD_BACK);
    // All these records are too young to be written.
    record(&fixture, 0, &[HOLD_BACK / 2; 16_384]);
    fixture.vpmu.drain();
    assert_eq!(ring.head(), 0);
    record(&fixture, 0, &[10]);
    fixture.vpmu.drain();
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.samples_written + metrics.samples_lost, 16_385);
}
