//! Recordings of hand-made histories.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part; tests fail by panicking")]

use std::fs;
use std::io::Cursor;

use vpmu::source::Rate;
use vpmu::{History, PersistentStatus, abi};
use vpmu_profile::{Format, Names, Options, Profile, Selection};
use vpmu_recorder::{Recording, Symbols};

/// IDENTIFIER, IP, TID, TIME, ADDR, CPU, PERIOD.
pub(crate) const USUAL: u64 = 1 << 16 | 0x18f;
/// The same, with a call chain.
pub(crate) const CHAINS: u64 = USUAL | 1 << 5;

pub(crate) const KERNEL: u16 = 1;
pub(crate) const USER: u16 = 2;
pub(crate) const CONTEXT_KERNEL: u64 = u64::MAX - 127;
pub(crate) const CONTEXT_USER: u64 = u64::MAX - 511;

/// The kernel's functions. Symbols of a recording's addresses become part of the recording.
pub(crate) const MAP: &str = "\
ffffffff81000000 T startup_64
ffffffff81000100 t do_idle
ffffffff81000180 T panic
ffffffff81000200 t sysrq_handle_crash
ffffffff81000300 D not_code
";
pub(crate) const IDLE: u64 = 0xffff_ffff_8100_0108;
pub(crate) const PANIC: u64 = 0xffff_ffff_8100_0190;
pub(crate) const SYSRQ: u64 = 0xffff_ffff_8100_0210;

/// An event that the operator started on vCPU `vcpu`.
pub(crate) fn event(id: u64, name: &str, vcpu: u32, kind: u32, sample_type: u64) -> PersistentStatus {
    PersistentStatus {
        id,
        name: name.to_owned(),
        event: name.to_owned(),
        operator: true,
        vcpu,
        kind,
        config: 0,
        rate: Some(if kind == abi::KIND_SOFTWARE { Rate::Frequency(100) } else { Rate::Period(1) }),
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

/// A sample's task, time, address, period and call chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken<'a> {
    pub(crate) task: (u32, u32),
    pub(crate) time: u64,
    pub(crate) value: u64,
    pub(crate) period: u64,
    pub(crate) chain: &'a [u64],
}

pub(crate) const TAKEN: Taken<'static> = Taken { task: (5, 6), time: 10, value: 0, period: 1, chain: &[] };

pub(crate) fn sample(of: &PersistentStatus, misc: u16, ip: u64, taken: Taken<'_>) -> Vec<u8> {
    let (pid, tid) = taken.task;
    let task = u64::from(tid) << 32 | u64::from(pid);
    let mut words = vec![of.id, ip, task, taken.time, taken.value, of.vcpu.into(), taken.period];
    if of.sample_type & 1 << 5 != 0 {
        words.push(taken.chain.len() as u64);
        words.extend(taken.chain);
    }
    record(9, misc, &words)
}

pub(crate) fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u8> {
    let size = 8 + 8 * words.len() as u64;
    let header = u64::from(kind) | u64::from(misc) << 32 | size << 48;
    [header].iter().chain(words).flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn history(event: &PersistentStatus, records: &[Vec<u8>]) -> History {
    History { event: event.clone(), records: records.concat() }
}

/// Writes a recording with the names of [`MAP`].
pub(crate) fn recorded(histories: &[History]) -> Vec<u8> {
    let map = tempfile::NamedTempFile::new().unwrap();
    fs::write(map.path(), MAP).unwrap();
    let mut recording = Recording::new(histories);
    recording.name_functions(&Symbols::open(map.path()).unwrap()).unwrap();
    let mut bytes = Vec::new();
    recording.write(&mut bytes).unwrap();
    bytes
}

pub(crate) fn profile(bytes: Vec<u8>) -> Profile {
    Profile::read(Cursor::new(bytes), Names::none()).unwrap()
}

pub(crate) fn exported(profile: &Profile, format: Format, options: &Options) -> Vec<u8> {
    let selection = Selection::new(profile, options).unwrap();
    let mut bytes = Vec::new();
    format.write(&selection, &mut bytes).unwrap();
    bytes
}

pub(crate) fn text(profile: &Profile, format: Format) -> String {
    String::from_utf8(exported(profile, format, &Options::default())).unwrap()
}

/// A guest of two vCPUs that panics: a clock with chains on each vCPU, marks and exits. Samples were lost.
pub(crate) fn guest() -> Vec<u8> {
    let clocks = [0, 1].map(|vcpu| {
        let id = u64::from(11 + vcpu);
        event(id, &format!("cpu-clock-{vcpu}"), vcpu, abi::KIND_SOFTWARE, CHAINS)
    });
    let [first, second] = &clocks;
    let of_first = [
        sample(first, KERNEL, IDLE, Taken { task: (0, 0), chain: &[CONTEXT_KERNEL, IDLE], ..TAKEN }),
        sample(
            first,
            USER,
            0x40_1000,
            Taken { time: 30, period: 9, chain: &[CONTEXT_USER, 0x40_1000, 0x40_2000], ..TAKEN },
        ),
        sample(
            first,
            KERNEL,
            PANIC,
            Taken { time: 50, chain: &[CONTEXT_KERNEL, PANIC, SYSRQ, CONTEXT_USER, 0x40_1000], ..TAKEN },
        ),
    ];
    let of_second = [
        sample(second, KERNEL, IDLE, Taken { task: (0, 0), time: 20, chain: &[CONTEXT_KERNEL, IDLE], ..TAKEN }),
        sample(second, KERNEL, IDLE, Taken { task: (0, 0), time: 40, chain: &[CONTEXT_KERNEL, IDLE], ..TAKEN }),
    ];
    let marks = PersistentStatus { lost: 41, ..event(21, "marks", 0, abi::KIND_MARK, USUAL) };
    let of_marks = [
        sample(&marks, USER, 0x40_1008, Taken { time: 25, value: 7, ..TAKEN }),
        sample(&marks, USER, 0x40_1008, Taken { time: 26, value: 8, ..TAKEN }),
    ];
    let exits = event(31, "exits-io", 0, abi::KIND_EXITS, USUAL);
    let of_exits = [sample(&exits, USER, 0x40_100c, Taken { time: 27, ..TAKEN })];
    recorded(&[
        history(first, &of_first),
        history(second, &of_second),
        history(&marks, &of_marks),
        history(&exits, &of_exits),
    ])
}

pub(crate) fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

pub(crate) fn word(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()).try_into().unwrap()
}

/// Replaces all records of a file.
pub(crate) fn with_records(records: &[Vec<u8>]) -> Vec<u8> {
    let clock = event(11, "cpu-clock", 0, abi::KIND_SOFTWARE, CHAINS);
    let mut bytes = recorded(&[history(&clock, &[])]);
    let (at, size) = (word(&bytes, 40), word(&bytes, 48));
    let records = records.concat();
    let features = bytes.split_off(at + size);
    bytes.truncate(at);
    bytes.extend(&records);
    put(&mut bytes, 48, records.len() as u64);
    // The table of two features has their offsets.
    let mut features = features;
    let moved = records.len().wrapping_sub(size);
    for at in [0, 16] {
        let offset = word(&features, at).wrapping_add(moved) as u64;
        put(&mut features, at, offset);
    }
    bytes.extend(features);
    bytes
}
