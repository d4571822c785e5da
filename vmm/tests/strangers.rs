//! Strangers around the control socket: a process that listens in place of a machine, a machine that was taken over and
//! lies to `vmm ctl`, and another user who connects to a machine.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

use common::machine::{Machine, marking};
use common::{Bench, ctl, messages, refused};
use rustix::cmsg_space;
use rustix::fs::Uid;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// A user of the host who is neither the operator nor a machine's user.
const STRANGER: u32 = 1234;

/// Whether the tests may act as another user.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs `act` as the stranger.
fn as_stranger<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let uid = Uid::from_raw(STRANGER);
    let became = move || {
        // Only this thread becomes another user.
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root");
        act()
    };
    thread::scope(|scope| scope.spawn(became).join().expect("no panic"))
}

/// A directory in `bench` that belongs to `owner`.
fn directory(bench: &Bench, name: &str, owner: u32, mode: u32) -> PathBuf {
    // The stranger must reach the directory.
    let open = Permissions::from_mode(0o755);
    fs::set_permissions(bench.path("."), open).expect("ours");
    let path = bench.path(name);
    fs::create_dir(&path).expect("made");
    chown(&path, Some(owner), Some(owner)).expect("root gives it away");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("ours");
    path
}

/// Receives a line, and the descriptors that accompanied it.
fn receive(stream: &UnixStream) -> (Vec<u8>, Vec<OwnedFd>) {
    let (mut line, mut received_files) = (Vec::new(), Vec::new());
    while line.last() != Some(&b'\n') {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(stream, &mut slices, &mut ancillary, flags);
        let count = received.expect("a connection").bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                received_files.extend(files);
            }
        }
        if count == 0 {
            break;
        }
        line.extend(&bytes[..count]);
    }
    (line, received_files)
}

/// Answers one connection on `listener` with `reply`.
fn answer_once(listener: &UnixListener, reply: &[u8]) {
    let (mut stream, _) = listener.accept().expect("a client");
    receive(&stream);
    stream.write_all(reply).expect("the client reads");
}

/// The output of `vmm ctl` with `args`, if `reply` is the reply to its request.
fn told(bench: &Bench, reply: &[u8], args: &[&str]) -> Output {
    let socket = bench.path("fake.sock");
    let listener = UnixListener::bind(&socket).expect("listens");
    let output = thread::scope(|scope| {
        scope.spawn(|| answer_once(&listener, reply));
        ctl(&socket, args)
    });
    fs::remove_file(&socket).expect("ours");
    output
}

/// Returns how many clients connect to `listener` at `path` during `act`. Closes their connections.
fn clients(listener: &UnixListener, path: &Path, act: impl FnOnce()) -> usize {
    const LAST: &[u8] = b"the last\n";
    /// Ends the count, also if `act` panics.
    struct End<'a>(&'a Path);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            let mut last = UnixStream::connect(self.0).expect("listens");
            last.write_all(LAST).expect("taken");
        }
    }
    thread::scope(|scope| {
        let counted = scope.spawn(|| {
            let accepted = std::iter::repeat_with(|| listener.accept().expect("a client").0);
            accepted.take_while(|client| receive(client).0 != LAST).count()
        });
        let end = End(path);
        act();
        drop(end);
        counted.join().expect("no panic")
    })
}

/// Checks that `text` has no control characters, apart from the newlines that end lines.
#[track_caller]
fn is_plain(text: &[u8]) {
    let text = std::str::from_utf8(text).expect("UTF-8");
    let control = text.chars().find(|it| it.is_control() && *it != '\n');
    assert_eq!(control, None, "in {text:?}");
}

#[test]
fn control_characters_of_a_reply_are_escaped() {
    // Clear the screen, set the title, a C1 control sequence, and DEL.
    let name = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{7f}\n";
    let bench = Bench::new();
    let reply = |value: Value| format!("{value}\n").into_bytes();
    let event = json!({
        "id": 1, "name": name, "event": name, "vcpu": 0, "owner": name, "state": name, "count": 0,
        "time_enabled": 0, "time_running": 0, "lost": 0, "period": null, "freq": null, "ring": null,
    });
    let events = reply(json!({"ok": {"events": [event]}}));
    let recording = json!({"file": name, "events": 1, "samples": 1, "lost": 0, "bytes": 1});
    let recording = reply(json!({"ok": {"recording": recording}}));
    for (reply, command, lines) in [(&events, "list", 2), (&recording, "dump", 1)] {
        let output = told(&bench, reply, &[command]);
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
        is_plain(&output.stdout);
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(text.contains("\\u{1b}[2J") && text.contains("\\u{9b}31m"), "{text}");
        assert_eq!(text.lines().count(), lines, "{text}");
    }
    let output = told(&bench, &events, &["list", "--json"]);
    is_plain(&output.stdout);
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(printed["events"][0]["name"], name);
    let mut unknown = b"{\"ok\":{\"\\u001b[2J\":[]}}\n".to_vec();
    for reply in [reply(json!({"error": name})), unknown.clone()] {
        let output = told(&bench, &reply, &["list"]);
        is_plain(&output.stderr);
        refused(&output, 1, &["\\u{1b}[2J"]);
    }
    unknown.splice(0..1, [0xff, 0x1b, 0x9b]);
    let output = told(&bench, &unknown, &["list"]);
    is_plain(&output.stderr);
    refused(&output, 1, &["unexpected reply"]);
}

