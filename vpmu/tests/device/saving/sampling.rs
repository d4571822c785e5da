//! Samples and rings across a save and restore.

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};

use super::{mark, marks};
use crate::persistent::{self, asked, reader, window};
use crate::reader::{Record, THROTTLE, UNTHROTTLE};
use crate::rig::{ALL_FEATURES, Rig, limits, open_of, sampling, thread};
use crate::world::{At, CYCLES};
use vpmu::{Engines, ExitReason, Settings};

#[test]
fn elapsed_periods_of_the_device_are_restored() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0, 7)).expect("open");
    let mut ring = rig.map(event, 8);
    let mut ips = Vec::new();
    for turn in 0..20 {
        mark(&rig, 1 + turn * 10, 10);
        if turn % 3 == 0 {
            ips.extend(ring.samples().iter().map(|sample| sample.ip));
        }
        rig.move_on();
    }
    ips.extend(ring.samples().iter().map(|sample| sample.ip));
    // All records are complete and occur exactly once.
    assert!((1..=28).map(|n| n * 7).eq(ips));
    assert_eq!(rig.vpmu.metrics().samples_lost, 0);
}

/// VPMU-D-6.13-8.
#[test]
fn full_ring_reports_its_loss_once() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0, 1)).expect("open");
    let mut ring = rig.map(event, 1);
    mark(&rig, 1, 60);
    rig.move_on();
    mark(&rig, 61, 10);
    let mut read = ring.take(1000);
    rig.move_on();
    mark(&rig, 71, 1);
    read.extend(ring.take(1000));
    let (mut ips, mut lost) = (Vec::new(), 0);
    for record in read {
        match record {
            Record::Sample(sample) => ips.push(sample.ip),
            Record::Lost { lost: more, .. } => lost += more,
        }
    }
    assert_eq!(ips.pop(), Some(71));
    assert!((1..).zip(&ips).all(|(expected, &ip)| expected == ip));
    assert_eq!(ips.len() as u64 + lost, 70);
    assert_eq!(rig.read(0, event).lost.get(), lost);
}

#[test]
fn paused_ring_stays_paused() {
    let mut rig = Rig::new();
    let event = rig.open(&marks(0, 1)).expect("open");
    let mut ring = rig.map(event, 4);
    rig.pause(event, 1).expect("paused");
    mark(&rig, 1, 2);
    rig.move_on();
    mark(&rig, 3, 3);
    assert_eq!(ring.take(10), []);
    rig.pause(event, 0).expect("resumed");
    mark(&rig, 9, 1);
    let records = ring.take(10);
    assert_eq!(records[0], Record::Lost { id: event, lost: 5 });
    assert!(matches!(records[1], Record::Sample(sample) if sample.ip == 9));
}

#[test]
fn wakeup_counts_are_restored() {
    let mut rig = Rig::new();
    let request = OpenRequest {
        wakeup: 10.into(),
        ..marks(0, 1)
    };
    let event = rig.open(&request).expect("open");
    let _ring = rig.map(event, 16);
    mark(&rig, 1, 25);
    rig.move_on();
    rig.post_notice(0, 64);
    assert_eq!(rig.counted_notice(), Some((NOTICE_WAKEUP, event, 2)));
    mark(&rig, 1, 4);
    rig.post_notice(2, 64);
    assert_eq!(rig.notice(), None);
    mark(&rig, 1, 1);
    assert_eq!(rig.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
}

/// VPMU-D-6.13-1.
#[test]
fn overflows_that_the_host_holds_are_written_before_a_save() {
    let mut rig = Rig::new();
    let request = sampling(open_of(CYCLES.0, CYCLES.1, 0), 100);
    let event = rig.open(&request).expect("open");
    let mut ring = rig.map(event, 8);
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.work(thread(0), 350, 4);
    rig.exit(0, ExitReason::Signal, &mut At(0x77));
    rig.move_on();
    assert_eq!(rig.value(0, event), 350);
    rig.world.work(thread(0), 100, 4);
    rig.exit(0, ExitReason::Signal, &mut At(0x78));
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x77, 0x77, 0x77, 0x78], "a new period begins");
    assert_eq!(rig.value(0, event), 450);
}

/// VPMU-D-6.13-1.
#[test]
fn records_of_the_batched_engine_are_collected_before_a_save() {
    let mut rig = Rig::new();
    rig.world.know_ips();
    rig.world.pass(10_000_000);
    let request = sampling(open_of(CYCLES.0, CYCLES.1, 0), 100);
    let reply = rig.open_reply(&request);
    assert_eq!(reply.engine.get(), ENGINE_BATCHED);
    let event = reply.id.get();
    let mut ring = rig.map(event, 8);
    rig.command(0, COMMAND_ENABLE, event);
    let record = |rig: &Rig, ip| {
        let overflow = Overflow {
            tsc: rig.world.now(),
            ip,
            mode: Mode::Guest,
            period: 100,
        };
        rig.world.record(thread(0), overflow);
    };
    record(&rig, 1);
    record(&rig, 2);
    rig.halt();
    let state = rig.save();
    let mut next = rig.successor(rig.settings(), rig.memory.clone(), None);
    rig.vpmu.reset();
    next.world.know_ips();
    next.resume(&state);
    assert!(next.world.draining());
    record(&next, 3);
    next.command(0, COMMAND_READ, event);
    let samples = ring.samples();
    let ips: Vec<u64> = samples.iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [1, 2, 3]);
    assert!(samples.is_sorted_by_key(|sample| sample.time));
}

