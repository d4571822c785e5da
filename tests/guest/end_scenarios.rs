//! The guest's part of tests that run on the host. The guest places marks, and then panics, resets or waits for the
//! host, depending on the word `act=WORD` on the kernel's command line.

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{ADDR, CPU, TID, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::persisting::{listed, look, values};
use crate::raw::{Device, Doorbell, Event, FLAG_PERSISTENT, How, KIND_MARK, WHOLE_GROUP, refused, silent};
use crate::{Fallible, Outcome, cpu, os};

/// Number of marks in a boot. Half of them are on each vCPU.
const MARKS: u32 = 1_000;
/// Number of marks that the guest's own persistent event counts in each boot.
const OWN: u32 = 50;
/// Maximum size of the groups that [`close`] opens and closes.
const CLOSED_GROUP: usize = 64;
const OWN_NAME: &str = "own";
/// The value of the marks that the guest's own event counts.
const OWN_VALUE: u64 = 500_000;

/// Implements `guest-tests act`, which performs this boot's act. If the act ends the guest, this function does not
/// return.
pub(crate) fn act() -> ExitCode {
    match perform() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints a line for the host, which reads the console.
pub(crate) fn say(what: &str) {
    println!("@guest {what}");
    // This fails only if the console is closed, and then nobody reads it.
    let _ = std::io::stdout().flush();
    os::drain_console();
}

fn perform() -> Outcome {
    let line = fs::read_to_string("/proc/cmdline")?;
    let act = line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix("act="))
        .ok_or("no act= on the kernel's command line")?;
    match act {
        "panic" => {
            sequence(1)?;
            fs::write("/proc/sysrq-trigger", "c")?;
            Err("the kernel did not panic".into())
        }
        "reboot" => {
            sequence(1)?;
            reboot()
        }
        "twice" => twice(),
        "wait" => wait(),
        "profiled" => crate::profiled::rounds(),
        "lines" => crate::restore::lines(),
        "events" => crate::restore::events(crate::restore::LINES),
        "cycles" => crate::restore::events(crate::restore::LINES_OF_CYCLES),
        "tools" => crate::restore::tools(),
        "counts" => crate::conformance::counts(),
        "steps" => crate::conformance::steps(),
        "loop" => crate::loads::act(),
        "leaders" => {
            crate::groups::close_leaders()?;
            crate::groups::close_leaders_under_marks()
        }
        other => match other.strip_prefix("close-") {
            Some(count) => close(count.parse()?),
            None => Err(format!("no act {other}").into()),
        },
    }
}

/// Keeps the control queue busy with one request after another. Runs on CPU 0, because [`close`] uses CPU 1.
fn ask_on(stop: &AtomicBool, asked: mpsc::Sender<()>) -> std::io::Result<()> {
    cpu::pin(0)?;
    let device = Device::open()?;
    let event = device.open_event(&device.marks(OWN_VALUE, 1, TIME), How::on_cpu(0))?;
    let _ring = Pages::map(&event, 1, READ_WRITE)?;
    while !stop.load(Ordering::Relaxed) {
        event.pause(true)?;
        // Only the first message is received.
        let _ = asked.send(());
    }
    Ok(())
}

/// Opens, enables and closes `count` events of this task. Prints how often the task slept while it enabled and closed
/// them. Nothing else runs on the CPU, so the task is switched out only if it sleeps.
fn close(count: usize) -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    cpu::keep()?;
    // Each event has a descriptor of perf and one of its ring.
    os::allow_descriptors(4096)?;
    let mut groups = Vec::new();
    for first in (0..count).step_by(CLOSED_GROUP) {
        let leader = device.open_event(&device.attr(KIND_MARK, OWN_VALUE), How::OWN)?;
        let mut group = vec![leader];
        for _ in first + 1..count.min(first + CLOSED_GROUP) {
            let mut attr = device.attr(KIND_MARK, OWN_VALUE);
            attr.set_disabled(0);
            let how = How::OWN.led_by(group[0].as_fd());
            group.push(device.open_event(&attr, how)?);
        }
        groups.push(group);
    }
    // The other thread always has a request in the control queue, so this task sleeps whenever it waits for the queue.
    let stop = AtomicBool::new(false);
    let slept = thread::scope(|scope| -> Fallible<i64> {
        let (asked, asking) = mpsc::channel();
        let other = scope.spawn(|| ask_on(&stop, asked));
        // The first request has been answered.
        asking.recv()?;
        let slept = (|| {
            let before = os::sleeps()?;
            for group in &groups {
                group[0].enable(WHOLE_GROUP)?;
            }
            drop(groups);
            Ok(os::sleeps()? - before)
        })();
        stop.store(true, Ordering::Relaxed);
        other.join().map_err(|_| "a thread panicked")??;
        slept
    })?;
    say(&format!("slept {slept}"));
    Ok(())
}

fn reboot() -> Outcome {
    Command::new("reboot").arg("-f").status()?;
    Err("the machine did not reset".into())
}

