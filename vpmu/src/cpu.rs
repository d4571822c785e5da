//! The vCPU data that a shard uses to count events: clocks, the thread, and the host counters that several events
//! share.

use std::io;
use std::sync::Arc;

use crate::backend::Backend;
use crate::refusal::Refusal;
use crate::slots::{RunSlot, RunSlots};
use crate::source::{Counter, CounterKey, CounterSet, Reading, Request};
use crate::vcpu::Vcpu;
use crate::work;

/// The vCPU of a shard, and the state that is needed to count its events. The shard's lock protects it.
#[derive(Debug)]
pub(crate) struct Cpu {
    pub(crate) index: u32,
    pub(crate) backend: Arc<Backend>,
    pub(crate) vcpu: Arc<Vcpu>,
    counters: Counters,
    /// Number of earlier threads of the vCPU.
    threads: u64,
    /// Room for the guest's sampling counters.
    slots: RunSlots,
    /// The thread for which [`Cpu::hold_own`] holds back the start of counters. `None` after [`Cpu::release_own`].
    held: Option<i32>,
    /// Cached readings of the guest's TSC, exits and halts. Each is read at most once while the shard is
    /// locked.
    now: Option<u64>,
    exits: Option<Option<u64>>,
    halts: Option<Option<u64>>,
    /// The host's reason for refusing the counter that was requested last. `None` if the host opened the counter.
    refusal: Option<Refusal>,
}

impl Cpu {
    pub(crate) fn new(index: u32, backend: Arc<Backend>, vcpu: Arc<Vcpu>) -> Self {
        Self {
            index,
            backend,
            vcpu,
            counters: Counters::default(),
            threads: 0,
            slots: RunSlots::default(),
            held: None,
            now: None,
            exits: None,
            halts: None,
            refusal: None,
        }
    }

    /// Discards cached readings, which are valid only while the shard stays locked.
    pub(crate) fn invalidate(&mut self) {
        self.counters.fresh = false;
        self.now = None;
        self.exits = None;
        self.halts = None;
        self.refusal = None;
    }

    /// The vCPU's thread, if attached.
    pub(crate) fn thread(&self) -> Option<i32> {
        self.vcpu.thread()
    }

    /// The guest's TSC now.
    pub(crate) fn tsc(&self) -> u64 {
        self.vcpu.guest_tsc(&*self.backend.source)
    }

    /// Returns the guest's TSC for updating counts. It is read only once while the shard is locked, so all events of a
    /// task switch are updated to the same time.
    pub(crate) fn counting_tsc(&mut self) -> u64 {
        match self.now {
            Some(now) => now,
            None => *self.now.insert(self.vcpu.guest_tsc(&*self.backend.source)),
        }
    }

    /// Guest nanoseconds now.
    pub(crate) fn time(&self) -> u64 {
        self.backend.clock.nanoseconds(self.tsc())
    }

    /// Total number of the vCPU's exits, from the hypervisor's statistics. `None` if the hypervisor has no such
    /// statistics.
    pub(crate) fn all_exits(&mut self) -> Option<u64> {
        let (machine, index) = (&self.backend.machine, self.index);
        *self.exits.get_or_insert_with(|| machine.exits(index))
    }

    /// Total number of the vCPU's halts, from the hypervisor's statistics. `None` if the hypervisor has no such
    /// statistics.
    pub(crate) fn halts(&mut self) -> Option<u64> {
        let (machine, index) = (&self.backend.machine, self.index);
        *self.halts.get_or_insert_with(|| machine.halts(index))
    }

    /// Opens a host counter for one event on the vCPU's thread.
    ///
    /// # Errors
    /// The host's error, or `ESRCH` while the vCPU has no thread.
    pub(crate) fn open(&mut self, request: &Request) -> io::Result<Box<dyn Counter>> {
        let thread = self.thread().ok_or_else(no_thread)?;
        work::charge_host_call();
        let permitted = self.backend.permit(request);
        let opened = permitted.and_then(|()| self.backend.source.open(request, thread));
        self.refusal = opened.as_ref().err().map(|error| self.backend.refused(error));
        opened
    }

    /// Returns and clears the host's reason for refusing the counter that was requested last. `None` if the
    /// host opened the counter, or if the reason was already taken.
    pub(crate) fn take_refusal(&mut self) -> Option<Refusal> {
        self.refusal.take()
    }

    /// Takes a slot for a counter with `rate` interrupts per second. Returns `None` if the vCPU's limits do not allow
    /// another such counter. The event must then wait.
    pub(crate) fn take_slot(&self, rate: u64) -> Option<RunSlot> {
        self.slots.take(self.backend.run_limit(), rate)
    }

