//! The device through perf core: `perf_event_open(2)`.

use std::error::Error;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::Duration;

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_DUMMY, PERF_SAMPLE_CALLCHAIN as SAMPLE_CALLCHAIN, PERF_SAMPLE_RAW as SAMPLE_RAW,
    PERF_SAMPLE_STACK_USER as SAMPLE_STACK_USER, PERF_SAMPLE_TID as SAMPLE_TID, PERF_TYPE_SOFTWARE, perf_event_attr,
};
use vpmu_client::perf::PerfPmu;
use vpmu_client::{Event, EventAttr, Record, Ring, Vpmu};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq, errno};
use crate::os;
use crate::{Fallible, Outcome};

const GROUP: &str = "module";

const SYSFS: &str = "/sys/bus/event_source/devices/vpmu";

pub(crate) fn mark_attr(pmu: &PerfPmu, value: u64) -> Fallible<EventAttr> {
    Ok(pmu.attr_of_terms(&format!("kind=0x104,event={value}"))?)
}

/// Counts a program's own port accesses. The attr uses the event's name in sysfs.
fn own_port_exits(pmu: &PerfPmu) -> Fallible<EventAttr> {
    let mut attr = pmu.attr(cpu::PORT_EXITS)?;
    attr.exclude_kernel = cpu::OWN_IN_USER_MODE;
    Ok(attr)
}

#[apply(guest_test)]
fn perf_counts_a_task_exactly() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?)?;
    event.enable()?;
    for hop in 0..40 {
        cpu::pin(hop % 2)?;
        vpmu.mark(8)?;
    }
    thread::scope(|scope| scope.spawn(|| (0..50).try_for_each(|_| vpmu.mark(8))).join())
        .map_err(|_| "the placer panicked")??;
    event.disable()?;
    let reading = event.read()?;
    ensure_eq!(reading.value, 40, "marks of this task on two CPUs");
    ensure!(reading.time_running > 0, "the event never ran: {reading:?}");
    Ok(())
}

#[apply(guest_test)]
fn perf_counts_a_cpu_exactly() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let attr = mark_attr(&pmu, 8)?;
    let events = [pmu.open_event(&attr.clone().on_cpu(0))?, pmu.open_event(&attr.on_cpu(1))?];
    for event in &events {
        event.enable()?;
    }
    for (cpu, times) in [(0, 30), (1, 50)] {
        cpu::pin(cpu)?;
        (0..times).try_for_each(|_| vpmu.mark(8))?;
    }
    ensure_eq!(events[0].read()?.value, 30, "marks on CPU 0");
    ensure_eq!(events[1].read()?.value, 50, "marks on CPU 1");
    Ok(())
}

#[apply(guest_test)]
fn perf_inherits() -> Outcome {
    let pmu = PerfPmu::open()?;
    let attr = mark_attr(&pmu, 8)?.with(|attr| attr.inherit = true);
    let event = pmu.open_event(&attr)?;
    event.enable()?;
    let status = std::process::Command::new("/proc/self/exe").args(["mark", "8", "25"]).status()?;
    ensure!(status.success(), "the child: {status}");
    ensure_eq!(event.read()?.value, 25, "a child's marks");
    Ok(())
}

/// The driver replays samples into perf core's ring. This test reads them with the client library's ring reader.
#[apply(guest_test)]
fn perf_samples_a_task_exactly() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(10))?;
    let mut ring = event.map(8)?;
    event.enable()?;
    for _ in 0..105 {
        vpmu.mark(8)?;
    }
    event.disable()?;
    let mut samples = 0;
    while let Some(record) = ring.next_record()? {
        samples += usize::from(matches!(record, Record::Sample(_)));
    }
    ensure_eq!(samples, 10, "samples");
    ensure_eq!(event.read()?.value, 105, "the count");
    Ok(())
}

#[apply(guest_test)]
fn sysfs_lists_what_the_catalogue_lists() -> Outcome {
    let vpmu = Vpmu::open()?;
    let pmu_type: u32 = fs::read_to_string(Path::new(SYSFS).join("type"))?.trim().parse()?;
    ensure_eq!(pmu_type, vpmu.info().pmu_type, "the PMU's type");
    let pmu = Path::new(SYSFS);
    let mut names: Vec<String> = vpmu.catalogue().entries().iter().map(|entry| entry.name.clone()).collect();
    let mut listed = PerfPmu::open()?.events()?;
    names.sort();
    listed.sort();
    ensure_eq!(listed, names, "names in sysfs");
    for format in ["event", "kind"] {
        let text = fs::read_to_string(pmu.join("format").join(format))?;
        ensure!(text.starts_with("config:"), "format/{format} is {text:?}");
    }
    ensure!(!pmu.join("cpumask").exists(), "the PMU has a cpumask, so perf regards it as uncore");
    Ok(())
}

