//! Byte offsets in perf's metadata page, `struct perf_event_mmap_page`, and bits of its
//! capabilities, as far as this project uses them.

use std::mem::offset_of;

use perf_event_open_sys::bindings::perf_event_mmap_page as Page;

/// The sequence lock; the upper half of the word is the hardware counter's index.
pub const LOCK_INDEX: usize = offset_of!(Page, lock);
/// The part of the count that is not in the hardware counter.
pub const OFFSET: usize = offset_of!(Page, offset);
/// How long the event was enabled, in nanoseconds.
pub const TIME_ENABLED: usize = offset_of!(Page, time_enabled);
/// How long the event counted, in nanoseconds.
pub const TIME_RUNNING: usize = offset_of!(Page, time_running);
/// The `CAP_*` bits.
pub const CAPABILITIES: usize = offset_of!(Page, __bindgen_anon_1);
/// The hardware counter's width, then the shift and the multiplier for converting ticks to nanoseconds.
pub const WIDTH_SHIFT_MULT: usize = offset_of!(Page, pmc_width);
/// Nanoseconds to add to the converted ticks to get the time since the page was written.
pub const TIME_OFFSET: usize = offset_of!(Page, time_offset);
/// Nanoseconds to add to the converted ticks to get a timestamp on the clock of the records.
pub const TIME_ZERO: usize = offset_of!(Page, time_zero);
/// Value of the CPU's clock when the page was written, if the clock is narrower than 64 bits.
pub const TIME_CYCLES: usize = offset_of!(Page, time_cycles);
/// Mask of the bits of a clock that is narrower than 64 bits.
pub const TIME_MASK: usize = offset_of!(Page, time_mask);
/// Bytes written to the data pages so far.
pub const DATA_HEAD: usize = offset_of!(Page, data_head);
/// Bytes of the data that the reader has consumed so far.
pub const DATA_TAIL: usize = offset_of!(Page, data_tail);
/// Bytes written to the AUX area so far.
pub const AUX_HEAD: usize = offset_of!(Page, aux_head);
/// Bytes of the AUX area that the reader has consumed so far.
pub const AUX_TAIL: usize = offset_of!(Page, aux_tail);
/// Offset in the event's descriptor at which the AUX area is mapped.
pub const AUX_OFFSET: usize = offset_of!(Page, aux_offset);
/// Bytes of the AUX area.
pub const AUX_SIZE: usize = offset_of!(Page, aux_size);

/// perf's `cap_user_rdpmc`: programs may read the hardware counter.
pub const CAP_USER_RDPMC: u64 = 1 << 2;
/// perf's `cap_user_time`: the times can be extrapolated with the CPU's clock.
pub const CAP_USER_TIME: u64 = 1 << 3;
/// perf's `cap_user_time_short`: the CPU's clock is narrower than 64 bits.
pub const CAP_USER_TIME_SHORT: u64 = 1 << 5;
