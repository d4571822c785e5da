//! Checks the privileges of a running VMM in `/proc`: threads, filters, capabilities, the user, the root directory and
//! descriptors. The guests are programs of a few instructions that run on this machine's `/dev/kvm`.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]

#[cfg(target_arch = "x86_64")]
mod inject;
mod namespace;
#[cfg(target_arch = "x86_64")]
mod takeover;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::io::Errno;
use serde_json::Value;
use tests::micro::attack::for_ever;
use tests::micro::{Code, single, vmm_binary};

const DOORBELL: u32 = 0xd000_1000;
const SERIAL: u16 = 0x3f8;
const RESET_PORT: u16 = 0xcf9;
const RESET: u8 = 6;
/// `CAP_PERFMON`.
const PERFMON: u64 = 1 << 38;
/// The ids of a user and a group that own no files.
const NOBODY: u32 = 65_534;

/// Seven marks, then a byte to the console.
fn marking() -> Code {
    (0..7).fold(Code::new(), |code, _| code.store(DOORBELL, 7)).out8(SERIAL, b'!')
}

/// Returns whether reading a thread's file in `/proc` failed because the thread has exited. The thread can exit before
/// or after the file was opened.
fn exited(error: &io::Error) -> bool {
    let gone = [Errno::NOENT, Errno::SRCH].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| gone.contains(&code))
}

/// A running machine in its own directory.
struct Machine {
    child: Child,
    directory: tempfile::TempDir,
}

impl Machine {
    /// Runs the VMM with `guest`, a persistent `marks` event, and a control socket. The command line starts with
    /// the words in `before`, followed by the VMM.
    fn start(guest: &Code, before: &[&str], arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir(directory.path().join("out")).expect("a directory");
        Self::start_in(directory, guest, before, arguments)
    }

