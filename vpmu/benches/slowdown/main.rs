//! Slowdown of a guest that samples itself, for several numbers of events and for both engines.
//!
//! A minimal VMM embeds the device and runs a vCPU on this machine's `/dev/kvm`. The vCPU runs a loop in ring 3,
//! while 1, 6 or 10 events at once sample the vCPU's clock, each at 1 kHz. Short slices with and without sampling
//! alternate in one run, and each slice with sampling is compared with its two neighbours. Separate runs would not be
//! comparable: on a machine with other users, speed drifts from run to run. The speed of a slice is the number of
//! rounds of the loop, divided by the CPU time that the thread used. This time includes the interrupts of sampling and
//! excludes other programs.
//!
//! The baseline is a thread that loops without a guest, while the same number of host events sample its clock. The
//! host events are opened and started as in any program, and nobody reads their records.

mod driver;
mod host_clock;

use std::fs;
use std::hint::black_box;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use vmm_sys_util::signal::{Killable, SIGRTMIN};
use vpmu::abi::{ENGINE_BATCHED, ENGINE_EXIT};
use vpmu::host::PerfSource;
use vpmu::{ExitReason, Machine, Settings, Source, VcpuSession, Vpmu};
use vpmu_testkit::{Exited, Guest, ignore_signals, selects};

use driver::Clocks;
use host_clock::HostClock;

/// `again: inc qword [rdi]; jmp again`, a loop that causes no exits.
const LOOP: [u8; 5] = [0x48, 0xff, 0x07, 0xeb, 0xfb];
const EVENTS: [u64; 3] = [1, 6, 10];
const SLICE: Duration = Duration::from_millis(50);
/// Number of slices with sampling in a run. Each is between two slices without sampling.
const SLICES: usize = 8;
/// Number of runs of each kind: host events, batched engine and exit engine. Runs of the three kinds alternate,
/// because the speed of a machine with other users drifts.
const RUNS: usize = 4;
/// The aim for the batched engine: its slowdown is at most this many times the slowdown by the host's own events.
const LIMIT: f64 = 1.2;
const DRAIN_EVERY: Duration = Duration::from_millis(10);
/// Bytes of a sample with IP, TID and TIME.
const RECORD: u64 = 32;

/// State shared by the threads of one benchmark.
#[derive(Debug, Default)]
struct Shared {
    draining: AtomicBool,
    /// Number of slices that the vCPU's thread has started.
    slices: AtomicU64,
    over: AtomicBool,
}

#[derive(Debug)]
struct Host(Arc<Shared>);

impl Machine for Host {
    fn exits(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn halts(&self, _vcpu: u32) -> Option<u64> {
        None
    }

    fn reports_guest_ips(&self) -> bool {
        true
    }

    fn draining(&self, wanted: bool) {
        self.0.draining.store(wanted, Ordering::Relaxed);
    }
}

/// The results of one slice.
#[derive(Debug, Clone, Copy, Default)]
struct Slice {
    /// Rounds per nanosecond of CPU time.
    speed: f64,
    /// How many times the run call returned before the slice ended.
    returns: u64,
    samples: u64,
}

/// The slices of a run. Slices with and without sampling alternate. The first and the last slice are without sampling.
#[derive(Debug)]
struct Run {
    without: Vec<Slice>,
    with: Vec<Slice>,
}

impl Run {
    /// Measures a run. `one` measures a slice, with sampling if its argument is true.
    fn of(mut one: impl FnMut(bool) -> io::Result<Slice>) -> io::Result<Self> {
        let mut run = Self { without: vec![one(false)?], with: Vec::new() };
        for _ in 0..SLICES {
            run.with.push(one(true)?);
            run.without.push(one(false)?);
        }
        Ok(run)
    }

    /// Slowdown of each slice with sampling, compared with its neighbours, in percent.
    fn slowdowns(&self) -> impl Iterator<Item = f64> {
        let pairs = self.with.iter().zip(self.without.windows(2));
        pairs.map(|(with, without)| {
            let beside = (without[0].speed + without[1].speed) / 2.0;
            100.0 * (1.0 - with.speed / beside)
        })
    }
}

/// Runs of one kind.
#[derive(Debug)]
struct Runs(Vec<Run>);

impl Runs {
    /// Quartiles of the slowdowns, in percent.
    fn quartiles(&self) -> [f64; 3] {
        let mut all: Vec<f64> = self.0.iter().flat_map(Run::slowdowns).collect();
        all.sort_by(f64::total_cmp);
        [1, 2, 3].map(|quarter| all[(all.len() - 1) * quarter / 4])
    }

    fn median(&self) -> f64 {
        self.quartiles()[1]
    }

