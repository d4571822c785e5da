//! Restores snapshots that are damaged, that a stranger has made, or that would show the operator's files to the guest.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::machine::{Machine, marking, restore_refused, restored};
use common::{Bench, messages, out, power_off, refused, run, vmm};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A user of the host who is neither the operator nor a machine's user.
const STRANGER: u32 = 1234;

/// Whether the tests may act as another user.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Where [`showing`] reads a byte.
const SHOWN: u64 = 8 << 20;

/// A guest that prints `!`, waits for a byte of input, prints the byte at [`SHOWN`], and powers off.
fn showing() -> Vec<u8> {
    let mut code = out(0x3f8, b'!');
    // mov ecx, 8 MiB
    code.extend([0xb9, 0x00, 0x00, 0x80, 0x00]);
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    // mov dx, 0x3f8; in al, dx; mov al, [rcx]; out dx, al
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xec, 0x8a, 0x01, 0xee]);
    code.extend(power_off());
    code
}

/// Saves a machine with the guest [`showing`] in the directory `name`.
fn saved(bench: &Bench, name: &str) -> PathBuf {
    let mut machine = Machine::start(run(&bench.kernel(&showing())), bench.path("vm.sock"));
    assert_eq!(machine.said(1), "!");
    let directory = bench.path(name);
    machine.saved(&directory);
    machine.end();
    directory
}

/// Restores the snapshot in `directory`, and gives its guest a byte of input.
fn shown(directory: &Path, args: &[&str]) -> Output {
    restored(directory, args, b"x")
}

/// A file of the operator that only he can read: a disk image, or the like. To show it, it has the memory of the snapshot
/// in `directory` with the letter `S` where [`showing`] reads, but not the snapshot's name.
fn secret(bench: &Bench, directory: &Path) -> PathBuf {
    let path = bench.path("secret");
    fs::copy(directory.join("memory"), &path).expect("copied");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("ours");
    let file = OpenOptions::new().write(true).open(&path).expect("ours");
    let length = file.metadata().expect("a file").len();
    file.write_all_at(&[0; 4096], length - 4096).expect("room");
    file.write_all_at(b"S", SHOWN).expect("room");
    path
}

fn give(directory: &Path, uid: u32) {
    for name in ["memory", "state", "."] {
        std::os::unix::fs::lchown(directory.join(name), Some(uid), Some(uid)).expect("root");
    }
}

/// The header of the state in `directory`.
fn header(directory: &Path) -> Value {
    let text = fs::read_to_string(directory.join("state")).expect("text");
    serde_json::from_str(text.lines().next().expect("a line")).expect("JSON")
}

/// Replaces the header of the state in `directory`.
fn set_header(directory: &Path, change: impl FnOnce(&mut Value)) {
    let path = directory.join("state");
    let text = fs::read_to_string(&path).expect("text");
    let body = text.lines().nth(1).expect("a second line");
    let mut header = header(directory);
    change(&mut header);
    fs::write(&path, format!("{header}\n{body}\n")).expect("written");
}

/// Exchanges two digits of the digest that follows `before` in the state in `directory`.
fn swap_digits(directory: &Path, before: &str) {
    let path = directory.join("state");
    let mut text = fs::read(&path).expect("readable");
    let header = String::from_utf8_lossy(&text).into_owned();
    let first = header.find(before).expect("a digest") + before.len();
    let other = (first..first + 64).find(|&at| text[at] != text[first]);
    text.swap(first, other.expect("another digit"));
    fs::write(&path, text).expect("written");
}

