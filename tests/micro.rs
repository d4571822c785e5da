//! Guests of a few instructions whose exits are known exactly. They run on this machine's `/dev/kvm`.
//!
//! A stock kernel causes exits in addition to its programs' exits. In these guests, only the programs cause exits, so
//! the VMM must count exactly these exits.

use std::process::Command;

use serde_json::Value;
use tests::micro::{Code, RunResult, Vcpu, halts, kernel, power_off, run, single, vmm_binary};

/// A port without a device.
const PORT: u16 = 0x5f0;

/// The virtio-mmio registers of the paravirtual PMU, as the ACPI tables name them.
const VIRTIO: u32 = 0xd000_0000;
const MAGIC: u32 = VIRTIO;
const REGION_SELECT: u32 = VIRTIO + 0xac;
const REGION_BASE: u32 = VIRTIO + 0xb8;
/// MMIO exits of [`find_doorbell`].
const TO_FIND: u64 = 3;

fn port_writes(times: u32) -> Code {
    Code::new().repeat(times, &Code::new().out8(PORT, 0x5a))
}

/// Loads the address of shared memory region 0 into `ebx`, or causes a triple fault.
fn find_doorbell() -> Code {
    Code::new()
        .load(MAGIC)
        .require(u32::from_le_bytes(*b"virt"))
        .store(REGION_SELECT, 0)
        .load(REGION_BASE)
        // mov ebx, eax
        .raw(&[0x89, 0xc3])
}

/// Finds the doorbell, and then places `times` marks of `value`.
fn marks(times: u32, value: u32) -> Code {
    // mov dword [ebx], value
    let mark = Code::new().raw(&[0xc7, 0x03]).raw(&value.to_le_bytes());
    find_doorbell().repeat(times, &mark)
}

fn powered_off(ran: &RunResult) {
    assert_eq!(ran.status, 0, "{} {:#}", ran.errors, ran.report);
    assert_eq!(ran.report["ending"], "poweroff");
}

fn exits(io: u64, mmio: u64) -> Vcpu {
    Vcpu { io, mmio, hlt: 0 }
}

#[test]
fn port_writes_count_one_by_one() {
    for times in [0, 1, 2, 7, 1000] {
        let ran = run(&kernel(&[port_writes(times)]), 1, &[]);
        powered_off(&ran);
        // The power-off causes one more exit for port I/O.
        assert_eq!(ran.vcpu(0), exits(u64::from(times) + 1, 0), "{times}");
        assert_eq!(ran.marks(), 0);
    }
}

#[test]
fn port_reads_count_one_by_one() {
    let reads = Code::new().repeat(11, &Code::new().in8(PORT));
    let ran = run(&kernel(&[reads]), 1, &[]);
    powered_off(&ran);
    assert_eq!(ran.vcpu(0), exits(12, 0));
}

#[test]
fn marks_count_one_by_one() {
    for times in [0, 1, 5, 1000] {
        let ran = run(&kernel(&[marks(times, 42)]), 1, &[]);
        powered_off(&ran);
        let mmio = u64::from(times) + TO_FIND;
        assert_eq!(ran.vcpu(0), exits(1, mmio), "{times}");
        assert_eq!(ran.marks(), u64::from(times));
    }
}

/// VPMU-D-4-2.
#[test]
fn only_a_whole_word_at_the_doorbell_is_a_mark() {
    // mov byte [ebx], 1; mov word [ebx], 1; mov dword [ebx + 4], 1; mov eax, [ebx]
    let strays = find_doorbell()
        .raw(&[0xc6, 0x03, 1])
        .raw(&[0x66, 0xc7, 0x03, 1, 0])
        .raw(&[0xc7, 0x43, 4, 1, 0, 0, 0])
        .raw(&[0x8b, 0x03]);
    let ran = run(&kernel(&[strays]), 1, &[]);
    powered_off(&ran);
    assert_eq!(ran.vcpu(0), exits(1, 4 + TO_FIND));
    assert_eq!(ran.marks(), 0);
}