    fn print(&self, what: &str, events: u64) {
        let [low, median, high] = self.quartiles();
        let slices = || self.0.iter().flat_map(|run| &run.with);
        let samples: u64 = slices().map(|slice| slice.samples).sum();
        let returns: u64 = slices().map(|slice| slice.returns).sum();
        print!("{what:<8} {events:>2} x 1 kHz: {median:>6.2} % slower (quartiles {low:.2} to {high:.2})");
        if samples > 0 {
            print!(", {samples} samples, {:.3} returns from the run call per sample", returns as f64 / samples as f64);
        }
        println!();
    }
}

fn main() -> ExitCode {
    if !selects("slowdown") {
        return ExitCode::SUCCESS;
    }
    if !Path::new("/dev/kvm").exists() {
        println!("slowdown: not measured, because this machine has no /dev/kvm");
        return ExitCode::SUCCESS;
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slowdown: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> io::Result<()> {
    ignore_signals();
    let module = ["kvm_intel", "kvm_amd", "kvm_pvm"]
        .into_iter()
        .find(|name| Path::new("/sys/module").join(name).exists())
        .unwrap_or("of unknown kind");
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("", |name| name.trim_start_matches([' ', '\t', ':']));
    println!("slowdown of a ring-3 loop on /dev/kvm ({module}), {model}");
    for events in EVENTS {
        let [mut host, mut batched, mut exit] = [const { Runs(Vec::new()) }; 3];
        for _ in 0..RUNS {
            host.0.push(host_alone(events)?);
            batched.0.push(guest(events, ENGINE_BATCHED)?);
            exit.0.push(guest(events, ENGINE_EXIT)?);
        }
        host.print("host", events);
        batched.print("batched", events);
        exit.print("exit", events);
        println!(
            "         the batched engine costs {:.2} times as much as the host's own events (aim: at most \
             {LIMIT})",
            batched.median() / host.median(),
        );
    }
    println!("host: the same events on a thread without a guest; nobody reads their records");
    Ok(())
}

/// Measures a guest. This thread ends the slices and drains the device, as a VMM's event loop does.
fn guest(events: u64, engine: u32) -> io::Result<Run> {
    let kvm = Kvm::new().map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
    let shared = Arc::new(Shared::default());
    let settings = Settings::new(1, 1_000_000);
    let source = PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?;
    let host = Arc::new(Host(Arc::clone(&shared)));
    let vpmu = Vpmu::new(settings, host, Box::new(source)).map_err(io::Error::other)?;
    let vpmu = Arc::new(vpmu);
    let vcpu = {
        let (vpmu, shared) = (Arc::clone(&vpmu), Arc::clone(&shared));
        thread::spawn(move || {
            let ran = run_slices(&kvm, &vpmu, &shared, events, engine);
            shared.over.store(true, Ordering::Release);
            ran
        })
    };
    let (mut slice, mut until) = (0, Instant::now() + SLICE);
    while !shared.over.load(Ordering::Acquire) {
        thread::sleep(DRAIN_EVERY.min(until.saturating_duration_since(Instant::now())));
        if shared.draining.load(Ordering::Relaxed) {
            vpmu.drain();
        }
        let begun = shared.slices.load(Ordering::Acquire);
        if begun != slice {
            (slice, until) = (begun, Instant::now() + SLICE);
        } else if Instant::now() >= until {
            // A signal that arrives outside the run call has no effect, so send it every millisecond until the slice
            // has ended. Ignore errors: the thread may have ended.
            let _ = vcpu.kill(SIGRTMIN());
            until = Instant::now() + Duration::from_millis(1);
        }
    }
    vcpu.join().map_err(|_| io::Error::other("the vCPU's thread panicked"))?
}

/// Measures a run on the vCPU's thread. This thread acts as the guest's driver and as the VMM.
fn run_slices(kvm: &Kvm, vpmu: &Arc<Vpmu>, shared: &Shared, events: u64, engine: u32) -> io::Result<Run> {
    let clock = PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?;
    let mut guest = Guest::new(kvm, &LOOP)?;
    let mut session = vpmu.attach(0, 0).map_err(io::Error::other)?;
    let mut clocks = Clocks::open(vpmu, &guest.memory, events, engine)?;
    let run = Run::of(|sample| {
        if sample {
            clocks.turn(&mut session, true)?;
        }
        let before = (guest.count(), clock.thread_time().unwrap_or(0));
        let returns = run_slice(&mut session, shared, &mut guest)?;
        let rounds = guest.count() - before.0;
        let spent = clock.thread_time().unwrap_or(0) - before.1;
        if sample {
            clocks.turn(&mut session, false)?;
        }
        Ok(Slice { speed: rounds as f64 / spent as f64, returns, samples: clocks.read_rings()? / RECORD })
    })?;
    clocks.close()?;
    Ok(run)
}

/// Runs the guest for a slice. Returns how many times the run call returned before the slice ended.
fn run_slice(session: &mut VcpuSession, shared: &Shared, guest: &mut Guest) -> io::Result<u64> {
    shared.slices.fetch_add(1, Ordering::Release);
    let end = Instant::now() + SLICE;
    let mut returns = 0;
    loop {
        session.enter();
        match guest.vcpu.run() {
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(io::Error::from_raw_os_error(error.errno())),
            Ok(exit) => {
                return Err(io::Error::other(format!("unexpected exit of the guest: {exit:?}")));
            }
        }
        session.leave(ExitReason::Signal, &mut Exited(&guest.vcpu));
        if Instant::now() >= end {
            return Ok(returns);
        }
        returns += 1;
    }
}

/// Measures a run without a guest. This thread loops, while `events` host events sample its clock.
fn host_alone(events: u64) -> io::Result<Run> {
    let source = PerfSource::new(SIGRTMIN()).map_err(io::Error::other)?;
    let clocks = (0..events).map(|_| HostClock::open()).collect::<io::Result<Vec<_>>>()?;
    Run::of(|sample| {
        if sample {
            clocks.iter().try_for_each(HostClock::start)?;
        }
        let before = source.thread_time().unwrap_or(0);
        let end = Instant::now() + SLICE;
        let mut rounds = 0_u64;
        while Instant::now() < end {
            for round in 0..1000_u64 {
                black_box(round);
            }
            rounds += 1000;
        }
        let spent = source.thread_time().unwrap_or(0) - before;
        if sample {
            clocks.iter().try_for_each(HostClock::stop)?;
        }
        Ok(Slice { speed: rounds as f64 / spent as f64, ..Slice::default() })
    })
}
