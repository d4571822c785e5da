//! How the operator's events start and end, and what the guest may do with them.

use vpmu::abi::*;
use vpmu::source::Rate;
use vpmu::{Engines, Persist, PersistError};
use vpmu_testkit::{Fields, Fixture, WINDOW_FEATURES, header, limits, open_of, window};

use super::{asked, marks, name};

#[test]
fn driver_can_read_the_operators_event() {
    let memory = window(16);
    let mut fixture = Fixture::bare(Engines::Auto, limits(), Some(&memory));
    let event = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    fixture.attach(0);
    fixture.mark(0, 5, 7);
    fixture.attach(1);
    fixture.activate(WINDOW_FEATURES);
    let listed = fixture.listed();
    assert_eq!(listed.len(), 1);
    let entry = listed[0];
    assert_eq!((entry.id.get(), name(&entry)), (event, "recorder".to_owned()));
    assert_eq!(entry.flags.get(), PERSISTENT_OPERATOR);
    assert_eq!((entry.pages.get(), entry.map.get(), entry.window_page.get()), (5, MAP_WINDOW, 0));
    let open = entry.open;
    let flags = OPEN_ENABLED | OPEN_BACKWARD | OPEN_SAMPLE_ID_ALL | OPEN_PERSISTENT;
    assert_eq!(open.flags.get(), flags);
    assert_eq!((open.kind.get(), open.config.get()), (KIND_MARK, 5));
    assert_eq!((open.context.get(), open.period.get()), (0, 1));
    fixture.mark(0, 5, 8);
    assert_eq!(fixture.value(0, event), 2, "counted before any driver");
}

/// VPMU-D-6.10-2.
#[test]
fn guest_cannot_change_the_operators_event() {
    let memory = window(64);
    let mut fixture = Fixture::windowed(&memory);
    let event = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let before = fixture.vpmu.persistent();
    let own = fixture.opened(&marks(0).flags(OPEN_ENABLED | OPEN_BACKWARD));
    let commands =
        [(COMMAND_ENABLE, 0), (COMMAND_DISABLE, 0), (COMMAND_RESET, 0), (COMMAND_PERIOD, 7), (COMMAND_REFRESH, 7)];
    for (op, value) in commands {
        assert_eq!(fixture.valued(0, op, event, value), libc::EPERM, "command {op}");
    }
    assert_eq!(fixture.close(event), Err(libc::EPERM));
    assert_eq!(fixture.detach(event, ""), Err(libc::EPERM));
    assert_eq!(fixture.detach(event, "mine"), Err(libc::EPERM));
    assert_eq!(fixture.reattach(event), Err(libc::EPERM));
    assert_eq!(fixture.map_pages(event, 0, &[0x9000]), Err(libc::EPERM));
    assert_eq!(fixture.map_window(event, 1, 0), Err(libc::EPERM));
    assert_eq!(fixture.unmap(event), Err(libc::EPERM));
    assert_eq!(fixture.map_as(CONTROL_MAP_AUX, event, 0, &[0x9000]), Err(libc::EPERM));
    assert_eq!(fixture.control(&header(CONTROL_UNMAP_AUX, event)), Err(libc::EPERM));
    assert_eq!(fixture.pause(event, 1), Err(libc::EPERM));
    assert_eq!(fixture.set_wakeup(event, 1, WAKEUP_RECORDS), Err(libc::EPERM));
    assert_eq!(fixture.redirect(event, own), Err(libc::EPERM));
    assert_eq!(fixture.redirect(own, event), Err(libc::EPERM));
    for role in [LINK_STARTER, LINK_STOPPER] {
        let link = |from, to: u64| LinkRequest {
            header: header(CONTROL_LINK, from),
            target: to.into(),
            role: role.into(),
            reserved: 0.into(),
        };
        assert_eq!(fixture.control(&link(event, own)), Err(libc::EPERM));
        assert_eq!(fixture.control(&link(own, event)), Err(libc::EPERM));
    }
    let child = marks(0).parent(event);
    assert_eq!(
        fixture.open(&child),
        Err(libc::EPERM),
        "an event of the guest cannot write to the ring of an operator's event"
    );
    let member = marks(0).leader(event);
    assert_eq!(fixture.open(&member), Err(libc::EINVAL));
    assert_eq!(fixture.value(0, event), 0, "any vCPU can read the event");
    let mut after = fixture.vpmu.persistent();
    for (after, before) in after.iter_mut().zip(&before) {
        (after.time_enabled, after.time_running) = (before.time_enabled, before.time_running);
    }
    assert_eq!(after, before);
    assert_eq!(fixture.redirect(own, 77), Err(libc::ENOENT));
}

