//! The life of an event: limits, periods, frequencies, children, exec, modes and refused requests.
#![expect(clippy::cast_possible_truncation, reason = "splits words into fields; usize has 64 bits")]

use std::process::Command;

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, CPU, ID, IP, PERIOD, READ, READ_RECORD, SAMPLE, STREAM_ID, TID, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, EXIT_PORT, Event, FORMAT_ENABLED, FORMAT_ID, FORMAT_RUNNING, How, KIND_EXITS, KIND_MARK, Later, refused,
    sampling, silent,
};
use crate::{Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 90;

/// Opens a disabled event of this thread, and maps its ring.
fn open(device: &Device, attr: &perf_event_attr) -> std::io::Result<(Event, Pages)> {
    let event = device.open_event(attr, How::OWN)?;
    let ring = Pages::map(&event, 4, READ_WRITE)?;
    Ok((event, ring))
}

#[apply(guest_test)]
fn refresh_limits_overflows() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 2, READ));
    let (event, mut ring) = open(&device, &attr)?;
    let mut counted = 0;
    for overflows in [1, 2, 17] {
        event.refresh(overflows)?;
        // The period is two marks, so the permitted overflows need only `2 * overflows` marks. The other marks must not
        // count.
        device.place(VALUE, 4 * overflows + 3)?;
        counted += 2 * overflows;
        ensure_eq!(event.count()?, counted, "marks counted with {overflows} overflows allowed");
        ensure_eq!(ring.take()?.len() as u64, overflows, "records");
        ensure_eq!(event.poll(10_000)?, libc::POLLIN, "poll after the last overflow");
    }
    // Permitted overflows add up.
    event.refresh(2)?;
    event.refresh(3)?;
    device.place(VALUE, 100)?;
    ensure_eq!(ring.take()?.len(), 5, "records after limits of 2 and 3 overflows");
    ensure_eq!(event.poll(10_000)?, libc::POLLIN, "poll after the last overflow");
    // Enabling the event removes the limit.
    event.enable(0)?;
    device.place(VALUE, 40)?;
    ensure_eq!(ring.take()?.len(), 20, "records with no limit");
    Ok(())
}

#[apply(guest_test)]
fn refresh_of_a_counting_or_inherited_event_is_refused() -> Outcome {
    let device = Device::open()?;
    let counting = device.open_event(&device.attr(KIND_MARK, VALUE), How::OWN)?;
    ensure_eq!(refused(counting.refresh(1)), Some(libc::EINVAL), "a refresh of an event that only counts");
    let mut attr = device.marks(VALUE, 1, TIME);
    attr.set_inherit(1);
    let inherited = device.open_event(&attr, How::OWN)?;
    ensure_eq!(refused(inherited.refresh(1)), Some(libc::EINVAL), "a refresh of an inherited event");
    Ok(())
}

#[apply(guest_test)]
fn period_can_be_changed() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 10, PERIOD | READ));
    let (event, mut ring) = open(&device, &attr)?;
    event.enable(0)?;
    device.place(VALUE, 25)?;
    event.period(4)?;
    device.place(VALUE, 9)?;
    event.period(1)?;
    device.place(VALUE, 2)?;
    let (samples, _) = fields::samples(&ring.take()?, &attr)?;
    let reported: Vec<Option<u64>> = samples.iter().map(|sample| sample.period).collect();
    ensure_eq!(reported, [10, 10, 4, 4, 1, 1].map(Some), "periods of the records");
    for wrong in [0, 1 << 63, u64::MAX] {
        ensure_eq!(refused(event.period(wrong)), Some(libc::EINVAL), "a period of {wrong:#x}");
    }
    Ok(())
}

fn frequent(device: &Device, rate: u64) -> perf_event_attr {
    let mut attr = silent(device.marks(VALUE, rate, TIME | PERIOD | READ));
    attr.set_freq(1);
    attr
}

