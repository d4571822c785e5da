//! Tests the guest driver when the device goes away or stops answering, or the machine hibernates, while a program has
//! events of every type open.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use perf_event_open_sys::bindings::perf_event_attr;
use vpmu_client::Vpmu;
use vpmu_client::perf::PerfPmu;

use crate::arch::MOST_EXITS;
use crate::areas::Area;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{CALLCHAIN, IP, TID};
use crate::os::{Arrived, POLL_HUP};
use crate::output_wakeup::sleepers_are_woken;
use crate::pages::{DATA_HEAD, Pages, READ_WRITE};
use crate::perf_core::mark_attr;
use crate::permissions::room;
use crate::persisting::{Doomed, fresh, persistent, sequence, tell};
use crate::programs::{text, vperf};
use crate::raw::{
    Device, Event, FORMAT_ENABLED, FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_RUNNING, How, KIND_EXIT_TRACE,
    KIND_MARK, KIND_SOFTWARE, SW_TASK_CLOCK, kernels, kernels_own, refused, sampling, silent,
};
use crate::{Fallible, Outcome, cpu, kernel_log, known_code, os};

pub(crate) const GROUP: &str = "driver-life";
/// The errors of the driver that the tests provoke.
pub(crate) const ERRORS: [&str; 2] =
    ["the device does not answer: it is given up", "did not answer its kick immediately"];

/// The mark that the tests count.
const VALUE: u64 = 77;
const SECONDS: &str = "/sys/module/virtio_pmu/parameters/answer_seconds";
const DRIVER: &str = "/sys/bus/platform/drivers/virtio-mmio";
const CPU1: &str = "/sys/devices/system/cpu/cpu1/online";
const MAX_STACK: &str = "/proc/sys/kernel/perf_event_max_stack";
const MODULE: &str = "/lib/modules/virtio_pmu.ko";
const TRANSPORT_MODULE: &str = "/lib/modules/virtio_mmio.ko";
/// Offset of the device status register of virtio-mmio.
const STATUS: u64 = 0x70;
const GONE: i16 = libc::POLLHUP | libc::POLLERR;
/// Longer than any wait takes that ends.
const LONG: Duration = Duration::from_secs(30);

/// The name of the transport's platform device.
fn transport() -> Fallible<String> {
    let path = fs::canonicalize("/sys/bus/virtio/devices/virtio0")?;
    let name = path.parent().and_then(|parent| parent.file_name());
    Ok(name.ok_or("the device has no parent")?.to_string_lossy().into_owned())
}

fn unbind(transport: &str) -> io::Result<()> {
    fs::write(PathBuf::from(DRIVER).join("unbind"), transport)
}

fn bind(transport: &str) -> io::Result<()> {
    fs::write(PathBuf::from(DRIVER).join("bind"), transport)
}

/// Resets the device behind the driver's back, by writing zero to the status register. After that, the device has no
/// queues and does not answer commands.
fn mute() -> Outcome {
    let name = transport()?;
    let map = fs::read_to_string("/proc/iomem")?;
    let line = map.lines().find(|line| line.contains(&name)).ok_or("the transport has no registers")?;
    let base = line.trim().split('-').next().unwrap_or_default();
    let status = u64::from_str_radix(base, 16)? + STATUS;
    let written = Command::new("devmem").args([format!("{status:#x}"), "32".into(), "0".into()]).status()?;
    ensure!(written.success(), "writing the device status: {written}");
    Ok(())
}

fn module(command: &str, what: &str) -> io::Result<bool> {
    let status = Command::new(command).arg(what).stderr(Stdio::null()).status()?;
    Ok(status.success())
}

/// Checks that the kernel has reported no fault, and the driver no error but those that the tests provoke.
fn ensure_no_complaint() -> Outcome {
    kernel_log::ensure_no_fault_after(GROUP)
}

/// Everything that a program can have open: events of `/dev/vpmu` and of perf core, rings, an area and a persistent
/// event.
struct Open {
    device: Device,
    counting: Event,
    of_cpu: Event,
    sampling: Event,
    ring: Pages,
    trace: Event,
    trace_ring: Pages,
    _area: Area,
    persistent: Event,
    window: Pages,
    perf: Event,
    perf_of_cpu: Event,
}

