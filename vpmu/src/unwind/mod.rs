//! Captures the guest state for a sample: callers, registers and the user stack. Reads the guest's memory while the
//! vCPU is outside the guest.
//!
//! The guest owns all of this memory, including the page tables, and may have written anything to it. Each read
//! is therefore checked against guest memory. Each walk is bounded, and ends at unreadable memory. This module
//! does not depend on events or rings.

mod capture;
mod frames;
mod orc;
mod paging;

pub(crate) use capture::{CaptureSpec, CpuContext, SampleCapture};

#[cfg(test)]
mod tests;
