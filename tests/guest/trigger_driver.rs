//! Tests the driver itself, not the device: links, flushes, and mappings of the doorbell. Covers permissions,
//! signals, links of tasks whose inherited contexts perf core swaps, and links that are made and ended while tasks
//! fork.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::TID;
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Doorbell, Event, FLAG_ON_STARTER, How, KIND_MARK, PAGE, refused, silent};
use crate::triggers::{INSIDE, Region, START, STOP};
use crate::{Outcome, cpu, os};

const GROUP: &str = "trigger";

/// The result of one task's work, which it sends to another task.
type Reported = io::Result<()>;

fn inherited(mut attr: perf_event_attr) -> perf_event_attr {
    attr.set_inherit(1);
    attr
}

/// Opens a target that waits for its starter. The events of these tests write no records, because records that name a
/// task would also keep perf core from swapping two tasks' inherited contexts. In these tests, only links should
/// prevent the swap.
fn target(device: &Device, how: How<'_>) -> io::Result<Event> {
    let attr = inherited(device.attr(KIND_MARK, INSIDE.into()));
    device.start(&attr, how.with(FLAG_ON_STARTER))
}

fn starter(device: &Device, how: How<'_>) -> io::Result<Event> {
    device.start(&inherited(device.marks(START.into(), 1, 0)), how)
}

fn stopper(device: &Device, how: How<'_>) -> io::Result<Event> {
    device.start(&inherited(device.marks(STOP.into(), 1, 0)), how)
}

fn link(region: &Region) -> io::Result<()> {
    region.starter.starts(region.target.as_raw_fd())?;
    region.stopper.stops(region.target.as_raw_fd())?;
    Ok(())
}

/// Places two marks, then a region with `inside` marks in it, then two more marks.
fn pass(device: &Device, inside: u64) -> io::Result<()> {
    device.place(INSIDE.into(), 2)?;
    device.mark(START.into())?;
    device.place(INSIDE.into(), inside)?;
    device.mark(STOP.into())?;
    device.place(INSIDE.into(), 2)
}

/// Starts a thread that forwards messages. Returns the sender to the thread and the receiver from it.
fn relay<'scope>(scope: &'scope thread::Scope<'scope, '_>) -> (Sender<Reported>, Receiver<Reported>) {
    let (tell, reported) = channel();
    let (forward, forwarded) = channel();
    scope.spawn(move || reported.into_iter().try_for_each(|what| forward.send(what)));
    (tell, forwarded)
}

/// After a context switch has swapped the contexts of two tasks, the events that a task opens are not in the same
/// context as the events that it opened before the swap. Nevertheless, events in different contexts can be linked.
#[apply(guest_test)]
fn links_between_swapped_contexts_act() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    for turn in 0..20 {
        thread::scope(|scope| -> Outcome {
            // The relay thread has no inherited events, so perf core never swaps its context with another task's.
            let (tell, reported) = relay(scope);
            // The servant thread inherits only the starter and the stopper. While these two have no links, perf core
            // may swap the contexts of this thread and the servant.
            let (starter, stopper) = (starter(&device, How::OWN)?, stopper(&device, How::OWN)?);
            let (order, orders) = channel();
            let servant = &device;
            scope.spawn(move || {
                let mut passes = orders.into_iter().map(|inside| pass(servant, inside));
                passes.try_for_each(|passed| tell.send(passed))
            });
            // A switch from this thread to the servant swaps their contexts. The switches back go through the relay
            // thread, and swap no contexts.
            for _ in 0..=turn % 4 {
                order.send(0)?;
                reported.recv()??;
            }
            let region = Region { target: target(&device, How::OWN)?, starter, stopper };
            link(&region)?;
            pass(&device, 5)?;
            ensure_eq!(region.target.count()?, 5, "turn {turn}: marks in this task's region");
            os::in_child(|| Ok(pass(&device, 2)?))?;
            ensure_eq!(region.target.count()?, 7, "turn {turn}: marks with those of a child's region");
            order.send(3)?;
            reported.recv()??;
            let count = region.target.count()?;
            ensure_eq!(count, 7, "turn {turn}: marks after a region of a task without a target");
            Ok(())
        })?;
    }
    Ok(())
}

#[apply(guest_test)]
fn children_of_one_end_are_not_linked() -> Outcome {
    let device = Device::open()?;
    let alone = device.marks(STOP.into(), 1, 0);
    let region = Region {
        target: target(&device, How::OWN)?,
        starter: starter(&device, How::OWN)?,
        stopper: device.start(&alone, How::OWN)?,
    };
    link(&region)?;
    pass(&device, 4)?;
    ensure_eq!(region.target.count()?, 4, "marks in this task's region");
    os::in_child(|| Ok(pass(&device, 3)?))?;
    // The child did not inherit the stopper, so its region never ends. Therefore, the two marks that follow the stop
    // mark also count.
    ensure_eq!(region.target.count()?, 4 + 3 + 2, "marks with those of the child's region");
    Ok(())
}

