//! The device's API for a VMM: methods for the transport, for the vCPUs' threads and for the operator.

use std::collections::BTreeSet;
use std::sync::Arc;

use vm_memory::GuestMemoryBackend;
use vpmu_orc::OrcTable;
use zerocopy::IntoBytes;

use crate::abi::{
    COUNT_GUEST, COUNT_VCPU, Config, KIND_HARDWARE, KIND_SOFTWARE, QUEUE_CONTROL, QUEUE_EVENT, QUEUE_VCPU, VERSION,
};
use crate::aux_writer::AuxWriter;
use crate::backend::Backend;
use crate::clock::Clock;
use crate::control::{Control, Driver, Overlap};
use crate::errno::Errno;
use crate::error::{Error, FlushError, MAX_VCPUS, RestoreError, SaveError};
use crate::flush::Visit;
use crate::machine::{Interrupt, Machine};
use crate::memory::Memory;
use crate::metrics::{ExitCounts, Metrics};
use crate::persistent::{History, Persist, PersistError, PersistentStatus, open_request};
use crate::producer::{AuxError, AuxProducer};
use crate::queues::QueueState;
use crate::refusal::Refusal;
use crate::remote::RemoteVcpu;
use crate::save::SavedState;
use crate::session::VcpuSession;
use crate::settings::{CountMode, Settings};
use crate::shard::Shard;
use crate::shared::Shared;
use crate::source::Source;
use crate::window::Window;
use crate::work::Turn;

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;

/// The device. Any thread may call its methods. The thread of a vCPU uses a [`VcpuSession`] for that vCPU.
///
/// # Examples
/// The operator counts marks before the guest has a driver. When the driver has set up its queues, a VMM also calls
/// [`Vpmu::activate`]; `examples/embed.rs` is a whole VMM.
///
/// ```
/// use std::sync::Arc;
///
/// use vm_memory::{GuestAddress, GuestMemoryMmap};
/// use vmm_sys_util::signal::SIGRTMIN;
/// use vpmu::host::PerfSource;
/// use vpmu::{GuestRegs, Machine, Registers, Settings, Vpmu};
///
/// #[derive(Debug)]
/// struct Vmm;
///
/// impl Machine for Vmm {
///     fn exits(&self, _vcpu: u32) -> Option<u64> {
///         None // without KVM's statistics
///     }
///     fn halts(&self, _vcpu: u32) -> Option<u64> {
///         None
///     }
/// }
///
/// # struct Stopped;
/// # impl Registers for Stopped {
/// #     fn registers(&mut self) -> Option<GuestRegs> {
/// #         None
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let window = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 32), 64 * 4096)])?;
/// let source = PerfSource::new(SIGRTMIN())?;
/// let vpmu = Vpmu::new(Settings::new(1, 2_400_000), Arc::new(Vmm), Box::new(source))?.with_window(window)?;
/// vpmu.persist(&"marks,name=boot".parse()?)?;
///
/// // On the thread of vCPU 0, at an exit for a store of 7 to the doorbell:
/// let mut vcpu = vpmu.attach(0, 0)?;
/// vcpu.mark(7, &mut Stopped);
/// assert_eq!(vpmu.persistent()[0].count, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Vpmu {
    shared: Arc<Shared>,
}

impl Vpmu {
    /// Creates a device without a driver.
    ///
    /// # Errors
    /// [`Error`]: the settings are not valid.
    pub fn new(settings: Settings, machine: Arc<dyn Machine>, source: Box<dyn Source>) -> Result<Self, Error> {
        if !(1..=MAX_VCPUS).contains(&settings.vcpus) {
            return Err(Error::Vcpus(settings.vcpus));
        }
        settings.limits.check()?;
        let clock = Clock::new(settings.tsc_khz).ok_or(Error::TscFrequency)?;
        let backend = Backend::new(settings, clock, source, machine);
        Ok(Self { shared: Arc::new(Shared::new(backend)) })
    }

