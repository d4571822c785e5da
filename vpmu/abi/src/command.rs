//! The vCPU queues: commands that a driver can send with interrupts disabled, and their replies.

use zerocopy::little_endian::{I32, U32, U64};

wire! {
    /// One command on a vCPU queue. A buffer holds one or more commands, followed by space for one
    /// [`Reply`] per command. At each notification, the device takes at most 2048 commands in total
    /// from all buffers. It writes the replies before the instruction that notified the queue retires.
    pub struct Command {
        /// One of `COMMAND_*`.
        pub op: U32,
        /// Zero.
        pub reserved: U32,
        /// Id of the event. Zero for [`COMMAND_VCPU`], and for a [`COMMAND_FLUSH`] that flushes all
        /// persistent events of the vCPU.
        pub event: U64,
        /// For [`COMMAND_PERIOD`]: the new period or frequency. For [`COMMAND_REFRESH`]: the number of overflows
        /// to allow. For [`COMMAND_AUX_BEGIN`]: the head of the AUX area. For [`COMMAND_PROMPT`]: 1 or 0. Otherwise
        /// zero.
        pub value: U64,
        /// For [`COMMAND_AUX_BEGIN`]: the number of bytes that the event may write. Otherwise zero.
        pub room: U64,
    }
}

/// vCPU command: identify the notifying vCPU; [`Reply::value`] is its index.
pub const COMMAND_VCPU: u32 = 1;
/// vCPU command: enable the event; the count continues from its current value.
pub const COMMAND_ENABLE: u32 = 2;
/// vCPU command: disable the event: its state becomes [`STATE_OFF`].
pub const COMMAND_DISABLE: u32 = 3;
/// vCPU command: report that the task of a task event starts to run on this vCPU.
pub const COMMAND_IN: u32 = 4;
/// vCPU command: report that the task of a task event stops running on this vCPU.
pub const COMMAND_OUT: u32 = 5;
/// vCPU command: only return the reply.
pub const COMMAND_READ: u32 = 6;
/// vCPU command: set the count to zero. [`Reply::time_enabled`] and [`Reply::time_running`] do not change.
pub const COMMAND_RESET: u32 = 7;
/// vCPU command: set the period, and start a new period immediately. For an event with
/// [`OPEN_FREQ`](super::OPEN_FREQ), set the frequency instead.
pub const COMMAND_PERIOD: u32 = 8;
/// vCPU command: enable the event, and allow it `value` overflows, in addition to any that remain from an
/// earlier refresh. The last allowed overflow disables the event. Like perf's `PERF_EVENT_IOC_REFRESH`.
pub const COMMAND_REFRESH: u32 = 9;
/// vCPU command: let the event write up to `room` bytes to its AUX area, starting at position `value` modulo
/// the size of the area. Only for areas mapped with [`MAP_DRIVER_OWNED`](super::MAP_DRIVER_OWNED).
pub const COMMAND_AUX_BEGIN: u32 = 10;
/// vCPU command: stop the event's writes to its AUX area. [`Reply::value`] is the head that the event reached.
/// [`Reply::lost`] is the number of bytes that were lost since [`COMMAND_AUX_BEGIN`] because they did not fit.
pub const COMMAND_AUX_END: u32 = 11;
/// vCPU command: write the event's pending samples and packets to its ring and AUX area, and wake the readers.
/// The device does all this before it replies. If [`Command::event`] is zero, flush every persistent event of
/// this vCPU.
pub const COMMAND_FLUSH: u32 = 12;
/// vCPU command: with `value` 1, each sample record of the event causes a wakeup immediately, and the exit engine takes
/// the event's samples. With `value` 0, use the family's wakeup interval and the engine of
/// [`OpenReply::engine`](super::OpenReply::engine) again.
pub const COMMAND_PROMPT: u32 = 13;

wire! {
    /// The reply to a [`Command`]: the event's state after the command.
    pub struct Reply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// One of `STATE_*`.
        pub state: I32,
        /// The event's count. For [`COMMAND_VCPU`]: the index of the vCPU. For [`COMMAND_AUX_END`]: the head
        /// of the AUX area.
        pub value: U64,
        /// Nanoseconds for which the event was enabled while its context ran.
        pub time_enabled: U64,
        /// Nanoseconds of `time_enabled` during which the event was actually counted.
        pub time_running: U64,
        /// Overflows without a record; for a trace, lost bytes.
        pub lost: U64,
    }
}

/// [`Reply::state`]: the event lost its counter, or cannot be counted; the count no longer changes.
pub const STATE_ERROR: i32 = -2;
/// [`Reply::state`]: disabled.
pub const STATE_OFF: i32 = -1;
/// [`Reply::state`]: enabled, but not active: the event's context is not running, its group leader is off, or
/// it is waiting for a host counter.
pub const STATE_INACTIVE: i32 = 0;
/// [`Reply::state`]: counting, or paused.
pub const STATE_ACTIVE: i32 = 1;
