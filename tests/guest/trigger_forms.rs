//! Combinations of starters and stoppers: chains, one starter for many targets, one event that both starts and stops a
//! target, regions bounded by every Nth mark, and regions of traces.

use std::os::fd::{AsFd, AsRawFd};

use perf_event_open_sys::bindings::perf_event_attr;

use crate::aux_mapping::io_trace;
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{SYNC_RESUME, syncs};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, Doorbell, ENGINE_EXIT, Event, FLAG_ON_STARTER, How, KIND_MARK, KIND_SOFTWARE, SW_CPU_CLOCK, sampling,
    silent,
};
use crate::traced::Traced;
use crate::triggers::{INSIDE, Region, START, STOP, ports, trigger, waiting};
use crate::{Outcome, cpu, fields};

const GROUP: &str = "trigger";

fn marks_inside(device: &Device) -> perf_event_attr {
    device.attr(KIND_MARK, INSIDE.into())
}

#[apply(guest_test)]
fn chain_of_starters_starts_link_by_link() -> Outcome {
    const LINKS: u32 = 8;
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    // The event that overflows at mark n starts the event that overflows at mark n + 1.
    let first = trigger(&device, START, 1, here)?;
    let mut chain = vec![first];
    for link in 1..LINKS {
        let value = (START + 10 + link).into();
        let waits = waiting(&device, &device.marks(value, 1, 0), here.by(ENGINE_EXIT))?;
        chain[chain.len() - 1].starts(waits.as_raw_fd())?;
        chain.push(waits);
    }
    let target = waiting(&device, &marks_inside(&device), here)?;
    chain[chain.len() - 1].starts(target.as_raw_fd())?;
    // In reverse order the marks start nothing.
    for link in (1..LINKS).rev() {
        bell.mark(START + 10 + link);
    }
    bell.mark(INSIDE);
    ensure_eq!(target.count()?, 0, "marks before the chain was begun");
    bell.mark(START);
    for link in 1..LINKS {
        ensure_eq!(target.count()?, 0, "marks before link {link}");
        bell.mark(START + 10 + link);
        bell.mark(INSIDE);
    }
    ensure_eq!(target.count()?, 1, "marks after the last link");
    let counts: Vec<u64> = chain.iter().skip(1).map(Event::count).collect::<Result<_, _>>()?;
    ensure_eq!(counts, vec![1; counts.len()], "counts of the chain's events");
    Ok(())
}

#[apply(guest_test)]
fn one_event_starts_many() -> Outcome {
    const TARGETS: u32 = 32;
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    let starter = trigger(&device, START, 1, here)?;
    let stopper = trigger(&device, STOP, 1, here)?;
    let targets = (0..TARGETS)
        .map(|number| -> std::io::Result<Event> {
            let attr = device.attr(KIND_MARK, (INSIDE + number % 4).into());
            let target = waiting(&device, &attr, here)?;
            starter.starts(target.as_raw_fd())?;
            stopper.stops(target.as_raw_fd())?;
            Ok(target)
        })
        .collect::<Result<Vec<_>, _>>()?;
    for _ in 0..100 {
        for value in 0..4 {
            bell.mark(INSIDE + value);
        }
        bell.mark(START);
        for value in 0..4 {
            bell.place(INSIDE + value, u64::from(value));
        }
        bell.mark(STOP);
    }
    for (number, target) in (0..TARGETS).zip(&targets) {
        let expected = u64::from(100 * (number % 4));
        ensure_eq!(target.count()?, expected, "marks of target {number}");
    }
    Ok(())
}

#[apply(guest_test)]
fn one_event_is_a_switch() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    for period in [1, 4] {
        let switch = trigger(&device, START, period, here)?;
        let target = waiting(&device, &marks_inside(&device), here)?;
        switch.starts(target.as_raw_fd())?;
        switch.stops(target.as_raw_fd())?;
        let mut expected = 0;
        for number in 0..800 {
            bell.mark(START);
            let overflows = (number + 1) / period;
            bell.place(INSIDE, 2);
            if overflows % 2 == 1 {
                expected += 2;
            }
        }
        ensure_eq!(target.count()?, expected, "marks counted, switched by every {period}th mark");
    }
    Ok(())
}

