//! Links between inherited events. Each forked task has its own regions.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::ensure_eq;
use crate::fields::{ADDR, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{Device, Doorbell, ENGINE_EXIT, Event, FLAG_ON_STARTER, How, KIND_MARK, silent};
use crate::switches::{Turn, settle};
use crate::triggers::{INSIDE, Region, START, STOP};
use crate::{Fallible, Outcome, cpu, fields, os};

const GROUP: &str = "trigger";

/// The same attr, inherited by children.
fn inherited(mut attr: perf_event_attr) -> perf_event_attr {
    attr.set_inherit(1);
    attr
}

/// Opens the events of a region for this thread and all its descendants. If `linked` is true, also links them.
fn family(device: &Device, linked: bool) -> std::io::Result<Region> {
    let marks = |value: u32, period| inherited(device.marks(value.into(), period, 0));
    let inside = inherited(device.attr(KIND_MARK, INSIDE.into()));
    let region = Region {
        target: device.start(&inside, How::OWN.with(FLAG_ON_STARTER))?,
        starter: device.start(&marks(START, 1), How::OWN.by(ENGINE_EXIT))?,
        stopper: device.start(&marks(STOP, 1), How::OWN.by(ENGINE_EXIT))?,
    };
    if linked {
        link(&region)?;
    }
    Ok(region)
}

fn link(region: &Region) -> std::io::Result<()> {
    region.starter.starts(region.target.as_raw_fd())?;
    region.stopper.stops(region.target.as_raw_fd())?;
    Ok(())
}

/// Places the marks of `times` regions. Each region has two marks inside and one outside.
fn regions(bell: &Doorbell, times: u64) {
    for _ in 0..times {
        bell.mark(INSIDE);
        bell.mark(START);
        bell.place(INSIDE, 2);
        bell.mark(STOP);
    }
}

#[apply(guest_test)]
fn child_has_regions_of_its_own() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let region = family(&device, true)?;
    // The parent stays in its region while the child is outside any region. Then the child enters and leaves its own
    // region.
    bell.mark(START);
    let code = os::forked(|| {
        let Ok(device) = Device::open() else {
            return 1;
        };
        let Ok(bell) = Doorbell::map(&device) else {
            return 2;
        };
        bell.place(INSIDE, 7);
        bell.mark(START);
        bell.place(INSIDE, 3);
        bell.mark(STOP);
        bell.place(INSIDE, 7);
        0
    })?;
    ensure_eq!(code, 0, "the child's exit code");
    bell.place(INSIDE, 5);
    bell.mark(STOP);
    bell.place(INSIDE, 5);
    // The child's target waits for the child's start mark. It does not inherit the running state of the parent's
    // target, but the state in which the parent's target was opened. So the child's first seven marks do not count.
    ensure_eq!(region.target.count()?, 3 + 5, "marks in regions of parent and child");
    Ok(())
}

#[apply(guest_test)]
fn family_counts_all_its_regions() -> Outcome {
    const EACH: u64 = 100;
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let region = family(&device, true)?;
    regions(&bell, EACH);
    // A child and a grandchild run regions. Another grandchild ends inside its region.
    let code = os::forked(|| {
        let Ok(device) = Device::open() else {
            return 1;
        };
        let Ok(bell) = Doorbell::map(&device) else {
            return 2;
        };
        regions(&bell, EACH);
        let grandchild = os::forked(|| {
            let Ok(bell) = Doorbell::map(&device) else {
                return 3;
            };
            regions(&bell, EACH);
            0
        });
        let ends_inside = os::forked(|| {
            let Ok(bell) = Doorbell::map(&device) else {
                return 4;
            };
            bell.mark(START);
            bell.place(INSIDE, 10);
            0
        });
        match (grandchild, ends_inside) {
            (Ok(0), Ok(0)) => 0,
            _ => 5,
        }
    })?;
    ensure_eq!(code, 0, "the child's exit code");
    // Threads on both CPUs at once.
    thread::scope(|scope| -> Outcome {
        let threads = [0, 1, 0, 1].map(|vcpu| {
            let bell = &bell;
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(vcpu)?;
                regions(bell, EACH);
                Ok(())
            })
        });
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })?;
    ensure_eq!(region.target.count()?, 7 * 2 * EACH + 10, "marks in the regions of the family");
    ensure_eq!(
        (region.starter.count()?, region.stopper.count()?),
        (7 * EACH + 1, 7 * EACH),
        "regions entered and left"
    );
    Ok(())
}

#[apply(guest_test)]
fn links_made_later_reach_children() -> Outcome {
    use std::sync::Barrier;
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let region = family(&device, false)?;
    let (ready, go) = (Barrier::new(3), Barrier::new(3));
    thread::scope(|scope| -> Outcome {
        let threads = [0, 1].map(|vcpu| {
            let (bell, ready, go) = (&bell, &ready, &go);
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(vcpu)?;
                // Not linked yet: nothing starts the targets.
                regions(bell, 5);
                ready.wait();
                go.wait();
                regions(bell, 50);
                Ok(())
            })
        });
        ready.wait();
        let before = region.target.count();
        let linked = link(&region);
        go.wait();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        linked?;
        ensure_eq!(before?, 0, "marks before there were links");
        Ok(())
    })?;
    ensure_eq!(region.target.count()?, 2 * 50 * 2, "marks in regions after the links were made");
    Ok(())
}

