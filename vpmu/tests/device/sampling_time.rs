//! The share of a vCPU's time that samples may take in each time window. When the share is used up, events whose
//! samples cause exits are throttled until the next time window.

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow, Rate};
use vpmu::{Engines, Error, ExitReason, LimitsError, Persist, RawEvents, Settings, Vpmu};
use vpmu_testkit::{
    ALL_FEATURES, At, CLOCK, CYCLES, FAULTS, FakeMachine, FakeSource, Fields, Fixture, Raw, Reader, SAMPLE, THROTTLE,
    UNTHROTTLE, VCPUS, limits, open_of, thread, window,
};

const WINDOW: u64 = 10_000_000;
/// Number of ticks that a sample takes: a hundredth of a window, so that 25 samples use up a quarter of a window. The
/// other 100 ticks make up for clock reads. Each of them takes a tick that is not charged to the sample.
const COST: u64 = 100_100;
/// The period of a throttled host counter. It is so long that the counter never overflows.
const NEVER: u64 = u64::MAX >> 1;

/// Returns a device that allows samples to take a quarter of the time. Its clock is at the start of a window.
fn fixture() -> Fixture {
    rig_of(25, Engines::Auto)
}

fn rig_of(percent: u32, engines: Engines) -> Fixture {
    let limits = limits().with(|limits| limits.max_sampling_percent = percent);
    let fixture = Fixture::with_engines(engines, limits, ALL_FEATURES);
    begin_window(&fixture);
    fixture
}

/// Advances the clock to the start of the next window.
fn begin_window(fixture: &Fixture) {
    // Windows start at multiples of `WINDOW` in guest time, which is ahead of the host's TSC.
    let left = WINDOW - (fixture.host.now() + vpmu_testkit::TSC_OFFSET) % WINDOW;
    fixture.host.pass(left);
}

/// Opens and enables an event that samples with a host counter, and maps its ring.
fn started(fixture: &mut Fixture, (kind, config): (u32, u64), vcpu: u32) -> (u64, Reader) {
    let event = fixture.opened(&open_of(kind, config, vcpu).sampled(100));
    let ring = fixture.map(event, 64);
    fixture.command(vcpu, COMMAND_ENABLE, event);
    (event, ring)
}

/// Makes each counter of the vCPU overflow after the vCPU has been in the guest for `inside` ticks. Then makes the vCPU
/// leave the guest, and enter it again `cost` ticks later.
fn overflow(fixture: &Fixture, vcpu: u32, inside: u64, cost: u64) {
    work(fixture, inside);
    let overflow = Overflow { tsc: fixture.host.now(), ip: 0, mode: Mode::Host, period: 100 };
    fixture.host.record(thread(vcpu), overflow);
    fixture.vcpus.leave(vcpu, ExitReason::Signal, &mut At(1));
    work(fixture, cost);
    fixture.vcpus.enter(vcpu);
}

/// Advances the clock by `ticks`. Charges these ticks to the vCPU's thread as CPU time.
fn work(fixture: &Fixture, ticks: u64) {
    fixture.host.pass(ticks);
    fixture.host.spend(ticks);
}

fn kinds(raw: &[Raw]) -> Vec<u64> {
    raw.iter().map(|record| record.kind).collect()
}

fn samples_then(samples: usize, last: u64) -> Vec<u64> {
    let mut kinds = vec![SAMPLE; samples];
    kinds.push(last);
    kinds
}

