//! The writer of AUX areas: whole packets, each byte counted once, and nothing lost unsaid.

use std::os::fd::AsRawFd;
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas::{self, Area, Chunk, OVERWRITE, PARTIAL, TRUNCATED, contiguous, told};
use crate::aux_mapping::{io_trace, ports};
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{CPU, ID, IDENTIFIER, STREAM_ID, TID, TIME};
use crate::packets::{EXIT_BYTES, Exit, Ledger, SYNC_LOSS, SYNC_PAGE, SYNC_START, exits, syncs};
use crate::pages::{AUX_TAIL, Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{
    Device, EXIT_IO, EXIT_MMIO, Event, FORMAT_LOST, How, KIND_EXIT_TRACE, PAGE, aux_watermark,
    silent,
};
use crate::{Outcome, Test, cpu};

pub(crate) const TESTS: &[Test] = &[
    ("a_trace_wraps_whole", a_trace_wraps_whole),
    (
        "a_stalled_reader_loses_what_is_told",
        a_stalled_reader_loses_what_is_told,
    ),
    (
        "written_and_lost_are_all_that_was_produced",
        written_and_lost_are_all_that_was_produced,
    ),
    ("a_lying_tail_is_a_full_area", a_lying_tail_is_a_full_area),
    ("a_snapshot_keeps_the_newest", a_snapshot_keeps_the_newest),
    ("the_start_is_told_once", the_start_is_told_once),
    (
        "pieces_without_a_record_are_told_later",
        pieces_without_a_record_are_told_later,
    ),
    (
        "a_ring_without_data_has_an_area",
        a_ring_without_data_has_an_area,
    ),
    ("without_an_area_all_is_lost", without_an_area_all_is_lost),
    (
        "a_trace_that_starts_anew_says_so",
        a_trace_that_starts_anew_says_so,
    ),
    (
        "records_of_an_area_tell_whose_they_are",
        records_of_an_area_tell_whose_they_are,
    ),
    (
        "traces_write_into_anothers_area",
        traces_write_into_anothers_area,
    ),
    (
        "children_write_into_their_parents_area",
        children_write_into_their_parents_area,
    ),
    ("a_number_of_aux_bytes_wakes", a_number_of_aux_bytes_wakes),
    ("half_an_area_wakes", half_an_area_wakes),
    (
        "the_first_loss_in_an_area_wakes",
        the_first_loss_in_an_area_wakes,
    ),
];

/// A page holds a sync and so many exits.
const PER_PAGE: u64 = PAGE as u64 / EXIT_BYTES - 1;
/// A record of an area without a trailer, and that of a trace's start.
const AUX_RECORD: u64 = 32;
const START_RECORD: u64 = 16;
/// Long enough for what must come, however slow the machine; what must not come is not there now.
const LONG: i32 = 10_000;
const NOW: i32 = 0;

/// A trace with its ring and its area.
pub(crate) struct Traced {
    pub(crate) event: Event,
    pub(crate) ring: Pages,
    pub(crate) area: Area,
    pub(crate) ledger: Ledger,
    /// Where the last chunk ended that the ring told of.
    pub(crate) told: u64,
    attr: perf_event_attr,
}

impl Traced {
    /// Off yet.
    pub(crate) fn open(
        device: &Device,
        attr: perf_event_attr,
        how: How<'_>,
        pages: usize,
        protection: i32,
    ) -> std::io::Result<Self> {
        let attr = perf_event_attr {
            read_format: FORMAT_LOST,
            ..attr
        };
        let event = device.open_event(&attr, how)?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        let area = Area::map(&event, &ring, pages, protection)?;
        Ok(Self {
            event,
            ring,
            area,
            ledger: Ledger::default(),
            told: 0,
            attr,
        })
    }

    /// Bytes produced and bytes lost, as read(2) tells; what was written is shown then.
    pub(crate) fn read(&self) -> Result<(u64, u64), Box<dyn std::error::Error>> {
        match self.event.read()?[..] {
            [count, lost] => Ok((count, lost)),
            ref words => Err(format!("a reading of {words:?}").into()),
        }
    }

    /// Takes out what is shown: exits that follow those before.
    pub(crate) fn take(&mut self) -> Result<Vec<Exit>, String> {
        let packets = self.area.take(&self.ring)?;
        self.ledger.follow(&packets)?;
        Ok(exits(&packets))
    }

    /// Takes out the records: chunks that follow those before.
    pub(crate) fn chunks(&mut self) -> Result<Vec<Chunk>, String> {
        let told = told(&self.ring.take()?, &self.attr)?;
        self.told = contiguous(&told.chunks, self.told)?;
        Ok(told.chunks)
    }

    /// What holds of every trace that is read: produced are what stands in the area and what was
    /// lost, and the ring has told of all that stands there.
    pub(crate) fn balance(&mut self) -> Outcome {
        let (count, lost) = self.read()?;
        let head = areas::head(&self.ring);
        ensure_eq!(
            count,
            head + lost,
            "produced, of {head} written and {lost} lost"
        );
        self.chunks()?;
        // What the full ring had no record for is told now.
        self.read()?;
        self.chunks()?;
        ensure_eq!(self.told, head, "where the chunks end");
        Ok(())
    }
}

/// A trace of CPU 1's port I/O, which this thread is to make there: no task switch shows anything
/// before its time. Enabled.
pub(crate) fn start(
    device: &Device,
    attr: perf_event_attr,
    pages: usize,
    protection: i32,
) -> std::io::Result<Traced> {
    cpu::allow_ports()?;
    cpu::pin(1)?;
    let traced = Traced::open(device, attr, How::on_cpu(1), pages, protection)?;
    traced.event.enable(0)?;
    Ok(traced)
}

fn a_trace_wraps_whole() -> Outcome {
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
            ensure!(exit.time > last, "{} after {last} ns", exit.time);
            last = exit.time;
        }
    }
    traced.event.disable(0)?;
    traced.balance()?;
    let (count, lost) = traced.read()?;
    ensure_eq!(lost, 0, "lost");
    ensure_eq!(traced.ledger.packets, made, "exits in the trace");
    // A sync for each page begun; no padding, for 64 packets fill a page.
    let packets = made + made.div_ceil(PER_PAGE);
    ensure_eq!(count, packets * EXIT_BYTES, "bytes of {made} exits");
    ensure!(
        count > 10 * traced.area.size(),
        "{count} bytes: wrapped too seldom"
    );
    Ok(())
}

