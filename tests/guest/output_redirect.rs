//! Output into another event's ring: which redirections are allowed, and which records the ring then contains.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use perf_event_open_sys::bindings::perf_event_attr;

use crate::Outcome;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ID, READ, TIME};
use crate::output_writer::numbers;
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Event, How, PAGE, refused, silent};

const GROUP: &str = "output";

const VALUE: u64 = 40;
const EVENTS: u64 = 8;

fn attr(device: &Device, event: u64) -> perf_event_attr {
    silent(device.marks(VALUE + event, 1, TIME | ID | READ))
}

#[apply(guest_test)]
fn events_write_into_anothers_ring() -> Outcome {
    let device = Device::open()?;
    let target = device.start(&attr(&device, 0), How::OWN)?;
    let mut ring = Pages::map(&target, 2, READ_WRITE)?;
    let mut events = vec![target];
    for number in 1..EVENTS {
        let event = device.start(&attr(&device, number), How::OWN)?;
        event.output_to(events[0].ring())?;
        events.push(event);
    }
    let ids = events.iter().map(Event::id).collect::<Result<Vec<_>, _>>()?;
    for round in 1..=20 {
        for number in 0..EVENTS {
            device.mark(VALUE + number)?;
        }
        let (samples, lost) = fields::samples(&ring.take()?, &attr(&device, 0))?;
        ensure_eq!(lost, 0, "lost records");
        let reported: Vec<u64> = samples.iter().filter_map(|s| s.id).collect();
        ensure_eq!(reported, ids, "the ids of the records, in the order of their marks");
        ensure_eq!(numbers(&samples), vec![round; EVENTS as usize], "the counts in the records");
    }
    // While the ring is full, records of all events are lost, and each loss is reported.
    for number in 0..EVENTS {
        device.place(VALUE + number, 100)?;
    }
    let mut records = ring.take()?;
    target_reads(&events)?;
    records.extend(ring.take()?);
    let (samples, lost) = fields::samples(&records, &attr(&device, 0))?;
    ensure!(lost > 0, "a full ring lost nothing");
    ensure_eq!(samples.len() as u64 + lost, 100 * EVENTS, "records written and lost");
    Ok(())
}

fn target_reads(events: &[Event]) -> std::io::Result<()> {
    events.iter().try_for_each(|event| event.count().map(drop))
}

#[apply(guest_test)]
fn redirection_is_refused_as_perf_refuses() -> Outcome {
    let device = Device::open()?;
    let target = device.open_event(&attr(&device, 0), How::OWN)?;
    let event = device.open_event(&attr(&device, 1), How::OWN)?;
    let refuse = |target: &Event| refused(event.output_to(target.ring()));
    ensure_eq!(refuse(&target), Some(libc::EINVAL), "to an event with no ring");
    let _ring = Pages::map(&target, 1, READ_WRITE)?;
    ensure_eq!(refuse(&event), Some(libc::EINVAL), "to itself");

    let of_cpu = device.open_event(&attr(&device, 2), How::on_cpu(0))?;
    let other_cpu = device.open_event(&attr(&device, 2), How::on_cpu(1))?;
    let _cpu_ring = Pages::map(&of_cpu, 1, READ_WRITE)?;
    ensure_eq!(refuse(&of_cpu), Some(libc::EINVAL), "from a task to a CPU");
    let across = refused(other_cpu.output_to(of_cpu.ring()));
    ensure_eq!(across, Some(libc::EINVAL), "from one CPU to another");

    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn()?;
    let of_child = How { pid: child.id().cast_signed(), ..How::OWN };
    let other_task = device.open_event(&attr(&device, 3), of_child)?;
    let across = refused(other_task.output_to(target.ring()));
    ensure_eq!(across, Some(libc::EINVAL), "from one task to another");
    drop(child.stdin.take());
    child.wait()?;

    let mut backward = attr(&device, 4);
    backward.set_write_backward(1);
    let backward = device.open_event(&backward, How::OWN)?;
    let mixed = refused(backward.output_to(target.ring()));
    ensure_eq!(mixed, Some(libc::EINVAL), "from backward to forward");

    let file = File::open("/dev/null")?;
    let foreign = refused(event.output_to(file.as_raw_fd()));
    ensure_eq!(foreign, Some(libc::EBADF), "to a file that is not an event");
    let closed = refused(event.output_to(1000));
    ensure_eq!(closed, Some(libc::EBADF), "to a descriptor that is closed");

    let own = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(refuse(&target), Some(libc::EINVAL), "with a ring of its own mapped");
    let back = refused(event.output_to(-1));
    ensure_eq!(back, Some(libc::EINVAL), "back, with a ring of its own mapped");
    drop(own);
    ensure_eq!(refuse(&target), None, "to another event of the task");
    Ok(())
}

