//! The paravirtual PMU of a machine. It is created from the machine's configuration, and connected to the VM of each
//! boot.

use std::io;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::{GuestMemoryMmap, GuestRegionCollection};
use vmm_sys_util::eventfd::EventFd;
use vpmu::host::{HostFiles, PerfSource};
use vpmu::orc::{OrcError, OrcTable};
use vpmu::{Engines, Memory, PersistSpec, QueueState, RestoreError, SaveError, Settings, Vpmu, abi};
use vpmu_kvm::{DrainTimer, KvmMachine, Statistics, Threads};

use super::images::open;
use super::{VmError, event};
use crate::arch::{kernel, layout};
use crate::board;
use crate::bus::Buses;
use crate::config::{Config, Engine};
use crate::confine::{Confinement, ThreadKind};
use crate::devices::virtio::queue_state;
use crate::devices::virtio_mmio::{Interrupt, Line, QUEUE_NOTIFY, SavedDriver, TransportError, VirtioMmio};
use crate::devices::vpmu::{DrainThread, Held, VirtioPmu};
use crate::event_loop::Queues;
use crate::host_kernel;
use crate::kvm;
use crate::memory::MemoryError;
use crate::operator::Operator;
use crate::recording::Recorder;
use crate::signal;
use crate::snapshot::dirty::{Tracker, Watched};
use crate::snapshot::{SavedPmu, SnapshotError};
use crate::vcpu::handlers;

/// The device, its transport and its lines.
#[derive(Debug)]
pub(super) struct Pmu {
    pub(super) vpmu: Arc<Vpmu>,
    /// The queues that the event loop serves.
    pub(super) queues: Queues,
    pub(super) operator: Arc<Operator>,
    /// Drains the device until the machine is dropped.
    drain: DrainThread,
    interrupt: Arc<Interrupt>,
    transport: Arc<VirtioMmio>,
    /// The events that the guest may open, if a report was requested.
    pub(super) events: Vec<String>,
}

/// The parts of the machine that the device uses.
pub(super) struct Parts<'a> {
    pub(super) memory: &'a GuestMemoryMmap,
    pub(super) window: Option<&'a GuestMemoryMmap>,
    pub(super) stats: &'a Arc<Statistics>,
    pub(super) threads: &'a Arc<Threads>,
    pub(super) confinement: &'a Confinement,
    pub(super) opened: Opened,
    /// Whether the host's samples have guest addresses.
    pub(super) guest_ips: bool,
    /// Marks the pages that the device writes, if --track-dirty was given.
    pub(super) tracker: Option<&'a Tracker>,
    /// The saved state, if the machine was restored.
    pub(super) saved: Option<&'a SavedPmu>,
}

/// Files that the PMU and the operator's events need. They are opened before confinement makes them unreachable.
#[derive(Debug)]
pub(super) struct Opened {
    files: HostFiles,
    pub(super) recorder: Recorder,
    /// The tables with which callers in the guest's kernel are found.
    orc: Option<OrcTable>,
}

impl Opened {
    /// Opens the files that `config` names, and reads the host's event descriptions.
    ///
    /// # Errors
    /// [`VmError::Operator`], [`VmError::Open`], [`VmError::NotFile`], [`VmError::Vmlinux`].
    pub(super) fn open(config: &Config) -> Result<Self, VmError> {
        if let Some(why) = host_kernel::lost_counts().filter(|_| config.hardware.events) {
            log::warn!("{why}; see perf.moved-hw of 'vmm check'");
        }
        Ok(Self {
            recorder: Operator::recorder(config)?,
            files: HostFiles::read(&config.hardware),
            orc: kernel_tables(config)?,
        })
    }

    /// Whether opening host counters for this machine takes `CAP_PERFMON`.
    pub(super) fn need_capability(&self, config: &Config) -> bool {
        self.files.need_capability(config.exit_traces())
    }
}

/// Reads the ORC tables of the guest's kernel from the file that `config` names for them, or else from the kernel itself
/// if a persistent event records callers.
fn kernel_tables(config: &Config) -> Result<Option<OrcTable>, VmError> {
    if let Some(path) = &config.vmlinux {
        let table = OrcTable::read(open("vmlinux", path)?);
        return table.map(Some).map_err(|source| VmError::Vmlinux { path: path.clone(), source });
    }
    let Some(path) = config.kernel.as_ref().filter(|_| config.persistent.iter().any(PersistSpec::has_call_graph))
    else {
        return Ok(None);
    };
    Ok(match OrcTable::read(open("kernel", path)?) {
        Ok(table) => Some(table),
        // Such kernels have frame pointers.
        Err(OrcError::NoTables | OrcError::Machine) => None,
        Err(_) if kernel::HAVE_FRAME_POINTERS => None,
        Err(error) => {
            let reason = vpmu_errors::chain(&error);
            log::warn!(
                "call chains lack callers in a kernel without frame pointers; use --vmlinux ({}: {reason})",
                path.display()
            );
            None
        }
    })
}

