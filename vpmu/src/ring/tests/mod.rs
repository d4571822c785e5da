//! Tests of a ring in memory with a fast, slow, absent or dishonest reader.

mod properties;
mod rules;

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestMemoryMmap};

use super::producer::{DATA_HEAD, DATA_TAIL};
use super::*;
use crate::record::{Layout, SampleId, TYPE_LOST};

const META: u64 = 0x4000;
const MEMORY: usize = 0x40000;
/// This bit in a record's type marks the records that these tests write. The other bits of the type are the record's
/// number.
const NUMBERED: u32 = 1 << 31;

const FORWARD: RingMode = RingMode { writable: true, backward: false };
const BACKWARD: RingMode = RingMode { backward: true, ..FORWARD };
const OVERWRITE: RingMode = RingMode { writable: false, ..FORWARD };

/// Returns the record with this number. Its `len` bytes are derived from the number.
fn numbered(number: u32, len: usize) -> Vec<u64> {
    let size = u16::try_from(len).expect("a record's length");
    let header = u64::from(NUMBERED | number) | u64::from(size) << 48;
    let body = (1..len as u64 / 8).map(|word| header.wrapping_mul(word));
    std::iter::once(header).chain(body).map(u64::to_le).collect()
}

/// A ring, its memory and its reader.
struct Fixture {
    memory: GuestMemoryMmap,
    ring: Ring,
    wakeup: Wakeup,
    pages: Vec<GuestAddress>,
    mode: RingMode,
    tail: u64,
    produced: u32,
    /// Numbers of the records read, oldest first.
    read: Vec<u32>,
    lost: u64,
}

impl Fixture {
    fn new(data_pages: u64, mode: RingMode, wakeup: Wakeup) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        // Like a guest's pages, these pages are neither ordered nor contiguous.
        let pages: Vec<_> = std::iter::once(GuestAddress(META))
            .chain((0..data_pages).map(|page| GuestAddress(0x3e000 - page * 0x2000)))
            .collect();
        let clock = Clock::new(1_000_000).expect("ticks");
        let ring = Ring::new(&View::of(&memory), &pages, mode, clock).expect("laid");
        Self { memory, ring, wakeup, pages, mode, tail: 0, produced: 0, read: Vec::new(), lost: 0 }
    }

    fn size(&self) -> u64 {
        (self.pages.len() as u64 - 1) * PAGE
    }

    /// Writes records of these lengths in one session.
    fn burst(&mut self, lens: &[usize]) -> Vec<Outcome> {
        let (layout, sample_id) = (Layout::default(), SampleId::default());
        let context = context(&layout, &sample_id, self.wakeup);
        let view = View::of(&self.memory);
        let mut session = self.ring.session(&view).expect("memory");
        lens.iter()
            .map(|&len| {
                self.produced += 1;
                session.write(&numbered(self.produced, len), &context)
            })
            .collect()
    }

    fn produce(&mut self, len: usize) -> Outcome {
        self.burst(&[len])[0]
    }

    fn flush(&mut self) -> bool {
        let (layout, sample_id) = (Layout::default(), SampleId::default());
        let context = context(&layout, &sample_id, self.wakeup);
        self.ring.flush(&View::of(&self.memory), &context)
    }

    fn head(&self) -> u64 {
        let head = GuestAddress(META + DATA_HEAD as u64);
        self.memory.load(head, Ordering::Acquire).expect("memory")
    }

    fn set_tail(&self, tail: u64) {
        let at = GuestAddress(META + DATA_TAIL as u64);
        self.memory.store(tail, at, Ordering::Release).expect("memory");
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
        (0..len / 8).map(|word| self.raw(position.wrapping_add(word * 8))).collect()
    }

    /// Reads the record at `position`, which has at most `room` bytes. Returns the record's number and its
    /// size. For `PERF_RECORD_LOST`, the first value is `Err` with the number of lost records.
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

    /// Reads at most `records` records, and moves the tail past them. From a backward ring, reads all unread
    /// records.
    fn consume(&mut self, records: usize) {
        let head = self.head();
        if self.mode.backward {
            let mut newest_first = Vec::new();
            let mut at = head;
            while at != self.tail {
                let (record, size) = self.record(at, self.tail.wrapping_sub(at));
                newest_first.push(record);
                at = at.wrapping_add(size);
            }
            newest_first.reverse();
            newest_first.into_iter().for_each(|record| self.found(record));
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

    /// Reads to the end, and checks that every record is in the ring or counted as lost.
    fn settle(&mut self) {
        self.set_tail(self.tail);
        self.consume(usize::MAX);
        self.flush();
        self.consume(usize::MAX);
        assert_eq!(self.read.len() as u64 + self.lost, u64::from(self.produced), "each record is written or lost");
        let rising = self.read.windows(2).all(|two| two[0] < two[1]);
        assert!(rising, "records are in order");
    }

    /// Returns whether nothing outside the ring's pages was written.
    fn is_clean_outside(&self) -> bool {
        (0..MEMORY as u64).step_by(PAGE_SIZE).all(|start| {
            let mut bytes = [0; PAGE_SIZE];
            self.memory.read_slice(&mut bytes, GuestAddress(start)).expect("memory");
            self.pages.contains(&GuestAddress(start)) || bytes.iter().all(|&byte| byte == 0)
        })
    }
}

fn context<'a>(layout: &'a Layout, sample_id: &'a SampleId, wakeup: Wakeup) -> WriteContext<'a> {
    WriteContext { layout, sample_id, wakeup, prompt: false }
}
