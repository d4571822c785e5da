//! Derives the layout of an event's records from its attributes.

use vpmu_perf::field::{Masks, masks};

use crate::attr::EventAttr;

/// The sample fields that this library can parse.
pub(super) const MASKS: Masks = masks();

/// Layout of an event's records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) sample_type: u64,
    pub(crate) read_format: u64,
    pub(crate) sample_id_all: bool,
    pub(crate) regs_user: u64,
    pub(crate) regs_intr: u64,
}

impl From<&EventAttr> for Layout {
    fn from(attr: &EventAttr) -> Self {
        Self {
            sample_type: attr.sample_type,
            read_format: attr.read_format,
            sample_id_all: attr.sample_id_all,
            regs_user: attr.regs_user,
            regs_intr: attr.regs_intr,
        }
    }
}

impl Layout {
    pub(super) fn has(&self, field: u64) -> bool {
        self.sample_type & field != 0
    }

    /// Number of words that `sample_id_all` adds to the end of a record other than a sample.
    pub(super) fn trailer(&self) -> usize {
        (self.sample_type & MASKS.trailer).count_ones() as usize
    }
}
