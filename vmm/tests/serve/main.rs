//! `vmm serve` as a VMM and its guest's driver see it: the built program, a client that speaks vfio-user, and the host's
//! own perf events.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod client;
#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::thread;

use client::{
    CONFIG_SPACE, Client, DEVICE_INFO, DMA_MAP, DMA_UNMAP, DOORBELL, Daemon, Machine, REGION_INFO, REGION_READ,
    REGION_WRITE, REGISTERS, RESET, WINDOW, bytes,
};
use common::{Bench, ctl, messages, refused, values, vmm};
use vpmu::abi::*;
use vpmu_testkit::{Fields, open_of};

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[test]
fn vmm_finds_a_pci_function_and_the_daemon_ends_with_it() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &[]);
    let mode = fs::metadata(&daemon.socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let machine = Machine::connect(&daemon.socket, 1);
    let limits = machine.client.greet();
    assert!(limits.contains("max_msg_fds"), "{limits}");
    assert!(!daemon.socket.exists(), "the socket takes one connection");
    let info = machine.client.done(DEVICE_INFO, &bytes![16u32, 0u32, 0u32, 0u32], &[]);
    // A PCI device that can be reset, with the regions and interrupts of vfio-pci.
    assert_eq!([4, 8, 12].map(|at| u32_at(&info, at)), [3, 9, 5]);
    let region = |index: u32| machine.client.call(REGION_INFO, &bytes![32u32, 0u32, index, 0u32, 0u64, 0u64], &[]);
    let window = region(WINDOW);
    assert_eq!((u32_at(&window.body, 4), u32_at(&window.body, 16)), (7, 16 << 20), "the VMM maps the window");
    let file = window.file.expect("the window's memory");
    file.set_len(0).expect_err("nobody can shrink it");
    assert_eq!(region(9).errno, 22);
    assert_eq!(machine.client.read::<4>(CONFIG_SPACE, 0), [0xf4, 0x1a, 0x7f, 0x10]);
    drop(machine);
    let output = daemon.output();
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn marks_of_two_vcpus_are_exact_and_synchronous() {
    const MARKS: u32 = 200;
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 2, &[]);
    let mut machine = Machine::start(&daemon.socket, 2);
    let request = |vcpu| open_of(KIND_MARK, MARK_ANY, vcpu).flags(OPEN_ENABLED);
    let events = [0, 1].map(|vcpu| machine.open(&request(vcpu)));
    let sevens = machine.open(&open_of(KIND_MARK, 7, 1).period(1).sample_type(1 << 3).flags(OPEN_ENABLED));
    let ring = machine.map(sevens);
    for mark in 0..MARKS {
        machine.mark((mark % 2) as usize, mark);
        if mark % 4 == 0 {
            machine.mark(1, 7);
        }
    }
    assert_eq!(machine.count(0, events[0]), u64::from(MARKS / 2));
    assert_eq!(machine.count(1, events[1]), u64::from(MARKS / 2 + MARKS / 4));
    // 7 is also one of the odd numbers.
    let samples = u64::from(MARKS / 4 + 1);
    assert_eq!(machine.count(1, sevens), samples);
    let head = u64::from_le_bytes(machine.bytes_at(ring + 1024));
    assert_eq!(head, samples * 16, "each sample has a header and the mark's value");
    assert_eq!(machine.bytes_at::<8>(ring + 0x1000 + 8), 7u64.to_le_bytes());
    drop(machine);
    assert_eq!(daemon.output().status.code(), Some(0));
}

#[test]
fn clock_of_a_vcpus_thread_counts_its_time() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &[]);
    let mut machine = Machine::start(&daemon.socket, 1);
    // The host's task-clock.
    let clock = machine.open(&open_of(KIND_SOFTWARE, 1, 0).flags(OPEN_ENABLED));
    let before = machine.count(0, clock);
    let own = machine.on(0, |_| {
        let time = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
        };
        let begin = time();
        while time() - begin < 50_000_000 {}
        time() - begin
    });
    let counted = machine.count(0, clock) - before;
    // perf's clock stands while the scheduler switches to the thread and from it, which the thread's own time includes.
    assert!(counted >= own / 100 * 95, "{counted} ns counted while the thread used {own} ns");
    let exits = machine.ask(zerocopy::IntoBytes::as_bytes(&open_of(KIND_EXITS, EXIT_USER, 0)), size_of::<OpenReply>());
    assert_eq!(u32_at(&exits, 0), libc::ENOENT.cast_unsigned(), "the device does not see the VMM's exits");
}

