//! Identities of the sampled processes. The kernel reports their changes during the recording;
//! /proc describes processes that started earlier, until they exit.
//!
//! If the kernel refuses to report changes, all processes are read from /proc whenever samples are read. A process that
//! starts and exits between two reads then has no name, and samples between an exec and the next read have the old
//! program's name.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use vpmu_client::tasks::{Clocks, Notice, Tasks, TasksError};
use vpmu_profile::Resolver;

/// An executable mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Offset of `start` in the file.
    pub(crate) offset: u64,
    pub(crate) path: String,
}

/// A process as /proc describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// The threads with their names.
    pub(crate) threads: Vec<(u32, String)>,
    pub(crate) maps: Vec<Map>,
}

impl Process {
    /// Makes this the state of the process.
    pub(crate) fn apply(&self, resolver: &mut Resolver) {
        let pid = self.pid.cast_signed();
        for (tid, name) in &self.threads {
            // An exec replaces the mappings.
            resolver.comm(pid, tid.cast_signed(), name, *tid == self.pid);
        }
        for map in &self.maps {
            resolver.map(pid, map.start, map.end.saturating_sub(map.start), map.offset, &map.path);
        }
    }
}

/// A change of a process, at a time of the samples' clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// The state from this time on.
    State(Process, u64),
    /// The kernel's report.
    Notice(Notice),
}

/// The processes seen so far.
#[derive(Debug)]
pub(crate) struct Processes {
    proc: PathBuf,
    /// The kernel's reports of changes; empty if the kernel refuses them.
    followed: Vec<Tasks>,
    /// The last state of each process that was read from /proc.
    known: HashMap<u32, Process>,
    /// Processes that need no look-up: for the whole recording if the kernel reports changes, otherwise until the next
    /// call of [`Processes::news`].
    reported: HashSet<u32>,
    /// Processes that the next call of [`Processes::news`] looks up, each with the time of its
    /// first sample.
    seen: Vec<(u32, u64)>,
}

impl Processes {
    pub(crate) fn new(proc: &Path, followed: Vec<Tasks>) -> Self {
        Self { proc: proc.into(), followed, known: HashMap::new(), reported: HashSet::new(), seen: Vec::new() }
    }

    /// Notes a sample of `pid` taken at `time`.
    pub(crate) fn saw(&mut self, pid: u32, time: u64) {
        if self.reported.insert(pid) {
            self.seen.push((pid, time));
        }
    }

    /// Returns the changes of processes. Call it after samples were read.
    pub(crate) fn news(&mut self, clocks: &Clocks) -> Result<Vec<Change>, TasksError> {
        let mut changes = Vec::new();
        let mut active = HashSet::new();
        for followed in &mut self.followed {
            for notice in followed.read()? {
                active.insert(notice.pid);
                changes.push(Change::Notice(Notice { time: clocks.device_time(notice.time), ..notice }));
            }
        }
        for (pid, time) in std::mem::take(&mut self.seen) {
            // The kernel's notices, read above, already describe a process that forked or called
            // exec.
            if !active.contains(&pid) {
                changes.extend(self.look(pid, time));
            }
        }
        if self.followed.is_empty() {
            self.reported.clear();
        } else {
            self.reported.extend(active);
        }
        Ok(changes)
    }

    /// Number of kernel notices that were lost because a ring was full.
    pub(crate) fn lost(&self) -> u64 {
        self.followed.iter().map(Tasks::lost).sum()
    }