#[apply(guest_test)]
fn frequency_is_reached() -> Outcome {
    const RATE: u64 = 200;
    let device = Device::open()?;
    let attr = frequent(&device, RATE);
    let event = device.open_event(&attr, How::OWN)?;
    let mut ring = Pages::map(&event, 16, READ_WRITE)?;
    event.enable(0)?;
    // Continues until the samples' times span two seconds.
    let (mut samples, mut placed) = (Vec::new(), 0);
    let times = |samples: &[fields::Sample]| -> Vec<u64> { samples.iter().filter_map(|sample| sample.time).collect() };
    loop {
        device.place(VALUE, 500)?;
        placed += 500;
        let (more, lost) = fields::samples(&ring.take()?, &attr)?;
        ensure_eq!(lost, 0, "lost samples");
        samples.extend(more);
        let at = times(&samples);
        if at.len() > 2 && at[at.len() - 1] - at[0] > 2_000_000_000 {
            break;
        }
        ensure!(placed < 1_000_000, "only {} samples of {placed} marks", samples.len());
    }
    let at = times(&samples);
    let settled: Vec<u64> = at.iter().copied().filter(|time| time - at[0] > 1_000_000_000).collect();
    let span = settled[settled.len() - 1] - settled[0];
    let rate = (settled.len() as u64 - 1) * 1_000_000_000 / span.max(1);
    ensure!((RATE / 2..=RATE * 2).contains(&rate), "{rate} samples a second, {RATE} asked for");
    // The periods in the samples must add up to the count, no matter how the period changed.
    let sum: u64 = samples.iter().filter_map(|sample| sample.period).sum();
    let last = samples[samples.len() - 1].read.as_ref().map_or(0, |read| read.values[0].value);
    ensure_eq!(sum, last, "the periods' sum and the count at the last sample");
    Ok(())
}

#[apply(guest_test)]
fn frequency_out_of_bounds_is_refused() -> Outcome {
    let device = Device::open()?;
    let most = u64::from(device.info.max_sample_rate);
    let errno = |rate| refused(device.open_event(&frequent(&device, rate), How::OWN));
    ensure_eq!(errno(most), None, "errno for the highest rate, {most}");
    ensure_eq!(errno(most + 1), Some(libc::EINVAL), "errno for a rate one above the highest");
    let event = device.open_event(&frequent(&device, 100), How::OWN)?;
    ensure_eq!(refused(event.period(most + 1)), Some(libc::EINVAL), "changing the rate to one above the highest");
    ensure_eq!(refused(event.period(0)), Some(libc::EINVAL), "changing the rate to zero");
    event.period(most)?;
    Ok(())
}

fn child(args: &[&str]) -> Outcome {
    let status = Command::new("/proc/self/exe").args(args).status()?;
    ensure!(status.success(), "the child: {status}");
    Ok(())
}

fn place_in_child(times: u64) -> Outcome {
    child(&["mark", &VALUE.to_string(), &times.to_string()])
}

#[apply(guest_test)]
fn exec_enables() -> Outcome {
    let device = Device::open()?;
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.set_inherit(1);
    attr.set_enable_on_exec(1);
    let event = device.open_event(&attr, How::OWN)?;
    device.place(VALUE, 7)?;
    place_in_child(25)?;
    ensure_eq!(event.count()?, 25, "the marks of a child from its exec on");
    Ok(())
}

#[apply(guest_test)]
fn children_are_read_with_their_parent() -> Outcome {
    let device = Device::open()?;
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.set_inherit(1);
    attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
    let event = device.start(&attr, How::OWN)?;
    device.place(VALUE, 3)?;
    place_in_child(11)?;
    let own = fields::reading(&event.read()?, attr.read_format)?;
    ensure_eq!(own.values[0].value, 14, "own marks and the child's");
    place_in_child(6)?;
    let more = fields::reading(&event.read()?, attr.read_format)?;
    ensure_eq!(more.values[0].value, 20, "own marks and two children's");
    ensure!(
        more.enabled > own.enabled && more.running <= more.enabled,
        "the enabled time did not grow, or is below the time running: {own:?}, {more:?}"
    );
    // As in perf, `PERF_SAMPLE_READ` is refused for an inherited event.
    let mut attr = device.marks(VALUE, 1, READ);
    attr.set_inherit(1);
    let errno = refused(device.open_event(&attr, How::OWN));
    ensure_eq!(errno, Some(libc::EINVAL), "errno for READ with inherit");
    Ok(())
}

