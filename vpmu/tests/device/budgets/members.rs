//! The cost of requests, commands and marks whose work grows with the number of members: the events of a group or a
//! family, the writers of a ring, links, pages, records.

use vm_memory::{Bytes, GuestAddress};
use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{QueueState, Turn};
use vpmu_testkit::{ALL_FEATURES, CYCLES, FAULTS, Fields, Fixture, QUEUE_SIZE, header, open_of, thread, window};
use zerocopy::IntoBytes;

use super::{TURN, group};

/// Number of events in a large group, in a large family, or with a common ring.
const MEMBERS: u64 = 1000;
/// Number of members that the device examines for each operation that it charges.
const EXAMINED: u64 = 8;
/// The most operations of a request whose work does not depend on a number of members.
const CONSTANT: u64 = 20;
/// An operation that no control request has.
const UNKNOWN: u32 = 99;

/// Returns the operations that `act` costs.
fn cost(fixture: &mut Fixture, act: impl FnOnce(&mut Fixture)) -> u64 {
    let before = fixture.vpmu.metrics().work.operations;
    act(fixture);
    fixture.vpmu.metrics().work.operations - before
}

fn assert_at_least(cost: u64, least: u64) {
    assert!(cost >= least, "{cost} operations, not {least}");
}

fn faults(context: u32) -> OpenRequest {
    open_of(FAULTS.0, FAULTS.1, context)
}

fn marks() -> OpenRequest {
    open_of(KIND_MARK, 5, 0).sampled(1)
}

/// Opens `count` events that sample marks.
fn events(fixture: &mut Fixture, count: u64) -> Vec<u64> {
    let open = |_| fixture.opened(&marks());
    (0..count).map(open).collect()
}

/// Makes the host record samples of an event on vCPU 0 while the vCPU runs, so that the device must collect them.
fn collect(fixture: &mut Fixture) -> u64 {
    fixture.host.know_ips();
    let event = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED));
    fixture.map(event, 16);
    event
}

/// VPMU-D-2-9.
#[test]
fn change_of_a_large_group_costs_each_member() {
    let mut fixture = Fixture::new();
    let leader = group(&mut fixture, faults(0), MEMBERS - 1);
    let member = faults(0).leader(leader);
    let mut last = 0;
    let opened = cost(&mut fixture, |fixture| {
        last = fixture.open(&member).expect("a member");
    });
    assert_at_least(opened, MEMBERS);
    let closed = cost(&mut fixture, |fixture| fixture.close(last).expect("closed"));
    assert_at_least(closed, MEMBERS);
    let disbanded = cost(&mut fixture, |fixture| {
        fixture.close(leader).expect("closed");
    });
    assert_at_least(disbanded, MEMBERS - 1);
}

/// VPMU-D-2-9.
#[test]
fn changes_of_a_large_group_are_served_in_turns() {
    let mut fixture = Fixture::new();
    let leader = group(&mut fixture, faults(0), MEMBERS - 1);
    let member = faults(0).leader(leader);
    for slot in (0..QUEUE_SIZE).step_by(2) {
        fixture.queues[0].request_at(slot, member.as_bytes(), size_of::<OpenReply>());
    }
    let mut turns = 1;
    while fixture.vpmu.notify(QUEUE_CONTROL) == Turn::Unfinished {
        turns += 1;
        // The device serves operator calls between turns.
        assert!(fixture.vpmu.persistent().is_empty());
    }
    let answers = std::iter::from_fn(|| fixture.queues[0].answer()).count();
    assert_eq!(answers, usize::from(QUEUE_SIZE) / 2);
    // Each turn serves at most four of the eight requests. In the last turn, the queue may be empty.
    assert!(turns >= 2, "{turns} turns");
    let largest = fixture.vpmu.metrics().largest_turn.operations;
    assert!(largest <= TURN + 2 * MEMBERS, "{largest}");
}

/// VPMU-D-2-9.
#[test]
fn refused_member_of_a_large_group_costs_an_examination_of_each_member() {
    let mut fixture = Fixture::new();
    let leader = group(&mut fixture, faults(0), MEMBERS - 1);
    // The counts of this group, with ids and losses, do not fit in a record.
    let too_large = faults(0).leader(leader).read_format(1 << 2 | 1 << 3 | 1 << 4);
    let refused = cost(&mut fixture, |fixture| {
        assert_eq!(fixture.open(&too_large), Err(libc::E2BIG));
    });
    assert_at_least(refused, MEMBERS / EXAMINED);
}

/// VPMU-D-2-9.
#[test]
fn redirect_of_a_large_family_costs_each_event() {
    let mut fixture = Fixture::new();
    let request = open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1);
    let target = fixture.opened(&request);
    fixture.map(target, 1);
    let parent = fixture.opened(&request);
    let child = request.parent(parent);
    for _ in 1..MEMBERS {
        fixture.open(&child).expect("a child");
    }
    for to in [target, 0] {
        let moved = cost(&mut fixture, |fixture| {
            fixture.redirect(parent, to).expect("redirected");
        });
        assert_at_least(moved, MEMBERS);
    }
    // A child takes its settings from one event of the family.
    let opened = cost(&mut fixture, |fixture| {
        fixture.open(&child).expect("a child");
    });
    assert!(opened <= CONSTANT, "{opened}");
}

