//! Counts that the kernel reads in any context. A probe or a tracepoint that leads a group reads the group's counts
//! wherever it hits: in the middle of the driver's own work with its queues, in the scheduler, in an interrupt. The
//! read must neither hang nor return a wrong count.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, READ, TIME};
use crate::os::BpfReader;
use crate::pages::{Pages, READ_WRITE};
use crate::probes::{self, Probe};
use crate::raw::{Device, Event, FORMAT_GROUP, How, KIND_MARK, KIND_SOFTWARE, kernels, sampling, silent};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "nesting";

guest_tests! {
    count_read_in_vm_notify_is_exact => probed("vm_notify");
    count_read_in_virtqueue_kick_prepare_is_exact => probed("virtqueue_kick_prepare");
    count_read_in_virtqueue_notify_is_exact => probed("virtqueue_notify");
    count_read_in_virtqueue_add_sgs_is_exact => probed("virtqueue_add_sgs");
    count_read_in_virtqueue_get_buf_is_exact => probed("virtqueue_get_buf");
    count_read_in_virtqueue_get_buf_ctx_is_exact => probed("virtqueue_get_buf_ctx");
    count_read_in_spin_unlock_irqrestore_is_exact => probed("_raw_spin_unlock_irqrestore");
    count_read_in_spin_lock_irqsave_is_exact => probed("_raw_spin_lock_irqsave");
    count_read_at_a_task_switch_is_exact => at_tracepoint("sched", "sched_switch");
    count_read_at_a_wakeup_is_exact => at_tracepoint("sched", "sched_waking");
    count_read_in_an_interrupt_is_exact => at_tracepoint("irq", "irq_handler_entry");
    count_read_in_a_softirq_is_exact => at_tracepoint("irq", "softirq_entry");
}

/// The functions that the tests probe: the driver's path to its queues, and the locks that the path takes.
const FUNCTIONS: [&str; 8] = [
    "vm_notify",
    "virtqueue_kick_prepare",
    "virtqueue_notify",
    "virtqueue_add_sgs",
    "virtqueue_get_buf",
    "virtqueue_get_buf_ctx",
    "_raw_spin_unlock_irqrestore",
    "_raw_spin_lock_irqsave",
];
/// The number of [`FUNCTIONS`] that every kernel can probe, and that the driver calls.
const ENOUGH: usize = 4;
const VALUE: u64 = 17;
/// The CPU on which the probes hit and the marks are placed.
const CPU: usize = 1;
const EVENTS: How<'_> = How::on_cpu(1);
/// The CPU from which another thread reads the counts.
const READERS: usize = 0;
const MARKS: u64 = 200;
const NAP: Duration = Duration::from_micros(1);
/// After this many marks, the test takes the samples out of the ring, so that the ring rarely is full.
const BATCH: u64 = 4;

/// Returns a probe of a function, or `None` with the reason on stderr if this kernel cannot probe it.
fn probe(function: &str) -> Fallible<Option<Probe>> {
    if !probes::has_function(function)? {
        eprintln!("this kernel has no function {function}");
        return Ok(None);
    }
    match Probe::of(function) {
        Ok(probe) => Ok(Some(probe)),
        Err(error) => {
            eprintln!("this kernel cannot probe {function}: {error}");
            Ok(None)
        }
    }
}

/// The other tests pass without a sample if the kernel cannot probe their function, or if the driver does not call it.
/// This test limits their number.
#[apply(guest_test)]
fn enough_functions_of_the_driver_can_be_probed() -> Outcome {
    let device = Device::open()?;
    let mut hit = Vec::new();
    for function in FUNCTIONS {
        let Some(probe) = probe(function)? else {
            continue;
        };
        let hits = kernels(&hits(&device, probe.id), EVENTS)?;
        hits.enable(0)?;
        under_load(&device, |_| Ok(()))?;
        if hits.count()? > 0 {
            hit.push(function);
        }
        drop(hits);
    }
    ensure!(hit.len() >= ENOUGH, "only {hit:?} are probed and called");
    Ok(())
}

fn probed(function: &str) -> Outcome {
    let Some(probe) = probe(function)? else {
        return Ok(());
    };
    if counts_are_exact(probe.id)? == 0 {
        eprintln!("the driver does not call {function}");
    }
    Ok(())
}

fn at_tracepoint(group: &str, name: &str) -> Outcome {
    let samples = counts_are_exact(probes::tracepoint(group, name)?)?;
    ensure!(samples > 0, "no sample at {group}:{name}");
    Ok(())
}

fn marks(device: &Device) -> perf_event_attr {
    device.attr(KIND_MARK, VALUE)
}

/// Counts of a tracepoint on [`CPU`].
fn hits(device: &Device, tracepoint: u64) -> perf_event_attr {
    perf_event_attr { type_: bindings::PERF_TYPE_TRACEPOINT, config: tracepoint, ..device.attr(KIND_SOFTWARE, 0) }
}