#[apply(guest_test)]
fn every_nth_region() -> Outcome {
    const NTH: u64 = 10;
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let region = Region::paced(&device, &marks_inside(&device), How::on_cpu(1), [NTH, 1])?;
    let mut expected = 0;
    for number in 1..=1_000 {
        bell.mark(START);
        bell.place(INSIDE, number % 5);
        bell.mark(STOP);
        if number % NTH == 0 {
            expected += number % 5;
        }
        bell.mark(INSIDE);
    }
    ensure_eq!(region.target.count()?, expected, "marks in every tenth region");
    // Now the reverse: every start mark starts the target, but only every tenth stop mark stops it.
    let region = Region::paced(&device, &marks_inside(&device), How::on_cpu(1), [1, NTH])?;
    for _ in 0..100 {
        bell.mark(START);
        bell.mark(INSIDE);
        bell.mark(STOP);
        bell.mark(INSIDE);
    }
    // The 100 rounds have two marks each. All of them count, except the 10 marks that directly follow every tenth stop:
    // 200 - 10.
    ensure_eq!(region.target.count()?, 190, "marks up to every tenth stop");
    Ok(())
}

#[apply(guest_test)]
fn exits_bound_regions() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let here = How::OWN;
    let target = waiting(&device, &marks_inside(&device), here)?;
    // Every third port write starts the target, and every fifth stops it.
    let exits = |period| -> std::io::Result<Event> {
        let attr = sampling(device.port_exits(), period, 0);
        device.start(&attr, here.by(ENGINE_EXIT))
    };
    let (starter, stopper) = (exits(3)?, exits(5)?);
    starter.starts(target.as_raw_fd())?;
    stopper.stops(target.as_raw_fd())?;
    let (mut running, mut expected) = (false, 0);
    for number in 1..=3_000_u64 {
        ports(1);
        // If both events overflow at an exit, the event that was opened later acts last.
        if number % 3 == 0 {
            running = true;
        }
        if number % 5 == 0 {
            running = false;
        }
        // Places marks by a system call, because a store to the doorbell may itself be an exit that the starter and the
        // stopper count.
        device.mark(INSIDE.into())?;
        expected += u64::from(running);
    }
    ensure_eq!(target.count()?, expected, "marks between starting and stopping exits");
    Ok(())
}

#[apply(guest_test)]
fn starter_stops_at_its_limit() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let region = Region::of(&device, &marks_inside(&device), How::on_cpu(1))?;
    region.starter.disable(0)?;
    region.starter.refresh(3)?;
    for _ in 0..10 {
        bell.mark(START);
        bell.mark(INSIDE);
        bell.mark(STOP);
        bell.mark(INSIDE);
    }
    ensure_eq!(region.target.count()?, 3, "regions of a starter with a limit");
    Ok(())
}

#[apply(guest_test)]
fn members_of_a_group_are_targets_by_themselves() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    let leader = device.start(&marks_inside(&device), here)?;
    let region = Region::of(&device, &marks_inside(&device), here.led_by(leader.as_fd()))?;
    for _ in 0..20 {
        bell.mark(INSIDE);
        bell.mark(START);
        bell.place(INSIDE, 2);
        bell.mark(STOP);
    }
    ensure_eq!(
        (leader.count()?, region.target.count()?),
        (60, 40),
        "counts of the leader and of the target, its member"
    );
    // While the leader is disabled, no member of the group is active. So the starter does not start the target, and the
    // target does not count.
    leader.disable(0)?;
    bell.mark(START);
    bell.place(INSIDE, 5);
    leader.enable(0)?;
    bell.place(INSIDE, 5);
    ensure_eq!(region.target.count()?, 40, "marks while the leader was off");
    bell.mark(START);
    bell.place(INSIDE, 5);
    ensure_eq!(region.target.count()?, 45, "marks in the next region");
    Ok(())
}

