//! Tests with rings in the pages of a file. While the ring is read, a test writes to the file at
//! chosen moments.

use super::*;
use crate::attr::{EventAttr, SAMPLE_IP};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

const SIZE: u64 = PAGE_SIZE as u64;
/// Bytes of each record in these tests. A page holds 170 whole records and 16 bytes of the next.
const RECORD: u64 = 24;
const LAYOUT: Layout =
    Layout { sample_type: SAMPLE_IP, read_format: 0, sample_id_all: false, regs_user: 0, regs_intr: 0 };

struct Writer {
    file: File,
    head: u64,
    backward: bool,
}

impl Writer {
    fn new(backward: bool) -> (Self, Mapping) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * SIZE).unwrap();
        let mapping = Mapping::new_read_only(file.as_fd(), 2 * PAGE_SIZE).unwrap();
        let writer = Self { file, head: 0, backward };
        (writer, mapping)
    }

    fn word(&self, offset: u64, word: u64) {
        self.file.write_all_at(&word.to_ne_bytes(), offset).unwrap();
    }

    fn publish(&self) {
        self.word(DATA_HEAD as u64, self.head);
    }

    /// Writes a record without publishing the head.
    fn put(&mut self, ip: u64) {
        let start = if self.backward {
            self.head = self.head.wrapping_sub(RECORD);
            self.head
        } else {
            self.head
        };
        for (index, word) in [RECORD << 48 | 9, ip, 0].into_iter().enumerate() {
            let position = start.wrapping_add(8 * index as u64) % SIZE;
            self.word(SIZE + position, word);
        }
        if !self.backward {
            self.head += RECORD;
        }
    }

    fn record(&mut self, ip: u64) {
        self.put(ip);
        self.publish();
    }

    fn records(&mut self, ips: impl Iterator<Item = u64>) {
        ips.for_each(|ip| self.record(ip));
    }
}

fn ips(snapshot: &RingSnapshot) -> Vec<u64> {
    let ip = |record: &Record| match record {
        Record::Sample(sample) => sample.ip,
        record => panic!("{record:?}"),
    };
    assert_eq!(snapshot.unreadable, 0);
    snapshot.records.iter().map(ip).collect()
}

fn quiet() -> Result<(), EventError> {
    Ok(())
}

#[test]
fn history_has_newest_records_once_oldest_first() {
    let (mut writer, mapping) = Writer::new(true);
    let mut seen = Vec::new();
    let mut position = 0;
    for ip in 0..1000 {
        writer.record(ip);
        let all = newest(&mapping, &LAYOUT, None, quiet).unwrap();
        assert_eq!(ips(&all), ((ip + 1u64).saturating_sub(170)..=ip).collect::<Vec<_>>());
        if ip % 100 == 0 {
            let more = newest(&mapping, &LAYOUT, Some(position), quiet).unwrap();
            assert_eq!(more.missed, 0);
            seen.extend(ips(&more));
            position = more.position;
        }
    }
    assert_eq!(seen, (0..=900).collect::<Vec<u64>>());
    let none = newest(&mapping, &LAYOUT, Some(writer.head), quiet).unwrap();
    assert_eq!((none.records.len(), none.missed), (0, 0));
}

#[test]
fn overwritten_history_is_counted_in_bytes() {
    let (mut writer, mapping) = Writer::new(true);
    writer.records(0..10);
    let first = newest(&mapping, &LAYOUT, None, quiet).unwrap();
    writer.records(10..500);
    let next = newest(&mapping, &LAYOUT, Some(first.position), quiet).unwrap();
    assert_eq!(ips(&next), (330..500).collect::<Vec<u64>>());
    assert_eq!(next.missed, (330 - 10) * RECORD);
}

/// Runs `then` at the second flush, after the copy.
fn after_copy(then: impl Fn()) -> impl Fn() -> Result<(), EventError> {
    let flushes = Cell::new(0);
    move || {
        flushes.set(flushes.get() + 1);
        if flushes.get() == 2 {
            then();
        }
        Ok(())
    }
}

#[test]
fn record_overwritten_during_copy_is_omitted() {
    for later in [0, 1, 7, 169, 170, 171, 1000] {
        let (mut writer, mapping) = Writer::new(true);
        writer.records(0..500);
        let writer = RefCell::new(writer);
        let barrier = after_copy(|| writer.borrow_mut().records(0..later));
        let snapshot = newest(&mapping, &LAYOUT, None, barrier).unwrap();
        // 4096 bytes hold the 170 newest records and 16 bytes of the record before them. The next
        // record overwrites these 16 bytes and part of the oldest whole record.
        let left = (SIZE.saturating_sub(later * RECORD)) / RECORD;
        assert_eq!(ips(&snapshot), (500 - left..500).collect::<Vec<u64>>(), "{later}");
    }
}