#[test]
fn samples_that_take_their_share_are_throttled_until_the_next_window() {
    let mut fixture = fixture();
    let (event, mut ring) = started(&mut fixture, CYCLES, 0);
    (0..40).for_each(|_| overflow(&fixture, 0, 1000, COST));
    let raw = ring.raw();
    assert_eq!(kinds(&raw), samples_then(25, THROTTLE));
    assert_eq!(raw[25].words[1..], [event, event]);
    assert_eq!(fixture.host.periods(), [NEVER]);
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.samples_written, 25);
    assert_eq!((metrics.samples_throttled, metrics.samples_lost), (15, 0));
    assert_eq!(metrics.sampling_throttles, 1);
    begin_window(&fixture);
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    let raw = ring.raw();
    assert_eq!(kinds(&raw), [UNTHROTTLE]);
    assert_eq!(raw[0].words[1..], [event, event]);
    assert_eq!(fixture.host.periods(), [100]);
    // The previous window had 40 samples, but its share was 25. The other 15 samples are charged to this window, which
    // has room for only 10 more.
    (0..40).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&ring.raw()), samples_then(10, THROTTLE));
    assert_eq!(fixture.vpmu.metrics().sampling_throttles, 2);
}

/// VPMU-D-6.6-14.
#[test]
fn storm_leaves_the_guest_three_quarters_of_each_window() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CLOCK, 0);
    let (begin, mut inside) = (fixture.host.now(), 0);
    while fixture.host.now() < begin + 100 * WINDOW {
        match fixture.host.periods()[0] {
            // The event is not throttled, so it overflows as soon as the vCPU is back in the guest.
            100 => overflow(&fixture, 0, 0, COST),
            _ => {
                inside += WINDOW / 100;
                work(&fixture, WINDOW / 100);
                fixture.exit(0, ExitReason::Hlt, &mut At(1));
            }
        }
    }
    let all = fixture.host.now() - begin;
    let metrics = fixture.vpmu.metrics();
    assert!(inside >= all * 74 / 100, "only {inside} of {all} ticks in the guest");
    assert!(
        metrics.sampling_time.abs_diff(all / 4) < all / 100,
        "samples did not take a quarter of {all} ticks: {metrics:?}"
    );
    assert!((99..=101).contains(&metrics.sampling_throttles), "not about 100 throttles: {metrics:?}");
    let raw = kinds(&ring.raw());
    let count = |kind| raw.iter().filter(|&&found| found == kind).count() as u64;
    assert_eq!(count(SAMPLE), metrics.samples_written);
    assert_eq!(count(THROTTLE), metrics.sampling_throttles);
    assert!(count(THROTTLE) - count(UNTHROTTLE) <= 1);
    assert!(count(SAMPLE) * COST <= all / 4 + WINDOW, "{} samples take more than their share", count(SAMPLE));
}

#[test]
fn time_in_the_guest_before_an_overflow_is_free() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    // Each sample takes `COST` ticks after 4 * `COST` ticks in the guest. Samples therefore take a fifth of the time,
    // which is less than their share.
    (0..200).for_each(|_| overflow(&fixture, 0, 4 * COST, COST));
    assert_eq!(kinds(&ring.raw()), [SAMPLE; 200]);
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.sampling_throttles, 0);
    let taken = metrics.sampling_time;
    // Only 199 samples have been charged so far, because the device charges each sample at the next exit.
    assert!((199 * (COST - 20)..=199 * COST).contains(&taken), "{taken} ticks charged for 199 samples");
}

#[test]
fn time_that_the_host_gives_to_others_is_free() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    for _ in 0..200 {
        fixture.host.pass(1000);
        let overflow = Overflow { tsc: fixture.host.now(), ip: 0, mode: Mode::Host, period: 100 };
        fixture.host.record(thread(0), overflow);
        // The thread is preempted before the exit, and again while the exit is handled. It gets no CPU time while it is
        // preempted.
        fixture.host.pass(WINDOW);
        fixture.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        fixture.host.pass(WINDOW);
        fixture.host.spend(COST);
        fixture.vcpus.enter(0);
    }
    assert_eq!(kinds(&ring.raw()), [SAMPLE; 200]);
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.sampling_throttles, 0);
    assert!(metrics.sampling_time <= 200 * COST, "more time charged than 200 samples take: {metrics:?}");
}

