//! Saves a running machine. Afterwards that machine continues, and so does each machine that is restored from the
//! snapshot.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{
    Bench, Running, ctl, kill, messages, out, read_output, read_report, refused, run, terminate,
    values, vmm,
};
use rustix::cmsg_space;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A guest that prints `!`. Then, for each byte of input, it prints the next letter twice: once from memory, and once
/// from a register. The first letter is `a`.
fn spelling() -> Vec<u8> {
    // mov bl, 'a'; mov ecx, 3 MiB; mov [rcx], bl
    let mut code = vec![0xb3, b'a', 0xb9, 0x00, 0x00, 0x30, 0x00, 0x88, 0x19];
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    // mov dx, 0x3f8; in al, dx; mov al, [rcx]; out dx, al; mov al, bl; out dx, al
    code.extend([
        0x66, 0xba, 0xf8, 0x03, 0xec, 0x8a, 0x01, 0xee, 0x88, 0xd8, 0xee,
    ]);
    // inc bl; inc byte [rcx]; jmp again
    code.extend([0xfe, 0xc3, 0xfe, 0x01, 0xeb, 0xe6]);
    code
}

/// A guest that prints `!`, and then the same letters as [`spelling`]. Before each letter, it writes to one page of
/// memory and places a mark. After the letter, it writes nothing.
fn marking() -> Vec<u8> {
    // mov bl, '`'; mov ecx, 3 MiB; mov [rcx], bl
    let mut code = vec![0xb3, b'`', 0xb9, 0x00, 0x00, 0x30, 0x00, 0x88, 0x19];
    // mov edi, the doorbell; mov dword [rdi], 1
    code.extend([0xbf, 0x00, 0x10, 0x00, 0xd0, 0xc7, 0x07, 1, 0, 0, 0]);
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again; mov dx, 0x3f8; in al, dx
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xec]);
    // inc bl; inc byte [rcx]; mov dword [rdi], 7
    code.extend([0xfe, 0xc3, 0xfe, 0x01, 0xc7, 0x07, 7, 0, 0, 0]);
    // mov al, [rcx]; out dx, al; mov al, bl; out dx, al; jmp again
    code.extend([0x8a, 0x01, 0xee, 0x88, 0xd8, 0xee, 0xeb, 0xe0]);
    code
}

/// The page that the guests in these tests write to.
const WRITTEN: u64 = (3 << 20) / 4096;
/// The first page of the operator's rings in the memory file. The file has 16 MiB of RAM, and then the window of 16
/// MiB. These rings are in the last quarter of the window.
const RING: u64 = (28 << 20) / 4096;

/// The pages in the diff in `directory`.
fn pages(directory: &Path) -> Value {
    let state = fs::read_to_string(directory.join("state")).expect("text");
    let line = state.lines().nth(1).expect("a second line");
    let state: Value = serde_json::from_str(line).expect("JSON");
    state["changed"].clone()
}

/// The memory of the snapshot in `directory`, without the last page of the file, which has the snapshot's name.
fn memory(directory: &Path) -> Vec<u8> {
    let mut memory = fs::read(directory.join("memory")).expect("readable");
    memory.truncate(memory.len() - 4096);
    memory
}

/// A machine whose guest prints a letter twice for each byte of input.
struct Machine {
    child: Running,
    socket: PathBuf,
}

