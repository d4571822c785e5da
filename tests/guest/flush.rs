//! Tests of flushes. When the call returns, the pages must contain everything that was sampled and traced before the
//! call, and waiting readers must have been woken.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::areas;
use crate::aux_mapping::{io_trace, ports};
use crate::beside::work_beside;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, ADDR, TIME};
use crate::known_code;
use crate::packets::exits;
use crate::pages::{Pages, READ, READ_WRITE};
use crate::persisting::{fresh, look, newest, persistent, values};
use crate::raw::{
    Device, Doorbell, ENGINE_BATCHED, ENGINE_EXIT, Event, FLAG_ON_STARTER, How, KIND_SOFTWARE, PAGE, SW_CPU_CLOCK,
    aux_watermark, refused, sampling, silent,
};
use crate::traced::Traced;
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "flush";

const VALUE: u64 = 70;
/// Limits for poll, in milliseconds. `LONG` is for a wakeup that must come, no matter how slow the machine is. `NOW` is
/// for checks that no wakeup has come.
const LONG: i32 = 10_000;
const NOW: i32 = 0;

fn marks(device: &Device) -> perf_event_attr {
    silent(device.marks(VALUE, 1, TIME | ADDR))
}

/// Pins this thread to CPU 1. Returns an event of marks on that CPU, with a ring whose records never wake a reader.
fn quiet(device: &Device) -> Fallible<(Event, Pages)> {
    cpu::pin(1)?;
    let event = device.start(&marks(device), How::on_cpu(1))?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    Ok((event, ring))
}

#[apply(guest_test)]
fn flush_wakes_a_waiting_reader() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = quiet(&device)?;
    for round in 0..5 {
        device.place(VALUE, 3)?;
        ensure_eq!(event.poll(NOW)?, 0, "round {round}: poll before");
        ensure_eq!(event.flush(0)?, 0, "what the flush returns");
        ensure_eq!(event.poll(NOW)?, libc::POLLIN, "round {round}: poll after");
        ensure_eq!(event.poll(NOW)?, 0, "round {round}: a second wakeup");
        ensure_eq!(ring.take()?.len(), 3, "round {round}: records");
    }
    Ok(())
}

#[apply(guest_test)]
fn sleeper_is_woken_by_a_flush() -> Outcome {
    let device = Device::open()?;
    let (event, _ring) = quiet(&device)?;
    device.place(VALUE, 1)?;
    thread::scope(|scope| -> Outcome {
        let sleeper = scope.spawn(|| event.poll(LONG));
        let epoll = os::Epoll::new(event.ring_fd(), true)?;
        // A sleeper that is not yet asleep finds the records immediately.
        event.flush(0)?;
        let reported = sleeper.join().map_err(|_| "the sleeper panicked")??;
        ensure_eq!(reported, libc::POLLIN, "the sleeper's poll");
        device.place(VALUE, 1)?;
        event.flush(0)?;
        ensure!(epoll.wait(LONG)? != 0, "epoll does not report the flush");
        Ok(())
    })
}

#[apply(guest_test)]
fn flush_without_records_wakes_no_reader() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = quiet(&device)?;
    for round in 0..3 {
        event.flush(0)?;
        ensure_eq!(event.poll(NOW)?, 0, "round {round}: poll with nothing new");
    }
    device.place(VALUE, 2)?;
    event.flush(0)?;
    ensure_eq!(event.poll(NOW)?, libc::POLLIN, "poll with records");
    event.flush(0)?;
    ensure_eq!(event.poll(NOW)?, 0, "poll after a second flush");
    ensure_eq!(ring.take()?.len(), 2, "records");
    Ok(())
}

#[apply(guest_test)]
fn pending_loss_is_recorded() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = quiet(&device)?;
    let fits = PAGE as u64 / 24;
    device.place(VALUE, fits + 11)?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll after the first loss");
    // The ring is full, so the loss cannot be recorded yet. This is not an error.
    event.flush(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, &marks(&device))?;
    ensure_eq!((samples.len() as u64, lost), (fits, 0), "records that fitted, and losses");
    event.flush(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, &marks(&device))?;
    ensure_eq!((samples.len(), lost), (0, 11), "records and losses after the second flush");
    ensure_eq!(event.poll(NOW)?, libc::POLLIN, "poll after the loss was recorded");
    Ok(())
}

