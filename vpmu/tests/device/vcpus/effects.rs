//! Leaders and triggers on one vCPU that affect members and targets on another vCPU. The effect must be complete before
//! the first vCPU enters the guest.

use vpmu::ExitReason;
use vpmu::abi::*;

use super::{Lane, VcpuThread, done, led, task_event};
use crate::rig::{Rig, command, sampling, thread};
use crate::world::{At, CYCLES, FAULTS};

fn state(rig: &mut Rig, event: u64) -> i32 {
    // Read the state on vCPU 0, because the affected event is usually on vCPU 1. A command on vCPU 1 could itself
    // complete the effect, and the test would not notice that the effect had been missing.
    rig.read(0, event).state.get()
}

/// Schedules in a disabled leader on vCPU 0 and its enabled member on vCPU 1.
fn split(rig: &mut Rig, leader: &OpenRequest, member: &OpenRequest) -> (u64, u64) {
    let off = OpenRequest {
        flags: 0.into(),
        ..*leader
    };
    let leader = rig.open(&off).expect("open");
    let member = rig.open(&led(leader, *member)).expect("open");
    done(rig, 0, COMMAND_IN, leader);
    done(rig, 1, COMMAND_IN, member);
    (leader, member)
}

/// VPMU-D-6.1-4.
#[test]
fn leader_starts_and_stops_its_member_on_another_vcpu() {
    let mut rig = Rig::new();
    let faults = task_event(FAULTS.0, FAULTS.1);
    let (leader, member) = split(&mut rig, &task_event(KIND_MARK, 5), &faults);
    let mut expected = 0;
    for by in [0, 1, 0, 1] {
        rig.world.work(thread(1), 1000, 4);
        assert_eq!(state(&mut rig, member), STATE_INACTIVE);
        done(&mut rig, by, COMMAND_ENABLE, leader);
        rig.world.work(thread(1), 7, 4);
        expected += 7;
        assert_eq!(state(&mut rig, member), STATE_ACTIVE);
        done(&mut rig, by, COMMAND_DISABLE, leader);
        rig.world.work(thread(1), 1000, 4);
        assert_eq!(rig.value(0, member), expected);
    }
    // Enabling a leader starts its member even if the leader is scheduled out.
    done(&mut rig, 0, COMMAND_OUT, leader);
    done(&mut rig, 0, COMMAND_ENABLE, leader);
    rig.world.work(thread(1), 5, 4);
    assert_eq!(rig.value(1, member), expected + 5);
}

#[test]
fn member_follows_its_leader_on_any_pair_of_vcpus() {
    let mut rig = Rig::new();
    let faults = task_event(FAULTS.0, FAULTS.1);
    let (leader, member) = split(&mut rig, &task_event(KIND_MARK, 5), &faults);
    done(&mut rig, 0, COMMAND_ENABLE, leader);
    for (of_leader, of_member) in [(1, 0), (0, 0), (1, 1), (0, 1)] {
        done(&mut rig, 1, COMMAND_DISABLE, leader);
        for event in [leader, member] {
            let [first, second] = [0, 1].map(|vcpu| rig.command(vcpu, COMMAND_OUT, event));
            let outs = [first, second].map(|reply| reply.status.get());
            assert!(outs.contains(&0), "no vCPU could schedule the event out");
        }
        done(&mut rig, of_member, COMMAND_IN, member);
        done(&mut rig, of_leader, COMMAND_IN, leader);
        assert_eq!(state(&mut rig, member), STATE_INACTIVE);
        done(&mut rig, 1 - of_leader, COMMAND_ENABLE, leader);
        assert_eq!(state(&mut rig, member), STATE_ACTIVE);
    }
    rig.close(leader).expect("closed");
    assert_eq!(
        state(&mut rig, member),
        STATE_ACTIVE,
        "a member without a leader is active"
    );
}

#[test]
fn leader_at_its_limit_stops_its_member_on_another_vcpu() {
    let mut rig = Rig::new();
    let marks = sampling(task_event(KIND_MARK, 5), 1);
    let (leader, member) = split(&mut rig, &marks, &task_event(FAULTS.0, FAULTS.1));
    assert_eq!(rig.valued(1, COMMAND_REFRESH, leader, 3), 0);
    for _ in 0..3 {
        rig.world.work(thread(1), 10, 4);
        rig.vcpus.leave(0, ExitReason::Mmio, &mut At(1));
        rig.vcpus.mark(0, 5, &mut At(1));
        // The leader's vCPU has not entered the guest again, but the member has already stopped.
    }
    rig.world.work(thread(1), 1000, 4);
    assert_eq!(rig.value(1, member), 30);
    assert_eq!(state(&mut rig, member), STATE_INACTIVE);
}

