//! Counts, states and totals across a save and restore.

use vpmu::abi::*;
use vpmu::{EventMatch, ExitReason, Policy, Tier};

use super::{mark, marks};
use crate::persistent::{self, asked, window};
use crate::rig::{Rig, command, open_of, thread};
use crate::world::{At, CYCLES, FAULTS};

/// VPMU-D-6.13-2.
#[test]
fn counts_continue_over_twenty_saves() {
    let mut rig = Rig::new();
    let requests = [
        open_of(KIND_MARK, 5, 0),
        open_of(KIND_EXITS, EXIT_IO, 0),
        open_of(CYCLES.0, CYCLES.1, 0),
        open_of(FAULTS.0, FAULTS.1, CONTEXT_TASK),
        open_of(KIND_EXITS, EXIT_ALL, 0),
    ];
    let events = requests.map(|request| {
        let event = rig.open(&request).expect("open");
        rig.command(0, COMMAND_ENABLE, event);
        event
    });
    rig.command(0, COMMAND_IN, events[3]);
    for _ in 0..20 {
        mark(&rig, 1, 3);
        rig.exit(0, ExitReason::Io, &mut At(1));
        rig.world.work(thread(0), 100, 4);
        rig.world.add_exits(7);
        rig.move_on();
    }
    let counts = events.map(|event| rig.value(0, event));
    assert_eq!(counts, [60, 20, 2000, 2000, 140]);
    let reply = rig.command(0, COMMAND_OUT, events[3]);
    assert_eq!(reply.state.get(), STATE_INACTIVE);
    rig.world.work(thread(0), 100, 4);
    assert_eq!(rig.value(0, events[3]), 2000);
    for event in events {
        rig.close(event).expect("closed");
    }
    assert_eq!(rig.world.open_counters(), 0);
}

/// VPMU-D-6.13-5.
#[test]
fn time_between_save_and_attach_is_not_counted() {
    let mut rig = Rig::new();
    let event = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let page = rig.map(event, 0);
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.pass(1_000_000);
    rig.halt();
    let before = rig.read(0, event).time_enabled.get();
    rig.halt();
    let state = rig.save();
    let mut next = rig.successor(rig.settings(), rig.memory.clone(), None);
    rig.vpmu.reset();
    next.world.pass(1_000_000_000);
    let (features, queues) = next.transport();
    let memory = next.memory.clone();
    next.vpmu
        .restore(&state, memory, features, &queues, next.interrupt.clone())
        .expect("restored");
    let growing = page.field(40) & 1 << 3 != 0;
    assert!(!growing, "the times grow before a vCPU is attached");
    (0..2).for_each(|vcpu| next.attach(vcpu));
    assert!(page.field(40) & 1 << 3 != 0);
    next.world.pass(500);
    let after = next.read(0, event).time_enabled.get();
    // Each read of the clock advances it by a tick.
    assert!(
        (500..600).contains(&(after - before)),
        "the enabled time grew by {}",
        after - before
    );
}

#[test]
fn states_and_limits_are_restored() {
    let mut rig = Rig::new();
    let off = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let request = OpenRequest {
        flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
        ..open_of(KIND_MARK, 5, 0)
    };
    let paused = rig.open(&request).expect("open");
    let task = rig
        .open(&open_of(KIND_MARK, 5, CONTEXT_TASK))
        .expect("open");
    rig.command(0, COMMAND_ENABLE, task);
    let limited = rig
        .open(&OpenRequest {
            flags: 0.into(),
            ..marks(0, 2)
        })
        .expect("open");
    rig.valued(0, COMMAND_REFRESH, limited, 3);
    mark(&rig, 1, 3);
    rig.move_on();
    mark(&rig, 1, 2);
    let all = [off, paused, task, limited];
    let states = |rig: &mut Rig| {
        all.map(|event| {
            let reply = rig.read(0, event);
            (reply.state.get(), reply.value.get())
        })
    };
    assert_eq!(
        states(&mut rig),
        [
            (STATE_OFF, 0),
            (STATE_ACTIVE, 0),
            (STATE_INACTIVE, 0),
            (STATE_ACTIVE, 5)
        ]
    );
    mark(&rig, 1, 5);
    assert_eq!(
        states(&mut rig)[3],
        (STATE_OFF, 6),
        "the third overflow uses up the limit"
    );
}

#[test]
fn event_in_error_stays_in_error() {
    let mut rig = Rig::new();
    let event = rig.open(&open_of(CYCLES.0, CYCLES.1, 0)).expect("open");
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.give_up(thread(0));
    rig.command(0, COMMAND_READ, event);
    rig.move_on();
    rig.post_notice(0, 64);
    assert_eq!(
        rig.notice(),
        Some((NOTICE_ERROR, event)),
        "the notice is still due"
    );
    let reply = rig.command(0, COMMAND_READ, event);
    assert_eq!(reply.state.get(), STATE_ERROR);
    rig.move_on();
    rig.post_notice(2, 64);
    assert_eq!(rig.notice(), None, "the notice is sent only once");
}

