//! Measures what samples and task switches cost a guest with two PMUs. One is a CPU PMU with trapped registers, driven
//! by the kernel's own driver. The other is the paravirtual PMU, used both through perf core and through `/dev/vpmu`.
//! All events count the host's CPU clock of the vCPU.

use std::fs;
use std::io;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::figures;
use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::packets::Exit;
use crate::pages::{Pages, READ_WRITE};
use crate::perf_command::{record, row_of, script, stat};
use crate::raw::{
    Device, ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, EXIT_ALL, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, EXIT_USER, Event,
    How, KIND_EXITS, KIND_SOFTWARE, SW_CPU_CLOCK, kernels, sampling, waking,
};
use crate::switches::Turn;
use crate::traced::Traced;
use crate::{Outcome, aux_exits, cpu};

const GROUP: &str = "baseline";

type Failure = Box<dyn std::error::Error>;
type Shared<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The guest's only CPU.
const CPU: usize = 0;
const ON_CPU: How<'_> = How::on_cpu(0);
/// Sampling period in nanoseconds, far longer than a sample takes on an emulated machine.
const PERIOD: u64 = 10_000_000;
/// Records for each wakeup.
const WAKEUP: u32 = 16;
/// `PERF_RECORD_SAMPLE`.
const RECORD_SAMPLE: u32 = 9;
const RING_PAGES: usize = 8;
/// Size of a sample in bytes. It has a header and an address.
const SAMPLE_BYTES: u64 = 16;
/// Number of pages of the area for the trace of every exit.
const AREA_PAGES: usize = 256;
/// SVM's exit code for an interrupt that is for the host.
const EXIT_OF_INTERRUPT: u16 = 0x60;

/// Numbers of register accesses that the kernel's driver for a CPU PMU makes.
struct Driver {
    /// For a switch between two tasks with one event each.
    switch: u64,
    /// For a switch between two tasks with six events each.
    switch_of_six: u64,
    sample: u64,
}

/// The driver of PerfMonV2.
const AMD: Driver = Driver { switch: 10, switch_of_six: 40, sample: 6 };
/// The driver of Intel's architectural PMU, version 2.
const INTEL: Driver = Driver { switch: 8, switch_of_six: 28, sample: 7 };

/// The driver of this CPU.
fn driver() -> io::Result<Driver> {
    let intel = fs::read_to_string("/proc/cpuinfo")?.contains("GenuineIntel");
    Ok(if intel { INTEL } else { AMD })
}
/// A measurement that takes longer has hung.
const LIMIT: Duration = Duration::from_secs(60);

/// How a program reaches a PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interface {
    /// The CPU's own PMU, by `perf_event_open(2)`.
    Trapped,
    /// The paravirtual PMU, by `perf_event_open(2)`.
    PerfCore,
    /// `/dev/vpmu`, with an engine.
    DeviceFile(u32),
}

impl Interface {
    fn name(self) -> &'static str {
        match self {
            Self::Trapped => "trapped",
            Self::PerfCore => "perf-core",
            Self::DeviceFile(ENGINE_EXIT) => "device-exit",
            Self::DeviceFile(ENGINE_BATCHED) => "device-batched",
            Self::DeviceFile(_) => "device",
        }
    }

    /// The vCPU's clock, disabled.
    fn clock(self, device: &Device) -> perf_event_attr {
        let mut attr = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
        if self == Self::Trapped {
            attr.type_ = bindings::PERF_TYPE_HARDWARE;
            attr.config = bindings::PERF_COUNT_HW_CPU_CYCLES.into();
        }
        attr
    }

    /// Opens an event of the calling thread.
    fn open(self, device: &Device, attr: &perf_event_attr) -> io::Result<Event> {
        match self {
            Self::Trapped | Self::PerfCore => kernels(attr, How::OWN),
            Self::DeviceFile(engine) => device.open_event(attr, How::OWN.by(engine)),
        }
    }
}

/// Numbers of exits and interrupts on [`CPU`] in a period of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// All exits except for the host's own interrupts.
    exits: u64,
    /// Exits for the host's own interrupts. They come from the host's timers and, if the guest samples, from overflows.
    host: u64,
    /// The exits that reached the VMM, whatever their reason.
    user: u64,
    mmio: u64,
    signal: u64,
    /// Accesses of trapped registers: the only exits to the VMM for the reason "other".
    register: u64,
    nmis: u64,
    /// Interrupts of the paravirtual PMU, on any CPU.
    lines: u64,
}

