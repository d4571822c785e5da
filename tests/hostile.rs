//! Attacks on the machine from inside a guest. The machine must keep running, and must respond to its operator.
//!
//! The guests are kernels of a few instructions that run on this machine's `/dev/kvm`. `guest/hostile.rs` has the
//! attacks by an unprivileged program, `vpmu/recorder/tests/memory.rs` measures how much memory a recording takes, and
//! `vpmu/tests/device` measures what attacks cost the device.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;
use tests::micro::attack::{
    MOST_COMMANDS, again, fill_with_switches, for_ever, kick, kick_for_ever, make_indirect, open_and_close_for_ever,
};
use tests::micro::device::{Device, REGISTERS};
use tests::micro::{Code, RunResult, kernel, power_off, run, single, vmm_binary};

/// The time limit of a wait, which is far longer than any wait needs.
const LIMIT: Duration = Duration::from_secs(60);
const KIND_SOFTWARE: u64 = 1;
const CPU_CLOCK: u64 = 0;
const KIND_MARK: u64 = 0x104;
const OPEN_ENABLED: u64 = 1;
/// perf's `PERF_SAMPLE_READ`, `PERF_FORMAT_GROUP`.
const SAMPLE_READ: u64 = 1 << 4;
const FORMAT_GROUP: u64 = 1 << 3;
const DOORBELL: u32 = REGISTERS + 0x1000;
const RESET_PORT: u16 = 0x64;
const SERIAL: u16 = 0x3f8;

/// The request that opens an event on vCPU 0.
struct Open {
    kind: u64,
    config: u64,
    period: u64,
    sample_type: u64,
    leader: u64,
    read_format: u64,
}

impl Open {
    fn words(&self) -> [u64; 14] {
        [
            1,
            0,
            self.kind,
            self.config,
            self.period,
            self.sample_type,
            OPEN_ENABLED,
            0,
            0,
            self.leader,
            self.read_format,
            0,
            0,
            0,
        ]
    }
}

/// Returns a request for a host clock that samples every `period` nanoseconds.
fn clock(period: u64) -> Open {
    Open { kind: KIND_SOFTWARE, config: CPU_CLOCK, period, sample_type: 1, leader: 0, read_format: 0 }
}

fn number(report: &Value, path: &str) -> u64 {
    let value = report.pointer(path).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("no {path} in {report:#}"))
}

/// A VMM that runs until it is terminated.
struct Running {
    vmm: Child,
    directory: tempfile::TempDir,
}

impl Running {
    fn start(kernel: &[u8], arguments: &[&str]) -> Self {
        Self::start_by(Command::new(vmm_binary()), kernel, arguments)
    }

    /// Starts the VMM with the command `vmm`, which is the VMM or a wrapper. Appends the VMM's arguments.
    fn start_by(mut vmm: Command, kernel: &[u8], arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| directory.path().join(name);
        fs::write(path("kernel"), kernel).expect("room for a small kernel");
        let console = File::create(path("console")).expect("room for its output");
        let vmm = vmm
            .arg("run")
            .arg("--kernel")
            .arg(path("kernel"))
            .arg("--report")
            .arg(path("report"))
            .arg("--ctl")
            .arg(path("ctl"))
            .args(["--memory", "32"])
            .args(arguments)
            // Recordings go to the current directory by default.
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(console)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the VMM starts");
        Self { vmm, directory }
    }

    /// Whether the machine executes an operator's request.
    fn does(&self, words: &[&str]) -> bool {
        let asked = Command::new(vmm_binary())
            .args(["ctl", "--socket"])
            .arg(self.directory.path().join("ctl"))
            .args(words)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        asked.expect("vmm ctl starts").success()
    }

    /// Whether the machine answers its operator.
    fn answers(&self) -> bool {
        self.does(&["list"])
    }

