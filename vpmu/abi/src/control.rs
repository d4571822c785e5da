//! The control queue: operations, rings, AUX areas, task pages, links and wakeups. The comment on each
//! operation names its request struct and its reply struct. The structs of the requests that open, list and
//! detach events are in the modules `open`, `catalogue` and `persistent`.

use zerocopy::little_endian::{U32, U64};

wire! {
    /// The header of every control request; `op` determines the struct that follows it.
    pub struct ControlHeader {
        /// One of `CONTROL_*`.
        pub op: U32,
        /// Zero.
        pub reserved: U32,
        /// Id of the event; zero for operations without an event.
        pub event: U64,
    }
}

/// Control operation: open an event. Request: [`OpenRequest`](super::OpenRequest). Reply:
/// [`OpenReply`](super::OpenReply).
pub const CONTROL_OPEN: u32 = 1;
/// Control operation: close an event. Request: [`ControlHeader`]. Reply: [`ControlReply`].
pub const CONTROL_CLOSE: u32 = 2;
/// Control operation: attach ring pages to an event. Request: [`MapRequest`]. Reply: [`ControlReply`].
pub const CONTROL_MAP: u32 = 3;
/// Control operation: detach an event's ring pages. Request: [`ControlHeader`]. Reply: [`ControlReply`]. After
/// the reply, the device no longer writes to these pages.
pub const CONTROL_UNMAP: u32 = 4;
/// Control operation: read the catalogue. Request: [`CatalogueRequest`](super::CatalogueRequest). Reply:
/// [`ControlReply`], followed by a [`CatalogueEntry`](super::CatalogueEntry) for each event.
pub const CONTROL_CATALOGUE: u32 = 5;
/// Control operation: set the address of a vCPU's [`TaskPage`](super::TaskPage). Request: [`TaskPageRequest`].
/// Reply: [`ControlReply`].
pub const CONTROL_TASK_PAGE: u32 = 6;
/// Control operation: send an event's records to the ring of another event. Request: [`RedirectRequest`].
/// Reply: [`ControlReply`].
pub const CONTROL_REDIRECT: u32 = 7;
/// Control operation: stop or resume writing to a ring. Request: [`PauseRequest`]. Reply: [`ControlReply`].
pub const CONTROL_PAUSE: u32 = 8;
/// Control operation: attach AUX pages to an event's own ring. With [`MAP_DRIVER_OWNED`], attach them to an
/// event without a ring. Request: [`MapRequest`]. Reply: [`ControlReply`].
pub const CONTROL_MAP_AUX: u32 = 9;
/// Control operation: detach an event's AUX pages. Request: [`ControlHeader`]. Reply: [`ControlReply`]. After
/// the reply, the device no longer writes to these pages.
pub const CONTROL_UNMAP_AUX: u32 = 10;
/// Control operation: make an event persistent. Request: [`DetachRequest`](super::DetachRequest). Reply:
/// [`ControlReply`].
pub const CONTROL_DETACH: u32 = 11;
/// Control operation: make an event non-persistent. Request: [`ControlHeader`]. Reply: [`ControlReply`].
pub const CONTROL_ATTACH: u32 = 12;
/// Control operation: list persistent events in ascending order of id. Request:
/// [`PersistentRequest`](super::PersistentRequest). Reply: [`ControlReply`], followed by a
/// [`PersistentEvent`](super::PersistentEvent) for each event.
pub const CONTROL_PERSISTENT: u32 = 13;
/// Control operation: make the overflows of an event start or stop another event. Request: [`LinkRequest`].
/// Reply: [`ControlReply`].
pub const CONTROL_LINK: u32 = 14;
/// Control operation: change the interval of an event's wakeups. Request: [`WakeupRequest`]. Reply:
/// [`ControlReply`].
pub const CONTROL_WAKEUP: u32 = 15;
/// Control operation: accept features that the transport hides. Request: [`FeaturesRequest`]. Reply:
/// [`ControlReply`].
pub const CONTROL_FEATURES: u32 = 16;
/// Control operation: report the wakeups of an event's family in notices of its own, or in those of the ring. Request:
/// [`SignalRequest`]. Reply: [`ControlReply`].
pub const CONTROL_SIGNAL: u32 = 17;

wire! {
    /// The reply to every control request except [`CONTROL_OPEN`]. In a reply to [`CONTROL_CATALOGUE`] or
    /// [`CONTROL_PERSISTENT`], entries follow this struct.
    pub struct ControlReply {
        /// 0 or a positive Linux errno.
        pub status: U32,
        /// For [`CONTROL_CATALOGUE`] and [`CONTROL_PERSISTENT`]: the number of entries that follow.
        /// For [`CONTROL_MAP`] with [`MAP_WINDOW`]: the ring's first page in the window. Otherwise
        /// zero.
        pub value: U32,
    }
}