#[apply(guest_test)]
fn count_of_each_child_is_recorded_at_its_end() -> Outcome {
    let device = Device::open()?;
    let mut attr = silent(device.marks(VALUE, 1, TID | TIME | ID | CPU | STREAM_ID));
    attr.read_format = FORMAT_ID;
    attr.set_inherit(1);
    attr.set_inherit_stat(1);
    attr.set_sample_id_all(1);
    let (event, mut ring) = open(&device, &attr)?;
    event.enable(0)?;
    let id = event.id()?;
    for placed in [5, 12] {
        place_in_child(placed)?;
        event.count()?;
        let records = ring.take()?;
        let samples: Vec<_> = records.iter().filter(|record| record.kind == SAMPLE).collect();
        ensure_eq!(samples.len() as u64, placed, "records of the child");
        let child = fields::sample(samples[0], &attr)?;
        let reported: Vec<_> = records.iter().filter(|record| record.kind == READ_RECORD).collect();
        ensure_eq!(reported.len(), 1, "records of counts at a child's end, among {} records", records.len());
        // pid and tid, the count, the id.
        let (own, trailer) = fields::trailer(reported[0], 3, &attr)?;
        let who = child.pid_tid.map(|(pid, tid)| u64::from(pid) | u64::from(tid) << 32);
        ensure_eq!(Some(own[0]), who, "the task of the count");
        ensure_eq!(own[1..], [placed, id], "the count, and the id of its event");
        ensure_eq!(trailer.id, Some(id), "the trailer's id");
        ensure_eq!(trailer.stream_id, child.stream_id, "the trailer's stream");
    }
    Ok(())
}

