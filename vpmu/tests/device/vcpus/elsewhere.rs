//! Commands on one vCPU's queue that refer to events of another vCPU.

use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, CYCLES, FAULTS, Fields, Fixture, Reader, command, map_aux, open_of, thread};

use super::{done, led, status, task_event};

/// Opens an event that samples every third mark, and maps its ring.
fn marks(fixture: &mut Fixture, context: u32, flags: u32) -> (u64, Reader) {
    let event = fixture.opened(&open_of(KIND_MARK, 5, context).sampled(3).flags(flags));
    let ring = fixture.map(event, 4);
    (event, ring)
}

fn place(fixture: &Fixture, vcpu: u32, times: u64) {
    (0..times).for_each(|_| fixture.mark(vcpu, 5, 1));
}

/// Opens an enabled event that is active on vCPU 1. It is a vCPU event, or a task event that is scheduled in there.
fn on_second(fixture: &mut Fixture, context: u32) -> (u64, Reader) {
    let (event, ring) = marks(fixture, context, OPEN_ENABLED);
    if context == CONTEXT_TASK {
        done(fixture, 1, COMMAND_IN, event);
    }
    (event, ring)
}

#[test]
fn event_is_read_reset_and_turned_off_and_on_from_another_vcpu() {
    for context in [1, CONTEXT_TASK] {
        let mut fixture = Fixture::new();
        let (event, mut ring) = on_second(&mut fixture, context);
        place(&fixture, 1, 4);
        let reply = done(&mut fixture, 0, COMMAND_READ, event);
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 4));
        let reply = done(&mut fixture, 0, COMMAND_RESET, event);
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 0));
        place(&fixture, 1, 3);
        let reply = done(&mut fixture, 0, COMMAND_DISABLE, event);
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_OFF, 3));
        place(&fixture, 1, 3);
        place(&fixture, 0, 3);
        let reply = done(&mut fixture, 0, COMMAND_ENABLE, event);
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 3));
        place(&fixture, 0, 9);
        place(&fixture, 1, 2);
        assert_eq!(fixture.value(1, event), 5);
        let samples = ring.samples();
        assert_eq!(samples.len(), 3, "`COMMAND_RESET` does not change the progress in the period");
        assert!(samples.iter().all(|sample| sample.cpu == 1));
    }
}

#[test]
fn period_and_limit_are_set_from_another_vcpu() {
    for context in [1, CONTEXT_TASK] {
        let mut fixture = Fixture::new();
        let (event, mut ring) = on_second(&mut fixture, context);
        place(&fixture, 1, 2);
        assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 2), 0);
        place(&fixture, 1, 5);
        assert_eq!(ring.samples().len(), 2, "the new period begins at the command");
        assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 0), libc::EINVAL);
        assert_eq!(fixture.valued(0, COMMAND_PERIOD, event, 1), 0);
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 0), libc::EINVAL);
        assert_eq!(fixture.valued(0, COMMAND_REFRESH, event, 4), 0);
        place(&fixture, 1, 9);
        assert_eq!(ring.samples().len(), 4);
        assert_eq!(fixture.read(0, event).state.get(), STATE_OFF);
    }
}

#[test]
fn event_scheduled_in_elsewhere_is_scheduled_there_only() {
    let mut fixture = Fixture::new();
    let (of_vcpu, _) = on_second(&mut fixture, 1);
    let (of_task, _) = on_second(&mut fixture, CONTEXT_TASK);
    for op in [COMMAND_IN, COMMAND_OUT] {
        for event in [of_vcpu, of_task] {
            assert_eq!(status(&mut fixture, 0, op, event), libc::EINVAL);
            let reply = fixture.read(0, event);
            assert_eq!(reply.state.get(), STATE_ACTIVE, "a refused command changes nothing");
        }
    }
    place(&fixture, 1, 2);
    assert_eq!(fixture.value(0, of_task), 2);
    done(&mut fixture, 1, COMMAND_OUT, of_task);
    // Now that the event is scheduled out, no vCPU can schedule it out again, but any vCPU can schedule it in.
    assert_eq!(status(&mut fixture, 0, COMMAND_OUT, of_task), libc::EINVAL);
    assert_eq!(status(&mut fixture, 1, COMMAND_OUT, of_task), libc::EINVAL);
    done(&mut fixture, 0, COMMAND_IN, of_task);
    assert_eq!(status(&mut fixture, 1, COMMAND_IN, of_task), libc::EINVAL);
    place(&fixture, 0, 3);
    assert_eq!(done(&mut fixture, 0, COMMAND_OUT, of_task).value.get(), 5);
}