fn a_stalled_reader_loses_what_is_told() -> Outcome {
    const LOST: u64 = 40;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 1, READ_WRITE)?;
    ports(PER_PAGE + LOST);
    traced.balance()?;
    let (size, lost) = (traced.area.size(), LOST * EXIT_BYTES);
    ensure_eq!(traced.read()?, (size + lost, lost), "produced, lost");
    ensure_eq!(
        traced.take()?.len() as u64,
        PER_PAGE,
        "exits of a full area"
    );
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
    ensure_eq!(flags, [PARTIAL], "flags of the piece after the loss");
    ports(5);
    traced.read()?;
    let chunks = traced.chunks()?;
    ensure_eq!(chunks.len(), 1, "pieces after that");
    ensure_eq!(chunks[0].flags, 0, "flags once nothing is missing");
    traced.balance()
}

/// Positions of the reader that a schedule of stalls takes, and the flags of the pieces.
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
            "round {round}: a loss after {chunks:x?}"
        );
        ensure!(
            chunks.iter().all(|c| c.flags & !(TRUNCATED | PARTIAL) == 0),
            "{chunks:x?}"
        );
        traced.balance()?;
        // Two rounds of three the reader sleeps.
        if round % 3 == 2 {
            traced.take()?;
        }
    }
    traced.event.disable(0)?;
    traced.take()?;
    traced.balance()?;
    let (_, lost) = traced.read()?;
    ensure!(truncated > 5 && partial > 5, "{truncated}, {partial}");
    ensure_eq!(
        traced.ledger.packets + lost / EXIT_BYTES,
        made,
        "exits written and lost"
    );
    Ok(())
}

