//! Wakeups: when a reader is woken, and by which call or signal. A reader is never woken more often than it requested.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings::perf_event_attr;
use vpmu_client::{Record, Vpmu, Wakeup};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{ADDR, CPU, ID, IP, PERIOD, TID, TIME};
use crate::os::{self, Arrived, Epoll, POLL_HUP, POLL_IN};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Doorbell, Event, How, KIND_MARK, kernels, refused, silent, waking, watermark};
use crate::{Fallible, Outcome, cpu, interrupt};

const GROUP: &str = "output";

const VALUE: u64 = 50;
/// `struct vpmu_wakeup::unit`.
const WAKEUP_RECORDS: u32 = 1;
const WAKEUP_BYTES: u32 = 2;
/// 64 bytes with the header.
const FIELDS: u64 = IP | TID | TIME | ADDR | CPU | PERIOD | ID;
const PER_PAGE: u64 = 64;
/// The timeout, in milliseconds, of a poll for a wakeup that must come even on a slow machine.
const LONG: i32 = 10_000;
/// No timeout. A poll that times out checks for records once more, which would hide a missing wakeup. If a sleeper is
/// not woken, the test exceeds its own time limit.
const FOREVER: i32 = -1;
/// The timeout of a poll for a wakeup that must not come. The poll need not wait, because a wakeup would have come at
/// the exit that wrote the record.
const NOW: i32 = 0;

fn start(device: &Device, attr: &perf_event_attr) -> std::io::Result<(Event, Pages)> {
    let event = device.open_event(attr, How::OWN)?;
    let ring = Pages::map(&event, 4, READ_WRITE)?;
    event.enable(0)?;
    Ok((event, ring))
}

/// `marks` lists numbers of records, counted from one. Checks that each of these records causes a wakeup, and that no
/// other record does.
fn wakes_at(event: &Event, device: &Device, marks: &[u64]) -> Outcome {
    let mut placed = 0;
    for &mark in marks {
        device.place(VALUE, mark - placed - 1)?;
        ensure_eq!(event.poll(NOW)?, 0, "poll after {} records", mark - 1);
        device.mark(VALUE)?;
        ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll after {mark} records");
        ensure_eq!(event.poll(NOW)?, 0, "a second wakeup");
        placed = mark;
    }
    Ok(())
}

#[apply(guest_test)]
fn every_full_page_wakes() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = start(&device, &device.marks(VALUE, 1, FIELDS))?;
    wakes_at(&event, &device, &[PER_PAGE, 2 * PER_PAGE, 3 * PER_PAGE])?;
    // A wakeup also comes when a page is full after the ring has wrapped.
    ensure_eq!(ring.take()?.len() as u64, 3 * PER_PAGE, "records");
    device.place(VALUE, 2 * PER_PAGE - 1)?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll past the ring's end");
    ensure_eq!(ring.take()?.len() as u64, 2 * PER_PAGE - 1, "records");
    ensure_eq!(event.poll(NOW)?, 0, "poll before the page is full");
    device.mark(VALUE)?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll when the page is full");
    Ok(())
}

#[apply(guest_test)]
fn number_of_records_wakes() -> Outcome {
    let device = Device::open()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 5);
    let (event, _ring) = start(&device, &attr)?;
    wakes_at(&event, &device, &[5, 10, 15, 20])
}

#[apply(guest_test)]
fn number_of_bytes_wakes() -> Outcome {
    let device = Device::open()?;
    // A record has 64 bytes. So record 4 is the first to reach 200 bytes, record 7 the first to reach 400, and so on.
    let attr = watermark(device.marks(VALUE, 1, FIELDS), 200);
    let (event, _ring) = start(&device, &attr)?;
    wakes_at(&event, &device, &[4, 7, 10, 13])
}

#[apply(guest_test)]
fn first_loss_wakes() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = start(&device, &silent(device.marks(VALUE, 1, FIELDS)))?;
    device.place(VALUE, 4 * PER_PAGE)?;
    ensure_eq!(event.poll(NOW)?, 0, "poll when the ring is full");
    device.mark(VALUE)?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll at the first loss");
    device.place(VALUE, 10)?;
    ensure_eq!(event.poll(NOW)?, 0, "poll at the losses after the first");
    ensure_eq!(ring.take()?.len() as u64, 4 * PER_PAGE, "records");
    Ok(())
}

