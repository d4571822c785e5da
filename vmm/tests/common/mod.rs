//! Small guests, and the `vmm` program that runs them.

pub(crate) mod driver;
pub(crate) mod machine;

use std::fs;
use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The load address of small guests. It is above the boot tables.
const LOAD: u64 = 0x20_0000;

/// Code that writes the byte `value` to `port` with `out`.
pub(crate) fn out(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0x66, 0xba, low, high, 0xb0, value, 0xee]
}

/// `hlt` in a loop.
pub(crate) const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];
/// A jump to itself.
pub(crate) const SPIN: [u8; 2] = [0xeb, 0xfe];
/// An invalid instruction. It causes a triple fault, because the small guests have no interrupt table.
pub(crate) const TRIPLE_FAULT: [u8; 2] = [0x0f, 0x0b];

/// Code that writes sleep type 5 (S5) with the enable bit to the ACPI sleep port.
pub(crate) fn power_off() -> Vec<u8> {
    [out(0x600, 5 << 2 | 1 << 5), HALT.to_vec()].concat()
}

/// Code that executes `out` to an unused port `count` times.
pub(crate) fn outs(count: u32) -> Vec<u8> {
    let mut code = vec![0xb9];
    code.extend(count.to_le_bytes());
    code.extend([0x66, 0xba, 0x80, 0x00]);
    code.extend([0xee, 0xff, 0xc9, 0x75, 0xfb]);
    code
}

/// An ELF kernel that consists of `code` and needs at least `in_memory` bytes of memory.
pub(crate) fn elf(code: &[u8], in_memory: u64) -> Vec<u8> {
    let mut bytes = vec![0; 120];
    let mut put = |offset: usize, value: &[u8]| {
        bytes[offset..offset + value.len()].copy_from_slice(value);
    };
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &2u16.to_le_bytes());
    put(18, &62u16.to_le_bytes());
    put(24, &LOAD.to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &1u16.to_le_bytes());
    put(64, &1u32.to_le_bytes());
    put(72, &120u64.to_le_bytes());
    put(88, &LOAD.to_le_bytes());
    put(96, &(code.len() as u64).to_le_bytes());
    put(104, &in_memory.max(code.len() as u64).to_le_bytes());
    bytes.extend_from_slice(code);
    bytes
}

/// A directory for the files of one test.
pub(crate) struct Bench(tempfile::TempDir);

impl Bench {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).expect("a file in our own directory");
        path
    }

    /// Writes a kernel that consists of `code`, and returns its path.
    pub(crate) fn kernel(&self, code: &[u8]) -> PathBuf {
        self.file("kernel.elf", &elf(code, 0))
    }
}

/// The command `vmm` with `args` and empty input. It is not started yet.
pub(crate) fn vmm<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmm"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// The command `vmm run` for `kernel`, with little memory.
pub(crate) fn run(kernel: &Path) -> Command {
    assert!(Path::new("/dev/kvm").exists(), "this test runs a guest and needs /dev/kvm");
    let mut command = vmm(["run", "--memory", "16", "--kernel"]);
    command.arg(kernel);
    command
}

/// The standard error of a finished process.
pub(crate) fn messages(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks that a command failed with status `code` and printed one line that contains all `words`.
#[track_caller]
pub(crate) fn refused(output: &Output, code: i32, words: &[&str]) {
    let text = messages(output);
    assert_eq!(output.status.code(), Some(code), "{words:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{words:?}: {text}");
    assert!(text.starts_with("vmm: "), "{text}");
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
    assert!(output.stdout.is_empty(), "{words:?}");
}

/// Runs `vmm ctl` with `args` on a machine's control socket.
pub(crate) fn ctl(socket: &Path, args: &[&str]) -> Output {
    let mut command = vmm(["ctl", "--socket"]);
    command.arg(socket).args(args).output().expect("vmm starts")
}

/// The report at `path`.
pub(crate) fn read_report(path: &Path) -> serde_json::Value {
    let text = fs::read(path).expect("a report");
    serde_json::from_slice(&text).expect("JSON")
}

/// Code that places a mark with the value `value` at the doorbell.
pub(crate) fn mark(value: u32) -> Vec<u8> {
    // mov ebx, doorbell; mov dword [rbx], value
    let mut code = vec![0xbb, 0x00, 0x10, 0x00, 0xd0, 0xc7, 0x03];
    code.extend(value.to_le_bytes());
    code
}

/// A machine that has been started. It is killed when this value is dropped, because otherwise the guest of a failed
/// test would spin forever.
#[derive(Debug)]
pub(crate) struct Running(Option<Child>);

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().expect("vmm starts")))
    }

    /// Waits until the machine ends. Returns its exit status, and all output that has not been read yet.
    pub(crate) fn wait_with_output(mut self) -> Output {
        let child = self.0.take().expect("a child");
        child.wait_with_output().expect("a child")
    }
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().expect("a child")
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("a child")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Both calls fail if the machine has already ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Sends `signal` (`-TERM`) to `child`.
pub(crate) fn kill(signal: &str, child: &Child) {
    let id = child.id().to_string();
    let kill = Command::new("kill").args([signal, &id]).status();
    assert!(kill.expect("kill starts").success());
}

/// Kills the process that runs the guest, and waits until the machine has ended. It is `child`, or the process for which
/// `child` waits: if that one were killed instead, the machine would end a moment later.
#[track_caller]
pub(crate) fn kill_machine(child: &mut Child) {
    let id = child.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
    let children = children.expect("a process");
    let own = id.to_string();
    let machine = children.split_whitespace().next().unwrap_or(&own);
    let kill = Command::new("kill").args(["-KILL", machine]).status();
    assert!(kill.expect("kill starts").success());
    let status = child.wait().expect("a child");
    assert_eq!(status.signal(), Some(9), "{status}");
}

/// Ends a machine with SIGTERM.
#[track_caller]
pub(crate) fn terminate(mut child: Running) {
    kill("-TERM", &child);
    assert_eq!(child.wait().expect("a child").code(), Some(6));
}

/// Waits for the next `bytes` bytes of a guest's output, and returns them.
#[track_caller]
pub(crate) fn read_output(child: &mut Child, bytes: usize) -> String {
    let mut text = vec![0; bytes];
    let output = child.stdout.as_mut().expect("piped");
    if let Err(error) = output.read_exact(&mut text) {
        let mut log = String::new();
        if let Some(messages) = &mut child.stderr {
            messages.read_to_string(&mut log).expect("text");
        }
        panic!("{error}: {log}");
    }
    String::from_utf8(text).expect("text")
}

/// Starts a machine, and waits until its guest has printed something.
pub(crate) fn running(command: &mut Command) -> Running {
    let mut child = Running::start(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    read_output(&mut child, 1);
    child
}

/// The values of the marks in the recording at `path`. The value of a mark is the address in its sample.
pub(crate) fn values(path: &Path) -> Vec<u64> {
    use linux_perf_data::{PerfFileReader, PerfFileRecord};
    let file = fs::File::open(path).expect("a recording");
    let PerfFileReader { mut record_iter, mut perf_file } = PerfFileReader::parse_file(file).expect("a perf.data");
    let mut values = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).expect("a record") {
        if let PerfFileRecord::EventRecord { record, .. } = record
            && let linux_perf_data::linux_perf_event_reader::EventRecord::Sample(sample) =
                record.parse().expect("whole")
        {
            values.push(sample.addr.expect("an address"));
        }
    }
    values
}
