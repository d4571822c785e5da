//! Checks exits that KVM's tracepoints report for a real vCPU on the machine that runs the tests. The guest is a loop
//! of three instructions in ring 3 that stores to an address without memory.
#![expect(clippy::expect_used, reason = "tests fail by panicking")]
#![expect(unsafe_code, reason = "guest memory, and a mount namespace of the test's own")]

use std::io::{self, Write as _};
use std::path::Path;

use kvm_ioctls::{Kvm, VcpuExit};
use vmm_sys_util::signal::SIGRTMIN;
use vpmu::abi::{EXIT_ALL, KIND_EXIT_TRACE};
use vpmu::host::{PerfSource, StoreTracepoint, Stores, traces_exits};
use vpmu::source::{Counter, HostExit, Overflows, Recorded, Request, Source};
use vpmu_testkit::{Guest, PROGRAM};

/// An address that the guest maps, but that has no memory behind it.
const WINDOW: u64 = 0x60_0000;
/// `mov esi, WINDOW; again: mov [rsi], ecx; inc ecx; jmp again`
const LOOP: [u8; 11] = [0xbe, 0x00, 0x00, 0x60, 0x00, 0x89, 0x0e, 0xff, 0xc1, 0xeb, 0xfa];
/// Address of the store.
const STORE: u64 = PROGRAM + 5;

/// Creates a vCPU that is about to execute the first instruction of [`LOOP`]. Returns `None` if this machine has no
/// KVM.
fn guest() -> Option<Guest> {
    if !Path::new("/dev/kvm").exists() {
        return None;
    }
    let kvm = Kvm::new().expect("/dev/kvm opens");
    Some(Guest::new(&kvm, &LOOP).expect("a guest"))
}

/// Runs the guest until its next store exits.
fn store(guest: &mut Guest) {
    let exit = guest.vcpu.run().expect("runs");
    assert!(matches!(exit, VcpuExit::MmioWrite(WINDOW, _)), "not the exit of the store: {exit:?}");
}

/// Reports that a test checks nothing on this machine. Writes directly to stderr, because the test runner captures what
/// macros print.
fn report_not_run(why: &str) {
    // The test must not fail if stderr is closed.
    let _ = writeln!(io::stderr(), "host_exits: nothing is checked on this machine: {why}");
}

/// If tracefs is missing at its usual path, mounts it there, in a new mount namespace of the calling thread.
fn mount_tracefs() -> io::Result<()> {
    if Path::new("/sys/kernel/tracing/events").exists() {
        return Ok(());
    }
    let check = |result| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the call takes no pointer, and changes only this thread's mount namespace.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let mount = |target: &std::ffi::CStr, kind: &std::ffi::CStr, flags| {
        let data = std::ptr::null();
        // SAFETY: the strings end in zero and outlive the call.
        check(unsafe { libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data) })
    };
    mount(c"/", c"none", libc::MS_REC | libc::MS_PRIVATE)?;
    mount(c"/sys/kernel/tracing", c"tracefs", 0)
}

/// Opens a recorder for the exits of this thread's vCPU, and creates the guest. The error explains why this machine
/// cannot record exits.
fn recorder() -> Result<(Box<dyn Counter>, PerfSource, Guest), String> {
    mount_tracefs().map_err(|error| format!("tracefs: {error}"))?;
    let source = PerfSource::new(SIGRTMIN()).expect("a source");
    let offered = source.offers().iter().any(|offer| (offer.kind, offer.config) == (KIND_EXIT_TRACE, EXIT_ALL));
    assert_eq!(offered, traces_exits().is_ok(), "the event is offered if and only if it opens");
    traces_exits().map_err(|refusal| refusal.to_string())?;
    let request = Request { kind: KIND_EXIT_TRACE, config: EXIT_ALL, ..Request::default() };
    let recorder = source.open(&request, source.thread()).expect("offered");
    let guest = guest().ok_or("no /dev/kvm")?;
    Ok((recorder, source, guest))
}

fn drained(recorder: &mut dyn Counter) -> (Vec<HostExit>, u64) {
    let mut overflows = Overflows::default();
    recorder.drain(&mut overflows);
    let (mut exits, mut lost) = (Vec::new(), 0);
    for recorded in overflows.exits {
        match recorded {
            Recorded::Exit(exit) => exits.push(exit),
            Recorded::Lost(some) => lost += some,
        }
    }
    (exits, lost)
}

/// This test also runs on hosts without tracepoints.
#[test]
fn guest_exits_at_each_store() {
    let Some(mut guest) = guest() else {
        return report_not_run("no /dev/kvm");
    };
    for _ in 0..3 {
        store(&mut guest);
        let ip = guest.vcpu.get_regs().expect("registers").rip;
        // At the exit, the instruction pointer is still at the store, or KVM has already advanced it past the store.
        assert!([STORE, STORE + 2].contains(&ip), "the exit is not at the store: {ip:#x}");
    }
}