#[apply(guest_test)]
fn both_interfaces_count_the_same() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    cpu::allow_ports()?;
    let shared = vpmu.open_event(&vpmu.attr(&cpu::own_port_exits())?)?;
    let core = pmu.open_event(&own_port_exits(&pmu)?)?;
    shared.enable()?;
    core.enable()?;
    for _ in 0..77 {
        cpu::port_write();
    }
    ensure_eq!((shared.read()?.value, core.read()?.value), (77, 77), "port writes by both kinds of events");
    Ok(())
}

/// Counts port writes in the regions between two marks. All events come from `perf_event_open(2)`. Requests on
/// `/dev/vpmu` then make the events of the marks start and stop the count.
#[apply(guest_test)]
fn perf_events_start_and_stop_each_other() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    cpu::allow_ports()?;
    let ports = pmu.open_event(&own_port_exits(&pmu)?.enabled_on_starter())?;
    let begin = pmu.open_event(&mark_attr(&pmu, 1)?.sampling(1))?;
    let end = pmu.open_event(&mark_attr(&pmu, 2)?.sampling(1))?;
    begin.set_starter_of(&ports)?;
    end.set_stopper_of(&ports)?;
    for event in [&ports, &end, &begin] {
        event.enable()?;
    }
    for region in 1..=50 {
        cpu::port_write();
        vpmu.mark(1)?;
        for _ in 0..region {
            cpu::port_write();
        }
        vpmu.mark(2)?;
    }
    ensure_eq!(ports.read()?.value, 50 * 51 / 2, "port writes in regions");
    let again = begin.set_starter_of(&ports).err();
    ensure_eq!(errno_of(again), Some(libc::EEXIST), "errno for the same link again");
    let another = end.set_starter_of(&ports).err();
    ensure_eq!(errno_of(another), Some(libc::EBUSY), "errno for another starter");
    // A link ends when either of its events is closed.
    drop(begin);
    end.set_starter_of(&ports)?;
    Ok(())
}

/// The error number of a refusal.
fn errno_of<E: Error + 'static>(refused: Option<E>) -> Option<i32> {
    refused.map(|error| errno(&error))
}

#[apply(guest_test)]
fn flush_of_a_perf_event_shows_its_samples() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let mut ring = event.map(8)?;
    event.enable()?;
    for round in 1..=5 {
        for _ in 0..round {
            vpmu.mark(8)?;
        }
        event.flush()?;
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        ensure_eq!(samples, round, "samples of round {round}");
    }
    Ok(())
}

#[apply(guest_test)]
fn calls_on_perf_events_take_events_of_the_device() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let ours = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let target = pmu.open_event(&mark_attr(&pmu, 9)?)?;
    let clock = mark_attr(&pmu, 9)?.with(|attr| {
        attr.pmu_type = PERF_TYPE_SOFTWARE;
        attr.config = 0;
    });
    let clock = pmu.open_event(&clock)?;
    ensure_eq!(errno_of(clock.flush().err()), Some(libc::EBADF), "errno for an event of the guest's kernel");
    let elsewhere = pmu.open_event(&mark_attr(&pmu, 9)?.on_cpu(0))?;
    for (target, expected) in [(&clock, libc::EBADF), (&ours, libc::EINVAL), (&elsewhere, libc::EINVAL)] {
        let refused = ours.set_starter_of(target).err();
        ensure_eq!(errno_of(refused), Some(expected), "errno for the target");
    }
    // It does not matter who writes an event's records, or whether tasks inherit it.
    let inherited = pmu.open_event(&mark_attr(&pmu, 9)?.with(|attr| attr.inherit = true))?;
    let hosts = vpmu.open_event(&vpmu.attr("mark=9")?)?;
    ours.set_starter_of(&inherited)?;
    ours.set_starter_of(&hosts)?;
    let counts = target.set_starter_of(&ours).err();
    ensure_eq!(errno_of(counts), Some(libc::EINVAL), "errno for a starter that does not sample");
    Ok(())
}

