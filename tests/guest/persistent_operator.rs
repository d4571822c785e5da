//! The operator's persistent events: they exist before the driver is loaded. The guest may read and flush them, but not
//! change them.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::Duration;

use crate::arch::EXITS_AT_ONCE;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, Sample};
use crate::pages::{Pages, READ, READ_WRITE};
use crate::persisting::{Counter, listed, names};
use crate::raw::{
    Device, Doorbell, ENGINE_EXIT, Event, FORMAT_ENABLED, How, IN_WINDOW, OPERATORS, OVERWRITES, PAGE, refused,
};
use crate::{Fallible, Outcome, cpu, os};
use perf_event_open_sys::bindings::perf_event_attr;

const GROUP: &str = "persistent-operator";

/// The events that the VMM starts.
const NAMES: [&str; 3] = ["boot", "flight-0", "flight-1"];

/// An event of the operator that this program has opened, and whose ring it has mapped. The event's entry in the list
/// provides the id and the CPU for the open, and the number of pages for the mapping.
struct OperatorEvent {
    event: Event,
    id: u64,
    ring: Pages,
    attr: perf_event_attr,
}

fn find(device: &Device, name: &str) -> Fallible<OperatorEvent> {
    let entry = device
        .persistent()?
        .into_iter()
        .find(|entry| entry.name() == name)
        .ok_or_else(|| format!("no {name} is listed"))?;
    let attr = perf_event_attr { read_format: FORMAT_ENABLED, ..device.reopening(entry.id) };
    let event = device.open_event(&attr, How::on_cpu(entry.cpu.cast_signed()))?;
    let pages = entry.data_pages().ok_or("the event has no ring")?;
    let ring = Pages::map(&event, pages, READ)?;
    Ok(OperatorEvent { event, id: entry.id, ring, attr: entry.attr() })
}

impl OperatorEvent {
    /// Returns the samples in the event's ring, oldest first. The event must not write records during the call.
    fn samples(&self) -> Result<Vec<Sample>, String> {
        let head = self.ring.head();
        let mut samples = Vec::new();
        let mut position = head;
        while position != 0 {
            // The oldest record is partly overwritten.
            let Ok(record) = self.ring.record_at(position) else {
                break;
            };
            let end = position.wrapping_add(8 + 8 * record.words.len() as u64);
            if end.wrapping_sub(head) > self.ring.size() {
                break;
            }
            if record.kind == fields::SAMPLE {
                samples.push(fields::sample(&record, &self.attr)?);
            }
            position = end;
        }
        samples.reverse();
        Ok(samples)
    }

    fn values(&self) -> Result<Vec<u64>, String> {
        Ok(self.samples()?.iter().filter_map(|s| s.addr).collect())
    }
}

#[apply(guest_test)]
fn operators_events_are_found_by_name() -> Outcome {
    let device = Device::open()?;
    ensure_eq!(names()?, NAMES, "names in sysfs");
    for name in NAMES {
        let found = find(&device, name)?;
        let entry = device.entry(found.id)?.ok_or("the event is not listed")?;
        ensure_eq!(
            (entry.flags, entry.engine),
            (OPERATORS | IN_WINDOW | OVERWRITES, ENGINE_EXIT),
            "flags and engine of {name}"
        );
        ensure_eq!(
            (found.attr.write_backward(), found.attr.disabled()),
            (1, 0),
            "write_backward and disabled of {name}"
        );
        let reported = std::fs::read_to_string(listed(name))?;
        ensure_eq!(reported.trim_end(), format!("id={:#x}", found.id), "the contents of {name}");
    }
    Ok(())
}

#[apply(guest_test)]
fn operators_events_hold_records_from_before_the_driver() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let boot = find(&device, "boot")?;
    let samples = boot.samples()?;
    let first = samples.first().ok_or("the event has no records of the boot")?;
    // Samples that were taken before the driver was loaded have no task, so their pid and tid are zero.
    let before = samples.iter().filter(|sample| sample.pid_tid == Some((0, 0))).count();
    ensure!(before > 0, "no record from before the driver was loaded, the first is {first:?}");
    ensure!(samples.is_sorted_by_key(|sample| sample.time), "the times of the samples go back");
    ensure!(boot.event.count()? >= samples.len() as u64, "the count is less than the number of records");
    // The event has been enabled since the guest's first instruction. The check tolerates a difference of one second.
    let uptime = std::fs::read_to_string("/proc/uptime")?;
    let uptime: f64 = uptime.split(' ').next().unwrap_or("").parse()?;
    let uptime = Duration::from_secs_f64(uptime);
    let reading = boot.event.read()?;
    let enabled = reading.get(1).ok_or("no time enabled")?;
    let enabled = Duration::from_nanos(*enabled) + Duration::from_secs(1);
    ensure!(enabled > uptime, "enabled for {enabled:?} (one second added), kernel up for {uptime:?}");
    let now = device.time_of(cpu::tsc());
    let age = now - first.time.ok_or("no time")?;
    let age = Duration::from_nanos(age) + Duration::from_secs(1);
    ensure!(
        age > uptime || !EXITS_AT_ONCE,
        "the first record is {age:?} old (one second added), kernel up for {uptime:?}"
    );
    Ok(())
}

