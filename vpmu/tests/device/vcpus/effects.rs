//! Leaders and triggers on one vCPU that affect members and targets on another vCPU. The effect must be complete before
//! the first vCPU enters the guest.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, command, thread};

use super::{Lane, VcpuThread, done, led, task_event};

fn state(fixture: &mut Fixture, event: u64) -> i32 {
    // Read the state on vCPU 0, because the affected event is usually on vCPU 1. A command on vCPU 1 could itself
    // complete the effect, and the test would not notice that the effect had been missing.
    fixture.read(0, event).state.get()
}

/// Schedules in a disabled leader on vCPU 0 and its enabled member on vCPU 1.
fn split(fixture: &mut Fixture, leader: &OpenRequest, member: &OpenRequest) -> (u64, u64) {
    let leader = fixture.opened(&leader.flags(0));
    let member = fixture.opened(&led(leader, *member));
    done(fixture, 0, COMMAND_IN, leader);
    done(fixture, 1, COMMAND_IN, member);
    (leader, member)
}

/// VPMU-D-6.1-4.
#[test]
fn leader_starts_and_stops_its_member_on_another_vcpu() {
    let mut fixture = Fixture::new();
    let faults = task_event(FAULTS.0, FAULTS.1);
    let (leader, member) = split(&mut fixture, &task_event(KIND_MARK, 5), &faults);
    let mut expected = 0;
    for by in [0, 1, 0, 1] {
        fixture.host.work(thread(1), 1000, 4);
        assert_eq!(state(&mut fixture, member), STATE_INACTIVE);
        done(&mut fixture, by, COMMAND_ENABLE, leader);
        fixture.host.work(thread(1), 7, 4);
        expected += 7;
        assert_eq!(state(&mut fixture, member), STATE_ACTIVE);
        done(&mut fixture, by, COMMAND_DISABLE, leader);
        fixture.host.work(thread(1), 1000, 4);
        assert_eq!(fixture.value(0, member), expected);
    }
    // Enabling a leader starts its member even if the leader is scheduled out.
    done(&mut fixture, 0, COMMAND_OUT, leader);
    done(&mut fixture, 0, COMMAND_ENABLE, leader);
    fixture.host.work(thread(1), 5, 4);
    assert_eq!(fixture.value(1, member), expected + 5);
}

#[test]
fn member_follows_its_leader_on_any_pair_of_vcpus() {
    let mut fixture = Fixture::new();
    let faults = task_event(FAULTS.0, FAULTS.1);
    let (leader, member) = split(&mut fixture, &task_event(KIND_MARK, 5), &faults);
    done(&mut fixture, 0, COMMAND_ENABLE, leader);
    for (of_leader, of_member) in [(1, 0), (0, 0), (1, 1), (0, 1)] {
        done(&mut fixture, 1, COMMAND_DISABLE, leader);
        for event in [leader, member] {
            let [first, second] = [0, 1].map(|vcpu| fixture.command(vcpu, COMMAND_OUT, event));
            let outs = [first, second].map(|reply| reply.status.get());
            assert!(outs.contains(&0), "no vCPU could schedule the event out");
        }
        done(&mut fixture, of_member, COMMAND_IN, member);
        done(&mut fixture, of_leader, COMMAND_IN, leader);
        assert_eq!(state(&mut fixture, member), STATE_INACTIVE);
        done(&mut fixture, 1 - of_leader, COMMAND_ENABLE, leader);
        assert_eq!(state(&mut fixture, member), STATE_ACTIVE);
    }
    fixture.close(leader).expect("closed");
    assert_eq!(state(&mut fixture, member), STATE_ACTIVE, "a member without a leader is active");
}

#[test]
fn leader_at_its_limit_stops_its_member_on_another_vcpu() {
    let mut fixture = Fixture::new();
    let marks = task_event(KIND_MARK, 5).sampled(1);
    let (leader, member) = split(&mut fixture, &marks, &task_event(FAULTS.0, FAULTS.1));
    assert_eq!(fixture.valued(1, COMMAND_REFRESH, leader, 3), 0);
    for _ in 0..3 {
        fixture.host.work(thread(1), 10, 4);
        fixture.vcpus.leave(0, ExitReason::Mmio, &mut At(1));
        fixture.vcpus.mark(0, 5, &mut At(1));
        // The leader's vCPU has not entered the guest again, but the member has already stopped.
    }
    fixture.host.work(thread(1), 1000, 4);
    assert_eq!(fixture.value(1, member), 30);
    assert_eq!(state(&mut fixture, member), STATE_INACTIVE);
}

