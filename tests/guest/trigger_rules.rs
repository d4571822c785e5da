//! Permitted links between starters, stoppers and targets. A link ends when either of its events is closed.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::{PERF_TYPE_SOFTWARE, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::TIME;
use crate::persisting::{Doomed, tell};
use crate::raw::{
    Device, Doorbell, ENGINE_BATCHED, Event, FLAG_ON_STARTER, How, KIND_MARK, KIND_SOFTWARE, SW_CPU_CLOCK, kernels,
    refused, sampling,
};
use crate::triggers::{INSIDE, Region, START, STOP, trigger, waiting};
use crate::{Outcome, cpu};

const GROUP: &str = "trigger";

const HERE: How<'_> = How::on_cpu(1);

fn inside(device: &Device) -> perf_event_attr {
    device.attr(KIND_MARK, INSIDE.into())
}

#[apply(guest_test)]
fn links_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let starter = trigger(&device, START, 1, HERE)?;
    let target = waiting(&device, &inside(&device), HERE)?;
    let both = |from: &Event, to: i32, errno: i32, what: &str| -> Outcome {
        ensure_eq!(refused(from.starts(to)), Some(errno), "errno for a starter: {what}");
        ensure_eq!(refused(from.stops(to)), Some(errno), "errno for a stopper: {what}");
        Ok(())
    };
    both(&starter, starter.as_raw_fd(), libc::EINVAL, "itself")?;
    let there = waiting(&device, &inside(&device), How::on_cpu(0))?;
    both(&starter, there.as_raw_fd(), libc::EINVAL, "another CPU")?;
    let own = waiting(&device, &inside(&device), How::OWN)?;
    both(&starter, own.as_raw_fd(), libc::EINVAL, "a task")?;
    let own_starter = trigger(&device, START, 1, How::OWN)?;
    both(&own_starter, target.as_raw_fd(), libc::EINVAL, "a task's starter of a CPU's target")?;
    let (id, bound) = (i32::try_from(cpu::thread_id())?, How { cpu: 1, ..How::OWN });
    let bound = waiting(&device, &inside(&device), bound)?;
    both(&own_starter, bound.as_raw_fd(), libc::EINVAL, "the same task on one CPU alone")?;
    let foreign = thread::scope(|scope| {
        let other = scope.spawn(|| trigger(&device, START, 1, How::OWN));
        other.join().map_err(|_| "the other thread panicked")
    })??;
    both(&foreign, own.as_raw_fd(), libc::EINVAL, "another task's target")?;
    // This target is opened with the calling thread's id. It belongs to the same task as events that are opened for the
    // calling thread, so the link is permitted.
    let named = waiting(&device, &inside(&device), How { pid: id, ..How::OWN })?;
    own_starter.starts(named.as_raw_fd())?;
    let counting = device.start(&inside(&device), HERE)?;
    both(&counting, target.as_raw_fd(), libc::EINVAL, "an event that never overflows")?;
    both(&starter, -1, libc::EBADF, "no descriptor")?;
    both(&starter, 1_000, libc::EBADF, "a closed descriptor")?;
    let null = File::open("/dev/null")?;
    both(&starter, null.as_raw_fd(), libc::EBADF, "a file that is not an event's")?;
    both(&starter, device.as_raw_fd(), libc::EBADF, "the device")?;
    let clock = kernels(&perf_event_attr { type_: PERF_TYPE_SOFTWARE, config: 0, ..inside(&device) }, HERE)?;
    both(&starter, clock.as_raw_fd(), libc::EBADF, "an event of the guest's kernel")?;
    // The refused requests have left no link.
    starter.starts(target.as_raw_fd())?;
    starter.stops(target.as_raw_fd())?;
    Ok(())
}

