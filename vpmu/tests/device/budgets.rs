//! The budget for a guest's work. It limits the operations on events and the calls to the source that one notification,
//! mark or exit can cause. Work beyond the budget of a turn waits while other vCPUs are served.

mod members;

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::{SaveError, Turn};
use vpmu_testkit::{
    ALL_FEATURES, At, Descriptor, FAULTS, Fields, Fixture, QUEUE_SIZE, command, header, limits, open_of,
};
use zerocopy::IntoBytes;

/// A turn ends after the request or command that reaches this number of operations.
const TURN: u64 = 4096;
/// Members of the largest possible group.
const MEMBERS: u64 = 1023;
/// perf's `PERF_FORMAT_GROUP`.
const FORMAT_GROUP: u64 = 1 << 3;
/// perf's `PERF_SAMPLE_READ`.
const SAMPLE_READ: u64 = 1 << 4;

/// Opens an enabled group of counting events, with `members` events besides the leader.
fn group(fixture: &mut Fixture, of: OpenRequest, members: u64) -> u64 {
    let leader = fixture.open(&of).expect("a leader");
    for _ in 0..members {
        let member = of.leader(leader).flags(OPEN_ENABLED);
        fixture.open(&member).expect("a member");
    }
    leader
}

/// Returns `count` commands that alternately enable and disable a group.
fn switches(leader: u64, count: usize) -> Vec<Command> {
    let ops = [COMMAND_ENABLE, COMMAND_DISABLE].iter().cycle();
    ops.take(count).map(|&op| command(op, leader)).collect()
}

/// Notifies vCPU 0's queue with `count` commands that alternately enable and disable a large group. Returns the device
/// after the first turn, which does not finish the commands.
fn unfinished(count: usize) -> Fixture {
    let mut fixture = Fixture::new();
    let leader = group(&mut fixture, open_of(FAULTS.0, FAULTS.1, 0), MEMBERS);
    fixture.vcpus.leave(0, vpmu::ExitReason::Mmio, &mut At(u64::MAX));
    let commands = switches(leader, count);
    fixture.queues[2].request(commands.as_bytes(), count * size_of::<Reply>());
    fixture.vcpus.kick(0, QUEUE_VCPU);
    assert_eq!(fixture.queues[2].answer(), None, "the first turn does not finish the notification");
    fixture
}

/// VPMU-D-2-9.
#[test]
fn notification_of_group_switches_is_served_in_turns() {
    let mut fixture = unfinished(2048);
    let mut turns = 1;
    while fixture.vcpus.with(0, |session| session.resume()) == Turn::Unfinished {
        turns += 1;
    }
    let answer = fixture.queues[2].answer().expect("answered after all turns");
    assert_eq!(answer.len(), 2048 * size_of::<Reply>());
    let after = fixture.vpmu.metrics();
    // Each command visits the leader and all members.
    let work = after.work.operations;
    assert!(work > 2048 * MEMBERS, "only {work} operations");
    assert_eq!(after.turns_unfinished, turns);
    assert!(turns >= work / (TURN + 2 * MEMBERS + 3), "only {turns} turns for {work} operations");
    let largest = after.largest_turn;
    assert!(largest.operations <= TURN + 2 * MEMBERS + 3, "{largest:?}: more than one command beyond the budget");
    assert!(largest.host_calls <= 512 + 2, "too many calls of the host: {largest:?}");
}

/// VPMU-D-2-1.
#[test]
fn remaining_work_is_done_before_guest_entry() {
    let mut fixture = unfinished(64);
    fixture.vcpus.enter(0);
    let answer = fixture.queues[2].answer().expect("answered");
    assert_eq!(answer.len(), 64 * size_of::<Reply>());
}

/// VPMU-D-2-9.
#[test]
fn operator_is_served_between_two_turns() {
    let fixture = unfinished(64);
    // These calls are made on the vCPU's thread, so they would deadlock if the turn left a lock held.
    assert!(fixture.vpmu.persistent().is_empty());
    fixture.vpmu.drain();
    assert_eq!(fixture.vcpus.with(0, |session| session.resume()), Turn::Unfinished);
}

/// VPMU-D-2-9.
#[test]
fn device_is_not_saved_between_two_turns() {
    let fixture = unfinished(64);
    assert!(matches!(fixture.vpmu.save(), Err(SaveError::Unserved(0))));
    while fixture.vcpus.with(0, |session| session.resume()) == Turn::Unfinished {}
    fixture.save();
}

#[test]
fn reset_between_two_turns_ends_the_notification() {
    let mut fixture = unfinished(64);
    fixture.vpmu.reset();
    assert_eq!(fixture.vcpus.with(0, |session| session.resume()), Turn::Done);
    assert_eq!(fixture.queues[2].answer(), None);
    assert_eq!(fixture.host.open_counters(), 0);
    fixture.activate(ALL_FEATURES);
    fixture.open(&open_of(KIND_MARK, 5, 0)).expect("as new");
}

#[test]
fn queue_notified_while_another_is_unfinished_is_served_after_it() {
    let mut fixture = unfinished(64);
    fixture.queues[3].request(command(COMMAND_VCPU, 0).as_bytes(), size_of::<Reply>());
    fixture.vcpus.kick(0, QUEUE_VCPU + 1);
    fixture.vcpus.kick(0, QUEUE_VCPU + 1);
    while fixture.vcpus.with(0, |session| session.resume()) == Turn::Unfinished {}
    assert!(fixture.queues[2].answer().is_some());
    assert!(fixture.queues[3].answer().is_some());
    assert_eq!(fixture.vpmu.metrics().kicks, [1, 2]);
}

