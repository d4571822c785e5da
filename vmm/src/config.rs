//! The operator's configuration, from flags and a file. This module checks every value once.

mod args;

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Deserialize;
use vpmu::abi::{EXIT_ALL, KIND_EXIT_TRACE, PAGE_SIZE};
use vpmu::{Hardware, PersistSpec};

use crate::arch::board::DEFAULT_CMDLINE;
use crate::arch::layout::WINDOW_MAX;
use crate::confine::{self, User};
use crate::exit::{EXIT_FAILURE, EXIT_USAGE};
use crate::limits::{LimitArgs, LimitError, Limits, bytes};
use crate::machine::Machine;
use crate::policy::{Decision, Events, HardwareUse, PolicyError, PolicyFile, Tier};
use crate::raw_events::RawEvents;
use crate::snapshot::{self, Facts, Owners, SnapshotError};

pub use self::args::{DeviceArgs, RunArgs};
pub use crate::arch::layout::MAX_VCPUS;

/// Minimum guest memory in MiB. A kernel needs at least this much.
pub const MIN_MEMORY_MIB: u64 = 4;
/// Maximum guest memory in MiB. A host can address at most 2^52 bytes.
pub const MAX_MEMORY_MIB: u64 = 1 << 32;

const DEFAULT_MEMORY_MIB: u64 = 256;
const DEFAULT_WINDOW: u64 = 16 << 20;

/// The engine for the guest's samples of host events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Batched if the host's samples have guest addresses, otherwise exit
    #[default]
    Auto,
    /// The host takes samples while the vCPU continues to run
    Batched,
    /// Each overflow makes the vCPU leave the guest
    Exit,
}

/// Work that hardware events count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CountMode {
    /// Only the guest's work
    #[default]
    Guest,
    /// Also the host's work for the vCPU
    Vcpu,
}

impl From<CountMode> for vpmu::CountMode {
    fn from(mode: CountMode) -> Self {
        match mode {
            CountMode::Guest => Self::Guest,
            CountMode::Vcpu => Self::Vcpu,
        }
    }
}

/// Action after a guest reset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnReset {
    /// End the run
    #[default]
    Exit,
    /// Boot the guest again
    Restart,
}

/// The configuration of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The kernel image. `None` for a machine that is restored without a kernel. Such a machine cannot boot again.
    pub kernel: Option<PathBuf>,
    /// The kernel's initramfs.
    pub initramfs: Option<PathBuf>,
    /// The kernel's command line.
    pub cmdline: String,
    /// The directory of the snapshot to restore.
    pub restore: Option<PathBuf>,
    /// The directories of the snapshot's bases that do not lie beside their diffs.
    pub bases: Vec<PathBuf>,
    /// vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub memory_mib: u64,
    /// Whether the machine has the paravirtual PMU.
    pub vpmu: bool,
    /// Whether the guest's processors have a hardware PMU.
    pub guest_pmu: bool,
    /// The events that the guest may open.
    pub policy: Decision,
    /// Host hardware that the machine may use.
    pub hardware: Hardware,
    /// Size of the window in bytes, a multiple of the page size. Zero if there is no window.
    pub window: u64,
    /// Persistent events started before the guest.
    pub persistent: Vec<PersistSpec>,
    /// The file for recordings, if given.
    pub recording: Option<PathBuf>,
    /// The file with the guest kernel's ORC tables. If it is `None`, an ELF file of [`Config::kernel`] has them.
    pub vmlinux: Option<PathBuf>,
    /// The file with the names of the guest kernel's functions.
    pub symbols: Option<PathBuf>,
    /// Limits on the guest's resource use.
    pub limits: Limits,
    /// Action after a guest reset.
    pub on_reset: OnReset,
    /// Path of the control socket.
    pub ctl: Option<PathBuf>,
    /// Whether to track which pages are written, for diff snapshots.
    pub track_dirty: bool,
    /// Whether guests may trace how long devices take to handle accesses.
    pub trace_handlers: bool,
    /// The engine for samples of host events.
    pub engine: Engine,
    /// The confinement of the VMM's process.
    pub confinement: confine::Options,
    /// The file of the report.
    pub report: Option<PathBuf>,
    /// Whether to print a summary on standard error.
    pub summary: bool,
}

