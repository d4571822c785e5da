//! Groups. Members count while their leader is enabled, and a group is read as a whole.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, Fields, Fixture, Raw, SAMPLE, command, open_of, thread};

const SAMPLE_READ: u64 = 1 << 4;

fn led(leader: u64, request: OpenRequest) -> OpenRequest {
    request.leader(leader).flags(OPEN_ENABLED)
}

fn marks(fixture: &Fixture, times: u64) {
    (0..times).for_each(|_| fixture.mark(0, 5, 1));
}

/// VPMU-D-6.1-4.
#[test]
fn members_count_while_their_leader_is_on() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let leader = fixture.opened(&mark);
    let on = fixture.opened(&led(leader, mark));
    let off = fixture.opened(&led(leader, mark).flags(0));
    let (kind, config) = CYCLES;
    let host = fixture.opened(&led(leader, open_of(kind, config, 0)));
    marks(&fixture, 3);
    fixture.host.work(thread(0), 100, 4);
    let reply = fixture.read(0, on);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_INACTIVE, 0));
    assert_eq!(reply.time_enabled.get(), 0, "the times of a stopped member do not grow");
    fixture.command(0, COMMAND_ENABLE, leader);
    marks(&fixture, 4);
    fixture.host.work(thread(0), 100, 4);
    fixture.command(0, COMMAND_DISABLE, leader);
    marks(&fixture, 5);
    fixture.host.work(thread(0), 100, 4);
    let values = |fixture: &mut Fixture| [leader, on, off, host].map(|id| fixture.value(0, id));
    assert_eq!(values(&mut fixture), [4, 4, 0, 100]);
    // A member is enabled and disabled independently of its leader.
    fixture.command(0, COMMAND_DISABLE, on);
    fixture.command(0, COMMAND_ENABLE, off);
    fixture.command(0, COMMAND_ENABLE, leader);
    marks(&fixture, 10);
    assert_eq!(values(&mut fixture), [14, 4, 10, 100]);
}

#[test]
fn members_survive_their_closed_leader() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let leader = fixture.opened(&mark);
    let member = fixture.opened(&led(leader, mark));
    marks(&fixture, 1);
    fixture.close(leader).expect("closed");
    marks(&fixture, 2);
    assert_eq!(fixture.value(0, member), 2);
    fixture.open(&led(member, mark)).expect("the member can lead a group now");
}

#[test]
fn task_group_follows_its_task_and_its_leader() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, CONTEXT_TASK);
    let leader = fixture.opened(&mark);
    let member = fixture.opened(&led(leader, mark));
    // Members and leaders can be scheduled in and enabled in any order.
    let both = |op| [command(op, member), command(op, leader)];
    fixture.commands(0, &both(COMMAND_IN));
    marks(&fixture, 1);
    fixture.command(0, COMMAND_ENABLE, leader);
    marks(&fixture, 2);
    fixture.commands(0, &both(COMMAND_OUT));
    marks(&fixture, 4);
    fixture.commands(1, &both(COMMAND_IN));
    marks(&fixture, 8);
    (0..16).for_each(|_| fixture.mark(1, 5, 1));
    let replies = fixture.commands(1, &both(COMMAND_OUT));
    assert_eq!(replies.iter().map(|r| r.value.get()).collect::<Vec<_>>(), [18, 18]);
}

/// VPMU-D-6.1-4.
#[test]
fn leader_in_error_stops_its_group() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let leader = fixture.opened(&open_of(kind, config, 0));
    let member = fixture.opened(&led(leader, open_of(KIND_MARK, 5, 0)));
    fixture.command(0, COMMAND_ENABLE, leader);
    marks(&fixture, 2);
    fixture.host.break_host();
    let failed = fixture.command(0, COMMAND_READ, leader);
    assert_eq!(failed.state.get(), STATE_ERROR);
    marks(&fixture, 2);
    assert_eq!(fixture.value(0, member), 2);
}

/// Returns the words of each sample in `raw`. The samples have only the field [`SAMPLE_READ`].
fn counts(raw: &[Raw]) -> Vec<&[u64]> {
    raw.iter()
        .map(|record| {
            assert_eq!(record.kind, SAMPLE);
            &record.words[..]
        })
        .collect()
}

