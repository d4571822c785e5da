//! Frequencies, and the rate limit that applies to each event.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Raw, SAMPLE, THROTTLE, UNTHROTTLE, limits, open_of, thread,
};

const WINDOW: u64 = 10_000_000;

/// Returns a device whose events each take at most `share` samples per time window. Its clock is at the start of a
/// window.
fn throttled(share: u32) -> Fixture {
    let limits = limits().with(|limits| limits.max_sample_rate = share * 100);
    let fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.pass(100 * WINDOW);
    fixture
}

fn kinds(raw: &[Raw]) -> Vec<u64> {
    raw.iter().map(|record| record.kind).collect()
}

/// VPMU-D-6.6-10.
#[test]
fn throttled_event_is_silent_until_a_later_window() {
    let mut fixture = throttled(5);
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    (0..20).for_each(|_| fixture.mark(0, 5, 1));
    let raw = ring.raw();
    assert_eq!(kinds(&raw), [[SAMPLE; 5].as_slice(), &[THROTTLE]].concat());
    assert_eq!(raw[5].words[1..], [event, event]);
    assert_eq!(raw[5].words[0], raw[4].words[3], "THROTTLE has the time of the last sample");
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (20, 0), "a throttled event still counts");
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 15);
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [0; 0], "the time window has not ended");
    fixture.host.pass(WINDOW);
    // Any exit ends the throttling.
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    let raw = ring.raw();
    assert_eq!(kinds(&raw), [UNTHROTTLE]);
    assert_eq!(raw[0].words[1..], [event, event]);
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    (0..3).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(kinds(&ring.raw()), [SAMPLE; 3]);
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 15);
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_written, metrics.samples_lost), (8, 0));
}

#[test]
fn overflow_that_ends_the_window_is_written() {
    let mut fixture = throttled(2);
    let event = fixture.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1));
    let mut ring = fixture.map(event, 2);
    fixture.command(0, COMMAND_IN, event);
    fixture.command(0, COMMAND_ENABLE, event);
    (0..4).for_each(|_| fixture.mark(0, 5, 1));
    fixture.command(0, COMMAND_OUT, event);
    assert_eq!(kinds(&ring.raw()), [SAMPLE, SAMPLE, THROTTLE]);
    fixture.host.pass(WINDOW);
    fixture.exit(0, ExitReason::Hlt, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [0; 0], "nothing is written for an event that is scheduled out");
    fixture.command(1, COMMAND_IN, event);
    assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
    fixture.mark(1, 5, 1);
    assert_eq!(kinds(&ring.raw()), [SAMPLE]);
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 2);
}

#[test]
fn host_counter_is_silent_while_throttled() {
    let mut fixture = throttled(3);
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    fixture.host.work(thread(0), 500, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [SAMPLE, SAMPLE, SAMPLE, THROTTLE]);
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 2);
    fixture.host.work(thread(0), 10_000, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 2, "the host counter makes no overflows meanwhile");
    // A period that is set during the throttling applies after it.
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 50), 0);
    fixture.host.work(thread(0), 10_000, 4);
    fixture.host.pass(WINDOW);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [SAMPLE, SAMPLE]);
    assert_eq!(fixture.value(0, event), 20_600);
}

#[test]
fn frequency_is_reached_at_any_event_rate() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_MARK, 5, 0).sampled(1000).flags(OPEN_FREQ | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 64);
    for gap in [2_000, 50_000, 10_000] {
        let second = |fixture: &Fixture| {
            (0..1_000_000_000 / gap).for_each(|_| {
                fixture.host.pass(gap);
                fixture.mark(0, 5, 1);
            });
        };
        second(&fixture);
        ring.samples();
        second(&fixture);
        let samples = ring.samples();
        assert!(
            (850..=1150).contains(&samples.len()),
            "{} samples in a second with a mark each {gap} ns",
            samples.len()
        );
        let periods: u64 = samples.iter().map(|sample| sample.period).sum();
        let marks = 1_000_000_000 / gap;
        assert!(periods.abs_diff(marks) < marks / 10, "the periods add up to {periods}, not to about {marks} marks");
    }
}

#[test]
fn new_frequency_is_kept() {
    let limits = limits().with(|limits| limits.max_sample_rate = 10_000);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let request = open_of(KIND_MARK, 5, 0).sampled(1000).flags(OPEN_FREQ | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 64);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 10_001), libc::EINVAL);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 0), libc::EINVAL);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 100), 0);
    for _ in 0..200_000 {
        fixture.host.pass(10_000);
        fixture.mark(0, 5, 1);
    }
    let samples = ring.samples().len();
    assert!((180..300).contains(&samples), "{samples} samples in two seconds, not about 200");
}

#[test]
fn host_counter_adapts_its_own_period() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let request = open_of(kind, config, 0).sampled(250).flags(OPEN_FREQ | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 2);
    assert_eq!(fixture.host.frequencies(), [250]);
    // A real host would adapt the period. The simulated host uses the frequency as a fixed period.
    fixture.host.work(thread(0), 500, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    let periods: Vec<u64> = ring.samples().iter().map(|sample| sample.period).collect();
    assert_eq!(periods, [250, 250], "the periods of the host's records");
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 125), 0);
    assert_eq!(fixture.host.frequencies(), [125]);
}

/// VPMU-D-6.4-4.
#[test]
fn rate_refused_by_the_host_changes_nothing() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let request = open_of(kind, config, 0).sampled(250).flags(OPEN_FREQ | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let mut ring = fixture.map(event, 2);
    fixture.host.refuse_rates();
    assert_eq!(
        fixture.valued(0, COMMAND_PERIOD, event, 100_000),
        libc::EINVAL,
        "the host refuses a frequency that the operator allows"
    );
    assert_eq!(fixture.read(0, event).state.get(), STATE_ACTIVE);
    fixture.host.work(thread(0), 500, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(ring.samples().len(), 2);
}

/// VPMU-D-6.6-10.
#[test]
fn throttle_of_an_event_ends_though_the_vcpu_never_leaves_the_guest() {
    let mut fixture = throttled(3);
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 2);
    assert!(!fixture.host.draining());
    fixture.host.work(thread(0), 300, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [SAMPLE, SAMPLE, SAMPLE, THROTTLE]);
    assert!(fixture.host.draining(), "no drain will end the throttle if the vCPU does not exit");
    fixture.vpmu.drain();
    assert_eq!(kinds(&ring.raw()), [0; 0]);
    fixture.host.pass(WINDOW);
    fixture.vpmu.drain();
    assert_eq!(kinds(&ring.raw()), [UNTHROTTLE]);
    assert!(!fixture.host.draining());
    fixture.host.work(thread(0), 200, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(kinds(&ring.raw()), [SAMPLE, SAMPLE]);
}