    /// Reads a process from /proc after its sample at `time`; `None` if it has exited, or is unchanged since it was last
    /// read. The first state of a process is valid for all its samples, a later one from this sample on.
    fn look(&mut self, pid: u32, time: u64) -> Option<Change> {
        let dir = self.proc.join(pid.to_string());
        let comm = |dir: &Path| Some(fs::read_to_string(dir.join("comm")).ok()?.trim_end().to_owned());
        let own = comm(&dir)?;
        let tasks = fs::read_dir(dir.join("task")).into_iter().flatten().flatten();
        let thread = |entry: fs::DirEntry| {
            let tid = entry.file_name().to_str()?.parse().ok()?;
            (tid != pid).then(|| Some((tid, comm(&entry.path())?)))?
        };
        let mut threads: Vec<(u32, String)> = tasks.filter_map(thread).collect();
        threads.push((pid, own));
        threads.sort_unstable();
        // Some processes hide their mappings; the name alone is useful.
        let maps = fs::read(dir.join("maps")).unwrap_or_default();
        let maps = executable(&String::from_utf8_lossy(&maps));
        let now = Process { pid, threads, maps };
        let last = self.known.get(&pid);
        // An exiting process still has its name, but no mappings.
        let is_ending = last.is_some_and(|last| now.maps.is_empty() && !last.maps.is_empty());
        if is_ending || last == Some(&now) {
            return None;
        }
        let since = if last.is_some() { time.saturating_sub(1) } else { 0 };
        self.known.insert(pid, now.clone());
        Some(Change::State(now, since))
    }
}

/// The executable mappings in /proc/PID/maps.
fn executable(maps: &str) -> Vec<Map> {
    maps.lines().filter_map(executable_line).collect()
}

/// Parses `start-end perms offset dev inode path`; the path may contain blanks or be missing.
fn executable_line(line: &str) -> Option<Map> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let offset = fields.next()?;
    let path = fields.nth(2).unwrap_or("").trim_start();
    if !permissions.contains('x') {
        return None;
    }
    Some(Map {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(offset)?,
        path: if path.is_empty() { "[anonymous]".into() } else { path.into() },
    })
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00401000 r--p 00000000 00:02 1234                               /bin/a program
00401000-00480000 r-xp 00001000 00:02 1234                               /bin/a program
7f0000000000-7f0000001000 rwxp 00000000 00:00 0\x20
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
nonsense
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn executable_mappings_are_taken_out() {
        let maps = executable(MAPS);
        let paths: Vec<&str> = maps.iter().map(|map| map.path.as_str()).collect();
        assert_eq!(paths, ["/bin/a program", "[anonymous]", "[vdso]", "[vsyscall]"]);
        assert_eq!((maps[0].start, maps[0].end, maps[0].offset), (0x40_1000, 0x48_0000, 0x1000));
    }

    #[test]
    fn process_is_reported_when_new_or_changed() {
        let proc = tempfile::tempdir().unwrap();
        let dir = proc.path().join("7");
        for thread in ["7", "8"] {
            fs::create_dir_all(dir.join("task").join(thread)).unwrap();
        }
        let put = |comm: &str, maps: &str| {
            fs::write(dir.join("comm"), comm).unwrap();
            fs::write(dir.join("task/8/comm"), "helper\n").unwrap();
            fs::write(dir.join("maps"), maps).unwrap();
        };
        let clocks = Clocks::default();
        let mut processes = Processes::new(proc.path(), Vec::new());
        let mut saw = |pid, time| {
            processes.saw(pid, time);
            processes.saw(pid, time + 1);
            let changes = processes.news(&clocks).unwrap();
            assert!(changes.len() <= 1);
            changes.into_iter().next()
        };
        put("sh\n", MAPS);
        let threads = |name: &str| vec![(7, name.to_owned()), (8, "helper".to_owned())];
        let Some(Change::State(first, 0)) = saw(7, 100) else { panic!() };
        assert_eq!((first.pid, first.threads, first.maps.len()), (7, threads("sh"), 4));
        assert_eq!(saw(7, 150), None);
        put("workload\n", "");
        assert_eq!(saw(7, 200), None, "an exiting process keeps its mappings");
        put("workload\n", MAPS);
        let Some(Change::State(second, 299)) = saw(7, 300) else { panic!() };
        assert_eq!(second.threads, threads("workload"));
        assert_eq!(saw(8, 400), None, "gone");
    }
}
