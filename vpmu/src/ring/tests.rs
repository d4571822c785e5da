//! The producer against a reader that is quick, slow, absent or a liar.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use vm_memory::Bytes;

use super::face::{CAP_USER_TIME, CAPABILITIES};
use super::producer::{DATA_HEAD, DATA_TAIL};
use super::*;
use crate::abi::Metadata;
use crate::record::{Layout, Origin, SAMPLE_TIME, TYPE_LOST};

const META: u64 = 0x4000;
const MEMORY: usize = 0x40000;
/// Set in the type of this module's records; the rest of it is the record's number.
const NUMBERED: u32 = 1 << 31;

const FORWARD: Manner = Manner {
    writable: true,
    backward: false,
};
const BACKWARD: Manner = Manner {
    backward: true,
    ..FORWARD
};
const OVERWRITE: Manner = Manner {
    writable: false,
    ..FORWARD
};

/// The record with this number: `len` bytes that follow from it.
fn numbered(number: u32, len: usize) -> Vec<u64> {
    let size = u16::try_from(len).expect("a record's length");
    let header = u64::from(NUMBERED | number) | u64::from(size) << 48;
    let body = (1..len as u64 / 8).map(|word| header.wrapping_mul(word));
    std::iter::once(header)
        .chain(body)
        .map(u64::to_le)
        .collect()
}

/// A ring, its memory and its reader.
struct Rig {
    memory: GuestMemoryMmap,
    ring: Ring,
    wakeup: Wakeup,
    pages: Vec<GuestAddress>,
    manner: Manner,
    tail: u64,
    produced: u32,
    /// Numbers of the records read, oldest first.
    read: Vec<u32>,
    lost: u64,
}

