//! Measures how long `vmm serve` makes a vCPU of another VMM wait: for an answer to a store, and for the answer to the
//! notification that costs the most. QEMU waits with its global lock held, and gives the device up after 5 s.

#![allow(clippy::expect_used, reason = "a benchmark ends by panicking")]

#[allow(dead_code, unused_imports, reason = "tests use the rest")]
#[path = "../tests/serve/client.rs"]
mod client;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use client::{DOORBELL, Daemon, Machine};
use common::Bench;
use vpmu::abi::{COMMAND_DISABLE, COMMAND_ENABLE, Command, KIND_MARK, KIND_SOFTWARE, OPEN_ENABLED, OpenRequest, Reply};
use vpmu_testkit::{Fields, command, open_of};
use zerocopy::IntoBytes;

const STORES: u32 = 50_000;
/// Events that commands start and stop, each with a counter of the host: first those of one group, then single events.
const EVENTS: usize = 500;
/// Commands of one notification that start or stop the group.
const TOGGLES: usize = 256;
/// The limit of the answer to a notification: a small part of the time after which QEMU gives the device up.
const LIMIT: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let bench = Bench::new();
    // Descriptors for the counters.
    let daemon = Daemon::start(&bench, 1, &["--max-host-counters", "1100", "--max-events", "1100"]);
    let mut machine = Machine::start(&daemon.socket, 1);
    let event = machine.open(&open_of(KIND_MARK, 1, 0).flags(OPEN_ENABLED));
    let (mean, least) = stores(&machine);
    assert_eq!(machine.count(0, event), u64::from(STORES), "marks");
    println!("the answer to a store:          {mean:10.2?} on average, {least:.2?} at least");

    let leader = machine.open(&open_of(KIND_SOFTWARE, 1, 0));
    for _ in 1..EVENTS {
        machine.open(&OpenRequest { leader: leader.into(), ..open_of(KIND_SOFTWARE, 1, 0) });
    }
    let toggles = [command(COMMAND_ENABLE, leader), command(COMMAND_DISABLE, leader)];
    let toggles: Vec<Command> = toggles.into_iter().cycle().take(TOGGLES).collect();
    let group = answers(&mut machine, &toggles, "of a group");
    let events: Vec<u64> = (0..EVENTS).map(|_| machine.open(&open_of(KIND_SOFTWARE, 1, 0))).collect();
    let of = |op| events.iter().map(move |&event| command(op, event));
    let all: Vec<Command> = of(COMMAND_ENABLE).chain(of(COMMAND_DISABLE)).collect();
    let single = answers(&mut machine, &all, "of single events");
    if group.max(single) > LIMIT { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Sends commands, and prints how long each notification took until all were answered. Returns the longest time.
fn answers(machine: &mut Machine, commands: &[Command], what: &str) -> Duration {
    let (waits, _) = machine.notified(0, commands.as_bytes(), commands.len() * size_of::<Reply>());
    let most = waits.iter().max().copied().unwrap_or_default();
    println!(
        "the answer to {} commands {what}, {EVENTS} events: {} notifications, {most:.2?} at most (limit: {LIMIT:?})",
        commands.len(),
        waits.len()
    );
    most
}

/// Returns the average and the least time in which a store to the doorbell is answered.
fn stores(machine: &Machine) -> (Duration, Duration) {
    machine.on(0, |client| {
        let mut least = Duration::MAX;
        let begin = Instant::now();
        for _ in 0..STORES {
            let store = Instant::now();
            client.write(DOORBELL, 0, &1u32.to_le_bytes());
            least = least.min(store.elapsed());
        }
        (begin.elapsed() / STORES, least)
    })
}