impl Seen {
    fn tell(self, subject: &str, times: u64) {
        let figures = [
            ("times", times),
            ("exits", self.exits),
            ("host", self.host),
            ("user", self.user),
            ("register", self.register),
            ("mmio", self.mmio),
            ("signal", self.signal),
            ("nmis", self.nmis),
            ("lines", self.lines),
        ];
        println!("{}", figures::line(subject, &figures));
    }
}

/// The counts at a moment.
#[derive(Debug, Clone, Copy)]
struct Moment {
    time: u64,
    /// Numbers of exits to the VMM: all exits, memory exits, signal exits and register exits.
    kept: [u64; 4],
    nmis: u64,
    lines: u64,
}

/// Watches [`CPU`]. Counts the exits that reach the VMM, and makes the host trace every exit.
struct Watch<'a> {
    device: &'a Device,
    trace: Traced,
    /// The metadata pages of the counting events. Reading a count from its page causes no exit.
    kept: [Pages; 4],
    _events: [Event; 4],
}

impl<'a> Watch<'a> {
    fn start(device: &'a Device) -> io::Result<Self> {
        let start = |config| device.start(&device.attr(KIND_EXITS, config), ON_CPU);
        let [user, mmio, signal, register] = [EXIT_USER, EXIT_MMIO, EXIT_SIGNAL, EXIT_OTHER];
        let events = [start(user)?, start(mmio)?, start(signal)?, start(register)?];
        let map = |event| Pages::map(event, 0, READ_WRITE);
        let [user, mmio, signal, register] = &events;
        let kept = [map(user)?, map(mmio)?, map(signal)?, map(register)?];
        let attr = aux_exits::trace(device, EXIT_ALL);
        let trace = Traced::open(device, attr, ON_CPU, AREA_PAGES, READ_WRITE)?;
        trace.event.enable(0)?;
        Ok(Self { device, trace, kept, _events: events })
    }

    /// Takes the counts, without an exit.
    fn now(&self) -> io::Result<Moment> {
        let interrupts = fs::read_to_string("/proc/interrupts")?;
        Ok(Moment {
            nmis: interrupts_of(&interrupts, "NMI:", Some(CPU)),
            lines: interrupts_of(&interrupts, "virtio", None),
            kept: self.kept.each_ref().map(|page| page.snapshot().count),
            time: self.device.time_of(cpu::tsc()),
        })
    }

    /// Returns the exits and interrupts between `before` and `after`.
    fn between(mut self, before: Moment, after: Moment) -> Result<Seen, Failure> {
        self.trace.event.disable(0)?;
        let (_, lost) = self.trace.read()?;
        ensure_eq!(lost, 0, "bytes that the trace lost");
        let exits = self.trace.take()?;
        let exits = exits.iter().filter(|exit| (before.time..after.time).contains(&exit.time));
        let (host, caused) = exits.partition::<Vec<&Exit>, _>(|exit| exit.reason == EXIT_OF_INTERRUPT);
        let [user, mmio, signal, register] = std::array::from_fn(|index| after.kept[index] - before.kept[index]);
        Ok(Seen {
            exits: caused.len() as u64,
            host: host.len() as u64,
            user,
            mmio,
            signal,
            register,
            nmis: after.nmis - before.nmis,
            lines: after.lines - before.lines,
        })
    }
}

/// Sums the interrupts in the lines of `table` that contain `name`, on one CPU or on all CPUs.
fn interrupts_of(table: &str, name: &str, cpu: Option<usize>) -> u64 {
    let lines = table.lines().filter(|line| line.contains(name));
    lines
        .map(|line| {
            let words = line.split_ascii_whitespace().skip(1);
            let counts = words.map_while(|word| word.parse::<u64>().ok());
            match cpu {
                Some(cpu) => counts.skip(cpu).take(1).sum::<u64>(),
                None => counts.sum(),
            }
        })
        .sum()
}

/// Opens and enables `count` events of the calling thread, each of which counts the vCPU's clock.
fn clocks(interface: Interface, device: &Device, count: u64) -> io::Result<Vec<Event>> {
    let start = |_| {
        let event = interface.open(device, &interface.clock(device))?;
        event.enable(0)?;
        Ok(event)
    };
    (0..count).map(start).collect()
}

/// Keeps this thread on [`CPU`]. The only other task that may run there is one with which this thread takes turns.
fn settle() -> io::Result<()> {
    cpu::pin(CPU)?;
    cpu::keep()
}