#[apply(guest_test)]
fn output_returns_to_the_events_own_ring() -> Outcome {
    let device = Device::open()?;
    let target = device.start(&attr(&device, 0), How::OWN)?;
    let mut ring = Pages::map(&target, 1, READ_WRITE)?;
    let event = device.start(&attr(&device, 1), How::OWN)?;
    event.output_to(target.ring())?;
    device.place(VALUE + 1, 3)?;
    event.output_to(-1)?;
    // The event no longer has a ring, so its records are dropped.
    device.place(VALUE + 1, 4)?;
    let mut own = Pages::map(&event, 1, READ_WRITE)?;
    device.place(VALUE + 1, 5)?;
    let (there, lost) = fields::samples(&ring.take()?, &attr(&device, 0))?;
    ensure_eq!((numbers(&there), lost), (vec![1, 2, 3], 0), "counts and losses in the target's ring");
    let (here, _) = fields::samples(&own.take()?, &attr(&device, 1))?;
    ensure_eq!(numbers(&here), [8, 9, 10, 11, 12], "counts in the event's own ring");
    Ok(())
}

#[apply(guest_test)]
fn redirected_event_maps_the_targets_ring() -> Outcome {
    let device = Device::open()?;
    let target = device.start(&attr(&device, 0), How::OWN)?;
    let ring = Pages::map(&target, 2, READ_WRITE)?;
    let event = device.start(&attr(&device, 1), How::OWN)?;
    event.output_to(target.ring())?;
    let other = Pages::map_raw(&event, 2 * PAGE, READ_WRITE, libc::MAP_SHARED, 0);
    ensure_eq!(refused(other), Some(libc::EINVAL), "a size other than the target's");
    let mut view = Pages::map(&event, 2, READ_WRITE)?;
    device.mark(VALUE)?;
    device.mark(VALUE + 1)?;
    ensure_eq!(view.head(), ring.head(), "the heads of the two maps");
    ensure_eq!(view.take()?.len(), 2, "records of both events, read through the second's mapping");
    // The ring exists as long as it is mapped through at least one of the two events.
    drop(ring);
    device.mark(VALUE)?;
    device.mark(VALUE + 1)?;
    ensure_eq!(view.take()?.len(), 2, "records when the target's mapping is gone");
    Ok(())
}

#[apply(guest_test)]
fn removed_ring_removes_its_redirects() -> Outcome {
    let device = Device::open()?;
    let target = device.start(&attr(&device, 0), How::OWN)?;
    let ring = Pages::map(&target, 1, READ_WRITE)?;
    let event = device.start(&attr(&device, 1), How::OWN)?;
    event.output_to(target.ring())?;
    device.place(VALUE + 1, 3)?;
    drop(ring);
    // The event now has no ring. This is not an error.
    device.place(VALUE + 1, 3)?;
    ensure_eq!(event.count()?, 6, "the count without a ring");
    let mut own = Pages::map(&event, 1, READ_WRITE)?;
    device.place(VALUE + 1, 2)?;
    let (samples, _) = fields::samples(&own.take()?, &attr(&device, 1))?;
    ensure_eq!(numbers(&samples), [7, 8], "counts in the event's own ring");
    Ok(())
}