/// Disables hardware events if they would prevent VMs with a mediated PMU from starting, unless the configuration
/// requests hardware events.
pub(super) fn leave_to_mediated(config: &mut Config, mediated: Option<bool>) {
    if config.hardware.events && !config.policy.hardware.on(mediated) {
        config.hardware.events = false;
        config.hardware.left_to_mediated = true;
        log::warn!(
            "the guest gets no hardware events: this host's KVM has mediated PMUs, and Linux starts no VM with a \
             mediated PMU while a hardware event is open; --hardware-events opens hardware events anyway"
        );
    }
}

/// The device settings that `config` describes.
pub(crate) fn settings(config: &Config, tsc_khz: u32) -> Settings {
    Settings::new(u32::from(config.vcpus), tsc_khz)
        .with_limits(config.limits.device.clone())
        .with_engines(match config.engine {
            Engine::Auto => Engines::Auto,
            Engine::Batched => Engines::Batched,
            Engine::Exit => Engines::Exit,
        })
        .with_hardware(config.hardware.clone())
        .with_policy(config.policy.policy.clone())
}

impl Pmu {
    /// Creates the device from `settings` and `config`, and adds it to `buses`.
    ///
    /// # Errors
    /// [`VmError`].
    pub(super) fn new(
        config: &Config,
        settings: Settings,
        parts: Parts<'_>,
        buses: &mut Buses,
    ) -> Result<Self, VmError> {
        let interrupt = Arc::new(Interrupt::default());
        let drain = DrainTimer::new().map_err(|source| VmError::Host("timers", source))?;
        let drain = Arc::new(drain);
        let machine = KvmMachine {
            stats: Arc::clone(parts.stats),
            threads: Arc::clone(parts.threads),
            drain: Arc::clone(&drain),
            guest_ips: parts.guest_ips,
        };
        let confinement = parts.confinement;
        let Opened { files, recorder, orc } = parts.opened;
        let begin = confinement.begin(ThreadKind::Closer);
        let begin = || begin().map_err(io::Error::other);
        let source = PerfSource::confined(files, signal::kick_signal(), begin)?;
        let mut vpmu = Vpmu::new(settings, Arc::new(machine), Box::new(source))?;
        if let Some(orc) = orc {
            vpmu = vpmu.with_orc(orc)?;
        }
        if config.trace_handlers {
            vpmu = vpmu.with_aux_producers(vec![handlers::PRODUCER])?;
        }
        if let Some(window) = parts.window {
            vpmu = match parts.tracker {
                Some(tracker) => vpmu.with_window(watched(tracker, window)?)?,
                None => vpmu.with_window(window.clone())?,
            };
        }
        let memory = match parts.tracker {
            Some(tracker) => Memory::from(watched(tracker, parts.memory)?),
            None => Memory::from(parts.memory.clone()),
        };
        let vpmu = Arc::new(vpmu);
        log::info!("events that the guest may open: {}", config.policy.name());
        // Only the report needs the list. List the events at this point, because KVM's statistics no longer exist when
        // the report is written. Without a report, do not probe the events before a driver needs them, because opening
        // the first perf event on a host takes milliseconds.
        let events = match config.report {
            Some(_) => vpmu.guest_events(),
            None => Vec::new(),
        };
        let queues = Queues { control: Arc::new(event()?), notices: Arc::new(event()?), vpmu: Arc::clone(&vpmu) };
        let backend = VirtioPmu {
            vpmu: Arc::clone(&vpmu),
            interrupt: Arc::clone(&interrupt),
            control: Arc::clone(&queues.control),
            window: if parts.window.is_some() { config.window } else { 0 },
        };
        let transport = board::plug_vpmu(buses, backend, memory, Arc::clone(&interrupt))?;
        if let Some(saved) = parts.saved {
            restore(saved, &transport, &queues, &interrupt)?;
        }
        let drain = DrainThread::start(drain, Arc::clone(&vpmu), confinement)?;
        let operator = Arc::new(Operator::new(config, &vpmu, recorder)?);
        Ok(Self { vpmu, queues, operator, drain, interrupt, transport, events })
    }