#[test]
fn copy_waits_for_unpublished_write() {
    let (mut writer, mapping) = Writer::new(true);
    writer.records(0..500);
    // These records overwrite the oldest records before the copy is made, but are published only by
    // the flush after the copy.
    for ip in 0..20 {
        writer.put(0xdead_0000 + ip);
    }
    let writer = RefCell::new(writer);
    let snapshot = newest(&mapping, &LAYOUT, None, after_copy(|| writer.borrow().publish())).unwrap();
    assert_eq!(ips(&snapshot), (350..500).collect::<Vec<u64>>());
}

#[test]
fn unread_records_are_shown_and_stay() {
    let (mut writer, mapping) = Writer::new(false);
    writer.records(0..100);
    for _ in 0..2 {
        let snapshot = unread(&mapping, &LAYOUT, None, quiet).unwrap();
        assert_eq!(ips(&snapshot), (0..100).collect::<Vec<u64>>());
    }
    writer.word(DATA_TAIL as u64, 40 * RECORD);
    writer.records(100..200);
    let snapshot = unread(&mapping, &LAYOUT, None, quiet).unwrap();
    assert_eq!(ips(&snapshot), (40..200).collect::<Vec<u64>>());
    let more = unread(&mapping, &LAYOUT, Some(90 * RECORD), quiet).unwrap();
    assert_eq!((ips(&more), more.missed), ((90..200).collect(), 0));
    let late = unread(&mapping, &LAYOUT, Some(30 * RECORD), quiet).unwrap();
    assert_eq!((ips(&late).len(), late.missed), (160, 10 * RECORD));
}

#[test]
fn record_consumed_during_copy_is_omitted() {
    let (mut writer, mapping) = Writer::new(false);
    writer.records(0..100);
    let writer = RefCell::new(writer);
    let barrier = after_copy(|| {
        let mut writer = writer.borrow_mut();
        writer.word(DATA_TAIL as u64, 60 * RECORD);
        writer.records(100..200);
    });
    let snapshot = unread(&mapping, &LAYOUT, None, barrier).unwrap();
    assert_eq!(ips(&snapshot), (60..100).collect::<Vec<u64>>());
    // Other readers consume the whole ring during the copy.
    let gone = after_copy(|| writer.borrow().word(DATA_TAIL as u64, 200 * RECORD));
    let snapshot = unread(&mapping, &LAYOUT, None, gone).unwrap();
    assert!(snapshot.records.is_empty());
}

#[test]
fn nonsense_ends_the_reading() {
    let (writer, mapping) = Writer::new(false);
    writer.word(DATA_HEAD as u64, SIZE + 8);
    let error = unread(&mapping, &LAYOUT, None, quiet).unwrap_err();
    assert!(matches!(error, HistoryError::Ring(RingError::Overrun { .. })));
    let (mut writer, mapping) = Writer::new(true);
    for header in [0, 4 << 48 | 9, 0xfff8 << 48 | 9] {
        writer.record(1);
        writer.record(2);
        let position = writer.head.wrapping_add(RECORD) % SIZE;
        writer.word(SIZE + position, header);
        let snapshot = newest(&mapping, &LAYOUT, None, quiet).unwrap();
        assert_eq!(ips(&snapshot), [2], "{header:#x}");
    }
    // A record that is too short for its fields is skipped, and counted as unreadable.
    writer.record(1);
    let position = writer.head % SIZE;
    writer.word(SIZE + position, 8 << 48 | 9);
    let snapshot = newest(&mapping, &LAYOUT, None, quiet).unwrap();
    assert_eq!(snapshot.unreadable, 1);
}

#[test]
fn failed_flush_is_reported_unless_event_is_in_error() {
    let (_, mapping) = Writer::new(true);
    let fail = |errno| Err(EventError::Flush(std::io::Error::from_raw_os_error(errno)));
    let snapshot = |errno| newest(&mapping, &LAYOUT, None, || settled(fail(errno)));
    assert!(snapshot(libc::ENOTTY).is_err());
    assert!(snapshot(libc::EIO).is_ok());
}

#[test]
fn history_needs_ring_that_overwrites_backwards_or_keeps_forwards() {
    let (writer, _mapping) = Writer::new(false);
    let [forward, backward] = [false, true].map(|backward| {
        let file = writer.file.try_clone().unwrap();
        Event::of_perf(file.into(), &EventAttr { backward, ..EventAttr::new(0, 0) })
    });
    assert!(History::map(&backward, 1, true).is_ok() && History::map(&forward, 1, false).is_ok());
    let error = History::map(&forward, 1, true).unwrap_err().to_string();
    assert!(error.contains("is not written backwards"), "{error}");
    let error = History::map(&backward, 1, false).unwrap_err().to_string();
    assert!(error.contains("does not overwrite"), "{error}");
}
