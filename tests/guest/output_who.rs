//! Tests the task that each sample names, and the cost of samples. With both engines, samples must name the right task,
//! without an exit at a task switch. With the batched engine, a sample must not cause an exit.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, CPU, ID, IP, MISC_MODE, MISC_USER, PERIOD, Sample, TID, TIME};
use crate::known_code::{self, Loop};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, ENGINE_ANY, ENGINE_BATCHED, ENGINE_EXIT, EXIT_MMIO, EXIT_SIGNAL, Event, How, KIND_EXITS, KIND_MARK,
    KIND_SOFTWARE, SW_CPU_CLOCK, SW_TASK_CLOCK, refused, sampling, silent,
};
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "output";

const FIELDS: u64 = IP | TID | TIME | CPU | ID | PERIOD;
const MILLISECOND: u64 = 1_000_000;

fn by(engine: u32, how: How<'_>) -> How<'_> {
    How { engine, ..how }
}

#[apply(guest_test)]
fn engine_of_an_event_is_reported() -> Outcome {
    let device = Device::open()?;
    let clock = sampling(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK), MILLISECOND, FIELDS);
    let event = device.open_event(&clock, by(ENGINE_EXIT, How::OWN))?;
    ensure_eq!(event.engine()?, ENGINE_EXIT, "the engine when the exit engine was requested");
    // By default, the device selects the batched engine if the host supports it, and otherwise the exit engine.
    let engine = device.open_event(&clock, How::OWN)?.engine()?;
    let batched = device.open_event(&clock, by(ENGINE_BATCHED, How::OWN));
    match &batched {
        Ok(event) => {
            let engines = (event.engine()?, engine);
            ensure_eq!(
                engines,
                (ENGINE_BATCHED, ENGINE_BATCHED),
                "the engine when batched was requested, and the default"
            );
        }
        Err(_) => {
            ensure_eq!(engine, ENGINE_EXIT, "the default engine on a host that cannot batch");
            ensure_eq!(
                refused(batched),
                Some(libc::EOPNOTSUPP),
                "errno for the batched engine on a host that cannot batch"
            );
        }
    }
    tell_of_marks(&device)
}

#[apply(guest_test)]
#[group = "output-batched"]
fn clock_is_sampled_only_by_the_batched_engine() -> Outcome {
    let device = Device::open()?;
    let clock = sampling(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK), MILLISECOND, FIELDS);
    for engine in [ENGINE_ANY, ENGINE_BATCHED] {
        let event = device.open_event(&clock, by(engine, How::OWN))?;
        ensure_eq!(event.engine()?, ENGINE_BATCHED, "the engine when {engine} was requested");
    }
    let exit = refused(device.open_event(&clock, by(ENGINE_EXIT, How::OWN)));
    ensure_eq!(exit, Some(libc::EOPNOTSUPP), "errno for a clock with the exit engine");
    tell_of_marks(&device)
}

/// Checks the engine of marks. The device counts marks by itself, so their engine does not depend on the host or on the
/// operator's settings.
fn tell_of_marks(device: &Device) -> Outcome {
    let marks = device.marks(1, 1, FIELDS);
    let event = device.open_event(&marks, How::OWN)?;
    ensure_eq!(event.engine()?, ENGINE_EXIT, "the engine of marks");
    let batched = refused(device.open_event(&marks, by(ENGINE_BATCHED, How::OWN)));
    ensure_eq!(batched, Some(libc::EOPNOTSUPP), "errno for marks with the batched engine");
    let counting = device.open_event(&device.attr(KIND_MARK, 1), How::OWN)?;
    ensure_eq!(counting.engine()?, ENGINE_ANY, "the engine of an event that only counts");
    Ok(())
}

/// Opens a counter of one CPU's exits, and maps the page from which the counter is read without an exit.
fn exits(device: &Device, which: u64, cpu: i32) -> std::io::Result<(Event, Pages)> {
    let event = device.open_event(&device.attr(KIND_EXITS, which), How::on_cpu(cpu))?;
    let page = Pages::map(&event, 0, READ_WRITE)?;
    event.enable(0)?;
    Ok((event, page))
}

