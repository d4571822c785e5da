//! What a sample tells beyond its instruction: callers, registers, the user's stack, as they
//! stand in the guest's memory while its vCPU stands still.
//!
//! The guest owns all of it, page tables included, and may have filled it with anything: each
//! read is checked against guest memory, each walk is bounded, and what cannot be read ends it.
//! Knows nothing of events or rings.

mod capture;
mod frames;
mod paging;

pub(crate) use capture::{Capture, CaptureSpec, CpuContext};
pub(crate) use paging::Page;

#[cfg(test)]
mod tests;