#[test]
fn leader_in_error_stops_its_member_on_another_vcpu() {
    let mut fixture = Fixture::new();
    let (leader, member) = split(&mut fixture, &task_event(CYCLES.0, CYCLES.1), &task_event(KIND_MARK, 5));
    done(&mut fixture, 0, COMMAND_ENABLE, leader);
    fixture.mark(1, 5, 1);
    fixture.host.break_host();
    let reply = fixture.command(0, COMMAND_READ, leader);
    assert_eq!(reply.state.get(), STATE_ERROR);
    fixture.mark(1, 5, 1);
    assert_eq!(fixture.value(1, member), 1);
    fixture.close(leader).expect("closed");
    fixture.mark(1, 5, 1);
    assert_eq!(fixture.value(1, member), 2);
}

/// Two vCPUs enable and disable a leader concurrently. The member follows its leader, no matter which command comes
/// last.
#[test]
fn member_is_on_with_its_leader_whichever_vcpu_was_the_last() {
    const ROUNDS: usize = 5_000;
    let mut fixture = Fixture::new();
    let marks = task_event(KIND_MARK, 5);
    let (leader, member) = split(&mut fixture, &marks, &marks);
    let first = VcpuThread::spawn(Lane::new(&mut fixture, 0));
    let second = VcpuThread::spawn(Lane::new(&mut fixture, 1));
    for round in 0..ROUNDS {
        let ops = [COMMAND_DISABLE, COMMAND_ENABLE];
        let [one, other] = [ops[round % 2], ops[(round + 1) % 2]];
        let begun = first.begin(move |lane| lane.kick(&[command(one, leader)])[0]);
        second.run(move |lane| lane.kick(&[command(other, leader)]));
        begun.wait();
        let read = [leader, member].map(|event| command(COMMAND_READ, event));
        let replies = second.run(move |lane| lane.kick(&read));
        let on = replies[0].state.get() != STATE_OFF;
        let state = replies[1].state.get();
        assert_eq!(state == STATE_ACTIVE, on, "round {round}: {replies:?}");
    }
}

/// An event that overflows on vCPU 0, and a function that makes it overflow.
type Overflow = (OpenRequest, fn(&Fixture));

fn triggers(config: u32) -> [Overflow; 3] {
    let every = |kind, config, period: u64| task_event(kind, config).period(period).engine(ENGINE_EXIT);
    let mark: fn(&Fixture) = match config {
        7 => |fixture| fixture.vcpus.mark(0, 7, &mut At(1)),
        _ => |fixture| fixture.vcpus.mark(0, 8, &mut At(1)),
    };
    let exit: fn(&Fixture) = match config {
        7 => |fixture| fixture.vcpus.leave(0, ExitReason::Io, &mut At(1)),
        _ => |fixture| fixture.vcpus.leave(0, ExitReason::Hlt, &mut At(1)),
    };
    let reason = if config == 7 { EXIT_IO } else { EXIT_HLT };
    [
        (every(KIND_MARK, config.into(), 1), mark),
        (every(KIND_EXITS, reason, 1), exit),
        (every(CYCLES.0, CYCLES.1, 100), |fixture| {
            fixture.host.work(thread(0), 100, 4);
            fixture.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        }),
    ]
}

/// VPMU-D-6.11-1.
#[test]
fn trigger_acts_on_another_vcpu_before_its_own_enters() {
    for (start, stop) in [(0, 0), (1, 1), (0, 1), (2, 0), (1, 2)] {
        let mut fixture = Fixture::new();
        let (start, starts) = triggers(7)[start];
        let (stop, stops) = triggers(8)[stop];
        let [start, stop] = [start, stop].map(|request| fixture.opened(&request));
        let paused = task_event(FAULTS.0, FAULTS.1).flags(OPEN_ENABLED | OPEN_PAUSED);
        let target = fixture.opened(&paused);
        fixture.link(start, target, LINK_STARTER).expect("linked");
        fixture.link(stop, target, LINK_STOPPER).expect("linked");
        for event in [start, stop] {
            done(&mut fixture, 0, COMMAND_IN, event);
        }
        done(&mut fixture, 1, COMMAND_IN, target);
        for round in 1..10 {
            fixture.host.work(thread(1), 1000, 4);
            starts(&fixture);
            fixture.host.work(thread(1), 3, 4);
            stops(&fixture);
            fixture.host.work(thread(1), 1000, 4);
            assert_eq!(fixture.value(1, target), 3 * round);
            fixture.vcpus.enter(0);
        }
    }
}

