//! Activation, reset and limits of the device.

use vm_memory::GuestMemoryMmap;
use vpmu::abi::*;
use vpmu::{Error, ExitReason, QueueState};

use crate::rig::{ALL_FEATURES, Rig, limits, open_of, sampling, thread};
use crate::world::{At, CYCLES};

/// VPMU-D-6.9-1.
#[test]
fn reset_device_does_not_write_guest_memory() {
    let mut rig = Rig::new();
    let (kind, config) = CYCLES;
    let events: Vec<u64> = [open_of(KIND_MARK, 5, 0), open_of(kind, config, 0)]
        .into_iter()
        .map(|request| {
            let event = rig.open(&sampling(request, 100)).expect("open");
            rig.map(event, 2);
            rig.command(0, COMMAND_ENABLE, event);
            event
        })
        .collect();
    rig.mark(0, 5, 1);
    rig.vpmu.reset();
    assert_eq!(rig.world.open_counters(), 0, "host descriptors are closed");
    assert!(!rig.vcpus.wants_registers(0));
    let before = rig.snapshot();
    rig.queues[0].request(&[0; 64], 64);
    rig.queues[2].request(&[0; 64], 64);
    let offered = rig.snapshot();
    (0..1000).for_each(|_| rig.mark(0, 5, 1));
    rig.world.work(thread(0), 10_000, 4);
    rig.exit(0, ExitReason::Signal, &mut At(1));
    let _ = rig.vpmu.notify(QUEUE_CONTROL);
    let _ = rig.vpmu.notify(QUEUE_EVENT);
    rig.vcpus.kick(0, QUEUE_VCPU);
    assert!(
        before != offered,
        "the snapshot does not show the driver's own writes"
    );
    assert!(
        rig.snapshot() == offered,
        "the device wrote after its reset"
    );

    rig.activate(ALL_FEATURES);
    let event = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    assert!(!events.contains(&event), "the id {event} is used again");
    assert_eq!(rig.close(events[0]), Err(libc::ENOENT));
    assert_eq!(
        rig.vpmu.metrics().events_opened,
        3,
        "a reset does not clear the metrics"
    );
}

/// VPMU-D-3-1, VPMU-D-5-1, VPMU-G-3-1, VPMU-G-5-1.
#[test]
fn device_needs_version_1_and_queues_in_memory() {
    let rig = Rig::new();
    let activate = |features, queues: &[QueueState]| {
        let memory = rig.memory.clone();
        rig.vpmu
            .activate(memory, features, queues, rig.interrupt.clone())
    };
    let refused = activate(7, &[]);
    assert!(matches!(refused, Err(Error::Features(7))), "{refused:?}");
    let refused = activate(ALL_FEATURES | 1 << 40, &[]);
    assert!(matches!(refused, Err(Error::Features(_))), "{refused:?}");
    let refused = activate(ALL_FEATURES, &[]);
    assert!(
        matches!(
            refused,
            Err(Error::QueueCount {
                expected: 4,
                given: 0
            })
        ),
        "{refused:?}"
    );
    let elsewhere = GuestMemoryMmap::<()>::from_ranges(&[(vm_memory::GuestAddress(1 << 40), 4096)]);
    let mut queues = [QueueState::default(); 4];
    queues[0].ready = true;
    queues[0].size = 16;
    let refused = rig.vpmu.activate(
        elsewhere.expect("memory"),
        ALL_FEATURES,
        &queues,
        rig.interrupt.clone(),
    );
    assert!(matches!(refused, Err(Error::Queue(0))), "{refused:?}");
    assert!(matches!(rig.vpmu.attach(2, 0), Err(Error::NoVcpu(2))));
}

#[test]
fn sampling_needs_the_ring_feature() {
    let mut rig = Rig::with(limits(), 1 << 32);
    let request = open_of(KIND_MARK, 5, 0);
    assert_eq!(rig.open(&sampling(request, 1)), Err(libc::EOPNOTSUPP));
    let event = rig.open(&request).expect("counting");
    assert_eq!(rig.map_pages(event, 0, &[0x1000]), Err(libc::EOPNOTSUPP));
}

#[test]
fn limits_hold() {
    let limits = limits().with(|limits| {
        limits.max_events = 3;
        limits.max_ring_pages = 4;
        limits.max_pages = 7;
    });
    let mut rig = Rig::with(limits, ALL_FEATURES);
    let request = open_of(KIND_MARK, 5, 0);
    let events = [(); 3].map(|()| rig.open(&request).expect("open"));
    assert_eq!(rig.open(&request), Err(libc::ENOSPC));
    let pages = |from: u64, count: u64| -> Vec<u64> {
        (0..count).map(|page| (from + page) * 4096).collect()
    };
    let mut map = |event, pages: &[u64]| rig.map_pages(event, 0, pages);
    assert_eq!(map(events[0], &pages(256, 9)), Err(libc::EINVAL));
    assert_eq!(map(events[0], &pages(256, 5)), Ok(()));
    assert_eq!(map(events[1], &pages(300, 3)), Err(libc::ENOSPC));
    assert_eq!(map(events[1], &pages(300, 2)), Ok(()));
    assert_eq!(map(events[2], &pages(400, 1)), Err(libc::ENOSPC));
    rig.close(events[0]).expect("closed");
    rig.open(&request).expect("room again");
}
