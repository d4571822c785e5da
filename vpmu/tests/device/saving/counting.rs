//! Counts, states and totals across a save and restore.

use vpmu::abi::*;
use vpmu::{EventMatch, ExitReason, Policy, Tier};
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, command, header, open_of, thread, window};

use super::{mark, marks};
use crate::persistent::{self, asked};

/// VPMU-D-6.13-2.
#[test]
fn counts_continue_over_twenty_saves() {
    let mut fixture = Fixture::new();
    let requests = [
        open_of(KIND_MARK, 5, 0),
        open_of(KIND_EXITS, EXIT_IO, 0),
        open_of(CYCLES.0, CYCLES.1, 0),
        open_of(FAULTS.0, FAULTS.1, CONTEXT_TASK),
        open_of(KIND_EXITS, EXIT_ALL, 0),
    ];
    let events = requests.map(|request| {
        let event = fixture.opened(&request);
        fixture.command(0, COMMAND_ENABLE, event);
        event
    });
    fixture.command(0, COMMAND_IN, events[3]);
    for _ in 0..20 {
        mark(&fixture, 1, 3);
        fixture.exit(0, ExitReason::Io, &mut At(1));
        fixture.host.work(thread(0), 100, 4);
        fixture.host.add_exits(7);
        fixture.move_on();
    }
    let counts = events.map(|event| fixture.value(0, event));
    assert_eq!(counts, [60, 20, 2000, 2000, 140]);
    let reply = fixture.command(0, COMMAND_OUT, events[3]);
    assert_eq!(reply.state.get(), STATE_INACTIVE);
    fixture.host.work(thread(0), 100, 4);
    assert_eq!(fixture.value(0, events[3]), 2000);
    for event in events {
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.host.open_counters(), 0);
}

/// VPMU-D-6.13-5.
#[test]
fn time_between_save_and_attach_is_not_counted() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).flags(OPEN_ENABLED));
    let page = fixture.map(event, 0);
    fixture.host.pass(1_000_000);
    fixture.halt();
    let before = fixture.read(0, event).time_enabled.get();
    fixture.halt();
    let state = fixture.save();
    let mut next = fixture.successor(fixture.settings(), fixture.memory.clone(), None);
    fixture.vpmu.reset();
    next.host.pass(1_000_000_000);
    let (features, queues) = next.transport();
    let memory = next.memory.clone();
    next.vpmu.restore(&state, memory, features, &queues, next.interrupt.clone()).expect("restored");
    let growing = page.field(40) & 1 << 3 != 0;
    assert!(!growing, "the times grow before a vCPU is attached");
    (0..2).for_each(|vcpu| next.attach(vcpu));
    assert!(page.field(40) & 1 << 3 != 0);
    next.host.pass(500);
    let after = next.read(0, event).time_enabled.get();
    // Each read of the clock advances it by a tick.
    assert!((500..600).contains(&(after - before)), "the enabled time grew by {}", after - before);
}

#[test]
fn states_and_limits_are_restored() {
    let mut fixture = Fixture::new();
    let off = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let request = open_of(KIND_MARK, 5, 0).flags(OPEN_ENABLED | OPEN_PAUSED);
    let paused = fixture.opened(&request);
    let task = fixture.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK));
    fixture.command(0, COMMAND_ENABLE, task);
    let limited = fixture.opened(&marks(0, 2).flags(0));
    fixture.valued(0, COMMAND_REFRESH, limited, 3);
    mark(&fixture, 1, 3);
    fixture.move_on();
    mark(&fixture, 1, 2);
    let all = [off, paused, task, limited];
    let states = |fixture: &mut Fixture| {
        all.map(|event| {
            let reply = fixture.read(0, event);
            (reply.state.get(), reply.value.get())
        })
    };
    assert_eq!(states(&mut fixture), [(STATE_OFF, 0), (STATE_ACTIVE, 0), (STATE_INACTIVE, 0), (STATE_ACTIVE, 5)]);
    mark(&fixture, 1, 5);
    assert_eq!(states(&mut fixture)[3], (STATE_OFF, 6), "the third overflow uses up the limit");
}

