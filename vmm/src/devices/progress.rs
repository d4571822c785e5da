//! Boot progress: init writes to the debug port to report that it is running.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::bus::{Caller, Device};

/// The debug port. It also remembers the time of the first guest entry.
#[derive(Debug, Default)]
pub struct Progress {
    start: OnceLock<Instant>,
    init: OnceLock<Instant>,
}

impl Progress {
    /// Records that the first vCPU is about to enter the guest.
    pub fn started(&self) {
        self.start.get_or_init(Instant::now);
    }

    /// Time from the first guest entry until init reported that it is running.
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
