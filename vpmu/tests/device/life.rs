//! Activation, reset and limits of the device.

use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::{Error, ExitReason, QueueState};
use vpmu_testkit::{ALL_FEATURES, At, CYCLES, Fields, Fixture, limits, open_of, thread};

/// VPMU-D-6.9-1.
#[test]
fn reset_device_does_not_write_guest_memory() {
    let mut fixture = Fixture::new();
    let (kind, config) = CYCLES;
    let events: Vec<u64> = [open_of(KIND_MARK, 5, 0), open_of(kind, config, 0)]
        .into_iter()
        .map(|request| {
            let event = fixture.opened(&request.sampled(100));
            fixture.map(event, 2);
            fixture.command(0, COMMAND_ENABLE, event);
            event
        })
        .collect();
    fixture.mark(0, 5, 1);
    fixture.vpmu.reset();
    assert_eq!(fixture.host.open_counters(), 0, "host descriptors are closed");
    assert!(!fixture.vcpus.wants_registers(0));
    let before = fixture.snapshot();
    fixture.queues[0].request(&[0; 64], 64);
    fixture.queues[2].request(&[0; 64], 64);
    let offered = fixture.snapshot();
    (0..1000).for_each(|_| fixture.mark(0, 5, 1));
    fixture.host.work(thread(0), 10_000, 4);
    fixture.exit(0, ExitReason::Signal, &mut At(1));
    let _ = fixture.vpmu.notify(QUEUE_CONTROL);
    let _ = fixture.vpmu.notify(QUEUE_EVENT);
    fixture.vcpus.kick(0, QUEUE_VCPU);
    assert!(before != offered, "the snapshot does not show the driver's own writes");
    assert!(fixture.snapshot() == offered, "the device wrote after its reset");

    fixture.activate(ALL_FEATURES);
    let event = fixture.opened(&open_of(KIND_MARK, 5, 0));
    assert!(!events.contains(&event), "the id {event} is used again");
    assert_eq!(fixture.close(events[0]), Err(libc::ENOENT));
    assert_eq!(fixture.vpmu.metrics().events_opened, 3, "a reset does not clear the metrics");
}

/// VPMU-D-3-1, VPMU-D-5-1, VPMU-G-3-1, VPMU-G-5-1.
#[test]
fn device_needs_version_1_and_queues_in_memory() {
    let fixture = Fixture::new();
    let activate = |features, queues: &[QueueState]| {
        let memory = fixture.memory.clone();
        fixture.vpmu.activate(memory, features, queues, fixture.interrupt.clone())
    };
    let refused = activate(7, &[]);
    assert!(matches!(refused, Err(Error::Features(7))), "{refused:?}");
    let refused = activate(ALL_FEATURES | 1 << 40, &[]);
    assert!(matches!(refused, Err(Error::Features(_))), "{refused:?}");
    let refused = activate(ALL_FEATURES, &[]);
    assert!(matches!(refused, Err(Error::QueueCount { expected: 4, given: 0 })), "{refused:?}");
    let elsewhere = GuestMemoryMmap::<()>::from_ranges(&[(vm_memory::GuestAddress(1 << 40), 4096)]);
    let mut queues = [QueueState::default(); 4];
    queues[0].ready = true;
    queues[0].size = 16;
    let refused = fixture.vpmu.activate(elsewhere.expect("memory"), ALL_FEATURES, &queues, fixture.interrupt.clone());
    assert!(matches!(refused, Err(Error::Queue(0))), "{refused:?}");
    assert!(matches!(fixture.vpmu.attach(2, 0), Err(Error::NoVcpu(2))));
}

#[test]
fn limits_hold() {
    let limits = limits().with(|limits| {
        limits.max_events = 3;
        limits.max_ring_pages = 4;
        limits.max_pages = 7;
    });
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let request = open_of(KIND_MARK, 5, 0);
    let events = [(); 3].map(|()| fixture.opened(&request));
    assert_eq!(fixture.open(&request), Err(libc::ENOSPC));
    let pages = |from: u64, count: u64| -> Vec<u64> { (0..count).map(|page| (from + page) * 4096).collect() };
    let mut map = |event, pages: &[u64]| fixture.map_pages(event, 0, pages);
    assert_eq!(map(events[0], &pages(256, 9)), Err(libc::EINVAL));
    assert_eq!(map(events[0], &pages(256, 5)), Ok(()));
    assert_eq!(map(events[1], &pages(300, 3)), Err(libc::ENOSPC));
    assert_eq!(map(events[1], &pages(300, 2)), Ok(()));
    assert_eq!(map(events[2], &pages(400, 1)), Err(libc::ENOSPC));
    fixture.close(events[0]).expect("closed");
    fixture.open(&request).expect("room again");
}