    fn start_in(directory: tempfile::TempDir, guest: &Code, before: &[&str], arguments: &[&str]) -> Self {
        let at = |name: &str| directory.path().join(name);
        fs::write(at("kernel"), single(guest)).expect("room for a small kernel");
        let whole = [before, &[vmm_binary().to_str().expect("a plain path")]].concat();
        let (program, first) = whole.split_first().expect("a program");
        let mut child = Command::new(program)
            .args(first)
            .args(["run", "--memory", "16", "--persistent", "marks"])
            .arg("--kernel")
            .arg(at("kernel"))
            .arg("--recording")
            .arg(at("out/perf.data"))
            .arg("--ctl")
            .arg(at("vm.sock"))
            .args(arguments)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the VMM starts");
        let console = child.stdout.as_mut().expect("piped");
        let begun = console.read_exact(&mut [0]);
        let mut machine = Self { child, directory };
        match begun {
            Ok(()) => machine,
            Err(error) => panic!("the guest does not run: {error}: {}", machine.end().1),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory in `/proc` of the process that runs the guest. Its parent only waits for it.
    fn process(&self) -> PathBuf {
        let parent = self.child.id().to_string();
        let parent = Path::new("/proc").join(&parent);
        let children = parent.join("task").join(self.child.id().to_string()).join("children");
        // Without a PID namespace, the process has no parent of its own.
        let children = fs::read_to_string(children).expect("a process");
        match children.split_whitespace().next() {
            Some(child) => Path::new("/proc").join(child),
            None => parent,
        }
    }

    /// Waits until the guest has written `count` more bytes.
    fn await_bytes(&mut self, count: usize) {
        let console = self.child.stdout.as_mut().expect("piped");
        console.read_exact(&mut vec![0; count]).expect("the guest keeps running");
    }

    /// Runs `vmm ctl` on this machine.
    fn ask(&self, words: &[&str]) -> Output {
        let mut ctl = Command::new(vmm_binary());
        ctl.args(["ctl", "--socket"]).arg(self.path("vm.sock"));
        ctl.args(words).output().expect("vmm starts")
    }

    /// Runs `vmm ctl` on this machine and checks that it succeeds.
    fn done(&self, words: &[&str]) {
        let output = self.ask(words);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {errors}");
    }

    /// Returns the status of each thread by thread id. Omits the threads that KVM adds to the process.
    fn threads(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let tasks = fs::read_dir(self.process().join("task")).expect("a process");
        let status = |task: fs::DirEntry| {
            let text = match fs::read_to_string(task.path().join("status")) {
                // A KVM thread has exited since it was listed. KVM has one such thread for each machine, and the thread
                // exits when the machine ends.
                Err(error) if exited(&error) => return None,
                text => text.expect("a thread"),
            };
            let fields = text.lines().filter_map(|line| line.split_once(':'));
            let fields = fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
            let id = task.file_name().into_string().expect("a number");
            Some((id, fields.collect::<BTreeMap<_, _>>()))
        };
        tasks
            .filter_map(|task| status(task.expect("a thread")))
            .filter(|(_, status)| !status["Name"].starts_with("kvm-"))
            .collect()
    }

    /// Ends the machine with a signal. Returns its exit status and its messages.
    fn end(&mut self) -> (Option<i32>, String) {
        let id = self.child.id().to_string();
        // It may have exited already.
        let _ = Command::new("kill").args(["-TERM", &id]).status();
        let mut errors = String::new();
        let pipe = self.child.stderr.as_mut().expect("piped");
        pipe.read_to_string(&mut errors).expect("text");
        let status = self.child.wait().expect("a child");
        (status.code(), errors)
    }

    /// Ends the machine with a signal. Returns the report that the VMM has written.
    fn report(&mut self) -> Value {
        let (status, errors) = self.end();
        assert_eq!(status, Some(6), "{errors}");
        let text = fs::read(self.path("report.json")).expect("a report");
        serde_json::from_slice(&text).expect("JSON")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // If the test failed, the process may still be running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spinning() -> Code {
    // jmp self
    marking().raw(&[0xeb, 0xfe])
}

fn set(status: &BTreeMap<String, String>, name: &str) -> u64 {
    u64::from_str_radix(&status[name], 16).expect("hexadecimal")
}

/// The capabilities of the test process.
fn own_capabilities() -> u64 {
    let text = fs::read_to_string("/proc/self/status").expect("a process");
    let line = text.lines().find_map(|line| line.strip_prefix("CapPrm:"));
    u64::from_str_radix(line.expect("a line").trim(), 16).expect("hexadecimal")
}

fn is_root() -> bool {
    fs::metadata("/proc/self").expect("a process").uid() == 0
}

fn names(machine: &Machine) -> Vec<String> {
    let mut names: Vec<String> = machine.threads().values().map(|status| status["Name"].clone()).collect();
    names.sort();
    names
}

#[test]
fn core_dumps_are_off() {
    let machine = Machine::start(&spinning(), &[], &[]);
    let limits = fs::read_to_string(machine.process().join("limits")).expect("a process");
    let line = limits.lines().find(|line| line.starts_with("Max core"));
    let words: Vec<&str> = line.unwrap_or("").split_whitespace().collect();
    assert_eq!(words, ["Max", "core", "file", "size", "0", "0", "bytes"]);
}

#[test]
fn each_thread_has_a_filter_and_no_capability_but_perfmon() {
    let mut machine = Machine::start(&spinning(), &[], &["--vcpus", "2", "--report", "report.json"]);
    assert_eq!(names(&machine), ["ctl", "vcpu0", "vcpu1", "vmm", "vpmu closer", "vpmu drain"]);
    for (id, status) in machine.threads() {
        let name = &status["Name"];
        assert_eq!(status["Seccomp"], "2", "{id} {name}");
        assert_eq!(status["NoNewPrivs"], "1", "{id} {name}");
        let kept = own_capabilities() & PERFMON;
        assert_eq!(set(&status, "CapEff"), kept, "{id} {name}");
        assert_eq!(set(&status, "CapPrm"), kept, "{id} {name}");
        assert_eq!(set(&status, "CapInh"), 0, "{id} {name}");
        assert_eq!(set(&status, "CapAmb"), 0, "{id} {name}");
        if is_root() {
            assert_eq!(set(&status, "CapBnd"), 0, "{id} {name}");
        }
    }
    let report = machine.report();
    let confinement = &report["confinement"];
    assert_eq!(confinement["seccomp"], true, "{report:#}");
    assert_eq!(confinement["no_new_privs"], true, "{report:#}");
    let expected: &[&str] = match own_capabilities() & PERFMON {
        0 => &[],
        _ => &["perfmon"],
    };
    assert_eq!(confinement["capabilities"], serde_json::json!(expected));
    let survey = survey();
    for fact in ["landlock_abi", "pid_namespace"] {
        assert_eq!(confinement[fact], survey["confinement"][fact], "{report:#}");
    }
}

/// The results of `vmm check`.
fn survey() -> Value {
    let output = Command::new(vmm_binary()).args(["check", "--json"]).output();
    serde_json::from_slice(&output.expect("vmm starts").stdout).expect("JSON")
}

/// Whether machines have a PID namespace of their own: this process may make one.
fn has_namespace() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    own_capabilities() & SYS_ADMIN != 0
}

#[test]
fn machine_without_exit_traces_keeps_no_capability_where_perf_allows_the_rest() {
    let level = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").expect("perf events");
    let level: i32 = level.trim().parse().expect("a number");
    let clocks = ["--pmu", "clocks"];
    let machine = Machine::start(&spinning(), &[], &clocks);
    let kept = own_capabilities() & PERFMON;
    let expected = if level > 1 { kept } else { 0 };
    for (id, status) in machine.threads() {
        assert_eq!(set(&status, "CapPrm"), expected, "{id}");
    }
    machine.done(&["start", "cpu-clock,period=1000000,cpu=0,name=clock"]);
}

#[test]
fn machine_without_a_pmu_keeps_no_capability() {
    let directory = tempfile::tempdir().expect("a directory");
    let kernel = directory.path().join("kernel");
    fs::write(&kernel, single(&Code::new().out8(SERIAL, b'!').raw(&[0xeb, 0xfe]))).expect("room");
    let mut child = Command::new(vmm_binary())
        .args(["run", "--memory", "16", "--no-vpmu", "--kernel"])
        .arg(&kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the VMM starts");
    let console = child.stdout.as_mut().expect("piped");
    console.read_exact(&mut [0]).expect("the guest runs");
    let machine = Machine { child, directory };
    assert_eq!(names(&machine), ["vcpu0", "vmm"]);
    for status in machine.threads().values() {
        assert_eq!(status["Seccomp"], "2");
        assert_eq!(set(status, "CapPrm"), 0);
    }
}

#[test]
fn threads_stay_the_same_whatever_the_operator_and_the_guest_do() {
    let guest = marking().out8(RESET_PORT, RESET).halt_for_ever();
    let mut machine = Machine::start(&guest, &[], &["--on-reset", "restart", "--vcpus", "2"]);
    let before: Vec<String> = machine.threads().into_keys().collect();
    for _ in 0..5 {
        machine.await_bytes(1);
        machine.done(&["start", "cpu-clock,period=1000000,cpu=0,name=clock"]);
        machine.done(&["list"]);
        machine.done(&["flush"]);
        machine.done(&["dump"]);
        let now = machine.path("now.data");
        machine.done(&["dump", now.to_str().expect("a plain path")]);
        machine.done(&["end", "clock"]);
        let after: Vec<String> = machine.threads().into_keys().collect();
        assert_eq!(after, before);
    }
    let (status, errors) = machine.end();
    assert_eq!((status, errors.as_str()), (Some(6), ""));
}

/// The C library's allocator frees memory with different system calls, depending on how much memory a thread has freed
/// before. Therefore, the test makes several large recordings.
#[test]
fn large_recordings_again_and_again_are_within_the_filters() {
    let marks = Code::new().repeat(20_000, &Code::new().store(DOORBELL, 7));
    let guest = marks.out8(SERIAL, b'!').raw(&[0xeb, 0xfe]);
    let large = ["--persistent", "marks,size=1M,name=large"];
    let mut machine = Machine::start(&guest, &[], &large);
    for _ in 0..4 {
        machine.done(&["dump"]);
        machine.done(&["start", "marks,size=4M,name=other"]);
        machine.done(&["end", "other"]);
    }
    let (status, errors) = machine.end();
    assert_eq!((status, errors.as_str()), (Some(6), ""));
}

#[test]
fn inherited_descriptors_are_closed_but_may_be_named_as_paths() {
    let other = tempfile::NamedTempFile::new().expect("a file");
    let script = format!("exec 8<{0} 9>>{0}; exec \"$@\"", other.path().display());
    let before = ["sh", "-c", &script, "sh"];
    let mut machine = Machine::start(&spinning(), &before, &["--report", "/dev/fd/9"]);
    let descriptors = fs::read_dir(machine.process().join("fd")).expect("a process");
    let open: Vec<PathBuf> = descriptors
        .map(|entry| fs::read_link(entry.expect("a descriptor").path()).expect("a link"))
        .filter(|target| target == other.path())
        .collect();
    assert_eq!(open.len(), 1, "only the report's descriptor is open");
    let (status, errors) = machine.end();
    assert_eq!((status, errors.as_str()), (Some(6), ""));
    let text = fs::read(other.path()).expect("a report");
    let report: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(report["ending"], "signal");
}

#[test]
fn limits_are_those_of_the_machine() {
    let mut machine = Machine::start(&spinning(), &[], &[]);
    let limits = fs::read_to_string(machine.process().join("limits")).expect("a process");
    let limit = |name: &str| -> Vec<u64> {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        let words = line.expect("such a limit").split_whitespace();
        words.map_while(|word| word.parse().ok()).collect()
    };
    assert_eq!(limit("Max core file size"), [0, 0]);
    let [soft, hard] = limit("Max open files")[..] else {
        panic!("{limits}");
    };
    assert!(soft == hard && soft < 4096, "{limits}");
    let [soft, hard] = limit("Max locked memory")[..] else {
        panic!("{limits}");
    };
    assert_eq!(soft, hard, "{limits}");
    assert_eq!(machine.end().0, Some(6));
}

#[test]
fn run_without_filters_warns() {
    let mut machine = Machine::start(&spinning(), &[], &["--no-seccomp"]);
    for status in machine.threads().values() {
        assert_eq!(status["Seccomp"], "0");
        assert_eq!(status["NoNewPrivs"], "1");
    }
    let (status, errors) = machine.end();
    assert_eq!(status, Some(6));
    assert!(errors.starts_with("vmm: warning: --no-seccomp"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn logging_of_everything_is_within_the_filters() {
    let guest = marking().out8(RESET_PORT, RESET).halt_for_ever();
    let before = ["env", "RUST_LOG=trace", "RUST_BACKTRACE=1"];
    let mut machine = Machine::start(&guest, &before, &["--on-reset", "restart"]);
    machine.await_bytes(3);
    machine.done(&["dump"]);
    let (status, errors) = machine.end();
    assert_eq!(status, Some(6), "{errors}");
    assert!(errors.contains("boots again"), "{errors}");
}

/// Returns false if this process runs as root. Otherwise checks that the VMM refuses to start with these arguments, and
/// returns true.
fn refused_unless_root(arguments: &[&str]) -> bool {
    if is_root() {
        return false;
    }
    let output =
        Command::new(vmm_binary()).args(["run", "--kernel", "/dev/null"]).args(arguments).output().expect("vmm starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("start as root to use"), "{errors}");
    true
}

#[test]
fn machine_of_another_user_records_and_answers_as_that_user() {
    let user = format!("{NOBODY}:{NOBODY}");
    if refused_unless_root(&["--user", &user]) {
        return;
    }
    let guest = marking().out8(RESET_PORT, RESET).halt_for_ever();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("a directory");
    std::os::unix::fs::chown(&out, Some(NOBODY), Some(NOBODY)).expect("root gives it away");
    let recording = out.join("perf.data");
    let arguments = [
        // The batched engine's rings are locked memory.
        "--engine",
        "batched",
        "--user",
        &user,
        "--on-reset",
        "restart",
        "--report",
        "report.json",
    ];
    let mut machine = Machine::start_in(directory, &guest, &[], &arguments);
    machine.await_bytes(3);
    for status in machine.threads().values() {
        for name in ["Uid", "Gid"] {
            let numbers: Vec<&str> = status[name].split_whitespace().collect();
            assert_eq!(numbers, ["65534"; 4]);
        }
        assert_eq!(status["Groups"], "");
        assert_eq!(status["Seccomp"], "2");
        assert_eq!(set(status, "CapEff"), own_capabilities() & PERFMON);
    }
    let socket = fs::symlink_metadata(machine.path("vm.sock")).expect("a socket");
    assert_eq!((socket.uid(), socket.gid()), (NOBODY, NOBODY));
    // Host events require CAP_PERFMON.
    machine.done(&["start", "cpu-clock,period=1000000,cpu=0,name=clock"]);
    machine.done(&["dump"]);
    let owner = |path: &Path| fs::metadata(path).expect("a recording").uid();
    assert_eq!(owner(&recording), NOBODY);
    let mine = machine.path("now.data");
    machine.done(&["dump", mine.to_str().expect("a plain path")]);
    assert_eq!(owner(&mine), 0, "the owner of `vmm ctl`");
    let report = machine.report();
    assert_eq!(report["confinement"]["user"], user, "{report:#}");
    assert_eq!(report["recording"]["file"], recording.to_str().expect("a plain path"));
}

#[test]
fn recording_that_the_user_may_not_write_is_refused_at_the_start() {
    let user = format!("{NOBODY}:{NOBODY}");
    if refused_unless_root(&["--user", &user]) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let kernel = directory.path().join("kernel");
    fs::write(&kernel, single(&spinning())).expect("room");
    let output = Command::new(vmm_binary())
        .args(["run", "--memory", "16", "--persistent", "marks", "--user", &user])
        .arg("--kernel")
        .arg(&kernel)
        .arg("--recording")
        .arg(directory.path().join("perf.data"))
        .output()
        .expect("vmm starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("--recording"), "{errors}");
}

#[test]
fn machine_in_another_root_reaches_what_it_opened_before() {
    let root = tempfile::tempdir().expect("a directory");
    let path = root.path().to_str().expect("a plain path");
    if refused_unless_root(&["--chroot", path]) {
        return;
    }
    let guest = marking().out8(RESET_PORT, RESET).halt_for_ever();
    let arguments = ["--chroot", path, "--on-reset", "restart", "--report", "report.json"];
    let mut machine = Machine::start(&guest, &[], &arguments);
    machine.await_bytes(3);
    for id in machine.threads().keys() {
        let thread = machine.process().join("task").join(id);
        assert_eq!(fs::read_link(thread.join("root")).expect("a thread"), root.path());
        assert_eq!(fs::read_link(thread.join("cwd")).expect("a thread"), root.path());
    }
    machine.done(&["dump"]);
    assert!(machine.path("out/perf.data").exists());
    let now = machine.path("now.data");
    machine.done(&["dump", now.to_str().expect("a plain path")]);
    assert!(now.exists());
    let socket = machine.path("vm.sock");
    let report = machine.report();
    assert!(!socket.exists(), "the socket outlives its machine");
    assert_eq!(report["confinement"]["chroot"], path, "{report:#}");
    assert!(report["vmm_overhead_bytes"].is_u64(), "{report:#}");
    assert_eq!(fs::read_dir(root.path()).expect("a directory").count(), 0);
}

/// Restores the snapshot in `directory`. The command line starts with the words in `before`, followed by the VMM.
fn restored(before: &[&str], directory: &Path, arguments: &[&str]) -> Child {
    let whole = [before, &[vmm_binary().to_str().expect("a plain path")]].concat();
    let (program, first) = whole.split_first().expect("a program");
    let mut command = Command::new(program);
    command.args(first).args(["run", "--restore"]).arg(directory);
    let command = command.args(arguments).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    child.spawn().expect("the VMM starts")
}

#[test]
fn snapshot_of_one_user_continues_as_another_in_another_root() {
    let user = format!("{NOBODY}:{NOBODY}");
    if refused_unless_root(&["--user", &user]) {
        return;
    }
    let guest = for_ever(marking(), &Code::new().store(DOORBELL, 7).out8(SERIAL, b'.'));
    let mut machine = Machine::start(&guest, &[], &["--track-dirty"]);
    let [here, root] = ["here", "root"].map(|name| machine.path(name));
    machine.done(&["snapshot", here.to_str().expect("a plain path")]);
    let (status, errors) = machine.end();
    assert_eq!(status, Some(6), "{errors}");
    // The snapshot may belong to the machine's user.
    for file in ["memory", "state", "."] {
        let given = std::os::unix::fs::chown(here.join(file), Some(NOBODY), Some(NOBODY));
        given.expect("root gives it away");
    }
    fs::create_dir(&root).expect("a directory");
    let directory = std::mem::replace(&mut machine.directory, tempfile::tempdir().expect("one"));
    let out = directory.path().join("out");
    std::os::unix::fs::chown(&out, Some(NOBODY), Some(NOBODY)).expect("root gives it away");
    let [recording, socket] = ["out/perf.data", "vm.sock"].map(|name| directory.path().join(name));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let (root_text, recording_text, socket_text) = (text(&root), text(&recording), text(&socket));
    let mut arguments = vec!["--user", &user, "--chroot", &root_text, "--track-dirty"];
    arguments.extend(["--recording", &recording_text, "--ctl", &socket_text]);
    let child = restored(&[], &here, &arguments);
    let mut machine = Machine { child, directory };
    machine.await_bytes(3);
    for (id, status) in machine.threads() {
        let numbers: Vec<&str> = status["Uid"].split_whitespace().collect();
        assert_eq!(numbers, ["65534"; 4]);
        assert_eq!(status["Seccomp"], "2");
        let thread = machine.process().join("task").join(id);
        assert_eq!(fs::read_link(thread.join("root")).expect("a thread"), root);
    }
    // Root can take snapshots of the restored machine: a full one, and then a diff against it.
    let [whole, part] = ["whole", "part"].map(|name| text(&machine.path(name)));
    machine.done(&["snapshot", &whole]);
    machine.await_bytes(3);
    machine.done(&["snapshot", &part, "--diff", &whole]);
    machine.done(&["dump"]);
    assert_eq!(fs::metadata(&recording).expect("a recording").uid(), NOBODY);
    let (status, errors) = machine.end();
    assert_eq!((status, errors.as_str()), (Some(6), ""));
    // A snapshot of root is not for another user.
    let as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let child = restored(&as_nobody, Path::new(&part), &[]);
    let output = child.wait_with_output().expect("a child");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("part belongs to user 0, not to user 65534"), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn wrong_confinement_is_refused_with_its_remedy() {
    let refused = |before: &[&str], arguments: &[&str], status: i32, words: &[&str]| {
        let whole = [before, &[vmm_binary().to_str().expect("a plain path")]].concat();
        let (program, first) = whole.split_first().expect("a program");
        let output = Command::new(program)
            .args(first)
            .args(["run", "--kernel", "/nonexistent"])
            .args(arguments)
            .output()
            .expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        for word in words {
            assert!(errors.contains(word), "{arguments:?}: no {word:?} in {errors}");
        }
    };
    for user in ["nobody", "1000", "1000:", "-1:0", "4294967295:0"] {
        refused(&[], &[&format!("--user={user}")], 2, &["--user", "1000:1000"]);
    }
    // Without capabilities, root has no more rights than any other user.
    let nobody: &[&str] = match is_root() {
        true => &["setpriv", "--bounding-set=-all"],
        false => &[],
    };
    let remedy = ["start as root", "--user", "Operation not permitted"];
    refused(nobody, &["--user", "7:7"], 1, &remedy);
    let remedy = ["start as root", "--chroot", "Operation not permitted"];
    refused(nobody, &["--chroot", "/"], 1, &remedy);
}

#[test]
fn chroot_to_a_file_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    if refused_unless_root(&["--chroot", "/"]) {
        return;
    }
    let kernel = directory.path().join("kernel");
    fs::write(&kernel, single(&spinning())).expect("room");
    for wrong in [kernel.clone(), directory.path().join("absent")] {
        let output = Command::new(vmm_binary())
            .args(["run", "--memory", "16", "--kernel"])
            .arg(&kernel)
            .arg("--chroot")
            .arg(&wrong)
            .output()
            .expect("vmm starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains("--chroot must be a directory"), "{errors}");
    }
}