#[apply(guest_test)]
fn period_of_a_perf_event_changes_at_once() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let mut ring = event.map(8)?;
    event.enable()?;
    for (period, marks, samples) in [(1, 6, 6), (5, 25, 5), (2, 9, 4)] {
        event.set_period(period)?;
        for _ in 0..marks {
            vpmu.mark(8)?;
        }
        event.flush()?;
        let mut seen = 0;
        while ring.next_record()?.is_some() {
            seen += 1;
        }
        ensure_eq!(seen, samples, "samples with a period of {period}");
    }
    ensure_eq!(event.read()?.value, 40, "the count");
    Ok(())
}

#[apply(guest_test)]
fn bpf_program_runs_for_each_sample() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    for records in [true, false] {
        let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(2))?;
        let mut ring = event.map(8)?;
        let counter = os::BpfCounter::load(records)?;
        counter.attach(event.as_fd())?;
        event.enable()?;
        for _ in 0..60 {
            vpmu.mark(8)?;
        }
        event.flush()?;
        ensure_eq!(counter.runs()?, 30, "runs of the BPF program");
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        let expected = if records { 30 } else { 0 };
        ensure_eq!(samples, expected, "samples (the BPF program lets overflows write records: {records})");
    }
    Ok(())
}

/// Profilers attach programs to events of a CPU, whose samples have fields that only the program asks for, or none of the
/// device's. Tasks that take turns on the CPU must not cost a run.
#[apply(guest_test)]
fn bpf_program_runs_for_each_sample_of_any_fields() -> Outcome {
    const CHAIN_AND_EMPTY_STACK: u64 = (SAMPLE_TID | SAMPLE_CALLCHAIN | SAMPLE_STACK_USER) as u64;
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    for (sample_type, wakeup) in [(CHAIN_AND_EMPTY_STACK, 1), (u64::from(SAMPLE_RAW), 0)] {
        let attr = mark_attr(&pmu, 8)?.sampling(1).on_cpu(0);
        let event = pmu.open_event(&attr.with(|attr| {
            attr.sample_type = sample_type;
            attr.wakeup = wakeup;
        }))?;
        let counter = os::BpfCounter::load(true)?;
        counter.attach(event.as_fd())?;
        event.enable()?;
        let place = || -> Result<(), String> {
            cpu::pin(0).map_err(|error| error.to_string())?;
            for _ in 0..60 {
                vpmu.mark(8).map_err(|error| error.to_string())?;
                thread::yield_now();
            }
            Ok(())
        };
        thread::scope(|scope| {
            let placers = [scope.spawn(place), scope.spawn(place)];
            placers.into_iter().try_for_each(|placer| placer.join().map_err(|_| "a placer panicked")?)
        })?;
        event.flush()?;
        ensure_eq!(event.read()?.value, 120, "marks of two tasks");
        ensure_eq!(counter.runs()?, 120, "runs of the BPF program with the sample type {sample_type:#x}");
    }
    Ok(())
}

/// Free pages of the guest, with those that the kernel keeps for each CPU.
fn free_pages() -> Fallible<u64> {
    let zones = fs::read_to_string("/proc/zoneinfo")?;
    let numbers = zones.lines().filter_map(|line| {
        let line = line.trim_start();
        line.strip_prefix("pages free").or_else(|| line.strip_prefix("count:"))
    });
    Ok(numbers.map(|number| number.trim().parse::<u64>()).sum::<Result<_, _>>()?)
}

/// A process can have thousands of threads, each with its events. Most of them are never mapped.
#[apply(guest_test)]
fn sampling_event_of_a_task_takes_few_pages_until_it_is_mapped() -> Outcome {
    const EVENTS: u64 = 200;
    /// Pages of the ring, and at most as many again for perf core's event and the driver's.
    const UNUSED: u64 = 5 + 5;
    /// The other pages of the ring, and two for perf core's.
    const MAPPED: u64 = 12 + 2;
    let pmu = PerfPmu::open()?;
    let attr = mark_attr(&pmu, 8)?.sampling(1);
    let before = free_pages()?;
    let events: Vec<_> = (0..EVENTS).map(|_| pmu.open_event(&attr)).collect::<Result<_, _>>()?;
    let open = free_pages()?;
    let rings: Vec<_> = events.iter().map(|event| event.map(1)).collect::<Result<_, _>>()?;
    let mapped = free_pages()?;
    let (taken, more) = (before.saturating_sub(open), open.saturating_sub(mapped));
    ensure!(taken <= EVENTS * UNUSED, "{EVENTS} events take {taken} pages");
    ensure!(more >= EVENTS * MAPPED * 9 / 10, "{EVENTS} mapped events take only {more} pages more");
    drop(rings);
    Ok(())
}

