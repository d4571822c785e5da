//! The clock behind an emulated counter. Whatever event the guest selects, the counter counts nanoseconds of the host's
//! CPU clock on the vCPU's thread. When this clock overflows, the host sends the thread a signal.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use vmm::signal::kick_signal;
use vpmu_perf::Mapping;
use vpmu_perf::bindings::{self, perf_event_attr};
use vpmu_perf::call::{self, Scope, Target};
use vpmu_perf::page::DATA_HEAD;

const PAGES: usize = 2;
const PAGE: usize = 4096;
/// A period of 26 days, which in practice never ends.
const NEVER: u64 = 1 << 51;

/// A clock of the calling thread, initially stopped.
#[derive(Debug)]
pub(crate) struct Clock {
    event: File,
    /// The event's ring. Its head advances at each overflow. This code reads only the head, not the records.
    ring: Mapping,
    seen: u64,
}

impl Clock {
    pub(crate) fn open() -> io::Result<Self> {
        let mut attr = perf_event_attr {
            type_: bindings::PERF_TYPE_SOFTWARE,
            config: bindings::PERF_COUNT_SW_CPU_CLOCK.into(),
            ..Default::default()
        };
        attr.__bindgen_anon_1.sample_period = NEVER;
        attr.__bindgen_anon_2.wakeup_events = 1;
        attr.set_disabled(1);
        let event = File::from(call::open(&attr, Target::HERE)?);
        // Its overflows kick the thread's vCPU.
        call::announce(&event, call::thread(), kick_signal())?;
        let ring = Mapping::new_read_only(event.as_fd(), PAGES * PAGE)?;
        Ok(Self { event, ring, seen: 0 })
    }

    /// Nanoseconds that the clock has run.
    pub(crate) fn read(&mut self) -> io::Result<u64> {
        let mut count = [0; 8];
        self.event.read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Starts the clock, which then overflows once after `period`.
    pub(crate) fn start(&mut self, period: u64) -> io::Result<()> {
        self.disarm()?;
        self.rearm(period)?;
        call::enable(&self.event, Scope::Event)
    }

    pub(crate) fn stop(&mut self) -> io::Result<()> {
        call::disable(&self.event, Scope::Event)
    }

    /// Sets the next overflow to `period` from now.
    fn rearm(&mut self, period: u64) -> io::Result<()> {
        call::set_period(&self.event, period.clamp(1, NEVER))
    }

    /// Returns whether the clock has overflowed since it was last started or disarmed.
    pub(crate) fn overflowed(&self) -> bool {
        self.head() != self.seen
    }

    /// Prevents overflows until the next start.
    pub(crate) fn disarm(&mut self) -> io::Result<()> {
        self.rearm(NEVER)?;
        self.seen = self.head();
        Ok(())
    }

    fn head(&self) -> u64 {
        self.ring.load(DATA_HEAD, Ordering::Acquire)
    }
}
