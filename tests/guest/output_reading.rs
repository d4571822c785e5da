//! Tests readings with every `read_format`, of single events and of groups. Also tests the rules of groups.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::ensure::{ensure, ensure_eq};
use crate::fields::{self, READ, Reading, TIME};
use crate::pages::{Pages, READ_WRITE};
use crate::raw::{
    Device, Event, FLAG_NO_GROUP, FORMAT_ENABLED, FORMAT_GROUP, FORMAT_ID, FORMAT_LOST, FORMAT_RUNNING, How, KIND_MARK,
    KIND_TSC, WHOLE_GROUP, refused, silent,
};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "output";

const VALUE: u64 = 80;
const FORMATS: u64 = 32;

fn attr(device: &Device, member: u64, format: u64) -> perf_event_attr {
    let mut attr = device.attr(KIND_MARK, VALUE + member);
    attr.read_format = format;
    // Members are opened enabled, so they count as soon as their leader is enabled.
    attr.set_disabled((member == 0).into());
    attr
}

fn member_of<'a>(leader: &'a Event, how: How<'a>) -> How<'a> {
    How { group: Some(leader.as_fd()), ..how }
}

/// Opens a disabled group of `members` events. The leader is first.
fn group(device: &Device, members: u64, format: u64, how: How<'_>) -> std::io::Result<Vec<Event>> {
    let mut events = vec![device.open_event(&attr(device, 0, format), how)?];
    for member in 1..members {
        let attr = attr(device, member, format);
        let event = device.open_event(&attr, member_of(&events[0], how))?;
        events.push(event);
    }
    Ok(events)
}

fn counts(reading: &Reading) -> Vec<u64> {
    reading.values.iter().map(|value| value.value).collect()
}

/// Checks that a reading has the fields of its format and no others.
fn check(reading: &Reading, format: u64, values: &[u64], ids: &[u64]) -> Outcome {
    ensure_eq!(counts(reading), values, "counts");
    ensure_eq!(reading.enabled.is_some(), format & FORMAT_ENABLED != 0, "whether the reading has time_enabled");
    ensure_eq!(reading.running.is_some(), format & FORMAT_RUNNING != 0, "whether the reading has time_running");
    if let (Some(enabled), Some(running)) = (reading.enabled, reading.running) {
        ensure!(running > 0 && running <= enabled, "the time running, {running} ns, is zero or exceeds {enabled} ns");
    }
    for (value, &id) in reading.values.iter().zip(ids) {
        ensure_eq!(value.id, (format & FORMAT_ID != 0).then_some(id), "ids");
        ensure_eq!(value.lost, (format & FORMAT_LOST != 0).then_some(0), "losses");
    }
    Ok(())
}

#[apply(guest_test)]
fn every_read_format_reads() -> Outcome {
    let device = Device::open()?;
    for format in 0..FORMATS {
        for members in [1_u64, 2, 3] {
            let what = format!("format {format:#x}, {members} events");
            let events = group(&device, members, format, How::OWN).map_err(|error| format!("{what}: {error}"))?;
            events[0].enable(0)?;
            let mut placed = Vec::new();
            for member in 0..members {
                device.place(VALUE + member, 3 + member)?;
                placed.push(3 + member);
            }
            let ids = events.iter().map(Event::perf_id).collect::<Result<Vec<_>, _>>()?;
            for (event, member) in events.iter().zip(0..) {
                let reading = fields::reading(&event.read()?, format).map_err(|error| format!("{what}: {error}"))?;
                // Each member reads the whole group, as in perf.
                let of = match format & FORMAT_GROUP != 0 {
                    true => 0..placed.len(),
                    false => member..member + 1,
                };
                check(&reading, format, &placed[of.clone()], &ids[of])
                    .map_err(|error| format!("{what}, event {member}: {error}"))?;
            }
        }
    }
    for bit in 5..64 {
        let refused = refused(device.open_event(&attr(&device, 0, 1 << bit), How::OWN));
        ensure_eq!(refused, Some(libc::EINVAL), "errno for bit {bit} of read_format");
    }
    Ok(())
}

