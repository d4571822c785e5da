//! Splits a ring's bytes into whole records. The guest can write there: only the start of the first
//! record, from the device, is trusted.

/// A record's header: its type, its mode, its size.
const HEADER: usize = 8;

/// The records in `bytes` that `is_own` accepts, in sequence, oldest first. An invalid size, or one
/// beyond the end, ends the sequence.
pub(crate) fn whole(bytes: &[u8], newest_first: bool, is_own: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut records = Vec::new();
    let mut rest = bytes;
    while let Some(size) = size(rest) {
        let Some((record, after)) = rest.split_at_checked(size) else {
            break;
        };
        if is_own(record) {
            records.push(record);
        }
        rest = after;
    }
    if newest_first {
        records.reverse();
    }
    records.concat()
}

/// The size of the record at the start of `bytes`, if valid.
fn size(bytes: &[u8]) -> Option<usize> {
    let field = bytes.get(HEADER - 2..HEADER)?;
    let size = usize::from(u16::from_le_bytes([field[0], field[1]]));
    (size >= HEADER && size.is_multiple_of(8)).then_some(size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u8, size: u16) -> Vec<u8> {
        let mut bytes = vec![0; usize::from(size).max(HEADER)];
        bytes[0] = kind;
        bytes[6..8].copy_from_slice(&size.to_le_bytes());
        bytes
    }

    #[test]
    fn the_oldest_comes_first() {
        let [one, two, three] = [record(1, 8), record(2, 24), record(3, 16)];
        let bytes = [one.clone(), two.clone(), three.clone()].concat();
        assert_eq!(whole(&bytes, false, |_| true), bytes);
        let turned = [three, two, one].concat();
        assert_eq!(whole(&bytes, true, |_| true), turned);
    }

    #[test]
    fn what_is_not_whole_ends_it_and_what_is_not_its_own_is_left_out() {
        let own = [record(1, 16), record(1, 8)];
        for end in [
            record(1, 0),
            record(1, 7),
            record(1, 12),
            vec![1; 7],
            Vec::new(),
        ] {
            let bytes = [&own[0], &record(2, 24), &own[1], &end[..]].concat();
            assert_eq!(whole(&bytes, false, |record| record[0] == 1), own.concat());
        }
        let cut = record(1, 4096);
        assert_eq!(whole(&cut[..4095], false, |_| true), Vec::<u8>::new());
    }

    proptest! {
        #[test]
        fn whatever_stands_there_it_comes_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..4096), newest_first: bool) {
            prop_assert!(whole(&bytes, newest_first, |_| true).len() <= bytes.len());
        }
    }
}
