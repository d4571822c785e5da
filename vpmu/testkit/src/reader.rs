//! A guest program that reads its ring.

use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const DATA_HEAD: u64 = 1024;
const DATA_TAIL: u64 = 1032;

#[derive(Debug)]
pub struct Reader {
    memory: GuestMemoryMmap,
    pages: Vec<u64>,
    tail: u64,
}

/// A sample with the fields that [`Fields::sampled`](crate::Fields::sampled) requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    pub user: bool,
    pub ip: u64,
    pub pid: u64,
    pub tid: u64,
    pub time: u64,
    pub id: u64,
    pub stream_id: u64,
    pub cpu: u64,
    pub period: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    Sample(Sample),
    Lost { id: u64, lost: u64 },
}

/// A record in the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw {
    pub kind: u64,
    pub misc: u64,
    /// The words after the header.
    pub words: Vec<u64>,
}

pub const LOST: u64 = 2;
pub const THROTTLE: u64 = 5;
pub const UNTHROTTLE: u64 = 6;
pub const READ: u64 = 8;
pub const SAMPLE: u64 = 9;

impl Reader {
    pub fn new(memory: &GuestMemoryMmap, pages: &[u64]) -> Self {
        Self { memory: memory.clone(), pages: pages.to_vec(), tail: 0 }
    }

    pub fn head(&self) -> u64 {
        self.field(DATA_HEAD)
    }

    /// A word of the metadata page.
    pub fn field(&self, offset: u64) -> u64 {
        self.memory.load(GuestAddress(self.pages[0] + offset), Ordering::Acquire).expect("in memory")
    }

    pub fn set_tail(&self, tail: u64) {
        let at = GuestAddress(self.pages[0] + DATA_TAIL);
        self.memory.store(tail, at, Ordering::Release).expect("in memory");
    }

    /// Reads and consumes at most `most` records.
    pub fn take(&mut self, most: usize) -> Vec<Record> {
        let head = self.head();
        let mut records = Vec::new();
        while records.len() < most && self.tail < head {
            let header = self.word(0);
            let size = header >> 48;
            assert!(size >= 8 && self.tail + size <= head, "a record is incomplete");
            records.push(match header & 0xffff_ffff {
                2 => Record::Lost { id: self.word(8), lost: self.word(16) },
                9 => {
                    assert_eq!(size, 72, "a sample has every field");
                    assert_eq!(self.word(8), self.word(40), "ID and IDENTIFIER are equal");
                    let misc = header >> 32 & 0xffff;
                    assert!([1, 2].contains(&misc), "the mode {misc} is neither user nor kernel");
                    let task = self.word(24);
                    Record::Sample(Sample {
                        user: misc == 2,
                        ip: self.word(16),
                        pid: task & 0xffff_ffff,
                        tid: task >> 32,
                        time: self.word(32),
                        id: self.word(40),
                        stream_id: self.word(48),
                        cpu: self.word(56),
                        period: self.word(64),
                    })
                }
                other => panic!("unexpected record of type {other}"),
            });
            self.tail += size;
        }
        self.set_tail(self.tail);
        records
    }

    /// Reads and consumes all records of all kinds.
    pub fn raw(&mut self) -> Vec<Raw> {
        let head = self.head();
        let mut records = Vec::new();
        while self.tail < head {
            let header = self.word(0);
            let size = header >> 48;
            assert!(size >= 8 && self.tail + size <= head, "a record is incomplete");
            records.push(Raw {
                kind: header & 0xffff_ffff,
                misc: header >> 32 & 0xffff,
                words: (1..size / 8).map(|word| self.word(8 * word)).collect(),
            });
            self.tail += size;
        }
        self.set_tail(self.tail);
        records
    }

    /// Reads and consumes all samples. The ring must not report losses.
    pub fn samples(&mut self) -> Vec<Sample> {
        let records = self.take(usize::MAX);
        records
            .into_iter()
            .map(|record| match record {
                Record::Sample(sample) => sample,
                Record::Lost { lost, .. } => panic!("{lost} samples lost"),
            })
            .collect()
    }

    fn word(&self, offset: u64) -> u64 {
        let position = self.tail + offset;
        let data = &self.pages[1..];
        let page = data[usize::try_from(position / 4096).expect("small") % data.len()];
        self.memory.read_obj(GuestAddress(page + position % 4096)).expect("in memory")
    }
}
