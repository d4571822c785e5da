//! The machine: builds it, runs it to its end, and returns the results.
//!
//! Devices, memory and the window last for the whole run. Each boot of the guest gets a new KVM VM.

mod boot;
mod error;
mod images;
mod pmu;
mod snapshot;

use std::fs::File;
use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use vpmu::Vpmu;
use vpmu_kvm::Statistics;
use vpmu_kvm::probe::{GuestIps, Sampling};

pub use self::error::VmError;
pub(crate) use self::pmu::settings;

use self::boot::{Boot, Threads};
use self::images::Images;
use self::pmu::{Opened, Parts, Pmu};
use self::snapshot::Control;
use crate::arch::clock::GuestClock;
use crate::arch::layout;
use crate::arch::platform;
use crate::arch::state::Saver;
use crate::board;
use crate::bucket::Bucket;
use crate::bus::Buses;
use crate::config::{Config, Engine, OnReset};
use crate::confine::{Confined, Confinement, Inherited, Needs};
use crate::ctl::{Recorded, Socket};
use crate::devices::console::{ConsoleBytes, StallPolicy};
use crate::devices::progress::Progress;
use crate::devices::serial::Console;
use crate::event_loop::{EventLoop, Stopped};
use crate::exit::{Ending, StopLatch};
use crate::footprint::Footprint;
use crate::host_kernel;
use crate::kvm;
use crate::machine::Machine;
use crate::memory::{self, Registration};
use crate::operator::Occasion;
use crate::signal::{self, EndingSignals};
use crate::snapshot::dirty::Tracker;
use crate::snapshot::mailbox::Mailbox;
use crate::snapshot::{Facts, SnapshotError};
use crate::terminal;
use crate::vcpu::{Gate, Shared};

/// A machine before its first instruction.
#[derive(Debug)]
pub struct Vm {
    // Fields are dropped in this order, so the vCPUs are dropped before the memory in which they run.
    boot: Option<Boot>,
    vcpus: Threads,
    images: Images,
    config: Config,
    kvm: Kvm,
    signals: EndingSignals,
    console: Console,
    control: Control,
    pmu: Option<Pmu>,
    shared: Arc<Shared>,
    stats: Arc<Statistics>,
    /// The clock of the first boot. Later boots continue it.
    clock: GuestClock,
    memory: GuestMemoryMmap,
    window: Option<GuestMemoryMmap>,
    /// Tracks the pages written since the last snapshot, if --track-dirty was given.
    tracker: Option<Tracker>,
    recorded: Option<Recorded>,
    resets_delayed: u64,
    confinement: Confinement,
    footprint: Footprint,
}

/// Totals of what the limits held back: delayed resets, skipped recordings and dropped console output. Also has the
/// total of the console output that was written.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeldBack {
    /// Resets that were delayed.
    pub resets_delayed: u64,
    /// Number of recordings at resets that were skipped.
    pub recordings_left_out: u64,
    /// Console output.
    pub console: ConsoleBytes,
}

/// The result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// The end of the run.
    pub ending: Result<Ending, VmError>,
    /// Time from the call of [`Vm::run`] to the end of the run.
    pub wall: Duration,
    /// Time from the first guest entry until init reported that it is running.
    pub boot: Option<Duration>,
    /// Number of times that the guest booted.
    pub boots: u64,
    /// The last recording, if anything was recorded.
    pub recorded: Option<Recorded>,
    /// Effects of the guest's limits.
    pub held_back: HeldBack,
    /// The name of the tier from which the operator's lists start. `list` if there is no tier.
    pub policy: &'static str,
    /// The events that the guest could open, if a report was requested.
    pub events: Vec<String>,
    /// The PMU, unless disabled.
    pub vpmu: Option<Arc<Vpmu>>,
    /// KVM's statistics of each vCPU, if this KVM has them.
    pub stats: Arc<Statistics>,
    /// Guest memory, still mapped.
    pub memory: GuestMemoryMmap,
    /// The privileges that remained to the process.
    pub confined: Confined,
    /// Measures the memory use of the VMM itself.
    pub footprint: Footprint,
}

/// The directory in which results of probing the host are stored. They are valid until the host reboots or reloads KVM.
const KNOWN_HOST: &str = "/run/vpmu";

fn event() -> Result<EventFd, VmError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|source| VmError::Host("event descriptors", source))
}

