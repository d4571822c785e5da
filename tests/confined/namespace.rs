//! The PID namespace of a machine, and the process that waits for the machine outside of it.

use std::os::unix::process::ExitStatusExt;

use super::*;

#[test]
fn machine_has_no_id_for_other_processes() {
    if !has_namespace() {
        eprintln!("skipped: this user cannot make PID namespaces");
        return;
    }
    let machine = Machine::start(&spinning(), &[], &[]);
    let namespace = |process: &Path| fs::read_link(process.join("ns/pid")).expect("a process");
    let own = namespace(&machine.process());
    assert_ne!(own, namespace(Path::new("/proc/self")));
    // The kernel's threads of KVM are in it, too.
    let others = fs::read_dir("/proc").expect("processes").filter_map(|entry| {
        let path = entry.expect("a process").path();
        let is_in = fs::read_link(path.join("ns/pid")).is_ok_and(|of| of == own);
        is_in.then_some(path)
    });
    assert_eq!(others.collect::<Vec<_>>(), [machine.process()]);
}

#[test]
fn waiting_process_has_no_rights_and_ends_with_the_machine() {
    let mut machine = Machine::start(&spinning(), &[], &[]);
    if !has_namespace() {
        eprintln!("skipped: this user cannot make PID namespaces");
        return;
    }
    let waiting = Path::new("/proc").join(machine.child.id().to_string());
    let status = fs::read_to_string(waiting.join("status")).expect("a process");
    for set in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        let line = format!("{set}:\t0000000000000000");
        assert!(status.lines().any(|it| it == line), "{status}");
    }
    assert!(status.contains("NoNewPrivs:\t1"), "{status}");
    let open = fs::read_dir(waiting.join("fd")).expect("a process").count();
    assert_eq!(open, 3, "standard error, and the pipe to the machine twice");
    // Whichever of the two processes dies, the other one ends, too.
    let process = machine.process();
    let vmm = process.file_name().expect("a number").to_str().expect("text");
    signal("-KILL", vmm);
    let status = machine.child.wait().expect("a child");
    assert_eq!(status.signal(), Some(9), "{status}");
}

#[test]
fn machine_dies_with_the_process_that_waits_for_it() {
    let user = format!("{NOBODY}:{NOBODY}");
    let directory = tempfile::tempdir().expect("a temporary directory");
    let out = directory.path().join("out");
    fs::create_dir(&out).expect("a directory");
    let mut arguments = Vec::new();
    if is_root() {
        std::os::unix::fs::chown(&out, Some(NOBODY), Some(NOBODY)).expect("root gives it away");
        arguments.extend(["--user", &user]);
    }
    let mut machine = Machine::start_in(directory, &spinning(), &[], &arguments);
    let process = machine.process();
    machine.child.kill().expect("a child");
    machine.child.wait().expect("a child");
    let mut console = machine.child.stdout.take().expect("piped");
    // The machine's end of the pipe closes while it dies.
    console.read_to_end(&mut Vec::new()).expect("the end");
    let lives = || {
        let status = fs::read_to_string(process.join("status"));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    };
    while lives() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn stopped_machine_continues_where_it_was() {
    let machine = &mut Machine::start(&spinning(), &[], &[]);
    let id = machine.child.id().to_string();
    let wait_for = |process: &Path, wanted: &str| {
        let line = format!("State:\t{wanted}");
        while !fs::read_to_string(process.join("status")).expect("a process").contains(&line) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    signal("-TSTP", &id);
    // The waiting process stops last. If it were continued before, its stop would discard that signal.
    wait_for(&machine.process(), "T");
    wait_for(&Path::new("/proc").join(&id), "T");
    signal("-CONT", &id);
    wait_for(&machine.process(), "S");
    machine.done(&["list"]);
    let (status, errors) = machine.end();
    assert_eq!((status, errors.as_str()), (Some(6), ""));
}

/// Sends a signal.
fn signal(name: &str, process: &str) {
    let sent = Command::new("kill").args([name, process]).status();
    assert!(sent.expect("kill starts").success());
}
