//! Limits that all events of a guest share: limits on host counters, clocks, samples and record bytes.

use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{Engines, ExitReason, Persist};
use vpmu_testkit::{ALL_FEATURES, At, CLOCK, CYCLES, Fields, Fixture, command, limits, open_of, thread, window};

use crate::persistent::asked;

/// perf's `PERF_RECORD_THROTTLE`.
const THROTTLE: u64 = 5;
/// The time window to which the budgets apply, in nanoseconds.
const WINDOW: u64 = 10_000_000;

/// Returns a request for an enabled event on `vcpu` that samples with a host counter.
fn cycles(vcpu: u32) -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, vcpu).sampled(1000).flags(OPEN_ENABLED)
}

fn state(fixture: &mut Fixture, event: u64) -> i32 {
    fixture.read(0, event).state.get()
}

/// VPMU-D-6.1-2, VPMU-D-6.6-11.
#[test]
fn counter_beyond_the_vcpus_limit_waits_for_a_place() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 2), ALL_FEATURES);
    let events = [(); 4].map(|()| fixture.opened(&cycles(0)));
    let elsewhere = fixture.open(&cycles(1)).expect("each vCPU has its own limit");
    assert_eq!(fixture.host.running(thread(0)), 2);
    assert_eq!(fixture.host.running(thread(1)), 1);
    fixture.host.work(thread(0), 100, 4);
    fixture.host.work(thread(1), 100, 4);
    fixture.host.pass(500);
    assert_eq!(events.map(|event| fixture.value(0, event)), [100, 100, 0, 0]);
    assert_eq!(fixture.value(1, elsewhere), 100);
    let waits = fixture.read(0, events[2]);
    assert_eq!(waits.state.get(), STATE_INACTIVE);
    assert_eq!(waits.time_running.get(), 0);
    assert!(waits.time_enabled.get() >= 500, "a waiting event is not enabled all the time: {waits:?}");
    assert_eq!(fixture.vpmu.metrics().counter_waits, 2);
    // When a counter becomes free, the event that has waited longest gets it.
    fixture.command(0, COMMAND_DISABLE, events[0]);
    assert_eq!(fixture.host.running(thread(0)), 2);
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(events.map(|event| fixture.value(0, event)), [100, 200, 100, 0]);
    assert_eq!(state(&mut fixture, events[3]), STATE_INACTIVE);
    fixture.close(events[1]).expect("closed");
    assert_eq!(state(&mut fixture, events[3]), STATE_ACTIVE);
}

#[test]
fn waiting_event_stops_pauses_and_closes() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 1), ALL_FEATURES);
    let first = fixture.opened(&cycles(0));
    let second = fixture.opened(&cycles(0));
    let mark = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    fixture.link(mark, second, LINK_STOPPER).expect("linked");
    // The mark pauses the second event while it waits for a counter. The event must then no longer be in the queue of
    // waiting events.
    fixture.mark(0, 5, 1);
    fixture.command(0, COMMAND_DISABLE, first);
    assert_eq!(fixture.host.running(thread(0)), 0);
    fixture.command(0, COMMAND_ENABLE, first);
    fixture.host.work(thread(0), 10, 4);
    assert_eq!([first, second].map(|event| fixture.value(0, event)), [10, 0]);
    fixture.command(0, COMMAND_DISABLE, second);
    assert_eq!(fixture.host.running(thread(0)), 1);
    fixture.command(0, COMMAND_ENABLE, second);
    fixture.close(second).expect("closed");
    fixture.close(first).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

/// VPMU-D-6.6-11.
#[test]
fn event_that_waits_again_goes_to_the_end() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 1), ALL_FEATURES);
    let [first, again, waiting] = [(); 3].map(|()| fixture.opened(&cycles(0)));
    fixture.command(0, COMMAND_DISABLE, again);
    fixture.command(0, COMMAND_ENABLE, again);
    fixture.command(0, COMMAND_DISABLE, first);
    let states = [again, waiting].map(|event| state(&mut fixture, event));
    assert_eq!(states, [STATE_INACTIVE, STATE_ACTIVE]);
    fixture.command(0, COMMAND_DISABLE, waiting);
    assert_eq!(state(&mut fixture, again), STATE_ACTIVE);
}

