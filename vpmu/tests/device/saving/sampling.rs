//! Samples and rings across a save and restore.

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow};

use super::{mark, marks};
use crate::persistent::{self, asked, reader};
use vpmu::{Engines, ExitReason, Settings};
use vpmu_testkit::{
    ALL_FEATURES, At, CYCLES, Fields, Fixture, Record, THROTTLE, UNTHROTTLE, WINDOW_FEATURES, limits, open_of, thread,
    window,
};

#[test]
fn elapsed_periods_of_the_device_are_restored() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 7));
    let mut ring = fixture.map(event, 8);
    let mut ips = Vec::new();
    for turn in 0..20 {
        mark(&fixture, 1 + turn * 10, 10);
        if turn % 3 == 0 {
            ips.extend(ring.samples().iter().map(|sample| sample.ip));
        }
        fixture.move_on();
    }
    ips.extend(ring.samples().iter().map(|sample| sample.ip));
    // All records are complete and occur exactly once.
    assert!((1..=28).map(|n| n * 7).eq(ips));
    assert_eq!(fixture.vpmu.metrics().samples_lost, 0);
}

/// VPMU-D-6.13-8.
#[test]
fn full_ring_reports_its_loss_once() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(event, 1);
    mark(&fixture, 1, 60);
    fixture.move_on();
    mark(&fixture, 61, 10);
    let mut read = ring.take(1000);
    fixture.move_on();
    mark(&fixture, 71, 1);
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
    assert_eq!(fixture.read(0, event).lost.get(), lost);
}

#[test]
fn paused_ring_stays_paused() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(event, 4);
    fixture.pause(event, 1).expect("paused");
    mark(&fixture, 1, 2);
    fixture.move_on();
    mark(&fixture, 3, 3);
    assert_eq!(ring.take(10), []);
    fixture.pause(event, 0).expect("resumed");
    mark(&fixture, 9, 1);
    let records = ring.take(10);
    assert_eq!(records[0], Record::Lost { id: event, lost: 5 });
    assert!(matches!(records[1], Record::Sample(sample) if sample.ip == 9));
}

#[test]
fn wakeup_counts_are_restored() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&marks(0, 1).wakeup(10));
    let _ring = fixture.map(event, 16);
    mark(&fixture, 1, 25);
    fixture.move_on();
    fixture.post_notice(0, 64);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 2)));
    mark(&fixture, 1, 4);
    fixture.post_notice(2, 64);
    assert_eq!(fixture.notice(), None);
    mark(&fixture, 1, 1);
    assert_eq!(fixture.counted_notice(), Some((NOTICE_WAKEUP, event, 1)));
}

/// VPMU-D-6.13-1.
#[test]
fn overflows_that_the_host_holds_are_written_before_a_save() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&open_of(CYCLES.0, CYCLES.1, 0).sampled(100).flags(OPEN_ENABLED));
    let mut ring = fixture.map(event, 8);
    fixture.host.work(thread(0), 350, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(0x77));
    fixture.move_on();
    assert_eq!(fixture.value(0, event), 350);
    fixture.host.work(thread(0), 100, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(0x78));
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x77, 0x77, 0x77, 0x78], "a new period begins");
    assert_eq!(fixture.value(0, event), 450);
}

/// VPMU-D-6.13-1.
#[test]
fn records_of_the_batched_engine_are_collected_before_a_save() {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    fixture.host.pass(10_000_000);
    let request = open_of(CYCLES.0, CYCLES.1, 0).sampled(100);
    let reply = fixture.open_reply(&request);
    assert_eq!(reply.engine.get(), ENGINE_BATCHED);
    let event = reply.id.get();
    let mut ring = fixture.map(event, 8);
    fixture.command(0, COMMAND_ENABLE, event);
    let record = |fixture: &Fixture, ip| {
        let overflow = Overflow { tsc: fixture.host.now(), ip, mode: Mode::Guest, period: 100 };
        fixture.host.record(thread(0), overflow);
    };
    record(&fixture, 1);
    record(&fixture, 2);
    fixture.halt();
    let state = fixture.save();
    let mut next = fixture.successor(fixture.settings(), fixture.memory.clone(), None);
    fixture.vpmu.reset();
    next.host.know_ips();
    next.resume(&state);
    assert!(next.host.draining());
    record(&next, 3);
    next.command(0, COMMAND_READ, event);
    let samples = ring.samples();
    let ips: Vec<u64> = samples.iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [1, 2, 3]);
    assert!(samples.is_sorted_by_key(|sample| sample.time));
}