#[apply(guest_test)]
fn regions_of_a_trace() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let bell = Doorbell::map(&device)?;
    // The starter and the stopper are linked to the trace, but are not members of its group.
    let how = How::on_cpu(1);
    let mut traced = Traced::open(&device, io_trace(&device), how.with(FLAG_ON_STARTER), 64, READ_WRITE)?;
    let starter = trigger(&device, START, 1, how)?;
    let stopper = trigger(&device, STOP, 1, how)?;
    starter.starts(traced.event.as_raw_fd())?;
    stopper.stops(traced.event.as_raw_fd())?;
    traced.event.enable(0)?;
    ports(4);
    let mut inside = 0;
    for number in 0..1_000 {
        bell.mark(START);
        ports(number % 4);
        inside += number % 4 + cpu::STORE_EXITS;
        bell.mark(STOP);
        ports(2);
    }
    traced.balance()?;
    let packets = traced.area.take(&traced.ring)?;
    traced.ledger.follow(&packets)?;
    let exits = crate::packets::exits(&packets).len();
    ensure_eq!(exits as u64, inside, "exits in the regions");
    let resumed = syncs(&packets).iter().filter(|sync| sync.flags & SYNC_RESUME != 0).count();
    ensure!(resumed > 0, "no sync reports a pause");
    Ok(())
}

#[apply(guest_test)]
fn clock_is_started_and_stopped() -> Outcome {
    const PERIOD: u64 = 1_000_000;
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
    let attr = silent(sampling(clock, PERIOD, fields::TIME));
    let region = Region::of(&device, &attr, here)?;
    let mut ring = Pages::map(&region.target, 16, READ_WRITE)?;
    let spin = |millis: u64| {
        let until = cpu::tsc() + u64::from(device.info.tsc_khz) * millis;
        while cpu::tsc() < until {}
    };
    let mut regions = Vec::new();
    for _ in 0..10 {
        spin(10);
        let before = device.time_of(cpu::tsc());
        bell.mark(START);
        spin(30);
        bell.mark(STOP);
        regions.push(before..=device.time_of(cpu::tsc()));
    }
    let stopped = region.target.count()?;
    spin(10);
    ensure_eq!(region.target.count()?, stopped, "the count of a stopped clock");
    ensure!(stopped > 0, "the clock never ran");
    let (samples, _) = fields::samples(&ring.take()?, &attr)?;
    ensure!(!samples.is_empty(), "the clock counted {stopped} ns without a sample");
    for time in samples.iter().filter_map(|sample| sample.time) {
        ensure!(regions.iter().any(|region| region.contains(&time)), "a sample at {time}, in none of {regions:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn starter_writes_its_own_records() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let bell = Doorbell::map(&device)?;
    let here = How::on_cpu(1);
    let target = waiting(&device, &marks_inside(&device), here)?;
    let attr = silent(device.marks(START.into(), 2, fields::ADDR | fields::TIME));
    let starter = device.start(&attr, here)?;
    let mut ring = Pages::map(&starter, 1, READ_WRITE)?;
    starter.starts(target.as_raw_fd())?;
    bell.place(START, 9);
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (4, 0), "the starter's samples and losses");
    // The starter starts its target even if the starter cannot write records: here, the starter's ring is paused.
    let stopper = trigger(&device, STOP, 1, here)?;
    stopper.stops(target.as_raw_fd())?;
    bell.mark(STOP);
    starter.pause(true)?;
    bell.place(START, 2);
    bell.place(INSIDE, 5);
    ensure_eq!(target.count()?, 5, "marks after a start without a record");
    Ok(())
}
