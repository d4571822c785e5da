//! Persistent events of a vCPU that has no thread yet, or that gets a new thread.

use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{Engines, ExitReason, Persist};

use super::{WINDOW_FEATURES, asked, samples, window};
use crate::rig::{Rig, limits, thread};
use crate::world::At;

fn cycles(rig: &Rig) -> u64 {
    let persist = Persist {
        rate: Some(Rate::Period(100)),
        ..asked("cycles", 0)
    };
    rig.vpmu.persist(&persist).expect("started")
}

fn count(rig: &Rig) -> u64 {
    rig.vpmu.persistent()[0].count
}

#[test]
fn operators_event_counts_from_the_first_instruction_of_its_vcpu() {
    let rig = Rig::bare(Engines::Auto, limits(), Some(&window(64)));
    let event = cycles(&rig);
    assert_eq!(
        rig.world.open_counters(),
        0,
        "no counter opens without a thread"
    );
    assert_eq!(rig.vpmu.persistent()[0].state, STATE_INACTIVE);
    rig.attach(1);
    assert_eq!(
        rig.world.open_counters(),
        0,
        "the thread of another vCPU does not matter"
    );
    rig.attach(0);
    rig.world.work(thread(0), 250, 4);
    rig.exit(0, ExitReason::Signal, &mut At(9));
    assert_eq!(count(&rig), 250);
    assert_eq!(samples(&rig, event).len(), 2);
    assert_eq!(rig.vpmu.persistent()[0].state, STATE_ACTIVE);
}

#[test]
fn event_moves_to_a_new_thread() {
    let rig = Rig::bare(Engines::Auto, limits(), Some(&window(64)));
    let event = cycles(&rig);
    rig.attach(0);
    rig.world.work(thread(0), 130, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.vcpus.leave(0, ExitReason::Io, &mut At(1));
    rig.world.work(thread(0), 100, 4);
    rig.vpmu.reset();
    rig.attach_as(0, 500);
    assert_eq!(rig.world.open_counters(), 1, "the old counter is closed");
    assert_eq!(count(&rig), 230, "the count of the old counter is kept");
    assert_eq!(
        samples(&rig, event).len(),
        2,
        "the last overflow of the old counter is written, too"
    );
    rig.world.work(thread(0), 1000, 4);
    rig.world.work(500, 170, 4);
    rig.exit(0, ExitReason::Signal, &mut At(2));
    assert_eq!(count(&rig), 400);
    assert_eq!(samples(&rig, event).len(), 3);
    rig.attach_as(0, 501);
    rig.world.work(501, 10, 4);
    assert_eq!(count(&rig), 410);
}

#[test]
fn event_counts_nothing_between_two_threads() {
    let rig = Rig::bare(Engines::Auto, limits(), Some(&window(64)));
    rig.attach(0);
    let before = cycles(&rig);
    rig.world.work(thread(0), 30, 4);
    rig.vcpus.set(0, None);
    // The vCPU currently has no thread. The device must not open a counter for the old thread's id, because another
    // thread may have this id by now.
    let event = rig.vpmu.persist(&Persist {
        name: Some("late".to_owned()),
        rate: Some(Rate::Period(100)),
        ..asked("cycles", 0)
    });
    let event = event.expect("the event starts when the vCPU gets a thread");
    assert_eq!(rig.world.open_counters(), 1);
    let states = || -> Vec<_> {
        let events = rig.vpmu.persistent().into_iter();
        events
            .map(|event| (event.id, event.state, event.count))
            .collect()
    };
    assert_eq!(
        states(),
        [(before, STATE_ACTIVE, 30), (event, STATE_INACTIVE, 0)]
    );
    rig.vpmu.reset();
    rig.attach_as(0, 500);
    rig.world.work(500, 12, 4);
    assert_eq!(
        states(),
        [(before, STATE_ACTIVE, 42), (event, STATE_ACTIVE, 12)]
    );
}

#[test]
fn disabled_event_stays_disabled_on_a_new_thread() {
    let mut rig = Rig::windowed(&window(64));
    let request = OpenRequest {
        flags: OPEN_PERSISTENT.into(),
        ..crate::rig::open_of(crate::world::CYCLES.0, crate::world::CYCLES.1, 0)
    };
    let event = rig.open(&request).expect("open");
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.work(thread(0), 7, 4);
    rig.command(0, COMMAND_DISABLE, event);
    rig.vpmu.reset();
    rig.attach_as(0, 500);
    rig.activate(WINDOW_FEATURES);
    rig.world.work(500, 100, 4);
    assert_eq!(rig.value(0, event), 7);
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.work(500, 3, 4);
    rig.world.work(thread(0), 100, 4);
    assert_eq!(rig.value(0, event), 10);
}

#[test]
fn event_survives_five_boots() {
    let memory = window(64);
    let mut rig = Rig::bare(Engines::Auto, limits(), Some(&memory));
    let event = rig.vpmu.persist(&asked("mark=5", 1)).expect("started");
    for boot in 0..5 {
        (0..2).for_each(|vcpu| rig.attach_as(vcpu, 10 + boot));
        rig.mark(1, 5, 100);
        rig.activate(WINDOW_FEATURES);
        rig.mark(1, 5, 200);
        assert_eq!(rig.listed()[0].id.get(), event);
        rig.vpmu.reset();
    }
    let ips: Vec<u64> = samples(&rig, event).iter().map(|words| words[2]).collect();
    assert_eq!(ips, [100, 200].repeat(5));
    let times: Vec<u64> = samples(&rig, event).iter().map(|words| words[4]).collect();
    assert!(times.is_sorted());
}

#[test]
fn event_that_cannot_continue_is_in_error() {
    let mut rig = Rig::windowed(&window(64));
    let event = cycles(&rig);
    rig.post_notice(0, 16);
    rig.post_notice(1, 16);
    assert_eq!(rig.notice(), Some((NOTICE_PERSISTENT, event)));
    rig.world.break_host();
    rig.attach_as(0, 500);
    assert_eq!(rig.notice(), Some((NOTICE_ERROR, event)));
    assert_eq!(rig.vpmu.persistent()[0].state, STATE_ERROR);
    rig.vpmu.reset();
    assert_eq!(
        rig.vpmu.persistent()[0].state,
        STATE_ERROR,
        "the event in the error state survives the reset"
    );
}
