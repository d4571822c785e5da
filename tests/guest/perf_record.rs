//! Stock `perf record` with our events: the recording contains each sample that the host took, with the task, the time
//! and the count at which it was taken.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::arch;
use crate::cpu;
use crate::ensure::{ensure, ensure_eq};
use crate::os;
use crate::perf_command::{
    Controlled, MARK_3, MARK_4, Marker, SEPARATED, command, only, perf, record, row_of, rows, script, shown, stat,
    tally,
};
use crate::programs::text;
use crate::{Fallible, Outcome, interrupt, kernel_log};

const GROUP: &str = "stock-record";

/// A user without any capability.
const NOBODY: u32 = 65534;

/// Here, `perf record` runs with its default configuration, so it fills its cache of build IDs at the end. For the
/// tests' other recordings, the guest's own configuration turns this step off.
#[apply(guest_test)]
fn record_of_marks_has_a_sample_for_each() -> Outcome {
    let record = ["record", "-o", "marks", "-d", "-e", MARK_3, "-c", "1"];
    let marks = ["--", "guest-tests", "mark", "3", "5000"];
    let output = command(&[&record[..], &marks[..]].concat()).env("PERF_CONFIG", "/dev/null").output()?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf record of marks: {said}");
    ensure!(Path::new("/tmp/.debug/[virtio_pmu]").exists(), "perf's cache has no build ID of the driver: {said}");
    let lines = script("marks", "comm,period,event,addr")?;
    let expected = format!("guest-tests          1 {MARK_3}:                3");
    ensure_eq!(tally(&lines), [(expected.as_str(), 5000)].into(), "samples");
    Ok(())
}

#[apply(guest_test)]
fn record_with_a_period_has_every_nth() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "107"];
    record("nth", &[&["-e", MARK_3, "-c", "10"], &marks[..]].concat())?;
    let lines = script("nth", "period")?;
    ensure_eq!(tally(&lines), [("10", 10)].into(), "samples");
    Ok(())
}

#[apply(guest_test)]
fn record_of_a_frequency_has_the_clocks_period() -> Outcome {
    let spin = ["--", "workload", "spin", "200"];
    record("freq", &[&["-e", "vpmu/cpu-clock/", "-F", "500"], &spin[..]].concat())?;
    let lines = script("freq", "comm,period")?;
    let samples = lines.iter().filter(|line| line.starts_with("workload"));
    ensure!(samples.count() > 0, "no sample of the program: {lines:?}");
    let other = lines.iter().find(|line| !line.ends_with(" 2000000"));
    ensure!(other.is_none(), "a sample's period is not 2 ms: {other:?}");
    Ok(())
}

#[apply(guest_test)]
fn record_of_children_has_all_their_samples() -> Outcome {
    let shell = "for i in $(seq 5); do guest-tests mark 3 20 & done; wait";
    record("children", &["-e", MARK_3, "-c", "1", "--", "sh", "-c", shell])?;
    let lines = script("children", "comm,tid")?;
    let tasks = tally(&lines);
    ensure_eq!(tasks.values().copied().collect::<Vec<_>>(), [20; 5], "samples of the children: {tasks:?}");
    Ok(())
}

#[apply(guest_test)]
fn record_without_inheritance_leaves_children_out() -> Outcome {
    let shell = "guest-tests mark 3 20; true";
    record("alone", &["-i", "-e", MARK_3, "-c", "1", "--", "sh", "-c", shell])?;
    ensure!(script("alone", "comm")?.is_empty(), "the recording has samples of a child");
    Ok(())
}

#[apply(guest_test)]
fn record_per_thread_has_the_threads_samples() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "33"];
    record("thread", &[&["--per-thread", "-e", MARK_3, "-c", "1"], &marks[..]].concat())?;
    ensure_eq!(script("thread", "comm")?.len(), 33, "samples");
    Ok(())
}

