//! The records that a ring has about its AUX area: one when a trace starts, and one for each chunk.

use crate::areas::{self, Area, reported};
use crate::aux_mapping::{io_trace, ports};
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{CPU, ID, IDENTIFIER, STREAM_ID, TID, TIME};
use crate::packets::{EXIT_BYTES, Ledger, exits};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, How};
use crate::traced::start;
use crate::{Outcome, cpu};

const GROUP: &str = "aux";

/// Size of a `PERF_RECORD_AUX` in bytes, without the trailer.
const AUX_RECORD: u64 = 32;

/// Size of a `PERF_RECORD_ITRACE_START` in bytes, without the trailer.
const START_RECORD: u64 = 16;

#[apply(guest_test)]
fn start_is_recorded_once() -> Outcome {
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
        ensure_eq!(records.first().map(|record| record.kind), Some(areas::ITRACE_START), "the first record");
        let reported = reported(&records, &attr)?;
        ensure_eq!(reported.starts, [own], "the tasks whose traces started");
        ensure!(reported.bytes() > 0, "no chunk is recorded");
    }
    Ok(())
}

#[apply(guest_test)]
fn pieces_without_a_record_are_recorded_later() -> Outcome {
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 8, READ_WRITE)?;
    let fit = (traced.ring.size() - START_RECORD) / AUX_RECORD;
    let more = 13;
    for _ in 0..fit + more {
        ports(1);
        traced.read()?;
    }
    let chunks = traced.chunks()?;
    ensure_eq!(chunks.len() as u64, fit, "chunks whose records fit into the ring");
    traced.read()?;
    let chunks = traced.chunks()?;
    ensure_eq!(chunks.len(), 1, "records of all later chunks together");
    // If a page of the area begins within the chunk, the chunk also contains a sync packet. It has the same size as an
    // exit's packet.
    let exits = chunks[0].size / EXIT_BYTES;
    ensure!((more..=more + 1).contains(&exits), "the last chunk has {exits} packets: {chunks:x?}");
    traced.balance()?;
    ensure_eq!(traced.take()?.len() as u64, fit + more, "exits");
    Ok(())
}

#[apply(guest_test)]
fn ring_without_data_has_an_area() -> Outcome {
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
    ensure_eq!(event.count()?, areas::head(&ring), "bytes counted");
    Ok(())
}

#[apply(guest_test)]
fn records_of_an_area_name_their_task() -> Outcome {
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
    let reported = reported(&ring.take()?, &attr)?;
    ensure!(reported.trailers.len() >= 2, "fewer than two records: {reported:?}");
    let mut last = before;
    for trailer in &reported.trailers {
        ensure_eq!(trailer.pid_tid, Some((std::process::id(), cpu::thread_id())), "process and thread in a trailer");
        ensure_eq!([trailer.id, trailer.stream_id, trailer.identifier], [Some(id); 3], "the ids in a trailer");
        ensure_eq!(trailer.cpu, Some(0), "the CPU in a trailer");
        let time = trailer.time.unwrap_or(0);
        ensure!((last..=after).contains(&time), "the time {time} is not between {last} and {after}");
        last = time;
    }
    ensure_eq!(exits(&area.take(&ring)?).len(), 3, "exits");
    Ok(())
}
