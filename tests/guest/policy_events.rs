//! The operator's lists of events. A denied event cannot be opened through `/dev/vpmu` or perf core. All other events
//! can be opened through both.

use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::programs::{text, vperf};
use crate::raw::{
    Device, EXIT_MMIO, EXIT_USER, FLAG_PERSISTENT, How, KIND_EXIT_TRACE, KIND_EXITS, KIND_MARK, KIND_SOFTWARE,
    KIND_TSC, SW_CPU_CLOCK, refused, sampling,
};
use crate::{Fallible, Outcome, cpu, kernel_log, os};

const GROUP: &str = "policy-allowed";

const HARDWARE: u64 = 0;
const HW_CACHE: u64 = 3;
const RAW: u64 = 4;
const INSTRUCTIONS: u64 = 1;

/// Events that one machine's list allows and another machine's list denies. Each entry has vperf's name for the event,
/// its kind, its config, and whether it can be sampled.
const MEMBERS: [(&str, u64, u64, bool); 3] =
    [("tsc", KIND_TSC, 0, false), ("exits-mmio", KIND_EXITS, EXIT_MMIO, true), ("mark=7", KIND_MARK, 7, true)];
/// Events of the same kinds that neither list names.
const OTHERS: [(&str, u64, u64, bool); 2] =
    [("exits-user", KIND_EXITS, EXIT_USER, true), ("mark=8", KIND_MARK, 8, true)];

/// Checks every way to open the event: `/dev/vpmu`, perf core and vperf. Each must fail with `errno`, or succeed if
/// `errno` is `None`.
fn every_interface(device: &Device, event: (&str, u64, u64, bool), errno: Option<i32>) -> Outcome {
    let (name, kind, config, samples) = event;
    let attr = device.attr(kind, config);
    let mut opened = vec![
        ("/dev/vpmu", refused(device.open_event(&attr, How::OWN))),
        ("/dev/vpmu, on a CPU", refused(device.open_event(&attr, How::on_cpu(0)))),
        ("perf core", refused(os::open_perf_attr(&attr))),
    ];
    // Attaches the event, so that it ends when its descriptor is closed.
    let persistent = device.open_event(&attr, How::on_cpu(0).with(FLAG_PERSISTENT));
    if let Ok(event) = &persistent {
        event.attach()?;
    }
    opened.push(("/dev/vpmu, persistent", refused(persistent)));
    if samples {
        let sampling = sampling(attr, 100, 0);
        opened.push(("/dev/vpmu, sampling", refused(device.open_event(&sampling, How::OWN))));
        opened.push(("perf core, sampling", refused(os::open_perf_attr(&sampling))));
    }
    for (interface, answer) in opened {
        ensure_eq!(answer, errno, "errno for {name} by {interface}");
    }
    let output = vperf(&["stat", "-e", name, "--", "true"])?;
    ensure_eq!(
        output.status.success(),
        errno.is_none(),
        "whether vperf stat -e {name} succeeded: {}",
        text(&output.stderr)
    );
    Ok(())
}

/// Like [`every_interface`], but for a trace of exits. Opens the trace only through `/dev/vpmu`, because in perf core,
/// traces belong to another PMU.
fn trace(device: &Device, config: u64, errno: Option<i32>) -> Outcome {
    let attr = device.attr(KIND_EXIT_TRACE, config);
    for how in [How::OWN, How::on_cpu(0)] {
        let answer = refused(device.open_event(&attr, how));
        ensure_eq!(answer, errno, "errno for a trace of exits {config}");
    }
    Ok(())
}

/// Checks hardware events, opened both with perf's own types and with their kinds in our PMU.
fn hardware_is_absent(device: &Device) -> Outcome {
    for (kind, config) in [(HARDWARE, INSTRUCTIONS), (HW_CACHE, 0), (RAW, 0x11)] {
        let attr = device.attr(kind, config);
        let answers = [
            refused(device.open_event(&attr, How::OWN)),
            refused(os::open_perf_attr(&attr)),
            refused(os::open_perf_event(u32::try_from(kind)?, config)),
        ];
        ensure_eq!(answers, [Some(libc::ENOENT); 3], "errnos for kind {kind}");
    }
    Ok(())
}

fn names() -> Fallible<Vec<String>> {
    let vpmu = Vpmu::open()?;
    let entries = vpmu.catalogue().entries().iter();
    Ok(entries.map(|entry| entry.name.clone()).collect())
}

