//! The device as a VMM sees it: the lock, the transport's calls, the vCPUs' entries and exits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;
use zerocopy::IntoBytes;

use crate::abi::{
    COUNT_GUEST, Config, F_AUX, F_DOORBELL, F_RING, F_TASK_PAGE, QUEUE_CONTROL, QUEUE_EVENT,
    QUEUE_VCPU, VERSION,
};
use crate::catalogue::Catalogue;
use crate::clock::Clock;
use crate::event::Host;
use crate::machine::{Exit, Machine, Registers};
use crate::metrics::{ExitCounts, Metrics};
use crate::notice::Delivered;
use crate::settings::Settings;
use crate::source::Source;
use crate::state::State;
use crate::vcpu::{Need, Vcpu};

/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;
const FEATURES: u64 = VERSION_1 | 1 << F_RING | 1 << F_TASK_PAGE | 1 << F_DOORBELL | 1 << F_AUX;
const MAX_VCPUS: u32 = (u16::MAX - QUEUE_VCPU) as u32;

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
    /// The ring limit is no power of two.
    #[error("the limit of ring pages must be a power of two, not {0}")]
    RingPages(u32),
    /// The limit of AUX pages is no power of two.
    #[error("the limit of AUX pages must be a power of two, not {0}")]
    AuxPages(u32),
    /// The limit of samples is zero.
    #[error("the limit of samples a second must not be zero: events that sample would never")]
    SampleRate,
    /// The driver took a feature that was not offered, or left out `VIRTIO_F_VERSION_1`.
    #[error("the driver negotiated features {0:#x}, which this device cannot serve")]
    Features(u64),
    /// The transport has another number of queues.
    #[error("the PMU device has {expected} queues, the transport gave it {given}")]
    QueueCount {
        /// What [`Vpmu::queue_count`] says.
        expected: usize,
        /// What came.
        given: usize,
    },
    /// A queue's rings do not lie in guest memory.
    #[error("the driver set up queue {0} outside guest memory, or not at all")]
    Queue(usize),
    /// There is no such vCPU.
    #[error("the PMU device has no vCPU {0}")]
    NoVcpu(u32),
}

/// The device. Methods may be called from any thread unless they say otherwise.
#[derive(Debug)]
pub struct Vpmu {
    settings: Settings,
    clock: Clock,
    machine: Arc<dyn Machine>,
    source: Box<dyn Source>,
    vcpus: Vec<Vcpu>,
    catalogue: OnceLock<Catalogue>,
    /// The machine's answer, once it has been asked.
    guest_ips: OnceLock<bool>,
    interrupts: AtomicU64,
    marks: AtomicU64,
    lock: Mutex<Locked>,
}

