use proptest::prelude::*;

use super::*;

const SIZE: usize = 256;

fn header(kind: u32, misc: u16, size: u16) -> u64 {
    u64::from(kind) | u64::from(misc) << 32 | u64::from(size) << 48
}

fn record(kind: u32, words: &[u64]) -> Vec<u64> {
    let size = u16::try_from(8 * (1 + words.len())).unwrap_or(u16::MAX);
    [&[header(kind, 0, size)], words].concat()
}

type ParsedRecord = Result<(u32, Vec<u64>), Broken>;

fn walk(ring: &[u64], tail: u64, head: u64) -> Vec<ParsedRecord> {
    let size = 8 * ring.len() as u64;
    let word = |offset: u64| {
        assert!(offset < size && offset.is_multiple_of(8), "inside, aligned");
        ring[usize::try_from(offset / 8).unwrap_or(usize::MAX)]
    };
    Records::new(&word, size, tail, head).map(|found| found.map(|record| (record.header.kind, record.body()))).collect()
}

/// A ring that holds `records` from byte `tail` on.
fn held(records: &[Vec<u64>], tail: u64) -> Vec<ParsedRecord> {
    let mut ring = [0; SIZE / 8];
    let words = records.concat();
    for (index, word) in words.iter().enumerate() {
        ring[(usize::try_from(tail / 8).unwrap_or(0) + index) % (SIZE / 8)] = *word;
    }
    walk(&ring, tail, tail + 8 * words.len() as u64)
}

#[test]
fn records_across_end_of_ring_are_whole() {
    let records = [record(9, &[1, 2, 3]), record(2, &[]), record(5, &[4; 20])];
    let expected = [Ok((9, vec![1, 2, 3])), Ok((2, vec![])), Ok((5, vec![4; 20]))];
    for tail in (0..SIZE as u64).step_by(8) {
        assert_eq!(held(&records, tail), expected, "from {tail}");
    }
}

#[test]
fn impossible_length_ends_walk() {
    for size in [0, 4, 7, 12, 48, 0xfff8] {
        let bad = vec![header(9, 5, size)];
        let found = held(&[record(9, &[4, 5, 6]), bad, record(9, &[7, 8, 9])], 8);
        let broken = Broken::Malformed { size, available: 40 };
        assert_eq!(found, [Ok((9, vec![4, 5, 6])), Err(broken)]);
    }
}

#[test]
fn impossible_head_or_tail_ends_walk() {
    let ring = [header(9, 0, 8); 8];
    let malformed = |available| [Err(Broken::Malformed { size: 8, available })];
    assert_eq!(walk(&ring, 0, 72), [Err(Broken::Overrun)]);
    assert_eq!(walk(&ring, 8, 0), [Err(Broken::Overrun)]);
    assert_eq!(walk(&[], 0, 8), [Err(Broken::Overrun)]);
    assert_eq!(walk(&ring, 4, 12), malformed(8));
    assert_eq!(walk(&ring, 8, 20), malformed(12));
    assert_eq!(walk(&[], 4, 4), []);
}

#[test]
fn word_beyond_record_is_zero() {
    let ring = [header(9, 0, 16), 7, 8];
    let word = |offset: u64| ring[usize::try_from(offset / 8).unwrap_or(usize::MAX)];
    let mut records = Records::new(&word, 24, 0, 16);
    let Some(Ok(record)) = records.next() else {
        panic!("a record is there");
    };
    assert_eq!([0, 1, u64::MAX].map(|index| record.word(index)), [7, 0, 0]);
}

#[test]
fn header_has_kind_mode_and_size() {
    let header = Header::from_word(0x0018_4002_0000_0009);
    assert_eq!((header.kind, header.misc, header.size), (9, 0x4002, 24));
    assert_eq!(header.mode(), MODE_USER);
    assert_eq!(halves(0x0000_0001_0000_0002), (2, 1));
}

#[test]
fn words_are_taken_up_to_their_end() {
    let mut words = Words::new(&[1, 2, 3, 4, 5]);
    assert_eq!(words.next_if(false), Some(0));
    assert_eq!(words.next_if(true), Some(1));
    assert_eq!(words.take(2), Some(&[2, 3][..]));
    assert_eq!(words.take(3), None);
    assert_eq!(words.take(u64::MAX), None);
    assert!(words.take_last(3).is_none());
    assert_eq!(words.take_last(1).and_then(|mut last| last.next()), Some(5));
    assert_eq!(words.skip(2), None);
    assert!(!words.is_empty());
    assert_eq!(words.skip(1), Some(()));
    assert_eq!(words.next(), None);
    assert!(words.is_empty());
}

proptest! {
    #[test]
    fn any_bytes_end_walk_inside_ring(
        ring in prop::collection::vec(any::<u64>(), 1..64),
        tail in any::<u64>(),
        held in 0_u64..600,
    ) {
        let found = walk(&ring, tail, tail.wrapping_add(held));
        prop_assert!(found.len() as u64 <= held / 8 + 1);
    }

    #[test]
    fn copies_have_the_records_of_the_ring(
        ring in prop::collection::vec(prop_oneof![
            (1_u16..5).prop_map(|words| header(9, 0, 8 * words)),
            any::<u64>(),
        ], 0..64),
        more in 0_usize..8,
    ) {
        let size = 8 * ring.len() as u64;
        let expected: Vec<_> = walk(&ring, 0, size).into_iter().map_while(Result::ok).collect();
        let words: Vec<_> = in_words(&ring, 0)
            .map(|(header, _, body)| (header.kind, body.to_vec()))
            .collect();
        prop_assert_eq!(&words, &expected);
        let mut bytes: Vec<u8> = ring.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.resize(bytes.len() + more, 0);
        let lengths: Vec<_> = in_bytes(&bytes)
            .map(|(header, record)| (header.kind, record.len() / 8 - 1))
            .collect();
        let expected: Vec<_> = expected.iter().map(|(kind, body)| (*kind, body.len())).collect();
        prop_assert_eq!(lengths, expected);
    }
}
