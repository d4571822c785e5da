//! The device as a PCI function: its regions, and virtio's registers in them.

use std::fs::File;
use std::sync::Arc;

use rustix::process::Pid;
use vpmu::QueueState;
use vpmu::abi;
use zerocopy::IntoBytes;

use super::ServeError;
use super::carried::{Carried, Prepared};
use super::config_space::{self as space, ConfigSpace};
use super::dma::Dma;
use super::interrupts::Interrupts;
use super::message::{self, DeviceInfo, IrqInfo, MAJOR, Refused, RegionInfo, Request};
use super::window::Window;
use crate::devices::virtio::{NEEDS_RESET, QUEUE_SIZE, QueueRegister, Setup, StatusChange, half, queue_state};

/// Numbers of vfio's PCI regions and interrupts, and flags, as in `linux/vfio.h`.
mod vfio {
    pub(super) const CONFIG_REGION: u32 = 7;
    pub(super) const REGIONS: u32 = 9;
    pub(super) const MSIX_IRQ: u32 = 2;
    pub(super) const IRQS: u32 = 5;
    pub(super) const DEVICE_RESET: u32 = 1;
    pub(super) const DEVICE_PCI: u32 = 1 << 1;
    pub(super) const REGION_READ: u32 = 1;
    pub(super) const REGION_WRITE: u32 = 1 << 1;
    pub(super) const REGION_MMAP: u32 = 1 << 2;
    pub(super) const IRQ_EVENTFD: u32 = 1;
    pub(super) const IRQ_NORESIZE: u32 = 1 << 3;
}

/// Offsets of the registers of the common configuration (virtio 1.2 section 4.1.4.3).
mod register {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub(super) const DEVICE_FEATURE: u64 = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub(super) const DRIVER_FEATURE: u64 = 0x0c;
    pub(super) const CONFIG_VECTOR: u64 = 0x10;
    pub(super) const NUM_QUEUES: u64 = 0x12;
    pub(super) const STATUS: u64 = 0x14;
    pub(super) const QUEUE_SELECT: u64 = 0x16;
    pub(super) const QUEUE_SIZE: u64 = 0x18;
    pub(super) const QUEUE_VECTOR: u64 = 0x1a;
    pub(super) const QUEUE_ENABLE: u64 = 0x1c;
    pub(super) const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub(super) const QUEUE_DESC: u64 = 0x20;
    pub(super) const QUEUE_DRIVER: u64 = 0x28;
    pub(super) const QUEUE_DEVICE: u64 = 0x30;
    pub(super) const END: u64 = 0x38;
}

/// An answer to the VMM: its bytes, and a file that accompanies them.
#[derive(Debug, Default)]
pub(super) struct Answer<'a> {
    pub(super) body: Vec<u8>,
    pub(super) file: Option<&'a File>,
}

impl From<Vec<u8>> for Answer<'_> {
    fn from(body: Vec<u8>) -> Self {
        Self { body, file: None }
    }
}

/// The function of one VM.
#[derive(Debug)]
pub(super) struct Function {
    space: ConfigSpace,
    setup: Setup,
    interrupts: Arc<Interrupts>,
    dma: Dma,
    window: Window,
    /// The VMM's process.
    process: Pid,
    device: Carried,
    /// Whether the driver has started the device.
    live: bool,
}

impl Function {
    /// A function without a driver, for the VMM in `process`.
    ///
    /// # Errors
    /// [`ServeError`].
    pub(super) fn new(prepared: Prepared, window: Window, process: Pid) -> Result<Self, ServeError> {
        let queues = usize::from(abi::QUEUE_VCPU) + prepared.vcpus() as usize;
        let interrupts = Arc::new(Interrupts::new(queues));
        let vectors = u16::try_from(interrupts.count()).unwrap_or(u16::MAX);
        Ok(Self {
            space: ConfigSpace::new(window.bytes(), vectors),
            setup: Setup::new((0..queues).map(|_| QUEUE_SIZE))?,
            interrupts,
            dma: Dma::new(),
            window,
            process,
            device: Carried::Prepared(Box::new(prepared)),
            live: false,
        })
    }

    /// Finds the vCPUs' threads if this has not been done, and starts to count on them. A VMM may start its vCPUs only
    /// after it has connected.
    ///
    /// # Errors
    /// [`ServeError`]. If the threads are not known, later calls try again.
    pub(super) fn attach(&mut self) -> Result<(), ServeError> {
        self.device.attach(self.process, &self.window)
    }

    /// Records the end of the connection. Returns the signal that ended it, if one did.
    pub(super) fn end(&self) -> Option<i32> {
        self.device.end()
    }