#[apply(guest_test)]
fn buffer_that_is_too_short_is_refused() -> Outcome {
    let device = Device::open()?;
    for format in 0..FORMATS {
        let events = group(&device, 3, format, How::OWN)?;
        let whole = events[0].read()?.len() * 8;
        for bytes in [0, 1, 7, 8, whole - 8, whole - 1] {
            if bytes < whole {
                ensure_eq!(
                    refused(events[0].read_into(bytes)),
                    Some(libc::ENOSPC),
                    "format {format:#x}: errno for a buffer of {bytes} of {whole} bytes"
                );
            }
        }
        ensure_eq!(events[0].read_into(whole)?.len() * 8, whole, "format {format:#x}: bytes read");
    }
    Ok(())
}

#[apply(guest_test)]
fn every_read_format_works_in_samples() -> Outcome {
    let device = Device::open()?;
    for format in 0..FORMATS {
        let mut sampled = silent(device.marks(VALUE, 1, READ | TIME));
        sampled.read_format = format;
        let leader = device.open_event(&sampled, How::OWN)?;
        let mut ring = Pages::map(&leader, 1, READ_WRITE)?;
        let member = attr(&device, 1, format);
        let member = device.open_event(&member, member_of(&leader, How::OWN))?;
        leader.enable(0)?;
        for _ in 0..4 {
            device.place(VALUE + 1, 2)?;
            device.mark(VALUE)?;
        }
        let ids = [leader.id()?, member.id()?];
        let (samples, lost) =
            fields::samples(&ring.take()?, &sampled).map_err(|error| format!("format {format:#x}: {error}"))?;
        ensure_eq!((samples.len(), lost), (4, 0), "samples and losses");
        for (sample, number) in samples.iter().zip(1..) {
            let reading = sample.read.clone().unwrap_or_default();
            let values = [number, 2 * number];
            let of = if format & FORMAT_GROUP != 0 { 2 } else { 1 };
            check(&reading, format, &values[..of], &ids[..of])
                .map_err(|error| format!("format {format:#x}, sample {number}: {error}"))?;
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn each_events_loss_is_its_own() -> Outcome {
    let device = Device::open()?;
    let format = FORMAT_GROUP | FORMAT_LOST | FORMAT_ID;
    let mut sampled = silent(device.marks(VALUE, 1, READ));
    sampled.read_format = FORMAT_LOST;
    // Two events share a ring. Records have 24 bytes.
    let first = device.start(&sampled, How::OWN)?;
    let ring = Pages::map(&first, 1, READ_WRITE)?;
    let mut other = silent(device.marks(VALUE + 1, 1, READ));
    other.read_format = FORMAT_LOST;
    let second = device.start(&other, How::OWN)?;
    second.output_to(first.ring())?;
    let fit = ring.size() / 24;
    device.place(VALUE, fit)?;
    device.place(VALUE, 3)?;
    device.place(VALUE + 1, 5)?;
    let lost = |event: &Event, values: &[u64]| -> Outcome {
        let reading = fields::reading(&event.read()?, FORMAT_LOST)?;
        let reported = [reading.values[0].value, reading.values[0].lost.unwrap_or(0)];
        ensure_eq!(reported, values, "count and losses of an event");
        Ok(())
    };
    lost(&first, &[fit + 3, 3])?;
    lost(&second, &[5, 5])?;

    // In a group's reading, each member has its own number of lost records.
    let mut leader = silent(device.marks(VALUE + 2, 1, TIME));
    leader.read_format = format;
    let leader = device.open_event(&leader, How::OWN)?;
    let ring = Pages::map(&leader, 1, READ_WRITE)?;
    let member = device.open_event(&attr(&device, 3, format), member_of(&leader, How::OWN))?;
    leader.enable(0)?;
    let fit = ring.size() / 16;
    device.place(VALUE + 2, fit + 7)?;
    device.place(VALUE + 3, 2)?;
    let reading = fields::reading(&leader.read()?, format)?;
    ensure_eq!(counts(&reading), [fit + 7, 2], "counts");
    let losses: Vec<_> = reading.values.iter().map(|value| value.lost).collect();
    ensure_eq!(losses, [Some(7), Some(0)], "losses of a sampling leader and its member");
    drop(member);
    Ok(())
}

#[apply(guest_test)]
fn members_count_while_their_leader_does() -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    for how in [How::OWN, How::on_cpu(1)] {
        let events = group(&device, 3, 0, how)?;
        let place = || (0..3).try_for_each(|member| device.place(VALUE + member, 4));
        let expect = |expected: [u64; 3], when: &str| -> Outcome {
            let found = events.iter().map(Event::count).collect::<Result<Vec<_>, _>>()?;
            ensure_eq!(found, expected, "cpu {}: counts {when}", how.cpu);
            Ok(())
        };
        place()?;
        expect([0; 3], "while the leader is off")?;
        events[0].enable(0)?;
        place()?;
        expect([4; 3], "while it is on")?;
        events[1].disable(0)?;
        place()?;
        expect([8, 4, 8], "with one member off")?;
        events[0].disable(0)?;
        place()?;
        events[1].enable(0)?;
        place()?;
        expect([8, 4, 8], "with the leader off and all members on")?;
        events[0].enable(0)?;
        place()?;
        expect([12, 8, 12], "with all of them on")?;
    }
    Ok(())
}

/// Reads a group that counts two marks, until its first count has grown in 100 of the readings. Meanwhile, a thread on
/// another CPU places the two marks alternately. So in each reading, the two counts must be equal, or the first must be
/// higher by one.
fn look_at_pairs(leader: &Event) -> Outcome {
    cpu::pin(0)?;
    let (mut grown, mut last) = (0, 0);
    while grown < 100 {
        let values = counts(&fields::reading(&leader.read()?, FORMAT_GROUP)?);
        let one = values.len() == 2 && (values[0] == values[1] || values[0] == values[1] + 1);
        ensure!(one && values[0] >= last, "counts {values:?} fall below {last}, or differ by more than one");
        grown += u32::from(values[0] > last);
        last = values[0];
    }
    Ok(())
}

#[apply(guest_test)]
fn group_is_read_at_one_moment() -> Outcome {
    let device = Device::open()?;
    let events = group(&device, 2, FORMAT_GROUP, How::on_cpu(1))?;
    events[0].enable(0)?;
    let done = AtomicBool::new(false);
    let pairs = thread::scope(|scope| -> Fallible<u64> {
        let placer = scope.spawn(|| -> std::io::Result<u64> {
            cpu::pin(1)?;
            let mut pairs = 0;
            while !done.load(Ordering::Acquire) {
                device.mark(VALUE)?;
                device.mark(VALUE + 1)?;
                pairs += 1;
            }
            Ok(pairs)
        });
        let looked = look_at_pairs(&events[0]);
        done.store(true, Ordering::Release);
        let pairs = placer.join().map_err(|_| "the placer panicked")??;
        looked.map(|()| pairs)
    })?;
    let values = counts(&fields::reading(&events[0].read()?, FORMAT_GROUP)?);
    ensure_eq!(values, [pairs, pairs], "marks of both at the end");
    Ok(())
}

#[apply(guest_test)]
fn samples_have_the_counts_of_a_group_at_one_moment() -> Outcome {
    let device = Device::open()?;
    cpu::pin(0)?;
    let mut sampled = silent(device.marks(VALUE, 5, READ | TIME));
    sampled.read_format = FORMAT_GROUP;
    let leader = device.open_event(&sampled, How::OWN)?;
    let mut ring = Pages::map(&leader, 2, READ_WRITE)?;
    let mut clock = device.attr(KIND_TSC, 0);
    clock.set_disabled(0);
    let _clock = device.open_event(&clock, member_of(&leader, How::OWN))?;
    let _marks = device.open_event(&attr(&device, 1, 0), member_of(&leader, How::OWN))?;
    leader.enable(0)?;
    let began = cpu::tsc();
    for _ in 0..50 {
        device.mark(VALUE)?;
        device.mark(VALUE + 1)?;
    }
    let took = cpu::tsc() - began;
    let (samples, lost) = fields::samples(&ring.take()?, &sampled)?;
    ensure_eq!((samples.len(), lost), (10, 0), "samples and losses");
    let mut last_tsc = 0;
    for (sample, number) in samples.iter().zip(1..) {
        let values = sample.read.as_ref().map(counts).unwrap_or_default();
        ensure_eq!(values.len(), 3, "events in a sample");
        // Every fifth mark of the leader causes a sample. The member's fifth mark is placed only after that.
        ensure_eq!((values[0], values[2]), (5 * number, 5 * number - 1), "marks of the leader and of its member");
        ensure!(values[1] > last_tsc, "the clock did not grow at sample {number}: {}", values[1]);
        last_tsc = values[1];
    }
    ensure!(last_tsc <= took + cpu::tsc() - began, "{last_tsc} ticks counted, but only {took} passed");
    Ok(())
}

#[apply(guest_test)]
fn group_flag_means_all_members() -> Outcome {
    let device = Device::open()?;
    let events = group(&device, 3, FORMAT_GROUP, How::OWN)?;
    let place = || (0..3).try_for_each(|member| device.place(VALUE + member, 4));
    let expect = |expected: [u64; 3], when: &str| -> Outcome {
        let values = counts(&fields::reading(&events[0].read()?, FORMAT_GROUP)?);
        ensure_eq!(values, expected, "{when}");
        Ok(())
    };
    for event in &events {
        event.disable(0)?;
    }
    // Any member can enable the group.
    events[2].enable(WHOLE_GROUP)?;
    place()?;
    expect([4; 3], "all on")?;
    events[1].disable(WHOLE_GROUP)?;
    place()?;
    events[0].enable(0)?;
    place()?;
    expect([8, 4, 4], "all off, then the leader on")?;
    events[1].reset(0)?;
    expect([8, 0, 4], "one reset")?;
    events[1].reset(WHOLE_GROUP)?;
    expect([0; 3], "all reset")?;
    events[0].enable(WHOLE_GROUP)?;
    place()?;
    expect([4; 3], "all on again")
}

#[apply(guest_test)]
fn members_outlive_their_leader() -> Outcome {
    let device = Device::open()?;
    let mut events = group(&device, 3, 0, How::OWN)?;
    events[0].enable(0)?;
    device.place(VALUE + 1, 3)?;
    drop(events.remove(0));
    for member in [1, 2] {
        device.place(VALUE + member, 5)?;
    }
    let found = events.iter().map(Event::count).collect::<Result<Vec<_>, _>>()?;
    ensure_eq!(found, [8, 5], "counts of members whose leader was closed");
    events[0].disable(0)?;
    device.place(VALUE + 1, 5)?;
    ensure_eq!(events[0].count()?, 8, "the count of a member whose leader was closed");
    Ok(())
}

#[apply(guest_test)]
fn groups_that_cannot_be_are_refused() -> Outcome {
    let device = Device::open()?;
    let events = group(&device, 2, 0, How::OWN)?;
    let open = |attr: &perf_event_attr, how: How<'_>| refused(device.open_event(attr, how));
    let plain = attr(&device, 2, 0);
    let under_member = member_of(&events[1], How::OWN);
    ensure_eq!(open(&plain, under_member), Some(libc::EINVAL), "a member as leader");
    let of_cpu = member_of(&events[0], How::on_cpu(0));
    ensure_eq!(open(&plain, of_cpu), Some(libc::EINVAL), "a CPU's event under a task's");
    let cpu_leader = device.open_event(&attr(&device, 3, 0), How::on_cpu(0))?;
    let other_cpu = member_of(&cpu_leader, How::on_cpu(1));
    ensure_eq!(open(&plain, other_cpu), Some(libc::EINVAL), "another CPU's event");
    let other_task = How { pid: 1, ..member_of(&events[0], How::OWN) };
    ensure_eq!(open(&plain, other_task), Some(libc::EINVAL), "another task's event");
    let mut pinned = plain;
    pinned.set_pinned(1);
    let pinned = open(&pinned, member_of(&events[0], How::OWN));
    ensure_eq!(pinned, Some(libc::EINVAL), "a pinned member");
    let file = std::fs::File::open("/dev/null")?;
    let foreign = How { group: Some(file.as_fd()), ..How::OWN };
    ensure_eq!(open(&plain, foreign), Some(libc::EBADF), "a file that is not an event");
    // With the flag `PERF_FLAG_FD_NO_GROUP`, the open accepts any event as the leader.
    let apart = How { flags: FLAG_NO_GROUP, ..under_member };
    ensure_eq!(open(&plain, apart), None, "beside a member, in no group");
    Ok(())
}
