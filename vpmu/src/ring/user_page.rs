//! Publishes an event's count and times in the metadata page, under the page's sequence lock.

use std::sync::atomic::Ordering;

use zerocopy::FromZeros;

use crate::abi::{Metadata, PAGE_SIZE};
use crate::clock::Clock;
use crate::pages::{Pages, Unwritable};

/// The value of the page's `size` field: the number of bytes before the field `reserved`.
#[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
const HEADER_SIZE: u32 = std::mem::offset_of!(Metadata, reserved) as u32;
pub(super) const LOCK: usize = std::mem::offset_of!(Metadata, lock);
pub(super) const COUNT: usize = std::mem::offset_of!(Metadata, offset);
const ENABLED: usize = std::mem::offset_of!(Metadata, time_enabled);
const RUNNING: usize = std::mem::offset_of!(Metadata, time_running);
pub(super) const CAPABILITIES: usize = std::mem::offset_of!(Metadata, capabilities);
const PMC_WIDTH_AND_SHIFT: usize = std::mem::offset_of!(Metadata, pmc_width);
const TIME_MULT: usize = std::mem::offset_of!(Metadata, time_mult);
const TIME_OFFSET: usize = std::mem::offset_of!(Metadata, time_offset);

const CAP_BIT0_IS_DEPRECATED: u64 = 1 << 1;
pub(super) const CAP_USER_TIME: u64 = 1 << 3;
const CAP_USER_TIME_ZERO: u64 = 1 << 4;
/// The field `pmc_width`: the width in bits of a counter that programs read with `rdpmc`. To sign-extend the counter,
/// programs shift it left and then right, by 64 minus this width. With this value, they shift it by zero.
const PMC_WIDTH: u16 = 64;

/// The count and times to publish in the metadata page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountSnapshot {
    pub(crate) count: u64,
    pub(crate) time_enabled: u64,
    pub(crate) time_running: u64,
    /// The guest time, in nanoseconds, at which the count and times had these values. `None` if they are not growing.
    pub(crate) growing_since: Option<u64>,
}

/// Returns the metadata page of an empty ring with `size` bytes of data.
pub(super) fn blank(size: u64, clock: Clock) -> Metadata {
    let mut page = Metadata::new_zeroed();
    page.capabilities = (CAP_BIT0_IS_DEPRECATED | CAP_USER_TIME_ZERO).into();
    page.pmc_width = PMC_WIDTH.into();
    page.time_mult = clock.mult.into();
    page.time_shift = clock.shift.into();
    page.time_mask = u64::MAX.into();
    page.size = HEADER_SIZE.into();
    page.data_offset = (PAGE_SIZE as u64).into();
    page.data_size = size.into();
    page
}

/// Writes the time conversion of `clock` to the page of a restored ring. `sequence` has the same meaning as for
/// [`show`].
pub(super) fn retime(pages: &impl Pages, sequence: &mut u32, clock: Clock) -> Result<(), Unwritable> {
    let odd = sequence.wrapping_add(1);
    *sequence = odd.wrapping_add(1);
    pages.store_half(LOCK, odd, Ordering::Relaxed)?;
    // A reader that sees a changed field must also see the odd sequence.
    pages.fence(Ordering::Release);
    // The width and the shift are the two halves of a 32-bit word.
    let shift = u32::from(PMC_WIDTH) | u32::from(clock.shift) << 16;
    pages.store_half(PMC_WIDTH_AND_SHIFT, shift, Ordering::Relaxed)?;
    pages.store_half(TIME_MULT, clock.mult, Ordering::Relaxed)?;
    pages.store_half(LOCK, *sequence, Ordering::Release)
}

/// Writes `counts` to the page. `sequence` is the value of the sequence lock, which is even before and after the write.
pub(super) fn update(pages: &impl Pages, sequence: &mut u32, counts: &CountSnapshot) -> Result<(), Unwritable> {
    let capabilities = CAP_BIT0_IS_DEPRECATED | CAP_USER_TIME_ZERO | counts.growing_since.map_or(0, |_| CAP_USER_TIME);
    let fields = [
        (COUNT, counts.count),
        (ENABLED, counts.time_enabled),
        (RUNNING, counts.time_running),
        (CAPABILITIES, capabilities),
        (TIME_OFFSET, counts.growing_since.unwrap_or(0).wrapping_neg()),
    ];
    let odd = sequence.wrapping_add(1);
    *sequence = odd.wrapping_add(1);
    pages.store_half(LOCK, odd, Ordering::Relaxed)?;
    // A reader that sees a changed field must also see the odd sequence.
    pages.fence(Ordering::Release);
    for (field, value) in fields {
        pages.store(field, value, Ordering::Relaxed)?;
    }
    pages.store_half(LOCK, *sequence, Ordering::Release)
}
