//! Checks what a sample costs the guest with each engine. The built VMM runs a program in ring 3 on this machine's
//! `/dev/kvm`. The program itself causes no exits while it is sampled.

use serde_json::Value;
use tests::micro::device::Device;
use tests::micro::sampled::{Sampled, records};
use tests::micro::{Looping, RunResult, power_off, run, single};

const IP_AND_TIME: u64 = 1 << 0 | 1 << 2;
/// Header, IP, TIME.
const RECORD: u32 = 24;
/// A sample a millisecond.
const PERIOD: u64 = 1_000_000;
const USER_MODE: u64 = 2;

const ENGINE_ANY: u64 = 0;
const ENGINE_EXIT: u64 = 1;
const ENGINE_BATCHED: u64 = 2;

/// The request to open an event that samples the vCPU's clock.
fn open(engine: u64) -> [u64; 14] {
    const OPEN: u64 = 1;
    const SOFTWARE: u64 = 1;
    const CPU_CLOCK: u64 = 0;
    const ENABLED: u64 = 1;
    [OPEN, 0, SOFTWARE, CPU_CLOCK, PERIOD, IP_AND_TIME, ENABLED, engine, 0, 0, 0, 0, 0, 0]
}

/// Samples the vCPU's clock until the ring has `samples` records.
fn sampled(samples: u32, engine: u64, arguments: &[&str]) -> (RunResult, Looping) {
    let (kernel, at) = Sampled::new().looping(&open(engine), samples * RECORD);
    let ran = run(&kernel, 1, arguments);
    assert_eq!(ran.status, 0, "{} {:#}", ran.errors, ran.report);
    (ran, at)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

fn pmu(ran: &RunResult, name: &str) -> u64 {
    number(&ran.report["vpmu"][name])
}

fn exits(ran: &RunResult) -> &Value {
    &ran.report["vcpus"][0]["exits"]
}

/// Checks that the ring has at least `least` records, that they are in order of time, and that their addresses are in
/// the program.
fn check_records(ran: &RunResult, at: &Looping, least: u32) {
    // The guest sends only the beginning of the ring. The last record sent may be incomplete.
    let whole = ran.console.len() - ran.console.len() % RECORD as usize;
    let records = records(&ran.console[..whole]);
    assert!(records.len() >= least as usize, "{} records", records.len());
    for record in &records {
        let &[header, ip, _] = record.as_slice() else {
            panic!("no sample: {record:x?}");
        };
        assert_eq!(header & 0xffff_ffff_ffff, 9 | USER_MODE << 32, "{header:x}");
        assert!(at.open.contains(&ip), "{ip:#x} not in {:x?}", at.open);
    }
    let inside = records.iter().filter(|r| at.in_loop.contains(&r[1])).count();
    // At least nine tenths of `least` samples must have addresses in the loop. The others may have addresses outside
    // the loop, where the program waits before and after it.
    assert!(inside >= (least - least / 10) as usize, "{inside} in the loop");
    assert!(records.is_sorted_by_key(|record| record[2]), "{records:x?}");
}

#[test]
fn batched_engine_samples_without_exits() {
    let runs = [20, 80].map(|samples| {
        let (ran, at) = sampled(samples, ENGINE_ANY, &["--engine", "batched"]);
        check_records(&ran, &at, samples);
        assert_eq!(pmu(&ran, "overflow_exits"), 0);
        assert_eq!(number(&exits(&ran)["signal"]), 0);
        assert!(pmu(&ran, "samples_written") >= samples.into());
        assert!(pmu(&ran, "drains") > 0);
        ran
    });
    // 60 more samples cause no additional return from the run call.
    assert_eq!(exits(&runs[0]), exits(&runs[1]));
}

#[test]
fn exit_engine_costs_one_exit_per_sample() {
    let (ran, at) = sampled(80, ENGINE_ANY, &["--engine", "exit"]);
    check_records(&ran, &at, 80);
    let overflows = pmu(&ran, "samples_written") + pmu(&ran, "samples_lost");
    let signals = number(&exits(&ran)["signal"]);
    // Several overflows share one exit if they occur while the vCPU is outside the guest. At most a tenth of the
    // overflows may share an exit with another overflow.
    assert!((overflows - overflows / 10..=overflows).contains(&signals), "{signals} exits for {overflows} overflows");
    assert_eq!((pmu(&ran, "drains"), pmu(&ran, "host_overflows")), (0, 0));
}

#[test]
fn requested_engine_makes_the_samples() {
    let (ran, _) = sampled(20, ENGINE_EXIT, &[]);
    assert_eq!(pmu(&ran, "drains"), 0);
    assert!(number(&exits(&ran)["signal"]) >= 18);
    let (ran, _) = sampled(20, ENGINE_BATCHED, &["--engine", "batched"]);
    assert_eq!(number(&exits(&ran)["signal"]), 0);
}

#[test]
fn forbidden_engine_is_refused() {
    const EOPNOTSUPP: u32 = 95;
    for (engine, allowed, status) in [
        (ENGINE_BATCHED, "exit", EOPNOTSUPP),
        (ENGINE_EXIT, "batched", EOPNOTSUPP),
        (ENGINE_EXIT, "exit", 0),
        (ENGINE_BATCHED, "batched", 0),
    ] {
        // Triple-faults on any other status.
        let (mut device, up) = Device::bring_up(1);
        let code = up.then(&device.request_with(&open(engine), status)).then(&power_off());
        let ran = run(&single(&code), 1, &["--engine", allowed]);
        assert_eq!(ran.status, 0, "{engine} under {allowed}: {}", ran.errors);
        assert_eq!(pmu(&ran, "events_opened"), u64::from(status == 0));
    }
}
