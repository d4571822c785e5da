//! Time and exits of a boot up to the guest's init, and memory of the VMM besides the guest's: this
//! project's VMM with and without the device, and QEMU's microvm, with one kernel and one init.
//!
//! In turns on the exact lab, where a nanosecond is an instruction.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use images::{Boot, PlaceChoice, foreign};
use tests::figures::{self, Figures};
use vpmu_client::error::chain;

/// Boots of each, besides a first that is not measured.
const ROUNDS: u64 = 5;
const NAMES: [(&str, &str); 3] = [
    ("vmm", "vmm"),
    ("vmm-without", "vmm --no-vpmu"),
    ("qemu-microvm", "QEMU microvm"),
];
/// Bytes that the VMM may take besides the guest's memory.
const MEMORY: u64 = 5 << 20;
/// Nanoseconds that an unused device may add to a boot.
const DEVICE: u64 = 1_000_000;

fn main() -> ExitCode {
    match measure() {
        Ok((place, told)) => {
            println!("\nA guest of 1 vCPU and 256 MiB on {place}; the middle of {ROUNDS} boots.");
            match print(&told) {
                Some(true) => ExitCode::SUCCESS,
                Some(false) => ExitCode::FAILURE,
                None => {
                    eprintln!("figures are missing: {told:?}");
                    ExitCode::FAILURE
                }
            }
        }
        Err(error) => {
            eprintln!("no figures: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(String, BTreeMap<String, Figures>), String> {
    let boot = Boot {
        command: format!("guest-tests boots {ROUNDS}"),
        vcpus: 1,
        programs: vec!["guest-tests".to_owned()],
        files: foreign::microvm().map_err(|error| chain(&error))?,
        // For the archive and its copy.
        memory_mib: 1024,
        place: PlaceChoice::Exact,
        timeout: Duration::from_secs(900),
        ..Boot::default()
    };
    let outcome = boot.run_on_lab_host().map_err(|error| chain(&error))?;
    if outcome.status != 0 {
        return Err(outcome.output);
    }
    let told = outcome.output.lines().filter_map(figures::parse);
    let told = told.map(|(subject, figures)| (subject.to_owned(), figures));
    Ok((outcome.place.to_string(), told.collect()))
}

/// Prints the table and the limits; returns whether all hold.
fn print(told: &BTreeMap<String, Figures>) -> Option<bool> {
    println!(
        "\n  {:16} {:>22} {:>22} {:>18}",
        "", "boot to init, ms", "exits", "memory, KiB"
    );
    for (subject, name) in NAMES {
        let row = told.get(subject)?;
        let spread = |quantity: &str, divisor: u64| {
            let value = |suffix| {
                let value = row.get(&format!("{quantity}{suffix}"))?;
                Some(value / divisor)
            };
            let (least, most) = (value("-least")?, value("-most")?);
            Some(format!("{} ({least}-{most})", value("")?))
        };
        println!(
            "  {name:16} {:>22} {:>22} {:>18}",
            spread("time", 1_000_000)?,
            spread("exits", 1)?,
            spread("memory", 1024)?
        );
    }
    let of = |subject: &str, quantity| told.get(subject)?.get(quantity).copied();
    let (with, without) = (of("vmm", "time")?, of("vmm-without", "time")?);
    let (memory, qemu) = (of("vmm", "memory")?, of("qemu-microvm", "time")?);
    let device = with.saturating_sub(without);
    let exits = of("vmm", "exits")?.saturating_sub(of("vmm-without", "exits")?);
    println!();
    let limits = [
        (
            with <= qemu,
            format!(
                "boot: {:.2} of QEMU microvm's, at most 1",
                ratio(with, qemu)
            ),
        ),
        (
            memory <= MEMORY,
            format!("memory: {} KiB, at most {}", memory >> 10, MEMORY >> 10),
        ),
        (
            device <= DEVICE,
            format!(
                "the unused device: {:.2} ms, at most 1, in {exits} exits",
                ratio(device, 1_000_000)
            ),
        ),
    ];
    for (kept, limit) in &limits {
        println!("  {limit}{}", if *kept { "" } else { "  exceeded" });
    }
    Some(limits.iter().all(|(kept, _)| *kept))
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn ratio(value: u64, of: u64) -> f64 {
    value as f64 / of as f64
}
