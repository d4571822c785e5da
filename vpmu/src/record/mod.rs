//! Builds records in the layout of Linux's perf. The caller writes them to a ring.

mod check;
mod read;
mod sample;

use zerocopy::IntoBytes;

pub(crate) use check::admits;
pub(crate) use read::{Member, Reading, read_size};
pub(crate) use sample::{Regs, Sample};

use crate::abi::SAMPLE_ALLOWED;
use vpmu_perf::field::{
    FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING, Masks, PART_COUNT, PARTS, Part,
    WORD_COUNT, masks,
};
pub(crate) use vpmu_perf::field::{
    SAMPLE_CALLCHAIN, SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_READ, SAMPLE_REGS_INTR, SAMPLE_REGS_USER,
    SAMPLE_STACK_USER, SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME,
};
pub(crate) use vpmu_perf::record::{
    MODE_KERNEL, MODE_UNKNOWN, MODE_USER, TYPE_AUX, TYPE_ITRACE_START, TYPE_LOST, TYPE_READ, TYPE_SAMPLE,
    TYPE_THROTTLE, TYPE_UNTHROTTLE,
};

/// Maximum size of a record in bytes: the largest multiple of 8 that fits in the 16-bit size field of a record's
/// header.
pub(crate) const RECORD_MAX: usize = 65_528;

/// A chunk of an AUX area, which `PERF_RECORD_AUX` reports to the area's reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) struct Chunk {
    /// Number of bytes written before this chunk, modulo 2^64.
    pub(crate) offset: u64,
    /// Number of bytes in the chunk.
    pub(crate) size: u64,
    /// perf's `PERF_AUX_FLAG_*`.
    pub(crate) flags: u64,
}

impl Chunk {
    /// Joins this chunk with `next`, which must begin where this chunk ends.
    pub(crate) fn with(self, next: Self) -> Self {
        Self { size: self.size.wrapping_add(next.size), flags: self.flags | next.flags, ..self }
    }
}

/// The fields of an event's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) struct Layout {
    /// `PERF_SAMPLE_*`.
    pub(crate) sample_type: u64,
    /// `PERF_FORMAT_*`, which determines the layout of the counts in [`SAMPLE_READ`] and in `PERF_RECORD_READ`.
    pub(crate) read_format: u64,
    /// Registers of [`SAMPLE_REGS_USER`].
    pub(crate) regs_user: u64,
    /// Registers of [`SAMPLE_REGS_INTR`].
    pub(crate) regs_intr: u64,
    /// Bytes of [`SAMPLE_STACK_USER`], a multiple of 8.
    pub(crate) stack_user: u32,
    /// Whether records other than samples end with the `sample_id` fields, such as task and time.
    pub(crate) sample_id_all: bool,
}

impl Layout {
    /// Returns whether samples have the field whose `SAMPLE_*` bit is `bit`.
    pub(crate) fn has(&self, bit: u64) -> bool {
        self.sample_type & bit != 0
    }
}

/// The task, CPU, time and event that a record refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(crate) struct SampleId {
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    /// Guest nanoseconds.
    pub(crate) time: u64,
    /// The id of the event's family. This is the parent's id, or the event's own id if the event has no parent.
    pub(crate) id: u64,
    /// The event's own id.
    pub(crate) stream_id: u64,
    pub(crate) vcpu: u32,
}

impl SampleId {
    fn task(&self) -> u64 {
        u64::from(self.tid) << 32 | u64::from(self.pid)
    }
}

/// The masks of the sample fields.
pub(crate) const MASKS: Masks = masks();
const _: () = assert!(MASKS.all == SAMPLE_ALLOWED, "the ABI allows exactly the fields of the table");

/// The record would be longer than the size field in perf's record header allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the record would be longer than {RECORD_MAX} bytes")]
pub(crate) struct TooLong;

/// The record under construction, as little-endian words. Its buffer is reused, so a new record needs no
/// allocation.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// The record's words, followed by unused words.
    words: Vec<u64>,
    /// Number of the words of the record.
    len: usize,
}

impl Record {
    /// Bytes of the last record.
    pub(crate) fn size(&self) -> usize {
        self.len * size_of::<u64>()
    }

    /// Builds `PERF_RECORD_LOST`.
    pub(crate) fn lost(&mut self, layout: &Layout, sample_id: &SampleId, lost: u64) -> &[u64] {
        self.begin();
        self.push(sample_id.id);
        self.push(lost);
        self.trailer(layout, sample_id);
        self.finish(TYPE_LOST)
    }

