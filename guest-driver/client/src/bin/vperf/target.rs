//! The measured target: a command, running tasks, or CPUs.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io;

use clap::Args;
use vpmu_client::event::EventError;
use vpmu_client::tasks::{Tasks, TasksError};
use vpmu_client::{Event, EventAttr};

use crate::os::{Process, Signals};
use crate::workload::{Held, Running, WorkloadError};

const ONLINE: &str = "/sys/devices/system/cpu/online";

#[derive(Debug, Clone, Args)]
pub(crate) struct TargetArgs {
    /// Measure all CPUs, whatever runs on them.
    #[arg(short = 'a', long)]
    all_cpus: bool,
    /// Measure these CPUs, whatever runs on them: 0 or 0,2-3.
    #[arg(short = 'C', long = "cpu", value_name = "LIST", conflicts_with = "all_cpus")]
    cpus: Option<String>,
    /// Measure these processes, with the threads and children that they start later.
    #[arg(short, long, value_name = "PID", value_delimiter = ',',
          value_parser = clap::value_parser!(i32).range(1..), conflicts_with_all = ["all_cpus", "cpus"])]
    pid: Vec<i32>,
    /// A command to run. Without -a, -C and -p, the command and its children are measured; with one
    /// of these options, the command only determines how long the measurement lasts. Without a
    /// command, the measurement ends at Ctrl-C, or when all processes of -p have exited.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// The CPUs to measure.
#[derive(Debug, Clone, Args)]
pub(crate) struct CpuArgs {
    /// Measure all CPUs, which is the default.
    #[arg(short = 'a', long)]
    all_cpus: bool,
    /// Measure these CPUs: 0 or 0,2-3.
    #[arg(short = 'C', long = "cpu", value_name = "LIST", conflicts_with = "all_cpus")]
    cpus: Option<String>,
}

impl CpuArgs {
    /// The selected CPUs among those online.
    pub(crate) fn list(&self) -> Result<Vec<u32>, TargetError> {
        online(self.cpus.as_deref())
    }
}

/// An error of the target.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    #[error("nothing to measure: use a command, -p PID, -C CPU or -a for all CPUs")]
    Nothing,
    #[error("{0:?} is not a list of CPUs such as 0 or 0,2-3")]
    CpuList(String),
    #[error("CPU {cpu} is not online; the online CPUs are {online}")]
    Offline { cpu: u32, online: String },
    #[error("cannot read {ONLINE}")]
    Online(#[source] io::Error),
    #[error("process {pid}")]
    Process { pid: i32, source: io::Error },
    #[error("cannot catch signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Wait(#[from] EventError),
}

/// One event on one measured task or CPU.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Index among the selected events.
    pub(crate) index: usize,
    /// Number of the task or CPU, from 0; the same for all events.
    pub(crate) place: usize,
    pub(crate) event: Event,
}

/// Whether `error` occurred because an event's CPU is offline, or because the device was removed.
pub(crate) fn is_away(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let code = error.downcast_ref::<io::Error>().map(io::Error::raw_os_error);
        if code == Some(Some(libc::ENODEV)) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The tasks or CPUs on which each event is opened.
#[derive(Debug)]
enum Places {
    Child(i32),
    Threads(Vec<i32>),
    Cpus(Vec<u32>),
}

/// A target that is not running yet.
#[derive(Debug)]
pub(crate) struct Target {
    signals: Signals,
    places: Places,
    pids: Vec<u32>,
    processes: Vec<Process>,
    held: Option<Held>,
}

/// A target that is running.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) signals: Signals,
    pub(crate) processes: Vec<Process>,
    pub(crate) child: Option<Running>,
}

impl TargetArgs {
    /// Selects all CPUs if nothing is selected.
    pub(crate) fn or_all_cpus(&self) -> Self {
        let nothing = self.cpus.is_none() && self.pid.is_empty() && self.command.is_empty();
        Self { all_cpus: self.all_cpus || nothing, ..self.clone() }
    }

    /// Resolves the target and forks the command, which waits before its exec.
    pub(crate) fn prepare(&self) -> Result<Target, TargetError> {
        self.prepare_catching(&[])
    }

    /// Like [`TargetArgs::prepare`], but also catches `signals`, which then do not end this
    /// program.
    pub(crate) fn prepare_catching(&self, signals: &[i32]) -> Result<Target, TargetError> {
        let cpus = self.cpus()?;
        if cpus.is_none() && self.pid.is_empty() && self.command.is_empty() {
            return Err(TargetError::Nothing);
        }
        let processes =
            self.pid.iter().map(|&pid| Process::open(pid).map_err(|source| TargetError::Process { pid, source }));
        let processes: Vec<Process> = processes.collect::<Result<_, _>>()?;
        let mut threads = Vec::new();
        for &pid in &self.pid {
            threads.extend(threads_of(pid)?);
        }
        // Block the signals before `Held::start`, which starts a thread to fork the command: that
        // thread inherits this mask.
        let signals = Signals::catch(signals).map_err(TargetError::Signals)?;
        let held = match self.command.as_slice() {
            [] => None,
            command => Some(Held::start(command)?),
        };
        let places = match (cpus, &held) {
            (Some(cpus), _) => Places::Cpus(cpus),
            (None, Some(held)) if threads.is_empty() => Places::Child(held.pid()),
            (None, _) => Places::Threads(threads),
        };
        Ok(Target { signals, places, pids: self.pid.iter().map(|pid| pid.unsigned_abs()).collect(), processes, held })
    }