#[apply(guest_test)]
fn refresh_of_a_perf_event_ends_its_samples() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let mut ring = event.map(8)?;
    for granted in [3, 1, 7] {
        event.refresh(granted)?;
        for _ in 0..granted * 2 {
            vpmu.mark(8)?;
        }
        event.flush()?;
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        ensure_eq!(samples, granted, "samples");
    }
    Ok(())
}

/// Pins the caller to CPU 0, and returns an enabled event on that CPU that takes a sample at each mark.
fn marks_of_the_cpu(pmu: &PerfPmu) -> Fallible<Event> {
    cpu::pin(0)?;
    let event = pmu.open_event(&mark_attr(pmu, 8)?.sampling(1).on_cpu(0))?;
    event.enable()?;
    Ok(event)
}

fn place(vpmu: &Vpmu, marks: u32) -> Outcome {
    (0..marks).try_for_each(|_| vpmu.mark(8))?;
    Ok(())
}

/// Takes the samples out of a ring, and returns their number.
pub(crate) fn take_samples(ring: &mut Ring) -> Fallible<u64> {
    let mut samples = 0;
    while let Some(record) = ring.next_record()? {
        samples += u64::from(matches!(record, Record::Sample(_)));
    }
    Ok(samples)
}

/// Opens a view of the persistent event `id` through `perf_event_open(2)`.
fn open_view(vpmu: &Vpmu, pmu: &PerfPmu, id: u64) -> Fallible<Event> {
    let attr = EventAttr::new(vpmu.info().persistent_type, id);
    Ok(pmu.open_event(&attr.sampling(1).on_cpu(0).with(|attr| attr.disabled = false))?)
}

#[apply(guest_test)]
fn detached_perf_event_outlives_its_descriptor() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = marks_of_the_cpu(&pmu)?;
    place(&vpmu, 5)?;
    // perf core has no ring for these samples, so it drops them.
    event.flush()?;
    let id = event.detach("from-perf")?;
    ensure_eq!(event.detach("")?, id, "the id of a second detach");
    drop(event);
    place(&vpmu, 7)?;
    let listed = vpmu.find_persistent("from-perf")?;
    ensure_eq!(listed.id, id, "the id listed");
    let again = vpmu.reopen(&listed)?;
    ensure_eq!(again.read()?.value, 12, "the count");
    let mut ring = again.map_pages(16)?;
    again.flush()?;
    ensure_eq!(take_samples(&mut ring)?, 7, "samples since the detach");
    again.disable()?;
    place(&vpmu, 3)?;
    ensure_eq!(again.read()?.value, 12, "the count of a disabled event");
    again.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn detached_perf_event_reads_on_by_its_descriptor() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = marks_of_the_cpu(&pmu)?;
    let mut ring = event.map(4)?;
    place(&vpmu, 5)?;
    event.detach("reads-on")?;
    place(&vpmu, 6)?;
    ensure_eq!(event.read()?.value, 11, "the count");
    event.flush()?;
    ensure_eq!(take_samples(&mut ring)?, 11, "samples");
    // This disables the view, not the event.
    event.disable()?;
    place(&vpmu, 4)?;
    ensure_eq!(event.read()?.value, 11, "the count, the view disabled");
    event.enable()?;
    ensure_eq!(event.read()?.value, 15, "the count, the view enabled");
    event.flush()?;
    ensure_eq!(take_samples(&mut ring)?, 4, "samples written since the last read");
    event.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn view_of_a_persistent_event_has_the_history_of_its_ring() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = marks_of_the_cpu(&pmu)?;
    let id = event.detach("history")?;
    drop(event);
    place(&vpmu, 700)?;
    let view = open_view(&vpmu, &pmu, id)?;
    ensure_eq!(view.read()?.value, 700, "the event's own count");
    let mut ring = view.map(6)?;
    ensure_eq!(take_samples(&mut ring)?, 700, "samples made before the view was opened");
    place(&vpmu, 9)?;
    view.flush()?;
    ensure_eq!(take_samples(&mut ring)?, 9, "samples made after the view was opened");
    // Both views share one ring. The first reader has taken all records, so the second reader finds none.
    let other = open_view(&vpmu, &pmu, id)?;
    let mut empty = other.map(6)?;
    other.flush()?;
    ensure_eq!(take_samples(&mut empty)?, 0, "samples left for the second view");
    view.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn attached_perf_event_ends_with_its_last_view() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = marks_of_the_cpu(&pmu)?;
    let id = event.detach("ends")?;
    let view = open_view(&vpmu, &pmu, id)?;
    event.attach()?;
    ensure_eq!(errno_of(view.attach().err()), Some(libc::EINVAL), "attaching the event a second time");
    ensure!(vpmu.find_persistent("ends").is_err(), "an attached event is still listed");
    drop(event);
    place(&vpmu, 6)?;
    ensure_eq!(view.read()?.value, 6, "the count that the last view reads");
    drop(view);
    // The device has freed the event's name and slot.
    let next = marks_of_the_cpu(&pmu)?;
    ensure!(next.detach("ends")? > id, "an id was used again");
    next.attach()?;
    Ok(())
}

