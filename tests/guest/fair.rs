//! Limits on what a program without privileges takes from others by its events: CPU time, interrupts on idle CPUs,
//! and time during which a CPU handles no interrupts. Each test alternates the attack with the same program without
//! it, and compares the two.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, CALLCHAIN, IP, STACK_USER, TID, TIME};
use crate::os::{Forked, SharedWords};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Event, How, KIND_SOFTWARE, MARK_ANY, kernels, sampling, silent, waking};
use crate::{Fallible, Outcome, cpu, interrupt, kernel_log, os};

const GROUP: &str = "fair";

guest_tests! {
    samples_of_nobodys_event_leave_idle_cpus_alone => idle_cpus_are_left_alone(1, false);
    samples_of_an_inherited_event_leave_idle_cpus_alone => idle_cpus_are_left_alone(1, true);
    samples_of_many_inherited_events_leave_idle_cpus_alone => idle_cpus_are_left_alone(64, true);
}

const VALUE: u64 = 7;
/// `kernel.perf_event_paranoid` at which the user nobody can open events of its own tasks.
const OWN_TASKS: i32 = 1;
const ATTACKER: usize = 0;
/// The victim's CPU, which also takes the device's interrupts.
const VICTIM: usize = 1;
/// The CPU of a process that does the same as the victim.
const PEER: usize = 2;
/// CPUs on which no task runs.
const IDLE: [usize; 2] = [2, 3];
/// How long the attack, and the program without it, each run at a time.
const SLICE: Duration = Duration::from_millis(100);
/// The number of such slices.
const SLICES: usize = 24;
/// How long the samples go on while idle CPUs are watched.
const WATCH: Duration = Duration::from_secs(1);
/// More events than a program without privileges may open.
const MANY: usize = 1000;
/// The part of its loops that a victim must keep, in percent. On a quiet machine it keeps 90; on a busy one, chance moves
/// this figure by tens. Without limits, the events would leave it next to nothing.
const KEPT: u128 = 50;
/// The longest time for which a victim may miss its CPU.
const LONGEST_GAP: Duration = Duration::from_millis(30);
/// The most function call interrupts that an idle CPU may get during an attack. A few are the kernel's own.
const FEW_CALLS: u64 = 20;
/// Many events keep the softirq thread of the attacker's CPU busy. While a CPU has several tasks to run, the kernel's load
/// balancer calls idle CPUs, at most once for this many marks.
const MARKS_A_CALL: u64 = 8;

/// The words that the victim and the attacker share.
const PHASE: usize = 0;
/// Set to one plus the number of events when the attacker has begun, or to [`FAILED`].
const OPENED: usize = 1;
/// The slice that runs: its number, counted from zero.
const NOW: usize = 2;
/// Two words: marks without the attack and with it.
const MARKS: usize = 3;
/// One word for each idle CPU: function calls.
const CALLS: usize = 5;
/// Two words for each slice, without the attack and with it: the victim's loops a second. Then the same words of its peer.
const RATES: [usize; 2] = [8, 8 + 2 * SLICES];
/// Two words for each slice: the victim's longest gap.
const GAPS: usize = RATES[1] + 2 * SLICES;

// Values of the word PHASE.
const WAIT: u64 = 0;
const WITHOUT: u64 = 1;
const WITH: u64 = 2;
const END: u64 = 3;
const FAILED: u64 = u64::MAX;

