//! Interprets the records of a host ring. Bytes that cannot be records count as a loss.

use vpmu_perf::record::{self, MODE_GUEST_KERNEL, MODE_GUEST_USER, Records, TYPE_LOST, TYPE_SAMPLE, TYPE_THROTTLE};

use crate::source::Mode;

/// Number of words in a sample's body, which consists of IP, TIME and PERIOD.
const SAMPLE_WORDS: u64 = 3;
/// Number of words in a loss record's body, which consists of the event's id and the number of lost records.
const LOST_WORDS: u64 = 2;

/// The content of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// `PERF_RECORD_SAMPLE` with IP, TIME and PERIOD.
    Sample {
        /// The mode of the thread.
        mode: Mode,
        /// IP.
        ip: u64,
        /// TIME, nanoseconds of the event's clock.
        time: u64,
        /// PERIOD.
        period: u64,
    },
    /// The given number of samples is missing.
    Lost(u64),
    /// `PERF_RECORD_THROTTLE`.
    Throttle,
}

/// The content of a record that reports a loss or a throttle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The given number of samples is missing.
    Lost(u64),
    /// `PERF_RECORD_THROTTLE`.
    Throttle,
}

/// Returns the content of a `PERF_RECORD_LOST` or `PERF_RECORD_THROTTLE`. The ring of any event can contain these
/// records. `None` for any other record.
pub(super) fn notice<W: Fn(u64) -> u64>(record: &record::Record<'_, W>) -> Option<Notice> {
    match record.header.kind {
        TYPE_LOST if record.words() >= LOST_WORDS => Some(Notice::Lost(record.word(1))),
        TYPE_LOST => Some(Notice::Lost(1)),
        TYPE_THROTTLE => Some(Notice::Throttle),
        _ => None,
    }
}

/// Passes the records between `tail` and `head` of a ring of `size` bytes to `found`, oldest first. `word`
/// returns the aligned word at an offset below `size`.
///
/// Afterwards, the caller must store `head` as the reader's tail. The ring is then empty.
pub fn take(word: impl Fn(u64) -> u64, size: u64, tail: u64, head: u64, mut found: impl FnMut(Record)) {
    for record in Records::new(&word, size, tail, head) {
        match record {
            Err(_) => found(Record::Lost(1)),
            Ok(record) if record.header.kind == TYPE_SAMPLE => match record.words() {
                SAMPLE_WORDS => found(Record::Sample {
                    mode: mode(record.header.mode()),
                    ip: record.word(0),
                    time: record.word(1),
                    period: record.word(2),
                }),
                _ => found(Record::Lost(1)),
            },
            Ok(record) => match notice(&record) {
                Some(Notice::Lost(lost)) => found(Record::Lost(lost)),
                Some(Notice::Throttle) => found(Record::Throttle),
                None => {}
            },
        }
    }
}

fn mode(mode: u16) -> Mode {
    match mode {
        MODE_GUEST_KERNEL | MODE_GUEST_USER => Mode::Guest,
        _ => Mode::Host,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: usize = 256;

    fn header(kind: u32, misc: u16, len: u16) -> u64 {
        u64::from(kind) | u64::from(misc) << 32 | u64::from(len) << 48
    }

    /// A record with `words` after its header.
    fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u64> {
        let len = u16::try_from(8 * (1 + words.len())).expect("short");
        [&[header(kind, misc, len)], words].concat()
    }

    /// Returns the records that [`take`] finds in a ring that holds `records`, starting at byte `tail`.
    fn taken(records: &[Vec<u64>], tail: u64) -> Vec<Record> {
        let mut ring = [0; SIZE / 8];
        let mut head = tail;
        for word in records.concat() {
            ring[usize::try_from(head).expect("small") % SIZE / 8] = word;
            head += 8;
        }
        assert!(head - tail <= SIZE as u64);
        walk(&ring, tail, head)
    }

    fn walk(ring: &[u64], tail: u64, head: u64) -> Vec<Record> {
        let size = 8 * ring.len() as u64;
        let word = |offset: u64| {
            assert!(offset < size && offset.is_multiple_of(8), "inside, aligned");
            ring[usize::try_from(offset / 8).expect("small")]
        };
        let mut found = Vec::new();
        take(word, size, tail, head, |record| found.push(record));
        found
    }

    #[test]
    fn every_kind_across_the_end_of_the_ring() {
        let records = [
            record(TYPE_SAMPLE, 4, &[1, 2, 3]),
            record(TYPE_SAMPLE, 5, &[4, 5, 6]),
            record(TYPE_LOST, 0, &[99, 7]),
            record(14, 0, &[8, 9]),
            record(TYPE_SAMPLE, 1, &[10, 11, 12]),
            record(TYPE_THROTTLE, 0, &[1, 2, 3]),
        ];
        let sample = |mode, ip, time, period| Record::Sample { mode, ip, time, period };
        let expected = [
            sample(Mode::Guest, 1, 2, 3),
            sample(Mode::Guest, 4, 5, 6),
            Record::Lost(7),
            sample(Mode::Host, 10, 11, 12),
            Record::Throttle,
        ];
        for tail in (0..SIZE as u64).step_by(8) {
            assert_eq!(taken(&records, tail), expected, "from {tail}");
        }
    }

    #[test]
    fn nonsense_is_a_loss_and_ends_the_walk() {
        let good = record(TYPE_SAMPLE, 5, &[4, 5, 6]);
        for len in [0, 4, 7, 12, 40, 0xfff8] {
            let bad = vec![header(TYPE_SAMPLE, 5, len)];
            let found = taken(&[good.clone(), bad, good.clone()], 8);
            // A length of 40 bytes could be valid, because the record then ends exactly where the data ends.
            if len != 40 {
                assert_eq!(found.len(), 2, "{len}: {found:?}");
            }
            assert_eq!(found[1], Record::Lost(1), "{len}");
        }
        let ring = [0; 8];
        assert_eq!(walk(&ring, 0, 72), [Record::Lost(1)], "more than it holds");
        assert_eq!(walk(&ring, 8, 0), [Record::Lost(1)], "backwards");
        assert_eq!(walk(&ring, 4, 12), [Record::Lost(1)], "unaligned");
        assert_eq!(walk(&[], 0, 8), [Record::Lost(1)], "no ring at all");
        assert_eq!(walk(&[], 4, 4), []);
    }

    proptest! {
        #[test]
        fn any_bytes_end_the_walk_inside_the_ring(
            ring in prop::collection::vec(any::<u64>(), 1..64),
            tail in any::<u64>(),
            held in 0_u64..600,
        ) {
            let found = walk(&ring, tail, tail.wrapping_add(held));
            prop_assert!(found.len() as u64 <= held / 8 + 1);
        }

        #[test]
        fn whole_records_come_out_as_they_went_in(
            samples in prop::collection::vec((0_u16..8, any::<[u64; 3]>()), 0..=8),
            tail in (0_u64..1 << 40).prop_map(|tail| tail * 8),
        ) {
            let records: Vec<_> = samples
                .iter()
                .map(|(misc, words)| record(TYPE_SAMPLE, *misc, words))
                .collect();
            let expected: Vec<_> = samples
                .iter()
                .map(|&(misc, [ip, time, period])| Record::Sample {
                    mode: mode(misc),
                    ip,
                    time,
                    period,
                })
                .collect();
            prop_assert_eq!(taken(&records, tail), expected);
        }
    }
}
