//! One host event on one vCPU's thread.

use std::fs::File;
use std::io::{self, Read};

use libc::c_int;
use perf_event_open_sys::bindings::{
    PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, perf_event_attr,
};

use super::ring::HostRing;
use super::sys;
use crate::abi::KIND_SOFTWARE;
use crate::source::{Counter, Overflows, Reading, Request};

#[derive(Debug)]
struct PerfCounter {
    event: File,
    /// Of an event that samples.
    ring: Option<HostRing>,
}

/// Opens a stopped host event; one that samples sends `signal` to `thread` at each overflow.
pub(super) fn open(what: &Request, thread: i32, signal: c_int) -> io::Result<Box<dyn Counter>> {
    let event = sys::open(&attr(what), thread)?;
    let ring = if what.period > 0 {
        let ring = HostRing::new(&event)?;
        sys::announce(&event, thread, signal)?;
        Some(ring)
    } else {
        None
    };
    Ok(Box::new(PerfCounter { event, ring }))
}

/// The host's event for `what`: never the host's own work, where the host can leave it out.
pub(super) fn attr(what: &Request) -> perf_event_attr {
    let mut attr = perf_event_attr {
        // A kernel that knows a shorter struct accepts zeros beyond it.
        size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(0),
        type_: what.kind,
        config: what.config,
        read_format: u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED)
            | u64::from(PERF_FORMAT_TOTAL_TIME_RUNNING),
        ..perf_event_attr::default()
    };
    attr.set_disabled(1);
    if what.kind != KIND_SOFTWARE {
        attr.set_exclude_host(1);
        attr.set_exclude_user(what.exclude_user.into());
        attr.set_exclude_kernel(what.exclude_kernel.into());
    }
    if what.period > 0 {
        attr.__bindgen_anon_1.sample_period = what.period;
        attr.__bindgen_anon_2.wakeup_events = 1;
    }
    attr
}

impl Counter for PerfCounter {
    fn start(&mut self) -> io::Result<()> {
        sys::enable(&self.event)
    }

    fn stop(&mut self) -> io::Result<()> {
        sys::disable(&self.event)
    }

    fn read(&mut self) -> io::Result<Reading> {
        let mut words = [0; 24];
        self.event.read_exact(&mut words)?;
        let (words, _) = words.as_chunks::<8>();
        Ok(Reading {
            value: u64::from_ne_bytes(words[0]),
            enabled: u64::from_ne_bytes(words[1]),
            running: u64::from_ne_bytes(words[2]),
        })
    }

    fn set_period(&mut self, period: u64) -> io::Result<()> {
        sys::set_period(&self.event, period)
    }

    fn drain(&mut self) -> Overflows {
        self.ring
            .as_ref()
            .map_or_else(Overflows::default, HostRing::drain)
    }
}
