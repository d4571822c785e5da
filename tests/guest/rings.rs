//! Rings: whatever the reader does, the written records and the lost records add up to the produced records.

use std::os::fd::AsFd;

use vpmu_client::{Event, Ring, Sample, Vpmu};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::sampling::{drain, sampling};
use crate::{Fallible, Outcome};

const GROUP: &str = "sampling";

const PAGE: usize = 4096;

/// Opens an event that samples each mark of value 4, and maps its ring of one page.
fn small(vpmu: &Vpmu) -> Fallible<(Event, Ring)> {
    sampling(vpmu, &vpmu.attr("mark=4")?.sampling(1), 0)
}

fn place(vpmu: &Vpmu, times: u64) -> Outcome {
    for _ in 0..times {
        vpmu.mark(4)?;
    }
    Ok(())
}

/// Reads the ring, makes the event report pending losses, and reads these reports.
fn settle(event: &Event, ring: &mut Ring) -> Fallible<(Vec<Sample>, u64)> {
    let (mut samples, mut lost) = drain(ring)?;
    event.read()?;
    let (more, more_lost) = drain(ring)?;
    samples.extend(more);
    lost += more_lost;
    ensure_times(&samples)?;
    Ok((samples, lost))
}

fn ensure_times(samples: &[Sample]) -> Outcome {
    ensure!(samples.windows(2).all(|pair| pair[0].time < pair[1].time), "records are out of order");
    Ok(())
}

#[apply(guest_test)]
fn absent_readers_losses_are_reported() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = small(&vpmu)?;
    place(&vpmu, 500)?;
    let (samples, lost) = settle(&event, &mut ring)?;
    ensure!(lost > 0, "no record was lost, although 500 do not fit into a page");
    ensure_eq!(samples.len() as u64 + lost, 500, "records, {} written and {lost} lost", samples.len());
    // After the loss has been reported, the ring works as before.
    place(&vpmu, 10)?;
    let (samples, lost) = settle(&event, &mut ring)?;
    ensure_eq!((samples.len(), lost), (10, 0), "records and losses after the loss was reported");
    Ok(())
}

#[apply(guest_test)]
fn lagging_readers_losses_are_reported() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = small(&vpmu)?;
    let (mut written, mut lost, mut placed) = (0, 0, 0);
    for round in 0..30 {
        let burst = 17 * round % 160;
        place(&vpmu, burst)?;
        placed += burst;
        // Takes only some of the records, so that the ring is still partly full when the next burst comes.
        for record in ring.records().take(20) {
            match record? {
                vpmu_client::Record::Sample(_) => written += 1,
                vpmu_client::Record::Lost { lost: more, .. } => lost += more,
                other => return Err(format!("{other:?}").into()),
            }
        }
    }
    let (samples, more) = settle(&event, &mut ring)?;
    (written, lost) = (written + samples.len() as u64, lost + more);
    ensure!(lost > 0, "a lagging reader lost nothing");
    ensure_eq!(written + lost, placed, "records, {written} read and {lost} lost");
    Ok(())
}

#[apply(guest_test)]
fn lying_readers_losses_are_reported() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = small(&vpmu)?;
    // Fills the ring, because the device reads the tail only when it needs room.
    place(&vpmu, 100)?;
    let head = ring.head();
    ensure!(head > 4000, "the ring is not full: {head}");
    let lies = [head + 8, head + 4096, head.wrapping_sub(4096 + 8), head.wrapping_sub(1 << 40), 1 << 63];
    for lie in lies {
        ring.set_tail_raw(lie);
        place(&vpmu, 3)?;
        ensure_eq!(ring.head(), head, "the head after a tail of {lie:#x}");
    }
    ring.set_tail_raw(ring.tail());
    let (samples, lost) = settle(&event, &mut ring)?;
    ensure_eq!(
        samples.len() as u64 * (head / samples.len() as u64),
        head,
        "whole records written before the false tails"
    );
    ensure_eq!(samples.len() as u64 + lost, 115, "samples written and lost, before and during the false tails");
    ensure_eq!(event.read()?.value, 115, "the count, losses included");
    place(&vpmu, 4)?;
    let (samples, lost) = settle(&event, &mut ring)?;
    ensure_eq!((samples.len(), lost), (4, 0), "samples and losses after the false tails");
    Ok(())
}

#[apply(guest_test)]
fn ring_wraps_without_loss() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = small(&vpmu)?;
    let id = event.id()?;
    for _ in 0..60 {
        place(&vpmu, 13)?;
        let (samples, lost) = drain(&mut ring)?;
        ensure_eq!((samples.len(), lost), (13, 0), "records and losses of a burst");
        ensure!(samples.iter().all(|s| s.id == id && s.tid == cpu::thread_id()), "a record has a wrong id or thread");
    }
    ensure!(ring.head() > 4 * PAGE as u64, "the ring did not wrap");
    Ok(())
}

#[apply(guest_test)]
fn mapping_follows_the_rules() -> Outcome {
    let vpmu = Vpmu::open()?;
    let event = vpmu.open_event(&vpmu.attr("mark=4")?.sampling(1))?;
    let fd = event.as_fd();
    let refused =
        |len: usize, flags: i32, offset: i64| cpu::try_map(fd, len, flags, offset).err().and_then(|e| e.raw_os_error());
    let shared = libc::MAP_SHARED;
    ensure_eq!(refused(4 * PAGE, shared, 0), Some(libc::EINVAL), "errno for three data pages");
    ensure_eq!(refused(2 * PAGE, libc::MAP_PRIVATE, 0), Some(libc::EINVAL), "errno for a private map");
    ensure_eq!(refused(2 * PAGE, shared, PAGE as i64), Some(libc::EINVAL), "errno for a mapping at an offset");
    ensure_eq!(refused(PAGE, shared, 0), None, "errno for the metadata page alone");
    let first = event.map(1)?;
    ensure_eq!(refused(2 * PAGE, shared, 0), Some(libc::EINVAL), "errno for a second map of a different size");
    ensure_eq!(refused(3 * PAGE, shared, 0), None, "errno for a second map of the same size");
    drop(first);
    ensure_eq!(refused(2 * PAGE, shared, 0), None, "errno for a different size after all maps are gone");
    Ok(())
}

#[apply(guest_test)]
fn ring_outlives_its_event() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, mut ring) = small(&vpmu)?;
    place(&vpmu, 6)?;
    drop(event);
    place(&vpmu, 6)?;
    let (samples, lost) = drain(&mut ring)?;
    // The mapping keeps the file open, so the event exists until both the descriptor and the mapping are gone.
    ensure_eq!((samples.len(), lost), (12, 0), "records from before and after the close, and losses");
    Ok(())
}

#[apply(guest_test)]
fn metadata_page_has_the_count() -> Outcome {
    let vpmu = Vpmu::open()?;
    let (event, ring) = small(&vpmu)?;
    place(&vpmu, 6)?;
    event.disable()?;
    let reading = event.read()?;
    let page = ring.metadata()?;
    ensure_eq!((page.index, page.offset), (0, 6), "counter index and count in the page");
    ensure!(
        page.time_enabled > 0 && page.time_running <= page.time_enabled,
        "an enabled time of zero, or below the time running: {page:?}"
    );
    ensure!(reading.value == page.offset, "{reading:?} and {page:?} have different counts");
    let info = vpmu.info();
    ensure_eq!(
        (page.time_mult, u32::from(page.time_shift)),
        (info.time_mult, info.time_shift),
        "the clock conversion in the page"
    );
    Ok(())
}