#[test]
fn overflow_from_before_the_entry_charges_the_whole_visit() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    for _ in 0..40 {
        let overflow = Overflow { tsc: fixture.host.now() - 1, ip: 0, mode: Mode::Host, period: 100 };
        fixture.host.record(thread(0), overflow);
        work(&fixture, COST / 2);
        fixture.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        work(&fixture, COST / 2);
        fixture.vcpus.enter(0);
    }
    assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
}

#[test]
fn guests_own_exit_is_free_though_it_finds_an_overflow() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    for _ in 0..100 {
        fixture.host.work(thread(0), 100, 4);
        fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
        work(&fixture, COST);
        fixture.vcpus.enter(0);
    }
    assert_eq!(kinds(&ring.raw()), [SAMPLE; 100]);
    assert_eq!(fixture.vpmu.metrics().sampling_time, 0);
}

#[test]
fn all_clocks_of_a_vcpu_are_throttled_together() {
    let mut fixture = fixture();
    let (_, mut first) = started(&mut fixture, CYCLES, 0);
    let frequent = fixture.opened(&open_of(CLOCK.0, CLOCK.1, 0).sampled(250).flags(OPEN_FREQ | OPEN_ENABLED));
    let mut second = fixture.map(frequent, 64);
    let (_, mut elsewhere) = started(&mut fixture, CYCLES, 1);
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    for ring in [&mut first, &mut second] {
        assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
    }
    assert_eq!(fixture.host.periods(), [NEVER, 100], "the other vCPU's clock continues");
    assert_eq!(fixture.host.frequencies(), [1]);
    // A frequency that is set during the throttling applies after it.
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, frequent, 125), 0);
    assert_eq!(fixture.host.frequencies(), [1]);
    (0..5).for_each(|_| overflow(&fixture, 1, 1000, COST));
    assert_eq!(kinds(&elsewhere.raw()), [SAMPLE; 5]);
    begin_window(&fixture);
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    for ring in [&mut first, &mut second] {
        assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
    }
    assert_eq!(fixture.host.periods(), [100, 100]);
    assert_eq!(fixture.host.frequencies(), [125]);
}

#[test]
fn throttle_ends_though_the_vcpu_never_leaves_the_guest() {
    let mut fixture = fixture();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
    assert!(fixture.host.draining());
    fixture.vpmu.drain();
    assert_eq!(kinds(&ring.raw()), [0; 0]);
    begin_window(&fixture);
    fixture.vpmu.drain();
    assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
    assert!(!fixture.host.draining());
}

#[test]
fn event_started_in_a_used_up_window_makes_no_sample() {
    let mut fixture = fixture();
    let (event, mut ring) = started(&mut fixture, CYCLES, 0);
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    ring.raw();
    fixture.command(0, COMMAND_DISABLE, event);
    let (_, mut newer) = started(&mut fixture, CLOCK, 0);
    (0..3).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&newer.raw()), [THROTTLE]);
    // The event was throttled before it was disabled. It is still throttled after it is enabled again.
    fixture.command(0, COMMAND_ENABLE, event);
    overflow(&fixture, 0, 1000, COST);
    assert_eq!(kinds(&ring.raw()), [0; 0]);
}

#[test]
fn counts_and_marks_continue_while_clocks_are_throttled() {
    let mut fixture = fixture();
    let (event, mut ring) = started(&mut fixture, CYCLES, 0);
    let marks = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    let mut of_marks = fixture.map(marks, 64);
    let faults = fixture.opened(&open_of(FAULTS.0, FAULTS.1, 0));
    fixture.command(0, COMMAND_ENABLE, marks);
    fixture.command(0, COMMAND_ENABLE, faults);
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
    fixture.host.work(thread(0), 70, 4);
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(kinds(&of_marks.raw()), [SAMPLE; 100]);
    assert_eq!(fixture.value(0, faults), 70);
    assert_eq!(fixture.value(0, event), 70, "a throttled event still counts");
}

