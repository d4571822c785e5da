//! Stock perf's output for events that had to wait for room. perf prints the percentage of time for which an event ran,
//! or `<not counted>` if it never ran.

use vpmu_client::perf::PerfPmu;
use vpmu_client::{Event, EventAttr, Reading};

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{MARK_3, MARK_4, SEPARATED, count, perf, record, row_of, rows, script, shown, stat, tally};
use crate::programs::text;
use crate::{Fallible, Outcome, kernel_log};

const GROUP: &str = "stock-few";

#[apply(guest_test)]
fn stat_of_more_events_than_the_device_has_names_the_errno() -> Outcome {
    let events = [MARK_3; 4].join(",");
    let output = perf(&["stat", "-x,", "-e", &events, "--", "true"])?;
    let said = text(&output.stderr);
    ensure!(!output.status.success(), "four events opened where three have room: {said}");
    ensure!(said.contains("No space left on device"), "perf does not report ENOSPC: {said}");
    // perf suggests to search the log for "perf".
    let log = kernel_log::log()?;
    let line = log.lines().find(|line| line.contains("perf event refused"));
    ensure!(line.is_some_and(|line| line.contains("--max-events")), "the log does not name the limit: {line:?}");
    Ok(())
}

/// The device has room for three events. The shell's two events leave room for only one of the two events of each
/// child.
#[apply(guest_test)]
fn stat_of_children_without_room_shows_the_share() -> Outcome {
    let shell = "guest-tests mark 3 10; guest-tests mark 4 10; true";
    let events = ["-e", MARK_3, "-e", MARK_4, "--", "sh", "-c", shell];
    let rows = stat(&events)?;
    let [first, second] = [row_of(&rows, MARK_3)?, row_of(&rows, MARK_4)?];
    ensure_eq!((first.value.as_str(), first.share()), ("10", "100.00"), "count and percentage of {MARK_3}");
    // Of the events for marks of value 4, only the shell's own event was opened on the device. The shell itself places
    // no marks, so this event's count is zero. perf scales the count, but it stays zero.
    let share: f64 = second.share().parse()?;
    ensure_eq!(second.value, "0", "the count of {MARK_4}");
    ensure!(0.0 < share && share < 100.0, "the percentage of {MARK_4} is {share}");
    // In its human-readable output, perf prints percentages below 100 in brackets.
    let output = perf(&[&["stat"], &events[..]].concat())?;
    let said = text(&output.stderr);
    let line = |event: &str| said.lines().find(|line| line.contains(event));
    ensure!(line(MARK_3).is_some_and(|line| !line.contains('%')), "{MARK_3} has no line, or a percentage: {said}");
    ensure!(line(MARK_4).is_some_and(|line| line.contains("%)")), "{MARK_4} has no line, or no percentage: {said}");
    Ok(())
}

/// A refused event takes no room.
#[apply(guest_test)]
fn stat_of_all_that_has_room_is_whole_again() -> Outcome {
    for _ in 0..3 {
        stat_of_more_events_than_the_device_has_names_the_errno()?;
    }
    let shell = "guest-tests mark 3 10; guest-tests mark 3 5; true";
    ensure_eq!(count(&["-e", MARK_3, "--", "sh", "-c", shell])?, 15, "marks");
    Ok(())
}

const CLOCKS: [&str; 2] = ["vpmu/cpu-clock/", "vpmu/task-clock/"];

#[apply(guest_test)]
#[group = "stock-waiting"]
fn record_of_a_clock_that_waits_has_no_sample_of_it() -> Outcome {
    let spin = ["--", "workload", "spin", "300"];
    let events = ["-e", CLOCKS[0], "-e", CLOCKS[1], "-c", "1000000"];
    record("waits", &[&events[..], &spin].concat())?;
    let lines = script("waits", "event")?;
    let events = tally(&lines);
    let names: Vec<&str> = events.keys().copied().collect();
    ensure_eq!(names, ["vpmu/cpu-clock/:"], "events with samples: {events:?}");
    // The recording has both events.
    let listed = shown(&["evlist", "-i", "waits"])?;
    let listed: Vec<&str> = listed.lines().collect();
    ensure_eq!(listed[..2], CLOCKS, "events of {listed:?}");
    Ok(())
}

/// Checks that a clock counted after it had waited.
fn ensure_ran_in_part(ran: &Reading) -> Outcome {
    ensure!(ran.value > 0, "the second clock counted nothing: {ran:?}");
    ensure!(
        0 < ran.time_running && ran.time_running < ran.time_enabled,
        "the second clock did not run for a part of its enabled time: {ran:?}"
    );
    Ok(())
}