#[apply(guest_test)]
fn change_of_operators_event_is_refused() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let found = find(&device, "flight-1")?;
    let event = &found.event;
    let before = event.count()?;
    let own = device.start(&device.any_marks(1, 0), How::on_cpu(1))?;
    let fd = event.as_raw_fd();
    let mut backward = device.any_marks(1, 0);
    backward.set_write_backward(1);
    let redirected = device.open_event(&backward, How::on_cpu(1))?;
    let calls = [
        ("enabling", refused(event.enable(0))),
        ("disabling", refused(event.disable(0))),
        ("a reset", refused(event.reset(0))),
        ("a period", refused(event.period(7))),
        ("a limit", refused(event.refresh(1))),
        ("pausing its ring", refused(event.pause(true))),
        ("redirecting its records", refused(event.output_to(own.ring()))),
        ("redirecting another event's records to its ring", refused(redirected.output_to(event.ring()))),
        ("a starter for it", refused(own.starts(fd))),
        ("a stopper for it", refused(own.stops(fd))),
        ("making it a starter", refused(event.starts(own.as_raw_fd()))),
        ("another name", refused(event.detach("mine"))),
        ("attaching it", refused(event.attach())),
    ];
    for (what, errno) in calls {
        ensure_eq!(errno, Some(libc::EPERM), "errno for {what}");
    }
    let pages = usize::try_from(found.ring.size() / 4096)?;
    let writable = refused(Pages::map(event, pages, READ_WRITE));
    ensure_eq!(writable, Some(libc::EPERM), "errno for a writable mapping");
    ensure_eq!(names()?, NAMES, "names after the refused calls");
    device.place(3, 10)?;
    ensure_eq!(event.count()?, before + 10, "the event's count after ten marks");
    Ok(())
}

#[apply(guest_test)]
fn each_vcpu_has_its_own() -> Outcome {
    let device = Device::open()?;
    let flights = [find(&device, "flight-0")?, find(&device, "flight-1")?];
    let before = [flights[0].event.count()?, flights[1].event.count()?];
    let bell = Doorbell::map(&device)?;
    for (vcpu, value) in [(0, 1_000), (1, 2_000)] {
        cpu::pin(vcpu)?;
        (0..50).for_each(|more| bell.mark(value + more));
    }
    for (vcpu, value) in [(0, 1_000), (1, 2_000)] {
        let flight = &flights[vcpu];
        ensure_eq!(flight.event.count()?, before[vcpu] + 50, "marks of vCPU {vcpu}");
        let reported = flight.values()?;
        let expected: Vec<u64> = (value..value + 50).collect();
        ensure!(reported.ends_with(&expected), "the newest records of vCPU {vcpu} are not its 50 marks: {reported:?}");
    }
    let own = std::process::id();
    let newest = flights[1].samples()?;
    let newest = newest.last().ok_or("no record")?;
    ensure_eq!(newest.pid_tid, Some((own, cpu::thread_id())), "the task of the last mark on vCPU 1");
    Ok(())
}

#[apply(guest_test)]
fn reader_is_woken_by_a_flush() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let found = find(&device, "flight-1")?;
    found.event.flush(0)?;
    found.event.poll(0)?;
    device.place(3, 2)?;
    found.event.flush(0)?;
    ensure_eq!(found.event.poll(10_000)?, libc::POLLIN, "poll after a flush of the event");
    device.place(3, 2)?;
    device.flush()?;
    ensure_eq!(found.event.poll(10_000)?, libc::POLLIN, "poll after a flush of all events");
    Ok(())
}

#[apply(guest_test)]
fn reloaded_driver_finds_the_operators_events() -> Outcome {
    cpu::pin(1)?;
    let device = Device::open()?;
    let (ids, count) = {
        let found = find(&device, "flight-1")?;
        let mut counter = Counter::new(&device)?;
        counter.mark(30);
        let ids: Vec<u64> = device.persistent()?.iter().map(|e| e.id).collect();
        (ids, found.event.count()?)
    };
    drop(device);
    for command in [["rmmod", "virtio_pmu"], ["insmod", "/lib/modules/virtio_pmu.ko"]] {
        let status = Command::new(command[0]).arg(command[1]).status()?;
        ensure!(status.success(), "{command:?}: {status}");
    }
    let device = Device::open()?;
    let again: Vec<u64> = device.persistent()?.iter().map(|e| e.id).collect();
    ensure_eq!(again, ids, "ids listed after the reload");
    ensure_eq!(names()?, NAMES, "names in sysfs after the reload");
    let found = find(&device, "flight-1")?;
    ensure_eq!(found.event.count()?, count, "the event's count after the reload");
    let reported = found.values()?;
    ensure!(
        reported.ends_with(&(1..=30).collect::<Vec<u64>>()),
        "the newest records are not the 30 marks: {reported:?}"
    );
    Ok(())
}

/// mprotect(2) fails both for the whole map and for its first page alone.
#[apply(guest_test)]
fn operators_ring_made_writable_is_refused() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let found = find(&device, "flight-1")?;
    let bytes = PAGE + usize::try_from(found.ring.size())?;
    for bytes in [PAGE, bytes] {
        let made = refused(os::make_writable(found.ring.address(), bytes));
        ensure_eq!(made, Some(libc::EACCES), "making {bytes} bytes of the ring writable");
    }
    let before = found.event.count()?;
    device.place(9, 4)?;
    ensure_eq!(found.event.count()?, before + 4, "the event's count after four marks");
    Ok(())
}
