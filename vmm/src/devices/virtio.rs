//! The part of a virtio transport that is the same on every bus: device status, features, and the setup of queues.

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_queue::{Queue, QueueT};
use vpmu::QueueState;

/// Maximum number of entries of each virtqueue of the PMU.
pub(crate) const QUEUE_SIZE: u16 = 256;

pub(super) const ACKNOWLEDGE: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE;
pub(super) const DRIVER: u32 = VIRTIO_CONFIG_S_DRIVER;
pub(super) const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
pub(crate) const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
pub(crate) const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;
const FAILED: u32 = VIRTIO_CONFIG_S_FAILED;

/// The registers by which a driver sets up a device.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) status: u32,
    pub(crate) device_features_select: u32,
    pub(crate) driver_features_select: u32,
    pub(crate) driver_features: u64,
    pub(crate) queue_select: u32,
    pub(crate) queues: Vec<Queue>,
}

/// The transport's task after a write to the device status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatusChange {
    /// Nothing more.
    Noted,
    /// The driver has set DRIVER_OK: start the device.
    Start,
    /// The driver has written zero: stop the device, then call [`Setup::reset`].
    Reset,
}

/// A register of the selected queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueRegister {
    Size,
    Ready,
    DescLow,
    DescHigh,
    DriverLow,
    DriverHigh,
    DeviceLow,
    DeviceHigh,
}

/// Half of a 64-bit register: the low or the high 32 bits.
pub(crate) fn half(value: u64, high: bool) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    u32::from_le_bytes(if high { [e, f, g, h] } else { [a, b, c, d] })
}

/// The 32 bits of `features` that the register `select` selects.
fn selected(features: u64, select: u32) -> u32 {
    match select {
        0 => half(features, false),
        1 => half(features, true),
        _ => 0,
    }
}

impl Setup {
    /// The registers at power-on, for queues of at most these sizes.
    ///
    /// # Errors
    /// A queue size that virtio does not allow.
    pub(crate) fn new(sizes: impl IntoIterator<Item = u16>) -> Result<Self, virtio_queue::Error> {
        let queues = sizes.into_iter().map(Queue::new).collect::<Result<_, _>>()?;
        Ok(Self {
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            queues,
        })
    }

    /// Gives each register its power-on value.
    pub(crate) fn reset(&mut self) {
        for queue in &mut self.queues {
            queue.reset();
        }
        self.status = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
    }

    /// Whether the driver has set `bit` of the device status.
    pub(crate) fn has(&self, bit: u32) -> bool {
        self.status & bit != 0
    }

    /// The selected half of the features that the device offers.
    pub(crate) fn device_features(&self, offered: u64) -> u32 {
        selected(offered, self.device_features_select)
    }

    /// The selected half of the features that the driver has accepted.
    pub(crate) fn accepted_features(&self) -> u32 {
        selected(self.driver_features, self.driver_features_select)
    }

    /// Writes the device status. A write only adds bits. To clear bits, a driver resets the device.
    pub(crate) fn write_status(&mut self, value: u32, offered: u64) -> StatusChange {
        if value == 0 {
            return StatusChange::Reset;
        }
        let mut change = StatusChange::Noted;
        let added = value & !self.status & !NEEDS_RESET;
        for bit in [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK, FAILED] {
            let allowed = match bit {
                DRIVER => self.has(ACKNOWLEDGE),
                FEATURES_OK => self.has(DRIVER) && self.features_agree(offered),
                DRIVER_OK => self.has(FEATURES_OK) && !self.has(FAILED),
                _ => true,
            };
            if added & bit == 0 || !allowed {
                continue;
            }
            self.status |= bit;
            if bit == DRIVER_OK {
                change = StatusChange::Start;
            }
        }
        change
    }

    fn features_agree(&self, offered: u64) -> bool {
        let beyond = self.driver_features & !offered;
        beyond == 0 && self.driver_features & 1 << VIRTIO_F_VERSION_1 != 0
    }

    /// The selected queue.
    pub(crate) fn queue(&self) -> Option<&Queue> {
        self.queues.get(usize::try_from(self.queue_select).ok()?)
    }

    /// Writes the selected half of the accepted features. The write is ignored before DRIVER, and after FEATURES_OK.
    pub(crate) fn accept_features(&mut self, value: u32) {
        if !self.has(DRIVER) || self.has(FEATURES_OK) {
            return;
        }
        let value = u64::from(value);
        let low = u64::from(u32::MAX);
        self.driver_features = match self.driver_features_select {
            0 => self.driver_features & !low | value,
            1 => self.driver_features & low | value << 32,
            _ => return,
        };
    }

    /// Whether the driver may set up queues: after FEATURES_OK, and before DRIVER_OK or FAILED.
    pub(crate) fn takes_queues(&self) -> bool {
        self.has(FEATURES_OK) && !self.has(DRIVER_OK | FAILED)
    }

    /// Writes a register of the selected queue. The write is ignored unless [`Setup::takes_queues`].
    pub(crate) fn set_queue(&mut self, register: QueueRegister, value: u32) {
        if !self.takes_queues() {
            return;
        }
        let Some(queue) = usize::try_from(self.queue_select).ok().and_then(|index| self.queues.get_mut(index)) else {
            return;
        };
        match register {
            QueueRegister::Size => queue.set_size(u16::try_from(value).unwrap_or(0)),
            QueueRegister::Ready => queue.set_ready(value == 1),
            QueueRegister::DescLow => queue.set_desc_table_address(Some(value), None),
            QueueRegister::DescHigh => queue.set_desc_table_address(None, Some(value)),
            QueueRegister::DriverLow => queue.set_avail_ring_address(Some(value), None),
            QueueRegister::DriverHigh => queue.set_avail_ring_address(None, Some(value)),
            QueueRegister::DeviceLow => queue.set_used_ring_address(Some(value), None),
            QueueRegister::DeviceHigh => queue.set_used_ring_address(None, Some(value)),
        }
    }
}

/// Converts a queue that a driver has set up to the type that the device uses.
pub(crate) fn queue_state(queue: &Queue) -> QueueState {
    QueueState {
        ready: queue.ready(),
        size: queue.size(),
        desc_table: queue.desc_table(),
        avail_ring: queue.avail_ring(),
        used_ring: queue.used_ring(),
        next_avail: queue.next_avail(),
        next_used: queue.next_used(),
    }
}
