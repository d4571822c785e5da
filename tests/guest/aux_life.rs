//! The lifetime of an AUX area: which references keep it alive, and which user is charged for its memory.

use crate::areas::{self, Area};
use crate::aux_mapping::{event, io_trace, ports};
use crate::beside::{making_exits, work_beside};
use crate::ensure::{ensure, ensure_eq};
use crate::output_mapping::{allowance, untouched};
use crate::packets::{Ledger, exits};
use crate::pages::{Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{Device, Event, How, PAGE, refused};
use crate::{Outcome, cpu, os};

const GROUP: &str = "aux";

#[apply(guest_test)]
fn forked_child_does_not_inherit_the_area() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 2, READ_WRITE)?;
    event.enable(0)?;
    ports(3);
    event.disable(0)?;
    let code = os::forked(|| {
        if os::is_mapped(area.address()) || os::is_mapped(ring.address()) {
            return 1;
        }
        let Ok(ring) = Pages::map(&event, 1, READ_WRITE) else {
            return 2;
        };
        let Ok(mut own) = Area::map(&event, &ring, 2, READ_WRITE) else {
            return 3;
        };
        match own.take(&ring) {
            Ok(packets) if exits(&packets).len() == 3 => 0,
            _ => 4,
        }
    })?;
    ensure_eq!(code, 0, "the child's exit code");
    event.enable(0)?;
    ports(4);
    event.disable(0)?;
    let mut ledger = Ledger::default();
    let packets = area.take(&ring)?;
    ledger.follow(&packets)?;
    ensure_eq!(exits(&packets).len(), 7, "exits that the parent reads");
    Ok(())
}

#[apply(guest_test)]
fn area_outlives_the_rings_last_map() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let event = event(&device)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 2, READ_WRITE)?;
    event.enable(0)?;
    ports(2);
    drop(ring);
    ports(3);
    // As in perf, the area's mapping keeps the ring alive, and a new mapping of the ring must have the same size.
    ensure_eq!(refused(Pages::map(&event, 2, READ_WRITE)), Some(libc::EINVAL), "a different size of the ring");
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    event.disable(0)?;
    let packets = area.take(&ring)?;
    Ledger::default().follow(&packets)?;
    ensure_eq!(exits(&packets).len(), 5, "exits");
    // If the area is unmapped first, the ring remains without an area.
    drop(area);
    event.enable(0)?;
    ports(6);
    event.disable(0)?;
    let fresh = Area::map(&event, &ring, 4, READ_WRITE)?;
    ensure_eq!(areas::head(&ring), 0, "the head of a fresh area");
    drop(fresh);
    drop(ring);
    ensure_eq!(refused(Pages::map(&event, 2, READ_WRITE)), None, "a different size after all maps are gone");
    Ok(())
}

#[apply(guest_test)]
fn area_lives_as_long_as_any_map() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let event = event(&device)?;
    event.enable(0)?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let first = Area::map(&event, &ring, 1, READ_WRITE)?;
    let mut second = Area::map(&event, &ring, 1, READ_WRITE)?;
    ports(2);
    drop(first);
    ports(2);
    drop(event);
    // The mapping keeps the event's file open, so the trace continues. When a half of the area is full, the device
    // publishes it without a flush or a read. Each half holds a sync packet and 31 exits.
    ports(27);
    let packets = second.take(&ring)?;
    Ledger::default().follow(&packets)?;
    ensure_eq!(exits(&packets).len(), 31, "exits");
    Ok(())
}

/// Runs `body` while CPU 1 continuously makes exits.
fn while_writing(body: impl FnOnce() -> Outcome) -> Outcome {
    cpu::pin(0)?;
    let ((), made) = work_beside(1, making_exits, |other| {
        body()?;
        other.wait_for(61);
        Ok(())
    })?;
    ensure!(made > 60, "{made} exits are too few");
    Ok(())
}

/// VPMU-G-6.3-1.
#[apply(guest_test)]
fn unmapping_an_area_while_the_host_writes_harms_nothing() -> Outcome {
    let device = Device::open()?;
    while_writing(|| {
        let mut attr = io_trace(&device);
        attr.aux_watermark = 512;
        let event = device.start(&attr, How::on_cpu(1))?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        for round in 0..60_usize {
            let pages = 1 << (round % 4);
            let protection = if round % 3 == 2 { READ_ONLY } else { READ_WRITE };
            let area = Area::map(&event, &ring, pages, protection)?;
            while area.word(0) == 0 {
                std::hint::spin_loop();
            }
            drop(area);
            untouched(pages, round)?;
        }
        event.disable(0)?;
        Ok(())
    })
}

#[apply(guest_test)]
fn closing_while_the_host_writes_harms_nothing() -> Outcome {
    let device = Device::open()?;
    while_writing(|| {
        for round in 0..24_usize {
            let pages = 1 << (round % 4);
            let mut attr = io_trace(&device);
            attr.aux_watermark = 512;
            let event = device.start(&attr, How::on_cpu(1))?;
            let ring = Pages::map(&event, 1, READ_WRITE)?;
            let area = Area::map(&event, &ring, pages, READ_WRITE)?;
            while area.word(0) == 0 {
                std::hint::spin_loop();
            }
            // The event, the ring and the area each keep the file open. When the last of them is dropped, the file is
            // released.
            match round % 3 {
                0 => drop((event, ring, area)),
                1 => drop((area, event, ring)),
                _ => drop((ring, area, event)),
            }
            untouched(pages, round)?;
        }
        Ok(())
    })
}

#[apply(guest_test)]
fn areas_are_accounted_and_given_back() -> Outcome {
    let device = Device::open()?;
    let allowance = allowance()?;
    let beyond = 64;
    os::limit_locked((beyond * PAGE) as u64)?;
    os::set_paranoid(1)?;
    os::become_nobody()?;
    let pair = || -> std::io::Result<(Event, Pages)> {
        // The user `nobody` may not observe the kernel.
        let mut attr = io_trace(&device);
        attr.set_exclude_kernel(1);
        let event = device.open_event(&attr, How::OWN)?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        Ok((event, ring))
    };
    // Each event takes 2 pages for its ring and 64 for its area.
    let whole = (allowance + beyond) / 66;
    let left = (allowance + beyond) % 66;
    for round in 0..2 {
        let mut kept = Vec::new();
        for number in 0..whole {
            let (event, ring) = pair()?;
            let area = Area::map(&event, &ring, 64, READ_WRITE)
                .map_err(|error| format!("round {round}, area {number}: {error}"))?;
            kept.push((area, ring, event));
        }
        // A ring takes two of the remaining pages. Fewer than 64 then remain for an area.
        if left >= 2 {
            let (event, ring) = pair()?;
            ensure_eq!(
                refused(Area::map(&event, &ring, 64, READ_WRITE)),
                Some(libc::EPERM),
                "round {round}: an area beyond the limit of {allowance} + {beyond} pages"
            );
            let fits = (left - 2).checked_ilog2().map(|order| 1 << order);
            if let Some(fits) = fits {
                let area = Area::map(&event, &ring, fits, READ_WRITE)?;
                kept.push((area, ring, event));
            }
        }
        // A second map of the same area takes no more memory.
        let (_, ring, event) = &kept[0];
        Area::map(event, ring, 64, READ_WRITE)?;
    }
    Ok(())
}
