//! The paravirtual PMU in this machine: its transport backend, its doorbell page, and what it
//! asks of KVM.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::timerfd::TimerFd;
use vpmu::{Machine, Vpmu, abi};

use crate::arch::layout::{DOORBELL, DOORBELL_SIZE, WINDOW};
use crate::bus::{Caller, Device};
use crate::check;
use crate::devices::virtio_mmio::{Backend, Interrupt, Region};
use crate::signal::Threads;
use crate::stats::Statistics;

/// Entries of each virtqueue, at most.
const QUEUE_SIZE: u16 = 256;

/// What the device asks of the machine that carries it.
#[derive(Debug)]
pub struct Carrier {
    /// The transport's interrupt.
    pub interrupt: Arc<Interrupt>,
    /// Each vCPU's statistics, where this kernel has them.
    pub stats: Arc<Statistics>,
    /// Where each vCPU runs.
    pub threads: Arc<Threads>,
    /// Goes off when the device is to be drained.
    pub drain: Arc<DrainTimer>,
    /// Whether the host's samples carry guest addresses, once somebody has asked.
    pub guest_ips: OnceLock<bool>,
}

/// How often the batched engine's samples are collected.
const DRAIN_PERIOD: Duration = Duration::from_millis(10);

/// The timer of the batched engine; armed only while there is something to collect.
#[derive(Debug)]
pub struct DrainTimer {
    fd: RawFd,
    timer: Mutex<TimerFd>,
}

impl DrainTimer {
    /// A timer at rest.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let timer = TimerFd::new()?;
        Ok(Self {
            fd: timer.as_raw_fd(),
            timer: Mutex::new(timer),
        })
    }

    fn set(&self, going: bool) {
        // A timer has no state that a panic could spoil.
        let mut timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner);
        let set = match going {
            true => timer.reset(DRAIN_PERIOD, Some(DRAIN_PERIOD)),
            false => timer.clear(),
        };
        if let Err(error) = set {
            log::error!("samples come late: the timer cannot be set: {error}");
        }
    }

    /// Whether it has gone off since the last call.
    pub fn take(&self) -> bool {
        let mut timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner);
        // At rest it has nothing to read, and nobody is to wait for it.
        timer.is_armed().unwrap_or(false) && timer.wait().is_ok()
    }
}

impl AsRawFd for DrainTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

impl Machine for Carrier {
    fn interrupt(&self) -> io::Result<()> {
        self.interrupt.used_buffer()
    }

    fn exits(&self, vcpu: u32) -> Option<u64> {
        self.stats.read(vcpu, "exits")
    }

    fn halts(&self, vcpu: u32) -> Option<u64> {
        self.stats.read(vcpu, "halt_exits")
    }

    fn reports_guest_ips(&self) -> bool {
        *self.guest_ips.get_or_init(check::host_knows_guest_ips)
    }

    fn kick(&self, vcpu: u32) -> io::Result<()> {
        self.threads.kick(vcpu)
    }

    fn draining(&self, wanted: bool) {
        self.drain.set(wanted);
    }
}

/// The device behind its transport.
#[derive(Debug)]
pub struct VirtioPmu {
    /// The device.
    pub vpmu: Arc<Vpmu>,
    /// Bytes of its window; zero: it has none.
    pub window: u64,
}

impl Backend for VirtioPmu {
    fn device_id(&self) -> u32 {
        abi::DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.vpmu.features()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.vpmu.queue_count()]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.vpmu.read_config(offset, data);
    }

    fn region(&self, id: u8) -> Option<Region> {
        let (address, size) = match id {
            abi::SHM_DOORBELL => (DOORBELL, DOORBELL_SIZE),
            abi::SHM_WINDOW if self.window > 0 => (WINDOW, self.window),
            _ => return None,
        };
        Some(Region { address, size })
    }

    fn activate(
        &self,
        memory: GuestMemoryMmap,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.vpmu.activate(memory, features, queues)?)
    }

    fn reset(&self) {
        self.vpmu.reset();
    }

    fn notify(&self, queue: u16, vcpu: u32) {
        // The control and event queues belong to no vCPU, whoever kicked.
        let vcpu = (queue >= abi::QUEUE_VCPU).then_some(vcpu);
        self.vpmu.notify(queue, vcpu);
    }
}

/// The doorbell page: a 32-bit write at its start is a mark by the vCPU that writes.
#[derive(Debug)]
pub struct Doorbell(pub Arc<Vpmu>);

impl Device for Doorbell {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8], caller: &mut Caller<'_>) {
        if let (0, Ok(value)) = (offset, data.try_into()) {
            self.0
                .mark(caller.vcpu, u32::from_le_bytes(value), caller.registers);
        }
    }
}
