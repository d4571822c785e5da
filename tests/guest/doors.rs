//! The perf core door: the same device through `perf_event_open(2)`, counting.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;

use vpmu_client::perf::PerfPmu;
use vpmu_client::{EventAttr, Record, Vpmu};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq, errno};
use crate::os;
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[
    ("perf_counts_a_task_exactly", perf_counts_a_task_exactly),
    ("perf_counts_a_cpu_exactly", perf_counts_a_cpu_exactly),
    ("perf_inherits", perf_inherits),
    ("perf_samples_a_task_exactly", perf_samples_a_task_exactly),
    (
        "sysfs_lists_what_the_catalogue_lists",
        sysfs_lists_what_the_catalogue_lists,
    ),
    ("both_doors_count_the_same", both_doors_count_the_same),
    (
        "perf_events_start_and_stop_each_other",
        perf_events_start_and_stop_each_other,
    ),
    (
        "flush_of_a_perf_event_shows_its_samples",
        flush_of_a_perf_event_shows_its_samples,
    ),
    (
        "calls_on_perf_events_take_events_of_the_device",
        calls_on_perf_events_take_events_of_the_device,
    ),
    (
        "refresh_of_a_perf_event_ends_its_samples",
        refresh_of_a_perf_event_ends_its_samples,
    ),
    (
        "bpf_program_runs_for_each_sample",
        bpf_program_runs_for_each_sample,
    ),
    (
        "period_of_a_perf_event_changes_at_once",
        period_of_a_perf_event_changes_at_once,
    ),
];

const SYSFS: &str = "/sys/bus/event_source/devices/vpmu";
/// The PMU of what writes to AUX areas.
const TRACES: &str = "/sys/bus/event_source/devices/vpmu_trace";

fn mark_attr(pmu: &PerfPmu, value: u64) -> Result<EventAttr, Box<dyn std::error::Error>> {
    Ok(pmu.attr_of_terms(&format!("kind=0x104,event={value}"))?)
}

fn perf_counts_a_task_exactly() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?)?;
    event.enable()?;
    for hop in 0..40 {
        cpu::pin(hop % 2)?;
        vpmu.mark(8)?;
    }
    thread::scope(|scope| {
        scope
            .spawn(|| (0..50).try_for_each(|_| vpmu.mark(8)))
            .join()
    })
    .map_err(|_| "the placer panicked")??;
    event.disable()?;
    let reading = event.read()?;
    ensure_eq!(reading.value, 40, "marks of this task on two CPUs");
    ensure!(reading.time_running > 0, "{reading:?}");
    Ok(())
}

fn perf_counts_a_cpu_exactly() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let attr = mark_attr(&pmu, 8)?;
    let events = [
        pmu.open_event(&attr.clone().on_cpu(0))?,
        pmu.open_event(&attr.on_cpu(1))?,
    ];
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

fn perf_inherits() -> Outcome {
    let pmu = PerfPmu::open()?;
    let attr = EventAttr {
        inherit: true,
        ..mark_attr(&pmu, 8)?
    };
    let event = pmu.open_event(&attr)?;
    event.enable()?;
    let status = std::process::Command::new("/proc/self/exe")
        .args(["mark", "8", "25"])
        .status()?;
    ensure!(status.success(), "the child: {status}");
    ensure_eq!(event.read()?.value, 25, "a child's marks");
    Ok(())
}

/// The driver replays samples into perf core's ring: here as read by the client's own reader.
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

fn sysfs_lists_what_the_catalogue_lists() -> Outcome {
    let vpmu = Vpmu::open()?;
    let pmu_type: u32 = fs::read_to_string(Path::new(SYSFS).join("type"))?
        .trim()
        .parse()?;
    ensure_eq!(pmu_type, vpmu.info().pmu_type, "the PMU's type");
    let mut listed = [0, 0];
    for entry in vpmu.catalogue().entries() {
        let traces = entry.trace.is_some();
        for (pmu, has) in [(SYSFS, !traces), (TRACES, traces)] {
            let file = Path::new(pmu).join("events").join(&entry.name);
            ensure_eq!(file.exists(), has, "{} is there", file.display());
        }
        listed[usize::from(traces)] += 1;
    }
    ensure!(!listed.contains(&0), "events and traces: {listed:?}");
    for pmu in [SYSFS, TRACES].map(Path::new) {
        for format in ["event", "kind"] {
            let text = fs::read_to_string(pmu.join("format").join(format))?;
            ensure!(text.starts_with("config:"), "format/{format} is {text:?}");
        }
        ensure!(
            !pmu.join("cpumask").exists(),
            "a cpumask would make it uncore"
        );
    }
    Ok(())
}

