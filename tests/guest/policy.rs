//! The operator's policy for hardware events, on a host that may have no hardware events.

use perf_event_open_sys::bindings::perf_event_attr;
use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::raw::{Device, How, KIND_SOFTWARE, SW_TASK_CLOCK, kernels_own, refused};
use crate::{Outcome, os};

const GROUP: &str = "policy";

const KIND_RAW: u32 = 4;
const COUNT_VCPU: u32 = 1;
/// The raw event that the operator allows.
const RAW: u64 = 0x11;

#[apply(guest_test)]
fn count_mode_of_the_operator_is_reported() -> Outcome {
    let device = Device::open()?;
    ensure_eq!(device.info.count_mode, COUNT_VCPU, "the count mode that the driver reports");
    let vpmu = Vpmu::open()?;
    ensure!(vpmu.info().host_work_counted, "the library reports that host work is not counted");
    for entry in vpmu.catalogue().entries() {
        let of_hardware = entry.kind == vpmu_abi::KIND_HARDWARE;
        ensure!(!(of_hardware && entry.guest_only), "a hardware event is listed as counting only the guest: {entry:?}");
    }
    Ok(())
}

/// `exclude_hv` has no effect. It is accepted even for an event that cannot exclude anything.
#[apply(guest_test)]
fn event_excluding_the_hypervisor_counts_through_both_interfaces() -> Outcome {
    let device = Device::open()?;
    let excluding = |mut attr: perf_event_attr| {
        attr.set_exclude_hv(1);
        attr
    };
    let clock = excluding(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK));
    let marks = excluding(device.marks(5, 1, 0));
    let own = |attr: &perf_event_attr| device.open_event(attr, How::OWN);
    let interfaces =
        [("/dev/vpmu", own(&marks)?, own(&clock)?), ("perf core", kernels_own(&marks)?, kernels_own(&clock)?)];
    for (interface, marks, clock) in interfaces {
        marks.enable(0)?;
        clock.enable(0)?;
        device.place(5, 3)?;
        ensure_eq!(marks.count()?, 3, "marks through {interface}");
        ensure!(clock.count()? > 0, "the clock counted nothing through {interface}");
    }
    Ok(())
}

/// If the host can open the raw event, the catalogue lists it. Otherwise, opening it in the guest fails with `ENOENT`.
#[apply(guest_test)]
fn raw_event_of_the_operators_list_is_the_hosts_to_count() -> Outcome {
    let vpmu = Vpmu::open()?;
    let entries = vpmu.catalogue().entries().iter();
    let raw: Vec<&str> = entries.filter(|entry| entry.kind == KIND_RAW).map(|entry| entry.name.as_str()).collect();
    let errno = match raw[..] {
        [] => Some(libc::ENOENT),
        ["raw-0x11"] => None,
        ref others => return Err(format!("raw events {others:?}").into()),
    };
    let device = Device::open()?;
    let attr = device.attr(KIND_RAW.into(), RAW);
    ensure_eq!(refused(device.open_event(&attr, How::OWN)), errno, "errno of /dev/vpmu");
    ensure_eq!(refused(os::open_perf_attr(&attr)), errno, "errno of perf core's PMU vpmu");
    let raw = os::open_perf_event(KIND_RAW, RAW);
    ensure_eq!(refused(raw), errno, "errno for perf's own type");
    Ok(())
}

/// The refusal is the same as for an event that the host does not have.
#[apply(guest_test)]
fn raw_event_beyond_the_operators_list_is_refused() -> Outcome {
    let device = Device::open()?;
    let attr = device.attr(KIND_RAW.into(), RAW + 1);
    let refusal = Some(libc::ENOENT);
    ensure_eq!(refused(device.open_event(&attr, How::OWN)), refusal, "errno of /dev/vpmu");
    ensure_eq!(refused(os::open_perf_attr(&attr)), refusal, "errno of perf core's PMU vpmu");
    let raw = os::open_perf_event(KIND_RAW, RAW + 1);
    ensure_eq!(refused(raw), refusal, "errno for perf's own type");
    Ok(())
}
