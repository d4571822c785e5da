//! The writer of AUX areas. It must write only whole packets, count each byte once, and report every loss.

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas::{self, Area, Chunk, OVERWRITE, PARTIAL, TRUNCATED};
use crate::aux_mapping::{io_trace, ports};
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{EXIT_BYTES, SYNC_LOSS, SYNC_PAGE, SYNC_START, exits, syncs};
use crate::pages::{AUX_TAIL, Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{Device, EXIT_PORT, FORMAT_LOST, How, PAGE};
use crate::traced::start;
use crate::{Outcome, cpu};

const GROUP: &str = "aux";

/// Exits in a page, behind its sync.
pub(crate) const PER_PAGE: u64 = PAGE as u64 / EXIT_BYTES - 1;

#[apply(guest_test)]
fn trace_wraps_without_loss() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 2, READ_WRITE)?;
    let (mut made, mut last) = (0, 0);
    for burst in (0..40).map(|round| 1 + round * 29 % 120) {
        ports(burst);
        made += burst;
        traced.balance()?;
        let taken = traced.take()?;
        ensure_eq!(taken.len() as u64, burst, "exits of a burst");
        for exit in taken {
            ensure!(exit.time > last, "an exit at {} ns follows one at {last} ns", exit.time);
            last = exit.time;
        }
    }
    traced.event.disable(0)?;
    traced.balance()?;
    let (count, lost) = traced.read()?;
    ensure_eq!(lost, 0, "lost bytes");
    ensure_eq!(traced.ledger.packets, made, "exits in the trace");
    // There is a sync packet for each page that was started. There is no padding, because 64 packets fill a page.
    let packets = made + made.div_ceil(PER_PAGE);
    ensure_eq!(count, packets * EXIT_BYTES, "bytes of {made} exits");
    ensure!(count > 10 * traced.area.size(), "{count} bytes: the area wrapped at most ten times");
    Ok(())
}

#[apply(guest_test)]
fn stalled_readers_losses_are_recorded() -> Outcome {
    const LOST: u64 = 40;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 1, READ_WRITE)?;
    ports(PER_PAGE + LOST);
    traced.balance()?;
    let (size, lost) = (traced.area.size(), LOST * EXIT_BYTES);
    ensure_eq!(traced.read()?, (size + lost, lost), "bytes produced and lost");
    ensure_eq!(traced.take()?.len() as u64, PER_PAGE, "exits of a full area");
    ports(5);
    traced.read()?;
    let packets = traced.area.take(&traced.ring)?;
    traced.ledger.follow(&packets)?;
    let first = packets.first().and_then(|placed| placed.packet.sync());
    let first = first.ok_or("no sync after the loss")?;
    ensure_eq!(
        (first.flags, first.lost, first.sequence),
        (SYNC_PAGE | SYNC_LOSS, lost, PER_PAGE + LOST),
        "the sync after the loss"
    );
    ensure_eq!(exits(&packets).len(), 5, "exits after the loss");
    let chunks = traced.chunks()?;
    let flags: Vec<u64> = chunks.iter().map(|chunk| chunk.flags).collect();
    ensure_eq!(flags, [PARTIAL], "flags of the chunk after the loss");
    ports(5);
    traced.read()?;
    let chunks = traced.chunks()?;
    ensure_eq!(chunks.len(), 1, "chunks after the one that reports the loss");
    ensure_eq!(chunks[0].flags, 0, "flags of the chunk after that");
    traced.balance()
}

/// The reader stalls on a fixed schedule. The flags of the chunks must report each loss.
#[apply(guest_test)]
fn written_and_lost_are_all_that_was_produced() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 2, READ_WRITE)?;
    let (mut made, mut truncated, mut partial) = (0, 0, 0);
    let mut before = 0;
    for round in 0..60_u64 {
        let burst = 1 + round * 37 % 200;
        ports(burst);
        made += burst;
        traced.read()?;
        let chunks = traced.chunks()?;
        let (_, lost) = traced.read()?;
        let missed = lost > before;
        before = lost;
        truncated += chunks.iter().filter(|c| c.flags & TRUNCATED != 0).count();
        partial += chunks.iter().filter(|c| c.flags & PARTIAL != 0).count();
        let cut = chunks.last().is_some_and(|c| c.flags & TRUNCATED != 0);
        ensure!(
            !missed || cut || chunks.is_empty(),
            "round {round}: a loss, but the last chunk is not truncated: {chunks:x?}"
        );
        ensure!(chunks.iter().all(|c| c.flags & !(TRUNCATED | PARTIAL) == 0), "a chunk has other flags: {chunks:x?}");
        traced.balance()?;
        // The reader stalls in two of every three rounds.
        if round % 3 == 2 {
            traced.take()?;
        }
    }
    traced.event.disable(0)?;
    traced.take()?;
    traced.balance()?;
    let (_, lost) = traced.read()?;
    ensure!(truncated > 5 && partial > 5, "too few chunks: {truncated} truncated, {partial} partial");
    ensure_eq!(traced.ledger.packets + lost / EXIT_BYTES, made, "exits written and lost");
    Ok(())
}

