//! perf's `PERF_SAMPLE_*` and `PERF_FORMAT_*`: the fields of samples, and the fields that a read of an event's count
//! returns.
//!
//! [`FIELDS`] is the one table of the fields of the device's samples. Writers, checkers and parsers of samples match on
//! its [`Word`]s and [`Part`]s, and every mask is computed from it. A new field is a new row and a new variant, and the
//! compiler then names the places that must know it.

use perf_event_open_sys::bindings as perf;

/// perf's `PERF_SAMPLE_IP`: the instruction pointer.
pub const SAMPLE_IP: u64 = perf::PERF_SAMPLE_IP as u64;
/// perf's `PERF_SAMPLE_TID`: process and thread ids.
pub const SAMPLE_TID: u64 = perf::PERF_SAMPLE_TID as u64;
/// perf's `PERF_SAMPLE_TIME`: the event's clock, in nanoseconds. In the device's records, this is guest time.
pub const SAMPLE_TIME: u64 = perf::PERF_SAMPLE_TIME as u64;
/// perf's `PERF_SAMPLE_ADDR`: the accessed address; zero where unknown.
pub const SAMPLE_ADDR: u64 = perf::PERF_SAMPLE_ADDR as u64;
/// perf's `PERF_SAMPLE_READ`: the counts, in the layout that the read format defines.
pub const SAMPLE_READ: u64 = perf::PERF_SAMPLE_READ as u64;
/// perf's `PERF_SAMPLE_CALLCHAIN`: the call chain, innermost frame first.
pub const SAMPLE_CALLCHAIN: u64 = perf::PERF_SAMPLE_CALLCHAIN as u64;
/// perf's `PERF_SAMPLE_ID`: the event's id; for an inherited event, the id of its parent.
pub const SAMPLE_ID: u64 = perf::PERF_SAMPLE_ID as u64;
/// perf's `PERF_SAMPLE_CPU`: the CPU's number.
pub const SAMPLE_CPU: u64 = perf::PERF_SAMPLE_CPU as u64;
/// perf's `PERF_SAMPLE_PERIOD`: the number of events that the sample represents.
pub const SAMPLE_PERIOD: u64 = perf::PERF_SAMPLE_PERIOD as u64;
/// perf's `PERF_SAMPLE_STREAM_ID`: the event's own id, also for an inherited event.
pub const SAMPLE_STREAM_ID: u64 = perf::PERF_SAMPLE_STREAM_ID as u64;
/// perf's `PERF_SAMPLE_REGS_USER`: the user-mode registers.
pub const SAMPLE_REGS_USER: u64 = perf::PERF_SAMPLE_REGS_USER as u64;
/// perf's `PERF_SAMPLE_STACK_USER`: the top of the user stack.
pub const SAMPLE_STACK_USER: u64 = perf::PERF_SAMPLE_STACK_USER as u64;
/// perf's `PERF_SAMPLE_IDENTIFIER`: the same id as [`SAMPLE_ID`], but right after the record's header.
pub const SAMPLE_IDENTIFIER: u64 = perf::PERF_SAMPLE_IDENTIFIER as u64;
/// perf's `PERF_SAMPLE_REGS_INTR`: the registers at the overflow.
pub const SAMPLE_REGS_INTR: u64 = perf::PERF_SAMPLE_REGS_INTR as u64;

/// A field of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Its `SAMPLE_*` bit.
    pub bit: u64,
    /// Its contents, and thereby its size.
    pub contents: Contents,
    /// The knowledge that the device needs to fill it in.
    pub needs: Needs,
    /// Whether perf's `struct sample_id`, the trailer of other records, has it too.
    pub in_trailer: bool,
}

/// The contents of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// One word.
    Word(Word),
    /// As many words as the event or the sample says.
    Part(Part),
}

/// A field of one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// [`SAMPLE_IDENTIFIER`].
    Identifier,
    /// [`SAMPLE_IP`].
    Ip,
    /// [`SAMPLE_TID`].
    Tid,
    /// [`SAMPLE_TIME`].
    Time,
    /// [`SAMPLE_ADDR`].
    Addr,
    /// [`SAMPLE_ID`].
    Id,
    /// [`SAMPLE_STREAM_ID`].
    StreamId,
    /// [`SAMPLE_CPU`].
    Cpu,
    /// [`SAMPLE_PERIOD`].
    Period,
}

/// A field of any number of words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// [`SAMPLE_READ`]: the counts, as the read format says.
    Counts,
    /// [`SAMPLE_CALLCHAIN`]: the number of entries, and the entries.
    Callchain,
    /// [`SAMPLE_REGS_USER`]: the ABI, and a word for each register of the event's mask unless the ABI is 0.
    RegsUser,
    /// [`SAMPLE_STACK_USER`]: the size in bytes and, unless it is 0, as many bytes and the number of valid ones.
    StackUser,
    /// [`SAMPLE_REGS_INTR`]: like [`Part::RegsUser`].
    RegsIntr,
}

/// Knowledge that the device needs at an overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Only what it knows of every overflow.
    Nothing,
    /// The guest's instruction pointer.
    Ip,
    /// The counts at that moment, so the vCPU must be stopped.
    Counts,
    /// The vCPU's registers, so the vCPU must be stopped.
    Registers,
}

impl Field {
    const fn word(bit: u64, word: Word, needs: Needs, in_trailer: bool) -> Self {
        Self { bit, contents: Contents::Word(word), needs, in_trailer }
    }