/// Returns the numbers of exits and interrupts during `rounds` switches to another task and back. Each of the two tasks
/// has `events` enabled clock events.
fn switches(interface: Interface, events: u64, rounds: u64) -> Result<Seen, Failure> {
    let device = Device::open()?;
    let watch = Watch::start(&device)?;
    let [mut one, mut other] = Turn::pair()?;
    let (before, after) = thread::scope(|scope| {
        let partner = scope.spawn(|| -> Shared<()> {
            settle()?;
            let _events = clocks(interface, &device, events)?;
            // The first round is not counted.
            for _ in 0..=rounds {
                other.wait()?;
                other.give()?;
            }
            // The task must not end before counting has ended.
            other.wait()?;
            Ok(())
        });
        let caller = scope.spawn(|| -> Shared<(Moment, Moment)> {
            settle()?;
            let _events = clocks(interface, &device, events)?;
            one.give()?;
            one.wait()?;
            let before = watch.now()?;
            for _ in 0..rounds {
                one.give()?;
                one.wait()?;
            }
            let after = watch.now()?;
            one.give()?;
            Ok((before, after))
        });
        let moments = caller.join().map_err(|_| "a task panicked")?;
        let ended = partner.join().map_err(|_| "a task panicked")?;
        ended.map_err(|error| error.to_string())?;
        moments.map_err(|error| error.to_string())
    })?;
    watch.between(before, after)
}

/// Returns the counts at one moment, and the number of bytes in all records up to then. Tries again if a record is
/// written between the readings.
fn between_records(watch: &Watch<'_>, pages: &Pages) -> io::Result<(Moment, u64)> {
    loop {
        let head = pages.head();
        let moment = watch.now()?;
        if pages.head() == head {
            return Ok((moment, head));
        }
    }
}

/// Waits for a first sample, and then for at least `count` more. Returns the numbers of exits and interrupts since the
/// first sample, the number of samples since then, and the time that they took.
fn samples(interface: Interface, count: u64) -> Result<(Seen, u64, Duration), Failure> {
    let device = Device::open()?;
    let watch = Watch::start(&device)?;
    settle()?;
    let attr = sampling(interface.clock(&device), PERIOD, bindings::PERF_SAMPLE_IP.into());
    let event = interface.open(&device, &waking(attr, WAKEUP))?;
    let mut pages = Pages::map(&event, RING_PAGES, READ_WRITE)?;
    let began = Instant::now();
    let wait = |bytes| -> Outcome {
        while pages.head() < bytes {
            ensure!(began.elapsed() < LIMIT, "only {} bytes of samples at the time limit", pages.head());
        }
        Ok(())
    };
    event.enable(0)?;
    wait(SAMPLE_BYTES)?;
    let (before, first) = between_records(&watch, &pages)?;
    let start = Instant::now();
    wait(first + count * SAMPLE_BYTES)?;
    let (after, last) = between_records(&watch, &pages)?;
    let took = start.elapsed();
    event.disable(0)?;
    let others = pages.take()?.into_iter().find(|it| it.kind != RECORD_SAMPLE);
    ensure_eq!(others, None, "type of a record that is not a sample");
    let taken = (last - first) / SAMPLE_BYTES;
    Ok((watch.between(before, after)?, taken, took))
}

/// Returns the numbers of exits and interrupts while a task runs for `time` without sampling.
fn idle(time: Duration) -> Result<Seen, Failure> {
    let device = Device::open()?;
    let watch = Watch::start(&device)?;
    settle()?;
    let before = watch.now()?;
    let began = Instant::now();
    while began.elapsed() < time {}
    let after = watch.now()?;
    watch.between(before, after)
}

/// Prevents the kernel from reducing the sampling rate when samples take a long time, as they do on an emulated
/// machine.
fn sample_as_asked() -> io::Result<()> {
    // While this is zero, the kernel refuses to change the rate.
    fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "25")?;
    fs::write("/proc/sys/kernel/perf_event_max_sample_rate", "100000")?;
    fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "0")
}

/// `guest-tests baseline SAMPLES ROUNDS`: prints all figures.
pub(crate) fn measure(count: &str, rounds: &str) -> ExitCode {
    let measured = count.parse().map_err(Failure::from).and_then(|count| {
        let rounds = rounds.parse()?;
        measure_all(count, rounds)
    });
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_all(count: u64, rounds: u64) -> Outcome {
    sample_as_asked()?;
    for interface in [
        Interface::Trapped,
        Interface::PerfCore,
        Interface::DeviceFile(ENGINE_EXIT),
        Interface::DeviceFile(ENGINE_BATCHED),
    ] {
        match apart(move || samples(interface, count)) {
            Ok((seen, taken, took)) => {
                seen.tell(&format!("sample:{}", interface.name()), taken);
                apart(move || idle(took))?.tell(&format!("idle:{}", interface.name()), taken);
            }
            // If the host or the driver does not support such samples, prints the error instead of figures.
            Err(error) => println!("no samples by {}: {error}", interface.name()),
        }
    }
    for interface in [Interface::Trapped, Interface::PerfCore, Interface::DeviceFile(ENGINE_ANY)] {
        for events in [0, 1, 6, 20] {
            let seen = switches(interface, events, rounds)?;
            seen.tell(&format!("switch:{}:{events}", interface.name()), 2 * rounds);
        }
    }
    Ok(())
}

/// Runs `act` on a new thread, so that the CPU and the priority that `act` sets do not affect the caller.
fn apart<T: Send + 'static>(act: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    let done = thread::spawn(|| act().map_err(|error| error.to_string()));
    Ok(done.join().map_err(|_| "a thread panicked")??)
}

