//! A device with its driver's control queue, and a [`Seat`] for each of its vCPUs.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::abi::*;
use vpmu::{Limits, Machine, Settings, Source, Vpmu};
use zerocopy::IntoBytes;

use crate::common::{Control, DriverQueue, Silent, header};
use crate::vcpu;

const FEATURES: u64 = 1 << 32 | 0xf;
const QUEUES: u64 = 0x1_0000;
const PLACES: u64 = 0x10_0000;
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
    control: Mutex<Control>,
}

/// One vCPU of a device, for the thread that runs it.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) device: Arc<Device>,
    pub(crate) vcpu: u32,
    pub(crate) queue: DriverQueue,
}

#[derive(Debug)]
struct BenchMachine;

impl Machine for BenchMachine {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn reports_guest_ips(&self) -> bool {
        true
    }
}

/// Creates a device with its own guest memory. Returns a seat for each of its vCPUs.
pub(crate) fn seats(vcpus: u32, source: Box<dyn Source>) -> io::Result<Vec<Seat>> {
    let settings = Settings::new(vcpus, 1_000_000).with_limits(Limits::default().with(|limits| {
        limits.max_sample_rate = u32::MAX;
        limits.max_samples = u32::MAX;
        limits.max_record_bytes = u64::MAX;
        limits.max_sampling_percent = 100;
        limits.min_hardware_period = 1;
    }));
    let vpmu = Vpmu::new(settings, Arc::new(BenchMachine), source).map_err(io::Error::other)?;
    let vpmu = Arc::new(vpmu);
    let len = place(vcpus).try_into().map_err(io::Error::other)?;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len)]).map_err(io::Error::other)?;
    let at = |index: u32| QUEUES + u64::from(index) * DriverQueue::BYTES;
    let (control, control_queue) = DriverQueue::new(&memory, at(0))?;
    let (_, event_queue) = DriverQueue::new(&memory, at(1))?;
    let mut queues = vec![control_queue, event_queue];
    let mut drivers = Vec::new();
    for vcpu in 0..vcpus {
        let (driver, queue) = DriverQueue::new(&memory, at(2 + vcpu))?;
        queues.push(queue);
        drivers.push(driver);
    }
    vpmu.activate(memory, FEATURES, &queues, Arc::new(Silent)).map_err(io::Error::other)?;
    let control = Control::new(&vpmu, control, vcpu::notify_control);
    let device = Arc::new(Device { vpmu, control: Mutex::new(control) });
    let seats = drivers.into_iter().zip(0..).map(|(queue, vcpu)| Seat { device: Arc::clone(&device), vcpu, queue });
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
        self.with_control(|control| control.request("task page", request.as_bytes()))
    }

    pub(crate) fn open(&self, request: &OpenRequest) -> io::Result<u64> {
        self.with_control(|control| control.open(request))
    }

    /// Maps ring number `index` of `vcpu` for `event`, in overwrite mode.
    pub(crate) fn map_ring(&self, vcpu: u32, event: u64, index: u64) -> io::Result<()> {
        let from = place(vcpu) + RINGS + index * (1 + DATA) * PAGE_SIZE as u64;
        self.with_control(|control| control.map(CONTROL_MAP, event, 0, from, 1 + DATA))
    }

    /// Maps the AUX area of `vcpu` for `event`, in snapshot mode. The event must have a ring.
    pub(crate) fn map_area(&self, vcpu: u32, event: u64) -> io::Result<()> {
        let from = place(vcpu) + AREA;
        self.with_control(|control| control.map(CONTROL_MAP_AUX, event, 0, from, AREA_PAGES))
    }

    fn with_control<T>(&self, act: impl FnOnce(&mut Control) -> T) -> T {
        act(&mut self.control.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the address at which the memory of `vcpu` begins: its task page, then its rings and its AUX area.
fn place(vcpu: u32) -> u64 {
    PLACES + u64::from(vcpu) * PLACE_BYTES
}
