//! Parses the records of a host ring. Lengths are not trusted: they cannot lead out of the ring or
//! stop the walk; a walk over nonsense ends, and skipped bytes count as a loss.

use crate::source::Mode;

const TYPE_LOST: u32 = 2;
const TYPE_THROTTLE: u32 = 5;
pub(super) const TYPE_SAMPLE: u32 = 9;

/// `PERF_RECORD_MISC_CPUMODE_MASK` and two of its values.
const MODE_MASK: u64 = 7;
const GUEST_KERNEL: u64 = 4;
const GUEST_USER: u64 = 5;

const WORD: u64 = 8;
/// IP, TIME, PERIOD.
const SAMPLE_WORDS: u64 = 3;
/// Id, number.
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

/// One record in a ring: its header, and its words on demand.
pub(super) struct Body<'a> {
    /// `PERF_RECORD_*`.
    pub(super) kind: u32,
    misc: u64,
    /// Words behind the header.
    pub(super) words: u64,
    word: &'a dyn Fn(u64) -> u64,
}

impl Body<'_> {
    /// Word `index` behind the header; zero beyond the record.
    pub(super) fn word(&self, index: u64) -> u64 {
        if index >= self.words {
            return 0;
        }
        (self.word)(index)
    }

    /// The content of a record other than a sample, which every event can have.
    pub(super) fn notice(&self) -> Option<Notice> {
        match self.kind {
            TYPE_LOST if self.words >= LOST_WORDS => Some(Notice::Lost(self.word(1))),
            TYPE_LOST => Some(Notice::Lost(1)),
            TYPE_THROTTLE => Some(Notice::Throttle),
            _ => None,
        }
    }
}

/// The content of a record other than a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Notice {
    /// The given number of samples is missing.
    Lost(u64),
    /// `PERF_RECORD_THROTTLE`.
    Throttle,
}

/// Takes the records between `tail` and `head` out of a ring of `size` bytes, oldest first. `word`
/// returns the aligned word at an offset below `size`.
///
/// Afterwards the reader's tail is `head`: the ring is empty.
pub fn take(
    word: impl Fn(u64) -> u64,
    size: u64,
    tail: u64,
    head: u64,
    mut found: impl FnMut(Record),
) {
    walk(word, size, tail, head, |body| match body {
        None => found(Record::Lost(1)),
        Some(body) if body.kind == TYPE_SAMPLE => match body.words {
            SAMPLE_WORDS => found(Record::Sample {
                mode: mode(body.misc),
                ip: body.word(0),
                time: body.word(1),
                period: body.word(2),
            }),
            _ => found(Record::Lost(1)),
        },
        Some(body) => match body.notice() {
            Some(Notice::Lost(lost)) => found(Record::Lost(lost)),
            Some(Notice::Throttle) => found(Record::Throttle),
            None => {}
        },
    });
}

/// Walks the records between `tail` and `head` like [`take`]; `None` for nonsense, which ends the
/// walk.
pub(super) fn walk(
    word: impl Fn(u64) -> u64,
    size: u64,
    tail: u64,
    head: u64,
    mut found: impl FnMut(Option<Body<'_>>),
) {
    let held = head.wrapping_sub(tail);
    if size == 0 || held > size || !(held | tail).is_multiple_of(WORD) {
        if held != 0 {
            found(None);
        }
        return;
    }
    let at = |position: u64| word(tail.wrapping_add(position) % size);
    let mut position = 0;
    while position < held {
        let header = at(position);
        let len = header >> 48;
        if len < WORD || !len.is_multiple_of(WORD) || len > held - position {
            return found(None);
        }
        found(Some(Body {
            // The low half, which fits.
            kind: u32::try_from(header & 0xffff_ffff).unwrap_or(0),
            misc: header >> 32 & MODE_MASK,
            words: len / WORD - 1,
            word: &|index| at(position + WORD + index * WORD),
        }));
        position += len;
    }
}

fn mode(mode: u64) -> Mode {
    match mode {
        GUEST_KERNEL | GUEST_USER => Mode::Guest,
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

    /// A record of `words`, with its expected content.
    fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u64> {
        let len = u16::try_from(8 * (1 + words.len())).expect("short");
        [&[header(kind, misc, len)], words].concat()
    }

    /// A ring that holds `records` from byte `tail` on.
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
        let sample = |mode, ip, time, period| Record::Sample {
            mode,
            ip,
            time,
            period,
        };
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
            // A length that reaches the end of the ring's data could be valid.
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
                    mode: mode(misc.into()),
                    ip,
                    time,
                    period,
                })
                .collect();
            prop_assert_eq!(taken(&records, tail), expected);
        }
    }
}