impl Machine {
    fn start(mut command: Command, socket: PathBuf) -> Self {
        // The default path of a recording is relative, so run in the test's own directory.
        let directory = socket.parent().expect("a directory").to_owned();
        let command = command
            .current_dir(directory)
            .arg("--ctl")
            .arg(&socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = Running::start(command);
        Self { child, socket }
    }

    fn boot(bench: &Bench, args: &[&str]) -> Self {
        Self::boot_of(bench, &spelling(), args)
    }

    fn boot_of(bench: &Bench, code: &[u8], args: &[&str]) -> Self {
        let mut command = run(&bench.kernel(code));
        command.args(args);
        let mut machine = Self::start(command, bench.path("vm.sock"));
        assert_eq!(machine.said(1), "!");
        machine
    }

    fn restore(directory: &Path, socket: PathBuf, args: &[&str]) -> Self {
        let mut command = vmm(["run", "--restore"]);
        command.arg(directory).args(args);
        Self::start(command, socket)
    }

    fn said(&mut self, bytes: usize) -> String {
        read_output(&mut self.child, bytes)
    }

    /// The next letter.
    fn next(&mut self) -> String {
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(b"x").expect("the machine reads");
        self.said(2)
    }

    fn snapshot(&self, directory: &Path, args: &[&str]) -> Output {
        let directory = directory.to_str().expect("text");
        ctl(&self.socket, &[&["snapshot", directory], args].concat())
    }

    /// Takes a snapshot whose state cannot be written. The limit on file sizes applies to `vmm ctl`, which writes the
    /// state. It does not apply to the machine, which writes the memory.
    fn snapshot_without_room(&self, directory: &Path, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_vmm"), "ctl"]);
        command.arg("--socket").arg(&self.socket);
        command.arg("snapshot").arg(directory).args(args);
        command.output().expect("sh starts")
    }

    /// Waits until the machine accepts connections on its control socket.
    fn listens(&mut self) {
        while UnixStream::connect(&self.socket).is_err() {
            assert_eq!(self.child.try_wait().expect("a child"), None);
            std::thread::yield_now();
        }
    }

    fn saved_diff(&self, directory: &Path, base: &Path) {
        let output = self.diff(directory, base);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }

    fn diff(&self, directory: &Path, base: &Path) -> Output {
        self.snapshot(directory, &["--diff", base.to_str().expect("text")])
    }

    fn saved(&self, directory: &Path) {
        let output = self.snapshot(directory, &[]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }

    /// Requests a snapshot with `then_exit`, and reads the reply. Does not finish the snapshot. Returns the client's
    /// connection.
    fn asked(&self, bench: &Bench) -> BufReader<UnixStream> {
        let stream = UnixStream::connect(&self.socket).expect("the machine listens");
        let memory = File::create(bench.path("memory")).expect("made");
        let files = [memory.as_fd()];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        let line = b"{\"do\":\"snapshot\",\"id\":\"one\",\"then_exit\":true}\n";
        let slices = [IoSlice::new(line)];
        let sent = rustix::net::sendmsg(&stream, &slices, &mut ancillary, SendFlags::empty());
        assert_eq!(sent.expect("sent"), line.len());
        let mut client = BufReader::new(stream);
        let mut reply = String::new();
        client.read_line(&mut reply).expect("a reply");
        assert!(reply.starts_with("{\"ok\":{\"snapshot\":"), "{reply:.100}");
        client
    }

    /// Waits until the machine ends. Returns the exit status, the rest of the output, and the messages.
    fn rest(mut self) -> (i32, String, String) {
        let mut text = [String::new(), String::new()];
        let output = self.child.stdout.as_mut().expect("piped");
        output.read_to_string(&mut text[0]).expect("text");
        let log = self.child.stderr.as_mut().expect("piped");
        log.read_to_string(&mut text[1]).expect("text");
        let status = self.child.wait().expect("a child").code();
        let [text, log] = text;
        (status.expect("no signal"), text, log)
    }

    fn end(self) {
        terminate(self.child);
    }
}

/// Checks that `vmm run --restore` fails with the status `code` and a message that contains `words`, before the guest
/// runs.
#[track_caller]
fn restore_refused(directory: &Path, args: &[&str], code: i32, words: &[&str]) {
    let mut command = vmm(["run", "--restore"]);
    let output = command.arg(directory).args(args).output();
    refused(&output.expect("vmm starts"), code, words);
}

#[test]
fn snapshot_continues_where_it_was_taken_at_each_restore() {
    for args in [&["--no-vpmu"][..], &[], &["--vcpus", "2"]] {
        let bench = Bench::new();
        let mut machine = Machine::boot(&bench, args);
        assert_eq!([machine.next(), machine.next()], ["aa", "bb"]);
        let directory = bench.path("here");
        machine.saved(&directory);
        assert_eq!(machine.next(), "cc", "the saved machine itself continues");
        let sockets = ["one.sock", "two.sock"];
        let [mut one, mut two] =
            sockets.map(|name| Machine::restore(&directory, bench.path(name), &[]));
        assert_eq!([one.next(), one.next(), two.next()], ["cc", "dd", "cc"]);
        assert_eq!([two.next(), one.next(), machine.next()], ["dd", "ee", "dd"]);
        // A restored machine can be saved, too.
        let later = bench.path("later");
        one.saved(&later);
        let mut three = Machine::restore(&later, bench.path("three.sock"), &[]);
        assert_eq!(three.next(), "ff");
        for machine in [machine, one, two, three] {
            machine.end();
        }
    }
}

#[test]
fn machine_without_a_pmu_is_restored_by_the_flags_it_was_started_with() {
    let bench = Bench::new();
    let flags = ["--no-vpmu", "--window", "32M"];
    let machine = Machine::boot(&bench, &flags);
    let directory = bench.path("here");
    machine.saved(&directory);
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &flags);
    assert_eq!(other.next(), "aa");
    machine.end();
    other.end();
}

#[test]
fn machine_ends_with_its_snapshot_when_asked() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &["--then-exit"]);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert_eq!(machine.child.wait().expect("a child").code(), Some(6));
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!(other.next(), "bb");
    other.end();
}

