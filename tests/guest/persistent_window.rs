//! Where the rings of persistent events are in memory, and which events and rings a driver finds after a reload.

use std::process::{Command, Stdio};

use crate::ensure::{ensure, ensure_eq};
use crate::output_mapping::allowance;
use crate::pages::{Pages, READ_WRITE};
use crate::persisting::{Counter, backwards, fresh, listed, look, names, newest, persistent, sequence, up_to, values};
use crate::raw::{Device, FLAG_PERSISTENT, How, IN_WINDOW, OVERWRITES, refused};
use crate::{Fallible, Outcome, cpu, kernel_log, os};

const GROUP: &str = "persistent";

/// Where the guest's initramfs has the module.
const MODULE: &str = "/lib/modules/virtio_pmu.ko";

fn module(command: &str, what: &str) -> Fallible<bool> {
    let status = Command::new(command).arg(what).stderr(Stdio::null()).status()?;
    Ok(status.success())
}

fn reload() -> Outcome {
    ensure!(module("rmmod", "virtio_pmu")?, "the module was not unloaded");
    ensure!(module("insmod", MODULE)?, "the module was not loaded again");
    Ok(())
}

fn flags(device: &Device, id: u64) -> Fallible<u32> {
    Ok(device.entry(id)?.ok_or("the event is not listed")?.flags)
}

#[apply(guest_test)]
fn ring_of_a_detached_event_is_in_the_window() -> Outcome {
    let device = fresh()?;
    let attr = sequence(&device);
    let (late, late_id) = persistent(&device, &attr, 1, "late")?;
    ensure_eq!(flags(&device, late_id)?, 0, "flags before there is a ring");
    let _late = Pages::map(&late, 1, READ_WRITE)?;
    ensure_eq!(flags(&device, late_id)?, IN_WINDOW, "flags of an event mapped when persistent");
    let at_once = device.start(&attr, How::on_cpu(1).with(FLAG_PERSISTENT))?;
    let _at_once = look(&at_once, 1)?;
    ensure_eq!(
        flags(&device, at_once.id()?)?,
        IN_WINDOW | OVERWRITES,
        "flags of an event opened persistent and mapped read-only"
    );
    let early = device.start(&attr, How::on_cpu(1))?;
    let _early = Pages::map(&early, 1, READ_WRITE)?;
    let early_id = early.detach("early")?;
    ensure_eq!(flags(&device, early_id)?, 0, "flags of an event mapped before the detach");
    for event in [late, at_once, early] {
        event.attach()?;
    }
    Ok(())
}

