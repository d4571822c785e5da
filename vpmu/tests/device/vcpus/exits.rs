//! Another vCPU or a request starts, ends or pauses a trace while an exit of the traced vCPU is handled.

use std::sync::mpsc::{Receiver, Sender, channel};

use vpmu::abi::*;
use vpmu::{ExitReason, GuestRegs, Registers};
use vpmu_testkit::{AreaReader, At, Fields, Fixture, TSC_OFFSET, header, map_area, open_of};

use super::{Lane, VcpuThread, done, task_event};

/// Opens a trace of vCPU 0's I/O exits, and maps its area.
fn trace(fixture: &mut Fixture, flags: u32) -> (u64, AreaReader) {
    let event = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0).flags(flags));
    let area = map_area(fixture, event, 4);
    (event, area)
}

/// Returns the instruction pointer of each exit packet, and whether the packet has `PACKET_CUT`.
fn reported(fixture: &mut Fixture, event: u64, area: &mut AreaReader) -> Vec<(u64, bool)> {
    done(fixture, 1, COMMAND_READ, event);
    let exits = area.exits();
    let cut = |exit: &ExitPacket| exit.flags & PACKET_CUT != 0;
    let reported = exits.iter().map(|exit| (exit.ip.get(), cut(exit)));
    reported.collect()
}

fn leave(fixture: &Fixture, ip: u64) {
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(ip));
}

#[test]
fn trace_ended_by_another_vcpu_during_an_exit_cuts_it() {
    let mut fixture = Fixture::new();
    let (event, mut area) = trace(&mut fixture, OPEN_ENABLED);
    fixture.host.pass(100);
    let left = fixture.host.now();
    leave(&fixture, 1);
    fixture.host.pass(1000);
    done(&mut fixture, 1, COMMAND_DISABLE, event);
    fixture.host.pass(1000);
    fixture.vcpus.enter(0);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    done(&mut fixture, 1, COMMAND_READ, event);
    let exits = area.exits();
    assert_eq!(exits.len(), 1);
    assert_eq!(exits[0].flags & PACKET_CUT, PACKET_CUT);
    assert_eq!((exits[0].ip.get(), exits[0].vcpu.get()), (1, 0));
    assert_eq!(exits[0].time.get(), left + TSC_OFFSET);
    let outside = exits[0].outside.get();
    assert!((1000..1100).contains(&outside), "the time until the trace ended: {outside}");
}

#[test]
fn trace_ended_by_a_request_during_an_exit_cuts_it_once() {
    let ends: [fn(&mut Fixture, u64); 4] = [
        |fixture, event| fixture.close(event).expect("closed"),
        |fixture, event| fixture.unmap(event).expect("unmapped"),
        |fixture, event| {
            let unmap = header(CONTROL_UNMAP_AUX, event);
            fixture.control(&unmap).expect("unmapped");
        },
        |fixture, event| {
            done(fixture, 1, COMMAND_DISABLE, event);
            fixture.close(event).expect("closed");
        },
    ];
    for end in ends {
        let mut fixture = Fixture::new();
        let (event, mut area) = trace(&mut fixture, OPEN_ENABLED);
        fixture.exit(0, ExitReason::Io, &mut At(1));
        leave(&fixture, 2);
        end(&mut fixture, event);
        fixture.vcpus.enter(0);
        fixture.exit(0, ExitReason::Io, &mut At(3));
        let exits = area.exits();
        let cuts = exits.iter().map(|exit| (exit.ip.get(), exit.flags & PACKET_CUT));
        assert_eq!(cuts.collect::<Vec<_>>(), [(1, 0), (2, PACKET_CUT)]);
    }
}

#[test]
fn trace_started_during_an_exit_omits_it() {
    // Test without another trace, and with another trace that records the exit.
    for others in [0, 1] {
        let mut fixture = Fixture::new();
        let mut others: Vec<_> = (0..others).map(|_| trace(&mut fixture, OPEN_ENABLED)).collect();
        let (late, mut late_area) = trace(&mut fixture, 0);
        leave(&fixture, 1);
        done(&mut fixture, 1, COMMAND_ENABLE, late);
        let (opened, mut opened_area) = trace(&mut fixture, OPEN_ENABLED);
        fixture.vcpus.enter(0);
        fixture.exit(0, ExitReason::Io, &mut At(2));
        for (event, area) in [(late, &mut late_area), (opened, &mut opened_area)] {
            assert_eq!(reported(&mut fixture, event, area), [(2, false)]);
        }
        for (event, area) in &mut others {
            assert_eq!(reported(&mut fixture, *event, area), [(1, false), (2, false)]);
        }
    }
}

#[test]
fn trace_restarted_during_an_exit_contains_it_once_and_cut() {
    for times in [1, 2, 3] {
        let mut fixture = Fixture::new();
        let (event, mut area) = trace(&mut fixture, OPEN_ENABLED);
        let (other, mut other_area) = trace(&mut fixture, OPEN_ENABLED);
        leave(&fixture, 1);
        for _ in 0..times {
            done(&mut fixture, 1, COMMAND_DISABLE, event);
            done(&mut fixture, 1, COMMAND_ENABLE, event);
        }
        fixture.vcpus.enter(0);
        fixture.exit(0, ExitReason::Io, &mut At(2));
        assert_eq!(reported(&mut fixture, event, &mut area), [(1, true), (2, false)]);
        let other = reported(&mut fixture, other, &mut other_area);
        assert_eq!(other, [(1, false), (2, false)]);
    }
}