impl Open {
    fn new() -> Fallible<Self> {
        let device = fresh()?;
        cpu::pin(1)?;
        let counting = device.start(&device.attr(KIND_MARK, VALUE), How::OWN)?;
        let of_cpu = device.start(&device.attr(KIND_MARK, VALUE), How::on_cpu(1))?;
        let sampling = device.start(&silent(device.marks(VALUE, 1, TID)), How::OWN)?;
        let ring = Pages::map(&sampling, 1, READ_WRITE)?;
        let trace = device.start(&silent(device.attr(KIND_EXIT_TRACE, MOST_EXITS)), How::OWN)?;
        let trace_ring = Pages::map(&trace, 1, READ_WRITE)?;
        let area = Area::map(&trace, &trace_ring, 1, READ_WRITE)?;
        let (persistent, _) = persistent(&device, &sequence(&device), 1, "survivor")?;
        let window = Pages::map(&persistent, 1, READ_WRITE)?;
        let mut attr = device.attr(KIND_MARK, VALUE);
        attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
        let perf = kernels_own(&attr)?;
        let perf_of_cpu = kernels(&attr, How::on_cpu(1))?;
        perf.enable(0)?;
        perf_of_cpu.enable(0)?;
        Ok(Self {
            device,
            counting,
            of_cpu,
            sampling,
            ring,
            trace,
            trace_ring,
            _area: area,
            persistent,
            window,
            perf,
            perf_of_cpu,
        })
    }

    /// Checks that all events count five marks.
    fn ensure_counts(&self) -> Outcome {
        self.device.place(VALUE, 5)?;
        for event in [&self.counting, &self.of_cpu, &self.perf, &self.perf_of_cpu] {
            ensure_eq!(event.count()?, 5, "marks counted");
        }
        self.sampling.flush(0)?;
        ensure_eq!(self.sampling.poll(-1)?, libc::POLLIN, "the wakeup");
        Ok(())
    }

    /// Checks that all of them have ended, and that no call blocks.
    fn ensure_ended(&self, errno: i32) -> Outcome {
        let own = [&self.counting, &self.of_cpu, &self.sampling, &self.trace, &self.persistent];
        for (index, event) in own.iter().enumerate() {
            ensure_eq!(event.poll(0)?, GONE, "polling {index}");
            ensure_eq!(refused(event.flush(0)), Some(errno), "flushing {index}");
            let map = Pages::map(event, 1, READ_WRITE);
            ensure_eq!(refused(map), Some(errno), "mapping {index}");
        }
        ensure_eq!(refused(self.persistent.enable(0)), Some(errno), "enabling the persistent event");
        for event in [&self.perf, &self.perf_of_cpu] {
            // This is how perf shows an event that does not run.
            ensure_eq!(event.read()?.get(2), Some(&0), "time running of an ended event of perf core");
        }
        let open = self.device.open_event(&self.device.attr(KIND_MARK, VALUE), How::OWN);
        ensure_eq!(refused(open), Some(errno), "opening by the old descriptor");
        let open = kernels_own(&self.device.attr(KIND_MARK, VALUE));
        ensure_eq!(refused(open), Some(errno), "opening through perf core");
        ensure_eq!(refused(self.device.mark(VALUE)), Some(errno), "placing a mark");
        Ok(())
    }

    /// Makes `end` end the events with rings. Checks that this wakes a program that sleeps in poll(2) on any of them, and
    /// signals a program that uses `O_ASYNC`.
    fn ensure_woken(&self, sleepers: &[&Event], end: impl FnOnce() -> Outcome) -> Outcome {
        os::block_signal()?;
        os::signal_from(self.sampling.ring_fd())?;
        let sleepers: io::Result<Vec<Event>> = sleepers.iter().map(|event| event.duplicate()).collect();
        sleepers_are_woken(sleepers?, GONE, || end().map_err(|error| io::Error::other(error.to_string())))?;
        let expected = Arrived { code: POLL_HUP, fd: self.sampling.ring() };
        ensure_eq!(os::wait_signal(LONG)?, Some(expected), "the signal of an event that has ended");
        Ok(())
    }

    /// Checks that the rings can be read.
    fn ensure_readable(&mut self, samples: usize) -> Outcome {
        ensure_eq!(self.ring.take()?.len(), samples, "samples left");
        for pages in [&self.ring, &self.trace_ring, &self.window] {
            ensure!(pages.load(DATA_HEAD) < 1 << 20, "the head of a ring that has ended is invalid");
        }
        Ok(())
    }
}

/// Checks that a new program's event counts and samples, and wakes its reader.
fn ensure_works() -> Outcome {
    let device = fresh()?;
    let event = device.start(&device.marks(VALUE, 1, TID), How::OWN)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let perf = kernels_own(&device.attr(KIND_MARK, VALUE))?;
    perf.enable(0)?;
    device.place(VALUE, 7)?;
    ensure_eq!(event.count()?, 7, "marks of a new event");
    ensure_eq!(perf.count()?, 7, "marks of a new event of perf core");
    event.flush(0)?;
    ensure_eq!(event.poll(-1)?, libc::POLLIN, "the new event's wakeup");
    ensure_eq!(ring.take()?.len(), 7, "samples of a new event");
    Ok(())
}

