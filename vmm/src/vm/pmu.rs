//! The paravirtual PMU of a machine: made from its configuration, wired again at every boot.

use std::io;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vpmu::host::{HostFiles, PerfSource};
use vpmu::{Engines, Settings, Vpmu, abi};

use super::{VmError, event};
use crate::arch::layout;
use crate::board::{self, Buses};
use crate::cli::Engine;
use crate::config::Config;
use crate::confine::{Confinement, ThreadKind};
use crate::ctl::{Server, Socket};
use crate::devices::virtio_mmio::{Interrupt, QUEUE_NOTIFY, VirtioMmio};
use crate::devices::vpmu::{Carrier, Drain, DrainThread, VirtioPmu};
use crate::event_loop::Queues;
use crate::host_kernel;
use crate::kvm;
use crate::operator::Operator;
use crate::recording::Recorder;
use crate::signal::{self, Threads};
use crate::stats::Statistics;

/// The device, its transport and its lines.
#[derive(Debug)]
pub(super) struct Pmu {
    pub(super) vpmu: Arc<Vpmu>,
    /// The queues that the event loop serves.
    pub(super) queues: Queues,
    pub(super) operator: Arc<Operator>,
    /// Serves the control socket while the machine exists.
    _server: Option<Server>,
    /// Drains the device while the machine exists.
    _drain: DrainThread,
    interrupt: Arc<Interrupt>,
    transport: Arc<VirtioMmio>,
}

/// The machine's parts that the device uses.
pub(super) struct Parts<'a> {
    pub(super) memory: &'a GuestMemoryMmap,
    pub(super) window: Option<&'a GuestMemoryMmap>,
    pub(super) stats: &'a Arc<Statistics>,
    pub(super) threads: &'a Arc<Threads>,
    pub(super) confinement: &'a Confinement,
    pub(super) opened: Opened,
    /// Whether the host's samples have guest addresses.
    pub(super) guest_ips: bool,
}

/// Files of the PMU and its operator, opened before they become unreachable.
#[derive(Debug)]
pub(super) struct Opened {
    files: HostFiles,
    pub(super) recorder: Recorder,
    pub(super) socket: Option<Socket>,
}

impl Opened {
    /// Opens the files that `config` names, and the host's event descriptions.
    ///
    /// # Errors
    /// [`VmError::Operator`], [`VmError::Socket`].
    pub(super) fn open(config: &Config) -> Result<Self, VmError> {
        if let Some(why) = host_kernel::lost_counts().filter(|_| config.hardware.events) {
            log::warn!("{why}; 'vmm check' has perf.moved-hw");
        }
        let listen = |path| Socket::listen(path, config.user);
        Ok(Self {
            recorder: Operator::recorder(config)?,
            socket: config.ctl.as_deref().map(listen).transpose()?,
            files: HostFiles::read(&config.hardware),
        })
    }
}

/// Disables hardware events where that lets VMs with a mediated PMU start, unless they were
/// requested.
pub(super) fn leave_to_mediated(config: &mut Config, mediated: Option<bool>) {
    if config.hardware.events && !config.policy.hardware.on(mediated) {
        config.hardware.events = false;
        config.hardware.left_to_mediated = true;
        log::warn!(
            "no guest gets hardware events: this host's KVM has mediated PMUs, and Linux starts no VM with \
             one while such an event is open; --hardware-events opens them all the same"
        );
    }
}

/// The settings of the device that `config` describes.
pub(super) fn settings(config: &Config, tsc_khz: u32) -> Settings {
    Settings {
        vcpus: u32::from(config.vcpus),
        tsc_khz,
        limits: config.limits.device.clone(),
        engines: match config.engine {
            Engine::Auto => Engines::Auto,
            Engine::Batched => Engines::Batched,
            Engine::Exit => Engines::Exit,
        },
        hardware: config.hardware.clone(),
        policy: config.policy.policy.clone(),
    }
}

impl Pmu {
    /// Adds the device of `settings` and `config` to `buses`.
    ///
    /// # Errors
    /// [`VmError`].
    pub(super) fn new(
        config: &Config,
        settings: Settings,
        parts: Parts<'_>,
        buses: &mut Buses,
    ) -> Result<Self, VmError> {
        let interrupt = Arc::new(Interrupt::new(event()?));
        let drain = Arc::new(Drain::default());
        let carrier = Carrier {
            interrupt: Arc::clone(&interrupt),
            stats: Arc::clone(parts.stats),
            threads: Arc::clone(parts.threads),
            drain: Arc::clone(&drain),
            guest_ips: parts.guest_ips,
        };
        let confinement = parts.confinement;
        let Opened {
            files,
            recorder,
            socket,
        } = parts.opened;
        let begin = confinement.begin(ThreadKind::Closer);
        let begin = || begin().map_err(io::Error::other);
        let source = PerfSource::confined(files, signal::kick_signal(), begin)?;
        let mut vpmu = Vpmu::new(settings, Arc::new(carrier), Box::new(source))?;
        if let Some(window) = parts.window {
            vpmu = vpmu.with_window(window.clone())?;
        }
        let vpmu = Arc::new(vpmu);
        // Query it now: the report at the end of the run comes after KVM's statistics are gone.
        let events = vpmu.guest_events();
        log::info!(
            "the guest may open {} events: {}",
            events.len(),
            config.policy.name()
        );
        let queues = Queues {
            control: Arc::new(event()?),
            notices: Arc::new(event()?),
            vpmu: Arc::clone(&vpmu),
        };
        let backend = VirtioPmu {
            vpmu: Arc::clone(&vpmu),
            control: Arc::clone(&queues.control),
            window: if parts.window.is_some() {
                config.window
            } else {
                0
            },
        };
        let transport = board::plug_vpmu(buses, backend, parts.memory, Arc::clone(&interrupt))?;
        let drain = DrainThread::start(drain, Arc::clone(&vpmu), confinement)?;
        let operator = Arc::new(Operator::new(config, &vpmu, recorder)?);
        let server = socket.map(|socket| {
            let operator = Arc::clone(&operator);
            let serve = move |request, file| operator.serve(request, file);
            Server::start(socket, Box::new(serve), confinement)
        });
        Ok(Self {
            vpmu,
            queues,
            operator,
            _server: server.transpose()?,
            _drain: drain,
            interrupt,
            transport,
        })
    }

    /// Connects the device to a new VM.
    ///
    /// # Errors
    /// [`VmError::Kvm`].
    pub(super) fn wire(&self, vm: &VmFd) -> Result<(), VmError> {
        vm.register_irqfd(self.interrupt.line(), layout::VIRTIO_GSI)
            .map_err(kvm::KvmError::refused("wire an interrupt"))?;
        notification(vm, abi::QUEUE_CONTROL, &self.queues.control)?;
        notification(vm, abi::QUEUE_EVENT, &self.queues.notices)
    }

    /// Resets the device after its driver is gone.
    pub(super) fn reset(&self) {
        self.transport.reset();
    }
}

/// Makes KVM signal a queue's notifications instead of ending the run call.
fn notification(vm: &VmFd, queue: u16, event: &EventFd) -> Result<(), VmError> {
    let address = IoEventAddress::Mmio(layout::VIRTIO + QUEUE_NOTIFY);
    vm.register_ioevent(event, &address, u32::from(queue))
        .map_err(kvm::KvmError::refused("wire a queue notification"))?;
    Ok(())
}