#[apply(guest_test)]
fn cpu_pmu_reads_cost_one_exit() -> Outcome {
    const READS: u64 = 100;
    let device = Device::open()?;
    let watch = Watch::start(&device)?;
    settle()?;
    let clock = clocks(Interface::Trapped, &device, 1)?;
    let before = watch.now()?;
    for _ in 0..READS {
        clock[0].count()?;
    }
    let after = watch.now()?;
    let seen = watch.between(before, after)?;
    ensure_eq!((seen.user, seen.register), (READS, READS), "exits of {READS} readings");
    ensure!(seen.exits >= READS, "fewer exits than readings: {seen:?}");
    Ok(())
}

#[apply(guest_test)]
fn cpu_pmu_switches_cost_exits_by_the_event() -> Outcome {
    const ROUNDS: u64 = 20;
    let driver = driver()?;
    for (events, each) in [(1, driver.switch), (6, driver.switch_of_six)] {
        let seen = switches(Interface::Trapped, events, ROUNDS)?;
        ensure_eq!(
            (seen.user, seen.register),
            (2 * ROUNDS * each, 2 * ROUNDS * each),
            "exits of {} switches, {events} events",
            2 * ROUNDS
        );
        ensure!(seen.exits >= seen.user, "fewer exits than reached the VMM: {seen:?}");
    }
    // There are more events than counters, so every counter is in use. A switch then makes at least as many accesses as
    // with six events.
    let seen = switches(Interface::Trapped, 20, ROUNDS)?;
    ensure!(
        seen.register >= 2 * ROUNDS * driver.switch_of_six,
        "fewer register accesses than with six events: {seen:?}"
    );
    for interface in [Interface::PerfCore, Interface::DeviceFile(ENGINE_ANY)] {
        let seen = switches(interface, 6, ROUNDS)?;
        // One exit stops the events of one task, and another starts those of the other.
        ensure_eq!(
            (seen.user, seen.mmio),
            (4 * ROUNDS, 4 * ROUNDS),
            "exits of {} switches by {}",
            2 * ROUNDS,
            interface.name()
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn cpu_pmu_samples_cost_an_nmi_and_exits() -> Outcome {
    const SAMPLES: u64 = 20;
    sample_as_asked()?;
    let (seen, taken, _) = samples(Interface::Trapped, SAMPLES)?;
    ensure_eq!(
        (seen.nmis, seen.signal, seen.register),
        (taken, taken, taken * driver()?.sample),
        "NMIs, signals and register accesses of {taken} samples"
    );
    Ok(())
}

#[apply(guest_test)]
fn vpmu_samples_return_once_or_never() -> Outcome {
    const SAMPLES: u64 = 40;
    for (engine, signals) in [(ENGINE_EXIT, 1), (ENGINE_BATCHED, 0)] {
        let interface = Interface::DeviceFile(engine);
        let (seen, taken, _) = samples(interface, SAMPLES)?;
        let name = interface.name();
        ensure_eq!(seen.signal, signals * taken, "signals of {taken} samples, {name}");
        // The driver reads an interrupt's cause and acknowledges it.
        ensure_eq!(
            (seen.user, seen.nmis),
            (seen.signal + 2 * seen.lines, 0),
            "exits to the VMM and NMIs, {name}: {seen:?}"
        );
        let wakeups = taken / u64::from(WAKEUP) + 1;
        ensure!(seen.lines <= wakeups, "more interrupts than {wakeups} wakeups, {name}: {seen:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn perf_runs_on_the_cpu_pmu() -> Outcome {
    let rows = stat(&["-e", "cycles", "--", "guest-tests", "mark", "1", "100"])?;
    ensure!(row_of(&rows, "cycles")?.value.parse::<u64>()? > 0, "perf stat counts no cycles");
    record("cycles.data", &["-e", "cycles", "-c", "5000000", "--", "guest-tests", "mark", "1", "1000"])?;
    let samples = script("cycles.data", "comm,event,ip")?;
    ensure!(samples.iter().any(|line| line.contains("cycles")), "perf script lists no samples: {samples:?}");
    Ok(())
}