#[test]
fn sample_reads_its_group_at_one_moment() {
    let mut fixture = Fixture::new();
    let with =
        |format: u64, period: u64| open_of(KIND_MARK, 5, 0).sample_type(SAMPLE_READ).read_format(format).period(period);
    // `read_format` with GROUP, ID and LOST.
    let leader = fixture.opened(&with(0x1c, 2));
    let (kind, config) = CYCLES;
    let host = fixture.opened(&led(leader, open_of(kind, config, 0)));
    // At each mark, events count in the order in which they were opened, so the leader counts before this member. The
    // member's `read_format` does not have GROUP.
    let single = fixture.opened(&led(leader, with(0x14, 3)));
    let mut ring = fixture.map(leader, 1);
    let mut own = fixture.map(single, 1);
    fixture.command(0, COMMAND_ENABLE, leader);
    for mark in 1..=6_u64 {
        fixture.host.work(thread(0), 10, 4);
        marks(&fixture, 1);
        let read = ring.raw();
        let read = counts(&read);
        if mark % 2 == 0 {
            assert_eq!(read, [[3, mark, leader, 0, 10 * mark, host, 0, mark, single, 0]]);
        } else {
            assert_eq!(read, [[0; 0]; 0]);
        }
    }
    assert_eq!(counts(&own.raw()), [[3, single, 0], [6, single, 0]]);
}

#[test]
fn group_is_read_once_for_all_samples_of_an_exit() {
    const MEMBERS: usize = 20;
    const HOST: usize = 10;
    let mut fixture = Fixture::new();
    let reading = open_of(KIND_MARK, 5, 0).sample_type(SAMPLE_READ).read_format(0xc).period(1);
    let leader = fixture.opened(&reading);
    let mut rings = vec![fixture.map(leader, 4)];
    for _ in 1..MEMBERS {
        let member = fixture.opened(&led(leader, reading));
        rings.push(fixture.map(member, 4));
    }
    let (kind, config) = CYCLES;
    for _ in 0..HOST {
        // An event that samples does not share its host counter with other events.
        let host = open_of(kind, config, 0).sampled(1 << 40);
        fixture.opened(&led(leader, host));
    }
    fixture.command(0, COMMAND_ENABLE, leader);
    for mark in 1..=3 {
        fixture.host.work(thread(0), 10, 4);
        let (_, before) = fixture.host.visits(thread(0));
        marks(&fixture, 1);
        let (_, after) = fixture.host.visits(thread(0));
        assert_eq!(after - before, HOST as u64, "reads of host counters, mark {mark}");
        for ring in &mut rings {
            let read = ring.raw();
            let values: Vec<u64> = counts(&read)[0][1..].chunks(2).map(|of| of[0]).collect();
            let marks = [mark; MEMBERS];
            let host = [10 * mark; HOST];
            assert_eq!(values, [&marks[..], &host[..]].concat());
        }
    }
}

#[test]
fn member_sample_lists_the_leader_first_with_the_members_times() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&open_of(KIND_EXITS, EXIT_IO, 0));
    let request = open_of(KIND_MARK, 5, 0).sample_type(SAMPLE_READ).read_format(0xf).period(1);
    let member = fixture.opened(&led(leader, request));
    let mut ring = fixture.map(member, 1);
    fixture.command(0, COMMAND_ENABLE, leader);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.host.pass(1000);
    marks(&fixture, 1);
    let read = ring.raw();
    let read = counts(&read);
    let [nr, enabled, running, rest @ ..] = read[0] else {
        panic!("{read:?}");
    };
    assert_eq!((*nr, rest), (2, &[1, leader, 1, member][..]));
    assert!(*enabled >= 1000 && running == enabled);
    let reply = fixture.read(0, member);
    assert!(reply.time_enabled.get() > *enabled);
}

#[test]
fn losses_are_reported_per_event() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, 0).sampled(1);
    let first = fixture.opened(&mark);
    let second = fixture.opened(&mark.period(2));
    let mut ring = fixture.map(first, 1);
    fixture.redirect(second, first).expect("redirected");
    fixture.commands(0, &[first, second].map(|id| command(COMMAND_ENABLE, id)));
    marks(&fixture, 100);
    let lost = [first, second].map(|id| fixture.read(0, id).lost.get());
    let raw = ring.raw();
    let written = raw.iter().filter(|record| record.kind == SAMPLE).count() as u64;
    assert_eq!(lost[0] + lost[1] + written, 150);
    assert_eq!(lost[0], 100 - written.div_ceil(3) * 2);
    assert_eq!(fixture.vpmu.metrics().samples_lost, lost[0] + lost[1]);
}

#[test]
fn group_size_is_limited_by_the_record_size() {
    let mut fixture = Fixture::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let all = mark.read_format(READ_ALLOWED);
    let leader = fixture.opened(&all);
    // A reading has three words for the group and three words for each event. With the leader and 680 members, it
    // occupies 16,368 bytes. One more member would make it exceed the limit of 16 KiB.
    for _ in 0..680 {
        fixture.opened(&led(leader, mark));
    }
    assert_eq!(fixture.open(&led(leader, mark)), Err(libc::E2BIG));
    let alone = fixture.opened(&mark);
    fixture.open(&led(alone, all)).expect("another group");
}