#[test]
fn active_event_is_flushed_only_by_its_own_vcpu() {
    for context in [1, CONTEXT_TASK] {
        let mut fixture = Fixture::new();
        let (event, mut ring) = on_second(&mut fixture, context);
        (0..8).for_each(|slot| fixture.post_notice(slot, 16));
        place(&fixture, 1, 3);
        let reply = fixture.command(0, COMMAND_FLUSH, event);
        assert_eq!(reply.status.get(), libc::EXDEV.unsigned_abs());
        assert_eq!(reply.state.get(), STATE_ACTIVE);
        assert_eq!(fixture.notice(), None);
        assert_eq!(fixture.flush(1, event), 0);
        assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
        place(&fixture, 1, 3);
        done(&mut fixture, 0, COMMAND_DISABLE, event);
        assert_eq!(fixture.flush(0, event), 0, "any vCPU can flush a disabled event");
        assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
        assert_eq!(ring.samples().len(), 2);
    }
}

#[test]
fn parked_event_takes_commands_of_either_vcpu() {
    for last in [0, 1] {
        let mut fixture = Fixture::new();
        let (event, mut ring) = marks(&mut fixture, CONTEXT_TASK, 0);
        done(&mut fixture, last, COMMAND_IN, event);
        done(&mut fixture, last, COMMAND_OUT, event);
        for vcpu in [1 - last, last] {
            let reply = done(&mut fixture, vcpu, COMMAND_ENABLE, event);
            assert_eq!(reply.state.get(), STATE_INACTIVE);
            assert_eq!(fixture.flush(vcpu, event), 0);
            assert_eq!(fixture.valued(vcpu, COMMAND_PERIOD, event, 2), 0);
            assert_eq!(fixture.valued(vcpu, COMMAND_REFRESH, event, 1), 0);
            done(&mut fixture, vcpu, COMMAND_RESET, event);
            assert_eq!(fixture.value(vcpu, event), 0);
            let reply = done(&mut fixture, vcpu, COMMAND_DISABLE, event);
            assert_eq!(reply.state.get(), STATE_OFF);
        }
        // Each of the two `COMMAND_REFRESH` commands raised the limit by one, so there are two samples.
        done(&mut fixture, 1 - last, COMMAND_ENABLE, event);
        done(&mut fixture, 1 - last, COMMAND_IN, event);
        place(&fixture, 1 - last, 9);
        assert_eq!(fixture.value(last, event), 4);
        assert_eq!(ring.samples().len(), 2);
    }
}

/// VPMU-D-6.6-3.
#[test]
fn overflow_that_another_vcpu_finds_while_the_guest_runs_is_lost() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&task_event(CYCLES.0, CYCLES.1).sampled(100).engine(ENGINE_EXIT));
    let mut ring = fixture.map(event, 4);
    done(&mut fixture, 1, COMMAND_IN, event);
    fixture.vcpus.leave(1, vpmu::ExitReason::Signal, &mut At(7));
    fixture.host.work(thread(1), 100, 4);
    let reply = done(&mut fixture, 0, COMMAND_DISABLE, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (100, 0));
    let ips: Vec<_> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [7], "the vCPU is outside the guest, so its registers are known");
    done(&mut fixture, 0, COMMAND_ENABLE, event);
    fixture.vcpus.enter(1);
    fixture.host.work(thread(1), 100, 4);
    let reply = done(&mut fixture, 0, COMMAND_DISABLE, event);
    assert_eq!((reply.value.get(), reply.lost.get()), (200, 1));
}

#[test]
fn driver_area_is_begun_and_ended_from_another_vcpu() {
    let mut fixture = Fixture::new();
    for context in [1, CONTEXT_TASK] {
        let trace = fixture.opened(&open_of(KIND_EXIT_TRACE, EXIT_IO, context).flags(OPEN_ENABLED));
        let metadata = fixture.next_ring;
        let pages: Vec<u64> = (1..3).map(|page| metadata + page * 0x1000).collect();
        fixture.next_ring += 0x4000;
        map_aux(&mut fixture, trace, MAP_WRITABLE | MAP_DRIVER_OWNED, &pages).expect("an area");
        if context == CONTEXT_TASK {
            done(&mut fixture, 1, COMMAND_IN, trace);
        }
        let begin = Command { value: 0.into(), room: 0x1000.into(), ..command(COMMAND_AUX_BEGIN, trace) };
        let mut status = |commands: &[Command]| fixture.commands(0, commands)[0].status.get();
        assert_eq!(status(&[begin]), 0);
        assert_eq!(status(&[begin]), libc::EINVAL.unsigned_abs(), "the span has begun already");
        fixture.exit(1, vpmu::ExitReason::Io, &mut At(1));
        fixture.exit(0, vpmu::ExitReason::Io, &mut At(2));
        let end = fixture.command(0, COMMAND_AUX_END, trace);
        assert_eq!(end.status.get(), 0);
        assert!(end.value.get() > 0 && end.lost.get() == 0, "a span without data, or with losses: {end:?}");
        let area = AreaReader::new(&fixture, metadata, pages);
        area.set_head(end.value.get());
        let mut area = area;
        let ips: Vec<_> = area.exits().iter().map(|exit| exit.ip.get()).collect();
        assert_eq!(ips, [1]);
        let again = fixture.command(0, COMMAND_AUX_END, trace);
        assert_eq!(again.status.get(), libc::EINVAL.unsigned_abs());
        fixture.close(trace).expect("closed");
    }
}

