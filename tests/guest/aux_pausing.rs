//! Overflows of the events in a trace's group pause and resume the trace. The tests check each exit.

use std::os::fd::AsFd;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::aux_exits::trace;
use crate::aux_mapping::{io_trace, ports};
use crate::ensure::{ensure, ensure_eq};
use crate::packets::{Exit, SYNC_RESUME, SYNC_START, exits, syncs};
use crate::pages::READ_WRITE;
use crate::raw::{
    AUX_PAUSE, AUX_RESUME, AUX_START_PAUSED, Device, EXIT_MMIO, Event, How, refused, sampling, with_aux_action,
};
use crate::traced::Traced;
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "aux";

const RESUME: u64 = 60;
const PAUSE: u64 = 61;
const REGIONS: u64 = 1_000;

/// Opens a trace that starts paused, and two events that count marks. One of them resumes the trace, and the other
/// pauses it. All three are off until the trace is enabled.
fn regions(device: &Device, attr: perf_event_attr, how: How<'_>, pages: usize) -> Fallible<(Traced, [Event; 2])> {
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let traced = Traced::open(device, with_aux_action(attr, AUX_START_PAUSED), how, pages, READ_WRITE)?;
    let member = |value, action| {
        let mut attr = with_aux_action(device.marks(value, 1, 0), action);
        attr.set_disabled(0);
        let how = How { group: Some(traced.event.as_fd()), ..how };
        device.open_event(&attr, how)
    };
    let members = [member(RESUME, AUX_RESUME)?, member(PAUSE, AUX_PAUSE)?];
    Ok((traced, members))
}

#[apply(guest_test)]
fn trace_has_only_the_regions() -> Outcome {
    let device = Device::open()?;
    let (mut traced, _members) = regions(&device, io_trace(&device), How::on_cpu(1), 256)?;
    traced.event.enable(0)?;
    let mut inside = 0;
    ports(5);
    for region in 0..REGIONS {
        device.mark(RESUME)?;
        ports(region % 5);
        inside += region % 5;
        device.mark(PAUSE)?;
        ports(region % 3);
    }
    traced.balance()?;
    let packets = traced.area.take(&traced.ring)?;
    traced.ledger.follow(&packets)?;
    ensure_eq!(exits(&packets).len() as u64, inside, "exits in the regions");
    // If no exit occurs in a region, the region has no packets at all, not even a sync packet.
    let resumed = syncs(&packets).iter().filter(|sync| sync.flags & SYNC_RESUME != 0).count() as u64;
    ensure_eq!(resumed, REGIONS - REGIONS / 5, "syncs of regions with exits");
    let first = syncs(&packets)[0].flags;
    ensure!(first & SYNC_START != 0, "the first sync lacks SYNC_START: {first:#x}");
    // The exits of a region are between its sync packet and the next sync packet.
    let mut sizes = Vec::new();
    for placed in &packets {
        match (placed.packet.sync(), sizes.last_mut()) {
            (Some(sync), _) if sync.flags & SYNC_RESUME != 0 => sizes.push(0),
            (None, Some(size)) if placed.packet.exit().is_some() => *size += 1,
            _ => {}
        }
    }
    let expected: Vec<u64> = (0..REGIONS).map(|r| r % 5).filter(|&n| n > 0).collect();
    ensure_eq!(sizes, expected, "exits of the regions");
    Ok(())
}

#[apply(guest_test)]
fn trace_has_the_pausing_exit_and_not_the_resuming_one() -> Outcome {
    const VALUE: u64 = 62;
    let device = Device::open()?;
    let attr = trace(&device, EXIT_MMIO);
    let (mut traced, _members) = regions(&device, attr, How::on_cpu(1), 256)?;
    traced.event.enable(0)?;
    let mut inside = 0;
    for region in 0..REGIONS {
        device.mark(RESUME)?;
        device.place(VALUE, region % 4)?;
        inside += region % 4 + 1;
        device.mark(PAUSE)?;
        device.place(VALUE, 2)?;
    }
    traced.balance()?;
    let exits = traced.take()?;
    ensure_eq!(exits.len() as u64, inside, "exits");
    let marks = |exit: &&Exit| exit.qualification == exits[0].qualification;
    ensure_eq!(exits.iter().filter(marks).count() as u64, inside, "exits of marks");
    Ok(())
}

