//! Measures what samples and task switches cost a guest, in exits and interrupts. The guest has either KVM's own PMU, or
//! only the paravirtual PMU, which is used both through perf core and through `/dev/vpmu`. All events are the CPU's.

use std::fs;
use std::io;
use std::path::Path;
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
    Device, ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, EXIT_ALL, EXIT_MMIO, EXIT_SIGNAL, EXIT_USER, Event, How,
    KIND_EXITS, kernels, sampling, waking,
};
use crate::switches::Turn;
use crate::traced::Traced;
use crate::{Outcome, aux_exits, cpu, loads};

const GROUP: &str = "baseline";

type Failure = Box<dyn std::error::Error>;
type Shared<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The guest's only CPU.
const CPU: usize = 0;
const ON_CPU: How<'_> = How::on_cpu(0);
/// Sampling period in cycles: 1 ms of the exact lab.
const PERIOD: u64 = 1_000_000;
/// Records for each wakeup.
const WAKEUP: u32 = 16;
/// `PERF_RECORD_SAMPLE`.
const RECORD_SAMPLE: u32 = 9;
const RING_PAGES: usize = 8;
/// Size of a sample in bytes. It has a header and an address.
const SAMPLE_BYTES: u64 = 16;
/// Number of pages of the area for the trace of every exit.
const AREA_PAGES: usize = 256;
/// SVM's exit codes for an interrupt and for an NMI that are for the host. The host's counters raise NMIs.
const EXIT_OF_INTERRUPT: u16 = 0x60;
const EXIT_OF_NMI: u16 = 0x61;
/// Number of events in a task in the measurements of switches.
const EVENTS: [usize; 3] = [1, 6, 20];

/// The least numbers of exits that KVM's own PMU causes for a switch between tasks with [`EVENTS`].
const KVMS_SWITCHES: [u64; 3] = [9, 49, 49];

/// A measurement that takes longer has hung.
const LIMIT: Duration = Duration::from_secs(60);

/// How a program reaches a PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interface {
    /// `perf_event_open(2)`: KVM's own PMU if the guest has it, else the paravirtual PMU.
    Kernel,
    /// `/dev/vpmu`, with an engine.
    DeviceFile(u32),
}

/// Whether the guest has KVM's own PMU.
pub(crate) fn has_kvms_pmu() -> bool {
    Path::new("/sys/bus/event_source/devices/cpu").exists()
}

impl Interface {
    /// The interfaces to sample with. With KVM's own PMU, only that PMU is measured.
    fn samplers() -> &'static [Self] {
        const ALL: [Interface; 3] =
            [Interface::Kernel, Interface::DeviceFile(ENGINE_EXIT), Interface::DeviceFile(ENGINE_BATCHED)];
        if has_kvms_pmu() { &ALL[..1] } else { &ALL }
    }

    /// The interfaces to count with.
    fn counters() -> &'static [Self] {
        const ALL: [Interface; 2] = [Interface::Kernel, Interface::DeviceFile(ENGINE_ANY)];
        if has_kvms_pmu() { &ALL[..1] } else { &ALL }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Kernel if has_kvms_pmu() => "kvm",
            Self::Kernel => "perf-core",
            Self::DeviceFile(ENGINE_EXIT) => "device-exit",
            Self::DeviceFile(ENGINE_BATCHED) => "device-batched",
            Self::DeviceFile(_) => "device",
        }
    }

    /// The attributes of the `index`th of at least 20 different events of the CPU, disabled. Equal events would share a
    /// counter of the paravirtual PMU. The first event is cycles in both modes.
    fn attr(self, device: &Device, index: usize) -> perf_event_attr {
        const KINDS: [(u32, u32); 7] = [
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_CPU_CYCLES),
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_INSTRUCTIONS),
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_BRANCH_INSTRUCTIONS),
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_BRANCH_MISSES),
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_STALLED_CYCLES_FRONTEND),
            (vpmu_abi::KIND_HARDWARE, bindings::PERF_COUNT_HW_STALLED_CYCLES_BACKEND),
            // Accesses of the branch predictor.
            (vpmu_abi::KIND_HW_CACHE, bindings::PERF_COUNT_HW_CACHE_BPU),
        ];
        let (kind, config) = KINDS[index % KINDS.len()];
        let mut attr = device.attr(kind.into(), config.into());
        if self == Self::Kernel {
            attr.type_ = match kind {
                vpmu_abi::KIND_HARDWARE => bindings::PERF_TYPE_HARDWARE,
                _ => bindings::PERF_TYPE_HW_CACHE,
            };
            attr.config = config.into();
        }
        let mode = index / KINDS.len();
        attr.set_exclude_kernel((mode == 1).into());
        attr.set_exclude_user((mode == 2).into());
        attr
    }

    /// Opens an event of the calling thread.
    fn open(self, device: &Device, attr: &perf_event_attr) -> io::Result<Event> {
        match self {
            Self::Kernel => kernels(attr, How::OWN),
            Self::DeviceFile(engine) => device.open_event(attr, How::OWN.by(engine)),
        }
    }
}