#[test]
fn last_trigger_of_an_exit_decides_on_another_vcpu() {
    for roles in [[LINK_STARTER, LINK_STOPPER], [LINK_STOPPER, LINK_STARTER]] {
        let mut fixture = Fixture::new();
        let mark = task_event(KIND_MARK, 5).period(1);
        let triggers = [(); 2].map(|()| fixture.opened(&mark));
        let target = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
        for (trigger, role) in triggers.into_iter().zip(roles) {
            fixture.link(trigger, target, role).expect("linked");
            done(&mut fixture, 0, COMMAND_IN, trigger);
        }
        done(&mut fixture, 1, COMMAND_IN, target);
        fixture.mark(0, 5, 1);
        fixture.host.work(thread(1), 10, 4);
        let expected = if roles[1] == LINK_STARTER { 10 } else { 0 };
        assert_eq!(fixture.value(1, target), expected);
    }
}

#[test]
fn starter_that_is_also_the_stopper_toggles_on_another_vcpu() {
    let mut fixture = Fixture::new();
    let trigger = fixture.opened(&task_event(KIND_MARK, 5).period(2));
    let target = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    for role in [LINK_STARTER, LINK_STOPPER] {
        fixture.link(trigger, target, role).expect("linked");
    }
    done(&mut fixture, 0, COMMAND_IN, trigger);
    done(&mut fixture, 1, COMMAND_IN, target);
    for _ in 0..20 {
        fixture.host.work(thread(1), 1, 4);
        fixture.mark(0, 5, 1);
    }
    assert_eq!(fixture.value(0, target), 10, "the target counts in every other interval");
}

/// A mark of vCPU 0 stops a sampling event of vCPU 1. When the device stops this event, it finds that the event has
/// overflowed. The overflow starts another event of vCPU 0.
#[test]
fn chain_of_triggers_crosses_vcpus_and_returns() {
    let mut fixture = Fixture::new();
    let first = fixture.opened(&task_event(KIND_MARK, 5).period(1));
    let second = fixture.opened(&task_event(CYCLES.0, CYCLES.1).sampled(100).engine(ENGINE_EXIT));
    let paused = task_event(FAULTS.0, FAULTS.1).flags(OPEN_ENABLED | OPEN_PAUSED);
    let third = fixture.opened(&paused);
    fixture.link(first, second, LINK_STOPPER).expect("linked");
    fixture.link(second, third, LINK_STARTER).expect("linked");
    for (vcpu, event) in [(0, first), (1, second), (0, third)] {
        done(&mut fixture, vcpu, COMMAND_IN, event);
    }
    fixture.vcpus.leave(1, ExitReason::Signal, &mut At(7));
    fixture.host.work(thread(1), 100, 4);
    fixture.host.work(thread(0), 1000, 4);
    fixture.vcpus.mark(0, 5, &mut At(1));
    fixture.host.work(thread(0), 3, 4);
    fixture.host.work(thread(1), 1000, 4);
    assert_eq!(fixture.value(0, third), 3);
    assert_eq!(fixture.value(0, second), 100);
}

/// A cycle of links between events on two vCPUs must not keep the device busy forever.
///
/// VPMU-D-6.11-4.
#[test]
fn circular_links_over_two_vcpus_end() {
    let mut fixture = Fixture::new();
    let request = task_event(CYCLES.0, CYCLES.1).sampled(100).engine(ENGINE_EXIT);
    let events = [(); 4].map(|()| fixture.opened(&request));
    for (at, &event) in events.iter().enumerate() {
        let next = events[(at + 1) % 4];
        fixture.link(event, next, LINK_STARTER).expect("linked");
        fixture.link(event, next, LINK_STOPPER).expect("linked");
        let vcpu = u32::from(at % 2 == 1);
        done(&mut fixture, vcpu, COMMAND_IN, event);
    }
    for _ in 0..50 {
        for vcpu in [0, 1] {
            fixture.vcpus.leave(vcpu, ExitReason::Io, &mut At(1));
            fixture.host.work(thread(vcpu), 350, 4);
            fixture.exit(vcpu, ExitReason::Signal, &mut At(1));
        }
    }
    let metrics = fixture.vpmu.metrics();
    assert!(metrics.samples_lost > 0, "no samples were lost, although there are no rings: {metrics:?}");
}