#[test]
fn driver_can_be_reset_and_started_again() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &["--persistent", "marks,name=kept", "--recording", "kept.data"]);
    let mut machine = Machine::start(&daemon.socket, 1);
    machine.mark(0, 4);
    machine.client.done(RESET, &[], &[]);
    assert_eq!(machine.status(), 0);
    assert!(bench.path("kept.data").exists(), "a reset is recorded");
    machine.client.write(DOORBELL, 0, &5u32.to_le_bytes());
    machine.initialize();
    machine.mark(0, 6);
    let event = machine.open(&open_of(KIND_MARK, 9, 0).flags(OPEN_ENABLED));
    machine.mark(0, 9);
    assert_eq!(machine.count(0, event), 1);
    drop(machine);
    let output = daemon.output();
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
    assert_eq!(values(&bench.path("kept.data")), [4, 6, 9], "without a driver, a store is no mark");
}

#[test]
fn operator_controls_the_events_of_another_vmms_machine() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &["--ctl", "ctl.sock"]);
    let machine = Machine::start(&daemon.socket, 1);
    let socket = bench.path("ctl.sock");
    let output = ctl(&socket, &["start", "marks,name=mine"]);
    assert!(output.status.success(), "{}", messages(&output));
    machine.mark(0, 1);
    let listed = ctl(&socket, &["list"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("mine"));
    refused(&ctl(&socket, &["snapshot", "saved"]), 1, &["belongs to another VMM"]);
    drop(machine);
    assert_eq!(daemon.output().status.code(), Some(0));
}

#[test]
fn thread_that_ends_is_no_longer_counted() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 2, &[]);
    let mut machine = Machine::start(&daemon.socket, 2);
    let event = machine.open(&open_of(KIND_MARK, MARK_ANY, 0).flags(OPEN_ENABLED));
    machine.unplug(1);
    machine.mark(0, 3);
    assert_eq!(machine.count(0, event), 1, "the other vCPU goes on");
    drop(machine);
    assert_eq!(daemon.output().status.code(), Some(0));
}

#[test]
fn machine_whose_threads_have_no_names_has_no_device() {
    let bench = Bench::new();
    let mut daemon = Daemon::start(&bench, 2, &[]);
    let machine = Machine::connect(&daemon.socket, 1);
    machine.client.greet();
    for status in [1u8, 3] {
        machine.client.write(REGISTERS, 0x14, &[status]);
    }
    assert_eq!(machine.client.read::<4>(REGISTERS, 0x04), [0; 4], "no features");
    machine.client.write(REGISTERS, 0x14, &[11]);
    assert_eq!(machine.status(), 3, "a driver cannot accept a device without features");
    drop(machine);
    let mut text = String::new();
    daemon.child.stderr.take().expect("piped").read_to_string(&mut text).expect("text");
    assert!(text.contains("no thread for vCPU 1") && text.contains("debug-threads=on"), "{text}");
    assert_eq!(daemon.output().status.code(), Some(0));
}

#[test]
fn lies_are_refused_and_leave_the_device_running() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &[]);
    let mut machine = Machine::start(&daemon.socket, 1);
    let client = &machine.client;
    let file = tempfile::tempfile().expect("a file");
    let fd = std::os::fd::AsFd::as_fd(&file);
    let refused: [(u16, Vec<u8>); 6] = [
        (99, Vec::new()),
        (REGION_READ, bytes![0u64, 0u32, 5000u32]),
        (REGION_WRITE, bytes![0u64, 0u32, 8u32, 0u32]),
        (REGION_READ, vec![0; 3]),
        // Memory beyond the end of its file, and over other memory.
        (DMA_MAP, bytes![32u32, 3u32, 0u64, 1u64 << 40, 0x1000u64]),
        (DMA_MAP, bytes![32u32, 3u32, u64::MAX, 0u64, 0x1000u64]),
    ];
    for (command, body) in refused {
        let files = if command == DMA_MAP { vec![fd] } else { Vec::new() };
        assert_ne!(client.call(command, &body, &files).errno, 0, "command {command}");
    }
    for (region, offset) in [(REGISTERS, u64::MAX), (WINDOW, u64::MAX), (CONFIG_SPACE, 255), (8, 0), (u32::MAX, 4)] {
        client.write(region, offset, &[0xff; 8]);
        let _ = client.read::<8>(region, offset);
    }
    for queue in [3u64, 100, 0x3ff] {
        client.write(REGISTERS, 0x3000 + 4 * queue, &[0, 0]);
    }
    let event = machine.open(&open_of(KIND_MARK, MARK_ANY, 0).flags(OPEN_ENABLED));
    machine.mark(0, 3);
    assert_eq!(machine.count(0, event), 1);
    // The driver's memory goes away. The device must not use it, and the daemon must not die.
    machine.client.done(DMA_UNMAP, &bytes![24u32, 2u32, 0u64, 0u64], &[]);
    machine.client.write(REGISTERS, 0x3000 + 8, &[2, 0]);
    machine.mark(0, 3);
    drop(machine);
    let output = daemon.output();
    assert_eq!(output.status.code(), Some(0), "{}", messages(&output));
}

