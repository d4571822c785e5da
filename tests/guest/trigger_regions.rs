//! Checks that targets count exactly the marks and exits in their regions. User code marks the bounds of thousands of
//! regions.

use std::os::fd::AsRawFd;
use std::thread;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ADDR, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::persisting::values;
use crate::raw::{Device, Doorbell, How, KIND_MARK, KIND_TSC, MARK_ANY, silent};
use crate::triggers::{INSIDE, Region, START, STOP, ports, trigger, waiting};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "trigger";

const REGIONS: u64 = 10_000;

#[apply(guest_test)]
fn regions_hold_exactly_their_marks() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let inside = device.attr(KIND_MARK, INSIDE.into());
    let region = Region::of(&device, &inside, How::on_cpu(1))?;
    let mut expected = 0;
    for number in 0..REGIONS {
        bell.mark(START);
        bell.place(INSIDE, number % 4);
        expected += number % 4;
        bell.mark(STOP);
        bell.place(INSIDE, number % 3);
    }
    ensure_eq!(region.target.count()?, expected, "marks in the regions");
    ensure_eq!((region.starter.count()?, region.stopper.count()?), (REGIONS, REGIONS), "regions entered and left");
    Ok(())
}

#[apply(guest_test)]
fn regions_hold_exactly_their_exits() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let bell = Doorbell::map(&device)?;
    let inside = device.port_exits();
    let region = Region::of(&device, &inside, How::OWN)?;
    let mut expected = 0;
    for number in 0..REGIONS {
        bell.mark(START);
        ports(number % 4);
        bell.mark(STOP);
        expected += number % 4 + cpu::STORE_EXITS;
        ports(number % 3);
    }
    ensure_eq!(region.target.count()?, expected, "port writes in the regions");
    Ok(())
}

#[apply(guest_test)]
fn both_vcpus_have_regions_of_their_own() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    // On vCPU 0, all events are per-task events. On vCPU 1, they are per-CPU events.
    let run = |vcpu: u64| -> Result<(u64, u64), String> {
        let body = || -> Fallible<(u64, u64)> {
            cpu::pin(usize::try_from(vcpu)?)?;
            let how = match vcpu {
                0 => How::OWN,
                _ => How::on_cpu(1),
            };
            let inside = device.attr(KIND_MARK, INSIDE.into());
            let region = Region::of(&device, &inside, how)?;
            let mut expected = 0;
            for number in 0..REGIONS / 2 {
                bell.place(INSIDE, (number + vcpu) % 2);
                bell.mark(START);
                bell.place(INSIDE, number % (3 + vcpu));
                expected += number % (3 + vcpu);
                bell.mark(STOP);
            }
            Ok((region.target.count()?, expected))
        };
        body().map_err(|error| error.to_string())
    };
    thread::scope(|scope| {
        let runs = [0, 1].map(|vcpu| scope.spawn(move || run(vcpu)));
        for (vcpu, run) in runs.into_iter().enumerate() {
            let (counted, expected) = run.join().map_err(|_| "a vCPU's thread panicked")??;
            ensure_eq!(counted, expected, "marks in the regions of vCPU {vcpu}");
        }
        Ok(())
    })
}

#[apply(guest_test)]
fn region_follows_its_task() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let bell = Doorbell::map(&device)?;
    let region = Region::of(&device, &device.port_exits(), How::OWN)?;
    let mut expected = 0;
    for number in 0..160 {
        cpu::pin(number % 2)?;
        bell.mark(START);
        ports(2);
        // The task stays in its region on the other CPU.
        cpu::pin((number + 1) % 2)?;
        ports(3);
        bell.mark(STOP);
        expected += 5 + cpu::STORE_EXITS;
        ports(1);
        cpu::pin(number % 2)?;
        ports(1);
    }
    ensure_eq!(region.target.count()?, expected, "port writes in the regions");
    Ok(())
}

#[apply(guest_test)]
fn region_excludes_its_starting_mark_and_includes_its_stopping_mark() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let every = device.attr(KIND_MARK, MARK_ANY);
    let region = Region::of(&device, &every, How::on_cpu(1))?;
    let mut expected = 0;
    for number in 0..1_000 {
        bell.mark(START);
        bell.place(INSIDE, number % 5);
        bell.mark(STOP);
        expected += number % 5 + 1;
        bell.mark(INSIDE);
    }
    ensure_eq!(region.target.count()?, expected, "marks of every value");
    // Starting a running target changes nothing, nor does stopping a stopped target.
    bell.place(START, 3);
    bell.place(INSIDE, 2);
    bell.place(STOP, 3);
    ensure_eq!(region.target.count()?, expected + 2 + 2 + 1, "marks after starts and stops in a row");
    Ok(())
}

