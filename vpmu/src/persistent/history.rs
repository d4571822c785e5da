//! Splits a ring's bytes into whole records. The position of the first record comes from the device and is
//! trusted. The ring's content is not trusted, because the guest can write to the ring.

use vpmu_perf::record;

/// Returns the records in `bytes` that `is_own` accepts, concatenated, oldest first. `newest_first` is true if `bytes`
/// begins with the newest record. If a record's size is invalid or exceeds the rest of `bytes`, this record and
/// everything after it are omitted.
pub(crate) fn whole(bytes: &[u8], newest_first: bool, is_own: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let mut records: Vec<_> =
        record::in_bytes(bytes).map(|(_, record)| record).filter(|record| is_own(record)).collect();
    if newest_first {
        records.reverse();
    }
    records.concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: usize = 8;

    fn record(kind: u8, size: u16) -> Vec<u8> {
        let mut bytes = vec![0; usize::from(size).max(HEADER)];
        bytes[0] = kind;
        bytes[6..8].copy_from_slice(&size.to_le_bytes());
        bytes
    }

    #[test]
    fn oldest_record_comes_first() {
        let [one, two, three] = [record(1, 8), record(2, 24), record(3, 16)];
        let bytes = [one.clone(), two.clone(), three.clone()].concat();
        assert_eq!(whole(&bytes, false, |_| true), bytes);
        let turned = [three, two, one].concat();
        assert_eq!(whole(&bytes, true, |_| true), turned);
    }

    #[test]
    fn partial_record_ends_the_history_and_foreign_record_is_omitted() {
        let own = [record(1, 16), record(1, 8)];
        for end in [record(1, 0), record(1, 7), record(1, 12), vec![1; 7], Vec::new()] {
            let bytes = [&own[0], &record(2, 24), &own[1], &end[..]].concat();
            assert_eq!(whole(&bytes, false, |record| record[0] == 1), own.concat());
        }
        let cut = record(1, 4096);
        assert_eq!(whole(&cut[..4095], false, |_| true), Vec::<u8>::new());
    }

    proptest! {
        #[test]
        fn history_of_any_bytes_ends(bytes in prop::collection::vec(any::<u8>(), 0..4096), newest_first: bool) {
            prop_assert!(whole(&bytes, newest_first, |_| true).len() <= bytes.len());
        }
    }
}
