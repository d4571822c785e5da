//! The driver does not offer events that the host's operator has disabled, and logs the reason in the guest's kernel
//! log. A pinned event that cannot get a counter enters the error state.

use std::hint::black_box;
use std::time::Duration;

use perf_event_open_sys::bindings::perf_event_attr;
use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::IP;
use crate::os::{Arrived, POLL_ERR};
use crate::output_wakeup::sleepers_are_woken;
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, FORMAT_ENABLED, FORMAT_RUNNING, How, KIND_SOFTWARE, SW_TASK_CLOCK, refused, sampling, silent,
};
use crate::{Outcome, cpu, kernel_log, os};

const GROUP: &str = "refusals";

/// Longer than any wait takes that ends.
const LONG: Duration = Duration::from_secs(30);
const HARDWARE: u64 = vpmu_abi::KIND_HARDWARE as u64;
const HW_CACHE: u64 = vpmu_abi::KIND_HW_CACHE as u64;

#[apply(guest_test)]
fn hardware_that_the_operator_keeps_is_not_offered() -> Outcome {
    let vpmu = Vpmu::open()?;
    for entry in vpmu.catalogue().entries() {
        let kind = u64::from(entry.kind);
        ensure!(![HARDWARE, HW_CACHE].contains(&kind), "a hardware event is offered: {entry:?}");
        ensure!(entry.name != "sample-trace-cycles", "a trace paced by a hardware event is offered: {entry:?}");
    }
    let device = Device::open()?;
    for kind in [HARDWARE, HW_CACHE] {
        let attr = device.attr(kind, 0);
        ensure_eq!(
            refused(device.open_event(&attr, How::OWN)),
            Some(libc::ENOENT),
            "errno for an event of kind {kind}"
        );
    }
    // perf core's own types of these events are refused, too.
    for kind in [0, 3] {
        let opened = os::open_perf_event(kind, 0);
        ensure_eq!(refused(opened), Some(libc::ENOENT), "errno for perf's type {kind}");
    }
    let clock = device.attr(KIND_SOFTWARE, SW_TASK_CLOCK);
    ensure_eq!(refused(device.open_event(&clock, How::OWN)), None, "errno for a clock");
    Ok(())
}

#[apply(guest_test)]
fn kernel_log_reports_once_that_the_operator_keeps_hardware() -> Outcome {
    let log = kernel_log::log()?;
    let lines = log.lines().filter(|line| line.contains("ask the operator"));
    let lines: Vec<&str> = lines.collect();
    ensure_eq!(lines.len(), 1, "lines of the log: {lines:?}");
    let says = "no hardware events: the host refused them: disabled by its operator";
    ensure!(lines[0].contains(says), "the log's line does not give the reason: {}", lines[0]);
    Ok(())
}

/// The operator allows only one sampling counter per vCPU to run at a time.
#[apply(guest_test)]
fn pinned_event_without_a_counter_is_in_error() -> Outcome {
    cpu::pin(1)?;
    let device = Device::open()?;
    let clock = silent(sampling(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK), 1_000_000, IP));
    let mut pinned = perf_event_attr { read_format: FORMAT_ENABLED | FORMAT_RUNNING, ..clock };
    pinned.set_pinned(1);
    let spin = || {
        for round in 0..1_000_000_u64 {
            black_box(round);
        }
    };

    // A pinned event counts when no other event uses the counter.
    let alone = device.start(&pinned, How::OWN)?;
    spin();
    let words = alone.read()?;
    ensure!(words.len() == 3 && words[0] > 0, "a pinned event that has the counter counts nothing: {words:?}");
    drop(alone);

    // perf core schedules pinned events first, so only another pinned event can have the counter already.
    let holder = device.start(&pinned, How::OWN)?;
    spin();
    ensure!(holder.count()? > 0, "the event that has the counter does not count");
    let ours = device.open_event(&pinned, How::OWN)?;
    let _ring = Pages::map(&ours, 1, READ_WRITE)?;
    os::block_signal()?;
    os::signal_from(ours.ring_fd())?;
    let error = libc::POLLHUP | libc::POLLERR;
    sleepers_are_woken(vec![ours.duplicate()?], error, || {
        ours.enable(0)?;
        spin();
        Ok(())
    })?;
    let expected = Arrived { code: POLL_ERR, fd: ours.ring() };
    ensure_eq!(os::wait_signal(LONG)?, Some(expected), "the signal of an event that enters the error state");
    ensure_eq!(ours.read()?.get(2), Some(&0), "time running of an event in the error state");
    ensure!(holder.count()? > 0, "the event that has the counter no longer counts");
    Ok(())
}
