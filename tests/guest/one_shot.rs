//! Profilers that sample one overflow at a time: each thread has an event with a limit of one overflow, and the handler
//! of its signal enables it for the next one. The kernel's own clock shows how many signals such a program gets.

use std::hint::black_box;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{CALLCHAIN, LOST, SAMPLE, TID};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, How, KIND_SOFTWARE, SW_CPU_CLOCK, SW_TASK_CLOCK, kernels, sampling, waking};
use crate::{Fallible, Outcome, handled, os};

const GROUP: &str = "costs";

guest_tests! {
    cpu_clock_signals_as_often_as_the_kernels => as_often_as_the_kernels(SW_CPU_CLOCK);
    task_clock_signals_as_often_as_the_kernels => as_often_as_the_kernels(SW_TASK_CLOCK);
}

const THREADS: usize = 4;
const PERIOD: u64 = 10_000_000;
/// How long each clock runs at a time.
const SLICE: Duration = Duration::from_millis(700);
const SLICES: u32 = 3;
/// The part of the kernel's rate that must be reached, in percent.
const PERCENT: u64 = 95;

/// The figures of a clock, added up over threads.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    signals: u64,
    records: u64,
    /// The clock's time while the threads ran, counted by another event without a limit.
    time: u64,
}

impl Figures {
    /// Signals for 1000 periods of the clock.
    fn rate(self) -> u64 {
        self.signals * 1000 * PERIOD / self.time.max(1)
    }

    fn add(&mut self, other: Self) {
        self.signals += other.signals;
        self.records += other.records;
        self.time += other.time;
    }
}

/// Runs for [`SLICE`] with one-shot samples of this thread.
fn sampled(clock: &perf_event_attr) -> io::Result<Figures> {
    let attr = waking(sampling(*clock, PERIOD, TID | CALLCHAIN), 1);
    let event = kernels(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    let time = kernels(clock, How::OWN)?;
    os::signal_from(event.ring_fd())?;
    let before = handled::of(event.ring());
    time.enable(0)?;
    event.refresh(1)?;
    let begin = Instant::now();
    while begin.elapsed() < SLICE {
        for round in 0..10_000_u64 {
            black_box(round);
        }
    }
    event.disable(0)?;
    // The signal of an overflow just before has enabled the event again.
    event.disable(0)?;
    time.disable(0)?;
    let mut records = 0;
    for record in ring.take().map_err(io::Error::other)? {
        match record.kind {
            SAMPLE => records += 1,
            LOST => {}
            kind => return Err(io::Error::other(format!("a record of type {kind}"))),
        }
    }
    Ok(Figures { signals: handled::of(event.ring()) - before, records, time: time.count()? })
}

/// Runs one slice in several threads.
fn slice(clock: &perf_event_attr) -> Fallible<Figures> {
    let mut all = Figures::default();
    thread::scope(|scope| -> Outcome {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(|| sampled(clock))).collect();
        for thread in threads {
            all.add(thread.join().map_err(|_| "a thread panicked")??);
        }
        Ok(())
    })?;
    Ok(all)
}

/// Alternates our clock with the kernel's, so that both see the same load of the machine. A clock of ours stands still
/// while the host runs something else, so signals are compared with the clock's own time.
fn as_often_as_the_kernels(clock: u64) -> Outcome {
    let device = Device::open()?;
    let ours = device.attr(KIND_SOFTWARE, clock);
    let kernels = perf_event_attr {
        type_: bindings::PERF_TYPE_SOFTWARE,
        config: bindings::PERF_COUNT_SW_CPU_CLOCK.into(),
        ..ours
    };
    os::limit_signals(10_000)?;
    handled::install()?;
    handled::refresh_sender_in_handler();
    let (mut of_kernel, mut of_device) = (Figures::default(), Figures::default());
    for _ in 0..SLICES {
        of_kernel.add(slice(&kernels)?);
        of_device.add(slice(&ours)?);
    }
    let figures = format!(
        "ours: {of_device:?}, {} signals in 1000 periods; the kernel's: {of_kernel:?}, {}",
        of_device.rate(),
        of_kernel.rate()
    );
    println!("{figures}");
    let handled = handled::so_far();
    ensure_eq!((handled.input, handled.strange), (0, 0), "signals without POLL_HUP: {figures}");
    ensure!(of_device.rate() * 100 >= of_kernel.rate() * PERCENT, "too few signals: {figures}");
    ensure_eq!(of_device.records, of_device.signals, "records, compared with signals: {figures}");
    Ok(())
}
