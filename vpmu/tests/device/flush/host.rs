//! Flushes by the host while vCPUs are stopped or are running the guest.

use std::thread;

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{ExitReason, FlushError};
use vpmu_testkit::{At, Fields, Fixture, open_of, thread};

use super::{cycles, listen};

/// Flushes from the host while vCPU 0 is in the guest. The flush kicks the vCPU, which leaves the guest at `ip`.
fn flush_inside(fixture: &Fixture, event: Option<u64>, ip: u64) -> Result<(), FlushError> {
    thread::scope(|scope| {
        let flush = scope.spawn(|| fixture.vpmu.flush(event));
        assert_eq!(fixture.host.await_kicks(1), [0]);
        assert!(!flush.is_finished(), "the flush did not wait for the exit of the vCPU");
        fixture.vcpus.leave(0, ExitReason::Signal, &mut At(ip));
        let flushed = flush.join().expect("no panic");
        fixture.vcpus.enter(0);
        flushed
    })
}

#[test]
fn stopped_vcpu_is_flushed_at_once() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    fixture.vcpus.enter(0);
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(7));
    fixture.host.work(thread(0), 100, 4);
    fixture.vpmu.flush(Some(event)).expect("flushed");
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [7], "the sample has the address of the last exit");
    assert_eq!(fixture.host.kicks(), 0);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
}

#[test]
fn running_vcpu_is_kicked_for_a_flush() {
    let mut fixture = Fixture::new();
    listen(&mut fixture);
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    fixture.vcpus.enter(0);
    for ip in 1..=100 {
        fixture.host.work(thread(0), 100, 4);
        flush_inside(&fixture, Some(event), ip).expect("flushed");
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [ip], "the sample is written when the flush returns");
        assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
        fixture.post_notice(u16::try_from(ip % 8).expect("small"), 16);
    }
    assert_eq!(fixture.read(0, event).lost.get(), 0);
}

#[test]
fn flush_kicks_no_vcpu_without_held_overflows() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    listen(&mut fixture);
    let batched = cycles(&mut fixture, 0, ENGINE_BATCHED);
    let marks = fixture.opened(&open_of(KIND_MARK, 5, 0).sampled(1).flags(OPEN_ENABLED));
    let exact = cycles(&mut fixture, 0, ENGINE_EXIT);
    fixture.command(0, COMMAND_DISABLE, exact);
    let mut rings = [batched, marks, exact].map(|id| fixture.map(id, 4));
    fixture.vcpus.enter(0);
    fixture.mark(0, 5, 1);
    fixture.host.record(thread(0), Overflow { tsc: fixture.host.now(), ip: 3, mode: Mode::Guest, period: 100 });
    for event in [batched, marks, exact] {
        fixture.vpmu.flush(Some(event)).expect("flushed");
    }
    assert_eq!(fixture.host.kicks(), 0);
    let counts = rings.each_mut().map(|ring| ring.samples().len());
    assert_eq!(counts, [1, 1, 0]);
    let woken = [(); 2].map(|()| fixture.notice());
    assert_eq!(woken, [batched, marks].map(|id| Some((NOTICE_WAKEUP, id))));
}

#[test]
fn flush_of_none_covers_every_persistent_event_with_one_kick_per_vcpu() {
    let mut fixture = Fixture::new();
    let mut rings = Vec::new();
    for vcpu in [0, 0, 1, 1] {
        let request =
            open_of(KIND_HARDWARE, 0, vcpu).sampled(100).engine(ENGINE_EXIT).flags(OPEN_ENABLED | OPEN_PERSISTENT);
        let event = fixture.opened(&request);
        rings.push(fixture.map(event, 4));
    }
    (0..2).for_each(|vcpu| fixture.vcpus.enter(vcpu));
    (0..2).for_each(|vcpu| fixture.host.work(thread(vcpu), 100, 4));
    thread::scope(|scope| {
        let flush = scope.spawn(|| fixture.vpmu.flush(None));
        assert_eq!(fixture.host.await_kicks(2), [0, 1]);
        fixture.vcpus.leave(1, ExitReason::Signal, &mut At(1));
        assert!(!flush.is_finished(), "the flush did not wait for the other vCPU");
        fixture.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        flush.join().expect("no panic").expect("flushed");
    });
    let counts: Vec<usize> = rings.iter_mut().map(|ring| ring.samples().len()).collect();
    assert_eq!(counts, [1; 4]);
    assert_eq!(fixture.host.kicks(), 0, "each vCPU is kicked only once");
}

#[test]
fn flush_reports_unknown_and_failed_events() {
    let mut fixture = Fixture::new();
    let unknown = fixture.vpmu.flush(Some(7));
    assert!(matches!(unknown, Err(FlushError::NoEvent(7))), "a flush of an unknown event returns {unknown:?}");
    fixture.vpmu.flush(None).expect("nothing to flush");
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.host.be_stuck();
    let stuck = fixture.vpmu.flush(Some(event));
    assert!(
        matches!(stuck, Err(FlushError::Inside { vcpu: 0, .. })),
        "a flush of a vCPU that cannot be kicked returns {stuck:?}"
    );
    fixture.vcpus.leave(0, ExitReason::Io, &mut At(2));
    fixture.host.break_host();
    let failed = fixture.vpmu.flush(Some(event));
    assert!(matches!(failed, Err(FlushError::Failed(id)) if id == event));
    assert_eq!(ring.samples().len(), 1, "records from before the error are written");
}

#[test]
fn vcpu_that_leaves_before_its_kick_was_flushed() {
    let mut fixture = Fixture::new();
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    let mut ring = fixture.map(event, 4);
    fixture.vcpus.enter(0);
    fixture.host.work(thread(0), 100, 4);
    let kick = fixture.host.kick_too_late();
    thread::scope(|scope| {
        let flush = scope.spawn(|| fixture.vpmu.flush(Some(event)));
        kick.wait();
        fixture.vcpus.leave(0, ExitReason::Io, &mut At(1));
        kick.wait();
        flush.join().expect("no panic").expect("flushed");
    });
    assert_eq!(ring.samples().len(), 1);
}

#[test]
fn event_that_ends_during_a_flush_was_flushed() {
    let mut fixture = Fixture::new();
    let event = cycles(&mut fixture, 0, ENGINE_EXIT);
    fixture.vcpus.enter(0);
    thread::scope(|scope| {
        let flush = scope.spawn(|| fixture.vpmu.flush(Some(event)));
        assert_eq!(fixture.host.await_kicks(1), [0]);
        fixture.vpmu.reset();
        fixture.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        flush.join().expect("no panic").expect("flushed");
    });
}