    fn cpus(&self) -> Result<Option<Vec<u32>>, TargetError> {
        if !self.all_cpus && self.cpus.is_none() {
            return Ok(None);
        }
        online(self.cpus.as_deref()).map(Some)
    }

    /// Text for the heading of a result.
    pub(crate) fn describe(&self) -> String {
        let words: Vec<_> = self.command.iter().map(|word| word.to_string_lossy()).collect();
        if self.all_cpus {
            "all CPUs".into()
        } else if let Some(cpus) = &self.cpus {
            format!("CPUs {cpus}")
        } else if !self.pid.is_empty() {
            let pids: Vec<String> = self.pid.iter().map(i32::to_string).collect();
            format!("processes {}", pids.join(","))
        } else {
            format!("'{}'", words.join(" "))
        }
    }
}

/// The CPUs in `wanted`, or all online CPUs.
fn online(wanted: Option<&str>) -> Result<Vec<u32>, TargetError> {
    let text = fs::read_to_string(ONLINE).map_err(TargetError::Online)?;
    let online = text.trim();
    let all = cpu_list(online).ok_or_else(|| TargetError::CpuList(online.into()))?;
    let Some(wanted) = wanted else {
        return Ok(all);
    };
    let wanted = cpu_list(wanted).ok_or_else(|| TargetError::CpuList(wanted.into()))?;
    match wanted.iter().find(|cpu| !all.contains(cpu)) {
        Some(&cpu) => Err(TargetError::Offline { cpu, online: online.into() }),
        None => Ok(wanted),
    }
}

fn threads_of(pid: i32) -> Result<Vec<i32>, TargetError> {
    let error = |source| TargetError::Process { pid, source };
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        threads.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(threads)
}

/// Parses `0-2,5` to sorted distinct numbers; `None` if malformed.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // A CPU number above Linux's maximum is a mistake. A list of all CPUs up to that number
        // would waste memory.
        if first > last || last >= 8192 {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

impl Target {
    /// Opens the event with the index `index` on every measured task or CPU, in the same order for all events. Calls
    /// `open` with the [`Opened::place`] of each. The command's exec enables the command's events; [`Target::start`]
    /// enables all other events. Skips CPUs that went offline after the target was prepared, unless all of them did.
    pub(crate) fn open(
        &self,
        index: usize,
        attr: &EventAttr,
        open: impl Fn(usize, &EventAttr) -> Result<Event, vpmu_client::Error>,
    ) -> Result<Vec<Opened>, vpmu_client::Error> {
        let attrs: Vec<EventAttr> = match &self.places {
            Places::Child(pid) => vec![attr.clone().of_task(*pid).with(|attr| {
                attr.inherit = true;
                attr.enable_on_exec = true;
            })],
            Places::Threads(threads) => {
                threads.iter().map(|&pid| attr.clone().of_task(pid).with(|attr| attr.inherit = true)).collect()
            }
            Places::Cpus(cpus) => {
                cpus.iter().filter_map(|&cpu| i32::try_from(cpu).ok()).map(|cpu| attr.clone().on_cpu(cpu)).collect()
            }
        };
        let mut opened = Vec::new();
        let mut away = None;
        for (place, attr) in attrs.iter().enumerate() {
            match open(place, attr) {
                Ok(event) => opened.push(Opened { index, place, event }),
                Err(error) if self.are_cpus() && is_away(&error) => away = Some(error),
                Err(error) => return Err(error),
            }
        }
        match away {
            Some(error) if opened.is_empty() => Err(error),
            _ => Ok(opened),
        }
    }

    fn are_cpus(&self) -> bool {
        matches!(self.places, Places::Cpus(_))
    }

    /// Opens rings in which the kernel reports what the measured tasks fork, execute and map.
    pub(crate) fn follow(&self) -> Result<Vec<Tasks>, TasksError> {
        let online = || fs::read_to_string(ONLINE).ok().and_then(|text| cpu_list(text.trim()));
        let (tasks, cpus) = match &self.places {
            Places::Child(pid) => (vec![*pid], online()),
            Places::Threads(threads) => (threads.clone(), online()),
            Places::Cpus(cpus) => (vec![-1], Some(cpus.clone())),
        };
        let cpus = cpus.unwrap_or_default();
        let places = tasks.iter().flat_map(|&task| cpus.iter().map(move |&cpu| (task, cpu)));
        places.map(|(task, cpu)| Tasks::follow(task, i32::try_from(cpu).unwrap_or(-1))).collect()
    }

    /// Ids of the measured processes that already run. Processes that start later are reported
    /// through [`Target::follow`].
    pub(crate) fn present(&self) -> Vec<u32> {
        let is_everybody = match &self.places {
            Places::Child(_) => return Vec::new(),
            Places::Threads(_) => false,
            Places::Cpus(_) => true,
        };
        if !is_everybody {
            return self.pids.clone();
        }
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Enables the events in `opened`, in order, and then releases the command. Enables no events if the
    /// command's exec enables them. Skips events on CPUs that went offline.
    pub(crate) fn start<'a>(self, opened: impl IntoIterator<Item = &'a Opened>) -> Result<Started, TargetError> {
        if !matches!(self.places, Places::Child(_)) {
            for opened in opened {
                match opened.event.enable() {
                    Err(error) if self.are_cpus() && is_away(&error) => {}
                    result => result?,
                }
            }
        }
        let child = self.held.map(Held::release).transpose()?;
        Ok(Started { signals: self.signals, processes: self.processes, child })
    }
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
