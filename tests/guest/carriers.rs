//! `guest-tests carriers`: what the device costs its guest, by the process that carries it: the time of an access to the
//! device, and the rates of marks, samples and task switches.
#![expect(unsafe_code, reason = "reads a register of a PCI function")]

use std::fs;
use std::process::ExitCode;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::figures;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::TIME;
use crate::pages::{Pages, READ_WRITE, map_physical};
use crate::raw::{Device, Doorbell, Event, How, KIND_MARK, silent};
use crate::switches::Turn;
use crate::{Fallible, Outcome, cpu};

/// The time of a measurement.
const SPAN: Duration = Duration::from_secs(2);
const VALUE: u32 = 80;
/// The vendor and the device of `edu`, a function in QEMU itself, and the value of its first register without the two
/// bytes of its version.
const EDU: [&str; 2] = ["0x1234", "0x11e8"];
const EDU_IDENTITY: u32 = 0xed;
/// The data pages of a ring, which a round of samples does not fill.
const RING_PAGES: usize = 8;
/// The number of samples after which the ring is read.
const ROUND: u64 = 64;
/// The type of a sample's record.
const RECORD_SAMPLE: u32 = 9;

type Shared<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub(crate) fn run() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Outcome {
    let device = Device::open()?;
    let cpus = thread::available_parallelism()?.get();
    cpu::pin(0)?;
    if let Some(address) = address_of_edu()? {
        access_in_qemu(address)?;
    }
    marks(&device)?;
    reads(&device)?;
    samples(&device)?;
    for cpus in 1..=cpus.min(2) {
        switches(&device, cpus)?;
    }
    Ok(())
}

/// Repeats an operation for [`SPAN`], and prints the number of operations, the nanoseconds that all took, and those of
/// the fastest. Returns the number.
fn timed(subject: &str, mut operation: impl FnMut() -> Fallible<u64>) -> Fallible<u64> {
    operation()?;
    let (mut times, mut least) = (0, u128::MAX);
    let began = Instant::now();
    while began.elapsed() < SPAN {
        let start = Instant::now();
        let done = operation()?;
        least = least.min(start.elapsed().as_nanos() / u128::from(done));
        times += done;
    }
    let took = u64::try_from(began.elapsed().as_nanos())?;
    println!("{}", figures::line(subject, &[("times", times), ("took", took), ("least", u64::try_from(least)?)]));
    Ok(times)
}

/// The physical address of the registers of `edu`, if QEMU has it, with its memory enabled.
fn address_of_edu() -> Fallible<Option<u32>> {
    let Ok(functions) = fs::read_dir("/sys/bus/pci/devices") else {
        return Ok(None);
    };
    for function in functions {
        let function = function?.path();
        let read = |name| fs::read_to_string(function.join(name));
        if [read("vendor")?.trim_end(), read("device")?.trim_end()] != EDU {
            continue;
        }
        fs::write(function.join("enable"), "1")?;
        let resources = read("resource")?;
        let address = resources.split_whitespace().next().ok_or("edu has no memory")?;
        return Ok(Some(u32::from_str_radix(address.trim_start_matches("0x"), 16)?));
    }
    Ok(None)
}

/// Reads a register of a device in QEMU itself.
fn access_in_qemu(address: u32) -> Outcome {
    let register: *mut u32 = map_physical(address)?.cast();
    timed("access-in-qemu", || {
        // SAFETY: map_physical() mapped a page at this address, which stays mapped.
        let identity = unsafe { ptr::read_volatile(register) };
        ensure_eq!(identity & 0xffff, EDU_IDENTITY, "the identity of edu");
        Ok(1)
    })?;
    Ok(())
}

/// A store to the doorbell's page is one access to the device.
fn marks(device: &Device) -> Outcome {
    let bell = Doorbell::map(device)?;
    let event = device.start(&device.attr(KIND_MARK, VALUE.into()), How::OWN)?;
    let times = timed("mark", || {
        bell.mark(VALUE);
        Ok(1)
    })?;
    ensure_eq!(event.count()?, times + 1, "marks");
    Ok(())
}

/// A read of an event is a system call with one access to the device.
fn reads(device: &Device) -> Outcome {
    let event = device.start(&device.attr(KIND_MARK, VALUE.into()), How::OWN)?;
    timed("read", || {
        ensure_eq!(event.count()?, 0, "a count without marks");
        Ok(1)
    })?;
    Ok(())
}

/// Each mark is sampled, and the ring is read often enough to lose none.
fn samples(device: &Device) -> Outcome {
    let bell = Doorbell::map(device)?;
    let event = device.start(&silent(device.marks(VALUE.into(), 1, TIME)), How::OWN)?;
    let mut ring = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    timed("sample", || {
        bell.place(VALUE, ROUND);
        let taken = ring.take()?;
        let samples = taken.iter().filter(|record| record.kind == RECORD_SAMPLE).count();
        ensure_eq!(samples as u64, ROUND, "samples of {ROUND} marks");
        Ok(ROUND)
    })?;
    Ok(())
}

/// On each of the first `cpus` CPUs, two tasks with an event each take turns.
fn switches(device: &Device, cpus: usize) -> Outcome {
    let began = Instant::now();
    let times: Shared<u64> = thread::scope(|scope| {
        let mut tasks = Vec::new();
        for cpu in 0..cpus {
            let [one, other] = Turn::pair()?;
            tasks.push(scope.spawn(move || take_turns(device, cpu, one, Some(began))));
            tasks.push(scope.spawn(move || take_turns(device, cpu, other, None)));
        }
        tasks.into_iter().map(|task| task.join().map_err(|_panic| "a task panicked")?).sum()
    });
    let times = times.map_err(|error| error.to_string())?;
    ensure!(times > 0, "no switch");
    let took = u64::try_from(began.elapsed().as_nanos())?;
    println!("{}", figures::line(&format!("switch-{cpus}"), &[("times", times), ("took", took), ("least", 0)]));
    Ok(())
}

/// Returns how often this task gave its turn to the other: until [`SPAN`] after `first`, or until the other ends.
fn take_turns(device: &Device, cpu: usize, mut turn: Turn, first: Option<Instant>) -> Shared<u64> {
    cpu::pin(cpu)?;
    let _event: Event = device.start(&device.attr(KIND_MARK, VALUE.into()), How::OWN)?;
    let mut given = 0;
    if let Some(began) = first {
        while began.elapsed() < SPAN {
            turn.give()?;
            given += 1;
            turn.wait()?;
        }
        return Ok(given);
    }
    while turn.wait().is_ok() {
        given += 1;
        if turn.give().is_err() {
            break;
        }
    }
    Ok(given)
}
