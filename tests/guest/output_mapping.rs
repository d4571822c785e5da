//! How a ring is mapped: its sizes, the processes that may map it, its lifetime, and the user to whom its memory is
//! charged.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::fs;
use std::thread;
use std::time::Duration;

use crate::beside::work_beside;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, READ, TID, TIME};
use crate::pages::{DATA_OFFSET, DATA_SIZE, Pages, READ as READ_ONLY, READ_WRITE};
use crate::raw::{Device, Event, How, PAGE, refused, silent};
use crate::{Fallible, Outcome, cpu, os};

const GROUP: &str = "output";

const VALUE: u64 = 21;

/// Opens an enabled event of this thread that samples each mark.
fn marks(device: &Device) -> std::io::Result<Event> {
    let attr = silent(device.marks(VALUE, 1, TID | TIME));
    device.start(&attr, How::OWN)
}

fn map_errno(event: &Event, bytes: usize, flags: i32, offset: i64) -> Option<i32> {
    refused(Pages::map_raw(event, bytes, READ_WRITE, flags, offset))
}

#[apply(guest_test)]
fn ring_has_one_page_or_a_power_of_two_more() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    for pages in 1..=34_usize {
        let fits = pages == 1 || (pages - 1).is_power_of_two();
        let expected = (!fits).then_some(libc::EINVAL);
        for protection in [READ_WRITE, READ_ONLY] {
            let bytes = pages * PAGE;
            let mapped = Pages::map_raw(&event, bytes, protection, libc::MAP_SHARED, 0);
            if let Ok(ring) = &mapped {
                let reported = (ring.load(DATA_OFFSET), ring.load(DATA_SIZE));
                let is = (PAGE as u64, ((pages - 1) * PAGE) as u64);
                ensure_eq!(reported, is, "data_offset and data_size with {pages} pages");
            }
            ensure_eq!(refused(mapped), expected, "errno for a mapping of {pages} pages");
        }
    }
    let most = device.info.max_ring_pages as usize;
    ensure_eq!(
        map_errno(&event, (1 + 2 * most) * PAGE, libc::MAP_SHARED, 0),
        Some(libc::EINVAL),
        "twice the {most} pages that a ring may have"
    );
    Ok(())
}

#[apply(guest_test)]
fn later_maps_are_equal_until_all_are_gone() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    let first = Pages::map(&event, 2, READ_WRITE)?;
    let second = Pages::map(&event, 2, READ_WRITE)?;
    let others = [1, 2, 5, 9].map(|pages| pages * PAGE);
    for bytes in others {
        let other = map_errno(&event, bytes, libc::MAP_SHARED, 0);
        ensure_eq!(other, Some(libc::EINVAL), "a mapping of {bytes} bytes beside one of three pages");
    }
    drop(first);
    let other = map_errno(&event, 2 * PAGE, libc::MAP_SHARED, 0);
    ensure_eq!(other, Some(libc::EINVAL), "a different size while one mapping is left");
    drop(second);
    for bytes in others {
        let fresh = map_errno(&event, bytes, libc::MAP_SHARED, 0);
        ensure_eq!(fresh, None, "a mapping of {bytes} bytes after all mappings are gone");
    }
    Ok(())
}

#[apply(guest_test)]
fn maps_are_shared_and_from_the_start() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    let cases = [
        (libc::MAP_PRIVATE, 0, "a private map"),
        (libc::MAP_SHARED, PAGE as i64, "an offset of a page"),
        (libc::MAP_SHARED, 2 * PAGE as i64, "an offset of two pages"),
    ];
    let ensure_refused = |when: &str| {
        cases.into_iter().try_for_each(|(flags, offset, what)| {
            let errno = map_errno(&event, 2 * PAGE, flags, offset);
            ensure_eq!(errno, Some(libc::EINVAL), "{what} {when}");
            Ok(())
        })
    };
    ensure_refused("before the first mapping")?;
    let ring = Pages::map(&event, 1, READ_WRITE)?;
    ensure_refused("beside a mapping")?;
    drop(ring);
    ensure_refused("after the last mapping")
}