    /// Waits until `done` is true. Fails if the machine ends before, or after [`LIMIT`].
    fn await_that(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !done(self) {
            let ended = self.vmm.try_wait().expect("a child");
            assert_eq!(ended, None, "the machine ended by itself before {what}");
            assert!(begin.elapsed() < LIMIT, "{what} does not happen within {LIMIT:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the guest has written to its console.
    fn await_console(&mut self) {
        let console = self.directory.path().join("console");
        self.await_that("output on the console", |_| fs::metadata(&console).expect("its output").len() > 0);
    }

    /// Waits until the machine answers for the first time.
    fn await_answer(&mut self) {
        self.await_that("an answer to the operator", Self::answers);
    }

    /// Waits until the machine logs a line with `text`.
    fn await_line(&mut self, text: &str) {
        let errors = self.vmm.stderr.take().expect("piped above");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                // The receiver waits only for one of the lines.
                let _ = sender.send(line);
            }
        });
        let begin = Instant::now();
        while let Ok(line) = lines.recv_timeout(LIMIT.saturating_sub(begin.elapsed())) {
            if line.contains(text) {
                return;
            }
        }
        panic!("no line contains {text:?}, within {:?}", begin.elapsed());
    }

    /// Terminates the machine, waits until it has ended, and returns its report.
    fn terminate(mut self) -> Value {
        let id = self.vmm.id().to_string();
        let sent = Command::new("kill").arg(&id).status().expect("kill starts");
        assert!(sent.success());
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.vmm.try_wait().expect("a child") {
                break status;
            }
            assert!(begin.elapsed() < LIMIT, "the machine does not end within {LIMIT:?} when asked");
            thread::sleep(Duration::from_millis(20));
        };
        assert_eq!((status.code(), status.signal()), (Some(6), None));
        let report = fs::read(self.directory.path().join("report")).expect("a report");
        serde_json::from_slice(&report).expect("a report in JSON")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has exited, unless a test failed.
        let _ = self.vmm.kill();
    }
}

/// Checks that a machine answers its operator during an attack. The guest writes to its console after the attack has
/// begun.
fn assert_answers_during(machine: &mut Running) {
    machine.await_answer();
    // These requests run concurrently with the attack, which may start during any of them.
    for _ in 0..10 {
        assert!(machine.answers());
    }
    machine.await_console();
    assert!(machine.answers());
}

/// Returns a device, and the code that opens a group of `events` page-fault events on its vCPU 0.
fn group_of(events: u32) -> (Device, Code) {
    let (mut device, up) = Device::bring_up(1);
    let event = |leader| Open { kind: KIND_SOFTWARE, config: 2, period: 0, sample_type: 0, leader, read_format: 0 };
    let code = up.then(&device.request(&event(0).words())).then(&device.request(&event(1).words()));
    let code = code.then(&again(&mut device, events - 2));
    (device, code)
}

#[test]
fn kicks_of_2048_group_switches_leave_the_machine_to_its_operator() {
    let (_, code) = group_of(1024);
    // The guest writes to its console after it has sent the first commands.
    let code =
        code.then(&fill_with_switches(1)).then(&kick(2, 1)).out8(SERIAL, b'!').then(&kick_for_ever(2)).halt_for_ever();
    let mut machine = Running::start(&single(&code), &[]);
    assert_answers_during(&mut machine);
    let report = machine.terminate();
    assert!(number(&report, "/vpmu/turns_unfinished") > 0);
    let turn = number(&report, "/vpmu/largest_turn/operations");
    // A turn can exceed its budget by the cost of one command. Here, a command examines and changes each of the 1,023
    // members and the leader.
    assert!(turn <= 4096 + 2 * 1023 + 3, "{turn}");
    let calls = number(&report, "/vpmu/largest_turn/host_calls");
    assert!(calls <= 512 + 2, "{calls}");
}

