//! Names of persistent events: which names are valid, and how sysfs lists them.

use std::fs;
use std::path::Path;

use vpmu_client::attr::SAMPLE_TIME;
use vpmu_client::perf::PerfPmu;
use vpmu_client::{EventAttr, Overwrite, Vpmu};

use crate::ensure::{ensure, ensure_eq, errno};
use crate::perf_command::{record, row_of, script, stat};
use crate::persisting::{SYSFS, fresh, listed, names, persistent, sequence, sweep};
use crate::raw::{Device, How, kernels, refused, sampling};
use crate::{Fallible, Outcome, cpu};

const GROUP: &str = "persistent";

#[apply(guest_test)]
fn names_are_those_of_events() -> Outcome {
    let device = fresh()?;
    let (event, id) = persistent(&device, &sequence(&device), 0, "")?;
    let name = || -> Fallible<String> { Ok(device.entry(id)?.ok_or("the event is not listed")?.name()) };
    ensure_eq!(name()?, format!("event{id}"), "the default name");
    let longest = "n".repeat(39);
    for good in ["a", "z9", "a-b_c-0_", "event", longest.as_str()] {
        event.detach(good)?;
        ensure_eq!(name()?, good, "the event's name");
        event.detach("")?;
        ensure_eq!(name()?, good, "the event's name after a detach without a name");
    }
    let padded = |text: &[u8]| {
        let mut bytes = [0; 40];
        bytes[..text.len()].copy_from_slice(text);
        bytes
    };
    for bad in [
        &b"A"[..],
        b"aB",
        b"9a",
        b"-a",
        b"_a",
        b"a b",
        b"a/b",
        b"a.b",
        b"..",
        b"a\0b",
        b"\0a",
        b"a\n",
        b"\xc3\xa4",
        b"a=1",
        b"a,b",
        b"event0",
        &[b'n'; 40],
    ] {
        ensure_eq!(
            refused(event.detach_raw(padded(bad))),
            Some(libc::EINVAL),
            "errno for the name '{}'",
            bad.escape_ascii()
        );
    }
    ensure_eq!(name()?, longest, "the event's name after the refused names");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn name_belongs_to_one_event() -> Outcome {
    let device = fresh()?;
    let attr = sequence(&device);
    let (first, _) = persistent(&device, &attr, 0, "taken")?;
    let second = device.start(&attr, How::on_cpu(1))?;
    ensure_eq!(refused(second.detach("taken")), Some(libc::EEXIST), "errno for the name of another event");
    ensure_eq!(device.persistent()?.len(), 1, "events listed");
    second.detach("free")?;
    ensure_eq!(
        refused(second.detach("taken")),
        Some(libc::EEXIST),
        "errno for the name of another event, when renaming"
    );
    first.detach("taken")?;
    // A name becomes free when its event is renamed or is no longer persistent.
    first.detach("moved")?;
    second.detach("taken")?;
    first.attach()?;
    second.detach("moved")?;
    ensure_eq!(names()?, ["moved"], "the names listed");
    sweep(&device)
}

#[apply(guest_test)]
fn sysfs_lists_persistent_events_until_their_end() -> Outcome {
    let device = fresh()?;
    ensure_eq!(names()?.len(), 0, "names before the first event");
    let attr = sequence(&device);
    let (event, id) = persistent(&device, &attr, 1, "first")?;
    let (other, other_id) = persistent(&device, &attr, 0, "second")?;
    for (name, id) in [("first", id), ("second", other_id)] {
        let content = fs::read_to_string(listed(name))?;
        ensure_eq!(content.trim_end(), format!("id={id:#x}"), "the contents of {name}");
    }
    event.detach("renamed")?;
    ensure_eq!(names()?, ["renamed", "second"], "names after renaming");
    drop(event);
    ensure!(listed("renamed").exists(), "the renamed event is not listed after its handle is closed");
    device.reopen(id, 1)?.attach()?;
    ensure_eq!(names()?, ["second"], "names after one has ended");
    // An attached event is no longer persistent, although it is still open.
    other.attach()?;
    ensure_eq!(names()?.len(), 0, "names after the second event is attached");
    // Many events at once, made and ended.
    let most = device.info.max_persistent as usize;
    for round in 0..3 {
        let kept: Vec<_> = (0..most)
            .map(|number| persistent(&device, &attr, 0, &format!("many{number}")))
            .collect::<Result<_, _>>()?;
        ensure_eq!(names()?.len(), most, "round {round}: names");
        for (event, _) in &kept {
            event.attach()?;
        }
        ensure_eq!(names()?.len(), 0, "round {round}: names after all are attached");
    }
    Ok(())
}

#[apply(guest_test)]
fn sysfs_describes_how_to_open_a_persistent_event() -> Outcome {
    let device = fresh()?;
    let sysfs = Path::new(SYSFS);
    let kind: u32 = fs::read_to_string(sysfs.join("type"))?.trim().parse()?;
    ensure_eq!(kind, device.info.persistent_type, "the PMU's type");
    ensure!(kind != device.info.pmu_type, "the PMUs vpmu and persistent have the same type {kind}");
    let format = fs::read_to_string(sysfs.join("format/id"))?;
    ensure_eq!(format.trim_end(), "config:0-63", "the contents of format/id");
    // Opens the event with no information except what sysfs contains.
    let (event, id) = persistent(&device, &sequence(&device), 1, "by-sysfs")?;
    drop(event);
    let content = fs::read_to_string(listed("by-sysfs"))?;
    let reported = content.trim_end().strip_prefix("id=0x").ok_or("no id there")?;
    ensure_eq!(u64::from_str_radix(reported, 16)?, id, "the id in sysfs");
    let mut attr = device.reopening(u64::from_str_radix(reported, 16)?);
    attr.type_ = kind;
    device.open_event(&attr, How::on_cpu(1))?.attach()?;
    Ok(())
}

/// Stock perf reads the persistent event itself, so its count includes what was counted before perf started.
#[apply(guest_test)]
fn stock_perf_counts_one_by_name() -> Outcome {
    let device = fresh()?;
    let (event, _) = persistent(&device, &device.marks(6, 1, 0), 1, "for-perf")?;
    cpu::pin(1)?;
    device.place(6, 9)?;
    let rows = stat(&["-e", "persistent/for-perf/", "-C", "1", "--", "guest-tests", "mark", "6", "25"])?;
    ensure_eq!(row_of(&rows, "persistent/for-perf/")?.value, "34", "the count that perf reads");
    ensure_eq!(event.count()?, 34, "the count that the event's handle reads");
    // The event stays enabled when perf ends.
    device.place(6, 1)?;
    ensure_eq!(event.count()?, 35, "the event's count after perf has ended");
    event.attach()?;
    Ok(())
}

/// Stock perf records both the samples that a persistent event already has in the window and the new samples.
#[apply(guest_test)]
fn stock_perf_records_one_by_name() -> Outcome {
    fresh()?;
    let vpmu = Vpmu::open()?;
    cpu::pin(1)?;
    let attr = vpmu.attr("mark=6")?.sampling(1).on_cpu(1);
    let event = vpmu.open_event(&attr.persistent())?;
    event.detach("recorded")?;
    event.enable()?;
    // The first mapping makes the ring.
    drop(event.map(4)?);
    (0..40).try_for_each(|_| vpmu.mark(6))?;
    drop(event);

    let marks = ["-c", "1", "-C", "1", "-e", "persistent/recorded/", "--", "guest-tests", "mark", "6", "25"];
    record("persistent.data", &marks)?;
    let lines = script("persistent.data", "comm,cpu,time,event")?;
    ensure_eq!(lines.iter().filter(|line| line.contains("[001]")).count(), 65, "samples on CPU 1: {lines:?}");
    let other = lines.iter().find(|line| !line.contains("persistent/recorded/"));
    ensure_eq!(other, None, "the line of a sample of another event");
    let words = lines.iter().flat_map(|line| line.split_whitespace());
    let times: Vec<f64> = words.filter_map(|word| word.strip_suffix(':')?.parse().ok()).collect();
    ensure_eq!(times.len(), 65, "times in the samples");
    ensure!(times.is_sorted(), "the times go back: {lines:?}");
    vpmu.reopen_named("recorded")?.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn perf_core_samples_rings_that_are_read() -> Outcome {
    fresh()?;
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let attr = vpmu.attr("mark=6")?.sampling(1).on_cpu(1);
    let overwritten = attr.clone().persistent().with(|attr| attr.backward = true);
    let event = vpmu.open_event(&overwritten)?;
    let id = event.detach("read")?;
    let view = EventAttr::new(vpmu.info().persistent_type, id);
    let view = view.sampling(1).on_cpu(1);
    let refused = |attr: &EventAttr| pmu.open_event(attr).err().map(|error| errno(&error));
    let refusal = Some(libc::EOPNOTSUPP);
    ensure_eq!(refused(&view), refusal, "errno for an event without a ring");
    // No reader consumes the records of a ring that is mapped to be overwritten.
    drop(Overwrite::map(&event, 2)?);
    ensure_eq!(refused(&view), refusal, "errno for a ring that overwrites");
    event.attach()?;

    let mut attr = attr;
    attr.sample_type &= !SAMPLE_TIME;
    let event = vpmu.open_event(&attr.persistent())?;
    let id = event.detach("timeless")?;
    drop(event.map(2)?);
    let view = view.with(|attr| attr.config = id);
    ensure_eq!(refused(&view), refusal, "errno for a field that no record has");
    let mut timeless = view;
    timeless.sample_type &= !SAMPLE_TIME;
    let opened = pmu.open_event(&timeless)?;
    // A counting view needs no samples.
    let counting = timeless.with(|attr| attr.period = 0);
    pmu.open_event(&counting)?;
    drop(opened);
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn perf_core_counts_but_does_not_sample() -> Outcome {
    let device = fresh()?;
    cpu::pin(1)?;
    let (event, id) = persistent(&device, &device.marks(6, 1, 0), 1, "perfs")?;
    let attr = device.reopening(id);
    let here = How::on_cpu(1);
    let counting = kernels(&attr, here)?;
    device.place(6, 12)?;
    ensure_eq!(counting.count()?, event.count()?, "perf core's count, compared with the event's");
    ensure_eq!(refused(kernels(&sampling(attr, 1, 0), here)), Some(libc::EOPNOTSUPP), "sampling through perf core");
    let open = |id, how| refused(kernels(&device.reopening(id), how));
    ensure_eq!(open(id + 1, here), Some(libc::ENOENT), "errno for an id that does not exist");
    ensure_eq!(open(id, How::on_cpu(0)), Some(libc::EINVAL), "errno for another CPU");
    ensure_eq!(open(id, How::OWN), Some(libc::EINVAL), "errno for a task's event");
    // A view does not keep an attached event alive.
    event.attach()?;
    drop(event);
    ensure_eq!(open(id, here), Some(libc::ENOENT), "errno for an ended event");
    let left = Device::open()?;
    left.place(6, 3)?;
    drop(counting);
    Ok(())
}
