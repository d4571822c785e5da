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
/// Events of the group that the costliest commands start and stop, each with a counter of the host.
const EVENTS: usize = 1000;
const COMMANDS: usize = 128;
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
    let toggles: Vec<Command> = toggles.into_iter().cycle().take(COMMANDS).collect();
    let waits = machine.notified(0, toggles.as_bytes(), COMMANDS * size_of::<Reply>());
    let most = waits.iter().max().copied().unwrap_or_default();
    println!(
        "the answers to {COMMANDS} commands of {EVENTS} events each: {} notifications, at most {most:.2?} each (limit: \
         {LIMIT:?})",
        waits.len(),
    );
    if most > LIMIT { ExitCode::FAILURE } else { ExitCode::SUCCESS }
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