/// VPMU-D-6.10-5.
#[test]
fn driver_is_notified_when_the_host_starts_or_ends_an_event() {
    let mut fixture = Fixture::windowed(&window(64));
    fixture.post_notice(0, 16);
    fixture.post_notice(1, 16);
    let event = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    assert_eq!(fixture.notice(), Some((NOTICE_PERSISTENT, event)));
    fixture.vpmu.end(event).expect("ended");
    assert_eq!(fixture.notice(), Some((NOTICE_PERSISTENT, event)));
    assert_eq!(fixture.listed(), []);
    assert_eq!(fixture.command(0, COMMAND_READ, event).status.get(), libc::ENOENT.unsigned_abs());
    assert!(matches!(fixture.vpmu.end(event), Err(PersistError::NoSuch(id)) if id == event));
    let again = fixture.vpmu.persist(&asked("mark=5", 0)).expect("its name and pages are free");
    assert_ne!(again, event);
    assert_eq!(fixture.listed()[0].window_page.get(), 0);
}

/// VPMU-D-6.10-1.
#[test]
fn operator_ends_persistent_events_of_the_guest_only() {
    let mut fixture = Fixture::windowed(&window(64));
    let event = fixture.opened(&marks(0));
    assert!(matches!(fixture.vpmu.end(event), Err(PersistError::NoSuch(_))));
    fixture.detach(event, "guests").expect("detached");
    assert!(!fixture.vpmu.persistent()[0].operator);
    fixture.vpmu.end(event).expect("ended");
    assert_eq!(fixture.close(event), Err(libc::ENOENT));
}

#[test]
fn refused_request_has_a_reason_and_no_effect() {
    let memory = window(8);
    let fixture = Fixture::windowed(&memory);
    let usual = asked("mark=5", 0);
    let refused = |persist: Persist| fixture.vpmu.persist(&persist).expect_err("refused").to_string();
    let event = |event: &str| Persist { event: event.to_owned(), ..usual.clone() };
    for (persist, says) in [
        (asked("mark=5", 2), "there is no vCPU 2: the guest has 2 vCPUs, counted from 0"),
        (event("nothing"), "this host has no event `nothing`"),
        (event("mark=x"), "this host has no event `mark=x`"),
        (event("mark=4294967296"), "this host has no event `mark=4294967296`"),
        (event("cycles=1"), "this host has no event `cycles=1`"),
        (event("cycles:x"), "this host has no event `cycles:x`"),
        (event("exit-trace-user"), "a trace needs an area"),
        (event("tsc:u"), "it cannot separate user and kernel mode"),
        (event("tsc"), "it cannot be sampled"),
        (Persist { rate: Some(Rate::Period(9)), ..event("cycles") }, "shorter than its counter supports"),
        (Persist { rate: Some(Rate::Period(1 << 63)), ..usual.clone() }, "its period is too long"),
        (Persist { rate: Some(Rate::Frequency(0)), ..usual.clone() }, "its frequency is zero, or above"),
        (Persist { rate: Some(Rate::Period(0)), ..usual.clone() }, "shorter"),
        (Persist { rate: None, ..usual.clone() }, "a ring stays empty"),
        (Persist { pages: 0, ..usual.clone() }, "its samples need a ring"),
        (Persist { sample_type: 1 << 12, ..usual.clone() }, "cannot contain all"),
        (Persist { name: Some("9".to_owned()), ..usual.clone() }, "`9` is not a valid name"),
        (Persist { pages: 3, ..usual.clone() }, "must be a power of two"),
        (Persist { pages: 8192, ..usual.clone() }, "at most 4096, not 8192"),
        (Persist { pages: 8, ..usual.clone() }, "no room for 9 more pages"),
    ] {
        let said = refused(persist);
        assert!(said.contains(says), "the error does not contain {says:?}: {said}");
    }
    assert_eq!(fixture.vpmu.persistent(), []);
    fixture.vpmu.persist(&usual).expect("started");
    assert!(refused(usual.clone()).contains("a persistent event `recorder` already exists"));
    let bare = Fixture::new();
    let without = bare.vpmu.persist(&usual);
    assert!(matches!(without, Err(PersistError::NoWindow)), "{without:?}");
    bare.host.break_host();
    let counting = Persist { rate: None, pages: 0, ..event("cycles") };
    let broken = bare.vpmu.persist(&counting);
    assert!(matches!(broken, Err(PersistError::Host(_))), "{broken:?}");
    assert_eq!(bare.vpmu.persistent(), []);
}

#[test]
fn engine_of_an_operators_event_depends_on_the_host() {
    let fixture = Fixture::windowed(&window(64));
    fixture.host.know_ips();
    let cycles = Persist { rate: Some(Rate::Frequency(100)), sample_type: 0x1_0007, ..asked("cycles", 0) };
    fixture.vpmu.persist(&cycles).expect("started");
    let status = &fixture.vpmu.persistent()[0];
    assert_eq!(status.engine, ENGINE_BATCHED);
    assert_eq!((status.event.as_str(), status.rate), ("cycles", Some(Rate::Frequency(100))));
    let fixture = Fixture::bare(Engines::Exit, limits(), Some(&window(64)));
    fixture.vpmu.persist(&cycles).expect("started");
    assert_eq!(fixture.vpmu.persistent()[0].engine, ENGINE_EXIT);
}