/// Pseudo-random numbers for the times between yields, so that the yields do not synchronize with a scheduler.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Runs two threads on one CPU. Each thread runs its own code. They yield to each other after random times, until
/// `enough` returns true. Returns the number of switches.
fn swap_until(codes: &[Loop; 2], tids: &[AtomicU64; 2], mut enough: impl FnMut() -> Fallible<bool>) -> Fallible<u64> {
    let stop = AtomicBool::new(false);
    let switches = AtomicU64::new(0);
    thread::scope(|scope| {
        let swappers: Vec<_> = (0..2)
            .map(|which| {
                let (stop, switches) = (&stop, &switches);
                scope.spawn(move || -> std::io::Result<()> {
                    cpu::pin(0)?;
                    tids[which].store(cpu::thread_id().into(), Ordering::Release);
                    let mut random = Random(0x9e37_79b9_7f4a_7c15 + which as u64);
                    while !stop.load(Ordering::Relaxed) {
                        codes[which].run(1000 + random.below(200_000));
                        os::yield_cpu();
                        switches.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        let watched = loop {
            match enough() {
                Ok(false) => thread::yield_now(),
                Ok(true) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        stop.store(true, Ordering::Relaxed);
        for swapper in swappers {
            swapper.join().map_err(|_| "a swapper panicked")??;
        }
        watched?;
        Ok(switches.load(Ordering::Relaxed))
    })
}

fn swapping_tasks_are_distinguished(engine: u32) -> Outcome {
    const ENOUGH: usize = 2000;
    let device = Device::open()?;
    cpu::pin(1)?;
    let codes = known_code::loops();
    let tids = [AtomicU64::new(0), AtomicU64::new(0)];
    let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
    let attr = silent(sampling(clock, MILLISECOND, FIELDS));
    let event = device.open_event(&attr, by(engine, How::on_cpu(0)))?;
    ensure_eq!(event.engine()?, engine, "the engine");
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    let (_mmio, mmio) = exits(&device, EXIT_MMIO, 0)?;
    event.enable(0)?;
    let before = mmio.snapshot().count;
    let of_code = |sample: &Sample| {
        let ip = sample.ip.unwrap_or(0);
        codes.iter().position(|code| code.code.contains(&ip))
    };
    let (mut right, mut wrong, mut nobody) = (0, Vec::new(), 0);
    let switches = swap_until(&codes, &tids, || {
        let (samples, _) = fields::samples(&ring.take()?, &attr)?;
        for sample in samples.iter().filter(|s| s.misc & MISC_MODE == MISC_USER) {
            let Some(which) = of_code(sample) else {
                continue;
            };
            let tid = tids[which].load(Ordering::Acquire) as u32;
            match sample.pid_tid {
                Some((pid, reported)) if reported == tid && pid == std::process::id() => right += 1,
                Some((0, 0)) => nobody += 1,
                _ => wrong.push(sample.clone()),
            }
        }
        Ok(right + wrong.len() + nobody >= ENOUGH)
    })?;
    let after = mmio.snapshot().count;
    let all = right + wrong.len() + nobody;
    ensure!(
        right * 1000 >= all * 999,
        "{right} of {all} samples name their task; {nobody} name no task; the first wrong one: {:x?}",
        wrong.first()
    );
    ensure!(switches > 200, "{switches} switches are too few");
    ensure_eq!(after - before, 0, "exits to the device in {switches} switches");
    Ok(())
}

#[apply(guest_test)]
fn swapping_tasks_are_distinguished_by_the_exit_engine() -> Outcome {
    swapping_tasks_are_distinguished(ENGINE_EXIT)
}

/// VPMU-G-6.5-1.
#[apply(guest_test)]
#[group = "output-batched"]
fn swapping_tasks_are_distinguished_by_the_batched_engine() -> Outcome {
    swapping_tasks_are_distinguished(ENGINE_BATCHED)
}

/// Results of sampling a loop on a CPU.
struct Sampled {
    samples: u64,
    /// Number of distinct times in the samples. All overflows that the device finds at one exit have the time of that
    /// exit.
    moments: u64,
    /// Number of signals that took the vCPU out of the guest while the loop was sampled.
    signals: u64,
}

fn sampled_loop(device: &Device, attr: &perf_event_attr, engine: u32) -> Fallible<Sampled> {
    cpu::pin(1)?;
    let [code, _] = known_code::loops();
    let event = device.open_event(attr, by(engine, How::on_cpu(1)))?;
    ensure_eq!(event.engine()?, engine, "the engine");
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    let (_signals, signals) = exits(device, EXIT_SIGNAL, 1)?;
    let before = signals.snapshot().count;
    event.enable(0)?;
    let (mut moments, mut samples) = (BTreeSet::new(), 0);
    let mut on = true;
    while on {
        code.run(1 << 20);
        on = moments.len() < 300;
        if !on {
            event.disable(0)?;
        }
        let (more, lost) = fields::samples(&ring.take()?, attr)?;
        ensure_eq!(lost, 0, "lost samples");
        for sample in more {
            ensure!(
                sample.cpu == Some(1) && sample.ip.is_some(),
                "a sample has no IP, or is not on CPU 1: {sample:x?}"
            );
            moments.insert(sample.time.ok_or("a sample without its time")?);
            samples += 1;
        }
    }
    Ok(Sampled { samples, moments: moments.len() as u64, signals: signals.snapshot().count - before })
}

fn clock(device: &Device) -> perf_event_attr {
    let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
    silent(sampling(clock, MILLISECOND, FIELDS))
}

#[apply(guest_test)]
fn exit_engine_exits_once_for_a_sample() -> Outcome {
    let device = Device::open()?;
    let Sampled { samples, moments, signals } = sampled_loop(&device, &clock(&device), ENGINE_EXIT)?;
    // There can be fewer signals than samples. The last sample needs no signal if the device finds its overflow at the
    // exit that disables the event. On a busy host, one signal can announce several overflows. Their samples then have
    // the same time, so the lower bound uses the number of distinct times. No sample causes more than one signal. A
    // signal ends a run call even if the device has already found its overflow at another exit. `signals` also counts
    // signals with other causes, so the upper bound allows one more.
    ensure!(
        (moments - 1..=samples + 1).contains(&signals),
        "{signals} signals ended the run call for {samples} samples with {moments} distinct times"
    );
    Ok(())
}

#[apply(guest_test)]
#[group = "output-batched"]
fn batched_engine_exits_for_no_sample() -> Outcome {
    let device = Device::open()?;
    let sampled = sampled_loop(&device, &clock(&device), ENGINE_BATCHED)?;
    ensure_eq!(sampled.signals, 0, "signals that ended the run call for {} samples", sampled.samples);
    Ok(())
}

/// Two threads inherit a clock. Each thread has its own vCPU and its own code.
#[apply(guest_test)]
#[group = "output-batched"]
fn both_vcpus_are_batched_into_one_ring() -> Outcome {
    const EACH: usize = 200;
    let device = Device::open()?;
    let codes = known_code::loops();
    let mut attr = clock(&device);
    attr.set_inherit(1);
    let event = device.open_event(&attr, by(ENGINE_BATCHED, How::OWN))?;
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    event.enable(0)?;
    let stop = AtomicBool::new(false);
    let (mut samples, mut lost) = (Vec::new(), 0);
    thread::scope(|scope| -> Outcome {
        let runners = [0, 1].map(|which| {
            let (stop, code) = (&stop, &codes[which]);
            scope.spawn(move || -> std::io::Result<u32> {
                cpu::pin(which)?;
                while !stop.load(Ordering::Relaxed) {
                    code.run(100_000);
                }
                Ok(cpu::thread_id())
            })
        });
        let in_code = |sample: &&Sample, which: usize| sample.ip.is_some_and(|ip| codes[which].code.contains(&ip));
        let reported = loop {
            match ring.take().map(|bytes| fields::samples(&bytes, &attr)) {
                Ok(Ok((more, less))) => {
                    samples.extend(more);
                    lost += less;
                }
                Ok(Err(error)) => break Err(error),
                Err(error) => break Err(error),
            }
            let of = |which| samples.iter().filter(|s| in_code(s, which)).count();
            if runners.iter().any(|runner| runner.is_finished()) || of(0).min(of(1)) >= EACH {
                break Ok(());
            }
            thread::yield_now();
        };
        stop.store(true, Ordering::Relaxed);
        let [first, second] = runners.map(|runner| runner.join());
        let tids = [first.map_err(|_| "a runner panicked")??, second.map_err(|_| "a runner panicked")??];
        reported?;
        ensure_eq!(lost, 0, "lost samples");
        for (which, tid) in tids.into_iter().enumerate() {
            let own = samples.iter().filter(|s| in_code(s, which));
            let own: Vec<&Sample> = own.collect();
            let right = own.iter().all(|s| s.cpu == Some(which as u32) && s.pid_tid.is_some_and(|who| who.1 == tid));
            ensure!(right, "a sample in the code of thread {tid} names another thread or CPU");
            ensure!(own.is_sorted_by_key(|s| s.time), "the times of CPU {which} go back");
        }
        Ok(())
    })
}
