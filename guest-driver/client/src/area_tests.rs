//! In these tests, a temporary file replaces the event: bytes that a test writes to the file appear
//! in the mappings of the ring and the area.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::attr::EventAttr;
use crate::record::Layout;
use crate::trace::Packet;
use std::os::fd::AsFd;

/// Bytes before the area: the metadata page and one data page.
const BEFORE: u64 = 2 * PAGE;

struct Host {
    file: File,
    ring: Ring,
    size: u64,
    head: u64,
}

impl Host {
    fn new(pages: u64) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BEFORE + pages * PAGE).unwrap();
        let layout = Layout::from(&EventAttr::new(0, 0));
        Self { ring: Ring::new(file.as_fd(), 1, layout).unwrap(), file, size: pages * PAGE, head: 0 }
    }

    fn event(&self) -> Event {
        Event::of_perf(self.file.try_clone().unwrap().into(), &EventAttr::new(0, 0))
    }

    fn area(&self) -> Area {
        let pages_log2 = (self.size / PAGE).ilog2();
        Area::map(&self.event(), &self.ring, pages_log2).unwrap()
    }

    fn mapping(&self) -> AreaMapping {
        let pages_log2 = (self.size / PAGE).ilog2();
        AreaMapping::new(&self.event(), &self.ring, pages_log2, false).unwrap()
    }

    fn put(&self, offset: usize, value: u64) {
        let bytes = value.to_ne_bytes();
        self.file.write_all_at(&bytes, offset as u64).unwrap();
    }

    fn get(&self, offset: usize) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset as u64).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Writes packets of 64 bytes, each filled with the number of packets before it, and publishes
    /// the head.
    fn write(&mut self, packets: u64) {
        for _ in 0..packets {
            let number = (self.head / 64).to_le_bytes()[0];
            let offset = BEFORE + self.head % self.size;
            self.file.write_all_at(&[number; 64], offset).unwrap();
            self.head += 64;
        }
        self.put(AUX_HEAD, self.head);
    }
}

/// The bytes that [`Host::write`] writes for the packets from `first` up to but excluding `end`.
fn expected(first: u64, end: u64) -> Vec<u8> {
    (first..end).flat_map(|number| [number.to_le_bytes()[0]; 64]).collect()
}

#[test]
fn area_size_is_announced_before_map() {
    let host = Host::new(4);
    assert_eq!(host.area().size(), 4 * PAGE);
    assert_eq!(host.get(AUX_OFFSET), BEFORE);
    assert_eq!(host.get(AUX_SIZE), 4 * PAGE);
}

#[test]
fn area_read_advances_tail_and_wraps() {
    let mut host = Host::new(1);
    let mut area = host.area();
    let mut chunk = Chunk::default();
    assert!(!area.read(&mut chunk).unwrap());
    let mut read = 0;
    for packets in [1, 40, 64, 7, 63] {
        host.write(packets);
        assert!(area.read(&mut chunk).unwrap());
        assert_eq!(chunk.position, read * 64);
        assert_eq!(chunk.bytes, expected(read, read + packets));
        read += packets;
        assert_eq!(host.get(AUX_TAIL), read * 64);
        assert!(!area.read(&mut chunk).unwrap());
        assert!(chunk.bytes.is_empty());
    }
    assert_eq!((area.head(), area.tail()), (read * 64, read * 64));
}

#[test]
fn large_output_is_split_at_page_ends() {
    let pages = 2 * MOST / PAGE;
    let mut host = Host::new(pages);
    let mut area = host.area();
    let mut chunk = Chunk::default();
    host.write(1);
    assert!(area.read(&mut chunk).unwrap());
    host.write(2 * MOST / 64 - 1);
    let mut position = 64;
    for end in [MOST, 2 * MOST] {
        assert!(area.read(&mut chunk).unwrap());
        assert_eq!(chunk.position, position);
        assert_eq!(chunk.bytes.len() as u64, end - position);
        position = end;
    }
    assert!(!area.read(&mut chunk).unwrap());
}

#[test]
fn impossible_area_head_is_error_until_skipped() {
    let mut host = Host::new(1);
    let mut area = host.area();
    let mut chunk = Chunk::default();
    for head in [PAGE + 64, 32, u64::MAX] {
        host.put(AUX_HEAD, head);
        for _ in 0..2 {
            let error = area.read(&mut chunk).unwrap_err();
            assert!(matches!(error, AreaError::Overrun { head: h, .. } if h == head));
        }
    }
    host.head = 128;
    host.put(AUX_HEAD, host.head);
    assert_eq!(area.skip(), 128);
    host.write(1);
    assert!(area.read(&mut chunk).unwrap());
    assert_eq!(chunk.bytes, expected(2, 3));
}

