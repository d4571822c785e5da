//! The producer against a reader that is quick, slow, absent or a liar.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::record::{
    Layout, Origin, Record, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_TID, SAMPLE_TIME, Sample,
    TYPE_LOST, TYPE_SAMPLE,
};

const META: u64 = 0x4000;
const DATA_HEAD: u64 = 1024;
const DATA_TAIL: u64 = 1032;
const LONG: u64 = SAMPLE_IDENTIFIER | SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME;

struct Rig {
    memory: GuestMemoryMmap,
    ring: Ring,
    wakeup: Wakeup,
    record: Record,
    pages: Vec<GuestAddress>,
    tail: u64,
    head: u64,
    produced: u64,
    /// Times of the samples read.
    read: Vec<u64>,
    lost: u64,
}

impl Rig {
    fn new(data_pages: u64, writable: bool, wakeup: Wakeup) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x40000)]).expect("memory");
        // Neither in order nor together, as a guest's pages are.
        let pages: Vec<_> = std::iter::once(GuestAddress(META))
            .chain((0..data_pages).map(|page| GuestAddress(0x20000 - page * 0x2000)))
            .collect();
        let clock = Clock::new(1_000_000).expect("ticks");
        let manner = Manner {
            writable,
            backward: false,
        };
        let ring = Ring::new(&memory, &pages, manner, clock).expect("laid");
        Self {
            memory,
            ring,
            wakeup,
            record: Record::default(),
            pages,
            tail: 0,
            head: 0,
            produced: 0,
            read: Vec::new(),
            lost: 0,
        }
    }

    fn produce(&mut self, sample_type: u64) -> Outcome {
        self.produced += 1;
        let origin = self.origin();
        let layout = Layout {
            sample_type,
            ..Layout::default()
        };
        let sample = Sample {
            ip: self.produced,
            origin,
            period: 1,
            ..Sample::default()
        };
        let author = Author {
            layout: &layout,
            origin: &origin,
            wakeup: self.wakeup,
        };
        let record = self.record.sample(&layout, &sample).expect("short");
        self.ring.write(&self.memory, record, &author)
    }

    fn origin(&self) -> Origin {
        Origin {
            pid: 1,
            tid: 2,
            time: self.produced,
            id: 7,
            stream_id: 8,
            vcpu: 0,
        }
    }

    fn flush(&mut self) -> bool {
        let author = Author {
            layout: &Layout::default(),
            origin: &self.origin(),
            wakeup: self.wakeup,
        };
        self.ring.flush(&self.memory, &author)
    }

    fn word(&self, position: u64) -> u64 {
        let data = self.pages.len() as u64 - 1;
        let page = usize::try_from(position / PAGE % data).expect("an index");
        let at = GuestAddress(self.pages[1 + page].0 + position % PAGE);
        self.memory.read_obj(at).expect("in memory")
    }

    /// Reads at most `records` records and moves the tail past them.
    fn consume(&mut self, records: usize) {
        let head = GuestAddress(META + DATA_HEAD);
        self.head = self
            .memory
            .load(head, Ordering::Acquire)
            .expect("in memory");
        for _ in 0..records {
            if self.tail == self.head {
                break;
            }
            let header = self.word(self.tail);
            let size = header >> 48;
            assert!(
                size >= 8 && size.is_multiple_of(8) && self.tail + size <= self.head,
                "torn"
            );
            match u32::try_from(header & 0xffff_ffff).expect("32 bits") {
                TYPE_LOST => {
                    assert_eq!(self.word(self.tail + 8), 7);
                    self.lost += self.word(self.tail + 16);
                }
                TYPE_SAMPLE if size == 16 => self.read.push(self.word(self.tail + 8)),
                TYPE_SAMPLE => {
                    // IDENTIFIER, IP, TID, TIME: the IP and the time were given the same number.
                    assert_eq!(self.word(self.tail + 8), 7);
                    let time = self.word(self.tail + 32);
                    assert_eq!(self.word(self.tail + 16), time);
                    self.read.push(time);
                }
                other => panic!("a record of type {other}"),
            }
            self.tail += size;
        }
        self.set_tail(self.tail);
    }

    fn set_tail(&self, tail: u64) {
        let at = GuestAddress(META + DATA_TAIL);
        self.memory
            .store(tail, at, Ordering::Release)
            .expect("in memory");
    }

    /// Reads to the end, and finds every sample there or counted as lost.
    fn settle(&mut self) {
        self.consume(usize::MAX);
        self.flush();
        self.consume(usize::MAX);
        assert_eq!(self.read.len() as u64 + self.lost, self.produced);
        assert!(
            self.read.windows(2).all(|two| two[0] < two[1]),
            "out of order"
        );
    }

    /// Whether anything outside the ring's pages was written.
    fn is_clean_outside(&self) -> bool {
        (0..0x40).all(|page| {
            let start = page * PAGE;
            let mut bytes = [0; PAGE_SIZE];
            self.memory
                .read_slice(&mut bytes, GuestAddress(start))
                .expect("in memory");
            self.pages.contains(&GuestAddress(start)) || bytes.iter().all(|&byte| byte == 0)
        })
    }
}

