//! Which events a reset keeps, and which events it closes.

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow, Rate};
use vpmu::{ExitReason, Persist};
use vpmu_testkit::{At, CYCLES, Fields, Fixture, Reader, WINDOW_FEATURES, open_of, thread, window};

use super::{asked, marks, reader, samples};
use crate::links::{paused, trigger};

fn ids(fixture: &mut Fixture) -> Vec<u64> {
    fixture.listed().iter().map(|event| event.id.get()).collect()
}

/// Returns a device, an event that survives a reset, and the event's ring in the window.
fn recorder(request: &OpenRequest) -> (Fixture, u64, Reader) {
    let memory = window(8);
    let mut fixture = Fixture::windowed(&memory);
    let event = fixture.opened(request);
    fixture.detach(event, "recorder").expect("detached");
    let first = fixture.map_window(event, 4, MAP_WRITABLE).expect("mapped");
    (fixture, event, reader(&memory, first, 4))
}

/// VPMU-D-4-3, VPMU-D-6.9-2.
#[test]
fn event_with_a_ring_in_the_window_survives_a_reset() {
    let (mut fixture, event, mut ring) = recorder(&marks(0));
    fixture.mark(0, 5, 1);
    let before = fixture.listed();
    fixture.vpmu.reset();
    let quiet = fixture.snapshot();
    fixture.mark(0, 5, 2);
    fixture.mark(0, 5, 3);
    assert!(fixture.snapshot() == quiet, "the device wrote to guest memory");
    fixture.activate(WINDOW_FEATURES);
    fixture.mark(0, 5, 4);
    assert_eq!(fixture.listed(), before, "the list is unchanged");
    assert_eq!(fixture.value(0, event), 4);
    let ips: Vec<u64> = ring.raw().iter().map(|record| record.words[1]).collect();
    assert_eq!(ips, [1, 2, 3, 4]);
    let other = fixture.opened(&marks(0));
    assert!(other > event, "the id {other} is not above {event}");
}

#[test]
fn samples_between_drivers_name_no_task() {
    let (mut fixture, _, mut ring) = recorder(&marks(0));
    fixture.runs(0, 7, 8);
    fixture.mark(0, 5, 1);
    fixture.vpmu.reset();
    fixture.mark(0, 5, 1);
    fixture.activate(WINDOW_FEATURES);
    fixture.mark(0, 5, 1);
    fixture.runs(0, 9, 9);
    fixture.mark(0, 5, 1);
    let tasks: Vec<u64> = ring.raw().iter().map(|record| record.words[2]).collect();
    assert_eq!(tasks, [8 << 32 | 7, 0, 0, 9 << 32 | 9]);
}

/// VPMU-D-6.9-2.
#[test]
fn reset_closes_events_with_guest_pages() {
    let mut fixture = Fixture::windowed(&window(16));
    let guests = fixture.opened(&marks(0));
    fixture.map(guests, 1);
    fixture.detach(guests, "guests").expect("detached");
    let attached = fixture.opened(&marks(0));
    fixture.detach(attached, "attached").expect("detached");
    fixture.map_window(attached, 1, 0).expect("mapped");
    fixture.reattach(attached).expect("attached");
    let plain = fixture.opened(&marks(0));
    let trace = open_of(KIND_EXIT_TRACE, EXIT_USER, 0);
    let [traced, tracing] = [(); 2].map(|()| fixture.opened(&trace));
    for trace in [traced, tracing] {
        fixture.detach(trace, "").expect("detached");
        fixture.map_window(trace, 1, MAP_WRITABLE).expect("mapped");
    }
    fixture.map_as(CONTROL_MAP_AUX, traced, MAP_WRITABLE, &[0x9000]).expect("mapped");
    let bare = fixture.opened(&marks(1));
    fixture.detach(bare, "bare").expect("detached");
    assert_eq!(ids(&mut fixture), [guests, traced, tracing, bare]);
    fixture.activate(WINDOW_FEATURES);
    assert_eq!(ids(&mut fixture), [tracing, bare], "events that need no guest memory remain");
    for gone in [guests, attached, plain, traced] {
        assert_eq!(fixture.close(gone), Err(libc::ENOENT));
        assert_eq!(fixture.unmap(gone), Err(libc::ENOENT), "rings are removed, too");
    }
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "").expect("detached");
    assert_eq!(fixture.map_window(event, 1, 0), Ok(0), "pages of closed events in the window are free");
}

#[test]
fn reset_closes_redirected_events_and_children() {
    let (mut fixture, event, mut ring) = recorder(&marks(0));
    let other = fixture.opened(&marks(0));
    fixture.redirect(other, event).expect("redirected");
    fixture.opened(&marks(0).parent(event));
    fixture.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 3);
    fixture.activate(WINDOW_FEATURES);
    fixture.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 1);
}