/// A socket at `path`. The stranger listens on it, and every user may connect to it.
fn planted(path: &Path) -> UnixListener {
    let listener = as_stranger(|| UnixListener::bind(path).expect("listens"));
    fs::set_permissions(path, Permissions::from_mode(0o666)).expect("root");
    listener
}

#[test]
fn socket_that_a_stranger_could_have_planted_gets_no_connection() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let file = bench.path("now.data");
    let file = file.to_str().expect("text");
    let saved = bench.path("here");
    let saved = saved.to_str().expect("text");
    for (name, owner, mode) in [("tmp", 0, 0o1777), ("group", 0, 0o775), ("other", 77, 0o755)] {
        let socket = directory(&bench, name, owner, mode).join("vm.sock");
        // The stranger can create files only in the first directory, but root does not know how the socket got there.
        let elsewhere = directory(&bench, &format!("of-{name}"), STRANGER, 0o755);
        let listener = planted(&elsewhere.join("vm.sock"));
        fs::rename(elsewhere.join("vm.sock"), &socket).expect("root");
        let clients = clients(&listener, &socket, || {
            for args in [&["list"][..], &["dump", file], &["snapshot", saved]] {
                let words = ["belongs to user 1234", "--ctl in a directory"];
                refused(&ctl(&socket, args), 1, &words);
            }
        });
        assert_eq!(clients, 0, "in {name}");
        assert!(!Path::new(file).exists() && !Path::new(saved).exists());
        let link = bench.path(&format!("{name}.sock"));
        symlink(&socket, &link).expect("made");
        refused(&ctl(&link, &["list"]), 1, &["symbolic link"]);
    }
}

#[test]
fn root_reaches_the_machine_of_a_user_in_a_directory_of_that_user() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    for (name, owner) in [("theirs", STRANGER), ("by-root", 0)] {
        let socket = directory(&bench, name, owner, 0o755).join("vm.sock");
        let elsewhere = directory(&bench, &format!("of-{name}"), STRANGER, 0o755);
        let listener = planted(&elsewhere.join("vm.sock"));
        fs::rename(elsewhere.join("vm.sock"), &socket).expect("root");
        let output = thread::scope(|scope| {
            scope.spawn(|| answer_once(&listener, b"{\"ok\":{\"events\":[]}}\n"));
            ctl(&socket, &["list"])
        });
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    }
}

#[test]
fn descriptor_is_not_sent_to_a_process_of_another_user() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let socket = directory(&bench, "theirs", STRANGER, 0o755).join("vm.sock");
    let listener = planted(&socket);
    // The file seems to be root's, but the stranger listens.
    chown(&socket, Some(0), Some(0)).expect("root");
    let file = bench.path("now.data");
    let (output, received) = thread::scope(|scope| {
        let got = scope.spawn(|| {
            let (stream, _) = listener.accept().expect("a client");
            receive(&stream)
        });
        let output = ctl(&socket, &["dump", file.to_str().expect("text")]);
        (output, got.join().expect("no panic"))
    });
    refused(&output, 1, &["process of user 1234", "not the owner"]);
    let (bytes, descriptors) = received;
    assert!(bytes.is_empty() && descriptors.is_empty());
    assert!(!file.exists());
}

#[test]
fn machine_does_not_answer_another_user() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let open = |path: &Path, mode| {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
    };
    // Even if the permissions of the socket let the stranger connect.
    open(&bench.path("."), 0o755);
    open(&machine.socket, 0o666);
    let socket = machine.socket.clone();
    let answer = as_stranger(|| {
        let mut stream = UnixStream::connect(&socket).expect("permitted");
        // The machine may close the connection before it gets the request.
        let _ = stream.write_all(b"{\"do\":\"list\"}\n");
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    });
    assert_eq!(answer, "");
    let output = ctl(&machine.socket, &["list"]);
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert_eq!(machine.next(), "aa");
    machine.end();
}

