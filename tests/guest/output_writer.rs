//! How the device writes forward and backward rings. It must write only whole records, and must report every loss.

use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ADDR, CPU, ID, IP, LOST, PERIOD, READ, Sample, TID, TIME};
use crate::pages::{Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{Device, Event, How, refused, silent};
use crate::{Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 23;
/// With these fields, a record has 64 bytes (header included), so that exactly 64 records fit into a page.
const FIELDS: u64 = IP | TID | TIME | ADDR | CPU | PERIOD | READ;
const RECORD: u64 = 64;

/// Returns the number of the mark that caused the sample. This is the event's count, which is in the sample.
pub(crate) fn number(sample: &Sample) -> u64 {
    let read = sample.read.as_ref();
    read.and_then(|read| read.values.first()).map_or(0, |value| value.value)
}

pub(crate) fn numbers(samples: &[Sample]) -> Vec<u64> {
    samples.iter().map(number).collect()
}

/// Pins this thread to CPU 1, and starts an event of that CPU. If the event belonged to a task, a task switch would
/// schedule it out. A pending loss would then be recorded too early for the tests.
fn start(device: &Device, attr: &perf_event_attr, pages: usize, protection: i32) -> std::io::Result<(Event, Pages)> {
    cpu::pin(1)?;
    let event = device.open_event(attr, How::on_cpu(1))?;
    let ring = Pages::map(&event, pages, protection)?;
    event.enable(0)?;
    Ok((event, ring))
}

#[apply(guest_test)]
fn records_wrap_whole() -> Outcome {
    let device = Device::open()?;
    // A record has 48 bytes. The page size is not a multiple of that, so some records wrap around the end of the ring.
    let attr = silent(device.marks(VALUE, 1, TID | TIME | CPU | READ | ID));
    let (event, mut ring) = start(&device, &attr, 1, READ_WRITE)?;
    let id = event.id()?;
    let (mut seen, mut placed, mut last) = (0, 0, 0);
    for burst in (0..60).map(|round| 1 + round * 29 % 80) {
        device.place(VALUE, burst)?;
        placed += burst;
        let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
        ensure_eq!((samples.len() as u64, lost), (burst, 0), "records and losses of a burst");
        for sample in &samples {
            seen += 1;
            let time = sample.time.unwrap_or(0);
            ensure_eq!(number(sample), seen, "the count in the next record");
            ensure!(time > last, "a record at {time} ns follows one at {last} ns");
            ensure_eq!(sample.id, Some(id), "the id in a record");
            ensure_eq!(sample.pid_tid, Some((std::process::id(), cpu::thread_id())), "the task in a record");
            last = time;
        }
    }
    ensure_eq!(ring.head(), placed * 48, "bytes produced");
    ensure!(ring.head() > 20 * ring.size(), "the ring wrapped at most 20 times");
    Ok(())
}

#[apply(guest_test)]
fn losses_stand_where_they_happened() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, FIELDS));
    let (event, mut ring) = start(&device, &attr, 1, READ_WRITE)?;
    let id = event.id()?;
    let room = ring.size() / RECORD;
    device.place(VALUE, room + 33)?;
    ensure_eq!(ring.head(), ring.size(), "bytes in a full ring");
    // The reader frees room for one record. Before the new sample, the device must write a record of the earlier loss.
    // The ring does not have room for both, so the new sample is also lost.
    ring.next_record()?;
    device.place(VALUE, 1)?;
    ensure_eq!(ring.head(), ring.size(), "the head while the loss cannot be recorded");
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    let expected: Vec<u64> = (2..=room).collect();
    ensure_eq!(numbers(&samples), expected, "counts in the records before the loss");
    ensure_eq!(lost, 0, "losses recorded before there was room");
    device.place(VALUE, 3)?;
    let records = ring.take()?;
    ensure_eq!(records[0].kind, LOST, "type of the first record after the loss");
    ensure_eq!(records[0].words[..2], [id, 34], "the id of the event and the number of lost records");
    let (samples, _) = fields::samples(&records, &attr)?;
    let first = room + 34 + 1;
    ensure_eq!(numbers(&samples), [first, first + 1, first + 2], "counts in the samples after the loss");
    ensure_eq!(event.count()?, room + 37, "the count, losses included");
    Ok(())
}

