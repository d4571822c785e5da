//! Random rings of a host against the parsers of its records, samples and tracepoints: they read
//! nothing but the ring's words, end, and find no more records than the ring has room for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu::host::records::take;
use vpmu::internals::exits_in;

/// Tracepoints 1 and 2.
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

fuzz_target!(|input: &[u8]| {
    let words: Vec<u64> = input
        .chunks_exact(8)
        .filter_map(|word| word.try_into().ok().map(u64::from_le_bytes))
        .collect();
    let [shape, tail, head, ring @ ..] = words.as_slice() else {
        return;
    };
    // As a host makes them, a power of two, or as it never does.
    let size = match shape % 8 {
        0 => ring.len() as u64 * 8,
        power => 1 << (power + 4),
    };
    // Mostly a ring that could be; each bit of the shape lets one lie through.
    let tail = if shape & 0x100 == 0 { tail & !7 } else { *tail };
    let head = match shape & 0x200 {
        0 => tail.wrapping_add((head % (size + 8)) & !7),
        _ => *head,
    };
    let word = |at: u64| {
        assert!(at.is_multiple_of(8) && at < size, "a word of the ring");
        let index = usize::try_from(at / 8).unwrap_or(usize::MAX);
        ring.get(index).copied().unwrap_or(0)
    };
    let mut records = 0;
    take(word, size, tail, head, |_| records += 1);
    assert!(records <= size / 8 + 1, "each record has a header");
    let exits = exits_in(FORMATS, word, size, tail, head);
    // Each record of a loss ends an exit, too.
    assert!(exits.is_some_and(|exits| exits <= 2 * (size / 8 + 1)));
});