impl Vm {
    /// Builds the machine that `config` describes. Opens files, then drops all privileges that the machine does not
    /// need, and then starts the threads that run with the guest. Threads that this function starts before it drops
    /// privileges have ended when it returns.
    ///
    /// # Errors
    /// [`VmError`] of any step.
    pub fn new(mut config: Config, inherited: Inherited) -> Result<Self, VmError> {
        pmu::leave_to_mediated(&mut config, host_kernel::mediated_pmu());
        Confinement::prepare(&config.confinement)?;
        // `GuestIps::begin` runs small guests concurrently with the next steps, unless `KNOWN_HOST` has a result.
        let asks = config.vpmu && config.engine == Engine::Auto;
        let known = Path::new(KNOWN_HOST);
        let guest_ips = asks.then(|| GuestIps::begin(Some(known), Sampling::QUICK)).transpose();
        let guest_ips = guest_ips.map_err(|e| VmError::Host("threads", e))?;
        let mut images = Images::open(&config)?;
        let open = |directory| crate::snapshot::open(directory, &config.bases, config.owners());
        let restored = config.restore.as_deref().map(open).transpose()?;
        if let Some(restored) = &restored
            && restored.facts != Facts::from(&config)
        {
            return Err(SnapshotError::Changed.into());
        }
        let opened = config.vpmu.then(|| Opened::open(&config)).transpose()?;
        let listen = |path| Socket::listen(path, config.confinement.user);
        let socket = config.ctl.as_deref().map(listen).transpose()?;
        let footprint = Footprint::open();
        let kvm = kvm::open(&platform::HOST, config.vcpus)?;
        let saver = socket.as_ref().map(|_| Saver::new(&kvm)).transpose();
        let saver = saver.map_err(VmError::Saver)?;
        let file = restored.as_ref().map(|it| &it.memory);
        let (memory, window) = memories(&config, file)?;
        let machine = Machine::from(&config);
        let reaches = reached(&memory, window.as_ref());
        let track = config.track_dirty;
        let base = restored.as_ref().map(|it| it.id);
        let tracker = track.then(|| Tracker::new(&reaches, base));
        for diff in restored.iter().flat_map(|it| &it.diffs) {
            diff.apply(&reaches)?;
        }
        let ram = [&memory];
        let make = || Boot::new(&kvm, &machine, (&ram, track), None);
        let boot = match &restored {
            Some(restored) => {
                let mut boot = make()?;
                boot.restore(&kvm, &restored.state)?;
                boot
            }
            None => {
                // KVM waits for an SRCU grace period for each memory slot. Load the images during these waits.
                let both = concurrently(make, || images.load(&memory));
                let (boot, entry) = both.map_err(|e| VmError::Host("threads", e))?;
                let (boot, entry) = (boot?, entry?);
                boot.enter_at(entry)?;
                boot
            }
        };
        // Threads inherit the signal mask, so block the signals before starting any thread that runs with the guest.
        let signals = EndingSignals::new()?;
        // The window's slots follow the slots of the RAM. Register the window on another thread, in parallel with the
        // next steps, because nothing needs its slots before the guest runs.
        let window_slot = window.as_ref().map(|window| {
            let first = u32::try_from(memory.num_regions()).unwrap_or(u32::MAX);
            Registration::begin(Arc::clone(&boot.vm), window.clone(), first, track)
        });
        let window_slot = window_slot.transpose();
        let window_slot = window_slot.map_err(|e| VmError::Host("threads", e))?;
        let stats = Arc::new(Statistics::new(config.vcpus.into()));
        stats.begin(boot.stats());
        let mut settings = config.vpmu.then(|| pmu::settings(&config, boot.clock.khz()));
        if let Some(settings) = &mut settings {
            Confinement::fit_descriptors(settings, config.limits.host_counters_asked)?;
        }
        let guest_ips = guest_ips.is_some_and(GuestIps::answer);

        let needs = Needs {
            vcpus: config.vcpus,
            restarts: config.on_reset == OnReset::Restart,
            restored_pmu: restored.is_some() && config.guest_pmu,
            remote: false,
            reads_calls: false,
            settings: settings.as_ref(),
            perfmon: opened.as_ref().is_some_and(|it| it.need_capability(&config)),
            recordings: opened.as_ref().and_then(|it| it.recorder.directory()),
            socket: socket.as_ref().and_then(Socket::directory),
        };
        let unfiltered = Confinement::drop_privileges(&config.confinement, &needs, inherited)?;

        signal::install_kick()?;
        let (vcpus, confinement) = Threads::start(config.vcpus, unfiltered)?;
        let end = Arc::new(StopLatch::new().map_err(|e| VmError::Host("event descriptors", e))?);
        let progress = Arc::new(Progress::default());
        let mut buses = Buses::default();
        let stall = StallPolicy { end: Arc::clone(&end), signals: signals.try_clone()? };
        let console = board::plug_console(&mut buses, stall, config.limits.console)?;
        board::plug_power(&mut buses, &end, &progress)?;
        let threads = Arc::new(vpmu_kvm::Threads::new(config.vcpus.into(), signal::kick_signal()));
        let pmu = match settings.zip(opened) {
            Some((settings, opened)) => {
                let parts = Parts {
                    memory: &memory,
                    window: window.as_ref(),
                    stats: &stats,
                    threads: &threads,
                    confinement: &confinement,
                    opened,
                    guest_ips,
                    tracker: tracker.as_ref(),
                    saved: restored.as_ref().and_then(|it| it.state.pmu.as_ref()),
                };
                Some(Pmu::new(&config, settings, parts, &mut buses)?)
            }
            None => None,
        };
        let operator = pmu.as_ref().map(|pmu| Arc::clone(&pmu.operator));
        let control = Control::start(Mailbox::new(event()?), socket, operator, &confinement)?;
        let shared = Arc::new(Shared {
            ports: buses.ports,
            memory: buses.memory,
            vpmu: pmu.as_ref().map(|pmu| Arc::clone(&pmu.vpmu)),
            end,
            progress,
            trace_handlers: config.trace_handlers,
            threads,
            gate: Gate::default(),
            saver,
        });
        let mut vm = Self {
            clock: boot.clock.clone(),
            boot: None,
            vcpus,
            images,
            config,
            kvm,
            signals,
            console,
            control,
            pmu,
            shared,
            stats,
            memory,
            window,
            tracker,
            recorded: None,
            resets_delayed: 0,
            confinement,
            footprint,
        };
        vm.wire(&boot.vm)?;
        // The thread that registers the window has no seccomp filter, so it must end before the guest runs.
        window_slot.map_or(Ok(()), Registration::finish)?;
        vm.boot = Some(boot);
        if let Some(restored) = restored {
            let console = vm.console.serial.restore(restored.state.console);
            console.map_err(|error| SnapshotError::Console(format!("{error:?}")))?;
        }
        Ok(vm)
    }

