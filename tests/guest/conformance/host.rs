//! Programs for guests that share their host's counters with others, and commands that run on the host at the same
//! time.

use std::fs;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings;

use super::counting::border_of_the_loop;
use super::event::{INSTRUCTIONS, Mode, What, attr, counted, offered, open, spin};
use super::prepare;
use super::sharing::waiting;
use crate::arch::{INSTRUCTIONS_CONFIG, RAW_IGNORED, mmio_pio};
use crate::end_scenarios::say;
use crate::raw::{Event, How, kernels, kernels_own};
use crate::{Fallible, Outcome, cpu};

/// Number of events in the guest. The lab's PMU can count them together with the operator's events.
const EVENTS: usize = 4;
/// Number of loops that are counted while others use the counters.
const LOOPS: usize = 50;

/// The guest's part in the test. It counts loops, reports how many of its events wait for counters, and then sleeps.
pub(crate) fn counts() -> Outcome {
    prepare()?;
    let mut borders = Vec::new();
    for _ in 0..LOOPS {
        borders.push(border_of_the_loop()?);
    }
    match borders.iter().all(|border| *border == borders[0]) {
        true => say("loops exact"),
        false => say(&format!("loops {borders:?}")),
    }
    say(&format!("without-a-counter {} of {EVENTS}", waiting(EVENTS)?));
    say(&format!("writes {}", of_writes()?));
    say(&format!("raw {}", of_raw()?));
    say("waiting");
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

/// Counts one loop after another, and prints how much each adds to a count that goes on all the time.
pub(crate) fn steps() -> Outcome {
    const ROUNDS: u64 = 10_000_000;
    prepare()?;
    let event = open(INSTRUCTIONS, Mode::User)?;
    event.enable(0)?;
    for step in 0_u64.. {
        let before = event.count()?;
        spin(ROUNDS);
        say(&format!("step {step} {}", event.count()? - before));
    }
    Ok(())
}

/// Number of VM exits that a loop causes. Only with `--count-mode vcpu` do counts include the instructions that the
/// host executes for these exits.
const WRITES: u64 = 1_000;

/// Returns the number of instructions, in both modes, of a loop that leaves the guest [`WRITES`] times.
fn of_writes() -> Fallible<u64> {
    cpu::allow_ports()?;
    let mut attr = attr(INSTRUCTIONS, Mode::Both);
    attr.set_exclude_hv(0);
    let event = kernels_own(&attr)?;
    Ok(counted(&event, || mmio_pio::out_loop(WRITES))?.count)
}

/// Returns the raw event's count for a loop of 10,000 rounds, or `refused`.
fn of_raw() -> Fallible<String> {
    Ok(match offered(What { kind: bindings::PERF_TYPE_RAW, config: INSTRUCTIONS_CONFIG | RAW_IGNORED }, Mode::User)? {
        None => "refused".to_owned(),
        Some(event) => counted(&event, || spin(10_000))?.count.to_string(),
    })
}

/// `guest-tests count-guests FILE PROGRAM ARGUMENT...`: runs the program, then writes to the file how many instructions
/// guests executed in user mode on the program's threads.
pub(crate) fn count_guests(file: &str, program: &str, arguments: &[&str]) -> ExitCode {
    let run = || -> Fallible<u8> {
        let mut attr = attr(INSTRUCTIONS, Mode::User);
        attr.read_format = 0;
        attr.set_disabled(0);
        attr.set_inherit(1);
        attr.set_exclude_host(1);
        let event = kernels_own(&attr)?;
        let status = Command::new(program).args(arguments).status()?;
        fs::write(file, event.count()?.to_string())?;
        Ok(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1))
    };
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// `guest-tests hold-counters COUNT`: keeps `COUNT` counters of CPU 0 until the process is ended.
pub(crate) fn hold_counters(count: &str) -> ExitCode {
    let hold = || -> Fallible<Vec<Event>> {
        (0..count.parse()?)
            .map(|_| {
                let mut attr = attr(INSTRUCTIONS, Mode::Both);
                attr.set_disabled(0);
                attr.set_pinned(1);
                Ok(kernels(&attr, How::on_cpu(0))?)
            })
            .collect()
    };
    match hold() {
        Ok(events) => {
            println!("held {}", events.len());
            loop {
                thread::sleep(Duration::from_secs(60));
            }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
