//! Probes the host's perf events, as a profiler would open them on a vCPU's thread.
//!
//! The probes open events to find out which ones exist. They count to find out whether host work can be excluded, and
//! take samples to find out whether samples have guest addresses. The probes run on short-lived threads of this
//! process, and close all their events.

use std::collections::BTreeMap;
use std::fs;
use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use vpmu_perf::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_SW_CONTEXT_SWITCHES, PERF_COUNT_SW_CPU_CLOCK, PERF_COUNT_SW_CPU_MIGRATIONS, PERF_COUNT_SW_PAGE_FAULTS,
    PERF_COUNT_SW_TASK_CLOCK, PERF_TYPE_HARDWARE, PERF_TYPE_SOFTWARE, perf_event_attr,
};

use vpmu::Refusal;
use vpmu::abi::{EXIT_ALL, KIND_EXIT_TRACE};
use vpmu::host::{PerfSource, hardware_refusal, host_traces, traces_exits};
use vpmu::source::{Counter, Request, Source};

use vpmu_kvm::micro::{self, Ring};
use vpmu_kvm::probe::events::Event as HostEvent;
use vpmu_kvm::probe::{Samples, Sampling, sample_guest};

use super::facts::{AutoEngine, Event, Perf};
use crate::arch;
use crate::host_kernel;
use crate::probe::Finding;
use crate::signal::kick_signal;

/// Time that a thread spins to find out whether an event counts host work. It is also the shortest time for which the
/// probe for exit traces runs its guest.
const SPUN: Duration = Duration::from_millis(5);

const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
const TSC_TYPE: &str = "/sys/bus/event_source/devices/msr/type";

/// The generic events to try, under perf's names.
const GENERIC: &[(&str, u32, u32)] = &[
    ("branch-misses", PERF_TYPE_HARDWARE, PERF_COUNT_HW_BRANCH_MISSES),
    ("branches", PERF_TYPE_HARDWARE, PERF_COUNT_HW_BRANCH_INSTRUCTIONS),
    ("cache-misses", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_MISSES),
    ("cache-references", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CACHE_REFERENCES),
    ("context-switches", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CONTEXT_SWITCHES),
    ("cpu-clock", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK),
    ("cpu-migrations", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_MIGRATIONS),
    ("cycles", PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES),
    ("instructions", PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS),
    ("page-faults", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_PAGE_FAULTS),
    ("task-clock", PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK),
];

/// The names in [`GENERIC`] that a hardware PMU counts.
pub(super) fn hardware_names() -> impl Iterator<Item = &'static str> {
    names(PERF_TYPE_HARDWARE)
}

/// The names in [`GENERIC`] that the kernel itself counts.
pub(super) fn software_names() -> impl Iterator<Item = &'static str> {
    names(PERF_TYPE_SOFTWARE)
}

fn names(kind: u32) -> impl Iterator<Item = &'static str> {
    GENERIC.iter().filter(move |generic| generic.1 == kind).map(|generic| generic.0)
}

/// Runs every probe. Probes that sample a guest are skipped if guests cannot run (`guests` is false).
pub(super) fn probe(guests: bool) -> Perf {
    let mut events: BTreeMap<_, _> =
        GENERIC.iter().map(|&(name, kind, config)| (name, try_open(kind, config.into()))).collect();
    mark_silent(&mut events);
    events.insert("msr/tsc", tsc());
    let opens = |name: &str| events.get(name).is_some_and(|event: &Event| event.opens);
    // If no event of a kind opens, report the error from the most basic event of that kind.
    let refused = |plainest: &str| {
        let errno = events.get(plainest).and_then(|event| event.errno)?;
        Some(Refusal::of(&io::Error::from_raw_os_error(errno)).to_string())
    };
    // On a host with several core PMUs, hardware events may open although `vmm run` does not use them.
    let hardware_refused = match (hardware_refusal(), hardware_names().any(opens)) {
        (Some(refusal), true) => Some(refusal.to_string()),
        (None, true) => None,
        (_, false) => refused("cycles"),
    };
    let software_refused = if software_names().any(opens) { None } else { refused("cpu-clock") };
    let clock = opens("cpu-clock");
    let cycles = opens("cycles");
    let sampled = |ring| {
        let clock = clock && guests;
        clock.then(|| sample_guest(ring, Sampling::THOROUGH).ok()).flatten()
    };
    let (guest_kernel, guest_user) = (sampled(Ring::Kernel), sampled(Ring::User));
    let names = |samples: Option<Samples>| samples.is_some_and(|s| s.name_places());
    Perf {
        paranoid: fs::read_to_string(PARANOID).ok().and_then(|text| text.trim().parse().ok()),
        software_excludes_host: clock
            .then(|| excludes_host(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK).ok())
            .flatten(),
        hardware_excludes_host: cycles
            .then(|| excludes_host(PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES).ok())
            .flatten(),
        auto_engine: if names(guest_kernel) && names(guest_user) { AutoEngine::Batched } else { AutoEngine::Exit },
        guest_kernel,
        guest_user,
        emulated: arch::check::is_emulated(),
        hardware_refused,
        hardware_loses: host_kernel::lost_counts(),
        software_refused,
        tracepoints: tracepoints(guests),
        host_traces: host_traces().into_iter().map(Into::into).collect(),
        events,
    }
}