#[test]
fn area_reader_keeps_its_own_tail() {
    let mut host = Host::new(1);
    let mut area = host.area();
    area.set_tail_raw(0x1000);
    assert_eq!(host.get(AUX_TAIL), 0x1000);
    host.write(2);
    let mut chunk = Chunk::default();
    assert!(area.read(&mut chunk).unwrap());
    assert_eq!((chunk.position, chunk.bytes.len()), (0, 128));
    assert_eq!(host.get(AUX_TAIL), 128);
}

#[test]
fn snapshot_holds_newest_bytes_from_page_boundary() {
    let mut host = Host::new(2);
    let mapping = host.mapping();
    let chunk = take(&mapping, || Ok(())).unwrap();
    assert_eq!(chunk, Chunk::default());
    assert!(chunk.packets().next().is_none());
    host.write(3);
    let chunk = take(&mapping, || Ok(())).unwrap();
    assert_eq!((chunk.position, chunk.bytes), (0, expected(0, 3)));
    host.write(128);
    // The area holds the last 128 of 131 packets. The page with the oldest of them is partly
    // overwritten, so the snapshot omits this whole page.
    let chunk = take(&mapping, || Ok(())).unwrap();
    assert_eq!((chunk.position, chunk.bytes), (PAGE, expected(64, 131)));
}

#[test]
fn writes_during_snapshot_drop_oldest_bytes() {
    let mut host = Host::new(4);
    let mapping = host.mapping();
    host.write(256);
    let host = RefCell::new(host);
    let calls = RefCell::new(0);
    let chunk = take(&mapping, || {
        *calls.borrow_mut() += 1;
        // The reader calls this closure before and after the copy. Write more packets at the second
        // call: this simulates a host that continues to trace during the copy.
        if *calls.borrow() == 2 {
            host.borrow_mut().write(65);
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(chunk.position, 2 * PAGE, "one page and one packet are gone");
    assert_eq!(chunk.bytes, expected(128, 256));
    let fast = take(&mapping, || {
        host.borrow_mut().write(256);
        Ok(())
    });
    assert!(matches!(fast, Err(AreaError::TooFast)));
}

#[test]
fn snapshot_of_empty_area_filled_during_copy_is_empty() {
    let host = RefCell::new(Host::new(1));
    let mapping = host.borrow().mapping();
    let calls = Cell::new(0);
    let chunk = take(&mapping, || {
        calls.set(calls.get() + 1);
        if calls.get() == 2 {
            host.borrow_mut().write(200);
        }
        Ok(())
    });
    assert_eq!(chunk.unwrap(), Chunk::default());
}

#[test]
fn snapshot_with_wild_heads_does_not_panic() {
    let host = Host::new(1);
    let mapping = host.mapping();
    let heads = [0, 1, PAGE, PAGE + 63, 3 * PAGE, u64::MAX - 7, u64::MAX];
    for (first, second) in heads.iter().flat_map(|&a| heads.map(|b| (a, b))) {
        let calls = Cell::new(0);
        let _ = take(&mapping, || {
            calls.set(calls.get() + 1);
            host.put(AUX_HEAD, if calls.get() % 2 == 1 { first } else { second });
            Ok(())
        });
    }
}

#[test]
fn snapshot_of_event_that_reads_its_group_has_its_bytes() {
    let mut host = Host::new(1);
    host.write(3);
    // Each read(2) of this file returns zeros, which parse as the counts of an empty group.
    let file = tempfile::tempfile().unwrap();
    file.set_len(16 * PAGE).unwrap();
    let attr = EventAttr::new(0, 0).reading_group();
    let event = Event::of_perf(file.into(), &attr);
    let mapping = host.mapping();
    let snapshot = Snapshot { event: &event, mapping };
    assert_eq!(snapshot.take().unwrap().bytes, expected(0, 3));
}

#[test]
fn sizes_that_no_machine_has_are_refused() {
    let host = Host::new(1);
    for pages_log2 in [52, 63, 64, u32::MAX] {
        let error = Area::map(&host.event(), &host.ring, pages_log2).unwrap_err();
        assert!(matches!(error, AreaError::TooLarge(_)), "{pages_log2}: {error}");
    }
}

#[test]
fn packets_of_a_chunk_know_their_place() {
    let chunk = Chunk { position: PAGE, bytes: [vec![0; 64], vec![9; 64]].concat() };
    let packets: Vec<_> = chunk.packets().collect();
    assert_eq!(packets[0], Ok(Packet::Padding));
    assert_eq!(packets[1].unwrap_err().position, PAGE + 64);
}
