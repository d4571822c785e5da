//! perf's `PERF_SAMPLE_*` and `PERF_FORMAT_*`: the fields of samples, and the fields that a read of an event's count
//! returns.

use perf_event_open_sys::bindings as perf;

/// perf's `PERF_SAMPLE_IP`: the instruction pointer.
pub const SAMPLE_IP: u64 = perf::PERF_SAMPLE_IP as u64;
/// perf's `PERF_SAMPLE_TID`: process and thread ids.
pub const SAMPLE_TID: u64 = perf::PERF_SAMPLE_TID as u64;
/// perf's `PERF_SAMPLE_TIME`: the event's clock, in nanoseconds. In the device's records, this is guest time.
pub const SAMPLE_TIME: u64 = perf::PERF_SAMPLE_TIME as u64;
/// perf's `PERF_SAMPLE_ADDR`: the accessed address; zero where unknown.
pub const SAMPLE_ADDR: u64 = perf::PERF_SAMPLE_ADDR as u64;
/// perf's `PERF_SAMPLE_READ`: the counts, in the layout that the read format defines.
pub const SAMPLE_READ: u64 = perf::PERF_SAMPLE_READ as u64;
/// perf's `PERF_SAMPLE_CALLCHAIN`: the call chain, innermost frame first.
pub const SAMPLE_CALLCHAIN: u64 = perf::PERF_SAMPLE_CALLCHAIN as u64;
/// perf's `PERF_SAMPLE_ID`: the event's id; for an inherited event, the id of its parent.
pub const SAMPLE_ID: u64 = perf::PERF_SAMPLE_ID as u64;
/// perf's `PERF_SAMPLE_CPU`: the CPU's number.
pub const SAMPLE_CPU: u64 = perf::PERF_SAMPLE_CPU as u64;
/// perf's `PERF_SAMPLE_PERIOD`: the number of events that the sample represents.
pub const SAMPLE_PERIOD: u64 = perf::PERF_SAMPLE_PERIOD as u64;
/// perf's `PERF_SAMPLE_STREAM_ID`: the event's own id, also for an inherited event.
pub const SAMPLE_STREAM_ID: u64 = perf::PERF_SAMPLE_STREAM_ID as u64;
/// perf's `PERF_SAMPLE_REGS_USER`: the user-mode registers.
pub const SAMPLE_REGS_USER: u64 = perf::PERF_SAMPLE_REGS_USER as u64;
/// perf's `PERF_SAMPLE_STACK_USER`: the top of the user stack.
pub const SAMPLE_STACK_USER: u64 = perf::PERF_SAMPLE_STACK_USER as u64;
/// perf's `PERF_SAMPLE_IDENTIFIER`: the same id as [`SAMPLE_ID`], but right after the record's header.
pub const SAMPLE_IDENTIFIER: u64 = perf::PERF_SAMPLE_IDENTIFIER as u64;
/// perf's `PERF_SAMPLE_REGS_INTR`: the registers at the overflow.
pub const SAMPLE_REGS_INTR: u64 = perf::PERF_SAMPLE_REGS_INTR as u64;

/// perf's `PERF_FORMAT_TOTAL_TIME_ENABLED`: how long the event was enabled, in nanoseconds.
pub const FORMAT_TIME_ENABLED: u64 = perf::PERF_FORMAT_TOTAL_TIME_ENABLED as u64;
/// perf's `PERF_FORMAT_TOTAL_TIME_RUNNING`: how long the event counted, in nanoseconds.
pub const FORMAT_TIME_RUNNING: u64 = perf::PERF_FORMAT_TOTAL_TIME_RUNNING as u64;
/// perf's `PERF_FORMAT_ID`: the event's id.
pub const FORMAT_ID: u64 = perf::PERF_FORMAT_ID as u64;
/// perf's `PERF_FORMAT_GROUP`: the counts of all events of the group, read together.
pub const FORMAT_GROUP: u64 = perf::PERF_FORMAT_GROUP as u64;
/// perf's `PERF_FORMAT_LOST`: the number of the event's lost records.
pub const FORMAT_LOST: u64 = perf::PERF_FORMAT_LOST as u64;
