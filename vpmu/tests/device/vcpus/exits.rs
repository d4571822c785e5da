//! Another vCPU or a request starts, ends or pauses a trace while an exit of the traced vCPU is handled.

use std::sync::mpsc::{Receiver, Sender, channel};

use vpmu::abi::*;
use vpmu::{ExitReason, GuestRegs, Registers};

use super::{Lane, VcpuThread, done, task_event};
use crate::rig::{Rig, TSC_OFFSET, open_of};
use crate::traces::area::{AreaReader, map};
use crate::world::At;

/// Opens a trace of vCPU 0's I/O exits, and maps its area.
fn trace(rig: &mut Rig, flags: u32) -> (u64, AreaReader) {
    let request = OpenRequest {
        flags: flags.into(),
        ..open_of(KIND_EXIT_TRACE, EXIT_IO, 0)
    };
    let event = rig.open(&request).expect("open");
    let area = map(rig, event, 4);
    (event, area)
}

/// Returns the instruction pointer of each exit packet, and whether the packet has `PACKET_CUT`.
fn told(rig: &mut Rig, event: u64, area: &mut AreaReader) -> Vec<(u64, bool)> {
    done(rig, 1, COMMAND_READ, event);
    let exits = area.exits();
    let cut = |exit: &ExitPacket| exit.flags & PACKET_CUT != 0;
    let told = exits.iter().map(|exit| (exit.ip.get(), cut(exit)));
    told.collect()
}

fn leave(rig: &Rig, ip: u64) {
    rig.vcpus.leave(0, ExitReason::Io, &mut At(ip));
}

#[test]
fn trace_ended_by_another_vcpu_during_an_exit_cuts_it() {
    let mut rig = Rig::new();
    let (event, mut area) = trace(&mut rig, OPEN_ENABLED);
    rig.world.pass(100);
    let left = rig.world.now();
    leave(&rig, 1);
    rig.world.pass(1000);
    done(&mut rig, 1, COMMAND_DISABLE, event);
    rig.world.pass(1000);
    rig.vcpus.enter(0);
    rig.exit(0, ExitReason::Io, &mut At(2));
    done(&mut rig, 1, COMMAND_READ, event);
    let exits = area.exits();
    assert_eq!(exits.len(), 1);
    assert_eq!(exits[0].flags & PACKET_CUT, PACKET_CUT);
    assert_eq!((exits[0].ip.get(), exits[0].vcpu.get()), (1, 0));
    assert_eq!(exits[0].time.get(), left + TSC_OFFSET);
    let outside = exits[0].outside.get();
    assert!(
        (1000..1100).contains(&outside),
        "the time until the trace ended: {outside}"
    );
}

#[test]
fn trace_ended_by_a_request_during_an_exit_cuts_it_once() {
    let ends: [fn(&mut Rig, u64); 4] = [
        |rig, event| rig.close(event).expect("closed"),
        |rig, event| rig.unmap(event).expect("unmapped"),
        |rig, event| {
            let unmap = Rig::header(CONTROL_UNMAP_AUX, event);
            rig.control(&unmap).expect("unmapped");
        },
        |rig, event| {
            done(rig, 1, COMMAND_DISABLE, event);
            rig.close(event).expect("closed");
        },
    ];
    for end in ends {
        let mut rig = Rig::new();
        let (event, mut area) = trace(&mut rig, OPEN_ENABLED);
        rig.exit(0, ExitReason::Io, &mut At(1));
        leave(&rig, 2);
        end(&mut rig, event);
        rig.vcpus.enter(0);
        rig.exit(0, ExitReason::Io, &mut At(3));
        let exits = area.exits();
        let cuts = exits
            .iter()
            .map(|exit| (exit.ip.get(), exit.flags & PACKET_CUT));
        assert_eq!(cuts.collect::<Vec<_>>(), [(1, 0), (2, PACKET_CUT)]);
    }
}

#[test]
fn trace_started_during_an_exit_omits_it() {
    // Test without another trace, and with another trace that records the exit.
    for others in [0, 1] {
        let mut rig = Rig::new();
        let mut others: Vec<_> = (0..others).map(|_| trace(&mut rig, OPEN_ENABLED)).collect();
        let (late, mut late_area) = trace(&mut rig, 0);
        leave(&rig, 1);
        done(&mut rig, 1, COMMAND_ENABLE, late);
        let (opened, mut opened_area) = trace(&mut rig, OPEN_ENABLED);
        rig.vcpus.enter(0);
        rig.exit(0, ExitReason::Io, &mut At(2));
        for (event, area) in [(late, &mut late_area), (opened, &mut opened_area)] {
            assert_eq!(told(&mut rig, event, area), [(2, false)]);
        }
        for (event, area) in &mut others {
            assert_eq!(told(&mut rig, *event, area), [(1, false), (2, false)]);
        }
    }
}

#[test]
fn trace_restarted_during_an_exit_contains_it_once_and_cut() {
    for times in [1, 2, 3] {
        let mut rig = Rig::new();
        let (event, mut area) = trace(&mut rig, OPEN_ENABLED);
        let (other, mut other_area) = trace(&mut rig, OPEN_ENABLED);
        leave(&rig, 1);
        for _ in 0..times {
            done(&mut rig, 1, COMMAND_DISABLE, event);
            done(&mut rig, 1, COMMAND_ENABLE, event);
        }
        rig.vcpus.enter(0);
        rig.exit(0, ExitReason::Io, &mut At(2));
        assert_eq!(told(&mut rig, event, &mut area), [(1, true), (2, false)]);
        let other = told(&mut rig, other, &mut other_area);
        assert_eq!(other, [(1, false), (2, false)]);
    }
}

