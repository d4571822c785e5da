//! How an AUX area is mapped. By perf's rules, a program first announces the area in the ring's metadata page.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::arch::OWN_IN_USER_MODE;
use crate::areas::{self, Area, announce};
use crate::ensure::{ensure, ensure_eq};
use crate::packets::exits;
use crate::pages::{AUX_OFFSET, AUX_SIZE, Pages, READ_WRITE};
use crate::raw::{Device, EXIT_PORT, Event, How, KIND_EXIT_TRACE, PAGE, refused, silent};
use crate::{Outcome, cpu, os};

const GROUP: &str = "aux";

const P: u64 = PAGE as u64;

/// The attr of a trace of port I/O whose records never wake a reader.
pub(crate) fn io_trace(device: &Device) -> perf_event_attr {
    let mut attr = silent(device.attr(KIND_EXIT_TRACE, EXIT_PORT));
    attr.set_exclude_kernel(OWN_IN_USER_MODE.into());
    attr
}

/// Opens a trace of this thread's port I/O. The trace is disabled.
pub(crate) fn event(device: &Device) -> std::io::Result<Event> {
    device.open_event(&io_trace(device), How::OWN)
}

/// Makes `times` port writes. Each write is an exit.
pub(crate) fn ports(times: u64) {
    (0..times).for_each(|_| cpu::port_write());
}

/// Announces the offset and the size in `announced`, and maps `pages` pages at `offset`. Returns the errno of mmap(2).
fn map_errno(event: &Event, ring: &Pages, announced: (u64, u64), pages: u64, offset: u64) -> Option<i32> {
    announce(ring, announced.0, announced.1);
    let bytes = usize::try_from(pages * P).unwrap_or(0);
    refused(Area::map_raw(event, bytes, READ_WRITE, offset))
}

#[apply(guest_test)]
fn area_is_mapped_only_as_announced() -> Outcome {
    let device = Device::open()?;
    let event = event(&device)?;
    let bytes = 4 * PAGE;
    ensure_eq!(
        refused(Area::map_raw(&event, bytes, READ_WRITE, 3 * P)),
        Some(libc::EINVAL),
        "an area mapped before the ring"
    );
    let ring = Pages::map(&event, 2, READ_WRITE)?;
    ensure_eq!((ring.load(AUX_OFFSET), ring.load(AUX_SIZE)), (0, 0), "offset and size that a fresh ring announces");
    ensure_eq!(
        refused(Area::map_raw(&event, bytes, READ_WRITE, 3 * P)),
        Some(libc::EINVAL),
        "an area that was not announced"
    );
    // The ring ends at page 3.
    let cases = [
        ("a different offset", (3 * P, 4 * P), 4, 4 * P),
        ("a smaller size", (3 * P, 4 * P), 2, 3 * P),
        ("a bigger size", (3 * P, 4 * P), 8, 3 * P),
        ("in the data", (2 * P, 4 * P), 4, 2 * P),
        ("at the first page of the data", (P, 4 * P), 4, P),
        ("an offset that is not a multiple of the page size", (3 * P + 8, 4 * P), 4, 3 * P),
        ("a size that is not a multiple of the page size", (3 * P, 4 * P - 8), 4, 3 * P),
        ("the highest offset", (u64::MAX - P + 1, 4 * P), 4, 3 * P),
        ("no size", (3 * P, 0), 4, 3 * P),
    ];
    for (what, announced, pages, offset) in cases {
        ensure_eq!(map_errno(&event, &ring, announced, pages, offset), Some(libc::EINVAL), "{what}");
    }
    announce(&ring, 3 * P, 4 * P);
    let private = Pages::map_raw(&event, bytes, READ_WRITE, libc::MAP_PRIVATE, 3 * PAGE as i64);
    ensure_eq!(refused(private), Some(libc::EINVAL), "a private map");
    for offset in [3 * P, 4 * P, 1000 * P] {
        ensure_eq!(map_errno(&event, &ring, (offset, 4 * P), 4, offset), None, "a mapping at {offset:#x}");
    }
    Ok(())
}

