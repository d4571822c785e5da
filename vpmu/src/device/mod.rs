//! The device as a VMM sees it: the lock, and the vCPUs' entries and exits.

mod flush;
mod persistent;
mod transport;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub use self::flush::FlushError;
use self::flush::Flushes;
use crate::abi::QUEUE_VCPU;
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
    /// The window is not one region of whole pages.
    #[error("the window must be one region of whole pages, the first of them aligned")]
    Window,
    /// The window lies where guest memory does.
    #[error("the window lies in guest memory")]
    WindowOverlaps(#[source] vm_memory::GuestRegionCollectionError),
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
    flushes: Flushes,
    state: Mutex<State>,
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
        let state = State::new(settings.clone(), clock);
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
            flushes: Flushes::default(),
            state: Mutex::new(state),
        })
    }

    /// A vCPU's thread introduces itself, before the vCPU first runs there:
    /// guest TSC = host TSC + `tsc_offset`, wrapping. After a restart of the machine another thread does
    /// so: what counts on the vCPU goes on there.
    ///
    /// # Errors
    /// [`Error::NoVcpu`] for a vCPU that the device does not have.
    pub fn attach(&self, vcpu: u32, tsc_offset: u64) -> Result<(), Error> {
        self.vcpu(vcpu).ok_or(Error::NoVcpu(vcpu))?;
        let thread = self.source.thread();
        self.with_state(|state, host| state.attach(host, vcpu, thread, tsc_offset));
        Ok(())
    }

    /// A vCPU's thread is about to end, and does not enter any more. Events that are started from now on
    /// wait for the thread that [attaches](Vpmu::attach) next; those that count there go on then too.
    pub fn detach(&self, vcpu: u32) {
        if let Some(on) = self.vcpu(vcpu) {
            // Whoever opens a counter on the thread holds the lock.
            let state = self.locked();
            on.detach();
            drop(state);
        }
    }

    /// Right before the run call, on the vCPU's thread; [`Vpmu::leave`] follows it, whatever becomes of
    /// the call.
    pub fn enter(&self, vcpu: u32) {
        if let Some(on) = self.vcpu(vcpu) {
            // Before the thread's time is read: what packets take is no time of the guest's.
            if on.take_awaited() {
                self.with_state(|state, host| state.enter(host, vcpu));
            }
            on.enter(&*self.source);
            self.let_flushes_by();
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
            self.with_state(|state, host| state.leave(host, vcpu, &exit, left, regs));
        }
        on.handled();
        self.tell_flushes();
    }

    /// Collects the samples that the host took while vCPUs ran on, and writes them to the guest's
    /// rings. Called from a thread that is no vCPU's, about every ten milliseconds while
    /// [`Machine::draining`] asks for it.
    pub fn drain(&self) {
        self.with_state(|state, host| state.collect(host));
    }

    /// A 32-bit write to the doorbell by `vcpu`, on its thread.
    pub fn mark(&self, vcpu: u32, value: u32, regs: &mut dyn Registers) {
        if self.vcpu(vcpu).is_none() {
            return;
        }
        self.marks.fetch_add(1, Ordering::Relaxed);
        self.with_state(|state, host| state.mark(host, vcpu, value, regs));
    }

    /// Exact exits by reason since the start.
    #[must_use]
    pub fn exits(&self, vcpu: u32) -> ExitCounts {
        self.vcpu(vcpu).map(Vcpu::exits).unwrap_or_default()
    }

    /// What the device did since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let mut metrics = self.locked().totals();
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

    /// Acts on the state, and delivers what notices that made due.
    fn with_state<T>(&self, act: impl FnOnce(&mut State, &Host<'_>) -> T) -> T {
        self.serve(|state, host| (act(state, host), false))
    }

    /// Acts on the state, delivers what notices that made due, and raises one interrupt if any of it
    /// calls for one, as `act` says beside its result: after the lock is let go, for the machine has
    /// locks of its own.
    fn serve<T>(&self, act: impl FnOnce(&mut State, &Host<'_>) -> (T, bool)) -> T {
        let (result, interrupt) = {
            let mut state = self.locked();
            let (result, served) = act(&mut state, &self.host());
            let Delivered(noticed) = state.deliver_notices();
            (result, served || noticed)
        };
        if interrupt {
            self.interrupts.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = self.machine.interrupt() {
                log::warn!("the interrupt could not be raised: {error}");
            }
        }
        result
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

    fn locked(&self) -> MutexGuard<'_, State> {
        // Each change of the state is complete in itself; a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
