//! Saves and restores the registers of the transport.

use std::io;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState};
use vpmu::Memory;

use super::super::virtio::{DRIVER_OK, NEEDS_RESET, Setup};
use super::{Region, State, VirtioMmio};

/// Errors from restoring registers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransportError {
    /// A queue is not valid.
    #[error("the saved queue {index} is not valid")]
    Queue {
        /// The queue's index.
        index: usize,
        /// The reason why the queue is not valid.
        #[source]
        source: virtio_queue::Error,
    },
    /// The saved queues do not match the device's queues.
    #[error("the saved device and this device differ in the number or maximum size of queues")]
    Queues,
    /// The interrupt line returned an error.
    #[error("cannot raise the device's interrupt")]
    Interrupt(#[source] io::Error),
}

/// The saved registers of the transport, including its interrupt's registers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedTransport {
    status: u32,
    interrupt: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    generation: u32,
    region: Option<(u64, u64)>,
    queues: Vec<SavedQueue>,
}

/// A queue as set up by the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedQueue {
    max_size: u16,
    size: u16,
    ready: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

/// The driver's setup of a transport, as [`VirtioMmio::restore`] returns it.
#[derive(Debug, Default)]
pub(crate) struct SavedDriver {
    pub(crate) memory: Memory,
    pub(crate) features: u64,
    pub(crate) queues: Vec<Queue>,
}

impl From<&Queue> for SavedQueue {
    fn from(queue: &Queue) -> Self {
        let state = queue.state();
        Self {
            max_size: state.max_size,
            size: state.size,
            ready: state.ready,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
        }
    }
}

impl SavedQueue {
    fn queue(&self) -> Result<Queue, virtio_queue::Error> {
        Queue::try_from(QueueState {
            max_size: self.max_size,
            size: self.size,
            ready: self.ready,
            desc_table: self.descriptors,
            avail_ring: self.available,
            used_ring: self.used,
            ..QueueState::default()
        })
    }
}

impl SavedTransport {
    /// Whether a driver uses the device.
    fn live(&self) -> bool {
        self.status & DRIVER_OK != 0 && self.status & NEEDS_RESET == 0
    }

    fn queues(&self) -> Result<Vec<Queue>, TransportError> {
        let queues = self
            .queues
            .iter()
            .enumerate()
            .map(|(index, queue)| queue.queue().map_err(|source| TransportError::Queue { index, source }));
        queues.collect()
    }
}

impl VirtioMmio {
    /// The current registers, for a snapshot.
    pub(crate) fn save(&self) -> SavedTransport {
        let state = self.state();
        let setup = &state.setup;
        SavedTransport {
            status: setup.status,
            interrupt: self.interrupt.save(),
            device_features_select: setup.device_features_select,
            driver_features_select: setup.driver_features_select,
            driver_features: setup.driver_features,
            queue_select: setup.queue_select,
            generation: state.generation,
            region: state.region.map(|region| (region.address, region.size)),
            queues: setup.queues.iter().map(SavedQueue::from).collect(),
        }
    }

    /// Restores a saved transport. If a driver uses the device, returns the driver's setup. The caller then restores
    /// the device behind the transport.
    ///
    /// # Errors
    /// [`TransportError`].
    pub(crate) fn restore(&self, saved: &SavedTransport) -> Result<Option<SavedDriver>, TransportError> {
        let sizes = saved.queues.iter().map(|queue| queue.max_size);
        if !sizes.eq(self.backend.queue_sizes()) {
            return Err(TransportError::Queues);
        }
        let queues = saved.queues()?;
        let driver = saved.live().then(|| saved.queues()).transpose()?;
        *self.state() = State {
            setup: Setup {
                status: saved.status,
                device_features_select: saved.device_features_select,
                driver_features_select: saved.driver_features_select,
                driver_features: saved.driver_features,
                queue_select: saved.queue_select,
                queues,
            },
            // Configuration space has the limits and the counter frequency of this host, which may differ from those
            // before the save.
            generation: saved.generation.wrapping_add(1),
            region: saved.region.map(|(address, size)| Region { address, size }),
        };
        self.interrupt.restore(saved.interrupt).map_err(TransportError::Interrupt)?;
        self.live.store(saved.live(), Ordering::Release);
        Ok(driver.map(|queues| SavedDriver { memory: self.memory.clone(), features: saved.driver_features, queues }))
    }
}
