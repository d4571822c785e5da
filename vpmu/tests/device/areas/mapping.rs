//! Which pages an area may consist of, and which events may have an area.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Errno, Fixture, header, limits, map_aux};

use super::{pages, trace};

fn unmap_aux(fixture: &mut Fixture, event: u64) -> Result<(), Errno> {
    fixture.control(&header(CONTROL_UNMAP_AUX, event))
}

#[test]
fn unmapped_area_can_be_replaced_by_another() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&trace());
    fixture.map(event, 2);
    let [some, more] = [4, 2].map(|count| pages(&mut fixture, count));
    map_aux(&mut fixture, event, MAP_WRITABLE, &some).expect("an area");
    assert_eq!(map_aux(&mut fixture, event, MAP_WRITABLE, &more), Err(libc::EBUSY));
    unmap_aux(&mut fixture, event).expect("unmapped");
    assert_eq!(unmap_aux(&mut fixture, event), Err(libc::EINVAL));
    map_aux(&mut fixture, event, 0, &more).expect("the new area can differ in size and flags");
}

#[test]
fn area_of_the_driver_excludes_a_ring_of_the_device() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&trace());
    let target = fixture.opened(&trace());
    fixture.map(target, 1);
    let area = pages(&mut fixture, 2);
    map_aux(&mut fixture, event, MAP_DRIVER_OWNED, &area).expect("an area");
    let ring = pages(&mut fixture, 2);
    assert_eq!(fixture.map_pages(event, 0, &ring), Err(libc::EINVAL));
    assert_eq!(fixture.redirect(event, target), Err(libc::EINVAL));
    unmap_aux(&mut fixture, event).expect("unmapped");
    fixture.map_pages(event, 0, &ring).expect("a ring is possible without the area");
}

#[test]
fn limits_hold() {
    let limits = limits().with(|limits| {
        limits.max_aux_pages = 8;
        limits.max_pages = 16;
    });
    let mut fixture = Fixture::with(limits, ALL_FEATURES);
    let offset = std::mem::offset_of!(Config, max_aux_pages) as u64;
    let mut field = [0; 4];
    fixture.vpmu.read_config(offset, &mut field);
    assert_eq!(u32::from_le_bytes(field), 8);
    let event = fixture.opened(&trace());
    let other = fixture.opened(&trace());
    fixture.map(event, 1);
    fixture.map(other, 2);
    let area = pages(&mut fixture, 16);
    assert_eq!(map_aux(&mut fixture, event, 0, &area), Err(libc::EINVAL));
    assert_eq!(map_aux(&mut fixture, event, 0, &area[..8]), Ok(()));
    // With five pages for rings and eight for the area, three pages are left.
    assert_eq!(map_aux(&mut fixture, other, 0, &area[8..12]), Err(libc::ENOSPC));
    assert_eq!(map_aux(&mut fixture, other, 0, &area[8..10]), Ok(()));
    unmap_aux(&mut fixture, event).expect("unmapped");
    let third = fixture.opened(&trace());
    fixture.map(third, 1);
}

#[test]
fn largest_area_can_be_mapped() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&trace());
    let ring = pages(&mut fixture, 1);
    fixture.map_pages(event, 0, &ring).expect("a ring");
    // Use as many pages as fit in this memory next to the queues, rounded down to a power of two. The pages are not
    // contiguous.
    let area: Vec<u64> = (0..4096).map(|page| 0x200_0000 + page * 0x2000).collect();
    map_aux(&mut fixture, event, 0, &area).expect("an area");
}
