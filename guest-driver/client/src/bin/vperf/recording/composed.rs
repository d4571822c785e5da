//! Composes recordings for tests.

use std::io::Cursor;
use std::path::Path;

use vpmu_client::Sample;
use vpmu_client::attr::SAMPLE_CALLCHAIN;
use vpmu_perfdata::{Event, Rate, SAMPLE_FIELDS};
use vpmu_profile::{Names, Profile};

use super::Output;
use crate::processes::{Change, Map, Process};

pub(crate) const CONTEXT_KERNEL: u64 = 128_u64.wrapping_neg();
pub(crate) const CONTEXT_USER: u64 = 512_u64.wrapping_neg();

/// The task clock, with the first id of a file.
pub(crate) fn clock() -> Event {
    Event {
        name: "task-clock".into(),
        kind: 1,
        config: 1,
        rate: Some(Rate::Period(1_000_000)),
        sample_type: SAMPLE_FIELDS | SAMPLE_CALLCHAIN,
        flags: 0,
        id: 1,
    }
}

/// A process with its mappings: start and path.
pub(crate) fn process(pid: u32, name: &str, maps: &[(u64, &str)]) -> Change {
    let map = |&(start, path): &(u64, &str)| Map { start, end: start + 0x1000, offset: 0, path: path.into() };
    Change::State(Process { pid, threads: vec![(pid, name.into())], maps: maps.iter().map(map).collect() }, 0)
}

/// A sample in user mode.
pub(crate) fn sample(pid: u32, ip: u64) -> Sample {
    Sample { ip, pid, tid: pid, time: 100, period: 1_000_000, user: true, ..Sample::default() }
}

/// Writes a file into a new directory and reads it.
pub(crate) fn recorded(events: Vec<Event>, write: impl FnOnce(&mut Output)) -> Profile {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("perf.data");
    written(&path, events, write);
    Profile::read(Cursor::new(std::fs::read(path).unwrap()), Names::none()).unwrap()
}

/// Writes a file.
pub(crate) fn written(path: &Path, events: Vec<Event>, write: impl FnOnce(&mut Output)) {
    let mut output = Output::create(path, events).unwrap();
    write(&mut output);
    output.finish().unwrap();
}