/// Marks the hardware events that open, but that the device does not offer, because its trial of them counted nothing.
fn mark_silent(events: &mut BTreeMap<&'static str, Event>) {
    let Ok(source) = PerfSource::new(kick_signal()) else {
        return;
    };
    let offered = |name: &str| source.offers().iter().any(|offer| offer.name == name);
    if !hardware_names().any(offered) {
        return;
    }
    for name in hardware_names().filter(|name| !offered(name)) {
        if let Some(event) = events.get_mut(name).filter(|event| event.opens) {
            event.silent = true;
        }
    }
}

fn attr(kind: u32, config: u64) -> perf_event_attr {
    perf_event_attr { type_: kind, config, ..Default::default() }
}

/// Opens and closes an event. If this process lacks privileges, opens the event only for user mode.
fn try_open(kind: u32, config: u64) -> Event {
    let failed =
        |error: io::Error| Event { error: Some(error.to_string()), errno: error.raw_os_error(), ..Event::default() };
    let opened = |user_only| Event { opens: true, user_only, ..Event::default() };
    let mut attr = attr(kind, config);
    match HostEvent::open(attr) {
        Ok(_) => opened(false),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            attr.set_exclude_kernel(1);
            attr.set_exclude_hv(1);
            match HostEvent::open(attr) {
                Ok(_) => opened(true),
                Err(_) => failed(error),
            }
        }
        Err(error) => failed(error),
    }
}

fn tsc() -> Event {
    let kind = fs::read_to_string(TSC_TYPE).ok().and_then(|text| text.trim().parse().ok());
    match kind {
        Some(kind) => try_open(kind, 0),
        None => Event { error: Some(format!("{TSC_TYPE} does not exist")), ..Event::default() },
    }
}

/// Whether `exclude_host` keeps host work out of a count. Spins in this thread, outside any guest, where an event with
/// `exclude_host` should count nothing.
fn excludes_host(kind: u32, config: u32) -> io::Result<bool> {
    let mut attr = attr(kind, config.into());
    attr.set_exclude_host(1);
    let event = match HostEvent::open(attr) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            attr.set_exclude_kernel(1);
            HostEvent::open(attr)?
        }
        other => other?,
    };
    event.enable()?;
    let begin = Instant::now();
    while begin.elapsed() < SPUN {
        black_box(0);
    }
    event.disable()?;
    Ok(event.count()? == 0)
}

/// Whether the host can trace exits. Runs a guest that loops. The trace of this guest must have at least one exit: the
/// one that stops the guest. If guests cannot run (`guests` is false), only checks that the tracepoints open.
fn tracepoints(guests: bool) -> Finding {
    let found = traces_exits().map_err(|refusal| refusal.to_string());
    let recorded = found.and_then(|()| {
        if guests {
            exits_of_a_guest().map(|exits| format!("{exits} exits of a small guest recorded"))
        } else {
            Ok("kvm:kvm_exit and kvm:kvm_entry open".into())
        }
    });
    match recorded {
        Ok(detail) => Finding { ok: true, detail },
        Err(detail) => Finding { ok: false, detail },
    }
}

fn exits_of_a_guest() -> Result<u64, String> {
    // The guest runs until `time` is over. `time` starts before the event is opened, and on an emulated host, it can be
    // over before the event is open. Then no exit is recorded, so try again with a longer time.
    for time in [SPUN, 10 * SPUN, 100 * SPUN] {
        match exits_of_one(time)? {
            0 => {}
            exits => return Ok(exits),
        }
    }
    Err("kvm:kvm_exit opens, but no exit of a small guest was recorded".into())
}

fn exits_of_one(time: Duration) -> Result<u64, String> {
    let start = move || {
        let source = PerfSource::new(kick_signal()).map_err(io::Error::other)?;
        let request = Request {
            kind: KIND_EXIT_TRACE,
            config: EXIT_ALL,
            sampling: None,
            exclude_user: false,
            exclude_kernel: false,
            exclude_host: false,
            pinned: false,
        };
        let mut exits = source.open(&request, source.thread())?;
        exits.start()?;
        Ok(exits)
    };
    let finish = move |mut exits: Box<dyn Counter>| {
        exits.stop()?;
        Ok(exits.read()?.value)
    };
    micro::spin(time, Ring::User, start, |_| false, finish).map_err(|error| vpmu_errors::chain(&error))
}
