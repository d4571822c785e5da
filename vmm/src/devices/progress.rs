//! How far the guest has booted: a write to one port says "init is reached".

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::bus::{Caller, Device};

/// The debug port, and the clock that it is read against.
#[derive(Debug, Default)]
pub struct Progress {
    start: OnceLock<Instant>,
    init: OnceLock<Instant>,
}

impl Progress {
    /// The first vCPU is about to enter the guest.
    pub fn started(&self) {
        self.start.get_or_init(Instant::now);
    }

    /// From the first entry into the guest until init said that it runs.
    #[must_use]
    pub fn boot_time(&self) -> Option<Duration> {
        Some(self.init.get()?.duration_since(*self.start.get()?))
    }
}

impl Device for Progress {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8], _caller: &mut Caller<'_>) {
        self.init.get_or_init(Instant::now);
    }
}