/// VPMU-D-7-3.
#[test]
fn waits_that_ended_cost_nothing() {
    const WAITS: u64 = 1000;
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 1), ALL_FEATURES);
    let [first, _second, third] = [(); 3].map(|()| fixture.opened(&cycles(0)));
    for _ in 0..WAITS {
        fixture.command(0, COMMAND_DISABLE, third);
        fixture.command(0, COMMAND_ENABLE, third);
    }
    let before = fixture.vpmu.metrics();
    assert_eq!(before.counter_waits, 2 + WAITS);
    fixture.command(0, COMMAND_DISABLE, first);
    let work = fixture.vpmu.metrics().work.operations - before.work.operations;
    assert!(work < 20, "{work} operations for one free counter");
}

#[test]
fn paused_event_holds_no_place() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 1), ALL_FEATURES);
    let paused = cycles(0).flags(OPEN_ENABLED | OPEN_PAUSED);
    let regions = [(); 3].map(|()| fixture.opened(&paused));
    for (value, region) in (5..).step_by(2).zip(regions) {
        for (value, role) in [(value, LINK_STARTER), (value + 1, LINK_STOPPER)] {
            let mark = fixture.opened(&open_of(KIND_MARK, value, 0).sampled(1).flags(OPEN_ENABLED));
            fixture.link(mark, region, role).expect("linked");
        }
    }
    for value in [5, 6, 7, 8, 9] {
        fixture.mark(0, value, 1);
        fixture.host.work(thread(0), 100, 4);
    }
    assert_eq!(regions.map(|region| fixture.value(0, region)), [100, 100, 100]);
    assert_eq!(fixture.vpmu.metrics().counter_waits, 0);
    // A target that is started while another target counts must wait until the other target stops.
    fixture.mark(0, 5, 1);
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(state(&mut fixture, regions[0]), STATE_INACTIVE);
    fixture.mark(0, 10, 1);
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(regions.map(|region| fixture.value(0, region)), [200, 100, 200]);
}

#[test]
fn pinned_event_does_not_wait() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_active_counters = 1), ALL_FEATURES);
    fixture.opened(&cycles(0));
    let pinned = fixture.opened(&cycles(0).flags(OPEN_PINNED));
    let reply = fixture.command(0, COMMAND_ENABLE, pinned);
    assert_eq!(reply.status.get(), libc::ENOSPC.unsigned_abs());
    assert_eq!(state(&mut fixture, pinned), STATE_ERROR);
}

/// VPMU-D-6.4-4.
#[test]
fn clocks_of_a_vcpu_share_its_interrupts() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_sample_rate = 1000), ALL_FEATURES);
    let clock = |period: u64, flags: u32| open_of(CLOCK.0, CLOCK.1, 0).sampled(period).flags(OPEN_ENABLED | flags);
    // 600, 500 and 300 samples a second.
    let fast = fixture.opened(&clock(600, OPEN_FREQ));
    let slow = fixture.opened(&clock(2_000_000, 0));
    let third = fixture.opened(&clock(300, OPEN_FREQ));
    let states = [fast, slow, third].map(|event| state(&mut fixture, event));
    assert_eq!(states, [STATE_ACTIVE, STATE_INACTIVE, STATE_ACTIVE]);
    // Raising the frequency would exceed the limit. Lowering it makes room for other clocks.
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, fast, 701), libc::ENOSPC);
    assert_eq!(fixture.host.frequencies(), [600, 300]);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, fast, 200), 0);
    assert_eq!(state(&mut fixture, slow), STATE_ACTIVE);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, fast, 201), libc::ENOSPC);
}

/// VPMU-D-6.4-4.
#[test]
fn clock_that_waits_starts_when_its_own_rate_has_room() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_sample_rate = 1000), ALL_FEATURES);
    let [fast, waiting] = [600, 500].map(|frequency| {
        let clock = open_of(CLOCK.0, CLOCK.1, 0).sampled(frequency);
        let flags = (OPEN_ENABLED | OPEN_FREQ).into();
        fixture.opened(&OpenRequest { flags, ..clock })
    });
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, waiting, 401), 0);
    let states = [fast, waiting].map(|event| state(&mut fixture, event));
    assert_eq!(states, [STATE_ACTIVE, STATE_INACTIVE]);
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, waiting, 400), 0);
    assert_eq!(state(&mut fixture, waiting), STATE_ACTIVE);
    assert_eq!(fixture.host.frequencies(), [600, 400]);
}