/// Two processes run on one CPU and take turns after each mark.
#[apply(guest_test)]
fn record_of_cpus_names_each_task() -> Outcome {
    let shell = "mkfifo there back 2>/dev/null; \
        taskset 2 guest-tests mark 4 40 in-turn < there > back & \
        { printf x; cat back; } | taskset 2 guest-tests mark 3 40 in-turn > there; wait";
    record("cpus", &["-a", "-e", MARK_3, "-c", "1", "-e", MARK_4, "-c", "1", "--", "sh", "-c", shell])?;
    let lines = script("cpus", "tid,cpu,event")?;
    let tasks = tally(&lines);
    ensure_eq!(tasks.len(), 2, "pairs of a task and an event: {tasks:?}");
    for (line, count) in &tasks {
        ensure!(line.contains("[001]"), "a sample is not on CPU 1: {line}");
        ensure_eq!(*count, 40, "samples of a task: {tasks:?}");
    }
    let tids: Vec<_> = tasks.keys().filter_map(|line| line.split(' ').next()).collect();
    ensure!(tids[0] != tids[1], "both events have the same task: {tasks:?}");
    Ok(())
}

#[apply(guest_test)]
fn record_of_a_process_begins_where_perf_attaches() -> Outcome {
    for option in ["-p", "-t"] {
        let mut marker = Marker::start("3")?;
        marker.place(5)?;
        let id = marker.process.id().to_string();
        let mut perf = Controlled::start("attached", &[option, &id, "-e", MARK_3, "-c", "1"])?;
        perf.say("enable")?;
        marker.place(17)?;
        perf.say("disable")?;
        marker.place(3)?;
        perf.stop()?;
        ensure_eq!(script("attached", "comm")?.len(), 17, "samples with {option}");
    }
    Ok(())
}

#[apply(guest_test)]
fn record_controlled_has_what_was_enabled() -> Outcome {
    let mut marker = Marker::start("3")?;
    let mut perf = Controlled::start("controlled", &["-a", "-e", MARK_3, "-c", "1"])?;
    for round in 1..=3 {
        marker.place(4)?;
        perf.say("enable")?;
        marker.place(round)?;
        perf.say("disable")?;
    }
    perf.stop()?;
    ensure_eq!(script("controlled", "comm")?.len(), 6, "samples");
    Ok(())
}

#[apply(guest_test)]
fn record_of_two_events_keeps_them_apart() -> Outcome {
    let shell = "guest-tests mark 3 40; guest-tests mark 4 30";
    let [first, second] = ["vpmu/mark,event=3,period=2/", "vpmu/mark,event=4,period=5/"];
    record("two", &["-e", first, "-e", second, "--", "sh", "-c", shell])?;
    let lines = script("two", "period,event")?;
    let expected = [(format!("2 {first}:"), 20), (format!("5 {second}:"), 6)];
    let expected = expected.iter().map(|(line, count)| (line.as_str(), *count));
    ensure_eq!(tally(&lines), expected.collect(), "samples");
    Ok(())
}

#[apply(guest_test)]
fn records_of_two_perfs_are_both_whole() -> Outcome {
    let inner = ["perf", "record", "-o", "inner", "-e", MARK_3, "-c", "1"];
    let marks = ["--", "guest-tests", "mark", "3", "50"];
    let outer = ["-a", "-e", MARK_3, "-c", "1", "--"];
    record("outer", &[&outer[..], &inner, &marks].concat())?;
    ensure_eq!(script("outer", "comm")?.len(), 50, "samples of the CPUs");
    ensure_eq!(script("inner", "comm")?.len(), 50, "samples of the task");
    Ok(())
}

#[apply(guest_test)]
fn group_samples_have_the_counts_of_their_moment() -> Outcome {
    // On one CPU, two marks of value 4 precede each mark of value 3. Only the event of value 3 takes samples.
    cpu::pin(1)?;
    let shell = "for i in 1 2 3 4 5; do guest-tests mark 4 2; guest-tests mark 3 1; done";
    let events = format!("{{{MARK_3},{MARK_4}}}:S");
    let args = ["-C", "1", "-e", &events, "-c", "1", "--", "sh", "-c", shell];
    record("group", &args)?;
    let lines = script("group", "period,event")?;
    let expected = [(format!("1 {MARK_3}:"), 5), (format!("2 {MARK_4}:"), 5)];
    let expected = expected.iter().map(|(line, count)| (line.as_str(), *count));
    ensure_eq!(tally(&lines), expected.collect(), "counts of CPU 1");
    let marks = ["--", "guest-tests", "mark", "3", "20"];
    let args = ["-e", &events, "-c", "1"];
    record("group", &[&args[..], &marks].concat())?;
    let lines = script("group", "period,event")?;
    let expected = format!("1 {MARK_3}:");
    ensure_eq!(tally(&lines), [(expected.as_str(), 20)].into(), "counts of a task");
    Ok(())
}