#[test]
fn event_in_error_stays_in_error() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).flags(OPEN_ENABLED));
    fixture.host.give_up(thread(0));
    fixture.command(0, COMMAND_READ, event);
    fixture.move_on();
    fixture.post_notice(0, 64);
    assert_eq!(fixture.notice(), Some((NOTICE_ERROR, event)), "the notice is still due");
    let reply = fixture.command(0, COMMAND_READ, event);
    assert_eq!(reply.state.get(), STATE_ERROR);
    fixture.move_on();
    fixture.post_notice(2, 64);
    assert_eq!(fixture.notice(), None, "the notice is sent only once");
}

/// VPMU-D-6.13-6.
#[test]
fn restored_event_without_a_host_counter_is_in_error() {
    let mut fixture = Fixture::new();
    let lost = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0));
    let kept = fixture.opened(&open_of(KIND_MARK, 5, 0));
    for event in [lost, kept] {
        fixture.command(0, COMMAND_ENABLE, event);
    }
    fixture.host.work(thread(0), 100, 4);
    mark(&fixture, 1, 3);
    fixture.halt();
    let state = fixture.save();
    let mut next = fixture.successor(fixture.settings(), fixture.memory.clone(), None);
    fixture.vpmu.reset();
    next.host.break_host();
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
    let mut fixture = Fixture::windowed(&window);
    let denied = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let kept = fixture.opened(&open_of(KIND_EXITS, EXIT_IO, 0));
    for event in [denied, kept] {
        fixture.command(0, COMMAND_ENABLE, event);
    }
    let operators = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    mark(&fixture, 1, 3);
    fixture.halt();
    let state = fixture.save();
    let marks = EventMatch::kind(KIND_MARK);
    let mut settings = fixture.settings();
    settings.policy = Policy::new(Tier::Full.events(), vec![marks]);
    let mut next = fixture.successor(settings, fixture.memory.clone(), Some(&window));
    fixture.vpmu.reset();
    next.resume(&state);
    next.post_notice(0, 64);
    let notice = (NOTICE_PERSISTENT, operators, 0);
    assert_eq!(next.counted_notice(), Some(notice), "the notice is still due");
    next.post_notice(1, 64);
    let notice = (NOTICE_ERROR, denied, REFUSED_POLICY.into());
    assert_eq!(next.counted_notice(), Some(notice));
    let reply = next.command(0, COMMAND_READ, denied);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ERROR, 3));
    mark(&next, 4, 2);
    next.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(next.value(0, kept), 1);
    let history = persistent::samples(&next, operators);
    assert_eq!(history.len(), 5, "the policy does not apply to the operator's events");
}

#[test]
fn totals_and_exits_only_grow() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(event, 4);
    mark(&fixture, 1, 10);
    fixture.halt();
    let (before, exits) = (fixture.vpmu.metrics(), fixture.vpmu.exits(0));
    fixture.move_on();
    let (after, now) = (fixture.vpmu.metrics(), fixture.vpmu.exits(0));
    // There is one more exit, because the vCPU left the guest so that the device could be saved.
    assert_eq!(now.total(), exits.total() + 1);
    assert_eq!((now.mmio, exits.mmio), (exits.mmio, 10));
    assert_eq!(
        (after.samples_written, after.marks, after.events_opened),
        (before.samples_written, before.marks, before.events_opened)
    );
    assert_eq!(after.kicks, before.kicks);
    mark(&fixture, 1, 10);
    assert_eq!(fixture.vpmu.metrics().samples_written, 20);
    assert_eq!(ring.samples().len(), 20);
}

/// VPMU-D-6.13-3.
#[test]
fn ids_are_not_reused_after_a_restore() {
    let mut fixture = Fixture::new();
    let first = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let second = fixture.opened(&open_of(KIND_MARK, 5, 0));
    fixture.close(second).expect("closed");
    fixture.move_on();
    let third = fixture.opened(&open_of(KIND_MARK, 5, 0));
    assert!(first < second && second < third);
}

/// VPMU-D-6.13-4.
#[test]
fn waiting_requests_are_served_after_a_restore() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    fixture.halt();
    let close = header(CONTROL_CLOSE, event);
    let bytes = zerocopy::IntoBytes::as_bytes(&close);
    fixture.queues[0].request(bytes, size_of::<ControlReply>());
    fixture.move_on();
    assert!(fixture.queues[0].answer().is_some());
    let reply = fixture.commands(0, &[command(COMMAND_READ, event)])[0];
    assert_eq!(reply.status.get(), libc::ENOENT.unsigned_abs());
}
