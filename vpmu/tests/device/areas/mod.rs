//! AUX areas: valid pages, AUX records and wakeups, writers, and removal.

mod driver_owned;
mod life;
mod mapping;
mod producers;
mod records;
mod threads;

use vpmu::ExitReason;
use vpmu::abi::*;
use vpmu_testkit::{AreaReader, At, Fixture, Raw, Reader, map_aux, open_of};

const AUX: u64 = 11;
const ITRACE_START: u64 = 12;

fn trace() -> OpenRequest {
    open_of(KIND_EXIT_TRACE, EXIT_IO, 0)
}

/// Addresses of `count` unused pages.
fn pages(fixture: &mut Fixture, count: u64) -> Vec<u64> {
    let first = fixture.next_ring;
    fixture.next_ring += (count + 1) * 0x1000;
    (0..count).map(|page| first + page * 0x1000).collect()
}

/// A trace, with readers of its ring and its area.
struct Traced {
    event: u64,
    ring: Reader,
    area: AreaReader,
}

impl Traced {
    fn new(fixture: &mut Fixture, request: &OpenRequest, count: u64, flags: u32) -> Self {
        let event = fixture.opened(request);
        let ring_pages = pages(fixture, 5);
        fixture.map_pages(event, MAP_WRITABLE, &ring_pages).expect("a ring");
        let area = pages(fixture, count);
        map_aux(fixture, event, flags, &area).expect("an area");
        Self {
            event,
            ring: Reader::new(&fixture.memory, &ring_pages),
            area: AreaReader::new(fixture, ring_pages[0], area),
        }
    }

    /// An enabled trace on vCPU 0.
    fn on(fixture: &mut Fixture, count: u64) -> Self {
        let traced = Self::new(fixture, &trace(), count, MAP_WRITABLE);
        fixture.command(0, COMMAND_ENABLE, traced.event);
        traced
    }

    /// Reads the ring. Returns the offset, size and flags of each new AUX record.
    fn chunks(&mut self) -> Vec<[u64; 3]> {
        chunks(&self.ring.raw())
    }
}

fn chunks(records: &[Raw]) -> Vec<[u64; 3]> {
    records
        .iter()
        .filter(|record| record.kind == AUX)
        .map(|record| [record.words[0], record.words[1], record.words[2]])
        .collect()
}

/// Causes `count` exits of `vcpu`. A trace opened with [`trace`] records them.
fn exits(fixture: &Fixture, vcpu: u32, count: u64) {
    for ip in 0..count {
        fixture.exit(vcpu, ExitReason::Io, &mut At(ip));
    }
}
