//! Tests third-party programs other than perf, and a library. Some of them find vpmu's events in sysfs, and count and
//! sample them. The others know only the kernel's own events, and run while vpmu's events are in use.
#![expect(unsafe_code, reason = "marks of a child before its exec")]

use std::error::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use perf_event::data::Record;
use perf_event::events::{Dynamic, Software};
use perf_event::{Builder, Group, ReadFormat, SampleFlag};
use vpmu_client::Vpmu;

use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::os;
use crate::perf_command::{MARK_3, SEPARATED, perf, row_of, rows};
use crate::programs::text;
use crate::{Fallible, Outcome};

const GROUP: &str = "third-party-tools";

/// Returns an event, given its name in sysfs and the value of a mark.
fn event(name: &str, value: Option<u64>) -> Fallible<Dynamic> {
    let mut builder = Dynamic::builder("vpmu")?;
    // The library has no default values for format terms, so each needs a value.
    builder.event(name)?.field("enable_on_starter", 0)?.field("engine", 0)?.field("persistent", 0)?;
    if let Some(value) = value {
        builder.field("event", value)?;
    }
    Ok(builder.build()?)
}

fn mark(value: u64) -> Fallible<Dynamic> {
    event("mark", Some(value))
}

#[apply(guest_test)]
fn library_that_reads_sysfs_counts_by_name() -> Outcome {
    let vpmu = Vpmu::open()?;
    cpu::leave_console()?;
    cpu::allow_ports()?;
    let mut own = Builder::new(mark(3)?).include_kernel().build()?;
    let mut others = Builder::new(mark(4)?).include_kernel().build()?;
    let mut ports = Builder::new(event(cpu::PORT_EXITS, None)?).build()?;
    let mut of_cpu = Builder::new(mark(3)?);
    let mut of_cpu = of_cpu.any_pid().one_cpu(1).include_kernel().build()?;
    for counter in [&mut own, &mut others, &mut ports, &mut of_cpu] {
        counter.enable()?;
    }
    cpu::pin(0)?;
    (0..10).try_for_each(|_| vpmu.mark(3))?;
    cpu::pin(1)?;
    (0..25).try_for_each(|_| vpmu.mark(3))?;
    (0..70).for_each(|_| cpu::port_write());
    for counter in [&mut own, &mut others, &mut ports, &mut of_cpu] {
        counter.disable()?;
    }
    let mut counts = Vec::new();
    for counter in [&mut own, &mut others, &mut ports, &mut of_cpu] {
        let full = counter.read_full()?;
        ensure_eq!(full.time_enabled(), full.time_running(), "time enabled, compared with time running: {full:?}");
        counts.push(full.count());
    }
    ensure_eq!(counts, [35, 0, 70, 25], "counts");
    Ok(())
}

#[apply(guest_test)]
fn library_that_reads_sysfs_refuses_what_is_not_there() -> Outcome {
    let missing = event("nonsense", None).err();
    let kind = missing.as_deref().and_then(|error| {
        let error = error.downcast_ref::<std::io::Error>();
        error.map(std::io::Error::kind)
    });
    ensure_eq!(kind, Some(std::io::ErrorKind::NotFound), "error kind for an unknown event");
    // A kind that the device does not have is refused with the errno that tools expect.
    let mut builder = Dynamic::builder("vpmu")?;
    builder
        .field("enable_on_starter", 0)?
        .field("engine", 0)?
        .field("persistent", 0)?
        .field("kind", 0x7ff)?
        .field("event", 1)?;
    let refused = Builder::new(builder.build()?).include_kernel().build();
    let code = refused.err().and_then(|error| error.raw_os_error());
    ensure_eq!(code, Some(libc::ENOENT), "errno for a kind that does not exist");
    Ok(())
}

/// The library disables each member when the member joins a group.
#[apply(guest_test)]
fn librarys_group_counts_its_members() -> Outcome {
    let vpmu = Vpmu::open()?;
    let format = ReadFormat::GROUP | ReadFormat::ID;
    let mut leader = Builder::new(mark(3)?);
    let mut group = leader.include_kernel().read_format(format).build_group()?;
    let others = group.add(Builder::new(mark(4)?).include_kernel())?;
    group.enable()?;
    (0..5).try_for_each(|_| vpmu.mark(3))?;
    (0..9).try_for_each(|_| vpmu.mark(4))?;
    group.disable()?;
    let counts = group.as_counter_mut().read_group()?;
    let values = [counts[group.as_counter()], counts[&others]];
    ensure_eq!(values, [5, 9], "counts of the members: {counts:?}");
    Ok(())
}

