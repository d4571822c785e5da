//! The virtio-mmio transport, version 2: registers, queue setup and device status.
//!
//! The transport does not depend on the device, which implements [`Backend`].

mod interrupt;
mod saved;

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::interrupt::{Interrupt, Line};
pub(crate) use self::saved::{SavedDriver, SavedTransport, TransportError};
use virtio_queue::{Queue, QueueT};
use vpmu::Memory;

use self::interrupt::CONFIG_CHANGE;
use super::virtio::{NEEDS_RESET, QueueRegister, Setup, StatusChange, half};
use crate::bus::{Caller, Device};

/// Offsets of the registers.
mod register {
    pub(super) const MAGIC: u64 = 0x00;
    pub(super) const VERSION: u64 = 0x04;
    pub(super) const DEVICE_ID: u64 = 0x08;
    pub(super) const VENDOR_ID: u64 = 0x0c;
    pub(super) const DEVICE_FEATURES: u64 = 0x10;
    pub(super) const DEVICE_FEATURES_SELECT: u64 = 0x14;
    pub(super) const DRIVER_FEATURES: u64 = 0x20;
    pub(super) const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub(super) const QUEUE_SELECT: u64 = 0x30;
    pub(super) const QUEUE_SIZE_MAX: u64 = 0x34;
    pub(super) const QUEUE_SIZE: u64 = 0x38;
    pub(super) const QUEUE_READY: u64 = 0x44;
    pub(super) const INTERRUPT_STATUS: u64 = 0x60;
    pub(super) const INTERRUPT_ACK: u64 = 0x64;
    pub(super) const STATUS: u64 = 0x70;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x80;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x84;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    pub(super) const REGION_SELECT: u64 = 0xac;
    pub(super) const REGION_SIZE_LOW: u64 = 0xb0;
    pub(super) const REGION_SIZE_HIGH: u64 = 0xb4;
    pub(super) const REGION_BASE_LOW: u64 = 0xb8;
    pub(super) const REGION_BASE_HIGH: u64 = 0xbc;
    pub(super) const CONFIG_GENERATION: u64 = 0xfc;
    pub(super) const CONFIG: u64 = 0x100;
}

/// Offset of the register QueueNotify. To notify a queue, the driver writes the queue's number to this register as 32
/// bits.
pub const QUEUE_NOTIFY: u64 = 0x50;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR_ID: u32 = u32::from_le_bytes(*b"vpmu");

