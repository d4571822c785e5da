//! Combines the records of a host ring into exits of a vCPU. Each exit contains the time of the entry that ended it, if
//! known. Lengths in records are not trusted, and unreadable records count as losses.

use vpmu_perf::record::{Record, Records, TYPE_SAMPLE};

use super::Layout;
use super::raw::Raw;
use super::redact::guest_visible;
use crate::host::records::{Notice, notice};

/// Index of the word after TIME, where the raw data begins.
const RAW_WORD: u64 = 1;

/// An item of a ring of exits and entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TracedItem {
    Exit(Exit),
    /// The given number of exits is missing.
    Lost(u64),
}

/// One exit of a vCPU, without data about the host. Times are in nanoseconds of the host event's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exit {
    pub(super) time: u64,
    pub(super) ip: u64,
    pub(super) reason: u16,
    pub(super) info: [u64; 2],
    /// The time when the vCPU was about to re-enter the guest. `None` if unknown.
    pub(super) back: Option<u64>,
}

/// The content of a tracepoint's record.
enum Moment {
    Exit(Exit),
    Entry(u64),
}

/// State that lasts from one drain of a ring to the next, such as an exit whose entry has not been read yet.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    open: Option<Exit>,
    /// Whether the last record, lost or not, was an entry.
    inside: bool,
}

impl Pairs {
    /// Takes the records between `tail` and `head`. See [`crate::host::records::take`].
    pub(super) fn take(
        &mut self,
        layout: &Layout,
        word: impl Fn(u64) -> u64,
        size: u64,
        tail: u64,
        head: u64,
        mut found: impl FnMut(TracedItem),
    ) {
        for record in Records::new(&word, size, tail, head) {
            match record {
                Err(_) => self.lose(1, &mut found),
                Ok(record) if record.header.kind == TYPE_SAMPLE => match moment(layout, &record) {
                    Some(Moment::Exit(exit)) => {
                        self.finish(&mut found);
                        self.inside = false;
                        self.open = Some(exit);
                    }
                    Some(Moment::Entry(back)) => {
                        self.inside = true;
                        if let Some(exit) = self.open.take() {
                            let back = Some(back);
                            found(TracedItem::Exit(Exit { back, ..exit }));
                        }
                    }
                    None => self.lose(1, &mut found),
                },
                Ok(record) => {
                    if let Some(Notice::Lost(records)) = notice(&record) {
                        self.lose(records, &mut found);
                    }
                }
            }
        }
    }

    /// Reports the exit that still waits for its entry, if there is one. Call this when no entry will follow.
    pub(super) fn finish(&mut self, found: &mut impl FnMut(TracedItem)) {
        if let Some(exit) = self.open.take() {
            found(TracedItem::Exit(exit));
        }
    }

    /// Reports the exit that still waits for its entry, and then the number of exits among `records` lost records.
    /// Exits and entries alternate, so this number can be computed from the number of lost records.
    fn lose(&mut self, records: u64, found: &mut impl FnMut(TracedItem)) {
        let (odd, inside) = (records % 2 == 1, self.inside);
        self.finish(found);
        self.inside = inside != odd;
        let exits = records / 2 + u64::from(inside && odd);
        if exits > 0 {
            found(TracedItem::Lost(exits));
        }
    }
}