#[test]
fn forged_snapshot_shows_no_file_of_the_operator() {
    let bench = Bench::new();
    let directory = saved(&bench, "here");
    let secret = secret(&bench, &directory);
    let linked = |it: &Path| {
        fs::remove_file(it.join("memory")).expect("there");
        symlink(&secret, it.join("memory")).expect("made");
    };
    let hard_linked = |it: &Path| {
        fs::remove_file(it.join("memory")).expect("there");
        fs::hard_link(&secret, it.join("memory")).expect("made");
    };
    let without_id = |it: &Path| set_header(it, |header| header["id"] = json!(""));
    let no = |words: &str, change: &dyn Fn(&Path)| {
        let forged = changed(&bench, &directory, change);
        refused(&shown(&forged, &[]), 1, &[words]);
    };
    for link in [&linked as &dyn Fn(&Path), &hard_linked] {
        no("lowercase hexadecimal digits", &|it| {
            link(it);
            without_id(it);
        });
    }
    no("memory is a symbolic link", &linked);
    no("does not end with the name", &hard_linked);
    for id in ["0".repeat(31), "A".repeat(32), format!("+{}", "0".repeat(31))] {
        no("lowercase hexadecimal digits", &|it| {
            set_header(it, |header| header["id"] = json!(id));
        });
    }
    no("state is a symbolic link", &|it| {
        fs::rename(it.join("state"), it.join("moved")).expect("ours");
        symlink("moved", it.join("state")).expect("made");
    });
    let link = bench.path("link");
    symlink(&directory, &link).expect("made");
    for link in [link.clone(), link.join("")] {
        refused(&shown(&link, &[]), 1, &["link is a symbolic link"]);
    }
}

#[test]
fn snapshot_of_a_stranger_is_refused_unless_the_machine_is_theirs() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let directory = saved(&bench, "here");
    let secret = secret(&bench, &directory);
    let jail = bench.path("jail");
    fs::create_dir(&jail).expect("made");
    let evil = changed(&bench, &directory, |it| {
        set_header(it, |header| header["id"] = json!(""));
        fs::remove_file(it.join("memory")).expect("there");
        symlink(&secret, it.join("memory")).expect("made");
    });
    give(&evil, STRANGER);
    let jailed = ["--chroot", jail.to_str().expect("text")];
    let as_nobody = [&["--user", "65534:65534"], &jailed[..]].concat();
    let remedies = ["belongs to user 1234", "65534", "--user", "chown"];
    refused(&shown(&evil, &as_nobody), 1, &remedies);
    refused(&shown(&evil, &[]), 1, &["belongs to user 1234", "not to user 0:"]);
    // The machine's own user can make a snapshot, but not of another user's files.
    let theirs = [&["--user", "1234:1234"], &jailed[..]].concat();
    let mine = changed(&bench, &directory, |it| give(it, STRANGER));
    let output = shown(&mine, &theirs);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert_eq!(output.stdout, b"\0");
    for name in ["memory", "state"] {
        let mixed = changed(&bench, &directory, |it| give(it, STRANGER));
        chown(mixed.join(name), Some(0), Some(0)).expect("root");
        let words = [name, "belongs to user 0", "directory to user 1234", "chown"];
        refused(&shown(&mixed, &theirs), 1, &words);
    }
}

/// A machine that was saved in `base`, and then in `diff` as a diff. Returns both directories.
fn chain(bench: &Bench, base: &str, diff: &str) -> [PathBuf; 2] {
    let mut machine = Machine::boot_of(bench, &marking(), &["--track-dirty"]);
    let [base, diff] = [base, diff].map(|name| bench.path(name));
    for path in [&base, &diff] {
        fs::create_dir_all(path.parent().expect("a directory")).expect("made");
    }
    machine.saved(&base);
    assert_eq!(machine.next(), "aa");
    machine.saved_diff(&diff, &base);
    machine.end();
    [base, diff]
}

#[test]
fn base_is_a_name_beside_its_diff() {
    let bench = Bench::new();
    let [base, diff] = chain(&bench, "base", "diff");
    assert_eq!(header(&diff)["base"]["directory"], "base");
    let absolute = base.to_str().expect("text").to_owned();
    for path in [absolute.as_str(), "../base", "..", ".", "./base", "x/base", ""] {
        let forged = changed(&bench, &diff, |it| {
            set_header(it, |header| header["base"]["directory"] = json!(path));
        });
        restore_refused(&forged, &[], 1, &["a name beside the diff"]);
    }
    let moved = bench.path("moved");
    fs::rename(&base, &moved).expect("ours");
    symlink(&moved, &base).expect("made");
    restore_refused(&diff, &[], 1, &["base is a symbolic link"]);
}