#[test]
fn snapshot_goes_to_no_directory_of_another_user_and_through_no_link() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let here = bench.path("here");
    fs::create_dir(&here).expect("made");
    let link = bench.path("link");
    symlink(&here, &link).expect("made");
    refused(&machine.snapshot(&link, &[]), 1, &["symbolic link"]);
    refused(&machine.snapshot(&link.join(""), &[]), 1, &["symbolic link"]);
    assert_eq!(fs::read_dir(&here).expect("there").count(), 0);
    if is_root() {
        let theirs = directory(&bench, "theirs", STRANGER, 0o755);
        let words = ["belongs to user 1234", "your own"];
        refused(&machine.snapshot(&theirs, &[]), 1, &words);
        assert_eq!(fs::read_dir(&theirs).expect("there").count(), 0);
    }
    assert_eq!(machine.next(), "aa");
    machine.end();
}

/// A machine that was taken over. It passes a request for a snapshot to `machine`, and then changes the files by `forge`.
struct Liar<'a> {
    bench: &'a Bench,
    machine: &'a Machine,
}

/// The files of a snapshot.
struct Forgeable {
    memory: File,
    state: File,
}

impl Liar<'_> {
    /// Takes a snapshot from the liar. Returns the output of `vmm ctl`.
    fn snapshot(&self, to: &Path, args: &[&str], forge: impl FnOnce(&Forgeable) + Send) -> Output {
        let socket = self.bench.path("liar.sock");
        let listener = UnixListener::bind(&socket).expect("listens");
        let output = thread::scope(|scope| {
            scope.spawn(|| self.lie(&listener, forge));
            let to = to.to_str().expect("text");
            ctl(&socket, &[&["snapshot", to], args].concat())
        });
        fs::remove_file(&socket).expect("ours");
        output
    }

    fn lie(&self, listener: &UnixListener, forge: impl FnOnce(&Forgeable)) {
        let (mut client, _) = listener.accept().expect("a client");
        let machine = UnixStream::connect(&self.machine.socket).expect("listens");
        let (line, files) = receive(&client);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let sent_files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        ancillary.push(SendAncillaryMessage::ScmRights(&sent_files));
        let sent = rustix::net::sendmsg(&machine, &[IoSlice::new(&line)], &mut ancillary, SendFlags::empty());
        assert_eq!(sent.expect("sent"), line.len());
        let mut reply = String::new();
        BufReader::new(machine).read_line(&mut reply).expect("a reply");
        let files: [OwnedFd; 2] = files.try_into().expect("files for memory and state");
        let [memory, state] = files.map(File::from);
        forge(&Forgeable { memory, state });
        client.write_all(reply.as_bytes()).expect("sent");
    }
}

impl Forgeable {
    /// Replaces the text of the state file.
    fn write(&self, text: &str) {
        self.state.set_len(0).expect("room");
        self.state.write_all_at(text.as_bytes(), 0).expect("room");
    }

    /// Changes the two lines of the state file, and its digest if `seal` is true.
    fn restate(&self, seal: bool, change: impl FnOnce(&mut Value, &mut Value)) {
        let mut text = vec![0; self.state.metadata().expect("a file").len().try_into().expect("small")];
        self.state.read_exact_at(&mut text, 0).expect("a file");
        let text = String::from_utf8(text).expect("text");
        let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
        let [mut header, mut state]: [Value; 2] = lines.collect::<Vec<_>>().try_into().expect("two");
        change(&mut header, &mut state);
        let state = state.to_string();
        if seal {
            let digits = Sha256::digest(&state);
            let digits: String = digits.iter().map(|byte| format!("{byte:02x}")).collect();
            header["digest"] = digits.into();
        }
        self.write(&format!("{header}\n{state}\n"));
    }
}

/// Exchanges the first digit of a digest with another digit of it.
fn swap(digest: &mut Value) {
    let mut digits = digest.as_str().expect("text").to_owned().into_bytes();
    let other = digits.iter().position(|digit| *digit != digits[0]);
    digits.swap(0, other.expect("another digit"));
    *digest = String::from_utf8(digits).expect("digits").into();
}

