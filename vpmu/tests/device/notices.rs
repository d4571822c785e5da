//! The wakeups of events that write to one ring share a notice, unless the driver asks for notices of a family's own.

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, WINDOW_FEATURES, open_of, window};

/// Opens an event of vCPU 0 that samples marks of value 5, with a wakeup at each record.
fn waking(fixture: &mut Fixture) -> u64 {
    let request = open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED).wakeup(1);
    fixture.opened(&request)
}

/// Maps a ring that never gets full.
fn map(fixture: &mut Fixture, event: u64) {
    let pages = [fixture.next_ring, fixture.next_ring + 0x1000];
    fixture.next_ring += 0x3000;
    fixture.map_pages(event, 0, &pages).expect("mapped");
}

/// Opens `count` events with a wakeup at each record. The first has a ring, and the others are redirected to it.
fn sharing<const N: usize>(fixture: &mut Fixture) -> [u64; N] {
    let events = [(); N].map(|()| waking(fixture));
    map(fixture, events[0]);
    for &event in &events[1..] {
        fixture.redirect(event, events[0]).expect("redirected");
    }
    events
}

fn mark(fixture: &Fixture) {
    fixture.mark(0, 5, 1);
}

/// Posts as many buffers as there are `expected` notices, and takes the notices: kind, event and value.
fn take(fixture: &mut Fixture, expected: &[(u32, u64, u32)]) {
    let seen: Vec<_> = expected
        .iter()
        .map(|_| {
            fixture.post_notice(0, 16);
            fixture.counted_notice().expect("a notice")
        })
        .collect();
    assert_eq!(seen, expected);
}

/// Checks that no notice waits.
fn end(fixture: &mut Fixture) {
    fixture.post_notice(0, 16);
    assert_eq!(fixture.counted_notice(), None);
}

fn woke(event: u64, wakeups: u32) -> (u32, u64, u32) {
    (NOTICE_WAKEUP, event, wakeups)
}

/// VPMU-D-6.7-13.
#[test]
fn wakeups_of_redirected_families_share_one_notice() {
    let mut fixture = Fixture::new();
    let events = sharing::<40>(&mut fixture);
    (0..4).for_each(|slot| fixture.post_notice(slot, 16));
    let interrupts = fixture.host.interrupts();
    for _ in 0..2 {
        mark(&fixture);
        let notices = [(); 2].map(|()| fixture.counted_notice());
        assert_eq!(notices, [Some(woke(events[0], 40)), None]);
    }
    assert_eq!(fixture.host.interrupts(), interrupts + 2);
    assert_eq!(fixture.vpmu.metrics().wakeups, 80);
}

/// VPMU-D-6.7-13, VPMU-D-6.7-10.
#[test]
fn wakeups_of_many_families_take_as_few_notices_as_possible() {
    let mut fixture = Fixture::new();
    let events = sharing::<600>(&mut fixture);
    mark(&fixture);
    let expected = [NOTICE_COUNT, NOTICE_COUNT, 600 - 2 * NOTICE_COUNT];
    take(&mut fixture, &expected.map(|count| woke(events[0], count)));
    end(&mut fixture);
}

/// VPMU-D-6.7-14.
#[test]
fn family_with_its_own_notices_is_counted_alone() {
    let mut fixture = Fixture::new();
    let [owner, own, other] = sharing(&mut fixture);
    fixture.set_own_notices(own, 1).expect("own");
    (0..3).for_each(|_| mark(&fixture));
    take(&mut fixture, &[woke(owner, 6), woke(own, 3)]);
    // The ring's notices name another family, so that those of the owner's family count only its own wakeups.
    fixture.set_own_notices(owner, 1).expect("own");
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 1), woke(own, 1), woke(other, 1)]);
    fixture.set_own_notices(owner, 0).expect("shared");
    fixture.set_own_notices(own, 0).expect("shared");
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 3)]);
    end(&mut fixture);
}

/// VPMU-D-6.7-14.
#[test]
fn own_notices_are_those_of_the_whole_family() {
    let mut fixture = Fixture::new();
    let [owner, parent] = sharing(&mut fixture);
    let child = |parent: u64| open_of(KIND_MARK, 5, 0).sampled(1).parent(parent).flags(OPEN_ENABLED).wakeup(1);
    let before = fixture.opened(&child(parent));
    fixture.set_own_notices(parent, 1).expect("own");
    fixture.opened(&child(parent));
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 1), woke(parent, 3)]);
    // The family keeps its notices when its parent is closed.
    fixture.close(parent).expect("closed");
    assert_eq!(fixture.set_own_notices(parent, 0), Err(libc::ENOENT));
    assert_eq!(fixture.set_own_notices(before, 0), Err(libc::EINVAL));
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 1), woke(parent, 2)]);
    end(&mut fixture);
}

/// VPMU-D-6.7-12.
#[test]
fn pending_wakeups_outlive_a_change_of_a_familys_notices() {
    let mut fixture = Fixture::new();
    let [owner, other] = sharing(&mut fixture);
    mark(&fixture);
    fixture.set_own_notices(owner, 1).expect("own");
    mark(&fixture);
    take(&mut fixture, &[woke(other, 3), woke(owner, 1)]);
    mark(&fixture);
    fixture.set_own_notices(other, 1).expect("own");
    mark(&fixture);
    fixture.set_own_notices(other, 0).expect("shared");
    fixture.set_own_notices(owner, 0).expect("shared");
    take(&mut fixture, &[woke(owner, 4)]);
    end(&mut fixture);
}