#[apply(guest_test)]
fn sleeping_poll_is_woken() -> Outcome {
    let device = Device::open()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 3);
    let (event, _ring) = start(&device, &attr)?;
    thread::scope(|scope| -> Outcome {
        let sleeper = scope.spawn(|| event.poll(FOREVER));
        device.place(VALUE, 3)?;
        let woken = sleeper.join().map_err(|_| "the sleeper panicked")??;
        ensure_eq!(woken, libc::POLLIN, "the sleeper's poll");
        Ok(())
    })
}

#[apply(guest_test)]
fn sleepers_of_all_events_that_share_a_ring_are_woken() -> Outcome {
    const OTHER: u64 = VALUE + 1;
    let device = Device::open()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 1);
    let (event, _ring) = start(&device, &attr)?;
    let sharing = device.marks(OTHER, 1, FIELDS);
    let sharers =
        [device.open_event(&waking(sharing, 1), How::OWN)?, device.open_event(&waking(sharing, 1), How::OWN)?];
    for sharer in &sharers {
        sharer.output_to(event.ring())?;
    }
    let sleepers = [event].into_iter().chain(sharers).collect();
    // Only one of the events writes a record of the mark.
    sleepers_are_woken(sleepers, libc::POLLIN, || device.mark(VALUE))
}

/// For each of these events, one thread sleeps in poll(2). Checks that `wake` wakes all of these threads, and that
/// poll(2) reports `expected` to them.
pub(crate) fn sleepers_are_woken(
    sleepers: Vec<Event>,
    expected: i16,
    wake: impl FnOnce() -> std::io::Result<()>,
) -> Outcome {
    let all = sleepers.len();
    let (reported, tells) = mpsc::channel();
    // Each sleeper has its own thread. A thread that is not woken remains until the process ends.
    for sleeper in sleepers {
        let (announce, announced) = mpsc::channel();
        let reported = reported.clone();
        thread::spawn(move || {
            // If a test has failed, the receiver no longer exists.
            let _ = announce.send(cpu::thread_id());
            let _ = reported.send(sleeper.poll(FOREVER));
        });
        let thread = announced.recv()?;
        while !os::is_asleep(thread)? {
            os::yield_cpu();
        }
    }
    wake()?;
    for number in 0..all {
        let woken = tells
            .recv_timeout(Duration::from_secs(30))
            .map_err(|_| format!("{number} of {all} sleepers were woken"))??;
        ensure_eq!(woken, expected, "a sleeper's poll");
    }
    Ok(())
}

#[apply(guest_test)]
fn epoll_reports_each_wakeup_once() -> Outcome {
    let device = Device::open()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 2);
    let readable = libc::EPOLLIN.cast_unsigned();
    for edge in [false, true] {
        let (event, _ring) = start(&device, &attr)?;
        let epoll = Epoll::new(event.ring_fd(), edge)?;
        ensure_eq!(epoll.wait(NOW)?, 0, "edge {edge}: epoll before any record");
        for round in 0..4 {
            device.mark(VALUE)?;
            ensure_eq!(epoll.wait(NOW)?, 0, "edge {edge}, round {round}: epoll after one record");
            device.mark(VALUE)?;
            ensure_eq!(epoll.wait(LONG)?, readable, "edge {edge}, round {round}: epoll after two records");
            ensure_eq!(epoll.wait(NOW)?, 0, "edge {edge}, round {round}: a second wakeup");
        }
    }
    Ok(())
}

fn next_signal() -> Fallible<Arrived> {
    let limit = Duration::from_millis(LONG.unsigned_abs().into());
    Ok(os::wait_signal(limit)?.ok_or("no signal")?)
}

fn no_signal(what: &str) -> Outcome {
    let more = os::wait_signal(Duration::ZERO)?;
    ensure!(more.is_none(), "{what}: {more:?}");
    Ok(())
}

/// Opens an event that signals this thread at every record, and maps its ring.
fn signalling(device: &Device) -> Fallible<(Event, Pages)> {
    os::block_signal()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 1);
    let (event, ring) = start(device, &attr)?;
    os::signal_from(event.ring_fd())?;
    Ok((event, ring))
}

