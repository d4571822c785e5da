//! The metadata page, from which any reader gets counts and times without a system call or an exit.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, TIME};
use crate::pages::{
    CAPABILITIES, DATA_HEAD, DATA_OFFSET, DATA_SIZE, DATA_TAIL, Pages, READ_WRITE, TIME_ZERO, WIDTH_SHIFT_MULT,
};
use crate::raw::{Device, Event, FORMAT_ENABLED, FORMAT_RUNNING, How, KIND_EXITS, KIND_MARK, PAGE, silent};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 22;
const CAP_BIT0_IS_DEPRECATED: u64 = 1 << 1;
const CAP_USER_RDPMC: u64 = 1 << 2;
const CAP_USER_TIME_ZERO: u64 = 1 << 4;
/// All exits that reach the VMM.
const EXIT_USER: u64 = 1;

/// Opens an enabled counting event, and maps its page.
fn counting(device: &Device, mut attr: perf_event_attr, how: How<'_>) -> std::io::Result<(Event, Pages)> {
    attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
    let event = device.open_event(&attr, how)?;
    let page = Pages::map(&event, 0, READ_WRITE)?;
    event.enable(0)?;
    Ok((event, page))
}

#[apply(guest_test)]
fn page_describes_itself() -> Outcome {
    let device = Device::open()?;
    let event = device.start(&silent(device.marks(VALUE, 1, TIME)), How::OWN)?;
    let page = Pages::map(&event, 4, READ_WRITE)?;
    device.mark(VALUE)?;
    ensure_eq!(page.load(0), 0, "version and compat_version");
    ensure_eq!(page.load(DATA_OFFSET), PAGE as u64, "data_offset");
    ensure_eq!(page.load(DATA_SIZE), 4 * PAGE as u64, "data_size");
    ensure_eq!(page.load(DATA_HEAD), 16, "data_head after one record");
    ensure_eq!(page.load(DATA_TAIL), 0, "data_tail, which the reader owns");
    for aux in [1056, 1064, 1072, 1080] {
        ensure_eq!(page.load(aux), 0, "the word at byte {aux}, of an AUX area that does not exist");
    }
    let capabilities = page.load(CAPABILITIES);
    let reported = CAP_BIT0_IS_DEPRECATED | CAP_USER_TIME_ZERO;
    ensure_eq!(capabilities & reported, reported, "required bits of the capabilities {capabilities:#x}");
    ensure_eq!(capabilities & (CAP_USER_RDPMC | 1), 0, "bits that must be clear in the capabilities {capabilities:#x}");
    let word = page.load(WIDTH_SHIFT_MULT);
    let (width, shift, mult) = (word as u16, (word >> 16) as u16, (word >> 32) as u32);
    ensure!(width <= 64, "the counter's width is {width} bits");
    ensure_eq!(
        (u32::from(shift), mult, page.load(TIME_ZERO)),
        (device.info.time_shift, device.info.time_mult, device.info.time_zero),
        "the clock conversion in the page"
    );
    ensure_eq!(page.snapshot().index, 0, "the index of a hardware counter");
    Ok(())
}

#[apply(guest_test)]
fn page_counts_without_a_call_or_an_exit() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    // A switch of the task causes an exit.
    cpu::keep()?;
    let (_marks, page) = counting(&device, device.attr(KIND_MARK, VALUE), How::OWN)?;
    let (_exits, exits) = counting(&device, device.attr(KIND_EXITS, EXIT_USER), How::OWN)?;
    let mut before = exits.snapshot().count;
    for placed in 1..=200 {
        device.mark(VALUE)?;
        let after_mark = exits.snapshot().count;
        ensure_eq!(after_mark, before + 1, "exits after a mark, as their page reports");
        for _ in 0..50 {
            let snapshot = page.snapshot();
            ensure_eq!((snapshot.index, snapshot.count), (0, placed), "index and count in the page of marks");
        }
        before = exits.snapshot().count;
        ensure_eq!(before, after_mark, "exits after the page was read 50 times");
    }
    Ok(())
}