#[test]
fn status_describes_the_operators_event() {
    let fixture = Fixture::windowed(&window(64));
    let marks = Persist { event: "mark=7:u".to_owned(), name: None, vcpu: 1, rate: None, sample_type: 0, pages: 0 };
    let event = fixture.vpmu.persist(&marks).expect("started");
    fixture.mark(1, 7, 1);
    fixture.mark(1, 7, u64::MAX);
    let status = &fixture.vpmu.persistent()[0];
    assert_eq!(status.name, format!("event{event}"));
    assert_eq!(status.event, "mark=7:u");
    assert_eq!((status.vcpu, status.state, status.count), (1, STATE_ACTIVE, 1));
    assert_eq!((status.pages, status.window, status.rate), (None, false, None));
    assert_eq!((status.kind, status.config, status.operator), (KIND_MARK, 7, true));
    assert!(status.time_enabled > 0 && status.time_enabled == status.time_running);
}

#[test]
fn operators_event_is_outside_the_guests_limits() {
    let limits = limits().with(|limits| {
        limits.max_events = 1;
        limits.max_persistent = 1;
    });
    let mut fixture = Fixture::windowed_with(limits, &window(64));
    for vcpu in 0..2 {
        let persist = Persist { name: None, ..asked("mark=5", vcpu) };
        fixture.vpmu.persist(&persist).expect("started");
    }
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1));
    fixture.detach(event, "").expect("detached");
    assert_eq!(fixture.open(&marks(0)), Err(libc::ENOSPC));
    assert_eq!(fixture.detach(event, "recorder"), Ok(()), "the name is free for the guest");
}

/// VPMU-D-6.10-3.
#[test]
fn guest_cannot_take_the_operators_name() {
    let mut fixture = Fixture::windowed(&window(64));
    fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let event = fixture.opened(&marks(0));
    assert_eq!(fixture.detach(event, "recorder"), Err(libc::EEXIST));
}

/// VPMU-D-6.10-3.
#[test]
fn operator_takes_a_name_from_the_guests_event() {
    let mut fixture = Fixture::windowed(&window(64));
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "recorder").expect("detached");
    fixture.post_notice(0, 16);
    let operators = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let names: Vec<_> = fixture.listed().iter().map(name).collect();
    assert_eq!(names, [format!("event{event}"), "recorder".to_owned()]);
    let notice = fixture.notice().map(|(kind, _)| kind);
    assert_eq!(notice, Some(NOTICE_PERSISTENT), "the driver lists the events again");
    // The event keeps its new name.
    fixture.detach(event, "").expect("it is persistent");
    assert_eq!(fixture.listed().len(), 2);
    let second = fixture.vpmu.persist(&asked("mark=5", 0));
    assert!(matches!(second, Err(PersistError::NameTaken(_))), "{second:?}");
    fixture.vpmu.end(operators).expect("ended");
}

#[test]
fn guest_event_keeps_its_name_if_the_operators_request_fails() {
    let mut fixture = Fixture::windowed(&window(8));
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "recorder").expect("detached");
    fixture.post_notice(0, 16);
    let large = Persist { pages: 8, ..asked("mark=5", 0) };
    let refused = fixture.vpmu.persist(&large);
    assert!(matches!(refused, Err(PersistError::NoRoom(9))), "{refused:?}");
    fixture.host.deny(libc::EBUSY);
    let counting = Persist { rate: None, pages: 0, ..asked("cycles", 0) };
    let refused = fixture.vpmu.persist(&counting);
    assert!(matches!(refused, Err(PersistError::Host(_))), "{refused:?}");
    let names: Vec<_> = fixture.listed().iter().map(name).collect();
    assert_eq!(names, ["recorder"]);
    assert_eq!(fixture.notice(), None);
}

#[test]
fn operator_gives_no_event_the_name_of_an_id() {
    let fixture = Fixture::windowed(&window(64));
    let persist = Persist { name: Some("event9".to_owned()), ..asked("mark=5", 0) };
    let reserved = fixture.vpmu.persist(&persist);
    assert!(matches!(reserved, Err(PersistError::ReservedName(_))), "{reserved:?}");
    let unnamed = Persist { name: None, ..persist };
    let id = fixture.vpmu.persist(&unnamed).expect("started");
    assert_eq!(fixture.vpmu.persistent()[0].name, format!("event{id}"));
}

#[test]
fn operator_finds_room_in_a_window_that_the_guest_filled() {
    let limits = limits().with(|limits| {
        limits.max_window_pages = 48;
        limits.max_sample_rate = u32::MAX;
    });
    let mut fixture = Fixture::windowed_with(limits, &window(64));
    let mut taken = 0;
    loop {
        let event = fixture.opened(&marks(0));
        fixture.detach(event, "").expect("detached");
        match fixture.map_window(event, 1, 0) {
            Ok(_) => taken += 2,
            Err(errno) => break assert_eq!(errno, libc::ENOSPC),
        }
    }
    assert_eq!(taken, 48);
    fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
}
