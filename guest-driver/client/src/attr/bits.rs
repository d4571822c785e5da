//! perf's numbers for what records and readings hold.

use perf_event_open_sys::bindings as perf;

/// perf's `PERF_SAMPLE_IP`: where the program was.
pub const SAMPLE_IP: u64 = perf::PERF_SAMPLE_IP as u64;
/// perf's `PERF_SAMPLE_TID`: process and thread.
pub const SAMPLE_TID: u64 = perf::PERF_SAMPLE_TID as u64;
/// perf's `PERF_SAMPLE_TIME`: nanoseconds of the guest's clock.
pub const SAMPLE_TIME: u64 = perf::PERF_SAMPLE_TIME as u64;
/// perf's `PERF_SAMPLE_ADDR`: what was accessed; zero where unknown.
pub const SAMPLE_ADDR: u64 = perf::PERF_SAMPLE_ADDR as u64;
/// perf's `PERF_SAMPLE_READ`: the counts, as the read format has them.
pub const SAMPLE_READ: u64 = perf::PERF_SAMPLE_READ as u64;
/// perf's `PERF_SAMPLE_CALLCHAIN`: who called, up to the thread's beginning.
pub const SAMPLE_CALLCHAIN: u64 = perf::PERF_SAMPLE_CALLCHAIN as u64;
/// perf's `PERF_SAMPLE_ID`: which event; an inherited one has its parent's.
pub const SAMPLE_ID: u64 = perf::PERF_SAMPLE_ID as u64;
/// perf's `PERF_SAMPLE_CPU`.
pub const SAMPLE_CPU: u64 = perf::PERF_SAMPLE_CPU as u64;
/// perf's `PERF_SAMPLE_PERIOD`: how much this sample stands for.
pub const SAMPLE_PERIOD: u64 = perf::PERF_SAMPLE_PERIOD as u64;
/// perf's `PERF_SAMPLE_STREAM_ID`: which event; an inherited one has its own.
pub const SAMPLE_STREAM_ID: u64 = perf::PERF_SAMPLE_STREAM_ID as u64;
/// perf's `PERF_SAMPLE_REGS_USER`: the registers of user mode.
pub const SAMPLE_REGS_USER: u64 = perf::PERF_SAMPLE_REGS_USER as u64;
/// perf's `PERF_SAMPLE_STACK_USER`: the top of user mode's stack.
pub const SAMPLE_STACK_USER: u64 = perf::PERF_SAMPLE_STACK_USER as u64;
/// perf's `PERF_SAMPLE_IDENTIFIER`: the id once more, at the record's beginning.
pub const SAMPLE_IDENTIFIER: u64 = perf::PERF_SAMPLE_IDENTIFIER as u64;
/// perf's `PERF_SAMPLE_REGS_INTR`: the registers at the overflow.
pub const SAMPLE_REGS_INTR: u64 = perf::PERF_SAMPLE_REGS_INTR as u64;

/// What a sample of a profile needs: where, who, when, which event, and for how much it stands.
pub const SAMPLE_DEFAULT: u64 =
    SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_ID | SAMPLE_CPU | SAMPLE_PERIOD;

/// perf's `PERF_FORMAT_TOTAL_TIME_ENABLED`.
pub const FORMAT_TIME_ENABLED: u64 = perf::PERF_FORMAT_TOTAL_TIME_ENABLED as u64;
/// perf's `PERF_FORMAT_TOTAL_TIME_RUNNING`.
pub const FORMAT_TIME_RUNNING: u64 = perf::PERF_FORMAT_TOTAL_TIME_RUNNING as u64;
/// perf's `PERF_FORMAT_ID`.
pub const FORMAT_ID: u64 = perf::PERF_FORMAT_ID as u64;
/// perf's `PERF_FORMAT_GROUP`: the whole group at one moment.
pub const FORMAT_GROUP: u64 = perf::PERF_FORMAT_GROUP as u64;
/// perf's `PERF_FORMAT_LOST`: records of the event that were never written.
pub const FORMAT_LOST: u64 = perf::PERF_FORMAT_LOST as u64;

/// A count with its times and its id.
pub const FORMAT_ALL: u64 = FORMAT_TIME_ENABLED | FORMAT_TIME_RUNNING | FORMAT_ID;