#[test]
fn machine_ends_only_when_its_client_has_the_whole_snapshot() {
    let bench = Bench::new();
    let event = ["--persistent", "cpu-clock,freq=1000,name=clock"];
    let mut machine = Machine::boot(&bench, &event);
    let mut client = machine.asked(&bench);
    let input = machine.child.stdin.as_mut().expect("piped");
    input.write_all(b"x").expect("room");
    // The machine still serves other requests.
    for command in ["list", "flush"] {
        let output = ctl(&machine.socket, &[command]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }
    let output = machine.snapshot(&bench.path("here"), &[]);
    refused(&output, 1, &["another client"]);
    let line = b"{\"do\":\"finish\",\"id\":\"one\"}\n";
    client.get_mut().write_all(line).expect("sent");
    let mut reply = String::new();
    client.read_line(&mut reply).expect("a reply");
    assert_eq!(reply, "{\"ok\":\"done\"}\n");
    let (code, text, log) = machine.rest();
    assert_eq!((code, text.as_str()), (6, ""), "{log}");
}

#[test]
fn machine_continues_if_the_client_of_its_snapshot_is_gone() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    drop(machine.asked(&bench));
    assert_eq!(machine.next(), "aa");
    // The machine can be saved again.
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &["--then-exit"]);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    let (code, _, log) = machine.rest();
    assert_eq!(code, 6, "{log}");
    assert!(log.contains("the machine continues"), "{log}");
}

#[test]
fn machine_continues_if_its_state_cannot_be_written() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    assert_eq!(machine.next(), "aa");
    let directory = bench.path("here");
    let output = machine.snapshot_without_room(&directory, &["--then-exit"]);
    refused(&output, 1, &["the machine continues"]);
    assert!(!directory.exists());
    assert_eq!(machine.next(), "bb");
    kill("-TERM", &machine.child);
    let (code, _, log) = machine.rest();
    assert_eq!(code, 6, "{log}");
    assert!(
        log.contains("the machine continues") && log.contains("too large"),
        "{log}"
    );
}

#[test]
fn signal_ends_a_machine_whose_snapshot_is_not_finished() {
    let bench = Bench::new();
    let machine = Machine::boot(&bench, &[]);
    let client = machine.asked(&bench);
    machine.end();
    drop(client);
}

#[test]
fn files_of_a_snapshot_that_was_broken_off_give_way_to_the_next() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    fs::create_dir(&directory).expect("made");
    for name in ["memory", "state.unfinished"] {
        fs::write(directory.join(name), "part").expect("written");
    }
    machine.saved(&directory);
    let mut other = Machine::restore(&directory, bench.path("other.sock"), &[]);
    assert_eq!([machine.next(), other.next()], ["aa", "aa"]);
    machine.end();
    other.end();
}

#[test]
fn directory_that_is_not_empty_keeps_its_files_and_the_machine_runs_on() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    fs::create_dir(&directory).expect("made");
    fs::write(directory.join("notes"), "mine").expect("written");
    let output = machine.snapshot(&directory, &[]);
    refused(&output, 1, &["empty"]);
    assert_eq!(fs::read_dir(&directory).expect("there").count(), 1);
    assert_eq!(machine.next(), "aa");
    machine.end();
}

#[test]
fn failed_write_leaves_nothing_and_the_machine_runs_on() {
    let bench = Bench::new();
    // Ignore SIGXFSZ, so that a write beyond the file size limit fails instead of killing the machine.
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$@\"";
    command.args(["-c", script, "sh"]);
    let machine = run(&bench.kernel(&spelling()));
    command.arg(machine.get_program()).args(machine.get_args());
    let mut machine = Machine::start(command, bench.path("vm.sock"));
    assert_eq!(machine.said(1), "!");
    let directory = bench.path("here");
    let output = machine.snapshot(&directory, &[]);
    refused(&output, 1, &["cannot write the memory"]);
    assert!(!directory.exists());
    assert_eq!(machine.next(), "aa");
    machine.end();
}

