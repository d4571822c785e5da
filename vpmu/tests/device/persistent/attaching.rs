//! Persistent events of a vCPU that has no thread yet, or that gets a new thread.

use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{Engines, ExitReason, Persist};
use vpmu_testkit::{At, Fields, Fixture, WINDOW_FEATURES, limits, thread, window};

use super::{asked, samples};

fn cycles(fixture: &Fixture) -> u64 {
    let persist = Persist { rate: Some(Rate::Period(100)), ..asked("cycles", 0) };
    fixture.vpmu.persist(&persist).expect("started")
}

fn count(fixture: &Fixture) -> u64 {
    fixture.vpmu.persistent()[0].count
}

#[test]
fn operators_event_counts_from_the_first_instruction_of_its_vcpu() {
    let fixture = Fixture::bare(Engines::Auto, limits(), Some(&window(64)));
    let event = cycles(&fixture);
    assert_eq!(fixture.host.open_counters(), 0, "no counter opens without a thread");
    assert_eq!(fixture.vpmu.persistent()[0].state, STATE_INACTIVE);
    fixture.attach(1);
    assert_eq!(fixture.host.open_counters(), 0, "the thread of another vCPU does not matter");
    fixture.attach(0);
    fixture.host.work(thread(0), 250, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(9));
    assert_eq!(count(&fixture), 250);
    assert_eq!(samples(&fixture, event).len(), 2);
    assert_eq!(fixture.vpmu.persistent()[0].state, STATE_ACTIVE);
}

#[test]
fn event_moves_to_a_new_thread() {
    let fixture = Fixture::bare(Engines::Auto, limits(), Some(&window(64)));
    let event = cycles(&fixture);
    fixture.attach(0);
    fixture.host.work(thread(0), 130, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
    fixture.host.work(thread(0), 100, 4);
    fixture.vpmu.reset();
    fixture.attach_as(0, 500);
    assert_eq!(fixture.host.open_counters(), 1, "the old counter is closed");
    assert_eq!(count(&fixture), 230, "the count of the old counter is kept");
    assert_eq!(samples(&fixture, event).len(), 2, "the last overflow of the old counter is written, too");
    fixture.host.work(thread(0), 1000, 4);
    fixture.host.work(500, 170, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(2));
    assert_eq!(count(&fixture), 400);
    assert_eq!(samples(&fixture, event).len(), 3);
    fixture.attach_as(0, 501);
    fixture.host.work(501, 10, 4);
    assert_eq!(count(&fixture), 410);
}

#[test]
fn event_counts_nothing_between_two_threads() {
    let fixture = Fixture::bare(Engines::Auto, limits(), Some(&window(64)));
    fixture.attach(0);
    let before = cycles(&fixture);
    fixture.host.work(thread(0), 30, 4);
    fixture.vcpus.set(0, None);
    // The vCPU currently has no thread. The device must not open a counter for the old thread's id, because another
    // thread may have this id by now.
    let event = fixture.vpmu.persist(&Persist {
        name: Some("late".to_owned()),
        rate: Some(Rate::Period(100)),
        ..asked("cycles", 0)
    });
    let event = event.expect("the event starts when the vCPU gets a thread");
    assert_eq!(fixture.host.open_counters(), 1);
    let states = || -> Vec<_> {
        let events = fixture.vpmu.persistent().into_iter();
        events.map(|event| (event.id, event.state, event.count)).collect()
    };
    assert_eq!(states(), [(before, STATE_ACTIVE, 30), (event, STATE_INACTIVE, 0)]);
    fixture.vpmu.reset();
    fixture.attach_as(0, 500);
    fixture.host.work(500, 12, 4);
    assert_eq!(states(), [(before, STATE_ACTIVE, 42), (event, STATE_ACTIVE, 12)]);
}

#[test]
fn disabled_event_stays_disabled_on_a_new_thread() {
    let mut fixture = Fixture::windowed(&window(64));
    let request = vpmu_testkit::open_of(vpmu_testkit::CYCLES.0, vpmu_testkit::CYCLES.1, 0).flags(OPEN_PERSISTENT);
    let event = fixture.opened(&request);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.work(thread(0), 7, 4);
    fixture.command(0, COMMAND_DISABLE, event);
    fixture.vpmu.reset();
    fixture.attach_as(0, 500);
    fixture.activate(WINDOW_FEATURES);
    fixture.host.work(500, 100, 4);
    assert_eq!(fixture.value(0, event), 7);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.work(500, 3, 4);
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(fixture.value(0, event), 10);
}

#[test]
fn event_survives_five_boots() {
    let memory = window(64);
    let mut fixture = Fixture::bare(Engines::Auto, limits(), Some(&memory));
    let event = fixture.vpmu.persist(&asked("mark=5", 1)).expect("started");
    for boot in 0..5 {
        (0..2).for_each(|vcpu| fixture.attach_as(vcpu, 10 + boot));
        fixture.mark(1, 5, 100);
        fixture.activate(WINDOW_FEATURES);
        fixture.mark(1, 5, 200);
        assert_eq!(fixture.listed()[0].id.get(), event);
        fixture.vpmu.reset();
    }
    let ips: Vec<u64> = samples(&fixture, event).iter().map(|words| words[2]).collect();
    assert_eq!(ips, [100, 200].repeat(5));
    let times: Vec<u64> = samples(&fixture, event).iter().map(|words| words[4]).collect();
    assert!(times.is_sorted());
}

#[test]
fn event_that_cannot_continue_is_in_error() {
    let mut fixture = Fixture::windowed(&window(64));
    let event = cycles(&fixture);
    fixture.post_notice(0, 16);
    fixture.post_notice(1, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_PERSISTENT, event)));
    fixture.host.break_host();
    fixture.attach_as(0, 500);
    assert_eq!(fixture.notice(), Some((NOTICE_ERROR, event)));
    assert_eq!(fixture.vpmu.persistent()[0].state, STATE_ERROR);
    fixture.vpmu.reset();
    assert_eq!(fixture.vpmu.persistent()[0].state, STATE_ERROR, "the event in the error state survives the reset");
}