impl Config {
    /// Whether the guest may open a trace of all exits. The operator's persistent events cannot be traces.
    #[must_use]
    pub(crate) fn exit_traces(&self) -> bool {
        let policy = &self.policy.policy;
        policy.allows(KIND_EXIT_TRACE, EXIT_ALL)
    }

    /// The users whose snapshots can be restored.
    pub(crate) fn owners(&self) -> Owners {
        owners(self.confinement.user)
    }
}

fn owners(user: Option<User>) -> Owners {
    Owners::new(user.map(|user| user.ids().0))
}

impl From<&Config> for Machine {
    fn from(config: &Config) -> Self {
        Self {
            vcpus: config.vcpus,
            virtio: config.vpmu,
            window: if config.vpmu { config.window } else { 0 },
            pmu: config.guest_pmu,
        }
    }
}

impl From<&Config> for Facts {
    fn from(config: &Config) -> Self {
        Self {
            vcpus: config.vcpus,
            memory_mib: config.memory_mib,
            window: if config.vpmu { config.window } else { 0 },
            vpmu: config.vpmu,
            guest_pmu: config.guest_pmu,
        }
    }
}

/// Errors in the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
    /// The file is invalid.
    #[error("the configuration {path} is not valid")]
    Parse {
        /// The path.
        path: PathBuf,
        /// The position and the error.
        #[source]
        source: serde_json::Error,
    },
    /// Neither a flag nor the configuration file gives a kernel.
    #[error("no kernel: set --kernel, or \"kernel\" in the file of --config")]
    NoKernel,
    /// An invalid number of vCPUs.
    #[error("cannot run {0} vCPUs: --vcpus must be 1 to {MAX_VCPUS}")]
    Vcpus(u32),
    /// An invalid amount of memory.
    #[error("{0} MiB of memory: --memory must be at least {MIN_MEMORY_MIB} MiB, and no more than a host can address")]
    Memory(u64),
    /// An invalid size of the window.
    #[error(
        "a window of {0} bytes: --window must be a multiple of 4K, at most {max}M",
        max = WINDOW_MAX >> 20
    )]
    Window(u64),
    /// Contradictory settings of events.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// An invalid limit.
    #[error(transparent)]
    Limits(#[from] LimitError),
    /// A snapshot that cannot be restored with this configuration.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// `--on-reset restart` for a restored machine without `--kernel`. A snapshot has no kernel to boot.
    #[error("--on-reset restart with --restore needs --kernel, too: a snapshot has no kernel to boot")]
    RestartWithoutKernel,
    /// Persistent events for a machine without a PMU.
    #[error("--persistent needs the PMU: remove --no-vpmu or --pmu off")]
    PersistentWithoutVpmu,
}

impl ConfigError {
    /// The error for a `flag` that differs from the snapshot's value, `saved`.
    fn differs(flag: &'static str, saved: impl Display) -> Self {
        Self::Snapshot(SnapshotError::Differs { flag, saved: saved.to_string() })
    }

    /// The exit status. A snapshot that cannot be restored is a usage error only if a flag contradicts the snapshot.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Snapshot(SnapshotError::Differs { .. }) => EXIT_USAGE,
            Self::Snapshot(_) => EXIT_FAILURE,
            _ => EXIT_USAGE,
        }
    }
}

