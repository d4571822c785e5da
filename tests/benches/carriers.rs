//! Compares the ways to carry the device: in this project's VMM, and in a process beside a stock QEMU or beside Cloud
//! Hypervisor. `VPMU_CLOUD_HYPERVISOR` names the program of Cloud Hypervisor, which Debian does not have. Without it, there
//! are no figures of Cloud Hypervisor.
//!
//! A guest of each takes turns on the same KVM: this machine's, if a stock kernel boots there, else that of a lab, whose
//! processor is emulated. There the ratios mean something, and the times do not. Guests of one vCPU run in the exact lab:
//! their figures do not depend on load. They lack the cost of finding the vCPU of a mark, which guests of two vCPUs have.
//! One more guest is emulated on this machine by QEMU, which has a device of its own to compare with: an access to either
//! waits for its answer, but QEMU's own device answers in the vCPU's thread, and the process beside it in a thread of its
//! own.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use guest_tests::figures::{self, Figures};
use images::{Boot, Carrier, KvmHost, KvmHostChoice};
use vpmu_client::error::chain;

/// The environment variable that names the program of Cloud Hypervisor.
const CLOUD_HYPERVISOR: &str = "VPMU_CLOUD_HYPERVISOR";
/// The number of boots of each of the guests that take turns. In the exact lab, one boot is as good as two.
const ROUNDS: usize = 2;
/// The subjects in the figures, and the rows of the table.
const RATES: [(&str, &str); 5] = [
    ("mark", "marks/s"),
    ("sample", "samples/s"),
    ("read", "reads of a count/s"),
    ("switch-1", "task switches/s, one vCPU"),
    (ON_TWO, "task switches/s, two vCPUs"),
];
/// The subject that guests of one vCPU lack.
const ON_TWO: &str = "switch-2";

/// The figures of the boots of one guest, by subject.
type Reported = BTreeMap<String, Vec<Figures>>;

/// A way to carry the device, and the figures of its guest.
struct Way {
    carrier: Carrier,
    name: &'static str,
    reported: Reported,
    /// The machine that its guest ran on.
    machine: String,
}

impl Way {
    fn new(carrier: Carrier, name: &'static str) -> Self {
        Self { carrier, name, reported: Reported::new(), machine: String::new() }
    }
}

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("no figures: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(), String> {
    compare(1, KvmHostChoice::AutoExact)?;
    compare(2, KvmHostChoice::Auto)?;
    let mut emulated = Reported::new();
    let stock = boot(&Carrier::BesideEmulation, 2, KvmHostChoice::Auto, &["-device", "edu"], &mut emulated)?;
    println!("\nAn access to a device from a guest of {stock}:\n");
    println!("  {:28} {:>12} {:>12}", "", "mean, µs", "least, µs");
    for (subject, row) in [("access-in-qemu", "QEMU's own device"), ("mark", "the device beside it")] {
        let (mean, least) = (1e6 / rate(&emulated, subject)?, least(&emulated, subject)?);
        println!("  {row:28} {mean:12.2} {least:12.2}");
    }
    println!("\n  ratio of the means: {:.1}", rate(&emulated, "access-in-qemu")? / rate(&emulated, "mark")?);
    Ok(())
}

/// Compares guests of this number of vCPUs.
fn compare(vcpus: u32, choice: KvmHostChoice) -> Result<(), String> {
    let mut within = Way::new(Carrier::Vmm, "vmm run");
    let mut ways = vec![Way::new(Carrier::BesideQemu, "beside QEMU")];
    if let Some(program) = env::var_os(CLOUD_HYPERVISOR) {
        let carrier = Carrier::BesideCloudHypervisor(PathBuf::from(program));
        ways.push(Way::new(carrier, "beside Cloud Hypervisor"));
    }
    for _ in 0..ROUNDS {
        let kvm_host = boot(&within.carrier, vcpus, choice, &[], &mut within.reported)?;
        let (choice, is_exact) = match kvm_host {
            KvmHost::Direct => (KvmHostChoice::Auto, false),
            KvmHost::Lab { exact: true, .. } => (KvmHostChoice::Exact, true),
            _ => (KvmHostChoice::Lab, false),
        };
        within.machine = kvm_host.to_string();
        for way in &mut ways {
            way.machine = boot(&way.carrier, vcpus, choice, &[], &mut way.reported)?.to_string();
        }
        if is_exact {
            break;
        }
    }
    println!("\nGuests with {vcpus} vCPUs:");
    for way in [&within].into_iter().chain(&ways) {
        println!("  {:24} {}", way.name, way.machine);
    }
    for way in &ways {
        println!("\n  {:28} {:>12} {:>24} {:>8}", "", within.name, way.name, "ratio");
        for (subject, row) in RATES.into_iter().filter(|(subject, _)| vcpus > 1 || *subject != ON_TWO) {
            let (run, serve) = (rate(&within.reported, subject)?, rate(&way.reported, subject)?);
            println!("  {row:28} {run:12.0} {serve:24.0} {:8.2}", serve / run);
        }
    }
    Ok(())
}

/// Boots a guest that measures, and adds its figures to `reported`.
fn boot(
    carrier: &Carrier,
    vcpus: u32,
    kvm_host: KvmHostChoice,
    other_args: &[&str],
    reported: &mut Reported,
) -> Result<KvmHost, String> {
    let boot = Boot {
        command: "guest-tests carriers".to_owned(),
        programs: vec!["guest-tests".to_owned()],
        timeout: Duration::from_secs(900),
        vcpus,
        kvm_host,
        carrier: carrier.clone(),
        other_args: other_args.iter().map(|&argument| argument.to_owned()).collect(),
        ..Boot::default()
    };
    let outcome = boot.run().map_err(|error| chain(&error))?;
    if outcome.status != 0 {
        return Err(outcome.output);
    }
    for (subject, figures) in outcome.output.lines().filter_map(figures::parse) {
        reported.entry(subject.to_owned()).or_default().push(figures);
    }
    Ok(outcome.kvm_host)
}

/// The sum of a figure over the boots.
#[expect(clippy::cast_precision_loss, reason = "figures of seconds")]
fn sum(reported: &Reported, subject: &str, figure: &str) -> Result<f64, String> {
    let boots = reported.get(subject).ok_or_else(|| format!("no figures of {subject}: {reported:?}"))?;
    let figures: Option<Vec<u64>> = boots.iter().map(|figures| figures.get(figure).copied()).collect();
    let figures = figures.ok_or_else(|| format!("no {figure} of {subject}: {boots:?}"))?;
    Ok(figures.iter().sum::<u64>() as f64)
}

/// Operations in a second.
fn rate(reported: &Reported, subject: &str) -> Result<f64, String> {
    Ok(sum(reported, subject, "times")? * 1e9 / sum(reported, subject, "took")?)
}

/// The time of the fastest operation of a guest that booted once, in microseconds.
fn least(reported: &Reported, subject: &str) -> Result<f64, String> {
    Ok(sum(reported, subject, "least")? / 1e3)
}
