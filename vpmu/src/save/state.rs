//! The saved state, as it is stored in a file. A change to any field requires a new [`FORMAT`].

use super::RestoreError;
use crate::abi::ENGINE_BATCHED;
use crate::area::Chunk;
use crate::event::Context;
use crate::links::Role;
use crate::metrics::{ExitCounts, Metrics};
use crate::record::{Layout, SampleId};
use crate::ring::Wakeup;
use crate::tasks::Task;

/// Version of this layout.
pub(crate) const FORMAT: u32 = 4;

/// Declares types for plain data. Every field is serialized, and unknown fields are rejected.
macro_rules! saved {
    ($($(#[$meta:meta])* $vis:vis $kind:ident $name:ident { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        #[cfg_attr(
            feature = "serde",
            derive(serde::Serialize, serde::Deserialize),
            serde(deny_unknown_fields)
        )]
        $vis $kind $name { $($body)* }
    )*};
}

impl SavedState {
    /// Checks that this version can read the state.
    ///
    /// # Errors
    /// [`RestoreError::Format`].
    pub(crate) fn check_format(&self) -> Result<(), RestoreError> {
        match self.format {
            FORMAT => Ok(()),
            other => Err(RestoreError::Format(other)),
        }
    }

    /// Whether the device had a driver. If so, the state must be restored on a transport with a driver.
    #[must_use]
    pub fn has_driver(&self) -> bool {
        self.driver.is_some()
    }

    /// Whether an event uses the batched engine.
    pub(crate) fn is_batched(&self) -> bool {
        let mut events = self.events.iter();
        events.any(|event| event.spec.engine == ENGINE_BATCHED)
    }
}