#[test]
fn hardware_periods_have_a_floor() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.min_hardware_period = 5000), ALL_FEATURES);
    let of = |period| open_of(CYCLES.0, CYCLES.1, 0).sampled(period);
    assert_eq!(fixture.open(&of(4999)), Err(libc::EOPNOTSUPP));
    let event = fixture.opened(&of(5000));
    assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 4999), libc::EINVAL);
    let paced = |period: u64| of(0).kind(KIND_SAMPLE_TRACE).config(PACE_CYCLES).period(period);
    assert_eq!(fixture.open(&paced(4999)), Err(libc::EOPNOTSUPP));
    fixture.opened(&paced(5000));
    fixture.open(&open_of(KIND_MARK, 5, 0).sampled(1)).expect("the shortest period does not apply to marks");
}

#[test]
fn host_counters_are_limited_over_all_vcpus() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_host_counters = 3), ALL_FEATURES);
    let task = cycles(0).context(CONTEXT_TASK);
    let moving = fixture.opened(&task);
    // As long as the limit allows, a task event has a counter on each vCPU where its task has run.
    for vcpu in [0, 1] {
        fixture.command(vcpu, COMMAND_IN, moving);
        fixture.host.work(thread(vcpu), 10, 4);
        fixture.command(vcpu, COMMAND_OUT, moving);
    }
    assert_eq!(fixture.host.open_counters(), 2);
    let second = fixture.opened(&task);
    assert_eq!(fixture.vpmu.metrics().host_counters, 3);
    assert_eq!(fixture.open(&task), Err(libc::EMFILE));
    // At the limit, the device closes the counter on the previous vCPU before it opens one on the next vCPU.
    for vcpu in [0, 1, 0, 1] {
        fixture.command(vcpu, COMMAND_IN, second);
        fixture.host.work(thread(vcpu), 10, 4);
        fixture.command(vcpu, COMMAND_OUT, second);
        assert_eq!(fixture.host.open_counters(), 3);
    }
    assert_eq!(fixture.value(0, second), 40, "the counts of closed counters are kept");
    assert_eq!(fixture.value(0, moving), 20);
    fixture.close(moving).expect("closed");
    fixture.open(&task).expect("there is room again");
    // The limit does not apply to events that only count, because they share a counter.
    fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0));
}

#[test]
fn operators_counters_do_not_count_towards_the_guests_limit() {
    let memory = window(64);
    let mut fixture = Fixture::windowed_with(
        limits().with(|limits| {
            limits.max_host_counters = 1;
            limits.max_active_counters = 1;
            limits.max_sample_rate = 1000;
        }),
        &memory,
    );
    let guests = fixture.opened(&cycles(0));
    let persist =
        |name: &str, event: &str, rate| Persist { name: Some(name.to_owned()), rate: Some(rate), ..asked(event, 0) };
    for (name, event, rate) in [
        ("one", "cycles", Rate::Period(1000)),
        ("two", "clock", Rate::Frequency(900)),
        ("three", "clock", Rate::Frequency(900)),
    ] {
        fixture.vpmu.persist(&persist(name, event, rate)).expect(name);
    }
    assert_eq!(fixture.host.running(thread(0)), 4);
    assert_eq!(state(&mut fixture, guests), STATE_ACTIVE);
    assert_eq!(fixture.vpmu.metrics().host_counters, 1);
}

#[test]
fn metric_of_the_guests_counters_excludes_the_operators_counter() {
    let fixture = Fixture::windowed(&window(64));
    let persist = Persist { rate: Some(Rate::Period(1000)), ..asked("cycles", 0) };
    fixture.vpmu.persist(&persist).expect("started");
    assert_eq!(fixture.host.open_counters(), 1);
    assert_eq!(fixture.vpmu.metrics().host_counters, 0);
}

