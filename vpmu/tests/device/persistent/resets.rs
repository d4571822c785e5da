//! Which events a reset keeps, and which events it closes.

use vpmu::abi::*;
use vpmu::source::{Mode, Overflow, Rate};
use vpmu::{ExitReason, Persist};

use super::{WINDOW_FEATURES, asked, marks, reader, samples, window};
use crate::links::{paused, trigger};
use crate::reader::Reader;
use crate::rig::{Rig, open_of, sampling, thread};
use crate::world::{At, CYCLES};

fn ids(rig: &mut Rig) -> Vec<u64> {
    rig.listed().iter().map(|event| event.id.get()).collect()
}

/// Returns a device, an event that survives a reset, and the event's ring in the window.
fn recorder(request: &OpenRequest) -> (Rig, u64, Reader) {
    let memory = window(8);
    let mut rig = Rig::windowed(&memory);
    let event = rig.open(request).expect("open");
    rig.detach(event, "recorder").expect("detached");
    let first = rig.map_window(event, 4, MAP_WRITABLE).expect("mapped");
    (rig, event, reader(&memory, first, 4))
}

/// VPMU-D-4-3, VPMU-D-6.9-2.
#[test]
fn event_with_a_ring_in_the_window_survives_a_reset() {
    let (mut rig, event, mut ring) = recorder(&marks(0));
    rig.mark(0, 5, 1);
    let before = rig.listed();
    rig.vpmu.reset();
    let quiet = rig.snapshot();
    rig.mark(0, 5, 2);
    rig.mark(0, 5, 3);
    assert!(rig.snapshot() == quiet, "the device wrote to guest memory");
    rig.activate(WINDOW_FEATURES);
    rig.mark(0, 5, 4);
    assert_eq!(rig.listed(), before, "the list is unchanged");
    assert_eq!(rig.value(0, event), 4);
    let ips: Vec<u64> = ring.raw().iter().map(|record| record.words[1]).collect();
    assert_eq!(ips, [1, 2, 3, 4]);
    let other = rig.open(&marks(0)).expect("open");
    assert!(other > event, "the id {other} is not above {event}");
}

#[test]
fn samples_between_drivers_name_no_task() {
    let (mut rig, _, mut ring) = recorder(&marks(0));
    rig.runs(0, 7, 8);
    rig.mark(0, 5, 1);
    rig.vpmu.reset();
    rig.mark(0, 5, 1);
    rig.activate(WINDOW_FEATURES);
    rig.mark(0, 5, 1);
    rig.runs(0, 9, 9);
    rig.mark(0, 5, 1);
    let tasks: Vec<u64> = ring.raw().iter().map(|record| record.words[2]).collect();
    assert_eq!(tasks, [8 << 32 | 7, 0, 0, 9 << 32 | 9]);
}

/// VPMU-D-6.9-2.
#[test]
fn reset_closes_events_with_guest_pages() {
    let mut rig = Rig::windowed(&window(16));
    let guests = rig.open(&marks(0)).expect("open");
    rig.map(guests, 1);
    rig.detach(guests, "guests").expect("detached");
    let attached = rig.open(&marks(0)).expect("open");
    rig.detach(attached, "attached").expect("detached");
    rig.map_window(attached, 1, 0).expect("mapped");
    rig.reattach(attached).expect("attached");
    let plain = rig.open(&marks(0)).expect("open");
    let trace = open_of(KIND_EXIT_TRACE, EXIT_USER, 0);
    let [traced, tracing] = [(); 2].map(|()| rig.open(&trace).expect("open"));
    for trace in [traced, tracing] {
        rig.detach(trace, "").expect("detached");
        rig.map_window(trace, 1, MAP_WRITABLE).expect("mapped");
    }
    rig.map_as(CONTROL_MAP_AUX, traced, MAP_WRITABLE, &[0x9000])
        .expect("mapped");
    let bare = rig.open(&marks(1)).expect("open");
    rig.detach(bare, "bare").expect("detached");
    assert_eq!(ids(&mut rig), [guests, traced, tracing, bare]);
    rig.activate(WINDOW_FEATURES);
    assert_eq!(
        ids(&mut rig),
        [tracing, bare],
        "events that need no guest memory remain"
    );
    for gone in [guests, attached, plain, traced] {
        assert_eq!(rig.close(gone), Err(libc::ENOENT));
        assert_eq!(rig.unmap(gone), Err(libc::ENOENT), "rings are removed, too");
    }
    let event = rig.open(&marks(0)).expect("open");
    rig.detach(event, "").expect("detached");
    assert_eq!(
        rig.map_window(event, 1, 0),
        Ok(0),
        "pages of closed events in the window are free"
    );
}

#[test]
fn reset_closes_redirected_events_and_children() {
    let (mut rig, event, mut ring) = recorder(&marks(0));
    let other = rig.open(&marks(0)).expect("open");
    rig.redirect(other, event).expect("redirected");
    let child = OpenRequest {
        parent: event.into(),
        ..marks(0)
    };
    rig.open(&child).expect("open");
    rig.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 3);
    rig.activate(WINDOW_FEATURES);
    rig.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 1);
}

