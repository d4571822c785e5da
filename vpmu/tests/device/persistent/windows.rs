//! The placement of rings in the window, and requests that the device refuses.

use std::sync::Arc;

use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryRegionBytes, GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};
use vpmu::abi::*;
use vpmu::{Engines, Error};

use super::{WINDOW, WINDOW_FEATURES, marks, reader, window};
use crate::rig::{ALL_FEATURES, Rig, VCPUS, limits};

fn detached(rig: &mut Rig) -> u64 {
    let event = rig.open(&marks(0)).expect("open");
    rig.detach(event, "").expect("detached");
    event
}

#[test]
fn ring_in_the_window_works_like_any_other() {
    let memory = window(8);
    memory
        .write_slice(&[7; 8 * PAGE_SIZE], GuestAddress(WINDOW))
        .expect("in memory");
    let mut rig = Rig::windowed(&memory);
    let event = detached(&mut rig);
    let first = rig.map_window(event, 2, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 2);
    (0..10).for_each(|_| rig.mark(0, 5, 1));
    assert_eq!(ring.take(100).len(), 10);
    let size = 3 * PAGE_SIZE;
    let mut bytes = vec![0; size];
    memory
        .read_slice(
            &mut bytes,
            GuestAddress(WINDOW + u64::from(first) * PAGE_SIZE as u64),
        )
        .expect("in memory");
    assert!(!bytes.contains(&7), "the new ring has previous contents");
    rig.unmap(event).expect("unmapped");
    assert_eq!(rig.map_window(event, 2, 0), Ok(first), "its pages are free");
}

/// VPMU-D-6.10-4.
#[test]
fn window_pages_are_allocated_first_fit_and_freed() {
    let mut rig = Rig::windowed(&window(8));
    let [one, two, three] = [(); 3].map(|()| detached(&mut rig));
    assert_eq!(rig.map_window(one, 2, 0), Ok(0));
    assert_eq!(rig.map_window(two, 2, 0), Ok(3));
    assert_eq!(rig.map_window(three, 2, 0), Err(libc::ENOSPC));
    assert_eq!(rig.map_window(three, 1, 0), Ok(6));
    assert_eq!(rig.map_window(three, 1, 0), Err(libc::EBUSY));
    rig.reattach(one).expect("attached");
    rig.close(one).expect("closed");
    let four = detached(&mut rig);
    assert_eq!(rig.map_window(four, 4, 0), Err(libc::ENOSPC));
    assert_eq!(rig.map_window(four, 0, 0), Ok(0));
}

#[test]
fn invalid_ring_in_the_window_is_refused() {
    let mut rig = Rig::windowed(&window(64));
    let bare = rig.open(&marks(0)).expect("open");
    assert_eq!(
        rig.map_window(bare, 1, 0),
        Err(libc::EINVAL),
        "not persistent"
    );
    let event = detached(&mut rig);
    assert_eq!(
        rig.map_window(event, 2, MAP_DRIVER_OWNED),
        Err(libc::EINVAL)
    );
    assert_eq!(rig.map_window(event, 2, 1 << 9), Err(libc::EINVAL));
    assert_eq!(
        rig.map_window(event, 3, 0),
        Err(libc::EINVAL),
        "not a power of two"
    );
    assert_eq!(rig.map_window(77, 1, 0), Err(libc::ENOENT));
    assert_eq!(
        rig.map_pages(event, 0, &[WINDOW]),
        Err(libc::EINVAL),
        "pages of the window are not mapped by address"
    );
    assert_eq!(
        rig.control(&TaskPageRequest {
            header: Rig::header(CONTROL_TASK_PAGE, 0),
            vcpu: 0.into(),
            reserved: 0.into(),
            address: WINDOW.into(),
        }),
        Err(libc::EINVAL)
    );

    let trace = OpenRequest {
        kind: KIND_EXIT_TRACE.into(),
        config: EXIT_USER.into(),
        context: 0.into(),
        header: Rig::header(CONTROL_OPEN, 0),
        ..OpenRequest::default()
    };
    let trace = rig.open(&trace).expect("open");
    rig.detach(trace, "").expect("detached");
    rig.map_window(trace, 1, MAP_WRITABLE).expect("mapped");
    let area = |rig: &mut Rig, flags, page| rig.map_as(CONTROL_MAP_AUX, trace, flags, &[page]);
    assert_eq!(area(&mut rig, MAP_WINDOW, 0x9000), Err(libc::EINVAL));
    assert_eq!(
        area(&mut rig, MAP_WRITABLE, WINDOW + 0x1_0000),
        Err(libc::EINVAL)
    );
    assert_eq!(area(&mut rig, MAP_WRITABLE, 0x9000), Ok(()));
}

