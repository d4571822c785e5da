//! Describes the consequences of the survey's facts as text. It neither probes nor prints.

use vpmu_kvm::probe::Samples;

use super::facts::{AutoEngine, Event, HostTrace, Kvm, Perf};
use super::perf;
use crate::arch::check::Guest;
use crate::probe::Check;

/// Whether a stock kernel should boot. True if KVM is usable, and all mechanisms that were tested with small guests
/// work. A kernel needs these mechanisms until it starts its first user program.
pub(super) fn stock_kernel(kvm: &Kvm, guest: Option<&Guest>) -> bool {
    kvm.usable && guest.is_some_and(|guest| guest.obstacles().is_empty())
}

/// The table from top to bottom.
pub(super) fn checks(kvm: &Kvm, guest: Option<&Guest>, perf: &Perf) -> Vec<Check> {
    let mut checks = vec![device(kvm)];
    if kvm.api_version.is_some() {
        checks.extend(capabilities(kvm));
    }
    if let Some(guest) = guest {
        checks.extend(guest.checks());
    }
    checks.extend(counters(perf));
    if guest.is_some() {
        checks.push(sampled("perf.guest-kernel", "kernel", perf.guest_kernel));
        checks.push(sampled("perf.guest-user", "user", perf.guest_user));
        checks.push(engine(perf.auto_engine));
    }
    checks.push(Check::choose(
        "perf.tracepoints",
        &perf.tracepoints,
        "guests can trace every exit, including those that KVM handles by itself",
        "guests can trace the exits that reach the VMM; all others are only counted",
    ));
    checks.push(host_traces(perf));
    checks.push(verdict(kvm, guest));
    checks
}

fn device(kvm: &Kvm) -> Check {
    let name = "kvm.device";
    match (&kvm.error, &kvm.module) {
        (Some(error), _) if kvm.api_version.is_none() => {
            Check::new(name, error.as_str(), "no guest runs on this machine")
        }
        (_, module) => {
            let module = module.as_deref().unwrap_or("of unknown kind");
            Check::new(name, format!("opens ({module})"), "guests can be created")
        }
    }
}

fn capabilities(kvm: &Kvm) -> Vec<Check> {
    let has = |name| kvm.capabilities.get(name) == Some(&true);
    let required = if kvm.missing.is_empty() {
        Check::new("kvm.required", "all present", "interrupts, doorbells and exits work as the VMM needs them")
    } else {
        let missing = format!("missing: {}", kvm.missing.join(", "));
        Check::new("kvm.required", missing, "`vmm run` cannot work here")
    };
    let statistics = if has("binary_stats") {
        ("present", "exits that never reach the VMM can be counted")
    } else {
        ("absent", "only exits that reach the VMM can be counted")
    };
    let vcpus = kvm.max_vcpus.unwrap_or(0);
    vec![
        required,
        Check::new("kvm.statistics", statistics.0, statistics.1),
        Check::new("kvm.vcpus", vcpus.to_string(), format!("a guest can have at most {vcpus} vCPUs")),
    ]
}

fn counters(perf: &Perf) -> Vec<Check> {
    let open = |name: &&str| perf.events.get(name).is_some_and(|event| event.opens && !event.silent);
    let silent = |name: &&str| perf.events.get(name).is_some_and(|event| event.silent);
    let list = |names: Vec<&str>| match names.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let hardware: Vec<_> = perf::hardware_names().filter(open).collect();
    let emulated = if perf.emulated && !hardware.is_empty() { ", emulated" } else { "" };
    let silent: Vec<_> = perf::hardware_names().filter(silent).collect();
    let uncounted = match silent.as_slice() {
        [] => String::new(),
        names => format!("; they do not have {}: the host opens these, but never counts them", names.join(", ")),
    };
    let software: Vec<_> = perf::software_names().filter(open).collect();
    let tsc = perf.events.get("msr/tsc");
    vec![
        paranoid(perf),
        Check::new(
            "perf.hardware",
            list(hardware) + emulated,
            match &perf.hardware_refused {
                Some(why) => format!(
                    "guests have no cycles or instructions; the device offers its other events. The host \
                     refused: {why}"
                ),
                None => format!(
                    "guests can count these; while one does, Linux starts no VM with a mediated PMU: see 'vmm run \
                     --no-hardware-events'{uncounted}"
                ),
            },
        ),
        Check::new(
            "perf.software",
            list(software),
            match &perf.software_refused {
                Some(why) => format!(
                    "guests cannot count clocks or faults of the vCPU's thread. The host \
                                      refused: {why}"
                ),
                None => "guests can count these on their vCPU's thread".into(),
            },
        ),
        Check::new(
            "perf.msr-tsc",
            match tsc {
                Some(Event { opens: true, .. }) => "opens",
                Some(Event { error: Some(error), .. }) => error.as_str(),
                _ => "not tried",
            },
            "guests have the tsc event even if the host has none: the device reads the counter itself",
        ),
        excludes("perf.exclude-host", perf.software_excludes_host),
        match perf.hardware_excludes_host {
            Some(_) => excludes("perf.exclude-host-hw", perf.hardware_excludes_host),
            None => Check::new(
                "perf.exclude-host-hw",
                "no counter to try",
                "no hardware event can count only the guest's work",
            ),
        },
        match &perf.hardware_loses {
            Some(why) => Check::new("perf.moved-hw", "loses counts", format!("{why}: use a newer host")),
            None => Check::new(
                "perf.moved-hw",
                "keeps counting",
                "the host may move hardware events between counters while a guest runs",
            ),
        },
    ]
}

