//! Events that start and stop other events.

mod backings;
mod ends;
mod pauses;
mod regions;
mod rules;
mod threads;
mod traces;

use vpmu::abi::*;

use crate::fixture::{Fixture, open_of, sampling};

/// Values of the marks that start and stop the target.
pub(crate) const START: u32 = 7;
pub(crate) const STOP: u32 = 8;

/// Opens an enabled event that overflows at every `period`th mark of `value`.
pub(crate) fn trigger(fixture: &mut Fixture, value: u32, period: u64) -> u64 {
    let request =
        OpenRequest { period: period.into(), flags: OPEN_ENABLED.into(), ..open_of(KIND_MARK, value.into(), 0) };
    fixture.open(&request).expect("open")
}

/// An enabled event that opens paused.
pub(crate) fn paused(kind: u32, config: u64) -> OpenRequest {
    OpenRequest { flags: (OPEN_ENABLED | OPEN_PAUSED).into(), ..open_of(kind, config, 0) }
}

/// Like [`paused`], but the event samples with period `period` and uses the exit engine.
pub(crate) fn paused_sampling(kind: u32, config: u64, period: u64) -> OpenRequest {
    OpenRequest { engine: ENGINE_EXIT.into(), ..sampling(paused(kind, config), period) }
}

/// Opens a target, and links marks that start and stop it.
pub(crate) fn between_marks(fixture: &mut Fixture, request: &OpenRequest) -> u64 {
    let target = fixture.open(request).expect("open");
    for (value, role) in [(START, LINK_STARTER), (STOP, LINK_STOPPER)] {
        let mark = trigger(fixture, value, 1);
        fixture.link(mark, target, role).expect("linked");
    }
    target
}
