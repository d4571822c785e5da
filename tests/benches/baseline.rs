//! Compares the vPMU with KVM's own PMU and with the host's perf: exits and interrupts of samples and task switches, and
//! how much longer a load takes while it is sampled or counted.
//!
//! All run in the exact x86 lab, whose AMD counters are emulated, and exact to the instruction. One guest has only the
//! vPMU, one has KVM's own PMU, and one is profiled from its host. Time in this lab is the number of instructions that
//! the guest and its host have executed, so a slowdown is a ratio of instructions, without noise. It says nothing about
//! the cycles that a processor needs for an exit.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use guest_tests::figures::{self, Figures};
use images::{Arch, Boot, KvmHostChoice, third_party};
use tests::host::SharedSession;
use vpmu_client::error::chain;

const SAMPLES: u64 = 500;
const ROUNDS: u64 = 50;
/// Task switches of the load `switches`, two for each of its rounds.
const SWITCHES: f64 = 4_000.0;
/// The periods in cycles at which the loop is sampled. Every cycle takes a nanosecond, and the loop has 300,000,000.
const PERIODS: [(u32, &str); 3] = [(1_000_000, "1 kHz"), (250_000, "4 kHz"), (100_000, "10 kHz")];
const CYCLES: f64 = 300_000_000.0;
/// Samples of six events, each at the first of these periods: four count all instructions, two the branches, which are
/// half of them.
const SAMPLES_OF_SIX: f64 = 1_500.0;

/// Runs guests that the host's perf profiles: with the same periods and rates that guests profile themselves with.
const HOSTS_PERF: &str = r#"
ACT=loop
VCPUS=1
profiled() {
	name=$1
	shift
	VMM="perf record -o /tmp/samples $* -- vmm"
	boot $name
}
boot alone
for period in 1000000 250000 100000; do
	profiled $period -e cycles:uG -c $period
done
profiled rate -e cycles:uG -F 4000
profiled six -e cycles:uG,instructions:uG,branches:uG,cycles:G,instructions:G,branches:G -c 1000000
"#;

/// The columns: names in the figures of exits and of times, and in the table.
const COLUMNS: [Column; 4] = [
    Column { sampler: "perf-core", counter: "perf-core", head: "vPMU, perf" },
    Column { sampler: "device-batched", counter: "device", head: "vPMU, /dev/vpmu" },
    Column { sampler: "kvm", counter: "kvm", head: "KVM's own PMU" },
    Column { sampler: "host", counter: "host", head: "host's own perf" },
];

struct Column {
    sampler: &'static str,
    counter: &'static str,
    head: &'static str,
}

/// The figures by subject.
type Reported = BTreeMap<String, Figures>;