#[test]
fn reset_of_a_restored_machine_boots_from_zeroed_memory() {
    let bench = Bench::new();
    // mov ecx, 3 MiB; cmp byte [rcx], 0
    let mut second = vec![0xb9, 0x00, 0x00, 0x30, 0x00, 0x80, 0x39, 0x00];
    // setne al; add al, '0'; mov dx, 0x3f8; out dx, al
    second.extend([0x0f, 0x95, 0xc0, 0x04, b'0', 0x66, 0xba, 0xf8, 0x03, 0xee]);
    second.extend(common::power_off());
    let kernel = bench.file("second.elf", &common::elf(&second, 0));
    let first = bench.file("first.elf", &common::elf(&resetting(), 0));
    let mut machine = Machine::start(run(&first), bench.path("first.sock"));
    assert_eq!(machine.said(1), "!");
    let directory = bench.path("here");
    machine.saved(&directory);
    machine.end();
    let mut command = vmm(["run", "--on-reset", "restart", "--kernel"]);
    command.arg(&kernel).arg("--restore").arg(&directory);
    let mut machine = Machine::start(command, bench.path("second.sock"));
    let input = machine.child.stdin.as_mut().expect("piped");
    input.write_all(b"x").expect("the machine reads");
    assert_eq!(machine.said(1), "0");
    assert_eq!(machine.child.wait().expect("a child").code(), Some(0));
}

/// A guest that writes to memory, prints `!`, and resets when it gets the first byte of input.
fn resetting() -> Vec<u8> {
    // mov ecx, 3 MiB; mov byte [rcx], 1
    let mut code = vec![0xb9, 0x00, 0x00, 0x30, 0x00, 0xc6, 0x01, 0x01];
    code.extend(out(0x3f8, b'!'));
    // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7]);
    code.extend(out(0xcf9, 0x06));
    code.extend(common::HALT);
    code
}

#[test]
fn diff_has_the_pages_written_since_its_base_and_no_others() {
    let bench = Bench::new();
    let ring = ["--persistent", "marks,name=flight,size=4K"];
    let args = [&["--track-dirty"], &ring[..]].concat();
    let mut machine = Machine::boot_of(&bench, &marking(), &args);
    assert_eq!(machine.next(), "aa");
    let [base, one, two] = ["base", "one", "two"].map(|name| bench.path(name));
    machine.saved(&base);
    assert_eq!(pages(&base), Value::Null);
    assert_eq!(machine.next(), "bb");
    machine.saved_diff(&one, &base);
    // The guest wrote its page. The device wrote the ring's metadata page, and the page that has the records.
    let written = json!([[WRITTEN, 1], [RING, 2]]);
    assert_eq!(pages(&one), written);
    machine.saved_diff(&two, &one);
    // Only the ring's metadata page was written, because the save updated the event's times there.
    assert_eq!(pages(&two), json!([[RING, 1]]));
    machine.end();
    let recording = bench.path("perf.data");
    let path = recording.to_str().expect("text");
    let args = ["--track-dirty", "--recording", path];
    let mut machine = Machine::restore(&two, bench.path("other.sock"), &args);
    assert_eq!(machine.next(), "cc");
    // The restored snapshot can be a base, too.
    let three = bench.path("three");
    machine.saved_diff(&three, &two);
    assert_eq!(pages(&three), written);
    machine.end();
    assert_eq!(values(&recording), [1, 7, 7, 7]);
    let mut machine = Machine::restore(&three, bench.path("third.sock"), &[]);
    assert_eq!(machine.next(), "dd");
    machine.end();
}

#[test]
fn diff_on_its_base_is_the_memory_of_a_whole_snapshot() {
    for args in [&["--track-dirty", "--no-vpmu"][..], &["--track-dirty"]] {
        let bench = Bench::new();
        let mut machine = Machine::boot(&bench, args);
        let [base, one, two, whole] = ["base", "one", "two", "whole"].map(|name| bench.path(name));
        assert_eq!(machine.next(), "aa");
        machine.saved(&base);
        assert_eq!(machine.next(), "bb");
        machine.saved_diff(&one, &base);
        assert_eq!([machine.next(), machine.next()], ["cc", "dd"]);
        machine.saved_diff(&two, &one);
        machine.saved(&whole);
        machine.end();
        // Move the snapshots, so that they are restored from another directory.
        let moved = bench.path("moved");
        fs::create_dir(&moved).expect("made");
        let place = |path: &Path| moved.join(path.file_name().expect("a name"));
        for path in [&base, &one, &two, &whole] {
            fs::rename(path, place(path)).expect("ours");
        }
        let [by_diff, by_whole] = [(&two, "by-diff"), (&whole, "by-whole")].map(|(from, name)| {
            let mut machine = Machine::restore(&place(from), bench.path("other.sock"), &[]);
            let again = bench.path(name);
            machine.listens();
            machine.saved(&again);
            machine.end();
            memory(&again)
        });
        assert!(by_diff == by_whole, "memory differs");
        assert!(by_whole == memory(&place(&whole)), "memory has changed");
    }
}