#[apply(guest_test)]
fn target_has_one_starter_and_one_stopper() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let target = waiting(&device, &inside(&device), HERE)?;
    let fd = target.as_raw_fd();
    let (first, second) = (trigger(&device, START, 1, HERE)?, trigger(&device, STOP, 1, HERE)?);
    first.starts(fd)?;
    ensure_eq!(refused(first.starts(fd)), Some(libc::EEXIST), "errno for the same starter again");
    ensure_eq!(refused(second.starts(fd)), Some(libc::EBUSY), "errno for another starter");
    second.stops(fd)?;
    ensure_eq!(refused(second.stops(fd)), Some(libc::EEXIST), "errno for the same stopper again");
    ensure_eq!(refused(first.stops(fd)), Some(libc::EBUSY), "errno for another stopper");
    // Another descriptor still refers to the same target.
    let twin = std::os::fd::AsFd::as_fd(&target).try_clone_to_owned()?;
    ensure_eq!(
        refused(first.starts(twin.as_raw_fd())),
        Some(libc::EEXIST),
        "errno for the same starter by a second descriptor"
    );
    device.mark(START.into())?;
    device.place(INSIDE.into(), 3)?;
    device.mark(STOP.into())?;
    device.place(INSIDE.into(), 3)?;
    ensure_eq!(target.count()?, 3, "marks that the existing links let count");
    Ok(())
}

#[apply(guest_test)]
#[group = "output-batched"]
fn batched_event_as_starter_is_refused() -> Outcome {
    let device = Device::open()?;
    let target = waiting(&device, &inside(&device), HERE)?;
    let clock = sampling(device.attr(KIND_SOFTWARE, SW_CPU_CLOCK), 1_000_000, TIME);
    let event = device.open_event(&clock, HERE.by(ENGINE_BATCHED))?;
    let fd = target.as_raw_fd();
    for refusal in [refused(event.starts(fd)), refused(event.stops(fd))] {
        ensure_eq!(refusal, Some(libc::EOPNOTSUPP), "errno for a starter with the batched engine");
    }
    Ok(())
}

#[apply(guest_test)]
fn links_go_with_the_event_that_acts() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let region = Region::of(&device, &inside(&device), HERE)?;
    let Region { target, starter, stopper } = region;
    // Without a stopper, a running target continues to run.
    device.mark(START.into())?;
    drop(stopper);
    device.mark(STOP.into())?;
    device.place(INSIDE.into(), 4)?;
    ensure_eq!(target.count()?, 4, "marks without a stopper");
    let stopper = trigger(&device, STOP, 1, HERE)?;
    stopper.stops(target.as_raw_fd())?;
    device.mark(STOP.into())?;
    // A paused target stays paused until another starter starts it, even if the target is disabled and enabled again.
    drop(starter);
    device.mark(START.into())?;
    device.place(INSIDE.into(), 4)?;
    target.disable(0)?;
    target.enable(0)?;
    device.place(INSIDE.into(), 4)?;
    ensure_eq!(target.count()?, 4, "marks of a paused target");
    let starter = trigger(&device, START, 1, HERE)?;
    device.mark(START.into())?;
    device.place(INSIDE.into(), 4)?;
    ensure_eq!(target.count()?, 4, "marks before the new starter is linked");
    starter.starts(target.as_raw_fd())?;
    device.mark(START.into())?;
    device.place(INSIDE.into(), 4)?;
    ensure_eq!(target.count()?, 8, "marks after another starter started it");
    // After a starter or stopper is closed, the target can get another one, even while it is disabled.
    target.disable(0)?;
    drop((starter, stopper));
    let starter = trigger(&device, START, 1, HERE)?;
    starter.starts(target.as_raw_fd())?;
    starter.stops(target.as_raw_fd())?;
    Ok(())
}

