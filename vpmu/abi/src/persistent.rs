//! Persistent events: those that live on without a handle, and beyond a reset.

use zerocopy::little_endian::{U32, U64};

use super::{ControlHeader, OpenRequest};

/// Bytes of the name of a persistent event, the last of them always zero.
pub const PERSISTENT_NAME: usize = 40;

wire! {
    /// [`CONTROL_DETACH`](super::CONTROL_DETACH).
    pub struct DetachRequest {
        /// `event` names the event.
        pub header: ControlHeader,
        /// At most 39 lower-case letters, digits, `-` and `_`, a letter first, padded with zeros; all
        /// zero: the name that it has, or `event` and its id.
        pub name: [u8; PERSISTENT_NAME],
    }
}

wire! {
    /// [`CONTROL_PERSISTENT`](super::CONTROL_PERSISTENT).
    pub struct PersistentRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// Only events with a higher id are wanted.
        pub after: U64,
        /// Most of them wanted; the writable bytes bound it too.
        pub count: U32,
        /// Zero.
        pub reserved: U32,
    }
}

wire! {
    /// One persistent event as it is now.
    pub struct PersistentEvent {
        /// Its id.
        pub id: U64,
        /// What it would be opened with; of its flags [`OPEN_ENABLED`](super::OPEN_ENABLED) says
        /// whether it is enabled now, `period` what it is now, `engine` which one it has.
        pub open: OpenRequest,
        /// Pages of its ring, the metadata page included; zero: it has none.
        pub pages: U32,
        /// `MAP_*` that its ring was mapped with.
        pub map: U32,
        /// With [`MAP_WINDOW`](super::MAP_WINDOW) the number of the ring's first page in the window.
        pub window_page: U32,
        /// `PERSISTENT_*`.
        pub flags: U32,
        /// As for [`DetachRequest::name`].
        pub name: [u8; PERSISTENT_NAME],
    }
}

/// [`PersistentEvent::flags`]: the operator's; the guest reads and flushes it, and no more.
pub const PERSISTENT_OPERATOR: u32 = 1 << 0;
