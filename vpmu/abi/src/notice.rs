//! The event queue: notices from the device to the driver.

use zerocopy::little_endian::{U32, U64};

wire! {
    /// A notice from the device, in a buffer that the driver posted on the event queue.
    pub struct Notice {
        /// One of `NOTICE_*`.
        pub kind: U32,
        /// For [`NOTICE_WAKEUP`] and [`NOTICE_LIMIT`]: the number of wakeups or limits that the notice reports, 1 to
        /// [`NOTICE_COUNT`]. For [`NOTICE_ERROR`]: one of `REFUSED_*`, the reason why the host refused the event's
        /// counter, or [`REFUSED_NOT`](super::REFUSED_NOT) if the event is in the error state for another reason, such
        /// as the loss of an open counter. Otherwise zero.
        pub value: U32,
        /// The event. For [`NOTICE_WAKEUP`]: the parent of one of the families that write to the ring or AUX area.
        pub event: U64,
    }
}

/// Maximum number of wakeups or limits that one notice reports. This bounds the driver's work for a notice.
pub const NOTICE_COUNT: u32 = 256;

/// [`Notice::kind`]: the driver should wake the readers of the ring or AUX area that this event writes to. One notice
/// reports the wakeups of all families that write there, except those that have notices of their own
/// ([`CONTROL_SIGNAL`](super::CONTROL_SIGNAL)).
pub const NOTICE_WAKEUP: u32 = 1;
/// [`Notice::kind`]: the event is in [`STATE_ERROR`](super::STATE_ERROR).
pub const NOTICE_ERROR: u32 = 2;
/// [`Notice::kind`]: the overflows granted with [`COMMAND_REFRESH`](super::COMMAND_REFRESH) are
/// used up; the event is in [`STATE_OFF`](super::STATE_OFF).
pub const NOTICE_LIMIT: u32 = 3;
/// [`Notice::kind`]: in an AUX area mapped with [`MAP_DRIVER_OWNED`](super::MAP_DRIVER_OWNED), the event
/// crossed the watermark, used half of its granted space, or ran out of space; the driver responds with
/// [`COMMAND_AUX_END`](super::COMMAND_AUX_END).
pub const NOTICE_AUX: u32 = 4;
/// [`Notice::kind`]: the host started, ended or renamed persistent events; `event` is one of them. The
/// driver responds by listing them with [`CONTROL_PERSISTENT`](super::CONTROL_PERSISTENT).
pub const NOTICE_PERSISTENT: u32 = 5;
