//! Events that start and stop other events.

mod backings;
mod ends;
mod pauses;
mod regions;
mod rules;
mod threads;
mod traces;

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, open_of};

/// Values of the marks that start and stop the target.
pub(crate) const START: u32 = 7;
pub(crate) const STOP: u32 = 8;

/// Opens an enabled event that overflows at every `period`th mark of `value`.
pub(crate) fn trigger(fixture: &mut Fixture, value: u32, period: u64) -> u64 {
    let request = open_of(KIND_MARK, value.into(), 0).period(period).flags(OPEN_ENABLED);
    fixture.opened(&request)
}

/// An enabled event that opens paused.
pub(crate) fn paused(kind: u32, config: u64) -> OpenRequest {
    open_of(kind, config, 0).flags(OPEN_ENABLED | OPEN_PAUSED)
}

/// Like [`paused`], but the event samples with period `period` and uses the exit engine.
pub(crate) fn paused_sampling(kind: u32, config: u64, period: u64) -> OpenRequest {
    paused(kind, config).sampled(period).engine(ENGINE_EXIT)
}

/// Opens a target, and links marks that start and stop it.
pub(crate) fn between_marks(fixture: &mut Fixture, request: &OpenRequest) -> u64 {
    let target = fixture.opened(request);
    for (value, role) in [(START, LINK_STARTER), (STOP, LINK_STOPPER)] {
        let mark = trigger(fixture, value, 1);
        fixture.link(mark, target, role).expect("linked");
    }
    target
}
