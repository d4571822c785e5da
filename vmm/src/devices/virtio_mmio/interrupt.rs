//! The transport's interrupt: an edge on a line, and the status that says what for.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// Why: buffers were used.
pub(super) const USED_BUFFER: u32 = 1;
/// Why: the device needs its driver's attention.
pub(super) const CONFIG_CHANGE: u32 = 2;

/// The device's interrupt: an edge on a line, and the status that says what for.
#[derive(Debug)]
pub struct Interrupt {
    pub(super) status: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    /// An interrupt raised by writing to `line`.
    #[must_use]
    pub fn new(line: EventFd) -> Self {
        Self {
            status: AtomicU32::new(0),
            line,
        }
    }

    /// The line, to be wired.
    #[must_use]
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    /// Says that buffers were used. The status stands before the edge, so the handler sees it.
    ///
    /// # Errors
    /// The line's.
    pub fn used_buffer(&self) -> io::Result<()> {
        self.raise(USED_BUFFER)
    }

    pub(super) fn raise(&self, why: u32) -> io::Result<()> {
        self.status.fetch_or(why, Ordering::SeqCst);
        self.line.write(1)
    }
}
