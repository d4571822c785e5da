//! The vCPU queues: commands that are legal with interrupts off, and their replies.

use zerocopy::little_endian::{I32, U32, U64};

wire! {
    /// One command on a vCPU queue. A buffer holds commands, then space for one [`Reply`] to each
    /// command. All buffers of one notification may hold at most 2048 commands. The device writes
    /// the replies before the notifying instruction retires.
    pub struct Command {
        /// One of `COMMAND_*`.
        pub op: U32,
        /// Zero.
        pub reserved: U32,
        /// The event; zero for [`COMMAND_VCPU`], or to make [`COMMAND_FLUSH`] flush all persistent
        /// events of the vCPU.
        pub event: U64,
        /// For [`COMMAND_PERIOD`] the new period, for [`COMMAND_REFRESH`] the number of overflows
        /// until the event is disabled, for [`COMMAND_AUX_BEGIN`] the head, else zero.
        pub value: U64,
        /// The bytes that the event may write for [`COMMAND_AUX_BEGIN`], else zero.
        pub room: U64,
    }
}

/// vCPU command: identify the notifying vCPU; [`Reply::value`] is its index.
pub const COMMAND_VCPU: u32 = 1;
/// vCPU command: enable the event; its count continues.
pub const COMMAND_ENABLE: u32 = 2;
/// vCPU command: disable the event: its state becomes [`STATE_OFF`].
pub const COMMAND_DISABLE: u32 = 3;
/// vCPU command: the task of a task event starts to run on this vCPU.
pub const COMMAND_IN: u32 = 4;
/// vCPU command: the task of a task event stops running on this vCPU.
pub const COMMAND_OUT: u32 = 5;
/// vCPU command: only return the reply.
pub const COMMAND_READ: u32 = 6;
/// vCPU command: set the count to zero; keep the times.
pub const COMMAND_RESET: u32 = 7;
/// vCPU command: set the period (with [`OPEN_FREQ`](super::OPEN_FREQ): the frequency), from now on.
pub const COMMAND_PERIOD: u32 = 8;
/// vCPU command: enable the event for the given number of overflows; the last one disables it.
/// Like perf's `PERF_EVENT_IOC_REFRESH`.
pub const COMMAND_REFRESH: u32 = 9;
/// vCPU command: the event may write `room` bytes of its AUX area from `value` on, modulo the size
/// of the area; for areas mapped with [`MAP_DRIVER_OWNED`](super::MAP_DRIVER_OWNED).
pub const COMMAND_AUX_BEGIN: u32 = 10;
/// vCPU command: the event may no longer write to its AUX area. [`Reply::value`] is the head that the
/// event reached, [`Reply::lost`] the bytes that found no room since [`COMMAND_AUX_BEGIN`].
pub const COMMAND_AUX_END: u32 = 11;
/// vCPU command: write the event's pending samples and traces to the guest's pages and wake its
/// readers before the reply. Event zero flushes every persistent event of this vCPU.
pub const COMMAND_FLUSH: u32 = 12;

wire! {
    /// The reply to a [`Command`]: the event's state after the command.
    pub struct Reply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// One of `STATE_*`.
        pub state: I32,
        /// The count, except for [`COMMAND_VCPU`] and [`COMMAND_AUX_END`].
        pub value: U64,
        /// Nanoseconds for which the event was enabled while its context ran.
        pub time_enabled: U64,
        /// Nanoseconds for which the backing counted.
        pub time_running: U64,
        /// Overflows without a record; for a trace, lost bytes.
        pub lost: U64,
    }
}

/// [`Reply::state`]: the backing was lost; the count no longer changes.
pub const STATE_ERROR: i32 = -2;
/// [`Reply::state`]: disabled.
pub const STATE_OFF: i32 = -1;
/// [`Reply::state`]: enabled, but its context does not run, its leader is off, or it waits for a host
/// counter.
pub const STATE_INACTIVE: i32 = 0;
/// [`Reply::state`]: counting, or paused.
pub const STATE_ACTIVE: i32 = 1;
