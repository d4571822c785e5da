//! The device as a VMM sees it.

use std::sync::Arc;

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use crate::machine::{ExitReason, Machine, Registers};
use crate::metrics::{ExitCounts, Metrics};
use crate::settings::Settings;
use crate::source::Source;

/// Why the device cannot be made or started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing to count on.
    #[error("a device needs 1 to 65533 vCPUs, not {0}")]
    Vcpus(u32),
}

/// The device. Every method may be called from any thread unless it says otherwise.
#[derive(Debug)]
pub struct Vpmu {
    settings: Settings,
    machine: Arc<dyn Machine>,
    source: Box<dyn Source>,
}

impl Vpmu {
    /// A device with no driver yet.
    ///
    /// # Errors
    /// [`Error`] for settings that make no device.
    pub fn new(
        settings: Settings,
        machine: Arc<dyn Machine>,
        source: Box<dyn Source>,
    ) -> Result<Self, Error> {
        Ok(Self {
            settings,
            machine,
            source,
        })
    }
    /// Feature bits offered, `VIRTIO_F_VERSION_1` included.
    #[must_use]
    pub fn features(&self) -> u64 {
        1 << 32 | 7
    }
    /// Number of virtqueues: control, event, one per vCPU.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        2 + self.settings.vcpus as usize
    }
    /// Reads configuration space; bytes beyond it are zero.
    pub fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    /// The driver has set `DRIVER_OK`.
    ///
    /// # Errors
    /// [`Error`] for queues or features that cannot serve; the device stays inactive.
    pub fn activate(
        &self,
        _memory: GuestMemoryMmap,
        _features: u64,
        _queues: Vec<Queue>,
    ) -> Result<(), Error> {
        Ok(())
    }
    /// Drops every event, ring and host descriptor; guest memory is not touched afterwards.
    pub fn reset(&self) {}
    /// A vCPU's thread introduces itself, before the vCPU first runs:
    /// guest TSC = host TSC + `tsc_offset`, wrapping.
    ///
    /// # Errors
    /// [`Error`] for a vCPU that the device does not have.
    pub fn attach(&self, _vcpu: u32, _tsc_offset: u64) -> Result<(), Error> {
        Ok(())
    }
    /// Right before the run call, on the vCPU's thread.
    pub fn enter(&self, _vcpu: u32) {}
    /// Right after the run call, on the vCPU's thread.
    pub fn leave(&self, _vcpu: u32, _reason: ExitReason, _regs: &mut dyn Registers) {}
    /// The driver notified `queue`. A vCPU queue is served on the thread of the vCPU that
    /// notified, `vcpu`, before that vCPU runs on; the other queues from any thread.
    pub fn notify(&self, _queue: u16, _vcpu: Option<u32>) {}
    /// A 32-bit write to the doorbell by `vcpu`, on its thread.
    pub fn mark(&self, _vcpu: u32, _value: u32, _regs: &mut dyn Registers) {}
    /// Exact exits by reason since the start.
    #[must_use]
    pub fn exits(&self, _vcpu: u32) -> ExitCounts {
        ExitCounts::default()
    }
    /// What the device did since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        Metrics::default()
    }
    /// Whether a sampling event is active on `vcpu`, so that registers are about to be asked for.
    #[must_use]
    pub fn wants_registers(&self, _vcpu: u32) -> bool {
        false
    }
}
