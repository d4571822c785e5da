//! Making an event persistent and non-persistent.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Fields, Fixture, limits};

use super::{marks, name};

/// VPMU-D-6.10-1.
#[test]
fn persistent_event_is_not_closed_until_it_is_attached() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0));
    assert_eq!(fixture.reattach(event), Err(libc::EINVAL), "the event is not persistent");
    fixture.detach(event, "").expect("detached");
    assert_eq!(fixture.close(event), Err(libc::EBUSY));
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.value(0, event), 1, "the refused close did not end the event");
    fixture.reattach(event).expect("attached");
    assert_eq!(fixture.listed(), []);
    assert_eq!(fixture.reattach(event), Err(libc::EINVAL));
    fixture.close(event).expect("closed");
    assert_eq!(fixture.detach(event, ""), Err(libc::ENOENT));
    assert_eq!(fixture.reattach(event), Err(libc::ENOENT));
}

#[test]
fn target_of_others_and_former_leader_can_be_detached() {
    let mut fixture = Fixture::new();
    let parent = fixture.opened(&marks(0));
    fixture.opened(&marks(0).parent(parent));
    let leader = fixture.opened(&marks(0));
    let member = fixture.opened(&marks(0).leader(leader));
    fixture.map(parent, 1);
    let redirected = fixture.opened(&marks(0));
    fixture.redirect(redirected, parent).expect("redirected");
    fixture.detach(parent, "").expect("events that write to the parent's ring do not prevent the detach");
    assert_eq!(fixture.detach(leader, ""), Err(libc::EINVAL));
    fixture.close(member).expect("closed");
    fixture.detach(leader, "").expect("the group no longer has members");
}

#[test]
fn persistent_event_joins_no_group_and_is_not_redirected() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0));
    let other = fixture.opened(&marks(0));
    fixture.detach(event, "").expect("detached");
    let member = marks(0).leader(event);
    assert_eq!(fixture.open(&member), Err(libc::EINVAL));
    fixture.map(other, 1);
    assert_eq!(fixture.redirect(event, other), Err(libc::EINVAL));
    assert_eq!(fixture.redirect(event, 0), Err(libc::EINVAL));
    fixture.unmap(other).expect("unmapped");
    let mut ring = fixture.map(event, 1);
    fixture.redirect(other, event).expect("others may");
    fixture.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 2);
}

#[test]
fn event_can_be_opened_persistent() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0).flags(OPEN_ENABLED | OPEN_PERSISTENT));
    assert_eq!(fixture.close(event), Err(libc::EBUSY));
    let listed = fixture.listed();
    assert_eq!(listed.len(), 1);
    assert_eq!(name(&listed[0]), format!("event{event}"));
}

#[test]
fn name_of_another_events_id_is_refused() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0));
    for id in [event + 1, 0, u64::MAX] {
        let name = format!("event{id}");
        assert_eq!(fixture.detach(event, &name), Err(libc::EINVAL), "{name}");
    }
    assert_eq!(fixture.detach(event, &format!("event{event}")), Ok(()));
    // The next event can still be given this name.
    let next = fixture.opened(&marks(0).flags(OPEN_PERSISTENT));
    assert_eq!(name(&fixture.listed()[1]), format!("event{next}"));
}

#[test]
fn guests_persistent_events_are_limited() {
    let limits = limits().with(|limits| limits.max_persistent = 2);
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let events = [(); 3].map(|()| fixture.opened(&marks(0)));
    fixture.detach(events[0], "").expect("detached");
    fixture.detach(events[1], "").expect("detached");
    assert_eq!(fixture.detach(events[2], ""), Err(libc::ENOSPC));
    fixture.detach(events[1], "again").expect("the event is already persistent");
    let persistent = marks(0).flags(OPEN_PERSISTENT);
    assert_eq!(fixture.open(&persistent), Err(libc::ENOSPC));
    fixture.reattach(events[0]).expect("attached");
    fixture.detach(events[2], "").expect("room again");
    let mut config = [0; 4];
    let offset = std::mem::offset_of!(Config, max_persistent) as u64;
    fixture.vpmu.read_config(offset, &mut config);
    assert_eq!(u32::from_le_bytes(config), 2);
}

#[test]
fn names() {
    let mut fixture = Fixture::new();
    let [one, two] = [(); 2].map(|()| fixture.opened(&marks(0)));
    for bad in ["9a", "a b", "A", "a/b", "-", "a.b"] {
        assert_eq!(fixture.detach(one, bad), Err(libc::EINVAL), "{bad}");
    }
    assert_eq!(fixture.detach_raw(one, &[b'a'; 40]), Err(libc::EINVAL), "a name without a terminating zero");
    assert_eq!(fixture.detach_raw(one, b"a\0b"), Err(libc::EINVAL));
    assert_eq!(fixture.listed(), []);
    let names = |fixture: &mut Fixture| -> Vec<String> { fixture.listed().iter().map(name).collect() };
    fixture.detach(one, "exits-0").expect("detached");
    assert_eq!(fixture.detach(two, "exits-0"), Err(libc::EEXIST));
    fixture.detach(two, "").expect("detached");
    assert_eq!(names(&mut fixture), ["exits-0".to_owned(), format!("event{two}")]);
    fixture.detach(one, "").expect("detached already");
    fixture.detach(one, "exits-0").expect("its own");
    assert_eq!(names(&mut fixture)[0], "exits-0");
    fixture.detach(one, "other").expect("renamed");
    fixture.detach(two, "exits-0").expect("free now");
    assert_eq!(names(&mut fixture), ["other", "exits-0"]);
    fixture.reattach(one).expect("attached");
    fixture.detach(one, "").expect("detached");
    assert_eq!(names(&mut fixture)[0], format!("event{one}"), "the earlier name is forgotten");
}
