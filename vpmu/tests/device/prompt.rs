//! Prompt events: each of their samples causes a wakeup, and the exit engine takes the samples.

use vpmu::abi::*;
use vpmu::source::{Engine, Mode, Overflow};
use vpmu::{Engines, ExitReason};
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Reader, Sample, WINDOW_FEATURES, command, limits, open_of, thread,
    window,
};

use crate::persistent::reader;

/// More ticks than those for which the device holds back records of the batched engine.
const LATER: u64 = 10_000_000;

fn with_engines(engines: Engines) -> Fixture {
    let limits = limits().with(|limits| limits.max_sample_rate = u32::MAX);
    let fixture = Fixture::with_engines(engines, limits, ALL_FEATURES);
    fixture.host.know_ips();
    fixture.host.pass(LATER);
    fixture
}

fn fixture() -> Fixture {
    with_engines(Engines::Auto)
}

/// A request for an event that the batched engine samples.
fn cycles(context: u32) -> OpenRequest {
    open_of(CYCLES.0, CYCLES.1, context).sampled(100).flags(OPEN_ENABLED)
}

fn batched(fixture: &mut Fixture, request: &OpenRequest) -> (u64, Reader) {
    let reply = fixture.open_reply(request);
    let opened = (reply.status.get(), reply.engine.get());
    assert_eq!(opened, (0, ENGINE_BATCHED));
    let event = reply.id.get();
    (event, fixture.map(event, 8))
}

fn prompt(event: u64, on: u64) -> Command {
    Command { value: on.into(), ..command(COMMAND_PROMPT, event) }
}

fn set_prompt(fixture: &mut Fixture, event: u64, on: u64) -> Reply {
    let reply = fixture.commands(0, &[prompt(event, on)])[0];
    assert_eq!(reply.status.get(), 0, "{reply:?}");
    reply
}

/// Makes the host record overflows at these IPs, now.
fn record(fixture: &Fixture, ips: &[u64]) {
    for &ip in ips {
        let overflow = Overflow { tsc: fixture.host.now(), ip, mode: Mode::Guest, period: 100 };
        fixture.host.record(thread(0), overflow);
    }
}

/// Makes the vCPU overflow, and leave the guest at `ip`.
fn overflow(fixture: &Fixture, ip: u64) {
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(ip));
}

fn ips(samples: &[Sample]) -> Vec<u64> {
    samples.iter().map(|sample| sample.ip).collect()
}

/// Returns the number of wakeups that `act` causes.
fn wakeups(fixture: &mut Fixture, act: impl FnOnce(&mut Fixture)) -> u64 {
    let before = fixture.vpmu.metrics().wakeups;
    act(fixture);
    fixture.vpmu.metrics().wakeups - before
}

/// VPMU-D-6.6-15.
#[test]
fn prompt_event_wakes_at_each_record_and_its_family_at_the_interval() {
    let mut fixture = Fixture::new();
    let request = |config| open_of(KIND_MARK, config, 0).sampled(1).flags(OPEN_ENABLED).wakeup(10);
    let parent = fixture.opened(&request(5));
    fixture.map(parent, 8);
    fixture.opened(&request(6).parent(parent));
    let marks = |fixture: &mut Fixture, value, times| {
        wakeups(fixture, |fixture| {
            (0..times).for_each(|_| fixture.mark(0, value, 1));
        })
    };
    assert_eq!(marks(&mut fixture, 5, 3), 0);
    set_prompt(&mut fixture, parent, 1);
    assert_eq!(marks(&mut fixture, 5, 4), 4);
    assert_eq!(marks(&mut fixture, 6, 2), 0);
    // The records count towards the interval as if the event were not prompt. The tenth record causes one wakeup.
    assert_eq!(marks(&mut fixture, 5, 1), 1);
    assert_eq!(marks(&mut fixture, 6, 9), 0);
    fixture.set_wakeup(parent, 4, WAKEUP_RECORDS).expect("an interval");
    assert_eq!(marks(&mut fixture, 5, 3), 3);
    set_prompt(&mut fixture, parent, 0);
    assert_eq!(marks(&mut fixture, 5, 9), 3);
}