#[test]
fn leader_in_error_stops_its_member_on_another_vcpu() {
    let mut rig = Rig::new();
    let (leader, member) = split(
        &mut rig,
        &task_event(CYCLES.0, CYCLES.1),
        &task_event(KIND_MARK, 5),
    );
    done(&mut rig, 0, COMMAND_ENABLE, leader);
    rig.mark(1, 5, 1);
    rig.world.break_host();
    let reply = rig.command(0, COMMAND_READ, leader);
    assert_eq!(reply.state.get(), STATE_ERROR);
    rig.mark(1, 5, 1);
    assert_eq!(rig.value(1, member), 1);
    rig.close(leader).expect("closed");
    rig.mark(1, 5, 1);
    assert_eq!(rig.value(1, member), 2);
}

/// Two vCPUs enable and disable a leader concurrently. The member follows its leader, no matter which command comes
/// last.
#[test]
fn member_is_on_with_its_leader_whichever_vcpu_was_the_last() {
    const ROUNDS: usize = 5_000;
    let mut rig = Rig::new();
    let marks = task_event(KIND_MARK, 5);
    let (leader, member) = split(&mut rig, &marks, &marks);
    let first = VcpuThread::spawn(Lane::new(&mut rig, 0));
    let second = VcpuThread::spawn(Lane::new(&mut rig, 1));
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
type Overflow = (OpenRequest, fn(&Rig));

fn triggers(config: u32) -> [Overflow; 3] {
    let every = |kind, config, period: u64| OpenRequest {
        period: period.into(),
        engine: ENGINE_EXIT.into(),
        ..task_event(kind, config)
    };
    let mark: fn(&Rig) = match config {
        7 => |rig| rig.vcpus.mark(0, 7, &mut At(1)),
        _ => |rig| rig.vcpus.mark(0, 8, &mut At(1)),
    };
    let exit: fn(&Rig) = match config {
        7 => |rig| rig.vcpus.leave(0, ExitReason::Io, &mut At(1)),
        _ => |rig| rig.vcpus.leave(0, ExitReason::Hlt, &mut At(1)),
    };
    let reason = if config == 7 { EXIT_IO } else { EXIT_HLT };
    [
        (every(KIND_MARK, config.into(), 1), mark),
        (every(KIND_EXITS, reason, 1), exit),
        (every(CYCLES.0, CYCLES.1, 100), |rig| {
            rig.world.work(thread(0), 100, 4);
            rig.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        }),
    ]
}

/// VPMU-D-6.11-1.
#[test]
fn trigger_acts_on_another_vcpu_before_its_own_enters() {
    for (start, stop) in [(0, 0), (1, 1), (0, 1), (2, 0), (1, 2)] {
        let mut rig = Rig::new();
        let (start, starts) = triggers(7)[start];
        let (stop, stops) = triggers(8)[stop];
        let [start, stop] = [start, stop].map(|request| rig.open(&request).expect("open"));
        let paused = OpenRequest {
            flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
            ..task_event(FAULTS.0, FAULTS.1)
        };
        let target = rig.open(&paused).expect("open");
        rig.link(start, target, LINK_STARTER).expect("linked");
        rig.link(stop, target, LINK_STOPPER).expect("linked");
        for event in [start, stop] {
            done(&mut rig, 0, COMMAND_IN, event);
        }
        done(&mut rig, 1, COMMAND_IN, target);
        for round in 1..10 {
            rig.world.work(thread(1), 1000, 4);
            starts(&rig);
            rig.world.work(thread(1), 3, 4);
            stops(&rig);
            rig.world.work(thread(1), 1000, 4);
            assert_eq!(rig.value(1, target), 3 * round);
            rig.vcpus.enter(0);
        }
    }
}

#[test]
fn last_trigger_of_an_exit_decides_on_another_vcpu() {
    for roles in [[LINK_STARTER, LINK_STOPPER], [LINK_STOPPER, LINK_STARTER]] {
        let mut rig = Rig::new();
        let mark = OpenRequest {
            period: 1.into(),
            ..task_event(KIND_MARK, 5)
        };
        let triggers = [(); 2].map(|()| rig.open(&mark).expect("open"));
        let target = rig.open(&task_event(FAULTS.0, FAULTS.1)).expect("open");
        for (trigger, role) in triggers.into_iter().zip(roles) {
            rig.link(trigger, target, role).expect("linked");
            done(&mut rig, 0, COMMAND_IN, trigger);
        }
        done(&mut rig, 1, COMMAND_IN, target);
        rig.mark(0, 5, 1);
        rig.world.work(thread(1), 10, 4);
        let expected = if roles[1] == LINK_STARTER { 10 } else { 0 };
        assert_eq!(rig.value(1, target), expected);
    }
}

#[test]
fn starter_that_is_also_the_stopper_toggles_on_another_vcpu() {
    let mut rig = Rig::new();
    let mark = OpenRequest {
        period: 2.into(),
        ..task_event(KIND_MARK, 5)
    };
    let trigger = rig.open(&mark).expect("open");
    let target = rig.open(&task_event(FAULTS.0, FAULTS.1)).expect("open");
    for role in [LINK_STARTER, LINK_STOPPER] {
        rig.link(trigger, target, role).expect("linked");
    }
    done(&mut rig, 0, COMMAND_IN, trigger);
    done(&mut rig, 1, COMMAND_IN, target);
    for _ in 0..20 {
        rig.world.work(thread(1), 1, 4);
        rig.mark(0, 5, 1);
    }
    assert_eq!(
        rig.value(0, target),
        10,
        "the target counts in every other interval"
    );
}

/// A mark of vCPU 0 stops a sampling event of vCPU 1. When the device stops this event, it finds that the event has
/// overflowed. The overflow starts another event of vCPU 0.
#[test]
fn chain_of_triggers_crosses_vcpus_and_returns() {
    let mut rig = Rig::new();
    let mark = OpenRequest {
        period: 1.into(),
        ..task_event(KIND_MARK, 5)
    };
    let first = rig.open(&mark).expect("open");
    let second = OpenRequest {
        engine: ENGINE_EXIT.into(),
        ..sampling(task_event(CYCLES.0, CYCLES.1), 100)
    };
    let second = rig.open(&second).expect("open");
    let paused = OpenRequest {
        flags: (OPEN_ENABLED | OPEN_PAUSED).into(),
        ..task_event(FAULTS.0, FAULTS.1)
    };
    let third = rig.open(&paused).expect("open");
    rig.link(first, second, LINK_STOPPER).expect("linked");
    rig.link(second, third, LINK_STARTER).expect("linked");
    for (vcpu, event) in [(0, first), (1, second), (0, third)] {
        done(&mut rig, vcpu, COMMAND_IN, event);
    }
    rig.vcpus.leave(1, ExitReason::Signal, &mut At(7));
    rig.world.work(thread(1), 100, 4);
    rig.world.work(thread(0), 1000, 4);
    rig.vcpus.mark(0, 5, &mut At(1));
    rig.world.work(thread(0), 3, 4);
    rig.world.work(thread(1), 1000, 4);
    assert_eq!(rig.value(0, third), 3);
    assert_eq!(rig.value(0, second), 100);
}

/// A cycle of links between events on two vCPUs must not keep the device busy forever.
///
/// VPMU-D-6.11-4.
#[test]
fn circular_links_over_two_vcpus_end() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        engine: ENGINE_EXIT.into(),
        ..sampling(task_event(CYCLES.0, CYCLES.1), 100)
    };
    let events = [(); 4].map(|()| rig.open(&request).expect("open"));
    for (at, &event) in events.iter().enumerate() {
        let next = events[(at + 1) % 4];
        rig.link(event, next, LINK_STARTER).expect("linked");
        rig.link(event, next, LINK_STOPPER).expect("linked");
        let vcpu = u32::from(at % 2 == 1);
        done(&mut rig, vcpu, COMMAND_IN, event);
    }
    for _ in 0..50 {
        for vcpu in [0, 1] {
            rig.vcpus.leave(vcpu, ExitReason::Io, &mut At(1));
            rig.world.work(thread(vcpu), 350, 4);
            rig.exit(vcpu, ExitReason::Signal, &mut At(1));
        }
    }
    let metrics = rig.vpmu.metrics();
    assert!(
        metrics.samples_lost > 0,
        "no samples were lost, although there are no rings: {metrics:?}"
    );
}