/// VPMU-G-4-2.
#[apply(guest_test)]
fn ring_in_the_window_is_not_charged_to_the_user() -> Outcome {
    let device = fresh()?;
    let kib = |field: &str| -> Fallible<u64> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(field)).ok_or("/proc/self/status lacks a field")?;
        Ok(line.trim_end_matches("kB").trim().parse()?)
    };
    // The user may lock no pages beyond the driver's allowance. The allowance is enough for the small ring, but not for
    // the large ring.
    let small = (allowance()? / 2).next_power_of_two();
    let large = 2 * small;
    os::limit_locked(0)?;
    // At Debian's own level, CAP_PERFMON is not enough.
    os::set_paranoid(2)?;
    os::become_nobody_with(&[os::CAP_PERFMON])?;
    let attr = sequence(&device);
    let (event, _) = persistent(&device, &attr, 1, "charge")?;
    let own = device.start(&attr, How::on_cpu(1))?;
    ensure_eq!(
        refused(Pages::map(&own, large, READ_WRITE)),
        Some(libc::EPERM),
        "errno for a ring of {large} pages that is charged to the user"
    );
    let before = (kib("VmLck:")?, kib("VmPin:")?);
    let ring = Pages::map(&event, large, READ_WRITE)?;
    ensure_eq!((kib("VmLck:")?, kib("VmPin:")?), before, "locked and pinned memory of the process");
    // The ring in the window has not used any of the allowance.
    drop(Pages::map(&own, small, READ_WRITE)?);
    drop(ring);
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn full_window_refuses_a_ring() -> Outcome {
    const DATA: usize = 256;
    let device = fresh()?;
    let attr = sequence(&device);
    for round in 0..2 {
        let mut kept = Vec::new();
        let full = loop {
            let (event, _) = persistent(&device, &attr, 0, "")?;
            match Pages::map(&event, DATA, READ_WRITE) {
                Ok(ring) => kept.push((event, ring)),
                Err(error) => {
                    event.attach()?;
                    break error.raw_os_error();
                }
            }
        };
        ensure_eq!(full, Some(libc::ENOSPC), "round {round}: errno for a full window");
        // The guest may use three quarters of the window's 16 MiB; the rest is reserved for the operator.
        ensure_eq!(kept.len(), 3072 / (DATA + 1), "round {round}: rings in the window");
        for (event, _) in &kept {
            event.attach()?;
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn ended_rings_leave_no_trace() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    for round in 0..4 {
        let (event, _) = persistent(&device, &attr, 1, "trace")?;
        let mut ring = Pages::map(&event, 1, READ_WRITE)?;
        ensure_eq!((ring.head(), ring.tail()), (0, 0), "round {round}: head and tail of the new ring");
        for word in 0..512 {
            let word = ring.load(4096 + 8 * word);
            ensure_eq!(word, 0, "round {round}: a word of the new ring");
        }
        device.place(round, 100)?;
        ensure_eq!(ring.take()?.len(), 100, "round {round}: records");
        event.attach()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn reloaded_driver_finds_persistent_events() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let (forward, backward) = (sequence(&device), backwards(&device));
    let mut ids = Vec::new();
    let mut counter = Counter::new(&device)?;
    for (attr, name) in [(&forward, "taken"), (&backward, "newest")] {
        let (event, id) = persistent(&device, attr, 1, name)?;
        ids.push(id);
        match name {
            "taken" => drop(Pages::map(&event, 2, READ_WRITE)?),
            _ => drop(look(&event, 2)?),
        }
    }
    let (off, off_id) = persistent(&device, &forward, 0, "off")?;
    drop(look(&off, 1)?);
    off.disable(0)?;
    ids.push(off_id);
    drop(off);
    counter.mark(60);
    let placed = counter.placed();
    drop((counter, device));
    for round in 0..3 {
        reload()?;
        let device = Device::open()?;
        let found: Vec<u64> = device.persistent()?.iter().map(|entry| entry.id).collect();
        ensure_eq!(found, ids, "round {round}: ids listed");
        ensure_eq!(names()?, ["newest", "off", "taken"], "round {round}: names in sysfs");
        let attrs = device.persistent()?;
        ensure_eq!(
            attrs.iter().map(|entry| entry.attr().disabled()).collect::<Vec<_>>(),
            [0, 0, 1],
            "round {round}: disabled bits of the attrs"
        );
    }
    let device = Device::open()?;
    let taken = device.reopen(ids[0], 1)?;
    let newest_of = device.reopen(ids[1], 1)?;
    for (event, pages) in [(&taken, 1), (&newest_of, 4)] {
        ensure_eq!(
            refused(Pages::map(event, pages, READ_WRITE)),
            Some(libc::EINVAL),
            "errno for a size other than the ring's"
        );
    }
    let mut ring = Pages::map(&taken, 2, READ_WRITE)?;
    let overwritten = look(&newest_of, 2)?;
    ensure_eq!(values(&ring.take()?, &forward)?, up_to(placed), "values of the marks");
    ensure_eq!(newest(&overwritten, &backward)?, up_to(placed), "values of the newest marks");
    ensure_eq!((taken.count()?, newest_of.count()?), (placed, placed), "counts of both events");
    device.place(5, 3)?;
    ensure_eq!(values(&ring.take()?, &forward)?, [5; 3], "values of later marks");
    let off = device.reopen(off_id, 0)?;
    cpu::pin(0)?;
    device.place(5, 2)?;
    ensure_eq!(off.count()?, 0, "the count of the event that is off");
    off.enable(0)?;
    device.place(5, 2)?;
    ensure_eq!(off.count()?, 2, "the count of the event that is on again");
    for event in [taken, newest_of, off] {
        event.attach()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn rings_in_guest_memory_end_with_their_driver() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let early = device.start(&attr, How::on_cpu(1))?;
    drop(Pages::map(&early, 1, READ_WRITE)?);
    let early_ring = Pages::map(&early, 1, READ_WRITE)?;
    let gone = early.detach("in-memory")?;
    drop((early, early_ring));
    // An event without a ring has no pages in the guest's memory.
    let (_, counts) = persistent(&device, &device.marks(3, 1, 0), 1, "counts")?;
    device.place(3, 8)?;
    drop(device);
    reload()?;
    let device = Device::open()?;
    ensure!(listed("counts").exists() && !listed("in-memory").exists(), "sysfs lists {:?}", names()?);
    ensure_eq!(
        refused(device.reopen(gone, 1)),
        Some(libc::ENOENT),
        "reopening the event whose ring lay in the guest's memory"
    );
    let event = device.reopen(counts, 1)?;
    device.place(3, 4)?;
    ensure_eq!(event.count()?, 12, "marks of the event that still counts");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn unloading_waits_for_handles_not_for_events() -> Outcome {
    let device = fresh()?;
    let (event, id) = persistent(&device, &sequence(&device), 1, "holds")?;
    drop(device);
    ensure!(!module("rmmod", "virtio_pmu")?, "the module was unloaded with an event open");
    let ring = look(&event, 1)?;
    drop(event);
    ensure!(!module("rmmod", "virtio_pmu")?, "the module was unloaded with a ring mapped");
    drop(ring);
    reload()?;
    let device = Device::open()?;
    device.reopen(id, 1)?.attach()?;
    let log = kernel_log::log()?;
    for word in ["WARNING:", "BUG:", "Oops", "refcount"] {
        let line = log.lines().find(|line| line.contains(word));
        ensure!(line.is_none(), "the kernel says {line:?}");
    }
    Ok(())
}
