//! The contents of `PERF_RECORD_SAMPLE`: every field that an event can request, in perf's order.

use vpmu_perf::field::{WORDS, Word};

use super::{Reading, SampleId};

/// Registers in perf's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regs<'a> {
    /// `PERF_SAMPLE_REGS_ABI_*`.
    pub(crate) abi: u64,
    /// Values of the registers in the event's mask, in ascending order of perf's register numbers. A record has one
    /// value for each register in the mask. Missing values become zero, and extra values are dropped.
    pub(crate) values: &'a [u64],
}

/// The contents of a sample, which describes one overflow as the guest sees it. Fields that the event does not request
/// are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Sample<'a> {
    /// One of `MODE_*`: the guest's mode.
    pub(crate) misc: u16,
    /// The instruction pointer. Zero if the hypervisor does not provide it.
    pub(crate) ip: u64,
    /// The mark's value, if the event counts marks. Zero for all other events, because their samples have no data
    /// address.
    pub(crate) addr: u64,
    pub(crate) period: u64,
    pub(crate) read: Reading<'a>,
    /// The callchain, in perf's format: `PERF_CONTEXT_*` values precede the kernel entries and the user entries.
    pub(crate) chain: &'a [u64],
    /// The user-mode registers. `None` if they are unknown, or if the task is a kernel thread.
    pub(crate) regs_user: Option<Regs<'a>>,
    /// The readable part of the user stack. It starts at the stack pointer and has at most the size that the event
    /// requests. `None` if `regs_user` is `None`.
    pub(crate) stack: Option<&'a [u8]>,
    /// The registers at the overflow. `None` if the hypervisor does not provide them.
    pub(crate) regs_intr: Option<Regs<'a>>,
}

impl Sample<'_> {
    /// The bit and the contents of the field of one word that is in row `AT` of the table.
    #[inline(always)]
    pub(super) fn field<const AT: usize>(&self, sample_id: &SampleId) -> (u64, u64) {
        let (bit, word) = const { WORDS[AT] };
        let contents = match word {
            Word::Identifier | Word::Id => sample_id.id,
            Word::Ip => self.ip,
            Word::Tid => sample_id.task(),
            Word::Time => sample_id.time,
            Word::Addr => self.addr,
            Word::StreamId => sample_id.stream_id,
            Word::Cpu => sample_id.vcpu.into(),
            Word::Period => self.period,
        };
        (bit, contents)
    }
}
