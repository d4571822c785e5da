//! Opening an event: what it counts, when it samples and what a record holds.

use zerocopy::little_endian::{U32, U64};

use super::ControlHeader;

wire! {
    /// [`CONTROL_OPEN`](super::CONTROL_OPEN).
    pub struct OpenRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// One of `KIND_*`.
        pub kind: U32,
        /// A vCPU index, or [`CONTEXT_TASK`].
        pub context: U32,
        /// Which event of the kind.
        pub config: U64,
        /// A sample every so many, or so many samples a second with [`OPEN_FREQ`]; zero counts
        /// only.
        pub period: U64,
        /// perf's `PERF_SAMPLE_*`, out of [`SAMPLE_ALLOWED`].
        pub sample_type: U64,
        /// `OPEN_*`.
        pub flags: U32,
        /// A wakeup every so many records, or bytes with [`OPEN_WATERMARK`]; zero: every full page.
        pub wakeup: U32,
        /// [`ENGINE_ANY`], [`ENGINE_EXIT`] or [`ENGINE_BATCHED`].
        pub engine: U32,
        /// Most addresses of a call chain, [`MAX_STACK`] at most; zero: [`MAX_STACK`].
        pub max_stack: U32,
        /// Zero, or the event whose ring this one writes to and whose id its records carry
        /// (inherited events).
        pub parent: U64,
        /// Zero, or the leader of its group: an event of the same context without a leader.
        pub leader: U64,
        /// perf's `PERF_FORMAT_*`, out of [`READ_ALLOWED`]: of `PERF_SAMPLE_READ` and
        /// `PERF_RECORD_READ`.
        pub read_format: U64,
        /// Registers of `PERF_SAMPLE_REGS_USER`: perf's numbers for the architecture.
        pub regs_user: U64,
        /// Registers of `PERF_SAMPLE_REGS_INTR`.
        pub regs_intr: U64,
        /// Bytes of `PERF_SAMPLE_STACK_USER`: a multiple of 8 below 65,535.
        pub stack_user: U32,
        /// Of a trace: a wakeup every so many bytes of AUX data; zero: every half of the area.
        pub aux_watermark: U32,
    }
}

/// [`OpenRequest::context`]: the driver schedules the event in and out on vCPU queues.
pub const CONTEXT_TASK: u32 = u32::MAX;

/// [`OpenRequest::flags`]: opens enabled.
pub const OPEN_ENABLED: u32 = 1 << 0;
/// [`OpenRequest::flags`]: guest user mode is not counted.
pub const OPEN_EXCLUDE_USER: u32 = 1 << 1;
/// [`OpenRequest::flags`]: guest kernel mode is not counted.
pub const OPEN_EXCLUDE_KERNEL: u32 = 1 << 2;
/// [`OpenRequest::flags`]: `wakeup` is in bytes.
pub const OPEN_WATERMARK: u32 = 1 << 3;
/// [`OpenRequest::flags`]: `period` is in samples a second, and the device adapts the period.
pub const OPEN_FREQ: u32 = 1 << 4;
/// [`OpenRequest::flags`]: records that are no samples end with who and when, as perf's
/// `sample_id_all` has it.
pub const OPEN_SAMPLE_ID_ALL: u32 = 1 << 5;
/// [`OpenRequest::flags`]: its ring is written from its end backwards, as perf's
/// `write_backward` has it.
pub const OPEN_BACKWARD: u32 = 1 << 6;
/// [`OpenRequest::flags`]: in error when the host cannot count it all the time.
pub const OPEN_PINNED: u32 = 1 << 7;
/// [`OpenRequest::flags`]: its counts are written to the ring as it closes, as
/// `PERF_RECORD_READ`; of inherited events.
pub const OPEN_INHERIT_STAT: u32 = 1 << 8;
/// [`OpenRequest::flags`]: call chains leave the kernel out.
pub const OPEN_EXCLUDE_CHAIN_KERNEL: u32 = 1 << 9;
/// [`OpenRequest::flags`]: call chains leave user mode out.
pub const OPEN_EXCLUDE_CHAIN_USER: u32 = 1 << 10;
/// [`OpenRequest::flags`]: a trace that opens paused: it makes nothing until it is resumed.
pub const OPEN_AUX_START_PAUSED: u32 = 1 << 11;
/// [`OpenRequest::flags`]: its overflow pauses the trace that leads its group.
pub const OPEN_AUX_PAUSE: u32 = 1 << 12;
/// [`OpenRequest::flags`]: its overflow resumes the trace that leads its group.
pub const OPEN_AUX_RESUME: u32 = 1 << 13;
/// [`OpenRequest::flags`]: opens paused: it counts and makes nothing until its starter overflows.
pub const OPEN_PAUSED: u32 = 1 << 14;
/// [`OpenRequest::flags`]: opens persistent, as by [`CONTROL_DETACH`](super::CONTROL_DETACH) without a
/// name.
pub const OPEN_PERSISTENT: u32 = 1 << 15;
/// [`OpenRequest::flags`]: the host's work for the vCPU is not counted, where the backing can tell,
/// whatever [`Config::count_mode`](super::Config::count_mode) says.
pub const OPEN_EXCLUDE_HOST: u32 = 1 << 16;

/// perf's `PERF_SAMPLE_*` that an event can have: IP, TID, TIME, ADDR, READ, CALLCHAIN, ID, CPU,
/// PERIOD, STREAM_ID, REGS_USER, STACK_USER, IDENTIFIER, REGS_INTR.
pub const SAMPLE_ALLOWED: u64 = 0x5_33ff;
/// perf's `PERF_FORMAT_*` that an event can have: TOTAL_TIME_ENABLED, TOTAL_TIME_RUNNING, ID,
/// GROUP, LOST.
pub const READ_ALLOWED: u64 = 0x1f;
/// Most addresses of a call chain, those that name the mode not counted.
pub const MAX_STACK: u32 = 127;

/// [`OpenRequest::engine`]: the device chooses.
pub const ENGINE_ANY: u32 = 0;
/// The overflow ends the run call and the registers are read: exact on any host.
pub const ENGINE_EXIT: u32 = 1;
/// The host samples and the device rewrites: no exit per sample.
pub const ENGINE_BATCHED: u32 = 2;

wire! {
    /// The answer to [`CONTROL_OPEN`](super::CONTROL_OPEN).
    pub struct OpenReply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// The engine chosen; [`ENGINE_ANY`] for an event without a period, but for a trace of every exit.
        /// With a status, one of `REFUSED_*`: why the host refused;
        /// [`REFUSED_NOT`](super::REFUSED_NOT): the device did.
        pub engine: U32,
        /// The event's id: never zero, never used again while the VM lives.
        pub id: U64,
    }
}