#[apply(guest_test)]
fn two_maps_of_an_event_are_one_ring() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    let mut first = Pages::map(&event, 1, READ_WRITE)?;
    let second = Pages::map(&event, 1, READ_WRITE)?;
    device.place(VALUE, 10)?;
    let head = first.head();
    ensure!(head > 0, "the marks moved no head");
    ensure_eq!(second.head(), head, "the head as the other mapping shows it");
    for word in (0..head as usize).step_by(8) {
        let pair = (first.load(PAGE + word), second.load(PAGE + word));
        ensure_eq!(pair.0, pair.1, "byte {word} of the data in the maps");
    }
    // All maps share the tail, so a reader of a later map starts after the consumed records.
    ensure_eq!(first.take()?.len(), 10, "records");
    let third = Pages::map(&event, 1, READ_WRITE)?;
    ensure_eq!(third.tail(), head, "the tail that a later map finds");
    Ok(())
}

#[apply(guest_test)]
fn forked_child_does_not_inherit_the_ring() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    let mut ring = Pages::map(&event, 1, READ_WRITE)?;
    device.place(VALUE, 3)?;
    let code = os::forked(|| {
        // As with perf's rings, a forked child does not inherit the ring's mapping, but may map the ring itself.
        if os::is_mapped(ring.address()) {
            return 1;
        }
        let Ok(mut own) = Pages::map(&event, 1, READ_WRITE) else {
            return 2;
        };
        match own.take() {
            Ok(records) if records.len() == 3 => 0,
            _ => 3,
        }
    })?;
    ensure_eq!(code, 0, "the child's exit code");
    // The child has moved the tail that all mappings share. The parent's mapping still works.
    device.place(VALUE, 4)?;
    ensure_eq!(ring.head(), 7 * 24, "the head after the child has gone");
    let left = Pages::map(&event, 1, READ_WRITE)?.take()?;
    ensure_eq!(left.len(), 4, "records after the child's");
    ensure!(ring.take()?.len() == 7, "the parent did not read all seven records from its own position");
    Ok(())
}

#[apply(guest_test)]
fn ring_lives_as_long_as_any_map() -> Outcome {
    let device = Device::open()?;
    let event = marks(&device)?;
    let first = Pages::map(&event, 1, READ_WRITE)?;
    let mut second = Pages::map(&event, 1, READ_WRITE)?;
    device.place(VALUE, 2)?;
    drop(first);
    device.place(VALUE, 2)?;
    drop(event);
    // The map keeps the file open, so the event still counts.
    device.place(VALUE, 2)?;
    ensure_eq!(second.take()?.len(), 6, "records read through the remaining map");
    Ok(())
}

/// Allocates `freed` pages of memory, which are probably the pages that an unmapped ring or area has freed. Checks that
/// the host no longer writes to them.
pub(crate) fn untouched(freed: usize, round: usize) -> Outcome {
    let memory = vec![0x5a5a_5a5a_5a5a_5a5a_u64; freed * PAGE / 8];
    for _ in 0..200 {
        std::hint::spin_loop();
    }
    ensure!(memory.iter().all(|&word| word == memory[0]), "round {round}: memory was written to after it was unmapped");
    Ok(())
}

/// VPMU-G-6.3-1.
#[apply(guest_test)]
fn unmapping_while_the_host_writes_harms_nothing() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let marking = || Ok(|| device.mark(VALUE));
    let (event, placed) = work_beside(1, marking, |_| {
        let attr = silent(device.marks(VALUE, 1, TID | TIME | READ));
        let event = device.start(&attr, How::on_cpu(1))?;
        for round in 0..60_usize {
            let pages = 1 << (round % 4);
            let mut ring = Pages::map(&event, pages, READ_WRITE)?;
            // Waits for a record, so that the host is writing when the ring is unmapped.
            while ring.head() == 0 {
                std::hint::spin_loop();
            }
            let (samples, _) = fields::samples(&ring.take()?, &attr)?;
            ensure!(!samples.is_empty(), "round {round}: no record");
            drop(ring);
            untouched(1 + pages, round)?;
        }
        Ok(event)
    })?;
    ensure!(event.count()? <= placed, "the count exceeds the number of marks placed");
    ensure!(placed > 60, "{placed} marks are too few");
    Ok(())
}

