//! The result of a run: JSON for programs, and a few lines of text for people.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use vpmu::{ExitCounts, Metrics};

use crate::confine::Confined;
use crate::ctl::Recorded;
use crate::exit::{EXIT_STOPPED, Ending};
use crate::logger;
use crate::vm::{RunResult, VmError};

/// Errors of the report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file cannot be written.
    #[error("cannot write the report {path}")]
    Write {
        /// The path.
        path: PathBuf,
        /// The host's reason.
        #[source]
        source: io::Error,
    },
}

/// The report's file. It is opened before the run, so that a wrong path is reported before the guest runs.
#[derive(Debug)]
pub struct Destination {
    file: File,
    path: PathBuf,
}

impl Destination {
    /// Opens `path`. An existing file keeps its contents until the report is written.
    ///
    /// # Errors
    /// [`ReportError::Write`].
    pub fn open(path: &Path) -> Result<Self, ReportError> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        match file {
            Ok(file) => Ok(Self { file, path: path.to_owned() }),
            Err(source) => Err(ReportError::Write { path: path.to_owned(), source }),
        }
    }

    /// Replaces the file's contents with `report`.
    ///
    /// # Errors
    /// [`ReportError::Write`].
    pub fn write(mut self, report: &Report) -> Result<(), ReportError> {
        let written = serde_json::to_vec_pretty(report).map_err(io::Error::from).and_then(|mut text| {
            text.push(b'\n');
            // Only a regular file has contents to replace. A pipe or a device has none.
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
                self.file.rewind()?;
            }
            self.file.write_all(&text)
        });
        written.map_err(|source| ReportError::Write { path: self.path, source })
    }
}

/// Exits of one vCPU that reached the VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Exits {
    /// By reason.
    #[serde(flatten)]
    pub counts: ExitCounts,
    /// The sum of all reasons.
    pub total: u64,
}

/// Totals of one vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VcpuReport {
    /// Exits that reached the VMM. Absent if there is no PMU, because the PMU counts these exits.
    pub exits: Option<Exits>,
    /// KVM's own statistics. Absent if this KVM has none.
    pub kvm: Option<BTreeMap<String, u64>>,
}

/// Totals of the PMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VpmuReport {
    /// The tier from which the operator's lists start. `list` if there is no tier, and the guest has only the events
    /// that the lists add.
    pub policy: &'static str,
    /// The events that the guest could open.
    pub events: Vec<String>,
    /// The device's totals.
    #[serde(flatten)]
    pub metrics: Metrics,
}

/// Totals of what the limits held back: dropped log lines, dropped console output, skipped recordings and delayed
/// resets. Also has the totals of the log lines and the console output that were written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HeldBack {
    /// Log lines written.
    pub log_lines: u64,
    /// Log lines dropped.
    pub log_lines_left_out: u64,
    /// Bytes of console output.
    pub console_bytes: u64,
    /// Bytes of console output dropped.
    pub console_bytes_left_out: u64,
    /// Resets that were delayed.
    pub resets_delayed: u64,
    /// Number of recordings at resets that were skipped.
    pub recordings_left_out: u64,
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The stable name for how the run ended, such as `poweroff`. `stopped` if KVM cannot continue the guest, and
    /// `error` if the VMM failed.
    pub ending: &'static str,
    /// The VMM's exit status.
    pub exit_code: u8,
    /// The error.
    pub error: Option<String>,
    /// Duration of the run in nanoseconds.
    pub wall_ns: u64,
    /// Number of times that the guest booted.
    pub boots: u64,
    /// Nanoseconds from the first entry into the guest until init reported, through the debug port, that it is running.
    pub boot_to_init_ns: Option<u64>,
    /// Totals of each vCPU.
    pub vcpus: Vec<VcpuReport>,
    /// KVM's statistics, summed over the vCPUs.
    pub kvm_totals: BTreeMap<String, u64>,
    /// The PMU. Absent if it is disabled.
    pub vpmu: Option<VpmuReport>,
    /// The last recording. Absent if nothing was recorded.
    pub recording: Option<Recorded>,
    /// Effects of the guest's limits.
    pub limits: HeldBack,
    /// The privileges that the process had while the guest ran. Absent if the guest never ran.
    pub confinement: Option<Confined>,
    /// Number of bytes of memory that the VMM itself used at the end of the run. Absent if the host does not report it.
    pub vmm_overhead_bytes: Option<u64>,
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Report {
    /// The report of a machine that never ran.
    #[must_use]
    pub fn of_failure(error: &VmError) -> Self {
        let (exit_code, ending) = error.exit();
        Self {
            ending,
            exit_code,
            error: Some(vpmu_errors::chain(error)),
            wall_ns: 0,
            boots: 0,
            boot_to_init_ns: None,
            vcpus: Vec::new(),
            kvm_totals: BTreeMap::new(),
            vpmu: None,
            recording: None,
            limits: HeldBack::default(),
            confinement: None,
            vmm_overhead_bytes: None,
        }
    }

    /// The report of a machine whose run has ended.
    #[must_use]
    pub fn of_run(ran: &RunResult) -> Self {
        let vcpus: Vec<VcpuReport> = (0u32..)
            .zip(ran.stats.read_all())
            .map(|(index, stats)| VcpuReport {
                exits: ran.vpmu.as_ref().map(|vpmu| {
                    let counts = vpmu.exits(index);
                    Exits { counts, total: counts.total() }
                }),
                kvm: stats,
            })
            .collect();
        let mut kvm_totals = BTreeMap::new();
        for (name, value) in vcpus.iter().filter_map(|vcpu| vcpu.kvm.as_ref()).flatten() {
            let total: &mut u64 = kvm_totals.entry(name.clone()).or_default();
            *total = total.saturating_add(*value);
        }
        let vpmu = ran.vpmu.as_ref().map(|vpmu| VpmuReport {
            policy: ran.policy,
            events: ran.events.clone(),
            metrics: vpmu.metrics(),
        });
        let (exit_code, ending) = match &ran.ending {
            Ok(ending) => (ending.exit_code(), ending.name()),
            Err(error) => error.exit(),
        };
        Self {
            ending,
            exit_code,
            error: ran.ending.as_ref().err().map(|error| vpmu_errors::chain(error)),
            wall_ns: nanoseconds(ran.wall),
            boots: ran.boots,
            boot_to_init_ns: ran.boot.map(nanoseconds),
            vcpus,
            kvm_totals,
            vpmu,
            recording: ran.recorded.clone(),
            limits: held_back(ran),
            confinement: Some(ran.confined.clone()),
            vmm_overhead_bytes: ran.footprint.overhead(&ran.memory),
        }
    }
}

