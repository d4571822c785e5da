//! The lifetime of a persistent event. The event needs no open handle and outlives its creator. After
//! `VPMU_IOC_ATTACH`, it ends when its last user is gone.

use std::fs;
use std::os::fd::AsRawFd;
use std::thread;

use crate::ensure::{ensure, ensure_eq};
use crate::output_wakeup::sleepers_are_woken;
use crate::pages::{Pages, READ, READ_WRITE};
use crate::permissions::room;
use crate::persisting::{
    Counter, Doomed, RECORD, backwards, fresh, look, newest, persistent, sequence, tell, up_to, values,
};
use crate::raw::{Device, Event, FLAG_PERSISTENT, How, KIND_MARK, PAGE, refused, waking};
use crate::triggers::trigger;
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "persistent";

const PAGES: usize = 64;

#[apply(guest_test)]
fn detached_event_outlives_its_creators_kill() -> Outcome {
    const ENOUGH: u32 = 500;
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    // Only the child has the descriptor and the ring. The test kills the child while the child places marks.
    let mut child = Doomed::start(|parent| {
        let device = Device::open()?;
        let (event, id) = persistent(&device, &attr, 1, "orphan")?;
        let _ring = Pages::map(&event, PAGES, READ_WRITE)?;
        let mut counter = Counter::new(&device)?;
        counter.mark(ENOUGH);
        tell(parent, id)?;
        // Places marks until the ring is full, unless the child is killed before that.
        while counter.placed() < (PAGES * PAGE) as u64 / RECORD {
            counter.mark(1);
        }
        Ok(())
    })?;
    let id = child.hear()?;
    child.kill()?;
    let event = device.reopen(id, 1)?;
    let mut ring = Pages::map(&event, PAGES, READ_WRITE)?;
    let left = values(&ring.take()?, &attr)?;
    let placed = left.len() as u64;
    ensure!(placed >= ENOUGH.into(), "{placed} records of the child");
    ensure_eq!(left, up_to(placed), "values of the child's marks");
    ensure_eq!(event.count()?, placed, "the event's count");
    // The event continues for later readers.
    device.place(7, 5)?;
    ensure_eq!(values(&ring.take()?, &attr)?, [7; 5], "values of later marks");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn persistent_event_counts_on_without_a_handle() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (event, id) = persistent(&device, &attr, 1, "alone")?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    let mut counter = Counter::new(&device)?;
    counter.mark(3);
    let before = event.read_into(32)?;
    drop(ring);
    drop(event);
    ensure_eq!(device.persistent()?.iter().map(|e| e.id).collect::<Vec<_>>(), [id], "the ids listed");
    counter.mark(40);
    let event = device.reopen(id, 1)?;
    ensure_eq!(event.id()?, id, "the id of the new handle");
    ensure_eq!(before[0], 3, "the count before the handle was closed");
    ensure_eq!(event.count()?, 43, "the count in the new handle");
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(values(&ring.take()?, &attr)?, up_to(43), "values of the marks");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn event_opened_persistent_outlives_its_handle() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let how = How::on_cpu(1).with(FLAG_PERSISTENT);
    let event = device.start(&attr, how)?;
    let id = event.id()?;
    let entry = device.entry(id)?.ok_or("the event is not listed")?;
    ensure_eq!(entry.name(), format!("event{id}"), "the default name");
    drop(event);
    device.place(1, 4)?;
    let event = device.reopen(id, 1)?;
    ensure_eq!(event.count()?, 4, "marks counted without a handle");
    ensure_eq!(event.detach("")?, id, "the id from detaching");
    event.attach()?;
    drop(event);
    ensure_eq!(refused(device.reopen(id, 1)), Some(libc::ENOENT), "reopening an ended event");
    Ok(())
}

#[apply(guest_test)]
fn second_detach_returns_the_same_id() -> Outcome {
    let device = fresh()?;
    let (event, id) = persistent(&device, &sequence(&device), 0, "twice")?;
    ensure_eq!(id, event.id()?, "the id from detaching");
    for name in ["", "other", ""] {
        ensure_eq!(event.detach(name)?, id, "the id of the same event");
    }
    let second = device.reopen(id, 0)?;
    ensure_eq!(second.detach("")?, id, "the id by another handle");
    ensure_eq!(device.persistent()?.len(), 1, "events listed");
    event.attach()?;
    Ok(())
}