#[test]
fn ring_in_the_window_needs_a_window() {
    let rig = Rig::new();
    assert_eq!(rig.vpmu.features() & 1 << F_WINDOW, 0);
    let refused = rig.vpmu.activate(
        rig.memory.clone(),
        WINDOW_FEATURES,
        &[],
        rig.interrupt.clone(),
    );
    assert!(matches!(refused, Err(Error::Features(_))), "{refused:?}");

    let mut rig = Rig::windowed(&window(8));
    assert_ne!(rig.vpmu.features() & 1 << F_WINDOW, 0);
    rig.activate(ALL_FEATURES);
    let event = detached(&mut rig);
    assert_eq!(
        rig.map_window(event, 1, 0),
        Err(libc::EOPNOTSUPP),
        "the driver has not accepted the window"
    );
}

/// VPMU-D-4-4.
#[test]
fn window_is_one_region_outside_guest_memory() {
    let two = [
        (GuestAddress(WINDOW), 4096),
        (GuestAddress(WINDOW + 8192), 4096),
    ];
    for ranges in [
        &two[..],
        &[(GuestAddress(WINDOW + 8), 4096)],
        &[(GuestAddress(WINDOW), 4000)],
    ] {
        let memory = GuestMemoryMmap::<()>::from_ranges(ranges).expect("memory");
        let vpmu = Arc::into_inner(Rig::new().vpmu).expect("the only reference");
        let refused = vpmu.with_window(memory);
        assert!(matches!(refused, Err(Error::Window)), "{ranges:?}");
    }
    let inside = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x1000), 4096)]).expect("memory");
    let mut rig = Rig::bare(Engines::Auto, limits(), Some(&inside));
    let queues = rig.make_queues();
    let refused = rig.vpmu.activate(
        rig.memory.clone(),
        ALL_FEATURES,
        &queues,
        rig.interrupt.clone(),
    );
    assert!(matches!(refused, Err(Error::WindowOverlaps)), "{refused:?}");
}

#[test]
fn window_pages_do_not_count_towards_the_guests_limit() {
    let limits = limits().with(|limits| limits.max_pages = 4);
    let mut rig = Rig::windowed_with(limits, &window(64));
    let event = detached(&mut rig);
    rig.map_window(event, 8, 0).expect("mapped");
    let other = rig.open(&marks(0)).expect("open");
    rig.map(other, 2);
    let third = rig.open(&marks(0)).expect("open");
    assert_eq!(rig.try_map(third, 1).err(), Some(libc::ENOSPC));
}

/// A window whose pages are not page-aligned in the VMM's address space. The device can write to these pages, but a
/// guest could not map them.
struct Unaligned(GuestMemoryMmap);

const PAGES: usize = 8;

impl GuestMemoryRegion for Unaligned {
    type B = ();

    fn len(&self) -> GuestUsize {
        (PAGES * PAGE_SIZE) as GuestUsize
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(WINDOW)
    }

    fn bitmap(&self) {}

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_>, GuestMemoryError> {
        let at = GuestAddress(WINDOW + offset.0 + 1);
        GuestMemoryBackend::get_slice(&self.0, at, count)
    }
}

impl GuestMemoryRegionBytes for Unaligned {}

#[test]
fn pages_of_a_ring_that_cannot_be_mapped_are_freed() {
    let region = Unaligned(window(PAGES + 1));
    let window = GuestRegionCollection::from_regions(vec![region]).expect("a region");
    let mut rig = Rig::bare(Engines::Auto, limits(), None);
    let vpmu = Arc::into_inner(rig.vpmu).expect("the only reference");
    rig.vpmu = Arc::new(vpmu.with_window(window).expect("a window"));
    (0..VCPUS).for_each(|vcpu| rig.attach(vcpu));
    rig.activate(WINDOW_FEATURES);
    let event = detached(&mut rig);
    for _ in 0..2 {
        assert_eq!(rig.map_window(event, 4, 0), Err(libc::EINVAL));
    }
}
