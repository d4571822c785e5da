//! Flushes make all data from before the flush readable, and wake the reader.

mod command;
mod host;
mod threads;

use vpmu::abi::*;
use vpmu_testkit::{CYCLES, Fields, Fixture, open_of};

/// Opens an enabled event on `vcpu`. The given engine takes a sample at every hundredth cycle that the event's host
/// counter counts.
fn cycles(fixture: &mut Fixture, vcpu: u32, engine: u32) -> u64 {
    let request = open_of(CYCLES.0, CYCLES.1, vcpu).sampled(100).engine(engine).flags(OPEN_ENABLED);
    let reply = fixture.open_reply(&request);
    assert_eq!((reply.status.get(), reply.engine.get()), (0, engine));
    reply.id.get()
}

/// Posts buffers for notices.
fn listen(fixture: &mut Fixture) {
    (0..8).for_each(|slot| fixture.post_notice(slot, 16));
}