#[test]
fn marks_start_and_stop_a_throttled_clock() {
    let mut fixture = fixture();
    let paused = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_PAUSED | OPEN_ENABLED);
    let target = fixture.opened(&paused);
    let mut ring = fixture.map(target, 64);
    for (value, role) in [(1, LINK_STARTER), (2, LINK_STOPPER)] {
        let mark = fixture.opened(&open_of(KIND_MARK, value, 0).sampled(1).flags(OPEN_ENABLED));
        fixture.link(mark, target, role).expect("linked");
    }
    fixture.mark(0, 1, 1);
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
    fixture.mark(0, 2, 1);
    fixture.host.work(thread(0), 1000, 4);
    fixture.mark(0, 1, 1);
    fixture.host.work(thread(0), 30, 4);
    fixture.mark(0, 2, 1);
    fixture.host.work(thread(0), 1000, 4);
    assert_eq!(fixture.value(0, target), 30);
}

#[test]
fn late_overflow_of_a_throttled_clock_still_acts() {
    let mut fixture = fixture();
    let (starter, mut ring) = started(&mut fixture, CYCLES, 0);
    let target = fixture.opened(&open_of(KIND_MARK, 5, 0).flags(OPEN_PAUSED | OPEN_ENABLED));
    (0..26).for_each(|_| overflow(&fixture, 0, 1000, COST));
    assert_eq!(kinds(&ring.raw()), samples_then(25, THROTTLE));
    fixture.link(starter, target, LINK_STARTER).expect("linked");
    fixture.mark(0, 5, 1);
    // Simulate an overflow that was pending when the counter was throttled. The device starts the target, but does not
    // write a sample.
    overflow(&fixture, 0, 1000, COST);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 1);
    assert_eq!(kinds(&ring.raw()), [0; 0]);
}

#[test]
fn operators_samples_are_neither_charged_nor_throttled() {
    let limits = limits().with(|limits| limits.max_sampling_percent = 25);
    let fixture = Fixture::windowed_with(limits, &window(64));
    begin_window(&fixture);
    let persist = Persist { rate: Some(Rate::Period(100)), ..crate::persistent::asked("cycles", 0) };
    fixture.vpmu.persist(&persist).expect("started");
    (0..40).for_each(|_| overflow(&fixture, 0, 1000, COST));
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.samples_written, 40);
    assert_eq!((metrics.sampling_time, metrics.sampling_throttles), (0, 0));
}

#[test]
fn batched_samples_take_the_vcpu_no_time() {
    let mut fixture = rig_of(25, Engines::Batched);
    fixture.host.know_ips();
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    (0..40).for_each(|_| overflow(&fixture, 0, 1000, COST));
    fixture.vpmu.drain();
    assert_eq!(fixture.vpmu.metrics().sampling_time, 0);
    assert!(!kinds(&ring.raw()).contains(&THROTTLE));
}

#[test]
fn hundred_percent_throttles_nothing() {
    let mut fixture = rig_of(100, Engines::Auto);
    let (_, mut ring) = started(&mut fixture, CYCLES, 0);
    (0..200).for_each(|_| overflow(&fixture, 0, 0, COST));
    assert_eq!(kinds(&ring.raw()), [SAMPLE; 200]);
    assert!(fixture.vpmu.metrics().sampling_time >= 199 * (COST - 20));
}

#[test]
fn share_beyond_the_whole_is_refused() {
    for (percent, refused) in [
        (0, LimitsError::Zero("max_sampling_percent")),
        (101, LimitsError::Percent { limit: "max_sampling_percent", given: 101 }),
    ] {
        let host = std::sync::Arc::default();
        let settings =
            Settings::new(VCPUS, 1_000_000).with_limits(limits().with(|limits| limits.max_sampling_percent = percent));
        let source = Box::new(FakeSource::new(&host, &RawEvents::default()));
        let made = Vpmu::new(settings, std::sync::Arc::new(FakeMachine(host)), source);
        match made {
            Err(Error::Limits(error)) => assert_eq!(error, refused),
            other => panic!("{other:?}"),
        }
    }
}