#[derive(Debug, Clone)]
enum Step {
    Produce(usize, bool),
    Consume(usize),
    Lie(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1_usize..120, any::<bool>()).prop_map(|(n, long)| Step::Produce(n, long)),
        3 => (0_usize..150).prop_map(Step::Consume),
        1 => any::<u64>().prop_map(Step::Lie),
        1 => (0_u64..40_000).prop_map(Step::Lie),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    #[test]
    fn written_and_lost_are_what_was_produced(steps in steps(), power in 0_u32..4) {
        let mut rig = Rig::new(1 << power, true, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(n, long) => for _ in 0..n {
                    rig.produce(if long { LONG } else { SAMPLE_TIME });
                },
                Step::Consume(n) => rig.consume(n),
                // A tail that may be believed would let unread records be overwritten: the
                // liar's own loss. One that cannot be must stop the writer.
                Step::Lie(tail) => if tail.wrapping_sub(rig.tail) >= 1 << 33 {
                    rig.set_tail(tail);
                },
            }
        }
        rig.set_tail(rig.tail);
        rig.settle();
        prop_assert!(rig.is_clean_outside());
    }

    #[test]
    fn no_tail_makes_it_write_elsewhere(steps in steps(), power in 0_u32..4, pages in any::<bool>()) {
        let mut rig = Rig::new(if pages { 1 << power } else { 0 }, true, Wakeup::Page);
        for step in steps {
            match step {
                Step::Produce(n, _) => for _ in 0..n { rig.produce(LONG); },
                Step::Consume(n) => rig.set_tail(n as u64),
                Step::Lie(tail) => rig.set_tail(tail),
            }
        }
        prop_assert!(rig.is_clean_outside());
    }

    #[test]
    fn wakeups_by_records_and_bytes(every in 1_u32..300, produced in 1_u64..2000) {
        for (wakeup, grown) in [
            (Wakeup::Records(every), produced),
            (Wakeup::Bytes(every), produced * 16),
        ] {
            let mut rig = Rig::new(8, false, wakeup);
            let wakes = (0..produced).filter(|_| rig.produce(SAMPLE_TIME).wake).count() as u64;
            // Several marks crossed by one record are one wakeup.
            let expected = if matches!(wakeup, Wakeup::Bytes(1..16)) { produced } else { grown / u64::from(every) };
            prop_assert_eq!(wakes, expected);
        }
    }
}

#[test]
fn an_absent_reader_loses_all_but_the_first_fill() {
    let mut rig = Rig::new(1, true, Wakeup::Page);
    for _ in 0..1000 {
        rig.produce(SAMPLE_TIME);
    }
    rig.settle();
    assert_eq!((rig.read.len(), rig.lost), (4096 / 16, 1000 - 256));
}

#[test]
fn the_first_loss_wakes_a_reader_whose_mark_lies_beyond_the_ring() {
    for wakeup in [Wakeup::Records(1_000_000), Wakeup::Bytes(1 << 20)] {
        let mut rig = Rig::new(1, true, wakeup);
        let woke: Vec<_> = (1..=1000)
            .filter(|_| rig.produce(SAMPLE_TIME).wake)
            .collect();
        assert_eq!(woke, [257], "{wakeup:?}");
    }
}

#[test]
fn without_data_pages_nothing_is_written() {
    for writable in [true, false] {
        let mut rig = Rig::new(0, writable, Wakeup::Page);
        assert!(!rig.produce(SAMPLE_TIME).written);
        assert!(!rig.flush());
        assert!(rig.is_clean_outside());
    }
}

#[test]
fn a_read_only_ring_overwrites() {
    let mut rig = Rig::new(1, false, Wakeup::Page);
    let wakes = (0..1000).filter(|_| rig.produce(SAMPLE_TIME).wake).count();
    assert_eq!(wakes, 1000 * 16 / 4096);
    let newest = rig.word(1000 * 16 - 8);
    assert_eq!(newest, 1000);
}

#[test]
fn the_metadata_page_shows_counts_between_two_even_sequences() {
    let mut rig = Rig::new(1, true, Wakeup::Page);
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
            .expect("in memory");
        zerocopy::transmute!(bytes)
    };
    assert_eq!(page.lock.get(), 2);
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
        .expect("in memory");
    assert_eq!(
        capabilities & CAP_USER_TIME,
        0,
        "a count that stands still has no time to add"
    );
}