/// The contents of the `--config` file. The keys are those in `vmm run --help`, and all are optional.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Document {
    kernel: Option<PathBuf>,
    initramfs: Option<PathBuf>,
    cmdline: Option<String>,
    vcpus: Option<u32>,
    memory: Option<u64>,
    vpmu: Option<bool>,
    #[serde(rename = "guest-pmu")]
    guest_pmu: Option<bool>,
    pmu: Option<Tier>,
    #[serde(rename = "allow-events")]
    allow_events: Vec<Events>,
    #[serde(rename = "deny-events")]
    deny_events: Vec<Events>,
    #[serde(rename = "hardware-events")]
    hardware_events: Option<bool>,
    #[serde(rename = "count-mode")]
    count_mode: Option<CountMode>,
    #[serde(rename = "raw-events")]
    raw_events: Option<RawEvents>,
    #[serde(rename = "pin-hardware")]
    pin_hardware: Option<bool>,
    #[serde(deserialize_with = "bytes")]
    window: Option<u64>,
    persistent: Vec<PersistSpec>,
    recording: Option<PathBuf>,
    symbols: Option<PathBuf>,
    vmlinux: Option<PathBuf>,
    limits: LimitArgs,
    #[serde(rename = "on-reset")]
    on_reset: Option<OnReset>,
    ctl: Option<PathBuf>,
    #[serde(rename = "track-dirty")]
    track_dirty: Option<bool>,
    #[serde(rename = "trace-handlers")]
    trace_handlers: Option<bool>,
    engine: Option<Engine>,
    user: Option<User>,
    chroot: Option<PathBuf>,
    seccomp: Option<bool>,
    report: Option<PathBuf>,
    summary: Option<bool>,
}

impl Document {
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        serde_json::from_slice(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })
    }
}

impl TryFrom<&RunArgs> for Config {
    type Error = ConfigError;

    /// Flags override the file, and the file overrides the defaults.
    fn try_from(args: &RunArgs) -> Result<Self, ConfigError> {
        let file = match &args.config {
            Some(path) => Document::read(path)?,
            None => Document::default(),
        };
        if args.kernel.is_none() && file.kernel.is_none() && args.restore.is_none() {
            return Err(ConfigError::NoKernel);
        }
        Self::new(args.clone(), file)
    }
}

