//! Groups, links, families and redirections across a save and restore.

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, open_of};

use super::{mark, marks};

#[test]
fn members_follow_their_leader() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let member = fixture.opened(&marks(0, 2).leader(leader));
    fixture.move_on();
    mark(&fixture, 1, 2);
    assert_eq!(fixture.value(0, member), 0, "the leader is disabled");
    fixture.command(0, COMMAND_ENABLE, leader);
    mark(&fixture, 1, 3);
    fixture.move_on();
    mark(&fixture, 1, 4);
    fixture.command(0, COMMAND_DISABLE, leader);
    fixture.move_on();
    mark(&fixture, 1, 5);
    assert_eq!([leader, member].map(|id| fixture.value(0, id)), [7, 7]);
}

#[test]
fn group_reads_of_samples_continue_after_a_restore() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&marks(0, 1).sample_type(0x10).read_format(8));
    fixture.opened(&open_of(KIND_MARK, MARK_ANY, 0).leader(leader).flags(OPEN_ENABLED));
    let mut ring = fixture.map(leader, 4);
    fixture.mark(0, 9, 1);
    mark(&fixture, 1, 1);
    fixture.move_on();
    mark(&fixture, 1, 1);
    let read: Vec<_> = ring.raw().into_iter().map(|record| record.words).collect();
    assert_eq!(read, [[2, 1, 2], [2, 2, 3]], "number of events, then their counts");
}

#[test]
fn links_act_on() {
    let mut fixture = Fixture::new();
    let one = fixture.opened(&marks(0, 2));
    let start = open_of(KIND_MARK, 6, 0).sampled(1);
    let start = fixture.opened(&start.flags(OPEN_ENABLED));
    let target = fixture.opened(&open_of(KIND_MARK, MARK_ANY, 0).flags(OPEN_ENABLED | OPEN_PAUSED));
    fixture.link(start, target, LINK_STARTER).expect("linked");
    fixture.link(one, target, LINK_STOPPER).expect("linked");
    mark(&fixture, 1, 1);
    fixture.mark(0, 6, 1);
    fixture.move_on();
    mark(&fixture, 1, 3);
    assert_eq!(fixture.value(0, target), 1, "the stopper completes the period begun before the save");
    assert_eq!(fixture.link(one, target, LINK_STOPPER), Err(libc::EEXIST));
    fixture.close(start).expect("closed");
    fixture.link(one, target, LINK_STARTER).expect("the closed starter can be replaced");
}

#[test]
fn restored_families_write_to_their_parents_ring() {
    let mut fixture = Fixture::new();
    let parent = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(parent, 8);
    let child = fixture.opened(&marks(0, 1).parent(parent));
    let other = fixture.opened(&marks(0, 1));
    fixture.redirect(other, parent).expect("redirected");
    fixture.close(parent).expect("closed");
    fixture.move_on();
    mark(&fixture, 1, 2);
    let mut ids: Vec<_> = ring.samples().iter().map(|one| (one.id, one.stream_id)).collect();
    ids.sort_unstable();
    let (child, other) = ((parent, child), (other, other));
    assert_eq!(ids, [child, child, other, other]);
    let grandchild = marks(0, 1).parent(child.1);
    fixture.open(&grandchild).expect("the grandchild joins the family");
    mark(&fixture, 1, 1);
    assert_eq!(ring.samples().len(), 3);
}