#[apply(guest_test)]
fn each_overflow_signals() -> Outcome {
    let device = Device::open()?;
    let (event, ring) = signalling(&device)?;
    let expected = Arrived { code: POLL_IN, fd: event.ring() };
    for round in 1..=30 {
        // Places marks on both CPUs in turn, because the signals must not depend on the CPU that takes the interrupt.
        cpu::pin(round % 2)?;
        device.mark(VALUE)?;
        ensure_eq!(next_signal()?, expected, "the signal of overflow {round}");
        ensure_eq!(ring.head(), 64 * round as u64, "the head at the signal of overflow {round}");
    }
    no_signal("more signals than overflows")
}

#[apply(guest_test)]
fn burst_signals_each_overflow() -> Outcome {
    let device = Device::open()?;
    // The CPU that places the marks also takes the interrupt, so nothing else runs between an overflow and its signal.
    interrupt::bind(0)?;
    cpu::pin(0)?;
    let (event, _ring) = signalling(&device)?;
    device.place(VALUE, 100)?;
    event.disable(0)?;
    for round in 1..=100 {
        ensure_eq!(next_signal()?.code, POLL_IN, "signal {round} of 100");
    }
    no_signal("more signals than overflows")
}

/// Whether the kernel has a thread that writes to the console, as Linux 7.3 has. Then [`print_long`] keeps no CPU busy, and
/// its lines would come between those of later tests.
fn console_has_a_thread() -> std::io::Result<bool> {
    for process in fs::read_dir("/proc")? {
        // Other entries have no name, and a process may have ended.
        let name = fs::read_to_string(process?.path().join("comm")).unwrap_or_default();
        if name.starts_with("pr/") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the kernel write a line to the serial console with interrupts off. Each character causes an exit.
fn print_long() -> std::io::Result<()> {
    let line = format!("<1>guest-tests: interrupts wait {}", ".".repeat(800));
    fs::write("/dev/kmsg", line)
}

/// While events on another CPU overflow, the CPU that takes the interrupt is busy, if the console can keep it busy. So
/// the event queue runs out of buffers.
#[apply(guest_test)]
fn burst_on_another_cpu_signals_each_overflow() -> Outcome {
    const OVERFLOWS: u64 = 1000;
    let device = Device::open()?;
    interrupt::bind(0)?;
    cpu::pin(1)?;
    // Signals beyond this limit are not queued, and come as SIGIO.
    os::limit_signals(2 * OVERFLOWS)?;
    os::block_signal()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 1);
    let event = device.open_event(&attr, How::OWN)?;
    let ring = Pages::map(&event, 16, READ_WRITE)?;
    event.enable(0)?;
    os::signal_from(event.ring_fd())?;
    let doorbell = Doorbell::map(&device)?;
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| -> Outcome {
        let busy = scope.spawn(|| -> std::io::Result<()> {
            cpu::pin(0)?;
            let prints = !console_has_a_thread()?;
            begun.store(true, Ordering::SeqCst);
            while prints && !over.load(Ordering::SeqCst) {
                print_long()?;
            }
            Ok(())
        });
        while !begun.load(Ordering::SeqCst) && !busy.is_finished() {
            std::hint::spin_loop();
        }
        doorbell.place(u32::try_from(VALUE)?, OVERFLOWS);
        over.store(true, Ordering::SeqCst);
        busy.join().map_err(|_| "the busy thread panicked")??;
        Ok(())
    })?;
    event.disable(0)?;
    ensure_eq!(ring.head(), 64 * OVERFLOWS, "bytes of records");
    let expected = Arrived { code: POLL_IN, fd: event.ring() };
    for round in 1..=OVERFLOWS {
        let signal = next_signal().map_err(|error| format!("signal {round}: {error}"))?;
        ensure_eq!(signal, expected, "signal {round} of {OVERFLOWS}");
    }
    no_signal("more signals than overflows")
}

/// Returns the number of signals that have arrived. A signal arrives at the exit that writes its record.
fn signals() -> Fallible<u64> {
    let mut signals = 0;
    while let Some(signal) = os::wait_signal(Duration::ZERO)? {
        ensure_eq!(signal.code, POLL_IN, "a signal's code");
        signals += 1;
    }
    Ok(signals)
}

