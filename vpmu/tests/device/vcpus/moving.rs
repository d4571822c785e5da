//! Task events that move from one vCPU to another.

use vpmu::ExitReason;
use vpmu::abi::*;

use super::{done, each, led, task_event};
use crate::rig::{Rig, sampling, thread};
use crate::world::{At, CYCLES, FAULTS};

/// Every order of three events.
const ORDERS: [[usize; 3]; 6] = [
    [0, 1, 2],
    [0, 2, 1],
    [1, 0, 2],
    [1, 2, 0],
    [2, 0, 1],
    [2, 1, 0],
];

fn values(rig: &mut Rig, vcpu: u32, events: &[u64]) -> Vec<u64> {
    let replies = rig.commands(vcpu, &each(COMMAND_READ, events));
    replies.iter().map(|reply| reply.value.get()).collect()
}

/// Simulates work on both vCPUs. The task's events count the work on `vcpu` if they are scheduled in there. They must
/// not count the work on the other vCPU.
fn work(rig: &Rig, vcpu: u32, times: u64) {
    rig.world.work(thread(vcpu), 10 * times, 4);
    rig.world.work(thread(1 - vcpu), 7000, 4);
    (0..times).for_each(|_| rig.mark(vcpu, 5, 1));
    (0..100).for_each(|_| rig.mark(1 - vcpu, 5, 1));
}

