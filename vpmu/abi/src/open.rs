//! Opening an event: the counted event, sampling and the fields of its records.

use zerocopy::little_endian::{U32, U64};

use super::ControlHeader;

wire! {
    /// The request of [`CONTROL_OPEN`](super::CONTROL_OPEN).
    pub struct OpenRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// One of `KIND_*`.
        pub kind: U32,
        /// A vCPU index, or [`CONTEXT_TASK`].
        pub context: U32,
        /// The event within the kind.
        pub config: U64,
        /// Events between samples, or samples per second with [`OPEN_FREQ`]; zero for an event that
        /// only counts.
        pub period: U64,
        /// perf's `PERF_SAMPLE_*`, a subset of [`SAMPLE_ALLOWED`].
        pub sample_type: U64,
        /// `OPEN_*`.
        pub flags: U32,
        /// Sample records between wakeups, or bytes with [`OPEN_WATERMARK`]; zero: a wakeup at every
        /// full page.
        pub wakeup: U32,
        /// [`ENGINE_ANY`], [`ENGINE_EXIT`] or [`ENGINE_BATCHED`].
        pub engine: U32,
        /// Maximum length of a call chain, [`MAX_STACK`] at most; zero: [`MAX_STACK`].
        pub max_stack: U32,
        /// Zero, or the parent of an inherited event. Records of the inherited event go to the parent's ring
    /// and have the parent's id.
        pub parent: U64,
        /// Zero, or the leader of the group: an event of the same context without a leader.
        pub leader: U64,
        /// perf's `PERF_FORMAT_*`, a subset of [`READ_ALLOWED`], for `PERF_SAMPLE_READ` and
        /// `PERF_RECORD_READ`.
        pub read_format: U64,
        /// Mask of the registers of `PERF_SAMPLE_REGS_USER`, by perf's numbers for the architecture.
        pub regs_user: U64,
        /// Mask of the registers of `PERF_SAMPLE_REGS_INTR`.
        pub regs_intr: U64,
        /// Bytes of `PERF_SAMPLE_STACK_USER`: a multiple of 8 below 65,535.
        pub stack_user: U32,
        /// For a trace: AUX bytes between wakeups; zero: half of the area.
        pub aux_watermark: U32,
    }
}

/// [`OpenRequest::context`]: the driver schedules the event in and out on vCPU queues.
pub const CONTEXT_TASK: u32 = u32::MAX;

/// [`OpenRequest::flags`]: the event opens enabled.
pub const OPEN_ENABLED: u32 = 1 << 0;
/// [`OpenRequest::flags`]: guest user mode is not counted.
pub const OPEN_EXCLUDE_USER: u32 = 1 << 1;
/// [`OpenRequest::flags`]: guest kernel mode is not counted.
pub const OPEN_EXCLUDE_KERNEL: u32 = 1 << 2;
/// [`OpenRequest::flags`]: `wakeup` is in bytes.
pub const OPEN_WATERMARK: u32 = 1 << 3;
/// [`OpenRequest::flags`]: `period` is in samples a second, and the device adapts the period.
pub const OPEN_FREQ: u32 = 1 << 4;
/// [`OpenRequest::flags`]: records other than samples end with task and time, like perf's
/// `sample_id_all`.
pub const OPEN_SAMPLE_ID_ALL: u32 = 1 << 5;
/// [`OpenRequest::flags`]: the event's ring is written from its end backwards, like perf's
/// `write_backward`.
pub const OPEN_BACKWARD: u32 = 1 << 6;
/// [`OpenRequest::flags`]: the event enters the error state unless the host can always count it.
pub const OPEN_PINNED: u32 = 1 << 7;
/// [`OpenRequest::flags`] of an inherited event: closing it writes its counts to the ring as
/// `PERF_RECORD_READ`.
pub const OPEN_INHERIT_STAT: u32 = 1 << 8;
/// [`OpenRequest::flags`]: call chains omit the kernel.
pub const OPEN_EXCLUDE_CHAIN_KERNEL: u32 = 1 << 9;
/// [`OpenRequest::flags`]: call chains omit user mode.
pub const OPEN_EXCLUDE_CHAIN_USER: u32 = 1 << 10;
/// [`OpenRequest::flags`] of a trace: it opens paused and writes nothing until it is resumed.
pub const OPEN_AUX_START_PAUSED: u32 = 1 << 11;
/// [`OpenRequest::flags`]: an overflow of the event pauses the trace that leads its group.
pub const OPEN_AUX_PAUSE: u32 = 1 << 12;
/// [`OpenRequest::flags`]: an overflow of the event resumes the trace that leads its group.
pub const OPEN_AUX_RESUME: u32 = 1 << 13;
/// [`OpenRequest::flags`]: the event opens paused: it neither counts nor samples until its starter
/// overflows.
pub const OPEN_PAUSED: u32 = 1 << 14;
/// [`OpenRequest::flags`]: the event opens persistent, as [`CONTROL_DETACH`](super::CONTROL_DETACH)
/// without a name makes it.
pub const OPEN_PERSISTENT: u32 = 1 << 15;
/// [`OpenRequest::flags`]: host work for the vCPU is excluded if the backing can separate it,
/// independent of [`Config::count_mode`](super::Config::count_mode).
pub const OPEN_EXCLUDE_HOST: u32 = 1 << 16;

/// Supported `PERF_SAMPLE_*` of perf: IP, TID, TIME, ADDR, READ, CALLCHAIN, ID, CPU, PERIOD,
/// STREAM_ID, REGS_USER, STACK_USER, IDENTIFIER, REGS_INTR.
pub const SAMPLE_ALLOWED: u64 = 0x5_33ff;
/// Supported `PERF_FORMAT_*` of perf: TOTAL_TIME_ENABLED, TOTAL_TIME_RUNNING, ID, GROUP, LOST.
pub const READ_ALLOWED: u64 = 0x1f;
/// Maximum length of a call chain, without the values that mark a mode.
pub const MAX_STACK: u32 = 127;

/// [`OpenRequest::engine`]: the device chooses.
pub const ENGINE_ANY: u32 = 0;
/// [`OpenRequest::engine`]: the overflow ends the run call, and the device reads the registers; exact
/// on any host.
pub const ENGINE_EXIT: u32 = 1;
/// [`OpenRequest::engine`]: the host samples, and the device converts the host's records; no exit per
/// sample.
pub const ENGINE_BATCHED: u32 = 2;

wire! {
    /// The reply to [`CONTROL_OPEN`](super::CONTROL_OPEN).
    pub struct OpenReply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// The chosen engine; [`ENGINE_ANY`] for an event without a period, but [`ENGINE_BATCHED`]
        /// for a trace of every exit. With an error status: one of `REFUSED_*`, the reason why the
        /// host refused, or [`REFUSED_NOT`](super::REFUSED_NOT) if the device refused.
        pub engine: U32,
        /// The event's id: never zero, and not reused while the VM lives.
        pub id: U64,
    }
}
