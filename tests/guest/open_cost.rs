//! How long `perf_event_open(2)` takes. Programs open and close events often, and probe which events exist. In the exact
//! lab, a nanosecond is an instruction.

use std::io;
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_MAX, PERF_COUNT_SW_DUMMY, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use crate::ensure::{ensure, ensure_eq};
use crate::raw::{Device, KIND_MARK, KIND_SOFTWARE, kernels_own, refused};
use crate::{Fallible, Outcome};

const GROUP: &str = "costs";

/// An odd number of measurements, which has a median.
const TIMES: usize = 31;
const VALUE: u64 = 44;

fn attr(device: &Device, kind: u32, config: u64) -> perf_event_attr {
    perf_event_attr { type_: kind, config, ..device.attr(KIND_SOFTWARE, 0) }
}

/// Measures how long each action takes, in turn. Returns the medians.
fn medians<const N: usize>(mut actions: [&mut dyn FnMut() -> io::Result<()>; N]) -> io::Result<[Duration; N]> {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..TIMES {
        for (action, times) in actions.iter_mut().zip(&mut times) {
            let begin = Instant::now();
            action()?;
            times.push(begin.elapsed());
        }
    }
    Ok(times.map(|mut times| {
        times.sort_unstable();
        times[TIMES / 2]
    }))
}

/// Returns the perf's generic hardware events that this machine cannot count. The others can be opened.
fn absent(device: &Device) -> Fallible<Vec<u64>> {
    let mut absent = Vec::new();
    for config in 0..u64::from(PERF_COUNT_HW_MAX) {
        let errno = refused(kernels_own(&attr(device, PERF_TYPE_HARDWARE, config)));
        match errno {
            None => {}
            Some(libc::ENOENT) => absent.push(config),
            Some(errno) => return Err(format!("errno {errno} for hardware event {config}").into()),
        }
    }
    Ok(absent)
}

#[apply(guest_test)]
fn open_of_an_absent_hardware_event_is_as_quick_as_a_dummys() -> Outcome {
    let device = Device::open()?;
    let absent = absent(&device)?;
    let Some(&config) = absent.first() else {
        eprintln!("this machine counts all hardware events");
        return Ok(());
    };
    let hardware = attr(&device, PERF_TYPE_HARDWARE, config);
    let dummy = attr(&device, PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.into());
    let mut open_hardware = || match refused(kernels_own(&hardware)) {
        Some(libc::ENOENT) => Ok(()),
        other => Err(io::Error::other(format!("errno {other:?}"))),
    };
    let mut open_dummy = || kernels_own(&dummy).map(drop);
    // With and without another event of the device.
    let held = kernels_own(&device.attr(KIND_MARK, VALUE))?;
    let with = medians([&mut open_hardware, &mut open_dummy])?;
    drop(held);
    let without = medians([&mut open_hardware, &mut open_dummy])?;
    println!("absent and dummy, beside an event: {with:?}, alone: {without:?}");
    for ([absent, dummy], when) in [(with, "beside an event"), (without, "alone")] {
        ensure!(
            absent <= 3 * dummy,
            "{when}, the open of an absent event takes {absent:?}, a dummy's open and close {dummy:?}"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn open_of_an_unknown_hardware_event_is_einval() -> Outcome {
    let device = Device::open()?;
    absent(&device)?;
    let first = u64::from(PERF_COUNT_HW_MAX);
    for config in [first, first + 1, 63, 64, 1 << 16, u64::from(u32::MAX)] {
        let errno = refused(kernels_own(&attr(&device, PERF_TYPE_HARDWARE, config)));
        ensure_eq!(errno, Some(libc::EINVAL), "errno for hardware event {config}, which perf does not define");
    }
    Ok(())
}

/// With grace periods of RCU, it was 12 ms and more.
#[apply(guest_test)]
fn open_and_close_take_a_tenth_of_a_millisecond() -> Outcome {
    const MOST: Duration = Duration::from_micros(100);
    let device = Device::open()?;
    let marks = device.attr(KIND_MARK, VALUE);
    let dummy = attr(&device, PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.into());
    // The first open registers a probe.
    drop(kernels_own(&marks)?);
    let mut open_marks = || kernels_own(&marks).map(drop);
    let mut open_dummy = || kernels_own(&dummy).map(drop);
    let alone = medians([&mut open_marks, &mut open_dummy])?;
    let held = kernels_own(&marks)?;
    let beside = medians([&mut open_marks, &mut open_dummy])?;
    drop(held);
    println!("open and close of vpmu/marks/, of a dummy: alone {alone:?}, beside another {beside:?}");
    for ([marks, _], when) in [(alone, "alone"), (beside, "beside another")] {
        ensure!(marks <= MOST, "{when}, an open and close takes {marks:?}");
    }
    Ok(())
}