#[apply(guest_test)]
fn links_go_with_their_target() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let starter = trigger(&device, START, 1, HERE)?;
    for state in ["waiting", "running", "stopped", "off", "never on"] {
        let target = match state {
            "never on" => device.open_event(&inside(&device), HERE.with(FLAG_ON_STARTER))?,
            _ => waiting(&device, &inside(&device), HERE)?,
        };
        let stopper = trigger(&device, STOP, 1, HERE)?;
        starter.starts(target.as_raw_fd())?;
        stopper.stops(target.as_raw_fd())?;
        match state {
            "running" => device.mark(START.into())?,
            "stopped" => {
                device.mark(START.into())?;
                device.mark(STOP.into())?;
            }
            "off" => target.disable(0).map(|_| ())?,
            _ => {}
        }
        drop(target);
        device.mark(START.into())?;
        device.mark(STOP.into())?;
    }
    // The starter still works.
    let target = waiting(&device, &inside(&device), HERE)?;
    starter.starts(target.as_raw_fd())?;
    device.mark(START.into())?;
    device.place(INSIDE.into(), 6)?;
    ensure_eq!(target.count()?, 6, "marks of the starter's last target");
    Ok(())
}

#[apply(guest_test)]
fn links_go_with_a_killed_process() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    // This process opens the target. The child inherits the file descriptor, and opens the starter and the stopper.
    let target = waiting(&device, &inside(&device), HERE)?;
    let mut child = Doomed::start(|parent| {
        let device = Device::open()?;
        let starter = trigger(&device, START, 1, HERE)?;
        let stopper = trigger(&device, STOP, 1, HERE)?;
        starter.starts(target.as_raw_fd())?;
        stopper.stops(target.as_raw_fd())?;
        // The starter also starts a target that the child opens.
        let own = waiting(&device, &inside(&device), HERE)?;
        starter.starts(own.as_raw_fd())?;
        device.mark(START.into())?;
        tell(parent, 1)?;
        std::mem::forget((starter, stopper, own, device));
        Ok(())
    })?;
    child.hear()?;
    device.place(INSIDE.into(), 5)?;
    ensure_eq!(target.count()?, 5, "marks of the running target");
    child.kill()?;
    device.mark(STOP.into())?;
    device.place(INSIDE.into(), 5)?;
    ensure_eq!(target.count()?, 10, "marks after its stopper has ended");
    let stopper = trigger(&device, STOP, 1, HERE)?;
    stopper.stops(target.as_raw_fd())?;
    stopper.starts(target.as_raw_fd())?;
    Ok(())
}

#[apply(guest_test)]
fn target_that_is_off_is_left_alone() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let region = Region::of(&device, &inside(&device), HERE)?;
    region.target.disable(0)?;
    device.mark(START.into())?;
    region.target.enable(0)?;
    device.place(INSIDE.into(), 3)?;
    ensure_eq!(region.target.count()?, 0, "marks after a start while the target was off");
    device.mark(START.into())?;
    region.target.disable(0)?;
    device.mark(STOP.into())?;
    region.target.enable(0)?;
    device.place(INSIDE.into(), 3)?;
    ensure_eq!(region.target.count()?, 3, "marks after a stop while the target was off");
    // A disabled event starts and stops nothing.
    region.stopper.disable(0)?;
    device.mark(STOP.into())?;
    device.place(INSIDE.into(), 3)?;
    ensure_eq!(region.target.count()?, 6, "marks after a stop by a stopper that was off");
    Ok(())
}

/// A thread that places the marks of a region again and again. It can be held between two regions.
#[derive(Debug, Default)]
struct Placer {
    stop: AtomicBool,
    hold: AtomicBool,
    held: AtomicBool,
    /// The number of regions so far.
    placed: AtomicU64,
}