#[apply(guest_test)]
fn all_persistent_events_are_flushed_at_once() -> Outcome {
    let device = fresh()?;
    cpu::pin(0)?;
    let mut kept = Vec::new();
    for (cpu, name) in [(0, "zero"), (1, "one"), (0, "more")] {
        let (event, _) = persistent(&device, &marks(&device), cpu, name)?;
        let ring = Pages::map(&event, 1, READ_WRITE)?;
        kept.push((event, ring));
    }
    let (other, _ring) = quiet(&device)?;
    for vcpu in [0, 1] {
        cpu::pin(vcpu)?;
        device.place(VALUE, 4)?;
    }
    device.flush()?;
    for (number, (event, ring)) in kept.iter_mut().enumerate() {
        ensure_eq!(event.poll(NOW)?, libc::POLLIN, "poll of event {number}");
        ensure_eq!(ring.take()?.len(), 4, "records of event {number}");
    }
    ensure_eq!(other.poll(NOW)?, 0, "poll of an event that is not persistent");
    for (event, _) in kept {
        event.attach()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn every_state_can_be_flushed() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = quiet(&device)?;
    device.place(VALUE, 2)?;
    event.disable(0)?;
    ensure_eq!(event.flush(0)?, 0, "flush of an event that is off");
    ensure_eq!(event.poll(NOW)?, libc::POLLIN, "poll for earlier records");
    ensure_eq!(ring.take()?.len(), 2, "records of an event that is off");
    event.pause(true)?;
    event.enable(0)?;
    device.place(VALUE, 2)?;
    ensure_eq!(event.flush(0)?, 0, "flush of an event whose ring is paused");
    event.pause(false)?;
    event.flush(0)?;
    let (samples, lost) = fields::samples(&ring.take()?, &marks(&device))?;
    ensure_eq!((samples.len(), lost), (0, 2), "records and losses of a paused ring");
    let how = How::on_cpu(1);
    let waits = device.start(&marks(&device), how.with(FLAG_ON_STARTER))?;
    ensure_eq!(waits.flush(0)?, 0, "flush of an event that waits for its starter");
    let counts = device.start(&device.attr(crate::raw::KIND_MARK, VALUE), how)?;
    ensure_eq!(counts.flush(0)?, 0, "flush of an event that only counts");
    let without = device.start(&marks(&device), how)?;
    device.place(VALUE, 2)?;
    ensure_eq!(without.flush(0)?, 0, "flush of an event without a ring");
    let never = device.open_event(&marks(&device), how)?;
    ensure_eq!(never.flush(0)?, 0, "flush of an event that was never enabled");
    let looked = device.start(&marks(&device), how)?;
    let _looked = Pages::map(&looked, 1, READ)?;
    device.place(VALUE, 2)?;
    ensure_eq!(looked.flush(0)?, 0, "flush of an event whose ring overwrites");
    ensure_eq!(looked.poll(NOW)?, libc::POLLIN, "poll of an event whose ring overwrites");
    // The task has ended, but its records can still be flushed.
    let tid = AtomicU64::new(0);
    let gone = thread::scope(|scope| {
        let owner = scope.spawn(|| -> std::io::Result<(Event, Pages)> {
            tid.store(cpu::thread_id().into(), Ordering::Relaxed);
            let event = device.start(&marks(&device), How::OWN)?;
            let ring = Pages::map(&event, 1, READ_WRITE)?;
            device.place(VALUE, 3)?;
            Ok((event, ring))
        });
        owner.join().map_err(|_| "the owner panicked")
    })?;
    let (event, mut ring) = gone?;
    ensure_eq!(event.flush(0)?, 0, "flush of an event of a task that has ended");
    ensure_eq!(ring.take()?.len(), 3, "records of a task that has ended");
    Ok(())
}

#[apply(guest_test)]
fn flush_publishes_a_piece_of_a_trace() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::allow_ports()?;
    let attr = aux_watermark(io_trace(&device), u32::MAX);
    let mut traced = Traced::open(&device, attr, How::on_cpu(1), 4, READ_WRITE)?;
    traced.event.enable(0)?;
    let mut shown = 0;
    for round in 1..=5 {
        ports(4);
        ensure_eq!(areas::head(&traced.ring), shown, "round {round}: the area's head before the flush");
        traced.event.flush(0)?;
        let head = areas::head(&traced.ring);
        ensure!(head > shown, "round {round}: the flush did not move the area's head");
        let packets = traced.area.take(&traced.ring)?;
        traced.ledger.follow(&packets)?;
        ensure_eq!(exits(&packets).len(), 4, "round {round}: exits");
        let chunks = traced.chunks()?;
        ensure_eq!(chunks.len(), 1, "round {round}: records of chunks");
        ensure_eq!(traced.reported, head, "round {round}: the end of the last chunk");
        ensure_eq!(traced.event.poll(NOW)?, libc::POLLIN, "round {round}: poll after the flush");
        shown = head;
        traced.event.flush(0)?;
        ensure_eq!(traced.event.poll(NOW)?, 0, "round {round}: poll again");
        ensure_eq!(traced.chunks()?.len(), 0, "round {round}: chunks without packets");
    }
    Ok(())
}

