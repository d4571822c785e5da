//! `PERF_RECORD_SAMPLE`: every field that an event can request, in perf's order.

use super::Reading;

/// Registers in perf's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regs<'a> {
    /// `PERF_SAMPLE_REGS_ABI_*`.
    pub(crate) abi: u64,
    /// The registers in the event's mask, in ascending order of perf's numbers; missing ones become
    /// zero, extra ones are dropped.
    pub(crate) values: &'a [u64],
}

/// One overflow, in guest terms. Fields that its event does not request are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sample<'a> {
    /// One of `MODE_*`: the guest's mode.
    pub(crate) misc: u16,
    /// Zero if the hypervisor does not provide it.
    pub(crate) ip: u64,
    /// A mark's value, else zero: other events have no data address.
    pub(crate) addr: u64,
    pub(crate) period: u64,
    pub(crate) read: Reading<'a>,
    /// Callers, with perf's values that mark a mode.
    pub(crate) chain: &'a [u64],
    /// `None` if unknown, or for a task without user mode.
    pub(crate) regs_user: Option<Regs<'a>>,
    /// The readable part of the user stack, from the stack pointer on, up to the size that the event
    /// requests; `None` if the user registers are unknown, or for a task without user mode.
    pub(crate) stack: Option<&'a [u8]>,
    /// `None` if the hypervisor does not provide them.
    pub(crate) regs_intr: Option<Regs<'a>>,
}