    /// Connects the device's interrupt and notifications to a new VM.
    ///
    /// # Errors
    /// [`VmError::Kvm`].
    pub(super) fn wire(&self, vm: &Arc<VmFd>) -> Result<(), VmError> {
        self.interrupt
            .connect(Arc::new(KvmLine(Arc::clone(vm))))
            .map_err(|error| kvm::KvmError::refused("raise the PMU's interrupt")(error.into()))?;
        notification(vm, abi::QUEUE_CONTROL, &self.queues.control)?;
        notification(vm, abi::QUEUE_EVENT, &self.queues.notices)
    }

    /// Keeps the drain thread from accessing the device until the returned value is dropped.
    pub(super) fn hold(&self) -> Held<'_> {
        self.drain.hold()
    }

    /// Saves the device and its transport. When this returns, all samples so far are in guest memory or the window. The
    /// caller must copy both before the device is used again.
    ///
    /// # Errors
    /// [`SaveError`]; the device continues.
    pub(super) fn save(&self) -> Result<SavedPmu, SaveError> {
        let device = self.vpmu.save()?;
        // Save the transport after the device, because saving the device may raise the transport's interrupt.
        let transport = self.transport.save();
        Ok(SavedPmu { transport, device })
    }

    /// Resets the device after a boot has ended and the guest's driver is gone.
    pub(super) fn reset(&self) {
        self.transport.reset();
        self.interrupt.disconnect();
    }
}

/// `memory`, wrapped so that `tracker` marks the device's writes.
fn watched(tracker: &Tracker, memory: &GuestMemoryMmap) -> Result<GuestRegionCollection<Watched>, VmError> {
    let watched = tracker.watched(memory);
    Ok(watched.map_err(MemoryError::Place)?)
}

/// Errors from restoring the device.
#[derive(Debug, thiserror::Error)]
enum PmuError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Device(#[from] RestoreError),
    #[error("the transport and the device disagree on whether a driver was active")]
    Driver,
}

/// Restores the saved device. Also signals the eventfds of the control and event queues, so that the event loop
/// processes both queues once, because notifications may have been pending at the save. Call this before any vCPU runs.
///
/// # Errors
/// [`VmError::Snapshot`].
fn restore(
    saved: &SavedPmu,
    transport: &VirtioMmio,
    queues: &Queues,
    interrupt: &Arc<Interrupt>,
) -> Result<(), VmError> {
    let failed = |error: PmuError| SnapshotError::Pmu(error.into());
    take_place(saved, transport, &queues.vpmu, Arc::clone(interrupt)).map_err(failed)?;
    for queue in [&queues.control, &queues.notices] {
        queue.write(1).map_err(|source| VmError::Host("event descriptors", source))?;
    }
    Ok(())
}

fn take_place(
    saved: &SavedPmu,
    transport: &VirtioMmio,
    vpmu: &Vpmu,
    interrupt: Arc<Interrupt>,
) -> Result<(), PmuError> {
    let driver = transport.restore(&saved.transport)?;
    if driver.is_some() != saved.device.has_driver() {
        return Err(PmuError::Driver);
    }
    let driver = driver.unwrap_or_default();
    let SavedDriver { memory, features, queues } = driver;
    let queues: Vec<QueueState> = queues.iter().map(queue_state).collect();
    Ok(vpmu.restore(&saved.device, memory, features, &queues, interrupt)?)
}

/// The line of the PMU's interrupt in a VM.
///
/// KVM would raise an edge of an eventfd (irqfd) later, on a thread of its own: the program whose event overflowed could
/// then run on before it gets the signal for the overflow.
#[derive(Debug)]
struct KvmLine(Arc<VmFd>);

impl Line for KvmLine {
    fn edge(&self) -> io::Result<()> {
        self.0.set_irq_line(layout::VIRTIO_LINE, true)?;
        self.0.set_irq_line(layout::VIRTIO_LINE, false)?;
        Ok(())
    }
}

/// Makes KVM signal `event` for a queue's notifications, instead of returning from the run call.
fn notification(vm: &VmFd, queue: u16, event: &EventFd) -> Result<(), VmError> {
    let address = IoEventAddress::Mmio(layout::VIRTIO + QUEUE_NOTIFY);
    vm.register_ioevent(event, &address, u32::from(queue))
        .map_err(kvm::KvmError::refused("connect a queue's notifications"))?;
    Ok(())
}