#[test]
fn base_whose_digest_differs_is_refused() {
    let bench = Bench::new();
    let [_, diff] = chain(&bench, "base", "diff");
    let forged = changed(&bench, &diff, |it| {
        set_header(it, |header| {
            // The last digest in the header, so that the state's own digest stays.
            let digest = header["base"]["digest"].as_str().expect("text").to_owned();
            let turned: String = digest[1..].chars().chain(digest.chars().take(1)).collect();
            assert_ne!(turned, digest);
            header["base"]["digest"] = turned.into();
        });
    });
    restore_refused(&forged, &[], 1, &["base is not the snapshot"]);
}

#[test]
fn base_elsewhere_is_restored_when_it_is_named() {
    let bench = Bench::new();
    let [base, diff] = chain(&bench, "first/base", "second/diff");
    let other = bench.path("other");
    fs::create_dir(&other).expect("made");
    for name in ["memory", "state"] {
        fs::copy(base.join(name), other.join(name)).expect("copied");
    }
    fs::set_permissions(other.join("state"), Permissions::from_mode(0o600)).expect("ours");
    set_header(&other, |header| header["id"] = json!("0".repeat(32)));
    restore_refused(&diff, &[], 1, &["second/base does not exist", "--base"]);
    let [base, other] = [&base, &other].map(|path| path.to_str().expect("text"));
    let words = ["not based on", "other", "--base"];
    restore_refused(&diff, &["--base", base, "--base", other], 1, &words);
    let output = vmm(["run", "--kernel", "/dev/null", "--base", base]).output();
    refused(&output.expect("vmm starts"), 2, &["--restore"]);
    let args = ["--base", base, "--track-dirty"];
    let mut machine = Machine::restore(&diff, bench.path("other.sock"), &args);
    assert_eq!(machine.next(), "bb");
    // The chain goes on from there.
    let third = bench.path("second/third");
    machine.saved_diff(&third, &diff);
    machine.end();
    let mut machine = Machine::restore(&third, bench.path("third.sock"), &["--base", base]);
    assert_eq!(machine.next(), "cc");
    machine.end();
}

/// Copies the snapshot in `from`, and applies `change` to the copy.
fn changed(bench: &Bench, from: &Path, change: impl FnOnce(&Path)) -> PathBuf {
    let directory = bench.path("changed");
    if directory.exists() {
        fs::remove_dir_all(&directory).expect("ours");
    }
    fs::create_dir(&directory).expect("made");
    for name in ["memory", "state"] {
        let to = directory.join(name);
        fs::copy(from.join(name), &to).expect("copied");
        fs::set_permissions(&to, Permissions::from_mode(0o600)).expect("ours");
    }
    change(&directory);
    directory
}

fn replaced(directory: &Path, from: &str, to: &str) {
    let path = directory.join("state");
    let text = fs::read_to_string(&path).expect("text");
    assert!(text.contains(from), "no {from} in {text:.200}");
    fs::write(&path, text.replacen(from, to, 1)).expect("written");
}

