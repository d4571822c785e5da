//! Which ring an event writes to, and how long the ring exists.

use std::thread;

use vpmu::ExitReason;
use vpmu::abi::*;

use crate::reader::{Raw, SAMPLE};
use crate::rig::{Rig, open_of, sampling};
use crate::world::At;

fn open(rig: &mut Rig, vcpu: u32) -> u64 {
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(KIND_MARK, 5, vcpu), 1)
    };
    rig.open(&request).expect("open")
}

/// Returns the IDs of the samples in `raw`, which must contain only samples.
fn ids(raw: &[Raw]) -> Vec<u64> {
    raw.iter()
        .map(|record| {
            assert_eq!(record.kind, SAMPLE);
            record.words[0]
        })
        .collect()
}

#[test]
fn records_are_redirected_to_another_ring_and_back() {
    let mut rig = Rig::new();
    let [one, two] = [(); 2].map(|()| open(&mut rig, 0));
    let mut ring = rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    let child = OpenRequest {
        parent: two.into(),
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(KIND_MARK, 5, 1), 1)
    };
    rig.open(&child).expect("open");
    rig.mark(0, 5, 1);
    rig.mark(1, 5, 1);
    assert_eq!(
        ids(&ring.raw()),
        [one, two, two],
        "the children's records are redirected, too"
    );
    assert_eq!(
        rig.map_pages(two, 0, &[0x9000]),
        Err(libc::EINVAL),
        "its pages belong to another event"
    );
    rig.redirect(two, 0).expect("back");
    let mut own = rig.map(two, 1);
    rig.mark(0, 5, 1);
    assert_eq!((ids(&ring.raw()), ids(&own.raw())), (vec![one], vec![two]));
}

/// Hooks tell a vCPU which work its events need at an exit. The vCPU reads them at each exit without a lock, while
/// requests change them.
#[test]
fn exits_during_redirections_are_all_counted() {
    const EXITS: u64 = 2_000_000;
    let mut rig = Rig::new();
    let one = open(&mut rig, 0);
    let two = OpenRequest {
        flags: (OPEN_ENABLED | OPEN_EXCLUDE_KERNEL).into(),
        ..sampling(open_of(KIND_EXITS, EXIT_IO, 0), u64::MAX >> 1)
    };
    let two = rig.open(&two).expect("open");
    let _ring = rig.map(one, 1);
    let mut session = rig.vcpus.take(0);
    let vcpu = thread::spawn(move || {
        for _ in 0..EXITS {
            session.enter();
            session.leave(ExitReason::Io, &mut At(1));
        }
        session
    });
    while !vcpu.is_finished() {
        rig.redirect(two, one).expect("redirected");
        rig.redirect(two, 0).expect("back");
    }
    rig.vcpus.set(0, Some(vcpu.join().expect("no panic")));
    assert_eq!(rig.value(0, two), EXITS);
}

#[test]
fn invalid_redirections_are_refused() {
    let mut rig = Rig::new();
    let [one, two, bare] = [(); 3].map(|()| open(&mut rig, 0));
    let elsewhere = open(&mut rig, 1);
    let task = open(&mut rig, CONTEXT_TASK);
    let backward = OpenRequest {
        flags: OPEN_BACKWARD.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let backward = rig.open(&backward).expect("open");
    let child = OpenRequest {
        parent: two.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let child = rig.open(&child).expect("open");
    rig.map(one, 1);
    rig.map(elsewhere, 1);
    rig.map(task, 1);
    assert_eq!(rig.redirect(77, one), Err(libc::ENOENT));
    assert_eq!(rig.redirect(two, 77), Err(libc::ENOENT));
    for (event, target) in [
        (two, two),
        (two, bare),
        (two, elsewhere),
        (two, task),
        (backward, one),
        (one, elsewhere),
        (one, 0),
        (child, one),
        (child, 0),
        (two, child),
    ] {
        assert_eq!(
            rig.redirect(event, target),
            Err(libc::EINVAL),
            "{event} {target}"
        );
    }
    rig.redirect(two, one).expect("redirected");
    rig.redirect(bare, two)
        .expect("the target writes to the ring of another event");
}

#[test]
fn redirection_is_to_the_ring_and_not_to_the_event() {
    let mut rig = Rig::new();
    let [one, two, three] = [(); 3].map(|()| open(&mut rig, 0));
    let mut ring = rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    rig.redirect(three, two).expect("redirected");
    rig.redirect(two, 0).expect("back");
    rig.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [one, three]);
    rig.unmap(one).expect("unmapped");
    let mut ring = rig.map(one, 1);
    rig.mark(0, 5, 1);
    assert_eq!(
        ids(&ring.raw()),
        [one],
        "the new ring has no records of the redirected event"
    );
    assert_eq!(rig.read(0, three).lost.get(), 1, "the event has no ring");
}

/// VPMU-D-6.3-4.
#[test]
fn ring_outlives_its_event_while_others_write_to_it() {
    let mut rig = Rig::new();
    let [one, two] = [(); 2].map(|()| open(&mut rig, 0));
    let mut ring = rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    rig.close(one).expect("closed");
    rig.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [two]);
    rig.unmap(one)
        .expect("the id of the closed event is still valid");
    rig.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [0; 0]);
    assert_eq!(rig.unmap(one), Err(libc::ENOENT));
}

