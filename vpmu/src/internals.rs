//! Exposes parts of the device to this project's own benchmarks and fuzz targets. This is not a stable interface for
//! embedders.

mod areas;
mod callers;

use std::sync::atomic::Ordering;

use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::abi::{Metadata, PAGE_SIZE};
use crate::clock::Clock;
use crate::memory::Memory;
use crate::record::{Layout, MODE_USER, Record, Sample, SampleId};
use crate::ring::{Ring, RingMode, Wakeup, WriteContext};
use vpmu_perf::field::{
    SAMPLE_CALLCHAIN, SAMPLE_CPU, SAMPLE_ID, SAMPLE_IP, SAMPLE_PERIOD, SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME,
};

pub use crate::host::tracepoint::ExitFormats;
pub use areas::{AuxArea, Tracer, aux_memory};
pub use callers::Callers;

/// Guest address of `data_tail`. The metadata page is the first page of the memory.
const DATA_TAIL: GuestAddress = GuestAddress(std::mem::offset_of!(Metadata, data_tail) as u64);
/// With the header, these fields take up seven words. The eighth word is the CPU number in a record of [`SHORTEST`]
/// bytes, and the callchain's length in a longer record.
const SAMPLE_TYPE: u64 = SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_STREAM_ID | SAMPLE_PERIOD;
/// Length of a record without a callchain, in bytes.
pub const SHORTEST: usize = 64;

/// A ring whose reader has read everything when a burst begins.
#[derive(Debug)]
pub struct Producer {
    memory: Memory,
    ring: Ring,
    record: Record,
    sample_type: u64,
    chain: Vec<u64>,
    time: u64,
    head: u64,
}

impl Producer {
    /// Creates a ring of `pages` data pages at the start of `memory`, for records of `len` bytes. `len`
    /// is a multiple of 8 and at least [`SHORTEST`].
    #[must_use]
    pub fn new(memory: GuestMemoryMmap, pages: usize, len: usize) -> Option<Self> {
        let addresses: Vec<_> = (0..=pages as u64).map(|page| GuestAddress(page * PAGE_SIZE as u64)).collect();
        let mode = RingMode { writable: true, backward: false };
        let memory = Memory::from(memory);
        let ring = Ring::new(&memory.view(), &addresses, mode, Clock::new(1_000_000)?).ok()?;
        Some(Self {
            memory,
            ring,
            record: Record::default(),
            sample_type: match len {
                SHORTEST => SAMPLE_TYPE | SAMPLE_CPU,
                _ => SAMPLE_TYPE | SAMPLE_CALLCHAIN,
            },
            chain: vec![0xffff_8000_1234_5678; (len - SHORTEST) / 8],
            time: 0,
            head: 0,
        })
    }

    /// Builds and writes `records` records in one burst. Returns the number of records written.
    pub fn burst(&mut self, records: u64) -> u64 {
        let view = self.memory.view();
        let read = view.store(self.head.to_le(), DATA_TAIL, Ordering::Release);
        let Ok(mut session) = self.ring.session(&view) else {
            return 0;
        };
        if read.is_err() {
            return 0;
        }
        let mut written = 0;
        for _ in 0..records {
            self.time += 1;
            let sample_id = SampleId { pid: 1, tid: 2, time: self.time, id: 3, stream_id: 4, vcpu: 0 };
            let layout = Layout { sample_type: self.sample_type, ..Layout::default() };
            let sample = Sample { misc: MODE_USER, ip: self.time, period: 5, chain: &self.chain, ..Sample::default() };
            let context = WriteContext { layout: &layout, sample_id: &sample_id, wakeup: Wakeup::Page, prompt: false };
            let Ok(record) = self.record.sample(&layout, &sample_id, &sample) else {
                break;
            };
            self.head += size_of_val(record) as u64;
            written += u64::from(session.write(record, &context).written);
        }
        written
    }
}