#[apply(guest_test)]
fn read_returns_the_number_lost() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, FIELDS));
    let (event, mut ring) = start(&device, &attr, 1, READ_WRITE)?;
    device.place(VALUE, 64 + 5)?;
    ensure_eq!(ring.take()?.len(), 64, "records of a full ring");
    ensure_eq!(ring.take()?.len(), 0, "records before a read(2)");
    event.count()?;
    let records = ring.take()?;
    let (samples, lost) = fields::samples(&records, &attr)?;
    ensure_eq!((samples.len(), lost), (0, 5), "records and losses after a read(2)");
    event.count()?;
    ensure_eq!(ring.take()?.len(), 0, "records after another read(2)");
    Ok(())
}

#[apply(guest_test)]
fn overwriting_keeps_the_newest() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, FIELDS));
    let (event, ring) = start(&device, &attr, 2, READ_ONLY)?;
    device.place(VALUE, 500)?;
    event.disable(0)?;
    ensure_eq!(ring.head(), 500 * RECORD, "bytes produced");
    let kept = ring.size() / RECORD;
    for back in 1..=kept {
        let record = ring.record_at(ring.head() - back * RECORD)?;
        let sample = fields::sample(&record, &attr)?;
        ensure_eq!(number(&sample), 500 + 1 - back, "the count in the record {} before the newest", back - 1);
    }
    Ok(())
}

fn backward(device: &Device) -> perf_event_attr {
    let mut attr = silent(device.marks(VALUE, 1, FIELDS));
    attr.set_write_backward(1);
    attr
}

/// Returns the samples of a backward ring from the head to the oldest whole record, so the newest sample is first.
fn held(ring: &Pages, attr: &perf_event_attr) -> Result<Vec<Sample>, String> {
    let produced = ring.head().wrapping_neg();
    let (mut at, mut samples) = (0, Vec::new());
    while at + RECORD <= ring.size().min(produced) {
        let record = ring.record_at(ring.head().wrapping_add(at))?;
        samples.push(fields::sample(&record, attr)?);
        at += RECORD;
    }
    Ok(samples)
}

#[apply(guest_test)]
fn writing_backwards_puts_the_newest_first() -> Outcome {
    let device = Device::open()?;
    let attr = backward(&device);
    let (event, ring) = start(&device, &attr, 1, READ_ONLY)?;
    device.place(VALUE, 10)?;
    ensure_eq!(ring.head(), (10 * RECORD).wrapping_neg(), "the head after ten records");
    let expected: Vec<u64> = (1..=10).rev().collect();
    ensure_eq!(numbers(&held(&ring, &attr)?), expected, "counts in ten records, newest first");
    device.place(VALUE, 290)?;
    event.disable(0)?;
    ensure_eq!(ring.head(), (300 * RECORD).wrapping_neg(), "the head after 300 records");
    let expected: Vec<u64> = (300 - 63..=300).rev().collect();
    ensure_eq!(numbers(&held(&ring, &attr)?), expected, "counts in a page of records, newest first");
    Ok(())
}

#[apply(guest_test)]
fn backward_ring_can_be_frozen_and_read() -> Outcome {
    let device = Device::open()?;
    let attr = backward(&device);
    let (event, ring) = start(&device, &attr, 1, READ_ONLY)?;
    device.place(VALUE, 100)?;
    event.pause(true)?;
    let frozen = ring.head();
    device.place(VALUE, 30)?;
    ensure_eq!(ring.head(), frozen, "the head of a paused ring");
    let expected: Vec<u64> = (100 - 63..=100).rev().collect();
    ensure_eq!(numbers(&held(&ring, &attr)?), expected, "counts in the samples of a paused ring");
    event.pause(false)?;
    device.place(VALUE, 1)?;
    // The device has published the loss record and the next record together.
    let loss = ring.record_at(ring.head())?;
    ensure_eq!((loss.kind, &loss.words[..]), (LOST, &[event.id()?, 30][..]), "type, event and number of the loss");
    let newest = ring.record_at(ring.head().wrapping_add(24))?;
    let newest = fields::sample(&newest, &attr)?;
    ensure_eq!(number(&newest), 131, "the count in the newest record after the pause");
    Ok(())
}

