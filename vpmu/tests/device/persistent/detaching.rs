//! Making an event persistent and non-persistent.

use vpmu::abi::*;

use super::{marks, name, window};
use crate::rig::{ALL_FEATURES, Rig, limits, open_of, sampling};
use crate::world::CYCLES;

/// VPMU-D-6.10-1.
#[test]
fn persistent_event_is_not_closed_until_it_is_attached() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0)).expect("open");
    assert_eq!(
        rig.reattach(event),
        Err(libc::EINVAL),
        "the event is not persistent"
    );
    rig.detach(event, "").expect("detached");
    assert_eq!(rig.close(event), Err(libc::EBUSY));
    rig.mark(0, 5, 1);
    assert_eq!(
        rig.value(0, event),
        1,
        "the refused close did not end the event"
    );
    rig.reattach(event).expect("attached");
    assert_eq!(rig.listed(), []);
    assert_eq!(rig.reattach(event), Err(libc::EINVAL));
    rig.close(event).expect("closed");
    assert_eq!(rig.detach(event, ""), Err(libc::ENOENT));
    assert_eq!(rig.reattach(event), Err(libc::ENOENT));
}

#[test]
fn group_task_and_inherited_events_are_not_made_persistent() {
    let mut rig = Rig::new();
    let task = rig.open(&marks(CONTEXT_TASK)).expect("open");
    let parent = rig.open(&marks(0)).expect("open");
    let child = OpenRequest {
        parent: parent.into(),
        ..marks(0)
    };
    let child = rig.open(&child).expect("open");
    let leader = rig.open(&marks(0)).expect("open");
    let member = OpenRequest {
        leader: leader.into(),
        ..marks(0)
    };
    let member = rig.open(&member).expect("open");
    rig.map(parent, 1);
    let redirected = rig.open(&marks(0)).expect("open");
    rig.redirect(redirected, parent).expect("redirected");
    let (kind, config) = CYCLES;
    let failed = rig.open(&open_of(kind, config, 0)).expect("open");
    rig.world.break_host();
    rig.command(0, COMMAND_ENABLE, failed);
    for event in [task, child, leader, member, redirected, failed] {
        assert_eq!(rig.detach(event, ""), Err(libc::EINVAL), "{event}");
    }
    assert_eq!(rig.detach(77, ""), Err(libc::ENOENT));
    rig.detach(parent, "")
        .expect("events that write to the parent's ring do not prevent the detach");
    rig.close(member).expect("closed");
    rig.detach(leader, "")
        .expect("the group no longer has members");
}

#[test]
fn persistent_event_joins_no_group_and_is_not_redirected() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0)).expect("open");
    let other = rig.open(&marks(0)).expect("open");
    rig.detach(event, "").expect("detached");
    let member = OpenRequest {
        leader: event.into(),
        ..marks(0)
    };
    assert_eq!(rig.open(&member), Err(libc::EINVAL));
    rig.map(other, 1);
    assert_eq!(rig.redirect(event, other), Err(libc::EINVAL));
    assert_eq!(rig.redirect(event, 0), Err(libc::EINVAL));
    rig.unmap(other).expect("unmapped");
    let mut ring = rig.map(event, 1);
    rig.redirect(other, event).expect("others may");
    rig.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 2);
}

#[test]
fn event_can_be_opened_persistent() {
    let mut rig = Rig::new();
    let flags = OPEN_ENABLED | OPEN_PERSISTENT;
    let persistent = |request| OpenRequest {
        flags: flags.into(),
        ..request
    };
    let event = rig.open(&persistent(marks(0))).expect("open");
    assert_eq!(rig.close(event), Err(libc::EBUSY));
    let listed = rig.listed();
    assert_eq!(listed.len(), 1);
    assert_eq!(name(&listed[0]), format!("event{event}"));
    let other = rig.open(&marks(0)).expect("open");
    let of_family = OpenRequest {
        parent: other.into(),
        ..marks(0)
    };
    let of_group = OpenRequest {
        leader: other.into(),
        ..marks(0)
    };
    for refused in [marks(CONTEXT_TASK), of_family, of_group] {
        assert_eq!(rig.open(&persistent(refused)), Err(libc::EINVAL));
    }
}

