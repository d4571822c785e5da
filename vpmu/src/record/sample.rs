//! `PERF_RECORD_SAMPLE`: every field that an event can ask for, in perf's order.

use zerocopy::IntoBytes;

use super::{
    Layout, Origin, RECORD_MAX, Reading, Record, SAMPLE_ADDR, SAMPLE_CALLCHAIN, SAMPLE_CPU,
    SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD, SAMPLE_READ, SAMPLE_REGS_INTR,
    SAMPLE_REGS_USER, SAMPLE_STACK_USER, SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME, TYPE_SAMPLE,
    TooLong,
};

/// The fields whose length the event or the sample decides.
const VARIABLE: u64 =
    SAMPLE_READ | SAMPLE_CALLCHAIN | SAMPLE_REGS_USER | SAMPLE_STACK_USER | SAMPLE_REGS_INTR;

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

impl Record {
    /// Builds `PERF_RECORD_SAMPLE`. The stack is cut where the record would be too long.
    ///
    /// # Errors
    /// A group or a chain longer than a record holds.
    pub(crate) fn sample(
        &mut self,
        layout: &Layout,
        origin: &Origin,
        sample: &Sample<'_>,
    ) -> Result<&[u64], TooLong> {
        let fields = [
            (SAMPLE_IDENTIFIER, origin.id),
            (SAMPLE_IP, sample.ip),
            (SAMPLE_TID, origin.task()),
            (SAMPLE_TIME, origin.time),
            (SAMPLE_ADDR, sample.addr),
            (SAMPLE_ID, origin.id),
            (SAMPLE_STREAM_ID, origin.stream_id),
            (SAMPLE_CPU, u64::from(origin.vcpu)),
            (SAMPLE_PERIOD, sample.period),
        ];
        self.begin();
        self.push_chosen(layout, &fields);
        if !layout.has(VARIABLE) {
            return self.end(TYPE_SAMPLE, sample.misc);
        }
        if layout.has(SAMPLE_READ) {
            self.push_reading(layout.read_format, &sample.read);
        }
        if layout.has(SAMPLE_CALLCHAIN) {
            self.push(sample.chain.len() as u64);
            self.push_all(sample.chain);
        }
        if layout.has(SAMPLE_REGS_USER) {
            self.push_regs(layout.regs_user, sample.regs_user);
        }
        if layout.has(SAMPLE_STACK_USER) {
            let after = match (layout.has(SAMPLE_REGS_INTR), sample.regs_intr) {
                (false, _) => 0,
                (true, None) => 8,
                (true, Some(_)) => 8 + 8 * layout.regs_intr.count_ones() as usize,
            };
            self.push_stack(layout.stack_user, sample.stack, after);
        }
        if layout.has(SAMPLE_REGS_INTR) {
            self.push_regs(layout.regs_intr, sample.regs_intr);
        }
        self.end(TYPE_SAMPLE, sample.misc)
    }

    fn push_regs(&mut self, mask: u64, regs: Option<Regs<'_>>) {
        let Some(regs) = regs.filter(|regs| regs.abi != 0) else {
            return self.push(0);
        };
        self.push(regs.abi);
        let values = regs.values.iter().copied().chain(std::iter::repeat(0));
        for value in values.take(mask.count_ones() as usize) {
            self.push(value);
        }
    }

    /// Appends `size` bytes of stack of which those of `stack` are real, or fewer where the
    /// record, with `after` bytes more to come, would be too long.
    fn push_stack(&mut self, size: u32, stack: Option<&[u8]>, after: usize) {
        let around = self.len() + 16 + after;
        let room = RECORD_MAX.saturating_sub(around);
        let size = (size as usize).min(room) / 8 * 8;
        let Some(stack) = stack.filter(|_| size > 0) else {
            return self.push(0);
        };
        self.push(size as u64);
        let real = stack.len().min(size);
        let (dumped, rest) = self.room(size / 8).as_mut_bytes().split_at_mut(real);
        dumped.copy_from_slice(stack.split_at(real).0);
        rest.fill(0);
        self.len += size / 8;
        self.push(real as u64);
    }
}