#[apply(guest_test)]
fn perf_events_that_cannot_be_detached_are_refused() -> Outcome {
    let pmu = PerfPmu::open()?;
    let detach = |event: &Event| errno_of(event.detach("").err());
    let task = pmu.open_event(&mark_attr(&pmu, 8)?)?;
    ensure_eq!(detach(&task), Some(libc::EINVAL), "errno for a task's event");
    let of_cpu = mark_attr(&pmu, 8)?.on_cpu(0);
    let leader = pmu.open_event(&of_cpu)?;
    let member = pmu.open_member(&of_cpu, &leader)?;
    ensure_eq!(detach(&leader), Some(libc::EINVAL), "errno for a leader");
    ensure_eq!(detach(&member), Some(libc::EINVAL), "errno for a member");
    let mut counts = of_cpu.clone().sampling(1);
    counts.sample_type |= vpmu_client::attr::SAMPLE_READ;
    let counts = pmu.open_event(&counts)?;
    ensure_eq!(detach(&counts), Some(libc::EOPNOTSUPP), "errno for a sample field that is not supported");
    let alone = pmu.open_event(&of_cpu)?;
    ensure_eq!(errno_of(alone.attach().err()), Some(libc::EINVAL), "attaching an event that is not persistent");
    let named = alone.detach("Capital");
    ensure!(named.is_err(), "a name with a capital letter was accepted");
    let nobodys = os::forked(|| {
        if os::become_nobody().is_err() {
            return 1;
        }
        let attached = errno_of(alone.attach().err());
        if [detach(&alone), attached] == [Some(libc::EPERM); 2] { 0 } else { 2 }
    })?;
    ensure_eq!(nobodys, 0, "nobody's exit code (2: a call was not refused)");
    Ok(())
}

/// Longer than the driver's replay interval. At each replay, the driver goes through its lists of active events.
pub(crate) const REPLAYED: Duration = Duration::from_millis(250);

/// After a disabled leader is closed, its enabled sibling stays inactive until perf core next schedules the task's
/// events. When the test sets a new period for `other`, perf core does not schedule them. It only restarts `other`.
#[apply(guest_test)]
fn perf_event_that_lost_its_leader_ends_with_its_close() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let other = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1_000_000))?;
    other.enable()?;
    for period in 1..=20 {
        let leader = pmu.open_event(&mark_attr(&pmu, 9)?)?;
        let sibling = pmu.open_member(&mark_attr(&pmu, 10)?.sampling(1), &leader)?;
        sibling.enable()?;
        drop(leader);
        other.set_period(1_000_000 + period)?;
        drop(sibling);
    }
    thread::sleep(REPLAYED);
    vpmu.mark(8)?;
    ensure_eq!(other.read()?.value, 1, "the other event's count");
    Ok(())
}

/// An exclusive event excludes only hardware events.
#[apply(guest_test)]
fn exclusive_event_of_the_kernel_leaves_both_interfaces_counting() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let file = vpmu.open_event(&vpmu.attr("mark=8")?)?;
    let core = pmu.open_event(&mark_attr(&pmu, 8)?)?;
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: u32::try_from(size_of::<perf_event_attr>())?,
        config: PERF_COUNT_SW_DUMMY.into(),
        ..perf_event_attr::default()
    };
    attr.set_pinned(1);
    attr.set_exclusive(1);
    let exclusive = os::open_perf_attr(&attr)?;
    file.enable()?;
    core.enable()?;
    for _ in 0..5 {
        vpmu.mark(8)?;
    }
    ensure_eq!((file.read()?.value, core.read()?.value), (5, 5), "marks beside an exclusive event");
    drop(exclusive);
    Ok(())
}