/// VPMU-D-6.6-15, VPMU-D-6.6-16.
#[test]
fn active_batched_event_changes_engines_without_losing_anything() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    fixture.host.work(thread(0), 30, 4);
    record(&fixture, &[1, 2]);
    let before = fixture.read(0, event);
    assert_eq!(ips(&ring.samples()), [1, 2]);
    record(&fixture, &[3]);
    let woken = wakeups(&mut fixture, |fixture| {
        let reply = set_prompt(fixture, event, 1);
        assert_eq!((reply.value.get(), reply.state.get()), (30, STATE_ACTIVE));
        assert!(reply.time_running.get() > before.time_running.get());
        assert_eq!(reply.time_running, reply.time_enabled);
    });
    assert_eq!(woken, 0, "the record is older than the command");
    assert_eq!(ips(&ring.samples()), [3]);
    assert_eq!(fixture.host.engines(), [Engine::Exit]);
    assert_eq!(fixture.host.running(thread(0)), 1);
    let woken = wakeups(&mut fixture, |fixture| {
        (4..7).for_each(|ip| overflow(fixture, ip));
    });
    assert_eq!((woken, ips(&ring.samples())), (3, vec![4, 5, 6]));
    fixture.vpmu.drain();
    assert!(!fixture.host.draining(), "no event needs drains");
    fixture.host.work(thread(0), 50, 4);
    let reply = set_prompt(&mut fixture, event, 0);
    assert_eq!(reply.value.get(), 30 + 300 + 50);
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
    assert!(fixture.host.draining());
    let woken = wakeups(&mut fixture, |fixture| {
        record(fixture, &[7, 8]);
        fixture.read(0, event);
    });
    assert_eq!((woken, ips(&ring.samples())), (0, vec![7, 8]));
    assert_eq!(fixture.value(0, event), 380);
    let metrics = fixture.vpmu.metrics();
    assert_eq!((metrics.samples_lost, metrics.samples_written), (0, 8));
}

/// VPMU-D-6.6-16.
#[test]
fn overflows_before_the_end_of_prompt_sampling_are_written() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    set_prompt(&mut fixture, event, 1);
    // The counter overflows twice, and the exit at which the device would detect this is the command itself.
    fixture.host.work(thread(0), 200, 4);
    assert_eq!(set_prompt(&mut fixture, event, 0).value.get(), 200);
    assert_eq!(ring.samples().len(), 2);
    assert_eq!(fixture.read(0, event).lost.get(), 0);
}

#[test]
fn inactive_event_is_prompt_when_it_becomes_active() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(CONTEXT_TASK));
    let batch = [prompt(event, 1), command(COMMAND_IN, event)];
    let replies = fixture.commands(0, &batch);
    assert_eq!([0, 1].map(|reply| replies[reply].status.get()), [0, 0]);
    assert_eq!(replies[0].state.get(), STATE_INACTIVE);
    assert_eq!(fixture.host.engines(), [Engine::Exit]);
    assert!(!fixture.host.draining());
    assert_eq!(wakeups(&mut fixture, |fixture| overflow(fixture, 1)), 1);
    fixture.command(0, COMMAND_OUT, event);
    // On another vCPU, too.
    fixture.command(1, COMMAND_IN, event);
    assert_eq!(fixture.host.engines(), [Engine::Exit; 2]);
    fixture.host.work(thread(1), 100, 4);
    fixture.exit(1, ExitReason::Signal, &mut At(2));
    assert_eq!(ips(&ring.samples()), [1, 2]);
    fixture.command(1, COMMAND_OUT, event);
    // Only one of the counters is opened again.
    let replies = fixture.commands(1, &[prompt(event, 0), command(COMMAND_IN, event)]);
    assert_eq!([0, 1].map(|reply| replies[reply].status.get()), [0, 0]);
    assert_eq!(replies[1].value.get(), 200);
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
}

