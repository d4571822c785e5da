//! `COMMAND_REFRESH` sets the number of overflows after which an event is disabled.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, Fields, Fixture, open_of, thread};

/// VPMU-D-6.6-5.
#[test]
fn event_is_off_after_its_last_overflow() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(3));
    let mut ring = fixture.map(event, 1);
    fixture.post_notice(0, 16);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 4), 0);
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.notice(), Some((NOTICE_LIMIT, event)));
    assert_eq!(ring.samples().len(), 4);
    let reply = fixture.read(0, event);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_OFF, 12));
    assert!(!fixture.vcpus.wants_registers(0));
    // Once the event is enabled again, it has no limit.
    fixture.command(0, COMMAND_ENABLE, event);
    (0..30).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(ring.samples().len(), 10);
}

#[test]
fn limits_add_up_and_lost_records_count() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    for more in [2, 3] {
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, more), 0);
    }
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    let reply = fixture.read(0, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (5, 5), "without a ring, each overflow is lost");
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, u64::MAX), 0);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, u64::MAX), 0);
}

#[test]
fn only_sampling_events_have_a_limit() {
    let mut fixture = Fixture::new();
    let counting = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, counting, 1), libc::EINVAL);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 0), libc::EINVAL);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, 77, 1), libc::ENOENT);
    assert_eq!(fixture.read(0, event).state.get(), STATE_OFF);
}

#[test]
fn leader_at_its_limit_stops_its_group() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    let member = fixture.opened(&open_of(KIND_MARK, 5, 0).leader(leader).flags(OPEN_ENABLED));
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, leader, 7), 0);
    (0..100).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.value(0, member), 7);
}

#[test]
fn overflows_beyond_the_limit_are_dropped() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let event = fixture.opened(&open_of(kind, config, 0).sampled(100));
    let mut ring = fixture.map(event, 1);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 2), 0);
    fixture.host.work(thread(0), 500, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    assert_eq!(ring.samples().len(), 2);
    let reply = fixture.read(0, event);
    assert_eq!((reply.state.get(), reply.lost.get()), (STATE_OFF, 0));
    fixture.host.work(thread(0), 500, 4);
    assert_eq!(fixture.value(0, event), 500, "the event is disabled and no longer counts");
}