/// Tests whether the device still has an event. `target` can have only one starter, and the event is this starter. So
/// `heir` can become the starter only after the event has ended.
struct StarterProbe {
    target: Event,
    heir: Event,
}

impl StarterProbe {
    fn of(device: &Device, event: &Event) -> Fallible<Self> {
        let here = How::on_cpu(1);
        let target = device.start(&device.attr(KIND_MARK, 77), here)?;
        event.starts(target.as_raw_fd())?;
        let heir = trigger(device, 78, 1, here)?;
        Ok(Self { target, heir })
    }

    fn taken(&self) -> Option<i32> {
        refused(self.heir.starts(self.target.as_raw_fd()))
    }

    fn ensure_taken(&self) -> Outcome {
        ensure_eq!(self.taken(), Some(libc::EBUSY), "linking another starter while the event has a user");
        Ok(())
    }

    fn ensure_free(&self) -> Outcome {
        ensure_eq!(self.taken(), None, "linking another starter after the event's last user has gone");
        Ok(())
    }
}

#[apply(guest_test)]
fn attached_event_ends_with_its_last_user() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (creator, id) = persistent(&device, &attr, 1, "ends")?;
    let reader = device.reopen(id, 1)?;
    let place = StarterProbe::of(&device, &reader)?;
    drop(creator);
    // Any handle can attach the event. The event then lives until its last user is gone.
    let other = device.reopen(id, 1)?;
    other.attach()?;
    ensure_eq!(refused(other.attach()), Some(libc::EINVAL), "attaching the event a second time");
    ensure_eq!(device.persistent()?.len(), 0, "events listed");
    ensure_eq!(refused(device.reopen(id, 1)), Some(libc::ENOENT), "reopening an attached event");
    drop(other);
    device.place(1, 6)?;
    ensure_eq!(reader.count()?, 6, "marks for the user that is left");
    // The event can be made persistent again, with the same id.
    ensure_eq!(reader.detach("again")?, id, "the id from detaching again");
    drop(reader);
    device.place(1, 6)?;
    let last = device.reopen(id, 1)?;
    ensure_eq!(last.count()?, 12, "marks");
    last.attach()?;
    place.ensure_taken()?;
    drop(last);
    ensure_eq!(refused(device.reopen(id, 1)), Some(libc::ENOENT), "reopening the event after its last user has gone");
    place.ensure_free()
}

#[apply(guest_test)]
fn map_keeps_an_attached_event() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (creator, id) = persistent(&device, &attr, 1, "mapped")?;
    drop(creator);
    let event = device.reopen(id, 1)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    let place = StarterProbe::of(&device, &event)?;
    event.attach()?;
    drop(event);
    device.place(9, 3)?;
    ensure_eq!(values(&ring.take()?, &attr)?, [9; 3], "values of the marks");
    ensure_eq!(device.persistent()?.len(), 0, "events listed");
    place.ensure_taken()?;
    drop(ring);
    place.ensure_free()
}

