//! Wakeups of the reader of an AUX area: when the device must wake the reader, and when it must not.

use crate::Outcome;
use crate::aux_mapping::{io_trace, ports};
use crate::aux_writer::PER_PAGE;
use crate::ensure::ensure_eq;
use crate::pages::READ_WRITE;
use crate::raw::{Device, aux_watermark};
use crate::traced::{Traced, start};

const GROUP: &str = "aux";

/// Limits for poll, in milliseconds. `LONG` is for a wakeup that must come, no matter how slow the machine is. `NOW` is
/// for checks that no wakeup has come.
const LONG: i32 = 10_000;

const NOW: i32 = 0;

/// Checks that there is a wakeup at each of these exits, and at no other exit.
fn wakes_at(traced: &Traced, exits: &[u64]) -> Outcome {
    let mut made = 0;
    for &exit in exits {
        ports(exit - made - 1);
        ensure_eq!(traced.event.poll(NOW)?, 0, "poll after {} exits", exit - 1);
        ports(1);
        ensure_eq!(traced.event.poll(LONG)?, libc::POLLIN, "poll after {exit} exits");
        ensure_eq!(traced.event.poll(NOW)?, 0, "a second wakeup");
        made = exit;
    }
    Ok(())
}

#[apply(guest_test)]
fn number_of_aux_bytes_wakes() -> Outcome {
    let device = Device::open()?;
    let attr = aux_watermark(io_trace(&device), 512);
    let mut traced = start(&device, attr, 4, READ_WRITE)?;
    // At the beginning of a page, a sync packet and seven exits reach the watermark of 512 bytes. Elsewhere in a page,
    // eight exits reach it.
    let marks: Vec<u64> = (1..=16).map(|wakeup| wakeup * 8 - (wakeup * 8_u64).div_ceil(64)).collect();
    wakes_at(&traced, &marks)?;
    let sizes: Vec<u64> = traced.chunks()?.iter().map(|chunk| chunk.size).collect();
    ensure_eq!(sizes, [512; 16], "bytes of the chunks");
    let made = *marks.last().ok_or("no marks")?;
    ensure_eq!(traced.take()?.len() as u64, made, "exits");
    // In the other half of the area, the wakeups come after the same numbers of exits.
    wakes_at(&traced, &marks)?;
    traced.balance()
}

#[apply(guest_test)]
fn half_an_area_wakes() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 4, READ_WRITE)?;
    wakes_at(&traced, &[2 * PER_PAGE, 4 * PER_PAGE])?;
    ensure_eq!(traced.take()?.len() as u64, 4 * PER_PAGE, "exits");
    wakes_at(&traced, &[2 * PER_PAGE])?;
    traced.balance()
}

#[apply(guest_test)]
fn first_loss_in_an_area_wakes() -> Outcome {
    let device = Device::open()?;
    let attr = aux_watermark(io_trace(&device), u32::MAX);
    let mut traced = start(&device, attr, 2, READ_WRITE)?;
    for _ in 0..2 {
        wakes_at(&traced, &[2 * PER_PAGE + 1])?;
        ports(20);
        ensure_eq!(traced.event.poll(NOW)?, 0, "poll after more losses");
        traced.balance()?;
        ensure_eq!(traced.take()?.len() as u64, 2 * PER_PAGE, "exits");
    }
    Ok(())
}