#[test]
fn disabled_event_is_prompt_when_it_is_enabled() {
    let mut fixture = fixture();
    let request = cycles(0).flags(0);
    let (event, _ring) = batched(&mut fixture, &request);
    assert_eq!(set_prompt(&mut fixture, event, 1).state.get(), STATE_OFF);
    fixture.command(0, COMMAND_ENABLE, event);
    assert_eq!(fixture.host.engines(), [Engine::Exit]);
    assert_eq!(wakeups(&mut fixture, |fixture| overflow(fixture, 1)), 1);
}

#[test]
fn value_in_force_costs_no_host_call() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    for on in [0, 1, 0] {
        set_prompt(&mut fixture, event, on);
        let before = fixture.vpmu.metrics().work.host_calls;
        set_prompt(&mut fixture, event, on);
        assert_eq!(fixture.vpmu.metrics().work.host_calls, before, "{on}");
    }
}

#[test]
fn command_of_another_vcpu_works() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    fixture.host.work(thread(0), 10, 4);
    let reply = fixture.commands(1, &[prompt(event, 1)])[0];
    assert_eq!((reply.status.get(), reply.value.get()), (0, 10));
    assert_eq!(fixture.host.engines(), [Engine::Exit]);
    assert_eq!(wakeups(&mut fixture, |fixture| overflow(fixture, 1)), 1);
}

#[test]
fn event_of_a_vcpu_without_a_thread_is_prompt_on_the_next_thread() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    fixture.host.work(thread(0), 10, 4);
    fixture.vcpus.set(0, None);
    let reply = fixture.commands(1, &[prompt(event, 1)])[0];
    assert_eq!((reply.status.get(), reply.value.get()), (0, 10));
    assert_eq!(fixture.value(1, event), 10);
    fixture.attach_as(0, 500);
    assert_eq!(fixture.host.engines(), [Engine::Exit]);
    fixture.host.work(500, 100, 4);
    let woken = wakeups(&mut fixture, |fixture| {
        fixture.exit(0, ExitReason::Signal, &mut At(1));
    });
    assert_eq!((woken, fixture.value(0, event)), (1, 110));
}

#[test]
fn operator_who_requires_the_batched_engine_keeps_it() {
    let mut fixture = with_engines(Engines::Batched);
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    set_prompt(&mut fixture, event, 1);
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
    let woken = wakeups(&mut fixture, |fixture| {
        record(fixture, &[1, 2, 3]);
        fixture.host.pass(LATER);
        fixture.vpmu.drain();
    });
    assert_eq!((woken, ips(&ring.samples())), (3, vec![1, 2, 3]));
}

#[test]
fn refused_counter_puts_the_event_in_the_error_state() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    let member = fixture.opened(&open_of(KIND_MARK, 5, 0).leader(event).flags(OPEN_ENABLED));
    fixture.host.work(thread(0), 70, 4);
    fixture.host.deny(libc::EACCES);
    let reply = fixture.commands(0, &[prompt(event, 1)])[0];
    assert_eq!(reply.status.get(), libc::EACCES.unsigned_abs());
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 70));
    fixture.post_notice(0, 16);
    let refused = (NOTICE_ERROR, event, u32::from(REFUSED_PERMISSION));
    assert_eq!(fixture.counted_notice(), Some(refused));
    assert_eq!(fixture.host.open_counters(), 0);
    assert_eq!(fixture.read(0, member).state.get(), STATE_INACTIVE);
    // The command still works for an event in the error state.
    fixture.host.deny(0);
    assert_eq!(set_prompt(&mut fixture, event, 0).state.get(), STATE_ERROR);
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn group_of_both_engines_counts_on() {
    let mut fixture = fixture();
    let (leader, mut ring) = batched(&mut fixture, &cycles(0));
    let member = fixture.opened(&cycles(0).leader(leader));
    fixture.redirect(member, leader).expect("redirected");
    fixture.host.work(thread(0), 40, 4);
    for (event, values) in [(member, [1, 2]), (leader, [3, 4])] {
        set_prompt(&mut fixture, event, 1);
        let woken = wakeups(&mut fixture, |fixture| {
            for ip in values {
                overflow(fixture, ip);
            }
        });
        assert_eq!(woken, if event == leader { 4 } else { 2 });
        fixture.host.pass(LATER);
        fixture.vpmu.drain();
        ring.samples();
    }
    for event in [leader, member] {
        assert_eq!(fixture.value(0, event), 440);
    }
    set_prompt(&mut fixture, leader, 0);
    assert_eq!(fixture.host.engines(), [Engine::Exit, Engine::Batched]);
    assert_eq!(fixture.value(0, leader), 440);
}