#[apply(guest_test)]
fn pause_of_a_trace_follows_its_task() -> Outcome {
    let device = Device::open()?;
    let (mut traced, _members) = regions(&device, io_trace(&device), How::OWN, 64)?;
    traced.event.enable(0)?;
    let mut expected = Vec::new();
    for region in 0..200_u32 {
        let vcpu = region / 10 % 2;
        cpu::pin(vcpu as usize)?;
        device.mark(RESUME)?;
        ports(2);
        // The trace still runs after the task has moved to the other CPU.
        cpu::pin((vcpu ^ 1) as usize)?;
        ports(1);
        device.mark(PAUSE)?;
        ports(1);
        cpu::pin(vcpu as usize)?;
        ports(1);
        expected.extend([vcpu, vcpu, vcpu ^ 1]);
    }
    traced.event.disable(0)?;
    traced.balance()?;
    let vcpus: Vec<u32> = traced.take()?.iter().map(|exit| exit.vcpu).collect();
    ensure_eq!(vcpus, expected, "vCPUs of the exits");
    Ok(())
}

#[apply(guest_test)]
fn exits_resume_and_pause_each_other() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let mut traced =
        Traced::open(&device, with_aux_action(io_trace(&device), AUX_START_PAUSED), How::on_cpu(1), 16, READ_WRITE)?;
    let how = How { group: Some(traced.event.as_fd()), ..How::on_cpu(1) };
    // Every third port write resumes the trace, and every fifth pauses it.
    let member = |period, action| {
        let attr = device.port_exits();
        let mut attr = with_aux_action(sampling(attr, period, 0), action);
        attr.set_disabled(0);
        device.open_event(&attr, how)
    };
    let members = [member(3, AUX_RESUME)?, member(5, AUX_PAUSE)?];
    traced.event.enable(0)?;
    ports(30);
    traced.event.disable(0)?;
    traced.balance()?;
    drop(members);
    let packets = traced.area.take(&traced.ring)?;
    // Computes for each write whether its exit is in the trace. An exit that pauses the trace is in it, but an exit
    // that resumes the trace is not. If an exit does both, the members act in the order in which they were opened.
    let mut running = false;
    let mut inside = 0;
    for write in 1..=30 {
        inside += u64::from(running);
        if write % 3 == 0 {
            running = true;
        }
        if write % 5 == 0 {
            running = false;
        }
    }
    ensure_eq!(exits(&packets).len() as u64, inside, "exits");
    Ok(())
}

#[apply(guest_test)]
fn paused_trace_stays_enabled() -> Outcome {
    let device = Device::open()?;
    let mut attr = io_trace(&device);
    attr.read_format = crate::raw::FORMAT_ENABLED | crate::raw::FORMAT_RUNNING;
    let attr = with_aux_action(attr, AUX_START_PAUSED);
    cpu::pin(1)?;
    let event = device.start(&attr, How::on_cpu(1))?;
    let times = || -> Fallible<(u64, u64)> {
        match event.read()?[..] {
            [0, enabled, running] => Ok((enabled, running)),
            ref words => Err(format!("a reading of {words:?}").into()),
        }
    };
    cpu::allow_ports()?;
    let before = times()?;
    ports(100);
    let after = times()?;
    ensure!(after.0 > before.0 && after.1 > before.1, "a time of the trace did not grow: {before:?}, then {after:?}");
    // Enabling does not resume.
    event.disable(0)?;
    event.enable(0)?;
    ports(10);
    times()?;
    Ok(())
}

#[apply(guest_test)]
fn pausing_is_for_members_of_a_trace() -> Outcome {
    let device = Device::open()?;
    let open = |attr: &perf_event_attr, group: Option<&Event>| {
        let how = How { group: group.map(AsFd::as_fd), ..How::OWN };
        refused(device.open_event(attr, how))
    };
    let leader = device.open_event(&io_trace(&device), How::OWN)?;
    let marks = device.open_event(&device.marks(3, 1, 0), How::OWN)?;
    for action in [AUX_PAUSE, AUX_RESUME] {
        let attr = with_aux_action(device.marks(4, 1, 0), action);
        ensure_eq!(open(&attr, Some(&leader)), None, "action {action} of a trace");
        ensure_eq!(open(&attr, Some(&marks)), Some(libc::EINVAL), "action {action} under a leader that is not a trace");
        ensure_eq!(open(&attr, None), Some(libc::EINVAL), "action {action} outside a group");
    }
    let both = with_aux_action(device.marks(4, 1, 0), AUX_PAUSE | AUX_RESUME);
    ensure_eq!(open(&both, Some(&leader)), Some(libc::EINVAL), "two actions at once");
    let start = with_aux_action(device.marks(4, 1, 0), AUX_START_PAUSED);
    ensure_eq!(open(&start, None), Some(libc::EOPNOTSUPP), "marks that start paused");
    let unknown = with_aux_action(io_trace(&device), 1 << 8);
    ensure_eq!(open(&unknown, None), Some(libc::EINVAL), "an unknown action");
    ensure_eq!(open(&with_aux_action(io_trace(&device), AUX_START_PAUSED), None), None, "a trace that starts paused");
    Ok(())
}