/// VPMU-D-6.3-4.
#[test]
fn ring_ends_with_its_last_writer() {
    let mut rig = Rig::new();
    let [one, two] = [(); 2].map(|()| open(&mut rig, 0));
    rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    rig.close(one).expect("closed");
    rig.redirect(two, 0).expect("back");
    assert_eq!(rig.unmap(one), Err(libc::ENOENT));
    let three = open(&mut rig, 0);
    rig.map(three, 1);
    rig.redirect(two, three).expect("redirected");
    rig.close(three).expect("closed");
    rig.close(two).expect("closed");
    assert_eq!(rig.unmap(three), Err(libc::ENOENT));
}

/// VPMU-D-6.7-11.
#[test]
fn wakeup_outlives_the_event_that_caused_it() {
    let mut rig = Rig::new();
    let one = open(&mut rig, 0);
    let two = OpenRequest {
        flags: OPEN_ENABLED.into(),
        wakeup: 1.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let two = rig.open(&two).expect("open");
    rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    rig.mark(0, 5, 1);
    rig.close(two).expect("closed");
    rig.post_notice(0, 16);
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, one)));
}

#[test]
fn wakeup_names_the_event_of_its_record() {
    let mut rig = Rig::new();
    let one = open(&mut rig, 0);
    let two = OpenRequest {
        flags: OPEN_ENABLED.into(),
        wakeup: 3.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let two = rig.open(&two).expect("open");
    rig.map(one, 1);
    rig.redirect(two, one).expect("redirected");
    (0..3).for_each(|_| rig.mark(0, 5, 1));
    rig.post_notice(0, 16);
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, two)));
}

/// VPMU-D-6.7-9.
#[test]
fn overflows_on_a_paused_ring_are_lost() {
    let mut rig = Rig::new();
    let event = open(&mut rig, 0);
    assert_eq!(
        rig.pause(event, 1),
        Err(libc::EINVAL),
        "the event has no ring"
    );
    assert_eq!(rig.pause(77, 1), Err(libc::ENOENT));
    let page = open(&mut rig, 1);
    rig.map(page, 0);
    assert_eq!(
        rig.pause(page, 1),
        Err(libc::EINVAL),
        "the ring has no data pages"
    );
    let mut ring = rig.map(event, 1);
    assert_eq!(rig.pause(event, 2), Err(libc::EINVAL));
    rig.mark(0, 5, 1);
    rig.pause(event, 1).expect("paused");
    (0..4).for_each(|_| rig.mark(0, 5, 1));
    assert_eq!(rig.read(0, event).lost.get(), 4);
    assert_eq!(ids(&ring.raw()), [event]);
    rig.pause(event, 0).expect("resumed");
    rig.mark(0, 5, 1);
    let raw = ring.raw();
    assert_eq!(raw[0].words, [event, 4]);
    assert_eq!(ids(&raw[1..]), [event]);
}

#[test]
fn backward_ring_grows_down() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        flags: (OPEN_BACKWARD | OPEN_ENABLED).into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let event = rig.open(&request).expect("open");
    let ring = rig.map(event, 1);
    rig.mark(0, 5, 1);
    assert_eq!(ring.head(), 72_u64.wrapping_neg());
    rig.mark(0, 5, 1);
    assert_eq!(ring.head(), 144_u64.wrapping_neg());
}