    /// Runs the guest until the guest, the user, a signal or an error ends the run.
    #[must_use]
    pub fn run(mut self) -> RunResult {
        let start = Instant::now();
        let mut boots = 0;
        let ending = self.run_boots(&mut boots);
        self.control.end();
        let events = self.pmu.as_mut().map(|pmu| std::mem::take(&mut pmu.events));
        RunResult {
            ending,
            wall: start.elapsed(),
            boot: self.shared.progress.boot_time(),
            boots,
            recorded: self.recorded,
            held_back: HeldBack {
                resets_delayed: self.resets_delayed,
                recordings_left_out: self.pmu.map_or(0, |pmu| pmu.operator.left_out()),
                console: self.console.serial.bytes(),
            },
            policy: self.config.policy.name(),
            events: events.unwrap_or_default(),
            vpmu: self.shared.vpmu.clone(),
            stats: self.stats,
            memory: self.memory,
            confined: self.confinement.confined().clone(),
            footprint: self.footprint,
        }
    }

    fn run_boots(&mut self, boots: &mut u64) -> Result<Ending, VmError> {
        let _raw = terminal::Raw::new().map_err(VmError::Terminal)?;
        let queues = self.pmu.as_ref().map(|pmu| pmu.queues.clone());
        let signals = self.signals.try_clone()?;
        let mailbox = Arc::clone(&self.control.mailbox);
        let console = self.console.clone();
        let mut events = EventLoop::new(&self.shared.end, signals, console, queues, mailbox)?;
        let mut resets = Bucket::per_minute(self.config.limits.resets.into());
        // All other threads have their filters.
        self.confinement.filter_main()?;
        loop {
            *boots += 1;
            let boot = self.boot.take().ok_or(VmError::NoReason)?;
            let ended = self.run_boot(boot, &mut events);
            match ended {
                Ok(how) if self.reboots(how) => {
                    if let Err(outside) = self.shared.end.rearm() {
                        return Ok(outside);
                    }
                    log::info!("{how}: the guest boots again");
                    self.await_turn(&mut resets, &mut events)?;
                    if let Some(ended) = self.shared.end.take() {
                        return Ok(ended?);
                    }
                    self.boot = Some(self.boot_again()?);
                }
                ended => return ended,
            }
        }
    }

    /// Whether the guest boots again after this end.
    fn reboots(&self, how: Ending) -> bool {
        how.is_reset() && self.config.on_reset == OnReset::Restart
    }

