//! The device as the distribution's own `perf` sees it through perf core.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use vpmu_client::perf::{PerfError, PerfPmu};
use vpmu_client::{Engine, Vpmu};

use crate::Outcome;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{MARK_3, SEPARATED, count, perf, row_of, rows, stat};
use crate::programs::text;

const GROUP: &str = "stock-perf";

/// The events of the PMU in sysfs.
const EVENTS: &str = "/sys/bus/event_source/devices/vpmu/events";

/// `guest-tests ports TIMES`: a command that causes a known number of exits.
pub(crate) fn write_ports(times: &str) -> ExitCode {
    let Ok(times) = times.parse::<u32>() else {
        return ExitCode::from(2);
    };
    if let Err(error) = cpu::allow_ports() {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    (0..times).for_each(|_| cpu::port_write());
    ExitCode::SUCCESS
}

#[apply(guest_test)]
fn list_shows_every_event() -> Outcome {
    let output = perf(&["list", "pmu"])?;
    ensure!(output.status.success(), "perf list failed: {}", text(&output.stderr));
    let listed = text(&output.stdout);
    for entry in Vpmu::open()?.catalogue().entries() {
        let name = &entry.name;
        let shown = format!("vpmu/{name}/");
        ensure!(listed.contains(&shown), "{name} is not in:\n{listed}");
    }
    Ok(())
}

/// Some tools read only the first term of a file in `events`.
#[apply(guest_test)]
fn event_without_its_kind_is_refused() -> Outcome {
    let pmu = PerfPmu::open()?;
    for name in pmu.events()? {
        let terms = fs::read_to_string(Path::new(EVENTS).join(&name))?;
        let (event, _) = terms.split_once(',').ok_or("a single term")?;
        let opened = pmu.open_event(&pmu.attr_of_terms(event)?);
        ensure!(
            matches!(&opened, Err(PerfError::Open(error)) if error.raw_os_error() == Some(libc::ENOENT)),
            "{name} by {event} alone: {opened:?}"
        );
    }
    Ok(())
}

/// Some tools expect a scale beside each unit.
#[apply(guest_test)]
fn unit_has_a_scale() -> Outcome {
    let mut units = 0;
    for file in fs::read_dir(EVENTS)? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "unit") {
            ensure_eq!(fs::read_to_string(path.with_extension("scale"))?.trim(), "1", "the scale beside {path:?}");
            units += 1;
        }
    }
    ensure!(units > 0, "no event has a unit");
    Ok(())
}

#[apply(guest_test)]
fn port_writes_count_exactly() -> Outcome {
    cpu::leave_console()?;
    let event = cpu::own_port_exits_of_perf();
    for times in ["0", "1", "321"] {
        let args = ["-e", &event, "--", "guest-tests", "ports", times];
        ensure_eq!(count(&args)?.to_string(), times, "port writes");
    }
    Ok(())
}

#[apply(guest_test)]
fn marks_count_by_number_and_by_name() -> Outcome {
    let command = ["--", "guest-tests", "mark", "3", "100"];
    for (event, expected) in [
        (MARK_3, 100),
        ("vpmu/mark/", 0),
        ("vpmu/kind=0x104,event=3/", 100),
        ("vpmu/config=0x104000000000003/", 100),
        ("vpmu/mark,event=4/", 0),
    ] {
        let counted = count(&[&["-e", event], &command[..]].concat())?;
        ensure_eq!(counted, expected, "the count of {event}");
    }
    Ok(())
}

