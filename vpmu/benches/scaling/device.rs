//! A device with its driver, and a [`Seat`] for each of its vCPUs.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{Settings, Source, Vpmu};
use vpmu_testkit::{Bare, Driver, DriverQueue, Layout, header, limits};

const FEATURES: u64 = 1 << 32 | 0xf;
const PLACES: u64 = 0x100_0000;
const PLACE_BYTES: u64 = 0x20_0000;
/// Offsets in the memory of a vCPU.
const RINGS: u64 = 0x1000;
const AREA: u64 = 0x10_0000;
/// Data pages of each ring.
const DATA: u64 = 16;
const AREA_PAGES: u64 = 64;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) vpmu: Arc<Vpmu>,
    driver: Mutex<Driver>,
}

/// One vCPU of a device, for the thread that runs it.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) device: Arc<Device>,
    pub(crate) vcpu: u32,
    pub(crate) queue: DriverQueue,
}

/// Creates a device with its own guest memory. Returns a seat for each of its vCPUs.
pub(crate) fn seats(vcpus: u32, source: Box<dyn Source>) -> io::Result<Vec<Seat>> {
    let settings =
        Settings::new(vcpus, 1_000_000).with_limits(limits().with(|limits| limits.max_sample_rate = u32::MAX));
    let vpmu = Vpmu::new(settings, Arc::new(Bare { guest_ips: true }), source).map_err(io::Error::other)?;
    let vpmu = Arc::new(vpmu);
    let len = place(vcpus).try_into().map_err(io::Error::other)?;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len)]).map_err(io::Error::other)?;
    // Each vCPU's queue has two requests at a time: see `Load::Switches`.
    let layout = Layout { vcpus, slots: 4, ..Layout::SMALL };
    let mut driver = Driver::activate(&vpmu, &memory, layout, FEATURES).map_err(io::Error::other)?;
    let queues = driver.queues.split_off(usize::from(QUEUE_VCPU));
    let device = Arc::new(Device { vpmu, driver: Mutex::new(driver) });
    let seats = queues.into_iter().zip(0..).map(|(queue, vcpu)| Seat { device: Arc::clone(&device), vcpu, queue });
    Ok(seats.collect())
}

impl Device {
    /// Registers the task page of `vcpu`. All bytes of the page are zero, which means that task 0 runs and no switch is
    /// recorded.
    pub(crate) fn name_task(&self, vcpu: u32) -> io::Result<()> {
        let request = TaskPageRequest {
            header: header(CONTROL_TASK_PAGE, 0),
            vcpu: vcpu.into(),
            reserved: 0.into(),
            address: place(vcpu).into(),
        };
        self.with_driver(|driver| driver.request(&request))
    }

    pub(crate) fn open(&self, request: &OpenRequest) -> io::Result<u64> {
        self.with_driver(|driver| driver.open(request))
    }

    /// Maps ring number `index` of `vcpu` for `event`, in overwrite mode.
    pub(crate) fn map_ring(&self, vcpu: u32, event: u64, index: u64) -> io::Result<()> {
        let from = place(vcpu) + RINGS + index * (1 + DATA) * PAGE_SIZE as u64;
        self.with_driver(|driver| driver.map(CONTROL_MAP, event, 0, from, 1 + DATA))
    }

    /// Maps the AUX area of `vcpu` for `event`, in snapshot mode. The event must have a ring.
    pub(crate) fn map_area(&self, vcpu: u32, event: u64) -> io::Result<()> {
        let from = place(vcpu) + AREA;
        self.with_driver(|driver| driver.map(CONTROL_MAP_AUX, event, 0, from, AREA_PAGES))
    }

    fn with_driver<T>(&self, act: impl FnOnce(&mut Driver) -> T) -> T {
        act(&mut self.driver.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the address at which the memory of `vcpu` begins: its task page, then its rings and its AUX area.
fn place(vcpu: u32) -> u64 {
    PLACES + u64::from(vcpu) * PLACE_BYTES
}
