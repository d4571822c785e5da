//! Traces that share one area: traces of several events, of a task and its children, and of both vCPUs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas::{self, Area, contiguous, reported};
use crate::aux_mapping::{io_trace, ports};
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{EXIT_BYTES, Exit, USER, exits, syncs};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, EXIT_MMIO, EXIT_PORT, FORMAT_LOST, How, KIND_EXIT_TRACE, silent};
use crate::traced::start;
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "aux";

#[apply(guest_test)]
fn traces_write_into_anothers_area() -> Outcome {
    const VALUE: u64 = 3;
    let device = Device::open()?;
    let mut traced = start(&device, io_trace(&device), 4, READ_WRITE)?;
    // A mark exits in kernel mode, because the driver writes it for the program. A port write exits in user mode.
    let mut attr = perf_event_attr { read_format: FORMAT_LOST, ..silent(device.attr(KIND_EXIT_TRACE, EXIT_MMIO)) };
    attr.set_exclude_user(1);
    let other = device.open_event(&attr, How::on_cpu(1))?;
    other.output_to(traced.event.ring())?;
    // `other` traces MMIO exits, and commands on an event are such exits. Therefore, the test disables `other` before
    // it reads the counts.
    other.enable(0)?;
    for _ in 0..50 {
        ports(1);
        device.mark(VALUE)?;
    }
    other.disable(0)?;
    traced.event.disable(0)?;
    let (io, mmio) = (traced.read()?, other.read()?);
    ensure_eq!((io.1, mmio[1]), (0, 0), "bytes lost by the two traces");
    let head = areas::head(&traced.ring);
    ensure_eq!(io.0 + mmio[0], head, "bytes written by both traces");
    let packets = traced.area.take(&traced.ring)?;
    let exits = exits(&packets);
    let of = |reason: u64, user: u8| {
        let own = exits.iter();
        own.filter(move |exit| u64::from(exit.reason) == reason && exit.flags & USER == user)
    };
    for (reason, user, least) in [(EXIT_PORT, USER, 50), (EXIT_MMIO, 0, 51)] {
        let numbers: Vec<u64> = of(reason, user).map(|exit| exit.sequence).collect();
        let all: Vec<u64> = (0..numbers.len() as u64).collect();
        ensure_eq!(numbers, all, "numbers of exits of reason {reason}");
        ensure_eq!(numbers.len(), least, "exits of reason {reason}");
    }
    let mut last = 0;
    for exit in &exits {
        ensure!(exit.time > last, "exits of the two traces are out of order");
        last = exit.time;
    }
    let ids: Vec<u64> = syncs(&packets).iter().map(|sync| sync.event).collect();
    let known = [traced.event.id()?, other.id()?];
    ensure!(
        known.iter().all(|id| ids.contains(id)) && ids.iter().all(|id| known.contains(id)),
        "the syncs name the events {ids:?}, not {known:?}"
    );
    traced.chunks()?;
    ensure_eq!(traced.reported, head, "the end of the last chunk");
    // Ends the redirection. The event has no area of its own, so its packets are now lost.
    other.output_to(-1)?;
    other.enable(0)?;
    device.mark(VALUE)?;
    other.disable(0)?;
    ensure_eq!(areas::head(&traced.ring), head, "the head of the area after the redirection has ended");
    let lost = other.read()?[1];
    ensure_eq!(lost, 2 * EXIT_BYTES, "lost bytes: the exits of a mark and of the trace's end");
    Ok(())
}

#[apply(guest_test)]
fn children_write_into_their_parents_area() -> Outcome {
    const EACH: u64 = 400;
    /// Number of exits that a thread makes before it waits for the reader. The exits of both threads together fill less
    /// than half of the area.
    const STEP: u64 = 50;
    let device = Device::open()?;
    let mut attr = io_trace(&device);
    attr.set_inherit(1);
    attr.aux_watermark = 1024;
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut area = Area::map(&event, &ring, 4, READ_WRITE)?;
    event.enable(0)?;
    let mut packets = Vec::new();
    let mut reached = 0;
    // Number of reads of the area that have started, and number of reads that have ended.
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    let threads = thread::scope(|scope| -> Fallible<Vec<u32>> {
        let makers = [0, 1].map(|cpu| {
            let (begun, ended) = (&begun, &ended);
            scope.spawn(move || -> std::io::Result<u32> {
                cpu::pin(cpu)?;
                cpu::allow_ports()?;
                for _ in 0..EACH / STEP {
                    ports(STEP);
                    // A read that starts after these exits takes all of their packets. Waits until such a read has
                    // ended.
                    let before = begun.load(Ordering::SeqCst);
                    while ended.load(Ordering::SeqCst) <= before {
                        thread::yield_now();
                    }
                }
                Ok(cpu::thread_id())
            })
        });
        let mut read = || -> Outcome {
            packets.extend(area.take(&ring)?);
            reached = contiguous(&reported(&ring.take()?, &attr)?.chunks, reached)?;
            Ok(())
        };
        while !makers.iter().all(|maker| maker.is_finished()) {
            let number = 1 + begun.fetch_add(1, Ordering::SeqCst);
            let outcome = read();
            // After a failed read, the threads that make exits must not wait for another read.
            let last = if outcome.is_ok() { number } else { u64::MAX };
            ended.store(last, Ordering::SeqCst);
            outcome?;
        }
        makers.into_iter().map(|maker| Ok(maker.join().map_err(|_| "a maker panicked")??)).collect()
    })?;
    event.disable(0)?;
    let count = event.count()?;
    packets.extend(area.take(&ring)?);
    // The ring may have been too full for the record of a chunk. Then the next read(2) of the event writes the record.
    reached = contiguous(&reported(&ring.take()?, &attr)?.chunks, reached)?;
    event.count()?;
    reached = contiguous(&reported(&ring.take()?, &attr)?.chunks, reached)?;
    let head = areas::head(&ring);
    ensure_eq!(reached, head, "the end of the last chunk");
    for (vcpu, tid) in (0..).zip(threads) {
        let own: Vec<Exit> =
            exits(&packets).into_iter().filter(|exit| exit.pid_tid == (std::process::id(), tid)).collect();
        ensure!(own.iter().all(|exit| exit.vcpu == vcpu), "an exit of thread {tid} is not on vCPU {vcpu}");
        ensure!(
            own.windows(2).all(|pair| pair[0].time < pair[1].time && pair[0].sequence < pair[1].sequence),
            "exits of thread {tid} are out of order"
        );
        ensure_eq!(
            own.len() as u64,
            EACH,
            "exits of thread {tid}; the family wrote {count} bytes, the area's head is {head}"
        );
    }
    ensure_eq!(exits(&packets).len() as u64, 2 * EACH, "exits of the family");
    ensure_eq!(count, head, "bytes that the family wrote");
    Ok(())
}
