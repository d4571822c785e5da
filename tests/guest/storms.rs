//! Sampling storms: an unprivileged program opens a clock with a period of ten microseconds. Other programs on the same
//! vCPU must still get time to run.

use std::hint::black_box;
use std::process::{Child, Command, Stdio};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{IP, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, ENGINE_EXIT, How, KIND_SOFTWARE, SW_CPU_CLOCK, SW_TASK_CLOCK, sampling, silent};
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "storms";

/// The shortest sampling period, in nanoseconds, of the host's clocks.
const PERIOD: u64 = 10_000;
/// The throttle's window of guest time, in nanoseconds.
const WINDOW: u64 = 10_000_000;
/// The work that another process does during the storm.
const ROUNDS: &str = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo $i";
const DONE: &[u8] = b"20000\n";

const LOST: u32 = 2;
const THROTTLE: u32 = 5;
const UNTHROTTLE: u32 = 6;
const SAMPLE: u32 = 9;

/// The numbers of records in the rings during a storm, and the storm's duration.
#[derive(Debug, Default)]
struct Storm {
    samples: u64,
    throttles: u64,
    unthrottles: u64,
    /// Number of records that report losses. Each one means that a ring was full.
    losses: u64,
    time: u64,
}

#[apply(guest_test)]
fn clock_of_nobodys_task_is_throttled_and_others_go_on() -> Outcome {
    storm(&[SW_CPU_CLOCK])
}

#[apply(guest_test)]
fn clocks_of_nobodys_task_share_one_budget() -> Outcome {
    storm(&[SW_CPU_CLOCK, SW_TASK_CLOCK])
}

/// Runs the storm on CPU 0 as the user nobody, while another process works on the same CPU.
fn storm(clocks: &[u64]) -> Outcome {
    os::set_paranoid(1)?;
    os::in_child(|| {
        cpu::pin(0)?;
        by_nobody(clocks)
    })
}

fn by_nobody(clocks: &[u64]) -> Outcome {
    let mut other = Command::new("sh").args(["-c", ROUNDS]).stdout(Stdio::piped()).spawn()?;
    os::become_nobody()?;
    let storm = until_done(clocks, &mut other)?;
    let output = other.wait_with_output()?;
    ensure_eq!(output.stdout, DONE, "output of the other process");
    // A test on the host compares this line with the device's counters.
    println!("storm of {} clocks: {storm:?}", clocks.len());
    ensure!(storm.throttles > 0, "nothing was throttled: {storm:?}");
    let open = storm.throttles.checked_sub(storm.unthrottles);
    ensure!(open.is_some_and(|open| open <= clocks.len() as u64), "the throttles do not match their ends: {storm:?}");
    // Each event is throttled at most once per window.
    let windows = storm.time / WINDOW + 2;
    ensure!(storm.throttles <= windows * clocks.len() as u64, "too many throttles for {windows} windows: {storm:?}");
    Ok(())
}

/// Samples this task with `clocks` until `other` has ended.
fn until_done(clocks: &[u64], other: &mut Child) -> Fallible<Storm> {
    let device = Device::open()?;
    let mut events = Vec::new();
    for &clock in clocks {
        let clock = device.attr(KIND_SOFTWARE, clock);
        let attr = silent(sampling(clock, PERIOD, IP | TIME));
        let event = device.open_event(&attr, How::OWN.by(ENGINE_EXIT))?;
        let ring = Pages::map(&event, 32, READ_WRITE)?;
        events.push((event, ring));
    }
    let mut storm = Storm::default();
    let begin = cpu::tsc();
    for (event, _) in &events {
        event.enable(0)?;
    }
    loop {
        for round in 0..20_000_u64 {
            black_box(round);
        }
        let ended = other.try_wait()?.is_some();
        if ended {
            for (event, _) in &events {
                event.disable(0)?;
            }
        }
        for (_, ring) in &mut events {
            for record in ring.take()? {
                match record.kind {
                    SAMPLE => storm.samples += 1,
                    THROTTLE => storm.throttles += 1,
                    UNTHROTTLE => storm.unthrottles += 1,
                    LOST => storm.losses += 1,
                    other => return Err(format!("a record of type {other}").into()),
                }
            }
        }
        if ended {
            break;
        }
    }
    storm.time = device.time_of(cpu::tsc()) - device.time_of(begin);
    Ok(storm)
}
