//! Shared code of the tests of starters and stoppers: sets up and runs regions between two marks.

use std::io;
use std::os::fd::AsRawFd;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::cpu;
use crate::raw::{Device, ENGINE_EXIT, Event, FLAG_ON_STARTER, How};

/// Begins a region.
pub(crate) const START: u32 = 100;
/// Ends a region.
pub(crate) const STOP: u32 = 101;
/// The mark that is counted in a region.
pub(crate) const INSIDE: u32 = 102;

/// Returns an enabled event that overflows at every `period`th mark of `value`, for use as a starter or stopper.
pub(crate) fn trigger(device: &Device, value: u32, period: u64, how: How<'_>) -> io::Result<Event> {
    device.start(&device.marks(value.into(), period, 0), how.by(ENGINE_EXIT))
}

/// Returns an enabled target that waits for its starter.
pub(crate) fn waiting(device: &Device, attr: &perf_event_attr, how: How<'_>) -> io::Result<Event> {
    device.start(attr, how.with(FLAG_ON_STARTER))
}

/// A target with its starter and its stopper.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) target: Event,
    pub(crate) starter: Event,
    pub(crate) stopper: Event,
}

impl Region {
    /// Sets up a region from [`START`] to [`STOP`]. The target waits for the first [`START`].
    pub(crate) fn of(device: &Device, attr: &perf_event_attr, how: How<'_>) -> io::Result<Self> {
        Self::paced(device, attr, how, [1, 1])
    }

    /// Like [`Region::of`], but every `start`th mark [`START`] starts the region, and every `stop`th mark [`STOP`] ends
    /// it.
    pub(crate) fn paced(
        device: &Device,
        attr: &perf_event_attr,
        how: How<'_>,
        [start, stop]: [u64; 2],
    ) -> io::Result<Self> {
        let region = Self {
            target: waiting(device, attr, how)?,
            starter: trigger(device, START, start, how)?,
            stopper: trigger(device, STOP, stop, how)?,
        };
        region.starter.starts(region.target.as_raw_fd())?;
        region.stopper.stops(region.target.as_raw_fd())?;
        Ok(region)
    }
}

/// Causes `times` exits by port writes. Call [`cpu::allow_ports`] first.
pub(crate) fn ports(times: u64) {
    (0..times).for_each(|_| cpu::port_write());
}
