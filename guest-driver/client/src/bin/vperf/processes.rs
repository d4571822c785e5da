//! Who the sampled processes are, asked of /proc while they live: their names and what they
//! have mapped. Asked again whenever samples of them are read, for they may exec or load.
//!
//! Between a process's exec and the next reading of the ring its samples bear the old
//! mappings; a process that comes and goes between two readings stays without a name.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::data::{Map, Process};

/// The processes seen so far.
#[derive(Debug)]
pub(crate) struct Processes {
    proc: PathBuf,
    /// As last written.
    known: HashMap<u32, (String, Vec<Map>)>,
    /// Asked since the last [`Processes::next_reading`].
    asked: HashSet<u32>,
}

impl Processes {
    pub(crate) fn new(proc: &Path) -> Self {
        Self {
            proc: proc.into(),
            known: HashMap::new(),
            asked: HashSet::new(),
        }
    }

    /// From here on processes are asked again.
    pub(crate) fn next_reading(&mut self) {
        self.asked.clear();
    }

    /// A sample of `pid` taken at `time` was read: what is new about the process, if it
    /// lives and anything is.
    pub(crate) fn saw(&mut self, pid: u32, time: u64) -> Option<Process> {
        if !self.asked.insert(pid) {
            return None;
        }
        let dir = self.proc.join(pid.to_string());
        let comm = fs::read_to_string(dir.join("comm"))
            .ok()?
            .trim_end()
            .to_owned();
        // Not every process lets itself be looked at; its name alone is something.
        let maps = fs::read(dir.join("maps")).unwrap_or_default();
        let maps = executable(&String::from_utf8_lossy(&maps));
        if let Some((last_comm, last_maps)) = self.known.get(&pid) {
            // One that is ending has its name, and no mappings any more.
            let is_ending = maps.is_empty() && !last_maps.is_empty();
            if is_ending || (*last_comm == comm && *last_maps == maps) {
                return None;
            }
        }
        self.known.insert(pid, (comm.clone(), maps.clone()));
        Some(Process {
            pid,
            comm,
            time,
            maps,
        })
    }
}

/// The executable mappings in a /proc/PID/maps.
fn executable(maps: &str) -> Vec<Map> {
    maps.lines().filter_map(executable_line).collect()
}

/// `start-end perms offset dev inode path`, the path with blanks in it or missing.
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
        path: if path.is_empty() {
            "[anonymous]".into()
        } else {
            path.into()
        },
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
        assert_eq!(
            paths,
            ["/bin/a program", "[anonymous]", "[vdso]", "[vsyscall]"]
        );
        assert_eq!(
            (maps[0].start, maps[0].end, maps[0].offset),
            (0x40_1000, 0x48_0000, 0x1000)
        );
    }

    #[test]
    fn a_process_is_told_once_and_when_it_changes() {
        let proc = tempfile::tempdir().unwrap();
        let dir = proc.path().join("7");
        fs::create_dir(&dir).unwrap();
        let put = |comm: &str, maps: &str| {
            fs::write(dir.join("comm"), comm).unwrap();
            fs::write(dir.join("maps"), maps).unwrap();
        };
        put("sh\n", MAPS);
        let mut processes = Processes::new(proc.path());
        let first = processes.saw(7, 100).unwrap();
        assert_eq!(
            (first.comm.as_str(), first.time, first.maps.len()),
            ("sh", 100, 4)
        );
        put("workload\n", "");
        assert_eq!(processes.saw(7, 150), None, "not twice in one reading");
        processes.next_reading();
        assert_eq!(
            processes.saw(7, 200),
            None,
            "what it had mapped is kept to its end"
        );
        put("workload\n", MAPS.split_at(90).1);
        processes.next_reading();
        assert_eq!(processes.saw(7, 300).unwrap().comm, "workload");
        processes.next_reading();
        assert_eq!(processes.saw(7, 400), None);
        assert_eq!(processes.saw(8, 400), None, "gone");
    }
}