    /// Builds `PERF_RECORD_THROTTLE`.
    pub(crate) fn throttle(&mut self, layout: &Layout, sample_id: &SampleId) -> &[u64] {
        self.throttling(layout, sample_id, TYPE_THROTTLE)
    }

    /// Builds `PERF_RECORD_UNTHROTTLE`.
    pub(crate) fn unthrottle(&mut self, layout: &Layout, sample_id: &SampleId) -> &[u64] {
        self.throttling(layout, sample_id, TYPE_UNTHROTTLE)
    }

    /// Builds `PERF_RECORD_AUX`, which reports a chunk of the AUX area.
    pub(crate) fn aux(&mut self, layout: &Layout, sample_id: &SampleId, chunk: &Chunk) -> &[u64] {
        self.begin();
        self.push_all(&[chunk.offset, chunk.size, chunk.flags]);
        self.trailer(layout, sample_id);
        self.finish(TYPE_AUX)
    }

    /// Builds `PERF_RECORD_ITRACE_START`, which reports the start of a trace and the task running at that time.
    pub(crate) fn itrace_start(&mut self, layout: &Layout, sample_id: &SampleId) -> &[u64] {
        self.begin();
        self.push(sample_id.task());
        self.trailer(layout, sample_id);
        self.finish(TYPE_ITRACE_START)
    }

    /// Builds `PERF_RECORD_READ`, which contains the task and the counts of an event or of the event's group.
    ///
    /// # Errors
    /// The group has more members than a record can hold.
    pub(crate) fn read(
        &mut self,
        layout: &Layout,
        sample_id: &SampleId,
        reading: &Reading<'_>,
    ) -> Result<&[u64], TooLong> {
        self.begin();
        self.push(sample_id.task());
        self.push_reading(layout.read_format, reading);
        self.trailer(layout, sample_id);
        self.end(TYPE_READ, MODE_UNKNOWN)
    }

    /// Builds `PERF_RECORD_SAMPLE`. Truncates the user stack if the record would be too long.
    ///
    /// # Errors
    /// The record would be too long even without the stack, because the group or the callchain is too large.
    pub(crate) fn sample(
        &mut self,
        layout: &Layout,
        sample_id: &SampleId,
        sample: &Sample<'_>,
    ) -> Result<&[u64], TooLong> {
        // A constant index per field, because this code runs for every sample, and the compiler does not unroll a loop
        // over the table. The number of fields is checked.
        let fields: [(u64, u64); WORD_COUNT] = [
            sample.field::<0>(sample_id),
            sample.field::<1>(sample_id),
            sample.field::<2>(sample_id),
            sample.field::<3>(sample_id),
            sample.field::<4>(sample_id),
            sample.field::<5>(sample_id),
            sample.field::<6>(sample_id),
            sample.field::<7>(sample_id),
            sample.field::<8>(sample_id),
        ];
        self.begin();
        self.push_chosen(layout, &fields);
        if !layout.has(MASKS.parts) {
            return self.end(TYPE_SAMPLE, sample.misc);
        }
        const { assert!(PART_COUNT == 5, "every part is pushed") };
        self.push_part::<0>(layout, sample);
        self.push_part::<1>(layout, sample);
        self.push_part::<2>(layout, sample);
        self.push_part::<3>(layout, sample);
        self.push_part::<4>(layout, sample);
        self.end(TYPE_SAMPLE, sample.misc)
    }