wire! {
    /// The request of [`CONTROL_MAP`] and [`CONTROL_MAP_AUX`]. In the readable buffer, it is followed by the
    /// guest-physical addresses (`U64`) of `pages` pages. A ring consists of the metadata page alone, or of the
    /// metadata page followed by 2^n data pages. An AUX area consists of 2^n pages.
    pub struct MapRequest {
        /// `event` names the event.
        pub header: ControlHeader,
        /// Number of pages: 1 or 1 + 2^n for a ring, 2^n for an AUX area.
        pub pages: U32,
        /// `MAP_*`.
        pub flags: U32,
    }
}

/// [`MapRequest::flags`]: the reader moves `data_tail` or `aux_tail`, and the device does not overwrite
/// data that the reader has not consumed. Without this flag, the device overwrites the oldest data.
pub const MAP_WRITABLE: u32 = 1 << 0;
/// [`MapRequest::flags`] of an AUX area: the device writes only to the area. The driver grants it space with
/// [`COMMAND_AUX_BEGIN`](super::COMMAND_AUX_BEGIN), and writes the records about the area to its own ring.
pub const MAP_DRIVER_OWNED: u32 = 1 << 1;
/// [`MapRequest::flags`] of a persistent event's ring: the device places the ring in consecutive
/// pages of the window, and no addresses follow.
pub const MAP_WINDOW: u32 = 1 << 2;

wire! {
    /// The request of [`CONTROL_REDIRECT`]; like perf's `PERF_EVENT_IOC_SET_OUTPUT`.
    pub struct RedirectRequest {
        /// `event` names the event whose records are redirected.
        pub header: ControlHeader,
        /// The event whose ring receives the records; zero restores the event's own ring.
        pub target: U64,
    }
}

wire! {
    /// The request of [`CONTROL_PAUSE`]; like perf's `PERF_EVENT_IOC_PAUSE_OUTPUT`.
    pub struct PauseRequest {
        /// `event` names an event that writes to the ring.
        pub header: ControlHeader,
        /// 1 stops writing, and 0 resumes it. Overflows are lost while writing is stopped.
        pub paused: U32,
        /// Zero.
        pub reserved: U32,
    }
}

wire! {
    /// The request of [`CONTROL_WAKEUP`].
    pub struct WakeupRequest {
        /// `event` names the event.
        pub header: ControlHeader,
        /// The wakeup interval: 1 to 2^32 - 1.
        pub every: U64,
        /// One of `WAKEUP_*`.
        pub unit: U32,
        /// Zero.
        pub reserved: U32,
    }
}

/// [`WakeupRequest::unit`]: sample records.
pub const WAKEUP_RECORDS: u32 = 1;
/// [`WakeupRequest::unit`]: bytes of records.
pub const WAKEUP_BYTES: u32 = 2;

wire! {
    /// The request of [`CONTROL_LINK`].
    pub struct LinkRequest {
        /// `event` names the event whose overflows start or stop the target.
        pub header: ControlHeader,
        /// The event to start or stop.
        pub target: U64,
        /// One of `LINK_*`.
        pub role: U32,
        /// Zero.
        pub reserved: U32,
    }
}

/// [`LinkRequest::role`]: an overflow of the event starts the target.
pub const LINK_STARTER: u32 = 1;
/// [`LinkRequest::role`]: an overflow of the event stops the target.
pub const LINK_STOPPER: u32 = 2;

wire! {
    /// The request of [`CONTROL_FEATURES`].
    pub struct FeaturesRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// Bits of [`Config::features`](super::Config::features) to accept in addition to the
        /// negotiated ones.
        pub features: U64,
    }
}

wire! {
    /// The request of [`CONTROL_SIGNAL`].
    pub struct SignalRequest {
        /// `event` names the event.
        pub header: ControlHeader,
        /// 1: the wakeups of the event's family have notices of their own. 0: they share the notices of all families
        /// that write to the same ring.
        pub own: U32,
        /// Zero.
        pub reserved: U32,
    }
}

wire! {
    /// The request of [`CONTROL_TASK_PAGE`].
    pub struct TaskPageRequest {
        /// `event` is zero.
        pub header: ControlHeader,
        /// The vCPU of the page.
        pub vcpu: U32,
        /// Zero.
        pub reserved: U32,
        /// Page-aligned guest-physical address of the [`TaskPage`](super::TaskPage); zero removes the
        /// page.
        pub address: U64,
    }
}
