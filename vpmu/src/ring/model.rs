//! Uses loom to test every interleaving of the producer and a reader of a ring. The producer accesses loom's
//! weak memory model instead of guest memory.
//!
//! The reader follows the protocol in the kernel's `perf_event.h`. It reads the data with plain loads, and the producer
//! writes it with plain stores. The model fails if a load and a store of the same word are unordered, or if the reader
//! sees a torn or stale record.

use loom::cell::Cell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::thread;

use super::producer::{DATA_HEAD, DATA_TAIL};
use super::user_page::{COUNT, LOCK, update};
use super::*;
use crate::pages::Pages;
use crate::record::{Layout, SampleId};

/// Number of words in the data. A record has three words, so eight words hold two records and the first part of a third
/// record, whose rest wraps around.
const WORDS: u64 = 8;
const RECORD: usize = 24;
const LOST: u64 = 2 | 24 << 48;

/// A plain word accessed by both sides.
struct Word(Cell<u64>);

#[expect(unsafe_code, reason = "shared without a lock, as a ring's data is")]
// SAFETY: loom runs one thread at a time, and fails the model if two conflicting accesses to the cell are unordered, so
// it detects every data race.
unsafe impl Sync for Word {}

/// The memory shared by the producer and the reader.
struct Shared {
    lock: AtomicU32,
    count: AtomicU64,
    enabled: AtomicU64,
    head: AtomicU64,
    tail: AtomicU64,
    data: Vec<Word>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            lock: AtomicU32::new(0),
            count: AtomicU64::new(0),
            enabled: AtomicU64::new(0),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            data: (0..WORDS).map(|_| Word(Cell::new(0))).collect(),
        })
    }

    fn word(&self, position: u64) -> &Cell<u64> {
        let index = usize::try_from(position / 8 % WORDS).expect("small");
        &self.data[index].0
    }
}

struct Model(Arc<Shared>);

impl Pages for Model {
    fn load(&self, field: usize, order: Ordering) -> Result<u64, pages::Unwritable> {
        assert_eq!(field, DATA_TAIL, "the producer reads only the tail");
        Ok(self.0.tail.load(order))
    }

    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), pages::Unwritable> {
        match field {
            // If the model fails, its panic drops the session, and the drop stores the head. Ignore this store, because
            // loom's memory no longer exists by then.
            _ if std::thread::panicking() => {}
            DATA_HEAD => self.0.head.store(value, order),
            COUNT => self.0.count.store(value, order),
            _ if field == COUNT + 8 => self.0.enabled.store(value, order),
            _ => {}
        }
        Ok(())
    }

    fn store_half(&self, field: usize, value: u32, order: Ordering) -> Result<(), pages::Unwritable> {
        assert_eq!(field, LOCK);
        self.0.lock.store(value, order);
        Ok(())
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }

    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), pages::Unwritable> {
        for (index, &word) in (0..).zip(words) {
            let at = position.wrapping_add(index * 8);
            self.0.word(at).set(u64::from_le(word));
        }
        Ok(())
    }
}

/// The records that a reader read.
#[derive(Default)]
struct ReadRecords {
    numbers: Vec<u64>,
    lost: u64,
}

impl ReadRecords {
    /// Reads the records in `from..to`.
    fn read(&mut self, shared: &Shared, from: u64, to: u64) {
        let mut at = from;
        let mut numbers = Vec::new();
        while at != to {
            let header = shared.word(at).get();
            let first = shared.word(at.wrapping_add(8)).get();
            let second = shared.word(at.wrapping_add(16)).get();
            if header == LOST {
                self.lost += second;
            } else {
                assert_eq!(header, RECORD_HEADER, "a header");
                assert_eq!(first, !second, "a whole record");
                numbers.push(first);
            }
            at = at.wrapping_add(RECORD as u64);
        }
        self.numbers.extend(numbers);
    }

    /// Reads the ring once, as `perf_event.h` requires.
    fn look(&mut self, shared: &Shared, tail: &mut u64, backward: bool) {
        let head = shared.head.load(Ordering::Acquire);
        let (from, to) = if backward { (head, *tail) } else { (*tail, head) };
        self.read(shared, from, to);
        *tail = head;
        shared.tail.store(head, Ordering::Release);
    }
}

const RECORD_HEADER: u64 = 9 | (RECORD as u64) << 48;

fn record(number: u64) -> [u64; 3] {
    [RECORD_HEADER, number, !number].map(u64::to_le)
}

fn context<'a>(layout: &'a Layout, sample_id: &'a SampleId) -> WriteContext<'a> {
    WriteContext { layout, sample_id, wakeup: Wakeup::Page, prompt: false }
}

/// Runs a producer and a reader concurrently. For each number in `bursts`, the producer writes a burst of that many
/// records. The reader reads the ring `looks` times.
fn run(backward: bool, bursts: &'static [u64], looks: usize) {
    loom::model(move || {
        let shared = Shared::new();
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (mut found, mut tail) = (ReadRecords::default(), 0);
                for _ in 0..looks {
                    found.look(&shared, &mut tail, backward);
                }
                (found, tail)
            })
        };
        let mode = RingMode { writable: true, backward };
        let mut producer = Producer::new(WORDS * 8, mode);
        let (layout, sample_id) = (Layout::default(), SampleId::default());
        let (mut produced, mut written) = (0, 0);
        for &burst in bursts {
            let mut session = Session::new(&mut producer, Model(Arc::clone(&shared)));
            for _ in 0..burst {
                produced += 1;
                let outcome = session.write(&record(produced), &context(&layout, &sample_id));
                written += u64::from(outcome.written);
            }
        }
        let (mut found, mut tail) = reader.join().expect("the reader");
        found.look(&shared, &mut tail, backward);
        Session::new(&mut producer, Model(Arc::clone(&shared))).flush(&context(&layout, &sample_id));
        found.look(&shared, &mut tail, backward);
        assert_eq!(found.numbers.len() as u64, written);
        assert_eq!(written + found.lost, produced, "each record is written or lost");
        if !backward {
            let rising = found.numbers.windows(2).all(|two| two[0] < two[1]);
            assert!(rising, "records are in order");
        }
    });
}

/// VPMU-D-6.7-2.
#[test]
fn reader_of_any_speed_sees_whole_records() {
    run(false, &[1, 1, 1, 1], 2);
}

/// VPMU-D-6.7-1.
#[test]
fn burst_is_seen_whole() {
    run(false, &[2, 2, 1], 2);
}

/// VPMU-D-6.7-1.
#[test]
fn backward_records_are_read_whole() {
    run(true, &[1, 2, 1], 2);
}

/// VPMU-D-6.7-7.
#[test]
fn count_and_times_are_read_consistently() {
    loom::model(|| {
        let shared = Shared::new();
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let before = shared.lock.load(Ordering::Acquire);
                let count = shared.count.load(Ordering::Relaxed);
                let enabled = shared.enabled.load(Ordering::Relaxed);
                fence(Ordering::Acquire);
                let after = shared.lock.load(Ordering::Relaxed);
                if before == after && before.is_multiple_of(2) {
                    assert_eq!(enabled, count * 10);
                    assert_eq!(count, u64::from(before) / 2, "the count of this sequence");
                }
            })
        };
        let model = Model(Arc::clone(&shared));
        let mut sequence = 0;
        for count in 1..=2 {
            let counts = CountSnapshot { count, time_enabled: count * 10, time_running: 0, growing_since: None };
            update(&model, &mut sequence, &counts).expect("a model");
        }
        reader.join().expect("the reader");
    });
}