/// Opens an event with the batched engine, restores it on a new host, and checks that the event samples at exits on the
/// new host.
fn is_sampled_at_exits(
    requested: u32,
    settings: impl FnOnce(Settings) -> Settings,
    reports_ips: bool,
) {
    let mut rig = Rig::new();
    rig.world.know_ips();
    let request = OpenRequest {
        engine: requested.into(),
        ..sampling(open_of(CYCLES.0, CYCLES.1, 0), 100)
    };
    let reply = rig.open_reply(&request);
    assert_eq!(reply.engine.get(), ENGINE_BATCHED);
    let event = reply.id.get();
    let mut ring = rig.map(event, 8);
    rig.command(0, COMMAND_ENABLE, event);
    rig.halt();
    let state = rig.save();
    let mut next = rig.successor(settings(rig.settings()), rig.memory.clone(), None);
    rig.vpmu.reset();
    if reports_ips {
        next.world.know_ips();
    }
    next.resume(&state);
    let mut rig = next;
    rig.world.work(thread(0), 250, 4);
    rig.exit(0, ExitReason::Signal, &mut At(0x77));
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x77, 0x77]);
    let reply = rig.command(0, COMMAND_READ, event);
    assert_eq!((reply.state.get(), reply.value.get()), (STATE_ACTIVE, 250));
}

#[test]
fn host_without_guest_ips_samples_at_exits() {
    for requested in [ENGINE_ANY, ENGINE_BATCHED] {
        is_sampled_at_exits(requested, |settings| settings, false);
    }
}

#[test]
fn host_whose_operator_chose_the_exit_engine_samples_at_exits() {
    for requested in [ENGINE_ANY, ENGINE_BATCHED] {
        let settings = |settings: Settings| settings.with_engines(Engines::Exit);
        is_sampled_at_exits(requested, settings, true);
    }
}

#[test]
fn throttled_event_samples_again() {
    let limits = limits().with(|limits| limits.max_sample_rate = 100);
    let mut rig = Rig::with(limits, ALL_FEATURES);
    rig.world.pass(100_000_000);
    let event = rig.open(&marks(0, 1)).expect("open");
    let mut ring = rig.map(event, 8);
    mark(&rig, 1, 3);
    rig.move_on();
    rig.world.pass(20_000_000);
    mark(&rig, 9, 1);
    let kinds: Vec<u64> = ring.raw().iter().map(|record| record.kind).collect();
    let sample = crate::reader::SAMPLE;
    assert_eq!(kinds[..3], [sample, THROTTLE, UNTHROTTLE]);
    assert_eq!(kinds[3], sample);
}

#[test]
fn restored_task_pages_name_tasks() {
    let mut rig = Rig::new();
    rig.runs(0, 11, 12);
    let event = rig.open(&marks(0, 1)).expect("open");
    let mut ring = rig.map(event, 4);
    rig.move_on();
    mark(&rig, 1, 1);
    let samples = ring.samples();
    assert_eq!((samples[0].pid, samples[0].tid), (11, 12));
}

#[test]
fn persistent_events_of_guest_and_operator_are_restored() {
    let memory = window(64);
    let mut rig = Rig::windowed(&memory);
    let operators = rig.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let guests = rig.open(&marks(0, 1)).expect("open");
    rig.detach(guests, "mine").expect("detached");
    let first = rig.map_window(guests, 2, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 2);
    for turn in 0..5 {
        mark(&rig, 1 + turn * 4, 4);
        rig.move_on();
    }
    let history = persistent::samples(&rig, operators);
    assert!((1..=20).eq(history.iter().map(|words| words[2])));
    assert!((1..=20).eq(ring.samples().iter().map(|sample| sample.ip)));
    let names = rig.vpmu.persistent();
    let names: Vec<_> = names.iter().map(|one| (&*one.name, one.operator)).collect();
    assert_eq!(names, [("recorder", true), ("mine", false)]);
    assert_eq!(rig.close(operators), Err(libc::EPERM));
    assert_eq!(rig.close(guests), Err(libc::EBUSY));
    // The new device does not reuse the window's pages until the event that uses them has ended.
    let other = rig.open(&marks(0, 1)).expect("open");
    rig.detach(other, "").expect("detached");
    let second = rig.map_window(other, 2, 0).expect("mapped");
    assert!(second >= first + 3);
    rig.vpmu.end(guests).expect("ended");
    let third = rig.open(&marks(0, 1)).expect("open");
    rig.detach(third, "").expect("detached");
    assert_eq!(rig.map_window(third, 2, 0), Ok(first));
}

#[test]
fn operators_event_without_a_driver_is_restored() {
    let memory = window(64);
    let mut rig = Rig::windowed(&memory);
    let event = rig.vpmu.persist(&asked("mark=5", 0)).expect("started");
    mark(&rig, 1, 3);
    rig.vpmu.reset();
    mark(&rig, 4, 3);
    rig.move_on();
    mark(&rig, 7, 3);
    let history = persistent::samples(&rig, event);
    assert!((1..10).eq(history.iter().map(|words| words[2])));
    rig.activate(persistent::WINDOW_FEATURES);
    mark(&rig, 10, 1);
    assert_eq!(persistent::samples(&rig, event).len(), 10);
}
