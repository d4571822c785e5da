//! Runs a micro guest through the built `vmm` and reads its report.

use std::env;
use std::fs;
use std::io::{Read, Write, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// The time limit of a run, which is far longer than any micro guest takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// The VMM's exit status, or -1 if a signal ended it.
    pub status: i32,
    /// Its output on standard error.
    pub errors: String,
    /// The guest's output on the serial port.
    pub console: Vec<u8>,
    /// The report.
    pub report: Value,
}

/// The report's totals of one vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vcpu {
    /// Exits for port I/O.
    pub io: u64,
    /// Exits for memory-mapped I/O.
    pub mmio: u64,
    /// Exits for a halt that reached the VMM.
    pub hlt: u64,
}

impl RunResult {
    /// Totals of vCPU `index`.
    ///
    /// # Panics
    /// If the report lacks them.
    #[must_use]
    pub fn vcpu(&self, index: usize) -> Vcpu {
        let exits = &self.report["vcpus"][index]["exits"];
        Vcpu { io: self.number(&exits["io"]), mmio: self.number(&exits["mmio"]), hlt: self.number(&exits["hlt"]) }
    }

    /// KVM's own statistic `name` of vCPU `index`.
    ///
    /// # Panics
    /// If this KVM lacks the statistic. KVM has offered statistics to the VMM since Linux 5.14.
    #[must_use]
    pub fn statistic(&self, index: usize, name: &str) -> u64 {
        self.number(&self.report["vcpus"][index]["kvm"][name])
    }

    /// Marks counted by the device.
    ///
    /// # Panics
    /// If the report lacks the number.
    #[must_use]
    pub fn marks(&self) -> u64 {
        self.number(&self.report["vpmu"]["marks"])
    }

    fn number(&self, value: &Value) -> u64 {
        let Some(number) = value.as_u64() else {
            panic!("no number in the report: {:#}", self.report);
        };
        number
    }
}

/// Boots `kernel` with `vcpus` vCPUs and further VMM arguments, and waits until the VMM ends.
///
/// # Panics
/// If the VMM cannot be started, does not end in time, or leaves no report.
#[must_use]
pub fn run(kernel: &[u8], vcpus: usize, arguments: &[&str]) -> RunResult {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("kernel");
    let report = directory.path().join("report.json");
    let console = directory.path().join("console");
    let serial = fs::File::create(&console).expect("room for its output");
    fs::write(&image, kernel).expect("room for a small kernel");
    say_once();

    let mut vmm = Command::new(vmm_binary())
        .arg("run")
        .arg("--kernel")
        .arg(&image)
        .arg("--report")
        .arg(&report)
        .args(["--memory", "32", "--vcpus", &vcpus.to_string()])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(serial)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the VMM starts");

    // The VMM's standard error closes when the VMM ends, so reading it to the end waits for the VMM.
    let mut pipe = vmm.stderr.take().expect("piped above");
    let (sender, receiver) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut errors = String::new();
        let read = pipe.read_to_string(&mut errors);
        // The receiver is gone after the limit.
        let _ = sender.send(());
        read.map(|_| errors)
    });
    let in_time = receiver.recv_timeout(LIMIT).is_ok();
    if !in_time {
        vmm.kill().expect("the VMM is not reaped yet");
    }
    let status = vmm.wait().expect("the VMM ends");
    let errors = reader.join().expect("the reader does not panic").expect("readable text");
    assert!(in_time, "no end within {LIMIT:?}: {errors}");
    let report = fs::read(&report).unwrap_or_else(|e| panic!("no report: {e}: {errors}"));
    let report = serde_json::from_slice(&report).expect("a report in JSON");
    RunResult { status: status.code().unwrap_or(-1), errors, console: fs::read(&console).expect("its output"), report }
}

/// Returns the path of this workspace's VMM, which is built once per test program. The VMM is optimized if the test
/// program is, as in benchmarks.
///
/// To get an unoptimized VMM, this function builds the VMM's test `cli`, which depends on the VMM, and does not pass
/// `--package`. Cargo then unifies features as `cargo test` does, and reuses the crates that `cargo test` compiled.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn vmm_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(build)
}

fn build() -> PathBuf {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into());
    let arguments: &[&str] = if cfg!(debug_assertions) {
        &["test", "--no-run", "--test", "cli"]
    } else {
        &["build", "--release", "--package", "vmm", "--bin", "vmm"]
    };
    let output = Command::new(cargo)
        .args(arguments)
        .args(["--quiet", "--message-format=json"])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "the VMM does not build");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == "vmm")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .expect("cargo names the program that it built")
}

/// Prints the name of the KVM module once. It is printed even if the tests pass, because the test runner captures only
/// the output of print macros.
fn say_once() {
    static SAID: OnceLock<()> = OnceLock::new();
    SAID.get_or_init(|| {
        let module = ["kvm_intel", "kvm_amd", "kvm_pvm"]
            .into_iter()
            .find(|name| Path::new("/sys/module").join(name).exists())
            .unwrap_or("of unknown kind");
        // A closed stderr must not fail the test.
        let _ = writeln!(stderr(), "micro guests on /dev/kvm ({module})");
    });
}
