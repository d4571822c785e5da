//! Throughput of several vCPUs that share one device, compared with the same number of vCPUs that each have their own
//! device.
//!
//! The vCPUs of a device share its control queue, catalogue and limits, but each has its own events. The cost
//! of work on these events should not depend on what the other vCPUs do, so the rate of independent devices
//! is the upper limit. A lock or a cache line that vCPUs share keeps the shared device below this limit.
//!
//! Plain threads stand in for the vCPUs and call the device as a VMM does. There is no guest, so the cost of the exits
//! themselves is excluded. Short slices of one shared device and of independent devices alternate on the same CPUs, and
//! each shared slice is compared with its two neighbours. Separate runs would not be comparable: on a machine with
//! other users, speed drifts from run to run. If other users take CPUs away, the threads share the remaining ones, and
//! a lock costs little between threads that share one CPU. Therefore, only the shared slices with the least disturbed
//! neighbours count. The memory addresses of a device and its threads change the rate by a few per cent, even for one
//! vCPU. Each round therefore creates its devices and threads anew, and the result is the median of the rounds.

mod cpus;
mod device;
mod overflows;
mod side;
mod vcpu;
mod work;

use std::fs;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use vmm_sys_util::signal::SIGRTMIN;
use vpmu::Source;
use vpmu::abi::KIND_SOFTWARE;
use vpmu::host::PerfSource;
use vpmu_testkit::selects;

use device::{Seat, seats};
use overflows::OverflowSource;
use side::Side;
use work::Load;

const VCPUS: [u32; 3] = [1, 2, 4];
/// How many counting task events a switch schedules in or out.
const EVENTS: [usize; 3] = [1, 6, 20];
const LOADS: [(&str, Load); 6] = [
    ("switches, 1 event", Load::Switches(EVENTS[0])),
    ("switches, 6 events", Load::Switches(EVENTS[1])),
    ("switches, 20 events", Load::Switches(EVENTS[2])),
    ("marks", Load::Marks),
    ("exits", Load::Exits),
    ("samples", Load::Samples),
];
/// Number of rounds. Each creates its own devices and threads.
const ROUNDS: usize = 15;
/// Number of shared slices that determine the result of a round. Each is between two independent slices.
const SLICES: usize = 9;
/// Maximum number of shared slices that a round measures.
const TRIES: usize = 90;
/// A shared slice counts as undisturbed if, in both the independent slice before it and the one after it, the threads
/// got at least this fraction of the CPU time that they could get.
const UNDISTURBED: f64 = 0.9;
/// Number of slices that measure the time of a switch, for each number in [`EVENTS`].
const TIMES: usize = 40;

/// The machine that runs the benchmark.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) clock: PerfSource,
    /// Configs of the software events that this machine counts.
    pub(crate) software: Vec<u64>,
    /// CPUs to which the threads are pinned, round-robin.
    pub(crate) cpus: Vec<usize>,
}

/// The rate of a shared slice, and the mean rate of the independent slices before and after it.
#[derive(Debug, Clone, Copy)]
struct Pair {
    shared: f64,
    independent: f64,
    /// CPU time that the threads got, divided by the maximum that they could get. This is the lower of the values for
    /// the two independent slices.
    undisturbed: f64,
}

impl Pair {
    fn ratio(&self) -> f64 {
        self.shared / self.independent
    }
}

/// The median pair of each round.
#[derive(Debug)]
struct Compared(Vec<Pair>);

impl Compared {
    fn quartiles(&self, of: impl Fn(&Pair) -> f64) -> [f64; 3] {
        quartiles(self.0.iter().map(of))
    }

    fn ratios(&self) -> [f64; 3] {
        self.quartiles(Pair::ratio)
    }

    fn print(&self, what: &str) {
        let [low, ratio, high] = self.ratios();
        println!(
            "    {what:<19} {:>9.0}/s shared, {:>9.0}/s independent: {ratio:.3} (quartiles {low:.3} \
             to {high:.3}; {:.0} % of the CPUs)",
            self.quartiles(|pair| pair.shared)[1],
            self.quartiles(|pair| pair.independent)[1],
            100.0 * self.quartiles(|pair| pair.undisturbed)[1],
        );
    }
}