/// VPMU-D-2-9.
#[test]
fn schedule_in_that_moves_a_large_group_costs_each_member() {
    let mut fixture = Fixture::new();
    let leader = group(&mut fixture, faults(CONTEXT_TASK), MEMBERS - 1);
    let moved = cost(&mut fixture, |fixture| {
        assert_eq!(fixture.command(1, COMMAND_IN, leader).status.get(), 0);
    });
    assert_at_least(moved, MEMBERS);
    let moved = cost(&mut fixture, |fixture| {
        assert_eq!(fixture.command(0, COMMAND_IN, leader + 1).status.get(), 0);
    });
    assert_at_least(moved, MEMBERS - 1);
    // The leader is scheduled in on vCPU 1, so it cannot move. All members are on vCPU 0.
    let refused = cost(&mut fixture, |fixture| {
        assert_ne!(fixture.command(0, COMMAND_IN, leader).status.get(), 0);
    });
    assert_at_least(refused, MEMBERS / EXAMINED);
}

/// VPMU-D-2-9, VPMU-D-6.6-6.
#[test]
fn request_on_a_ring_with_many_writers_costs_an_examination_of_each_writer() {
    let mut fixture = Fixture::new();
    let writers = events(&mut fixture, MEMBERS);
    let first = writers[0];
    fixture.map(first, 1);
    for &writer in &writers[1..] {
        fixture.redirect(writer, first).expect("redirected");
    }
    let requests = [(header(UNKNOWN, first), libc::EOPNOTSUPP), (header(CONTROL_ATTACH, first), libc::EINVAL)];
    // While the host records no samples, none can be pending for the ring.
    for (request, errno) in requests {
        let refused = cost(&mut fixture, |fixture| {
            assert_eq!(fixture.control(&request), Err(errno));
        });
        assert!(refused <= CONSTANT, "{refused}");
    }
    collect(&mut fixture);
    for (request, errno) in requests {
        let refused = cost(&mut fixture, |fixture| {
            assert_eq!(fixture.control(&request), Err(errno));
        });
        assert_at_least(refused, MEMBERS / EXAMINED);
    }
    let paused = cost(&mut fixture, |fixture| {
        fixture.pause(first, 1).expect("paused");
    });
    assert_at_least(paused, MEMBERS / EXAMINED);
    let unmapped = cost(&mut fixture, |fixture| {
        fixture.unmap(first).expect("unmapped");
    });
    assert_at_least(unmapped, MEMBERS);
}

/// VPMU-D-2-3, VPMU-D-2-9.
#[test]
fn malformed_buffers_are_returned_in_turns() {
    const ENTRIES: u16 = 1 << 15;
    const INDIRECT: u64 = 4 << 32;
    const TABLE: u64 = 0x200_0000;
    const AVAILABLE: u64 = TABLE + 16 * ENTRIES as u64;
    const USED: u64 = AVAILABLE + 0x2_0000;
    let mut fixture = Fixture::new();
    let mut queues = fixture.make_queues();
    queues[2] = QueueState { size: ENTRIES, desc_table: TABLE, avail_ring: AVAILABLE, used_ring: USED, ..queues[2] };
    // Each entry of the available ring offers a buffer of its own, whose only descriptor is indirect.
    let descriptor = [[0; 8], INDIRECT.to_le_bytes()].concat();
    let table = descriptor.repeat(ENTRIES.into());
    let flags_and_index = [0, ENTRIES].into_iter();
    let ring = flags_and_index.chain(0..ENTRIES).flat_map(u16::to_le_bytes);
    let ring: Vec<u8> = ring.collect();
    for (bytes, at) in [(&table, TABLE), (&ring, AVAILABLE)] {
        let written = fixture.memory.write_slice(bytes, GuestAddress(at));
        written.expect("in memory");
    }
    let (memory, interrupt) = (fixture.memory.clone(), fixture.interrupt.clone());
    let activated = fixture.vpmu.activate(memory, ALL_FEATURES, &queues, interrupt);
    activated.expect("active");
    fixture.vcpus.kick(0, QUEUE_VCPU);
    fixture.vcpus.resume(0);
    let metrics = fixture.vpmu.metrics();
    assert_eq!(metrics.bad_requests, u64::from(ENTRIES));
    let largest = metrics.largest_turn.operations;
    assert!(largest <= TURN, "{largest}");
}

/// VPMU-D-2-9.
#[test]
fn request_for_pages_costs_an_examination_of_each_ring() {
    let mut fixture = Fixture::new();
    for event in events(&mut fixture, MEMBERS) {
        fixture.map(event, 0);
    }
    let last = events(&mut fixture, 1)[0];
    let mapped = cost(&mut fixture, |fixture| {
        fixture.map(last, 0);
    });
    assert_at_least(mapped, MEMBERS / EXAMINED);
}

