//! The device as a VMM sees it: its transport, its vCPUs, its operator.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use vm_memory::GuestMemoryBackend;
use zerocopy::IntoBytes;

use crate::abi::{
    COUNT_GUEST, COUNT_VCPU, Config, KIND_HARDWARE, KIND_SOFTWARE, QUEUE_CONTROL, QUEUE_EVENT,
    QUEUE_VCPU, VERSION,
};
use crate::backend::Backend;
use crate::clock::Clock;
use crate::control::{Control, Driver, Overlap};
use crate::errno::Errno;
use crate::flush::Visit;
use crate::machine::{Interrupt, Machine};
use crate::memory::Memory;
use crate::metrics::{ExitCounts, Metrics};
use crate::persistent::{History, Persist, PersistError, PersistentStatus, open_request};
use crate::producer::{AuxError, AuxProducer, AuxWriter};
use crate::queues::QueueState;
use crate::refusal::Refusal;
use crate::save::{RestoreError, SaveError, SavedState};
use crate::session::VcpuSession;
use crate::settings::{CountMode, LimitsError, Settings};
use crate::shard::{Shard, State};
use crate::shared::Shared;
use crate::source::Source;
use crate::window::Window;
use crate::work::Turn;

const MAX_VCPUS: u32 = (u16::MAX - QUEUE_VCPU) as u32;
/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;

/// Why the device cannot be made, started or joined.
#[derive(Debug, thiserror::Error)]
#[expect(
    clippy::error_impl_error,
    reason = "read with its module before it, as std's are"
)]
pub enum Error {
    /// Too few or too many vCPUs.
    #[error("a PMU device has 1 to {MAX_VCPUS} vCPUs, not {0}")]
    Vcpus(u32),
    /// No TSC frequency to make guest time of.
    #[error("the guest's TSC frequency is not known, so samples would have no time")]
    TscFrequency,
    /// A limit leaves nothing to use, or cannot be kept.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// The driver took a feature that was not offered, or left out `VIRTIO_F_VERSION_1`.
    #[error("the driver negotiated features {0:#x}, which this device cannot serve")]
    Features(u64),
    /// The transport has another number of queues.
    #[error("the PMU device has {expected} queues, the transport gave it {given}")]
    QueueCount {
        /// [`Vpmu::queue_count`].
        expected: usize,
        /// The transport's number.
        given: usize,
    },
    /// A queue's rings do not lie in guest memory.
    #[error("the driver set up queue {0} outside guest memory, or not at all")]
    Queue(usize),
    /// The window is not one region of whole pages.
    #[error("the window must be one region of whole pages, the first of them aligned")]
    Window,
    /// A producer's name or format is not valid, or another producer has the name.
    #[error("{0:?} cannot be an AUX producer: a name of its own, and a format from 128 on")]
    Producer(&'static str),
    /// The window lies where guest memory does.
    #[error("the window lies in guest memory")]
    WindowOverlaps,
    /// There is no such vCPU.
    #[error("the PMU device has no vCPU {0}")]
    NoVcpu(u32),
    /// Another session of this vCPU lives.
    #[error("vCPU {0} is attached already")]
    Attached(u32),
}

/// Why a flush is not whole. The rest has been shown.
#[derive(Debug, thiserror::Error)]
pub enum FlushError {
    /// There is no event with this id.
    #[error("there is no event {0}")]
    NoEvent(u64),
    /// The host gave the event up: its records until then have been shown.
    #[error("event {0} is in error")]
    Failed(u64),
    /// A vCPU that may hold samples could not be made to leave the guest.
    #[error("vCPU {vcpu} cannot be made to leave the guest")]
    Inside {
        /// Which one.
        vcpu: u32,
        /// The machine's error.
        #[source]
        source: io::Error,
    },
}

/// The device. Its methods may be called from any thread; the work of a vCPU's own thread goes through
/// a [`VcpuSession`].
#[derive(Debug)]
pub struct Vpmu {
    shared: Arc<Shared>,
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
        if !(1..=MAX_VCPUS).contains(&settings.vcpus) {
            return Err(Error::Vcpus(settings.vcpus));
        }
        settings.limits.check()?;
        let clock = Clock::new(settings.tsc_khz).ok_or(Error::TscFrequency)?;
        let backend = Backend::new(settings, clock, source, machine);
        Ok(Self {
            shared: Arc::new(Shared::new(backend)),
        })
    }