fn held_back(ran: &RunResult) -> HeldBack {
    let lines = logger::finish();
    let held_back = &ran.held_back;
    HeldBack {
        log_lines: lines.written,
        log_lines_left_out: lines.left_out,
        console_bytes: held_back.console.taken,
        console_bytes_left_out: held_back.console.left_out,
        resets_delayed: held_back.resets_delayed,
        recordings_left_out: held_back.recordings_left_out,
    }
}

#[expect(clippy::cast_precision_loss, reason = "rounded for display")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// A few lines for people.
#[must_use]
pub fn summary(report: &Report, ending: Option<Ending>) -> String {
    let mut text = String::new();
    let how = match ending {
        Some(how) => how.to_string(),
        None if report.exit_code == EXIT_STOPPED => "KVM stopped the guest".to_owned(),
        None => "the VMM failed".to_owned(),
    };
    // Writing to a string cannot fail. This also holds for the writes below.
    let _ = writeln!(text, "vmm: {how} after {:.3} s", seconds(report.wall_ns));
    if report.boots > 1 {
        let _ = writeln!(text, "vmm: {} boots", report.boots);
    }
    if let Some(boot) = report.boot_to_init_ns {
        let _ = writeln!(text, "vmm: boot to init {:.3} s", seconds(boot));
    }
    for (index, vcpu) in report.vcpus.iter().enumerate() {
        if let Some(exits) = &vcpu.exits {
            let _ = write!(
                text,
                "vmm: vCPU {index}: {} exits to the VMM ({} port, {} memory, {} signal, {} other)",
                exits.total,
                exits.counts.io,
                exits.counts.mmio,
                exits.counts.signal,
                exits.counts.hlt + exits.counts.other,
            );
            let all = vcpu.kvm.as_ref().and_then(|kvm| kvm.get("exits"));
            let _ = match all {
                Some(all) => writeln!(text, ", {all} in total"),
                None => writeln!(text),
            };
        }
    }
    let metrics = report.vpmu.as_ref().map(|vpmu| &vpmu.metrics);
    if let Some(vpmu) = metrics {
        let _ = writeln!(
            text,
            "vmm: PMU: {} events opened, {} samples written, {} lost, {} marks, {} interrupts",
            vpmu.events_opened, vpmu.samples_written, vpmu.samples_lost, vpmu.marks, vpmu.interrupts,
        );
    }
    let traced = metrics.filter(|vpmu| vpmu.aux_written + vpmu.aux_lost > 0);
    if let Some(vpmu) = traced {
        let _ = writeln!(
            text,
            "vmm: PMU: {} KiB traced, {} KiB lost",
            vpmu.aux_written >> 10,
            vpmu.aux_lost.div_ceil(1 << 10),
        );
    }
    if let Some(recorded) = &report.recording {
        let _ = writeln!(text, "vmm: recording: {recorded}");
    }
    let limits = &report.limits;
    let device = |figure: fn(&Metrics) -> u64| metrics.map_or(0, figure);
    for (times, what) in [
        (limits.log_lines_left_out, "lines of this log omitted"),
        (limits.console_bytes_left_out, "bytes of console output omitted"),
        (limits.resets_delayed, "resets delayed"),
        (limits.recordings_left_out, "recordings omitted"),
        (
            device(|vpmu| vpmu.samples_over_budget),
            "times that an event was throttled by the limit on the samples of all events",
        ),
        (
            device(|vpmu| vpmu.sampling_throttles),
            "times that a vCPU's samples were throttled because they took too much time",
        ),
        (device(|vpmu| vpmu.counter_waits), "times that an event waited for a host counter"),
    ] {
        if times > 0 {
            let _ = writeln!(text, "vmm: limits: {times} {what}");
        }
    }
    if let Some(bytes) = report.vmm_overhead_bytes {
        let _ = writeln!(text, "vmm: {} KiB used by the VMM itself", bytes >> 10);
    }
    text
}