#[test]
fn snapshot_that_is_not_the_requested_one_is_removed() {
    let bench = Bench::new();
    let mut machine = Machine::boot(&bench, &[]);
    let evil = json!({"id": "0".repeat(32), "directory": "evil", "digest": "0".repeat(64), "diffs": 1});
    type Forge<'a> = &'a (dyn Fn(&Forgeable) + Sync);
    let header = |change: &'static (dyn Fn(&mut Value) + Sync)| {
        move |it: &Forgeable| it.restate(true, |header, _| change(header))
    };
    let with_base = |directory: &'static str| {
        let evil = evil.clone();
        move |it: &Forgeable| {
            it.restate(true, |header, state| {
                header["base"] = evil.clone();
                header["base"]["directory"] = directory.into();
                state["changed"] = json!([]);
            });
        }
    };
    let cases: [(&str, Forge<'_>); 11] = [
        ("its name differs", &header(&|it| it["id"] = "0".repeat(32).into())),
        ("hexadecimal digits", &header(&|it| it["id"] = "".into())),
        ("its base differs", &with_base("evil")),
        ("a name beside the diff", &with_base("/evil")),
        ("digest", &|it| it.restate(false, |header, _| swap(&mut header["digest"]))),
        ("invalid machine", &header(&|it| it["machine"]["vcpus"] = 2.into())),
        ("should have", &header(&|it| it["machine"]["memory_mib"] = 8.into())),
        ("damaged", &|it| it.restate(true, |_, state| state["more"] = 1.into())),
        ("not the state of a machine", &|it| it.write("dear diary\n")),
        ("does not end with the name", &|it| {
            let length = it.memory.metadata().expect("a file").len();
            it.memory.write_all_at(b"V", length - 4096).expect("room");
        }),
        ("should have", &|it| it.memory.set_len(4096).expect("room")),
    ];
    let liar = Liar { bench: &bench, machine: &machine };
    let here = bench.path("here");
    for (words, forge) in cases {
        let output = liar.snapshot(&here, &[], forge);
        refused(&output, 1, &["not the requested snapshot", "was removed", words]);
        assert!(!here.exists(), "{words}");
    }
    let mut kept = None;
    let output = liar.snapshot(&here, &[], |it| kept = Some(it.state.try_clone().expect("a file")));
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    // The machine's file is not the snapshot's state, which was checked.
    kept.expect("forged").set_len(0).expect("its own");
    let mut other = Machine::restore(&here, bench.path("other.sock"), &[]);
    assert_eq!([machine.next(), other.next()], ["aa", "aa"]);
    machine.end();
    other.end();
}

#[test]
fn snapshot_with_another_base_than_the_requested_is_removed() {
    let bench = Bench::new();
    let machine = Machine::boot_of(&bench, &marking(), &["--track-dirty"]);
    let [base, diff] = ["base", "diff"].map(|name| bench.path(name));
    type Change<'a> = &'a (dyn Fn(&mut Value, &mut Value) + Sync);
    let cases: [(&str, Change<'_>); 4] = [
        ("its base differs", &|header, _| swap(&mut header["base"]["digest"])),
        ("its base differs", &|header, _| header["base"]["directory"] = "other".into()),
        ("its base differs", &|header, state| {
            header["base"] = Value::Null;
            state["changed"] = Value::Null;
        }),
        ("its machine differs", &|header, _| header["machine"]["guest_pmu"] = true.into()),
    ];
    let liar = Liar { bench: &bench, machine: &machine };
    for (words, change) in cases {
        machine.saved(&base);
        let args = ["--diff", base.to_str().expect("text")];
        let output = liar.snapshot(&diff, &args, |it| it.restate(true, change));
        refused(&output, 1, &["not the requested snapshot", words]);
        assert!(!diff.exists(), "{words}");
        fs::remove_dir_all(&base).expect("ours");
    }
    machine.end();
}

#[test]
fn user_is_refused_by_the_socket_of_another() {
    if !is_root() {
        return;
    }
    let bench = Bench::new();
    let socket = directory(&bench, "other", 77, 0o755).join("vm.sock");
    let listener = UnixListener::bind(&socket).expect("listens");
    chown(&socket, Some(77), Some(77)).expect("root");
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).expect("root");
    // A copy that the stranger can reach.
    let program = directory(&bench, "bin", 0, 0o755).join("vmm");
    fs::copy(env!("CARGO_BIN_EXE_vmm"), &program).expect("copied");
    let clients = clients(&listener, &socket, || {
        let mut command = Command::new(&program);
        command.args(["ctl", "--socket"]).arg(&socket).arg("list");
        let output = command.uid(STRANGER).output().expect("vmm starts");
        refused(&output, 1, &["belongs to user 77", "run as this user"]);
    });
    assert_eq!(clients, 0);
}