#[test]
fn host_counters_survive_a_reset() {
    let (kind, config) = CYCLES;
    let (mut rig, event, mut ring) = recorder(&sampling(open_of(kind, config, 0), 100));
    rig.command(0, COMMAND_ENABLE, event);
    rig.world.work(thread(0), 250, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    rig.vpmu.reset();
    assert_eq!(rig.world.open_counters(), 1);
    assert!(rig.vcpus.wants_registers(0));
    rig.world.work(thread(0), 200, 4);
    rig.exit(0, ExitReason::Signal, &mut At(2));
    rig.activate(WINDOW_FEATURES);
    rig.world.work(thread(0), 50, 4);
    rig.exit(0, ExitReason::Signal, &mut At(3));
    assert_eq!(rig.value(0, event), 500);
    let ips: Vec<u64> = ring.raw().iter().map(|record| record.words[1]).collect();
    assert_eq!(ips, [1, 1, 2, 2, 3]);
}

/// VPMU-D-6.9-3.
#[test]
fn new_driver_gets_no_notice_due_to_the_previous_one() {
    let wakes = OpenRequest {
        wakeup: 1.into(),
        ..marks(0)
    };
    let (mut rig, event, _) = recorder(&wakes);
    rig.mark(0, 5, 1);
    rig.vpmu.reset();
    rig.mark(0, 5, 1);
    rig.activate(WINDOW_FEATURES);
    rig.post_notice(0, 16);
    assert_eq!(rig.notice(), None);
    rig.mark(0, 5, 1);
    assert_eq!(rig.notice(), Some((NOTICE_WAKEUP, event)));
}

#[test]
fn driver_without_rings_does_not_stop_persistent_events() {
    let (mut rig, event, mut ring) = recorder(&marks(0));
    rig.activate(1 << 32);
    rig.mark(0, 5, 1);
    assert_eq!(ring.raw().len(), 1);
    assert_eq!(ids(&mut rig), [event]);
}

/// Opens a host counter. Marks of value 7 start it, and marks of value 8 stop it.
fn region(rig: &mut Rig) -> [u64; 3] {
    let (kind, config) = CYCLES;
    let target = rig.open(&paused(kind, config)).expect("open");
    let [starter, stopper] = [7, 8].map(|value| trigger(rig, value, 1));
    rig.link(starter, target, LINK_STARTER).expect("linked");
    rig.link(stopper, target, LINK_STOPPER).expect("linked");
    [starter, stopper, target]
}

#[test]
fn links_between_surviving_events_are_kept() {
    let mut rig = Rig::windowed(&window(8));
    let events = region(&mut rig);
    for event in events {
        rig.detach(event, "").expect("detached");
    }
    let [.., target] = events;
    rig.vpmu.reset();
    rig.world.work(thread(0), 100, 4);
    rig.mark(0, 7, 1);
    rig.world.work(thread(0), 10, 4);
    rig.mark(0, 8, 1);
    rig.attach_as(0, 500);
    rig.world.work(500, 100, 4);
    rig.activate(WINDOW_FEATURES);
    assert_eq!(
        rig.value(0, target),
        10,
        "the pause continues on another thread"
    );
    rig.mark(0, 7, 1);
    rig.world.work(500, 3, 4);
    rig.mark(0, 8, 1);
    rig.world.work(500, 100, 4);
    assert_eq!(rig.value(0, target), 13);
}

#[test]
fn links_with_closed_events_end() {
    let mut rig = Rig::windowed(&window(8));
    let [starter, _, target] = region(&mut rig);
    for event in [starter, target] {
        rig.detach(event, "").expect("detached");
    }
    rig.activate(WINDOW_FEATURES);
    rig.mark(0, 7, 1);
    rig.mark(0, 8, 1);
    rig.world.work(thread(0), 5, 4);
    assert_eq!(
        rig.value(0, target),
        5,
        "the stopper was closed by the reset"
    );
    let other = trigger(&mut rig, 8, 1);
    rig.link(other, target, LINK_STOPPER)
        .expect("the target has no stopper now");
    assert_eq!(rig.link(other, target, LINK_STARTER), Err(libc::EBUSY));
}

#[test]
fn host_records_are_still_collected_after_a_reset() {
    let rig = Rig::windowed(&window(8));
    rig.world.know_ips();
    let cycles = Persist {
        rate: Some(Rate::Period(100)),
        sample_type: 0x1_0007,
        ..asked("cycles", 0)
    };
    let event = rig.vpmu.persist(&cycles).expect("started");
    rig.vpmu.reset();
    assert!(rig.world.draining());
    rig.world.record(
        thread(0),
        Overflow {
            tsc: rig.world.now(),
            ip: 77,
            mode: Mode::Guest,
            period: 100,
        },
    );
    // The batched engine holds back records for less than this time.
    rig.world.pass(10_000_000);
    rig.vpmu.drain();
    assert_eq!(samples(&rig, event).len(), 1);
    rig.vpmu.end(event).expect("ended");
    rig.vpmu.drain();
    assert!(
        !rig.world.draining(),
        "the device drains, but there is nothing to collect"
    );
}