impl Placer {
    /// Places marks on CPU 1 until `stop` is set.
    fn run(&self, device: &Device) -> std::io::Result<()> {
        cpu::pin(1)?;
        let bell = Doorbell::map(device)?;
        while !self.stop.load(Ordering::Relaxed) {
            if self.hold.load(Ordering::Acquire) {
                self.held.store(true, Ordering::Release);
                thread::yield_now();
                continue;
            }
            self.held.store(false, Ordering::Release);
            bell.mark(START);
            bell.mark(INSIDE);
            bell.mark(STOP);
            self.placed.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the number of regions so far and the count of `target`, while no region is entered.
    fn held(&self, target: &Event) -> std::io::Result<(u64, u64)> {
        self.hold.store(true, Ordering::Release);
        while !self.held.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let seen = (self.placed.load(Ordering::Relaxed), target.count()?);
        self.hold.store(false, Ordering::Release);
        while self.held.load(Ordering::Acquire) {
            thread::yield_now();
        }
        Ok(seen)
    }

    fn await_more(&self, regions: u64) {
        let enough = self.placed.load(Ordering::Relaxed) + regions;
        while self.placed.load(Ordering::Relaxed) < enough {
            thread::yield_now();
        }
    }
}

#[apply(guest_test)]
fn links_come_and_go_while_marks_are_placed() -> Outcome {
    const ROUNDS: usize = 120;
    let device = Device::open()?;
    let placer = Placer::default();
    cpu::pin(0)?;
    let lasting = trigger(&device, START, 1, HERE)?;
    thread::scope(|scope| -> Outcome {
        let placing = scope.spawn(|| placer.run(&device));
        let linked = (|| -> Outcome {
            for round in 0..ROUNDS {
                let target = waiting(&device, &inside(&device), HERE)?;
                let stopper = trigger(&device, STOP, 1, HERE)?;
                lasting.starts(target.as_raw_fd())?;
                stopper.stops(target.as_raw_fd())?;
                if round % 8 == 0 {
                    let (placed, count) = placer.held(&target)?;
                    placer.await_more(3);
                    let (later, more) = placer.held(&target)?;
                    ensure_eq!(more - count, later - placed, "round {round}: marks counted in linked regions");
                }
                // In turn, a round closes the target first, closes the stopper first, or closes both concurrently.
                match round % 3 {
                    0 => drop((target, stopper)),
                    1 => drop((stopper, target)),
                    _ => {
                        let closer = scope.spawn(move || drop(stopper));
                        drop(target);
                        closer.join().map_err(|_| "the closer panicked")?;
                    }
                }
            }
            Ok(())
        })();
        placer.stop.store(true, Ordering::Relaxed);
        placing.join().map_err(|_| "the placer panicked")??;
        linked
    })?;
    ensure_eq!(lasting.count()?, placer.placed.into_inner(), "marks of the starter that stayed open");
    // The starter that stayed open starts this target alone, and no stopper is left.
    let target = waiting(&device, &inside(&device), HERE)?;
    lasting.starts(target.as_raw_fd())?;
    cpu::pin(1)?;
    for value in [INSIDE, START, INSIDE, STOP, INSIDE] {
        device.mark(value.into())?;
    }
    ensure_eq!(target.count()?, 2, "marks of a target whose stopper is gone");
    Ok(())
}

#[apply(guest_test)]
fn both_ends_are_closed_at_once() -> Outcome {
    let device = Device::open()?;
    for round in 0..60 {
        let region = Region::of(&device, &inside(&device), HERE)?;
        let fresh = trigger(&device, START, 1, HERE)?;
        let Region { target, starter, stopper } = region;
        let fd = target.as_raw_fd();
        thread::scope(|scope| -> Outcome {
            let closing = scope.spawn(move || drop(starter));
            let linking = scope.spawn(|| fresh.starts(fd).err().and_then(|e| e.raw_os_error()));
            if round % 2 == 0 {
                drop(stopper);
            }
            closing.join().map_err(|_| "the closer panicked")?;
            let refusal = linking.join().map_err(|_| "the linker panicked")?;
            ensure!(
                refusal.is_none() || refusal == Some(libc::EBUSY),
                "round {round}: the link was refused with {refusal:?}"
            );
            // If the first attempt was refused, this attempt succeeds. If the first attempt succeeded, this attempt
            // fails, because the link already exists.
            let again = refused(fresh.starts(fd));
            let expected = match refusal {
                None => Some(libc::EEXIST),
                Some(_) => None,
            };
            ensure_eq!(again, expected, "round {round}: errno for linking again");
            Ok(())
        })?;
        drop(target);
    }
    // No link is left.
    let attr = sampling(device.port_exits(), 1, 0);
    let last = device.start(&attr, HERE)?;
    let target = waiting(&device, &inside(&device), HERE)?;
    last.starts(target.as_raw_fd())?;
    Ok(())
}
