//! The host's own clock event, without the device: the baseline.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use vpmu_perf::Mapping;
use vpmu_perf::bindings::{
    PERF_COUNT_SW_CPU_CLOCK, PERF_SAMPLE_IP, PERF_SAMPLE_PERIOD, PERF_SAMPLE_TIME, PERF_TYPE_SOFTWARE, perf_event_attr,
};
use vpmu_perf::call::{self, Scope, Target};

const PERIOD: u64 = 1_000_000;
/// The metadata page and the data pages.
const RING: usize = 17 * 4096;

/// A clock of the calling thread that samples every millisecond into a ring without a reader.
#[derive(Debug)]
pub(crate) struct HostClock {
    event: OwnedFd,
    _ring: Mapping,
}

impl HostClock {
    pub(crate) fn open() -> io::Result<Self> {
        let mut attr = perf_event_attr {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_CPU_CLOCK.into(),
            sample_type: u64::from(PERF_SAMPLE_IP | PERF_SAMPLE_TIME | PERF_SAMPLE_PERIOD),
            clockid: libc::CLOCK_MONOTONIC_RAW,
            ..perf_event_attr::default()
        };
        attr.set_disabled(1);
        attr.set_use_clockid(1);
        attr.set_watermark(1);
        attr.__bindgen_anon_1.sample_period = PERIOD;
        attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
        let event = call::open(&attr, Target::HERE)?;
        let ring = Mapping::new(event.as_fd(), RING)?;
        Ok(Self { event, _ring: ring })
    }

    pub(crate) fn start(&self) -> io::Result<()> {
        call::enable(&self.event, Scope::Event)
    }

    pub(crate) fn stop(&self) -> io::Result<()> {
        call::disable(&self.event, Scope::Event)
    }
}