    /// The same device with a window: memory of the VMM's for rings that outlive a reset. It is one
    /// region of whole pages, outside the guest's RAM; its address is where the VMM maps it for the
    /// guest, as shared memory region [`SHM_WINDOW`](crate::abi::SHM_WINDOW). Set before any event is
    /// started.
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

    /// The same device with producers of the VMM's own, which guests open as traces
    /// ([`KIND_VMM_TRACE`](crate::abi::KIND_VMM_TRACE)): the first has number 0. Named before any driver
    /// is there.
    ///
    /// # Errors
    /// [`Error::Producer`].
    pub fn with_aux_producers(self, producers: Vec<AuxProducer>) -> Result<Self, Error> {
        for (index, producer) in producers.iter().enumerate() {
            let mut before = producers.iter().take(index);
            if !producer.is_sound() || before.any(|one| one.name == producer.name) {
                return Err(Error::Producer(producer.name));
            }
        }
        self.shared.backend.set_producers(producers);
        Ok(self)
    }

    // The VMM's own producers.

    /// The traces of a producer that are active on `vcpu` now, and not paused.
    #[must_use]
    pub fn aux_traces(&self, producer: u64, vcpu: u32) -> Vec<u64> {
        let shard = self.shared.shard(vcpu);
        shard.map_or_else(Vec::new, |shard| {
            self.shared
                .on(shard, |state| state.produced_for(producer, vcpu))
        })
    }