#[test]
fn host_counters_survive_a_reset() {
    let (kind, config) = CYCLES;
    let (mut fixture, event, mut ring) = recorder(&open_of(kind, config, 0).sampled(100));
    fixture.command(0, COMMAND_ENABLE, event);
    fixture.host.work(thread(0), 250, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    fixture.vpmu.reset();
    assert_eq!(fixture.host.open_counters(), 1);
    assert!(fixture.vcpus.wants_registers(0));
    fixture.host.work(thread(0), 200, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(2));
    fixture.activate(WINDOW_FEATURES);
    fixture.host.work(thread(0), 50, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(3));
    assert_eq!(fixture.value(0, event), 500);
    let ips: Vec<u64> = ring.raw().iter().map(|record| record.words[1]).collect();
    assert_eq!(ips, [1, 1, 2, 2, 3]);
}

/// VPMU-D-6.9-3.
#[test]
fn new_driver_gets_no_notice_due_to_the_previous_one() {
    let wakes = marks(0).wakeup(1);
    let (mut fixture, event, _) = recorder(&wakes);
    fixture.mark(0, 5, 1);
    fixture.vpmu.reset();
    fixture.mark(0, 5, 1);
    fixture.activate(WINDOW_FEATURES);
    fixture.post_notice(0, 16);
    assert_eq!(fixture.notice(), None);
    fixture.mark(0, 5, 1);
    assert_eq!(fixture.notice(), Some((NOTICE_WAKEUP, event)));
}

#[test]
fn driver_without_rings_does_not_stop_persistent_events() {
    let (mut fixture, event, mut ring) = recorder(&marks(0));
    fixture.activate(1 << 32);
    fixture.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 1);
    assert_eq!(ids(&mut fixture), [event]);
}

/// Opens a host counter. Marks of value 7 start it, and marks of value 8 stop it.
fn region(fixture: &mut Fixture) -> [u64; 3] {
    let (kind, config) = CYCLES;
    let target = fixture.opened(&paused(kind, config));
    let [starter, stopper] = [7, 8].map(|value| trigger(fixture, value, 1));
    fixture.link(starter, target, LINK_STARTER).expect("linked");
    fixture.link(stopper, target, LINK_STOPPER).expect("linked");
    [starter, stopper, target]
}

#[test]
fn links_between_surviving_events_are_kept() {
    let mut fixture = Fixture::windowed(&window(8));
    let events = region(&mut fixture);
    for event in events {
        fixture.detach(event, "").expect("detached");
    }
    let [.., target] = events;
    fixture.vpmu.reset();
    fixture.host.work(thread(0), 100, 4);
    fixture.mark(0, 7, 1);
    fixture.host.work(thread(0), 10, 4);
    fixture.mark(0, 8, 1);
    fixture.attach_as(0, 500);
    fixture.host.work(500, 100, 4);
    fixture.activate(WINDOW_FEATURES);
    assert_eq!(fixture.value(0, target), 10, "the pause continues on another thread");
    fixture.mark(0, 7, 1);
    fixture.host.work(500, 3, 4);
    fixture.mark(0, 8, 1);
    fixture.host.work(500, 100, 4);
    assert_eq!(fixture.value(0, target), 13);
}

#[test]
fn links_with_closed_events_end() {
    let mut fixture = Fixture::windowed(&window(8));
    let [starter, _, target] = region(&mut fixture);
    for event in [starter, target] {
        fixture.detach(event, "").expect("detached");
    }
    fixture.activate(WINDOW_FEATURES);
    fixture.mark(0, 7, 1);
    fixture.mark(0, 8, 1);
    fixture.host.work(thread(0), 5, 4);
    assert_eq!(fixture.value(0, target), 5, "the stopper was closed by the reset");
    let other = trigger(&mut fixture, 8, 1);
    fixture.link(other, target, LINK_STOPPER).expect("the target has no stopper now");
    assert_eq!(fixture.link(other, target, LINK_STARTER), Err(libc::EBUSY));
}

#[test]
fn host_records_are_still_collected_after_a_reset() {
    let fixture = Fixture::windowed(&window(8));
    fixture.host.know_ips();
    let cycles = Persist { rate: Some(Rate::Period(100)), sample_type: 0x1_0007, ..asked("cycles", 0) };
    let event = fixture.vpmu.persist(&cycles).expect("started");
    fixture.vpmu.reset();
    assert!(fixture.host.draining());
    fixture.host.record(thread(0), Overflow { tsc: fixture.host.now(), ip: 77, mode: Mode::Guest, period: 100 });
    // The batched engine holds back records for less than this time.
    fixture.host.pass(10_000_000);
    fixture.vpmu.drain();
    assert_eq!(samples(&fixture, event).len(), 1);
    fixture.vpmu.end(event).expect("ended");
    fixture.vpmu.drain();
    assert!(!fixture.host.draining(), "the device drains, but there is nothing to collect");
}
