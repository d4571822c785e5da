//! Tests `vmm ctl` with a running machine, using the built programs.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

#[allow(dead_code, reason = "the other tests use the rest")]
mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Output;

use common::{
    Bench, Running, SPIN, ctl, kill_machine, mark, messages, out, read_output, refused, run, running, terminate, vmm,
};
use serde_json::{Value, json};

/// A machine whose guest has placed seven marks and now spins. Its control socket is in the directory of the test.
struct Machine {
    child: Running,
    socket: PathBuf,
}

impl Machine {
    fn start(bench: &Bench) -> Self {
        Self::start_with(bench, &[])
    }

    fn start_with(bench: &Bench, args: &[&str]) -> Self {
        let code = [mark(7).repeat(7), out(0x3f8, b'!'), SPIN.to_vec()].concat();
        let socket = bench.path("vm.sock");
        let mut command = run(&bench.kernel(&code));
        command
            .args(["--persistent", "marks,name=steps", "--ctl"])
            .arg(&socket)
            .arg("--recording")
            .arg(bench.path("perf.data"))
            .args(args);
        Self { child: running(&mut command), socket }
    }

    fn ask(&self, args: &[&str]) -> Output {
        ctl(&self.socket, args)
    }

    /// The answer to a command that must succeed.
    fn reply(&self, args: &[&str]) -> Value {
        let output = self.ask(&[args, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn end(self) {
        terminate(self.child);
    }
}

#[test]
fn events_are_listed_started_and_ended_while_the_guest_runs() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    let [steps] = names(&machine);
    assert_eq!((&steps["name"], &steps["count"]), (&json!("steps"), &json!(7)));
    assert_eq!(steps["ring"], json!({"bytes": 65536, "window": true}));
    let table = machine.ask(&["list"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.starts_with("ID  NAME   EVENT"), "{table}");
    assert_eq!(table.lines().count(), 2, "{table}");
    let started = machine.reply(&["start", "mark=7,size=4K,name=sevens"]);
    assert_eq!(started["events"][0]["name"], "sevens");
    assert_eq!(started["events"][0]["count"], 0, "counts from its start");
    let [_, sevens] = names(&machine);
    assert_eq!(sevens["id"], started["events"][0]["id"]);
    assert_eq!(machine.reply(&["end", "steps"]), json!("done"));
    let id = sevens["id"].to_string();
    assert_eq!(machine.reply(&["end", &id]), json!("done"));
    assert_eq!(names(&machine), [] as [Value; 0]);
    let none = machine.ask(&["list"]);
    assert_eq!(String::from_utf8_lossy(&none.stdout), "no persistent events\n");
    machine.end();
}

/// The machine's events. There must be exactly `N`.
fn names<const N: usize>(machine: &Machine) -> [Value; N] {
    let list = machine.reply(&["list"]);
    let events = list["events"].as_array().expect("a list").clone();
    events.try_into().expect("exactly N events")
}

#[test]
fn recordings_are_written_on_demand() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    let dumped = machine.reply(&["dump"]);
    let file = bench.path("perf.data");
    let bytes = fs::metadata(&file).expect("written").len();
    let expected = json!({"file": file, "events": 1, "samples": 7, "lost": 0, "bytes": bytes});
    assert_eq!(dumped["recording"], expected);
    let other = bench.path("now.data");
    let dumped = machine.ask(&["dump", other.to_str().expect("a plain path")]);
    let reported = String::from_utf8_lossy(&dumped.stdout).into_owned();
    assert_eq!(reported, format!("{}: 1 events, 7 samples, 0 lost\n", other.display()));
    let (one, two) = (fs::read(bench.path("perf.data")), fs::read(&other));
    assert_eq!(one.expect("written"), two.expect("written"));
    assert!(!bench.path("perf.data.old").exists());
    machine.end();
    assert!(bench.path("perf.data.old").exists(), "the dump is kept");
}

#[test]
fn flush_kicks_a_vcpu_that_never_exits() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    // With the exit engine, a clock's samples wait until the vCPU leaves the guest, so a flush must kick the vCPU.
    machine.reply(&["start", "cpu-clock,period=100000000,name=clock"]);
    for args in [&["flush"] as &[&str], &["flush", "clock"], &["flush", "steps"]] {
        assert_eq!(machine.reply(args), json!("done"));
    }
    machine.end();
}

#[test]
fn refusal_of_the_machine_is_one_line() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    let refused = |args: &[&str], words: &[&str]| refused(&machine.ask(args), 1, words);
    refused(&["end", "nobody"], &["`nobody`", "vmm ctl list"]);
    refused(&["flush", "17"], &["`17`"]);
    refused(&["start", "nonsense"], &["nonsense"]);
    refused(&["start", "marks,colour=red"], &["colour=red", "period"]);
    refused(&["start", "marks,name=steps"], &["`steps` already"]);
    refused(&["start", "marks,size=16M,name=big"], &["--window"]);
    refused(&["dump", "/nonexistent/x"], &["/nonexistent"]);
    let [steps] = names(&machine);
    assert_eq!(steps["name"], "steps", "refused commands leave no event");
    machine.end();
}