#[test]
fn two_vcpus_never_mix() {
    for [(io, mark), (other_io, other_mark)] in [[(3, 0), (0, 9)], [(0, 500), (500, 0)], [(600, 7), (41, 300)]] {
        let programs = [port_writes(io).then(&marks(mark, 1)), marks(other_mark, 2).then(&port_writes(other_io))];
        let ran = run(&kernel(&programs), 2, &[]);
        powered_off(&ran);
        assert_eq!(ran.vcpu(0), exits(u64::from(io) + 1, u64::from(mark) + TO_FIND));
        assert_eq!(ran.vcpu(1), exits(other_io.into(), u64::from(other_mark) + TO_FIND));
        assert_eq!(ran.marks(), u64::from(mark + other_mark));
    }
}

#[test]
fn four_vcpus_never_mix() {
    let programs = [5, 50, 500, 0].map(port_writes);
    let ran = run(&kernel(&programs), 4, &[]);
    powered_off(&ran);
    let counted: Vec<_> = (0..4).map(|index| ran.vcpu(index).io).collect();
    assert_eq!(counted, [6, 50, 500, 0]);
}

#[test]
fn halts_stay_in_the_kernel_and_are_counted_there() {
    const TIMES: u32 = 25;
    let ran = run(&single(&halts(TIMES).then(&power_off())), 1, &[]);
    powered_off(&ran);
    assert_eq!(ran.vcpu(0), exits(1, 0));
    assert_eq!(ran.statistic(0, "halt_exits"), u64::from(TIMES));
}

#[test]
fn kvm_exit_count_is_at_least_that_of_vmm() {
    let ran = run(&kernel(&[port_writes(200)]), 1, &[]);
    powered_off(&ran);
    let all = ran.statistic(0, "exits");
    assert!(all >= 201, "{all} exits in all");
}

#[test]
fn registers_of_an_absent_device_do_not_answer() {
    for without in [&["--no-vpmu"][..], &["--pmu", "off"]] {
        let ran = run(&single(&find_doorbell().then(&power_off())), 1, without);
        assert_eq!(ran.status, 4, "{} {:#}", ran.errors, ran.report);
        assert_eq!(ran.report["ending"], "triple-fault");
        assert!(ran.report["vpmu"].is_null());
    }
}

#[test]
fn report_of_a_tier_names_it_and_its_events() {
    let clocks = [
        "cpu-clock",
        "task-clock",
        "tsc",
        "exits-user",
        "exits-io",
        "exits-mmio",
        "exits-hlt",
        "exits-signal",
        "exits-other",
        "guest-time",
        "marks",
        "mark",
    ];
    for (arguments, policy, events) in [
        (&["--pmu", "clocks"][..], "clocks", &clocks[..]),
        (&["--pmu", "clocks", "--deny-event", "exits-*,*clock,mark*"], "clocks", &["tsc", "guest-time"]),
        (&["--allow-event", "exits-io,mark:7"], "list", &["exits-io", "mark"]),
        (&["--allow-event", "tsc,vmm-traces:0"], "list", &["tsc"]),
        (&["--allow-event", "tsc,vmm-traces:0", "--trace-handlers"], "list", &["tsc", "handlers"]),
    ] {
        let ran = run(&single(&power_off()), 1, arguments);
        powered_off(&ran);
        let vpmu = &ran.report["vpmu"];
        assert_eq!(vpmu["policy"], policy, "{vpmu:#}");
        assert_eq!(vpmu["events"], serde_json::json!(events), "{arguments:?}");
    }
}

#[test]
fn triple_fault_on_other_vcpu_ends_run() {
    // Word of memory that the boot vCPU sets when its writes are done.
    const FLAG: u32 = 0x84_0000;
    let programs = [port_writes(3).store(FLAG, 1), Code::new().wait_for(FLAG, 1).die()];
    let ran = run(&kernel(&programs), 2, &[]);
    assert_eq!(ran.status, 4, "{} {:#}", ran.errors, ran.report);
    assert_eq!(ran.vcpu(0), exits(3, 0));
}

#[test]
fn check_reports_that_such_guests_run_here() {
    let check = Command::new(vmm_binary()).args(["check", "--json"]).output().unwrap();
    let survey: Value = serde_json::from_slice(&check.stdout).unwrap();
    assert!(survey["stock_kernel"].is_boolean());
    assert_eq!(survey["guest"]["port_io"]["ok"], true, "{survey:#}");
    assert_eq!(check.status.code(), Some(0));
}