#[test]
fn diff_without_its_base_is_refused() {
    let bench = Bench::new();
    let [base, other, diff, one] = ["base", "other", "diff", "one"].map(|name| bench.path(name));
    let said = |output: &Output, words: &str| {
        refused(output, 1, &[words]);
        assert!(!diff.exists());
    };
    let machine = Machine::boot(&bench, &[]);
    machine.saved(&base);
    said(&machine.diff(&diff, &base), "--track-dirty");
    machine.end();
    fs::remove_dir_all(&base).expect("ours");
    let machine = Machine::boot(&bench, &["--track-dirty"]);
    said(&machine.diff(&diff, &base), "base/state");
    machine.saved(&base);
    machine.saved(&other);
    said(&machine.diff(&diff, &base), "the last one");
    machine.saved_diff(&one, &other);
    machine.end();
    restore_refused(&one, &["--memory", "64"], 2, &["--memory"]);
    fs::rename(&other, bench.path("away")).expect("ours");
    restore_refused(&one, &[], 1, &["snapshot's base", "other/state"]);
    fs::rename(&base, &other).expect("ours");
    restore_refused(&one, &[], 1, &["other is not the snapshot"]);
}

#[test]
fn pages_of_a_snapshot_that_failed_are_in_the_next_diff() {
    let bench = Bench::new();
    let mut machine = Machine::boot_of(&bench, &marking(), &["--track-dirty"]);
    let [base, failed, diff] = ["base", "failed", "diff"].map(|name| bench.path(name));
    machine.saved(&base);
    assert_eq!(machine.next(), "aa");
    let output = machine.snapshot_without_room(&failed, &[]);
    assert_eq!(output.status.code(), Some(1), "{}", messages(&output));
    machine.saved_diff(&diff, &base);
    assert_eq!(pages(&diff), json!([[WRITTEN, 1]]));
    machine.end();
}

#[test]
fn machine_that_was_reset_has_no_base() {
    let bench = Bench::new();
    let mut command = run(&bench.kernel(&resetting()));
    command.args(["--track-dirty", "--on-reset", "restart"]);
    let mut machine = Machine::start(command, bench.path("vm.sock"));
    assert_eq!(machine.said(1), "!");
    let base = bench.path("base");
    machine.saved(&base);
    let input = machine.child.stdin.as_mut().expect("piped");
    input.write_all(b"x").expect("the machine reads");
    assert_eq!(machine.said(1), "!");
    let output = machine.diff(&bench.path("diff"), &base);
    refused(&output, 1, &["reset"]);
    machine.end();
}