#[apply(guest_test)]
fn children_count_unless_left_out() -> Outcome {
    let direct = ["--", "guest-tests", "mark", "3", "100"];
    let script = "guest-tests mark 3 60; guest-tests mark 3 40; true";
    let children = ["--", "sh", "-c", script];
    for (options, command, expected) in [
        (&["-e", MARK_3][..], &direct[..], 100),
        (&["-i", "-e", MARK_3], &direct, 100),
        (&["-e", MARK_3], &children, 100),
        (&["-i", "-e", MARK_3], &children, 0),
    ] {
        let counted = count(&[options, command].concat())?;
        ensure_eq!(counted, expected, "the count with {options:?} {command:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn many_children_at_once_count() -> Outcome {
    let script = "for i in $(seq 20); do guest-tests mark 3 5 & done; wait";
    let counted = count(&["-e", MARK_3, "--", "sh", "-c", script])?;
    ensure_eq!(counted, 100, "marks of twenty children");
    Ok(())
}

#[apply(guest_test)]
fn cpus_count_apart() -> Outcome {
    let on_cpu_1 = ["--", "taskset", "2", "guest-tests", "mark", "3", "100"];
    for (cpus, expected) in [(&["-a"][..], 100), (&["-C", "0"], 0), (&["-C", "1"], 100), (&["-C", "0-1"], 100)] {
        let counted = count(&[cpus, &["-e", MARK_3], &on_cpu_1[..]].concat())?;
        ensure_eq!(counted, expected, "the count with {cpus:?}");
    }
    let rows = stat(&[&["-a", "-A", "-e", MARK_3], &on_cpu_1[..]].concat())?;
    let counts: Vec<_> = rows.iter().map(|row| (row.subject.as_deref(), row.value.as_str())).collect();
    ensure_eq!(counts, [(Some("CPU0"), "0"), (Some("CPU1"), "100")], "counts of each CPU");
    Ok(())
}

/// perf reads the counts after each interval. For an interval in which the task did not run, it prints `<not counted>`.
#[apply(guest_test)]
fn intervals_add_up() -> Outcome {
    const FILE: &str = "/tmp/intervals";
    // If the program ends during an interval, perf does not print this interval. So the program waits until perf has
    // printed an interval that started after the marks.
    let script = format!(
        "for i in $(seq 10); do guest-tests mark 3 7; done
        lines() {{ wc -l <{FILE}; }}
        last=$(($(lines) + 2)); until [ $(lines) -ge $last ]; do :; done"
    );
    let args = ["-I", "20", "-o", FILE, "-e", MARK_3, "--", "sh", "-c"];
    let output = perf(&[&["stat", "-x;"], &args[..], &[script.as_str()]].concat())?;
    ensure!(output.status.success(), "perf stat failed: {}", text(&output.stderr));
    let said = std::fs::read_to_string(FILE)?;
    let (mut sum, mut intervals) = (0, 0);
    for value in said.lines().filter_map(|line| line.split(';').nth(1)) {
        intervals += 1;
        if value != "<not counted>" {
            sum += value.parse::<u64>().map_err(|e| format!("{e}: {said}"))?;
        }
    }
    ensure_eq!(sum, 70, "the sum of the intervals' counts: {said}");
    ensure!(intervals > 1, "fewer than two intervals: {said}");
    Ok(())
}

#[apply(guest_test)]
fn many_events_of_a_task_at_once() -> Outcome {
    // The marks have known counts. Two marks are a group, and the others are single events. Two of the kernel's own
    // events are between them. The counts of the last three events are not known.
    let events = "{vpmu/mark,event=0/,vpmu/mark,event=1/},task-clock,vpmu/mark,event=2/,\
        page-faults,vpmu/mark,event=3/,vpmu/mark,event=4/,vpmu/mark,event=5/,vpmu/mark,event=6/,\
        vpmu/mark,event=7/,vpmu/tsc/,vpmu/guest-time/,vpmu/exits/";
    let script = "for i in $(seq 0 7); do guest-tests mark $i $((i + 10)); done";
    let rows = stat(&["-e", events, "--", "sh", "-c", script])?;
    let value = |event: &str| -> Result<u64, String> {
        let row = row_of(&rows, event)?;
        row.value.parse().map_err(|e| format!("{e}: {row:?}"))
    };
    for mark in 0..8 {
        let counted = value(&format!("vpmu/mark,event={mark}/"))?;
        ensure_eq!(counted, mark + 10, "the count of mark {mark} in {rows:?}");
    }
    for event in ["vpmu/tsc/", "vpmu/guest-time/", "vpmu/exits/"] {
        ensure!(value(event)? > 0, "{event} counts nothing: {rows:?}");
    }
    let partly = rows.iter().find(|row| row.share() != "100.00");
    ensure!(partly.is_none(), "an event did not run all the time: {partly:?}");
    Ok(())
}

/// perf runs vperf, and both count the same marks.
#[apply(guest_test)]
fn vperf_and_perf_agree() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "100"];
    let vperf = ["vperf", "stat", "-x", ",", "-e", "mark=3"];
    for scope in [&[][..], &["-a"]] {
        let inner = [&vperf[..], scope, &marks].concat();
        let outer = [&["stat", SEPARATED], scope, &["-e", MARK_3, "--"], &inner].concat();
        let output = perf(&outer)?;
        let said = text(&output.stderr);
        ensure!(output.status.success(), "perf stat failed: {said}");
        let ours = text(&output.stdout);
        ensure_eq!(ours.split(',').next(), Some("100"), "vperf's count with {scope:?}: {ours}");
        let theirs: Vec<String> = rows(&said).into_iter().map(|row| row.value).collect();
        ensure_eq!(theirs, ["100"], "perf's count with {scope:?}: {said}");
    }
    Ok(())
}

#[apply(guest_test)]
fn uncountable_events_are_not_supported() -> Outcome {
    for event in [
        // An unknown kind.
        "vpmu/kind=0x7ff,event=1/",
        // The device cannot restrict the count of halts to user mode.
        "vpmu/halts/u",
        // Exits of a guest of this guest.
        "vpmu/exits-user/G",
    ] {
        let output = perf(&["stat", "-x,", "-e", event, "--", "true"])?;
        let said = text(&output.stderr);
        ensure!(said.starts_with("<not supported>,"), "{event} is supported: {said}");
    }
    Ok(())
}

#[apply(guest_test)]
fn unnamed_events_are_refused() -> Outcome {
    // An unknown name, and a value that exceeds 48 bits.
    for event in ["vpmu/nonsense/", "vpmu/mark,event=0x1000000000000/"] {
        let output = perf(&["stat", "-x,", "-e", event, "--", "true"])?;
        ensure!(!output.status.success(), "{event} was accepted: {}", text(&output.stderr));
    }
    Ok(())
}

/// perf's format terms take numbers: 1 is the exit engine, which makes the samples of marks, and 2 the batched engine.
#[apply(guest_test)]
fn engine_of_samples_can_be_chosen() -> Outcome {
    let pmu = PerfPmu::open()?;
    let marks = pmu.attr_of_terms("kind=0x104,event=3")?.sampling(1);
    pmu.open_event(&marks.clone().sampled_by(Engine::Exit))?;
    let refused = match pmu.open_event(&marks.sampled_by(Engine::Batched)) {
        Err(PerfError::Open(source)) => source.raw_os_error(),
        other => return Err(format!("marks with the batched engine: {other:?}").into()),
    };
    ensure_eq!(refused, Some(libc::EOPNOTSUPP), "errno for marks with the batched engine");

    for (engine, works) in [(0, true), (1, true), (2, false), (3, false)] {
        let event = format!("vpmu/mark,event=3,period=1,engine={engine}/");
        let output = perf(&["record", "-q", "-o", "engine", "-e", &event, "--", "guest-tests", "mark", "3", "5"])?;
        ensure_eq!(output.status.success(), works, "perf record -e {event}: {}", text(&output.stderr));
    }
    Ok(())
}