/// The wakeup interval of an enabled event changes between two marks. From then on, wakeups come at the new interval.
#[apply(guest_test)]
fn interval_changes_while_records_flow() -> Outcome {
    const STAGE: u64 = 300;
    // The unit, the interval, and the number of wakeups that 300 records of 64 bytes cause.
    let stages = [
        (WAKEUP_RECORDS, 10, 30),
        (WAKEUP_RECORDS, 25, 12),
        (WAKEUP_RECORDS, 1, 300),
        (WAKEUP_BYTES, 40 * 64, 7),
        (WAKEUP_RECORDS, 299, 1),
    ];
    let device = Device::open()?;
    os::limit_signals(1000)?;
    os::block_signal()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 7);
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 32, READ_WRITE)?;
    event.enable(0)?;
    os::signal_from(event.ring_fd())?;
    cpu::pin(0)?;
    // The event was opened with an interval of seven records. So the first seven records cause a wakeup. The other four
    // come before the interval changes, and must not count towards the new interval.
    device.place(VALUE, 7 + 4)?;
    ensure_eq!(next_signal()?.code, POLL_IN, "the signal at the interval that the event was opened with");
    no_signal("before the second seven")?;
    for (stage, (unit, every, wakeups)) in stages.into_iter().enumerate() {
        event.wakeup(every, unit, 0)?;
        device.place(VALUE, STAGE)?;
        for wakeup in 1..=wakeups {
            next_signal().map_err(|error| format!("stage {stage}, wakeup {wakeup}: {error}"))?;
        }
        ensure_eq!(signals()?, 0, "stage {stage}: signals beyond {wakeups}");
        ensure_eq!(event.poll(NOW)?, libc::POLLIN, "stage {stage}: poll after the wakeups");
        ensure_eq!(event.poll(NOW)?, 0, "stage {stage}: poll after that poll");
    }
    let records = 7 + 4 + STAGE * stages.len() as u64;
    ensure_eq!(ring.take()?.len() as u64, records, "records");
    ensure_eq!(event.count()?, records, "the count");
    Ok(())
}

