//! Tests with a file instead of an event: bytes written to the file appear in the mapped ring.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use super::*;
use crate::attr::{SAMPLE_ID, SAMPLE_IP};
use crate::record::Sample;
use vpmu_perf::page::{
    CAPABILITIES, LOCK_INDEX, OFFSET, TIME_ENABLED, TIME_OFFSET, TIME_RUNNING, TIME_ZERO, WIDTH_SHIFT_MULT,
};

const LAYOUT: Layout =
    Layout { sample_type: SAMPLE_IP | SAMPLE_ID, read_format: 0, sample_id_all: false, regs_user: 0, regs_intr: 0 };

struct Writer {
    file: File,
    size: u64,
    head: u64,
}

impl Writer {
    fn new(data_pages: usize) -> (Self, Ring) {
        let file = tempfile::tempfile().unwrap();
        let size = (data_pages * PAGE_SIZE) as u64;
        file.set_len(PAGE_SIZE as u64 + size).unwrap();
        let ring = Ring::new(file.as_fd(), data_pages, LAYOUT).unwrap();
        (Self { file, size, head: 0 }, ring)
    }

    fn put(&self, offset: usize, value: u64) {
        self.file.write_all_at(&value.to_ne_bytes(), offset as u64).unwrap();
    }

    fn words(&mut self, words: &[u64]) {
        for word in words {
            let offset = PAGE_SIZE as u64 + self.head % self.size;
            self.file.write_all_at(&word.to_ne_bytes(), offset).unwrap();
            self.head = self.head.wrapping_add(8);
        }
    }

    fn publish(&self) {
        self.put(DATA_HEAD, self.head);
    }

    fn sample(&mut self, ip: u64) {
        self.words(&[24 << 48 | 2 << 32 | 9, ip, 42]);
        self.publish();
    }

    fn tail(&self) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, DATA_TAIL as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }
}

fn sample(ip: u64) -> Record {
    Record::Sample(Sample { ip, id: 42, user: true, ..Sample::default() })
}

#[test]
fn records_are_read_once_in_order_and_their_room_is_freed() {
    let (mut writer, mut ring) = Writer::new(1);
    assert!(ring.next_record().unwrap().is_none());
    writer.sample(1);
    writer.sample(2);
    assert_eq!(ring.next_record().unwrap(), Some(sample(1)));
    assert_eq!(writer.tail(), 24);
    writer.sample(3);
    let rest: Vec<Record> = ring.records().map(Result::unwrap).collect();
    assert_eq!(rest, [sample(2), sample(3)]);
    assert_eq!((writer.tail(), ring.tail(), ring.head()), (72, 72, 72));
}

#[test]
fn records_wrap_at_every_place() {
    // 4096 is not a multiple of 24. 512 records fill the ring exactly three times, and among them
    // are records that wrap at every possible offset.
    let (mut writer, mut ring) = Writer::new(1);
    for ip in 0..4000 {
        writer.sample(ip);
        if ip % 100 == 99 {
            let got: Vec<Record> = ring.records().map(Result::unwrap).collect();
            let expected: Vec<Record> = (ip - 99..=ip).map(sample).collect();
            assert_eq!(got, expected);
        }
    }
    assert_eq!(writer.tail(), writer.head);
}

#[test]
fn head_and_tail_wrap_at_the_end_of_numbers() {
    let (mut writer, _) = Writer::new(1);
    let start = u64::MAX - 15;
    writer.head = start;
    writer.put(DATA_TAIL, start);
    let mut ring = Ring::new(writer.file.as_fd(), 1, LAYOUT).unwrap();
    writer.sample(5);
    assert!(writer.head < start);
    assert_eq!(ring.next_record().unwrap(), Some(sample(5)));
    assert!(ring.next_record().unwrap().is_none());
}