fn moment<W: Fn(u64) -> u64>(layout: &Layout, body: &Record<'_, W>) -> Option<Moment> {
    let time = body.word(0);
    let raw = Raw::of(body, RAW_WORD)?;
    let raw = raw.bytes();
    let kind = layout.kind.of(raw);
    if kind == u64::from(layout.entry) {
        return Some(Moment::Entry(time));
    }
    if kind != u64::from(layout.exit) || raw.len() < layout.end {
        return None;
    }
    let reason = layout.reason.of(raw);
    let info = layout.info.map(|info| info.of(raw));
    Some(Moment::Exit(Exit {
        time,
        ip: layout.ip.of(raw),
        // Keep only the low half of the hardware's exit reason. An SVM reason fits in 16 bits, and the high half of a
        // VMX reason contains flags.
        reason: u16::try_from(reason & 0xffff).unwrap_or(u16::MAX),
        info: guest_visible(layout.isa.of(raw), reason, info),
        back: None,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::host::tracepoint::Tracepoints;
    use crate::host::tracepoint::tests::{ENTRY, EXIT};

    const SIZE: usize = 1024;
    const TYPE_LOST: u64 = 2;

    fn layout() -> Layout {
        Tracepoints::parse(EXIT, ENTRY).expect("formats").layout
    }

    fn record(kind: u64, words: &[u64]) -> Vec<u64> {
        let len = 8 * (1 + words.len() as u64);
        [&[kind | len << 48], words].concat()
    }

    /// A sample of `raw`, padded like perf's.
    fn sample(time: u64, raw: &[u8]) -> Vec<u64> {
        let padded = (raw.len() + 4).next_multiple_of(8) - 4;
        let mut bytes = u32::try_from(padded).expect("short").to_le_bytes().to_vec();
        bytes.extend(raw);
        bytes.resize(padded + 4, 0);
        let (words, _) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        record(TYPE_SAMPLE.into(), &[&[time], words.as_slice()].concat())
    }

    fn raw_exit(reason: u32, ip: u64, info: [u64; 2]) -> Vec<u8> {
        let mut raw = vec![0; 64];
        raw[..2].copy_from_slice(&1473_u16.to_le_bytes());
        raw[4..8].copy_from_slice(&4711_u32.to_le_bytes());
        raw[8..12].copy_from_slice(&reason.to_le_bytes());
        raw[16..24].copy_from_slice(&ip.to_le_bytes());
        raw[24..28].copy_from_slice(&2_u32.to_le_bytes());
        raw[32..40].copy_from_slice(&info[0].to_le_bytes());
        raw[40..48].copy_from_slice(&info[1].to_le_bytes());
        raw
    }

    fn exit(time: u64, ip: u64) -> Vec<u64> {
        sample(time, &raw_exit(0x7b, ip, [1, 2]))
    }

    fn entry(time: u64) -> Vec<u64> {
        let mut raw = vec![0xff; 28];
        raw[..2].copy_from_slice(&1482_u16.to_le_bytes());
        sample(time, &raw)
    }

    fn lost(records: u64) -> Vec<u64> {
        record(TYPE_LOST, &[7, records])
    }

    /// Returns the results of [`Pairs::take`] for a ring that holds `records`, starting at byte `tail`.
    fn taken(pairs: &mut Pairs, records: &[Vec<u64>], tail: u64) -> Vec<TracedItem> {
        let mut ring = [0; SIZE / 8];
        let mut head = tail;
        for word in records.concat() {
            ring[usize::try_from(head).expect("small") % SIZE / 8] = word;
            head += 8;
        }
        assert!(head - tail <= SIZE as u64, "{}", head - tail);
        let mut found = Vec::new();
        let word = |offset: u64| ring[usize::try_from(offset / 8).expect("small")];
        pairs.take(&layout(), word, SIZE as u64, tail, head, |one| found.push(one));
        found
    }

    fn found(time: u64, ip: u64, back: Option<u64>) -> TracedItem {
        TracedItem::Exit(Exit { time, ip, reason: 0x7b, info: [1, 2], back })
    }

    #[test]
    fn exit_pairs_with_the_next_entry() {
        for tail in (0..SIZE as u64).step_by(8) {
            let mut pairs = Pairs::default();
            let first = [entry(5), exit(10, 1), entry(12), exit(20, 2)];
            assert_eq!(taken(&mut pairs, &first, tail), [found(10, 1, Some(12))]);
            let rest = [entry(21), exit(30, 3)];
            assert_eq!(taken(&mut pairs, &rest, tail), [found(20, 2, Some(21))]);
            let mut last = Vec::new();
            pairs.finish(&mut |one| last.push(one));
            assert_eq!(last, [found(30, 3, None)], "reported without an entry");
        }
    }

    #[test]
    fn record_of_another_tracepoint_is_ignored() {
        let other = record(14, &[1, 2, 3]);
        let records = [entry(5), exit(10, 1), other, entry(12)];
        assert_eq!(taken(&mut Pairs::default(), &records, 0), [found(10, 1, Some(12))]);
    }

    /// Checks a sequence of alternating exits and entries, some of which the ring dropped. The reported exits and the
    /// reported losses must add up to the number of exits in the sequence.
    fn check_losses(events: usize, dropped: std::ops::Range<usize>) {
        let mut records = Vec::new();
        let mut exits = 0;
        for index in 0..events {
            let is_exit = index % 2 == 1;
            exits += u64::from(is_exit);
            let time = 10 * index as u64;
            if index == dropped.end && !dropped.is_empty() {
                records.push(lost(dropped.len() as u64));
            }
            if !dropped.contains(&index) {
                records.push(if is_exit { exit(time, 1) } else { entry(time) });
            }
        }
        let mut pairs = Pairs::default();
        let mut all = taken(&mut pairs, &records, 0);
        pairs.finish(&mut |one| all.push(one));
        let reported = all.iter().map(|one| match one {
            TracedItem::Exit(_) => 1,
            TracedItem::Lost(exits) => *exits,
        });
        assert_eq!(reported.sum::<u64>(), exits, "{dropped:?} of {events}: {all:?}");
    }

    #[test]
    fn of_lost_records_half_are_exits() {
        for events in 1..10 {
            for from in 0..events {
                for to in from..events {
                    check_losses(events, from..to);
                }
            }
        }
    }

    #[test]
    fn exit_whose_entry_was_lost_has_no_end() {
        let records = [entry(5), exit(10, 1), lost(3), exit(30, 2), entry(31)];
        let expected = [found(10, 1, None), TracedItem::Lost(1), found(30, 2, Some(31))];
        // The lost records are an entry, an exit and an entry.
        assert_eq!(taken(&mut Pairs::default(), &records, 0), expected);
    }

    #[test]
    fn lengths_that_lie_are_losses() {
        let good = exit(10, 1);
        let mut long = good.clone();
        long[2] = long[2] & !0xffff_ffff | 0xffff_fff0;
        let mut longer = good.clone();
        longer[2] = longer[2] & !0xffff_ffff | (8 * (longer.len() as u64 - 2) - 4 + 1);
        let short = sample(10, &raw_exit(0x7b, 1, [1, 2])[..40]);
        let tiny = record(TYPE_SAMPLE.into(), &[10]);
        let none = record(TYPE_SAMPLE.into(), &[]);
        for bad in [long, longer, short, tiny, none] {
            let records = [entry(5), bad.clone(), entry(12), exit(20, 2)];
            let mut pairs = Pairs::default();
            assert_eq!(taken(&mut pairs, &records, 0), [TracedItem::Lost(1)], "{bad:x?}");
        }
    }

    /// VPMU-D-6.8-9.
    #[test]
    fn exit_without_guest_information_has_none() {
        // An external interrupt, whose information words may be stale.
        let records = [entry(5), sample(10, &raw_exit(0x60, 1, [u64::MAX; 2])), entry(12)];
        let reported = taken(&mut Pairs::default(), &records, 0);
        let [TracedItem::Exit(exit)] = reported[..] else {
            panic!("{reported:?}");
        };
        assert_eq!((exit.reason, exit.info), (0x60, [0; 2]));
    }

    proptest! {
        #[test]
        fn any_ring_is_gone_through(
            ring in prop::collection::vec(any::<u64>(), 1..64),
            tail in any::<u64>(),
            held in 0_u64..600,
        ) {
            let size = 8 * ring.len() as u64;
            let word = |offset: u64| ring[usize::try_from(offset / 8).expect("inside")];
            let mut reported = 0;
            Pairs::default().take(&layout(), word, size, tail, tail.wrapping_add(held), |_| reported += 1);
            prop_assert!(reported <= 2 * (held / 8 + 1));
        }
    }
}