/// VPMU-D-6.8-7.
#[test]
fn every_exit_is_recorded_with_its_place_and_its_end() {
    const STORES: usize = 100;
    let (mut recorder, source, mut guest) = match recorder() {
        Ok(all) => all,
        Err(why) => return report_not_run(&why),
    };
    store(&mut guest);
    let from = source.tsc();
    recorder.start().expect("starts");
    for _ in 0..STORES / 2 {
        store(&mut guest);
    }
    let (mut exits, lost) = drained(&mut *recorder);
    for exit in &exits {
        assert!(exit.back.is_some(), "a drain returns an exit that has not ended: {exit:?}");
    }
    for _ in 0..STORES / 2 {
        store(&mut guest);
    }
    recorder.stop().expect("stops");
    let until = source.tsc();
    store(&mut guest);
    let (rest, more) = drained(&mut *recorder);
    exits.extend(rest);
    assert_eq!((lost, more), (0, 0));
    let counted = recorder.read().expect("reads").value;
    assert_eq!(exits.len() as u64, counted, "each exit is recorded once");
    let stores = exits.iter().filter(|exit| exit.ip == STORE);
    assert!(stores.count() >= STORES, "fewer exits than stores: {exits:x?}");
    let reasons: std::collections::BTreeSet<_> = exits.iter().map(|exit| exit.reason).collect();
    eprintln!("{counted} exits of {STORES} stores, reasons {reasons:x?}, {:x?}", exits[0]);
    assert!(exits.is_sorted_by_key(|exit| exit.tsc));
    let (last, ended) = exits.split_last().expect("some");
    assert_eq!(last.back, None, "the vCPU did not run again after the last exit");
    for (exit, next) in ended.iter().zip(&exits[1..]) {
        let back = exit.back.expect("an exit that ended");
        assert!(
            (exit.tsc..=next.tsc).contains(&back),
            "{exit:x?} does not end between its start and that of {next:x?}"
        );
    }
    assert!(exits.iter().all(|exit| (from..=until).contains(&exit.tsc)));
    assert_eq!(drained(&mut *recorder), (Vec::new(), 0), "each exit is drained once");
}

#[test]
fn exits_without_room_are_counted_as_lost() {
    let (mut recorder, _source, mut guest) = match recorder() {
        Ok(all) => all,
        Err(why) => return report_not_run(&why),
    };
    for rounds in [5_000, 100, 10_000] {
        recorder.start().expect("starts");
        for _ in 0..rounds {
            store(&mut guest);
        }
        recorder.stop().expect("stops");
    }
    let (exits, lost) = drained(&mut *recorder);
    let counted = recorder.read().expect("reads").value;
    eprintln!("{} exits recorded and {lost} lost, {counted} counted", exits.len());
    assert!(lost > 0);
    assert_eq!(exits.len() as u64 + lost, counted);
    // After the loss, the recorder returns records again. It does not report the loss a second time.
    for _ in 0..2 {
        recorder.start().expect("starts");
        store(&mut guest);
        recorder.stop().expect("stops");
        let (exits, lost) = drained(&mut *recorder);
        assert_eq!(lost, 0);
        assert!(exits.iter().any(|exit| exit.ip == STORE), "no exit of the store after the loss: {exits:x?}");
    }
}

#[test]
fn stores_are_taken_with_their_values_from_the_address_that_is_watched() {
    if let Err(error) = mount_tracefs() {
        return report_not_run(&format!("tracefs: {error}"));
    }
    let (tracepoint, mut guest) = match (StoreTracepoint::find(), guest()) {
        (Err(refusal), _) => return report_not_run(&refusal.to_string()),
        (_, None) => return report_not_run("no /dev/kvm"),
        (Ok(tracepoint), Some(guest)) => (tracepoint, guest),
    };
    let thread = PerfSource::new(SIGRTMIN()).expect("a source").thread();
    let mut stores = Stores::open(&tracepoint, thread).expect("opens");
    let mut next = 0..;
    let mut taken = |stores: &mut Stores, count| {
        for _ in 0..count {
            store(&mut guest);
        }
        let mut values = Vec::new();
        assert_eq!(stores.take(|value| values.push(value)), 0, "no record is missing");
        let made: Vec<u32> = next.by_ref().take(count).collect();
        (values, made)
    };
    assert_eq!(taken(&mut stores, 1).0, [0; 0], "before the first watch");
    // A driver that starts the device again leaves the address as it was, or moves it.
    for (address, is_stored) in [(WINDOW, true), (WINDOW, true), (WINDOW + 4, false), (WINDOW, true), (WINDOW, true)] {
        stores.watch(address).expect("watches");
        let (values, made) = taken(&mut stores, 3);
        let expected = if is_stored { made } else { Vec::new() };
        assert_eq!(values, expected, "stores while {address:#x} is watched");
    }
}