#[apply(guest_test)]
fn samples_are_in_the_order_of_time() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "2000"];
    record("order", &[&["-e", MARK_3, "-c", "1"], &marks[..]].concat())?;
    let output = perf(&["script", "-i", "order", "-F", "time", "--ns", "--show-task-events"])?;
    let said = text(&output.stderr);
    ensure!(!said.contains("out of order"), "perf reports records out of order: {said}");
    // The kernel itself timestamps the task's first and last records. The times of our samples must be between these
    // two.
    let lines = text(&output.stdout);
    let times: Vec<f64> = lines.lines().filter_map(|line| line.trim().split(':').next()?.parse().ok()).collect();
    ensure!(times.len() > 2000, "only {} times", times.len());
    ensure!(times.is_sorted(), "the times go back");
    Ok(())
}

#[apply(guest_test)]
fn samples_lost_for_room_are_counted() -> Outcome {
    // perf is stopped while the marks are placed, so its ring of one page keeps only the samples that fit.
    let mut marker = Marker::start("3")?;
    let id = marker.process.id().to_string();
    let mut perf = Controlled::start("lost", &["-p", &id, "-m", "1", "-e", MARK_3, "-c", "1"])?;
    perf.say("enable")?;
    perf.signal("-STOP")?;
    marker.place(250)?;
    perf.signal("-CONT")?;
    perf.say("disable")?;
    perf.stop()?;
    let samples = script("lost", "comm")?.len();
    ensure!(samples < 250, "one page held all {samples} samples");
    let lost = lost_samples("lost")?;
    ensure_eq!(samples + lost, 250, "marks sampled ({samples}) and lost ({lost})");
    Ok(())
}

/// Returns the total number of lost samples in a recording, from the records of losses that perf wrote.
fn lost_samples(file: &str) -> Fallible<usize> {
    let said = shown(&["report", "-i", file, "-D"])?;
    let lost = |line: &str| -> Option<usize> {
        let (_, rest) = line.split_once("PERF_RECORD_LOST_SAMPLES: ")?;
        rest.rsplit(':').next()?.trim().parse().ok()
    };
    Ok(said.lines().filter_map(lost).sum())
}

#[apply(guest_test)]
fn call_graph_by_frame_pointers_is_the_programs() -> Outcome {
    let tree = ["--", "workload", "tree", "--rounds", "300"];
    let args = ["-g", "-e", "vpmu/cpu-clock/u", "-c", "1000000"];
    record("tree", &[&args[..], &tree].concat())?;
    let report = ["report", "-i", "tree", "--stdio", "--no-children", "-g", "caller"];
    let said = shown(&report)?;
    for function in ["hot_leaf", "three_quarters", "one_quarter"] {
        ensure!(said.contains(function), "no {function} in:\n{said}");
    }
    // A complete chain contains these functions, from the innermost outward: the leaf, one of its two callers, and the
    // function that calls both callers.
    let lines = script("tree", "ip,sym")?;
    let mut names: Vec<&str> = lines.iter().map(|line| line.split_once(' ').map_or("", |(_, symbol)| symbol)).collect();
    // On aarch64, perf also adds the leaf's caller from the link register. If the leaf has already set up its frame,
    // the chain then contains the caller twice.
    names.dedup();
    let whole = names.windows(3).filter(|chain| {
        chain[0].contains("hot_leaf") && chain[1].contains("_quarter") && chain[2].contains("tree::tree")
    });
    let leaves = names.iter().filter(|name| name.contains("hot_leaf")).count();
    let whole = whole.count();
    // If a sample hits an instruction that sets up the frame, its chain lacks a caller. So not every chain is complete.
    ensure!(leaves > 0 && whole > leaves / 2, "only {whole} of {leaves} chains are whole: {names:?}");
    Ok(())
}