#[apply(guest_test)]
fn links_come_and_go_while_tasks_fork() -> Outcome {
    let device = Device::open()?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> Outcome {
        let (tell, reported) = channel();
        let forker = scope.spawn({
            let (stop, device) = (&stop, &device);
            move || -> Result<u32, String> {
                tell.send(cpu::thread_id()).map_err(|e| e.to_string())?;
                let mut forked = 0;
                while !stop.load(Ordering::Relaxed) {
                    thread::scope(|scope| {
                        (0..3).for_each(|_| drop(scope.spawn(|| pass(device, 2))));
                    });
                    forked += 3;
                }
                Ok(forked)
            }
        });
        let how = How { pid: reported.recv()?.cast_signed(), ..How::OWN };
        let turns = (0..24).try_for_each(|turn| churn(&device, how, turn));
        stop.store(true, Ordering::Relaxed);
        let forked = forker.join().map_err(|_| "the forker panicked")??;
        turns?;
        ensure!(forked > 0, "nothing was forked");
        Ok(())
    })?;
    // Links still work after all that.
    let region = Region {
        target: target(&device, How::OWN)?,
        starter: starter(&device, How::OWN)?,
        stopper: stopper(&device, How::OWN)?,
    };
    link(&region)?;
    pass(&device, 2)?;
    os::in_child(|| Ok(pass(&device, 3)?))?;
    ensure_eq!(region.target.count()?, 5, "marks in the last regions");
    Ok(())
}

/// Opens, links, reads and closes a region's events for another task, while that task creates threads. `turn` selects
/// the event that is closed first: the target, the starter or the stopper.
fn churn(device: &Device, how: How<'_>, turn: usize) -> Outcome {
    let region =
        Region { target: target(device, how)?, starter: starter(device, how)?, stopper: stopper(device, how)? };
    link(&region)?;
    let again = refused(region.starter.starts(region.target.as_raw_fd()));
    ensure_eq!(again, Some(libc::EEXIST), "turn {turn}: errno for the same link again");
    let mut last = 0;
    for _ in 0..3 {
        let now = region.target.count()?;
        ensure!(now >= last, "turn {turn}: the count fell from {last} to {now}");
        last = now;
    }
    let Region { target, starter, stopper } = region;
    match turn % 3 {
        0 => drop(target),
        1 => drop(starter),
        _ => drop(stopper),
    }
    Ok(())
}

#[apply(guest_test)]
fn flush_sends_a_signal() -> Outcome {
    let device = Device::open()?;
    os::block_signal()?;
    let event = device.start(&silent(device.marks(INSIDE.into(), 1, TID)), How::OWN)?;
    let _ring = Pages::map(&event, 1, READ_WRITE)?;
    os::signal_from(event.ring_fd())?;
    for turn in 0..20 {
        device.mark(INSIDE.into())?;
        event.flush(0)?;
        // The signal has already been sent when the flush returns, so the test need not wait.
        let signal = os::wait_signal(Duration::ZERO)?;
        let from = signal.map(|signal| (signal.code, signal.fd));
        let expected = (os::POLL_IN, event.ring());
        ensure_eq!(from, Some(expected), "turn {turn}: code and descriptor of the signal");
        event.flush(0)?;
        let signal = os::wait_signal(Duration::ZERO)?;
        ensure_eq!(signal, None, "turn {turn}: a signal without new records");
    }
    Ok(())
}

#[apply(guest_test)]
fn flush_of_all_by_nobody_is_refused() -> Outcome {
    let device = Device::open()?;
    device.flush()?;
    let event = device.start(&device.attr(KIND_MARK, INSIDE.into()), How::OWN)?;
    os::in_child(|| {
        os::become_nobody()?;
        let (all, own) = (refused(device.flush()), refused(event.flush(0)));
        ensure_eq!((all, own), (Some(libc::EPERM), None), "errno of nobody's flushes of all and of its own event");
        Ok(())
    })
}

#[apply(guest_test)]
fn doorbell_map_without_write_access_is_refused() -> Outcome {
    let device = Device::open()?;
    let map = |protection| {
        let mapped = Doorbell::map_raw(&device, PAGE, protection, libc::MAP_SHARED, 0);
        refused(mapped)
    };
    ensure_eq!(map(libc::PROT_READ), Some(libc::EINVAL), "errno for a read-only map");
    let runs = READ_WRITE | libc::PROT_EXEC;
    ensure_eq!(map(runs), Some(libc::EINVAL), "errno for an executable map");
    let reader = File::open("/dev/vpmu")?;
    let refusal = refused(cpu::try_map(reader.as_fd(), PAGE, libc::MAP_SHARED, 0));
    ensure_eq!(refusal, Some(libc::EACCES), "errno for a mapping through a read-only file");
    Ok(())
}

#[apply(guest_test)]
fn doorbell_map_keeps_the_device() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    drop(device);
    let unloaded = Command::new("rmmod").arg("virtio_pmu").stderr(Stdio::null()).status()?;
    ensure!(!unloaded.success(), "the module was unloaded with the doorbell mapped");
    bell.mark(INSIDE);
    Ok(())
}
