//! Notices for events of several vCPUs.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, Fields, Fixture, Vcpus, open_of};

use super::{done, task_event};

/// Opens an event of `vcpu` that wakes its reader at every mark of value 5.
fn waking(fixture: &mut Fixture, vcpu: u32) -> u64 {
    let event = fixture.opened(&open_of(KIND_MARK, 5, vcpu).sampled(1).flags(OPEN_ENABLED).wakeup(1));
    // Without `MAP_WRITABLE` the ring never gets full.
    let pages = [fixture.next_ring, fixture.next_ring + 0x1000];
    fixture.next_ring += 0x3000;
    fixture.map_pages(event, 0, &pages).expect("mapped");
    event
}

#[test]
fn notices_wait_until_the_driver_posts_and_notifies() {
    let mut fixture = Fixture::new();
    let events = [0, 1].map(|vcpu| waking(&mut fixture, vcpu));
    for vcpu in [1, 0] {
        fixture.mark(vcpu, 5, 1);
    }
    let interrupts = fixture.host.interrupts();
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, events[1])), "the notice that waited longer comes first");
    assert_eq!(fixture.host.interrupts(), interrupts + 1);
    assert_eq!(fixture.notice(), None);
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, events[0])));
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), None);
    assert_eq!(fixture.host.interrupts(), interrupts + 2, "a buffer without a notice raises no interrupt");
    // The device uses this buffer for the next notice.
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, events[0])));
    assert_eq!(fixture.vpmu.metrics().notices, 3);
}

/// VPMU-D-6.7-10.
#[test]
fn notice_counts_the_waiting_wakeups() {
    let mut fixture = Fixture::new();
    let event = waking(&mut fixture, 1);
    let (records, rest) = (600, 600 - 2 * NOTICE_COUNT);
    (0..records).for_each(|_| fixture.mark(1, 5, 1));
    let interrupts = fixture.host.interrupts();
    (0..4).for_each(|slot| fixture.post_notice(slot, 16));
    for count in [NOTICE_COUNT, NOTICE_COUNT, rest] {
        let notice = fixture.counted_notice();
        assert_eq!(notice, Some((NOTICE_WAKEUP, event, count)));
    }
    assert_eq!(fixture.counted_notice(), None);
    // If a buffer is available, the notice is not merged with others, so it represents one wakeup.
    fixture.mark(1, 5, 1);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
    assert!(fixture.host.interrupts() <= interrupts + 5);
}

#[test]
fn limit_notice_replaces_the_last_wakeup() {
    let mut fixture = Fixture::new();
    let event = waking(&mut fixture, 0);
    fixture.command(0, COMMAND_DISABLE, event);
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 3), 0);
    (0..5).for_each(|_| fixture.mark(0, 5, 1));
    (0..3).for_each(|slot| fixture.post_notice(slot, 16));
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 2)));
    assert_eq!(fixture.counted_notice(), Some((NOTICE_LIMIT, event, 1)));
    assert_eq!(fixture.counted_notice(), None);
    // With a wakeup at every second record, the third record does not cause a wakeup.
    fixture.set_wakeup(event, 2, WAKEUP_RECORDS).expect("set");
    assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 3), 0);
    (0..2).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
    fixture.mark(0, 5, 1);
    fixture.post_notice(0, 16);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_LIMIT, event, 1)));
}

#[test]
fn wakeups_of_two_vcpus_are_merged_per_family() {
    let mut fixture = Fixture::new();
    let family = |fixture: &mut Fixture, value: u64| {
        let request = task_event(KIND_MARK, value).sampled(1).wakeup(1);
        let parent = fixture.opened(&request);
        fixture.map(parent, 8);
        let child = fixture.opened(&request.parent(parent));
        done(fixture, 0, COMMAND_IN, parent);
        done(fixture, 1, COMMAND_IN, child);
        parent
    };
    let [first, second] = [5, 6].map(|value| family(&mut fixture, value));
    for _ in 0..3 {
        for value in [5, 6] {
            (0..2).for_each(|vcpu| fixture.mark(vcpu, value, 1));
        }
        (0..4).for_each(|slot| fixture.post_notice(slot, 16));
        let notices = [(); 3].map(|()| fixture.notice());
        let woken = [first, second].map(|family| Some((NOTICE_WAKEUP, family)));
        assert_eq!(notices[..2], woken);
        assert_eq!(notices[2], None);
        // Two buffers are left, so each of these wakeups gets a buffer immediately.
        (0..2).for_each(|vcpu| fixture.mark(vcpu, 6, 1));
        let notices = [(); 3].map(|()| fixture.notice());
        let twice = [Some((NOTICE_WAKEUP, second)); 2];
        assert_eq!(notices[..2], twice);
        assert_eq!(notices[2], None);
    }
}

/// One thread causes a notice while another thread posts the buffer for it. The thread that comes second delivers the
/// notice.
#[test]
fn notice_posted_concurrently_with_its_buffer_is_delivered() {
    const ROUNDS: u32 = 5_000;
    let mut fixture = Fixture::new();
    let event = waking(&mut fixture, 0);
    let (start, end) = (&Barrier::new(2), &Barrier::new(2));
    let (go, over) = (&AtomicBool::new(false), &AtomicBool::new(false));
    let vcpus = std::mem::replace(&mut fixture.vcpus, Vcpus::new());
    thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                start.wait();
                if over.load(Ordering::SeqCst) {
                    return;
                }
                while !go.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
                vcpus.leave(0, ExitReason::Mmio, &mut At(1));
                vcpus.mark(0, 5, &mut At(1));
                vcpus.enter(0);
                end.wait();
            }
        });
        for round in 0..ROUNDS {
            go.store(false, Ordering::SeqCst);
            start.wait();
            go.store(true, Ordering::SeqCst);
            // Vary the delay, so that the test posts the buffer sometimes before the mark and sometimes after it.
            for _ in 0..(round.wrapping_mul(2654435761) >> 16) % 60 {
                std::hint::spin_loop();
            }
            fixture.post_notice(0, 16);
            end.wait();
            let notice = fixture.notice();
            if notice.is_none() {
                over.store(true, Ordering::SeqCst);
                start.wait();
            }
            assert_eq!(notice, Some((NOTICE_WAKEUP, event)), "round {round}");
        }
        over.store(true, Ordering::SeqCst);
        start.wait();
    });
}