saved! {
    /// The state of a device, as [`Vpmu::save`](crate::Vpmu::save) returns it. With the feature `serde`, it can be
    /// serialized and deserialized. The fields are otherwise unspecified.
    pub struct SavedState {
        pub(crate) format: u32,
        pub(crate) tsc_khz: u32,
        /// The next event's id.
        pub(crate) next_id: u64,
        /// `None` without a driver.
        pub(crate) driver: Option<SavedDriver>,
        pub(crate) vcpus: Vec<SavedVcpu>,
        /// By ascending id.
        pub(crate) events: Vec<SavedEvent>,
        /// By ascending id.
        pub(crate) sinks: Vec<SavedSink>,
        /// The families of events that write to a sink, in ascending order of their owners.
        pub(crate) families: Vec<SavedFamily>,
        pub(crate) links: Vec<SavedLink>,
        /// Pending notices, oldest first.
        pub(crate) notices: Vec<SavedNotice>,
        pub(crate) totals: Metrics,
    }

    /// The driver of a device.
    pub(crate) struct SavedDriver {
        pub(crate) features: u64,
        /// The control queue, the event queue, and then one queue per vCPU.
        pub(crate) queues: Vec<SavedQueue>,
    }

    /// The device's position in a virtqueue.
    pub(crate) struct SavedQueue {
        pub(crate) next_available: u16,
        pub(crate) next_used: u16,
        pub(crate) broken: bool,
    }

    /// A vCPU.
    pub(crate) struct SavedVcpu {
        /// Address of the task page.
        pub(crate) task_page: Option<u64>,
        pub(crate) exits: ExitCounts,
    }

    /// An open event.
    pub(crate) struct SavedEvent {
        pub(crate) spec: SavedSpec,
        pub(crate) context: Context,
        /// The vCPU whose shard holds the event.
        pub(crate) shard: u32,
        pub(crate) leader: Option<u64>,
        pub(crate) persistence: Option<SavedPersistence>,
        pub(crate) life: SavedLife,
    }

    /// The specification of an event: its open request, with the current settings of its family's wakeups.
    pub(crate) struct SavedSpec {
        pub(crate) id: u64,
        pub(crate) owner: u64,
        pub(crate) kind: u32,
        pub(crate) config: u64,
        /// `OPEN_*`.
        pub(crate) flags: u32,
        pub(crate) layout: Layout,
        pub(crate) wakeup: Wakeup,
        /// Whether the wakeups of the event's family have notices of their own.
        pub(crate) own_notices: bool,
        pub(crate) aux_watermark: u32,
        pub(crate) max_stack: u32,
        /// `ENGINE_*`.
        pub(crate) engine: u32,
    }

    /// Persistence of an event.
    pub(crate) struct SavedPersistence {
        pub(crate) name: String,
        pub(crate) operator: bool,
    }

    /// The state of an event at one moment.
    pub(crate) struct SavedLife {
        pub(crate) enabled: bool,
        pub(crate) paused: bool,
        pub(crate) failed: bool,
        /// Whether each of its samples causes a wakeup.
        pub(crate) prompt: bool,
        /// Whether its overflows make no records.
        pub(crate) throttled: bool,
        /// The task that was last scheduled in for the event, and the last vCPU that this task ran on.
        pub(crate) task: Option<Task>,
        pub(crate) last_vcpu: u32,
        pub(crate) limit: u64,
        pub(crate) lost: u64,
        pub(crate) period: Option<SavedPeriod>,
        pub(crate) trace: Option<SavedTrace>,
        pub(crate) count: u64,
        /// The unit is ticks of a TSC with the frequency [`SavedState::tsc_khz`].
        pub(crate) enabled_ticks: u64,
        pub(crate) running_ticks: u64,
    }

    /// A period. If the device itself counts the event, also how much of the period has elapsed.
    pub(crate) struct SavedPeriod {
        pub(crate) length: u64,
        pub(crate) counted: u64,
        /// In hertz.
        pub(crate) frequency: Option<u64>,
    }

    /// The trace of an event.
    pub(crate) struct SavedTrace {
        pub(crate) sequence: u64,
        pub(crate) count: u64,
        pub(crate) lost: u64,
        /// `SYNC_*`.
        pub(crate) due: u8,
        pub(crate) announced: bool,
    }

    /// A family of events that writes to a sink: the owner and the events inherited from the owner.
    pub(crate) struct SavedFamily {
        pub(crate) owner: u64,
        pub(crate) sink: u64,
    }

    /// A ring, an AUX area, or both.
    pub(crate) struct SavedSink {
        /// The event through which they were mapped.
        pub(crate) id: u64,
        /// The page of the window where the sink's ring begins. `None` if the ring is not in the window.
        pub(crate) window_page: Option<u32>,
        pub(crate) ring: Option<SavedRing>,
        pub(crate) area: Option<SavedArea>,
        pub(crate) pending: Option<SavedPendingAux>,
    }

    /// A ring.
    pub(crate) struct SavedRing {
        /// Addresses of the pages. The metadata page is first.
        pub(crate) pages: Vec<u64>,
        pub(crate) writable: bool,
        pub(crate) backward: bool,
        pub(crate) paused: bool,
        pub(crate) head: u64,
        /// The head when the reader was last woken.
        pub(crate) roused: u64,
        pub(crate) tail: u64,
        pub(crate) lost: u64,
        pub(crate) loss_told: bool,
        pub(crate) records: u64,
        pub(crate) bytes: u64,
        /// The value of the metadata page's sequence lock.
        pub(crate) sequence: u32,
    }

    /// An AUX area.
    pub(crate) struct SavedArea {
        /// Addresses of the pages.
        pub(crate) pages: Vec<u64>,
        pub(crate) overwrite: bool,
        pub(crate) watermark: u64,
        pub(crate) head: u64,
        pub(crate) tail: u64,
        /// Start of the chunk that has not ended yet.
        pub(crate) begun: Option<u64>,
        pub(crate) keeper: SavedKeeper,
    }

    /// The side that manages an AUX area.
    pub(crate) enum SavedKeeper {
        Device {
            /// perf's `PERF_AUX_FLAG_*` of the open chunk.
            flags: u64,
            full: bool,
        },
        Driver {
            span: Option<SavedSpan>,
        },
    }

    /// A trace with an open span (`COMMAND_AUX_BEGIN`) in an area that the driver manages.
    pub(crate) struct SavedSpan {
        pub(crate) event: u64,
        pub(crate) room: u64,
        pub(crate) lost: u64,
        pub(crate) told: bool,
    }

    /// A chunk of AUX data that has ended but has no record in the ring yet.
    pub(crate) struct SavedPendingAux {
        pub(crate) chunk: Chunk,
        pub(crate) layout: Layout,
        pub(crate) origin: SampleId,
    }

    /// An event that starts or stops another.
    pub(crate) struct SavedLink {
        pub(crate) trigger: u64,
        pub(crate) target: u64,
        pub(crate) role: Role,
    }

    /// A notice that has not been delivered.
    pub(crate) struct SavedNotice {
        /// `NOTICE_*`.
        pub(crate) kind: u32,
        pub(crate) event: u64,
        /// For wakeups or reached limits, their number. For an error, one of `REFUSED_*`.
        pub(crate) value: u64,
    }
}