    /// Waits until the guest may boot again, or the run ends.
    fn await_turn(&mut self, resets: &mut Bucket, events: &mut EventLoop) -> Result<(), VmError> {
        let wait = resets.wait(Instant::now());
        if !wait.is_zero() {
            self.resets_delayed += 1;
            log::warn!("the guest resets more often than --max-resets allows: its next boot is delayed");
            events.run_for(wait)?;
        }
        resets.take(1, Instant::now());
        Ok(())
    }

    /// Runs the guest until this boot ends. Drops the boot and its VM.
    fn run_boot(&mut self, mut boot: Boot, events: &mut EventLoop) -> Result<Ending, VmError> {
        let end = Arc::clone(&self.shared.end);
        let served = boot.start(&self.shared, &mut self.vcpus).and_then(|()| {
            while events.run()? == Stopped::HasMail {
                self.answer_mailbox(&boot);
            }
            Ok(())
        });
        if served.is_err() {
            // Announce an end, so that vCPUs no longer enter the guest. Nobody sees the placeholder `ByHand`, because
            // this function returns the error in `served`.
            end.announce(Ok(Ending::ByHand));
        }
        self.vcpus.stop(&self.shared.threads);
        // Read the statistics while their VM still exists.
        self.stats.end();
        if let Some(pmu) = &self.pmu {
            // Write the recording before resetting the device, because a reset makes the device drop the memory of the
            // guest's driver.
            let how = end.peek();
            let occasion = if how.is_some_and(|how| self.reboots(how)) { Occasion::Reset } else { Occasion::End };
            if let Some(recorded) = pmu.operator.record(occasion) {
                self.recorded = Some(recorded);
            }
            pmu.reset();
        }
        served?;
        Ok(end.take().ok_or(VmError::NoReason)??)
    }

    /// Replaces the VM with a new one. Memory and devices are in the same state as at power-on. The window keeps its
    /// contents, and the operator's events keep their counts. The console stays open, and guest time is not reset.
    fn boot_again(&mut self) -> Result<Boot, VmError> {
        memory::empty(&self.memory)?;
        let entry = self.images.load(&self.memory)?;
        let machine = Machine::from(&self.config);
        let reaches = reached(&self.memory, self.window.as_ref());
        let reaches = (reaches.as_slice(), self.tracker.is_some());
        let boot = Boot::new(&self.kvm, &machine, reaches, Some(&self.clock))?;
        if let Some(tracker) = &self.tracker {
            tracker.forget();
        }
        boot.enter_at(entry)?;
        self.stats.begin(boot.stats());
        self.console.serial.reset();
        self.wire(&boot.vm)?;
        Ok(boot)
    }

    /// Connects interrupt lines and notifications to a new VM. A line can serve only one VM at a time, so the previous
    /// VM must have been destroyed.
    fn wire(&self, vm: &Arc<VmFd>) -> Result<(), VmError> {
        let line = self.console.serial.line();
        // Discard an interrupt from the previous boot, if there is one.
        let _ = line.read();
        vm.register_irqfd(line, layout::SERIAL_GSI)
            .map_err(kvm::KvmError::refused("connect the console's interrupt"))?;
        match &self.pmu {
            Some(pmu) => pmu.wire(vm),
            None => Ok(()),
        }
    }
}

/// Runs `here` on this thread and, at the same time, `there` on another thread. That thread ends before this function
/// returns.
///
/// # Errors
/// The host cannot start another thread.
fn concurrently<A, B: Send>(here: impl FnOnce() -> A, there: impl FnOnce() -> B + Send) -> io::Result<(A, B)> {
    thread::scope(|scope| {
        let there = thread::Builder::new().spawn_scoped(scope, there)?;
        let here = here();
        let there = there.join();
        Ok((here, there.unwrap_or_else(|panic| resume_unwind(panic))))
    })
}

/// Returns the guest's memory, and the window if the machine has one. For a restored machine, maps both from `file`.
fn memories(config: &Config, file: Option<&File>) -> Result<(GuestMemoryMmap, Option<GuestMemoryMmap>), VmError> {
    let memory = match file {
        Some(file) => memory::map(config.memory_mib, file)?,
        None => memory::allocate(config.memory_mib)?,
    };
    let window = match (config.window, file) {
        (0, _) => None,
        _ if !config.vpmu => None,
        (bytes, Some(file)) => {
            let offset = crate::snapshot::memory::length(&memory);
            Some(memory::map_window(bytes, file, offset)?)
        }
        (bytes, None) => Some(memory::window(bytes)?),
    };
    Ok((memory, window))
}

/// All memory that the guest can access: RAM, and the window if there is one.
fn reached<'a>(memory: &'a GuestMemoryMmap, window: Option<&'a GuestMemoryMmap>) -> Vec<&'a GuestMemoryMmap> {
    std::iter::once(memory).chain(window).collect()
}