#[test]
fn snapshot_that_is_damaged_or_does_not_fit_starts_nothing() {
    let bench = Bench::new();
    let machine = Machine::boot(&bench, &["--vcpus", "2"]);
    let (one, other) = (bench.path("one"), bench.path("other"));
    machine.saved(&one);
    machine.saved(&other);
    machine.end();
    restore_refused(&bench.path("nowhere"), &[], 1, &["nowhere: No such file"]);
    restore_refused(&one, &["--vcpus", "3"], 2, &["--vcpus", "has 2"]);
    restore_refused(&one, &["--memory", "64"], 2, &["--memory", "has 16"]);
    restore_refused(&one, &["--no-vpmu"], 2, &["--no-vpmu", "has a PMU"]);
    restore_refused(&one, &["--pmu", "off"], 2, &["--pmu", "has a PMU"]);
    restore_refused(&one, &["--on-reset", "restart"], 2, &["--kernel"]);
    let no = |change: &dyn Fn(&Path), words: &[&str]| {
        restore_refused(&changed(&bench, &one, change), &[], 1, words);
    };
    let gone = |name: &'static str| move |directory: &Path| fs::remove_file(directory.join(name)).expect("there");
    no(&gone("state"), &["state"]);
    no(&gone("memory"), &["memory"]);
    let swapped = |directory: &Path| {
        fs::copy(other.join("memory"), directory.join("memory")).expect("copied");
    };
    no(&swapped, &["memory", "different snapshots"]);
    let shorter = |directory: &Path| {
        let memory = OpenOptions::new().write(true).open(directory.join("memory"));
        memory.expect("there").set_len(16 << 20).expect("shorter");
    };
    no(&shorter, &["memory", "damaged"]);
    let cut = |directory: &Path| {
        let state = OpenOptions::new().write(true).open(directory.join("state"));
        state.expect("there").set_len(5000).expect("shorter");
    };
    no(&cut, &["state", "damaged"]);
    let flipped = |directory: &Path| {
        let state: File = OpenOptions::new().read(true).write(true).open(directory.join("state")).expect("there");
        let place = state.metadata().expect("a file").len() / 2;
        let mut byte = [0];
        state.read_exact_at(&mut byte, place).expect("in the file");
        let changed = [if byte == *b"1" { b'2' } else { b'1' }];
        state.write_all_at(&changed, place).expect("in the file");
    };
    no(&flipped, &["state", "damaged"]);
    no(&|it| replaced(it, "\"version\":2", "\"version\":9"), &["version 9"]);
    no(&|it| replaced(it, std::env::consts::ARCH, "sparc"), &["sparc", std::env::consts::ARCH]);
    no(&|it| replaced(it, "\"vcpus\":2", "\"vcpus\":3"), &["invalid machine"]);
    no(&|it| replaced(it, "\"memory_mib\":16", "\"memory_mib\":17"), &["memory"]);
    no(&|it| fs::write(it.join("state"), "dear diary\n").expect("written"), &["not the state"]);
    let fifo = |name: &'static str| {
        move |directory: &Path| {
            let path = directory.join(name);
            fs::remove_file(&path).expect("there");
            let made = Command::new("mkfifo").arg(&path).status();
            assert!(made.expect("mkfifo starts").success());
        }
    };
    // JSON that differs only in its digests.
    no(&|it| swap_digits(it, "\"digest\":\""), &["digest"]);
    no(&fifo("state"), &["state is not a regular file"]);
    no(&fifo("memory"), &["memory is not a regular file"]);
}

/// Applies `forge` to the state of the snapshot in `directory`, and updates the digest.
fn reseal(directory: &Path, forge: impl FnOnce(&mut Value)) {
    let path = directory.join("state");
    let text = fs::read_to_string(&path).expect("text");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let [mut header, mut state]: [Value; 2] = lines.try_into().expect("two lines");
    forge(&mut state);
    let state = state.to_string();
    let digits = Sha256::digest(&state);
    let digits: String = digits.iter().map(|byte| format!("{byte:02x}")).collect();
    header["digest"] = digits.into();
    fs::write(&path, format!("{header}\n{state}\n")).expect("written");
}

#[test]
fn forged_state_with_a_digest_of_its_own_starts_nothing() {
    let bench = Bench::new();
    let event = ["--track-dirty", "--persistent", "marks,name=flight"];
    let mut machine = Machine::boot_of(&bench, &marking(), &event);
    let (base, diff) = (bench.path("base"), bench.path("diff"));
    machine.saved(&base);
    assert_eq!(machine.next(), "aa");
    machine.saved_diff(&diff, &base);
    machine.end();
    let forged = |pointer: &str, value: Value, words: &[&str]| {
        let forge = |state: &mut Value| *state.pointer_mut(pointer).expect("there") = value;
        let forged = changed(&bench, &diff, |directory| reseal(directory, forge));
        restore_refused(&forged, &[], 1, words);
    };
    forged("/pmu/device/format", json!(99), &["format 99"]);
    forged("/pmu/device/vcpus", json!([]), &["vCPUs"]);
    forged("/pmu/device/next_id", json!(0), &["next id"]);
    let page = "/pmu/device/sinks/0/ring/pages/0";
    forged(page, json!(1u64 << 62), &["ring"]);
    forged("/pmu/transport/queues", json!([]), &["queues"]);
    forged("/vm/irqchips", json!([]), &["interrupt controllers"]);
    forged("/vcpus/0/msrs/0/0", json!(0xdead_0001_u32), &["0xdead0001"]);
    for pages in [json!([[1, 0]]), json!([[1u64 << 40, 1]]), json!([[7, 1], [7, 1]]), json!([[1, u64::MAX]])] {
        forged("/changed", pages, &["invalid machine"]);
    }
    forged("/changed", json!(null), &["invalid machine"]);
}