/// If the host batches samples, they stay in the host's ring for up to ten milliseconds.
#[apply(guest_test)]
#[group = "output-batched"]
fn flush_writes_samples_of_the_batched_engine() -> Outcome {
    held_samples_are_written(ENGINE_BATCHED)
}

#[apply(guest_test)]
fn flush_writes_samples_of_the_exit_engine() -> Outcome {
    held_samples_are_written(ENGINE_EXIT)
}

fn held_samples_are_written(engine: u32) -> Outcome {
    const PERIOD: u64 = 1_000_000;
    let device = Device::open()?;
    cpu::pin(1)?;
    let [code, _] = known_code::loops();
    let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
    let attr = silent(sampling(clock, PERIOD, TIME));
    let event = device.start(&attr, How::on_cpu(1).by(engine))?;
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    let (mut records, mut last) = (0, 0);
    for round in 0..20 {
        code.run(1 << 22);
        let asked = device.time_of(cpu::tsc());
        event.flush(0)?;
        let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
        let taken = device.time_of(cpu::tsc());
        ensure_eq!(lost, 0, "engine {engine}, round {round}: lost samples");
        records += samples.len();
        for time in samples.iter().filter_map(|sample| sample.time) {
            ensure!(
                time >= last && time <= taken,
                "engine {engine}: sample time {time} is not between {last} (previous) and {taken} (read)"
            );
            last = time;
        }
        // A sample that appears only after the flush must have been taken after the flush began, because the flush
        // writes all earlier samples. A sample's time is known to within a microsecond.
        code.run(1 << 18);
        event.flush(0)?;
        let (samples, _) = fields::samples(&ring.take()?, &attr)?;
        records += samples.len();
        for time in samples.iter().filter_map(|sample| sample.time) {
            ensure!(
                time + 1_000 >= asked,
                "engine {engine}, round {round}: the flush at {asked} did not write the sample of {time}"
            );
            last = time;
        }
    }
    ensure!(records > 20, "engine {engine}: only {records} samples were taken");
    Ok(())
}

#[apply(guest_test)]
fn task_is_flushed_wherever_it_is() -> Outcome {
    use std::sync::Barrier;
    const MARKS: u64 = 500;
    let device = Device::open()?;
    let (ready, done) = (Barrier::new(2), Barrier::new(2));
    let stop = AtomicBool::new(false);
    cpu::pin(0)?;
    thread::scope(|scope| -> Outcome {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (device, ready, done, stop) = (&device, &ready, &done, &stop);
        let owner = scope.spawn(move || -> std::io::Result<()> {
            cpu::pin(1)?;
            let event = device.start(&marks(device), How::OWN)?;
            let ring = Pages::map(&event, 8, READ_WRITE)?;
            device.place(VALUE, 3)?;
            let _ = sender.send((event, ring));
            // The task sleeps, so its event is on no CPU.
            ready.wait();
            done.wait();
            // The task and the flush run on different CPUs. The task places too few marks to be throttled.
            device.place(VALUE, MARKS)?;
            while !stop.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            Ok(())
        });
        let (event, mut ring) = receiver.recv().map_err(|_| "no event came")?;
        ready.wait();
        event.flush(0)?;
        ensure_eq!(event.poll(NOW)?, libc::POLLIN, "poll while the task sleeps");
        ensure_eq!(ring.take()?.len(), 3, "records of a sleeping task");
        done.wait();
        let flushed = (|| -> Outcome {
            let mut written = 3;
            loop {
                let counted = event.count()?;
                event.flush(0)?;
                written += ring.take()?.len() as u64;
                ensure!(written >= counted, "{written} records of {counted} marks");
                if counted == 3 + MARKS {
                    return Ok(());
                }
            }
        })();
        stop.store(true, Ordering::Relaxed);
        owner.join().map_err(|_| "the owner panicked")??;
        flushed
    })
}

#[apply(guest_test)]
fn children_are_flushed_too() -> Outcome {
    use std::sync::Barrier;
    let device = Device::open()?;
    let mut attr = marks(&device);
    attr.set_inherit(1);
    let event = device.start(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 8, READ_WRITE)?;
    let (placed, flushed) = (Barrier::new(3), Barrier::new(3));
    thread::scope(|scope| -> Outcome {
        let children = [0, 1].map(|vcpu| {
            let (device, placed, flushed) = (&device, &placed, &flushed);
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(vcpu)?;
                let marked = device.place(VALUE, 5);
                placed.wait();
                flushed.wait();
                marked
            })
        });
        placed.wait();
        let outcome = event.flush(0);
        let (polled, records) = (event.poll(NOW), ring.take());
        flushed.wait();
        for child in children {
            child.join().map_err(|_| "a child panicked")??;
        }
        outcome?;
        ensure_eq!(polled?, libc::POLLIN, "poll after the family's flush");
        ensure_eq!(records?.len(), 10, "records of the children");
        Ok(())
    })
}