#[test]
fn control_requests_of_many_pages_are_served_in_turns() {
    let mut fixture = Fixture::with(limits().with(|limits| limits.max_ring_pages = 4096), ALL_FEATURES);
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    // Only the last page is invalid, so the device has to check all pages.
    let pages: Vec<u64> = (0..4096).chain([u64::MAX >> 12]).map(|n| n << 12).collect();
    let request = MapRequest { header: header(CONTROL_MAP, event), pages: 4097.into(), flags: 0.into() };
    let mut bytes = request.as_bytes().to_vec();
    bytes.extend(pages.iter().flat_map(|page| page.to_le_bytes()));
    for slot in (0..QUEUE_SIZE).step_by(2) {
        fixture.queues[0].request_at(slot, &bytes, size_of::<ControlReply>());
    }
    let mut turns = 1;
    while fixture.vpmu.notify(QUEUE_CONTROL) == Turn::Unfinished {
        turns += 1;
        // The device serves operator calls between turns.
        assert!(fixture.vpmu.persistent().is_empty());
    }
    let answers = std::iter::from_fn(|| fixture.queues[0].answer()).count();
    assert_eq!(answers, usize::from(QUEUE_SIZE) / 2);
    // The first two turns each serve half of the requests. In the third turn, the queue is empty.
    assert_eq!(turns, 3);
}

/// VPMU-D-7-3.
#[test]
fn mark_reads_each_group_once() {
    let mut fixture = Fixture::new();
    let of = open_of(KIND_MARK, 5, 0).sampled(1).sample_type(SAMPLE_READ).read_format(FORMAT_GROUP);
    // Members of two groups overflow alternately.
    let leaders = [fixture.open(&of), fixture.open(&of)].map(|leader| leader.expect("a leader"));
    for _ in 0..255 {
        for leader in leaders {
            let member = of.leader(leader).flags(OPEN_ENABLED);
            fixture.open(&member).expect("a member");
        }
    }
    for leader in leaders {
        fixture.command(0, COMMAND_ENABLE, leader);
    }
    let before = fixture.vpmu.metrics().work.operations;
    fixture.mark(0, 5, 1);
    let work = fixture.vpmu.metrics().work.operations - before;
    // Each of the 512 events needs at most four operations: one each for the count, the metadata page, a reading and a
    // record. One more operation locks the vCPU's events, and for each operation the device examines eight events.
    assert!((512..=4 * 512 + 1 + 512 / 8).contains(&work), "{work} operations for 512 events");
}

/// VPMU-D-2-3.
#[test]
fn indirect_descriptor_makes_a_buffer_bad() {
    const INDIRECT: u16 = 4;
    let mut fixture = Fixture::new();
    let open = open_of(KIND_MARK, 5, 0);
    for queue in [0, 1, 2] {
        let table = fixture.queues[queue].buffer(4);
        let (from, to) = (fixture.queues[queue].buffer(0), fixture.queues[queue].buffer(1));
        // Fill an indirect table. Its descriptors would form a valid request if the device supported indirect
        // descriptors.
        let entries = [(from, 128_u32, 1_u16, 1_u16), (to, 16, 2, 0)];
        for (at, (address, len, flags, next)) in (table..).step_by(16).zip(entries) {
            let entry = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
            let written = fixture.memory.write_slice(&entry.concat(), GuestAddress(at));
            written.expect("in memory");
        }
        let written = fixture.memory.write_slice(open.as_bytes(), GuestAddress(from));
        written.expect("in memory");
        let indirect = Descriptor { address: table, len: 32, writable: false, next: None };
        fixture.queues[queue].describe_as(0, indirect, INDIRECT);
        fixture.queues[queue].offer(0);
        // Also offer an indirect descriptor in the middle of a chain.
        let first = Descriptor { address: from, len: 128, next: Some(0), ..indirect };
        fixture.queues[queue].describe(2, first);
        fixture.queues[queue].offer(2);
    }
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    fixture.vcpus.kick(0, QUEUE_VCPU);
    for queue in [0, 2] {
        let returned: Vec<_> = std::iter::from_fn(|| fixture.queues[queue].reclaim()).collect();
        assert_eq!(returned, [(0, 0), (2, 0)], "queue {queue}");
    }
    assert_eq!(fixture.vpmu.metrics().events_opened, 0);
    assert_eq!(fixture.vpmu.metrics().bad_requests, 4);
    // The event queue also returns buffers with indirect descriptors. The device writes nothing to them.
    let event = fixture.opened(&open.sampled(1).wakeup(1));
    fixture.map(event, 1);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.queues[1].reclaim(), Some((0, 0)));
    assert_eq!(fixture.queues[1].reclaim(), Some((2, 0)));
}

/// VPMU-D-2-5.
#[test]
fn notification_looks_at_a_bounded_number_of_descriptors() {
    let mut fixture = Fixture::new();
    // Offer one chain that consists of all descriptors, as many times as the queue has entries.
    for index in 0..QUEUE_SIZE {
        let descriptor = Descriptor {
            address: fixture.queues[2].buffer(0),
            len: 16,
            writable: false,
            next: (index + 1 < QUEUE_SIZE).then_some(index + 1),
        };
        fixture.queues[2].describe(index, descriptor);
    }
    for _ in 0..QUEUE_SIZE {
        fixture.queues[2].offer(0);
    }
    let mut returned = Vec::new();
    for _ in 0..QUEUE_SIZE / 2 {
        fixture.vcpus.kick(0, QUEUE_VCPU);
        returned.push(std::iter::from_fn(|| fixture.queues[2].reclaim()).count());
    }
    // The device stops when it has taken twice as many descriptors as the queue has entries. Two chains have exactly
    // that many, so the device serves two chains per notification.
    assert_eq!(returned, [2; 8]);
}