/// Opens a trace of a task on vCPU 0. Marks of vCPU 1 stop and start this trace.
fn steered(rig: &mut Rig) -> (u64, AreaReader) {
    let request = task_event(KIND_EXIT_TRACE, EXIT_IO);
    let event = rig.open(&request).expect("open");
    let area = map(rig, event, 4);
    for (value, role) in [(7, LINK_STARTER), (8, LINK_STOPPER)] {
        let mark = OpenRequest {
            period: 1.into(),
            ..task_event(KIND_MARK, value)
        };
        let mark = rig.open(&mark).expect("open");
        rig.link(mark, event, role).expect("linked");
        done(rig, 1, COMMAND_IN, mark);
    }
    done(rig, 0, COMMAND_IN, event);
    (event, area)
}

#[test]
fn trace_paused_by_another_vcpu_during_an_exit_contains_it() {
    let mut rig = Rig::new();
    let (event, mut area) = steered(&mut rig);
    leave(&rig, 1);
    rig.mark(1, 8, 1);
    assert_eq!(
        told(&mut rig, event, &mut area),
        [],
        "the exit has not ended"
    );
    rig.vcpus.enter(0);
    // The device publishes the packet immediately, because there may never be a later packet.
    let exits = area.exits();
    let cuts = exits
        .iter()
        .map(|exit| (exit.ip.get(), exit.flags & PACKET_CUT));
    assert_eq!(cuts.collect::<Vec<_>>(), [(1, 0)]);
    rig.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(told(&mut rig, event, &mut area), []);
}

#[test]
fn trace_resumed_by_another_vcpu_during_an_exit_omits_it() {
    let mut rig = Rig::new();
    let (event, mut area) = steered(&mut rig);
    rig.mark(1, 8, 1);
    leave(&rig, 1);
    rig.mark(1, 7, 1);
    rig.vcpus.enter(0);
    rig.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(told(&mut rig, event, &mut area), [(2, false)]);
}

#[test]
fn trace_paused_and_resumed_during_an_exit_contains_it_once() {
    let mut rig = Rig::new();
    let (event, mut area) = steered(&mut rig);
    leave(&rig, 1);
    for value in [8, 7, 8, 7] {
        rig.mark(1, value, 1);
    }
    rig.vcpus.enter(0);
    rig.exit(0, ExitReason::Io, &mut At(2));
    assert_eq!(told(&mut rig, event, &mut area), [(1, false), (2, false)]);
}

#[test]
fn trace_ended_in_a_pause_during_an_exit_cuts_it() {
    let mut rig = Rig::new();
    let (event, mut area) = steered(&mut rig);
    leave(&rig, 1);
    rig.mark(1, 8, 1);
    done(&mut rig, 1, COMMAND_DISABLE, event);
    rig.vcpus.enter(0);
    assert_eq!(told(&mut rig, event, &mut area), [(1, true)]);
}

#[test]
fn exit_of_a_moved_task_is_cut_on_one_vcpu_and_omitted_on_the_other() {
    let mut rig = Rig::new();
    let request = task_event(KIND_EXIT_TRACE, EXIT_USER);
    let event = rig.open(&request).expect("open");
    let mut area = map(&mut rig, event, 4);
    // Another trace records all exits of the second vCPU, including the exit of `COMMAND_IN`. The task's trace omits
    // the exit of `COMMAND_IN`.
    let other = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..open_of(KIND_EXIT_TRACE, EXIT_USER, 1)
    };
    rig.open(&other).expect("open");
    done(&mut rig, 0, COMMAND_IN, event);
    rig.exit(0, ExitReason::Io, &mut At(1));
    done(&mut rig, 0, COMMAND_OUT, event);
    done(&mut rig, 1, COMMAND_IN, event);
    rig.exit(1, ExitReason::Hlt, &mut At(2));
    done(&mut rig, 1, COMMAND_OUT, event);
    let exits = area.exits();
    let exits = exits.iter().map(|exit| {
        let reason = u64::from(exit.reason.get());
        (exit.vcpu.get(), reason, exit.flags & PACKET_CUT != 0)
    });
    let expected = [
        (0, EXIT_IO, false),
        (0, EXIT_MMIO, true),
        (1, EXIT_HLT, false),
        (1, EXIT_MMIO, true),
    ];
    assert_eq!(exits.collect::<Vec<_>>(), expected);
}

/// A hypervisor that returns registers only when the test permits it.
struct Asked {
    asked: Sender<()>,
    go_on: Receiver<()>,
}

impl Registers for Asked {
    fn registers(&mut self) -> Option<GuestRegs> {
        self.asked.send(()).expect("the test waits");
        self.go_on.recv().expect("the test continues");
        At(1).registers()
    }
}

#[test]
fn trace_stopped_as_an_exit_begins_and_started_during_it_omits_it() {
    let mut rig = Rig::new();
    let (event, mut area) = trace(&mut rig, OPEN_ENABLED);
    let first = VcpuThread::spawn(Lane::new(&mut rig, 0));
    let (asked, is_asked) = channel();
    let (go, go_on) = channel();
    let left = first.begin(move |lane| {
        lane.session
            .leave(ExitReason::Io, &mut Asked { asked, go_on });
    });
    is_asked
        .recv_timeout(super::LONG)
        .expect("the trace needs the registers");
    done(&mut rig, 1, COMMAND_DISABLE, event);
    go.send(()).expect("the vCPU waits");
    left.wait();
    done(&mut rig, 1, COMMAND_ENABLE, event);
    first.run(|lane| {
        lane.session.enter();
        lane.session.leave(ExitReason::Io, &mut At(2));
        lane.session.enter();
    });
    assert_eq!(told(&mut rig, event, &mut area), [(2, false)]);
}