fn paranoid(perf: &Perf) -> Check {
    let name = "perf.paranoid";
    let Some(level) = perf.paranoid else {
        return Check::new(name, "no perf events", "the device has no host events");
    };
    let limited = perf.events.values().any(|event| event.user_only);
    // If the most basic event is refused, all events are refused.
    let refused =
        perf.events.get("cpu-clock").is_some_and(|event| matches!(event.errno, Some(libc::EACCES | libc::EPERM)));
    let consequence = if refused {
        "host events are refused: set kernel.perf_event_paranoid=1, or give this process CAP_PERFMON"
    } else if limited {
        "only user mode can be counted: to count more, set kernel.perf_event_paranoid=1, or give this process \
         CAP_PERFMON"
    } else {
        "this process may open host events"
    };
    Check::new(name, level.to_string(), consequence)
}

fn excludes(name: &'static str, honoured: Option<bool>) -> Check {
    match honoured {
        Some(true) => Check::new(name, "honoured", "counts include only the guest's work"),
        Some(false) => Check::new(
            name,
            "not honoured",
            "counts also include the host's work for the vCPU; the catalogue reports this",
        ),
        None => Check::new(name, "not observed", "the catalogue does not say whether host work is excluded"),
    }
}

fn sampled(name: &'static str, mode: &str, samples: Option<Samples>) -> Check {
    let Some(samples) = samples else {
        let what = "host samples cannot be relied on to have guest addresses";
        return Check::new(name, "not observed", what);
    };
    let value = format!("{} of {} samples in the guest's loop", samples.in_loop, samples.total);
    let consequence = match samples.carry_guest_ips() {
        Some(true) if mode == "kernel" && samples.labelled_user > 0 => format!(
            "host samples have guest kernel addresses, but the host marks {} of them as user mode",
            samples.labelled_user
        ),
        Some(true) => format!("host samples have guest {mode} addresses"),
        Some(false) => {
            format!("host samples do not have guest {mode} addresses: the exit engine is needed")
        }
        None => "too few samples to tell".into(),
    };
    Check::new(name, value, consequence)
}

fn engine(auto: AutoEngine) -> Check {
    let name = "perf.engine";
    match auto {
        AutoEngine::Batched => Check::new(name, "batched", "`vmm run` samples host events without an exit per sample"),
        AutoEngine::Exit => Check::new(
            name,
            "exit",
            "`vmm run` samples host events with an exit per sample; --engine batched overrides this",
        ),
    }
}

fn host_traces(perf: &Perf) -> Check {
    let name = "perf.host-trace";
    let list = |of: fn(&HostTrace) -> String, between| {
        let texts: Vec<_> = perf.host_traces.iter().map(of).collect();
        texts.join(between)
    };
    if perf.host_traces.is_empty() {
        return Check::new(name, "none", "no PMU of this host makes a trace");
    }
    Check::new(
        name,
        list(|trace| trace.pmu.clone(), ", "),
        list(|trace| format!("refused: {}: {}", trace.pmu, trace.refused), "; "),
    )
}

fn verdict(kvm: &Kvm, guest: Option<&Guest>) -> Check {
    let name = "stock-kernel";
    match guest {
        _ if stock_kernel(kvm, guest) => Check::new(name, "yes", "stock Linux guests boot here: direct KVM"),
        Some(guest) if guest.runs() => Check::new(
            name,
            format!("no: {}", guest.obstacles().join(", ")),
            "small guests only; stock Linux guests need the lab",
        ),
        _ => Check::new(name, "no", "no guest runs here; everything needs the lab"),
    }
}

#[cfg(test)]
mod tests;