#[apply(guest_test)]
fn call_graph_by_dwarf_has_the_users_stack() -> Outcome {
    let spin = ["--", "workload", "spin", "500"];
    let args = ["--call-graph", "dwarf,1024", "-e", "vpmu/cpu-clock/u", "-c", "1000000"];
    record("dwarf", &[&args[..], &spin].concat())?;
    // Without --no-inline, perf would run addr2line, which the guest does not have, and would stop at the first sample.
    let said = shown(&["report", "--no-inline", "-i", "dwarf", "-D"])?;
    let samples = said.matches("PERF_RECORD_SAMPLE(").count();
    let stacks = said.split("... ustack: size ").skip(1);
    let stacks: Vec<usize> =
        stacks.map(|rest| rest.split(',').next().unwrap_or_default().parse()).collect::<Result<_, _>>()?;
    ensure_eq!(stacks.len(), samples, "stacks in the recording");
    // When the program starts, its stack is smaller than the 1024 bytes that perf requests.
    let full = stacks.iter().filter(|&&size| size == 1024).count();
    ensure!(stacks.iter().all(|size| (1..=1024).contains(size)), "a stack has no byte, or more than 1024: {stacks:?}");
    // Each stack must be a copy from the time of its sample, so that perf finds the callers in it.
    let chains = shown(&["script", "--no-inline", "-i", "dwarf", "-F", "ip,sym"])?;
    let names = |chain: &str| -> Vec<String> {
        let names = chain.lines().map(|line| line.split_whitespace().nth(1));
        names.flatten().map(str::to_owned).collect()
    };
    let chains: Vec<Vec<String>> = chains.split("\n\n").map(names).collect();
    let spins: Vec<_> =
        chains.iter().filter(|chain| chain.first().is_some_and(|leaf| leaf == "workload::spin")).collect();
    let whole = spins.iter().filter(|chain| chain.get(1).is_some_and(|caller| caller == "workload::main"));
    let whole = whole.count();
    ensure!(
        whole > 0 && whole == spins.len(),
        "{whole} of the {} samples in `spin` name its caller: {chains:?}",
        spins.len()
    );
    // After the program's start, the stack is at least 1024 bytes deep.
    ensure!(full >= whole, "{full} stacks have 1024 bytes: {stacks:?}");
    // The instruction pointer in a sample's registers equals the sample's address.
    let mut address = None;
    let mut equal = 0;
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("PERF_RECORD_SAMPLE(") {
            // The flags, the task, the address.
            address = rest.split_whitespace().filter_map(|word| word.strip_prefix("0x")).nth(1);
        } else if let Some(value) = line.trim().strip_prefix(arch::PERF_ADDRESS) {
            let value = value.trim_start_matches('0');
            equal += usize::from(address == Some(value));
        }
    }
    ensure_eq!(equal, samples, "samples whose address is in their registers");
    Ok(())
}

#[apply(guest_test)]
fn top_names_the_hot_function() -> Outcome {
    let mut hot = Command::new("workload").args(["spin", "86400000"]).spawn()?;
    let top = top_until_named(hot.id());
    hot.kill()?;
    hot.wait()?;
    top
}

/// Waits until `perf top` shows the function in which a process spends its time.
fn top_until_named(process: u32) -> Outcome {
    let process = process.to_string();
    let mut top = command(&["top", "--stdio", "-d", "1", "-F", "100", "-e", "vpmu/cpu-clock/u", "-p", &process])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let output = BufReader::new(top.stdout.take().ok_or("no output")?);
    let mut said = Vec::new();
    let mut found = false;
    for line in output.lines() {
        let line = line?;
        found = line.contains("workload") && line.contains("spin");
        said.push(line);
        // `perf top` prints some 10 lines a second, so 1000 lines take more than a minute.
        if found || said.len() > 1000 {
            break;
        }
    }
    top.kill()?;
    top.wait()?;
    ensure!(found, "spin is not in:\n{}", said.join("\n"));
    Ok(())
}

/// The device interrupts the driver each time half of the driver's 64 KiB ring is full. With 48-byte records, that is
/// about every 680 samples.
#[apply(guest_test)]
fn interrupts_of_a_recording_are_one_for_many_samples() -> Outcome {
    let mut perf = Controlled::start("few", &["-a", "-e", MARK_3, "-c", "1"])?;
    perf.say("enable")?;
    let before = interrupt::taken()?;
    let status = Command::new("guest-tests").args(["mark", "3", "3000"]).status()?;
    ensure!(status.success(), "the marks: {status}");
    let interrupts = interrupt::taken()? - before;
    perf.say("disable")?;
    perf.stop()?;
    ensure_eq!(script("few", "comm")?.len(), 3000, "samples");
    ensure!(interrupts <= 3000 / 60, "{interrupts} interrupts for 3000 samples");
    Ok(())
}