/// Opens an event with the batched engine, restores it on a new host, and checks that the event samples at exits on the
/// new host.
fn is_sampled_at_exits(requested: u32, settings: impl FnOnce(Settings) -> Settings, reports_ips: bool) {
    let mut fixture = Fixture::new();
    fixture.host.know_ips();
    let request = open_of(CYCLES.0, CYCLES.1, 0).sampled(100).engine(requested);
    let reply = fixture.open_reply(&request);
    assert_eq!(reply.engine.get(), ENGINE_BATCHED);
    let event = reply.id.get();
    let mut ring = fixture.map(event, 8);
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.halt();
    let state = fixture.save();
    let mut next = fixture.successor(settings(fixture.settings()), fixture.memory.clone(), None);
    fixture.vpmu.reset();
    if reports_ips {
        next.host.know_ips();
    }
    next.resume(&state);
    let mut fixture = next;
    fixture.host.work(thread(0), 250, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(0x77));
    let ips: Vec<u64> = ring.samples().iter().map(|sample| sample.ip).collect();
    assert_eq!(ips, [0x77, 0x77]);
    let reply = fixture.command(0, COMMAND_READ, event);
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
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    fixture.host.pass(100_000_000);
    let event = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(event, 8);
    mark(&fixture, 1, 3);
    fixture.move_on();
    fixture.host.pass(20_000_000);
    mark(&fixture, 9, 1);
    let kinds: Vec<u64> = ring.raw().iter().map(|record| record.kind).collect();
    let sample = vpmu_testkit::SAMPLE;
    assert_eq!(kinds[..3], [sample, THROTTLE, UNTHROTTLE]);
    assert_eq!(kinds[3], sample);
}

#[test]
fn restored_task_pages_name_tasks() {
    let mut fixture = Fixture::new();
    fixture.runs(0, 11, 12);
    let event = fixture.opened(&marks(0, 1));
    let mut ring = fixture.map(event, 4);
    fixture.move_on();
    mark(&fixture, 1, 1);
    let samples = ring.samples();
    assert_eq!((samples[0].pid, samples[0].tid), (11, 12));
}

#[test]
fn persistent_events_of_guest_and_operator_are_restored() {
    let memory = window(64);
    let mut fixture = Fixture::windowed(&memory);
    let operators = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    let guests = fixture.opened(&marks(0, 1));
    fixture.detach(guests, "mine").expect("detached");
    let first = fixture.map_window(guests, 2, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 2);
    for turn in 0..5 {
        mark(&fixture, 1 + turn * 4, 4);
        fixture.move_on();
    }
    let history = persistent::samples(&fixture, operators);
    assert!((1..=20).eq(history.iter().map(|words| words[2])));
    assert!((1..=20).eq(ring.samples().iter().map(|sample| sample.ip)));
    let names = fixture.vpmu.persistent();
    let names: Vec<_> = names.iter().map(|one| (&*one.name, one.operator)).collect();
    assert_eq!(names, [("recorder", true), ("mine", false)]);
    assert_eq!(fixture.close(operators), Err(libc::EPERM));
    assert_eq!(fixture.close(guests), Err(libc::EBUSY));
    // The new device does not reuse the window's pages until the event that uses them has ended.
    let other = fixture.opened(&marks(0, 1));
    fixture.detach(other, "").expect("detached");
    let second = fixture.map_window(other, 2, 0).expect("mapped");
    assert!(second >= first + 3);
    fixture.vpmu.end(guests).expect("ended");
    let third = fixture.opened(&marks(0, 1));
    fixture.detach(third, "").expect("detached");
    assert_eq!(fixture.map_window(third, 2, 0), Ok(first));
}

#[test]
fn operators_event_without_a_driver_is_restored() {
    let memory = window(64);
    let mut fixture = Fixture::windowed(&memory);
    let event = fixture.vpmu.persist(&asked("mark=5", 0)).expect("started");
    mark(&fixture, 1, 3);
    fixture.vpmu.reset();
    mark(&fixture, 4, 3);
    fixture.move_on();
    mark(&fixture, 7, 3);
    let history = persistent::samples(&fixture, event);
    assert!((1..10).eq(history.iter().map(|words| words[2])));
    fixture.activate(WINDOW_FEATURES);
    mark(&fixture, 10, 1);
    assert_eq!(persistent::samples(&fixture, event).len(), 10);
}