/// Reads both clocks as any program does, with read(2) on perf core's events. The second clock has to wait for the
/// vCPU's only sampling counter until the first clock is disabled.
#[apply(guest_test)]
#[group = "stock-waiting"]
fn clock_that_waits_has_not_run() -> Outcome {
    let pmu = PerfPmu::open()?;
    cpu::pin(1)?;
    let mut events = Vec::new();
    for name in CLOCKS {
        let name = name.trim_start_matches("vpmu").trim_matches('/');
        events.push(pmu.open_event(&pmu.attr(name)?.sampling(1_000_000))?);
    }
    let [first, second] = events.as_slice() else {
        return Err("there are not two events".into());
    };
    let _rings = [first.map(8)?, second.map(8)?];
    first.enable()?;
    second.enable()?;
    spin();
    let [ran, waited] = [first.read()?, second.read()?];
    ensure!(ran.value > 0, "the first clock counted nothing: {ran:?}");
    ensure_eq!(ran.time_running, ran.time_enabled, "time running of the first clock: {ran:?}");
    ensure!(waited.time_enabled > 0, "the waiting clock has no enabled time: {waited:?}");
    ensure_eq!((waited.value, waited.time_running), (0, 0), "count and time running of the waiting clock: {waited:?}");
    first.disable()?;
    spin();
    ensure_ran_in_part(&second.read()?)
}

/// When an event is read, perf core takes its timestamp first, and the device takes another one later. The group is
/// large to make the time between the two timestamps long.
#[apply(guest_test)]
#[group = "stock-waiting"]
fn clock_that_counts_after_a_wait_has_run() -> Outcome {
    let pmu = PerfPmu::open()?;
    cpu::pin(1)?;
    let clock = |name| -> Fallible<EventAttr> { Ok(pmu.attr(name)?.sampling(1_000_000).on_cpu(1)) };
    let first = pmu.open_event(&clock("cpu-clock")?)?;
    let second = pmu.open_event(&clock("task-clock")?.reading_group())?;
    let _rings = [first.map(8)?, second.map(8)?];
    let member = pmu.attr(cpu::PORT_EXITS)?.on_cpu(1);
    let members = (0..64).map(|_| pmu.open_member(&member, &second));
    let members: Vec<Event> = members.collect::<Result<_, _>>()?;
    first.enable()?;
    second.enable()?;
    for member in &members {
        member.enable()?;
    }
    spin();
    first.disable()?;
    let readings = second.read_group()?;
    ensure_ran_in_part(readings.first().ok_or("no reading")?)
}

/// A pinned event does not wait for a counter that another pinned event uses. Instead, it enters the error state, and
/// perf prints `<not counted>` for it.
#[apply(guest_test)]
#[group = "stock-waiting"]
fn pinned_clock_without_a_counter_has_not_run() -> Outcome {
    let pmu = PerfPmu::open()?;
    cpu::pin(1)?;
    let open = |name| -> Fallible<Event> {
        Ok(pmu.open_event(&pmu.attr(name)?.sampling(1_000_000).with(|attr| attr.pinned = true))?)
    };
    let [first, second] = [open("cpu-clock")?, open("task-clock")?];
    first.enable()?;
    second.enable()?;
    spin();
    for _ in 0..3 {
        let failed = second.read()?;
        ensure!(failed.time_enabled > 0, "the second clock has no enabled time: {failed:?}");
        ensure_eq!(
            (failed.value, failed.time_running),
            (0, 0),
            "count and time running of the second clock: {failed:?}"
        );
        spin();
    }
    second.disable()?;
    let failed = second.read()?;
    ensure_eq!(
        (failed.value, failed.time_running),
        (0, 0),
        "count and time running of the disabled second clock: {failed:?}"
    );
    ensure!(first.read()?.value > 0, "the first clock counted nothing");
    Ok(())
}

fn spin() {
    let begin = cpu::tsc();
    while cpu::tsc() - begin < 50_000_000 {}
}

#[apply(guest_test)]
#[group = "stock-waiting"]
fn stat_beside_a_clock_that_waits_is_whole() -> Outcome {
    let stat = ["perf", "stat", SEPARATED, "-e", MARK_3, "--", "guest-tests", "mark", "3", "200"];
    let events = ["-a", "-e", CLOCKS[0], "-e", CLOCKS[1], "-c", "1000000", "--"];
    let said = record("beside", &[&events[..], &stat].concat())?;
    let rows = rows(&said);
    let row = row_of(&rows, MARK_3)?;
    ensure_eq!((row.value.as_str(), row.share()), ("200", "100.00"), "count and percentage of {MARK_3}");
    Ok(())
}
