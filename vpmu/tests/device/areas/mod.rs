//! AUX areas: which pages can be one, what its reader is told, who writes there and until when.

mod driven;
mod life;
mod mapping;
mod producers;
mod random;
mod telling;
mod threads;

use vpmu::ExitReason;
use vpmu::abi::*;

use crate::reader::{Raw, Reader};
use crate::rig::{Rig, open_of};
use crate::traces::area::{AreaReader, map_aux};
use crate::world::At;

const AUX: u64 = 11;
const ITRACE_START: u64 = 12;

fn trace() -> OpenRequest {
    open_of(KIND_EXIT_TRACE, EXIT_IO, 0)
}

/// So many addresses that nothing lies at.
fn pages(rig: &mut Rig, count: u64) -> Vec<u64> {
    let first = rig.next_ring;
    rig.next_ring += (count + 1) * 0x1000;
    (0..count).map(|page| first + page * 0x1000).collect()
}

/// A trace that is on, its ring and its area, both read.
struct Traced {
    event: u64,
    ring: Reader,
    area: AreaReader,
}

impl Traced {
    fn new(rig: &mut Rig, request: &OpenRequest, count: u64, flags: u32) -> Self {
        let event = rig.open(request).expect("open");
        let ring_pages = pages(rig, 5);
        rig.map_pages(event, MAP_WRITABLE, &ring_pages)
            .expect("a ring");
        let area = pages(rig, count);
        map_aux(rig, event, flags, &area).expect("an area");
        Self {
            event,
            ring: Reader::new(&rig.memory, &ring_pages),
            area: AreaReader::new(rig, ring_pages[0], area),
        }
    }

    /// Of vCPU 0, enabled.
    fn on(rig: &mut Rig, count: u64) -> Self {
        let traced = Self::new(rig, &trace(), count, MAP_WRITABLE);
        rig.command(0, COMMAND_ENABLE, traced.event);
        traced
    }

    /// Offset, size and flags of each piece told since the last look.
    fn pieces(&mut self) -> Vec<[u64; 3]> {
        pieces(&self.ring.raw())
    }
}

fn pieces(records: &[Raw]) -> Vec<[u64; 3]> {
    records
        .iter()
        .filter(|record| record.kind == AUX)
        .map(|record| [record.words[0], record.words[1], record.words[2]])
        .collect()
}

/// So many exits of `vcpu` that the traces of [`trace`] hold.
fn exits(rig: &Rig, vcpu: u32, count: u64) {
    for ip in 0..count {
        rig.exit(vcpu, ExitReason::Io, &mut At(ip));
    }
}
