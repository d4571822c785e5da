//! The machine: put together in the order of the boot, run to its end, and asked what it did.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::Killable;
use vpmu::{Engines, Limits, Settings, Vpmu, abi, host::PerfSource};

use crate::arch::{acpi, boot, cpuid, kernel, layout, regs};
use crate::cli::Engine;
use crate::config::Config;
use crate::devices::console::Patience;
use crate::devices::progress::Progress;
use crate::devices::virtio_mmio::{Interrupt, QUEUE_NOTIFY};
use crate::devices::vpmu::{Carrier, DrainTimer};
use crate::event_loop::{self, Console, Queues};
use crate::exit::{End, Ending};
use crate::kvm;
use crate::memory;
use crate::pc;
use crate::signal::{self, EndingSignals};
use crate::stats::Stats;
use crate::terminal;
use crate::vcpu::{self, RunPage, Shared, Vcpu};

/// Why there is no machine, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A file named in the configuration.
    #[error("cannot open the {what} {path}")]
    Open {
        /// What it is for.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// A directory or a device where a file is needed.
    #[error("the {what} {path} is not a file")]
    NotFile {
        /// What it is for.
        what: &'static str,
        /// Which path.
        path: PathBuf,
    },
    /// The kernel.
    #[error("the kernel {path}")]
    Kernel {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: kernel::KernelError,
    },
    /// KVM itself.
    #[error(transparent)]
    Kvm(#[from] kvm::KvmError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// What the kernel boots with.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// The ACPI tables.
    #[error("cannot write the ACPI tables")]
    Acpi(#[source] vm_memory::GuestMemoryError),
    /// The state that vCPUs start in.
    #[error("cannot set a vCPU up")]
    Registers(#[from] regs::RegisterError),
    /// Their CPUID leaves.
    #[error("cannot set a vCPU's CPUID up")]
    Cpuid(#[source] vmm_sys_util::fam::Error),
    /// The devices.
    #[error(transparent)]
    Devices(#[from] pc::PlugError),
    /// The paravirtual PMU's host side.
    #[error("the host's perf events cannot serve the PMU; --no-vpmu leaves it out")]
    PerfSource(#[from] vpmu::host::Error),
    /// The paravirtual PMU.
    #[error("cannot make the PMU device; --no-vpmu leaves it out")]
    Vpmu(#[from] vpmu::Error),
    /// A descriptor or a thread.
    #[error("the host has no more {0}")]
    Host(&'static str, #[source] io::Error),
    /// Signals.
    #[error(transparent)]
    Signals(#[from] signal::SignalError),
    /// The terminal.
    #[error("cannot make the terminal raw")]
    Terminal(#[source] io::Error),
    /// The event loop.
    #[error(transparent)]
    EventLoop(#[from] event_loop::LoopError),
    /// A vCPU.
    #[error(transparent)]
    Vcpu(#[from] vcpu::VcpuError),
    /// A thread went away without a word: a mistake of ours.
    #[error("the run ended without a reason")]
    NoReason,
}

/// A machine before its first instruction.
#[derive(Debug)]
pub struct Vm {
    // The order is that of the drop: vCPUs go before the memory that they run in.
    vcpus: Vec<Vcpu>,
    signals: EndingSignals,
    console: Console,
    queues: Option<Queues>,
    shared: Arc<Shared>,
    stats: Arc<Vec<Option<Stats>>>,
    memory: GuestMemoryMmap,
    _vm: VmFd,
}

/// A machine whose run has ended.
#[derive(Debug)]
pub struct Ran {
    /// How.
    pub ending: Result<Ending, VmError>,
    /// From the first entry into the guest to the end.
    pub wall: Duration,
    /// From the first entry until the guest said that init is reached.
    pub boot: Option<Duration>,
    /// The PMU, unless left out.
    pub vpmu: Option<Arc<Vpmu>>,
    /// KVM's statistics of each vCPU, where there are some.
    pub stats: Arc<Vec<Option<Stats>>>,
    /// Guest memory, still mapped.
    pub memory: GuestMemoryMmap,
}

fn open(what: &'static str, path: &Path) -> Result<File, VmError> {
    let error = |source| VmError::Open {
        what,
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(error)?;
    if !file.metadata().map_err(error)?.is_file() {
        return Err(VmError::NotFile {
            what,
            path: path.to_owned(),
        });
    }
    Ok(file)
}

fn event() -> Result<EventFd, VmError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
        .map_err(|source| VmError::Host("event descriptors", source))
}

impl Vm {
    /// The machine that `config` describes.
    ///
    /// # Errors
    /// [`VmError`], whatever does not come together.
    pub fn new(config: &Config) -> Result<Self, VmError> {
        let mut kernel_file = open("kernel", &config.kernel)?;
        let mut initramfs = match &config.initramfs {
            Some(path) => Some(open("initramfs", path)?),
            None => None,
        };
        let kvm = kvm::open(config.vcpus)?;
        let memory = memory::allocate(config.memory_mib)?;
        let kernel = kernel::load(&memory, &mut kernel_file).map_err(|source| VmError::Kernel {
            path: config.kernel.clone(),
            source,
        })?;
        boot::write(&memory, &kernel, initramfs.as_mut(), &config.cmdline)?;
        let machine = acpi::Machine {
            vcpus: config.vcpus,
            virtio: config.vpmu,
        };
        acpi::write(&memory, &machine).map_err(VmError::Acpi)?;
        regs::write_tables(&memory)?;

        let vm = kvm::create(&kvm)?;
        memory::register(&vm, &memory)?;
        let (fds, tsc_khz) = make_vcpus(&kvm, &vm, config.vcpus)?;
        if let Some(first) = fds.first() {
            regs::enter(first, kernel.entry)?;
        }
        let stats: Arc<Vec<_>> = Arc::new(fds.iter().map(open_stats).collect());

        signal::install_kick()?;
        let end = Arc::new(End::new().map_err(|e| VmError::Host("event descriptors", e))?);
        let progress = Arc::new(Progress::default());
        let mut buses = pc::Buses::default();
        let signals = EndingSignals::new()?;
        let patience = Patience {
            end: Arc::clone(&end),
            signals: signals.try_clone()?,
        };
        let console = pc::plug_console(&vm, &mut buses, patience)?;
        pc::plug_power(&mut buses, &end, &progress)?;
        let mut queues = None;
        if config.vpmu {
            let line = event()?;
            vm.register_irqfd(&line, layout::VIRTIO_GSI)
                .map_err(kvm::KvmError::refused("wire an interrupt"))?;
            let interrupt = Arc::new(Interrupt::new(line));
            let drain = DrainTimer::new().map_err(|e| VmError::Host("timers", e))?;
            let drain = Arc::new(drain);
            let carrier = Carrier {
                interrupt: Arc::clone(&interrupt),
                stats: Arc::clone(&stats),
                drain: Arc::clone(&drain),
                guest_ips: OnceLock::new(),
            };
            let settings = Settings {
                vcpus: u32::from(config.vcpus),
                tsc_khz,
                limits: limits(config),
                engines: match config.engine {
                    Engine::Auto => Engines::Auto,
                    Engine::Batched => Engines::Batched,
                    Engine::Exit => Engines::Exit,
                },
            };
            let source = PerfSource::new(signal::kick_signal())?;
            let vpmu = Arc::new(Vpmu::new(settings, Arc::new(carrier), Box::new(source))?);
            pc::plug_vpmu(&mut buses, &vpmu, &memory, interrupt)?;
            queues = Some(Queues {
                control: notification(&vm, abi::QUEUE_CONTROL)?,
                notices: notification(&vm, abi::QUEUE_EVENT)?,
                vpmu,
                drain,
            });
        }
        let shared = Arc::new(Shared {
            ports: buses.ports,
            memory: buses.memory,
            vpmu: queues.as_ref().map(|queues| Arc::clone(&queues.vpmu)),
            end,
            progress,
        });
        let can_sync = kvm::syncs_registers(&kvm);
        let mut vcpus = Vec::with_capacity(fds.len());
        for (index, fd) in (0u32..).zip(fds) {
            let page = RunPage::map(&fd, vm.run_size())?;
            vcpus.push(Vcpu::new(index, fd, page, can_sync, Arc::clone(&shared)));
        }
        Ok(Self {
            vcpus,
            signals,
            console,
            queues,
            shared,
            stats,
            memory,
            _vm: vm,
        })
    }

    /// Runs the guest until it ends, or someone ends it.
    #[must_use]
    pub fn run(self) -> Ran {
        let shared = self.shared;
        let start = Instant::now();
        let ending = run_threads(
            self.vcpus,
            self.signals,
            self.console,
            self.queues,
            &shared.end,
        );
        let wall = start.elapsed();
        if let Some(vpmu) = &shared.vpmu {
            vpmu.reset();
        }
        Ran {
            ending,
            wall,
            boot: shared.progress.boot_time(),
            vpmu: shared.vpmu.clone(),
            stats: self.stats,
            memory: self.memory,
        }
    }
}

/// The vCPUs, each with its CPUID, and the guest's TSC frequency in kHz.
fn make_vcpus(kvm: &Kvm, vm: &VmFd, count: u8) -> Result<(Vec<VcpuFd>, u32), VmError> {
    let supported = kvm::supported_cpuid(kvm)?;
    let mut fds = Vec::with_capacity(usize::from(count));
    let mut tsc_khz = 0;
    for index in 0..count {
        let fd = vm
            .create_vcpu(u64::from(index))
            .map_err(kvm::KvmError::refused("create a vCPU"))?;
        tsc_khz = fd
            .get_tsc_khz()
            .map_err(kvm::KvmError::refused("tell the TSC frequency"))?;
        let cpu = cpuid::Cpu {
            index,
            count,
            tsc_khz,
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
        };
        let leaves = cpuid::leaves(&supported, &cpu).map_err(VmError::Cpuid)?;
        fd.set_cpuid2(&leaves)
            .map_err(kvm::KvmError::refused("take our CPUID leaves"))?;
        regs::prepare(&fd)?;
        fds.push(fd);
    }
    Ok((fds, tsc_khz))
}

fn open_stats(vcpu: &VcpuFd) -> Option<Stats> {
    Stats::open(vcpu)
        .inspect_err(|error| log::info!("this KVM has no statistics: {error}"))
        .ok()
}

/// What the guest may use up, so that it can have AUX areas as large as it is allowed.
fn limits(config: &Config) -> Limits {
    let usual = Limits::default();
    Limits {
        max_sample_rate: config.max_sample_rate,
        max_aux_pages: config.max_aux_pages,
        max_pages: usual.max_pages.max(config.max_aux_pages.saturating_mul(2)),
        ..usual
    }
}

/// Has KVM signal a queue's notifications instead of ending the run call.
fn notification(vm: &VmFd, queue: u16) -> Result<EventFd, VmError> {
    let event = event()?;
    let address = IoEventAddress::Mmio(layout::VIRTIO + QUEUE_NOTIFY);
    vm.register_ioevent(&event, &address, u32::from(queue))
        .map_err(kvm::KvmError::refused("wire a queue notification"))?;
    Ok(event)
}

fn run_threads(
    vcpus: Vec<Vcpu>,
    signals: EndingSignals,
    console: Console,
    queues: Option<Queues>,
    end: &Arc<End>,
) -> Result<Ending, VmError> {
    let raw = terminal::Raw::new().map_err(VmError::Terminal)?;
    let mut threads = Vec::with_capacity(vcpus.len());
    let mut failed = None;
    for (index, vcpu) in vcpus.into_iter().enumerate() {
        let thread = thread::Builder::new().name(format!("vcpu{index}"));
        match thread.spawn(move || vcpu.run()) {
            Ok(thread) => threads.push(thread),
            Err(source) => {
                failed = Some(VmError::Host("threads", source));
                break;
            }
        }
    }
    if failed.is_none() {
        failed = event_loop::run(end, signals, console, queues)
            .err()
            .map(VmError::from);
    }
    if failed.is_some() {
        // No vCPU enters the guest any more; the reason is ours, and this one only a token.
        end.announce(Ok(Ending::ByHand));
    }
    stop(threads);
    drop(raw);
    match failed {
        Some(error) => Err(error),
        None => Ok(end.take().ok_or(VmError::NoReason)??),
    }
}

/// The end is announced: whoever is in the guest is called out of it.
fn stop(threads: Vec<JoinHandle<()>>) {
    for thread in &threads {
        if let Err(error) = thread.kill(signal::kick_signal()) {
            log::debug!("a vCPU thread is gone already: {error}");
        }
    }
    for thread in threads {
        if thread.join().is_err() {
            log::debug!("a vCPU thread panicked, and has said so");
        }
    }
}