/// The library's own leader counts nothing. If the PMUs of a member and its leader differ, Linux 6.12 enables the
/// member only when the task is next scheduled in. This also applies to members on the kernel's own PMUs. Therefore,
/// our member must count whenever the kernel's member does.
#[apply(guest_test)]
fn librarys_group_with_an_idle_leader_counts_as_the_kernels_members_do() -> Outcome {
    let vpmu = Vpmu::open()?;
    let times = ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING;
    let mut group = Group::new()?;
    let mut clock = Builder::new(Software::TASK_CLOCK);
    let mut clock = group.add(clock.include_kernel().read_format(times))?;
    let mut marks = Builder::new(mark(3)?);
    let mut marks = group.add(marks.include_kernel().read_format(times))?;
    group.enable()?;
    (0..5).try_for_each(|_| vpmu.mark(3))?;
    let [kernels, ours] = [clock.read_full()?, marks.read_full()?];
    let ran = kernels.time_running() > Some(Duration::ZERO);
    ensure_eq!(ours.time_running() > Some(Duration::ZERO), ran, "whether our member ran: {ours:?} beside {kernels:?}");
    ensure_eq!(ours.count(), if ran { 5 } else { 0 }, "our member's count: {ours:?} beside {kernels:?}");
    // The task is scheduled in again.
    thread::sleep(Duration::from_millis(20));
    let before = marks.read()?;
    (0..9).try_for_each(|_| vpmu.mark(3))?;
    group.disable()?;
    ensure_eq!(marks.read()? - before, 9, "marks after a sleep");
    Ok(())
}

#[apply(guest_test)]
fn librarys_sampler_reads_every_mark() -> Outcome {
    let vpmu = Vpmu::open()?;
    let mut builder = Builder::new(event("marks", None)?);
    builder
        .include_kernel()
        .sample_period(1)
        .sample(SampleFlag::ADDR | SampleFlag::TID | SampleFlag::TIME)
        .read_format(ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING);
    let mut sampler = builder.build()?.sampled(1 << 16)?;
    sampler.enable()?;
    for burst in 0..10 {
        // The marks follow a switch, and a tick replays them. Each must keep its own time.
        thread::sleep(Duration::from_millis(1));
        (0..4).try_for_each(|mark| vpmu.mark(100 + 4 * burst + mark))?;
        let end = Instant::now() + Duration::from_millis(10);
        while Instant::now() < end {}
    }
    sampler.disable()?;
    let mut values = Vec::new();
    let mut last = 0;
    while let Some(record) = sampler.next_record() {
        let Record::Sample(sample) = record.parse_record()? else {
            return Err("a record that is not a sample".into());
        };
        ensure_eq!(sample.tid(), Some(cpu::thread_id()), "the thread in {sample:?}");
        let time = sample.time().unwrap_or(0);
        ensure!(time > last, "a sample is not later than {last}: {sample:?}");
        last = time;
        values.push(sample.addr().unwrap_or(0));
    }
    ensure_eq!(values, (100..140).collect::<Vec<_>>(), "values of the marks in the samples");
    Ok(())
}

#[apply(guest_test)]
fn librarys_counter_begins_with_the_exec() -> Outcome {
    let vpmu = Vpmu::open()?;
    let mut builder = Builder::new(mark(3)?);
    let mut counter = builder.include_kernel().inherit(true).enable_on_exec(true).build()?;
    let mut child = Command::new("guest-tests");
    child.args(["mark", "3", "7"]);
    let place = move || {
        let marks = (0..5).try_for_each(|_| vpmu.mark(3));
        marks.map_err(|_| std::io::ErrorKind::Other.into())
    };
    // SAFETY: the child makes only system calls, and allocates nothing.
    unsafe { child.pre_exec(place) };
    let status = child.status()?;
    ensure!(status.success(), "the child: {status}");
    ensure_eq!(counter.read()?, 7, "marks after the exec");
    Ok(())
}

fn has_cycles() -> Fallible<bool> {
    let vpmu = Vpmu::open()?;
    let entries = vpmu.catalogue().entries();
    Ok(entries.iter().any(|entry| entry.name == "cycles"))
}

/// Counts the marks of a shell script, and checks the count. Returns the script's output.
fn counted(script: &str, marks: u32) -> Fallible<String> {
    let args = ["stat", SEPARATED, "-o", "counted", "-e", MARK_3, "--", "sh", "-c", script];
    let output = perf(&args)?;
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    ensure!(output.status.success(), "perf stat of {script}: {said}");
    let rows = rows(&std::fs::read_to_string("/tmp/counted")?);
    ensure_eq!(row_of(&rows, MARK_3)?.value, marks.to_string(), "marks of {script}");
    Ok(said)
}

/// PAPI finds events in its own tables, which do not list the PMUs of sysfs.
#[apply(guest_test)]
fn papi_counts_the_kernels_events_beside_ours() -> Outcome {
    // If `perf_event_paranoid` is 3, which is Debian's default, PAPI does not even try to open events.
    os::set_paranoid(2)?;
    let papi = "papi_command_line perf::TASK-CLOCK perf::PAGE-FAULTS";
    let script = format!("guest-tests mark 3 20; {papi}; guest-tests mark 3 30");
    let said = counted(&script, 50)?;
    for event in ["perf::TASK-CLOCK :", "perf::PAGE-FAULTS :"] {
        let value = said.lines().find_map(|line| line.strip_prefix(event));
        let value = value.and_then(|value| value.trim().parse::<u64>().ok());
        ensure!(value.is_some_and(|value| value > 0), "{event} has no count in:\n{said}");
    }
    let said = counted(&format!("papi_command_line vpmu::{}; true", cpu::PORT_EXITS), 0)?;
    ensure!(said.contains("because: Event does not exist"), "PAPI does not refuse the event as unknown: {said}");
    Ok(())
}