#[test]
fn message_that_is_none_ends_the_connection() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &[]);
    let client = Client::connect(&daemon.socket);
    client.raw(&[0xff; 64]);
    assert!(client.try_call(DEVICE_INFO, &[], &[]).is_none());
    let output = daemon.output();
    assert_eq!(output.status.code(), Some(1));
    assert!(messages(&output).contains("not a vfio-user request"), "{}", messages(&output));
}

#[test]
fn signal_ends_the_daemon_before_and_after_the_connection() {
    let bench = Bench::new();
    let waiting = Daemon::start(&bench, 1, &[]);
    waiting.signal("-TERM");
    assert_eq!(waiting.output().status.code(), Some(6));
    let daemon = Daemon::start(&bench, 1, &["--persistent", "marks", "--recording", "end.data"]);
    let machine = Machine::start(&daemon.socket, 1);
    machine.mark(0, 1);
    daemon.signal("-INT");
    let output = daemon.output();
    assert_eq!(output.status.code(), Some(6), "{}", messages(&output));
    assert!(bench.path("end.data").exists(), "the end is recorded");
    drop(machine);
}

#[test]
fn each_thread_has_a_filter_and_capabilities_are_dropped() {
    let bench = Bench::new();
    let daemon = Daemon::start(&bench, 1, &["--ctl", "ctl.sock"]);
    let machine = Machine::start(&daemon.socket, 1);
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.child.id())).expect("threads");
    let mut threads = 0;
    for task in tasks {
        let path = task.expect("a thread").path();
        let status = fs::read_to_string(path.join("status")).expect("its status");
        let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).expect("a line").trim().to_owned();
        assert_eq!(of("Seccomp:"), "2", "{status}");
        assert_eq!(of("NoNewPrivs:"), "1");
        let held = u64::from_str_radix(&of("CapEff:"), 16).expect("a set");
        assert_eq!(held & !(1 << 38), 0, "no capability but CAP_PERFMON: {held:#x}");
        threads += 1;
    }
    assert_eq!(threads, 5, "main, drain, closer, service, ctl");
    drop(machine);
    assert_eq!(daemon.output().status.code(), Some(0));
}

#[test]
fn socket_is_not_for_strangers() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let bench = Bench::new();
    fs::set_permissions(bench.path("."), fs::Permissions::from_mode(0o755)).expect("ours");
    let daemon = Daemon::start(&bench, 1, &[]);
    let socket = daemon.socket.clone();
    let uid = rustix::fs::Uid::from_raw(1234);
    let connected = thread::spawn(move || {
        // Only this thread becomes another user.
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("root");
        UnixStream::connect(socket).map(drop)
    });
    let error = connected.join().expect("no panic").expect_err("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    daemon.signal("-TERM");
    assert_eq!(daemon.output().status.code(), Some(6));
}

#[test]
fn wrong_arguments_name_the_remedy() {
    let bench = Bench::new();
    let run = |args: &[&str]| vmm(["serve"]).args(args).current_dir(bench.path(".")).output().expect("ran");
    refused(&run(&[]), 2, &["--socket"]);
    refused(&run(&["--socket", "s", "--vcpus", "0"]), 2, &["--vcpus"]);
    refused(&run(&["--socket", "s", "--pmu", "off"]), 2, &["omit '--pmu off'"]);
    refused(&run(&["--socket", "s", "--window", "12K"]), 2, &["power of two"]);
    refused(&run(&["--socket", "s", "--window", "0"]), 2, &["power of two"]);
    refused(&run(&["--socket", "s", "--max-console", "1M"]), 2, &["omit --max-console"]);
    refused(&run(&["--socket", "missing/s"]), 1, &["missing/s"]);
    assert!(!bench.path("s").exists());
    let help = run(&["--help"]);
    let text = String::from_utf8_lossy(&help.stdout);
    for word in ["vfio-user-pci", "cloud-hypervisor", "--socket", "--persistent", "Exit status"] {
        assert!(text.contains(word), "{word}");
    }
}
