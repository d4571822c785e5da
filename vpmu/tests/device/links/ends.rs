//! Links end when their trigger or their target is closed, no matter what state the closed event is in.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, FAULTS, Fields, Fixture, open_of};

use super::{START, STOP, between_marks, paused, trigger};

const WORK: u64 = 5;

/// Brings a trigger or a target into a state before the test closes it.
type Bring = fn(&mut Fixture, u64);

fn states() -> [(&'static str, Bring); 4] {
    [
        ("paused", |_, _| {}),
        ("active", |fixture, _| fixture.mark(0, START, 1)),
        ("off", |fixture, id| {
            fixture.command(0, COMMAND_DISABLE, id);
        }),
        ("reset", |fixture, id| {
            fixture.mark(0, START, 1);
            fixture.command(0, COMMAND_RESET, id);
        }),
    ]
}

/// VPMU-D-6.11-3.
#[test]
fn links_end_with_the_target() {
    for (state, bring) in states() {
        let mut fixture = Fixture::new();
        let start = trigger(&mut fixture, START, 1);
        let stop = trigger(&mut fixture, STOP, 1);
        for _ in 0..2 {
            let target = fixture.opened(&paused(KIND_MARK, WORK));
            fixture.link(start, target, LINK_STARTER).expect("linked");
            fixture.link(stop, target, LINK_STOPPER).expect("linked");
            bring(&mut fixture, target);
            fixture.close(target).expect("closed");
            fixture.mark(0, START, 1);
            fixture.mark(0, STOP, 1);
            let gone = fixture.link(start, target, LINK_STARTER);
            assert_eq!(gone, Err(libc::ENOENT), "{state}");
        }
        for trigger in [start, stop] {
            fixture.close(trigger).expect("closed");
        }
    }
}

#[test]
fn target_left_paused_waits_for_another_starter() {
    for (state, bring) in states() {
        let mut fixture = Fixture::new();
        let target = fixture.opened(&paused(KIND_MARK, WORK));
        let start = trigger(&mut fixture, STOP, 1);
        fixture.link(start, target, LINK_STARTER).expect("linked");
        bring(&mut fixture, start);
        fixture.close(start).expect("closed");
        fixture.mark(0, STOP, 1);
        fixture.mark(0, 5, 1);
        assert_eq!(fixture.value(0, target), 0, "{state}");
        let other = trigger(&mut fixture, START, 1);
        fixture.link(other, target, LINK_STARTER).expect("linked");
        fixture.mark(0, 5, 1);
        assert_eq!(fixture.value(0, target), 0, "{state}");
        fixture.mark(0, START, 1);
        fixture.mark(0, 5, 1);
        assert_eq!(fixture.value(0, target), 1, "{state}");
    }
}

#[test]
fn target_without_its_stopper_counts_on() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, WORK));
    let start = trigger(&mut fixture, START, 1);
    let stop = trigger(&mut fixture, STOP, 1);
    fixture.link(start, target, LINK_STARTER).expect("linked");
    fixture.link(stop, target, LINK_STOPPER).expect("linked");
    fixture.mark(0, START, 1);
    fixture.close(stop).expect("closed");
    fixture.mark(0, STOP, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 1);
    // The target no longer has a stopper, but still has its starter. Therefore, it can get another stopper, but not
    // another starter.
    let other = trigger(&mut fixture, STOP, 1);
    assert_eq!(fixture.link(other, target, LINK_STARTER), Err(libc::EBUSY));
    assert_eq!(fixture.link(other, target, LINK_STOPPER), Ok(()));
    fixture.mark(0, STOP, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 1);
}

#[test]
fn disabled_trigger_does_nothing() {
    let mut fixture = Fixture::new();
    let target = fixture.opened(&paused(KIND_MARK, WORK));
    let start = trigger(&mut fixture, START, 1);
    fixture.link(start, target, LINK_STARTER).expect("linked");
    fixture.command(0, COMMAND_DISABLE, start);
    fixture.mark(0, START, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, target), 0);
}

#[test]
fn links_of_an_event_in_error_have_no_effect() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(KIND_HARDWARE, 0));
    fixture.host.break_host();
    fixture.mark(0, START, 1);
    let reply = fixture.command(0, COMMAND_READ, target);
    assert_eq!(reply.state.get(), STATE_ERROR, "the host does not start its counter");
    fixture.mark(0, STOP, 1);
    fixture.mark(0, START, 1);
    let other = trigger(&mut fixture, 9, 1);
    assert_eq!(fixture.link(other, target, LINK_STARTER), Err(libc::EBUSY));
    fixture.close(target).expect("closed");
    fixture.mark(0, START, 1);
}

#[test]
fn reset_ends_all_links() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(KIND_MARK, WORK));
    fixture.vpmu.reset();
    fixture.activate(ALL_FEATURES);
    let start = trigger(&mut fixture, START, 1);
    assert_eq!(fixture.link(start, target, LINK_STARTER), Err(libc::ENOENT));
    let again = between_marks(&mut fixture, &paused(KIND_MARK, WORK));
    fixture.mark(0, START, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, again), 1);
}

#[test]
fn pause_and_links_survive_a_reset_and_the_vcpus_thread() {
    let mut fixture = Fixture::new();
    let open = |fixture: &mut Fixture, request: OpenRequest| {
        let flags = request.flags.get() | OPEN_PERSISTENT;
        let request = request.flags(flags);
        fixture.opened(&request)
    };
    let target = open(&mut fixture, paused(FAULTS.0, FAULTS.1));
    let start = open_of(KIND_MARK, START.into(), 0).period(1).flags(OPEN_ENABLED);
    let start = open(&mut fixture, start);
    fixture.link(start, target, LINK_STARTER).expect("linked");
    fixture.vpmu.reset();
    fixture.attach_as(0, 500);
    fixture.activate(ALL_FEATURES);
    fixture.host.work(500, 10, 4);
    assert_eq!(fixture.value(0, target), 0, "the target is still paused on the new thread");
    fixture.mark(0, START, 1);
    fixture.host.work(500, 10, 4);
    assert_eq!(fixture.value(0, target), 10);
    let other = trigger(&mut fixture, STOP, 1);
    assert_eq!(fixture.link(other, target, LINK_STARTER), Err(libc::EBUSY));
}