impl Rig {
    fn new(data_pages: u64, manner: Manner, wakeup: Wakeup) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        // Neither in order nor together, as a guest's pages are.
        let pages: Vec<_> = std::iter::once(GuestAddress(META))
            .chain((0..data_pages).map(|page| GuestAddress(0x3e000 - page * 0x2000)))
            .collect();
        let clock = Clock::new(1_000_000).expect("ticks");
        let ring = Ring::new(&memory, &pages, manner, clock).expect("laid");
        Self {
            memory,
            ring,
            wakeup,
            pages,
            manner,
            tail: 0,
            produced: 0,
            read: Vec::new(),
            lost: 0,
        }
    }

    fn size(&self) -> u64 {
        (self.pages.len() as u64 - 1) * PAGE
    }

    /// Produces records of these lengths in one session.
    fn burst(&mut self, lens: &[usize]) -> Vec<Outcome> {
        let (layout, origin) = (Layout::default(), Origin::default());
        let author = author(&layout, &origin, self.wakeup);
        let mut session = self.ring.session(&self.memory).expect("memory");
        lens.iter()
            .map(|&len| {
                self.produced += 1;
                session.write(&numbered(self.produced, len), &author)
            })
            .collect()
    }

    fn produce(&mut self, len: usize) -> Outcome {
        self.burst(&[len])[0]
    }

    fn flush(&mut self) -> bool {
        let (layout, origin) = (Layout::default(), Origin::default());
        let author = author(&layout, &origin, self.wakeup);
        self.ring.flush(&self.memory, &author)
    }

    fn head(&self) -> u64 {
        let head = GuestAddress(META + DATA_HEAD as u64);
        self.memory.load(head, Ordering::Acquire).expect("memory")
    }

    fn set_tail(&self, tail: u64) {
        let at = GuestAddress(META + DATA_TAIL as u64);
        self.memory
            .store(tail, at, Ordering::Release)
            .expect("memory");
    }

    fn raw(&self, position: u64) -> u64 {
        let data = self.pages.len() as u64 - 1;
        let page = usize::try_from(position / PAGE % data).expect("an index");
        let at = GuestAddress(self.pages[1 + page].0 + position % PAGE);
        self.memory.read_obj(at).expect("memory")
    }

    fn word(&self, position: u64) -> u64 {
        u64::from_le(self.raw(position))
    }

    fn words(&self, position: u64, len: u64) -> Vec<u64> {
        (0..len / 8)
            .map(|word| self.raw(position.wrapping_add(word * 8)))
            .collect()
    }

    /// The record at `position`: its number, or how many were lost; and its size, `room` at most.
    fn record(&self, position: u64, room: u64) -> (Result<u32, u64>, u64) {
        let header = self.word(position);
        let size = header >> 48;
        assert!(size >= 8 && size.is_multiple_of(8) && size <= room, "torn");
        let kind = u32::try_from(header & 0xffff_ffff).expect("32 bits");
        if kind == TYPE_LOST {
            return (Err(self.word(position.wrapping_add(16))), size);
        }
        let number = kind & !NUMBERED;
        let len = usize::try_from(size).expect("small");
        assert!(self.words(position, size) == numbered(number, len), "torn");
        (Ok(number), size)
    }

    /// Reads at most `records` records and moves the tail past them; backwards, all there are.
    fn consume(&mut self, records: usize) {
        let head = self.head();
        if self.manner.backward {
            let mut newest_first = Vec::new();
            let mut at = head;
            while at != self.tail {
                let (record, size) = self.record(at, self.tail.wrapping_sub(at));
                newest_first.push(record);
                at = at.wrapping_add(size);
            }
            newest_first.reverse();
            newest_first
                .into_iter()
                .for_each(|record| self.found(record));
            self.tail = head;
        } else {
            for _ in 0..records {
                if self.tail == head {
                    break;
                }
                let (record, size) = self.record(self.tail, head - self.tail);
                self.found(record);
                self.tail += size;
            }
        }
        self.set_tail(self.tail);
    }

    fn found(&mut self, record: Result<u32, u64>) {
        match record {
            Ok(number) => self.read.push(number),
            Err(lost) => self.lost += lost,
        }
    }

    /// Reads to the end, and finds every record there or counted as lost.
    fn settle(&mut self) {
        self.set_tail(self.tail);
        self.consume(usize::MAX);
        self.flush();
        self.consume(usize::MAX);
        assert_eq!(
            self.read.len() as u64 + self.lost,
            u64::from(self.produced),
            "each is written or lost"
        );
        let rising = self.read.windows(2).all(|two| two[0] < two[1]);
        assert!(rising, "in order");
    }

    /// Whether anything outside the ring's pages was written.
    fn is_clean_outside(&self) -> bool {
        (0..MEMORY as u64).step_by(PAGE_SIZE).all(|start| {
            let mut bytes = [0; PAGE_SIZE];
            self.memory
                .read_slice(&mut bytes, GuestAddress(start))
                .expect("memory");
            self.pages.contains(&GuestAddress(start)) || bytes.iter().all(|&byte| byte == 0)
        })
    }
}

fn author<'a>(layout: &'a Layout, origin: &'a Origin, wakeup: Wakeup) -> Author<'a> {
    Author {
        layout,
        origin,
        wakeup,
    }
}

#[derive(Debug, Clone)]
enum Step {
    Produce(Vec<usize>),
    Consume(usize),
    Lie(u64),
    Pause(bool),
}

