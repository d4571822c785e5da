//! The saved state of a device, independent of the host. It is plain data that a VMM stores with the state of its
//! machine, and later restores into a new device. Because the state comes from a file that anyone may have written,
//! each module that restores a part of the state checks that part like a request from the guest. A change to any field
//! requires a new [`FORMAT`].

use crate::abi::ENGINE_BATCHED;
use crate::error::RestoreError;
use crate::event::SavedLife;
use crate::links::SavedLink;
use crate::metrics::{ExitCounts, Metrics};
use crate::notices::SavedNotice;
use crate::persistent::SavedPersistence;
use crate::queues::SavedQueue;
use crate::saved::saved;
use crate::sink::SavedSink;
use crate::spec::{Context, SavedSpec};

/// Version of this layout.
pub(crate) const FORMAT: u32 = 5;

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
        events.any(|event| event.spec.request.engine == ENGINE_BATCHED)
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

    /// A family of events that writes to a sink: the owner and the events inherited from the owner.
    pub(crate) struct SavedFamily {
        pub(crate) owner: u64,
        pub(crate) sink: u64,
    }

}