fn a_lying_tail_is_a_full_area() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 1, READ_WRITE)?;
    ports(PER_PAGE);
    traced.read()?;
    let (head, size) = (areas::head(&traced.ring), traced.area.size());
    ensure_eq!(head, size, "the head of a full area");
    let mut lost = 0;
    let lies = [
        head + 1,
        head + 64,
        head + size,
        u64::MAX,
        1 << 63,
        head.wrapping_sub(size + 64),
        0,
    ];
    for lie in lies {
        traced.ring.store_release(AUX_TAIL, lie);
        ports(3);
        lost += 3 * EXIT_BYTES;
        ensure_eq!(
            traced.read()?,
            (head + lost, lost),
            "with a tail of {lie:#x}"
        );
        ensure_eq!(areas::head(&traced.ring), head, "the head then");
    }
    // The truth sets it free.
    ensure_eq!(
        traced.take()?.len() as u64,
        PER_PAGE,
        "exits before the lies"
    );
    ports(4);
    traced.balance()?;
    ensure_eq!(traced.take()?.len(), 4, "exits after them");
    ensure_eq!(traced.ledger.lost, lost, "what the sync told lost");
    // The device's own head: what a guest writes there changes nothing.
    traced.ring.store_release(crate::pages::AUX_HEAD, 1 << 40);
    ports(1);
    traced.balance()?;
    ensure_eq!(traced.take()?.len(), 1, "exits after a head was forged");
    Ok(())
}

fn a_snapshot_keeps_the_newest() -> Outcome {
    const MADE: u64 = 500;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 2, READ_ONLY)?;
    ports(MADE);
    traced.event.disable(0)?;
    let (count, lost) = traced.read()?;
    let packets = MADE + MADE.div_ceil(PER_PAGE);
    ensure_eq!((count, lost), (packets * EXIT_BYTES, 0), "produced, lost");
    ensure_eq!(areas::head(&traced.ring), count, "bytes ever written");
    let newest = traced.area.newest(&traced.ring)?;
    let begins: Vec<u64> = newest
        .iter()
        .filter(|placed| placed.packet.sync().is_some())
        .map(|placed| placed.at % PAGE as u64)
        .collect();
    ensure!(
        !begins.is_empty() && begins.iter().all(|&at| at == 0),
        "syncs at {begins:x?} of their pages"
    );
    let numbers: Vec<u64> = exits(&newest).iter().map(|exit| exit.sequence).collect();
    let kept = PER_PAGE..=2 * PER_PAGE;
    let held = numbers.len() as u64;
    ensure!(
        kept.contains(&held),
        "{held} exits in a snapshot of two pages"
    );
    ensure_eq!(
        numbers,
        (MADE - held..MADE).collect::<Vec<u64>>(),
        "numbers of the exits"
    );
    ensure_eq!(
        traced.chunks()?,
        [Chunk {
            offset: 0,
            size: count,
            flags: OVERWRITE
        }],
        "pieces told"
    );
    // It goes on from there.
    traced.event.enable(0)?;
    ports(1);
    traced.event.disable(0)?;
    let newest = traced.area.newest(&traced.ring)?;
    let last = exits(&newest).last().map(|exit| exit.sequence);
    ensure_eq!(last, Some(MADE), "the newest after another");
    Ok(())
}

fn the_start_is_told_once() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let own = (std::process::id(), cpu::thread_id());
    for area_first in [true, false] {
        let attr = io_trace(&device);
        let event = device.open_event(&attr, How::OWN)?;
        let mut ring = Pages::map(&event, 1, READ_WRITE)?;
        if !area_first {
            event.enable(0)?;
            ports(1);
            event.disable(0)?;
            ensure_eq!(ring.take()?.len(), 0, "records without an area");
        }
        let _area = Area::map(&event, &ring, 1, READ_WRITE)?;
        for _ in 0..3 {
            event.enable(0)?;
            ports(2);
            event.disable(0)?;
        }
        let records = ring.take()?;
        ensure_eq!(
            records.first().map(|record| record.kind),
            Some(areas::ITRACE_START),
            "the first record"
        );
        let told = told(&records, &attr)?;
        ensure_eq!(told.starts, [own], "whose trace started");
        ensure!(told.bytes() > 0, "no piece is told");
    }
    Ok(())
}