    /// Begins to write to the AUX area of a trace of the VMM's producers. Until the writer ends, nothing
    /// else writes there: packets of other traces that share the area are lost meanwhile, and counted.
    ///
    /// # Errors
    /// [`AuxError`]; [`AuxError::Nested`] while another writer has not ended.
    pub fn aux_begin(&self, trace: u64) -> Result<AuxWriter<'_>, AuxError> {
        AuxWriter::begin(self, trace)
    }

    // vCPUs.

    /// The calling thread runs `vcpu` from now on, until the session is dropped: guest TSC = host TSC +
    /// `tsc_offset`, wrapping. Events of the vCPU that counted on an earlier thread go on here.
    ///
    /// # Errors
    /// [`Error::NoVcpu`] for a vCPU that the device does not have, [`Error::Attached`] while another
    /// session of it lives.
    pub fn attach(&self, vcpu: u32, tsc_offset: u64) -> Result<VcpuSession, Error> {
        let shard = self.shared.shard(vcpu).ok_or(Error::NoVcpu(vcpu))?;
        if !shard.vcpu.take() {
            return Err(Error::Attached(vcpu));
        }
        let thread = self.shared.backend.source.thread();
        self.control(|control| control.attach(vcpu, thread, tsc_offset));
        Ok(VcpuSession::new(Arc::clone(&self.shared), vcpu))
    }

    /// Collects the samples that the host took while vCPUs ran on, one vCPU after the other, and writes
    /// them to the guest's rings. Called from a thread that is no vCPU's, about every ten milliseconds
    /// while [`Machine::draining`] asks for it.
    pub fn drain(&self) {
        self.shared.count_drain();
        for shard in self.shared.shards.iter() {
            self.shared.on(shard, State::collect);
            self.shared.notices.deliver(None);
        }
    }

    /// Exact exits of a vCPU by reason since the start.
    #[must_use]
    pub fn exits(&self, vcpu: u32) -> ExitCounts {
        let exits = self.shared.shard(vcpu).map(|shard| shard.vcpu.exits());
        exits.unwrap_or_default()
    }

    /// The device's totals since the start.
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

    /// Feature bits offered, `VIRTIO_F_VERSION_1` included.
    #[must_use]
    pub fn features(&self) -> u64 {
        VERSION_1 | self.shared.control.lock().offered()
    }

    /// Number of virtqueues: control, event, one per vCPU.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        usize::from(QUEUE_VCPU) + self.shared.shards.len()
    }

    /// Reads configuration space; bytes beyond it are zero.
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

    /// The driver has set `DRIVER_OK`: the device uses its memory and its `queues`, one for each index,
    /// until a reset, and reports used buffers by `interrupt`.
    ///
    /// # Errors
    /// [`Error`] for queues or features that cannot serve; the device stays inactive.
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

    /// Whether the device can serve a driver with these.
    fn check_driver(
        &self,
        memory: &Memory,
        features: u64,
        queues: &[QueueState],
    ) -> Result<(), Error> {
        if features & VERSION_1 == 0 || features & !self.features() != 0 {
            return Err(Error::Features(features));
        }
        if queues.len() != self.queue_count() {
            return Err(Error::QueueCount {
                expected: self.queue_count(),
                given: queues.len(),
            });
        }
        for (index, queue) in queues.iter().enumerate() {
            let needed = index == usize::from(QUEUE_CONTROL);
            if (needed || queue.ready) && !queue.is_sound(&memory.view()) {
                return Err(Error::Queue(index));
            }
        }
        Ok(())
    }

    /// Each virtqueue as it is now, by its index; the default for one that no driver uses. Its indices
    /// are those after the work that has been done: to go on elsewhere, stop notifying first.
    #[must_use]
    pub fn queue_states(&self) -> Vec<QueueState> {
        self.shared.control.lock().queue_states()
    }

    /// Forgets the driver and its memory, which is not touched afterwards, and closes every event but the
    /// persistent ones that need neither: those go on.
    pub fn reset(&self) {
        self.shared.control.lock().reset();
    }

    // Its state outside its host.

    /// The state of the device, for [`Vpmu::restore`]. Every sample, packet and count up to now is in guest
    /// memory, or the window, when this returns: the VMM copies both afterwards, and until then calls nothing
    /// of the device. The device itself goes on as if nothing had been, but that traces report the exit
    /// that lasts as cut.
    ///
    /// Every vCPU has left the guest, its exit handled; none is made to leave.
    ///
    /// # Errors
    /// [`SaveError`]; the device goes on.
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

    /// Makes this device what another was when it was [saved](Vpmu::save): a new one of the same settings,
    /// window and producers, whose machine has its vCPUs, but none of them a thread yet. `memory` and the
    /// window hold what they held then. `features` are those that the driver negotiated, `queues` where it
    /// set them up; how far the device had come on them is part of the state. Without a driver then, none
    /// of the three is looked at.
    ///
    /// Events count on from the saved counts as vCPUs [attach](Vpmu::attach); the time between is not
    /// theirs. What this host does not count is in error, and the driver gets a notice. A host counter
    /// that samples begins a new period. Times are those of the guest's TSC as it is now: where its
    /// frequency is another, configuration space and metadata pages have the new conversion, and the VMM
    /// reports a change of the configuration. The VMM then notifies the control queue once
    /// ([`Vpmu::notify`]): requests may wait there.
    ///
    /// The state may come from anyone: each part of it is checked as a request of the guest's is.
    ///
    /// # Errors
    /// [`RestoreError`]; the device is as new then.
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
                Some(Driver {
                    memory,
                    features,
                    queues,
                    interrupt,
                })
            }
            None => None,
        };
        // Before the lock is taken: the machine is asked for its statistics, and may run a guest.
        self.shared.backend.catalogue();
        if state.is_batched() {
            self.shared.backend.ask_guest_ips();
        }
        let mut control = self.shared.control.lock();
        match control.is_new() {
            true => control.restore(state, driver),
            false => Err(RestoreError::InUse),
        }
    }

    /// The driver notified the control or the event queue. A vCPU's queue is served by the vCPU's
    /// thread: [`VcpuSession::kick`].
    ///
    /// [`Turn::Unfinished`]: the turn is over, and requests are left. The VMM serves whoever else
    /// waits for this thread, then notifies again.
    pub fn notify(&self, queue: u16) -> Turn {
        match queue {
            QUEUE_CONTROL => return self.serve_control(),
            QUEUE_EVENT => self.shared.notices.posted(),
            // A guest can do this as often as it likes.
            _ => log::debug!("queue {queue} was notified, but not by a vCPU of this device"),
        }
        Turn::Done
    }

    fn serve_control(&self) -> Turn {
        // Made before the lock is taken: the machine is asked for its statistics.
        self.shared.backend.catalogue();
        let mut served = self.shared.control.lock().serve();
        if served.needs_guest_ips {
            self.shared.notices.deliver(served.signals());
            self.shared.backend.ask_guest_ips();
            served = self.shared.control.lock().serve();
        }
        self.shared.notices.deliver(served.signals());
        served.turn
    }

    // The operator.

    /// Names of the events that the guest may open, in the order of its catalogue. Called when the machine
    /// has its vCPUs and can tell what it counts.
    #[must_use]
    pub fn guest_events(&self) -> Vec<String> {
        let entries = self.shared.backend.guest_entries();
        entries.map(|entry| entry.name().to_owned()).collect()
    }

    /// Starts a persistent event of the operator's; its id. Called when the machine has its vCPUs and
    /// can tell what it counts, be it before their threads [attach](Vpmu::attach): the event begins
    /// when its vCPU does.
    ///
    /// # Errors
    /// [`PersistError`]; nothing has been started then.
    pub fn persist(&self, persist: &Persist) -> Result<u64, PersistError> {
        let backend = &self.shared.backend;
        if self.shared.shard(persist.vcpu).is_none() {
            return Err(PersistError::NoVcpu {
                vcpu: persist.vcpu,
                vcpus: backend.settings.vcpus,
            });
        }
        let highest = backend.settings.limits.max_sample_rate;
        let request = open_request(persist, backend.catalogue(), highest)?;
        if self.shared.control.lock().needs_guest_ips(&request) {
            backend.ask_guest_ips();
        }
        self.control(|control| control.persist(persist, &request))
    }

    /// Every persistent event, the guest's too, by ascending id.
    #[must_use]
    pub fn persistent(&self) -> Vec<PersistentStatus> {
        match self.shared.backend.known_catalogue() {
            Some(_) => self.control(Control::statuses),
            // Nobody has opened anything yet.
            None => Vec::new(),
        }
    }

    /// Ends a persistent event, the guest's too; its ring goes with it.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`].
    pub fn end(&self, id: u64) -> Result<(), PersistError> {
        self.control(|control| control.end_persistent(id))
    }

    /// A persistent event, the guest's too, with the records in its ring. Samples that the batched engine
    /// has not collected yet are written first. A reset closes the events that have a ring in guest
    /// memory: call this before it.
    ///
    /// # Errors
    /// [`PersistError::NoSuch`], [`PersistError::NoRing`], [`PersistError::Unreadable`].
    pub fn history(&self, id: u64) -> Result<History, PersistError> {
        // The records are looked through without the lock.
        let held = self.control(|control| control.held(id))?;
        Ok(held.history())
    }

    /// When this returns, the earlier samples and packets of an event (`None`: of every persistent
    /// event) are in its ring and area, and its readers are woken. vCPUs that run the guest meanwhile
    /// are made to leave it once where an event may have samples there that only an exit shows.
    ///
    /// Waits for them: not to be called where their exits are held up.
    ///
    /// # Errors
    /// [`FlushError`]; of several events, the first that has one.
    pub fn flush(&self, event: Option<u64>) -> Result<(), FlushError> {
        let waiting = self.shared.flushes.begin();
        let ids = self.shared.control.lock().flushed(event);
        let ids = ids.ok_or_else(|| FlushError::NoEvent(event.unwrap_or(0)))?;
        let mut failed = None;
        let mut awaited = self.control(|control| control.begin_flush(&ids));
        awaited.retain(|&Visit { vcpu, .. }| {
            let kicked = self.shared.backend.machine.kick(vcpu);
            let going = kicked.is_ok();
            if let Err(source) = kicked {
                failed.get_or_insert(FlushError::Inside { vcpu, source });
            }
            going
        });
        self.await_exits(&awaited);
        drop(waiting);
        for id in ids {
            match self.control(|control| control.end_flush(id)) {
                // Closed meanwhile: then it was flushed.
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(_) => {
                    failed.get_or_insert(FlushError::Failed(id));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Waits until these visits are over, their exits handled.
    fn await_exits(&self, visits: &BTreeSet<Visit>) {
        let over = |&Visit { vcpu, number }: &Visit| {
            let shard: Option<&Shard> = self.shared.shard(vcpu);
            shard.is_none_or(|shard| shard.vcpu.visit() != Some(number))
        };
        self.shared.flushes.wait(|| visits.iter().all(over));
    }

    /// Acts on the control plane, then delivers the notices that this made due.
    pub(crate) fn control<T>(&self, act: impl FnOnce(&mut Control) -> T) -> T {
        let result = act(&mut self.shared.control.lock());
        self.shared.notices.deliver(None);
        result
    }
}