#[test]
fn malformed_command_about_an_event_elsewhere_changes_nothing() {
    for context in [1, CONTEXT_TASK] {
        let mut fixture = Fixture::new();
        let (event, _) = on_second(&mut fixture, context);
        place(&fixture, 1, 2);
        for op in [COMMAND_DISABLE, COMMAND_RESET, COMMAND_READ, COMMAND_FLUSH] {
            assert_eq!(fixture.valued(0, op, event, 1), libc::EINVAL, "command {op}");
        }
        assert_eq!(status(&mut fixture, 0, 99, event), libc::EINVAL);
        let reply = fixture.read(0, event);
        assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 2));
        assert_eq!(status(&mut fixture, 0, COMMAND_READ, 77), libc::ENOENT);
    }
}

#[test]
fn queue_of_another_vcpu_refuses_every_command() {
    let mut fixture = Fixture::new();
    let ours = fixture.opened(&open_of(KIND_MARK, 5, 0));
    let (theirs, _) = on_second(&mut fixture, 1);
    let (of_task, _) = on_second(&mut fixture, CONTEXT_TASK);
    let parked = fixture.opened(&task_event(FAULTS.0, FAULTS.1));
    let ops = [
        COMMAND_ENABLE,
        COMMAND_DISABLE,
        COMMAND_IN,
        COMMAND_OUT,
        COMMAND_READ,
        COMMAND_RESET,
        COMMAND_FLUSH,
        COMMAND_AUX_END,
    ];
    for (of, by) in [(0, 1), (1, 0)] {
        for op in ops {
            let events = [ours, theirs, of_task, parked];
            let replies = fixture.commands_from(of, by, &super::each(op, &events));
            let statuses = replies.iter().map(|reply| reply.status.get());
            assert!(
                statuses.eq([libc::EXDEV.unsigned_abs(); 4]),
                "command {op} is not refused with EXDEV for each event"
            );
        }
    }
}

/// VPMU-D-6.4-1.
#[test]
fn commands_of_one_buffer_are_executed_in_order_across_vcpus() {
    let mut fixture = Fixture::new();
    let ours = fixture.opened(&task_event(KIND_MARK, 5));
    let theirs = fixture.opened(&task_event(KIND_MARK, 5));
    let member = fixture.opened(&led(ours, task_event(KIND_MARK, 5)));
    done(&mut fixture, 1, COMMAND_IN, theirs);
    place(&fixture, 1, 3);
    let batch = [
        command(COMMAND_IN, ours),
        command(COMMAND_READ, theirs),
        command(COMMAND_VCPU, 0),
        command(COMMAND_RESET, theirs),
        command(COMMAND_IN, theirs),
        command(COMMAND_READ, theirs),
        command(COMMAND_READ, 77),
        command(COMMAND_DISABLE, theirs),
        command(COMMAND_IN, member),
        command(COMMAND_READ, member),
        command(COMMAND_ENABLE, theirs),
    ];
    let replies = fixture.commands(0, &batch);
    let reported: Vec<_> = replies
        .iter()
        .map(|reply| {
            let status = i32::try_from(reply.status.get()).expect("an errno");
            (status, reply.state.get(), reply.value.get())
        })
        .collect();
    let expected = [
        (0, STATE_ACTIVE, 0),
        (0, STATE_ACTIVE, 3),
        (0, 0, 0),
        (0, STATE_ACTIVE, 0),
        (libc::EINVAL, STATE_ACTIVE, 0),
        (0, STATE_ACTIVE, 0),
        (libc::ENOENT, 0, 0),
        (0, STATE_OFF, 0),
        (0, STATE_ACTIVE, 0),
        (0, STATE_ACTIVE, 0),
        (0, STATE_ACTIVE, 0),
    ];
    assert_eq!(reported, expected);
    assert_eq!(fixture.vpmu.metrics().kicks, [1, 1]);
}