    /// See [`RunSlots::take_freed`].
    pub(crate) fn take_freed(&self) -> bool {
        self.slots.take_freed()
    }

    /// See [`RunSlots::look_again`].
    pub(crate) fn look_again(&self) {
        self.slots.look_again();
    }

    /// Holds back the start of counters that only one event uses, until [`Cpu::release_own`] starts them together. See
    /// [`Source::hold`](crate::source::Source::hold).
    pub(crate) fn hold_own(&mut self) {
        if self.held.is_none()
            && let Some(thread) = self.thread()
        {
            work::charge_host_call();
            self.backend.source.hold(thread);
            self.held = Some(thread);
        }
    }

    /// Starts the counters that [`Cpu::hold_own`] held back. Call this before unlocking the shard.
    pub(crate) fn release_own(&mut self) {
        let Some(thread) = self.held.take() else {
            return;
        };
        work::charge_host_call();
        if let Err(error) = self.backend.source.release(thread) {
            log::error!("the counters of vCPU {} cannot resume: {error}", self.index);
        }
    }

    /// Lets one more event share the counter for `request`. Opens the counter for the first event.
    ///
    /// # Errors
    /// See [`Cpu::open`].
    pub(crate) fn share(&mut self, request: &Request) -> io::Result<Lease> {
        let thread = self.thread().ok_or_else(no_thread)?;
        let source = &self.backend.source;
        let permitted = self.backend.permit(request);
        let shared = permitted.and_then(|()| self.counters.share(request, || source.counters(thread)));
        self.refusal = shared.as_ref().err().map(|error| self.backend.refused(error));
        Ok(Lease { key: shared?, threads: self.threads })
    }

    /// Removes an event from a shared counter.
    pub(crate) fn release(&mut self, lease: Lease) {
        if lease.threads == self.threads {
            self.counters.release(lease.key);
        }
    }

    /// Returns the reading of a shared counter. All shared counters are read together, at most once while the shard is
    /// locked.
    ///
    /// # Errors
    /// The host revoked the counter.
    pub(crate) fn read(&mut self, lease: Lease) -> io::Result<Reading> {
        self.counters.read(lease.key)
    }

    /// Closes the counters of the previous thread.
    pub(crate) fn drop_counters(&mut self) {
        self.counters = Counters::default();
        self.threads += 1;
    }
}

/// An event's share in a shared counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lease {
    key: CounterKey,
    /// How many threads the vCPU ran on before the counter's thread. This number identifies the counter set, because
    /// keys are unique only within the set of one thread.
    threads: u64,
}

fn no_thread() -> io::Error {
    io::Error::from_raw_os_error(libc::ESRCH)
}

/// The counters on one vCPU's thread that events share. An event's count is the difference between two readings of a
/// counter, so all events with equal requests can use the same counter. The number of file descriptors therefore
/// depends on the number of different requests, not on the number of events.
#[derive(Debug, Default)]
struct Counters {
    /// Created together with the first counter.
    set: Option<Box<dyn CounterSet>>,
    shared: Vec<Shared>,
    /// Whether the set was read since the shard was locked.
    fresh: bool,
}

#[derive(Debug)]
struct Shared {
    request: Request,
    key: CounterKey,
    /// Number of events that use the counter.
    events: usize,
}

impl Counters {
    fn share(&mut self, request: &Request, make: impl FnOnce() -> Box<dyn CounterSet>) -> io::Result<CounterKey> {
        if let Some(shared) = self.shared.iter_mut().find(|one| one.request == *request) {
            shared.events += 1;
            return Ok(shared.key);
        }
        work::charge_host_call();
        let key = self.set.get_or_insert_with(make).add(request)?;
        self.shared.push(Shared { request: *request, key, events: 1 });
        Ok(key)
    }

    fn release(&mut self, key: CounterKey) {
        let Some(at) = self.shared.iter().position(|one| one.key == key) else {
            return;
        };
        self.shared[at].events -= 1;
        if self.shared[at].events > 0 {
            return;
        }
        self.shared.swap_remove(at);
        if let Some(set) = &mut self.set {
            work::charge_host_call();
            set.remove(key);
        }
        if self.shared.is_empty() {
            self.set = None;
        }
    }

    fn read(&mut self, key: CounterKey) -> io::Result<Reading> {
        let Some(set) = &mut self.set else {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        };
        if !self.fresh {
            work::charge_host_call();
            set.refresh();
            self.fresh = true;
        }
        set.reading(key)
    }
}
