//! Task events that move from one vCPU to another.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, thread};

use super::{done, each, led, task_event};

/// Every order of three events.
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

fn values(fixture: &mut Fixture, vcpu: u32, events: &[u64]) -> Vec<u64> {
    let replies = fixture.commands(vcpu, &each(COMMAND_READ, events));
    replies.iter().map(|reply| reply.value.get()).collect()
}

/// Simulates work on both vCPUs. The task's events count the work on `vcpu` if they are scheduled in there. They must
/// not count the work on the other vCPU.
fn work(fixture: &Fixture, vcpu: u32, times: u64) {
    fixture.host.work(thread(vcpu), 10 * times, 4);
    fixture.host.work(thread(1 - vcpu), 7000, 4);
    (0..times).for_each(|_| fixture.mark(vcpu, 5, 1));
    (0..100).for_each(|_| fixture.mark(1 - vcpu, 5, 1));
}

#[test]
fn moved_event_keeps_counting_and_closes_its_counters() {
    let mut fixture = Fixture::new();
    let kinds = [FAULTS, CYCLES, (KIND_MARK, 5), (KIND_EXITS, EXIT_IO)];
    let events = kinds.map(|(kind, config)| fixture.opened(&task_event(kind, config)));
    for round in 0..20_u64 {
        let vcpu = u32::from(round % 2 == 1);
        fixture.commands(vcpu, &each(COMMAND_IN, &events));
        work(&fixture, vcpu, round);
        fixture.exit(vcpu, ExitReason::Io, &mut At(1));
        fixture.exit(1 - vcpu, ExitReason::Io, &mut At(1));
        fixture.commands(vcpu, &each(COMMAND_OUT, &events));
        work(&fixture, vcpu, 3);
    }
    let times: u64 = (0..20).sum();
    for vcpu in [0, 1] {
        let counts = values(&mut fixture, vcpu, &events);
        assert_eq!(counts, [10 * times, 10 * times, times, 20]);
    }
    assert_eq!(fixture.host.open_counters(), 4, "there are two counters on each vCPU");
    fixture.close(events[0]).expect("closed");
    assert_eq!(fixture.host.open_counters(), 2);
    fixture.close(events[1]).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn shared_counters_stay_while_another_event_counts_by_them() {
    let mut fixture = Fixture::new();
    let events = [(); 3].map(|()| fixture.opened(&task_event(FAULTS.0, FAULTS.1)));
    for vcpu in [0, 1] {
        fixture.commands(vcpu, &each(COMMAND_IN, &events[..2]));
        fixture.commands(vcpu, &each(COMMAND_OUT, &events[..2]));
    }
    // The third event is scheduled in only on vCPU 1, where it shares the host counter of the first two events.
    done(&mut fixture, 1, COMMAND_IN, events[2]);
    assert_eq!(fixture.host.open_counters(), 2);
    fixture.close(events[0]).expect("closed");
    fixture.close(events[1]).expect("closed");
    fixture.host.work(thread(1), 5, 4);
    assert_eq!(values(&mut fixture, 1, &events[2..]), [5]);
    fixture.close(events[2]).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn moved_event_can_be_closed_while_scheduled_in() {
    let mut fixture = Fixture::new();
    for (kind, config) in [FAULTS, CYCLES] {
        let event = fixture.opened(&task_event(kind, config));
        done(&mut fixture, 0, COMMAND_IN, event);
        done(&mut fixture, 0, COMMAND_OUT, event);
        done(&mut fixture, 1, COMMAND_IN, event);
        fixture.close(event).expect("closed");
        assert_eq!(fixture.host.open_counters(), 0);
    }
}

#[test]
fn group_moves_in_any_order_of_commands() {
    for (into, out) in ORDERS.into_iter().flat_map(|into| ORDERS.map(|out| (into, out))) {
        let mut fixture = Fixture::new();
        let leader = fixture.opened(&task_event(CYCLES.0, CYCLES.1));
        let member = |(kind, config)| led(leader, task_event(kind, config));
        let members = [(KIND_MARK, 5), FAULTS].map(|kind| fixture.opened(&member(kind)));
        let group = [leader, members[0], members[1]];
        for round in 0..6_u64 {
            let vcpu = u32::from(round % 2 == 1);
            // Send the commands for the three events in one, three or two notifications.
            let (into, out) = (into.map(|at| group[at]), out.map(|at| group[at]));
            let sizes = [3, 1, 2];
            let size = sizes[usize::try_from(round).expect("few") % 3];
            for part in into.chunks(size) {
                fixture.commands(vcpu, &each(COMMAND_IN, part));
            }
            work(&fixture, vcpu, 4);
            for part in out.chunks(size) {
                fixture.commands(vcpu, &each(COMMAND_OUT, part));
            }
            work(&fixture, vcpu, 1);
        }
        let counts = values(&mut fixture, 0, &group);
        assert_eq!(counts, [240, 24, 240], "order of IN {into:?}, of OUT {out:?}");
        for event in group {
            fixture.close(event).expect("closed");
        }
        assert_eq!(fixture.host.open_counters(), 0);
    }
}

/// The events of a group can be scheduled in on different vCPUs.
#[test]
fn group_on_two_vcpus_is_reunited() {
    let mut fixture = Fixture::new();
    let leader = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    let member = fixture.opened(&led(leader, task_event(FAULTS.0, FAULTS.1)));
    let group = [leader, member];
    for (of_leader, of_member) in [(0, 1), (1, 1), (1, 0), (0, 0), (0, 1)] {
        done(&mut fixture, of_leader, COMMAND_IN, leader);
        done(&mut fixture, of_member, COMMAND_IN, member);
        fixture.host.work(thread(0), 1, 4);
        fixture.host.work(thread(1), 1000, 4);
        done(&mut fixture, of_leader, COMMAND_OUT, leader);
        fixture.host.work(thread(of_member), 10, 4);
        done(&mut fixture, of_member, COMMAND_OUT, member);
        fixture.host.work(thread(0), 5, 4);
    }
    assert_eq!(values(&mut fixture, 1, &group), [2003, 3052]);
    fixture.close(leader).expect("closed");
    done(&mut fixture, 1, COMMAND_IN, member);
    fixture.close(member).expect("closed");
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn samples_of_a_family_add_up_across_vcpus() {
    let mut fixture = Fixture::new();
    let request = task_event(CYCLES.0, CYCLES.1).sampled(100).engine(ENGINE_EXIT);
    let parent = fixture.opened(&request);
    let child = fixture.opened(&request.parent(parent));
    let mut ring = fixture.map(parent, 16);
    let mut expected = [[0_u64; 2]; 2];
    let mut left = [[0_u64; 2]; 2];
    for round in 0..40_u64 {
        let of_parent = usize::from(round % 2 == 1);
        let on = [of_parent, 1 - of_parent];
        for (event, vcpu) in [parent, child].into_iter().zip(on) {
            let vcpu = u32::try_from(vcpu).expect("few");
            fixture.runs(vcpu, 10 + vcpu, 20);
            done(&mut fixture, vcpu, COMMAND_IN, event);
        }
        for vcpu in [0, 1] {
            let cycles = 30 * (1 + round % 7) + 10 * u64::from(vcpu);
            fixture.host.work(thread(vcpu), cycles, 4);
            let at = usize::try_from(vcpu).expect("few");
            let event = usize::from(on[0] != at);
            // Each event has a counter on each vCPU. Each of these counters counts to the period separately.
            let grown = left[event][at] + cycles;
            expected[event][at] += grown / 100;
            left[event][at] = grown % 100;
            // In every third round, the device finds the overflows at an exit. In the other rounds, it finds them when
            // the task is scheduled out.
            if round % 3 == 0 {
                fixture.exit(vcpu, ExitReason::Signal, &mut At(1));
            }
        }
        for (event, vcpu) in [parent, child].into_iter().zip(on) {
            let vcpu = u32::try_from(vcpu).expect("few");
            done(&mut fixture, vcpu, COMMAND_OUT, event);
        }
    }
    let samples = ring.samples();
    assert!(samples.iter().all(|sample| sample.id == parent));
    for (event, expected) in [parent, child].into_iter().zip(expected) {
        for (vcpu, expected) in (0..).zip(expected) {
            let own = |sample: &&_| {
                let sample: &vpmu_testkit::Sample = sample;
                (sample.stream_id, sample.cpu) == (event, vcpu)
            };
            let own: Vec<_> = samples.iter().filter(own).collect();
            assert_eq!(own.len() as u64, expected, "event {event} on vCPU {vcpu}");
            assert!(own.is_sorted_by_key(|sample| sample.time));
            assert!(own.iter().all(|sample| sample.pid == 10 + vcpu));
        }
    }
    assert_eq!(fixture.host.open_counters(), 4);
    for event in [child, parent] {
        assert_eq!(fixture.read(0, event).lost.get(), 0);
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn period_that_began_on_one_vcpu_ends_on_another() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&task_event(KIND_MARK, 5).sampled(7));
    let mut ring = fixture.map(event, 4);
    for round in 0..30 {
        let vcpu = round % 2;
        done(&mut fixture, vcpu, COMMAND_IN, event);
        work(&fixture, vcpu, 3);
        done(&mut fixture, vcpu, COMMAND_OUT, event);
    }
    let samples = ring.samples();
    assert_eq!(samples.len(), 90 / 7);
    // Each round has three marks. Mark 7 * s causes sample s, so this sample is taken in round (7 * s - 1) / 3.
    let vcpus: Vec<_> = (1..=90 / 7).map(|sample| (7 * sample - 1) / 3 % 2).collect();
    assert!(samples.iter().map(|sample| sample.cpu).eq(vcpus));
}

#[test]
fn links_act_across_vcpus() {
    let mut fixture = Fixture::new();
    let mark = |value| task_event(KIND_MARK, value).period(1);
    let [start, stop] = [7, 8].map(|value| fixture.opened(&mark(value)));
    let paused = task_event(FAULTS.0, FAULTS.1).flags(OPEN_ENABLED | OPEN_PAUSED);
    let target = fixture.opened(&paused);
    fixture.link(start, target, LINK_STARTER).expect("linked");
    fixture.link(stop, target, LINK_STOPPER).expect("linked");
    let mut expected = 0;
    for round in 0..27_u32 {
        let of = [round % 2, round / 3 % 2, round / 9 % 2];
        for (event, vcpu) in [start, stop, target].into_iter().zip(of) {
            done(&mut fixture, vcpu, COMMAND_IN, event);
        }
        fixture.host.work(thread(of[2]), 100, 4);
        fixture.mark(of[0], 7, 1);
        fixture.host.work(thread(of[2]), 3, 4);
        expected += 3;
        // A mark has no effect if it is not on the stopper's vCPU.
        fixture.mark(1 - of[1], 8, 1);
        fixture.host.work(thread(of[2]), 20, 4);
        expected += 20;
        fixture.mark(of[1], 8, 1);
        fixture.host.work(thread(of[2]), 100, 4);
        for (event, vcpu) in [start, stop, target].into_iter().zip(of) {
            done(&mut fixture, vcpu, COMMAND_OUT, event);
        }
    }
    assert_eq!(values(&mut fixture, 0, &[target]), [expected]);
    for event in [start, stop, target] {
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.host.open_counters(), 0);
}

#[test]
fn events_stay_on_their_vcpus_over_thread_changes() {
    let mut fixture = Fixture::new();
    let events = [FAULTS, CYCLES].map(|(kind, config)| fixture.opened(&task_event(kind, config)));
    let mut expected = 0;
    for round in 0..10_u32 {
        let vcpu = round % 2;
        fixture.commands(vcpu, &each(COMMAND_IN, &events));
        fixture.host.work(thread(vcpu), 10, 4);
        // One vCPU gets a new thread. The device closes the counters of the vCPU's old thread. The other vCPU's
        // counters remain open.
        let ends = round / 2 % 2;
        fixture.attach(ends);
        fixture.host.work(thread(vcpu), 5, 4);
        expected += 15;
        fixture.commands(vcpu, &each(COMMAND_OUT, &events));
        assert_eq!(values(&mut fixture, 0, &events), [expected; 2], "round {round}");
    }
    for event in events {
        fixture.close(event).expect("closed");
    }
    assert_eq!(fixture.host.open_counters(), 0);
}
