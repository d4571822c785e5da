//! Groups. Members count while their leader is enabled, and a group is read as a whole.

use vpmu::ExitReason;
use vpmu::abi::*;

use crate::reader::{Raw, SAMPLE};
use crate::rig::{Rig, command, open_of, sampling, thread};
use crate::world::{At, CYCLES};

const SAMPLE_READ: u64 = 1 << 4;

fn led(leader: u64, request: OpenRequest) -> OpenRequest {
    OpenRequest {
        leader: leader.into(),
        flags: OPEN_ENABLED.into(),
        ..request
    }
}

fn marks(rig: &Rig, times: u64) {
    (0..times).for_each(|_| rig.mark(0, 5, 1));
}

/// VPMU-D-6.1-4.
#[test]
fn members_count_while_their_leader_is_on() {
    let mut rig = Rig::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let leader = rig.open(&mark).expect("open");
    let on = rig.open(&led(leader, mark)).expect("open");
    let off = OpenRequest {
        flags: 0.into(),
        ..led(leader, mark)
    };
    let off = rig.open(&off).expect("open");
    let (kind, config) = CYCLES;
    let host = rig
        .open(&led(leader, open_of(kind, config, 0)))
        .expect("open");
    marks(&rig, 3);
    rig.world.work(thread(0), 100, 4);
    let reply = rig.read(0, on);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_INACTIVE, 0));
    assert_eq!(
        reply.time_enabled.get(),
        0,
        "the times of a stopped member do not grow"
    );
    rig.command(0, COMMAND_ENABLE, leader);
    marks(&rig, 4);
    rig.world.work(thread(0), 100, 4);
    rig.command(0, COMMAND_DISABLE, leader);
    marks(&rig, 5);
    rig.world.work(thread(0), 100, 4);
    let values = |rig: &mut Rig| [leader, on, off, host].map(|id| rig.value(0, id));
    assert_eq!(values(&mut rig), [4, 4, 0, 100]);
    // A member is enabled and disabled independently of its leader.
    rig.command(0, COMMAND_DISABLE, on);
    rig.command(0, COMMAND_ENABLE, off);
    rig.command(0, COMMAND_ENABLE, leader);
    marks(&rig, 10);
    assert_eq!(values(&mut rig), [14, 4, 10, 100]);
}

#[test]
fn members_survive_their_closed_leader() {
    let mut rig = Rig::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let leader = rig.open(&mark).expect("open");
    let member = rig.open(&led(leader, mark)).expect("open");
    marks(&rig, 1);
    rig.close(leader).expect("closed");
    marks(&rig, 2);
    assert_eq!(rig.value(0, member), 2);
    rig.open(&led(member, mark))
        .expect("the member can lead a group now");
}

#[test]
fn task_group_follows_its_task_and_its_leader() {
    let mut rig = Rig::new();
    let mark = open_of(KIND_MARK, 5, CONTEXT_TASK);
    let leader = rig.open(&mark).expect("open");
    let member = rig.open(&led(leader, mark)).expect("open");
    // Members and leaders can be scheduled in and enabled in any order.
    let both = |op| [command(op, member), command(op, leader)];
    rig.commands(0, &both(COMMAND_IN));
    marks(&rig, 1);
    rig.command(0, COMMAND_ENABLE, leader);
    marks(&rig, 2);
    rig.commands(0, &both(COMMAND_OUT));
    marks(&rig, 4);
    rig.commands(1, &both(COMMAND_IN));
    marks(&rig, 8);
    (0..16).for_each(|_| rig.mark(1, 5, 1));
    let replies = rig.commands(1, &both(COMMAND_OUT));
    assert_eq!(
        replies.iter().map(|r| r.value.get()).collect::<Vec<_>>(),
        [18, 18]
    );
}