#[test]
fn events_go_on_over_twenty_saves_and_restores() {
    let bench = Bench::new();
    let event = ["--persistent", "marks,name=flight"];
    let mut machine = Machine::boot_of(&bench, &marking(), &event);
    let recording = bench.path("perf.data");
    let path = recording.to_str().expect("text");
    for (cycle, letter) in ('a'..='t').enumerate() {
        assert_eq!(machine.next(), format!("{letter}{letter}"));
        let directory = bench.path(&format!("{cycle}"));
        let output = machine.snapshot(&directory, &["--then-exit"]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
        assert_eq!(machine.child.wait().expect("a child").code(), Some(6));
        let socket = bench.path(&format!("{cycle}.sock"));
        machine = Machine::restore(&directory, socket, &["--recording", path]);
        if let Some(before) = cycle.checked_sub(1) {
            fs::remove_dir_all(bench.path(&format!("{before}"))).expect("ours");
        }
    }
    assert_eq!(machine.next(), "uu");
    let output = ctl(&machine.socket, &["list", "--json"]);
    let listed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let event = &listed["events"][0];
    assert_eq!((&event["count"], &event["lost"]), (&22.into(), &0.into()));
    machine.end();
    let marks = [&[1], &[7; 21][..]].concat();
    assert_eq!(values(&recording), marks);
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
    restore_refused(&bench.path("nowhere"), &[], 1, &["nowhere/state"]);
    restore_refused(&one, &["--vcpus", "3"], 2, &["--vcpus", "has 2"]);
    restore_refused(&one, &["--memory", "64"], 2, &["--memory", "has 16"]);
    restore_refused(&one, &["--no-vpmu"], 2, &["--no-vpmu", "has a PMU"]);
    restore_refused(&one, &["--pmu", "off"], 2, &["--pmu", "has a PMU"]);
    restore_refused(&one, &["--on-reset", "restart"], 2, &["--kernel"]);
    let no = |change: &dyn Fn(&Path), words: &[&str]| {
        restore_refused(&changed(&bench, &one, change), &[], 1, words);
    };
    let gone = |name: &'static str| {
        move |directory: &Path| fs::remove_file(directory.join(name)).expect("there")
    };
    no(&gone("state"), &["state"]);
    no(&gone("memory"), &["memory"]);
    let swapped = |directory: &Path| {
        fs::copy(other.join("memory"), directory.join("memory")).expect("copied");
    };
    no(&swapped, &["memory", "different snapshots"]);
    let shorter = |directory: &Path| {
        let memory = OpenOptions::new()
            .write(true)
            .open(directory.join("memory"));
        memory.expect("there").set_len(16 << 20).expect("shorter");
    };
    no(&shorter, &["memory", "damaged"]);
    let cut = |directory: &Path| {
        let state = OpenOptions::new().write(true).open(directory.join("state"));
        state.expect("there").set_len(5000).expect("shorter");
    };
    no(&cut, &["state", "damaged"]);
    let flipped = |directory: &Path| {
        let state: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(directory.join("state"))
            .expect("there");
        let place = state.metadata().expect("a file").len() / 2;
        let mut byte = [0];
        state.read_exact_at(&mut byte, place).expect("in the file");
        let changed = [if byte == *b"1" { b'2' } else { b'1' }];
        state.write_all_at(&changed, place).expect("in the file");
    };
    no(&flipped, &["state", "damaged"]);
    no(
        &|it| replaced(it, "\"version\":2", "\"version\":9"),
        &["version 9"],
    );
    no(
        &|it| replaced(it, std::env::consts::ARCH, "sparc"),
        &["sparc", std::env::consts::ARCH],
    );
    no(
        &|it| replaced(it, "\"vcpus\":2", "\"vcpus\":3"),
        &["invalid machine"],
    );
    no(
        &|it| replaced(it, "\"memory_mib\":16", "\"memory_mib\":17"),
        &["memory"],
    );
    no(
        &|it| fs::write(it.join("state"), "dear diary\n").expect("written"),
        &["not the state"],
    );
    let fifo = |name: &'static str| {
        move |directory: &Path| {
            let path = directory.join(name);
            fs::remove_file(&path).expect("there");
            let made = Command::new("mkfifo").arg(&path).status();
            assert!(made.expect("mkfifo starts").success());
        }
    };
    no(&fifo("state"), &["not the state"]);
    no(&fifo("memory"), &["memory"]);
}

/// Applies `forge` to the state of the snapshot in `directory`, and updates the digest.
fn reseal(directory: &Path, forge: impl FnOnce(&mut Value)) {
    let path = directory.join("state");
    let text = fs::read_to_string(&path).expect("text");
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
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
    for pages in [
        json!([[1, 0]]),
        json!([[1u64 << 40, 1]]),
        json!([[7, 1], [7, 1]]),
        json!([[1, u64::MAX]]),
    ] {
        forged("/changed", pages, &["invalid machine"]);
    }
    forged("/changed", json!(null), &["invalid machine"]);
}

#[test]
fn report_of_a_restored_machine_is_that_of_its_own_run() {
    let bench = Bench::new();
    let machine = Machine::boot(&bench, &[]);
    let directory = bench.path("here");
    machine.saved(&directory);
    machine.end();
    let report = bench.path("report.json");
    let path = report.to_str().expect("text");
    let mut machine = Machine::restore(&directory, bench.path("other.sock"), &["--report", path]);
    assert_eq!(machine.next(), "aa");
    machine.end();
    let report = read_report(&report);
    assert_eq!(report["boots"], 1);
    assert_eq!(report["confinement"]["seccomp"], true);
    assert_eq!(report["boot_to_init_ns"], Value::Null);
}
