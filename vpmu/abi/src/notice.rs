//! The event queue: what the device tells the driver unasked.

use zerocopy::little_endian::{U32, U64};

wire! {
    /// What the device tells the driver, in buffers that the driver posts on the event queue.
    pub struct Notice {
        /// One of `NOTICE_*`.
        pub kind: U32,
        /// Of [`NOTICE_WAKEUP`] and [`NOTICE_LIMIT`]: how many of them it stands for, 1 to
        /// [`NOTICE_COUNT`]. Of [`NOTICE_ERROR`], one of `REFUSED_*`: why the host refused the
        /// event's counter; [`REFUSED_NOT`](super::REFUSED_NOT): it gave up one that it had opened.
        /// Of others zero.
        pub value: U32,
        /// The event meant.
        pub event: U64,
    }
}

/// Most wakeups that one notice stands for: what a driver does for one is bounded.
pub const NOTICE_COUNT: u32 = 256;

/// [`Notice::kind`]: with a record of this event its ring has crossed the wakeup
/// mark.
pub const NOTICE_WAKEUP: u32 = 1;
/// [`Notice::kind`]: the event is in [`STATE_ERROR`](super::STATE_ERROR).
pub const NOTICE_ERROR: u32 = 2;
/// [`Notice::kind`]: the overflows that [`COMMAND_REFRESH`](super::COMMAND_REFRESH) gave it are
/// used up; the event is in [`STATE_OFF`](super::STATE_OFF).
pub const NOTICE_LIMIT: u32 = 3;
/// [`Notice::kind`]: in an AUX area that the driver drives, the event has crossed the wakeup mark,
/// has used half of its room, or found none; to be answered with [`COMMAND_AUX_END`](super::COMMAND_AUX_END).
pub const NOTICE_AUX: u32 = 4;
/// [`Notice::kind`]: the host has started or ended persistent events, `event` among them; to be
/// answered with [`CONTROL_PERSISTENT`](super::CONTROL_PERSISTENT).
pub const NOTICE_PERSISTENT: u32 = 5;