/// Places [`MARKS`] marks whose values count up from `first`, in ten batches. The two vCPUs take turns.
fn sequence(first: u32) -> Outcome {
    let device = Device::open()?;
    let bell = Doorbell::map(&device)?;
    for piece in 0..10 {
        cpu::pin((piece % 2) as usize)?;
        let from = first + piece * MARKS / 10;
        (from..from + MARKS / 10).for_each(|value| bell.mark(value));
    }
    Ok(())
}

fn own(device: &Device) -> Fallible<(Event, Pages)> {
    let attr = silent(device.marks(OWN_VALUE, 1, TIME | ADDR | TID | CPU));
    let event = device.start(&attr, How::on_cpu(0).with(FLAG_PERSISTENT))?;
    event.detach(OWN_NAME)?;
    let ring = Pages::map(&event, 4, READ_WRITE)?;
    Ok((event, ring))
}

/// In the first boot, the guest opens a persistent event and resets. In the second boot, the guest finds that event and
/// its records.
fn twice() -> Outcome {
    let device = Device::open()?;
    let found = device.persistent()?.into_iter().find(|entry| entry.name() == OWN_NAME);
    cpu::pin(0)?;
    let Some(entry) = found else {
        let (event, ring) = own(&device)?;
        device.place(OWN_VALUE, OWN.into())?;
        // An event whose ring is in guest memory ends with the boot.
        let attr = silent(device.any_marks(1, TIME));
        let gone = device.start(&attr, How::on_cpu(0))?;
        let gone_ring = Pages::map(&gone, 1, READ_WRITE)?;
        gone.detach("gone")?;
        say(&format!("own {}", event.id()?));
        sequence(1)?;
        std::mem::forget((event, ring, gone, gone_ring));
        return reboot();
    };
    say(&format!("found {}", entry.id));
    ensure!(listed(OWN_NAME).exists() && !listed("gone").exists(), "sysfs lists {:?}", crate::persisting::names()?);
    let event = device.reopen(entry.id, 0)?;
    let pages = entry.data_pages().ok_or("no ring")?;
    let mut ring = Pages::map(&event, pages, READ_WRITE)?;
    let attr = entry.attr();
    let reported = values(&ring.take()?, &attr)?;
    ensure_eq!(reported, vec![OWN_VALUE; OWN as usize], "records of the boot before");
    ensure_eq!(event.count()?, u64::from(OWN), "the event's count");
    device.place(OWN_VALUE, OWN.into())?;
    ensure_eq!(values(&ring.take()?, &attr)?, vec![OWN_VALUE; OWN as usize], "records of this boot");
    ensure_eq!(event.count()?, u64::from(2 * OWN), "the event's count after both boots");
    sequence(1 + MARKS)?;
    say("whole");
    Ok(())
}

/// Opens a persistent event of the host, and maps its ring.
fn hold(device: &Device, name: &str) -> Fallible<(Event, Pages)> {
    let mut entries = device.persistent()?.into_iter();
    let entry = entries.find(|entry| entry.name() == name).ok_or("not listed")?;
    let event = device.reopen(entry.id, entry.cpu.try_into()?)?;
    let pages = entry.data_pages().ok_or("the event has no ring")?;
    let ring = look(&event, pages)?;
    ensure!(
        os::is_readable(ring.address())? && event.count()? > 0,
        "the ring of {name} is unreadable, or its count is zero"
    );
    // Consumes a wakeup that occurred before this descriptor was opened, because poll also reports such wakeups.
    event.poll(0)?;
    Ok((event, ring))
}

/// Checks an event that the host has ended. Its descriptor must report the end and refuse every request, and its pages
/// must be unmapped.
fn is_over(event: &Event, ring: &Pages) -> Outcome {
    ensure_eq!(event.poll(300_000)?, libc::POLLHUP | libc::POLLERR, "poll of an event that has ended");
    for (what, errno) in [
        ("enabling", refused(event.enable(0))),
        ("resetting", refused(event.reset(0))),
        ("pausing", refused(event.pause(true))),
        ("flushing", refused(event.flush(0))),
        ("detaching", refused(event.detach(""))),
        ("attaching", refused(event.attach())),
        ("mapping", refused(look(event, 1))),
    ] {
        ensure_eq!(errno, Some(libc::ENOENT), "{what} an event that has ended");
    }
    ensure!(!os::is_readable(ring.address())?, "the ring of an event that has ended is still readable");
    Ok(())
}

/// Waits until the host has flushed an event, started another and ended a third.
fn wait() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let (event, mut ring) = own(&device)?;
    sequence(1)?;
    cpu::pin(0)?;
    device.place(OWN_VALUE, OWN.into())?;
    ensure_eq!(event.poll(0)?, 0, "poll before the host's flush");
    say("ready");
    ensure_eq!(event.poll(300_000)?, libc::POLLIN, "poll at the host's flush");
    ensure_eq!(ring.take()?.len(), OWN as usize, "records");
    say("woken");
    let until = |exists: bool, name: &str| {
        while listed(name).exists() != exists {
            thread::yield_now();
        }
        say(&format!("{name} {}", if exists { "came" } else { "went" }));
    };
    let (event, ring) = hold(&device, "flight-1")?;
    until(true, "late");
    // Here, the poll returns only when the event ends.
    is_over(&event, &ring)?;
    say("flight-1 is over");
    until(false, "flight-1");
    loop {
        thread::park();
    }
}