impl Config {
    /// The configuration of a PMU for a machine of `vcpus` vCPUs that another VMM runs.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub(crate) fn of_device(vcpus: u32, device: &DeviceArgs) -> Result<Self, ConfigError> {
        let args = RunArgs { vcpus: Some(vcpus), device: device.clone(), ..RunArgs::default() };
        Self::new(args, Document::default())
    }

    fn new(args: RunArgs, file: Document) -> Result<Self, ConfigError> {
        let user = args.device.user.or(file.user);
        let facts = |directory| snapshot::facts(directory, owners(user));
        let facts = args.restore.as_deref().map(facts).transpose()?;
        let facts = facts.as_ref();
        let vcpus = args.vcpus.or(file.vcpus);
        let vcpus = same_or(facts, "--vcpus", vcpus, |it| it.vcpus.into())?.unwrap_or(1);
        let memory_mib = args.memory.or(file.memory);
        let memory_mib = same_or(facts, "--memory", memory_mib, |it| it.memory_mib)?.unwrap_or(DEFAULT_MEMORY_MIB);
        if !(MIN_MEMORY_MIB..=MAX_MEMORY_MIB).contains(&memory_mib) {
            return Err(ConfigError::Memory(memory_mib));
        }
        let window = args.device.window.or(file.window);
        // A snapshot without a PMU has no window to compare with, even if the saved machine was started with --window.
        let windowed = facts.filter(|it| it.vpmu);
        let window = same_or(windowed, "--window", window, |it| it.window)?.unwrap_or(DEFAULT_WINDOW);
        if !window.is_multiple_of(PAGE_SIZE as u64) || window > WINDOW_MAX {
            return Err(ConfigError::Window(window));
        }
        let limits = args.device.limits.over(file.limits).limits(window)?;
        let guest_pmu = args.guest_pmu.then_some(true).or(file.guest_pmu);
        let guest_pmu = same_or(facts, "--guest-pmu", guest_pmu, |it| it.guest_pmu)?.unwrap_or(false);
        let kernel = args.kernel.or(file.kernel);
        let on_reset = args.on_reset.or(file.on_reset).unwrap_or_default();
        if kernel.is_none() && on_reset == OnReset::Restart {
            return Err(ConfigError::RestartWithoutKernel);
        }
        let persistent = match args.device.persistent {
            none if none.is_empty() => file.persistent,
            given => given,
        };
        let of_file = PolicyFile {
            vpmu: file.vpmu,
            pmu: file.pmu,
            allow_events: file.allow_events,
            deny_events: file.deny_events,
            raw_events: file.raw_events,
            hardware_events: file.hardware_events,
        };
        let own = persistent.iter().map(PersistSpec::event_name);
        let (flag, given) = match (args.device.policy.pmu.or(file.pmu), args.no_vpmu, file.vpmu) {
            (_, true, _) => ("--no-vpmu", Some(false)),
            (Some(tier), ..) => ("--pmu", Some(tier != Tier::Off)),
            (None, _, vpmu) => ("\"vpmu\"", vpmu),
        };
        let saved = facts.map(|it| it.vpmu);
        if let Some(saved) = saved.filter(|&saved| given.is_some_and(|given| given != saved)) {
            let saved = if saved { "a PMU" } else { "no PMU" };
            return Err(ConfigError::differs(flag, saved));
        }
        let without = given.or(saved) == Some(false);
        let policy = args.device.policy.decide(of_file, without, own)?;
        let vpmu = policy.tier != Some(Tier::Off);
        let ctl = args.device.ctl.or(file.ctl);
        if !persistent.is_empty() && !vpmu {
            return Err(ConfigError::PersistentWithoutVpmu);
        }
        Ok(Self {
            kernel,
            restore: args.restore,
            bases: args.base,
            initramfs: args.initramfs.or(file.initramfs),
            cmdline: args.cmdline.or(file.cmdline).unwrap_or_else(|| DEFAULT_CMDLINE.to_owned()),
            vcpus: u8::try_from(vcpus)
                .ok()
                .filter(|count| (1..=MAX_VCPUS).contains(&u32::from(*count)))
                .ok_or(ConfigError::Vcpus(vcpus))?,
            memory_mib,
            vpmu,
            guest_pmu,
            hardware: Hardware::default().with(|hardware| {
                hardware.events = policy.hardware != HardwareUse::Never;
                hardware.left_to_mediated = false;
                hardware.count_mode = args.device.count_mode.or(file.count_mode).unwrap_or_default().into();
                hardware.raw = policy.raw.clone();
                hardware.pinned = args.device.pin_hardware || file.pin_hardware.unwrap_or(false);
            }),
            policy,
            window,
            persistent,
            recording: args.device.recording.or(file.recording),
            symbols: args.device.symbols.or(file.symbols),
            vmlinux: args.vmlinux.or(file.vmlinux),
            limits,
            on_reset,
            ctl,
            track_dirty: args.track_dirty || file.track_dirty.unwrap_or(false),
            trace_handlers: args.trace_handlers || file.trace_handlers.unwrap_or(false),
            engine: args.engine.or(file.engine).unwrap_or_default(),
            confinement: confine::Options {
                user,
                chroot: args.device.chroot.or(file.chroot),
                seccomp: !args.device.no_seccomp && file.seccomp.unwrap_or(true),
            },
            report: args.report.or(file.report),
            summary: args.summary || file.summary.unwrap_or(false),
        })
    }
}

/// Returns `given`, or the snapshot's value if `given` is `None`. If both exist, they must be equal.
fn same_or<T: Copy + PartialEq + Display>(
    facts: Option<&Facts>,
    flag: &'static str,
    given: Option<T>,
    fact: impl FnOnce(&Facts) -> T,
) -> Result<Option<T>, ConfigError> {
    match (given, facts.map(fact)) {
        (Some(given), Some(saved)) if given != saved => Err(ConfigError::differs(flag, saved)),
        (given, saved) => Ok(given.or(saved)),
    }
}

#[cfg(test)]
mod tests;
