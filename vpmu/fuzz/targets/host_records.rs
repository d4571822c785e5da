//! Rings with arbitrary content for the parsers of host records, samples and tracepoints, and arbitrary text for the
//! parser of tracepoint formats. The parsers must read only words of the ring, terminate, and find no more records than
//! the ring can hold.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu::host::records::take;
use vpmu::internals::ExitFormats;

/// The formats of tracepoints 1 and 2.
const FORMATS: [&str; 2] = [
    "ID: 1
    field:unsigned short common_type;\toffset:0;\tsize:2;
    field:unsigned int exit_reason;\toffset:8;\tsize:4;
    field:unsigned long guest_rip;\toffset:16;\tsize:8;
    field:u32 isa;\toffset:24;\tsize:4;
    field:u64 info1;\toffset:32;\tsize:8;
    field:u64 info2;\toffset:40;\tsize:8;",
    "ID: 2
    field:unsigned short common_type;\toffset:0;\tsize:2;",
];
/// Number of words at the start of the input. They determine the size, tail and head of the ring.
const SHAPE_WORDS: usize = 3;
/// Flag in the first of these words: use the tail as it is. Otherwise, the tail is rounded down to a multiple of 8.
const ANY_TAIL: u64 = 0x100;
/// Flag in the first word: use the head as it is. Otherwise, the head is ahead of the tail by a whole number of words,
/// at most the size of the ring.
const ANY_HEAD: u64 = 0x200;
/// Flag in the first word: also parse the rest of the input as the text of a format.
const TEXT: u64 = 0x400;

thread_local! {
    /// Parsed once, because parsing takes longer than the rest of an execution.
    static OWN_FORMATS: Option<ExitFormats> = ExitFormats::parse(FORMATS[0], FORMATS[1]);
}

fuzz_target!(|input: &[u8]| {
    let words: Vec<u64> =
        input.chunks_exact(8).filter_map(|word| word.try_into().ok().map(u64::from_le_bytes)).collect();
    let Some(([shape, tail, head], ring)) = words.split_first_chunk::<SHAPE_WORDS>() else {
        return;
    };
    // The size of the ring in bytes: a power of two, as on real hosts, or the size of the rest of the input.
    let size = match shape % 8 {
        0 => ring.len() as u64 * 8,
        power => 1 << (power + 4),
    };
    let tail = if shape & ANY_TAIL == 0 { tail & !7 } else { *tail };
    let head = match shape & ANY_HEAD {
        0 => tail.wrapping_add((head % (size + 8)) & !7),
        _ => *head,
    };
    let word = |at: u64| {
        assert!(at.is_multiple_of(8) && at < size, "the parser reads outside the ring");
        let index = usize::try_from(at / 8).unwrap_or(usize::MAX);
        ring.get(index).copied().unwrap_or(0)
    };
    let mut records = 0;
    take(word, size, tail, head, |_| records += 1);
    assert!(records <= size / 8 + 1, "more records than the ring can hold");
    let count_exits = |formats: &ExitFormats| {
        let exits = formats.exits_in(word, size, tail, head);
        // A loss record can add two to the count: one for the loss, and one for an exit that still waited for its
        // entry.
        assert!(exits <= 2 * (size / 8 + 1));
    };
    OWN_FORMATS.with(|formats| {
        assert!(formats.is_some(), "the target's formats are valid");
        formats.iter().for_each(count_exits);
    });
    if shape & TEXT == 0 {
        return;
    }
    let text = input.get(8 * SHAPE_WORDS..).unwrap_or_default();
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    for [exit, entry] in [[text, text], [text, FORMATS[1]], [FORMATS[0], text]] {
        ExitFormats::parse(exit, entry).iter().for_each(count_exits);
    }
});
