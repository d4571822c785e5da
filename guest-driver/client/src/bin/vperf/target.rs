//! What is measured, and for how long: a command, tasks that run already, or CPUs.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use clap::Args;
use vpmu_client::event::{EventError, Ready, poll};
use vpmu_client::tasks::{Tasks, TasksError};
use vpmu_client::{Event, EventAttr};

use crate::os::{Process, Signals};
use crate::workload::{self, Held, Running, WorkloadError};

const ONLINE: &str = "/sys/devices/system/cpu/online";

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// Measure all CPUs, whatever runs on them.
    #[arg(short = 'a', long)]
    all_cpus: bool,
    /// Measure these CPUs, whatever runs on them: 0 or 0,2-3.
    #[arg(
        short = 'C',
        long = "cpu",
        value_name = "LIST",
        conflicts_with = "all_cpus"
    )]
    cpus: Option<String>,
    /// Measure these processes, with the threads and children they will have.
    #[arg(short, long, value_name = "PID", value_delimiter = ',',
          value_parser = clap::value_parser!(i32).range(1..), conflicts_with_all = ["all_cpus", "cpus"])]
    pid: Vec<i32>,
    /// A command to run. Alone, it is what is measured, its children included; with -a, -C or
    /// -p it says for how long. Without it, Ctrl-C (or the processes' end) does.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

/// Why nothing can be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TargetError {
    #[error("nothing to measure: give a command, -p PID, -C CPU or -a for all CPUs")]
    Nothing,
    #[error("{0:?} is not a list of CPUs such as 0 or 0,2-3")]
    CpuList(String),
    #[error("CPU {cpu} is not online: {online} are")]
    Offline { cpu: u32, online: String },
    #[error("reading {ONLINE}")]
    Online(#[source] io::Error),
    #[error("process {pid}")]
    Process { pid: i32, source: io::Error },
    #[error("catching signals")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Wait(#[from] EventError),
}

/// One event on one of the places that are measured.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Of the events chosen.
    pub(crate) index: usize,
    pub(crate) event: Event,
}

/// Where events are opened.
#[derive(Debug)]
enum Places {
    Child(i32),
    Threads(Vec<i32>),
    Cpus(Vec<u32>),
}

/// What shall be measured, not yet running.
#[derive(Debug)]
pub(crate) struct Target {
    signals: Signals,
    places: Places,
    pids: Vec<u32>,
    processes: Vec<Process>,
    held: Option<Held>,
}

impl TargetArgs {
    /// Finds what is meant and forks the command, which waits.
    pub(crate) fn prepare(&self) -> Result<Target, TargetError> {
        let cpus = self.cpus()?;
        if cpus.is_none() && self.pid.is_empty() && self.command.is_empty() {
            return Err(TargetError::Nothing);
        }
        let processes = self
            .pid
            .iter()
            .map(|&pid| Process::open(pid).map_err(|source| TargetError::Process { pid, source }));
        let processes: Vec<Process> = processes.collect::<Result<_, _>>()?;
        let mut threads = Vec::new();
        for &pid in &self.pid {
            threads.extend(threads_of(pid)?);
        }
        // Before the fork, whose thread inherits the mask.
        let signals = Signals::catch().map_err(TargetError::Signals)?;
        let held = match self.command.as_slice() {
            [] => None,
            command => Some(Held::start(command)?),
        };
        let places = match (cpus, &held) {
            (Some(cpus), _) => Places::Cpus(cpus),
            (None, Some(held)) if threads.is_empty() => Places::Child(held.pid()),
            (None, _) => Places::Threads(threads),
        };
        Ok(Target {
            signals,
            places,
            pids: self.pid.iter().map(|pid| pid.unsigned_abs()).collect(),
            processes,
            held,
        })
    }