#[apply(guest_test)]
fn excluded_mode_is_not_counted() -> Outcome {
    let device = Device::open()?;
    cpu::allow_ports()?;
    // The exit of a mark comes from kernel mode, because the driver writes the mark for the program. The exit of a port
    // write comes from user mode.
    for (kind, what) in [(KIND_MARK, VALUE), (KIND_EXITS, EXIT_PORT)] {
        for (user, kernel) in [(false, false), (true, false), (false, true)] {
            let mut attr = silent(sampling(device.attr(kind, what), 1, IP));
            attr.set_exclude_user(user.into());
            attr.set_exclude_kernel(kernel.into());
            let (event, mut ring) = open(&device, &attr)?;
            event.enable(0)?;
            for _ in 0..20 {
                if kind == KIND_MARK {
                    device.mark(VALUE)?;
                } else {
                    cpu::port_write();
                }
            }
            event.disable(0)?;
            let what = format!("kind {kind:#x} without user: {user}, kernel: {kernel}");
            let (samples, lost) = fields::samples(&ring.take()?, &attr)?;
            ensure_eq!((event.count()?, lost), (samples.len() as u64, 0), "{what}: count and losses");
            let of_kernel = samples.iter().filter(|s| s.ip > Some(1 << 63)).count();
            let of_user = samples.len() - of_kernel;
            let made = |left_out: bool| if left_out { 0 } else { 20 };
            if kind == KIND_MARK {
                ensure_eq!((of_user, of_kernel), (0, made(kernel)), "{what}: samples of user and kernel mode");
                continue;
            }
            ensure_eq!(of_user, made(user), "{what}: samples of user mode");
            // On some architectures, the driver's notifications cause exits for the same reason as port writes. The
            // samples of kernel mode are then samples of these notifications.
            let drivers = cpu::OWN_IN_USER_MODE && !kernel;
            ensure_eq!(of_kernel > 0, drivers, "{what}: whether samples are of kernel mode ({of_kernel} are)");
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn pinned_event_counts_always() -> Outcome {
    let device = Device::open()?;
    let mut attr = device.attr(KIND_MARK, VALUE);
    attr.set_pinned(1);
    attr.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
    let event = device.start(&attr, How::OWN)?;
    // The pinned event is one of many events.
    let others: Vec<Event> = (0..20)
        .map(|other| device.start(&device.attr(KIND_MARK, VALUE + other), How::OWN))
        .collect::<Result<_, _>>()?;
    device.place(VALUE, 30)?;
    event.disable(0)?;
    let reading = fields::reading(&event.read()?, attr.read_format)?;
    ensure_eq!(reading.values[0].value, 30, "marks of a pinned event");
    ensure_eq!(reading.enabled, reading.running, "times of a pinned event");
    drop(others);
    Ok(())
}

#[apply(guest_test)]
fn attributes_change_as_perf_changes_them() -> Outcome {
    let device = Device::open()?;
    let attr = silent(device.marks(VALUE, 1, TIME));
    let event = device.open_event(&attr, How::OWN)?;
    // In perf, only breakpoints support changes to their attributes.
    ensure_eq!(refused(event.modify(&attr)), Some(libc::EOPNOTSUPP), "attributes of the same type");
    let mut other = attr;
    other.type_ = bindings::PERF_TYPE_SOFTWARE;
    ensure_eq!(refused(event.modify(&other)), Some(libc::EINVAL), "attributes of another type");
    let mut later = Later { attr, more: [0, 0, 0, 0, 0, 0, 0, 1] };
    later.attr.size = u32::try_from(size_of::<Later>())?;
    let errno = refused(event.modify_later(&later));
    ensure_eq!(errno, Some(libc::E2BIG), "a bit that only a later kernel has");
    event.enable(0)?;
    device.place(VALUE, 3)?;
    ensure_eq!(event.count()?, 3, "the count after the refused changes");
    Ok(())
}

#[apply(guest_test)]
fn unknown_bits_are_refused() -> Outcome {
    let device = Device::open()?;
    let errno = |attr: &perf_event_attr| refused(device.open_event(attr, How::OWN));
    let plain = device.attr(KIND_MARK, VALUE);
    ensure_eq!(errno(&plain), None, "errno for known bits only");
    let mut attr = plain;
    attr.sample_type = 1 << 63;
    ensure_eq!(errno(&attr), Some(libc::EINVAL), "sample_type");
    let mut attr = plain;
    attr.read_format = 1 << 63;
    ensure_eq!(errno(&attr), Some(libc::EINVAL), "read_format");
    let attr = sampling(plain, 1 << 63, 0);
    ensure_eq!(errno(&attr), Some(libc::EINVAL), "a period with its highest bit");
    let mut attr = plain;
    attr.set___reserved_1(1);
    ensure_eq!(errno(&attr), Some(libc::EINVAL), "__reserved_1");
    let mut attr = plain;
    attr.__reserved_2 = 1;
    ensure_eq!(errno(&attr), Some(libc::EINVAL), "__reserved_2");
    for flags in [1 << 4, 1 << 31, 1 << 63] {
        let how = How { flags, ..How::OWN };
        let errno = refused(device.open_event(&plain, how));
        ensure_eq!(errno, Some(libc::EINVAL), "flags {flags:#x}");
    }
    let how = How { engine: 3, ..How::OWN };
    ensure_eq!(refused(device.open_event(&plain, how)), Some(libc::EINVAL), "engine 3");
    Ok(())
}

#[apply(guest_test)]
fn attributes_of_other_sizes() -> Outcome {
    let device = Device::open()?;
    let mut later = Later { attr: device.attr(KIND_MARK, VALUE), more: [0; 8] };
    later.attr.size = size_of::<Later>() as u32;
    let opened = device.open_later(&mut later);
    ensure_eq!(refused(opened), None, "attributes of a later kernel, the new fields zero");
    later.more[7] = 1;
    let opened = device.open_later(&mut later);
    ensure_eq!(refused(opened), Some(libc::E2BIG), "attributes of a later kernel, a new field set");
    let known = later.attr.size as usize;
    ensure!((64..=size_of::<perf_event_attr>()).contains(&known), "the driver returned the impossible size {known}");
    let mut attr = device.attr(KIND_MARK, VALUE);
    for size in [1, 63, 4097, u32::MAX] {
        attr.size = size;
        let opened = device.open_raw(&mut attr, How::OWN);
        ensure_eq!(refused(opened), Some(libc::E2BIG), "errno for a size of {size}");
        ensure_eq!(attr.size as usize, known, "the size written back");
    }
    // The first version of `perf_event_attr` has 64 bytes. A size of zero means the same.
    for size in [64, 0] {
        attr.size = size;
        ensure_eq!(refused(device.open_raw(&mut attr, How::OWN)), None, "errno for a size of {size}");
    }
    Ok(())
}