#[apply(guest_test)]
fn paused_ring_does_not_change() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, FIELDS));
    let (event, mut ring) = start(&device, &attr, 1, READ_WRITE)?;
    device.place(VALUE, 5)?;
    event.pause(true)?;
    event.pause(true)?;
    let head = ring.head();
    device.place(VALUE, 7)?;
    event.count()?;
    ensure_eq!(ring.head(), head, "the head of a paused ring");
    event.pause(false)?;
    device.place(VALUE, 3)?;
    let records = ring.take()?;
    let losses: Vec<usize> = (0..records.len()).filter(|&at| records[at].kind == LOST).collect();
    ensure_eq!(losses, [5], "indices of the LOST records");
    let (samples, lost) = fields::samples(&records, &attr)?;
    ensure_eq!(numbers(&samples), [1, 2, 3, 4, 5, 13, 14, 15], "marks with records");
    ensure_eq!(lost, 7, "losses recorded for the pause");
    ensure_eq!(event.count()?, 15, "the count, the pause included");
    Ok(())
}

#[apply(guest_test)]
fn pausing_needs_a_ring_with_data() -> Outcome {
    let device = Device::open()?;
    let event = device.open_event(&device.marks(VALUE, 1, FIELDS), How::OWN)?;
    ensure_eq!(refused(event.pause(true)), Some(libc::EINVAL), "pausing an event without a ring");
    let page = Pages::map(&event, 0, READ_WRITE)?;
    ensure_eq!(refused(event.pause(true)), Some(libc::EINVAL), "pausing an event with the metadata page alone");
    drop(page);
    let _ring = Pages::map(&event, 1, READ_WRITE)?;
    event.pause(true)?;
    event.pause(false)?;
    Ok(())
}

#[apply(guest_test)]
fn both_vcpus_write_into_one_ring() -> Outcome {
    const EACH: u64 = 400;
    let device = Device::open()?;
    let mut attr = silent(device.marks(VALUE, 1, TID | TIME | CPU | READ));
    attr.set_inherit(1);
    // `PERF_SAMPLE_READ` is refused for an inherited event.
    attr.sample_type &= !READ;
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    event.enable(0)?;
    let (mut samples, mut lost) = (Vec::new(), 0);
    thread::scope(|scope| -> Outcome {
        let placers = [0, 1].map(|cpu| {
            let device = &device;
            scope.spawn(move || -> std::io::Result<u32> {
                cpu::pin(cpu)?;
                device.place(VALUE, EACH)?;
                Ok(cpu::thread_id())
            })
        });
        let mut take = || -> Outcome {
            let (more, reported) = fields::samples(&ring.take()?, &attr)?;
            samples.extend(more);
            lost += reported;
            Ok(())
        };
        while !placers.iter().all(|placer| placer.is_finished()) {
            take()?;
        }
        event.disable(0)?;
        take()?;
        // Now the ring has room for a pending `PERF_RECORD_LOST`, which a flush writes.
        event.flush(0)?;
        take()?;
        ensure_eq!(samples.len() as u64 + lost, 2 * EACH, "records written and lost");
        ensure!(samples.len() as u64 > EACH / 4, "only {} records", samples.len());
        for (cpu, placer) in (0..).zip(placers) {
            let tid = placer.join().map_err(|_| "a placer panicked")??;
            let own = samples.iter().filter(|s| s.pid_tid.is_some_and(|who| who.1 == tid));
            let own: Vec<&Sample> = own.collect();
            ensure!(own.iter().all(|s| s.cpu == Some(cpu)), "a record of thread {tid} names another CPU");
            ensure!(own.windows(2).all(|pair| pair[0].time < pair[1].time), "records of thread {tid} are out of order");
        }
        Ok(())
    })
}