/// Lengths of records: mostly short ones, now and then any there can be.
fn lens() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![
        8 => (1_usize..12).prop_map(|words| words * 8),
        2 => (1_usize..600).prop_map(|words| words * 8),
        1 => (1_usize..=8191).prop_map(|words| words * 8),
    ];
    prop::collection::vec(len, 1..60)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => lens().prop_map(Step::Produce),
        4 => (0_usize..100).prop_map(Step::Consume),
        1 => any::<u64>().prop_map(Step::Lie),
        1 => (0_u64..40_000).prop_map(Step::Lie),
        1 => any::<bool>().prop_map(Step::Pause),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn written_and_lost_are_what_was_produced(
        steps in steps(), power in 0_u32..5, backward in any::<bool>(),
    ) {
        let manner = Manner { writable: true, backward };
        let mut rig = Rig::new(1 << power, manner, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(lens) => {
                    let outcomes = rig.burst(&lens);
                    prop_assert_eq!(outcomes.len(), lens.len());
                }
                Step::Consume(n) => rig.consume(n),
                Step::Pause(paused) => rig.ring.pause(paused),
                // A tail that may be believed would let unread records be overwritten: the
                // liar's own loss. One that cannot be must stop the writer.
                Step::Lie(tail) => {
                    let ahead = tail.wrapping_sub(rig.head());
                    if ahead.wrapping_add(1 << 32) >= 1 << 33 {
                        rig.set_tail(tail);
                    }
                }
            }
        }
        rig.ring.pause(false);
        rig.settle();
        prop_assert!(rig.is_clean_outside());
    }

    #[test]
    fn no_tail_makes_it_write_elsewhere(
        steps in steps(), power in 0_u32..5, data in any::<bool>(),
        writable in any::<bool>(), backward in any::<bool>(),
    ) {
        let manner = Manner { writable, backward };
        let mut rig = Rig::new(if data { 1 << power } else { 0 }, manner, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(lens) => { rig.burst(&lens); }
                Step::Consume(n) => rig.set_tail(n as u64),
                Step::Pause(paused) => rig.ring.pause(paused),
                Step::Lie(tail) => rig.set_tail(tail),
            }
        }
        prop_assert!(rig.is_clean_outside());
    }

    #[test]
    fn an_overwritten_ring_holds_the_newest(bursts in prop::collection::vec(lens(), 1..20), power in 0_u32..5) {
        for backward in [false, true] {
            let manner = Manner { writable: false, backward };
            let mut rig = Rig::new(1 << power, manner, Wakeup::Page);
            // Where each record written lies, its number and size.
            let (mut written, mut head) = (Vec::new(), 0_u64);
            let mut lost_by = 0;
            for lens in &bursts {
                let first = rig.produced + 1;
                for ((number, &len), outcome) in (first..).zip(lens).zip(rig.burst(lens)) {
                    let fits = len as u64 + if lost_by > 0 { 24 } else { 0 } <= rig.size();
                    prop_assert_eq!(outcome.written, fits, "only what is longer than the ring is lost");
                    if !fits {
                        lost_by += 1;
                        continue;
                    }
                    let lost = if std::mem::take(&mut lost_by) > 0 { 24 } else { 0 };
                    let all = lost + len as u64;
                    let at = if backward { head.wrapping_sub(all) } else { head };
                    head = if backward { at } else { at + all };
                    written.push((number, at.wrapping_add(lost), len as u64));
                }
                prop_assert_eq!(rig.head(), head);
            }
            let size = rig.size();
            for &(number, at, len) in written.iter().rev() {
                let end = at.wrapping_add(len);
                let age = if backward { end.wrapping_sub(head) } else { head - at };
                if age > size {
                    break;
                }
                prop_assert_eq!(rig.record(at, len), (Ok(number), len));
            }
            if backward {
                // A reader that knows the head alone finds the same, newest first.
                let (mut at, mut found) = (head, Vec::new());
                while at != 0 && at.wrapping_sub(head) < size {
                    let room = size - at.wrapping_sub(head);
                    if rig.word(at) >> 48 > room {
                        break;
                    }
                    let (record, len) = rig.record(at, room);
                    found.extend(record.ok());
                    at = at.wrapping_add(len);
                }
                let whole = written.iter().rev().take_while(|(_, at, len)| {
                    at.wrapping_add(*len).wrapping_sub(head) <= size
                });
                prop_assert_eq!(found, whole.map(|&(number, ..)| number).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn wakeups_by_records_and_bytes(
        every in 1_u32..300, produced in 1_usize..2000, backward in any::<bool>(),
    ) {
        let manner = Manner { writable: false, backward };
        for (wakeup, grown) in [
            (Wakeup::Records(every), produced as u64),
            (Wakeup::Bytes(every), produced as u64 * 16),
            (Wakeup::Page, produced as u64 * 16),
        ] {
            let mut rig = Rig::new(8, manner, wakeup);
            let wakes = (0..produced).filter(|_| rig.produce(16).wake).count() as u64;
            // Several marks crossed by one record are one wakeup.
            let expected = match wakeup {
                Wakeup::Bytes(1..16) => produced as u64,
                Wakeup::Page => grown / PAGE,
                _ => grown / u64::from(every),
            };
            prop_assert_eq!(wakes, expected);
        }
    }
}

#[test]
fn an_absent_reader_loses_all_but_the_first_fill() {
    for manner in [FORWARD, BACKWARD] {
        let mut rig = Rig::new(1, manner, Wakeup::Page);
        for _ in 0..1000 {
            rig.produce(16);
        }
        rig.settle();
        assert_eq!((rig.read.len(), rig.lost), (4096 / 16, 1000 - 256));
    }
}

#[test]
fn the_first_loss_wakes_a_reader_whose_mark_lies_beyond_the_ring() {
    for wakeup in [Wakeup::Records(1_000_000), Wakeup::Bytes(1 << 20)] {
        let mut rig = Rig::new(1, FORWARD, wakeup);
        let woke: Vec<_> = (1..=1000).filter(|_| rig.produce(16).wake).collect();
        assert_eq!(woke, [257], "{wakeup:?}");
        // Told of that loss by its record, the reader is woken for the next.
        rig.consume(usize::MAX);
        let woke: Vec<_> = (1..=1000).filter(|_| rig.produce(16).wake).collect();
        assert_eq!(woke, [255], "{wakeup:?}, 24 bytes less");
        rig.settle();
    }
}

#[test]
fn without_data_pages_nothing_is_written() {
    for manner in [FORWARD, OVERWRITE] {
        let mut rig = Rig::new(0, manner, Wakeup::Page);
        assert_eq!(rig.produce(16), Outcome::default());
        assert!(!rig.flush());
        assert!(rig.is_clean_outside());
    }
}

#[test]
fn a_burst_moves_the_head_once() {
    let mut rig = Rig::new(1, FORWARD, Wakeup::Page);
    let (layout, origin) = (Layout::default(), Origin::default());
    let author = author(&layout, &origin, Wakeup::Page);
    let at = GuestAddress(META + DATA_HEAD as u64);
    let head = || -> u64 { rig.memory.load(at, Ordering::Acquire).expect("memory") };
    let mut session = rig.ring.session(&rig.memory).expect("memory");
    for number in 1..=3 {
        assert!(session.write(&numbered(number, 16), &author).written);
        assert_eq!(head(), 0);
    }
    drop(session);
    assert_eq!(head(), 48);
}

#[test]
fn while_paused_records_are_lost_and_nobody_is_woken() {
    for manner in [FORWARD, BACKWARD, OVERWRITE] {
        let mut rig = Rig::new(1, manner, Wakeup::Records(1));
        rig.produce(16);
        rig.ring.pause(true);
        for _ in 0..5 {
            assert_eq!(rig.produce(16), Outcome::default());
        }
        assert!(!rig.flush());
        rig.consume(usize::MAX);
        assert_eq!((rig.read.as_slice(), rig.lost), (&[1][..], 0));
        rig.ring.pause(false);
        assert!(rig.produce(16).written);
        rig.consume(usize::MAX);
        assert_eq!((rig.read.as_slice(), rig.lost), (&[1, 7][..], 5));
    }
}

#[test]
fn a_note_that_does_not_fit_is_no_loss() {
    let mut rig = Rig::new(1, FORWARD, Wakeup::Records(1));
    let (layout, origin) = (Layout::default(), Origin::default());
    rig.produce(4080);
    let note = numbered(99, 24);
    let author = author(&layout, &origin, Wakeup::Records(1));
    let refused = rig.ring.note(&rig.memory, &note, &author);
    assert_eq!(refused, Outcome::default());
    rig.consume(usize::MAX);
    let written = rig.ring.note(&rig.memory, &note, &author);
    assert!(written.written && !written.wake, "no sample to count");
    rig.consume(usize::MAX);
    assert_eq!((rig.read.as_slice(), rig.lost), (&[1, 99][..], 0));
}

#[test]
fn events_that_share_a_ring_keep_their_own_marks() {
    let mut rig = Rig::new(1, FORWARD, Wakeup::Page);
    let mut wakes = Vec::new();
    for turn in 0..12 {
        rig.wakeup = [Wakeup::Records(2), Wakeup::Bytes(64)][turn % 2];
        wakes.push(rig.produce(16).wake);
    }
    // Every second record of the one; every 64 bytes of both, told when the other writes.
    let by_records = [false, true, false, true, false, true];
    let by_bytes = [false, true, false, true, false, true];
    assert_eq!(
        wakes.iter().step_by(2).copied().collect::<Vec<_>>(),
        by_records
    );
    assert_eq!(
        wakes[1..].iter().step_by(2).copied().collect::<Vec<_>>(),
        by_bytes
    );
}

#[test]
fn a_loss_is_told_in_the_name_of_the_next_to_write() {
    let mut rig = Rig::new(1, FORWARD, Wakeup::Page);
    rig.ring.lose(3);
    let layout = Layout {
        sample_type: SAMPLE_TIME,
        sample_id_all: true,
        ..Layout::default()
    };
    let origin = Origin {
        id: 5,
        time: 77,
        ..Origin::default()
    };
    let author = author(&layout, &origin, Wakeup::Page);
    rig.ring.write(&rig.memory, &numbered(1, 16), &author);
    let words: Vec<_> = (0..4).map(|word| rig.word(word * 8)).collect();
    assert_eq!(words, [u64::from(TYPE_LOST) | 32 << 48, 5, 3, 77]);
    assert_eq!(rig.record(32, 16), (Ok(1), 16));
}

#[test]
fn the_metadata_page_shows_counts_between_two_even_sequences() {
    let mut rig = Rig::new(1, FORWARD, Wakeup::Page);
    rig.ring.show(
        &rig.memory,
        &Face {
            count: 11,
            time_enabled: 22,
            time_running: 21,
            growing_since: Some(5),
        },
    );
    let page: Metadata = {
        let mut bytes = [0; size_of::<Metadata>()];
        rig.memory
            .read_slice(&mut bytes, GuestAddress(META))
            .expect("memory");
        zerocopy::transmute!(bytes)
    };
    assert_eq!(page.lock.get(), 2);
    assert_eq!(page.index.get(), 0);
    assert_eq!(page.pmc_width.get(), 64);
    assert_eq!(page.offset.get(), 11);
    assert_eq!(page.time_enabled.get(), 22);
    assert_eq!(page.time_running.get(), 21);
    assert_eq!(page.time_offset.get(), 5_u64.wrapping_neg());
    assert_eq!(page.capabilities.get() & CAP_USER_TIME, CAP_USER_TIME);
    assert_eq!(page.data_offset.get(), 4096);
    assert_eq!(page.data_size.get(), 4096);
    rig.ring.show(
        &rig.memory,
        &Face {
            count: 12,
            time_enabled: 22,
            time_running: 21,
            growing_since: None,
        },
    );
    let capabilities: u64 = rig
        .memory
        .read_obj(GuestAddress(META + CAPABILITIES as u64))
        .expect("memory");
    assert_eq!(
        capabilities & CAP_USER_TIME,
        0,
        "a count that stands still has no time to add"
    );
}
