//! The perf core door: the same device through `perf_event_open(2)`, counting.

use std::fs;
use std::path::Path;
use std::thread;

use vpmu_client::perf::PerfPmu;
use vpmu_client::{EventAttr, Record, Vpmu};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
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
