//! Measures boots up to the guest's init: their time, their exits, and the memory that the VMM uses in addition to the
//! guest's memory. Compares this project's VMM, with and without the device, and QEMU's microvm. All boot the same
//! kernel and init.
//!
//! The three VMMs boot alternately in the exact lab, where each instruction takes one nanosecond. The benchmark also
//! measures how much time the device adds to the VMM's start. This part uses this machine's own `/dev/kvm`, because
//! there the start includes real waits in the host's kernel.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::figures::{self, Figures};
use images::{Boot, KvmHostChoice, third_party};
use tests::micro::{Code, power_off, single, vmm_binary};
use vpmu_client::error::chain;

/// Number of measured boots of each VMM, after a first boot that is not measured.
const ROUNDS: u64 = 5;
const NAMES: [(&str, &str); 3] = [("vmm", "vmm"), ("vmm-without", "vmm --no-vpmu"), ("qemu-microvm", "QEMU microvm")];
/// Maximum number of bytes that the VMM may use in addition to the guest's memory.
const MEMORY: u64 = 5 << 20;
/// Maximum time, in nanoseconds, that an unused device may add to a start on this machine's own KVM.
const DEVICE: u64 = 1_000_000;
/// Number of measured starts with the device on this machine's own KVM. As many starts are measured without the device.
const STARTS: u32 = 200;
/// The guest's first serial port.
const SERIAL: u16 = 0x3f8;

fn main() -> ExitCode {
    match measure() {
        Ok((kvm_host, reported)) => {
            println!("\nA guest of 1 vCPU and 256 MiB on {kvm_host}; the median of {ROUNDS} boots.");
            let Some(kept) = print(&reported) else {
                eprintln!("figures are missing: {reported:?}");
                return ExitCode::FAILURE;
            };
            match starts() {
                Ok(starts) if kept && starts => ExitCode::SUCCESS,
                Ok(_) => ExitCode::FAILURE,
                Err(error) => {
                    eprintln!("no figures of starts: {error}");
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
        files: third_party::microvm().map_err(|error| chain(&error))?,
        // Enough for the initramfs archive and its unpacked copy, which are in memory at the same time.
        memory_mib: 1024,
        kvm_host: KvmHostChoice::Exact,
        timeout: Duration::from_secs(900),
        ..Boot::default()
    };
    let outcome = boot.run_on_lab_host().map_err(|error| chain(&error))?;
    if outcome.status != 0 {
        return Err(outcome.output);
    }
    let reported = outcome.output.lines().filter_map(figures::parse);
    let reported = reported.map(|(subject, figures)| (subject.to_owned(), figures));
    Ok((outcome.kvm_host.to_string(), reported.collect()))
}

/// Prints the table and the limits. Returns whether all limits hold, or `None` if a figure is missing.
fn print(reported: &BTreeMap<String, Figures>) -> Option<bool> {
    println!("\n  {:16} {:>22} {:>22} {:>18}", "", "boot to init, ms", "exits", "memory, KiB");
    for (subject, name) in NAMES {
        let row = reported.get(subject)?;
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
    let of = |subject: &str, quantity| reported.get(subject)?.get(quantity).copied();
    let (with, without) = (of("vmm", "time")?, of("vmm-without", "time")?);
    let (memory, qemu) = (of("vmm", "memory")?, of("qemu-microvm", "time")?);
    let device = with.saturating_sub(without);
    let exits = of("vmm", "exits")?.saturating_sub(of("vmm-without", "exits")?);
    println!();
    let limits = [
        (with <= qemu, format!("boot: {:.2} of QEMU microvm's time, at most 1", ratio(with, qemu))),
        (memory <= MEMORY, format!("memory: {} KiB, at most {}", memory >> 10, MEMORY >> 10)),
    ];
    println!("  the unused device: {:.2} million instructions, in {exits} exits", ratio(device, 1_000_000));
    Some(hold(&limits))
}

/// Prints the limits, and returns whether all of them hold.
fn hold(limits: &[(bool, String)]) -> bool {
    for (kept, limit) in limits {
        println!("  {limit}{}", if *kept { "" } else { "  exceeded" });
    }
    limits.iter().all(|(kept, _)| *kept)
}

/// Starts a guest of a few instructions on this machine's own KVM, alternately with and without the device. Returns
/// whether the time that the device adds is within its limit. Returns true if there is no `/dev/kvm`.
fn starts() -> Result<bool, Box<dyn Error>> {
    if !Path::new("/dev/kvm").exists() {
        println!("\nStarts: not measured, because this machine has no /dev/kvm");
        return Ok(true);
    }
    let directory = tempfile::tempdir()?;
    let kernel = directory.path().join("kernel");
    let program = Code::new().out8(SERIAL, b'@').then(&power_off());
    fs::write(&kernel, single(&program))?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for turn in 0..=STARTS {
        let both = [start(&kernel, turn, &[])?, start(&kernel, turn, &["--no-vpmu"])?];
        // The first two starts read their files into the page cache.
        if turn > 0 {
            with.push(both[0]);
            without.push(both[1]);
        }
    }
    let (with, without) = (middle(with), middle(without));
    println!(
        "\nFrom the start of the VMM to the guest's first output, on this machine's own /dev/kvm, the median of {STARTS}:\n  \
        vmm {:.2} ms, vmm --no-vpmu {:.2} ms",
        milliseconds(with),
        milliseconds(without)
    );
    let device = with.saturating_sub(without);
    let limit = format!("the unused device: {:.2} ms, at most 1", milliseconds(device));
    Ok(hold(&[(device.as_nanos() <= DEVICE.into(), limit)]))
}

/// Returns the time from the start of the VMM to its guest's first output.
fn start(kernel: &Path, turn: u32, arguments: &[&str]) -> Result<Duration, Box<dyn Error>> {
    // Some waits in the host's kernel end only at its next tick. Different sleeps spread the starts over the time
    // between two ticks.
    thread::sleep(Duration::from_micros(20_000 + u64::from(turn * 617 % 4000)));
    let began = Instant::now();
    let mut vmm = Command::new(vmm_binary())
        .args(["run", "--memory", "64", "--kernel"])
        .arg(kernel)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut first = [0];
    let read = vmm.stdout.take().ok_or("no output")?.read_exact(&mut first);
    let time = began.elapsed();
    let ended = vmm.wait_with_output()?;
    match read {
        Ok(()) if ended.status.success() => Ok(time),
        _ => Err(String::from_utf8_lossy(&ended.stderr).into()),
    }
}

/// The median of some times.
fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn ratio(value: u64, of: u64) -> f64 {
    value as f64 / of as f64
}