/// A shared memory region of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// The device behind the transport.
pub trait Backend: Send + Sync + Debug {
    /// The virtio device id.
    fn device_id(&self) -> u32;
    /// Feature bits offered.
    fn features(&self) -> u64;
    /// The maximum size of each queue.
    fn queue_sizes(&self) -> Vec<u16>;
    /// Reads configuration space.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// The shared memory region `id`, if there is one.
    fn region(&self, id: u8) -> Option<Region>;
    /// Starts the device with the queues that the driver has set up.
    ///
    /// # Errors
    /// An error sets DEVICE_NEEDS_RESET in the device status.
    fn activate(
        &self,
        memory: Memory,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
    /// Stops the device. Afterwards, the device must not access memory or queues.
    fn reset(&self);
    /// Handles a notification for `queue` from the vCPU of `caller`. The vCPU waits until this call returns.
    fn notify(&self, queue: u16, caller: &mut Caller<'_>);
}

#[derive(Debug)]
struct State {
    setup: Setup,
    /// Generation number of configuration space: how often the machine was restored, modulo 2^32.
    generation: u32,
    region: Option<Region>,
}

/// The transport on the memory bus.
#[derive(Debug)]
pub struct VirtioMmio {
    backend: Arc<dyn Backend>,
    memory: Memory,
    interrupt: Arc<Interrupt>,
    /// Whether notifications are passed to the backend. A notification only reads this, and does not lock `state`.
    live: AtomicBool,
    state: Mutex<State>,
}

impl VirtioMmio {
    /// A transport for `backend`, with queues in `memory`.
    ///
    /// # Errors
    /// A queue size that virtio does not allow.
    pub fn new(
        backend: Arc<dyn Backend>,
        memory: Memory,
        interrupt: Arc<Interrupt>,
    ) -> Result<Self, virtio_queue::Error> {
        let setup = Setup::new(backend.queue_sizes())?;
        Ok(Self {
            backend,
            memory,
            interrupt,
            live: AtomicBool::new(false),
            state: Mutex::new(State { setup, generation: 0, region: None }),
        })
    }

    /// Resets the device as a driver does. Every register except the generation of configuration space gets its
    /// power-on value.
    pub fn reset(&self) {
        self.reset_state(&mut self.state());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_register(&self, offset: u64) -> u32 {
        if offset == register::INTERRUPT_STATUS {
            return self.interrupt.status();
        }
        let state = self.state();
        // If the region does not exist, the specification requires that address and size read as all ones.
        let region = state.region.unwrap_or(Region { address: u64::MAX, size: u64::MAX });
        match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE_ID => self.backend.device_id(),
            register::VENDOR_ID => VENDOR_ID,
            register::DEVICE_FEATURES => state.setup.device_features(self.backend.features()),
            register::QUEUE_SIZE_MAX => state.setup.queue().map_or(0, |q| u32::from(q.max_size())),
            register::QUEUE_READY => state.setup.queue().map_or(0, |q| u32::from(q.ready())),
            register::STATUS => state.setup.status,
            register::REGION_SIZE_LOW => half(region.size, false),
            register::REGION_SIZE_HIGH => half(region.size, true),
            register::REGION_BASE_LOW => half(region.address, false),
            register::REGION_BASE_HIGH => half(region.address, true),
            register::CONFIG_GENERATION => state.generation,
            _ => 0,
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        let mut state = self.state();
        match offset {
            register::DEVICE_FEATURES_SELECT => state.setup.device_features_select = value,
            register::DRIVER_FEATURES_SELECT => state.setup.driver_features_select = value,
            register::DRIVER_FEATURES => state.setup.accept_features(value),
            register::QUEUE_SELECT => state.setup.queue_select = value,
            register::REGION_SELECT => {
                state.region = u8::try_from(value).ok().and_then(|id| self.backend.region(id));
            }
            register::STATUS => match state.setup.write_status(value, self.backend.features()) {
                StatusChange::Noted => {}
                StatusChange::Start => self.activate(&mut state),
                StatusChange::Reset => self.reset_state(&mut state),
            },
            _ => {
                if let Some(register) = queue_register(offset) {
                    state.setup.set_queue(register, value);
                }
            }
        }
    }

    fn activate(&self, state: &mut State) {
        let queues: Result<Vec<Queue>, _> =
            state.setup.queues.iter().map(|queue| Queue::try_from(queue.state())).collect();
        self.interrupt.start();
        let started = queues
            .map_err(Into::into)
            .and_then(|queues| self.backend.activate(self.memory.clone(), state.setup.driver_features, queues));
        match started {
            Ok(()) => self.live.store(true, Ordering::Release),
            Err(error) => {
                log::warn!("the device cannot start with the driver's setup: {error}");
                state.setup.status |= NEEDS_RESET;
                if let Err(error) = self.interrupt.raise(CONFIG_CHANGE) {
                    log::error!("cannot raise the device's interrupt: {error}");
                }
            }
        }
    }

    fn reset_state(&self, state: &mut State) {
        self.live.store(false, Ordering::Release);
        self.backend.reset();
        self.interrupt.stop();
        state.setup.reset();
        state.region = None;
    }
}

/// The register of the selected queue at `offset`.
fn queue_register(offset: u64) -> Option<QueueRegister> {
    Some(match offset {
        register::QUEUE_SIZE => QueueRegister::Size,
        register::QUEUE_READY => QueueRegister::Ready,
        register::QUEUE_DESC_LOW => QueueRegister::DescLow,
        register::QUEUE_DESC_HIGH => QueueRegister::DescHigh,
        register::QUEUE_DRIVER_LOW => QueueRegister::DriverLow,
        register::QUEUE_DRIVER_HIGH => QueueRegister::DriverHigh,
        register::QUEUE_DEVICE_LOW => QueueRegister::DeviceLow,
        register::QUEUE_DEVICE_HIGH => QueueRegister::DeviceHigh,
        _ => return None,
    })
}

impl Device for VirtioMmio {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(register::CONFIG) {
            self.backend.read_config(offset, data);
        } else if data.len() == 4 && offset.is_multiple_of(4) {
            data.copy_from_slice(&self.read_register(offset).to_le_bytes());
        } else {
            // Registers are 32 bits wide, and the specification permits no other access size.
            data.fill(0);
        }
    }

    fn write(&self, offset: u64, data: &[u8], caller: &mut Caller<'_>) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else {
            return;
        };
        match offset {
            QUEUE_NOTIFY => {
                if let (true, Ok(queue)) = (self.live.load(Ordering::Acquire), value.try_into()) {
                    self.backend.notify(queue, caller);
                }
            }
            register::INTERRUPT_ACK => {
                self.interrupt.acknowledge(value);
            }
            _ => self.write_register(offset, value),
        }
    }
}

#[cfg(test)]
mod tests;
