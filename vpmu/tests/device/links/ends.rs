//! Links end when their trigger or their target is closed, no matter what state the closed event is in.

use vpmu::abi::*;

use super::{START, STOP, between_marks, paused, trigger};
use crate::rig::{ALL_FEATURES, Rig, open_of};
use crate::world::FAULTS;

const WORK: u64 = 5;

/// Brings a trigger or a target into a state before the test closes it.
type Bring = fn(&mut Rig, u64);

fn states() -> [(&'static str, Bring); 4] {
    [
        ("paused", |_, _| {}),
        ("active", |rig, _| rig.mark(0, START, 1)),
        ("off", |rig, id| {
            rig.command(0, COMMAND_DISABLE, id);
        }),
        ("reset", |rig, id| {
            rig.mark(0, START, 1);
            rig.command(0, COMMAND_RESET, id);
        }),
    ]
}

/// VPMU-D-6.11-3.
#[test]
fn links_end_with_the_target() {
    for (state, bring) in states() {
        let mut rig = Rig::new();
        let start = trigger(&mut rig, START, 1);
        let stop = trigger(&mut rig, STOP, 1);
        for _ in 0..2 {
            let target = rig.open(&paused(KIND_MARK, WORK)).expect("open");
            rig.link(start, target, LINK_STARTER).expect("linked");
            rig.link(stop, target, LINK_STOPPER).expect("linked");
            bring(&mut rig, target);
            rig.close(target).expect("closed");
            rig.mark(0, START, 1);
            rig.mark(0, STOP, 1);
            let gone = rig.link(start, target, LINK_STARTER);
            assert_eq!(gone, Err(libc::ENOENT), "{state}");
        }
        for trigger in [start, stop] {
            rig.close(trigger).expect("closed");
        }
    }
}

#[test]
fn target_left_paused_waits_for_another_starter() {
    for (state, bring) in states() {
        let mut rig = Rig::new();
        let target = rig.open(&paused(KIND_MARK, WORK)).expect("open");
        let start = trigger(&mut rig, STOP, 1);
        rig.link(start, target, LINK_STARTER).expect("linked");
        bring(&mut rig, start);
        rig.close(start).expect("closed");
        rig.mark(0, STOP, 1);
        rig.mark(0, 5, 1);
        assert_eq!(rig.value(0, target), 0, "{state}");
        let other = trigger(&mut rig, START, 1);
        rig.link(other, target, LINK_STARTER).expect("linked");
        rig.mark(0, 5, 1);
        assert_eq!(rig.value(0, target), 0, "{state}");
        rig.mark(0, START, 1);
        rig.mark(0, 5, 1);
        assert_eq!(rig.value(0, target), 1, "{state}");
    }
}

#[test]
fn target_without_its_stopper_counts_on() {
    let mut rig = Rig::new();
    let target = rig.open(&paused(KIND_MARK, WORK)).expect("open");
    let start = trigger(&mut rig, START, 1);
    let stop = trigger(&mut rig, STOP, 1);
    rig.link(start, target, LINK_STARTER).expect("linked");
    rig.link(stop, target, LINK_STOPPER).expect("linked");
    rig.mark(0, START, 1);
    rig.close(stop).expect("closed");
    rig.mark(0, STOP, 1);
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, target), 1);
    // The target no longer has a stopper, but still has its starter. Therefore, it can get another stopper, but not
    // another starter.
    let other = trigger(&mut rig, STOP, 1);
    assert_eq!(rig.link(other, target, LINK_STARTER), Err(libc::EBUSY));
    assert_eq!(rig.link(other, target, LINK_STOPPER), Ok(()));
    rig.mark(0, STOP, 1);
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, target), 1);
}

#[test]
fn disabled_trigger_does_nothing() {
    let mut rig = Rig::new();
    let target = rig.open(&paused(KIND_MARK, WORK)).expect("open");
    let start = trigger(&mut rig, START, 1);
    rig.link(start, target, LINK_STARTER).expect("linked");
    rig.command(0, COMMAND_DISABLE, start);
    rig.mark(0, START, 1);
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, target), 0);
}

#[test]
fn links_of_an_event_in_error_have_no_effect() {
    let mut rig = Rig::new();
    let target = between_marks(&mut rig, &paused(KIND_HARDWARE, 0));
    rig.world.break_host();
    rig.mark(0, START, 1);
    let reply = rig.command(0, COMMAND_READ, target);
    assert_eq!(
        reply.state.get(),
        STATE_ERROR,
        "the host does not start its counter"
    );
    rig.mark(0, STOP, 1);
    rig.mark(0, START, 1);
    let other = trigger(&mut rig, 9, 1);
    assert_eq!(rig.link(other, target, LINK_STARTER), Err(libc::EBUSY));
    rig.close(target).expect("closed");
    rig.mark(0, START, 1);
}

#[test]
fn reset_ends_all_links() {
    let mut rig = Rig::new();
    let target = between_marks(&mut rig, &paused(KIND_MARK, WORK));
    rig.vpmu.reset();
    rig.activate(ALL_FEATURES);
    let start = trigger(&mut rig, START, 1);
    assert_eq!(rig.link(start, target, LINK_STARTER), Err(libc::ENOENT));
    let again = between_marks(&mut rig, &paused(KIND_MARK, WORK));
    rig.mark(0, START, 1);
    rig.mark(0, 5, 1);
    assert_eq!(rig.value(0, again), 1);
}

#[test]
fn pause_and_links_survive_a_reset_and_the_vcpus_thread() {
    let mut rig = Rig::new();
    let open = |rig: &mut Rig, request: OpenRequest| {
        let flags = request.flags.get() | OPEN_PERSISTENT;
        let request = OpenRequest {
            flags: flags.into(),
            ..request
        };
        rig.open(&request).expect("open")
    };
    let target = open(&mut rig, paused(FAULTS.0, FAULTS.1));
    let start = OpenRequest {
        period: 1.into(),
        flags: OPEN_ENABLED.into(),
        ..open_of(KIND_MARK, START.into(), 0)
    };
    let start = open(&mut rig, start);
    rig.link(start, target, LINK_STARTER).expect("linked");
    rig.vpmu.reset();
    rig.attach_as(0, 500);
    rig.activate(ALL_FEATURES);
    rig.world.work(500, 10, 4);
    assert_eq!(
        rig.value(0, target),
        0,
        "the target is still paused on the new thread"
    );
    rig.mark(0, START, 1);
    rig.world.work(500, 10, 4);
    assert_eq!(rig.value(0, target), 10);
    let other = trigger(&mut rig, STOP, 1);
    assert_eq!(rig.link(other, target, LINK_STARTER), Err(libc::EBUSY));
}