/// What the lock guards.
#[derive(Debug)]
struct Locked {
    state: Option<State>,
    /// Of activations that are over.
    past: Metrics,
    next_id: u64,
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
        if !settings.limits.max_ring_pages.is_power_of_two() {
            return Err(Error::RingPages(settings.limits.max_ring_pages));
        }
        if !settings.limits.max_aux_pages.is_power_of_two() {
            return Err(Error::AuxPages(settings.limits.max_aux_pages));
        }
        if settings.limits.max_sample_rate == 0 {
            return Err(Error::SampleRate);
        }
        let clock = Clock::new(settings.tsc_khz).ok_or(Error::TscFrequency)?;
        Ok(Self {
            vcpus: (0..settings.vcpus).map(|_| Vcpu::default()).collect(),
            settings,
            clock,
            machine,
            source,
            catalogue: OnceLock::new(),
            guest_ips: OnceLock::new(),
            interrupts: AtomicU64::new(0),
            marks: AtomicU64::new(0),
            lock: Mutex::new(Locked {
                state: None,
                past: Metrics::default(),
                next_id: 1,
            }),
        })
    }

    /// Feature bits offered, `VIRTIO_F_VERSION_1` included.
    #[must_use]
    pub fn features(&self) -> u64 {
        FEATURES
    }

    /// Number of virtqueues: control, event, one per vCPU.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        usize::from(QUEUE_VCPU) + self.vcpus.len()
    }

    /// Reads configuration space; bytes beyond it are zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        let entries = self.catalogue().entries().len();
        let limits = &self.settings.limits;
        let config = Config {
            version: VERSION.into(),
            vcpus: self.settings.vcpus.into(),
            max_events: limits.max_events.into(),
            max_ring_pages: limits.max_ring_pages.into(),
            catalogue_len: u32::try_from(entries).unwrap_or(u32::MAX).into(),
            count_mode: COUNT_GUEST.into(),
            time_mult: self.clock.mult.into(),
            time_shift: self.clock.shift.into(),
            tsc_khz: self.settings.tsc_khz.into(),
            max_sample_rate: limits.max_sample_rate.into(),
            max_aux_pages: limits.max_aux_pages.into(),
            ..Config::default()
        };
        data.fill(0);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(rest) = config.as_bytes().get(offset..) {
            let len = rest.len().min(data.len());
            data[..len].copy_from_slice(&rest[..len]);
        }
    }

    /// The driver has set `DRIVER_OK`.
    ///
    /// # Errors
    /// [`Error`] for queues or features that cannot serve; the device stays inactive.
    pub fn activate(
        &self,
        memory: GuestMemoryMmap,
        features: u64,
        queues: Vec<Queue>,
    ) -> Result<(), Error> {
        self.reset();
        if features & VERSION_1 == 0 || features & !FEATURES != 0 {
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
            if (needed || queue.ready()) && !queue.is_valid(&memory) {
                return Err(Error::Queue(index));
            }
        }
        let mut locked = self.locked();
        locked.state = Some(State::new(
            self.settings.clone(),
            self.clock,
            memory,
            features,
            queues,
            locked.next_id,
        ));
        Ok(())
    }

    /// Drops every event, ring and host descriptor; guest memory is not touched afterwards.
    pub fn reset(&self) {
        let mut locked = self.locked();
        if let Some(mut state) = locked.state.take() {
            state.drop_events(&self.host());
            if state.collecting {
                self.machine.draining(false);
            }
            locked.next_id = state.next_id;
            locked.past.add(&state.totals());
        }
    }

    /// A vCPU's thread introduces itself, before the vCPU first runs:
    /// guest TSC = host TSC + `tsc_offset`, wrapping.
    ///
    /// # Errors
    /// [`Error::NoVcpu`] for a vCPU that the device does not have.
    pub fn attach(&self, vcpu: u32, tsc_offset: u64) -> Result<(), Error> {
        let on = self.vcpu(vcpu).ok_or(Error::NoVcpu(vcpu))?;
        on.attach(self.source.thread(), tsc_offset);
        Ok(())
    }

    /// Right before the run call, on the vCPU's thread.
    pub fn enter(&self, vcpu: u32) {
        if let Some(on) = self.vcpu(vcpu) {
            // Before the thread's time is read: what packets take is no time of the guest's.
            if on.take_awaited() {
                self.with_state(|state, host| {
                    state.enter(host, vcpu);
                    false
                });
            }
            on.enter(&*self.source);
        }
    }

    /// Right after the run call, on the vCPU's thread. `exit` may be an
    /// [`ExitReason`](crate::ExitReason) alone; traces then tell no more of it.
    pub fn leave(&self, vcpu: u32, exit: impl Into<Exit>, regs: &mut dyn Registers) {
        let Some(on) = self.vcpu(vcpu) else {
            return;
        };
        let exit = exit.into();
        // At once: what the VMM does from here on is time outside the guest.
        let left = on.needs(Need::Traced).then(|| on.guest_tsc(&*self.source));
        on.leave(exit.reason, &*self.source);
        if [
            Need::Exits,
            Need::Traced,
            Need::HostSamples,
            Need::Throttled,
        ]
        .into_iter()
        .any(|need| on.needs(need))
        {
            self.with_state(|state, host| {
                state.leave(host, vcpu, &exit, left, regs);
                false
            });
        }
    }

    /// The driver notified `queue`. A vCPU queue is served on the thread of the vCPU that
    /// notified, `vcpu`, before that vCPU runs on; the other queues from any thread.
    pub fn notify(&self, queue: u16, vcpu: Option<u32>) {
        if queue == QUEUE_CONTROL {
            return self.serve_control();
        }
        self.with_state(|state, host| match (queue, vcpu) {
            (QUEUE_EVENT, _) => false,
            (queue, Some(by)) if self.vcpu(by).is_some() => {
                let of = u32::from(queue - QUEUE_VCPU);
                let Some(on) = self.vcpu(of) else {
                    return false;
                };
                on.count_kick();
                state.serve_commands(host, of, by)
            }
            _ => {
                log::warn!("queue {queue} was notified, but not by a vCPU of this device");
                false
            }
        });
    }

    /// Collects the samples that the host took while vCPUs ran on, and writes them to the guest's
    /// rings. Called from a thread that is no vCPU's, about every ten milliseconds while
    /// [`Machine::draining`] asks for it.
    pub fn drain(&self) {
        self.with_state(|state, host| {
            state.collect(host);
            false
        });
    }

    /// A 32-bit write to the doorbell by `vcpu`, on its thread.
    pub fn mark(&self, vcpu: u32, value: u32, regs: &mut dyn Registers) {
        if self.vcpu(vcpu).is_none() {
            return;
        }
        self.marks.fetch_add(1, Ordering::Relaxed);
        self.with_state(|state, host| {
            state.mark(host, vcpu, value, regs);
            false
        });
    }

    /// Exact exits by reason since the start.
    #[must_use]
    pub fn exits(&self, vcpu: u32) -> ExitCounts {
        self.vcpu(vcpu).map(Vcpu::exits).unwrap_or_default()
    }

    /// What the device did since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let locked = self.locked();
        let mut metrics = locked.past.clone();
        if let Some(state) = &locked.state {
            metrics.add(&state.totals());
        }
        metrics.kicks = self.vcpus.iter().map(Vcpu::kicks).collect();
        metrics.interrupts = self.interrupts.load(Ordering::Relaxed);
        metrics.marks = self.marks.load(Ordering::Relaxed);
        metrics
    }

    /// Whether a sampling event is active on `vcpu`, so that registers are about to be asked for.
    #[must_use]
    pub fn wants_registers(&self, vcpu: u32) -> bool {
        self.vcpu(vcpu)
            .is_some_and(|on| on.needs(Need::HostSamples) || on.needs(Need::Registers))
    }

    /// Acts on the state, delivers what notices that made due, and raises one interrupt if any
    /// of it calls for one: after the lock is let go, for the machine has locks of its own.
    fn with_state(&self, act: impl FnOnce(&mut State, &Host<'_>) -> bool) {
        let interrupt = {
            let mut locked = self.locked();
            let Some(state) = &mut locked.state else {
                return;
            };
            let served = act(state, &self.host());
            let Delivered(noticed) = state.deliver_notices();
            served || noticed
        };
        if interrupt {
            self.interrupts.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = self.machine.interrupt() {
                log::warn!("the interrupt could not be raised: {error}");
            }
        }
    }

    fn serve_control(&self) {
        let catalogue = self.catalogue();
        let mut asks_guest_ips = false;
        self.with_state(|state, host| {
            let served = state.serve_control(host, catalogue);
            asks_guest_ips = served.asks_guest_ips;
            served.interrupt
        });
        if asks_guest_ips {
            // The machine may try out a guest for it: were the lock held, every vCPU that needs the
            // device would stand still as long.
            self.guest_ips
                .get_or_init(|| self.machine.reports_guest_ips());
            self.with_state(|state, host| state.serve_control(host, catalogue).interrupt);
        }
    }

    fn host(&self) -> Host<'_> {
        Host {
            guest_ips: self.guest_ips.get().copied(),
            source: &*self.source,
            machine: &*self.machine,
            vcpus: &self.vcpus,
        }
    }

    fn vcpu(&self, index: u32) -> Option<&Vcpu> {
        self.vcpus.get(index as usize)
    }

    /// Asked for late, when the machine has its vCPUs and can tell what it counts.
    fn catalogue(&self) -> &Catalogue {
        self.catalogue
            .get_or_init(|| Catalogue::new(&*self.source, &*self.machine, self.settings.vcpus))
    }

    fn locked(&self) -> MutexGuard<'_, Locked> {
        // Each change of the state is complete in itself; a panic elsewhere does not spoil it.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