/// Number of pages of rings that a user may map in addition to `RLIMIT_MEMLOCK`, for all CPUs together.
pub(crate) fn allowance() -> Fallible<usize> {
    let kib = fs::read_to_string("/sys/module/virtio_pmu/parameters/mlock_kb")?;
    let online = fs::read_to_string("/proc/cpuinfo")?;
    let online = online.lines().filter(|line| line.starts_with("processor")).count();
    Ok(kib.trim().parse::<usize>()? / 4 * online)
}

#[apply(guest_test)]
fn locked_memory_is_accounted_and_given_back() -> Outcome {
    let device = Device::open()?;
    let allowance = allowance()?;
    let beyond = 64;
    os::limit_locked((beyond * PAGE) as u64)?;
    os::set_paranoid(1)?;
    os::become_nobody()?;
    let event = || marks(&device);
    // Uses up the allowance and then `RLIMIT_MEMLOCK` with rings of 1 + 64 pages.
    let whole = (allowance + beyond) / 65;
    let left = (allowance + beyond) % 65;
    for round in 0..2 {
        let mut rings = Vec::new();
        for number in 0..whole {
            let event = event()?;
            let ring = Pages::map(&event, 64, READ_WRITE);
            rings.push((event, ring.map_err(|e| format!("round {round}, ring {number}: {e}"))?));
        }
        let more = event()?;
        ensure_eq!(
            refused(Pages::map(&more, 64, READ_WRITE)),
            Some(libc::EPERM),
            "round {round}: a ring beyond the limit of {allowance} + {beyond} pages"
        );
        for _ in 0..left {
            let event = event()?;
            let ring = Pages::map(&event, 0, READ_WRITE)?;
            rings.push((event, ring));
        }
        ensure_eq!(
            refused(Pages::map(&more, 0, READ_WRITE)),
            Some(libc::EPERM),
            "round {round}: a page beyond the limit"
        );
        // A second map of the same ring takes no more memory.
        Pages::map(&rings[0].0, 64, READ_WRITE)?;
    }
    Ok(())
}

#[apply(guest_test)]
fn rings_of_root_have_no_memory_limit() -> Outcome {
    let device = Device::open()?;
    let allowance = allowance()?;
    os::limit_locked(0)?;
    let mut rings = Vec::new();
    let mut pages = 0;
    while pages <= allowance {
        let event = marks(&device)?;
        rings.push((Pages::map(&event, 128, READ_WRITE)?, event));
        pages += 129;
    }
    Ok(())
}

/// In each window of this length, the machine limits the bytes of records, by default to 2.6 MiB. If records of 32 KiB
/// come faster, the event is throttled.
const WINDOW: Duration = Duration::from_millis(10);
const RECORDS_OF_A_WINDOW: u64 = 50;

#[apply(guest_test)]
fn big_ring_fills_before_it_loses() -> Outcome {
    let device = Device::open()?;
    let pages = 2048.min(device.info.max_ring_pages as usize);
    let stack = 32 << 10;
    let mut attr = silent(device.marks(VALUE, 1, fields::STACK_USER | READ));
    attr.sample_stack_user = stack;
    // The event is bound to a CPU. If it were bound to a task, a task switch could record the loss too early.
    cpu::pin(1)?;
    let event = device.start(&attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&event, pages, READ_WRITE)?;
    // header, value, size, bytes, dynamic size
    let record = u64::from(stack) + 32;
    let fit = ring.size() / record;
    let mut left = fit + 5;
    while left > RECORDS_OF_A_WINDOW {
        device.place(VALUE, RECORDS_OF_A_WINDOW)?;
        left -= RECORDS_OF_A_WINDOW;
        thread::sleep(WINDOW);
    }
    device.place(VALUE, left)?;
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len() as u64, lost), (fit, 0), "records of {record} bytes, and losses");
    device.place(VALUE, 1)?;
    let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (1, 5), "records and losses after the ring was read");
    Ok(())
}