#[apply(guest_test)]
fn flush_has_no_other_arguments() -> Outcome {
    let device = Device::open()?;
    let (event, _ring) = quiet(&device)?;
    for flags in [2, 3, 1 << 32, u64::MAX] {
        ensure_eq!(refused(event.flush(flags)), Some(libc::EINVAL), "errno of a flush with the argument {flags:#x}");
    }
    Ok(())
}

/// Both vCPUs sample all their marks and repeatedly flush all events. One reader takes the records.
#[apply(guest_test)]
fn flushes_from_both_vcpus_lose_and_repeat_nothing() -> Outcome {
    const EACH: u32 = 3_000;
    let device = fresh()?;
    let attr = silent(device.any_marks(1, TIME | ADDR));
    let events = [0, 1].map(|cpu| persistent(&device, &attr, cpu, &format!("storm{cpu}")));
    let [zero, one] = events;
    let events = [zero?.0, one?.0];
    let mut rings = [Pages::map(&events[0], 4, READ_WRITE)?, Pages::map(&events[1], 4, READ_WRITE)?];
    let mut reported = [Vec::new(), Vec::new()];
    let mut lost = [0, 0];
    let take = |rings: &mut [Pages; 2], reported: &mut [Vec<u64>; 2], lost: &mut [u64; 2]| -> Outcome {
        for which in 0..2 {
            let (samples, less) = fields::samples(&rings[which].take()?, &attr)?;
            reported[which].extend(samples.iter().filter_map(|sample| sample.addr));
            lost[which] += less;
        }
        Ok(())
    };
    thread::scope(|scope| -> Outcome {
        let storms = [0, 1].map(|vcpu| {
            let (device, events) = (&device, &events);
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(vcpu)?;
                let bell = Doorbell::map(device)?;
                for value in 1..=EACH {
                    bell.mark(value);
                    match value % 16 {
                        // Flushes the event of this vCPU, the event of the other vCPU, or all events.
                        3 => events[vcpu].flush(0).map(|_| ())?,
                        9 => events[1 - vcpu].flush(0).map(|_| ())?,
                        15 => device.flush().map(|_| ())?,
                        _ => {}
                    }
                }
                Ok(())
            })
        });
        while !storms.iter().all(|storm| storm.is_finished()) {
            take(&mut rings, &mut reported, &mut lost)?;
            // The reader yields its CPU, so that rings also become full.
            os::yield_cpu();
        }
        for storm in storms {
            storm.join().map_err(|_| "a storm panicked")??;
        }
        Ok(())
    })?;
    for _ in 0..2 {
        device.flush()?;
        take(&mut rings, &mut reported, &mut lost)?;
    }
    for (vcpu, event) in events.iter().enumerate() {
        let produced = event.count()?;
        ensure_eq!(produced, u64::from(EACH), "marks of vCPU {vcpu}");
        ensure_eq!(reported[vcpu].len() as u64 + lost[vcpu], produced, "samples of vCPU {vcpu}, written and lost");
        ensure!(
            reported[vcpu].windows(2).all(|pair| pair[0] < pair[1]),
            "vCPU {vcpu}: a mark is recorded twice, or before an earlier one"
        );
    }
    for event in events {
        event.attach()?;
    }
    Ok(())
}

#[apply(guest_test)]
fn closing_under_a_flush_is_harmless() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let flushing = || Ok(|| device.flush().map(drop));
    work_beside(0, flushing, |_| {
        let mut attr = marks(&device);
        attr.set_write_backward(1);
        for round in 0..60 {
            let (event, _) = persistent(&device, &attr, round % 2, "under-flush")?;
            let ring = look(&event, 1)?;
            device.place(VALUE, 3)?;
            if round % 2 == 1 {
                ensure_eq!(newest(&ring, &attr)?, [VALUE; 3], "round {round}: records");
            }
            event.attach()?;
        }
        let plain = device.start(&marks(&device), How::on_cpu(1))?;
        let mut ring = Pages::map(&plain, 1, READ_WRITE)?;
        let other = plain.as_fd().try_clone_to_owned()?;
        drop(plain);
        device.place(VALUE, 3)?;
        drop(other);
        ensure_eq!(values(&ring.take()?, &marks(&device))?, [VALUE; 3], "records");
        Ok(())
    })?;
    Ok(())
}