    fn cpus(&self) -> Result<Option<Vec<u32>>, TargetError> {
        if !self.all_cpus && self.cpus.is_none() {
            return Ok(None);
        }
        let text = fs::read_to_string(ONLINE).map_err(TargetError::Online)?;
        let online = text.trim();
        let all = cpu_list(online).ok_or_else(|| TargetError::CpuList(online.into()))?;
        let Some(wanted) = &self.cpus else {
            return Ok(Some(all));
        };
        let wanted = cpu_list(wanted).ok_or_else(|| TargetError::CpuList(wanted.clone()))?;
        match wanted.iter().find(|cpu| !all.contains(cpu)) {
            Some(&cpu) => Err(TargetError::Offline {
                cpu,
                online: online.into(),
            }),
            None => Ok(Some(wanted)),
        }
    }

    /// In words, for the heading of a result.
    pub(crate) fn describe(&self) -> String {
        let words: Vec<_> = self
            .command
            .iter()
            .map(|word| word.to_string_lossy())
            .collect();
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

fn threads_of(pid: i32) -> Result<Vec<i32>, TargetError> {
    let error = |source| TargetError::Process { pid, source };
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        threads.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(threads)
}

/// `0-2,5` as numbers, each once and in order; `None` if it is not such a list.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // More CPUs than Linux can have are a mistake, and would take memory.
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
    /// Opens the `index`th event through `door` everywhere it shall be. A command's exec
    /// enables it; in tasks that run already it is enabled from the first: they may have
    /// children at any moment, and events with children cannot be switched.
    pub(crate) fn open(
        &self,
        index: usize,
        attr: &EventAttr,
        door: impl Fn(&EventAttr) -> Result<Event, vpmu_client::Error>,
    ) -> Result<Vec<Opened>, vpmu_client::Error> {
        let attrs: Vec<EventAttr> = match &self.places {
            Places::Child(pid) => vec![EventAttr {
                inherit: true,
                enable_on_exec: true,
                ..attr.clone().of_task(*pid)
            }],
            Places::Threads(threads) => threads
                .iter()
                .map(|&pid| EventAttr {
                    inherit: true,
                    disabled: false,
                    ..attr.clone().of_task(pid)
                })
                .collect(),
            Places::Cpus(cpus) => cpus
                .iter()
                .filter_map(|&cpu| i32::try_from(cpu).ok())
                .map(|cpu| attr.clone().on_cpu(cpu))
                .collect(),
        };
        attrs
            .iter()
            .map(|attr| {
                Ok(Opened {
                    index,
                    event: door(attr)?,
                })
            })
            .collect()
    }

    /// Begins to follow what the measured tasks do.
    pub(crate) fn follow(&self) -> Result<Vec<Tasks>, TasksError> {
        let online = || {
            fs::read_to_string(ONLINE)
                .ok()
                .and_then(|text| cpu_list(text.trim()))
        };
        let (tasks, cpus) = match &self.places {
            Places::Child(pid) => (vec![*pid], online()),
            Places::Threads(threads) => (threads.clone(), online()),
            Places::Cpus(cpus) => (vec![-1], Some(cpus.clone())),
        };
        let cpus = cpus.unwrap_or_default();
        let places = tasks
            .iter()
            .flat_map(|&task| cpus.iter().map(move |&cpu| (task, cpu)));
        places
            .map(|(task, cpu)| Tasks::follow(task, i32::try_from(cpu).unwrap_or(-1)))
            .collect()
    }

    /// The processes that are there already; those that come are followed.
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
        entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect()
    }

    /// Starts to measure: enables what is not yet, and lets the command go.
    pub(crate) fn start(self, opened: &[Opened]) -> Result<Measuring, TargetError> {
        if matches!(self.places, Places::Cpus(_)) {
            for opened in opened {
                opened.event.enable()?;
            }
        }
        let child = self.held.map(Held::release).transpose()?;
        Ok(Measuring {
            signals: self.signals,
            processes: self.processes,
            child,
            signalled: false,
        })
    }
}

/// What is being measured.
#[derive(Debug)]
pub(crate) struct Measuring {
    signals: Signals,
    processes: Vec<Process>,
    child: Option<Running>,
    signalled: bool,
}

