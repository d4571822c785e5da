//! Opening an event: what it counts, when it samples, and which fields its records have.

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
        /// The sampling period; with [`OPEN_FREQ`], the sampling frequency in samples per second. Zero for an
        /// event that only counts.
        pub period: U64,
        /// perf's `PERF_SAMPLE_*`, a subset of [`SAMPLE_ALLOWED`].
        pub sample_type: U64,
        /// `OPEN_*`.
        pub flags: U32,
        /// Number of sample records between wakeups; with [`OPEN_WATERMARK`], number of bytes. Zero requests a wakeup
        /// each time a page fills up.
        pub wakeup: U32,
        /// [`ENGINE_ANY`], [`ENGINE_EXIT`] or [`ENGINE_BATCHED`].
        pub engine: U32,
        /// Maximum length of a call chain, at most [`MAX_STACK`]; zero means [`DEFAULT_STACK`].
        pub max_stack: U32,
        /// For an inherited event, the id of its parent; otherwise zero. Records of the inherited event
        /// go to the parent's ring and have the parent's id.
        pub parent: U64,
        /// For a group member, the id of the group leader; otherwise zero. The leader must have the same
        /// context, and must not be a member of a group.
        pub leader: U64,
        /// perf's `PERF_FORMAT_*`, a subset of [`READ_ALLOWED`], for `PERF_SAMPLE_READ` and
        /// `PERF_RECORD_READ`.
        pub read_format: U64,
        /// Mask of the registers of `PERF_SAMPLE_REGS_USER`: bit n selects perf's register number n of the
        /// guest's architecture.
        pub regs_user: U64,
        /// Mask of the registers of `PERF_SAMPLE_REGS_INTR`.
        pub regs_intr: U64,
        /// Size of `PERF_SAMPLE_STACK_USER` in bytes: a multiple of 8 below 65,535.
        pub stack_user: U32,
        /// For a trace: AUX bytes between wakeups; zero means half of the area.
        pub aux_watermark: U32,
    }
}

/// [`OpenRequest::context`]: a task. When the task starts or stops running on a vCPU, the driver sends
/// [`COMMAND_IN`](super::COMMAND_IN) or [`COMMAND_OUT`](super::COMMAND_OUT) on the queue of this vCPU.
pub const CONTEXT_TASK: u32 = u32::MAX;

/// [`OpenRequest::flags`]: the event opens enabled.
pub const OPEN_ENABLED: u32 = 1 << 0;
/// [`OpenRequest::flags`]: guest user mode is not counted.
pub const OPEN_EXCLUDE_USER: u32 = 1 << 1;
/// [`OpenRequest::flags`]: guest kernel mode is not counted.
pub const OPEN_EXCLUDE_KERNEL: u32 = 1 << 2;
/// [`OpenRequest::flags`]: `wakeup` is in bytes.
pub const OPEN_WATERMARK: u32 = 1 << 3;
/// [`OpenRequest::flags`]: `period` is a frequency in samples per second; the device adjusts the actual period
/// to match it.
pub const OPEN_FREQ: u32 = 1 << 4;
/// [`OpenRequest::flags`]: every record that is not a sample ends with those of the fields TID, TIME, ID,
/// STREAM_ID, CPU and IDENTIFIER that `sample_type` selects. Like perf's `sample_id_all`.
pub const OPEN_SAMPLE_ID_ALL: u32 = 1 << 5;
/// [`OpenRequest::flags`]: the device writes the event's ring backwards, from its end, like perf's
/// `write_backward`.
pub const OPEN_BACKWARD: u32 = 1 << 6;
/// [`OpenRequest::flags`]: if the host cannot count the event all the time, the event enters
/// [`STATE_ERROR`](super::STATE_ERROR).
pub const OPEN_PINNED: u32 = 1 << 7;
/// [`OpenRequest::flags`] of an inherited event: when the event is closed, the device writes a
/// `PERF_RECORD_READ` with the event's counts to the ring.
pub const OPEN_INHERIT_STAT: u32 = 1 << 8;
/// [`OpenRequest::flags`]: call chains omit the kernel.
pub const OPEN_EXCLUDE_CHAIN_KERNEL: u32 = 1 << 9;
/// [`OpenRequest::flags`]: call chains omit user mode.
pub const OPEN_EXCLUDE_CHAIN_USER: u32 = 1 << 10;
/// [`OpenRequest::flags`] of a trace: the trace opens paused and writes nothing until it is resumed.
pub const OPEN_AUX_START_PAUSED: u32 = 1 << 11;
/// [`OpenRequest::flags`]: an overflow of the event pauses the trace that leads its group.
pub const OPEN_AUX_PAUSE: u32 = 1 << 12;
/// [`OpenRequest::flags`]: an overflow of the event resumes the trace that leads its group.
pub const OPEN_AUX_RESUME: u32 = 1 << 13;
/// [`OpenRequest::flags`]: the event opens paused: it neither counts nor samples until its starter
/// overflows.
pub const OPEN_PAUSED: u32 = 1 << 14;
/// [`OpenRequest::flags`]: the event opens persistent, as if it were made persistent by
/// [`CONTROL_DETACH`](super::CONTROL_DETACH) without a name.
pub const OPEN_PERSISTENT: u32 = 1 << 15;
/// [`OpenRequest::flags`]: the event excludes the host's work for the vCPU, if its counter can, regardless of
/// [`Config::count_mode`](super::Config::count_mode).
pub const OPEN_EXCLUDE_HOST: u32 = 1 << 16;

/// perf's `PERF_SAMPLE_*` bits that the device supports: IP, TID, TIME, ADDR, READ, CALLCHAIN, ID, CPU,
/// PERIOD, STREAM_ID, REGS_USER, STACK_USER, IDENTIFIER, REGS_INTR.
pub const SAMPLE_ALLOWED: u64 = 0x5_33ff;
/// perf's `PERF_FORMAT_*` bits that the device supports: TOTAL_TIME_ENABLED, TOTAL_TIME_RUNNING, ID, GROUP, LOST.
pub const READ_ALLOWED: u64 = 0x1f;
/// Maximum length of a call chain, not counting the `PERF_CONTEXT_*` values that mark a mode.
pub const MAX_STACK: u32 = 1024;
/// Maximum length of a call chain if the request has none: perf's default.
pub const DEFAULT_STACK: u32 = 127;

/// [`OpenRequest::engine`]: the device chooses.
pub const ENGINE_ANY: u32 = 0;
/// [`OpenRequest::engine`]: the overflow makes the run call (`KVM_RUN`) return, and the device reads
/// the vCPU's registers. The samples are exact on any host.
pub const ENGINE_EXIT: u32 = 1;
/// [`OpenRequest::engine`]: the host samples, and the device converts the host's records. Samples cause no
/// exits.
pub const ENGINE_BATCHED: u32 = 2;

wire! {
    /// The reply to [`CONTROL_OPEN`](super::CONTROL_OPEN).
    pub struct OpenReply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// The chosen engine, which takes the event's samples unless the driver has sent
        /// [`COMMAND_PROMPT`](super::COMMAND_PROMPT). An event without a period has [`ENGINE_ANY`], except a trace of every exit
        /// ([`EXIT_ALL`](super::EXIT_ALL)), which has [`ENGINE_BATCHED`]. With an error status: one of
        /// `REFUSED_*`, the reason why the host refused the event, or [`REFUSED_NOT`](super::REFUSED_NOT)
        /// if the device itself refused it.
        pub engine: U32,
        /// The event's id: never zero, and never reused during the lifetime of the VM.
        pub id: U64,
    }
}