#[apply(guest_test)]
fn allowed_events_are_all_that_there_is() -> Outcome {
    ensure_eq!(names()?, ["tsc", "exits-mmio", "mark", "exit-trace-mmio"], "names in the catalogue");
    let mut listed: Vec<String> = std::fs::read_dir("/sys/bus/event_source/devices/vpmu/events")?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<_>>()?;
    listed.retain(|name| !name.contains('.'));
    listed.sort();
    ensure_eq!(listed, ["exit-trace-mmio", "exits-mmio", "mark", "tsc"], "events of vpmu in sysfs");
    Ok(())
}

#[apply(guest_test)]
fn allowed_events_are_open_through_every_interface_and_others_through_none() -> Outcome {
    let device = Device::open()?;
    for event in MEMBERS {
        every_interface(&device, event, None)?;
    }
    let clock = ("cpu-clock", KIND_SOFTWARE, SW_CPU_CLOCK, false);
    for event in OTHERS.into_iter().chain([clock]) {
        every_interface(&device, event, Some(libc::ENOENT))?;
    }
    trace(&device, EXIT_MMIO, None)?;
    trace(&device, EXIT_USER, Some(libc::ENOENT))?;
    hardware_is_absent(&device)
}

#[apply(guest_test)]
fn allowed_mark_counts_and_others_are_unknown() -> Outcome {
    cpu::pin(0)?;
    let device = Device::open()?;
    let event = device.start(&device.attr(KIND_MARK, 7), How::OWN)?;
    device.place(7, 5)?;
    device.place(8, 9)?;
    ensure_eq!(event.count()?, 5, "marks of the value that is allowed");
    let every = device.attr(KIND_MARK, crate::raw::MARK_ANY);
    let answer = refused(device.open_event(&every, How::OWN));
    ensure_eq!(answer, Some(libc::ENOENT), "errno for marks of every value");
    Ok(())
}

#[apply(guest_test)]
#[group = "policy-denied"]
fn denied_events_are_not_listed() -> Outcome {
    let names = names()?;
    let has = |name: &str| names.iter().any(|listed| listed == name);
    for name in [
        "tsc",
        "exits-mmio",
        "exit-trace-mmio",
        "cpu-clock",
        "task-clock",
        "page-faults",
        "context-switches",
        "cpu-migrations",
        "sample-trace-cpu-clock",
    ] {
        ensure!(!has(name), "{name} is listed: {names:?}");
    }
    for name in ["exits", "exits-user", "halts", "guest-time", "marks", "mark", "exit-trace-user", "sample-trace-exits"]
    {
        ensure!(has(name), "{name} is not listed: {names:?}");
    }
    Ok(())
}

#[apply(guest_test)]
#[group = "policy-denied"]
fn denied_events_are_refused_through_every_interface_and_others_are_not() -> Outcome {
    let device = Device::open()?;
    let clock = ("cpu-clock", KIND_SOFTWARE, SW_CPU_CLOCK, true);
    for event in MEMBERS.into_iter().chain([clock]) {
        every_interface(&device, event, Some(libc::ENOENT))?;
    }
    for event in OTHERS {
        every_interface(&device, event, None)?;
    }
    trace(&device, EXIT_MMIO, Some(libc::ENOENT))?;
    trace(&device, EXIT_USER, None)
}

/// The operator's list applies only to the guest's events, not to the operator's own events.
#[apply(guest_test)]
#[group = "policy-denied"]
fn denied_event_of_the_operators_own_is_read() -> Outcome {
    cpu::pin(0)?;
    let device = Device::open()?;
    let listed = device.persistent()?;
    let kept = listed.iter().find(|entry| entry.name() == "kept");
    let kept = device.reopen(kept.ok_or("the event is not listed")?.id, 0)?;
    let before = kept.count()?;
    // Each mark is a store to the doorbell.
    device.place(8, 50)?;
    let counted = kept.count()? - before;
    // The driver's notifications are stores, too.
    ensure!(counted >= 50, "{counted} exits of 50 marks");
    let own = device.open_event(&device.attr(KIND_EXITS, EXIT_MMIO), How::on_cpu(0));
    ensure_eq!(refused(own), Some(libc::ENOENT), "errno for an event of the guest's own");
    Ok(())
}

#[apply(guest_test)]
#[group = "policy-denied"]
fn kernel_log_reports_a_denied_kind() -> Outcome {
    let log = kernel_log::log()?;
    let says = "no software events: the host refused them: disabled by its operator";
    let lines = log.lines().filter(|line| line.contains(says)).count();
    ensure_eq!(lines, 1, "lines of the log");
    Ok(())
}