impl Measuring {
    /// Waits for the end or until any of `others` is ready, whose answers come in `ready`;
    /// true at the end.
    pub(crate) fn wait(
        &mut self,
        others: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
        ready: &mut Vec<Ready>,
    ) -> Result<bool, TargetError> {
        let mut fds = vec![self.signals.as_fd()];
        match &self.child {
            Some(child) => fds.push(child.process().as_fd()),
            None => fds.extend(self.processes.iter().map(AsFd::as_fd)),
        }
        let own = fds.len();
        fds.extend_from_slice(others);
        let answers = poll(&fds, timeout)?;
        ready.clear();
        ready.extend_from_slice(&answers[own..]);
        let ended: Vec<bool> = answers[1..own].iter().map(|ready| ready.readable).collect();
        let signalled = answers[0].readable;
        if signalled && self.pass_signal()? {
            return Ok(true);
        }
        if self.child.is_some() {
            return Ok(ended[0]);
        }
        let had_processes = !self.processes.is_empty();
        let mut ended = ended.into_iter();
        self.processes.retain(|_| !ended.next().unwrap_or(false));
        Ok(had_processes && self.processes.is_empty())
    }

    /// A signal to vperf goes to its child, whose end is then waited for; the second kills
    /// it. True if there is no child: then it ends the measuring.
    fn pass_signal(&mut self) -> Result<bool, TargetError> {
        let signal = self.signals.next().map_err(TargetError::Signals)?;
        let Some(child) = &self.child else {
            return Ok(true);
        };
        let signal = if self.signalled {
            libc::SIGKILL
        } else {
            signal
        };
        child
            .process()
            .signal(signal)
            .map_err(TargetError::Signals)?;
        self.signalled = true;
        Ok(false)
    }