/// VPMU-D-6.1-4.
#[test]
fn leader_in_error_stops_its_group() {
    let mut rig = Rig::new();
    let (kind, config) = CYCLES;
    let leader = rig.open(&open_of(kind, config, 0)).expect("open");
    let member = rig
        .open(&led(leader, open_of(KIND_MARK, 5, 0)))
        .expect("open");
    rig.command(0, COMMAND_ENABLE, leader);
    marks(&rig, 2);
    rig.world.break_host();
    let failed = rig.command(0, COMMAND_READ, leader);
    assert_eq!(failed.state.get(), STATE_ERROR);
    marks(&rig, 2);
    assert_eq!(rig.value(0, member), 2);
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
    let mut rig = Rig::new();
    let with = |format: u64, period: u64| OpenRequest {
        sample_type: SAMPLE_READ.into(),
        read_format: format.into(),
        period: period.into(),
        ..open_of(KIND_MARK, 5, 0)
    };
    // `read_format` with GROUP, ID and LOST.
    let leader = rig.open(&with(0x1c, 2)).expect("open");
    let (kind, config) = CYCLES;
    let host = rig
        .open(&led(leader, open_of(kind, config, 0)))
        .expect("open");
    // At each mark, events count in the order in which they were opened, so the leader counts before this member. The
    // member's `read_format` does not have GROUP.
    let single = rig.open(&led(leader, with(0x14, 3))).expect("open");
    let mut ring = rig.map(leader, 1);
    let mut own = rig.map(single, 1);
    rig.command(0, COMMAND_ENABLE, leader);
    for mark in 1..=6_u64 {
        rig.world.work(thread(0), 10, 4);
        marks(&rig, 1);
        let read = ring.raw();
        let read = counts(&read);
        if mark % 2 == 0 {
            assert_eq!(
                read,
                [[3, mark, leader, 0, 10 * mark, host, 0, mark, single, 0]]
            );
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
    let mut rig = Rig::new();
    let reading = OpenRequest {
        sample_type: SAMPLE_READ.into(),
        read_format: 0xc.into(),
        period: 1.into(),
        ..open_of(KIND_MARK, 5, 0)
    };
    let leader = rig.open(&reading).expect("open");
    let mut rings = vec![rig.map(leader, 4)];
    for _ in 1..MEMBERS {
        let member = rig.open(&led(leader, reading)).expect("open");
        rings.push(rig.map(member, 4));
    }
    let (kind, config) = CYCLES;
    for _ in 0..HOST {
        // An event that samples does not share its host counter with other events.
        let host = sampling(open_of(kind, config, 0), 1 << 40);
        rig.open(&led(leader, host)).expect("open");
    }
    rig.command(0, COMMAND_ENABLE, leader);
    for mark in 1..=3 {
        rig.world.work(thread(0), 10, 4);
        let (_, before) = rig.world.visits(thread(0));
        marks(&rig, 1);
        let (_, after) = rig.world.visits(thread(0));
        assert_eq!(
            after - before,
            HOST as u64,
            "reads of host counters, mark {mark}"
        );
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
    let mut rig = Rig::new();
    let leader = rig.open(&open_of(KIND_EXITS, EXIT_IO, 0)).expect("open");
    let request = OpenRequest {
        sample_type: SAMPLE_READ.into(),
        read_format: 0xf.into(),
        period: 1.into(),
        ..open_of(KIND_MARK, 5, 0)
    };
    let member = rig.open(&led(leader, request)).expect("open");
    let mut ring = rig.map(member, 1);
    rig.command(0, COMMAND_ENABLE, leader);
    rig.exit(0, ExitReason::Io, &mut At(1));
    rig.world.pass(1000);
    marks(&rig, 1);
    let read = ring.raw();
    let read = counts(&read);
    let [nr, enabled, running, rest @ ..] = read[0] else {
        panic!("{read:?}");
    };
    assert_eq!((*nr, rest), (2, &[1, leader, 1, member][..]));
    assert!(*enabled >= 1000 && running == enabled);
    let reply = rig.read(0, member);
    assert!(reply.time_enabled.get() > *enabled);
}

#[test]
fn losses_are_reported_per_event() {
    let mut rig = Rig::new();
    let mark = sampling(open_of(KIND_MARK, 5, 0), 1);
    let first = rig.open(&mark).expect("open");
    let second = OpenRequest {
        period: 2.into(),
        ..mark
    };
    let second = rig.open(&second).expect("open");
    let mut ring = rig.map(first, 1);
    rig.redirect(second, first).expect("redirected");
    rig.commands(0, &[first, second].map(|id| command(COMMAND_ENABLE, id)));
    marks(&rig, 100);
    let lost = [first, second].map(|id| rig.read(0, id).lost.get());
    let raw = ring.raw();
    let written = raw.iter().filter(|record| record.kind == SAMPLE).count() as u64;
    assert_eq!(lost[0] + lost[1] + written, 150);
    assert_eq!(lost[0], 100 - written.div_ceil(3) * 2);
    assert_eq!(rig.vpmu.metrics().samples_lost, lost[0] + lost[1]);
}

#[test]
fn group_size_is_limited_by_the_record_size() {
    let mut rig = Rig::new();
    let mark = open_of(KIND_MARK, 5, 0);
    let all = OpenRequest {
        read_format: READ_ALLOWED.into(),
        ..mark
    };
    let leader = rig.open(&all).expect("open");
    // A reading has three words for the group and three words for each event. With the leader and 680 members, it
    // occupies 16,368 bytes. One more member would make it exceed the limit of 16 KiB.
    for _ in 0..680 {
        rig.open(&led(leader, mark)).expect("open");
    }
    assert_eq!(rig.open(&led(leader, mark)), Err(libc::E2BIG));
    let alone = rig.open(&mark).expect("open");
    rig.open(&led(alone, all)).expect("another group");
}
