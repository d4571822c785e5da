//! The device's process is killed, replaced, answers late, and is stopped. The guest of the stock QEMU lives on.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use images::daemon::Daemon;
use images::{Boot, Carrier, Error as BootError, Outcome};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use tests::micro::vmm_binary;

/// How long a step may take: an emulated guest boots within it beside other guests.
const STEP: Duration = Duration::from_secs(150);

/// How late the device's process answers.
const LATE: Duration = Duration::from_millis(5);

/// Shell functions of the guest. `step NAME` lets the host continue. `lost N` counts marks until the device has been
/// given up N times.
const GUEST: &str = r#"
step() {
	echo "$1" > /dev/ttyS1
}
lost() {
	until [ "$(dmesg | grep -c 'does not answer')" = "$1" ]; do
		vperf stat -e marks -- true > /tmp/stat 2>&1
		sleep 0.1
	done
	vperf stat -e marks -- true && exit 3
	vperf stat -e marks -- true 2>&1 | grep 'Input/output error' || exit 4
}
"#;

/// A guest of a stock QEMU, whose device is in a process that the test may end.
struct Guest {
    /// Owns the sockets.
    directory: tempfile::TempDir,
    boot: Option<JoinHandle<Result<Outcome, BootError>>>,
}

impl Guest {
    fn boot(script: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
        let boot = Boot {
            command: format!("{GUEST}{script}"),
            carrier: Carrier::BesideEmulation,
            programs: vec!["guest-tests".to_owned()],
            vmm_args: ["--ctl".to_owned(), path("first")].into(),
            other_args: [
                "-qmp".to_owned(),
                format!("unix:{},server=on,wait=off", path("qmp")),
                "-serial".to_owned(),
                format!("file:{}", path("steps")),
                "-device".to_owned(),
                "pcie-root-port,id=spare,pref64-reserve=32M".to_owned(),
            ]
            .into(),
            ..Boot::default()
        };
        let boot = thread::spawn(move || boot.run());
        Self { directory, boot: Some(boot) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until the guest has come to this step.
    fn await_step(&mut self, name: &str) {
        self.await_step_with(name, || thread::sleep(Duration::from_millis(20)));
    }

    /// Repeats `act` until the guest has come to this step.
    fn await_step_with(&mut self, name: &str, mut act: impl FnMut()) {
        let begin = Instant::now();
        while !fs::read_to_string(self.path("steps")).is_ok_and(|steps| steps.lines().any(|step| step == name)) {
            if let Some(boot) = self.boot.take_if(|boot| boot.is_finished()) {
                panic!("the guest ended before step {name}: {:?}", boot.join());
            }
            assert!(begin.elapsed() < STEP, "the guest has not come to step {name}");
            act();
        }
    }

    /// Returns the status and the output of the guest's command. The device's first process was killed.
    fn end(mut self) -> (i32, String) {
        let boot = self.boot.take().expect("one call");
        let ended = boot.join().expect("no panic").expect_err("the device's process was killed");
        let BootError::DaemonFailed { status, output, .. } = ended else { panic!("{ended:?}") };
        (status, output)
    }
}

/// Returns the `vmm serve` whose arguments contain this path.
fn daemon_with(path: &Path) -> Pid {
    let word = path.to_string_lossy();
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let daemons = processes.filter(|process| {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments);
        arguments.contains("\0serve\0") && arguments.split('\0').any(|argument| argument == word)
    });
    let ids: Vec<i32> = daemons.filter_map(|process| process.file_name().to_string_lossy().parse().ok()).collect();
    let [id] = ids[..] else { panic!("{word}: {ids:?}") };
    Pid::from_raw(id).expect("an id")
}

fn signal(process: Pid, signal: Signal) {
    rustix::process::kill_process(process, signal).expect("the process lives");
}

/// QEMU's monitor.
struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("QEMU's monitor");
        stream.set_read_timeout(Some(STEP)).expect("a time limit");
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.await_line("QMP");
        monitor.execute("qmp_capabilities", &json!({}));
        monitor
    }

    fn execute(&mut self, command: &str, arguments: &Value) {
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{request}").expect("a request");
        self.await_line("return");
    }

    /// Reads until a line has this key, or is this event.
    fn await_line(&mut self, word: &str) {
        loop {
            let mut line = String::new();
            let bytes = self.stream.read_line(&mut line).expect("a line of the monitor");
            assert_ne!(bytes, 0, "QEMU ended before {word}");
            let value: Value = serde_json::from_str(&line).expect("JSON");
            assert!(value.get("error").is_none(), "{line}");
            if value.get(word).is_some() || value["event"] == word {
                return;
            }
        }
    }
}

/// The guest's driver is bound to the stopped device when the guest powers off.
#[apply(tests::host_test)]
fn guest_lives_on_when_its_device_is_killed_replaced_late_and_stopped() {
    let mut guest = Guest::boot(
        r#"
vperf persist new -e marks --name orphan || exit 5
step ready
lost 1
echo virtio0 > /sys/bus/virtio/drivers/virtio_pmu/unbind || exit 6
step lost
until vperf stat -e marks -- true > /tmp/stat 2>&1; do
	sleep 0.1
done
vperf persist ls | grep orphan && exit 7
guest-tests one counting marks_count_exactly || exit 8
guest-tests one counting two_vcpus_never_mix || exit 9
step replaced
lost 2
step stopped
exit 10
"#,
    );
    guest.await_step("ready");
    signal(daemon_with(&guest.path("first")), Signal::KILL);
    guest.await_step("lost");
    let mut monitor = Monitor::connect(&guest.path("qmp"));
    let socket = guest.path("second");
    let mut serve = Command::new(vmm_binary());
    let daemon = Daemon::start(serve.args(Daemon::arguments(&socket.to_string_lossy(), 2, &[])), &socket);
    let daemon = daemon.expect("a second process");
    let place = json!({"type": "unix", "path": socket});
    monitor.execute("device_add", &json!({"driver": "vfio-user-pci", "bus": "spare", "socket": place}));
    let process = daemon_with(&socket);
    // Many of the answers that the vCPUs wait for are milliseconds late.
    guest.await_step_with("replaced", || {
        for (act, time) in [(Signal::STOP, LATE), (Signal::CONT, 2 * LATE)] {
            signal(process, act);
            thread::sleep(time);
        }
    });
    signal(process, Signal::STOP);
    guest.await_step("stopped");
    signal(process, Signal::CONT);
    let (status, output) = guest.end();
    assert_eq!(status, 10, "{output}");
    let error = daemon.finish().expect_err("QEMU gave the stopped process up").to_string();
    assert!(error.contains("the connection to the VMM failed"), "{error}");
}