    /// Adds a window, which is VMM memory for rings that survive a reset. The window is one region of whole pages
    /// outside the guest's RAM. The region's address is the guest-physical address at which the VMM maps the window for
    /// the guest, as shared memory region [`SHM_WINDOW`](crate::abi::SHM_WINDOW). If the guest chooses that address, as it
    /// does for a PCI device, give the region any address that no guest memory has: drivers name the window's pages by
    /// their numbers. Call this before the guest runs and before the first event is opened.
    ///
    /// # Errors
    /// [`Error::Window`].
    pub fn with_window<M>(self, window: M) -> Result<Self, Error>
    where
        M: GuestMemoryBackend + Send + Sync + 'static,
    {
        let guests = self.shared.backend.settings.limits.max_window_pages;
        let window = Window::new(window, guests).ok_or(Error::Window)?;
        self.shared.control.lock().set_window(window);
        Ok(self)
    }

    /// Adds the VMM's own AUX producers, which guests open as traces
    /// ([`KIND_VMM_TRACE`](crate::abi::KIND_VMM_TRACE)). The first producer has number 0. Call this at most once,
    /// before the guest runs and before [`Vpmu::guest_events`], [`Vpmu::persist`] or [`Vpmu::restore`], each of
    /// which fixes the list of events.
    ///
    /// # Errors
    /// [`Error::Producer`], [`Error::ProducersTwice`].
    pub fn with_aux_producers(self, producers: Vec<AuxProducer>) -> Result<Self, Error> {
        for (index, producer) in producers.iter().enumerate() {
            let mut before = producers.iter().take(index);
            if !producer.is_sound() || before.any(|one| one.name == producer.name) {
                return Err(Error::Producer(producer.name));
            }
        }
        let set = self.shared.backend.set_producers(producers);
        set.map_err(|_| Error::ProducersTwice)?;
        Ok(self)
    }

    /// Adds the ORC tables of the guest's kernel, which the VMM reads from the operator's `vmlinux`. Call chains then
    /// have the callers in a kernel that lacks frame pointers. If the kernel is loaded at another address than the one
    /// for which it was linked (KASLR), the device finds it in the guest's page tables. Code outside these tables, such
    /// as a module's, ends a chain. Tables of another kernel than the guest's yield wrong chains. Call this at most once,
    /// before the guest runs.
    ///
    /// # Errors
    /// [`Error::OrcTwice`].
    pub fn with_orc(self, table: OrcTable) -> Result<Self, Error> {
        self.shared.backend.set_orc(table).map_err(|_| Error::OrcTwice)?;
        Ok(self)
    }

    // AUX producers in the VMM.

    /// Returns the ids of a producer's traces that are active on `vcpu` and not paused.
    #[must_use]
    pub fn aux_traces(&self, producer: u64, vcpu: u32) -> Vec<u64> {
        let shard = self.shared.shard(vcpu);
        shard.map_or_else(Vec::new, |shard| self.shared.on(shard, |state| state.produced_for(producer, vcpu)))
    }

