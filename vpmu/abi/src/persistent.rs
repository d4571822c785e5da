//! Persistent events, which outlive their handles and can outlive a guest reset.

use zerocopy::little_endian::{U32, U64};

use super::{ControlHeader, OpenRequest};

/// Bytes of a persistent event's name; the last one is always zero.
pub const PERSISTENT_NAME: usize = 40;

wire! {
    /// The request of [`CONTROL_DETACH`](super::CONTROL_DETACH).
    pub struct DetachRequest {
        /// `event` names the event.
        pub header: ControlHeader,
        /// The event's name, padded with zeros. It is a lower-case letter, followed by at most 38 lower-case
        /// letters, digits, `-` and `_`. If all bytes are zero, the event keeps its name; an event without a
        /// name gets the name `event` followed by its id.
        pub name: [u8; PERSISTENT_NAME],
    }
}

wire! {
    /// The request of [`CONTROL_PERSISTENT`](super::CONTROL_PERSISTENT).
    pub struct PersistentRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// List only events with a higher id.
        pub after: U64,
        /// Maximum number of events to list. The device lists fewer if the writable buffer is too small.
        pub count: U32,
        /// Zero.
        pub reserved: U32,
    }
}

wire! {
    /// The current state of a persistent event.
    pub struct PersistentEvent {
        /// The event's id.
        pub id: U64,
        /// A request that would open an event like this one: with the current `period`, `wakeup` and
        /// `engine`, and with [`OPEN_ENABLED`](super::OPEN_ENABLED) if the event is enabled.
        pub open: OpenRequest,
        /// Pages of the event's ring, including the metadata page; zero if the event has no ring.
        pub pages: U32,
        /// `MAP_*` flags of the ring.
        pub map: U32,
        /// With [`MAP_WINDOW`](super::MAP_WINDOW): the number of the ring's first page in the window.
        pub window_page: U32,
        /// `PERSISTENT_*`.
        pub flags: U32,
        /// See [`DetachRequest::name`].
        pub name: [u8; PERSISTENT_NAME],
    }
}

/// [`PersistentEvent::flags`]: owned by the operator; the guest can only read and flush it.
pub const PERSISTENT_OPERATOR: u32 = 1 << 0;
