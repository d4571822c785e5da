//! Which ring an event writes to, and how long the ring exists.

use std::thread;

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, Raw, SAMPLE, open_of};

fn open(fixture: &mut Fixture, vcpu: u32) -> u64 {
    let request = open_of(KIND_MARK, 5, vcpu).sampled(1).flags(OPEN_ENABLED);
    fixture.opened(&request)
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
    let mut fixture = Fixture::new();
    let [one, two] = [(); 2].map(|()| open(&mut fixture, 0));
    let mut ring = fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    fixture.opened(&open_of(KIND_MARK, 5, 1).sampled(1).parent(two).flags(OPEN_ENABLED));
    fixture.mark(0, 5, 1);
    fixture.mark(1, 5, 1);
    assert_eq!(ids(&ring.raw()), [one, two, two], "the children's records are redirected, too");
    assert_eq!(fixture.map_pages(two, 0, &[0x9000]), Err(libc::EINVAL), "its pages belong to another event");
    fixture.redirect(two, 0).expect("back");
    let mut own = fixture.map(two, 1);
    fixture.mark(0, 5, 1);
    assert_eq!((ids(&ring.raw()), ids(&own.raw())), (vec![one], vec![two]));
}

/// Hooks tell a vCPU which work its events need at an exit. The vCPU reads them at each exit without a lock, while
/// requests change them.
#[test]
fn exits_during_redirections_are_all_counted() {
    const EXITS: u64 = 2_000_000;
    let mut fixture = Fixture::new();
    let one = open(&mut fixture, 0);
    let two = fixture
        .opened(&open_of(KIND_EXITS, EXIT_IO, 0).sampled(u64::MAX >> 1).flags(OPEN_ENABLED | OPEN_EXCLUDE_KERNEL));
    let _ring = fixture.map(one, 1);
    let mut session = fixture.vcpus.take(0);
    let vcpu = thread::spawn(move || {
        for _ in 0..EXITS {
            session.enter();
            session.leave(ExitReason::Io, &mut At(1));
        }
        session
    });
    while !vcpu.is_finished() {
        fixture.redirect(two, one).expect("redirected");
        fixture.redirect(two, 0).expect("back");
    }
    fixture.vcpus.set(0, Some(vcpu.join().expect("no panic")));
    assert_eq!(fixture.value(0, two), EXITS);
}

#[test]
fn redirection_is_to_the_ring_and_not_to_the_event() {
    let mut fixture = Fixture::new();
    let [one, two, three] = [(); 3].map(|()| open(&mut fixture, 0));
    let mut ring = fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    fixture.redirect(three, two).expect("redirected");
    fixture.redirect(two, 0).expect("back");
    fixture.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [one, three]);
    fixture.unmap(one).expect("unmapped");
    let mut ring = fixture.map(one, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [one], "the new ring has no records of the redirected event");
    assert_eq!(fixture.read(0, three).lost.get(), 1, "the event has no ring");
}

/// VPMU-D-6.3-4.
#[test]
fn ring_outlives_its_event_while_others_write_to_it() {
    let mut fixture = Fixture::new();
    let [one, two] = [(); 2].map(|()| open(&mut fixture, 0));
    let mut ring = fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    fixture.close(one).expect("closed");
    fixture.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [two]);
    fixture.unmap(one).expect("the id of the closed event is still valid");
    fixture.mark(0, 5, 1);
    assert_eq!(ids(&ring.raw()), [0; 0]);
    assert_eq!(fixture.unmap(one), Err(libc::ENOENT));
}

/// VPMU-D-6.3-4.
#[test]
fn ring_ends_with_its_last_writer() {
    let mut fixture = Fixture::new();
    let [one, two] = [(); 2].map(|()| open(&mut fixture, 0));
    fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    fixture.close(one).expect("closed");
    fixture.redirect(two, 0).expect("back");
    assert_eq!(fixture.unmap(one), Err(libc::ENOENT));
    let three = open(&mut fixture, 0);
    fixture.map(three, 1);
    fixture.redirect(two, three).expect("redirected");
    fixture.close(three).expect("closed");
    fixture.close(two).expect("closed");
    assert_eq!(fixture.unmap(three), Err(libc::ENOENT));
}

/// VPMU-D-6.7-11.
#[test]
fn wakeup_outlives_the_event_that_caused_it() {
    let mut fixture = Fixture::new();
    let one = open(&mut fixture, 0);
    let two = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED).wakeup(1));
    fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    fixture.mark(0, 5, 1);
    fixture.close(two).expect("closed");
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, one)));
}

#[test]
fn wakeup_names_the_event_with_the_ring() {
    let mut fixture = Fixture::new();
    let one = open(&mut fixture, 0);
    let two = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED).wakeup(3));
    fixture.map(one, 1);
    fixture.redirect(two, one).expect("redirected");
    (0..3).for_each(|_| fixture.mark(0, 5, 1));
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, one)));
}

/// VPMU-D-6.7-9.
#[test]
fn overflows_on_a_paused_ring_are_lost() {
    let mut fixture = Fixture::new();
    let event = open(&mut fixture, 0);
    assert_eq!(fixture.pause(event, 1), Err(libc::EINVAL), "the event has no ring");
    assert_eq!(fixture.pause(77, 1), Err(libc::ENOENT));
    let page = open(&mut fixture, 1);
    fixture.map(page, 0);
    assert_eq!(fixture.pause(page, 1), Err(libc::EINVAL), "the ring has no data pages");
    let mut ring = fixture.map(event, 1);
    assert_eq!(fixture.pause(event, 2), Err(libc::EINVAL));
    fixture.mark(0, 5, 1);
    fixture.pause(event, 1).expect("paused");
    (0..4).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.read(0, event).lost.get(), 4);
    assert_eq!(ids(&ring.raw()), [event]);
    fixture.pause(event, 0).expect("resumed");
    fixture.mark(0, 5, 1);
    let raw = ring.raw();
    assert_eq!(raw[0].words, [event, 4]);
    assert_eq!(ids(&raw[1..]), [event]);
}

#[test]
fn backward_ring_grows_down() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_BACKWARD | OPEN_ENABLED);
    let event = fixture.opened(&request);
    let ring = fixture.map(event, 1);
    fixture.mark(0, 5, 1);
    assert_eq!(ring.head(), 72_u64.wrapping_neg());
    fixture.mark(0, 5, 1);
    assert_eq!(ring.head(), 144_u64.wrapping_neg());
}
