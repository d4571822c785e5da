//! The records of the example's guest: a sampled clock, a count of marks, and a trace of exits.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{QueueState, VcpuSession, Vpmu};
use vpmu_testkit::{Driver, Layout, commands, open_of};

/// perf's `PERF_SAMPLE_IP`, `_TID` and `_TIME`.
const IP_TID_TIME: u64 = 0b111;
const RING: u64 = 0x10_0000;
const RING_PAGES: u64 = 16;
const TRACE_RING: u64 = 0x18_0000;
const AREA: u64 = 0x20_0000;
const AREA_PAGES: u64 = 256;
const PAGE: u64 = PAGE_SIZE as u64;
/// One sample per millisecond.
const PERIOD: u64 = 1_000_000;
/// perf's `PERF_RECORD_SAMPLE`.
const SAMPLE: u32 = 9;
/// Size of a record's header in bytes. In a sample, the instruction pointer follows.
const HEADER: usize = 8;
const DATA_HEAD: u64 = 1024;
const DATA_TAIL: u64 = 1032;
const AUX_HEAD: u64 = 1056;

/// The guest's counts and records.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) marks: u64,
    /// Number of traced exits due to I/O at the port that was passed to [`Recorder::stop`].
    pub(crate) exits: usize,
    /// Instruction pointers of the samples.
    pub(crate) samples: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Recorder {
    memory: GuestMemoryMmap,
    driver: Driver,
    /// Ids of the clock, the marks and the trace.
    events: [u64; 3],
    samples: Vec<u64>,
}

impl Recorder {
    /// Sets up the queues, calls `activate` to pass them to the device, and opens the events.
    pub(crate) fn new(
        vpmu: &Arc<Vpmu>,
        memory: &GuestMemoryMmap,
        activate: impl FnOnce(&GuestMemoryMmap, &[QueueState]) -> Result<(), vpmu::Error>,
    ) -> io::Result<Self> {
        let driver = Driver::new(vpmu, memory, Layout::SMALL, |queues| activate(memory, queues));
        let mut driver = driver.map_err(io::Error::other)?;
        let clock = driver.open(&OpenRequest {
            period: PERIOD.into(),
            sample_type: IP_TID_TIME.into(),
            ..open_of(KIND_SOFTWARE, 0, 0)
        })?;
        driver.map(CONTROL_MAP, clock, MAP_WRITABLE, RING, 1 + RING_PAGES)?;
        let marks = driver.open(&open_of(KIND_MARK, 7, 0))?;
        let trace = driver.open(&open_of(KIND_EXIT_TRACE, EXIT_USER, 0))?;
        driver.map(CONTROL_MAP, trace, MAP_WRITABLE, TRACE_RING, 3)?;
        driver.map(CONTROL_MAP_AUX, trace, MAP_WRITABLE, AREA, AREA_PAGES)?;
        Ok(Self { memory: memory.clone(), driver, events: [clock, marks, trace], samples: Vec::new() })
    }

    /// Enables the events on the vCPU of `session`.
    pub(crate) fn start(&mut self, session: &mut VcpuSession) -> io::Result<()> {
        self.driver.commands(session, &commands(COMMAND_ENABLE, &self.events)).map(|_| ())
    }

    /// Reads the new samples from the ring. Returns the instruction pointers of all samples so far.
    pub(crate) fn samples(&mut self) -> io::Result<&[u64]> {
        let (head, mut tail) = (self.word(RING + DATA_HEAD)?, self.word(RING + DATA_TAIL)?);
        while tail != head {
            // Read the header and the instruction pointer separately: the ring may wrap between them, because a
            // record can begin at any multiple of 8 bytes.
            let mut record = [0; 2 * HEADER];
            for (at, half) in (tail..).step_by(HEADER).zip(record.chunks_mut(HEADER)) {
                let place = RING + PAGE + at % (RING_PAGES * PAGE);
                let read = self.memory.read_slice(half, GuestAddress(place));
                read.map_err(io::Error::other)?;
            }
            self.samples.extend(ip(&record));
            tail += u64::from(u16::from_le_bytes([record[6], record[7]]));
        }
        let stored = self.memory.write_obj(tail.to_le(), GuestAddress(RING + DATA_TAIL));
        stored.map_err(io::Error::other)?;
        Ok(&self.samples)
    }

    /// Disables the events, reads everything that they produced, and closes them. Counts the traced exits due to I/O at
    /// `port`.
    pub(crate) fn stop(mut self, session: &mut VcpuSession, port: u16) -> io::Result<Seen> {
        let replies = self.driver.commands(session, &commands(COMMAND_DISABLE, &self.events))?;
        let marks = replies[1].value.get();
        let head = self.word(TRACE_RING + AUX_HEAD)?;
        let mut exits = 0;
        for at in (0..head).step_by(PACKET_ALIGN) {
            let mut packet = [0; size_of::<ExitPacket>()];
            let place = GuestAddress(AREA + at % (AREA_PAGES * PAGE));
            self.memory.read_slice(&mut packet, place).map_err(io::Error::other)?;
            let packet: ExitPacket = zerocopy::transmute!(packet);
            exits += usize::from(packet.kind == PACKET_EXIT && packet.qualification.get() == u64::from(port));
        }
        self.samples()?;
        for event in self.events {
            self.driver.close(event)?;
        }
        Ok(Seen { marks, exits, samples: self.samples })
    }

    fn word(&self, at: u64) -> io::Result<u64> {
        let word = self.memory.read_obj(GuestAddress(at));
        word.map(u64::from_le).map_err(io::Error::other)
    }
}

/// Returns the instruction pointer of a sample with [`IP_TID_TIME`]; `None` for another record.
pub(crate) fn ip(record: &[u8]) -> Option<u64> {
    let kind = u32::from_le_bytes(record.get(..4)?.try_into().ok()?);
    let ip = u64::from_le_bytes(record.get(HEADER..2 * HEADER)?.try_into().ok()?);
    (kind == SAMPLE).then_some(ip)
}

/// Returns the instruction pointer of a sample that begins with the event's id; `None` for another record.
pub(crate) fn identified_ip(record: &[u8]) -> Option<u64> {
    let (kind, body) = record.split_at_checked(HEADER)?;
    ip(&[kind, body.get(HEADER..)?].concat())
}