#[test]
fn impossible_sizes_are_reported_and_skipped() {
    for (size, label) in [(0u64, "none"), (12, "odd"), (32, "past the head"), (0xfff8, "huge")] {
        let (mut writer, mut ring) = Writer::new(1);
        writer.words(&[size << 48 | 9, 1, 2]);
        writer.publish();
        for _ in 0..2 {
            let error = ring.next_record().unwrap_err();
            assert!(matches!(error, RingError::Malformed { .. }), "{label}: {error}");
        }
        assert_eq!(ring.records().count(), 1, "{label}: ends after the error");
        assert_eq!(ring.skip(), 24);
        writer.sample(7);
        assert_eq!(ring.next_record().unwrap(), Some(sample(7)), "{label}");
    }
}

#[test]
fn ring_head_out_of_reach_is_reported() {
    let (mut writer, mut ring) = Writer::new(1);
    for head in [4096 + 8, u64::MAX - 7] {
        writer.put(DATA_HEAD, head);
        assert!(matches!(ring.next_record(), Err(RingError::Overrun { .. })), "{head:#x}");
    }
    writer.put(DATA_HEAD, 12);
    assert!(matches!(ring.next_record(), Err(RingError::Malformed { .. })));
    writer.head = 4096;
    writer.publish();
    ring.skip();
    writer.sample(1);
    assert_eq!(ring.next_record().unwrap(), Some(sample(1)));
}

#[test]
fn record_too_short_for_its_fields_is_skipped() {
    let (mut writer, mut ring) = Writer::new(1);
    writer.words(&[16 << 48 | 9, 1]);
    writer.sample(2);
    assert!(matches!(ring.next_record(), Err(RingError::Record { tail: 0, .. })));
    assert_eq!(ring.next_record().unwrap(), Some(sample(2)));
}

#[test]
fn ring_reader_ignores_forged_tail() {
    let (mut writer, mut ring) = Writer::new(1);
    writer.sample(1);
    writer.sample(2);
    ring.set_tail_raw(0xdead_beef);
    assert_eq!(writer.tail(), 0xdead_beef);
    assert_eq!(ring.next_record().unwrap(), Some(sample(1)));
    assert_eq!(writer.tail(), 24);
}

#[test]
fn map_of_metadata_page_alone_has_no_records() {
    let (writer, mut ring) = Writer::new(0);
    assert_eq!(ring.size(), 0);
    assert!(ring.next_record().unwrap().is_none());
    writer.put(DATA_HEAD, 8);
    assert!(matches!(ring.next_record(), Err(RingError::Overrun { .. })));
}

#[test]
fn metadata_is_read_between_writes_only() {
    let (writer, ring) = Writer::new(0);
    writer.put(LOCK_INDEX, 3 << 32 | 4);
    writer.put(OFFSET, 100);
    writer.put(TIME_ENABLED, 200);
    writer.put(TIME_RUNNING, 150);
    writer.put(WIDTH_SHIFT_MULT, 7 << 32 | 5 << 16 | 48);
    writer.put(CAPABILITIES, 8);
    writer.put(TIME_OFFSET, 11);
    writer.put(TIME_ZERO, 9);
    let expected = Metadata {
        index: 3,
        offset: 100,
        time_enabled: 200,
        time_running: 150,
        capabilities: 8,
        pmc_width: 48,
        time_shift: 5,
        time_mult: 7,
        time_offset: 11,
        time_zero: 9,
    };
    assert_eq!(ring.metadata().unwrap(), expected);
    assert!(matches!(ring.reading(), Err(RingError::Register)));
    writer.put(LOCK_INDEX, 5);
    assert!(matches!(ring.metadata(), Err(RingError::Busy)));
    assert!(matches!(ring.reading(), Err(RingError::Busy)));
    writer.put(LOCK_INDEX, 6);
    writer.put(CAPABILITIES, 0);
    let reading = ring.reading().unwrap();
    assert_eq!((reading.value, reading.time_enabled), (100, 200));
}

#[test]
fn impossible_mapping_is_an_error() {
    let file = tempfile::tempfile().unwrap();
    let error = Ring::new(file.as_fd(), usize::MAX, LAYOUT).unwrap_err();
    assert!(matches!(error, RingError::Map { .. }), "{error}");
}