#[test]
fn changes_of_a_group_of_1000_leave_the_machine_to_its_operator() {
    const EVENTS: u32 = 1000;
    let (mut device, code) = group_of(EVENTS);
    let (first, rest) = open_and_close_for_ever(&mut device, EVENTS + 1);
    // The guest writes to its console when all requests of the first notification have been answered.
    let code = code.then(&first).out8(SERIAL, b'!').then(&rest);
    let mut machine = Running::start(&single(&code), &[]);
    assert_answers_during(&mut machine);
    let report = machine.terminate();
    assert!(number(&report, "/vpmu/events_opened") >= u64::from(EVENTS) + 128);
    assert_eq!(number(&report, "/vpmu/bad_requests"), 0);
    assert!(number(&report, "/vpmu/turns_unfinished") > 0);
    // A turn can exceed its budget by the cost of one request, which examines and changes each event of the group.
    let turn = number(&report, "/vpmu/largest_turn/operations");
    assert!(turn <= 4096 + 2 * u64::from(EVENTS), "{turn}");
}

/// VPMU-D-6.4-2.
#[test]
fn notification_of_2048_group_switches_is_answered_in_the_end() {
    let (_, code) = group_of(64);
    let code = code.then(&fill_with_switches(1)).then(&kick(2, 1)).then(&power_off());
    let ran = run(&single(&code), 1, &[]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    let figure = |path: &str| number(&ran.report, path);
    assert_eq!(figure("/vpmu/commands"), u64::from(MOST_COMMANDS));
    assert_eq!(figure("/vpmu/bad_requests"), 0);
    // Each of the 2,048 commands first examines the 63 members of a group, and then switches the group's 64 events.
    let least = u64::from(MOST_COMMANDS) * (1 + 64 + 63);
    assert!(figure("/vpmu/work/operations") >= least);
    assert!(figure("/vpmu/turns_unfinished") >= least / (4096 + 2 * 64));
}

#[test]
fn indirect_chains_are_refused_on_every_queue() {
    let (_, up) = Device::bring_up(1);
    let code = up
        .then(&make_indirect(0))
        .then(&make_indirect(2))
        .then(&kick(0, 1))
        .wait_for(tests::micro::attack::used(0), 1 << 16)
        .then(&kick(2, 1))
        .wait_for(tests::micro::attack::used(2), 1 << 16)
        .then(&power_off());
    let ran = run(&single(&code), 1, &[]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    assert_eq!(number(&ran.report, "/vpmu/bad_requests"), 2);
    assert_eq!(number(&ran.report, "/vpmu/commands"), 0);
}

#[test]
fn mark_of_a_large_group_costs_each_event_once() {
    let (mut device, up) = Device::bring_up(1);
    let event = |leader| Open {
        kind: KIND_MARK,
        config: 5,
        period: 1,
        sample_type: SAMPLE_READ,
        leader,
        read_format: FORMAT_GROUP,
    };
    let code = up
        .then(&device.request(&event(0).words()))
        .then(&device.request(&event(1).words()))
        .then(&again(&mut device, 1022))
        .store(DOORBELL, 5)
        .then(&power_off());
    let ran = run(&single(&code), 1, &[]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    assert_eq!(ran.marks(), 1);
    assert_eq!(number(&ran.report, "/vpmu/events_opened"), 1024);
    // A turn makes at most four operations per event: it counts the event, and publishes, reads and records the
    // count. One more operation locks the vCPU's events, and for each operation the device examines eight events.
    let turn = number(&ran.report, "/vpmu/largest_turn/operations");
    assert!(turn <= 4 * 1024 + 1 + 1024 / 8, "{turn}");
}

#[test]
fn events_beyond_the_host_counters_of_a_vcpu_wait() {
    let (mut device, up) = Device::bring_up(1);
    let clock = clock(100_000_000);
    let code = up.then(&device.request(&clock.words())).then(&again(&mut device, 69)).then(&power_off());
    let ran = run(&single(&code), 1, &[]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    assert_eq!(number(&ran.report, "/vpmu/host_counters"), 70);
    assert_eq!(number(&ran.report, "/vpmu/counter_waits"), 70 - 64);
    let few = run(&single(&code), 1, &["--max-active-counters", "3"]);
    assert_eq!(number(&few.report, "/vpmu/counter_waits"), 70 - 3);
}

#[test]
fn clocks_beyond_the_interrupts_of_a_vcpu_wait() {
    let (mut device, up) = Device::bring_up(1);
    // Each of the five clocks samples 500 times a second.
    let clock = clock(2_000_000);
    let code = up.then(&device.request(&clock.words())).then(&again(&mut device, 4)).then(&power_off());
    let ran = run(&single(&code), 1, &["--max-sample-rate", "1000"]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    assert_eq!(number(&ran.report, "/vpmu/counter_waits"), 3);
}

#[test]
fn operator_starts_an_event_when_the_guest_has_its_name_and_the_window() {
    const DETACH: u64 = 11;
    const MAP: u64 = 3;
    const IN_WINDOW: u64 = 4 << 32;
    let (mut device, up) = Device::bring_up_with(1, 0x1f);
    let mark = Open { kind: KIND_MARK, config: 5, period: 1, sample_type: 1, leader: 0, read_format: 0 };
    let name = |text: &[u8]| {
        let mut name = [0; 8];
        name[..text.len()].copy_from_slice(text);
        u64::from_le_bytes(name)
    };
    let mut code = up;
    // The two rings have 9 and 3 pages, and so take all 12 pages of the guest.
    for (event, called, pages) in [(1, name(b"marks"), 9), (2, name(b"other"), 3)] {
        code = code
            .then(&device.request(&mark.words()))
            .then(&device.request(&[DETACH, event, called, 0, 0, 0, 0]))
            .then(&device.request(&[MAP, event, pages | IN_WINDOW]));
    }
    let code = code.out8(SERIAL, b'!').halt_for_ever();
    let mut machine = Running::start(&single(&code), &["--window", "64K"]);
    machine.await_console();
    assert!(machine.does(&["start", "marks,size=8K"]));
    assert!(machine.does(&["end", "marks"]));
    // The guest's event has lost its name, and is now named after its id.
    assert!(!machine.does(&["end", "marks"]) && machine.does(&["end", "event1"]));
    machine.terminate();
}

/// Returns code that opens a persistent event, and maps a ring of three pages for it in the guest's memory. `status` is
/// the expected answer to the request for the ring.
fn ring_in_memory(status: u32) -> Code {
    const DETACH: u64 = 11;
    const MAP: u64 = 3;
    const PAGES: [u64; 3] = [0x80_0000, 0x80_1000, 0x80_2000];
    let (mut device, up) = Device::bring_up_with(1, 0x1f);
    let mark = Open { kind: KIND_MARK, config: 5, period: 1, sample_type: 1, leader: 0, read_format: 0 };
    let name = u64::from_le_bytes(*b"marks\0\0\0");
    let map = [&[MAP, 1, PAGES.len() as u64], &PAGES[..]].concat();
    up.then(&device.request(&mark.words()))
        .then(&device.request(&[DETACH, 1, name, 0, 0, 0, 0]))
        .then(&device.request_with(&map, status))
        .then(&power_off())
}

#[test]
fn pages_beyond_the_limit_are_not_mapped() {
    const ENOSPC: u32 = 28;
    for (pages, status) in [("3", 0), ("2", ENOSPC)] {
        let ran = run(&single(&ring_in_memory(status)), 1, &["--max-pages", pages]);
        assert_eq!(ran.status, 0, "{pages}: {}", ran.errors);
    }
}

#[test]
fn recording_leaves_out_rings_beyond_the_limit() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let recording = directory.path().join("perf.data");
    let recording = recording.to_str().expect("a plain path");
    // The ring has two pages of records.
    for (limit, is_left_out) in [("8K", false), ("4K", true)] {
        let arguments = ["--recording", recording, "--max-guest-recording", limit];
        let ran = run(&single(&ring_in_memory(0)), 1, &arguments);
        assert_eq!(ran.status, 0, "{limit}: {}", ran.errors);
        let says = ran.errors.contains("the limit on records in guest memory");
        assert_eq!(says, is_left_out, "{limit}: {}", ran.errors);
    }
}

#[test]
fn operator_has_a_host_counter_when_the_guest_has_used_up_its_own() {
    let (mut device, up) = Device::bring_up(1);
    let clock = clock(100_000_000);
    let code =
        up.then(&device.request(&clock.words())).then(&again(&mut device, 299)).out8(SERIAL, b'!').halt_for_ever();
    let mut poor = Command::new("sh");
    poor.args(["-c", "ulimit -n 256; exec \"$@\"", "sh"]);
    poor.arg(vmm_binary());
    let mut machine = Running::start_by(poor, &single(&code), &[]);
    machine.await_console();
    let opened = |report: &Value| number(report, "/vpmu/host_counters");
    for name in ["one", "two", "three"] {
        let event = format!("cpu-clock,freq=10,size=4K,name={name}");
        assert!(machine.does(&["start", &event]), "{name}");
    }
    let report = machine.terminate();
    // Of the 256 descriptors, 72 are reserved for the VMM, 10 for the vCPU and 32 for the operator. The guest's
    // counters use the rest.
    assert_eq!(opened(&report), 256 - 72 - 10 - 32);
    assert_eq!(number(&report, "/vpmu/events_opened"), 142 + 3);
}

#[test]
fn host_counters_beyond_the_descriptors_are_refused_at_the_start() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("kernel");
    fs::write(&image, single(&power_off())).expect("room for a small kernel");
    let output = Command::new("sh")
        .args(["-c", "ulimit -n 256; exec \"$@\"", "sh"])
        .arg(vmm_binary())
        .args(["run", "--max-host-counters", "1000", "--kernel"])
        .arg(&image)
        .output()
        .expect("vmm starts");
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    for part in ["--max-host-counters 1000", "ulimit -Hn"] {
        assert!(errors.contains(part), "{errors}");
    }
}

/// Returns code that sets the device up `times` times, each time with a queue outside guest memory.
fn bad_setups(times: u32) -> Code {
    let write = |code: Code, offset: u32, value: u32| code.store(REGISTERS + offset, value);
    let setup = [
        (0x70, 0),
        (0x70, 1),
        (0x70, 3),
        (0x24, 1),
        (0x20, 1),
        (0x70, 0xb),
        (0x30, 0),
        (0x38, 8),
        (0x80, 0xf000_0000),
        (0x44, 1),
        (0x70, 0xf),
    ];
    let body = setup.iter().fold(Code::new(), |code, &(offset, value)| write(code, offset, value));
    Code::new().repeat(times, &body)
}

#[test]
fn lines_that_a_guest_brings_about_are_limited_and_counted() {
    const SETUPS: u32 = 2000;
    let ran = run(&single(&bad_setups(SETUPS).then(&power_off())), 1, &["--max-log-lines", "1"]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    let lines = ran.errors.lines().count() as u64;
    let [written, left_out] =
        ["log_lines", "log_lines_left_out"].map(|name| number(&ran.report, &format!("/limits/{name}")));
    assert!(written + left_out >= SETUPS.into(), "{written} {left_out}");
    // The log accepts at most ten lines at once, and then one line per second. Before each of these lines, the log may
    // contain a line with the number of omitted lines.
    let seconds = number(&ran.report, "/wall_ns") / 1_000_000_000 + 1;
    assert!(written <= 10 + seconds, "{written} in {seconds} s");
    assert!(lines <= 2 * written + 1, "{lines}");
    assert!(ran.errors.contains("lines omitted from this log"));
    let all = run(&single(&bad_setups(50).then(&power_off())), 1, &["--max-log-lines", "0"]);
    assert_eq!(number(&all.report, "/limits/log_lines_left_out"), 0);
    assert!(number(&all.report, "/limits/log_lines") >= 50);
}

#[test]
fn console_output_is_limited_and_counted() {
    const BYTES: u32 = 60_000;
    let code = Code::new().repeat(BYTES, &Code::new().out8(SERIAL, b'x')).then(&power_off());
    let figure = |ran: &RunResult, name: &str| number(&ran.report, &format!("/limits/{name}"));
    let ran = run(&single(&code), 1, &["--max-console", "1000"]);
    assert_eq!(ran.status, 0, "{}", ran.errors);
    let [taken, left_out] = ["console_bytes", "console_bytes_left_out"];
    assert_eq!(ran.console.len() as u64, figure(&ran, taken));
    assert_eq!(figure(&ran, taken) + figure(&ran, left_out), u64::from(BYTES));
    let seconds = number(&ran.report, "/wall_ns") / 1_000_000_000 + 1;
    assert!(figure(&ran, taken) <= 1000 + 1000 * seconds);
    assert!(ran.errors.contains("console output is omitted"));
    let all = run(&single(&code), 1, &["--max-console", "0"]);
    assert_eq!(all.console.len() as u64, u64::from(BYTES));
    assert_eq!(figure(&all, left_out), 0);
}

#[test]
fn guest_that_resets_too_often_waits_and_the_machine_ends_when_asked() {
    let code = Code::new().out8(RESET_PORT, 0xfe).halt_for_ever();
    let arguments = ["--on-reset", "restart", "--max-resets", "3"];
    let mut machine = Running::start(&single(&code), &arguments);
    machine.await_line("--max-resets");
    let report = machine.terminate();
    assert_eq!(number(&report, "/boots"), 4);
    assert_eq!(number(&report, "/limits/resets_delayed"), 1);
}

#[test]
fn recordings_of_a_guest_that_resets_are_limited() {
    let marks = Code::new().repeat(1000, &Code::new().store(DOORBELL, 7));
    let code = marks.out8(RESET_PORT, 0xfe).halt_for_ever();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let recording = directory.path().join("perf.data");
    let arguments = [
        "--on-reset",
        "restart",
        "--max-resets",
        "3",
        "--persistent",
        "marks,size=16K",
        "--max-recordings",
        "20K",
        "--recording",
        recording.to_str().expect("plain"),
    ];
    let mut machine = Running::start(&single(&code), &arguments);
    machine.await_line("--max-resets");
    let report = machine.terminate();
    // Four boots have ended with a reset, and the fifth waits. The VMM writes a recording if any of the budget of 20
    // KiB is left. Each recording has more than 16 KiB, so the VMM writes two and leaves out the other two.
    assert_eq!(number(&report, "/boots"), 4);
    let left_out = number(&report, "/limits/recordings_left_out");
    assert_eq!(left_out, 2);
    assert!(recording.exists());
}

#[test]
fn every_end_of_a_guest_has_its_own_status() {
    let bad = for_ever(Code::new(), &Code::new().store(REGISTERS + 0x50, 0xffff));
    let kernels = [
        Code::new().die(),
        Code::new().out8(RESET_PORT, 0xfe).halt_for_ever(),
        bad_setups(3).then(&power_off()),
        Code::new().store_unemulated(REGISTERS),
    ];
    for (code, status) in kernels.iter().zip([4, 3, 0, 8]) {
        let ran = run(&single(code), 1, &[]);
        assert_eq!(ran.status, status, "{}", ran.errors);
    }
    let machine = Running::start(&kernel(&[bad]), &[]);
    let mut machine = machine;
    machine.await_answer();
    machine.terminate();
}
