//! Names of tasks and of the kernel's functions, as the records of a file change them.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::fs;
use std::io::Cursor;

use common::{CHAINS, CONTEXT_KERNEL, KERNEL, MAP, TAKEN, Taken, event, record, sample, text, with_records};
use vpmu::PersistentStatus;
use vpmu::abi;
use vpmu_profile::{Format, Names, Profile};

/// How far the kernel is from the addresses in [`MAP`].
const SLIDE: u64 = 0x1900_0000;
const FORK: u32 = 7;
const COMM: u32 = 3;
const MMAP: u32 = 1;
const KSYMBOL: u32 = 17;

fn clock() -> PersistentStatus {
    event(11, "cpu-clock", 0, abi::KIND_SOFTWARE, CHAINS)
}

/// A record of a task: process, thread, words and a name. Its trailer has the time.
fn of_task(kind: u32, (pid, tid): (u32, u32), words: &[u64], name: &str, time: u64) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(bytes.len() + 8 - bytes.len() % 8, 0);
    let name = bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap()));
    let task = u64::from(tid) << 32 | u64::from(pid);
    let body = [task].into_iter().chain(words.iter().copied()).chain(name);
    let trailer = [task, time, 0, 11];
    record(kind, KERNEL, &body.chain(trailer).collect::<Vec<u64>>())
}

fn at(ip: u64, time: u64) -> Vec<u8> {
    let chain = [CONTEXT_KERNEL, ip, common::SYSRQ + SLIDE];
    sample(&clock(), KERNEL, ip, Taken { time, chain: &chain, ..TAKEN })
}

#[test]
fn kernel_is_named_at_the_address_where_it_runs() {
    let map = tempfile::NamedTempFile::new().unwrap();
    fs::write(map.path(), format!("ffffffff81000000 T _text\n{MAP}")).unwrap();
    let start = 0xffff_ffff_8100_0000 + SLIDE;
    let kernel = of_task(MMAP, (u32::MAX, 0), &[start, 0x100_0000, start], "[kernel.kallsyms]_text", 0);
    let bytes = with_records(&[kernel, at(common::IDLE + SLIDE, 10)]);
    let named = Profile::read(Cursor::new(bytes.clone()), Names::none().with(Some(map.path()), None).unwrap()).unwrap();
    assert_eq!(text(&named, Format::Folded), ":6;sysrq_handle_crash;do_idle 1\n");
    assert_eq!(named.nameless, (0, 0));
    let nameless = common::profile(bytes);
    assert_eq!(text(&nameless, Format::Folded), ":6;[kernel];[kernel] 1\n");
    assert_eq!(nameless.nameless, (2, 0));
}

#[test]
fn sample_has_the_name_that_its_task_had_then() {
    let fork = record(FORK, 0, &[1 << 32 | 5, 1 << 32 | 6, 5, 5 << 32 | 6, 5, 0, 11]);
    let bytes = with_records(&[
        of_task(COMM, (1, 1), &[], "sh", 1),
        fork,
        at(common::IDLE, 10),
        of_task(COMM, (5, 6), &[], "ls", 20),
        at(common::IDLE, 30),
    ]);
    let profile = common::profile(bytes);
    let tasks: Vec<_> = profile.tasks.iter().map(|task| (task.pid, task.tid, task.name.as_str())).collect();
    assert_eq!(tasks, [(Some(5), Some(6), "sh"), (Some(5), Some(6), "ls")]);
}

#[test]
fn firefox_names_a_process_after_its_last_program() {
    let main = |time| sample(&clock(), KERNEL, common::IDLE, Taken { task: (5, 5), time, ..TAKEN });
    let bytes = with_records(&[
        of_task(COMM, (5, 5), &[], "sh", 1),
        main(10),
        of_task(COMM, (5, 5), &[], "ls", 20),
        main(30),
        of_task(COMM, (5, 6), &[], "worker", 35),
        at(common::IDLE, 40),
    ]);
    let json: serde_json::Value = serde_json::from_str(&text(&common::profile(bytes), Format::Firefox)).unwrap();
    let threads = json["threads"].as_array().unwrap();
    let mut found: Vec<_> = threads
        .iter()
        .map(|thread| ["processName", "name", "isMainThread"].map(|key| thread[key].to_string().replace('"', "")))
        .collect();
    found.sort();
    assert_eq!(found, [["ls", "ls", "true"], ["ls", "sh", "false"], ["ls", "worker", "false"]]);
}

#[test]
fn function_that_the_kernel_removed_has_no_name() {
    let symbol = |flags: u64, time: u64| {
        let name = u64::from_le_bytes(*b"bpf_prog");
        record(KSYMBOL, 0, &[common::IDLE, flags << 48 | 0x100, name, 0, 0, time, 0, 11])
    };
    let bytes = with_records(&[symbol(0, 1), at(common::IDLE, 10), symbol(1, 20), at(common::IDLE, 30)]);
    let profile = common::profile(bytes);
    assert_eq!(text(&profile, Format::Folded), ":6;[kernel];[kernel] 1\n:6;[kernel];bpf_prog 1\n");
}