#[test]
fn limit_that_taken_overflows_reach_ends_the_event() {
    let mut fixture = fixture();
    let request = cycles(0).flags(0);
    let (event, mut ring) = batched(&mut fixture, &request);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 3), 0);
    record(&fixture, &[1]);
    set_prompt(&mut fixture, event, 1);
    overflow(&fixture, 2);
    // The command itself detects these overflows. The first of them is the last that the limit allows.
    fixture.host.work(thread(0), 200, 4);
    assert_eq!(set_prompt(&mut fixture, event, 0).state.get(), STATE_OFF);
    assert_eq!(ring.samples().len(), 3);
    fixture.post_notice(0, 16);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
    fixture.post_notice(0, 16);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_LIMIT, event, 1)));
    fixture.command(0, COMMAND_ENABLE, event);
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
}

#[test]
fn paused_event_stays_paused() {
    let mut fixture = fixture();
    let request = cycles(0).flags(OPEN_ENABLED | OPEN_PAUSED);
    let (event, mut ring) = batched(&mut fixture, &request);
    let starter = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    fixture.link(starter, event, LINK_STARTER).expect("linked");
    set_prompt(&mut fixture, event, 1);
    assert_eq!(fixture.host.running(thread(0)), 0);
    overflow(&fixture, 1);
    fixture.mark(0, 5, 1);
    overflow(&fixture, 2);
    assert_eq!(ips(&ring.samples()), [2]);
    assert_eq!(fixture.value(0, event), 100);
}

#[test]
fn waiting_event_keeps_its_position() {
    let limits = limits().with(|limits| limits.max_active_counters = 1);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    let events = [(); 3].map(|()| batched(&mut fixture, &cycles(0)).0);
    fixture.host.pass(1000);
    let reply = set_prompt(&mut fixture, events[1], 1);
    assert_eq!(reply.state.get(), STATE_INACTIVE);
    assert!(reply.time_enabled.get() >= 1000 && reply.time_running.get() == 0);
    // A running event keeps its place.
    set_prompt(&mut fixture, events[0], 1);
    let states = |fixture: &mut Fixture| events.map(|id| fixture.read(0, id).state.get());
    let (active, waits) = (STATE_ACTIVE, STATE_INACTIVE);
    assert_eq!(states(&mut fixture), [active, waits, waits]);
    fixture.command(0, COMMAND_DISABLE, events[0]);
    assert_eq!(states(&mut fixture), [STATE_OFF, active, waits]);
    fixture.host.work(thread(0), 10, 4);
    assert_eq!(events.map(|id| fixture.value(0, id)), [0, 10, 0]);
}

#[test]
fn changed_counter_needs_no_other_place_among_the_guests_counters() {
    let limits = limits().with(|limits| limits.max_host_counters = 1);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    for on in [1, 0, 1] {
        set_prompt(&mut fixture, event, on);
        assert_eq!(fixture.open(&cycles(0)), Err(libc::EMFILE));
    }
    fixture.close(event).expect("closed");
    fixture.opened(&cycles(0));
}

#[test]
fn throttled_event_stays_silent_until_its_window_ends() {
    let limits = limits().with(|limits| limits.max_sample_rate = 1000);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.know_ips();
    fixture.host.pass(100_000_000);
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    record(&fixture, &[1; 10]);
    let before = fixture.host.periods();
    set_prompt(&mut fixture, event, 1);
    let silent = fixture.host.periods();
    assert_ne!(silent, before, "the new counter is not silent");
    assert_eq!(ring.raw().len(), 10 + 1);
    fixture.host.pass(20_000_000);
    fixture.read(0, event);
    assert_eq!(fixture.host.periods(), before);
    assert_eq!(wakeups(&mut fixture, |fixture| overflow(fixture, 2)), 1);
}