    const fn part(bit: u64, part: Part, needs: Needs) -> Self {
        Self { bit, contents: Contents::Part(part), needs, in_trailer: false }
    }
}

/// Every field of the device's samples, in the order of a sample.
pub const FIELDS: [Field; 14] = [
    Field::word(SAMPLE_IDENTIFIER, Word::Identifier, Needs::Nothing, true),
    Field::word(SAMPLE_IP, Word::Ip, Needs::Ip, false),
    Field::word(SAMPLE_TID, Word::Tid, Needs::Nothing, true),
    Field::word(SAMPLE_TIME, Word::Time, Needs::Nothing, true),
    Field::word(SAMPLE_ADDR, Word::Addr, Needs::Nothing, false),
    Field::word(SAMPLE_ID, Word::Id, Needs::Nothing, true),
    Field::word(SAMPLE_STREAM_ID, Word::StreamId, Needs::Nothing, true),
    Field::word(SAMPLE_CPU, Word::Cpu, Needs::Nothing, true),
    Field::word(SAMPLE_PERIOD, Word::Period, Needs::Nothing, false),
    Field::part(SAMPLE_READ, Part::Counts, Needs::Counts),
    Field::part(SAMPLE_CALLCHAIN, Part::Callchain, Needs::Registers),
    Field::part(SAMPLE_REGS_USER, Part::RegsUser, Needs::Registers),
    Field::part(SAMPLE_STACK_USER, Part::StackUser, Needs::Registers),
    Field::part(SAMPLE_REGS_INTR, Part::RegsIntr, Needs::Registers),
];

/// Number of [`Word`]s.
pub const WORD_COUNT: usize = (masks().words.count_ones()) as usize;

/// The fields of one word, in the order of a sample, which all parts follow.
pub const WORDS: [(u64, Word); WORD_COUNT] = {
    let mut words = [(0, Word::Identifier); WORD_COUNT];
    let mut at = 0;
    while at < WORD_COUNT {
        match FIELDS[at].contents {
            Contents::Word(word) => words[at] = (FIELDS[at].bit, word),
            Contents::Part(_) => panic!("a part precedes a word"),
        }
        at += 1;
    }
    words
};

/// Number of [`Part`]s.
pub const PART_COUNT: usize = FIELDS.len() - WORD_COUNT;

/// The fields of any number of words, in the order of a sample.
pub const PARTS: [(u64, Part); PART_COUNT] = {
    let mut parts = [(0, Part::Counts); PART_COUNT];
    let mut at = 0;
    while at < PART_COUNT {
        match FIELDS[WORD_COUNT + at].contents {
            Contents::Part(part) => parts[at] = (FIELDS[WORD_COUNT + at].bit, part),
            Contents::Word(_) => panic!("a word follows a part"),
        }
        at += 1;
    }
    parts
};

/// Masks of `SAMPLE_*` bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Masks {
    /// Every field of the device's samples.
    pub all: u64,
    /// The fields of one word.
    pub words: u64,
    /// The fields of any number of words.
    pub parts: u64,
    /// The fields in the trailer of other records.
    pub trailer: u64,
    /// The fields that need the vCPU's registers.
    pub registers: u64,
    /// The fields that need the guest's instruction pointer or its registers.
    pub placed: u64,
    /// The fields that can be filled in only while the vCPU is stopped.
    pub stopped: u64,
    /// The fields that an open request describes further, by a mask of registers or a size.
    pub described: u64,
}

/// The masks of [`FIELDS`].
#[must_use]
pub const fn masks() -> Masks {
    let mut masks = Masks { all: 0, words: 0, parts: 0, trailer: 0, registers: 0, placed: 0, stopped: 0, described: 0 };
    let mut at = 0;
    while at < FIELDS.len() {
        let Field { bit, contents, needs, in_trailer } = FIELDS[at];
        masks.all |= bit;
        match contents {
            Contents::Word(_) => masks.words |= bit,
            Contents::Part(Part::Counts | Part::Callchain) => masks.parts |= bit,
            Contents::Part(Part::RegsUser | Part::StackUser | Part::RegsIntr) => {
                masks.parts |= bit;
                masks.described |= bit;
            }
        }
        match needs {
            Needs::Nothing => {}
            Needs::Ip => masks.placed |= bit,
            Needs::Counts => masks.stopped |= bit,
            Needs::Registers => {
                masks.registers |= bit;
                masks.placed |= bit;
                masks.stopped |= bit;
            }
        }
        if in_trailer {
            masks.trailer |= bit;
        }
        at += 1;
    }
    masks
}

/// perf's `PERF_FORMAT_TOTAL_TIME_ENABLED`: how long the event was enabled, in nanoseconds.
pub const FORMAT_TIME_ENABLED: u64 = perf::PERF_FORMAT_TOTAL_TIME_ENABLED as u64;
/// perf's `PERF_FORMAT_TOTAL_TIME_RUNNING`: how long the event counted, in nanoseconds.
pub const FORMAT_TIME_RUNNING: u64 = perf::PERF_FORMAT_TOTAL_TIME_RUNNING as u64;
/// perf's `PERF_FORMAT_ID`: the event's id.
pub const FORMAT_ID: u64 = perf::PERF_FORMAT_ID as u64;
/// perf's `PERF_FORMAT_GROUP`: the counts of all events of the group, read together.
pub const FORMAT_GROUP: u64 = perf::PERF_FORMAT_GROUP as u64;
/// perf's `PERF_FORMAT_LOST`: the number of the event's lost records.
pub const FORMAT_LOST: u64 = perf::PERF_FORMAT_LOST as u64;
