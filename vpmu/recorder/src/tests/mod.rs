//! Recordings of hand-made histories, read by stock perf and by an independent reader.
#![allow(
    clippy::cast_possible_truncation,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests fail by panicking"
)]

mod hostile;
mod written;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use vpmu::source::Rate;
use vpmu::{History, PersistentStatus, abi};

use super::{Recording, Summary, Symbols, SymbolsError, bounded};

/// IDENTIFIER, IP, TID, TIME, ADDR, CPU, PERIOD.
pub(super) const USUAL: u64 = 1 << 16 | 0x18f;

pub(super) const KERNEL: u16 = 1;
pub(super) const USER: u16 = 2;

/// An event that the operator started on vCPU `vcpu`.
pub(super) fn event(id: u64, name: &str, vcpu: u32, sample_type: u64) -> PersistentStatus {
    PersistentStatus {
        id,
        name: name.to_owned(),
        event: "mark=7".to_owned(),
        operator: true,
        vcpu,
        kind: abi::KIND_MARK,
        config: 7,
        rate: Some(Rate::Period(1)),
        flags: abi::OPEN_ENABLED | abi::OPEN_BACKWARD,
        engine: abi::ENGINE_EXIT,
        sample_type,
        read_format: 0,
        regs_user: 0,
        regs_intr: 0,
        stack_user: 0,
        state: abi::STATE_ACTIVE,
        count: 0,
        time_enabled: 0,
        time_running: 0,
        lost: 0,
        pages: Some(16),
        window: true,
    }
}

pub(super) fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u8> {
    let size = 8 + 8 * words.len() as u64;
    let header = u64::from(kind) | u64::from(misc) << 32 | size << 48;
    [header].iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
}

/// A sample with [`USUAL`] fields of task 5, thread 6.
pub(super) fn usual(of: &PersistentStatus, misc: u16, ip: u64, time: u64, addr: u64) -> Vec<u8> {
    let task = 6 << 32 | 5;
    let cpu = u64::from(of.vcpu);
    record(9, misc, &[of.id, ip, task, time, addr, cpu, 1])
}

pub(super) fn history(event: PersistentStatus, records: &[Vec<u8>]) -> History {
    History { event, records: records.concat() }
}

/// A recording in its own directory.
pub(super) struct Recorded {
    _directory: tempfile::TempDir,
    pub(super) path: PathBuf,
    pub(super) summary: Summary,
}

pub(super) fn recorded(histories: &[History], symbols: Option<&str>) -> Recorded {
    let mut recording = Recording::new(histories);
    if let Some(text) = symbols {
        let map = tempfile::NamedTempFile::new().unwrap();
        fs::write(map.path(), text).unwrap();
        let symbols = Symbols::open(map.path()).unwrap();
        recording.name_functions(&symbols).unwrap();
    }
    written(&recording)
}

pub(super) fn written(recording: &Recording<'_>) -> Recorded {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("perf.data");
    let mut file = File::create(&path).unwrap();
    let summary = recording.write(&mut file).unwrap();
    assert_eq!(summary.bytes, file.metadata().unwrap().len());
    Recorded { _directory: directory, path, summary }
}

/// Output of stock perf for a recording.
pub(super) fn perf(arguments: &[&str], path: &Path) -> String {
    images::prerequisites::ensure(&[images::prerequisites::Prerequisite::Perf]).expect("stock perf");
    let perf = images::prerequisites::perf().expect("stock perf");
    let output =
        Command::new(perf).args(arguments).arg("-i").arg(path).env("LC_ALL", "C").env("PAGER", "cat").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "perf {arguments:?}: {errors}");
    assert!(!errors.contains("unexpected"), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The output of `perf script`: one line for each sample, with single spaces between the fields.
pub(super) fn script(path: &Path) -> Vec<String> {
    let fields = "comm,tid,cpu,time,event,addr,ip,sym,symoff";
    let text = perf(&["script", "--ns", "-F", fields], path);
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}
