//! Which exits a trace records, how it ends, and its count at the end.

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, Fields, Fixture, Packet, command, header, map_area, open_of};

fn on(fixture: &mut Fixture, context: u32) -> u64 {
    fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, context))
}

fn reported(area: &mut AreaReader) -> Vec<(u64, bool)> {
    let exits = area.exits();
    let cut = |exit: &ExitPacket| exit.flags & PACKET_CUT != 0;
    exits.iter().map(|exit| (exit.ip.get(), cut(exit))).collect()
}

/// The instruction pointer of the exits that [`Fixture::commands`] causes.
const KICK: u64 = u64::MAX;

#[test]
fn task_trace_contains_its_exits_on_any_vcpu() {
    let mut fixture = Fixture::new();
    let trace = on(&mut fixture, CONTEXT_TASK);
    let mut area = map_area(&mut fixture, trace, 4);
    fixture.command(0, COMMAND_ENABLE, trace);
    for (vcpu, task) in [(0, 31), (1, 31), (0, 31)] {
        fixture.exit(vcpu, ExitReason::Io, &mut At(1));
        fixture.runs(vcpu, task, task + 1);
        fixture.command(vcpu, COMMAND_IN, trace);
        fixture.exit(vcpu, ExitReason::Io, &mut At(2));
        fixture.exit(1 - vcpu, ExitReason::Io, &mut At(3));
        // The task page already shows the next task, but this exit still belongs to the previous task.
        fixture.runs(vcpu, 99, 99);
        fixture.command(vcpu, COMMAND_OUT, trace);
        fixture.exit(vcpu, ExitReason::Io, &mut At(4));
    }
    let exits = area.exits();
    let vcpus: Vec<_> = exits.iter().map(|exit| (exit.vcpu.get(), exit.ip.get())).collect();
    assert_eq!(vcpus, [(0, 2), (0, KICK), (1, 2), (1, KICK), (0, 2), (0, KICK)]);
    assert!(exits.iter().all(|exit| (exit.pid.get(), exit.tid.get()) == (31, 32)));
    assert!((0..6).eq(exits.iter().map(|exit| exit.sequence.get())));
}

#[test]
fn vcpus_and_children_share_an_area() {
    let mut fixture = Fixture::new();
    let parent = on(&mut fixture, CONTEXT_TASK);
    let mut area = map_area(&mut fixture, parent, 4);
    let child = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_USER, CONTEXT_TASK).parent(parent));
    for (vcpu, trace) in [(0, parent), (1, child)] {
        fixture.commands(vcpu, &[command(COMMAND_ENABLE, trace), command(COMMAND_IN, trace)]);
    }
    // Both vCPUs are outside the guest at the same time. The packets are in the order in which the vCPUs enter the
    // guest again.
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
    fixture.vcpus.leave(1, ExitReason::Io, &mut At(2));
    fixture.vcpus.enter(1);
    fixture.vcpus.enter(0);
    let replies = [(0, parent), (1, child)].map(|(vcpu, trace)| fixture.command(vcpu, COMMAND_OUT, trace));
    let packets = area.take();
    let [Packet::Sync(of_child), Packet::Exit(second), Packet::Sync(of_parent), Packet::Exit(first), ..] = packets[..]
    else {
        panic!("{packets:?}");
    };
    assert_eq!((of_child.event.get(), of_child.vcpu.get()), (child, 1));
    assert_eq!((second.vcpu.get(), second.ip.get()), (1, 2));
    assert_eq!((of_parent.event.get(), of_parent.vcpu.get()), (parent, 0));
    assert_eq!((first.vcpu.get(), first.ip.get()), (0, 1));
    // Each trace numbers its own packets.
    assert_eq!((first.sequence.get(), second.sequence.get()), (0, 0));
    let counted: u64 = replies.iter().map(|reply| reply.value.get()).sum();
    assert_eq!(counted, area.head());
}

#[test]
fn trace_identifies_itself_in_each_area() {
    let mut fixture = Fixture::new();
    let first = on(&mut fixture, 0);
    let mut area = map_area(&mut fixture, first, 1);
    let second = on(&mut fixture, 0);
    let mut other = map_area(&mut fixture, second, 1);
    let third = on(&mut fixture, 0);
    fixture.redirect(third, second).expect("redirected");
    fixture.commands(0, &[first, second, third].map(|trace| command(COMMAND_ENABLE, trace)));
    fixture.exit(0, ExitReason::Io, &mut At(1));
    fixture.redirect(third, first).expect("redirected");
    fixture.exit(0, ExitReason::Io, &mut At(2));
    fixture.commands(0, &[first, second].map(|trace| command(COMMAND_READ, trace)));
    let who = |packets: Vec<Packet>| -> Vec<(u64, u8)> {
        let syncs = packets.into_iter().filter_map(|packet| match packet {
            Packet::Sync(sync) => Some((sync.event.get(), sync.flags & SYNC_START)),
            _ => None,
        });
        syncs.collect()
    };
    assert_eq!(who(area.take()), [(first, 1), (third, 1)]);
    assert_eq!(who(other.take()), [(second, 1), (third, 1)]);
    // A trace also starts with a sync packet in a newly mapped area.
    let unmap = header(CONTROL_UNMAP_AUX, second);
    fixture.control(&unmap).expect("unmapped");
    let mut anew = other.again(&mut fixture, second);
    fixture.exit(0, ExitReason::Io, &mut At(3));
    fixture.command(0, COMMAND_READ, second);
    assert_eq!(who(anew.take()), [(second, 1)]);
}

