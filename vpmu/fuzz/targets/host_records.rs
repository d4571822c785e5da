//! Random rings of a host against the parser of its records: it reads nothing but the ring's
//! words, ends, and finds no more records than the ring has room for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vpmu::host::records::take;

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
    let mut records = 0;
    take(
        |at| {
            assert!(at.is_multiple_of(8) && at < size, "a word of the ring");
            let index = usize::try_from(at / 8).unwrap_or(usize::MAX);
            ring.get(index).copied().unwrap_or(0)
        },
        size,
        tail,
        head,
        |_| records += 1,
    );
    assert!(records <= size / 8 + 1, "each record has a header");
});