#[apply(guest_test)]
fn lying_tail_counts_as_a_full_area() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 1, READ_WRITE)?;
    ports(PER_PAGE);
    traced.read()?;
    let (head, size) = (areas::head(&traced.ring), traced.area.size());
    ensure_eq!(head, size, "the head of a full area");
    let mut lost = 0;
    let lies = [head + 1, head + 64, head + size, u64::MAX, 1 << 63, head.wrapping_sub(size + 64), 0];
    for lie in lies {
        traced.ring.store_release(AUX_TAIL, lie);
        ports(3);
        lost += 3 * EXIT_BYTES;
        ensure_eq!(traced.read()?, (head + lost, lost), "bytes produced and lost with a tail of {lie:#x}");
        ensure_eq!(areas::head(&traced.ring), head, "the head with a tail of {lie:#x}");
    }
    // A correct tail frees the area.
    ensure_eq!(traced.take()?.len() as u64, PER_PAGE, "exits before the false tails");
    ports(4);
    traced.balance()?;
    ensure_eq!(traced.take()?.len(), 4, "exits after the false tails");
    ensure_eq!(traced.ledger.lost, lost, "lost bytes that the sync reports");
    // The device keeps its own head, so a guest's write to the page has no effect.
    traced.ring.store_release(crate::pages::AUX_HEAD, 1 << 40);
    ports(1);
    traced.balance()?;
    ensure_eq!(traced.take()?.len(), 1, "exits after a head was forged");
    Ok(())
}

#[apply(guest_test)]
fn snapshot_keeps_the_newest() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 2, READ_ONLY)?;
    ports(MADE);
    traced.event.disable(0)?;
    let (count, lost) = traced.read()?;
    let packets = MADE + MADE.div_ceil(PER_PAGE);
    ensure_eq!((count, lost), (packets * EXIT_BYTES, 0), "bytes produced and lost");
    ensure_eq!(areas::head(&traced.ring), count, "the head of a snapshot's area");
    let newest = traced.area.newest(&traced.ring)?;
    let begins: Vec<u64> =
        newest.iter().filter(|placed| placed.packet.sync().is_some()).map(|placed| placed.at % PAGE as u64).collect();
    ensure!(
        !begins.is_empty() && begins.iter().all(|&at| at == 0),
        "no syncs, or some that do not begin a page: {begins:x?}"
    );
    let numbers: Vec<u64> = exits(&newest).iter().map(|exit| exit.sequence).collect();
    let kept = PER_PAGE..=2 * PER_PAGE;
    let held = numbers.len() as u64;
    ensure!(kept.contains(&held), "{held} exits in a snapshot of two pages");
    ensure_eq!(numbers, (MADE - held..MADE).collect::<Vec<u64>>(), "numbers of the exits");
    ensure_eq!(traced.chunks()?, [Chunk { offset: 0, size: count, flags: OVERWRITE }], "chunks recorded");
    // The trace continues from there.
    traced.event.enable(0)?;
    ports(1);
    traced.event.disable(0)?;
    let newest = traced.area.newest(&traced.ring)?;
    let last = exits(&newest).last().map(|exit| exit.sequence);
    ensure_eq!(last, Some(MADE), "number of the newest exit after one more exit");
    Ok(())
}

#[apply(guest_test)]
fn without_an_area_all_is_lost() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let attr = perf_event_attr { read_format: FORMAT_LOST, ..io_trace(&device) };
    let event = device.start(&attr, How::on_cpu(1))?;
    ports(10);
    let lost = 10 * EXIT_BYTES;
    ensure_eq!(event.read()?, [lost, lost], "bytes produced and lost without a ring");
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    ports(10);
    let lost = 2 * lost;
    ensure_eq!(event.read()?, [lost, lost], "bytes produced and lost with a ring");
    let mut area = Area::map(&event, &ring, 1, READ_WRITE)?;
    ports(3);
    ensure_eq!(event.read()?, [lost + 4 * 64, lost], "bytes produced and lost with an area");
    let packets = area.take(&ring)?;
    let first = syncs(&packets)[0];
    ensure_eq!(
        (first.flags, first.sequence, first.lost),
        (SYNC_START | SYNC_LOSS | SYNC_PAGE, 20, lost),
        "flags, number and lost bytes of the first sync"
    );
    ensure_eq!(exits(&packets).len(), 3, "exits in the area");
    drop(area);
    ports(5);
    let lost = lost + 5 * EXIT_BYTES;
    ensure_eq!(event.read()?, [lost + 4 * 64, lost], "bytes produced and lost after the area was unmapped");
    Ok(())
}

#[apply(guest_test)]
fn trace_that_restarts_has_a_sync_packet() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 1, READ_WRITE)?;
    let id = traced.event.id()?;
    for round in 0..3 {
        traced.event.enable(0)?;
        let before = device.time_of(cpu::tsc());
        ports(2);
        let after = device.time_of(cpu::tsc());
        traced.event.disable(0)?;
        ports(7);
        let packets = traced.area.take(&traced.ring)?;
        traced.ledger.follow(&packets)?;
        let first = syncs(&packets)[0];
        let page = if round == 0 { SYNC_PAGE } else { 0 };
        ensure_eq!(first.flags, SYNC_START | page, "flags of the sync of round {round}");
        ensure_eq!((first.format, first.vcpu, first.event), (1, 1, id), "format, vCPU and event of the sync");
        ensure_eq!(first.config, EXIT_PORT, "the config of the sync");
        ensure_eq!(device.time_of(first.tsc), first.time, "the time computed from the sync's TSC");
        ensure!((before..=after).contains(&first.time), "a sync at {} between {before} and {after}", first.time);
        ensure_eq!(exits(&packets).len(), 2, "exits of round {round}");
    }
    // A reset sets the count to zero, but does not restart the trace.
    traced.event.enable(0)?;
    traced.event.reset(0)?;
    ports(2);
    let (count, lost) = traced.read()?;
    ensure_eq!((count, lost), (3 * 64, 0), "bytes produced and lost after a reset");
    ensure_eq!(traced.take()?.len(), 2, "exits after the reset");
    ensure_eq!(traced.ledger.packets, 8, "exits in total");
    Ok(())
}