#[apply(guest_test)]
fn inherited_events_wake_at_the_interval() -> Outcome {
    let device = Device::open()?;
    let mut attr = waking(device.marks(VALUE, 1, FIELDS), 100);
    attr.set_inherit(1);
    let (event, mut ring) = start(&device, &attr)?;
    let mut child = Command::new("/proc/self/exe")
        .args(["mark", &VALUE.to_string(), "6", "in-turn"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    // The child has already inherited the event, so the new interval must also reach the child's event. Children that
    // are forked later have the new interval from the start.
    event.wakeup(3, WAKEUP_RECORDS, 0)?;
    let mut turns = child.stdin.take().ok_or("no pipe")?;
    let mut answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
    for mark in 1..=5 {
        turns.write_all(b"\n")?;
        answers.read_line(&mut String::new())?;
        let expected = if mark == 3 { libc::POLLIN } else { 0 };
        let wait = if mark == 3 { LONG } else { NOW };
        ensure_eq!(event.poll(wait)?, expected, "poll after {mark} marks");
    }
    turns.write_all(b"\n")?;
    child.wait()?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll after 6 marks");
    let mut other =
        Command::new("/proc/self/exe").args(["mark", &VALUE.to_string(), "3"]).stdout(Stdio::null()).spawn()?;
    other.wait()?;
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll after a later child's marks");
    ensure_eq!(event.poll(NOW)?, 0, "a second wakeup");
    ensure_eq!(ring.take()?.len(), 9, "records");
    Ok(())
}

#[apply(guest_test)]
fn invalid_wakeup_interval_is_refused() -> Outcome {
    let device = Device::open()?;
    let attr = waking(device.marks(VALUE, 1, FIELDS), 5);
    let (event, _ring) = start(&device, &attr)?;
    for unit in [WAKEUP_RECORDS, WAKEUP_BYTES] {
        for every in [0, 1 << 32, u64::MAX] {
            let errno = refused(event.wakeup(every, unit, 0));
            ensure_eq!(errno, Some(libc::EINVAL), "errno for an interval of {every} in unit {unit}");
        }
    }
    for unit in [0, 3, u32::MAX] {
        let errno = refused(event.wakeup(1, unit, 0));
        ensure_eq!(errno, Some(libc::EINVAL), "errno for unit {unit}");
    }
    let errno = refused(event.wakeup(1, WAKEUP_RECORDS, 1));
    ensure_eq!(errno, Some(libc::EINVAL), "errno for a reserved word");
    let counter = device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    let errno = refused(counter.wakeup(1, WAKEUP_RECORDS, 0));
    ensure_eq!(errno, Some(libc::EINVAL), "errno for an event that only counts");
    let perfs = kernels(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    let errno = refused(perfs.wakeup(1, WAKEUP_RECORDS, 0));
    ensure_eq!(errno, Some(libc::ENOTTY), "errno for an event of perf_event_open(2)");
    // The refused requests have changed nothing.
    wakes_at(&event, &device, &[5, 10])
}

/// A program that waits for records with `poll()`, takes all of them from the ring, and waits again.
#[apply(guest_test)]
fn loop_of_poll_and_read_gets_every_record() -> Outcome {
    const RECORDS: u64 = 4000;
    const EVERY: u32 = 16;
    /// Maximum number of unread records. The ring has room for all of them.
    const AHEAD: u64 = 1000;
    let vpmu = Vpmu::open()?;
    let attr = vpmu.attr("mark=50")?.sampling(1).wakeup_every(u32::MAX);
    let event = vpmu.open_event(&attr)?;
    let mut ring = event.map(5)?;
    event.set_wakeup(Wakeup::Records(EVERY))?;
    event.enable()?;
    let taken = AtomicU64::new(0);
    let (times, waits) = thread::scope(|scope| -> Result<_, Box<dyn std::error::Error>> {
        let reader = scope.spawn(|| -> Result<(Vec<u64>, u64), String> {
            let (mut times, mut waits) = (Vec::new(), 0_u64);
            while (times.len() as u64) < RECORDS {
                let ready = event.poll(None).map_err(|error| error.to_string())?;
                waits += u64::from(ready.readable);
                for record in ring.records() {
                    match record.map_err(|error| error.to_string())? {
                        Record::Sample(sample) => times.push(sample.time),
                        other => return Err(format!("{other:?}")),
                    }
                }
                taken.store(times.len() as u64, Ordering::SeqCst);
            }
            Ok((times, waits))
        });
        for placed in 0..RECORDS {
            while placed >= taken.load(Ordering::SeqCst) + AHEAD && !reader.is_finished() {
                os::yield_cpu();
            }
            vpmu.mark(50)?;
        }
        Ok(reader.join().map_err(|_| "the reader panicked")??)
    })?;
    ensure_eq!(times.len() as u64, RECORDS, "records taken");
    ensure!(times.is_sorted(), "the times of the records are out of order");
    let most = RECORDS / u64::from(EVERY);
    ensure!((4..=most).contains(&waits), "{waits} waits, expected 4 to {most}");
    ensure_eq!(event.read()?.value, RECORDS, "the count");
    Ok(())
}

#[apply(guest_test)]
fn descriptor_cannot_be_spliced() -> Outcome {
    let device = Device::open()?;
    let (event, _ring) = start(&device, &waking(device.marks(VALUE, 1, FIELDS), 1))?;
    device.place(VALUE, 3)?;
    let (_reader, writer) = std::io::pipe()?;
    let perfs = kernels(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    for (event, whose) in [(&event, "ours"), (&perfs, "perf's own")] {
        let errno = refused(event.splice_to(writer.as_raw_fd()));
        ensure_eq!(errno, Some(libc::EINVAL), "splice(2) of {whose}");
    }
    ensure_eq!(event.count()?, 3, "the count after the refused splice(2)");
    Ok(())
}

#[apply(guest_test)]
fn used_up_refresh_hangs_up() -> Outcome {
    let device = Device::open()?;
    let (event, mut ring) = signalling(&device)?;
    event.disable(0)?;
    for round in 0..2 {
        event.refresh(3)?;
        for code in [POLL_IN, POLL_IN, POLL_HUP] {
            device.mark(VALUE)?;
            ensure_eq!(next_signal()?.code, code, "round {round}: the signal's code");
        }
        device.place(VALUE, 5)?;
        no_signal("after the last overflow")?;
        ensure_eq!(ring.take()?.len(), 3, "round {round}: records");
        ensure_eq!(event.count()?, 3 * (round + 1), "round {round}: the count");
    }
    Ok(())
}

#[apply(guest_test)]
fn task_that_ends_hangs_up() -> Outcome {
    let device = Device::open()?;
    let mut child = Command::new("/proc/self/exe")
        .args(["mark", &VALUE.to_string(), "3", "in-turn"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let how = How { pid: child.id().cast_signed(), ..How::OWN };
    let event = device.open_event(&waking(device.marks(VALUE, 1, FIELDS), 2), how)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    event.enable(0)?;
    let mut turns = child.stdin.take().ok_or("no pipe")?;
    let mut answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
    for _ in 0..2 {
        turns.write_all(b"\n")?;
        answers.read_line(&mut String::new())?;
    }
    ensure_eq!(event.poll(LONG)?, libc::POLLIN, "poll while the task runs");
    ensure_eq!(event.poll(NOW)?, 0, "a second wakeup");
    thread::scope(|scope| -> Outcome {
        let sleeper = scope.spawn(|| event.poll(FOREVER));
        turns.write_all(b"\n")?;
        child.wait()?;
        let woken = sleeper.join().map_err(|_| "the sleeper panicked")??;
        ensure!(woken & libc::POLLHUP != 0, "poll at the task's end lacks POLLHUP: {woken:#x}");
        Ok(())
    })?;
    ensure!(event.poll(NOW)? & libc::POLLHUP != 0, "poll after the task's end lacks POLLHUP");
    ensure_eq!(ring.take()?.len(), 3, "records of a task that has ended");
    ensure_eq!(event.count()?, 3, "the count of a task that has ended");
    Ok(())
}

#[apply(guest_test)]
fn shared_ring_wakes_all_and_signals_one() -> Outcome {
    const SECOND: u64 = VALUE + 1;
    let device = Device::open()?;
    os::block_signal()?;
    let (target, _ring) = start(&device, &silent(device.marks(VALUE, 1, FIELDS)))?;
    let attr = waking(device.marks(SECOND, 1, FIELDS), 2);
    let event = device.start(&attr, How::OWN)?;
    event.output_to(target.ring())?;
    os::signal_from(target.ring_fd())?;
    os::signal_from(event.ring_fd())?;
    for round in 0..3 {
        device.place(VALUE, 2)?;
        device.mark(SECOND)?;
        ensure_eq!(target.poll(NOW)?, 0, "round {round}: poll after one record of the second event");
        device.mark(SECOND)?;
        let signal = next_signal()?;
        ensure_eq!(signal.fd, event.ring(), "round {round}: the descriptor that signals");
        no_signal("the ring's other event")?;
        ensure_eq!(target.poll(LONG)?, libc::POLLIN, "round {round}: poll of the ring's owner");
    }
    Ok(())
}

/// The device's own tests assert the exact number of interrupts that it raises. The number that a guest counts can be
/// higher, because the lab's emulated CPU may deliver an injected interrupt twice.
#[apply(guest_test)]
fn interrupts_are_as_few_as_the_mark_allows() -> Outcome {
    const RECORDS: u64 = 480;
    const TWICE: u64 = 2;
    let device = Device::open()?;
    for every in [1, 16, 160] {
        let attr = waking(device.marks(VALUE, 1, FIELDS), every);
        let (event, mut ring) = start(&device, &attr)?;
        let before = interrupt::taken()?;
        let mut records = 0;
        for _ in 0..RECORDS / 160 {
            device.place(VALUE, 160)?;
            records += ring.take()?.len() as u64;
        }
        let after = interrupt::taken()?;
        ensure_eq!(records, RECORDS, "records");
        let most = RECORDS / u64::from(every);
        let taken = after - before;
        ensure!(
            taken <= most + TWICE && taken > 0,
            "{taken} interrupts for {RECORDS} records with a wakeup every {every}"
        );
        drop(event);
    }
    let (event, _ring) = start(&device, &silent(device.marks(VALUE, 1, FIELDS)))?;
    let before = interrupt::taken()?;
    device.place(VALUE, 200)?;
    let after = interrupt::taken()?;
    let taken = after - before;
    ensure!(taken <= TWICE, "{taken} interrupts although no wakeup is due");
    drop(event);
    Ok(())
}