#[test]
fn event_that_fails_on_one_vcpu_starts_on_none() {
    let bench = Bench::new();
    let machine = Machine::start_with(&bench, &["--vcpus", "2"]);
    machine.reply(&["start", "marks,cpu=1,name=half-1"]);
    let before: [Value; 3] = names(&machine);
    // Starting the event on vCPU 0 alone would succeed.
    let output = machine.ask(&["start", "marks,name=half"]);
    refused(&output, 1, &["`half-1` already"]);
    let after: [Value; 3] = names(&machine);
    let of = |events: &[Value; 3]| events.clone().map(|event| event["name"].clone());
    assert_eq!(of(&after), of(&before));
    // The failure leaves the name free.
    machine.reply(&["start", "marks,cpu=0,name=half-0"]);
    machine.end();
}

#[test]
fn wrong_usage_and_no_machine_have_their_exit_statuses() {
    let bench = Bench::new();
    let usage = |args: &[&str], words: &[&str]| {
        refused(&vmm(args).output().expect("vmm starts"), 2, words);
    };
    usage(&["ctl", "list"], &["--socket", "--help"]);
    usage(&["ctl", "--socket", "x", "walk"], &["walk", "--help"]);
    usage(&["ctl", "--socket", "x", "end"], &["EVENT", "--help"]);
    usage(&["ctl", "--socket", "x", "list", "all"], &["all", "--help"]);
    let absent = bench.path("absent");
    refused(&ctl(&absent, &["list"]), 1, &["absent", "vmm run --ctl"]);
    let notes = bench.file("notes", b"dear diary");
    refused(&ctl(&notes, &["list"]), 1, &["notes", "--socket"]);
    let machine = Machine::start(&bench);
    let Machine { mut child, socket } = machine;
    kill_machine(&mut child);
    assert!(socket.exists(), "a killed machine leaves its socket");
    refused(&ctl(&socket, &["list"]), 1, &["vm.sock", "has ended"]);
}

#[test]
fn socket_belongs_to_its_owner_and_one_machine() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    let mode = fs::metadata(&machine.socket).expect("there");
    assert_eq!(mode.permissions().mode() & 0o7777, 0o600);
    let second = run(&bench.kernel(&SPIN)).arg("--ctl").arg(&machine.socket).output().expect("vmm starts");
    refused(&second, 1, &["vm.sock", "another machine", "--ctl"]);
    let [steps] = names(&machine);
    assert_eq!(steps["name"], "steps", "the first machine keeps its socket");
    let socket = machine.socket.clone();
    machine.end();
    assert!(!socket.exists(), "the socket is removed with its machine");
}

#[test]
fn dead_machines_socket_is_taken_over() {
    let bench = Bench::new();
    let mut first = Machine::start(&bench);
    kill_machine(&mut first.child);
    let second = Machine::start(&bench);
    let [steps] = names(&second);
    assert_eq!(steps["count"], 7);
    second.end();
}

#[test]
fn resets_of_the_guest_keep_nobody_from_asking() {
    let bench = Bench::new();
    let code = [mark(1), out(0x3f8, b'!'), out(0xcf9, 0x06)].concat();
    let socket = bench.path("vm.sock");
    let mut command = run(&bench.kernel(&code));
    command
        .args(["--persistent", "marks,name=boots", "--on-reset", "restart"])
        .arg("--ctl")
        .arg(&socket)
        .arg("--recording")
        .arg(bench.path("perf.data"));
    let child = running(&mut command);
    let mut machine = Machine { child, socket };
    let mut before = 0;
    let now = bench.path("now.data");
    let now = now.to_str().expect("a plain path");
    for _ in 0..10 {
        // Wait for at least one more boot.
        read_output(&mut machine.child, 1);
        let [boots] = names(&machine);
        assert_eq!(boots["id"], 1);
        let count = boots["count"].as_u64().expect("a count");
        assert!(count >= before, "{count} after {before}");
        before = count;
        // These requests must also succeed between two boots, when the vCPU has no thread on which events could be
        // counted.
        machine.reply(&["start", "cpu-clock,size=4K,name=other"]);
        assert_eq!(machine.reply(&["flush"]), json!("done"));
        machine.reply(&["dump", now]);
        assert_eq!(machine.reply(&["end", "other"]), json!("done"));
    }
    assert!(before >= 10, "{before} boots");
    // From this point on, nobody reads the output.
    drop(machine.child.stdout.take());
    machine.end();
}

#[test]
fn several_clients_and_garbage_leave_each_other_alone() {
    let bench = Bench::new();
    let machine = Machine::start(&bench);
    let mut stuck = UnixStream::connect(&machine.socket).expect("answers");
    stuck.write_all(b"{\"do\":\"li").expect("taken");
    let mut strange = BufReader::new(UnixStream::connect(&machine.socket).expect("answers"));
    let mut line = String::new();
    for text in ["\u{7f}\u{0}", "{\"do\":\"poweroff\"}", "null"] {
        let stream = strange.get_mut();
        stream.write_all(format!("{text}\n").as_bytes()).expect("taken");
        line.clear();
        strange.read_line(&mut line).expect("an answer");
        assert!(line.starts_with("{\"error\":\"invalid request"), "{line}");
    }
    let [steps] = names(&machine);
    assert_eq!(steps["name"], "steps");
    stuck.write_all(b"st\"}\n").expect("taken");
    line.clear();
    BufReader::new(stuck).read_line(&mut line).expect("an answer");
    assert!(line.contains("\"steps\""), "{line}");
    machine.end();
}
