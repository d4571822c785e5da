//! Counts in the layout that `read_format` selects. Samples, `PERF_RECORD_READ` and the result of `read()` on a perf
//! event have this layout.

use vpmu_perf::field::{FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING};

/// One event of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Member {
    pub(crate) value: u64,
    pub(crate) id: u64,
    /// Number of overflows without a record.
    pub(crate) lost: u64,
}

/// The counts of an event or of a group. The leader's count is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reading<'a> {
    /// Nanoseconds.
    pub(crate) time_enabled: u64,
    /// Nanoseconds.
    pub(crate) time_running: u64,
    /// Without [`FORMAT_GROUP`] in `read_format`, a record has only the first member.
    pub(crate) members: &'a [Member],
}

/// Bytes of a reading of `members` events.
pub(crate) fn read_size(read_format: u64, members: usize) -> usize {
    let one_if = |bit| usize::from(read_format & bit != 0);
    let times = one_if(FORMAT_TIME_ENABLED) + one_if(FORMAT_TIME_RUNNING);
    let each = 1 + one_if(FORMAT_ID) + one_if(FORMAT_LOST);
    let words = match read_format & FORMAT_GROUP {
        0 => times + each,
        _ => 1 + times + each * members,
    };
    8 * words
}