    /// Appends the part in row `AT` of the table, if the event's samples have it.
    #[inline(always)]
    fn push_part<const AT: usize>(&mut self, layout: &Layout, sample: &Sample<'_>) {
        let (bit, part) = const { PARTS[AT] };
        if !layout.has(bit) {
            return;
        }
        match part {
            Part::Counts => self.push_reading(layout.read_format, &sample.read),
            Part::Callchain => {
                self.push(sample.chain.len() as u64);
                self.push_all(sample.chain);
            }
            Part::RegsUser => self.push_regs(layout.regs_user, sample.regs_user),
            Part::StackUser => {
                // Only the registers at the overflow follow the stack.
                let after = match (layout.has(SAMPLE_REGS_INTR), sample.regs_intr) {
                    (false, _) => 0,
                    (true, None) => 8,
                    (true, Some(_)) => 8 + 8 * layout.regs_intr.count_ones() as usize,
                };
                self.push_stack(layout.stack_user, sample.stack, after);
            }
            Part::RegsIntr => self.push_regs(layout.regs_intr, sample.regs_intr),
        }
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

    /// Appends a stack of `size` bytes: the bytes of `stack`, padded with zeros. Appends fewer bytes if the record
    /// would otherwise be too long. `after` is the number of bytes that follow the stack in the record.
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

    pub(super) fn push_reading(&mut self, read_format: u64, reading: &Reading<'_>) {
        let group = read_format & FORMAT_GROUP != 0;
        let first = reading.members.first().copied().unwrap_or_default();
        if group {
            self.push(reading.members.len() as u64);
        } else {
            self.push(first.value);
        }
        if read_format & FORMAT_TIME_ENABLED != 0 {
            self.push(reading.time_enabled);
        }
        if read_format & FORMAT_TIME_RUNNING != 0 {
            self.push(reading.time_running);
        }
        if !group {
            return self.push_identity(read_format, &first);
        }
        for member in reading.members {
            self.push(member.value);
            self.push_identity(read_format, member);
        }
    }

    fn push_identity(&mut self, read_format: u64, member: &Member) {
        if read_format & FORMAT_ID != 0 {
            self.push(member.id);
        }
        if read_format & FORMAT_LOST != 0 {
            self.push(member.lost);
        }
    }

    fn throttling(&mut self, layout: &Layout, sample_id: &SampleId, kind: u32) -> &[u64] {
        self.begin();
        self.push(sample_id.time);
        self.push(sample_id.id);
        self.push(sample_id.stream_id);
        self.trailer(layout, sample_id);
        self.finish(kind)
    }

    /// Appends the `sample_id` fields. If the event has `sample_id_all`, every record except a sample ends with these
    /// fields.
    fn trailer(&mut self, layout: &Layout, sample_id: &SampleId) {
        if !layout.sample_id_all {
            return;
        }
        let fields = [
            (SAMPLE_TID, sample_id.task()),
            (SAMPLE_TIME, sample_id.time),
            (SAMPLE_ID, sample_id.id),
            (SAMPLE_STREAM_ID, sample_id.stream_id),
            (SAMPLE_CPU, u64::from(sample_id.vcpu)),
            (SAMPLE_IDENTIFIER, sample_id.id),
        ];
        self.push_chosen(layout, &fields);
    }

    /// Appends the entries of `fields` whose bits are in the event's sample type. `fields` has at most sixteen entries.
    /// This code runs for every sample, so it has no branch per field, and reserves space for all fields at once.
    #[inline]
    fn push_chosen<const N: usize>(&mut self, layout: &Layout, fields: &[(u64, u64); N]) {
        const SLOTS: usize = 16;
        const { assert!(N <= SLOTS) };
        let mut chosen = 0;
        if let Some(slots) = self.room(SLOTS).first_chunk_mut::<SLOTS>() {
            for &(bit, value) in fields {
                slots[chosen % SLOTS] = value.to_le();
                chosen += usize::from(layout.has(bit));
            }
        }
        self.len += chosen;
    }

    fn push_all(&mut self, values: &[u64]) {
        for (slot, value) in self.room(values.len()).iter_mut().zip(values) {
            *slot = value.to_le();
        }
        self.len += values.len();
    }

    #[inline]
    fn push(&mut self, value: u64) {
        self.push_all(&[value]);
    }

    /// Returns room for `words` more words. Their contents are arbitrary.
    #[inline]
    fn room(&mut self, words: usize) -> &mut [u64] {
        let end = self.len + words;
        if end > self.words.len() {
            self.grow(end);
        }
        self.words.get_mut(self.len..end).unwrap_or_default()
    }

    #[cold]
    fn grow(&mut self, words: usize) {
        self.words.resize(words.next_power_of_two(), 0);
    }

    /// Leaves room for the header.
    fn begin(&mut self) {
        self.len = 1;
    }

    /// Bytes so far.
    fn len(&self) -> usize {
        self.len * 8
    }

    /// Writes the header of a record that cannot be too long.
    fn finish(&mut self, kind: u32) -> &[u64] {
        self.end(kind, MODE_UNKNOWN).unwrap_or_default()
    }

    /// Writes the header.
    fn end(&mut self, kind: u32, misc: u16) -> Result<&[u64], TooLong> {
        let size = u16::try_from(self.len()).map_err(|_| TooLong)?;
        let header = u64::from(kind) | u64::from(misc) << 32 | u64::from(size) << 48;
        if let Some(first) = self.words.first_mut() {
            *first = header.to_le();
        }
        Ok(self.words.get(..self.len).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests;