/// Opens a trace of a task on vCPU 0. Marks of vCPU 1 stop and start this trace.
fn steered(fixture: &mut Fixture) -> (u64, AreaReader) {
    let event = fixture.opened(&task_event(KIND_EXIT_TRACE, EXIT_IO));
    let area = map_area(fixture, event, 4);
    for (value, role) in [(7, LINK_STARTER), (8, LINK_STOPPER)] {
        let mark = fixture.opened(&task_event(KIND_MARK, value).period(1));
        fixture.link(mark, event, role).expect("linked");
        done(fixture, 1, COMMAND_IN, mark);
    }
    done(fixture, 0, COMMAND_IN, event);
    (event, area)
}

#[test]
fn trace_paused_by_another_vcpu_during_an_exit_contains_it() {
    let mut fixture = Fixture::new();
    let (event, mut area) = steered(&mut fixture);
    leave(&fixture, 1);
    fixture.mark(1, 8, 1);
    assert_eq!(reported(&mut fixture, event, &mut area), [], "the exit has not ended");
    fixture.vcpus.enter(0);
    // The device publishes the packet immediately, because there may never be a later packet.
    let exits = area.exits();
    let cuts = exits.iter().map(|exit| (exit.ip.get(), exit.flags & PACKET_CUT));
    assert_eq!(cuts.collect::<Vec<_>>(), [(1, 0)]);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(reported(&mut fixture, event, &mut area), []);
}

#[test]
fn trace_resumed_by_another_vcpu_during_an_exit_omits_it() {
    let mut fixture = Fixture::new();
    let (event, mut area) = steered(&mut fixture);
    fixture.mark(1, 8, 1);
    leave(&fixture, 1);
    fixture.mark(1, 7, 1);
    fixture.vcpus.enter(0);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(reported(&mut fixture, event, &mut area), [(2, false)]);
}

#[test]
fn trace_paused_and_resumed_during_an_exit_contains_it_once() {
    let mut fixture = Fixture::new();
    let (event, mut area) = steered(&mut fixture);
    leave(&fixture, 1);
    for value in [8, 7, 8, 7] {
        fixture.mark(1, value, 1);
    }
    fixture.vcpus.enter(0);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(reported(&mut fixture, event, &mut area), [(1, false), (2, false)]);
}

#[test]
fn trace_ended_in_a_pause_during_an_exit_cuts_it() {
    let mut fixture = Fixture::new();
    let (event, mut area) = steered(&mut fixture);
    leave(&fixture, 1);
    fixture.mark(1, 8, 1);
    done(&mut fixture, 1, COMMAND_DISABLE, event);
    fixture.vcpus.enter(0);
    assert_eq!(reported(&mut fixture, event, &mut area), [(1, true)]);
}

#[test]
fn exit_of_a_moved_task_is_cut_on_one_vcpu_and_omitted_on_the_other() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&task_event(KIND_EXIT_TRACE, EXIT_USER));
    let mut area = map_area(&mut fixture, event, 4);
    // Another trace records all exits of the second vCPU, including the exit of `COMMAND_IN`. The task's trace omits
    // the exit of `COMMAND_IN`.
    fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, 1).flags(OPEN_ENABLED));
    done(&mut fixture, 0, COMMAND_IN, event);
    fixture.exit(0, ExitReason::Io, &mut At(1));
    done(&mut fixture, 0, COMMAND_OUT, event);
    done(&mut fixture, 1, COMMAND_IN, event);
    fixture.exit(1, ExitReason::Hlt, &mut At(2));
    done(&mut fixture, 1, COMMAND_OUT, event);
    let exits = area.exits();
    let exits = exits.iter().map(|exit| {
        let reason = u64::from(exit.reason.get());
        (exit.vcpu.get(), reason, exit.flags & PACKET_CUT != 0)
    });
    let expected = [(0, EXIT_IO, false), (0, EXIT_MMIO, true), (1, EXIT_HLT, false), (1, EXIT_MMIO, true)];
    assert_eq!(exits.collect::<Vec<_>>(), expected);
}

/// A hypervisor that returns registers only when the test permits it.
struct Asked {
    asked: Sender<()>,
    resume: Receiver<()>,
}

impl Registers for Asked {
    fn registers(&mut self) -> Option<GuestRegs> {
        self.asked.send(()).expect("the test waits");
        self.resume.recv().expect("the test continues");
        At(1).registers()
    }
}

#[test]
fn trace_stopped_as_an_exit_begins_and_started_during_it_omits_it() {
    let mut fixture = Fixture::new();
    let (event, mut area) = trace(&mut fixture, OPEN_ENABLED);
    let first = VcpuThread::spawn(Lane::new(&mut fixture, 0));
    let (asked, is_asked) = channel();
    let (go, resume) = channel();
    let left = first.begin(move |lane| {
        lane.session.leave(ExitReason::Io, &mut Asked { asked, resume });
    });
    is_asked.recv_timeout(super::LONG).expect("the trace needs the registers");
    done(&mut fixture, 1, COMMAND_DISABLE, event);
    go.send(()).expect("the vCPU waits");
    left.wait();
    done(&mut fixture, 1, COMMAND_ENABLE, event);
    first.run(|lane| {
        lane.session.enter();
        lane.session.leave(ExitReason::Io, &mut At(2));
        lane.session.enter();
    });
    assert_eq!(reported(&mut fixture, event, &mut area), [(2, false)]);
}