    /// Begins a write to the AUX area of a VMM trace. Until the returned writer ends, nothing else can write to the
    /// area. Packets that other traces produce for this area are dropped and counted as lost.
    ///
    /// # Errors
    /// [`AuxError`]; [`AuxError::Nested`] while another writer of the area is open.
    pub fn aux_begin(&self, trace: u64) -> Result<AuxWriter<'_>, AuxError> {
        AuxWriter::begin(&self.shared, trace)
    }

    // vCPUs.

    /// Attaches the calling thread to `vcpu` until the returned session is dropped. The guest's TSC is the
    /// host's TSC plus `tsc_offset`, modulo 2^64. Events that counted on an earlier thread of the vCPU continue
    /// on this thread.
    ///
    /// # Errors
    /// [`Error::NoVcpu`]: the device has no such vCPU. [`Error::Attached`]: the vCPU already has a session.
    /// [`Error::Remote`]: the device is remote.
    pub fn attach(&self, vcpu: u32, tsc_offset: u64) -> Result<VcpuSession, Error> {
        if self.shared.backend.settings.remote {
            return Err(Error::Remote);
        }
        self.begin_session(vcpu, self.shared.backend.source.thread(), tsc_offset)
    }

    /// Attaches `thread`, a thread of the VMM's process, to `vcpu` until the returned session is dropped. For a remote
    /// device ([`Settings::remote`]). The guest's TSC is the host's TSC plus `tsc_offset`, modulo 2^64.
    ///
    /// The host may give the id of a thread that has ended to another thread: drop the session when the thread ends.
    ///
    /// # Errors
    /// Like [`Vpmu::attach`], but [`Error::Remote`] if the device is not remote.
    pub fn attach_thread(&self, vcpu: u32, thread: i32, tsc_offset: u64) -> Result<RemoteVcpu, Error> {
        if !self.shared.backend.settings.remote {
            return Err(Error::Remote);
        }
        self.begin_session(vcpu, thread, tsc_offset).map(RemoteVcpu::new)
    }

    fn begin_session(&self, vcpu: u32, thread: i32, tsc_offset: u64) -> Result<VcpuSession, Error> {
        let shard = self.shared.shard(vcpu).ok_or(Error::NoVcpu(vcpu))?;
        if !shard.vcpu.take() {
            return Err(Error::Attached(vcpu));
        }
        self.shared.control_plane(|control| control.attach(vcpu, thread, tsc_offset));
        Ok(VcpuSession::new(Arc::clone(&self.shared), vcpu))
    }

    /// Collects the samples that the host took while vCPUs ran, and writes them to the guest's rings. Handles one vCPU
    /// at a time. Call this about every ten milliseconds while [`Machine::draining`] requests it, on a thread that runs
    /// no vCPU.
    pub fn drain(&self) {
        self.shared.count_drain();
        for shard in self.shared.shards.iter() {
            self.shared.on(shard, |state| state.events.collect());
            self.shared.notices.deliver(None);
        }
    }

    /// Returns the exact number of a vCPU's exits to the VMM for each reason. All numbers are zero if the vCPU does not
    /// exist. A restored device continues from the saved numbers.
    #[must_use]
    pub fn exits(&self, vcpu: u32) -> ExitCounts {
        let exits = self.shared.shard(vcpu).map(|shard| shard.vcpu.exits());
        exits.unwrap_or_default()
    }

    /// The device's totals, see [`Metrics`].
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let (notices, bad_requests) = self.shared.notices.totals();
        let shards = || self.shared.shards.iter();
        let mut metrics = Metrics {
            kicks: shards().map(|shard| shard.vcpu.kicks()).collect(),
            interrupts: self.shared.notices.interrupts(),
            marks: shards().map(|shard| shard.vcpu.marks()).sum(),
            drains: self.shared.drains(),
            notices,
            bad_requests,
            ..Metrics::default()
        };
        metrics.host_counters = self.shared.backend.counters.peak();
        self.shared.control.lock().add_to(&mut metrics);
        for shard in shards() {
            metrics.add_work(shard.vcpu.work());
            shard.with(|state| state.add_to(&mut metrics));
        }
        self.shared.control.lock().add_before(&mut metrics);
        metrics
    }

    // The transport.

    /// The offered feature bits, `VIRTIO_F_VERSION_1` included.
    #[must_use]
    pub fn features(&self) -> u64 {
        VERSION_1 | self.shared.control.lock().offered()
    }

    /// Returns the number of virtqueues: the control queue, the event queue, and one queue per vCPU.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        usize::from(QUEUE_VCPU) + self.shared.shards.len()
    }

    /// Reads configuration space. Bytes beyond its end are zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        let backend = &self.shared.backend;
        let entries = backend.guest_entries().count();
        let limits = &backend.settings.limits;
        let config = Config {
            version: VERSION.into(),
            vcpus: backend.settings.vcpus.into(),
            max_events: limits.max_events.into(),
            max_ring_pages: limits.max_ring_pages.into(),
            catalogue_len: u32::try_from(entries).unwrap_or(u32::MAX).into(),
            count_mode: match backend.settings.hardware.count_mode {
                CountMode::Guest => COUNT_GUEST,
                CountMode::Vcpu => COUNT_VCPU,
            }
            .into(),
            time_mult: backend.clock.mult.into(),
            time_shift: backend.clock.shift.into(),
            refused_hardware: Refusal::wire(backend.refusal(KIND_HARDWARE)),
            refused_software: Refusal::wire(backend.refusal(KIND_SOFTWARE)),
            tsc_khz: backend.settings.tsc_khz.into(),
            max_sample_rate: limits.max_sample_rate.into(),
            max_aux_pages: limits.max_aux_pages.into(),
            max_persistent: limits.max_persistent.into(),
            features: self.shared.control.lock().offered().into(),
            ..Config::default()
        };
        data.fill(0);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(rest) = config.as_bytes().get(offset..) {
            let len = rest.len().min(data.len());
            data[..len].copy_from_slice(&rest[..len]);
        }
    }

    /// Activates the device once the driver has set `DRIVER_OK`. First resets the device, as [`Vpmu::reset`] does.
    /// `queues` is in the order of the queues' indices. Until the next reset, the device uses `memory` and these
    /// queues, and reports used buffers through `interrupt`.
    ///
    /// # Errors
    /// [`Error`]: the queues or the features are not valid, or the window overlaps guest memory; the device is then
    /// inactive.
    pub fn activate(
        &self,
        memory: impl Into<Memory>,
        features: u64,
        queues: &[QueueState],
        interrupt: Arc<dyn Interrupt>,
    ) -> Result<(), Error> {
        let memory = memory.into();
        self.reset();
        self.check_driver(&memory, features, queues)?;
        let mut control = self.shared.control.lock();
        let activated = control.activate(memory, features, queues, interrupt);
        activated.map_err(|Overlap| Error::WindowOverlaps)
    }

    /// Checks that the device can serve a driver with these queues and features.
    fn check_driver(&self, memory: &Memory, features: u64, queues: &[QueueState]) -> Result<(), Error> {
        if features & VERSION_1 == 0 || features & !self.features() != 0 {
            return Err(Error::Features(features));
        }
        if queues.len() != self.queue_count() {
            return Err(Error::QueueCount { expected: self.queue_count(), given: queues.len() });
        }
        for (index, queue) in queues.iter().enumerate() {
            let needed = index == usize::from(QUEUE_CONTROL);
            if (needed || queue.ready) && !queue.is_sound(&memory.view()) {
                return Err(Error::Queue(index));
            }
        }
        Ok(())
    }

    /// Returns the current state of each virtqueue, by index. An unused queue has the default state. `next_avail` and
    /// `next_used` include all work done so far. Before another device takes over the queues, stop notifying this
    /// device.
    #[must_use]
    pub fn queue_states(&self) -> Vec<QueueState> {
        self.shared.control.lock().queue_states()
    }

    /// Drops the driver and its memory. Afterwards, the device does not access this memory. Persistent events that need
    /// neither the driver nor its memory continue. All other events are closed.
    pub fn reset(&self) {
        self.shared.control.lock().reset();
    }

    // Save and restore.

    /// Saves the device's state, for [`Vpmu::restore`]. On return, every sample, packet and count is in guest memory or
    /// the window. The VMM must then copy guest memory and the window, and must not call any method of the device until
    /// the copies are complete. The device can continue after that, but in traces, the current exit of each vCPU is
    /// marked as cut ([`PACKET_CUT`](crate::abi::PACKET_CUT)).
    ///
    /// Every vCPU must have left the guest, and its exit must have been handled. This method does not make vCPUs leave
    /// the guest.
    ///
    /// # Errors
    /// [`SaveError`]; the device continues.
    pub fn save(&self) -> Result<SavedState, SaveError> {
        for (vcpu, shard) in (0..).zip(self.shared.shards.iter()) {
            if shard.vcpu.visit().is_some() {
                return Err(SaveError::Inside(vcpu));
            }
            if shard.vcpu.is_unserved() {
                return Err(SaveError::Unserved(vcpu));
            }
        }
        self.shared.control.lock().quiesce();
        let totals = self.metrics();
        self.shared.control.lock().save(totals)
    }

    /// Restores a [saved](Vpmu::save) state into this device. The device must be new, and must have the same settings,
    /// window and producers as the saved device. The machine's vCPUs must exist, and none of them may be attached yet.
    /// `memory` and the window must have their saved contents. `features` are the features that the driver negotiated,
    /// and `queues` are the queues that the driver set up. `state` contains the device's positions in these queues. If
    /// the device was saved without a driver, `memory`, `features`, `queues` and `interrupt` are ignored.
    ///
    /// Events continue from their saved counts when vCPUs [attach](Vpmu::attach). The time between the save and the
    /// attachment does not count. If this host cannot count an event, the event is in the error state, and the driver
    /// gets a notice. A sampling host counter begins a new period. Times are measured with the guest's current TSC. If
    /// the TSC's frequency differs from the saved frequency, configuration space and metadata pages report the
    /// conversion for the new frequency. After every restore, the VMM must change the configuration space's generation,
    /// report a configuration change if the driver had set `DRIVER_OK`, and notify the control queue once
    /// ([`Vpmu::notify`]), because it may hold pending requests.
    ///
    /// The state is untrusted. Each part of it is checked like a request from the guest.
    ///
    /// # Errors
    /// [`RestoreError`]; the device is then still new.
    pub fn restore(
        &self,
        state: &SavedState,
        memory: impl Into<Memory>,
        features: u64,
        queues: &[QueueState],
        interrupt: Arc<dyn Interrupt>,
    ) -> Result<(), RestoreError> {
        let memory = memory.into();
        state.check_format()?;
        let driver = match state.driver {
            Some(_) => {
                self.check_driver(&memory, features, queues)?;
                Some(Driver { memory, features, queues, interrupt })
            }
            None => None,
        };
        // Call `catalogue` and `ask_guest_ips` before taking the lock, because the first reads the machine's statistics
        // and the second may run a guest.
        self.shared.backend.catalogue();
        if state.is_batched() {
            self.shared.backend.ask_guest_ips();
        }
        let mut control = self.shared.control.lock();
        if control.is_new() { control.restore(state, driver) } else { Err(RestoreError::InUse) }
    }

    /// Handles the driver's notification of the control queue or the event queue. For a notification of a vCPU's
    /// queue, that vCPU's thread calls [`VcpuSession::kick`] instead.
    ///
    /// Returns [`Turn::Unfinished`] if the turn ended before all requests were handled. The calling thread must
    /// then call this method again, after its other pending work.
    pub fn notify(&self, queue: u16) -> Turn {
        match queue {
            QUEUE_CONTROL => return self.serve_control(),
            QUEUE_EVENT => self.shared.notices.posted(),
            // A guest can send such notifications at any rate, so they are logged only as debug messages.
            _ => log::debug!("ignored a notification of queue {queue}: not the control or event queue"),
        }
        Turn::Done
    }

    fn serve_control(&self) -> Turn {
        // Call `catalogue` before taking the lock, because its first call reads the machine's statistics.
        self.shared.backend.catalogue();
        let serve = || {
            // The operator may wait. Because the lock is fair, the operator comes before the guest's next turn.
            self.shared.control.lock().serve()
        };
        let mut served = serve();
        if served.needs_guest_ips {
            self.shared.notices.deliver(served.signals());
            self.shared.backend.ask_guest_ips();
            served = serve();
        }
        self.shared.notices.deliver(served.signals());
        served.turn
    }

    // The operator.

    /// Returns the names of the events that the guest may open, in catalogue order. Call this only after the machine's
    /// vCPUs have been created and the machine knows which events it can count.
    #[must_use]
    pub fn guest_events(&self) -> Vec<String> {
        let entries = self.shared.backend.guest_entries();
        entries.map(|entry| entry.name().to_owned()).collect()
    }

    /// Opens a persistent event of the operator. Returns its id. Call this only after the machine's vCPUs have been
    /// created and the machine knows which events it can count. The vCPUs need not be [attached](Vpmu::attach) yet,
    /// because the event starts when its vCPU is attached.
    ///
    /// # Errors
    /// [`PersistError`]; the event was not opened.
    pub fn persist(&self, persist: &Persist) -> Result<u64, PersistError> {
        let backend = &self.shared.backend;
        if self.shared.shard(persist.vcpu).is_none() {
            return Err(PersistError::NoVcpu { vcpu: persist.vcpu, vcpus: backend.settings.vcpus });
        }
        let highest = backend.settings.limits.max_sample_rate;
        let request = open_request(persist, backend.catalogue(), highest)?;
        if self.shared.control.lock().needs_guest_ips(&request) {
            backend.ask_guest_ips();
        }
        self.shared.control_plane(|control| control.persist(persist, &request))
    }

    /// Returns every persistent event of the guest and the operator, by ascending id.
    #[must_use]
    pub fn persistent(&self) -> Vec<PersistentStatus> {
        match self.shared.backend.known_catalogue() {
            Some(_) => self.shared.control_plane(Control::statuses),
            // Without a catalogue, events cannot have been opened.
            None => Vec::new(),
        }
    }

    /// Ends a persistent event of the guest or the operator, and removes its ring.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`].
    pub fn end(&self, id: u64) -> Result<(), PersistError> {
        self.shared.control_plane(|control| control.end_persistent(id))
    }

    /// Returns a persistent event of the guest or the operator, with the records in its ring. Samples that
    /// the batched engine has not collected yet are written first. Call this before a reset if the ring is in guest
    /// memory, because a reset closes such an event.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`], [`PersistError::NoRing`], [`PersistError::Unreadable`].
    pub fn history(&self, id: u64) -> Result<History, PersistError> {
        // Parse the records without the lock.
        let held = self.shared.control_plane(|control| control.held(id))?;
        Ok(held.history())
    }

    /// Flushes `event`, or every persistent event if `event` is `None`. On return, the earlier samples and packets of
    /// the flushed events are in their rings and areas, and the readers are woken. The device finds some samples only
    /// at an exit. If a vCPU is in the guest and may have such samples, this method makes the vCPU leave the guest
    /// once.
    ///
    /// This method waits for those exits, so do not call it on a thread that handles them.
    ///
    /// # Errors
    /// [`FlushError`]: the first error if several events fail.
    pub fn flush(&self, event: Option<u64>) -> Result<(), FlushError> {
        let waiting = self.shared.flushes.begin();
        let ids = self.shared.control.lock().flushed(event);
        let ids = ids.ok_or_else(|| FlushError::NoEvent(event.unwrap_or(0)))?;
        let mut failed = None;
        let mut awaited = self.shared.control_plane(|control| control.begin_flush(&ids));
        awaited.retain(|visit| {
            let vcpu = visit.vcpu;
            let Err(source) = self.shared.backend.machine.kick(vcpu) else {
                return true;
            };
            // If the vCPU has already left the guest, a failed kick is not an error, because the thread may have ended.
            if !self.is_over(visit) {
                failed.get_or_insert(FlushError::Inside { vcpu, source });
            }
            false
        });
        self.await_exits(&awaited);
        drop(waiting);
        for id in ids {
            match self.shared.control_plane(|control| control.end_flush(id)) {
                // An event that was closed in the meantime needs no flush.
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(_) => {
                    failed.get_or_insert(FlushError::Failed(id));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits until the exits that end these visits are handled.
    fn await_exits(&self, visits: &BTreeSet<Visit>) {
        self.shared.flushes.wait(|| visits.iter().all(|visit| self.is_over(visit)));
    }

    /// Whether the exit that ends this visit is handled.
    fn is_over(&self, visit: &Visit) -> bool {
        let shard: Option<&Shard> = self.shared.shard(visit.vcpu);
        shard.is_none_or(|shard| shard.vcpu.visit() != Some(visit.number))
    }
}
