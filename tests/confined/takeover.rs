//! Attacks by code that has taken over a thread of a confined VMM: it makes system calls with the thread's filter and
//! privileges.

use std::os::unix::fs::symlink;
use std::thread::sleep;
use std::time::Duration;

use super::inject::{Refused, Stopped};
use super::*;

const CLOEXEC: u64 = 8;
const ANY_CPU: u64 = u32::MAX as u64;
const NO_GROUP: u64 = u32::MAX as u64;
const F_SETOWN_EX: u64 = 15;
const F_SETFL: u64 = 4;
const F_SETSIG: u64 = 10;
/// `F_OWNER_PID`.
const PROCESS: i32 = 1;
const ENABLE: u64 = 0x2400;
/// The first version of Landlock that keeps signals within the restricted process.
const SCOPES_SIGNALS: u64 = 6;
const DENIED: i64 = -(libc::EACCES as i64);
const NO_SUCH_PROCESS: i64 = -(libc::ESRCH as i64);

/// A process that is not part of the machine.
struct Bystander(Child);

impl Bystander {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().expect("it starts"))
    }

    fn is_alive(&mut self) -> bool {
        self.0.try_wait().expect("a child").is_none()
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        // An attack may have ended it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sampling software clock, as `struct perf_event_attr` of the first version.
fn clock(period: u64) -> Vec<u8> {
    const SOFTWARE: u32 = 1;
    const SIZE: u32 = 64;
    const DISABLED: u64 = 1;
    let mut attr = Vec::new();
    attr.extend(SOFTWARE.to_ne_bytes());
    attr.extend(SIZE.to_ne_bytes());
    attr.extend(0_u64.to_ne_bytes());
    attr.extend(period.to_ne_bytes());
    attr.extend([0; 16]);
    attr.extend(DISABLED.to_ne_bytes());
    // One overflow wakes the reader.
    attr.extend(1_u32.to_ne_bytes());
    attr.resize(SIZE as usize, 0);
    attr
}

impl Machine {
    /// The id of the thread with this name.
    fn thread(&self, name: &str) -> u32 {
        let threads = self.threads();
        let mut found = threads.iter().filter(|(_, status)| status["Name"] == name);
        let (id, _) = found.next().expect("such a thread");
        id.parse().expect("a number")
    }

    /// The id that the machine's own process has for the thread with this name.
    fn own_id(&self, name: &str) -> u64 {
        let threads = self.threads();
        let status = threads.values().find(|status| status["Name"] == name);
        let ids = &status.expect("such a thread")["NSpid"];
        let innermost = ids.split_whitespace().last();
        innermost.expect("an id").parse().expect("a number")
    }

    /// The number of the descriptor of this directory.
    fn descriptor(&self, directory: &Path) -> u64 {
        let descriptors = fs::read_dir(self.process().join("fd")).expect("a process");
        let mut numbers = descriptors.filter_map(|entry| {
            let entry = entry.expect("a descriptor");
            let target = fs::read_link(entry.path()).ok()?;
            (target == directory).then(|| entry.file_name().into_string())
        });
        let number = numbers.next().expect("an open directory");
        number.expect("a number").parse().expect("a number")
    }
}

#[test]
fn event_on_a_process_outside_the_machine_is_refused_to_every_thread() {
    let bystander = Bystander::start();
    let machine = Machine::start(&spinning(), &[], &["--vcpus", "2"]);
    let own = machine.own_id("vcpu1");
    for name in ["vcpu0", "vmm", "ctl", "vpmu drain"] {
        let thread = Stopped::attach(machine.thread(name));
        let attr = thread.place(0, &clock(0));
        let open = |pid: u64| {
            let arguments = [attr, pid, ANY_CPU, NO_GROUP, CLOEXEC];
            thread.call(libc::SYS_perf_event_open, &arguments)
        };
        assert_eq!(open(bystander.0.id().into()), Err(Refused), "{name}");
        assert_eq!(open(ANY_CPU), Err(Refused), "{name}");
        let opened = open(own).expect("allowed");
        assert!(opened >= 0, "{name}: {opened}");
        assert_eq!(thread.call(libc::SYS_close, &[opened.cast_unsigned()]), Ok(0));
    }
}

#[test]
fn overflow_cannot_signal_a_process_outside_the_machine() {
    let mut bystander = Bystander::start();
    let machine = Machine::start(&spinning(), &[], &[]);
    let thread = Stopped::attach(machine.thread("vcpu0"));
    let attr = thread.place(0, &clock(1_000_000));
    let open = [attr, 0, ANY_CPU, NO_GROUP, CLOEXEC];
    let event = thread.call(libc::SYS_perf_event_open, &open);
    let event = event.expect("allowed").cast_unsigned();
    let fcntl = |what, argument| thread.call(libc::SYS_fcntl, &[event, what, argument]);
    let id = bystander.0.id().cast_signed();
    let owner = [PROCESS.to_ne_bytes(), id.to_ne_bytes()].concat();
    let owned = fcntl(F_SETOWN_EX, thread.place(128, &owner));
    let kill = fcntl(F_SETSIG, 9);
    let flags = libc::O_ASYNC | libc::O_NONBLOCK;
    assert_eq!(fcntl(F_SETFL, flags.cast_unsigned().into()), Ok(0));
    let enabled = thread.call(libc::SYS_ioctl, &[event, ENABLE]);
    assert_eq!(enabled, Ok(0));
    // The event counts while the thread runs.
    drop(thread);
    sleep(Duration::from_millis(300));
    if has_namespace() || landlock() >= SCOPES_SIGNALS {
        assert!(bystander.is_alive(), "killed: {owned:?}, {kill:?}");
    }
    assert_eq!(kill, Err(Refused));
    if has_namespace() {
        assert_eq!(owned, Ok(NO_SUCH_PROCESS));
    }
}

/// The version of this host's Landlock, or 0.
fn landlock() -> u64 {
    let output = Command::new(vmm_binary()).args(["check", "--json"]).output();
    let survey: Value = serde_json::from_slice(&output.expect("vmm starts").stdout).expect("JSON");
    let version = &survey["confinement"]["landlock_abi"];
    version.as_u64().unwrap_or_default()
}

#[test]
fn files_outside_the_directories_of_the_machine_are_out_of_reach() {
    if landlock() == 0 {
        eprintln!("skipped: this host has no Landlock");
        return;
    }
    let outside = tempfile::tempdir().expect("a directory");
    let theirs = outside.path().join("theirs");
    fs::write(&theirs, "theirs").expect("room");
    let machine = Machine::start(&spinning(), &[], &[]);
    let out = machine.path("out");
    fs::write(out.join("mine"), "mine").expect("room");
    symlink(outside.path(), out.join("link")).expect("room");
    let directory = machine.descriptor(&out);
    // The flags with which `vmm` opens a recording: read and write, create, exclusive, no link, close on exec.
    let create = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // `O_LARGEFILE` is 0 in the C library, but not in the kernel.
    let create = u64::from(create.cast_unsigned()) | 0x8000;
    for name in ["vmm", "ctl"] {
        let thread = Stopped::attach(machine.thread(name));
        let text = |offset, path: &Path| {
            let path = path.to_str().expect("a plain path");
            thread.place(offset, &[path.as_bytes(), &[0]].concat())
        };
        let mine = text(0, Path::new("mine"));
        let up = Path::new("../..").join(outside.path().file_name().expect("a name"));
        let far = outside.path().to_path_buf();
        for place in [far, up, PathBuf::from("link")] {
            let theirs = text(512, &place.join("theirs"));
            let planted = text(1024, &place.join("planted"));
            let call = |number, arguments: &[u64]| {
                let result = thread.call(number, arguments);
                result.expect("only Landlock sees the path")
            };
            let made = call(libc::SYS_openat, &[directory, planted, create, 0o600]);
            let removed = call(libc::SYS_unlinkat, &[directory, theirs, 0]);
            let swapped = [directory, mine, directory, theirs, 2];
            let swapped = call(libc::SYS_renameat2, &swapped);
            let moved = [directory, mine, directory, planted];
            let moved = call(libc::SYS_renameat, &moved);
            let all = [made, removed, swapped, moved];
            // A move to another directory may be refused as a move to another device.
            let refused = |&result: &i64| result == DENIED || result == -i64::from(libc::EXDEV);
            assert!(all.iter().all(refused), "{name} {}: {all:?}", place.display());
        }
        // The same calls succeed in the directory of recordings.
        let new = text(512, Path::new("new"));
        let made = thread.call(libc::SYS_openat, &[directory, new, create, 0o600]);
        assert!(made.expect("allowed") >= 0, "{name}");
        let swapped = [directory, mine, directory, new, 2];
        assert_eq!(thread.call(libc::SYS_renameat2, &swapped), Ok(0), "{name}");
        let removed = thread.call(libc::SYS_unlinkat, &[directory, new, 0]);
        assert_eq!(removed, Ok(0), "{name}");
    }
    let left = fs::read_dir(outside.path()).expect("a directory").count();
    assert_eq!(left, 1);
    assert_eq!(fs::read(&theirs).expect("theirs"), b"theirs");
}
