//! The placement of rings in the window, and requests that the device refuses.

use std::sync::Arc;

use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryRegionBytes, GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};
use vpmu::abi::*;
use vpmu::{Engines, Error};
use vpmu_testkit::{ALL_FEATURES, Fixture, VCPUS, WINDOW, WINDOW_FEATURES, limits, window};

use super::{marks, reader};

fn detached(fixture: &mut Fixture) -> u64 {
    let event = fixture.opened(&marks(0));
    fixture.detach(event, "").expect("detached");
    event
}

#[test]
fn ring_in_the_window_works_like_any_other() {
    let memory = window(8);
    memory.write_slice(&[7; 8 * PAGE_SIZE], GuestAddress(WINDOW)).expect("in memory");
    let mut fixture = Fixture::windowed(&memory);
    let event = detached(&mut fixture);
    let first = fixture.map_window(event, 2, MAP_WRITABLE).expect("mapped");
    let mut ring = reader(&memory, first, 2);
    (0..10).for_each(|_| fixture.mark(0, 5, 1));
    assert_eq!(ring.take(100).len(), 10);
    let size = 3 * PAGE_SIZE;
    let mut bytes = vec![0; size];
    memory.read_slice(&mut bytes, GuestAddress(WINDOW + u64::from(first) * PAGE_SIZE as u64)).expect("in memory");
    assert!(!bytes.contains(&7), "the new ring has previous contents");
    fixture.unmap(event).expect("unmapped");
    assert_eq!(fixture.map_window(event, 2, 0), Ok(first), "its pages are free");
}

/// VPMU-D-6.10-4.
#[test]
fn window_pages_are_allocated_first_fit_and_freed() {
    let mut fixture = Fixture::windowed(&window(8));
    let [one, two, three] = [(); 3].map(|()| detached(&mut fixture));
    assert_eq!(fixture.map_window(one, 2, 0), Ok(0));
    assert_eq!(fixture.map_window(two, 2, 0), Ok(3));
    assert_eq!(fixture.map_window(three, 2, 0), Err(libc::ENOSPC));
    assert_eq!(fixture.map_window(three, 1, 0), Ok(6));
    assert_eq!(fixture.map_window(three, 1, 0), Err(libc::EBUSY));
    fixture.reattach(one).expect("attached");
    fixture.close(one).expect("closed");
    let four = detached(&mut fixture);
    assert_eq!(fixture.map_window(four, 4, 0), Err(libc::ENOSPC));
    assert_eq!(fixture.map_window(four, 0, 0), Ok(0));
}

#[test]
fn ring_in_the_window_needs_a_window() {
    let fixture = Fixture::new();
    assert_eq!(fixture.vpmu.features() & 1 << F_WINDOW, 0);
    let refused = fixture.vpmu.activate(fixture.memory.clone(), WINDOW_FEATURES, &[], fixture.interrupt.clone());
    assert!(matches!(refused, Err(Error::Features(_))), "{refused:?}");

    let mut fixture = Fixture::windowed(&window(8));
    assert_ne!(fixture.vpmu.features() & 1 << F_WINDOW, 0);
    fixture.activate(ALL_FEATURES);
    let event = detached(&mut fixture);
    assert_eq!(fixture.map_window(event, 1, 0), Err(libc::EOPNOTSUPP), "the driver has not accepted the window");
}

/// VPMU-D-4-4.
#[test]
fn window_is_one_region_outside_guest_memory() {
    let two = [(GuestAddress(WINDOW), 4096), (GuestAddress(WINDOW + 8192), 4096)];
    for ranges in [&two[..], &[(GuestAddress(WINDOW + 8), 4096)], &[(GuestAddress(WINDOW), 4000)]] {
        let memory = GuestMemoryMmap::<()>::from_ranges(ranges).expect("memory");
        let vpmu = Arc::into_inner(Fixture::new().vpmu).expect("the only reference");
        let refused = vpmu.with_window(memory);
        assert!(matches!(refused, Err(Error::Window)), "{ranges:?}");
    }
    let inside = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x1000), 4096)]).expect("memory");
    let mut fixture = Fixture::bare(Engines::Auto, limits(), Some(&inside));
    let queues = fixture.make_queues();
    let refused = fixture.vpmu.activate(fixture.memory.clone(), ALL_FEATURES, &queues, fixture.interrupt.clone());
    assert!(matches!(refused, Err(Error::WindowOverlaps)), "{refused:?}");
}

#[test]
fn window_pages_do_not_count_towards_the_guests_limit() {
    let limits = limits().with(|limits| limits.max_pages = 4);
    let mut fixture = Fixture::windowed_with(limits, &window(64));
    let event = detached(&mut fixture);
    fixture.map_window(event, 8, 0).expect("mapped");
    let other = fixture.opened(&marks(0));
    fixture.map(other, 2);
    let third = fixture.opened(&marks(0));
    assert_eq!(fixture.try_map(third, 1).err(), Some(libc::ENOSPC));
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

    fn get_slice(&self, offset: MemoryRegionAddress, count: usize) -> Result<VolatileSlice<'_>, GuestMemoryError> {
        let at = GuestAddress(WINDOW + offset.0 + 1);
        GuestMemoryBackend::get_slice(&self.0, at, count)
    }
}

impl GuestMemoryRegionBytes for Unaligned {}

#[test]
fn pages_of_a_ring_that_cannot_be_mapped_are_freed() {
    let region = Unaligned(window(PAGES + 1));
    let window = GuestRegionCollection::from_regions(vec![region]).expect("a region");
    let mut fixture = Fixture::bare(Engines::Auto, limits(), None);
    let vpmu = Arc::into_inner(fixture.vpmu).expect("the only reference");
    fixture.vpmu = Arc::new(vpmu.with_window(window).expect("a window"));
    (0..VCPUS).for_each(|vcpu| fixture.attach(vcpu));
    fixture.activate(WINDOW_FEATURES);
    let event = detached(&mut fixture);
    for _ in 0..2 {
        assert_eq!(fixture.map_window(event, 4, 0), Err(libc::EINVAL));
    }
}