#[apply(guest_test)]
fn children_of_targets_alone_stay_paused() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    // The starter is not inherited, so nothing starts a child's target.
    let inside = inherited(device.attr(KIND_MARK, INSIDE.into()));
    let target = device.start(&inside, How::OWN.with(FLAG_ON_STARTER))?;
    let starter: Event = device.start(&device.marks(START.into(), 1, 0), How::OWN.by(ENGINE_EXIT))?;
    starter.starts(target.as_raw_fd())?;
    thread::scope(|scope| {
        let child = scope.spawn(|| {
            bell.mark(START);
            bell.place(INSIDE, 9);
        });
        child.join().map_err(|_| "the child panicked")
    })?;
    ensure_eq!(target.count()?, 0, "marks of a child without a starter");
    bell.mark(START);
    bell.place(INSIDE, 4);
    ensure_eq!(target.count()?, 4, "marks of the child's parent");
    Ok(())
}

#[apply(guest_test)]
fn childs_samples_lie_in_its_regions() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let attr = silent(inherited(device.any_marks(1, TIME | ADDR | fields::TID)));
    let target = device.start(&attr, How::OWN.with(FLAG_ON_STARTER))?;
    let mut ring = Pages::map(&target, 32, READ_WRITE)?;
    let marks = |value: u32| inherited(device.marks(value.into(), 1, 0));
    let starter = device.start(&marks(START), How::OWN.by(ENGINE_EXIT))?;
    let stopper = device.start(&marks(STOP), How::OWN.by(ENGINE_EXIT))?;
    starter.starts(target.as_raw_fd())?;
    stopper.stops(target.as_raw_fd())?;
    let tids = thread::scope(|scope| -> Fallible<Vec<u32>> {
        let threads = [0, 1].map(|vcpu| {
            let bell = &bell;
            scope.spawn(move || -> std::io::Result<u32> {
                cpu::pin(vcpu)?;
                for value in 0..200 {
                    bell.mark(INSIDE);
                    bell.mark(START);
                    bell.mark(1_000 + value);
                    bell.mark(STOP);
                }
                Ok(cpu::thread_id())
            })
        });
        threads.into_iter().map(|thread| Ok(thread.join().map_err(|_| "a thread panicked")??)).collect()
    })?;
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!(lost, 0, "lost samples");
    let expected: Vec<u64> = (0..200).flat_map(|v| [1_000 + v, STOP.into()]).collect();
    for tid in tids {
        let own: Vec<u64> = samples
            .iter()
            .filter(|sample| sample.pid_tid.is_some_and(|who| who.1 == tid))
            .filter_map(|sample| sample.addr)
            .collect();
        ensure_eq!(own, expected, "samples of thread {tid}");
    }
    ensure_eq!(samples.len(), 2 * expected.len(), "samples of the family");
    Ok(())
}

/// Two tasks of one program share a CPU. Both have the same events, so the kernel may swap their contexts instead of
/// scheduling the events out and in. One task is in a region, and the other is not.
#[apply(guest_test)]
fn tasks_that_take_turns_keep_their_regions() -> Outcome {
    use std::sync::Barrier;
    const TURNS: u64 = 200;
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let region = family(&device, true)?;
    let turn = Barrier::new(2);
    thread::scope(|scope| -> Outcome {
        let tasks = [true, false].map(|enters| {
            let (bell, turn) = (&bell, &turn);
            scope.spawn(move || -> std::io::Result<()> {
                cpu::pin(1)?;
                if enters {
                    bell.mark(START);
                }
                for _ in 0..TURNS {
                    turn.wait();
                    bell.mark(INSIDE);
                }
                Ok(())
            })
        });
        for task in tasks {
            task.join().map_err(|_| "a task panicked")??;
        }
        Ok(())
    })?;
    ensure_eq!(region.target.count()?, TURNS, "marks of the task that is in its region");
    Ok(())
}

/// The links are made while one of the two tasks runs, with its events scheduled in. When the kernel then switches to
/// the other task, it must not swap the two contexts.
#[apply(guest_test)]
fn regions_of_a_task_that_runs_at_the_link_stay_its_own() -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    let region = family(&device, false)?;
    let (ready, linked) = (AtomicBool::new(false), AtomicBool::new(false));
    let [mut one, mut other] = Turn::pair()?;
    thread::scope(|scope| -> Outcome {
        let waits = scope.spawn(|| -> std::io::Result<()> {
            settle()?;
            other.wait()?;
            // Both tasks have now run. Next, the task that will enter the region spins until the links are made.
            other.give()?;
            other.wait()?;
            bell.place(INSIDE, 5);
            other.give()
        });
        let enters = scope.spawn(|| -> std::io::Result<()> {
            settle()?;
            one.give()?;
            one.wait()?;
            ready.store(true, Ordering::Release);
            while !linked.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            bell.mark(START);
            one.give()?;
            one.wait()?;
            bell.place(INSIDE, 3);
            bell.mark(STOP);
            Ok(())
        });
        cpu::pin(0)?;
        while !ready.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let made = link(&region);
        linked.store(true, Ordering::Release);
        for task in [waits, enters] {
            task.join().map_err(|_| "a task panicked")??;
        }
        Ok(made?)
    })?;
    ensure_eq!(region.target.count()?, 3, "marks of the task that is in its region");
    Ok(())
}