fn main() -> ExitCode {
    let measured = measure(&[]).and_then(|(kvm_host, mut reported)| {
        reported.extend(measure(&["--guest-pmu"])?.1);
        reported.extend(profiled_by_the_host()?);
        Ok((kvm_host, reported))
    });
    match measured {
        Ok((kvm_host, reported)) => {
            println!("\nA guest of 1 vCPU on {kvm_host}. The counters are an AMD processor's, emulated.");
            match print(&reported) {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            eprintln!("no figures: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures in a guest with these arguments for `vmm run`.
fn measure(more: &[&str]) -> Result<(String, Reported), String> {
    let arguments = ["--max-sampling-percent", "100"].iter().chain(more);
    let boot = Boot {
        command: format!("guest-tests baseline {SAMPLES} {ROUNDS}"),
        vcpus: 1,
        // Room for perf and its libraries.
        memory_mib: 512,
        programs: vec!["guest-tests".to_owned()],
        files: third_party::perf(Arch::X86_64).map_err(|error| chain(&error))?,
        kvm_host: KvmHostChoice::Exact,
        timeout: Duration::from_secs(900),
        vmm_args: arguments.map(|&argument| argument.to_owned()).collect(),
        ..Boot::default()
    };
    let outcome = boot.run().map_err(|error| chain(&error))?;
    if outcome.status != 0 {
        return Err(outcome.output);
    }
    let reported = outcome.output.lines().filter_map(figures::parse);
    let reported = reported.map(|(subject, figures)| (subject.to_owned(), figures));
    Ok((outcome.kvm_host.to_string(), reported.collect()))
}

/// Measures the loop in guests that their host profiles.
fn profiled_by_the_host() -> Result<Reported, String> {
    let session = SharedSession::new(HOSTS_PERF).with_perf().in_exact_lab(Arch::X86_64);
    let session = session.get();
    let boots = ["alone", "1000000", "250000", "100000", "rate", "six"];
    let figures = |boot| session.text(&format!("{boot}.text")).lines().find_map(|line| Some(figures::parse(line)?.1));
    let subject = |boot| if boot == "alone" { "alone:host:loop".to_owned() } else { format!("record:host:{boot}") };
    let reported = |boot| Ok((subject(boot), figures(boot).ok_or_else(|| format!("boot {boot} has no figures"))?));
    boots.into_iter().map(reported).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts of one boot")]
fn value(reported: &Reported, subject: &str, name: &str) -> Option<f64> {
    Some(*reported.get(subject)?.get(name)? as f64)
}

/// The sum of these figures for each sample or switch, beyond that of a guest without events.
fn each(reported: &Reported, with: &str, without: &str, names: &[&str]) -> Option<f64> {
    let beyond = |name: &&str| Some(value(reported, with, name)? - value(reported, without, name)?);
    let sum: f64 = names.iter().map(beyond).sum::<Option<f64>>()?;
    Some(sum / value(reported, with, "times")?)
}

/// A row: a value for each column, and the largest values that the columns of the vPMU may have.
struct Row {
    name: String,
    values: [Option<f64>; 4],
    limits: [Option<f64>; 2],
}

fn rows(reported: &Reported) -> Vec<Row> {
    const EXITS: [&str; 2] = ["exits", "host"];
    const INTERRUPTS: [&str; 2] = ["nmis", "lines"];
    let mut rows = Vec::new();
    let mut row = |name: &str, limits: [Option<f64>; 2], of: &dyn Fn(&Column) -> Option<f64>| {
        rows.push(Row { name: name.to_owned(), values: COLUMNS.each_ref().map(of), limits });
    };
    let of_samples = |column: &Column, names: &[&str]| {
        let of = |sampler| each(reported, &format!("sample:{sampler}"), &format!("idle:{sampler}"), names);
        of(column.sampler)
    };
    row("exits per sample", [Some(1.5), Some(1.3)], &|column| of_samples(column, &EXITS));
    row("  of them, returns to the VMM", [Some(0.2), Some(0.2)], &|column| of_samples(column, &["user"]));
    row("interrupts per sample", [Some(0.1), Some(0.1)], &|column| of_samples(column, &INTERRUPTS));
    let engine = |column: &Column, names: &[&str]| {
        let device = column.counter == "device";
        device.then(|| each(reported, "sample:device-exit", "idle:device-exit", names)).flatten()
    };
    row("exits per sample, exit engine", [None, Some(1.3)], &|column| engine(column, &EXITS));
    row("  of them, returns to the VMM", [None, Some(1.2)], &|column| engine(column, &["user"]));
    for events in [1, 6, 20] {
        row(&format!("exits per switch, {events} event(s) per task"), [Some(2.2); 2], &|column| {
            let of = |events| format!("switch:{}:{events}", column.counter);
            each(reported, &of(events), &of(0), &EXITS)
        });
    }
    let time = |subject: &str| value(reported, subject, "elapsed");
    let alone = |column: &Column, load: &str| time(&format!("alone:{}:{load}", column.counter));
    let sampled =
        |column: &Column, how: &str| Some((time(&format!("record:{}:{how}", column.counter))?, alone(column, "loop")?));
    for (period, rate) in PERIODS {
        row(&format!("loop sampled at {rate}: slowdown"), [None; 2], &|column| {
            let (with, without) = sampled(column, &period.to_string())?;
            Some(with / without)
        });
        row("  instructions per sample", [None; 2], &|column| {
            let (with, without) = sampled(column, &period.to_string())?;
            Some((with - without) / (CYCLES / f64::from(period)))
        });
    }
    row("loop sampled with -F 4000: slowdown", [None; 2], &|column| {
        let (with, without) = sampled(column, "rate")?;
        Some(with / without)
    });
    row("loop sampled by 6 events: slowdown", [None; 2], &|column| {
        let (with, without) = sampled(column, "six")?;
        Some(with / without)
    });
    row("  instructions per sample", [None; 2], &|column| {
        let (with, without) = sampled(column, "six")?;
        Some((with - without) / SAMPLES_OF_SIX)
    });
    let counted = |column: &Column| Some((time(&format!("stat:{}", column.counter))?, alone(column, "switches")?));
    row("switches, stat of 6 events: slowdown", [Some(1.1); 2], &|column| {
        let (with, without) = counted(column)?;
        Some(with / without)
    });
    row("  instructions per switch", [None; 2], &|column| {
        let (with, without) = counted(column)?;
        Some((with - without) / SWITCHES)
    });
    rows
}

/// Prints the table, and returns whether it has all figures and all limits hold. The vPMU must be faster than KVM's
/// own PMU at each load.
fn print(reported: &Reported) -> bool {
    let [perf, device, kvm, host] = COLUMNS.map(|column| column.head);
    println!("\n  {:38} {perf:>15} {device:>15} {kvm:>15} {host:>15}", "");
    let mut kept = true;
    for Row { name, values, limits } in rows(reported) {
        let digits = if values.iter().flatten().any(|value| *value >= 100.0) { 0 } else { 3 };
        let cells = values.map(|value| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}")));
        let [perf, device, kvm, host] = cells;
        let exceeds = |(value, limit): (&Option<f64>, &Option<f64>)| {
            limit.is_some_and(|limit| value.is_none_or(|value| value > limit))
        };
        let [ours, devices, kvms, _] = values;
        let slower = kvms.is_some_and(|kvms| [ours, devices].iter().any(|value| value.is_none_or(|it| it >= kvms)));
        let is_load = name.ends_with("slowdown");
        let exceeded = values.iter().zip(&limits).any(exceeds) || is_load && (slower || kvms.is_none());
        kept &= !exceeded;
        let said = if exceeded { "  exceeds its limit" } else { "" };
        println!("  {name:38} {perf:>15} {device:>15} {kvm:>15} {host:>15}{said}");
    }
    println!(
        "\n  Exits: all that KVM made, less those of a guest that does the same without events. Interrupts: those \
         injected into\n  the guest; programs ask for one each 16 samples. Slowdown: time, which is executed \
         instructions, over the time of\n  the load alone. The vPMU's limits: {}",
        if kept { "kept." } else { "not kept." }
    );
    kept
}