/// VPMU-D-6.13-6.
#[test]
fn restored_event_without_a_host_counter_is_in_error() {
    let mut rig = Rig::new();
    let lost = rig.open(&open_of(CYCLES.0, CYCLES.1, 0)).expect("open");
    let kept = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    for event in [lost, kept] {
        rig.command(0, COMMAND_ENABLE, event);
    }
    rig.world.work(thread(0), 100, 4);
    mark(&rig, 1, 3);
    rig.halt();
    let state = rig.save();
    let mut next = rig.successor(rig.settings(), rig.memory.clone(), None);
    rig.vpmu.reset();
    next.world.break_host();
    next.resume(&state);
    next.post_notice(0, 64);
    assert_eq!(next.notice(), Some((NOTICE_ERROR, lost)));
    let reply = next.command(0, COMMAND_READ, lost);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 100));
    mark(&next, 1, 2);
    assert_eq!(next.value(0, kept), 5);
}

/// VPMU-D-6.13-6.
#[test]
fn restored_event_denied_by_the_operator_is_in_error() {
    let window = window(16);
    let mut rig = Rig::windowed(&window);
    let denied = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let kept = rig.open(&open_of(KIND_EXITS, EXIT_IO, 0)).expect("open");
    for event in [denied, kept] {
        rig.command(0, COMMAND_ENABLE, event);
    }
    let operators = rig.vpmu.persist(&asked("mark=5", 0)).expect("started");
    mark(&rig, 1, 3);
    rig.halt();
    let state = rig.save();
    let marks = EventMatch::kind(KIND_MARK);
    let mut settings = rig.settings();
    settings.policy = Policy::new(Tier::Full.events(), vec![marks]);
    let mut next = rig.successor(settings, rig.memory.clone(), Some(&window));
    rig.vpmu.reset();
    next.resume(&state);
    next.post_notice(0, 64);
    let notice = (NOTICE_PERSISTENT, operators, 0);
    assert_eq!(
        next.counted_notice(),
        Some(notice),
        "the notice is still due"
    );
    next.post_notice(1, 64);
    let notice = (NOTICE_ERROR, denied, REFUSED_POLICY.into());
    assert_eq!(next.counted_notice(), Some(notice));
    let reply = next.command(0, COMMAND_READ, denied);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 3));
    mark(&next, 4, 2);
    next.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(next.value(0, kept), 1);
    let history = persistent::samples(&next, operators);
    assert_eq!(
        history.len(),
        5,
        "the policy does not apply to the operator's events"
    );
}

#[test]
fn totals_and_exits_only_grow() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0, 1)).expect("open");
    let mut ring = rig.map(event, 4);
    mark(&rig, 1, 10);
    rig.halt();
    let (before, exits) = (rig.vpmu.metrics(), rig.vpmu.exits(0));
    rig.move_on();
    let (after, now) = (rig.vpmu.metrics(), rig.vpmu.exits(0));
    // There is one more exit, because the vCPU left the guest so that the device could be saved.
    assert_eq!(now.total(), exits.total() + 1);
    assert_eq!((now.mmio, exits.mmio), (exits.mmio, 10));
    assert_eq!(
        (after.samples_written, after.marks, after.events_opened),
        (before.samples_written, before.marks, before.events_opened)
    );
    assert_eq!(after.kicks, before.kicks);
    mark(&rig, 1, 10);
    assert_eq!(rig.vpmu.metrics().samples_written, 20);
    assert_eq!(ring.samples().len(), 20);
}

/// VPMU-D-6.13-3.
#[test]
fn ids_are_not_reused_after_a_restore() {
    let mut rig = Rig::new();
    let first = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    let second = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    rig.close(second).expect("closed");
    rig.move_on();
    let third = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    assert!(first < second && second < third);
}

/// VPMU-D-6.13-4.
#[test]
fn waiting_requests_are_served_after_a_restore() {
    let mut rig = Rig::new();
    let event = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    rig.halt();
    let close = Rig::header(CONTROL_CLOSE, event);
    let bytes = zerocopy::IntoBytes::as_bytes(&close);
    rig.queues[0].request(bytes, size_of::<ControlReply>());
    rig.move_on();
    assert!(rig.queues[0].answer().is_some());
    let reply = rig.commands(0, &[command(COMMAND_READ, event)])[0];
    assert_eq!(reply.status.get(), libc::ENOENT.unsigned_abs());
}
