//! Making an event persistent and non-persistent.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, CYCLES, Fields, Fixture, header, limits, open_of, window};

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
fn group_task_and_inherited_events_are_not_made_persistent() {
    let mut fixture = Fixture::new();
    let task = fixture.opened(&marks(CONTEXT_TASK));
    let parent = fixture.opened(&marks(0));
    let child = fixture.opened(&marks(0).parent(parent));
    let leader = fixture.opened(&marks(0));
    let member = fixture.opened(&marks(0).leader(leader));
    fixture.map(parent, 1);
    let redirected = fixture.opened(&marks(0));
    fixture.redirect(redirected, parent).expect("redirected");
    let (kind, config) = CYCLES;
    let failed = fixture.opened(&open_of(kind, config, 0));
    fixture.host.break_host();
    fixture.command(0, COMMAND_ENABLE, failed);
    for event in [task, child, leader, member, redirected, failed] {
        assert_eq!(fixture.detach(event, ""), Err(libc::EINVAL), "{event}");
    }
    assert_eq!(fixture.detach(77, ""), Err(libc::ENOENT));
    fixture.detach(parent, "").expect("events that write to the parent's ring do not prevent the detach");
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
    let flags = OPEN_ENABLED | OPEN_PERSISTENT;
    let persistent = |request: OpenRequest| request.flags(flags);
    let event = fixture.opened(&persistent(marks(0)));
    assert_eq!(fixture.close(event), Err(libc::EBUSY));
    let listed = fixture.listed();
    assert_eq!(listed.len(), 1);
    assert_eq!(name(&listed[0]), format!("event{event}"));
    let other = fixture.opened(&marks(0));
    let of_family = marks(0).parent(other);
    let of_group = marks(0).leader(other);
    for refused in [marks(CONTEXT_TASK), of_family, of_group] {
        assert_eq!(fixture.open(&persistent(refused)), Err(libc::EINVAL));
    }
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

#[test]
fn detach_request_of_the_wrong_size_is_refused() {
    let mut fixture = Fixture::windowed(&window(4));
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    let short = header(CONTROL_DETACH, event);
    assert_eq!(fixture.control(&short), Err(libc::EINVAL));
    assert_eq!(fixture.list(0, 1, 8), Ok(vec![]));
    let short = header(CONTROL_PERSISTENT, 0);
    assert_eq!(fixture.control(&short), Err(libc::EINVAL));
    for (event, reserved) in [(event, 0), (0, 1)] {
        let request = PersistentRequest {
            header: header(CONTROL_PERSISTENT, event),
            reserved: reserved.into(),
            ..PersistentRequest::default()
        };
        assert_eq!(fixture.control(&request), Err(libc::EINVAL));
    }
}
