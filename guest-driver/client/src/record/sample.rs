//! `PERF_RECORD_SAMPLE` and its fields.

use super::layout::Layout;
use crate::attr::{SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME};
use crate::reading::{self, Reading};
use vpmu_perf::field::{PARTS, Part, WORDS, Word};
use vpmu_perf::record::{Words, halves};

/// perf's `PERF_CONTEXT_KERNEL`: kernel addresses follow.
const CONTEXT_KERNEL: u64 = 128_u64.wrapping_neg();
/// perf's `PERF_CONTEXT_USER`: user-mode addresses follow.
const CONTEXT_USER: u64 = 512_u64.wrapping_neg();
/// perf's `PERF_CONTEXT_MAX`: values from here on are contexts, not addresses.
const CONTEXT_FIRST: u64 = 4095_u64.wrapping_neg();

/// One overflow of an event. Fields that the event did not request are zero or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The guest's instruction pointer.
    pub ip: u64,
    /// Process id.
    pub pid: u32,
    /// Thread id.
    pub tid: u32,
    /// Nanoseconds of the guest's clock; see [`crate::Info::time_of`].
    pub time: u64,
    /// The value of a mark; zero for the device's other events.
    pub addr: u64,
    /// The CPU.
    pub cpu: u32,
    /// Events that this sample represents.
    pub period: u64,
    /// Id of the event, or of its parent if the event was inherited.
    pub id: u64,
    /// Id of the event itself, even if it was inherited.
    pub stream_id: u64,
    /// Whether the guest was in user mode.
    pub user: bool,
    /// The event's reading or, for a group, the readings of all members, beginning with the leader.
    pub counts: Vec<Reading>,
    /// The call chain as recorded, including perf's `PERF_CONTEXT_*` markers; see [`Sample::frames`].
    pub chain: Vec<u64>,
    /// The user-mode registers; `None` for a kernel thread.
    pub user_registers: Option<Box<Registers>>,
    /// The readable part of the user stack, from the stack pointer upwards.
    pub user_stack: Vec<u8>,
    /// The registers at the overflow.
    pub registers: Option<Box<Registers>>,
}

/// The requested registers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registers {
    /// perf's `PERF_SAMPLE_REGS_ABI_*`: 1 for a 32-bit, 2 for a 64-bit program.
    pub abi: u64,
    /// Mask of the kernel's register numbers.
    pub mask: u64,
    /// Values of the registers in the mask, lowest number first.
    pub values: Vec<u64>,
}

impl Registers {
    /// The value of register `number`, numbered as in the kernel's `asm/perf_regs.h`; `None` if the
    /// register is not in the mask.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<u64> {
        let bit = 1u64.checked_shl(number).filter(|bit| self.mask & bit != 0)?;
        let index = (self.mask & (bit - 1)).count_ones() as usize;
        self.values.get(index).copied()
    }
}

/// One function on a call chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The sampled address for the innermost frame, the return address for the others.
    pub ip: u64,
    /// Whether the function is user-mode code.
    pub user: bool,
}

impl Sample {
    /// The call chain from the innermost function to the outermost; without a chain, the sampled
    /// address.
    #[must_use]
    pub fn frames(&self) -> Vec<Frame> {
        let mut user = self.user;
        let mut known = true;
        let mut frames = Vec::new();
        for &ip in &self.chain {
            match ip {
                CONTEXT_KERNEL => (user, known) = (false, true),
                CONTEXT_USER => (user, known) = (true, true),
                // Skip addresses of other contexts, such as the hypervisor's.
                CONTEXT_FIRST.. => known = false,
                _ if known => frames.push(Frame { ip, user }),
                _ => {}
            }
        }
        if frames.is_empty() {
            frames.push(Frame { ip: self.ip, user: self.user });
        }
        frames
    }
}

/// Parses the fields in perf's order; `None` if the words are too few.
pub(super) fn parse(user: bool, layout: &Layout, words: &mut Words<'_>) -> Option<Sample> {
    let mut sample = Sample { user, ..Sample::default() };
    for (_, word) in WORDS.into_iter().filter(|&(bit, _)| layout.has(bit)) {
        let value = words.next()?;
        match word {
            Word::Identifier | Word::Id => sample.id = value,
            Word::Ip => sample.ip = value,
            Word::Tid => (sample.pid, sample.tid) = halves(value),
            Word::Time => sample.time = value,
            Word::Addr => sample.addr = value,
            Word::StreamId => sample.stream_id = value,
            Word::Cpu => (sample.cpu, _) = halves(value),
            Word::Period => sample.period = value,
        }
    }
    for (_, part) in PARTS.into_iter().filter(|&(bit, _)| layout.has(bit)) {
        match part {
            Part::Counts => sample.counts = reading::parse(layout.read_format, words)?,
            Part::Callchain => {
                let length = words.next()?;
                sample.chain = words.take(length)?.to_vec();
            }
            Part::RegsUser => sample.user_registers = registers(layout.regs_user, words)?,
            Part::StackUser => sample.user_stack = stack(words)?,
            Part::RegsIntr => sample.registers = registers(layout.regs_intr, words)?,
        }
    }
    Some(sample)
}

/// Parses a register set. Returns `None` if the record is truncated, and `Some(None)` if the sample
/// has no registers.
fn registers(mask: u64, words: &mut Words<'_>) -> Option<Option<Box<Registers>>> {
    let abi = words.next()?;
    if abi == 0 {
        return Some(None);
    }
    let values = words.take(mask.count_ones().into())?.to_vec();
    Some(Some(Box::new(Registers { abi, mask, values })))
}

/// Parses the user stack: the bytes that were copied, without the unused space after them.
fn stack(words: &mut Words<'_>) -> Option<Vec<u8>> {
    let room = words.next()?;
    if room == 0 {
        return Some(Vec::new());
    }
    let room = words.take(room.div_ceil(8))?;
    let copied = usize::try_from(words.next()?).unwrap_or(usize::MAX);
    let mut bytes: Vec<u8> = room.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.truncate(copied);
    Some(bytes)
}

/// Task, time and event of a record other than a sample. Fields that the event did not request are
/// zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampleId {
    /// Process id.
    pub pid: u32,
    /// Thread id.
    pub tid: u32,
    /// Nanoseconds of the guest's clock.
    pub time: u64,
    /// Id of the event, or of its parent if the event was inherited.
    pub id: u64,
    /// Id of the event itself, even if it was inherited.
    pub stream_id: u64,
    /// The CPU.
    pub cpu: u32,
}

/// Parses the end of a record other than a sample.
pub(super) fn parse_id(layout: &Layout, mut words: Words<'_>) -> Option<SampleId> {
    let mut field = |bit| words.next_if(layout.has(bit));
    let (pid, tid) = halves(field(SAMPLE_TID)?);
    let time = field(SAMPLE_TIME)?;
    let id = field(SAMPLE_ID)?;
    let stream_id = field(SAMPLE_STREAM_ID)?;
    let (cpu, _) = halves(field(SAMPLE_CPU)?);
    let identifier = field(SAMPLE_IDENTIFIER)?;
    Some(SampleId { pid, tid, time, id: if layout.has(SAMPLE_ID) { id } else { identifier }, stream_id, cpu })
}