fn main() -> ExitCode {
    if !selects("scaling") {
        return ExitCode::SUCCESS;
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scaling: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> io::Result<()> {
    let host = Arc::new(Host::new()?);
    if host.software.is_empty() {
        println!("scaling: not measured, because this host counts no software events");
        return Ok(());
    }
    let load = fs::read_to_string("/proc/loadavg")?;
    println!(
        "scaling: rates of vCPUs that share a device, relative to vCPUs that have a device each; \
         {} CPUs, load {}",
        host.cpus.len(),
        load.split(' ').take(3).collect::<Vec<_>>().join(" "),
    );
    for vcpus in VCPUS {
        let compared = LOADS.map(|(_, load)| compare(load, vcpus, &host));
        let compared = compared.into_iter().collect::<io::Result<Vec<_>>>()?;
        let [_, six, _, marks, exits, samples] = &compared[..] else {
            return Err(io::Error::other("a load was not compared"));
        };
        let [switches, marks, exits, samples] = [six, marks, exits, samples].map(|compared| compared.ratios()[1]);
        println!(
            "{vcpus} vCPUs: switches {switches:.2} marks {marks:.2} exits {exits:.2} samples \
             {samples:.2}"
        );
        if vcpus as usize > host.cpus.len() {
            println!("    this process may use only {} CPUs: threads share CPUs", host.cpus.len());
        }
        for ((what, _), compared) in LOADS.iter().zip(&compared) {
            compared.print(what);
        }
    }
    print_times(&host)
}

impl Host {
    fn new() -> io::Result<Self> {
        let clock = source()?;
        let offers = clock.offers().iter();
        let software = offers.filter(|offer| offer.kind == KIND_SOFTWARE);
        Ok(Self { software: software.map(|offer| offer.config).collect(), clock, cpus: cpus::allowed()? })
    }
}

fn source() -> io::Result<PerfSource> {
    PerfSource::new(SIGRTMIN()).map_err(io::Error::other)
}

/// Seats for `vcpus` threads, all on one device.
fn shared(load: Load, vcpus: u32) -> io::Result<Vec<Seat>> {
    let source: Box<dyn Source> = match load {
        Load::Samples => Box::new(OverflowSource::new(source()?)),
        _ => Box::new(source()?),
    };
    seats(vcpus, source)
}

/// Seats for `vcpus` threads, each on its own device.
fn independent(load: Load, vcpus: u32) -> io::Result<Vec<Seat>> {
    let devices = (0..vcpus).map(|_| shared(load, 1));
    Ok(devices.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
}

fn compare(load: Load, vcpus: u32, host: &Arc<Host>) -> io::Result<Compared> {
    let rounds = (0..ROUNDS).map(|_| round(load, vcpus, host));
    Ok(Compared(rounds.collect::<io::Result<_>>()?))
}

/// Measures one round. Returns the pair with the median ratio among the [`SLICES`] least disturbed pairs.
fn round(load: Load, vcpus: u32, host: &Arc<Host>) -> io::Result<Pair> {
    let independent = Side::start(load, independent(load, vcpus)?, host);
    let shared = Side::start(load, shared(load, vcpus)?, host);
    // The first slices touch the memory.
    shared.slice();
    independent.slice();
    let cpus = host.cpus.len().min(vcpus as usize) as f64;
    let (mut pairs, mut before) = (Vec::new(), independent.slice());
    for _ in 0..TRIES {
        let between = shared.slice();
        let after = independent.slice();
        pairs.push(Pair {
            shared: between.rate,
            independent: (before.rate + after.rate) / 2.0,
            undisturbed: before.cpus.min(after.cpus) / cpus,
        });
        before = after;
        let good = pairs.iter().filter(|pair| pair.undisturbed >= UNDISTURBED);
        if good.count() == SLICES {
            break;
        }
    }
    shared.finish()?;
    independent.finish()?;
    pairs.sort_by(|one, other| other.undisturbed.total_cmp(&one.undisturbed));
    pairs.truncate(SLICES);
    pairs.sort_by(|one, other| one.ratio().total_cmp(&other.ratio()));
    Ok(pairs[pairs.len() / 2])
}

/// Prints the CPU time that one vCPU needs to schedule a task in and out, for each number in [`EVENTS`].
fn print_times(host: &Arc<Host>) -> io::Result<()> {
    let mut sides = Vec::new();
    for events in EVENTS {
        let load = Load::Switches(events);
        let side = Side::start(load, shared(load, 1)?, host);
        side.slice();
        sides.push(side);
    }
    let time = |side: &Side| {
        let slice = side.slice();
        1e9 * slice.cpus / slice.rate
    };
    let rounds: Vec<Vec<f64>> = (0..TIMES).map(|_| sides.iter().map(time).collect()).collect();
    sides.into_iter().try_for_each(Side::finish)?;
    let median = |of: &dyn Fn(&Vec<f64>) -> f64| quartiles(rounds.iter().map(of))[1];
    println!("CPU time of a switch in and out on one vCPU, by number of counting events:");
    for (index, events) in EVENTS.iter().enumerate() {
        println!("    {events:>2}: {:>6.0} ns", median(&|round| round[index]));
    }
    let slope = |from: usize, to: usize| {
        let more = (EVENTS[to] - EVENTS[from]) as f64;
        median(&|round| (round[to] - round[from]) / more)
    };
    println!(
        "    each further event: {:.0} ns ({:.0} ns up to 6, {:.0} ns beyond)",
        slope(0, 2),
        slope(0, 1),
        slope(1, 2),
    );
    Ok(())
}

fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}
