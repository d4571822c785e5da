//! The paravirtual PMU of a machine: made from its configuration, wired anew at every boot.

use std::sync::{Arc, OnceLock};

use kvm_ioctls::{IoEventAddress, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vpmu::{Engines, Limits, Settings, Vpmu, abi, host::PerfSource};

use super::{VmError, event};
use crate::arch::layout;
use crate::cli::Engine;
use crate::config::Config;
use crate::ctl::{Server, Socket};
use crate::devices::virtio_mmio::{Interrupt, QUEUE_NOTIFY, VirtioMmio};
use crate::devices::vpmu::{Carrier, Drain, DrainThread, VirtioPmu};
use crate::event_loop::Queues;
use crate::kvm;
use crate::operator::Operator;
use crate::pc::{self, Buses};
use crate::signal::{self, Threads};
use crate::stats::Statistics;

/// The device, its transport and its lines.
#[derive(Debug)]
pub(super) struct Pmu {
    pub(super) vpmu: Arc<Vpmu>,
    /// What the event loop serves of it.
    pub(super) queues: Queues,
    pub(super) operator: Arc<Operator>,
    /// Serves the control socket for as long as the machine is there.
    _server: Option<Server>,
    /// Drains the device for as long.
    _drain: DrainThread,
    interrupt: Arc<Interrupt>,
    transport: Arc<VirtioMmio>,
}

/// What the device learns from the machine that carries it.
pub(super) struct Parts<'a> {
    pub(super) memory: &'a GuestMemoryMmap,
    pub(super) window: Option<&'a GuestMemoryMmap>,
    pub(super) tsc_khz: u32,
    pub(super) stats: &'a Arc<Statistics>,
    pub(super) threads: &'a Arc<Threads>,
    pub(super) socket: Option<Socket>,
}

impl Pmu {
    /// The device that `config` describes, on `buses`.
    ///
    /// # Errors
    /// [`VmError`].
    pub(super) fn new(
        config: &Config,
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
            guest_ips: OnceLock::new(),
        };
        let settings = Settings {
            vcpus: u32::from(config.vcpus),
            tsc_khz: parts.tsc_khz,
            limits: limits(config),
            engines: match config.engine {
                Engine::Auto => Engines::Auto,
                Engine::Batched => Engines::Batched,
                Engine::Exit => Engines::Exit,
            },
        };
        let source = PerfSource::new(signal::kick_signal())?;
        let mut vpmu = Vpmu::new(settings, Arc::new(carrier), Box::new(source))?;
        if let Some(window) = parts.window {
            vpmu = vpmu.with_window(window.clone())?;
        }
        let vpmu = Arc::new(vpmu);
        let backend = VirtioPmu {
            vpmu: Arc::clone(&vpmu),
            window: if parts.window.is_some() {
                config.window
            } else {
                0
            },
        };
        let transport = pc::plug_vpmu(buses, backend, parts.memory, Arc::clone(&interrupt))?;
        let queues = Queues {
            control: Arc::new(event()?),
            notices: Arc::new(event()?),
            vpmu: Arc::clone(&vpmu),
        };
        let drain = DrainThread::start(drain, Arc::clone(&vpmu));
        let drain = drain.map_err(|e| VmError::Host("threads", e))?;
        let operator = Arc::new(Operator::new(config, &vpmu)?);
        let server = parts.socket.map(|socket| {
            let operator = Arc::clone(&operator);
            Server::start(socket, Box::new(move |request| operator.serve(request)))
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

    /// Connects it to a new VM.
    ///
    /// # Errors
    /// [`VmError::Kvm`].
    pub(super) fn wire(&self, vm: &VmFd) -> Result<(), VmError> {
        vm.register_irqfd(self.interrupt.line(), layout::VIRTIO_GSI)
            .map_err(kvm::KvmError::refused("wire an interrupt"))?;
        notification(vm, abi::QUEUE_CONTROL, &self.queues.control)?;
        notification(vm, abi::QUEUE_EVENT, &self.queues.notices)
    }

    /// The guest's driver is gone.
    pub(super) fn reset(&self) {
        self.transport.reset();
    }
}

/// What the guest may use up, so that it can have AUX areas as large as it is allowed.
fn limits(config: &Config) -> Limits {
    let usual = Limits::default();
    Limits {
        max_sample_rate: config.max_sample_rate,
        max_aux_pages: config.max_aux_pages,
        max_persistent: config.max_persistent,
        max_pages: usual.max_pages.max(config.max_aux_pages.saturating_mul(2)),
        ..usual
    }
}

/// Has KVM signal a queue's notifications instead of ending the run call.
fn notification(vm: &VmFd, queue: u16, event: &EventFd) -> Result<(), VmError> {
    let address = IoEventAddress::Mmio(layout::VIRTIO + QUEUE_NOTIFY);
    vm.register_ioevent(event, &address, u32::from(queue))
        .map_err(kvm::KvmError::refused("wire a queue notification"))?;
    Ok(())
}
