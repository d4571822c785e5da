//! Which pages an area may consist of, and which events may have an area.

use vpmu::abi::*;
use vpmu_testkit::{ALL_FEATURES, Errno, Fields, Fixture, MEMORY, header, limits, map_aux, open_of};

use super::{pages, trace};

fn unmap_aux(fixture: &mut Fixture, event: u64) -> Result<(), Errno> {
    fixture.control(&header(CONTROL_UNMAP_AUX, event))
}

#[test]
fn invalid_areas_are_refused() {
    let mut fixture = Fixture::new();
    let event = fixture.opened(&trace());
    let some = pages(&mut fixture, 4);
    let inval = Err(libc::EINVAL);
    assert_eq!(map_aux(&mut fixture, event, MAP_WRITABLE, &some), inval, "the trace has no ring");
    let ring = pages(&mut fixture, 3);
    fixture.map_pages(event, MAP_WRITABLE, &ring).expect("a ring");
    for wrong in [
        &[][..],
        &some[..3],
        &[some[0] + 8],
        &[some[0], some[0]],
        &[MEMORY],
        &[u64::MAX - 4095],
        &[ring[0]],
        &[some[0], ring[2]],
    ] {
        assert_eq!(map_aux(&mut fixture, event, MAP_WRITABLE, wrong), inval, "{wrong:x?}");
    }
    assert_eq!(map_aux(&mut fixture, event, 4, &some), inval, "unknown flag");
    let driven = MAP_DRIVER_OWNED | MAP_WRITABLE;
    assert_eq!(map_aux(&mut fixture, event, driven, &some), inval, "the trace has a ring");
    // The request gives a page count larger than its list of pages.
    let request = MapRequest { header: header(CONTROL_MAP_AUX, event), pages: 2.into(), flags: MAP_WRITABLE.into() };
    assert_eq!(fixture.control(&request), inval);
    assert_eq!(map_aux(&mut fixture, 77, MAP_WRITABLE, &some), Err(libc::ENOENT));
    let mark = fixture.opened(&open_of(KIND_MARK, 5, 0));
    fixture.map(mark, 1);
    assert_eq!(map_aux(&mut fixture, mark, MAP_WRITABLE, &some), Err(libc::EOPNOTSUPP));
    let child = fixture.opened(&trace().parent(event));
    assert_eq!(map_aux(&mut fixture, child, MAP_WRITABLE, &some), inval);
    assert_eq!(map_aux(&mut fixture, child, driven, &some), inval);
    let other = fixture.opened(&trace());
    fixture.redirect(other, event).expect("redirected");
    assert_eq!(map_aux(&mut fixture, other, MAP_WRITABLE, &some), inval, "its ring belongs to another event");
    assert_eq!(map_aux(&mut fixture, other, driven, &some), inval);

    assert_eq!(unmap_aux(&mut fixture, 77), Err(libc::ENOENT));
    assert_eq!(unmap_aux(&mut fixture, event), inval, "no area was mapped");
    map_aux(&mut fixture, event, MAP_WRITABLE, &some).expect("an area");
    let more = pages(&mut fixture, 4);
    assert_eq!(map_aux(&mut fixture, event, MAP_WRITABLE, &more), Err(libc::EBUSY));
    unmap_aux(&mut fixture, event).expect("unmapped");
    assert_eq!(unmap_aux(&mut fixture, event), inval);
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
fn area_needs_its_feature() {
    for missing in [F_RING, F_AUX] {
        let mut fixture = Fixture::with(limits(), ALL_FEATURES & !(1 << missing));
        assert_eq!(fixture.open(&trace()), Err(libc::EOPNOTSUPP));
        let area = pages(&mut fixture, 1);
        for flags in [0, MAP_DRIVER_OWNED] {
            let refused = map_aux(&mut fixture, 77, flags, &area);
            assert_eq!(refused, Err(libc::EOPNOTSUPP));
        }
    }
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