/// VPMU-D-6.7-11.
#[test]
fn pending_wakeups_outlive_each_family_of_the_ring() {
    let mut fixture = Fixture::new();
    let [owner, second, third] = sharing(&mut fixture);
    mark(&fixture);
    fixture.close(owner).expect("closed");
    mark(&fixture);
    take(&mut fixture, &[woke(second, 5)]);
    fixture.set_own_notices(third, 1).expect("own");
    mark(&fixture);
    // The last family has notices of its own, and inherits the pending wakeups of the ring.
    fixture.close(second).expect("closed");
    take(&mut fixture, &[woke(third, 2)]);
    mark(&fixture);
    fixture.close(third).expect("closed");
    end(&mut fixture);
}

/// VPMU-D-6.7-11.
#[test]
fn pending_wakeups_of_an_ended_family_with_its_own_notices_go_to_the_ring() {
    let mut fixture = Fixture::new();
    let [owner, own, other] = sharing(&mut fixture);
    fixture.set_own_notices(own, 1).expect("own");
    mark(&fixture);
    fixture.close(own).expect("closed");
    take(&mut fixture, &[woke(owner, 3)]);
    fixture.set_own_notices(owner, 1).expect("own");
    fixture.set_own_notices(other, 1).expect("own");
    mark(&fixture);
    fixture.close(other).expect("closed");
    take(&mut fixture, &[woke(owner, 2)]);
    end(&mut fixture);
}

/// VPMU-D-6.7-12.
#[test]
fn pending_wakeups_outlive_the_ring() {
    let mut fixture = Fixture::new();
    let [owner, other] = sharing(&mut fixture);
    mark(&fixture);
    fixture.unmap(owner).expect("unmapped");
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 2)]);
    // The wakeups of the unmapped ring join those of the next one.
    map(&mut fixture, other);
    mark(&fixture);
    fixture.unmap(other).expect("unmapped");
    map(&mut fixture, other);
    mark(&fixture);
    take(&mut fixture, &[woke(other, 2)]);
    end(&mut fixture);
}

/// VPMU-D-6.7-12.
#[test]
fn pending_wakeups_outlive_a_redirection() {
    let mut fixture = Fixture::new();
    let [first, moving] = sharing(&mut fixture);
    let second = waking(&mut fixture);
    map(&mut fixture, second);
    mark(&fixture);
    fixture.redirect(moving, second).expect("redirected");
    mark(&fixture);
    take(&mut fixture, &[woke(first, 3), woke(second, 3)]);
    fixture.redirect(moving, first).expect("redirected");
    mark(&fixture);
    // The first ring's notices then name the moving family, which leaves the ring to nobody.
    fixture.close(first).expect("closed");
    fixture.redirect(moving, second).expect("redirected");
    take(&mut fixture, &[woke(second, 3)]);
    // A family with notices of its own takes its wakeups along.
    fixture.set_own_notices(moving, 1).expect("own");
    mark(&fixture);
    fixture.redirect(moving, 0).expect("redirected");
    take(&mut fixture, &[woke(moving, 1), woke(second, 1)]);
    end(&mut fixture);
}

#[test]
fn limit_notice_replaces_a_wakeup_of_the_shared_notice() {
    let mut fixture = Fixture::new();
    let [owner, limited, own] = sharing(&mut fixture);
    fixture.set_own_notices(own, 1).expect("own");
    for event in [limited, own] {
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 2), 0);
    }
    (0..3).for_each(|_| mark(&fixture));
    let limit = |event| (NOTICE_LIMIT, event, 1);
    let expected = [woke(owner, 4), woke(own, 1), limit(limited), limit(own)];
    take(&mut fixture, &expected);
    // No wakeup is left for these notices.
    fixture.command(0, COMMAND_DISABLE, owner);
    for event in [limited, own] {
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 1), 0);
    }
    mark(&fixture);
    take(&mut fixture, &[limit(limited), limit(own)]);
    fixture.command(0, COMMAND_ENABLE, owner);
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 1)]);
    end(&mut fixture);
}

#[test]
fn limit_notice_of_a_child_replaces_the_wakeup_of_its_family() {
    let mut fixture = Fixture::new();
    let [parent] = sharing(&mut fixture);
    let child = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).parent(parent).wakeup(1));
    for own in [0, 1] {
        fixture.set_own_notices(parent, own).expect("set");
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, child, 1), 0);
        mark(&fixture);
        take(&mut fixture, &[woke(parent, 1), (NOTICE_LIMIT, child, 1)]);
    }
    end(&mut fixture);
}

/// VPMU-D-6.13-2.
#[test]
fn pending_and_later_wakeups_keep_their_notices_across_a_restore() {
    let mut fixture = Fixture::new();
    let [owner, own, other] = sharing(&mut fixture);
    fixture.set_own_notices(own, 1).expect("own");
    mark(&fixture);
    fixture.move_on();
    mark(&fixture);
    take(&mut fixture, &[woke(owner, 4), woke(own, 2)]);
    fixture.close(owner).expect("closed");
    mark(&fixture);
    fixture.move_on();
    mark(&fixture);
    take(&mut fixture, &[woke(own, 2), woke(other, 2)]);
    fixture.set_own_notices(own, 0).expect("shared");
    mark(&fixture);
    take(&mut fixture, &[woke(own, 2)]);
    end(&mut fixture);
}

#[test]
fn reset_ends_own_notices() {
    let window = window(8);
    let mut fixture = Fixture::windowed(&window);
    let event = waking(&mut fixture);
    fixture.detach(event, "").expect("detached");
    fixture.map_window(event, 1, 0).expect("mapped");
    fixture.set_own_notices(event, 1).expect("own");
    mark(&fixture);
    fixture.activate(WINDOW_FEATURES);
    let other = waking(&mut fixture);
    fixture.redirect(other, event).expect("redirected");
    mark(&fixture);
    take(&mut fixture, &[woke(event, 2)]);
    end(&mut fixture);
}