/// VPMU-D-2-9.
#[test]
fn ring_in_the_window_costs_each_page() {
    const PAGES: u32 = 2048;
    let mut fixture = Fixture::windowed(&window(4096));
    let event = fixture.opened(&marks());
    fixture.detach(event, "marks").expect("detached");
    let mapped = cost(&mut fixture, |fixture| {
        fixture.map_window(event, PAGES, MAP_WRITABLE).expect("mapped");
    });
    assert_at_least(mapped, PAGES.into());
}

/// VPMU-D-2-9.
#[test]
fn area_beside_a_large_ring_costs_a_check_of_each_page() {
    const PAGES: u64 = 4096;
    let mut fixture = Fixture::new();
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, 0));
    fixture.map(trace, PAGES);
    let unaligned = cost(&mut fixture, |fixture| {
        let mapped = fixture.map_as(CONTROL_MAP_AUX, trace, MAP_WRITABLE, &[1]);
        assert_eq!(mapped, Err(libc::EINVAL));
    });
    assert!(unaligned <= CONSTANT, "{unaligned}");
    let page = fixture.next_ring;
    let mapped = cost(&mut fixture, |fixture| {
        let mapped = fixture.map_as(CONTROL_MAP_AUX, trace, MAP_WRITABLE, &[page]);
        mapped.expect("mapped");
    });
    assert_at_least(mapped, PAGES / 4);
}

/// VPMU-D-2-9.
#[test]
fn long_request_costs_its_length() {
    const KIB: u64 = 32;
    let mut fixture = Fixture::new();
    let mut request = header(CONTROL_MAP, 7).as_bytes().to_vec();
    request.resize(1024 * usize::try_from(KIB).expect("small"), 0);
    let copied = cost(&mut fixture, |fixture| {
        fixture.control_bytes(&request, size_of::<ControlReply>());
    });
    assert_at_least(copied, KIB);
    // The device copies no more of this request than the longest request without pages has.
    request[..16].copy_from_slice(header(CONTROL_CLOSE, 7).as_bytes());
    let copied = cost(&mut fixture, |fixture| {
        fixture.control_bytes(&request, size_of::<ControlReply>());
    });
    assert!(copied <= CONSTANT, "{copied}");
}

/// VPMU-D-2-9.
#[test]
fn request_for_the_catalogue_costs_each_entry() {
    let mut fixture = Fixture::new();
    let mut entries = 0;
    let listed = cost(&mut fixture, |fixture| {
        entries = fixture.catalogue().len() as u64;
    });
    assert_at_least(listed, entries);
}

/// VPMU-D-2-9.
#[test]
fn change_of_a_link_costs_an_examination_of_each_link() {
    let mut fixture = Fixture::new();
    let all = events(&mut fixture, MEMBERS + 2);
    let (trigger, other) = (all[0], all[1]);
    for &target in &all[2..] {
        fixture.link(trigger, target, LINK_STARTER).expect("linked");
    }
    let refused = cost(&mut fixture, |fixture| {
        assert_eq!(fixture.link(other, all[2], LINK_STARTER), Err(libc::EBUSY));
    });
    assert_at_least(refused, MEMBERS / EXAMINED);
    let closed = cost(&mut fixture, |fixture| fixture.close(other).expect("closed"));
    assert_at_least(closed, MEMBERS / EXAMINED);
}

/// VPMU-D-7-3.
#[test]
fn overflow_of_a_trigger_costs_an_examination_of_each_target() {
    let mut fixture = Fixture::new();
    let all = events(&mut fixture, MEMBERS);
    let trigger = all[0];
    for &target in &all[1..] {
        fixture.link(trigger, target, LINK_STARTER).expect("linked");
    }
    fixture.command(0, COMMAND_ENABLE, trigger);
    let marked = cost(&mut fixture, |fixture| fixture.mark(0, 5, 1));
    assert_at_least(marked, MEMBERS / EXAMINED);
}

/// VPMU-D-2-9.
#[test]
fn notification_while_samples_are_collected_costs_an_examination_of_each_watched_event() {
    let mut fixture = Fixture::new();
    let sampled = collect(&mut fixture);
    for event in events(&mut fixture, MEMBERS) {
        fixture.command(0, COMMAND_ENABLE, event);
    }
    let read = cost(&mut fixture, |fixture| {
        fixture.read(0, sampled);
    });
    assert_at_least(read, MEMBERS / EXAMINED);
}

/// VPMU-D-2-9.
#[test]
fn collected_sample_costs_its_record() {
    const SAMPLES: u64 = 500;
    let mut fixture = Fixture::new();
    let event = collect(&mut fixture);
    fixture.host.pass(1_000_000);
    for age in 0..SAMPLES {
        let overflow = Overflow { tsc: fixture.host.now() - SAMPLES + age, ip: 0x10, mode: Mode::Guest, period: 100 };
        fixture.host.record(thread(0), overflow);
    }
    let read = cost(&mut fixture, |fixture| {
        fixture.read(0, event);
    });
    assert_eq!(fixture.vpmu.metrics().samples_written, SAMPLES);
    assert_at_least(read, SAMPLES);
}
