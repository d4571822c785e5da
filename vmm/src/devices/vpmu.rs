//! The paravirtual PMU in this machine: its transport backend, its doorbell page, and the thread that drains
//! the device.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;
use vpmu::{Memory, QueueState, Turn, Vpmu, abi};
use vpmu_kvm::DrainTimer;

use crate::arch::layout::{DOORBELL, DOORBELL_SIZE, WINDOW};
use crate::bus::{Caller, Device};
use crate::confine::{ConfineError, Confinement, ThreadKind};
use crate::devices::virtio::{QUEUE_SIZE, queue_state};
use crate::devices::virtio_mmio::{Backend, Interrupt, Region};

/// Keeps the drain thread from draining the device until this value is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(#[expect(dead_code, reason = "held for its drop")] MutexGuard<'a, ()>);

/// A thread that calls [`Vpmu::drain`] to move pending host samples to the guest's rings. It runs until this value is
/// dropped.
#[derive(Debug)]
pub struct DrainThread {
    timer: Arc<DrainTimer>,
    /// Locked during a drain, and while [`Held`] keeps drains from starting.
    turn: Arc<Mutex<()>>,
    thread: Option<JoinHandle<()>>,
}

impl DrainThread {
    /// Starts the thread under `confinement`. The thread sleeps while the device needs no draining.
    ///
    /// # Errors
    /// See [`Confinement::spawn`].
    pub fn start(timer: Arc<DrainTimer>, vpmu: Arc<Vpmu>, confinement: &Confinement) -> Result<Self, ConfineError> {
        let turn = Arc::new(Mutex::new(()));
        let (waits, turns) = (Arc::clone(&timer), Arc::clone(&turn));
        let name = "vpmu drain".to_owned();
        let thread = confinement.spawn(ThreadKind::Drain, name, move || {
            while waits.wait() {
                let turn = hold(&turns);
                vpmu.drain();
                drop(turn);
            }
        })?;
        Ok(Self { timer, turn, thread: Some(thread) })
    }

    /// If a drain is running, waits until it ends. No other drain starts until the returned value is dropped.
    pub(crate) fn hold(&self) -> Held<'_> {
        hold(&self.turn)
    }
}

fn hold(turn: &Mutex<()>) -> Held<'_> {
    // The lock protects no data that a panic could corrupt.
    Held(turn.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Drop for DrainThread {
    fn drop(&mut self) {
        self.timer.end();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that drains the PMU device panicked");
        }
    }
}

impl vpmu::Interrupt for Interrupt {
    fn used(&self, _queues: &[u16]) -> io::Result<()> {
        // All queues share one interrupt, so the driver checks each queue for used buffers.
        self.used_buffer()
    }
}

/// The device behind its transport.
#[derive(Debug)]
pub struct VirtioPmu {
    /// The PMU device.
    pub vpmu: Arc<Vpmu>,
    /// The interrupt of the transport.
    pub interrupt: Arc<Interrupt>,
    /// Size of the window in bytes. Zero if there is no window.
    pub window: u64,
    /// Signalled when the control queue needs service.
    pub control: Arc<EventFd>,
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
        memory: Memory,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let queues: Vec<QueueState> = queues.iter().map(queue_state).collect();
        let interrupt = Arc::clone(&self.interrupt);
        Ok(self.vpmu.activate(memory, features, &queues, interrupt)?)
    }

    fn reset(&self) {
        self.vpmu.reset();
    }

    fn notify(&self, queue: u16, caller: &mut Caller<'_>) {
        let turn = match &mut caller.pmu {
            Some(session) if queue >= abi::QUEUE_VCPU => {
                session.kick(queue);
                Turn::Done
            }
            // The control queue or the event queue.
            _ => self.vpmu.notify(queue),
        };
        if turn == Turn::Unfinished
            && let Err(error) = self.control.write(1)
        {
            log::error!("control requests wait for the driver's next notification: {error}");
        }
    }
}

/// The doorbell page. To place a mark, a vCPU writes 32 bits at the start of the page.
#[derive(Debug)]
pub struct Doorbell;

impl Device for Doorbell {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8], caller: &mut Caller<'_>) {
        if let (0, Ok(value), Some(session)) = (offset, data.try_into(), &mut caller.pmu) {
            session.mark(u32::from_le_bytes(value), caller.registers);
        }
    }
}
