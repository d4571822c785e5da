//! Tests that measure targets on this machine with the kernel's task clock, which needs no vPMU.

use super::*;
use crate::processes::{Change, Processes};
use crate::session::Session;
use std::path::Path;
use vpmu_client::perf::PerfPmu;
use vpmu_client::tasks::{Action, Clocks, Notice};

#[test]
fn lists_of_cpus() {
    assert_eq!(cpu_list("0"), Some(vec![0]));
    assert_eq!(cpu_list("2-4,0,3"), Some(vec![0, 2, 3, 4]));
    for wrong in ["", ",", "a", "3-1", "0-", "-1", "0-99999", "4294967296"] {
        assert_eq!(cpu_list(wrong), None, "{wrong}");
    }
}

/// The kernel's task clock, which every machine supports, as an event of perf_event_open(2).
fn task_clock(dir: &Path) -> (PerfPmu, EventAttr) {
    fs::write(dir.join("type"), "1").unwrap();
    (PerfPmu::open_at(dir).unwrap(), EventAttr::new(1, 1))
}

fn measure(args: &TargetArgs, once_started: impl FnOnce()) -> (u8, u64) {
    let dir = tempfile::tempdir().unwrap();
    let (pmu, attr) = task_clock(dir.path());
    let target = args.prepare().unwrap();
    let opened = target.open(0, &attr, |_, attr| Ok(pmu.open_event(attr)?)).unwrap();
    let mut session = Session::start(target, &opened).unwrap();
    once_started();
    while !session.wait(&[], None, &mut Vec::new()).unwrap() {}
    session.stop(&opened).unwrap();
    let count = opened.iter().map(|opened| opened.event.read().unwrap().value).sum();
    (session.finish().unwrap(), count)
}

fn args(command: &[&str]) -> TargetArgs {
    let command = command.iter().map(OsString::from).collect();
    TargetArgs { all_cpus: false, cpus: None, pid: Vec::new(), command }
}

#[test]
fn command_is_measured_with_children() {
    let line = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
    let (code, own) = measure(&args(&["sh", "-c", &format!("{line}; exit 3")]), || ());
    assert_eq!(code, 3);
    // Each of the two children does the same work as the command above. The shell only waits for
    // them.
    let (code, children) = measure(&args(&["sh", "-c", &format!("({line}) & ({line}) & wait")]), || ());
    assert_eq!(code, 0);
    assert!(own > 1_000_000 && children > own, "own {own} ns, children {children} ns");
}

#[test]
fn short_lived_child_of_command_is_followed() {
    let target = args(&["sh", "-c", "/bin/true; exit 0"]).prepare().unwrap();
    let shell = target.held.as_ref().unwrap().pid().unsigned_abs();
    let mut processes = Processes::new(Path::new("/proc"), target.follow().unwrap());
    let mut session = Session::start(target, &[]).unwrap();
    while !session.wait(&[], None, &mut Vec::new()).unwrap() {}
    assert_eq!(session.finish().unwrap(), 0);
    // The kernel has already reported the shell, so a sample of the shell causes no look-up in
    // /proc.
    processes.saw(shell, 0);
    let changes = processes.news(&Clocks::default()).unwrap();
    let mut notices: Vec<Notice> = changes
        .into_iter()
        .map(|change| match change {
            Change::Notice(notice) => notice,
            change => panic!("{change:?}"),
        })
        .collect();
    // Each CPU reported its own notices.
    notices.sort_by_key(|notice| notice.time);
    let execs: Vec<(u32, &str)> = notices
        .iter()
        .filter_map(|notice| match &notice.action {
            Action::Exec(name) => Some((notice.pid, name.as_str())),
            _ => None,
        })
        .collect();
    let [(first, "sh"), (second, "true")] = execs[..] else { panic!("{execs:?}") };
    assert_eq!(first, shell);
    let is_program = |notice: &Notice| {
        notice.pid == second && matches!(&notice.action, Action::Map { path, .. } if path.ends_with("/true"))
    };
    assert!(notices.iter().any(is_program), "{notices:?}");
    assert_eq!(processes.lost(), 0);
}

#[test]
fn process_is_measured_until_command_or_process_ends() {
    let mut sleeper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = i32::try_from(sleeper.id()).unwrap();
    let (code, _) = measure(&TargetArgs { pid: vec![pid], ..args(&["false"]) }, || ());
    assert_eq!(code, 1);
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let mut reader = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let pid = i32::try_from(reader.id()).unwrap();
    let args = TargetArgs { pid: vec![pid], ..args(&[]) };
    let (code, _) = measure(&args, || drop(reader.stdin.take()));
    assert_eq!(code, 0);
    reader.wait().unwrap();
}

#[test]
fn command_ended_early_is_not_an_error() {
    let end = |command: &[&str]| {
        let target = args(command).prepare().unwrap();
        let mut session = Session::start(target, &[]).unwrap();
        if command == ["false"] {
            while !session.wait(&[], None, &mut Vec::new()).unwrap() {}
        }
        session.end().unwrap()
    };
    assert_eq!(end(&["sleep", "1000"]), 0);
    assert_eq!(end(&["false"]), 1, "it had exited by itself");
}

#[test]
fn wrong_targets_are_named() {
    assert!(matches!(args(&[]).prepare(), Err(TargetError::Nothing)));
    let anything = args(&[]).or_all_cpus();
    assert!(anything.all_cpus && !args(&["true"]).or_all_cpus().all_cpus);
    let gone = TargetArgs { pid: vec![i32::MAX], ..args(&[]) };
    assert!(matches!(gone.prepare(), Err(TargetError::Process { .. })));
    let cpus = |list: &str| TargetArgs { cpus: Some(list.into()), ..args(&[]) };
    assert!(matches!(cpus("x").prepare(), Err(TargetError::CpuList(_))));
    assert!(matches!(cpus("8191").prepare(), Err(TargetError::Offline { cpu: 8191, .. })));
}

#[test]
fn threads_of_a_process_are_found() {
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(threads_of(own).unwrap().contains(&own));
    assert!(matches!(threads_of(i32::MAX), Err(TargetError::Process { .. })));
}