/// VPMU-G-2-3.
#[apply(guest_test)]
fn mute_device_is_given_up_and_bound_again() -> Outcome {
    let name = transport()?;
    fs::write(SECONDS, "1")?;
    let mut open = Open::new()?;
    open.ensure_counts()?;
    open.ensure_woken(&[&open.sampling, &open.persistent], || {
        mute()?;
        // A command's timeout tells the driver that the device no longer answers. That command may belong to this open
        // or to an earlier request.
        let refusal = refused(open.device.open_event(&open.device.attr(KIND_MARK, VALUE), How::OWN));
        ensure_eq!(refusal, Some(libc::EIO), "opening an event");
        Ok(())
    })?;
    open.ensure_ended(libc::EIO)?;
    open.ensure_readable(5)?;
    let other = Device::open();
    ensure_eq!(refused(other), Some(libc::EIO), "opening the device");
    unbind(&name)?;
    bind(&name)?;
    ensure_works()?;
    open.ensure_readable(0)?;
    drop(open);
    ensure_works()?;
    ensure_no_complaint()
}

#[apply(guest_test)]
fn mute_device_without_events_fails_an_open() -> Outcome {
    let name = transport()?;
    fs::write(SECONDS, "1")?;
    let device = fresh()?;
    mute()?;
    for turn in 0..3 {
        let open = device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN);
        ensure_eq!(refused(open), Some(libc::EIO), "turn {turn}: opening an event");
    }
    drop(device);
    ensure!(module("rmmod", "virtio_pmu")?, "the module was not unloaded");
    ensure!(module("insmod", MODULE)?, "the module was not loaded again");
    ensure!(transport()? == name, "the transport has a new name");
    ensure_works()?;
    ensure_no_complaint()
}

#[apply(guest_test)]
fn killed_task_leaves_a_mute_device() -> Outcome {
    let name = transport()?;
    fs::write(SECONDS, "3600")?;
    mute()?;
    let mut doomed = Doomed::start(|parent| {
        let device = Device::open()?;
        tell(parent, std::process::id().into())?;
        device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN)?;
        Ok(())
    })?;
    let stat = format!("/proc/{}/stat", doomed.hear()?);
    // Waits until the task blocks, because its answer never comes.
    while !fs::read_to_string(&stat)?.contains(") D ") {
        os::yield_cpu();
    }
    doomed.kill()?;
    fs::write(SECONDS, "1")?;
    unbind(&name)?;
    bind(&name)?;
    ensure_works()?;
    ensure_no_complaint()
}

#[apply(guest_test)]
fn unbinding_ends_open_events_and_returns() -> Outcome {
    let name = transport()?;
    let mut open = Open::new()?;
    open.ensure_counts()?;
    open.ensure_woken(&[&open.sampling, &open.persistent], || Ok(unbind(&name)?))?;
    open.ensure_ended(libc::ENODEV)?;
    open.ensure_readable(5)?;
    let other = Device::open();
    ensure_eq!(refused(other), Some(libc::ENOENT), "opening the device");
    ensure!(!module("rmmod", "virtio_pmu")?, "the module was unloaded while events were open");
    for round in 0..3 {
        bind(&name)?;
        ensure_works()?;
        ensure_eq!(open.counting.poll(0)?, GONE, "round {round}: polling an ended event");
        let refusal = refused(open.sampling.output_to(open.counting.ring()));
        ensure_eq!(refusal, Some(libc::ENODEV), "round {round}: redirecting an ended event");
        unbind(&name)?;
    }
    // When the last user is gone, the module can be unloaded, whether or not a device is bound.
    drop(open);
    ensure!(module("rmmod", "virtio_pmu")?, "the module was not unloaded");
    ensure!(module("insmod", MODULE)?, "the module was not loaded again");
    bind(&name)?;
    ensure_works()?;
    ensure_no_complaint()
}