fn pieces_without_a_record_are_told_later() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 8, READ_WRITE)?;
    let fit = (traced.ring.size() - START_RECORD) / AUX_RECORD;
    let more = 13;
    for _ in 0..fit + more {
        ports(1);
        traced.read()?;
    }
    let chunks = traced.chunks()?;
    ensure_eq!(
        chunks.len() as u64,
        fit,
        "pieces that the ring had room for"
    );
    traced.read()?;
    let chunks = traced.chunks()?;
    ensure_eq!(chunks.len(), 1, "pieces that tell of the others");
    // A page may have begun among them.
    let exits = chunks[0].size / EXIT_BYTES;
    ensure!((more..=more + 1).contains(&exits), "{chunks:x?}");
    traced.balance()?;
    ensure_eq!(traced.take()?.len() as u64, fit + more, "exits");
    Ok(())
}

fn a_ring_without_data_has_an_area() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let event = device.open_event(&io_trace(&device), How::OWN)?;
    let ring = Pages::map(&event, 0, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 2, READ_WRITE)?;
    event.enable(0)?;
    ports(100);
    event.disable(0)?;
    let packets = area.take(&ring)?;
    Ledger::default().follow(&packets)?;
    ensure_eq!(exits(&packets).len(), 100, "exits");
    ensure_eq!(event.count()?, areas::head(&ring), "bytes");
    Ok(())
}

fn without_an_area_all_is_lost() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let attr = perf_event_attr {
        read_format: FORMAT_LOST,
        ..io_trace(&device)
    };
    let event = device.start(&attr, How::on_cpu(1))?;
    ports(10);
    let lost = 10 * EXIT_BYTES;
    ensure_eq!(
        event.read()?,
        [lost, lost],
        "produced and lost with no ring"
    );
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    ports(10);
    let lost = 2 * lost;
    ensure_eq!(event.read()?, [lost, lost], "the same with a ring");
    let mut area = Area::map(&event, &ring, 1, READ_WRITE)?;
    ports(3);
    ensure_eq!(
        event.read()?,
        [lost + 4 * 64, lost],
        "the same with an area"
    );
    let packets = area.take(&ring)?;
    let first = syncs(&packets)[0];
    ensure_eq!(
        (first.flags, first.sequence, first.lost),
        (SYNC_START | SYNC_LOSS | SYNC_PAGE, 20, lost),
        "the first sync"
    );
    ensure_eq!(exits(&packets).len(), 3, "exits in the area");
    drop(area);
    ports(5);
    let lost = lost + 5 * EXIT_BYTES;
    ensure_eq!(
        event.read()?,
        [lost + 4 * 64, lost],
        "once the area is gone"
    );
    Ok(())
}

fn a_trace_that_starts_anew_says_so() -> Outcome {
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
        ensure_eq!(first.flags, SYNC_START | page, "the sync of round {round}");
        ensure_eq!(
            (first.format, first.vcpu, first.event),
            (1, 1, id),
            "format, vCPU and event of the sync"
        );
        ensure_eq!(first.config, EXIT_IO, "the config that it tells");
        ensure_eq!(device.time_of(first.tsc), first.time, "its time by its TSC");
        ensure!(
            (before..=after).contains(&first.time),
            "a sync at {} between {before} and {after}",
            first.time
        );
        ensure_eq!(exits(&packets).len(), 2, "exits of round {round}");
    }
    // The count can begin anew; the trace does not.
    traced.event.enable(0)?;
    traced.event.reset(0)?;
    ports(2);
    let (count, lost) = traced.read()?;
    ensure_eq!((count, lost), (3 * 64, 0), "after a reset");
    ensure_eq!(traced.take()?.len(), 2, "exits after it");
    ensure_eq!(traced.ledger.packets, 8, "exits in all");
    Ok(())
}