#[test]
fn batched_event_that_is_prompt_cannot_be_linked() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    set_prompt(&mut fixture, event, 1);
    let target = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let linked = fixture.link(event, target, LINK_STARTER);
    assert_eq!(linked, Err(libc::EOPNOTSUPP));
}

/// VPMU-D-6.13-2.
#[test]
fn prompt_event_is_prompt_after_a_restore() {
    for reports_ips in [true, false] {
        let mut fixture = fixture();
        let (event, mut ring) = batched(&mut fixture, &cycles(0));
        set_prompt(&mut fixture, event, 1);
        overflow(&fixture, 1);
        fixture.halt();
        let state = fixture.save();
        let mut next = fixture.successor(fixture.settings(), fixture.memory.clone(), None);
        fixture.vpmu.reset();
        if reports_ips {
            next.host.know_ips();
        }
        next.resume(&state);
        assert_eq!(next.host.engines(), [Engine::Exit]);
        assert_eq!(wakeups(&mut next, |next| overflow(next, 2)), 1);
        assert_eq!(ips(&ring.samples()), [1, 2]);
        set_prompt(&mut next, event, 0);
        let engine = if reports_ips { Engine::Batched } else { Engine::Exit };
        assert_eq!(next.host.engines(), [engine]);
        assert_eq!(next.value(0, event), 200);
    }
}

#[test]
fn restored_prompt_event_stays_batched_if_the_operator_requires_it() {
    let mut fixture = fixture();
    let (event, mut ring) = batched(&mut fixture, &cycles(0));
    set_prompt(&mut fixture, event, 1);
    fixture.halt();
    let state = fixture.save();
    let settings = fixture.settings().with_engines(Engines::Batched);
    let mut next = fixture.successor(settings, fixture.memory.clone(), None);
    fixture.vpmu.reset();
    next.resume(&state);
    assert_eq!(next.host.engines(), [Engine::Batched]);
    let woken = wakeups(&mut next, |next| {
        record(next, &[1, 2]);
        next.read(0, event);
    });
    assert_eq!((woken, ips(&ring.samples())), (2, vec![1, 2]));
}

#[test]
fn reset_ends_prompt_sampling() {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    fixture.host.know_ips();
    let reply = fixture.open_reply(&cycles(0));
    assert_eq!(reply.engine.get(), ENGINE_BATCHED);
    let event = reply.id.get();
    fixture.detach(event, "").expect("detached");
    let first = fixture.map_window(event, 4, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 4);
    set_prompt(&mut fixture, event, 1);
    overflow(&fixture, 1);
    fixture.host.work(thread(0), 30, 4);
    fixture.activate(WINDOW_FEATURES);
    assert_eq!(fixture.host.engines(), [Engine::Batched]);
    let woken = wakeups(&mut fixture, |fixture| {
        record(fixture, &[2]);
        assert_eq!(fixture.value(0, event), 130);
    });
    assert_eq!((woken, ips(&ring.samples())), (0, vec![1, 2]));
}

/// VPMU-D-2-9.
#[test]
fn notification_that_changes_engines_is_served_in_turns() {
    let mut fixture = fixture();
    let (event, _ring) = batched(&mut fixture, &cycles(0));
    let commands: Vec<Command> = [1, 0].map(|on| prompt(event, on)).repeat(1024);
    let replies = fixture.commands(0, &commands);
    assert!(replies.iter().all(|reply| reply.status.get() == 0));
    let metrics = fixture.vpmu.metrics();
    assert!(metrics.turns_unfinished >= 2048 * 4 / 512, "{metrics:?}");
    let largest = metrics.largest_turn;
    assert!(largest.host_calls <= 512 + 8, "{largest:?}");
}