#[apply(guest_test)]
fn event_waiting_for_its_starter_counts_nothing() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let attr = perf_event_open_sys::bindings::perf_event_attr {
        read_format: crate::raw::FORMAT_ENABLED | crate::raw::FORMAT_RUNNING,
        ..device.attr(KIND_MARK, INSIDE.into())
    };
    let target = waiting(&device, &attr, How::on_cpu(1))?;
    device.place(INSIDE.into(), 10)?;
    let waited = target.read()?;
    ensure_eq!(waited[0], 0, "marks that the waiting target counted");
    // While the target waits for its starter, it is paused but active, so its enabled time advances.
    ensure!(waited[1] > 0, "the waiting target has no enabled time: {waited:?}");
    // Once the target has a starter, it waits until the starter overflows.
    let starter = trigger(&device, START, 100, How::on_cpu(1))?;
    starter.starts(target.as_raw_fd())?;
    device.place(START.into(), 99)?;
    device.place(INSIDE.into(), 10)?;
    ensure_eq!(target.count()?, 0, "marks before the hundredth start");
    device.place(START.into(), 1)?;
    device.place(INSIDE.into(), 10)?;
    ensure_eq!(target.count()?, 10, "marks after the hundredth start");
    // Without `FLAG_ON_STARTER`, a target counts as soon as it is enabled.
    let plain = device.start(&attr, How::on_cpu(1))?;
    let other = trigger(&device, START, 1, How::on_cpu(1))?;
    other.starts(plain.as_raw_fd())?;
    device.place(INSIDE.into(), 10)?;
    ensure_eq!(plain.count()?, 10, "marks of a target that did not wait");
    Ok(())
}

#[apply(guest_test)]
fn samples_are_of_regions_alone() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let attr = silent(device.any_marks(1, TIME | ADDR));
    let region = Region::of(&device, &attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&region.target, 64, READ_WRITE)?;
    let mut expected = Vec::new();
    for number in 0..1_000_u32 {
        bell.mark(START);
        for value in 0..number % 5 {
            bell.mark(1_000 + number + value);
            expected.push(u64::from(1_000 + number + value));
        }
        bell.mark(STOP);
        // The target overflows at each mark in the region, and also at the mark that stops it. The sample of this last
        // overflow is still written.
        expected.push(STOP.into());
        bell.mark(3_000 + number);
        bell.mark(INSIDE);
    }
    ensure_eq!(values(&ring.take()?, &attr)?, expected, "marks with samples");
    Ok(())
}

#[apply(guest_test)]
fn period_continues_in_the_next_region() -> Outcome {
    const PERIOD: u64 = 7;
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let attr = silent(device.marks(INSIDE.into(), PERIOD, TIME));
    let region = Region::of(&device, &attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&region.target, 8, READ_WRITE)?;
    let (mut inside, mut records) = (0, 0);
    for number in 0..500 {
        bell.mark(START);
        bell.place(INSIDE, number % 6);
        bell.mark(STOP);
        bell.place(INSIDE, 5);
        inside += number % 6;
        let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
        ensure_eq!(lost, 0, "lost samples");
        records += samples.len() as u64;
        ensure_eq!(records, inside / PERIOD, "records of {inside} marks inside");
    }
    Ok(())
}

#[apply(guest_test)]
fn page_does_not_change_outside_a_region() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let bell = Doorbell::map(&device)?;
    // The amounts that a mark, a port write and a stop add to the count.
    for (attr, [of_mark, of_port, of_stop]) in [
        (device.attr(KIND_MARK, INSIDE.into()), [1, 0, 0]),
        (device.port_exits(), [cpu::STORE_EXITS, 1, cpu::STORE_EXITS]),
    ] {
        let region = Region::of(&device, &attr, How::on_cpu(1))?;
        let page = Pages::map(&region.target, 0, READ_WRITE)?;
        let mut expected = 0;
        for number in 0..200 {
            bell.mark(START);
            bell.place(INSIDE, number % 4);
            ports(number % 4);
            expected += number % 4 * (of_mark + of_port);
            ensure_eq!(page.snapshot().count, expected, "the page's count in a region");
            bell.mark(STOP);
            expected += of_stop;
            bell.place(INSIDE, 3);
            ports(3);
            ensure_eq!(page.snapshot().count, expected, "the page's count after a region");
        }
        ensure_eq!(region.target.count()?, expected, "the count that read() returns");
    }
    Ok(())
}

#[apply(guest_test)]
fn ticks_stand_still_outside() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let region = Region::of(&device, &device.attr(KIND_TSC, 0), How::on_cpu(1))?;
    ensure_eq!(region.target.count()?, 0, "ticks before any region");
    let (mut least, mut most) = (0, 0);
    for _ in 0..50 {
        let before = cpu::tsc();
        bell.mark(START);
        let inside = cpu::tsc();
        while cpu::tsc() < inside + 20_000 {}
        least += cpu::tsc() - inside;
        bell.mark(STOP);
        most += cpu::tsc() - before;
        while cpu::tsc() < inside + 200_000 {}
    }
    let counted = region.target.count()?;
    ensure!(
        (least..=most).contains(&counted),
        "{counted} ticks counted; the regions took between {least} and {most} ticks"
    );
    ensure_eq!(region.target.count()?, counted, "the count read again outside a region");
    Ok(())
}
