//! Callers in a kernel without frame pointers. The device finds them by the kernel's ORC tables, as the guest's own
//! kernel does for `perf record -g`. Both record the same work.

use std::collections::BTreeSet;
use std::fmt;

use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{record, shown};
use crate::probes::Probe;
use crate::{Fallible, Outcome};

const GROUP: &str = "kernel-chains";

/// The function that writes a byte to the console's serial port.
const WRITER: &str = "io_serial_out";

/// The lowest address of modules.
const MODULES: u64 = 0xffff_ffff_c000_0000;

/// A sample as `perf script` prints it: the addresses, the sampled one first, and their functions.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sample {
    event: String,
    cpu: String,
    chain: Vec<(u64, String)>,
}

impl Sample {
    /// The function of the sampled address.
    fn function(&self) -> &str {
        self.chain.first().map_or("", |(_, function)| function)
    }

    fn callers(&self) -> Vec<u64> {
        self.chain.iter().skip(1).map(|(address, _)| *address).collect()
    }

    /// Whether a function of a loadable module is in the chain.
    fn has_module(&self) -> bool {
        self.chain.iter().any(|(address, _)| *address >= MODULES)
    }

    /// The callers up to the first one in a module, whose callers the device cannot find: it knows only the kernel's own
    /// tables.
    fn callers_to_module(&self) -> Vec<u64> {
        let mut callers = self.callers();
        if let Some(module) = callers.iter().position(|address| *address >= MODULES) {
            callers.truncate(module + 1);
        }
        callers
    }

    /// Whether an interrupt is in the chain. Exceptions, such as page faults, do not count.
    fn has_interrupt(&self) -> bool {
        self.chain.iter().any(|(_, name)| name.starts_with("asm_sysvec") || name == "asm_common_interrupt")
    }

    /// The function at the end of the chain, by which the kernel was entered.
    fn entry(&self) -> &str {
        self.chain.last().map_or("", |(_, function)| function)
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frames = self.chain.iter().map(|(address, function)| format!("{address:x} {function}"));
        f.write_str(&frames.collect::<Vec<_>>().join(" < "))
    }
}

/// Returns the samples of a recording, oldest first. perf prints the addresses of each below a line with its fields.
fn samples(file: &str) -> Fallible<Vec<Sample>> {
    let text = shown(&["script", "-f", "-i", file, "-F", "cpu,event,ip,sym", "--max-stack", "200"])?;
    let mut samples: Vec<Sample> = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [cpu, event, ..] if cpu.starts_with('[') => {
                let event = event.trim_end_matches(':').to_owned();
                samples.push(Sample { event, cpu: cpu.to_owned(), chain: Vec::new() });
            }
            [address, function, ..] => {
                let last = samples.last_mut().ok_or("an address precedes the first sample")?;
                last.chain.push((u64::from_str_radix(address, 16)?, function.to_owned()));
            }
            _ => {}
        }
    }
    Ok(samples)
}

/// Whether `part` is at least `least` percent of `whole`.
fn is_percent(part: usize, whole: usize, least: usize) -> bool {
    part * 100 >= whole * least
}