/// Numbers of exits and interrupts on [`CPU`] in a period of time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    /// All exits except for the host's own interrupts.
    exits: u64,
    /// Exits for the host's own interrupts. They come from the host's timers.
    host: u64,
    /// The exits for the host's own NMIs, which come from overflows of the host's counters.
    overflows: u64,
    /// The exits that reached the VMM, whatever their reason.
    user: u64,
    mmio: u64,
    signal: u64,
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
            ("overflows", self.overflows),
            ("user", self.user),
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
    /// Numbers of exits to the VMM: all exits, memory exits and signal exits.
    kept: [u64; 3],
    nmis: u64,
    lines: u64,
}

/// Watches [`CPU`]. Counts the exits that reach the VMM, and makes the host trace every exit.
struct Watch<'a> {
    device: &'a Device,
    trace: Traced,
    /// The metadata pages of the counting events. Reading a count from its page causes no exit.
    kept: [Pages; 3],
    _events: [Event; 3],
}

impl<'a> Watch<'a> {
    fn start(device: &'a Device) -> io::Result<Self> {
        let start = |config| device.start(&device.attr(KIND_EXITS, config), ON_CPU);
        let events = [start(EXIT_USER)?, start(EXIT_MMIO)?, start(EXIT_SIGNAL)?];
        let map = |event| Pages::map(event, 0, READ_WRITE);
        let [user, mmio, signal] = &events;
        let kept = [map(user)?, map(mmio)?, map(signal)?];
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
        let overflows = caused.iter().filter(|exit| exit.reason == EXIT_OF_NMI).count();
        let [user, mmio, signal] = std::array::from_fn(|index| after.kept[index] - before.kept[index]);
        Ok(Seen {
            exits: caused.len() as u64,
            host: host.len() as u64,
            overflows: overflows as u64,
            user,
            mmio,
            signal,
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

/// Opens and enables `count` different events of the calling thread.
fn counting(interface: Interface, device: &Device, count: usize) -> io::Result<Vec<Event>> {
    let start = |index| {
        let event = interface.open(device, &interface.attr(device, index))?;
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
/// has `events` enabled events.
fn switches(interface: Interface, events: usize, rounds: u64) -> Result<Seen, Failure> {
    let device = Device::open()?;
    let watch = Watch::start(&device)?;
    let [mut one, mut other] = Turn::pair()?;
    let (before, after) = thread::scope(|scope| {
        let partner = scope.spawn(|| -> Shared<()> {
            settle()?;
            let _events = counting(interface, &device, events)?;
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
            let _events = counting(interface, &device, events)?;
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
    let attr = sampling(interface.attr(&device, 0), PERIOD, bindings::PERF_SAMPLE_IP.into());
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
pub(crate) fn sample_as_asked() -> io::Result<()> {
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
    for &interface in Interface::samplers() {
        let (seen, idle, taken) = beyond_idle(interface, count)?;
        seen.tell(&format!("sample:{}", interface.name()), taken);
        idle.tell(&format!("idle:{}", interface.name()), taken);
    }
    for &interface in Interface::counters() {
        for events in [0].iter().chain(&EVENTS) {
            let seen = switches(interface, *events, rounds)?;
            seen.tell(&format!("switch:{}:{events}", interface.name()), 2 * rounds);
        }
    }
    loads::measure()
}

/// Returns the exits and interrupts of at least `count` samples, those of the same time without samples, and the number
/// of samples.
fn beyond_idle(interface: Interface, count: u64) -> Result<(Seen, Seen, u64), Failure> {
    let (seen, taken, took) = apart(move || samples(interface, count))?;
    Ok((seen, apart(move || idle(took))?, taken))
}

/// Runs `act` on a new thread, so that the CPU and the priority that `act` sets do not affect the caller.
fn apart<T: Send + 'static>(act: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    let done = thread::spawn(|| act().map_err(|error| error.to_string()));
    Ok(done.join().map_err(|_| "a thread panicked")??)
}

#[apply(guest_test)]
fn switches_cost_an_exit_each_way_with_any_number_of_events() -> Outcome {
    const ROUNDS: u64 = 20;
    for &interface in Interface::counters() {
        for events in EVENTS {
            let seen = switches(interface, events, ROUNDS)?;
            // One exit stops the events of one task, and another starts those of the other.
            ensure_eq!(
                (seen.user, seen.mmio),
                (4 * ROUNDS, 4 * ROUNDS),
                "exits of {} switches by {}, {events} events",
                2 * ROUNDS,
                interface.name()
            );
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn samples_cost_little_more_than_the_overflows_of_the_host() -> Outcome {
    const SAMPLES: u64 = 200;
    sample_as_asked()?;
    for &interface in Interface::samplers() {
        let (seen, idle, taken) = beyond_idle(interface, SAMPLES)?;
        let name = interface.name();
        // Only with the exit engine is a sample in the ring when the guest continues. Else, the last ones may be missing.
        let late = if interface == Interface::DeviceFile(ENGINE_EXIT) { 0 } else { u64::from(WAKEUP) };
        ensure!(seen.overflows.abs_diff(taken) <= late, "overflows of {taken} samples, {name}: {seen:?}");
        ensure_eq!(seen.nmis, 0, "NMIs in the guest, {name}");
        let (exits, idle) = (seen.exits + seen.host, idle.exits + idle.host);
        ensure!(exits <= idle + taken * 7 / 5, "{exits} exits, {idle} when idle, {taken} samples by {name}");
    }
    Ok(())
}

#[apply(guest_test)]
fn samples_return_once_or_never() -> Outcome {
    const SAMPLES: u64 = 40;
    for (engine, signals) in [(ENGINE_EXIT, 1), (ENGINE_BATCHED, 0)] {
        let interface = Interface::DeviceFile(engine);
        let (seen, taken, _) = samples(interface, SAMPLES)?;
        let name = interface.name();
        ensure_eq!(seen.signal, signals * taken, "signals of {taken} samples, {name}");
        // The driver reads an interrupt's cause and acknowledges it.
        ensure_eq!(seen.user, seen.signal + 2 * seen.lines, "exits to the VMM, {name}: {seen:?}");
        let wakeups = taken / u64::from(WAKEUP) + 1;
        ensure!(seen.lines <= wakeups, "more interrupts than {wakeups} wakeups, {name}: {seen:?}");
    }
    Ok(())
}

#[apply(guest_test)]
#[group = "baseline-kvm"]
fn switches_cost_exits_for_each_event() -> Outcome {
    const ROUNDS: u64 = 20;
    let idle = switches(Interface::Kernel, 0, ROUNDS)?;
    for (events, each) in EVENTS.into_iter().zip(KVMS_SWITCHES) {
        let seen = switches(Interface::Kernel, events, ROUNDS)?;
        let exits = seen.exits - idle.exits;
        ensure!(exits >= 2 * ROUNDS * each, "{exits} exits of {} switches, {events} events", 2 * ROUNDS);
        ensure_eq!(seen.user, 0, "exits to the VMM, {events} events");
    }
    Ok(())
}

#[apply(guest_test)]
#[group = "baseline-kvm"]
fn samples_cost_an_nmi_and_at_least_four_exits() -> Outcome {
    const SAMPLES: u64 = 200;
    sample_as_asked()?;
    let (seen, idle, taken) = beyond_idle(Interface::Kernel, SAMPLES)?;
    ensure_eq!((seen.overflows, seen.nmis), (taken, taken), "overflows of {taken} samples and the guest's NMIs");
    let (exits, idle) = (seen.exits + seen.host, idle.exits + idle.host);
    ensure!(exits >= idle + 4 * taken, "{exits} exits, {idle} when idle, {taken} samples");
    Ok(())
}

#[apply(guest_test)]
#[group = "baseline-kvm"]
fn perf_runs_on_kvms_pmu() -> Outcome {
    let run = ["workload", "loop", "10000000"];
    let rows = stat(&[&["-e", "instructions:u"], &run[..]].concat())?;
    ensure!(row_of(&rows, "instructions:u")?.value.parse::<u64>()? >= 20_000_000, "too few instructions: {rows:?}");
    record("cycles.data", &[&["-e", "cycles:u", "-c", "1000000"], &run[..]].concat())?;
    let samples = script("cycles.data", "ip,sym")?;
    let inside = samples.iter().filter(|line| line.ends_with("exact_loop")).count();
    ensure!((19..=20).contains(&inside), "{inside} samples of 20 periods in the loop: {samples:?}");
    Ok(())
}
