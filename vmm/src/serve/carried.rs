//! The PMU of another VMM's machine: first its parts, then, when the vCPUs' threads are known, the device that counts on
//! them.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::Pid;
use vpmu::host::{HostFiles, PerfSource};
use vpmu::{Memory, QueueState, RemoteVcpu, Settings, Turn, Vpmu, abi};
use vpmu_kvm::{DrainTimer, KvmMachine, Statistics};

use super::ServeError;
use super::doorbell::Doorbell;
use super::foreign;
use super::interrupts::Interrupts;
use super::service::{Calls, Service};
use super::threads::{VcpuThreads, Vmm};
use super::window::Window;
use crate::config::Config;
use crate::confine::{Confinement, Inherited, Needs, ThreadKind};
use crate::ctl::{Reply, Request, Server, Socket};
use crate::devices::vpmu::DrainThread;
use crate::operator::{Occasion, Operator};
use crate::recording::Recorder;
use crate::signal::{EndingSignals, kick_signal};

/// The parts of the device, opened while this process has its privileges.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) config: Config,
    pub(super) settings: Settings,
    pub(super) files: HostFiles,
    pub(super) recorder: Recorder,
    pub(super) socket: Option<Socket>,
    pub(super) inherited: Inherited,
    /// Whether this host's samples of a guest have the guest's addresses.
    pub(super) guest_ips: bool,
    pub(super) signals: EndingSignals,
    /// The connection to the VMM, to end it at a signal.
    pub(super) stream: UnixStream,
}

/// The sessions of the vCPUs. A vCPU whose thread has ended has none.
#[derive(Debug)]
pub(super) struct Vcpus(Vec<Mutex<Option<RemoteVcpu>>>);

impl Vcpus {
    fn of(&self, vcpu: usize) -> Option<MutexGuard<'_, Option<RemoteVcpu>>> {
        // A session is usable after a panic: each of its calls begins anew.
        self.0.get(vcpu).map(|session| session.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stops counting on a vCPU whose thread has ended.
    pub(super) fn detach(&self, vcpu: usize) {
        let session = self.of(vcpu).and_then(|mut session| session.take());
        if session.is_some() {
            log::info!("the thread of vCPU {vcpu} has ended");
        }
    }
}

/// The device, and the threads that serve it.
#[derive(Debug)]
pub(super) struct Device {
    // Fields are dropped in this order: first the threads, then what they use.
    _ctl: Option<Server>,
    _drain: DrainThread,
    service: Service,
    operator: Arc<Operator>,
    vcpus: Arc<Vcpus>,
    doorbell: Doorbell,
    vpmu: Arc<Vpmu>,
}

/// The device before and after the vCPUs' threads are known.
#[derive(Debug)]
pub(super) enum Carried {
    Prepared(Box<Prepared>),
    Device(Box<Device>),
    /// The device could not be started.
    Failed,
}

impl Prepared {
    /// Number of vCPUs.
    pub(super) fn vcpus(&self) -> u32 {
        self.settings.vcpus
    }

    /// Starts the device. Drops this process's privileges.
    fn start(self, process: Pid, threads: &VcpuThreads, window: &Window) -> Result<Device, ServeError> {
        let Self { config, settings, files, recorder, socket, inherited, guest_ips, signals, stream } = self;
        let vcpus = threads.ids.len();
        let stats = Arc::new(Statistics::new(settings.vcpus));
        let by_kvm = threads.vmm != Vmm::QemuTcg;
        if by_kvm {
            stats.begin(foreign::statistics(process, vcpus));
        }
        let offset = |vcpu| foreign::tsc_offset(process, vcpu).filter(|_| by_kvm);
        let offsets: Vec<Option<u64>> = (0..vcpus).map(offset).collect();
        if offsets.contains(&None) {
            log::warn!("the offset of the guest's TSC is not known, so the times of records are the host's");
        }
        let doorbell = Doorbell::new(threads, process, &stream).map_err(ServeError::Doorbell)?;
        let service =
            Service::prepare(threads, signals, stream).map_err(|source| ServeError::Host("descriptors", source))?;
        let ids = threads.ids.iter().map(|id| id.cast_unsigned()).collect();
        let needs = Needs {
            vcpus: config.vcpus,
            restarts: false,
            restored_pmu: false,
            remote: true,
            reads_calls: doorbell.reads_calls(),
            settings: Some(&settings),
            perfmon: true,
            recordings: recorder.directory(),
            socket: socket.as_ref().and_then(Socket::directory),
        };
        let confinement = Confinement::drop_privileges(&config.confinement, &needs, inherited)?.on_threads(ids)?;

        let drain = Arc::new(DrainTimer::new().map_err(|source| ServeError::Host("timers", source))?);
        let guest_ips = guest_ips && by_kvm;
        // Nothing kicks a vCPU: none of them is ever inside a run call of this process.
        let threads_to_kick = Arc::new(vpmu_kvm::Threads::new(0, kick_signal()));
        let machine = KvmMachine { stats, threads: threads_to_kick, drain: Arc::clone(&drain), guest_ips };
        let begin = confinement.begin(ThreadKind::Closer);
        let source = PerfSource::remote(files, || begin().map_err(io::Error::other))?;
        let vpmu = Vpmu::new(settings, Arc::new(machine), Box::new(source))?;
        let memory = window.map().map_err(ServeError::Window)?;
        let vpmu = Arc::new(vpmu.with_window(memory)?);
        let sessions = (0..).zip(&threads.ids).zip(&offsets).map(|((vcpu, &id), offset)| {
            vpmu.attach_thread(vcpu, id, offset.unwrap_or(0)).map(|session| Mutex::new(Some(session)))
        });
        let vcpus = Arc::new(Vcpus(sessions.collect::<Result<_, _>>()?));
        let drain = DrainThread::start(drain, Arc::clone(&vpmu), &confinement)?;
        let operator = Arc::new(Operator::new(&config, &vpmu, recorder)?);
        let serves = Arc::clone(&operator);
        let serve = move |request: Request, files| match request {
            Request::Snapshot { .. } => Reply::Error("the machine belongs to another VMM: save it there".to_owned()),
            request => serves.serve(request, files),
        };
        let ctl = socket.map(|socket| Server::start(socket, Box::new(serve), &confinement)).transpose()?;
        let service = service.start(Arc::clone(&vpmu), Arc::clone(&vcpus), &confinement)?;
        confinement.filter_main()?;
        log::info!("counting on the threads {:?} of process {}", threads.ids, threads.process);
        Ok(Device { _ctl: ctl, _drain: drain, service, operator, vcpus, doorbell, vpmu })
    }
}

impl Carried {
    /// Finds the threads of the vCPUs and starts the device, unless it has started.
    ///
    /// # Errors
    /// [`ServeError::Threads`]: the threads are not known, and a later call may find them. After any other error, there is
    /// no device.
    pub(super) fn attach(&mut self, process: Pid, window: &Window) -> Result<(), ServeError> {
        let threads = match self {
            Self::Prepared(prepared) => VcpuThreads::find(process, prepared.vcpus())?,
            Self::Device(_) => return Ok(()),
            Self::Failed => return Err(ServeError::NoDevice),
        };
        if let Self::Prepared(prepared) = std::mem::replace(self, Self::Failed) {
            *self = Self::Device(Box::new(prepared.start(process, &threads, window)?));
        }
        Ok(())
    }