#[apply(guest_test)]
fn papi_without_host_counters_is_refused_cycles() -> Outcome {
    os::set_paranoid(2)?;
    let said = counted("papi_command_line perf::CYCLES; guest-tests mark 3 5", 5)?;
    let refused = said.contains("Failed adding: perf::CYCLES");
    ensure!(refused != has_cycles()?, "PAPI refuses cycles although the host has them, or the reverse: {said}");
    Ok(())
}

#[apply(guest_test)]
fn stress_ng_opens_its_events_beside_ours() -> Outcome {
    let stress = "stress-ng --perf --cpu 1 --cpu-method loop --cpu-ops 3 2>&1";
    let said = counted(&format!("{stress} & guest-tests mark 3 200; wait"), 200)?;
    for (event, expected) in [("Task Clock", true), ("Page Faults Total", true), ("CPU Cycles", has_cycles()?)] {
        ensure_eq!(said.contains(event), expected, "whether {event} is in:\n{said}");
    }
    Ok(())
}

#[apply(guest_test)]
fn trace_cmd_traces_beside_exact_counts() -> Outcome {
    let trace = "trace-cmd record -q -e sched:sched_process_exec -o /tmp/trace.dat \
        guest-tests mark 3 100";
    counted(&format!("{trace} > /dev/null 2>&1"), 100)?;
    let output = Command::new("trace-cmd").args(["report", "-i", "/tmp/trace.dat"]).output()?;
    let said = text(&output.stdout);
    let execs = said.lines().filter(|line| line.contains("filename=/bin/guest-tests"));
    ensure_eq!(execs.count(), 1, "execs in:\n{said}");
    Ok(())
}

/// Runs bpftrace with a program for as long as a command runs.
fn bpftrace(program: &str, command: &str) -> Fallible<(bool, String)> {
    let output = Command::new("bpftrace")
        .args(["-e", program, "-c", command])
        .current_dir("/tmp")
        .env("HOME", "/tmp")
        .output()?;
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    Ok((output.status.success(), said))
}

/// Returns the number that bpftrace prints for `map` when it exits.
fn printed(said: &str, map: &str) -> Fallible<u64> {
    let line = said.lines().find_map(|line| line.strip_prefix(map));
    let number = line.ok_or_else(|| format!("no {map} in:\n{said}"))?;
    number.trim().parse().map_err(|e| -> Box<dyn Error> { format!("{e}:\n{said}").into() })
}

#[apply(guest_test)]
#[group = "third-party-bpftrace"]
fn bpftrace_profiles_beside_exact_counts() -> Outcome {
    let program = "profile:hz:99 { @profile = count(); } \
        software:cpu-clock:1000000 { @clock = count(); } \
        tracepoint:sched:sched_process_exit /comm == \"guest-tests\"/ { @exits = count(); }";
    let command = format!("perf stat -x, -e {MARK_3} -- guest-tests mark 3 500");
    let (success, said) = bpftrace(program, &command)?;
    ensure!(success, "bpftrace failed: {said}");
    ensure!(said.lines().any(|line| line.starts_with("500,,")), "perf stat did not count 500 marks: {said}");
    ensure_eq!(printed(&said, "@exits:")?, 1, "exits of guest-tests: {said}");
    for map in ["@profile:", "@clock:"] {
        ensure!(printed(&said, map)? > 0, "{map} is zero: {said}");
    }
    Ok(())
}

/// bpftrace's probes cannot name a PMU from sysfs. But perf core writes our samples with a function that bpftrace can
/// probe.
#[apply(guest_test)]
#[group = "third-party-bpftrace"]
fn bpftrace_sees_each_sample_on_its_way_to_perf() -> Outcome {
    let program = "kprobe:perf_event_output_forward { @samples = count(); }";
    let command = format!("perf record -o /tmp/seen -c 1 -e {MARK_3} -- guest-tests mark 3 60");
    let (success, said) = bpftrace(program, &command)?;
    ensure!(success, "bpftrace failed: {said}");
    ensure_eq!(printed(&said, "@samples:")?, 60, "samples that bpftrace saw: {said}");
    Ok(())
}

#[apply(guest_test)]
#[group = "third-party-bpftrace"]
fn bpftrace_without_host_counters_is_refused_cycles() -> Outcome {
    let program = "hardware:cycles:1000000 { @cycles = count(); }";
    let (success, said) = bpftrace(program, "workload spin 100")?;
    let refused = said.contains("perf_event_open failed: No such file or directory");
    ensure_eq!(success, has_cycles()?, "whether bpftrace counted cycles: {said}");
    ensure_eq!(refused, !success, "whether bpftrace was refused cycles: {said}");
    Ok(())
}