#[apply(guest_test)]
fn area_is_a_power_of_two_of_pages() -> Outcome {
    let device = Device::open()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    for pages in 1..=33 {
        let expected = (!u64::is_power_of_two(pages)).then_some(libc::EINVAL);
        ensure_eq!(map_errno(&event, &ring, (2 * P, pages * P), pages, 2 * P), expected, "{pages} pages");
    }
    let most = u64::from(device.info.max_aux_pages);
    ensure!(most.is_power_of_two(), "{most} pages, the maximum, are not a power of two");
    ensure_eq!(
        map_errno(&event, &ring, (2 * P, 2 * most * P), 2 * most, 2 * P),
        Some(libc::ENOMEM),
        "twice the {most} pages that an area may have"
    );
    Ok(())
}

#[apply(guest_test)]
fn only_traces_have_areas() -> Outcome {
    let device = Device::open()?;
    let event = device.open_event(&silent(device.marks(3, 1, 0)), How::OWN)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(
        map_errno(&event, &ring, (2 * P, 4 * P), 4, 2 * P),
        Some(libc::EOPNOTSUPP),
        "an area of an event of marks"
    );
    ensure_eq!(map_errno(&event, &ring, (2 * P, 3 * P), 3, 2 * P), Some(libc::EINVAL), "an area of three pages");
    Ok(())
}

#[apply(guest_test)]
fn later_maps_of_an_area_are_equal_until_all_are_gone() -> Outcome {
    let device = Device::open()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let first = Area::map(&event, &ring, 4, READ_WRITE)?;
    let second = Area::map(&event, &ring, 4, READ_WRITE)?;
    let others = [("a smaller size", 2 * P, 2), ("a bigger size", 2 * P, 8), ("a different offset", 3 * P, 4)];
    let refuse_all = || -> Outcome {
        for (what, offset, pages) in others {
            ensure_eq!(map_errno(&event, &ring, (offset, pages * P), pages, offset), Some(libc::EINVAL), "{what}");
        }
        Ok(())
    };
    refuse_all()?;
    drop(first);
    refuse_all()?;
    drop(second);
    for (what, offset, pages) in others {
        ensure_eq!(
            map_errno(&event, &ring, (offset, pages * P), pages, offset),
            None,
            "{what} after all maps are gone"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn two_maps_of_an_area_are_one() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut first = Area::map(&event, &ring, 2, READ_WRITE)?;
    let second = Area::map(&event, &ring, 2, READ_WRITE)?;
    event.enable(0)?;
    ports(10);
    event.disable(0)?;
    let head = areas::head(&ring);
    ensure!(head >= 11 * 64, "{head} bytes are fewer than ten exits and a sync");
    for at in (0..head).step_by(8) {
        ensure_eq!(first.word(at), second.word(at), "byte {at} in the two maps");
    }
    ensure_eq!(exits(&first.take(&ring)?).len(), 10, "exits");
    let mut third = Area::map(&event, &ring, 2, READ_WRITE)?;
    ensure_eq!(third.take(&ring)?.len(), 0, "packets for a mapping made after they were consumed");
    Ok(())
}

#[apply(guest_test)]
fn part_of_an_area_cannot_be_unmapped() -> Outcome {
    let device = Device::open()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let area = Area::map(&event, &ring, 4, READ_WRITE)?;
    for (what, first) in [("head", 0), ("middle", 1), ("tail", 3)] {
        let part = area.address().wrapping_add(first * PAGE);
        ensure_eq!(refused(os::unmap(part, PAGE)), Some(libc::EINVAL), "unmapping the area's {what}");
    }
    ensure!(os::is_mapped(area.address()), "a refused munmap(2) has unmapped the area");
    Ok(())
}

#[apply(guest_test)]
fn ring_of_a_closed_trace_refuses_an_area() -> Outcome {
    let device = Device::open()?;
    let (first, second) = (event(&device)?, event(&device)?);
    let own = Pages::map(&first, 1, READ_WRITE)?;
    second.output_to(first.ring())?;
    let ring = Pages::map(&second, 1, READ_WRITE)?;
    let expected = [None, Some(libc::EOPNOTSUPP)];
    let mut found = [map_errno(&second, &ring, (2 * P, 4 * P), 4, 2 * P), None];
    drop((own, first));
    found[1] = map_errno(&second, &ring, (2 * P, 4 * P), 4, 2 * P);
    ensure_eq!(found, expected, "maps before its trace is closed, and after");
    Ok(())
}
