//! `PERF_RECORD_SAMPLE`: every field that an event can ask for, in perf's order.

use super::Reading;

/// Registers as perf shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regs<'a> {
    /// `PERF_SAMPLE_REGS_ABI_*`.
    pub(crate) abi: u64,
    /// Those of the event's mask, in ascending order of perf's numbers; fewer are taken as zero,
    /// more are left out.
    pub(crate) values: &'a [u64],
}

/// One overflow, in guest terms. What its event does not ask for is not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sample<'a> {
    /// One of `MISC_*`: the mode that the guest was in.
    pub(crate) misc: u16,
    /// Zero where the hypervisor would not tell.
    pub(crate) ip: u64,
    /// Of a mark its value, else zero: no event of ours knows a data address.
    pub(crate) addr: u64,
    pub(crate) period: u64,
    pub(crate) read: Reading<'a>,
    /// With the markers that name the mode.
    pub(crate) chain: &'a [u64],
    /// `None` for a task without user mode.
    pub(crate) regs_user: Option<Regs<'a>>,
    /// What could be read of the stack, from its pointer on, as much of it as the event wants;
    /// `None` for a task without user mode.
    pub(crate) stack: Option<&'a [u8]>,
    /// `None` where the hypervisor would not tell.
    pub(crate) regs_intr: Option<Regs<'a>>,
}