fn records_of_an_area_tell_whose_they_are() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    cpu::pin(0)?;
    let mut attr = io_trace(&device);
    attr.sample_type = TID | TIME | ID | STREAM_ID | CPU | IDENTIFIER;
    attr.set_sample_id_all(1);
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 1, READ_WRITE)?;
    let id = event.id()?;
    let before = device.time_of(cpu::tsc());
    event.enable(0)?;
    ports(3);
    event.disable(0)?;
    let after = device.time_of(cpu::tsc());
    let told = told(&ring.take()?, &attr)?;
    ensure!(told.trailers.len() >= 2, "{told:?}");
    let mut last = before;
    for trailer in &told.trailers {
        ensure_eq!(
            trailer.pid_tid,
            Some((std::process::id(), cpu::thread_id())),
            "who"
        );
        ensure_eq!(
            [trailer.id, trailer.stream_id, trailer.identifier],
            [Some(id); 3],
            "ids"
        );
        ensure_eq!(trailer.cpu, Some(0), "the CPU");
        let time = trailer.time.unwrap_or(0);
        ensure!((last..=after).contains(&time), "{time}: {last} to {after}");
        last = time;
    }
    ensure_eq!(exits(&area.take(&ring)?).len(), 3, "exits");
    Ok(())
}

fn traces_write_into_anothers_area() -> Outcome {
    const VALUE: u64 = 3;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 4, READ_WRITE)?;
    let attr = perf_event_attr {
        read_format: FORMAT_LOST,
        ..silent(device.attr(KIND_EXIT_TRACE, EXIT_MMIO))
    };
    let other = device.open_event(&attr, How::on_cpu(1))?;
    other.output_to(traced.event.as_raw_fd())?;
    // Its own commands are exits of its own kind, so it is looked at when it is off.
    other.enable(0)?;
    for _ in 0..50 {
        ports(1);
        device.mark(VALUE)?;
    }
    other.disable(0)?;
    traced.event.disable(0)?;
    let (io, mmio) = (traced.read()?, other.read()?);
    ensure_eq!((io.1, mmio[1]), (0, 0), "lost");
    let head = areas::head(&traced.ring);
    ensure_eq!(io.0 + mmio[0], head, "bytes of both in {head}");
    let packets = traced.area.take(&traced.ring)?;
    let exits = exits(&packets);
    let of = |reason: u64| -> Vec<Exit> {
        let own = exits.iter().filter(|exit| u64::from(exit.reason) == reason);
        own.copied().collect()
    };
    for (reason, least) in [(EXIT_IO, 50), (EXIT_MMIO, 51)] {
        let numbers: Vec<u64> = of(reason).iter().map(|exit| exit.sequence).collect();
        let all: Vec<u64> = (0..numbers.len() as u64).collect();
        ensure_eq!(numbers, all, "numbers of exits of reason {reason}");
        ensure_eq!(numbers.len(), least, "exits of reason {reason}");
    }
    let mut last = 0;
    for exit in &exits {
        ensure!(exit.time > last, "exits of both out of order");
        last = exit.time;
    }
    let ids: Vec<u64> = syncs(&packets).iter().map(|sync| sync.event).collect();
    let known = [traced.event.id()?, other.id()?];
    ensure!(
        known.iter().all(|id| ids.contains(id)) && ids.iter().all(|id| known.contains(id)),
        "syncs of {ids:?}, events {known:?}"
    );
    traced.chunks()?;
    ensure_eq!(traced.told, head, "where the chunks end");
    // Back to its own, where there is none.
    other.output_to(-1)?;
    other.enable(0)?;
    device.mark(VALUE)?;
    other.disable(0)?;
    ensure_eq!(
        areas::head(&traced.ring),
        head,
        "the head it writes to no more"
    );
    let lost = other.read()?[1];
    ensure_eq!(lost, 2 * EXIT_BYTES, "lost of a mark and its own end");
    Ok(())
}

