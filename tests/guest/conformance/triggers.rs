//! Regions between two marks.

use std::hint::black_box;

use super::event::{INSTRUCTIONS, MOST_BORDER, PER_ROUND, spin};
use super::{Row, RowResult, absent, holds};
use crate::ensure::ensure;
use crate::raw::{Device, Doorbell, How};
use crate::triggers::{Region, START, STOP};

pub(super) const ROWS: &[Row] = &[("region_counts_its_instructions", region)];

/// Executes a region once. It is not inlined, so that its instructions are the same for any number of rounds.
#[inline(never)]
fn pass(bell: &Doorbell, rounds: u64) {
    bell.mark(START);
    spin(rounds);
    bell.mark(STOP);
}

fn region() -> RowResult {
    let Ok(device) = Device::open() else {
        return absent("the guest has no vpmu");
    };
    let bell = Doorbell::map(&device)?;
    let mut inside = device.attr(vpmu_abi::KIND_HARDWARE.into(), INSTRUCTIONS.config);
    inside.set_exclude_kernel(1);
    let region = Region::of(&device, &inside, How::OWN)?;
    let mut borders = Vec::new();
    for rounds in [1_000, 100_000, 10_000_000] {
        let before = region.target.count()?;
        pass(&bell, black_box(rounds));
        let count = region.target.count()? - before;
        borders.push(count.wrapping_sub(PER_ROUND * rounds));
    }
    ensure!(borders.iter().all(|border| *border == borders[0]), "counts exceed the regions' loops by {borders:?}");
    ensure!(borders[0] <= MOST_BORDER, "the counts exceed the loops by {}", borders[0]);
    holds(format!("2,000 to 20,000,000, each + {}", borders[0]))
}
