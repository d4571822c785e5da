//! Which events can be linked, and what a link changes.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, open_of};

use super::{START, STOP, between_marks, paused, trigger};

#[test]
fn counting_event_and_trigger_can_be_targets() {
    let mut fixture = Fixture::new();
    let [mark, other] = [(); 2].map(|()| trigger(&mut fixture, START, 1));
    let counting = fixture.opened(&open_of(KIND_MARK, 9, 0));
    assert_eq!(fixture.link(other, mark, LINK_STOPPER), Ok(()));
    assert_eq!(fixture.link(mark, counting, LINK_STARTER), Ok(()));
}

#[test]
fn batched_event_can_be_a_target_but_no_trigger() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    let open = |fixture: &mut Fixture, engine: u32| {
        let request = open_of(KIND_HARDWARE, 0, 0).sampled(100).engine(engine);
        let reply = fixture.open_reply(&request);
        assert_eq!((reply.status.get(), reply.engine.get()), (0, engine));
        reply.id.get()
    };
    let [batched, exact] = [ENGINE_BATCHED, ENGINE_EXIT].map(|engine| open(&mut fixture, engine));
    for role in [LINK_STARTER, LINK_STOPPER] {
        assert_eq!(fixture.link(batched, exact, role), Err(libc::EOPNOTSUPP));
        assert_eq!(fixture.link(exact, batched, role), Ok(()));
    }
}

#[test]
fn task_events_and_children_can_be_linked() {
    let mut fixture = Fixture::new();
    let task = |fixture: &mut Fixture, value, period: u64, flags: u32, parent: u64| {
        let request = open_of(KIND_MARK, value, CONTEXT_TASK).period(period).flags(OPEN_ENABLED | flags).parent(parent);
        fixture.opened(&request)
    };
    let start = task(&mut fixture, START.into(), 1, 0, 0);
    let target = task(&mut fixture, 5, 0, OPEN_PAUSED, 0);
    let start_child = task(&mut fixture, START.into(), 1, 0, start);
    let child = task(&mut fixture, 5, 0, OPEN_PAUSED, target);
    for (event, target) in [(start, target), (start_child, child)] {
        fixture.link(event, target, LINK_STARTER).expect("linked");
    }
    // The child runs on one vCPU, and the parent runs on the other.
    for (vcpu, event) in [(0, start), (0, target), (1, start_child), (1, child)] {
        fixture.command(vcpu, COMMAND_IN, event);
    }
    fixture.mark(1, START, 1);
    for vcpu in [0, 1] {
        fixture.mark(vcpu, 5, 1);
    }
    assert_eq!((fixture.value(0, target), fixture.value(1, child)), (0, 1));
}

#[test]
fn inactive_target_is_not_changed() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(KIND_MARK, 5));
    let counts = |fixture: &mut Fixture| {
        fixture.command(0, COMMAND_RESET, target);
        fixture.mark(0, 5, 1);
        fixture.value(0, target) == 1
    };
    fixture.command(0, COMMAND_DISABLE, target);
    fixture.mark(0, START, 1);
    fixture.command(0, COMMAND_ENABLE, target);
    assert!(!counts(&mut fixture), "a start made a disabled target count");
    fixture.mark(0, START, 1);
    assert!(counts(&mut fixture));
    fixture.command(0, COMMAND_DISABLE, target);
    fixture.mark(0, STOP, 1);
    fixture.command(0, COMMAND_ENABLE, target);
    assert!(counts(&mut fixture), "a stop of a disabled target kept it from counting later");
}

#[test]
fn paused_event_keeps_its_state_and_times() {
    let mut fixture = Fixture::new();
    let target = between_marks(&mut fixture, &paused(KIND_EXITS, EXIT_IO));
    let page = fixture.map(target, 0);
    fixture.host.pass(1000);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    let before = fixture.read(0, target);
    assert_eq!(before.state.get(), STATE_ACTIVE);
    assert_eq!((before.value.get(), page.field(16)), (0, 0));
    assert!(before.time_running.get() >= 1000);
    assert_eq!(before.time_enabled, before.time_running);
    fixture.mark(0, START, 1);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(page.field(16), 1, "published immediately");
    fixture.mark(0, STOP, 1);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    assert_eq!(page.field(16), 1);
    fixture.host.pass(1000);
    let after = fixture.read(0, target);
    assert_eq!(after.value.get(), 1);
    assert!(after.time_running.get() >= before.time_running.get() + 1000);
    assert_eq!(after.time_enabled, after.time_running);
    fixture.command(0, COMMAND_RESET, target);
    fixture.mark(0, START, 1);
    assert_eq!(fixture.value(0, target), 0, "events during the pause are not counted later");
}