#[test]
fn name_of_another_events_id_is_refused() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0)).expect("open");
    for id in [event + 1, 0, u64::MAX] {
        let name = format!("event{id}");
        assert_eq!(rig.detach(event, &name), Err(libc::EINVAL), "{name}");
    }
    assert_eq!(rig.detach(event, &format!("event{event}")), Ok(()));
    // The next event can still be given this name.
    let persistent = OpenRequest {
        flags: OPEN_PERSISTENT.into(),
        ..marks(0)
    };
    let next = rig.open(&persistent).expect("open");
    assert_eq!(name(&rig.listed()[1]), format!("event{next}"));
}

#[test]
fn guests_persistent_events_are_limited() {
    let limits = limits().with(|limits| limits.max_persistent = 2);
    let mut rig = Rig::with(limits, ALL_FEATURES);
    let events = [(); 3].map(|()| rig.open(&marks(0)).expect("open"));
    rig.detach(events[0], "").expect("detached");
    rig.detach(events[1], "").expect("detached");
    assert_eq!(rig.detach(events[2], ""), Err(libc::ENOSPC));
    rig.detach(events[1], "again")
        .expect("the event is already persistent");
    let persistent = OpenRequest {
        flags: OPEN_PERSISTENT.into(),
        ..marks(0)
    };
    assert_eq!(rig.open(&persistent), Err(libc::ENOSPC));
    rig.reattach(events[0]).expect("attached");
    rig.detach(events[2], "").expect("room again");
    let mut config = [0; 4];
    let offset = std::mem::offset_of!(Config, max_persistent) as u64;
    rig.vpmu.read_config(offset, &mut config);
    assert_eq!(u32::from_le_bytes(config), 2);
}

#[test]
fn names() {
    let mut rig = Rig::new();
    let [one, two] = [(); 2].map(|()| rig.open(&marks(0)).expect("open"));
    for bad in ["9a", "a b", "A", "a/b", "-", "a.b"] {
        assert_eq!(rig.detach(one, bad), Err(libc::EINVAL), "{bad}");
    }
    assert_eq!(
        rig.detach_raw(one, &[b'a'; 40]),
        Err(libc::EINVAL),
        "a name without a terminating zero"
    );
    assert_eq!(rig.detach_raw(one, b"a\0b"), Err(libc::EINVAL));
    assert_eq!(rig.listed(), []);
    let names = |rig: &mut Rig| -> Vec<String> { rig.listed().iter().map(name).collect() };
    rig.detach(one, "exits-0").expect("detached");
    assert_eq!(rig.detach(two, "exits-0"), Err(libc::EEXIST));
    rig.detach(two, "").expect("detached");
    assert_eq!(
        names(&mut rig),
        ["exits-0".to_owned(), format!("event{two}")]
    );
    rig.detach(one, "").expect("detached already");
    rig.detach(one, "exits-0").expect("its own");
    assert_eq!(names(&mut rig)[0], "exits-0");
    rig.detach(one, "other").expect("renamed");
    rig.detach(two, "exits-0").expect("free now");
    assert_eq!(names(&mut rig), ["other", "exits-0"]);
    rig.reattach(one).expect("attached");
    rig.detach(one, "").expect("detached");
    assert_eq!(
        names(&mut rig)[0],
        format!("event{one}"),
        "the earlier name is forgotten"
    );
}

#[test]
fn detach_request_of_the_wrong_size_is_refused() {
    let mut rig = Rig::windowed(&window(4));
    let event = rig
        .open(&sampling(open_of(KIND_MARK, 5, 0), 1))
        .expect("open");
    let short = Rig::header(CONTROL_DETACH, event);
    assert_eq!(rig.control(&short), Err(libc::EINVAL));
    assert_eq!(rig.list(0, 1, 8), Ok(vec![]));
    let short = Rig::header(CONTROL_PERSISTENT, 0);
    assert_eq!(rig.control(&short), Err(libc::EINVAL));
    for (event, reserved) in [(event, 0), (0, 1)] {
        let request = PersistentRequest {
            header: Rig::header(CONTROL_PERSISTENT, event),
            reserved: reserved.into(),
            ..PersistentRequest::default()
        };
        assert_eq!(rig.control(&request), Err(libc::EINVAL));
    }
}