#[test]
fn moved_event_keeps_counting_and_closes_its_counters() {
    let mut rig = Rig::new();
    let kinds = [FAULTS, CYCLES, (KIND_MARK, 5), (KIND_EXITS, EXIT_IO)];
    let events = kinds.map(|(kind, config)| rig.open(&task_event(kind, config)).expect("open"));
    for round in 0..20_u64 {
        let vcpu = u32::from(round % 2 == 1);
        rig.commands(vcpu, &each(COMMAND_IN, &events));
        work(&rig, vcpu, round);
        rig.exit(vcpu, ExitReason::Io, &mut At(1));
        rig.exit(1 - vcpu, ExitReason::Io, &mut At(1));
        rig.commands(vcpu, &each(COMMAND_OUT, &events));
        work(&rig, vcpu, 3);
    }
    let times: u64 = (0..20).sum();
    for vcpu in [0, 1] {
        let counts = values(&mut rig, vcpu, &events);
        assert_eq!(counts, [10 * times, 10 * times, times, 20]);
    }
    assert_eq!(
        rig.world.open_counters(),
        4,
        "there are two counters on each vCPU"
    );
    rig.close(events[0]).expect("closed");
    assert_eq!(rig.world.open_counters(), 2);
    rig.close(events[1]).expect("closed");
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn shared_counters_stay_while_another_event_counts_by_them() {
    let mut rig = Rig::new();
    let events = [(); 3].map(|()| rig.open(&task_event(FAULTS.0, FAULTS.1)).expect("open"));
    for vcpu in [0, 1] {
        rig.commands(vcpu, &each(COMMAND_IN, &events[..2]));
        rig.commands(vcpu, &each(COMMAND_OUT, &events[..2]));
    }
    // The third event is scheduled in only on vCPU 1, where it shares the host counter of the first two events.
    done(&mut rig, 1, COMMAND_IN, events[2]);
    assert_eq!(rig.world.open_counters(), 2);
    rig.close(events[0]).expect("closed");
    rig.close(events[1]).expect("closed");
    rig.world.work(thread(1), 5, 4);
    assert_eq!(values(&mut rig, 1, &events[2..]), [5]);
    rig.close(events[2]).expect("closed");
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn moved_event_can_be_closed_while_scheduled_in() {
    let mut rig = Rig::new();
    for (kind, config) in [FAULTS, CYCLES] {
        let event = rig.open(&task_event(kind, config)).expect("open");
        done(&mut rig, 0, COMMAND_IN, event);
        done(&mut rig, 0, COMMAND_OUT, event);
        done(&mut rig, 1, COMMAND_IN, event);
        rig.close(event).expect("closed");
        assert_eq!(rig.world.open_counters(), 0);
    }
}

#[test]
fn group_moves_in_any_order_of_commands() {
    for (into, out) in ORDERS
        .into_iter()
        .flat_map(|into| ORDERS.map(|out| (into, out)))
    {
        let mut rig = Rig::new();
        let leader = rig.open(&task_event(CYCLES.0, CYCLES.1)).expect("open");
        let member = |(kind, config)| led(leader, task_event(kind, config));
        let members = [(KIND_MARK, 5), FAULTS].map(|kind| rig.open(&member(kind)).expect("open"));
        let group = [leader, members[0], members[1]];
        for round in 0..6_u64 {
            let vcpu = u32::from(round % 2 == 1);
            // Send the commands for the three events in one, three or two notifications.
            let (into, out) = (into.map(|at| group[at]), out.map(|at| group[at]));
            let sizes = [3, 1, 2];
            let size = sizes[usize::try_from(round).expect("few") % 3];
            for part in into.chunks(size) {
                rig.commands(vcpu, &each(COMMAND_IN, part));
            }
            work(&rig, vcpu, 4);
            for part in out.chunks(size) {
                rig.commands(vcpu, &each(COMMAND_OUT, part));
            }
            work(&rig, vcpu, 1);
        }
        let counts = values(&mut rig, 0, &group);
        assert_eq!(
            counts,
            [240, 24, 240],
            "order of IN {into:?}, of OUT {out:?}"
        );
        for event in group {
            rig.close(event).expect("closed");
        }
        assert_eq!(rig.world.open_counters(), 0);
    }
}

/// The events of a group can be scheduled in on different vCPUs.
#[test]
fn group_on_two_vcpus_is_reunited() {
    let mut rig = Rig::new();
    let leader = rig.open(&task_event(FAULTS.0, FAULTS.1)).expect("open");
    let member = led(leader, task_event(FAULTS.0, FAULTS.1));
    let member = rig.open(&member).expect("open");
    let group = [leader, member];
    for (of_leader, of_member) in [(0, 1), (1, 1), (1, 0), (0, 0), (0, 1)] {
        done(&mut rig, of_leader, COMMAND_IN, leader);
        done(&mut rig, of_member, COMMAND_IN, member);
        rig.world.work(thread(0), 1, 4);
        rig.world.work(thread(1), 1000, 4);
        done(&mut rig, of_leader, COMMAND_OUT, leader);
        rig.world.work(thread(of_member), 10, 4);
        done(&mut rig, of_member, COMMAND_OUT, member);
        rig.world.work(thread(0), 5, 4);
    }
    assert_eq!(values(&mut rig, 1, &group), [2003, 3052]);
    rig.close(leader).expect("closed");
    done(&mut rig, 1, COMMAND_IN, member);
    rig.close(member).expect("closed");
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn samples_of_a_family_add_up_across_vcpus() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        engine: ENGINE_EXIT.into(),
        ..sampling(task_event(CYCLES.0, CYCLES.1), 100)
    };
    let parent = rig.open(&request).expect("open");
    let child = OpenRequest {
        parent: parent.into(),
        ..request
    };
    let child = rig.open(&child).expect("open");
    let mut ring = rig.map(parent, 16);
    let mut expected = [[0_u64; 2]; 2];
    let mut left = [[0_u64; 2]; 2];
    for round in 0..40_u64 {
        let of_parent = usize::from(round % 2 == 1);
        let on = [of_parent, 1 - of_parent];
        for (event, vcpu) in [parent, child].into_iter().zip(on) {
            let vcpu = u32::try_from(vcpu).expect("few");
            rig.runs(vcpu, 10 + vcpu, 20);
            done(&mut rig, vcpu, COMMAND_IN, event);
        }
        for vcpu in [0, 1] {
            let cycles = 30 * (1 + round % 7) + 10 * u64::from(vcpu);
            rig.world.work(thread(vcpu), cycles, 4);
            let at = usize::try_from(vcpu).expect("few");
            let event = usize::from(on[0] != at);
            // Each event has a counter on each vCPU. Each of these counters counts to the period separately.
            let grown = left[event][at] + cycles;
            expected[event][at] += grown / 100;
            left[event][at] = grown % 100;
            // In every third round, the device finds the overflows at an exit. In the other rounds, it finds them when
            // the task is scheduled out.
            if round % 3 == 0 {
                rig.exit(vcpu, ExitReason::Signal, &mut At(1));
            }
        }
        for (event, vcpu) in [parent, child].into_iter().zip(on) {
            let vcpu = u32::try_from(vcpu).expect("few");
            done(&mut rig, vcpu, COMMAND_OUT, event);
        }
    }
    let samples = ring.samples();
    assert!(samples.iter().all(|sample| sample.id == parent));
    for (event, expected) in [parent, child].into_iter().zip(expected) {
        for (vcpu, expected) in (0..).zip(expected) {
            let own = |sample: &&_| {
                let sample: &crate::reader::Sample = sample;
                (sample.stream_id, sample.cpu) == (event, vcpu)
            };
            let own: Vec<_> = samples.iter().filter(own).collect();
            assert_eq!(own.len() as u64, expected, "event {event} on vCPU {vcpu}");
            assert!(own.is_sorted_by_key(|sample| sample.time));
            assert!(own.iter().all(|sample| sample.pid == 10 + vcpu));
        }
    }
    assert_eq!(rig.world.open_counters(), 4);
    for event in [child, parent] {
        assert_eq!(rig.read(0, event).lost.get(), 0);
        rig.close(event).expect("closed");
    }
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn period_that_began_on_one_vcpu_ends_on_another() {
    let mut rig = Rig::new();
    let event = rig
        .open(&sampling(task_event(KIND_MARK, 5), 7))
        .expect("open");
    let mut ring = rig.map(event, 4);
    for round in 0..30 {
        let vcpu = round % 2;
        done(&mut rig, vcpu, COMMAND_IN, event);
        work(&rig, vcpu, 3);
        done(&mut rig, vcpu, COMMAND_OUT, event);
    }
    let samples = ring.samples();
    assert_eq!(samples.len(), 90 / 7);
    // Each round has three marks. Mark 7 * s causes sample s, so this sample is taken in round (7 * s - 1) / 3.
    let vcpus: Vec<_> = (1..=90 / 7)
        .map(|sample| (7 * sample - 1) / 3 % 2)
        .collect();
    assert!(samples.iter().map(|sample| sample.cpu).eq(vcpus));
}

#[test]
fn links_act_across_vcpus() {
    let mut rig = Rig::new();
    let mark = |value| OpenRequest {
        period: 1.into(),
        ..task_event(KIND_MARK, value)
    };
    let [start, stop] = [7, 8].map(|value| rig.open(&mark(value)).expect("open"));
    let paused = OpenRequest {
        flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
        ..task_event(FAULTS.0, FAULTS.1)
    };
    let target = rig.open(&paused).expect("open");
    rig.link(start, target, LINK_STARTER).expect("linked");
    rig.link(stop, target, LINK_STOPPER).expect("linked");
    let mut expected = 0;
    for round in 0..27_u32 {
        let of = [round % 2, round / 3 % 2, round / 9 % 2];
        for (event, vcpu) in [start, stop, target].into_iter().zip(of) {
            done(&mut rig, vcpu, COMMAND_IN, event);
        }
        rig.world.work(thread(of[2]), 100, 4);
        rig.mark(of[0], 7, 1);
        rig.world.work(thread(of[2]), 3, 4);
        expected += 3;
        // A mark has no effect if it is not on the stopper's vCPU.
        rig.mark(1 - of[1], 8, 1);
        rig.world.work(thread(of[2]), 20, 4);
        expected += 20;
        rig.mark(of[1], 8, 1);
        rig.world.work(thread(of[2]), 100, 4);
        for (event, vcpu) in [start, stop, target].into_iter().zip(of) {
            done(&mut rig, vcpu, COMMAND_OUT, event);
        }
    }
    assert_eq!(values(&mut rig, 0, &[target]), [expected]);
    for event in [start, stop, target] {
        rig.close(event).expect("closed");
    }
    assert_eq!(rig.world.open_counters(), 0);
}

#[test]
fn events_stay_on_their_vcpus_over_thread_changes() {
    let mut rig = Rig::new();
    let events = [FAULTS, CYCLES].map(|(kind, config)| rig.open(&task_event(kind, config)));
    let events = events.map(|opened| opened.expect("open"));
    let mut expected = 0;
    for round in 0..10_u32 {
        let vcpu = round % 2;
        rig.commands(vcpu, &each(COMMAND_IN, &events));
        rig.world.work(thread(vcpu), 10, 4);
        // One vCPU gets a new thread. The device closes the counters of the vCPU's old thread. The other vCPU's
        // counters remain open.
        let ends = round / 2 % 2;
        rig.attach(ends);
        rig.world.work(thread(vcpu), 5, 4);
        expected += 15;
        rig.commands(vcpu, &each(COMMAND_OUT, &events));
        assert_eq!(values(&mut rig, 0, &events), [expected; 2], "round {round}");
    }
    for event in events {
        rig.close(event).expect("closed");
    }
    assert_eq!(rig.world.open_counters(), 0);
}
