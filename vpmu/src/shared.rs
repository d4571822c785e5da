//! The state that all threads using one device share. [`Shared::on`] works on a shard, and then does the work that was
//! deferred to other shards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::QUEUE_VCPU;
use crate::backend::Backend;
use crate::control::Control;
use crate::flush::Flushes;
use crate::locks::FairLock;
use crate::notices::Notices;
use crate::shard::{Shard, State};

/// The parts of one device.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) backend: Arc<Backend>,
    pub(crate) shards: Arc<[Shard]>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) control: FairLock<Control>,
    pub(crate) flushes: Flushes,
    drains: AtomicU64,
}

impl Shared {
    pub(crate) fn new(backend: Backend) -> Self {
        let notices = Arc::new(Notices::new());
        let backend = Arc::new(backend);
        let shards: Arc<[Shard]> =
            (0..backend.settings.vcpus).map(|vcpu| Shard::new(vcpu, &backend, &notices)).collect();
        let control = Control::new(&backend, &shards, &notices);
        Self {
            backend,
            shards,
            notices,
            control: FairLock::new(control),
            flushes: Flushes::default(),
            drains: AtomicU64::new(0),
        }
    }

    /// The shard of a vCPU; `None` if the vCPU does not exist.
    pub(crate) fn shard(&self, vcpu: u32) -> Option<&Shard> {
        self.shards.get(vcpu as usize)
    }

    /// The vCPU of a queue.
    pub(crate) fn queue_of(&self, queue: u16) -> Option<u32> {
        let vcpu = u32::from(queue.checked_sub(QUEUE_VCPU)?);
        self.shard(vcpu).map(|_| vcpu)
    }

    /// Runs `act` on a shard, and then does the work that `act` deferred to other shards. The caller must not hold any
    /// lock.
    pub(crate) fn on<T>(&self, shard: &Shard, act: impl FnOnce(&mut State) -> T) -> T {
        let (result, errands) = shard.with(act);
        if !errands.is_empty() {
            self.control.lock().run(errands);
        }
        result
    }

    /// Calls `act` on the control plane, then delivers the notices that `act` added.
    pub(crate) fn control_plane<T>(&self, act: impl FnOnce(&mut Control) -> T) -> T {
        let result = act(&mut self.control.lock());
        self.notices.deliver(None);
        result
    }

    pub(crate) fn count_drain(&self) {
        self.drains.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of drains since the device was created.
    pub(crate) fn drains(&self) -> u64 {
        self.drains.load(Ordering::Relaxed)
    }
}