/// Each byte that the kernel writes to the serial port causes an exit, at which the device takes a sample. A probe at
/// the beginning of the writing function makes the guest's own unwinder take one, too. Some bytes are written by system
/// calls, others by interrupts, on a stack of their own.
#[apply(guest_test)]
fn callers_of_each_write_are_those_that_the_guest_finds() -> Outcome {
    const DEVICE: &str = "vpmu/exits-io/k";
    let probe = Probe::of_last(WRITER)?;
    // Few bytes at a time, because the driver cannot hand on samples while the port's interrupt is handled.
    let text = "for i in $(seq 80); do echo 0123456789 > /dev/ttyS0; sleep 0.02; done";
    let events = ["-c", "1", "-e", &probe.event(), "-e", DEVICE];
    let command = ["--", "sh", "-c", text];
    let said = record("writes", &[&["-a", "-g", "--kernel-callchains", "-m", "1024"], &events[..], &command].concat())?;
    ensure!(!said.contains("lost"), "records were lost: {said}");
    let samples = samples("writes")?;
    let of = |device: bool, cpu: &str| {
        let writes = samples.iter().filter(|sample| sample.function() == WRITER && sample.cpu == cpu);
        writes.filter(|sample| sample.event.starts_with("vpmu") == device).collect::<Vec<_>>()
    };
    let cpus: BTreeSet<&str> = samples.iter().map(|sample| sample.cpu.as_str()).collect();
    let (mut all, mut equal, mut chains, mut interrupts) = (0, 0, BTreeSet::new(), 0);
    let mut first = String::new();
    for cpu in cpus {
        let (own, device) = (of(false, cpu), of(true, cpu));
        ensure_eq!(own.len(), device.len(), "samples of the guest and of the device on CPU {cpu}");
        for (own, device) in own.into_iter().zip(device) {
            all += 1;
            interrupts += usize::from(own.has_interrupt());
            if own.callers_to_module() == device.callers() {
                equal += 1;
                chains.insert(device.callers());
            } else if first.is_empty() {
                first = format!("the guest has {own}; the device has {device}");
            }
        }
    }
    println!("{equal} of {all} writes have equal chains, {} different ones; {interrupts} in interrupts", chains.len());
    ensure!(all >= 500 && interrupts >= 20, "{all} writes, {interrupts} of them in interrupts, are too few");
    ensure!(chains.len() >= 3, "{} different chains are too few", chains.len());
    ensure_eq!(equal, all, "writes with equal chains; {first}");
    Ok(())
}

/// Clocks of the guest and of the host sample the same work at different moments, so a chain of the device is compared with
/// all chains that the guest has to the same function. The guest's clock cannot interrupt an interrupt, so samples in
/// interrupts are not compared.
#[apply(guest_test)]
fn callers_at_any_instruction_are_some_that_the_guest_finds() -> Outcome {
    const DEVICE: &str = "vpmu/cpu-clock/k";
    const OWN: &str = "cpu-clock:k";
    let text = "cat $(yes /proc/self/maps | head -n 1000) > /dev/null";
    let clocks = ["--sample-cpu", "-m", "1024", "-c", "1000000", "-e", OWN, "-e", DEVICE];
    let command = ["--", "sh", "-c", text];
    record("clocks", &[&["-g", "--kernel-callchains"], &clocks[..], &command].concat())?;
    let (device, own): (Vec<Sample>, Vec<Sample>) =
        samples("clocks")?.into_iter().partition(|sample| sample.event.starts_with("vpmu"));
    let known: BTreeSet<(&str, Vec<u64>)> = own.iter().map(|sample| (sample.function(), sample.callers())).collect();
    let functions: BTreeSet<&str> = own.iter().map(Sample::function).collect();
    let entries: BTreeSet<&str> = own.iter().map(Sample::entry).collect();
    let in_kernel: Vec<&Sample> = device.iter().filter(|sample| !sample.has_module()).collect();
    let whole = in_kernel.iter().filter(|sample| entries.contains(sample.entry())).count();
    let comparable = in_kernel.iter().filter(|sample| !sample.has_interrupt() && functions.contains(sample.function()));
    let (equal, other): (Vec<&&Sample>, Vec<&&Sample>) =
        comparable.partition(|sample| known.contains(&(sample.function(), sample.callers())));
    let compared = equal.len() + other.len();
    println!(
        "{} samples of the device, {} of them in modules. {whole} of the others lead to an entry of the kernel; {} of \
         {compared} have a chain that the guest has, too",
        device.len(),
        device.len() - in_kernel.len(),
        equal.len()
    );
    let others: Vec<String> = other.iter().take(9).map(ToString::to_string).collect();
    ensure!(compared >= 500, "{compared} samples are too few");
    ensure!(
        is_percent(whole, in_kernel.len(), 99),
        "only {whole} of {} chains lead to an entry of the kernel",
        in_kernel.len()
    );
    ensure!(
        is_percent(equal.len(), compared, 90),
        "only {} of {compared} chains are some that the guest has; others: {others:#?}",
        equal.len()
    );
    Ok(())
}