fn both_doors_count_the_same() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    cpu::allow_ports()?;
    let shared = vpmu.open_event(&vpmu.attr("exits-io")?)?;
    let core = pmu.open_event(&pmu.attr("exits-io")?)?;
    shared.enable()?;
    core.enable()?;
    for _ in 0..77 {
        cpu::port_write();
    }
    ensure_eq!(
        (shared.read()?.value, core.read()?.value),
        (77, 77),
        "port writes by both doors"
    );
    Ok(())
}

/// Regions between two marks, all through `perf_event_open(2)`: the links are the device's.
fn perf_events_start_and_stop_each_other() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    cpu::allow_ports()?;
    let ports = pmu.open_event(&pmu.attr("exits-io")?.enabled_on_starter())?;
    let begin = pmu.open_event(&mark_attr(&pmu, 1)?.sampling(1))?;
    let end = pmu.open_event(&mark_attr(&pmu, 2)?.sampling(1))?;
    vpmu.set_perf_starter(&begin, &ports)?;
    vpmu.set_perf_stopper(&end, &ports)?;
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
    let again = vpmu.set_perf_starter(&begin, &ports).err();
    ensure_eq!(errno_of(again), Some(libc::EEXIST), "the same again");
    let another = vpmu.set_perf_starter(&end, &ports).err();
    ensure_eq!(errno_of(another), Some(libc::EBUSY), "another starter");
    // A link goes with either end.
    drop(begin);
    vpmu.set_perf_starter(&end, &ports)?;
    Ok(())
}

/// The error number of a refusal.
fn errno_of<E: std::error::Error + 'static>(refused: Option<E>) -> Option<i32> {
    refused.map(|error| errno(&error))
}

fn flush_of_a_perf_event_shows_its_samples() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let mut ring = event.map(8)?;
    event.enable()?;
    for round in 1..=5 {
        for _ in 0..round {
            vpmu.mark(8)?;
        }
        vpmu.flush_perf(&event)?;
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        ensure_eq!(samples, round, "samples of round {round}");
    }
    Ok(())
}

fn calls_on_perf_events_take_events_of_the_device() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let ours = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let target = pmu.open_event(&mark_attr(&pmu, 9)?)?;
    // An event of /dev/vpmu has the calls itself.
    let file = vpmu.open_event(&vpmu.attr("mark=8")?)?;
    ensure_eq!(
        errno_of(vpmu.flush_perf(&file).err()),
        Some(libc::EBADF),
        "an event of /dev/vpmu"
    );
    let inherited = EventAttr {
        inherit: true,
        ..mark_attr(&pmu, 9)?
    };
    let inherited = pmu.open_event(&inherited)?;
    let elsewhere = pmu.open_event(&mark_attr(&pmu, 9)?.on_cpu(0))?;
    for (target, expected) in [
        (&file, libc::EBADF),
        (&ours, libc::EINVAL),
        (&elsewhere, libc::EINVAL),
        (&inherited, libc::EOPNOTSUPP),
    ] {
        let refused = vpmu.set_perf_starter(&ours, target).err();
        ensure_eq!(errno_of(refused), Some(expected), "a target");
    }
    let counts = vpmu.set_perf_starter(&target, &ours).err();
    ensure_eq!(
        errno_of(counts),
        Some(libc::EINVAL),
        "a starter that does not sample"
    );
    Ok(())
}

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
        vpmu.flush_perf(&event)?;
        let mut seen = 0;
        while ring.next_record()?.is_some() {
            seen += 1;
        }
        ensure_eq!(seen, samples, "samples with a period of {period}");
    }
    ensure_eq!(event.read()?.value, 40, "the count");
    Ok(())
}

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
        vpmu.flush_perf(&event)?;
        ensure_eq!(counter.runs()?, 30, "runs of the program");
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        let expected = if records { 30 } else { 0 };
        ensure_eq!(samples, expected, "records, wanted: {records}");
    }
    Ok(())
}

fn refresh_of_a_perf_event_ends_its_samples() -> Outcome {
    let (vpmu, pmu) = (Vpmu::open()?, PerfPmu::open()?);
    let event = pmu.open_event(&mark_attr(&pmu, 8)?.sampling(1))?;
    let mut ring = event.map(8)?;
    for granted in [3, 1, 7] {
        event.refresh(granted)?;
        for _ in 0..granted * 2 {
            vpmu.mark(8)?;
        }
        vpmu.flush_perf(&event)?;
        let mut samples = 0;
        while ring.next_record()?.is_some() {
            samples += 1;
        }
        ensure_eq!(samples, granted, "samples");
    }
    Ok(())
}
