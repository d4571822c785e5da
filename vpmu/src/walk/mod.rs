//! The state of a sample beyond its instruction pointer: callers, registers and the user stack, read from the
//! guest's memory while its vCPU is outside the guest.
//!
//! The guest owns all of it, page tables included, and may have written anything: each read is checked
//! against guest memory, each walk is bounded, and ends at unreadable memory. This module does not know about
//! events or rings.

mod capture;
mod frames;
mod paging;

pub(crate) use capture::{Capture, CaptureSpec, CpuContext};
pub(crate) use paging::Page;

#[cfg(test)]
mod tests;