#[apply(guest_test)]
fn readers_of_one_ring_find_its_history() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = backwards(&device);
    let (event, id) = persistent(&device, &attr, 1, "history")?;
    let own = look(&event, 2)?;
    let mut counter = Counter::new(&device)?;
    counter.mark(100);
    let second = device.reopen(id, 1)?;
    let beside = look(&second, 2)?;
    counter.mark(50);
    let code = os::forked(|| {
        let found = Device::open().and_then(|device| {
            let event = device.reopen(id, 1)?;
            let ring = look(&event, 2)?;
            newest(&ring, &attr).map_err(std::io::Error::other)
        });
        i32::from(found.ok() != Some(up_to(150)))
    })?;
    ensure_eq!(code, 0, "the child's exit code (1: it misses a mark)");
    for (who, ring) in [("the creator", &own), ("the second reader", &beside)] {
        ensure_eq!(newest(ring, &attr)?, up_to(150), "values of the marks that {who} finds");
    }
    // No reader removes records, so the ring holds the same newest records for all readers.
    counter.mark(400);
    let fits = 2 * PAGE as u64 / RECORD;
    let all: Vec<u64> = (1..=550).collect();
    let expected = &all[all.len() - usize::try_from(fits)?..];
    ensure_eq!(newest(&own, &attr)?, expected, "the newest marks for the creator");
    ensure_eq!(newest(&beside, &attr)?, expected, "the newest marks for the second reader");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn readers_of_one_ring_are_all_woken() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = waking(device.any_marks(1, crate::fields::TIME), 3);
    let (event, id) = persistent(&device, &attr, 1, "waking")?;
    let _ring = look(&event, 1)?;
    let others = [device.reopen(id, 1)?, device.reopen(id, 1)?];
    for round in 0..3 {
        device.place(1, 2)?;
        for reader in others.iter().chain([&event]) {
            ensure_eq!(reader.poll(0)?, 0, "round {round}: poll after two records");
        }
        device.place(1, 1)?;
        for reader in others.iter().chain([&event]) {
            ensure_eq!(reader.poll(10_000)?, libc::POLLIN, "round {round}: poll after the third");
        }
    }
    let sleepers = others.into_iter().chain([event]).collect();
    sleepers_are_woken(sleepers, libc::POLLIN, || device.place(1, 3))?;
    device.reopen(id, 1)?.attach()?;
    Ok(())
}

/// Returns the errno of a mapping of that size.
fn sized(event: &Event, pages: usize) -> Option<i32> {
    refused(Pages::map(event, pages, READ_WRITE))
}

