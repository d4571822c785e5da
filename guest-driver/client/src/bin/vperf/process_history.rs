//! States of each process over time, from a recording.

use std::collections::HashMap;

use crate::data::{Action, Process, Task};

/// The states of each pid, in order of time. A state is valid from its `time` until the `time` of
/// the next one.
#[derive(Debug, Default)]
pub(crate) struct ProcessHistory(HashMap<u32, Vec<Process>>);

impl ProcessHistory {
    /// Applies the recorded changes in order of time.
    pub(crate) fn new(processes: &[Process], tasks: &[Task]) -> Self {
        let mut history = Self::default();
        let mut processes: Vec<&Process> = processes.iter().collect();
        processes.sort_by_key(|process| process.time);
        let mut tasks: Vec<&Task> = tasks.iter().collect();
        tasks.sort_by_key(|task| task.time);
        let mut processes = processes.into_iter().peekable();
        for task in tasks {
            while let Some(process) = processes.next_if(|process| process.time <= task.time) {
                history.push(process.clone());
            }
            history.play(task);
        }
        for process in processes {
            history.push(process.clone());
        }
        history
    }

    /// Returns the process's state at `time`, or its first state if `time` is earlier.
    pub(crate) fn at(&self, pid: u32, time: u64) -> Option<&Process> {
        self.0.get(&pid)?.get(self.version(pid, time))
    }

    /// Index of the state that [`ProcessHistory::at`] returns; zero for an unknown process.
    pub(crate) fn version(&self, pid: u32, time: u64) -> usize {
        let history = self.0.get(&pid).map_or(&[][..], Vec::as_slice);
        let after = history.partition_point(|process| process.time <= time);
        after.saturating_sub(1)
    }

    fn push(&mut self, process: Process) {
        self.0.entry(process.pid).or_default().push(process);
    }

    fn play(&mut self, task: &Task) {
        let Task { pid, time, .. } = *task;
        let last = |pid| self.0.get(&pid).and_then(|history| history.last());
        let nobody = || Process { pid, comm: format!("[pid {pid}]"), time, maps: Vec::new() };
        let before = match &task.action {
            Action::Fork(parent) => last(*parent),
            _ => last(pid),
        };
        let mut now = before.cloned().unwrap_or_else(nobody);
        match &task.action {
            Action::Fork(_) => {}
            Action::Name(name) => now.comm.clone_from(name),
            Action::Exec(name) => {
                now.comm.clone_from(name);
                now.maps.clear();
            }
            Action::Map(map) => {
                now.maps.retain(|old| old.end <= map.start || map.end <= old.start);
                now.maps.push(map.clone());
            }
        }
        self.push(Process { pid, time, ..now });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Map;

    fn map(start: u64, path: &str) -> Map {
        Map { start, end: start + 0x1000, offset: 0, path: path.into() }
    }

    fn task(pid: u32, time: u64, action: Action) -> Task {
        Task { pid, time, action }
    }

    #[test]
    fn process_has_its_name_of_the_sample_time() {
        let shell = Process { pid: 1, comm: "sh".into(), time: 50, maps: vec![map(0x1000, "/bin/sh")] };
        // Out of order, as from two CPUs.
        let tasks = [
            task(2, 300, Action::Map(map(0x1000, "/bin/work"))),
            task(2, 100, Action::Fork(1)),
            task(2, 200, Action::Exec("work".into())),
            task(2, 400, Action::Map(map(0x1800, "/lib/over"))),
            task(2, 500, Action::Name("renamed".into())),
        ];
        let history = ProcessHistory::new(&[shell], &tasks);
        let at = |pid, time| {
            let process = history.at(pid, time).unwrap();
            let paths: Vec<&str> = process.maps.iter().map(|map| map.path.as_str()).collect();
            (process.comm.as_str(), paths.join(" "))
        };
        assert_eq!(at(1, 0), ("sh", "/bin/sh".into()), "before its first state");
        assert_eq!(at(2, 150), ("sh", "/bin/sh".into()));
        assert_eq!(at(2, 200), ("work", String::new()));
        assert_eq!(at(2, 350), ("work", "/bin/work".into()));
        assert_eq!(at(2, 450), ("work", "/lib/over".into()), "map replaced");
        assert_eq!(at(2, 999), ("renamed", "/lib/over".into()));
        assert!(history.at(3, 0).is_none());
    }

    #[test]
    fn child_of_unknown_parent_is_named_by_number() {
        let history = ProcessHistory::new(&[], &[task(2, 100, Action::Fork(1))]);
        assert_eq!(history.at(2, 100).unwrap().comm, "[pid 2]");
    }
}