/// Samples a group at each hit of a tracepoint while the driver works on [`CPU`]. Returns the number of samples.
fn counts_are_exact(tracepoint: u64) -> Fallible<usize> {
    let device = Device::open()?;
    let attr =
        perf_event_attr { read_format: FORMAT_GROUP, ..silent(sampling(hits(&device, tracepoint), 1, READ | TIME)) };
    let leader = kernels(&attr, EVENTS)?;
    let mut member = marks(&device);
    member.set_disabled(0);
    let member = kernels(&member, EVENTS.led_by(leader.as_fd()))?;
    let mut ring = Pages::map(&leader, 256, READ_WRITE)?;
    let counter = kernels(&hits(&device, tracepoint), EVENTS)?;
    counter.enable(0)?;
    leader.enable(0)?;
    let mut seen = Seen::default();
    let placed = under_load(&device, |placed| seen.check(&fields::samples(&ring.take()?, &attr)?.0, placed))?;
    ensure_eq!(ring.head() > 0, counter.count()? > 0, "whether the ring has samples, compared with hits");
    ensure_eq!(member.count()?, placed, "marks, read afterwards");
    Ok(seen.samples)
}

/// The samples so far.
#[derive(Debug, Default)]
struct Seen {
    samples: usize,
    greatest: u64,
}

impl Seen {
    /// Checks the counts in further samples, when `placed` marks have been placed.
    fn check(&mut self, samples: &[fields::Sample], placed: u64) -> Outcome {
        for sample in samples {
            let read = sample.read.as_ref().ok_or("a sample without counts")?;
            let [_, marks] = read.values[..] else {
                return Err(format!("not two counts in {sample:?}").into());
            };
            let allowed = self.greatest..=placed;
            ensure!(
                allowed.contains(&marks.value),
                "sample {} has {} marks, expected {allowed:?}",
                self.samples,
                marks.value
            );
            self.greatest = marks.value;
            self.samples += 1;
        }
        Ok(())
    }
}

/// Places marks on [`CPU`] while events there start and stop, tasks switch, and another CPU reads an event of this CPU.
/// Calls `look` with the number of marks after each batch. Returns the number of marks.
fn under_load(device: &Device, mut look: impl FnMut(u64) -> Outcome) -> Fallible<u64> {
    let other = kernels(&marks(device), EVENTS)?;
    other.enable(0)?;
    let (placed, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(&other, &placed, &over).map_err(|e| e.to_string()));
        let mut place = || -> Outcome {
            cpu::pin(CPU)?;
            let task = kernels(&marks(device), How::OWN)?;
            for mark in 1..=MARKS {
                // Each of these calls makes the driver send a command to the device on this CPU.
                task.enable(0)?;
                placed.store(mark, Ordering::SeqCst);
                device.mark(VALUE)?;
                task.disable(0)?;
                // Another task, if only the idle task, runs on this CPU.
                thread::sleep(NAP);
                if mark % BATCH == 0 {
                    look(mark)?;
                }
            }
            ensure_eq!(task.count()?, MARKS, "marks of the task");
            ensure_eq!(other.count()?, MARKS, "marks of the other event");
            Ok(())
        };
        let done = place();
        over.store(true, Ordering::SeqCst);
        let read = reader.join().map_err(|_| "the reader panicked")?;
        done?;
        read?;
        Ok(MARKS)
    })
}

/// Reads an event from another CPU until the marks are placed.
fn read_until(event: &Event, placed: &AtomicU64, over: &AtomicBool) -> Outcome {
    cpu::pin(READERS)?;
    let mut last = 0;
    while !over.load(Ordering::SeqCst) {
        let count = event.count()?;
        let most = placed.load(Ordering::SeqCst);
        ensure!((last..=most).contains(&count), "another CPU reads {count}, expected {last} to {most}");
        last = count;
    }
    Ok(())
}

/// A BPF program on a probe reads the event of its CPU. The driver calls both functions on every kernel; in Linux 7.3,
/// `virtqueue_kick` has the code of `virtqueue_kick_prepare` inside.
#[apply(guest_test)]
fn count_read_by_a_bpf_program_in_a_probe_is_exact() -> Outcome {
    let device = Device::open()?;
    for function in ["vm_notify", "virtqueue_kick"] {
        let Some(probe) = probe(function)? else {
            continue;
        };
        let event = kernels(&marks(&device), EVENTS)?;
        event.enable(0)?;
        let program = BpfReader::load(CPU, event.as_fd())?;
        let hits = kernels(&hits(&device, probe.id), EVENTS)?;
        program.attach(hits.as_fd())?;
        hits.enable(0)?;
        let placed = under_load(&device, |placed| {
            let seen = program.seen()?;
            ensure!(seen.greatest <= placed && seen.decreased == 0, "{function}: {seen:?} after {placed} marks");
            Ok(())
        })?;
        let seen = program.seen()?;
        ensure!(seen.reads > 0, "{function}: the program read no count");
        ensure_eq!(event.count()?, placed, "{function}: marks, read afterwards");
        drop((hits, program));
    }
    Ok(())
}