#[apply(guest_test)]
fn ring_keeps_its_size_without_maps() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (event, id) = persistent(&device, &attr, 1, "size")?;
    let entry = |device: &Device| -> Fallible<u32> { Ok(device.entry(id)?.ok_or("the event is not listed")?.pages) };
    ensure_eq!(entry(&device)?, 0, "pages listed before the first mapping");
    let ring = Pages::map(&event, 2, READ_WRITE)?;
    ensure_eq!(entry(&device)?, 3, "pages listed for the ring");
    for pages in [0, 1, 4] {
        ensure_eq!(sized(&event, pages), Some(libc::EINVAL), "a second map of {pages} pages");
    }
    drop(ring);
    ensure_eq!(sized(&event, 1), Some(libc::EINVAL), "a different size without a mapping");
    drop(event);
    let event = device.reopen(id, 1)?;
    ensure_eq!(sized(&event, 4), Some(libc::EINVAL), "a different size by another handle");
    ensure_eq!(refused(Pages::map(&event, 2, READ_WRITE)), None, "a mapping of the same size");
    ensure_eq!(refused(Pages::map(&event, 2, READ)), None, "a read-only map of the same size");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn absent_reader_loses_nothing_that_fits() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let attr = sequence(&device);
    let (event, id) = persistent(&device, &attr, 1, "full")?;
    drop(Pages::map(&event, 1, READ_WRITE)?);
    drop(event);
    let fits = PAGE as u64 / RECORD;
    let mut counter = Counter::new(&device)?;
    counter.mark(u32::try_from(fits)? + 9);
    let event = device.reopen(id, 1)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(values(&ring.take()?, &attr)?, up_to(fits), "values of the marks that fitted");
    ensure_eq!(event.count()?, fits + 9, "the event's count");
    let (samples, lost) = crate::fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (0, 9), "records and losses");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn every_handle_switches_the_one_event() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    // `PERF_EVENT_IOC_REFRESH` is refused for events with `inherit`, but a persistent event ignores `inherit`.
    let mut attr = sequence(&device);
    attr.set_inherit(1);
    let (first, id) = persistent(&device, &attr, 1, "switched")?;
    let second = device.reopen(id, 1)?;
    let mut ring = Pages::map(&second, 1, READ_WRITE)?;
    let mut expected = 0;
    for (switch, other) in [(&first, &second), (&second, &first)] {
        switch.disable(0)?;
        let off = other.count()?;
        ensure_eq!(off, expected, "the count after the other handle disabled it");
        device.place(2, 10)?;
        ensure_eq!(other.count()?, off, "the count while the event is off");
        other.enable(0)?;
        device.place(2, 10)?;
        expected += 10;
        ensure_eq!(switch.count()?, expected, "the count after the event was enabled again");
    }
    second.reset(0)?;
    ensure_eq!(first.count()?, 0, "the count after the other handle's reset");
    first.period(5)?;
    ring.take()?;
    device.place(2, 20)?;
    ensure_eq!(ring.take()?.len(), 4, "records of a period of 5");
    second.period(1)?;
    first.pause(true)?;
    device.place(2, 3)?;
    ensure_eq!(ring.take()?.len(), 0, "records while the ring is paused");
    second.pause(false)?;
    device.place(2, 3)?;
    let (samples, lost) = crate::fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (3, 3), "records and losses after the pause");
    // The limit belongs to the event, so any handle can set it.
    second.disable(0)?;
    first.refresh(4)?;
    device.place(2, 9)?;
    ensure_eq!(ring.take()?.len(), 4, "records of a limit of 4");
    ensure_eq!(second.count()?, 30, "the count when the limit was reached");
    first.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn persistent_event_waits_for_its_cpu() -> Outcome {
    const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";
    let device = fresh()?;
    cpu::pin(1)?;
    let (event, id) = persistent(&device, &sequence(&device), 1, "patient")?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    device.place(2, 5)?;
    cpu::pin(0)?;
    fs::write(ONLINE, "0")?;
    let away = (|| -> Outcome {
        // As for every event of perf, the descriptor of an offline CPU's event has ended, and none can be opened.
        ensure_eq!(refused(device.reopen(id, 1)), Some(libc::ENODEV), "reopening the event while its CPU is offline");
        ensure_eq!(ring.take()?.len(), 5, "records");
        ensure_eq!(refused(event.disable(0)), Some(libc::ENODEV), "disabling the event while its CPU is offline");
        device.place(2, 3)?;
        Ok(())
    })();
    fs::write(ONLINE, "1")?;
    away?;
    cpu::pin(1)?;
    device.place(2, 4)?;
    let event = device.reopen(id, 1)?;
    ensure_eq!(event.count()?, 9, "the event's count after its CPU is online again");
    ensure_eq!(ring.take()?.len(), 4, "records");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn handles_come_and_go_while_it_counts() -> Outcome {
    use std::sync::atomic::{AtomicBool, Ordering};
    const MOST: u64 = 20_000;
    let device = fresh()?;
    let attr = backwards(&device);
    let (event, id) = persistent(&device, &attr, 1, "busy")?;
    drop(look(&event, 4)?);
    drop(event);
    let stop = AtomicBool::new(false);
    let placed = thread::scope(|scope| -> Fallible<u64> {
        let placer = scope.spawn(|| -> std::io::Result<u64> {
            cpu::pin(1)?;
            let mut counter = Counter::new(&device)?;
            counter.mark_until(&stop, MOST);
            Ok(counter.placed())
        });
        let looked = (|| -> Outcome {
            cpu::pin(0)?;
            let mut last = 0;
            for round in 0..100 {
                let event = device.reopen(id, 1)?;
                let ring = look(&event, 4)?;
                let count = event.count()?;
                ensure!(count >= last, "round {round}: the count fell from {last} to {count}");
                last = count;
                drop(event);
                drop(ring);
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let placed = placer.join().map_err(|_| "the placer panicked")??;
        looked?;
        Ok(placed)
    })?;
    let event = device.reopen(id, 1)?;
    ensure_eq!(event.count()?, placed, "the event's count");
    let ring = look(&event, 4)?;
    let reported = newest(&ring, &attr)?;
    let first = placed + 1 - reported.len() as u64;
    ensure_eq!(reported, (first..=placed).collect::<Vec<_>>(), "values of the newest marks");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn closed_attached_event_frees_its_place_on_the_device() -> Outcome {
    const ROUNDS: usize = 8;
    let device = fresh()?;
    os::allow_descriptors(4096)?;
    let task = os::Sleeper::start(|| Ok(()))?;
    for round in 0..ROUNDS {
        let event = device.open_event(&sequence(&device), How::on_cpu(1))?;
        event.detach("")?;
        event.attach()?;
        ensure_eq!(device.persistent()?.len(), 0, "round {round}: events listed");
    }
    ensure_eq!(
        room(&device, task.pid)?,
        device.info.max_events,
        "room for events after {ROUNDS} that were attached and closed"
    );
    Ok(())
}
