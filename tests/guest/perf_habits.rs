//! More uses of stock perf: options that select what `perf stat` counts and how it prints the counts, and uses of `perf
//! record` beyond a single plain recording.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Barrier;
use std::thread;

use serde_json::Value;
use vpmu_client::Vpmu;

use crate::ensure::{ensure, ensure_eq};
use crate::perf_command::{
    Controlled, MARK_3, MARK_4, Marker, Row, SEPARATED, command, count, perf, record, row_of, rows, script, shown,
    stat, tally,
};
use crate::programs::{json, text};
use crate::raw::Device;
use crate::{Fallible, Outcome, known_code, os};

const GROUP: &str = "stock-perf";

/// Number of marks that each thread of [`place_by_threads`] places in one round, first thread first.
const BY_THREADS: [u32; 3] = [3, 5, 7];

/// `guest-tests threads [in-turn]`: three threads place one round of marks. With `in-turn`, the threads place a round
/// for each byte that the program reads. The program outputs the byte after the round.
pub(crate) fn place_by_threads(rounds: Option<&str>) -> ExitCode {
    let endless = rounds == Some("in-turn");
    let place = || -> Outcome {
        let vpmu = Vpmu::open()?;
        let [first, others @ ..] = BY_THREADS;
        let (begin, end) = (Barrier::new(3), Barrier::new(3));
        thread::scope(|scope| -> Outcome {
            for times in others {
                let (vpmu, begin, end) = (&vpmu, &begin, &end);
                scope.spawn(move || {
                    loop {
                        begin.wait();
                        if let Err(error) = (0..times).try_for_each(|_| vpmu.mark(3)) {
                            eprintln!("{error}");
                            std::process::exit(1);
                        }
                        end.wait();
                        if !endless {
                            break;
                        }
                    }
                });
            }
            loop {
                let mut turn = [0];
                if endless && io::stdin().read_exact(&mut turn).is_err() {
                    // The other threads would wait forever.
                    std::process::exit(0);
                }
                begin.wait();
                (0..first).try_for_each(|_| vpmu.mark(3))?;
                end.wait();
                if !endless {
                    return Ok(());
                }
                io::stdout().write_all(&turn)?;
                io::stdout().flush()?;
            }
        })
    };
    match place() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A process with three threads, which place marks when the process reads a byte.
struct Threads(Child);

impl Threads {
    fn start() -> Fallible<Self> {
        let process = Command::new("guest-tests")
            .args(["threads", "in-turn"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut threads = Self(process);
        // After a round all threads exist.
        threads.round()?;
        Ok(threads)
    }

    fn round(&mut self) -> Outcome {
        self.0.stdin.as_mut().ok_or("no input")?.write_all(b"x")?;
        let output = self.0.stdout.as_mut().ok_or("no output")?;
        output.read_exact(&mut [0])?;
        Ok(())
    }

    /// The thread ids in ascending order. The initial thread has the lowest id.
    fn ids(&self) -> Fallible<Vec<String>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id()))?;
        let mut ids = Vec::new();
        for task in tasks {
            ids.push(task?.file_name().to_string_lossy().parse::<u32>()?);
        }
        ids.sort_unstable();
        Ok(ids.iter().map(u32::to_string).collect())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `perf stat` with these options during `work`. Returns the subject and the count in each of its rows.
fn counts_during(args: &[&str], work: impl FnOnce() -> Outcome) -> Fallible<Vec<(String, String)>> {
    let mut stat = Controlled::stat(&[args, &["-e", MARK_3]].concat())?;
    stat.say("enable")?;
    work()?;
    stat.say("disable")?;
    Ok(stat.rows()?.into_iter().map(|row| (row.subject.unwrap_or_default(), row.value)).collect())
}

#[apply(guest_test)]
fn stat_of_a_process_counts_its_threads_together() -> Outcome {
    let mut threads = Threads::start()?;
    let process = threads.0.id().to_string();
    let ids = threads.ids()?;
    ensure_eq!(ids.len(), 3, "threads of the process");
    let all: u32 = BY_THREADS.iter().sum();
    let rounds = 4;
    for (option, id, expected) in [("-p", &process, all), ("-t", &ids[0], BY_THREADS[0])] {
        let counts = counts_during(&[option, id], || (0..rounds).try_for_each(|_| threads.round()))?;
        ensure_eq!(counts, [(String::new(), (expected * rounds).to_string())], "counts with {option}");
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_per_thread_counts_each_thread() -> Outcome {
    let mut threads = Threads::start()?;
    let process = threads.0.id().to_string();
    let of_threads = counts_during(&["--per-thread", "-p", &process], || threads.round())?;
    let mut counts = Vec::new();
    for (thread, count) in &of_threads {
        ensure!(thread.starts_with("guest-tests-"), "{thread} is not a thread of guest-tests");
        counts.push(count.parse::<u32>().map_err(|e| format!("{e}: {count}"))?);
    }
    counts.sort_unstable();
    ensure_eq!(counts, BY_THREADS, "counts of the threads: {of_threads:?}");
    Ok(())
}

/// perf prints only threads whose count is not zero.
#[apply(guest_test)]
fn stat_per_thread_of_all_cpus_finds_the_thread() -> Outcome {
    let mut marker = Marker::start("3")?;
    marker.place(2)?;
    let counts = counts_during(&["--per-thread", "-a"], || marker.place(11))?;
    ensure_eq!(counts, [(format!("guest-tests-{}", marker.process.id()), "11".to_owned())], "counts of threads");
    Ok(())
}

#[apply(guest_test)]
fn stat_of_a_command_counts_its_threads_unless_left_out() -> Outcome {
    let command = ["--", "guest-tests", "threads"];
    let all: u32 = BY_THREADS.iter().sum();
    for (option, expected) in [(&[][..], all), (&["--no-inherit"], BY_THREADS[0])] {
        let counted = count(&[option, &["-e", MARK_3], &command].concat())?;
        ensure_eq!(counted, u64::from(expected), "the count with {option:?}");
    }
    Ok(())
}

/// perf sets `enable_on_exec`, so the kernel enables the events at the exec.
#[apply(guest_test)]
fn stat_of_a_command_begins_with_its_exec() -> Outcome {
    let output = perf(&["stat", "-vv", "-e", MARK_3, "--", "guest-tests", "mark", "3", "8"])?;
    let said = text(&output.stderr);
    ensure!(said.contains("enable_on_exec"), "perf does not set enable_on_exec: {said}");
    let events = ["-e", MARK_3, "-e", "vpmu/marks/"];
    for times in ["0", "8"] {
        for row in stat(&[&events[..], &["--", "guest-tests", "mark", "3", times]].concat())? {
            ensure_eq!(row.value, times, "the count of {}", row.event);
        }
    }
    Ok(())
}

#[apply(guest_test)]
fn stat_with_a_delay_counts_what_follows_it() -> Outcome {
    // The script places the marks after perf has printed that its events are enabled.
    let _ = fs::remove_file("/tmp/delayed");
    let script = "until grep -q 'Events enabled' /tmp/delayed; do sleep 0.05; done; \
        guest-tests mark 3 5";
    let errors = fs::File::create("/tmp/delayed")?;
    let status =
        command(&["stat", SEPARATED, "-D", "1", "-e", MARK_3, "--", "sh", "-c", script]).stderr(errors).status()?;
    let said = fs::read_to_string("/tmp/delayed")?;
    ensure!(status.success(), "perf stat failed: {said}");
    ensure_eq!(row_of(&rows(&said), MARK_3)?.value, "5", "marks after the delay");
    // If all marks come before the delay ends, perf prints `<not counted>` rather than zero.
    let rows = stat(&["-D", "80000", "-e", MARK_3, "--", "guest-tests", "mark", "3", "5"])?;
    ensure_eq!(row_of(&rows, MARK_3)?.value, "<not counted>", "marks before the delay ends");
    Ok(())
}

#[apply(guest_test)]
fn stat_controlled_counts_what_was_enabled() -> Outcome {
    let mut marker = Marker::start("3")?;
    let mut stat = Controlled::stat(&["-a", "-e", MARK_3])?;
    for round in 1..=3 {
        marker.place(4)?;
        stat.say("enable")?;
        marker.place(round)?;
        stat.say("disable")?;
    }
    ensure_eq!(row_of(&stat.rows()?, MARK_3)?.value, "6", "marks while the event was enabled");
    Ok(())
}

#[apply(guest_test)]
fn stat_repeated_has_the_mean_of_equal_counts() -> Outcome {
    let rows = stat(&["-r", "3", "-e", MARK_3, "--", "guest-tests", "mark", "3", "7"])?;
    let row = row_of(&rows, MARK_3)?;
    // The deviation follows the event.
    ensure_eq!((row.value.as_str(), row.rest[0].as_str()), ("7", "0.00%"), "the mean and the deviation: {row:?}");
    let output = perf(&["stat", "-r", "3", "-e", MARK_3, "--", "guest-tests", "mark", "3", "7"])?;
    let said = text(&output.stderr);
    ensure!(said.contains("(3 runs)"), "perf does not report three runs: {said}");
    Ok(())
}

#[apply(guest_test)]
fn stat_in_json_has_each_count() -> Outcome {
    let marks = ["--", "taskset", "2", "guest-tests", "mark", "3", "7"];
    let events = ["-e", MARK_3, "-e", MARK_4];
    for (scope, expected) in [
        (&[][..], &[("", MARK_3, 7.0), ("", MARK_4, 0.0)][..]),
        (&["-a", "-A"], &[("0", MARK_3, 0.0), ("1", MARK_3, 7.0), ("0", MARK_4, 0.0), ("1", MARK_4, 0.0)]),
    ] {
        let output = perf(&[&["stat", "-j"], scope, &events, &marks].concat())?;
        let said = text(&output.stderr);
        let mut counts = Vec::new();
        for line in said.lines() {
            let value = json(line.as_bytes())?;
            let word = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
            let count: f64 = word("counter-value").parse()?;
            let share = value["pcnt-running"].as_f64();
            ensure_eq!(share, Some(100.0), "percentage of the time that an event ran: {said}");
            ensure!(value["event-runtime"].as_u64() > Some(0), "an event never ran: {said}");
            let cpu = match &value["cpu"] {
                Value::Null => String::new(),
                cpu => cpu.as_str().unwrap_or_default().to_owned(),
            };
            counts.push((cpu, word("event"), count));
        }
        let expected: Vec<_> =
            expected.iter().map(|&(cpu, event, count)| (cpu.to_owned(), event.to_owned(), count)).collect();
        ensure_eq!(counts, expected, "counts with {scope:?}");
    }
    Ok(())
}

/// Mounts the unified hierarchy of cgroups, and enables a controller in it. Without both, the kernel does not count
/// events per cgroup of this hierarchy. Other systems do both at boot.
#[apply(guest_test)]
fn stat_of_each_cgroup_counts_its_members() -> Outcome {
    fs::create_dir_all("/tmp/unified")?;
    os::mount(c"cgroup2", c"/tmp/unified")?;
    fs::write("/tmp/unified/cgroup.subtree_control", "+pids")?;
    let member = |group: &str, times: u32| {
        format!("sh -c 'echo $$ > /tmp/unified/{group}/cgroup.procs; guest-tests mark 3 {times}'; ")
    };
    for group in ["one", "two", "idle"] {
        fs::create_dir_all(format!("/tmp/unified/{group}"))?;
    }
    let shell = format!("{}{}guest-tests mark 3 2", member("one", 4), member("two", 9));
    let expected = [("4", "one"), ("9", "two"), ("<not counted>", "idle")];
    let check = |rows: &[Row]| -> Outcome {
        // The cgroup follows the event.
        let counts: Vec<(&str, &str)> = rows.iter().map(|row| (row.value.as_str(), row.rest[0].as_str())).collect();
        ensure_eq!(counts, expected, "counts of the cgroups");
        Ok(())
    };
    let each = ["-a", "-e", MARK_3, "--for-each-cgroup", "one,two,idle"];
    check(&stat(&[&each[..], &["--", "sh", "-c", &shell]].concat())?)?;
    let events = [MARK_3; 3].join(",");
    let named = ["-a", "-e", &events, "-G", "one,two,idle"];
    check(&stat(&[&named[..], &["--", "sh", "-c", &shell]].concat())?)
}

/// Groups of our events and the kernel's software events, with either kind as the leader.
#[apply(guest_test)]
fn stat_of_mixed_groups_counts_both_kinds() -> Outcome {
    for events in [
        format!("{{task-clock,{MARK_3},page-faults,{MARK_4}}}"),
        format!("{{{MARK_3},task-clock,{MARK_4},page-faults}}"),
    ] {
        let shell = "guest-tests mark 3 6; guest-tests mark 4 8";
        let rows = stat(&["-e", &events, "--", "sh", "-c", shell])?;
        for (event, expected) in [(MARK_3, Some("6")), (MARK_4, Some("8")), ("page-faults", None)] {
            let row = row_of(&rows, event)?;
            let right = match expected {
                Some(expected) => row.value == expected,
                None => row.value.parse::<u64>().is_ok_and(|faults| faults > 0),
            };
            ensure!(right && row.share() == "100.00", "{events}: a count is wrong or partial: {row:?}");
        }
    }
    Ok(())
}

pub(crate) fn is_counted(event: &str) -> Fallible<bool> {
    let catalogue = Vpmu::open()?;
    let entries = catalogue.catalogue().entries();
    Ok(entries.iter().any(|entry| entry.name == event))
}

#[apply(guest_test)]
fn stat_without_events_names_what_is_not_supported() -> Outcome {
    // On a host with hardware counters, the device provides perf's default hardware events.
    let counted = is_counted("cycles")?;
    let rows = stat(&["-d", "--", "guest-tests", "mark", "3", "5"])?;
    for event in ["task-clock", "context-switches", "cpu-migrations", "page-faults"] {
        let row = row_of(&rows, event)?;
        ensure!(row.value.parse::<f64>().is_ok(), "{event} has no count: {row:?}");
    }
    for event in ["cycles", "instructions", "branch-misses", "L1-dcache-loads"] {
        let row = row_of(&rows, event)?;
        ensure!(counted || row.value == "<not supported>", "{event} is supported without host counters: {row:?}");
    }
    Ok(())
}

/// `P` asks perf for the highest precision that the event has. perf tries to open the event with the highest level
/// first, then with each lower one.
#[apply(guest_test)]
fn record_asked_for_any_precision_samples_without() -> Outcome {
    let marks = ["-c", "1", "--", "guest-tests", "mark", "3", "20"];
    record("any", &[&["-e", "vpmu/mark,event=3/P"], &marks[..]].concat())?;
    ensure_eq!(script("any", "comm")?.len(), 20, "samples");
    let said = shown(&["evlist", "-v", "-i", "any"])?;
    ensure!(!said.contains("precise_ip"), "the recording's event has precise_ip: {said}");
    Ok(())
}

#[apply(guest_test)]
fn record_asked_for_precision_names_the_lack() -> Outcome {
    for modifier in ["p", "pp", "ppp"] {
        let event = format!("{MARK_3}{modifier}");
        let args = ["record", "-o", "precise", "-e", &event, "-c", "1", "--", "true"];
        let output = perf(&args)?;
        let said = text(&output.stderr);
        ensure!(!output.status.success(), "{event} was accepted");
        let expected = format!("{event}: PMU Hardware doesn't support sampling");
        ensure!(said.contains(&expected), "perf does not refuse {event} with {expected:?}: {said}");
        let rows = stat(&["-e", &event, "--", "guest-tests", "mark", "3", "2"])?;
        ensure_eq!(row_of(&rows, &event)?.value, "<not supported>", "the count of {event}");
    }
    Ok(())
}

/// `guest-tests deep DEPTH`: places one mark of value 3 below `DEPTH` nested calls.
pub(crate) fn place_deep(depth: &str) -> ExitCode {
    let placed = depth.parse().map_err(|error| format!("{depth}: {error}")).and_then(|depth| {
        let device = Device::open().map_err(|error| error.to_string())?;
        known_code::deep(depth, device.as_raw_fd(), 3);
        Ok(())
    });
    match placed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// `kernel.perf_event_max_stack` permits deeper call chains than perf's default of 127 addresses.
#[apply(guest_test)]
fn record_of_a_deep_stack_has_every_caller() -> Outcome {
    const LIMIT: &str = "/proc/sys/kernel/perf_event_max_stack";
    let usual = fs::read_to_string(LIMIT)?;
    fs::write(LIMIT, "1024")?;
    for (most, depth, shown_addresses) in [(1024, 599, 600), (600, 700, 600), (16, 700, 16)] {
        let event = format!("vpmu/mark,event=3,max-stack={most}/");
        let command = ["--", "guest-tests", "deep", &depth.to_string()];
        let args = ["-g", "--user-callchains", "-e", &event, "-c", "1"];
        record("deep", &[&args[..], &command[..]].concat())?;
        let addresses = shown(&["script", "-i", "deep", "-F", "ip", "--max-stack", "1024"])?;
        let addresses = addresses.lines().filter(|line| !line.trim().is_empty()).count();
        ensure_eq!(addresses, shown_addresses, "addresses of a chain of at most {most} below {depth} calls");
    }
    // Longer chains than the device has are refused, not cut.
    fs::write(LIMIT, "2048")?;
    let output = perf(&["record", "-o", "deep", "-g", "-e", MARK_3, "-c", "1", "--", "true"])?;
    ensure!(!output.status.success(), "a chain of 2,048 addresses was accepted");
    let said = text(&output.stderr);
    ensure!(said.contains("Value too large"), "perf does not report EOVERFLOW: {said}");
    fs::write(LIMIT, usual.trim())?;
    Ok(())
}

/// With `-s`, perf core writes a `PERF_RECORD_READ` with the count of each task when the task ends. It must write as
/// many of these records for our events as for the kernel's own.
#[apply(guest_test)]
fn record_with_threads_counts_has_the_kernels_records() -> Outcome {
    let shell = "guest-tests mark 3 5; guest-tests mark 3 6";
    let mut records = Vec::new();
    for event in [MARK_3, "page-faults"] {
        let args = ["-s", "-T", "-e", event, "-c", "1", "--", "sh", "-c", shell];
        record("counts", &args)?;
        let dump = shown(&["report", "-i", "counts", "-D"])?;
        records.push(dump.matches("PERF_RECORD_READ").count());
        if event == MARK_3 {
            ensure_eq!(script("counts", "comm")?.len(), 11, "samples");
        }
        shown(&["report", "-T", "--stdio", "-i", "counts"])?;
    }
    ensure_eq!(records[0], records[1], "records of counts, of our events and of the kernel's");
    Ok(())
}

#[apply(guest_test)]
fn record_that_overwrites_keeps_the_newest() -> Outcome {
    // The ring of one page has room for about 100 samples. The marks of value 4 come last, so the ring must have all of
    // them, and only some of the earlier marks of value 3.
    let shell = "guest-tests mark 3 300; guest-tests mark 4 20";
    let options = ["--overwrite", "-m", "1", "-d", "-C", "1", "-e", "vpmu/marks/", "-c", "1"];
    let command = ["--", "taskset", "2", "sh", "-c", shell];
    record("newest", &[&options[..], &command].concat())?;
    let lines = script("newest", "addr")?;
    let values: Vec<u64> = lines.iter().map(|line| u64::from_str_radix(line.trim(), 16)).collect::<Result<_, _>>()?;
    let older = values.iter().filter(|&&value| value == 3).count();
    ensure_eq!(values.len() - older, 20, "marks of value 4 among {values:?}");
    ensure!(0 < older && older < 300, "{older} older marks, expected some of the 300");
    ensure!(values.is_sorted(), "the values are not in order: {values:?}");
    Ok(())
}

#[apply(guest_test)]
fn record_that_switches_files_loses_no_sample() -> Outcome {
    let mut marker = Marker::start("3")?;
    let _ = fs::remove_dir_all("/tmp/switched");
    fs::create_dir("/tmp/switched")?;
    let options = ["--switch-output=signal", "-a", "-e", MARK_3, "-c", "1"];
    let mut perf = Controlled::start("switched/data", &options)?;
    perf.say("enable")?;
    for round in 1..=2 {
        marker.place(30)?;
        perf.signal("-USR2")?;
        // perf gives the file its final name only when the file is complete.
        while fs::read_dir("/tmp/switched")?.count() <= round {
            thread::yield_now();
        }
    }
    marker.place(30)?;
    perf.say("disable")?;
    perf.stop()?;
    let mut sizes = Vec::new();
    for file in fs::read_dir("/tmp/switched")? {
        let path = file?.path();
        sizes.push(script(&path.to_string_lossy(), "comm")?.len());
    }
    ensure!(sizes.len() > 2, "only {} files", sizes.len());
    ensure_eq!(sizes.iter().sum::<usize>(), 90, "samples of {sizes:?}");
    Ok(())
}

#[apply(guest_test)]
fn report_has_every_sample_under_its_symbol() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "40"];
    record("symbols", &[&["-e", MARK_3, "-c", "1"], &marks[..]].concat())?;
    let args = ["report", "-i", "symbols", "--stdio", "-n", "-F", "sample,period,comm,dso"];
    let output = perf(&[&args[..], &["-t", ","]].concat())?;
    let said = text(&output.stdout);
    let lines: Vec<Vec<&str>> = said
        .lines()
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|line| line.split(',').map(str::trim).collect())
        .collect();
    // The module places the mark.
    ensure_eq!(lines, [["40", "40", "guest-tests", "[virtio_pmu]"]], "lines of perf report: {said}");
    Ok(())
}

/// perf has objdump disassemble the program.
#[apply(guest_test)]
fn annotate_names_the_hot_instructions() -> Outcome {
    let spin = ["--", "workload", "spin", "300"];
    record("hot", &[&["-e", "vpmu/cpu-clock/u", "-c", "1000000"], &spin[..]].concat())?;
    let said = shown(&["annotate", "-i", "hot", "--stdio", "-s", "workload::spin"])?;
    let mut share = 0.0;
    for line in said.lines() {
        let Some((percent, rest)) = line.split_once(" :") else {
            continue;
        };
        // The address and the instruction.
        let address = rest.trim_start().split_once(':').map_or("", |(word, _)| word);
        let is_instruction = u64::from_str_radix(address, 16).is_ok();
        if let (Ok(percent), true) = (percent.trim().parse::<f64>(), is_instruction) {
            share += percent;
        }
    }
    ensure!((99.0..101.0).contains(&share), "the instructions have {share} %, not 100 %:\n{said}");
    Ok(())
}

#[apply(guest_test)]
fn tracepoints_and_marks_are_in_one_recording() -> Outcome {
    let exec = "sched:sched_process_exec";
    let shell = "guest-tests mark 3 50; guest-tests mark 3 50";
    let args = ["-c", "1", "-e", exec, "-e", MARK_3, "--", "sh", "-c", shell];
    record("both", &args)?;
    let lines = script("both", "event")?;
    let (traced, marked) = (format!("{exec}:"), format!("{MARK_3}:"));
    // The recording has at least the execs of the shell's two commands. The exec of the shell itself may precede the
    // recording.
    let tally = tally(&lines);
    ensure_eq!(tally.get(marked.as_str()), Some(&100), "marks: {tally:?}");
    ensure!(tally.get(traced.as_str()) >= Some(&2), "fewer than two execs: {tally:?}");
    Ok(())
}

#[apply(guest_test)]
fn sched_recorded_beside_leaves_counts_exact() -> Outcome {
    let stat = ["perf", "stat", "-x,", "-e", MARK_3, "--", "sh", "-c", "guest-tests mark 3 500 && sleep 0.01"];
    let output = perf(&[&["sched", "record", "-o", "sched", "--"], &stat[..]].concat())?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "perf sched record failed: {said}");
    ensure!(said.lines().any(|line| line.starts_with("500,,")), "perf stat did not count 500 marks: {said}");
    // `timehist` takes a task's name from a sample in which the task is switched out. When a task ends, it is switched
    // out for the last time. In that sample, the thread id is -1 if the parent has already reaped the task. The task
    // that places marks may have no other such sample. So the check looks for `sleep`, which is also switched out
    // before it ends.
    for (action, expected) in [("latency", "guest-tests:"), ("timehist", "sleep[")] {
        let said = shown(&["sched", action, "-i", "sched"])?;
        ensure!(said.contains(expected), "perf sched {action} lacks {expected:?}:\n{said}");
    }
    Ok(())
}