/// A process that uses its CPU all the time. At the end of each slice, passes the slice's place among the words, the loops
/// a second and the longest gap to `note`.
fn run_on(cpu: usize, shared: &SharedWords, note: impl Fn(usize, u64, u64)) -> io::Result<()> {
    cpu::pin(cpu)?;
    loop {
        let phase = shared.load(PHASE);
        match phase {
            WITHOUT | WITH => {}
            END => return Ok(()),
            _ => continue,
        }
        let word = 2 * usize::try_from(shared.load(NOW)).map_err(io::Error::other)? + usize::from(phase == WITH);
        let begin = Instant::now();
        let (mut last, mut loops, mut worst) = (begin, 0_u64, Duration::ZERO);
        while shared.load(PHASE) == phase {
            let now = Instant::now();
            worst = worst.max(now - last);
            last = now;
            loops += 1;
        }
        let rate = loops * 1_000_000 / (nanoseconds(begin.elapsed()) / 1000).max(1);
        note(word, rate, nanoseconds(worst));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The attacker: a program of the user nobody that places marks. In the phase [`WITH`], its events are enabled.
fn attacker(shared: &SharedWords, open: impl FnOnce(&Device) -> Fallible<(Vec<Event>, Pages)>) -> Outcome {
    cpu::pin(ATTACKER)?;
    os::allow_descriptors(2000)?;
    os::become_nobody()?;
    os::set_dumpable(true)?;
    let device = Device::open()?;
    let (events, mut ring) = open(&device)?;
    shared.store(OPENED, 1 + events.len() as u64);
    let leader = events.first().ok_or("no events")?;
    for slice in 0..SLICES {
        shared.store(NOW, slice as u64);
        for phase in [WITHOUT, WITH] {
            if phase == WITH {
                leader.enable(0)?;
            }
            shared.store(PHASE, phase);
            let begin = Instant::now();
            while begin.elapsed() < SLICE {
                device.mark(VALUE)?;
                shared.add(MARKS + usize::from(phase == WITH), 1);
                ring.skip();
            }
            shared.store(PHASE, WAIT);
            if phase == WITH {
                leader.disable(0)?;
            }
        }
    }
    shared.store(PHASE, END);
    Ok(())
}

/// Runs the attack beside the victim, and checks what the victim keeps: [`KEPT`] percent of its loops, and no gap that is
/// longer than [`LONGEST_GAP`]. The victim's loops are counted in those of its peer: what else a shared machine does takes
/// about the same part from both.
fn victim_keeps(
    least_events: u64,
    limits_gaps: bool,
    open: impl FnOnce(&Device) -> Fallible<(Vec<Event>, Pages)>,
) -> Outcome {
    os::set_paranoid(OWN_TASKS)?;
    interrupt::move_to(VICTIM)?;
    let shared = SharedWords::map()?;
    let victim = |word, rate, gap| {
        shared.store(RATES[0] + word, rate);
        shared.store(GAPS + word, gap);
    };
    let peer = |word, rate, _| shared.store(RATES[1] + word, rate);
    let mut victim = Forked::start(|| i32::from(run_on(VICTIM, &shared, victim).is_err()))?;
    let mut peer = Forked::start(|| i32::from(run_on(PEER, &shared, peer).is_err()))?;
    let mut attacker = Forked::start(|| {
        let done = attacker(&shared, open);
        if let Err(error) = &done {
            eprintln!("the attacker: {error}");
            shared.store(OPENED, FAILED);
            shared.store(PHASE, END);
        }
        i32::from(done.is_err())
    })?;
    let codes = [attacker.wait()?, victim.wait()?, peer.wait()?];
    ensure_eq!(codes, [0, 0, 0], "exit codes of the attacker, the victim and its peer");
    let slices = |from: usize, which: usize| (0..SLICES).map(move |slice| from + 2 * slice + which);
    let of = |from: usize| [0, 1].map(|which| slices(from, which).map(|word| shared.load(word)).collect::<Vec<_>>());
    let ([rates, of_peer], gaps) = (RATES.map(of), of(GAPS));
    let marks = [MARKS, MARKS + 1].map(|word| shared.load(word));
    let events = shared.load(OPENED) - 1;
    let figures = format!(
        "{events} events; without and with them enabled: {marks:?} marks, the victim's loops a second in each slice \
         {rates:?}, its peer's {of_peer:?}, the victim's longest gaps in ns {gaps:?}"
    );
    println!("{figures}");
    ensure!(events >= least_events, "too few events: {figures}");
    let totals = |rates: [Vec<u64>; 2]| rates.map(|slices| u128::from(slices.into_iter().sum::<u64>()));
    let ([without, with], [peer_without, peer_with]) = (totals(rates), totals(of_peer));
    // A process may miss a slice, which is then zero.
    let ran = [without, with, peer_without, peer_with].iter().all(|&total| total > 0);
    ensure!(marks[1] > 0 && ran, "nothing ran: {figures}");
    let kept = with * peer_without * 100 / (without * peer_with);
    println!("the victim keeps {kept} %");
    ensure!(kept >= KEPT, "the victim keeps {kept} %, not {KEPT} %: {figures}");
    let gap = gaps[1].iter().min().copied().unwrap_or(u64::MAX);
    ensure!(
        !limits_gaps || gap <= nanoseconds(LONGEST_GAP),
        "the victim misses its CPU for {gap} ns in each slice: {figures}"
    );
    Ok(())
}

/// Opens at most `count` events of this task that sample each mark to one ring, and wake its readers each time. They are
/// one group, which starts with its leader: when one event of a task is enabled, perf core schedules all of them anew.
fn to_one_ring(device: &Device, count: usize) -> Fallible<(Vec<Event>, Pages)> {
    let attr = waking(device.marks(MARK_ANY, 1, IP), 1);
    let first = device.open_event(&attr, How::OWN)?;
    let ring = Pages::map(&first, 128, READ_WRITE)?;
    let mut events = vec![first];
    let mut member = attr;
    member.set_disabled(0);
    while events.len() < count {
        let event = match device.open_event(&member, How::OWN.led_by(events[0].as_fd())) {
            // The limit for programs without privileges.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => break,
            event => event?,
        };
        event.output_to(events[0].ring())?;
        events.push(event);
    }
    Ok((events, ring))
}

#[apply(guest_test)]
fn wakeups_of_nobodys_events_leave_other_cpus_their_time() -> Outcome {
    victim_keeps(500, true, |device| to_one_ring(device, MANY))?;
    kernel_log::ensure_no_fault()
}

/// Each signal goes to all processes of a group, most of which sleep.
#[apply(guest_test)]
fn signals_of_nobodys_events_leave_other_cpus_their_time() -> Outcome {
    const EVENTS: usize = 64;
    const SLEEPERS: usize = 400;
    os::ignore_sigio()?;
    let mut group = Vec::new();
    // The sleepers are in a process group of their own, which the first of them leads.
    for _ in 0..SLEEPERS {
        let leader = group.first().map_or(0, |first: &os::Sleeper| first.pid);
        group.push(os::Sleeper::start(|| {
            os::join_group(leader)?;
            os::become_nobody()
        })?);
    }
    let leader = group[0].pid;
    victim_keeps(EVENTS as u64, false, |device| {
        let (events, ring) = to_one_ring(device, EVENTS)?;
        for event in &events {
            os::signal_group_from(event.ring_fd(), leader)?;
        }
        Ok((events, ring))
    })?;
    kernel_log::ensure_no_fault()
}

/// Returns the number of function call interrupts that each CPU has taken.
fn calls() -> Fallible<Vec<u64>> {
    let table = fs::read_to_string("/proc/interrupts")?;
    let line = table
        .lines()
        .find(|line| line.contains("Function call interrupts"))
        .ok_or_else(|| format!("no function calls in:\n{table}"))?;
    let (_, counts) = line.split_once(':').ok_or("no counts")?;
    let counts = counts.split_whitespace().map_while(|word| word.parse().ok());
    Ok(counts.collect())
}

/// A program of the user nobody on one CPU takes samples that the driver reads at once.
fn idle_cpus_are_left_alone(events: usize, inherit: bool) -> Outcome {
    os::set_paranoid(OWN_TASKS)?;
    let shared = SharedWords::map()?;
    let attack = || -> Outcome {
        cpu::pin(ATTACKER)?;
        os::become_nobody()?;
        os::set_dumpable(true)?;
        let device = Device::open()?;
        let mut attr = device.marks(MARK_ANY, 1, IP | STACK_USER);
        attr.sample_stack_user = 64;
        attr.set_inherit(inherit.into());
        attr.set_disabled(0);
        let opened: io::Result<Vec<_>> = (0..events).map(|_| kernels(&attr, How::OWN)).collect();
        let opened = opened?;
        let before = calls()?;
        let begin = Instant::now();
        while begin.elapsed() < WATCH {
            device.mark(VALUE)?;
            shared.add(MARKS, 1);
        }
        let after = calls()?;
        for (word, cpu) in IDLE.into_iter().enumerate() {
            shared.store(CALLS + word, after[cpu] - before[cpu]);
        }
        ensure!(opened[0].count()? > 0, "no mark was counted");
        Ok(())
    };
    os::in_child(attack)?;
    let taken = [CALLS, CALLS + 1].map(|word| shared.load(word));
    let marks = shared.load(MARKS);
    let balancing = if events > 1 { marks / MARKS_A_CALL } else { 0 };
    println!("{marks} marks, {taken:?} function calls on idle CPUs");
    ensure!(
        taken.iter().all(|&calls| calls <= FEW_CALLS + balancing),
        "{marks} marks of one CPU caused {taken:?} function calls on idle CPUs"
    );
    Ok(())
}

/// The period of the clock by which [`gaps`] are measured, in nanoseconds.
const CLOCK: u64 = 100_000;
/// The longest time for which a CPU may handle no interrupt.
const OFF: u64 = 1_000_000;

/// Returns the longest time between two samples of the kernel's own clock on CPU 0 while `act` runs. The kernel takes
/// these samples in a timer's interrupt, so a longer time than the clock's period means that the CPU took no interrupts.
fn longest_gap(device: &Device, act: impl FnOnce() -> Outcome) -> Fallible<u64> {
    let clock = perf_event_attr {
        type_: bindings::PERF_TYPE_SOFTWARE,
        config: bindings::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..device.attr(KIND_SOFTWARE, 0)
    };
    let attr = silent(sampling(clock, CLOCK, TIME));
    let event = kernels(&attr, How::on_cpu(0))?;
    let mut ring = Pages::map(&event, 256, READ_WRITE)?;
    event.enable(0)?;
    act()?;
    event.disable(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!(lost, 0, "samples of the clock that were lost");
    let times: Vec<u64> = samples.iter().filter_map(|sample| sample.time).collect();
    ensure!(times.len() > 100, "only {} samples", times.len());
    let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
    Ok(gaps.max().unwrap_or(0))
}

/// In the exact lab, a nanosecond passes with each instruction, those of the host included. The host's work for a mark
/// of 64 events is subtracted from the gaps.
#[apply(guest_test)]
#[group = "costs"]
fn samples_of_nobodys_events_delay_no_interrupt() -> Outcome {
    const EVENTS: usize = 64;
    const RUN: Duration = Duration::from_millis(400);
    os::set_paranoid(OWN_TASKS)?;
    // The kernel must not lower the rate of the clock.
    fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "0")?;
    let device = Device::open()?;
    let shared = SharedWords::map()?;
    let attack = |events: usize| -> Outcome {
        os::become_nobody()?;
        os::set_dumpable(true)?;
        let device = Device::open()?;
        let attr = silent(device.marks(MARK_ANY, 1, IP | TID | TIME | CALLCHAIN));
        let opened: io::Result<Vec<_>> = (0..events).map(|_| kernels(&attr, How::OWN)).collect();
        let opened = opened?;
        let mut ring = match opened.first() {
            Some(first) => Some(Pages::map(first, 128, READ_WRITE)?),
            None => None,
        };
        for event in &opened {
            if event.as_raw_fd() != opened[0].as_raw_fd() {
                event.output_to(opened[0].ring())?;
            }
            event.enable(0)?;
        }
        let (begin, mut marks) = (Instant::now(), 0);
        while begin.elapsed() < RUN {
            device.mark(VALUE)?;
            marks += 1;
            if let Some(ring) = &mut ring {
                ring.skip();
            }
        }
        shared.store(MARKS, nanoseconds(begin.elapsed()) / marks);
        Ok(())
    };
    let gap_with = |events| longest_gap(&device, || os::in_child(|| attack(events)));
    let without = gap_with(0)?;
    let with = gap_with(EVENTS)?;
    let mark = shared.load(MARKS);
    let figures = format!(
        "longest gaps of a clock of {CLOCK} ns: {without} ns, with {EVENTS} events {with} ns; {mark} ns a mark"
    );
    println!("{figures}");
    ensure!(with <= OFF + CLOCK + 2 * mark, "a CPU takes no interrupts for more than {OFF} ns: {figures}");
    Ok(())
}
