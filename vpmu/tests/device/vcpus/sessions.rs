//! Sessions, which bind a vCPU to a thread, and the state of a vCPU that has no thread.

use std::sync::{Arc, Barrier};
use std::thread;

use vpmu::abi::*;
use vpmu::{Error, ExitReason};
use vpmu_testkit::{At, CYCLES, FAULTS, Fields, Fixture, TSC_OFFSET, VCPUS, command, map_area, open_of, thread};
use zerocopy::{FromBytes, IntoBytes};

use super::{Lane, VcpuThread, aside, done, each, task_event};

#[test]
fn second_session_of_a_vcpu_is_refused_and_the_first_continues() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    done(&mut fixture, 0, COMMAND_IN, event);
    fixture.host.work(thread(0), 10, 4);
    fixture.host.be_thread(500);
    let refused = fixture.vpmu.attach(0, 7).expect_err("taken");
    assert!(matches!(refused, Error::Attached(0)), "another error: {refused}");
    fixture.host.work(thread(0), 10, 4);
    fixture.host.work(500, 1000, 4);
    assert_eq!(fixture.value(0, event), 20);
    for vcpu in [VCPUS, u32::MAX] {
        let unknown = fixture.vpmu.attach(vcpu, 0).expect_err("no such vCPU");
        assert!(matches!(unknown, Error::NoVcpu(index) if index == vcpu));
    }
}

#[test]
fn vcpu_is_free_when_its_session_is_dropped() {
    let mut fixture = Fixture::new();
    let of_vcpu = fixture.opened(&open_of(FAULTS.0, FAULTS.1, 0).flags(OPEN_ENABLED));
    let of_task = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    done(&mut fixture, 0, COMMAND_IN, of_task);
    for round in 1..=5 {
        fixture.host.work(thread(0), 10, 4);
        fixture.vcpus.set(0, None);
        fixture.host.be_thread(thread(0));
        let session = fixture.vpmu.attach(0, TSC_OFFSET).expect("free");
        fixture.vcpus.set(0, Some(session));
        for event in [of_vcpu, of_task] {
            assert_eq!(fixture.value(1, event), 10 * round);
        }
    }
    assert_eq!(fixture.host.open_counters(), 1);
}

#[test]
fn one_of_many_threads_gets_a_vcpu() {
    const THREADS: usize = 8;
    let fixture = Fixture::new();
    fixture.vcpus.set(1, None);
    for _ in 0..100 {
        let start = &Barrier::new(THREADS);
        let end = &Barrier::new(THREADS);
        let vpmu = &fixture.vpmu;
        let taken = thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| {
                scope.spawn(move || {
                    start.wait();
                    let session = vpmu.attach(1, 0);
                    end.wait();
                    session.is_ok()
                })
            });
            threads.map(|thread| thread.join().expect("no panic"))
        });
        assert_eq!(taken.iter().filter(|&&taken| taken).count(), 1);
    }
}

#[test]
fn open_exit_is_cut_at_the_end_of_its_session() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(OPEN_ENABLED));
    let mut area = map_area(&mut fixture, event, 4);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(2));
    fixture.vcpus.set(0, None);
    done(&mut fixture, 1, COMMAND_READ, event);
    let exits = area.exits();
    let cuts = exits.iter().map(|exit| (exit.ip.get(), exit.flags & PACKET_CUT));
    assert_eq!(cuts.collect::<Vec<_>>(), [(1, 0), (2, PACKET_CUT)]);
    // A new session inherits nothing from the dropped session.
    fixture.attach(0);
    fixture.vcpus.enter(0);
    fixture.exit(0, ExitReason::Io, &mut At(3));
    done(&mut fixture, 1, COMMAND_READ, event);
    let ips: Vec<_> = area.exits().iter().map(|exit| exit.ip.get()).collect();
    assert_eq!(ips, [3]);
}

#[test]
fn session_continues_in_another_thread() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    let marks = fixture.opened(&open_of(KIND_MARK, 5, 0).flags(OPEN_ENABLED));
    done(&mut fixture, 0, COMMAND_IN, event);
    fixture.vcpus.enter(0);
    let moved = VcpuThread::spawn(Lane::new(&mut fixture, 0));
    moved.run(|lane| {
        lane.session.leave(ExitReason::Io, &mut At(1));
        lane.session.enter();
        lane.mark(5);
    });
    // The session moved to another thread, but the host counters still measure the thread that attached the vCPU.
    fixture.host.work(thread(0), 10, 4);
    let replies = moved.run(move |lane| lane.commands(&each(COMMAND_READ, &[event, marks])));
    let values: Vec<_> = replies.iter().map(|reply| reply.value.get()).collect();
    assert_eq!(values, [10, 1]);
    drop(moved);
    // Once the thread has ended, its session is dropped, and the vCPU can be attached again.
    for _ in 0..1000 {
        fixture.host.be_thread(thread(0));
        if let Ok(session) = fixture.vpmu.attach(0, 0) {
            fixture.vcpus.set(0, Some(session));
            assert_eq!(fixture.value(1, event), 10);
            return;
        }
        thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the session still exists after the end of its thread");
}

/// If a thread panics between `enter` and `leave`, its session is dropped while the device still considers the vCPU to
/// be in the guest.
#[test]
fn flush_ends_when_its_session_is_dropped() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).sampled(100).engine(ENGINE_EXIT).flags(OPEN_ENABLED));
    fixture.vcpus.enter(0);
    let vpmu = Arc::clone(&fixture.vpmu);
    let flush = aside(move || vpmu.flush(Some(event)));
    assert_eq!(fixture.host.await_kicks(1), [0]);
    fixture.vcpus.set(0, None);
    flush.wait().expect("flushed");
    // A later flush does not wait.
    let vpmu = Arc::clone(&fixture.vpmu);
    aside(move || vpmu.flush(Some(event))).wait().expect("flushed");
    assert_eq!(fixture.host.kicks(), 0);
}

/// An event fails on vCPU 1, so the device closes the event's counter on vCPU 0. At the same time, vCPU 0 is attached
/// again.
#[test]
fn counters_of_a_new_thread_survive_a_failed_event() {
    const ROUNDS: u32 = 2_000;
    let mut fixture = Fixture::new();
    let stays = fixture.opened(&open_of(FAULTS.0, FAULTS.1, 0).flags(OPEN_ENABLED));
    for round in 0..ROUNDS {
        let fails = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
        done(&mut fixture, 0, COMMAND_IN, fails);
        done(&mut fixture, 0, COMMAND_OUT, fails);
        done(&mut fixture, 1, COMMAND_IN, fails);
        fixture.host.give_up(thread(1));
        let start = &Barrier::new(2);
        let command = command(COMMAND_READ, fails);
        fixture.queues[3].request(command.as_bytes(), size_of::<Reply>());
        let shared = &fixture;
        thread::scope(|scope| {
            scope.spawn(move || {
                start.wait();
                shared.vcpus.kick(1, QUEUE_VCPU + 1);
            });
            start.wait();
            shared.attach(0);
        });
        let answer = fixture.queues[3].answer().expect("answered immediately");
        let reply = Reply::read_from_bytes(&answer).expect("a reply");
        assert_eq!(reply.state.get(), STATE_ERROR);
        fixture.host.work(thread(0), 1, 4);
        let reply = fixture.command(0, COMMAND_READ, stays);
        assert_eq!(reply.state.get(), STATE_ACTIVE, "round {round}");
        assert_eq!(reply.value.get(), u64::from(round) + 1);
        fixture.close(fails).expect("closed");
        assert_eq!(fixture.host.open_counters(), 1);
    }
}