/// The driver keeps nothing of a transport that is gone: neither its device nor the code of its module.
#[apply(guest_test)]
fn transports_module_is_unloaded_while_events_are_open() -> Outcome {
    let mut open = Open::new()?;
    open.ensure_counts()?;
    let trace = silent(open.device.attr(KIND_EXIT_TRACE, MOST_EXITS));
    for round in 0..2 {
        ensure!(module("rmmod", "virtio_mmio")?, "round {round}: the transport's module was not unloaded");
        open.ensure_ended(libc::ENODEV)?;
        // The driver logs why it refuses this event. The message names the virtio device, which is gone.
        ensure_eq!(refused(kernels_own(&trace)), Some(libc::EOPNOTSUPP), "round {round}: a trace through perf");
        let log = kernel_log::log()?;
        let named = log.matches("virtio_pmu virtio0: perf cannot read traces").count();
        ensure_eq!(named, round + 1, "messages of the driver that name the device");
        ensure!(module("insmod", TRANSPORT_MODULE)?, "round {round}: the transport's module was not loaded again");
        ensure_works()?;
    }
    open.ensure_readable(5)?;
    ensure!(module("rmmod", "virtio_mmio")?, "the transport's module was not unloaded");
    drop(open);
    ensure!(module("rmmod", "virtio_pmu")?, "the module was not unloaded");
    for loaded in [MODULE, TRANSPORT_MODULE] {
        ensure!(module("insmod", loaded)?, "{loaded} was not loaded again");
    }
    ensure_works()?;
    ensure_no_complaint()
}

/// Forks while the task has events that its children inherit. The child places marks, unless it cannot open the device.
fn fork_and_place(times: u64) -> Outcome {
    let child = os::forked(|| {
        let placed = Device::open().and_then(|device| device.place(VALUE, times));
        i32::from(placed.is_err())
    })?;
    ensure_eq!(child, i32::from(Device::open().is_err()), "the child's exit code");
    Ok(())
}

#[apply(guest_test)]
fn fork_with_inherited_events_of_a_lost_device_succeeds() -> Outcome {
    let name = transport()?;
    fs::write(SECONDS, "1")?;
    for given_up in [false, true] {
        let device = fresh()?;
        let mut attr = device.attr(KIND_MARK, VALUE);
        attr.set_inherit(1);
        attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
        let own = device.start(&attr, How::OWN)?;
        let perf = kernels_own(&attr)?;
        perf.enable(0)?;
        let sampling = kernels_own(&device.marks(VALUE, 1, TID))?;
        sampling.enable(0)?;
        fork_and_place(3)?;
        ensure_eq!(own.count()?, 3, "marks of a child");
        ensure_eq!(perf.count()?, 3, "marks of a child in perf core");
        if given_up {
            mute()?;
            let open = device.open_event(&attr, How::OWN);
            ensure_eq!(refused(open), Some(libc::EIO), "opening an event");
        } else {
            unbind(&name)?;
        }
        let lost = perf.read()?;
        fork_and_place(5).map_err(|error| format!("device given up: {given_up}: {error}"))?;
        if given_up {
            unbind(&name)?;
        }
        bind(&name)?;
        fork_and_place(7)?;
        ensure_eq!(own.poll(0)?, GONE, "polling after the device was bound again");
        let values = perf.read()?;
        ensure_eq!(values.first(), Some(&3), "perf core's count from before");
        ensure_eq!(values.get(2), lost.get(2), "time running after the device was bound again");
    }
    ensure_works()?;
    ensure_no_complaint()
}

/// How programs' turns at opening, counting and closing ended.
#[derive(Debug, Default)]
struct Turns {
    /// Every count was right.
    worked: AtomicUsize,
    /// A call was refused, or an event ended, because the device was unbound.
    disturbed: AtomicUsize,
    /// A count was wrong, although the event was open, or a call failed for another reason.
    wrong: AtomicUsize,
}

impl Turns {
    /// Takes a turn.
    fn take(&self) {
        let turns = match hold(|| ()) {
            Ok(Held::Right) => &self.worked,
            Ok(Held::Ended) => &self.disturbed,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => &self.disturbed,
            wrong => {
                eprintln!("a turn went wrong: {wrong:?}");
                &self.wrong
            }
        };
        turns.fetch_add(1, Ordering::Relaxed);
    }

    fn ensure_none_wrong(&self) -> Outcome {
        ensure_eq!(self.wrong.load(Ordering::Relaxed), 0, "turns that went wrong: {self:?}");
        Ok(())
    }
}

/// The counts of the events that [`hold`] opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    Right,
    Wrong,
    /// The device was unbound, so that the counts may lack marks.
    Ended,
}

/// Opens events of `/dev/vpmu` and of perf core and counts with them, calls `held` while all of them are open, and then
/// closes them.
fn hold(held: impl FnOnce()) -> io::Result<Held> {
    let device = Device::open()?;
    let event = device.start(&silent(device.marks(VALUE, 1, TID)), How::OWN)?;
    let _ring = Pages::map(&event, 1, READ_WRITE)?;
    let perf = kernels_own(&device.attr(KIND_MARK, VALUE))?;
    perf.enable(0)?;
    device.place(VALUE, 3)?;
    held();
    let counts = [event.read()?, perf.read()?];
    Ok(match event.poll(0)? {
        _ if counts == [[3], [3]] => Held::Right,
        GONE => Held::Ended,
        _ => Held::Wrong,
    })
}