#[apply(guest_test)]
fn page_equals_read() -> Outcome {
    let device = Device::open()?;
    // The page contains the counts at the last command. A task switch also sends a command, so no other task may run
    // here.
    cpu::keep()?;
    let (event, page) = counting(&device, device.attr(KIND_MARK, VALUE), How::OWN)?;
    let same = |what: &str| -> Outcome {
        // The page has the device's times, and a reading has perf core's.
        ensure_eq!(event.count()?, page.snapshot().count, "read(), compared with the page, {what}");
        Ok(())
    };
    for round in 1..=20 {
        device.place(VALUE, round)?;
        same("while it counts")?;
    }
    event.disable(0)?;
    device.place(VALUE, 5)?;
    same("while the event is disabled")?;
    let still = page.snapshot();
    ensure_eq!(still.count, 210, "marks while the event was enabled");
    ensure_eq!(still.enabled, still.running, "time enabled, compared with time running");
    event.reset(0)?;
    ensure_eq!(page.snapshot().count, 0, "the page's count after a reset");
    same("after a reset")?;
    event.enable(0)?;
    device.mark(VALUE)?;
    ensure_eq!(page.snapshot().count, 1, "the page's count after the event was enabled again");
    ensure!(page.snapshot().enabled > still.enabled, "the enabled time did not grow");
    same("after it was enabled again")
}

#[apply(guest_test)]
fn page_follows_exits() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    let (event, page) = counting(&device, device.port_exits(), How::OWN)?;
    for written in 1..=100 {
        cpu::port_write();
        ensure_eq!(page.snapshot().count, written, "port writes in the page");
    }
    ensure_eq!(event.count()?, 100, "port writes that read() returns");
    Ok(())
}

/// VPMU-D-6.7-7.
#[apply(guest_test)]
fn page_is_never_torn() -> Outcome {
    let device = Device::open()?;
    let (event, page) = counting(&device, device.attr(KIND_MARK, VALUE), How::on_cpu(1))?;
    let changes = AtomicU64::new(0);
    let placed = thread::scope(|scope| -> Fallible<u64> {
        let reader = scope.spawn(|| -> Result<(), String> {
            cpu::pin(0).map_err(|e| e.to_string())?;
            let mut last = page.snapshot();
            while changes.load(Ordering::Relaxed) < 500 {
                let snapshot = page.snapshot();
                let backwards =
                    snapshot.count < last.count || snapshot.enabled < last.enabled || snapshot.running < last.running;
                // Each update of the page changes both the count and the time enabled. A snapshot in which only one of
                // them has changed is a mixture of two updates.
                let apart = (snapshot.count == last.count) != (snapshot.enabled == last.enabled);
                if backwards || apart || snapshot.running > snapshot.enabled {
                    return Err(format!("{snapshot:?} after {last:?}"));
                }
                if snapshot.count > last.count {
                    changes.fetch_add(1, Ordering::Relaxed);
                }
                last = snapshot;
            }
            Ok(())
        });
        cpu::pin(1)?;
        let mut placed = 0;
        while !reader.is_finished() {
            device.mark(VALUE)?;
            placed += 1;
        }
        reader.join().map_err(|_| "the reader panicked")??;
        Ok(placed)
    })?;
    ensure_eq!(event.count()?, placed, "marks");
    Ok(())
}

#[apply(guest_test)]
fn page_time_matches_record_time() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let attr = silent(device.marks(VALUE, 1, TIME));
    let event = device.start(&attr, How::OWN)?;
    let mut page = Pages::map(&event, 1, READ_WRITE)?;
    let word = page.load(WIDTH_SHIFT_MULT);
    let (shift, mult) = ((word >> 16) as u16, (word >> 32) as u32);
    // The formula of `<linux/perf_event.h>`. It splits the cycles so that the products fit into 64 bits.
    let time = |cycles: u64| {
        let (quotient, remainder) = (cycles >> shift, cycles & ((1 << shift) - 1));
        let scaled = (remainder * u64::from(mult)) >> shift;
        page.load(TIME_ZERO) + quotient * u64::from(mult) + scaled
    };
    let mut moments = vec![time(cpu::tsc())];
    for _ in 0..50 {
        device.mark(VALUE)?;
        moments.push(time(cpu::tsc()));
    }
    let (samples, lost) = fields::samples(&page.take()?, &attr)?;
    ensure_eq!((samples.len(), lost), (50, 0), "records and losses");
    for (pair, sample) in moments.windows(2).zip(samples) {
        let at = sample.time.unwrap_or(0);
        ensure!(
            (pair[0]..=pair[1]).contains(&at),
            "a record's time {at} ns is not between {} and {} ns",
            pair[0],
            pair[1]
        );
    }
    Ok(())
}