fn children_write_into_their_parents_area() -> Outcome {
    const EACH: u64 = 400;
    let device = Device::open()?;
    let mut attr = io_trace(&device);
    attr.set_inherit(1);
    attr.aux_watermark = 1024;
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 4, READ_WRITE)?;
    event.enable(0)?;
    let mut packets = Vec::new();
    let mut pieces = 0;
    let threads = thread::scope(|scope| -> Result<Vec<u32>, Box<dyn std::error::Error>> {
        let makers = [0, 1].map(|cpu| {
            scope.spawn(move || -> std::io::Result<u32> {
                cpu::pin(cpu)?;
                cpu::allow_ports()?;
                ports(EACH);
                Ok(cpu::thread_id())
            })
        });
        while !makers.iter().all(|maker| maker.is_finished()) {
            packets.extend(area.take(&ring)?);
            pieces = contiguous(&told(&ring.take()?, &attr)?.chunks, pieces)?;
        }
        makers
            .into_iter()
            .map(|maker| Ok(maker.join().map_err(|_| "a maker panicked")??))
            .collect()
    })?;
    event.disable(0)?;
    let count = event.count()?;
    packets.extend(area.take(&ring)?);
    // A piece that the full ring had no record for is told by the next reading.
    pieces = contiguous(&told(&ring.take()?, &attr)?.chunks, pieces)?;
    event.count()?;
    pieces = contiguous(&told(&ring.take()?, &attr)?.chunks, pieces)?;
    let head = areas::head(&ring);
    ensure_eq!(pieces, head, "where the chunks end");
    let mut written = 0;
    for (vcpu, tid) in (0..).zip(threads) {
        let own: Vec<Exit> = exits(&packets)
            .into_iter()
            .filter(|exit| exit.pid_tid == (std::process::id(), tid))
            .collect();
        ensure!(
            own.iter().all(|exit| exit.vcpu == vcpu),
            "thread {tid} strayed from vCPU {vcpu}"
        );
        ensure!(
            own.windows(2)
                .all(|pair| pair[0].time < pair[1].time && pair[0].sequence < pair[1].sequence),
            "exits of thread {tid} stand out of order"
        );
        ensure!(own.len() as u64 > EACH / 8, "{} exits alone", own.len());
        written += own.len() as u64;
    }
    ensure_eq!(exits(&packets).len() as u64, written, "exits of others");
    let lost = (2 * EACH - written) * EXIT_BYTES;
    ensure_eq!(
        count,
        head + lost,
        "bytes of the family, {lost} of them lost"
    );
    Ok(())
}

/// One wakeup at exactly these exits, of all that are made.
fn wakes_at(traced: &Traced, exits: &[u64]) -> Outcome {
    let mut made = 0;
    for &exit in exits {
        ports(exit - made - 1);
        ensure_eq!(traced.event.poll(NOW)?, 0, "poll after {} exits", exit - 1);
        ports(1);
        ensure_eq!(
            traced.event.poll(LONG)?,
            libc::POLLIN,
            "poll after {exit} exits"
        );
        ensure_eq!(traced.event.poll(NOW)?, 0, "a wakeup told twice");
        made = exit;
    }
    Ok(())
}

fn a_number_of_aux_bytes_wakes() -> Outcome {
    let device = Device::open()?;
    let attr = aux_watermark(io_trace(&device), 512);
    let mut traced = start(&device, attr, 4, READ_WRITE)?;
    // Seven exits behind a sync are 512 bytes; each page begins with one.
    let marks: Vec<u64> = (1..=16)
        .map(|wakeup| wakeup * 8 - (wakeup * 8_u64).div_ceil(64))
        .collect();
    wakes_at(&traced, &marks)?;
    let sizes: Vec<u64> = traced.chunks()?.iter().map(|chunk| chunk.size).collect();
    ensure_eq!(sizes, [512; 16], "bytes of the pieces");
    let made = *marks.last().ok_or("no marks")?;
    ensure_eq!(traced.take()?.len() as u64, made, "exits");
    // Round the area the multiples are the same.
    wakes_at(&traced, &marks)?;
    traced.balance()
}

fn half_an_area_wakes() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 4, READ_WRITE)?;
    wakes_at(&traced, &[2 * PER_PAGE, 4 * PER_PAGE])?;
    ensure_eq!(traced.take()?.len() as u64, 4 * PER_PAGE, "exits");
    wakes_at(&traced, &[2 * PER_PAGE])?;
    traced.balance()
}

fn the_first_loss_in_an_area_wakes() -> Outcome {
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
