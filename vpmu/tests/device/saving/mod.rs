//! Save and restore. Another device on another host continues from the saved state.

mod areas;
mod counting;
mod forged;
mod relations;
mod sampling;
mod timing;
mod twice;

use vpmu::abi::*;
use vpmu_testkit::{Fields, Fixture, open_of};

/// An enabled event that samples marks.
fn marks(vcpu: u32, period: u64) -> OpenRequest {
    open_of(KIND_MARK, 5, vcpu).sampled(period).flags(OPEN_ENABLED)
}

fn mark(fixture: &Fixture, from: u64, times: u64) {
    (from..from + times).for_each(|ip| fixture.mark(0, 5, ip));
}
