//! Which pages an area may consist of, and which events may have an area.

use vpmu::abi::*;

use super::{pages, trace};
use crate::rig::{ALL_FEATURES, Errno, MEMORY, Rig, limits, open_of};
use crate::traces::area::map_aux;

fn unmap_aux(rig: &mut Rig, event: u64) -> Result<(), Errno> {
    rig.control(&Rig::header(CONTROL_UNMAP_AUX, event))
}

#[test]
fn invalid_areas_are_refused() {
    let mut rig = Rig::new();
    let event = rig.open(&trace()).expect("open");
    let some = pages(&mut rig, 4);
    let inval = Err(libc::EINVAL);
    assert_eq!(
        map_aux(&mut rig, event, MAP_WRITABLE, &some),
        inval,
        "the trace has no ring"
    );
    let ring = pages(&mut rig, 3);
    rig.map_pages(event, MAP_WRITABLE, &ring).expect("a ring");
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
        assert_eq!(
            map_aux(&mut rig, event, MAP_WRITABLE, wrong),
            inval,
            "{wrong:x?}"
        );
    }
    assert_eq!(map_aux(&mut rig, event, 4, &some), inval, "unknown flag");
    let driven = MAP_DRIVER_OWNED | MAP_WRITABLE;
    assert_eq!(
        map_aux(&mut rig, event, driven, &some),
        inval,
        "the trace has a ring"
    );
    // The request gives a page count larger than its list of pages.
    let request = MapRequest {
        header: Rig::header(CONTROL_MAP_AUX, event),
        pages: 2.into(),
        flags: MAP_WRITABLE.into(),
    };
    assert_eq!(rig.control(&request), inval);
    assert_eq!(
        map_aux(&mut rig, 77, MAP_WRITABLE, &some),
        Err(libc::ENOENT)
    );
    let mark = rig.open(&open_of(KIND_MARK, 5, 0)).expect("open");
    rig.map(mark, 1);
    assert_eq!(
        map_aux(&mut rig, mark, MAP_WRITABLE, &some),
        Err(libc::EOPNOTSUPP)
    );
    let child = OpenRequest {
        parent: event.into(),
        ..trace()
    };
    let child = rig.open(&child).expect("open");
    assert_eq!(map_aux(&mut rig, child, MAP_WRITABLE, &some), inval);
    assert_eq!(map_aux(&mut rig, child, driven, &some), inval);
    let other = rig.open(&trace()).expect("open");
    rig.redirect(other, event).expect("redirected");
    assert_eq!(
        map_aux(&mut rig, other, MAP_WRITABLE, &some),
        inval,
        "its ring belongs to another event"
    );
    assert_eq!(map_aux(&mut rig, other, driven, &some), inval);

    assert_eq!(unmap_aux(&mut rig, 77), Err(libc::ENOENT));
    assert_eq!(unmap_aux(&mut rig, event), inval, "no area was mapped");
    map_aux(&mut rig, event, MAP_WRITABLE, &some).expect("an area");
    let more = pages(&mut rig, 4);
    assert_eq!(
        map_aux(&mut rig, event, MAP_WRITABLE, &more),
        Err(libc::EBUSY)
    );
    unmap_aux(&mut rig, event).expect("unmapped");
    assert_eq!(unmap_aux(&mut rig, event), inval);
    map_aux(&mut rig, event, 0, &more).expect("the new area can differ in size and flags");
}

#[test]
fn area_of_the_driver_excludes_a_ring_of_the_device() {
    let mut rig = Rig::new();
    let event = rig.open(&trace()).expect("open");
    let target = rig.open(&trace()).expect("open");
    rig.map(target, 1);
    let area = pages(&mut rig, 2);
    map_aux(&mut rig, event, MAP_DRIVER_OWNED, &area).expect("an area");
    let ring = pages(&mut rig, 2);
    assert_eq!(rig.map_pages(event, 0, &ring), Err(libc::EINVAL));
    assert_eq!(rig.redirect(event, target), Err(libc::EINVAL));
    unmap_aux(&mut rig, event).expect("unmapped");
    rig.map_pages(event, 0, &ring)
        .expect("a ring is possible without the area");
}

#[test]
fn limits_hold() {
    let limits = limits().with(|limits| {
        limits.max_aux_pages = 8;
        limits.max_pages = 16;
    });
    let mut rig = Rig::with(limits, ALL_FEATURES);
    let offset = std::mem::offset_of!(Config, max_aux_pages) as u64;
    let mut field = [0; 4];
    rig.vpmu.read_config(offset, &mut field);
    assert_eq!(u32::from_le_bytes(field), 8);
    let event = rig.open(&trace()).expect("open");
    let other = rig.open(&trace()).expect("open");
    rig.map(event, 1);
    rig.map(other, 2);
    let area = pages(&mut rig, 16);
    assert_eq!(map_aux(&mut rig, event, 0, &area), Err(libc::EINVAL));
    assert_eq!(map_aux(&mut rig, event, 0, &area[..8]), Ok(()));
    // With five pages for rings and eight for the area, three pages are left.
    assert_eq!(map_aux(&mut rig, other, 0, &area[8..12]), Err(libc::ENOSPC));
    assert_eq!(map_aux(&mut rig, other, 0, &area[8..10]), Ok(()));
    unmap_aux(&mut rig, event).expect("unmapped");
    let third = rig.open(&trace()).expect("open");
    rig.map(third, 1);
}

#[test]
fn area_needs_its_feature() {
    for missing in [F_RING, F_AUX] {
        let mut rig = Rig::with(limits(), ALL_FEATURES & !(1 << missing));
        assert_eq!(rig.open(&trace()), Err(libc::EOPNOTSUPP));
        let area = pages(&mut rig, 1);
        for flags in [0, MAP_DRIVER_OWNED] {
            let refused = map_aux(&mut rig, 77, flags, &area);
            assert_eq!(refused, Err(libc::EOPNOTSUPP));
        }
    }
}

#[test]
fn largest_area_can_be_mapped() {
    let mut rig = Rig::new();
    let event = rig.open(&trace()).expect("open");
    let ring = pages(&mut rig, 1);
    rig.map_pages(event, 0, &ring).expect("a ring");
    // Use as many pages as fit in this memory next to the queues, rounded down to a power of two. The pages are not
    // contiguous.
    let area: Vec<u64> = (0..4096).map(|page| 0x200_0000 + page * 0x2000).collect();
    map_aux(&mut rig, event, 0, &area).expect("an area");
}
