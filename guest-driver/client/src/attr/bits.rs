//! perf's bits for `sample_type` (`SAMPLE_*`) and `read_format` (`FORMAT_*`).

pub use vpmu_perf::field::{
    FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING, SAMPLE_ADDR, SAMPLE_CALLCHAIN,
    SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD, SAMPLE_READ, SAMPLE_REGS_INTR,
    SAMPLE_REGS_USER, SAMPLE_STACK_USER, SAMPLE_STREAM_ID, SAMPLE_TID, SAMPLE_TIME,
};

/// Sample fields that a profile needs: instruction, task, time, event id, CPU and period.
pub const SAMPLE_DEFAULT: u64 = SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_CPU | SAMPLE_PERIOD;

/// A reading with the count, both times and the event's id.
pub const FORMAT_ALL: u64 = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID;