/// Checks that the device and the driver have no event left of programs that have ended.
fn ensure_no_event_is_left() -> Outcome {
    os::allow_descriptors(4096)?;
    let device = fresh()?;
    let task = os::Sleeper::start(|| Ok(()))?;
    ensure_eq!(room(&device, task.pid)?, device.info.max_events, "room for events");
    Ok(())
}

#[apply(guest_test)]
fn unbinding_and_binding_while_programs_open_and_close() -> Outcome {
    let name = transport()?;
    let stop = AtomicBool::new(false);
    let turns = Turns::default();
    let until_more = |number: &AtomicUsize| {
        let before = number.load(Ordering::Relaxed);
        while number.load(Ordering::Relaxed) == before && turns.wrong.load(Ordering::Relaxed) == 0 {
            os::yield_cpu();
        }
    };
    thread::scope(|scope| -> Outcome {
        let programs: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        turns.take();
                    }
                })
            })
            .collect();
        let done = (0..15).try_for_each(|round| {
            // Every third round waits for turns before and after the unbinding. The other rounds do not wait.
            let waits = round % 3 == 0;
            if waits {
                until_more(&turns.worked);
            }
            unbind(&name)?;
            if waits {
                until_more(&turns.disturbed);
            }
            bind(&name)
        });
        stop.store(true, Ordering::Relaxed);
        for program in programs {
            program.join().map_err(|_| "a program panicked")?;
        }
        Ok(done?)
    })?;
    turns.ensure_none_wrong()?;
    ensure_works()?;
    ensure_no_event_is_left()?;
    ensure_no_complaint()
}

/// When a device is removed, the driver first refuses new opens, then closes persistent events, and then resets the
/// device. An open that started before the removal may complete during these steps.
#[apply(guest_test)]
fn event_opened_during_an_unbinding_ends_with_it() -> Outcome {
    const ROUNDS: usize = 8;
    const PERSISTENT: usize = 16;
    let name = transport()?;
    for round in 0..ROUNDS {
        let device = fresh()?;
        // The driver must send requests to close each of these events, because its ring is in the guest's memory.
        for number in 0..PERSISTENT {
            let event = device.start(&sequence(&device), How::on_cpu(0))?;
            let _ring = Pages::map(&event, 1, READ_WRITE)?;
            event.detach(&format!("kept{number}"))?;
        }
        let (tell, reported) = channel();
        let last = thread::scope(|scope| {
            let device = &device;
            let opener = scope.spawn(move || {
                let mut last = None;
                while let Ok(event) = device.start(&silent(device.marks(VALUE, 1, TID)), How::OWN) {
                    let ring = Pages::map(&event, 1, READ_WRITE);
                    last = Some((ring, event));
                    // The receiver waits only for the first event.
                    let _ = tell.send(());
                }
                last
            });
            let unbound = reported.recv().map(|()| unbind(&name));
            (unbound, opener.join())
        });
        let (unbound, Ok(last)) = last else {
            return Err("the opening program panicked".into());
        };
        unbound??;
        bind(&name)?;
        let (_ring, event) = last.ok_or("no event was opened")?;
        ensure_eq!(event.poll(0)?, GONE, "round {round}: polling the event opened last");
    }
    ensure_works()?;
    ensure_no_event_is_left()?;
    ensure_no_complaint()
}

