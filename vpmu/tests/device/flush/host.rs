//! Flushes by the host while vCPUs are stopped or are running the guest.

use std::thread;

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};
use vpmu::{ExitReason, FlushError};

use super::{cycles, listen};
use crate::rig::{self, Rig, open_of, sampling};
use crate::world::At;

/// Flushes from the host while vCPU 0 is in the guest. The flush kicks the vCPU, which leaves the guest at `ip`.
fn flush_inside(rig: &Rig, event: Option<u64>, ip: u64) -> Result<(), FlushError> {
    thread::scope(|scope| {
        let flush = scope.spawn(|| rig.vpmu.flush(event));
        assert_eq!(rig.world.await_kicks(1), [0]);
        assert!(
            !flush.is_finished(),
            "the flush did not wait for the exit of the vCPU"
        );
        rig.vcpus.leave(0, ExitReason::Signal, &mut At(ip));
        let flushed = flush.join().expect("no panic");
        rig.vcpus.enter(0);
        flushed
    })
}

#[test]
fn stopped_vcpu_is_flushed_at_once() {
    let mut rig = Rig::new();
    listen(&mut rig);
    let event = cycles(&mut rig, 0, ENGINE_EXIT);
    let mut ring = rig.map(event, 4);
    rig.vcpus.enter(0);
    rig.vcpus.leave(0, ExitReason::Io, &mut At(7));
    rig.world.work(rig::thread(0), 100, 4);
    rig.vpmu.flush(Some(event)).expect("flushed");
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [7], "the sample has the address of the last exit");
    assert_eq!(rig.world.kicks(), 0);
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, event)));
}

#[test]
fn running_vcpu_is_kicked_for_a_flush() {
    let mut rig = Rig::new();
    listen(&mut rig);
    let event = cycles(&mut rig, 0, ENGINE_EXIT);
    let mut ring = rig.map(event, 4);
    rig.vcpus.enter(0);
    for ip in 1..=100 {
        rig.world.work(rig::thread(0), 100, 4);
        flush_inside(&rig, Some(event), ip).expect("flushed");
        let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
        assert_eq!(ips, [ip], "the sample is written when the flush returns");
        assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, event)));
        rig.post_notice(u16::try_from(ip % 8).expect("small"), 16);
    }
    assert_eq!(rig.read(0, event).lost.get(), 0);
}

#[test]
fn flush_kicks_no_vcpu_without_held_overflows() {
    let mut rig = Rig::new();
    rig.world.know_ips();
    listen(&mut rig);
    let batched = cycles(&mut rig, 0, ENGINE_BATCHED);
    let request = OpenRequest {
        flags: OPEN_ENABLED.into(),
        ..sampling(open_of(KIND_MARK, 5, 0), 1)
    };
    let marks = rig.open(&request).expect("open");
    let exact = cycles(&mut rig, 0, ENGINE_EXIT);
    rig.command(0, COMMAND_DISABLE, exact);
    let mut rings = [batched, marks, exact].map(|id| rig.map(id, 4));
    rig.vcpus.enter(0);
    rig.mark(0, 5, 1);
    rig.world.record(
        rig::thread(0),
        Overflow {
            tsc: rig.world.now(),
            ip: 3,
            mode: Mode::Guest,
            period: 100,
        },
    );
    for event in [batched, marks, exact] {
        rig.vpmu.flush(Some(event)).expect("flushed");
    }
    assert_eq!(rig.world.kicks(), 0);
    let counts = rings.each_mut().map(|ring| ring.samples().len());
    assert_eq!(counts, [1, 1, 0]);
    let woken = [(); 2].map(|()| rig.notice());
    assert_eq!(woken, [batched, marks].map(|id| Some((NOTICE_WAKEUP, id))));
}

#[test]
fn flush_of_none_covers_every_persistent_event_with_one_kick_per_vcpu() {
    let mut rig = Rig::new();
    let mut rings = Vec::new();
    for vcpu in [0, 0, 1, 1] {
        let request = OpenRequest {
            engine: ENGINE_EXIT.into(),
            flags: (OPEN_ENABLED | OPEN_PERSISTENT).into(),
            ..sampling(open_of(KIND_HARDWARE, 0, vcpu), 100)
        };
        let event = rig.open(&request).expect("open");
        rings.push(rig.map(event, 4));
    }
    (0..2).for_each(|vcpu| rig.vcpus.enter(vcpu));
    (0..2).for_each(|vcpu| rig.world.work(rig::thread(vcpu), 100, 4));
    thread::scope(|scope| {
        let flush = scope.spawn(|| rig.vpmu.flush(None));
        assert_eq!(rig.world.await_kicks(2), [0, 1]);
        rig.vcpus.leave(1, ExitReason::Signal, &mut At(1));
        assert!(
            !flush.is_finished(),
            "the flush did not wait for the other vCPU"
        );
        rig.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        flush.join().expect("no panic").expect("flushed");
    });
    let counts: Vec<usize> = rings.iter_mut().map(|ring| ring.samples().len()).collect();
    assert_eq!(counts, [1; 4]);
    assert_eq!(rig.world.kicks(), 0, "each vCPU is kicked only once");
}

#[test]
fn flush_reports_unknown_and_failed_events() {
    let mut rig = Rig::new();
    let unknown = rig.vpmu.flush(Some(7));
    assert!(
        matches!(unknown, Err(FlushError::NoEvent(7))),
        "a flush of an unknown event returns {unknown:?}"
    );
    rig.vpmu.flush(None).expect("nothing to flush");
    let event = cycles(&mut rig, 0, ENGINE_EXIT);
    let mut ring = rig.map(event, 4);
    rig.world.work(rig::thread(0), 100, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.world.be_stuck();
    let stuck = rig.vpmu.flush(Some(event));
    assert!(
        matches!(stuck, Err(FlushError::Inside { vcpu: 0, .. })),
        "a flush of a vCPU that cannot be kicked returns {stuck:?}"
    );
    rig.vcpus.leave(0, ExitReason::Io, &mut At(2));
    rig.world.break_host();
    let failed = rig.vpmu.flush(Some(event));
    assert!(matches!(failed, Err(FlushError::Failed(id)) if id == event));
    assert_eq!(
        ring.samples().len(),
        1,
        "records from before the error are written"
    );
}

#[test]
fn vcpu_that_leaves_before_its_kick_was_flushed() {
    let mut rig = Rig::new();
    let event = cycles(&mut rig, 0, ENGINE_EXIT);
    let mut ring = rig.map(event, 4);
    rig.vcpus.enter(0);
    rig.world.work(rig::thread(0), 100, 4);
    let kick = rig.world.kick_too_late();
    thread::scope(|scope| {
        let flush = scope.spawn(|| rig.vpmu.flush(Some(event)));
        kick.wait();
        rig.vcpus.leave(0, ExitReason::Io, &mut At(1));
        kick.wait();
        flush.join().expect("no panic").expect("flushed");
    });
    assert_eq!(ring.samples().len(), 1);
}

#[test]
fn event_that_ends_during_a_flush_was_flushed() {
    let mut rig = Rig::new();
    let event = cycles(&mut rig, 0, ENGINE_EXIT);
    rig.vcpus.enter(0);
    thread::scope(|scope| {
        let flush = scope.spawn(|| rig.vpmu.flush(Some(event)));
        assert_eq!(rig.world.await_kicks(1), [0]);
        rig.vpmu.reset();
        rig.vcpus.leave(0, ExitReason::Signal, &mut At(1));
        flush.join().expect("no panic").expect("flushed");
    });
}
