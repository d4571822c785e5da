//! perf's numbers for the contents of records and readings.

pub use vpmu_perf::field::{
    FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_TIME_ENABLED, FORMAT_TIME_RUNNING, SAMPLE_ADDR,
    SAMPLE_CALLCHAIN, SAMPLE_CPU, SAMPLE_ID, SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_PERIOD,
    SAMPLE_READ, SAMPLE_REGS_INTR, SAMPLE_REGS_USER, SAMPLE_STACK_USER, SAMPLE_STREAM_ID,
    SAMPLE_TID, SAMPLE_TIME,
};

/// Fields that a profile needs: instruction, task, time, event id and period.
pub const SAMPLE_DEFAULT: u64 =
    SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_CPU | SAMPLE_PERIOD;

/// A count with its times and its id.
pub const FORMAT_ALL: u64 = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID;