/// VPMU-D-6.8-1.
#[test]
fn bytes_written_and_lost_add_up_to_produced() {
    let mut fixture = Fixture::new();
    // A trace of I/O exits does not record the exits that the test's commands cause.
    let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, 0));
    let mut area = map_area(&mut fixture, trace, 1);
    fixture.command(0, COMMAND_ENABLE, trace);
    let mut exits = Vec::new();
    for round in 1..20_u64 {
        for ip in 0..round * 10 {
            fixture.exit(0, ExitReason::Io, &mut At(ip));
        }
        let reply = fixture.read(0, trace);
        assert_eq!(reply.value.get(), area.head() + reply.lost.get());
        exits.extend(area.take());
    }
    let reply = fixture.command(0, COMMAND_DISABLE, trace);
    exits.extend(area.take());
    assert_eq!(reply.value.get(), area.head() + reply.lost.get());
    let mut next = 0;
    let mut lost = 0;
    for packet in exits {
        match packet {
            Packet::Sync(sync) if sync.flags & SYNC_LOSS != 0 => {
                // Lost packets have numbers, too.
                let missing = sync.sequence.get() - next;
                assert_eq!(sync.lost.get() - lost, missing * 64);
                (next, lost) = (sync.sequence.get(), sync.lost.get());
            }
            Packet::Sync(sync) => assert_eq!(sync.sequence.get(), next),
            Packet::Exit(exit) => {
                assert_eq!(exit.sequence.get(), next);
                next += 1;
            }
            Packet::Sample(_) => panic!("a sample"),
        }
    }
    let unsaid = reply.lost.get() - lost;
    assert_eq!(next + unsaid / 64, (1..20).sum::<u64>() * 10);
}

#[test]
fn close_or_unmap_during_an_exit_cuts_it() {
    for end in ["close", "unmap the area", "unmap the ring"] {
        let mut fixture = Fixture::new();
        let trace = on(&mut fixture, 0);
        let mut area = map_area(&mut fixture, trace, 1);
        fixture.command(0, COMMAND_ENABLE, trace);
        fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
        match end {
            "close" => fixture.close(trace).expect("closed"),
            "unmap the ring" => fixture.unmap(trace).expect("unmapped"),
            _ => {
                let unmap = header(CONTROL_UNMAP_AUX, trace);
                fixture.control(&unmap).expect("unmapped");
            }
        }
        assert_eq!(reported(&mut area), [(1, true)], "{end}");
        let before = fixture.snapshot();
        fixture.vcpus.enter(0);
        fixture.exit(0, ExitReason::Io, &mut At(2));
        assert!(before == fixture.snapshot(), "the device wrote to memory after: {end}");
    }
}

/// VPMU-D-6.9-1.
#[test]
fn reset_during_an_exit_writes_nothing() {
    let mut fixture = Fixture::new();
    let trace = on(&mut fixture, 0);
    map_area(&mut fixture, trace, 1);
    fixture.command(0, COMMAND_ENABLE, trace);
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
    fixture.vpmu.reset();
    let before = fixture.snapshot();
    fixture.vcpus.enter(0);
    fixture.exit(0, ExitReason::Io, &mut At(2));
    assert!(before == fixture.snapshot());
}

#[test]
fn trace_without_an_area_loses_all() {
    let mut fixture = Fixture::new();
    let trace = on(&mut fixture, 0);
    fixture.command(0, COMMAND_ENABLE, trace);
    for ip in 0..5 {
        fixture.exit(0, ExitReason::Io, &mut At(ip));
    }
    let reply = fixture.command(0, COMMAND_DISABLE, trace);
    assert_eq!((reply.value.get(), reply.lost.get()), (6 * 64, 6 * 64));
}

#[test]
fn registers_are_read_only_while_a_trace_needs_them() {
    let mut fixture = Fixture::new();
    let trace = on(&mut fixture, 0);
    assert!(!fixture.vcpus.wants_registers(0));
    fixture.command(0, COMMAND_ENABLE, trace);
    assert!(fixture.vcpus.wants_registers(0) && !fixture.vcpus.wants_registers(1));
    fixture.command(0, COMMAND_DISABLE, trace);
    assert!(!fixture.vcpus.wants_registers(0));
}

#[test]
fn catalogue_lists_trace_formats() {
    let mut fixture = Fixture::new();
    for entry in fixture.catalogue() {
        let flags = entry.flags.get();
        let format = u16::try_from(flags >> CATALOGUE_FORMAT_SHIFT & 0xff).expect("eight bits");
        let expected = match entry.kind.get() {
            KIND_EXIT_TRACE => FORMAT_EXITS,
            KIND_SAMPLE_TRACE => FORMAT_SAMPLES,
            _ => 0,
        };
        assert_eq!(format, expected);
        assert_eq!(flags & CATALOGUE_AUX != 0, expected != 0);
    }
}
