//! Uses loom to test every interleaving of the device and a reader of an area. Instead of guest memory, the area's
//! writer accesses loom's atomics and cells, which follow a weak memory model.
//!
//! The reader follows the protocol for `aux_head` and `aux_tail` in the kernel's UAPI header. Loom checks that
//! the reader's plain loads of the data do not race with the device's plain stores.

use loom::cell::Cell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::device_owned::DeviceOwned;
use super::writer::{AUX_HEAD, AUX_TAIL};
use super::*;
use crate::pages::{Pages, Unwritable};

/// Words of the area: one and a half entries.
const WORDS: u64 = 3;
const ENTRY: u64 = 16;

/// A plain word accessed by both sides.
struct Word(Cell<u64>);

#[expect(unsafe_code, reason = "shared without a lock, as an area's data is")]
// SAFETY: loom runs one thread at a time, and fails the model if two accesses to the cell are
// unordered, so it detects every race.
unsafe impl Sync for Word {}

struct Shared {
    head: AtomicU64,
    tail: AtomicU64,
    data: Vec<Word>,
}

impl Shared {
    fn word(&self, position: u64) -> &Cell<u64> {
        let index = usize::try_from(position / 8 % WORDS).expect("small");
        &self.data[index].0
    }
}

struct Model(Arc<Shared>);

impl Pages for Model {
    fn load(&self, field: usize, order: Ordering) -> Result<u64, Unwritable> {
        assert_eq!(field, AUX_TAIL, "the device reads only the tail");
        Ok(self.0.tail.load(order))
    }

    fn store(&self, field: usize, value: u64, order: Ordering) -> Result<(), Unwritable> {
        assert_eq!(field, AUX_HEAD, "the device writes only the head");
        self.0.head.store(value, order);
        Ok(())
    }

    fn store_half(&self, _: usize, _: u32, _: Ordering) -> Result<(), Unwritable> {
        Err(Unwritable::NoPage)
    }

    fn fence(&self, _: Ordering) {}

    fn put(&mut self, position: u64, words: &[u64]) -> Result<(), Unwritable> {
        for (index, &word) in (0..).zip(words) {
            self.0.word(position + index * 8).set(word);
        }
        Ok(())
    }
}

/// Reads the area's new contents once.
fn look(shared: &Shared, tail: &mut u64, found: &mut Vec<u64>) {
    let head = shared.head.load(Ordering::Acquire);
    while *tail < head {
        let first = shared.word(*tail).get();
        let second = shared.word(*tail + 8).get();
        assert_eq!(first, !second, "a whole entry");
        found.push(first);
        *tail += ENTRY;
    }
    shared.tail.store(*tail, Ordering::Release);
}

/// For each number in `bursts`, the device writes that many entries and publishes them. A reader reads
/// concurrently.
fn run(bursts: &'static [u64], looks: usize) {
    loom::model(move || {
        let shared = Arc::new(Shared {
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            data: (0..WORDS).map(|_| Word(Cell::new(0))).collect(),
        });
        let reader = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (mut tail, mut found) = (0, Vec::new());
                for _ in 0..looks {
                    look(&shared, &mut tail, &mut found);
                }
                (tail, found)
            })
        };
        let mut area = DeviceOwned::new(WORDS * 8, false, 1 << 20);
        let mut pages = Model(Arc::clone(&shared));
        let (mut produced, mut written) = (0, Vec::new());
        for &burst in bursts {
            for _ in 0..burst {
                produced += 1;
                let words = [produced, !produced];
                let entry = Entry { skip: 0, parts: [&[], &words], collision: false };
                if area.append(&mut pages, &entry).whole {
                    written.push(produced);
                }
            }
            area.end(&pages, 0);
        }
        let (mut tail, mut found) = reader.join().expect("the reader");
        look(&shared, &mut tail, &mut found);
        assert_eq!(found, written, "each written entry, once, in order");
    });
}

/// VPMU-D-6.8-3.
#[test]
fn reader_of_any_speed_sees_whole_records() {
    run(&[1, 1, 1], 2);
}

/// VPMU-D-6.8-3.
#[test]
fn spans_are_seen_whole() {
    run(&[1, 2], 2);
}