    /// Stops counting. What children that live on inherited cannot be stopped: it counts up
    /// to its reading.
    pub(crate) fn stop(&self, opened: &[Opened]) -> Result<(), TargetError> {
        for opened in opened {
            match opened.event.disable() {
                Err(EventError::Disable(error))
                    if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// The exit code to end with: the command's, else 0.
    pub(crate) fn finish(self) -> Result<u8, TargetError> {
        match self.child {
            Some(child) => Ok(workload::exit_code(child.wait()?)),
            None => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Action, Line, Task};
    use crate::histories::Histories;
    use crate::processes::Processes;
    use std::path::Path;
    use vpmu_client::perf::PerfPmu;
    use vpmu_client::tasks::Clocks;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(cpu_list("0"), Some(vec![0]));
        assert_eq!(cpu_list("2-4,0,3"), Some(vec![0, 2, 3, 4]));
        for wrong in ["", ",", "a", "3-1", "0-", "-1", "0-99999", "4294967296"] {
            assert_eq!(cpu_list(wrong), None, "{wrong}");
        }
    }

    /// The kernel's own clock of tasks, through perf's door: it is on every machine.
    fn task_clock(dir: &Path) -> (PerfPmu, EventAttr) {
        fs::write(dir.join("type"), "1").unwrap();
        (PerfPmu::open_at(dir).unwrap(), EventAttr::new(1, 1))
    }

    fn measure(args: &TargetArgs, once_started: impl FnOnce()) -> (u8, u64) {
        let dir = tempfile::tempdir().unwrap();
        let (pmu, attr) = task_clock(dir.path());
        let target = args.prepare().unwrap();
        let opened = target
            .open(0, &attr, |attr| Ok(pmu.open_event(attr)?))
            .unwrap();
        let mut measuring = target.start(&opened).unwrap();
        once_started();
        while !measuring.wait(&[], None, &mut Vec::new()).unwrap() {}
        measuring.stop(&opened).unwrap();
        let count = opened
            .iter()
            .map(|opened| opened.event.read().unwrap().value)
            .sum();
        (measuring.finish().unwrap(), count)
    }

    fn args(command: &[&str]) -> TargetArgs {
        let command = command.iter().map(OsString::from).collect();
        TargetArgs {
            all_cpus: false,
            cpus: None,
            pid: Vec::new(),
            command,
        }
    }

    #[test]
    fn a_command_is_measured_with_its_children() {
        let line = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        let (code, own) = measure(&args(&["sh", "-c", &format!("{line}; exit 3")]), || ());
        assert_eq!(code, 3);
        // Twice the work in two children, and hardly any in the shell that waits.
        let (code, children) = measure(
            &args(&["sh", "-c", &format!("({line}) & ({line}) & wait")]),
            || (),
        );
        assert_eq!(code, 0);
        assert!(
            own > 1_000_000 && children > own,
            "own {own} ns, children {children} ns"
        );
    }

    #[test]
    fn what_a_command_runs_is_followed_however_short_it_lives() {
        let target = args(&["sh", "-c", "/bin/true; exit 0"]).prepare().unwrap();
        let shell = target.held.as_ref().unwrap().pid().unsigned_abs();
        let mut processes = Processes::new(Path::new("/proc"), target.follow().unwrap());
        let mut measuring = target.start(&[]).unwrap();
        while !measuring.wait(&[], None, &mut Vec::new()).unwrap() {}
        assert_eq!(measuring.finish().unwrap(), 0);
        // Seen in a sample, but the kernel has told already.
        processes.saw(shell, 0);
        let lines = processes.news(&Clocks::default()).unwrap();
        let mut tasks: Vec<Task> = lines
            .into_iter()
            .map(|line| match line {
                Line::Task(task) => task,
                line => panic!("{line:?}"),
            })
            .collect();
        // Each CPU has told its own.
        tasks.sort_by_key(|task| task.time);
        let execs: Vec<(u32, &str)> = tasks
            .iter()
            .filter_map(|task| match &task.action {
                Action::Exec(name) => Some((task.pid, name.as_str())),
                _ => None,
            })
            .collect();
        let [(first, "sh"), (second, "true")] = execs[..] else {
            panic!("{execs:?}")
        };
        assert_eq!(first, shell);
        let histories = Histories::new(&[], &tasks);
        let program = histories.at(second, u64::MAX).unwrap();
        assert!(
            program.maps.iter().any(|map| map.path.ends_with("/true")),
            "{program:?}"
        );
        assert_eq!(processes.lost(), 0);
    }

    #[test]
    fn a_running_process_is_measured_as_long_as_the_command_runs_or_it_lives() {
        let mut sleeper = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = i32::try_from(sleeper.id()).unwrap();
        let (code, _) = measure(
            &TargetArgs {
                pid: vec![pid],
                ..args(&["false"])
            },
            || (),
        );
        assert_eq!(code, 1);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        let mut reader = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(reader.id()).unwrap();
        let args = TargetArgs {
            pid: vec![pid],
            ..args(&[])
        };
        let (code, _) = measure(&args, || drop(reader.stdin.take()));
        assert_eq!(code, 0);
        reader.wait().unwrap();
    }

    #[test]
    fn wrong_targets_are_named() {
        assert!(matches!(args(&[]).prepare(), Err(TargetError::Nothing)));
        let gone = TargetArgs {
            pid: vec![i32::MAX],
            ..args(&[])
        };
        assert!(matches!(gone.prepare(), Err(TargetError::Process { .. })));
        let cpus = |list: &str| TargetArgs {
            cpus: Some(list.into()),
            ..args(&[])
        };
        assert!(matches!(cpus("x").prepare(), Err(TargetError::CpuList(_))));
        assert!(matches!(
            cpus("8191").prepare(),
            Err(TargetError::Offline { cpu: 8191, .. })
        ));
    }

    #[test]
    fn threads_of_a_process_are_found() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(threads_of(own).unwrap().contains(&own));
        assert!(matches!(
            threads_of(i32::MAX),
            Err(TargetError::Process { .. })
        ));
    }
}