    fn device(&self) -> Option<&Device> {
        match self {
            Self::Device(device) => Some(device),
            _ => None,
        }
    }

    /// The features that the device offers. Zero without a device, so that drivers refuse the function.
    pub(super) fn features(&self) -> u64 {
        self.device().map_or(0, |device| device.vpmu.features())
    }

    pub(super) fn read_config(&self, offset: u64, data: &mut [u8]) {
        match self.device() {
            Some(device) => device.vpmu.read_config(offset, data),
            None => data.fill(0),
        }
    }

    /// Passes a driver's queues to the device.
    ///
    /// # Errors
    /// The driver's setup is not valid.
    pub(super) fn activate(
        &self,
        memory: Memory,
        features: u64,
        queues: &[QueueState],
        interrupts: Arc<Interrupts>,
    ) -> Result<(), ServeError> {
        let device = self.device().ok_or(ServeError::NoDevice)?;
        Ok(device.vpmu.activate(memory, features, queues, interrupts)?)
    }

    /// Drops the driver.
    pub(super) fn reset(&self) {
        if let Some(device) = self.device() {
            device.vpmu.reset();
        }
    }

    /// Serves a driver's notification of `queue`.
    pub(super) fn notify(&self, queue: u16) {
        let Some(device) = self.device() else { return };
        let Some(vcpu) = queue.checked_sub(abi::QUEUE_VCPU) else {
            device.service.call(if queue == abi::QUEUE_CONTROL { Calls::Control } else { Calls::Notices });
            return;
        };
        // The driver's rule: a vCPU notifies its own queue only (SPEC.md, VPMU-G-2-1).
        let Some(mut session) = device.vcpus.of(vcpu.into()) else { return };
        if let Some(session) = &mut *session
            && session.kick(queue) == Turn::Unfinished
        {
            log::debug!("vCPU {vcpu} sent more commands than one notification may execute");
        }
    }

    /// Counts the marks that a store of `value` means.
    pub(super) fn mark(&mut self, value: u32) {
        let Self::Device(device) = self else { return };
        let Device { doorbell, vcpus, .. } = &mut **device;
        doorbell.marks(value, |vcpu, value| {
            if let Some(mut session) = vcpus.of(vcpu)
                && let Some(session) = &mut *session
            {
                session.mark(value);
            }
        });
    }

    /// The guest has put the doorbell at `address`.
    pub(super) fn place_doorbell(&mut self, address: u64) {
        if let Self::Device(device) = self
            && let Err(error) = device.doorbell.place(address)
        {
            log::error!("marks are lost: KVM does not record stores to {address:#x}: {error}");
        }
    }

    /// Writes the recording, before a reset makes the device drop the guest's rings.
    pub(super) fn record_reset(&self) {
        if let Some(device) = self.device() {
            device.operator.record(Occasion::Reset);
        }
    }

    /// Writes the recording at the end. Returns the signal that ended the connection, if one did.
    pub(super) fn end(&self) -> Option<i32> {
        let device = self.device()?;
        if let Some(recorded) = device.operator.record(Occasion::End) {
            log::info!("{} samples of {} events are in {}", recorded.samples, recorded.events, recorded.file.display());
        }
        device.vpmu.reset();
        device.service.signal()
    }
}