#[apply(guest_test)]
fn cpu_that_goes_offline_ends_only_its_part() -> Outcome {
    const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";
    let mut marker = Marker::start("3")?;
    let mut perf = Controlled::start("hotplug", &["-a", "-e", MARK_3, "-c", "1"])?;
    perf.say("enable")?;
    marker.place(10)?;
    fs::write(ONLINE, "0")?;
    marker.place(10)?;
    fs::write(ONLINE, "1")?;
    // perf's event on CPU 1 ended when that CPU went offline. So this moves the marker to CPU 0, which stayed online.
    let id = marker.process.id().to_string();
    let status = Command::new("taskset").args(["-p", "1", &id]).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "taskset: {status}");
    marker.place(10)?;
    perf.say("disable")?;
    perf.stop()?;
    ensure_eq!(script("hotplug", "comm")?.len(), 30, "samples");
    Ok(())
}

#[apply(guest_test)]
fn hardware_events_without_host_counters_fall_back() -> Outcome {
    // On a host with hardware counters, the device provides the hardware events, so perf does not fall back to
    // `cpu-clock`.
    let counted = vpmu_client::Vpmu::open()?.catalogue().entries().iter().any(|entry| entry.name == "cycles");
    for event in [&[][..], &["-e", "cycles"]] {
        record("fallback", &[event, &["--", "workload", "spin", "50"]].concat())?;
        let said = shown(&["evlist", "-i", "fallback"])?;
        let expected = if counted { "cycles" } else { "cpu-clock" };
        ensure!(said.starts_with(expected), "{event:?} did not record {expected}: {said}");
    }
    for event in ["instructions", "L1-dcache-load-misses", "r1234"] {
        let output = perf(&["stat", "-x,", "-e", event, "--", "true"])?;
        let said = text(&output.stderr);
        ensure!(counted || said.starts_with("<not supported>,"), "{event} is supported without host counters: {said}");
    }
    for (kind, config) in [(0, 0), (0, 1), (3, 0x1_0000), (4, 0x1234)] {
        let error = os::open_perf_event(kind, config).err().and_then(|e| e.raw_os_error());
        ensure!(counted || error == Some(libc::ENOENT), "errno for type {kind}, config {config:#x}: {error:?}");
    }
    Ok(())
}

/// Runs perf as an unprivileged user, with `kernel.perf_event_paranoid` at 2, the default of most kernels.
fn as_nobody(args: &[&str]) -> Fallible<Output> {
    os::set_paranoid(2)?;
    let directory = "/tmp/nobody";
    fs::create_dir_all(directory)?;
    std::os::unix::fs::chown(directory, Some(NOBODY), Some(NOBODY))?;
    let mut perf = command(args);
    perf.current_dir(directory).env("HOME", directory);
    Ok(perf.uid(NOBODY).gid(NOBODY).output()?)
}

#[apply(guest_test)]
fn users_without_privilege_sample_their_own_mode() -> Outcome {
    let spin = ["--", "workload", "spin", "300"];
    let args = ["record", "-o", "user", "-e", "vpmu/cpu-clock/", "-c", "1000000"];
    let output = as_nobody(&[&args[..], &spin].concat())?;
    ensure!(output.status.success(), "perf record failed: {}", text(&output.stderr));
    let lines = script("nobody/user", "ip")?;
    ensure!(!lines.is_empty(), "the recording has no samples");
    let kernel = lines.iter().find(|line| line.len() == 16 && line.starts_with("ffff"));
    ensure!(kernel.is_none(), "a sample has an address of the kernel: {kernel:?}");
    // For this user, perf excludes the kernel. So exits and marks count only in user mode. Clocks still count in both
    // modes, as perf's own clocks do.
    for (event, expected) in
        [("vpmu/exits-user/", None), ("vpmu/mark,event=3/", Some("0")), ("vpmu/task-clock/", None), ("vpmu/tsc/", None)]
    {
        let output = as_nobody(&["stat", SEPARATED, "-e", event, "--", "guest-tests", "mark", "3", "7"])?;
        let row = only(rows(&text(&output.stderr)))?;
        ensure!(row.value.parse::<f64>().is_ok(), "{event} has no count: {row:?}");
        // A mark by a system call comes from kernel mode, because the driver places it.
        ensure!(expected.is_none_or(|expected| expected == row.value), "{event} has a wrong count: {row:?}");
    }
    Ok(())
}