/// VPMU-D-7-3.
#[test]
fn samples_of_all_events_share_a_budget() {
    let limits = limits().with(|limits| limits.max_samples = 3000);
    let mut fixture = Fixture::bare(Engines::Auto, limits, None);
    (0..2).for_each(|vcpu| fixture.attach(vcpu));
    fixture.activate(ALL_FEATURES);
    let events = [0, 0, 1, 1].map(|vcpu| {
        let event = fixture.opened(&open_of(KIND_MARK, 5, vcpu).sampled(1));
        fixture.command(vcpu, COMMAND_ENABLE, event);
        event
    });
    let mut rings = events.map(|event| fixture.map(event, 8));
    let written = |fixture: &Fixture| fixture.vpmu.metrics().samples_written;
    fixture.host.pass(WINDOW);
    for _ in 0..20 {
        fixture.mark(0, 5, 1);
        fixture.mark(1, 5, 1);
    }
    // A budget of 3000 samples per second allows 30 samples in a time window of 10 ms.
    assert_eq!(written(&fixture), 30);
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.samples_throttled, 50, "the other overflows are throttled, not lost");
    assert_eq!(metrics.samples_over_budget, 4, "each event counts once");
    for ring in &mut rings {
        let throttles = ring.raw().iter().filter(|raw| raw.kind == THROTTLE).count();
        assert_eq!(throttles, 1);
    }
    fixture.host.pass(WINDOW);
    fixture.mark(0, 5, 1);
    assert_eq!(written(&fixture), 32, "the new time window has a new budget");
    // Throttled events still count every mark.
    assert_eq!(fixture.value(0, events[0]), 21);
}

#[test]
fn host_counter_is_silent_while_the_budget_is_used_up() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_samples = 100), ALL_FEATURES);
    fixture.host.pass(WINDOW);
    let event = fixture.opened(&cycles(0));
    fixture.map(event, 1);
    for _ in 0..3 {
        fixture.host.work(thread(0), 1000, 4);
        fixture.exit(0, ExitReason::Signal, &mut At(0x9999));
    }
    assert_eq!(fixture.vpmu.metrics().samples_written, 1);
    assert!(fixture.host.periods().iter().all(|&period| period > 1 << 60));
    assert!(fixture.host.draining(), "no drain will end the throttle if the vCPU does not exit");
    fixture.host.pass(WINDOW);
    fixture.vpmu.drain();
    assert_eq!(fixture.host.periods(), [1000]);
}

#[test]
fn record_bytes_of_all_events_share_a_budget() {
    let mut fixture = Fixture::with(
        limits().with(|limits| {
            // 4,000 bytes in 10 ms.
            limits.max_record_bytes = 400_000;
        }),
        ALL_FEATURES,
    );
    // A record has the counts and ids of 40 events, so it has 656 bytes.
    let of = open_of(KIND_MARK, 5, 0).sampled(1).sample_type(1 << 4).read_format(1 << 3 | 1 << 2).flags(OPEN_ENABLED);
    let leader = fixture.opened(&of);
    for _ in 0..39 {
        fixture.opened(&open_of(KIND_MARK, 5, 0).leader(leader).flags(OPEN_ENABLED));
    }
    fixture.map(leader, 16);
    let mut written = 0;
    for _ in 0..2 {
        fixture.host.pass(WINDOW);
        for _ in 0..10 {
            fixture.mark(0, 5, 1);
        }
        let now = fixture.vpmu.metrics().samples_written;
        // The seventh record exceeds the budget.
        assert_eq!(now - written, 7);
        written = now;
    }
    assert_eq!(fixture.vpmu.metrics().samples_over_budget, 2);
    assert_eq!(fixture.vpmu.metrics().samples_throttled, 6);
}

#[test]
fn operators_samples_do_not_use_the_guests_budget() {
    let memory = window(64);
    let mut fixture = Fixture::windowed_with(limits().with(|limits| limits.max_samples = 100), &memory);
    let operators = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let guests = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    fixture.map(guests, 8);
    fixture.host.pass(WINDOW);
    for _ in 0..50 {
        fixture.mark(0, 5, 1);
    }
    assert_eq!(fixture.vpmu.metrics().samples_written, 51);
    let history = fixture.vpmu.history(operators).expect("a history");
    assert_eq!(history.iter().count(), 50);
    let replies = fixture.commands(0, &[command(COMMAND_READ, guests)]);
    assert_eq!(replies[0].value.get(), 50);
}