    /// Executes a request.
    ///
    /// # Errors
    /// [`Refused`] is the answer to the VMM.
    pub(super) fn serve(&mut self, request: Request<'_>) -> Result<Answer<'_>, Refused> {
        match request {
            Request::Version { major: MAJOR } => Ok(message::version().into()),
            Request::Version { .. } => Err(Refused::Unsupported),
            Request::DmaMap { range, writable, offset, file } => {
                self.dma.map(range, writable, offset, file)?;
                Ok(Answer::default())
            }
            Request::DmaUnmap { range } => {
                self.dma.unmap(range);
                Ok(message::unmapped(range).into())
            }
            Request::DeviceInfo => {
                let info = DeviceInfo {
                    argsz: message::argsz::<DeviceInfo>(),
                    flags: vfio::DEVICE_RESET | vfio::DEVICE_PCI,
                    regions: vfio::REGIONS,
                    irqs: vfio::IRQS,
                };
                Ok(info.as_bytes().to_vec().into())
            }
            Request::RegionInfo { index } => self.region_info(index),
            Request::IrqInfo { index } => {
                let count = if index == vfio::MSIX_IRQ { self.interrupts.count() } else { 0 };
                let flags = if count > 0 { vfio::IRQ_EVENTFD | vfio::IRQ_NORESIZE } else { 0 };
                let count = u32::try_from(count).unwrap_or(0);
                let info = IrqInfo { argsz: message::argsz::<IrqInfo>(), flags, index, count };
                Ok(info.as_bytes().to_vec().into())
            }
            Request::SetIrqs { index: vfio::MSIX_IRQ, start: 0, count: 0, .. } => {
                self.interrupts.disconnect();
                Ok(Answer::default())
            }
            Request::SetIrqs { index: vfio::MSIX_IRQ, start, count, files } => {
                if self.interrupts.connect(start, count, files) { Ok(Answer::default()) } else { Err(Refused::Invalid) }
            }
            Request::SetIrqs { .. } => Ok(Answer::default()),
            Request::Read { access } => {
                let mut body = access.as_bytes().to_vec();
                let head = body.len();
                body.resize(head + access.count as usize, 0);
                self.read(access.region, access.offset, &mut body[head..]);
                Ok(body.into())
            }
            Request::Write { access, data } => {
                self.write(access.region, access.offset, data);
                Ok(access.as_bytes().to_vec().into())
            }
            Request::Reset => {
                if self.live {
                    self.device.record_reset();
                }
                self.reset();
                Ok(Answer::default())
            }
        }
    }

    fn region_info(&self, index: u32) -> Result<Answer<'_>, Refused> {
        let size = match index {
            vfio::CONFIG_REGION => space::SIZE as u64,
            0..vfio::REGIONS => self.space.bar(index),
            _ => return Err(Refused::Invalid),
        };
        // QEMU waits for the answers to a device's writes only if the device has memory to map, so the window is what
        // makes notifications synchronous.
        let file = (index == space::WINDOW).then(|| self.window.file());
        let access = if size > 0 { vfio::REGION_READ | vfio::REGION_WRITE } else { 0 };
        let flags = access | if file.is_some() { vfio::REGION_MMAP } else { 0 };
        let argsz = message::argsz::<RegionInfo>();
        let info = RegionInfo { argsz, flags, index, cap_offset: 0, size, offset: 0 };
        Ok(Answer { body: info.as_bytes().to_vec(), file })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        match region {
            vfio::CONFIG_REGION => self.space.read(offset, data),
            space::REGISTERS => match offset {
                space::COMMON..space::ISR => self.read_common(offset, data),
                space::CONFIG..space::NOTIFY => self.device.read_config(offset - space::CONFIG, data),
                // With MSI-X, the interrupt status is not used.
                _ => data.fill(0),
            },
            space::WINDOW => self.window.read(offset, data),
            _ => data.fill(0),
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        match region {
            vfio::CONFIG_REGION => {
                let before = self.space.address(space::DOORBELL);
                self.space.write(offset, data);
                let now = self.space.address(space::DOORBELL);
                if self.live && now != before {
                    self.device.place_doorbell(now);
                }
            }
            space::REGISTERS => match offset {
                space::COMMON..space::ISR => self.write_common(offset, data),
                space::NOTIFY.. => self.notify((offset - space::NOTIFY) / space::NOTIFY_STRIDE),
                _ => {}
            },
            space::WINDOW => self.window.write(offset, data),
            space::DOORBELL => {
                if let (0, Ok(value), true) = (offset, data.try_into(), self.live) {
                    self.device.mark(u32::from_le_bytes(value));
                }
            }
            _ => {}
        }
    }

    fn notify(&mut self, queue: u64) {
        if let (true, Ok(queue)) = (self.live, u16::try_from(queue)) {
            self.device.notify(queue);
        }
    }

    /// Reads registers of the common configuration. A driver reads a register with an access of its own size, and may read the
    /// halves of a 64-bit register.
    fn read_common(&self, offset: u64, data: &mut [u8]) {
        let value = self.register(offset);
        let wide = u64::from(value).to_le_bytes();
        let count = data.len().min(4);
        data.fill(0);
        data[..count].copy_from_slice(&wide[..count]);
    }

    fn register(&self, offset: u64) -> u32 {
        let setup = &self.setup;
        let queue = setup.queue();
        let halves = |value: u64, from: u64| half(value, offset > from);
        match offset {
            register::DEVICE_FEATURE_SELECT => setup.device_features_select,
            register::DEVICE_FEATURE => setup.device_features(self.device.features()),
            register::DRIVER_FEATURE_SELECT => setup.driver_features_select,
            register::DRIVER_FEATURE => setup.accepted_features(),
            register::CONFIG_VECTOR => self.interrupts.vector(None).into(),
            register::NUM_QUEUES => u32::try_from(setup.queues.len()).unwrap_or(0),
            register::STATUS => setup.status,
            register::QUEUE_SELECT | register::QUEUE_NOTIFY_OFF => setup.queue_select,
            register::QUEUE_VECTOR => self.interrupts.vector(Some(setup.queue_select)).into(),
            _ => {
                let Some(queue) = queue.map(queue_state) else { return 0 };
                match offset {
                    register::QUEUE_SIZE => queue.size.into(),
                    register::QUEUE_ENABLE => queue.ready.into(),
                    register::QUEUE_DESC..register::QUEUE_DRIVER => halves(queue.desc_table, register::QUEUE_DESC),
                    register::QUEUE_DRIVER..register::QUEUE_DEVICE => halves(queue.avail_ring, register::QUEUE_DRIVER),
                    register::QUEUE_DEVICE..register::END => halves(queue.used_ring, register::QUEUE_DEVICE),
                    _ => 0,
                }
            }
        }
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        // A 64-bit register may be written in one access or in two.
        if let Ok([a, b, c, d, e, f, g, h]) = <[u8; 8]>::try_from(data) {
            self.set_register(offset, u32::from_le_bytes([a, b, c, d]));
            self.set_register(offset + 4, u32::from_le_bytes([e, f, g, h]));
            return;
        }
        let mut value = [0; 4];
        if let Some(bytes) = value.get_mut(..data.len()) {
            bytes.copy_from_slice(data);
            self.set_register(offset, u32::from_le_bytes(value));
        }
    }

    fn set_register(&mut self, offset: u64, value: u32) {
        let short = u16::try_from(value).unwrap_or(u16::MAX);
        let setup = &mut self.setup;
        match offset {
            register::DEVICE_FEATURE_SELECT => setup.device_features_select = value,
            register::DRIVER_FEATURE_SELECT => setup.driver_features_select = value,
            register::DRIVER_FEATURE => setup.accept_features(value),
            register::CONFIG_VECTOR => self.interrupts.set_vector(None, short),
            register::STATUS => self.set_status(value),
            register::QUEUE_SELECT => setup.queue_select = value,
            register::QUEUE_VECTOR => self.interrupts.set_vector(Some(setup.queue_select), short),
            _ => {
                if let Some(register) = queue_register(offset) {
                    setup.set_queue(register, value);
                }
            }
        }
    }

    fn set_status(&mut self, value: u32) {
        // The guest runs, so its vCPUs have threads.
        if value != 0
            && let Err(error) = self.attach()
        {
            log::error!("the guest's driver finds no PMU: {}", vpmu_errors::chain(&error));
        }
        match self.setup.write_status(value, self.device.features()) {
            StatusChange::Noted => {}
            StatusChange::Start => self.start(),
            StatusChange::Reset => self.reset(),
        }
    }

    fn start(&mut self) {
        let queues: Vec<QueueState> = self.setup.queues.iter().map(queue_state).collect();
        let interrupts = Arc::clone(&self.interrupts);
        let started = self.device.activate(self.dma.memory(), self.setup.driver_features, &queues, interrupts);
        match started {
            Ok(()) => {
                self.device.place_doorbell(self.space.address(space::DOORBELL));
                self.live = true;
            }
            Err(error) => {
                log::warn!("the device cannot start with the driver's setup: {}", vpmu_errors::chain(&error));
                self.setup.status |= NEEDS_RESET;
                self.tell_of_config();
            }
        }
    }

    fn tell_of_config(&self) {
        if let Err(error) = self.interrupts.config_changed() {
            log::error!("cannot raise the device's interrupt: {error}");
        }
    }

    /// Drops the driver.
    fn reset(&mut self) {
        self.live = false;
        self.device.reset();
        self.setup.reset();
        self.interrupts.reset();
    }
}

/// The register of the selected queue at `offset`.
fn queue_register(offset: u64) -> Option<QueueRegister> {
    Some(match offset {
        register::QUEUE_SIZE => QueueRegister::Size,
        register::QUEUE_ENABLE => QueueRegister::Ready,
        register::QUEUE_DESC => QueueRegister::DescLow,
        0x24 => QueueRegister::DescHigh,
        register::QUEUE_DRIVER => QueueRegister::DriverLow,
        0x2c => QueueRegister::DriverHigh,
        register::QUEUE_DEVICE => QueueRegister::DeviceLow,
        0x34 => QueueRegister::DeviceHigh,
        _ => return None,
    })
}