#[apply(guest_test)]
fn users_without_privilege_learn_what_they_lack() -> Outcome {
    for event in ["vpmu/exits/", "vpmu/halts/"] {
        let output = as_nobody(&["stat", "-e", event, "--", "true"])?;
        let said = text(&output.stderr);
        ensure!(!output.status.success(), "{event} was counted: {said}");
        ensure!(said.contains("perf_event_paranoid"), "perf does not name perf_event_paranoid for {event}: {said}");
    }
    Ok(())
}

#[apply(guest_test)]
fn refused_requests_have_the_errno_that_perf_expects() -> Outcome {
    // The first event requests precise_ip, and the second cannot sample. The other two request sample fields that the
    // device does not have.
    for (event, option) in [
        ("vpmu/cpu-clock/p", "-d"),
        ("vpmu/halts/", "-d"),
        ("vpmu/cpu-clock/", "--phys-data"),
        ("vpmu/cpu-clock/", "--all-cgroups"),
    ] {
        let args = ["record", "-o", "refused", option, "-e", event, "-c", "1000000", "--", "true"];
        let output = perf(&args)?;
        let said = text(&output.stderr);
        ensure!(!output.status.success(), "{event} {option} was accepted");
        ensure!(
            said.contains("doesn't support sampling/overflow-interrupts"),
            "perf refuses {event} {option} for another reason: {said}"
        );
    }
    Ok(())
}

#[apply(guest_test)]
fn traces_name_the_tool_that_reads_them() -> Outcome {
    let event = "vpmu/exit-trace-user/";
    let output = perf(&["record", "-o", "trace", "-a", "-e", event, "--", "true"])?;
    ensure!(!output.status.success(), "perf record accepted a trace");
    let log = kernel_log::log()?;
    ensure!(log.contains("use vperf exits"), "the log does not name vperf exits:\n{log}");
    Ok(())
}

/// A shell command: places 5 marks, moves its shell to the cgroup `counted`, and places 11 marks.
const JOINING: &str = "guest-tests mark 3 5; echo $$ > /tmp/groups/counted/cgroup.procs; guest-tests mark 3 11";

/// Mounts the cgroups, unless another test has mounted them, and creates `counted`.
fn make_group() -> Outcome {
    fs::create_dir_all("/tmp/groups")?;
    if !Path::new("/tmp/groups/cgroup.procs").exists() {
        os::mount_groups(c"/tmp/groups")?;
    }
    fs::create_dir_all("/tmp/groups/counted")?;
    Ok(())
}

#[apply(guest_test)]
fn cgroup_counts_its_members_alone() -> Outcome {
    make_group()?;
    let args = ["-a", "-e", MARK_3, "-G", "counted", "--", "sh", "-c", JOINING];
    ensure_eq!(row_of(&stat(&args)?, MARK_3)?.value, "11", "marks of the cgroup");
    record("group", &[&["-c", "1"], &args[..]].concat())?;
    ensure_eq!(script("group", "comm")?.len(), 11, "samples");
    Ok(())
}

/// Each CPU has two events: a count of all tasks, and the cgroup's event, which perf core adds only while a member of
/// the cgroup runs. The count of all tasks continues after the recording, for longer than the driver's replay interval.
#[apply(guest_test)]
fn cgroup_beside_a_count_of_all_tasks_counts_its_members_alone() -> Outcome {
    make_group()?;
    let recording = format!("perf record -o both -c 1 -a -e {MARK_3} -G counted -- sh -c '{JOINING}' && sleep 0.5");
    let args = ["stat", SEPARATED, "-o", "all", "-a", "-e", MARK_3, "--"];
    let output = perf(&[&args[..], &["sh", "-c", &recording]].concat())?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf failed: {said}");
    ensure_eq!(script("both", "comm")?.len(), 11, "samples");
    let all = rows(&fs::read_to_string("/tmp/all")?);
    ensure_eq!(row_of(&all, MARK_3)?.value, "16", "marks of all tasks");
    Ok(())
}