/// The opening task may be preempted after the device has opened the event and before the driver has recorded it. Here,
/// a real-time task preempts it at varying times, and keeps the CPU until the device is bound again.
#[apply(guest_test)]
fn event_opened_before_an_unbinding_ends_although_the_device_is_bound_again() -> Outcome {
    const ROUNDS: u32 = 100;
    /// After this time, the real-time task gives up the CPU, because the unbinding may wait for a lock that the opening
    /// task holds.
    const KEPT: Duration = Duration::from_millis(100);
    let name = transport()?;
    let device = fresh()?;
    // Number of times that the device was bound again.
    let (bound, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let open = || -> io::Result<usize> {
        cpu::pin(1)?;
        let mut opened = 0;
        while !stop.load(Ordering::Relaxed) {
            let event = device.start(&silent(device.marks(VALUE, 1, TID)), How::OWN);
            let ring = event.and_then(|event| Pages::map(&event, 1, READ_WRITE));
            let perf = kernels_own(&device.marks(VALUE, 1, TID));
            for (what, errno) in [("mapping", refused(ring)), ("opening", refused(perf))] {
                match errno {
                    None => opened += 1,
                    // The device is not bound, or it was unbound after it opened the event.
                    Some(libc::ENODEV) => (),
                    Some(errno) => {
                        return Err(io::Error::other(format!("{what}: errno {errno}")));
                    }
                }
            }
        }
        Ok(opened)
    };
    let bind_again = |round: u32| -> io::Result<()> {
        let (tell, reported) = channel();
        let (name, bound) = (&name, &bound);
        thread::scope(|scope| {
            let keeper = scope.spawn(move || -> io::Result<()> {
                cpu::pin(1)?;
                cpu::keep()?;
                thread::sleep(Duration::from_micros(20) * (round % 50));
                let begun = Instant::now();
                // Fails only if the test has failed.
                let _ = tell.send(());
                while bound.load(Ordering::Relaxed) == round && begun.elapsed() < KEPT {}
                Ok(())
            });
            // If the channel is closed, the other thread has failed. That thread's result contains the error.
            let done = reported.recv().map_or(Ok(()), |()| unbind(name).and_then(|()| bind(name)));
            bound.fetch_add(1, Ordering::Relaxed);
            let kept = keeper.join();
            kept.map_err(|_| io::Error::other("the real-time thread panicked"))?.and(done)
        })
    };
    thread::scope(|scope| -> Outcome {
        let opener = scope.spawn(open);
        cpu::pin(0)?;
        let done = (0..ROUNDS).try_for_each(bind_again);
        stop.store(true, Ordering::Relaxed);
        let opened = opener.join().map_err(|_| "the opening thread panicked")?;
        done?;
        ensure!(opened? > 0, "no event was opened");
        Ok(())
    })?;
    ensure_works()?;
    ensure_no_event_is_left()?;
    ensure_no_complaint()
}

#[apply(guest_test)]
fn module_reloads_while_programs_open_and_close() -> Outcome {
    let turns = Turns::default();
    for round in 0..30 {
        thread::scope(|scope| -> Outcome {
            let (tell_open, open) = channel();
            let (tell_refused, unload_refused) = channel::<()>();
            let holder = scope.spawn(move || {
                hold(|| {
                    // Fails only if the test has failed.
                    let _ = tell_open.send(());
                    let _ = unload_refused.recv();
                })
            });
            // If the channel is closed, the holder has failed. Its result, below, has the error.
            if open.recv().is_ok() {
                let refusal = refused(os::unload(c"virtio_pmu"));
                let racers: Vec<_> = (0..2).map(|_| scope.spawn(|| turns.take())).collect();
                drop(tell_refused);
                ensure_eq!(refusal, Some(libc::EAGAIN), "round {round}: unloading");
                // Unloading may fail while programs have events open. It must succeed once the last program has closed
                // its events.
                while let Err(error) = os::unload(c"virtio_pmu") {
                    let errno = error.raw_os_error();
                    ensure_eq!(errno, Some(libc::EAGAIN), "round {round}: unloading");
                }
                for racer in racers {
                    racer.join().map_err(|_| "a racing program panicked")?;
                }
            }
            let counted = holder.join().map_err(|_| "the holding program panicked")??;
            ensure_eq!(counted, Held::Right, "round {round}: counts");
            os::load(File::open(MODULE)?.as_fd()).map_err(|error| format!("round {round}: loading: {error}"))?;
            Ok(())
        })?;
    }
    turns.ensure_none_wrong()?;
    ensure_works()?;
    ensure_no_event_is_left()?;
    ensure_no_complaint()
}

/// Takes CPU 1 offline, or brings it back.
fn set_online(online: bool) -> io::Result<()> {
    fs::write(CPU1, if online { "1" } else { "0" })
}

#[apply(guest_test)]
fn vperf_continues_when_a_cpu_goes_offline() -> Outcome {
    cpu::pin(0)?;
    for tool in [&["record", "-c", "1"][..], &["stat"]] {
        // CPU 1 is offline when vperf stops its event and reads it.
        let command = format!("guest-tests mark {VALUE} 3; echo 0 > {CPU1}");
        let event = format!("mark={VALUE}");
        let measured = ["-e", &event, "-a", "--", "sh", "-c", &command];
        let output = vperf(&[tool, &measured[..]].concat());
        set_online(true)?;
        let output = output?;
        let said = text(&output.stderr) + &text(&output.stdout);
        ensure!(output.status.success(), "vperf {tool:?} failed: {said}");
        // All marks are on CPU 0, where both commands run.
        let counted = ["vperf: 3 samples written", "3 "];
        let mut lines = said.lines().map(str::trim_start);
        ensure!(
            lines.any(|line| counted.iter().any(|counted| line.starts_with(counted))),
            "{tool:?} does not report three marks: {said}"
        );
    }
    // CPU 1 may go offline at any time, even between the opening and the enabling of its event.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| -> Outcome {
        let flips = scope.spawn(|| -> io::Result<()> {
            while !stop.load(Ordering::Relaxed) {
                set_online(false)?;
                set_online(true)?;
            }
            Ok(())
        });
        let done = (0..10).try_for_each(|turn| -> Outcome {
            let output = vperf(&["record", "-e", "mark", "-c", "1", "-a", "--", "true"])?;
            let said = text(&output.stderr);
            ensure!(output.status.success(), "turn {turn}: vperf record failed: {said}");
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        flips.join().map_err(|_| "a thread panicked")??;
        done
    })?;
    ensure_no_complaint()
}

/// Makes the kernel create a hibernation image, for which it stops and restarts devices. There is no disk for the
/// image, so the kernel then continues.
fn hibernate() -> Outcome {
    let written = fs::write("/sys/power/state", "disk");
    let errno = written.err().and_then(|error| error.raw_os_error());
    let log = kernel_log::log()?;
    // Comes only after the image is made, and on each kernel, unlike the messages of its making, which 7.3 hides.
    ensure!(
        log.contains("Cannot get swap writer"),
        "no image was made ({errno:?}): {}",
        log.lines().rev().take(12).collect::<Vec<_>>().join(" | ")
    );
    Ok(())
}

#[apply(guest_test)]
fn counts_go_on_after_a_hibernation() -> Outcome {
    let device = fresh()?;
    // CPU 0 must stay online, because perf core ends the events of a CPU that goes offline.
    cpu::pin(0)?;
    let own = device.start(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    let id = own.perf_id()?;
    let of_cpu = device.start(&device.attr(KIND_MARK, VALUE), How::on_cpu(0))?;
    let off = device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    let mut inherited = device.attr(KIND_MARK, VALUE);
    inherited.set_inherit(1);
    let family = device.start(&inherited, How::OWN)?;
    let mut grouped = device.attr(KIND_MARK, VALUE);
    grouped.read_format = FORMAT_GROUP | FORMAT_ID;
    let leader = device.open_event(&grouped, How::OWN)?;
    let member = device.start(&device.attr(KIND_MARK, 1), How::OWN.led_by(leader.as_fd()))?;
    leader.enable(0)?;
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
    let perf = kernels_own(&attr)?;
    let perf_of_cpu = kernels(&attr, How::on_cpu(0))?;
    perf.enable(0)?;
    perf_of_cpu.enable(0)?;
    let (kept, kept_id) = persistent(&device, &sequence(&device), 0, "sleeper")?;
    let window = Pages::map(&kept, 1, READ_WRITE)?;

    let (order, orders) = channel();
    let (tell, reported) = channel();
    thread::scope(|scope| -> Outcome {
        // This task has inherited events, and exists both before and after the hibernation.
        let servant = &device;
        scope.spawn(move || {
            let mut placed = orders.into_iter().map(|times| servant.place(VALUE, times));
            placed.try_for_each(|done| tell.send(done))
        });
        order.send(4)?;
        reported.recv()??;
        device.place(VALUE, 3)?;
        hibernate()?;
        device.place(VALUE, 5)?;
        order.send(6)?;
        reported.recv()??;
        drop(order);
        Ok(())
    })?;
    device.place(1, 2)?;
    ensure_eq!(own.count()?, 8, "marks of a task's event");
    ensure_eq!(own.perf_id()?, id, "the id of a task's event");
    ensure_eq!(off.count()?, 0, "marks of an event that is off");
    ensure_eq!(family.count()?, 4 + 3 + 5 + 6, "marks of an inherited event");
    ensure_eq!(perf.count()?, 8, "marks of a task's event of perf core");
    let reading = leader.read()?;
    ensure_eq!(reading, [2, 8, leader.perf_id()?, 2, member.perf_id()?], "a group's reading");
    ensure_eq!(of_cpu.count()?, 4 + 3 + 5 + 6, "marks of a CPU's event");
    ensure_eq!(perf_of_cpu.count()?, 4 + 3 + 5 + 6, "marks of a CPU's event of perf core");
    ensure_eq!(kept.id()?, kept_id, "the persistent event's id");
    ensure!(kept.count()? >= 8, "the persistent event counts fewer than 8 marks");
    ensure!(window.load(DATA_HEAD) > 0, "the persistent event's ring is empty");
    off.enable(0)?;
    device.place(VALUE, 2)?;
    ensure_eq!(off.count()?, 2, "marks of an event that was enabled afterwards");
    own.reset(0)?;
    device.place(VALUE, 3)?;
    ensure_eq!(own.count()?, 3, "marks of an event that was reset afterwards");
    drop((kept, window));
    ensure_works()?;
    hibernate()?;
    ensure_eq!(own.count()?, 3 + 7, "the count after a second hibernation");
    ensure_no_complaint()
}

/// A clock of perf core loses samples, because their call chains are long, and a ring of the driver has room for few.
#[apply(guest_test)]
fn losses_from_before_a_hibernation_stay_counted() -> Outcome {
    const DEPTH: u64 = 900;
    /// An hour, in nanoseconds.
    const NEVER: u64 = 3_600_000_000_000;
    fs::write(MAX_STACK, "1024")?;
    let device = fresh()?;
    cpu::pin(0)?;
    let clock = sampling(device.attr(KIND_SOFTWARE, SW_TASK_CLOCK), 10_000, IP | CALLCHAIN);
    let event = kernels_own(&perf_event_attr { read_format: FORMAT_LOST, sample_max_stack: 1024, ..clock })?;
    let lost = || -> Fallible<u64> { Ok(*event.read()?.last().ok_or("no number of losses")?) };
    event.enable(0)?;
    while lost()? == 0 {
        known_code::deep(DEPTH, device.as_raw_fd(), VALUE);
    }
    event.disable(0)?;
    let before = lost()?;
    // With this period, the clock takes no sample, and so loses none.
    event.period(NEVER)?;
    hibernate()?;
    for _ in 0..2 {
        event.enable(0)?;
        event.disable(0)?;
        ensure_eq!(lost()?, before, "samples lost, after the hibernation");
    }
    ensure_no_complaint()
}

#[apply(guest_test)]
fn rings_and_traces_end_with_a_hibernation() -> Outcome {
    let mut open = Open::new()?;
    open.ensure_counts()?;
    open.ensure_woken(&[&open.sampling], hibernate)?;
    for event in [&open.sampling, &open.trace] {
        ensure_eq!(event.poll(0)?, GONE, "polling an event with a ring");
        ensure_eq!(refused(event.flush(0)), Some(libc::EIO), "flushing an event with a ring");
    }
    ensure_eq!(open.ring.take()?.len(), 5, "samples left");
    open.device.place(VALUE, 2)?;
    for event in [&open.counting, &open.perf] {
        ensure_eq!(event.count()?, 7, "marks of an event without a ring");
    }
    open.persistent.flush(0)?;
    drop(open);
    ensure_works()?;
    ensure_no_complaint()
}

/// If the driver opened linked events again after the hibernation, the link would be missing, and the target would
/// never start.
#[apply(guest_test)]
fn linked_events_of_perf_core_end_with_a_hibernation() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    cpu::pin(0)?;
    let target = pmu.open_event(&mark_attr(&pmu, 3)?.enabled_on_starter())?;
    let starter = pmu.open_event(&mark_attr(&pmu, 1)?.sampling(1))?;
    let other = pmu.open_event(&mark_attr(&pmu, 3)?)?;
    starter.set_starter_of(&target)?;
    for event in [&target, &starter, &other] {
        event.enable()?;
    }
    for value in [3, 1, 3] {
        vpmu.mark(value)?;
    }
    ensure_eq!((target.read()?.value, other.read()?.value), (1, 2), "counts before the hibernation");
    hibernate()?;
    for value in [1, 3] {
        vpmu.mark(value)?;
    }
    for event in [&target, &starter] {
        let ended = event.read()?;
        ensure_eq!(ended.time_running, 0, "time running of a linked event: {ended:?}");
    }
    ensure_eq!(other.read()?.value, 3, "marks of an event without a link");
    ensure_no_complaint()
}

#[apply(guest_test)]
fn persistent_event_of_a_given_up_device_opens_again_after_a_hibernation() -> Outcome {
    fs::write(SECONDS, "1")?;
    let device = fresh()?;
    cpu::pin(0)?;
    let (held, id) = persistent(&device, &sequence(&device), 0, "survivor")?;
    let window = Pages::map(&held, 1, READ_WRITE)?;
    device.place(VALUE, 3)?;
    mute()?;
    let open = device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN);
    ensure_eq!(refused(open), Some(libc::EIO), "opening an event");
    ensure_eq!(held.poll(-1)?, GONE, "polling the event");
    hibernate()?;
    ensure_eq!(refused(held.enable(0)), Some(libc::EIO), "enabling by the old descriptor");
    drop((held, window));
    let again = device.reopen(id, 0)?;
    let mut ring = Pages::map(&again, 1, READ_WRITE)?;
    let before = again.count()?;
    ring.take()?;
    device.place(VALUE, 2)?;
    ensure_eq!(again.count()?, before + 2, "marks after the hibernation");
    ensure_eq!(ring.take()?.len(), 2, "samples after the hibernation");
    drop((again, ring));
    ensure_works()?;
    ensure_no_complaint()
}
