//! The guest's part of tests in which the host saves and restores the guest. The two vCPUs take turns to print numbered
//! lines, and events record marks at each line.

use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::end_scenarios::say;
use crate::ensure::{ensure, ensure_eq};
use crate::fields::{ADDR, CPU, ID, IDENTIFIER, IP, PERIOD, STREAM_ID, TID, TIME};
use crate::kernel_log::ensure_none_of;
use crate::packets::USER;
use crate::pages::{Pages, READ_WRITE, Record};
use crate::perf_command::{MARK_3, script};
use crate::persisting::{self, values};
use crate::programs::{count, json, text, vperf};
use crate::raw::{
    Device, Doorbell, EXIT_MMIO, Event, FORMAT_ENABLED, FORMAT_RUNNING, How, KIND_EXIT_TRACE, KIND_MARK, KIND_SOFTWARE,
    MARK_ANY, SW_CPU_CLOCK, sampling, silent,
};
use crate::traced::Traced;
use crate::triggers::{Region, START, STOP};
use crate::{Fallible, Outcome, cpu, fields};
use perf_event_open_sys::bindings::perf_event_attr;

/// Number of lines in a run.
pub(crate) const LINES: u32 = 150;
/// Number of lines in a run in which the host saves the guest repeatedly.
pub(crate) const LINES_OF_CYCLES: u32 = 400;
/// The pause between two lines, in which the host can act.
const PAUSE: Duration = Duration::from_millis(20);

/// Prints numbered lines, each with the guest's time in nanoseconds.
pub(crate) fn lines() -> Outcome {
    let (to_other, from_one) = channel();
    let (to_one, from_other) = channel();
    let start = Instant::now();
    let other = move || turns(1, start, &from_one, &to_one).map_err(|e| e.to_string());
    let other = thread::spawn(other);
    to_other.send(1)?;
    turns(0, start, &from_other, &to_other)?;
    drop(to_other);
    other.join().map_err(|_| "a thread panicked")??;
    // The kernel must not report a save as a lockup or as a faulty clock.
    ensure_none_of(&["Marking clocksource"], &[])?;
    say("whole");
    Ok(())
}

/// Runs on CPU `place`, and prints the next line whenever it is this thread's turn.
fn turns(place: usize, start: Instant, mine: &Receiver<u32>, others: &Sender<u32>) -> Outcome {
    cpu::pin(place)?;
    while let Ok(number) = mine.recv() {
        if number <= LINES {
            say(&format!("line {number} {}", start.elapsed().as_nanos()));
            thread::sleep(PAUSE);
        }
        // The send fails only if the other thread has printed the last line and ended.
        if others.send(number + 1).is_err() || number >= LINES {
            break;
        }
    }
    Ok(())
}

/// The value of a line's mark is the line's number plus this number.
const FIRST: u64 = 1_000;
/// Marks of a line.
const MARKS: u64 = 3;
/// Nanoseconds between two samples of the clock.
const TICK: u64 = 1_000_000;

/// Prints lines like [`lines`]. For each line, one vCPU places three marks, and that vCPU's events count, sample or
/// trace them.
pub(crate) fn events(lines: u32) -> Outcome {
    let device = Device::open()?;
    let mut watches = [Watch::open(&device, 0)?, Watch::open(&device, 1)?];
    let bell = Doorbell::map(&device)?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| -> Outcome {
        let flushing = scope.spawn(|| flushes(&over).map_err(|error| error.to_string()));
        let seen = events_of_lines(lines, &device, &bell, &mut watches);
        over.store(true, Ordering::Relaxed);
        flushing.join().map_err(|_| "a thread panicked")??;
        seen
    })?;
    for watch in &mut watches {
        let whole = watch.whole(&device);
        whole.map_err(|error| format!("vCPU {}: {error}", watch.cpu))?;
    }
    let last = watches.iter().map(|watch| watch.newest).max();
    let next = device.open_event(&device.attr(KIND_MARK, MARK_ANY), How::on_cpu(0))?;
    let next = next.id()?;
    ensure!(last.is_some_and(|last| last < next), "id {next} was used again: the last one was {last:?}");
    // Prints the limit on the sampling rate. The driver has read it from the host on which the machine was restored.
    say(&format!("limit {}", Device::open()?.info.max_sample_rate));
    ensure_none_of(&["Marking clocksource"], &[])?;
    say("whole");
    Ok(())
}

fn events_of_lines(lines: u32, device: &Device, bell: &Doorbell, watches: &mut [Watch]) -> Outcome {
    let start = Instant::now();
    for number in 1..=lines {
        let place = (number % 2) as usize;
        cpu::pin(place)?;
        let watch = watches.get_mut(place).ok_or("a vCPU")?;
        let seen = watch.line(device, bell, FIRST + u64::from(number));
        seen.map_err(|error| format!("line {number}: {error}"))?;
        say(&format!("line {number} {}", start.elapsed().as_nanos()));
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// The pause between two flushes, in which other threads use the vCPU.
const BETWEEN_FLUSHES: Duration = Duration::from_millis(5);

/// Flushes a clock repeatedly, so that the host saves the machine during some of the flushes. Each flush must return,
/// and must leave all earlier ticks in the ring, in order.
fn flushes(over: &AtomicBool) -> Outcome {
    let device = Device::open()?;
    cpu::pin(1)?;
    let attr = clock(&device);
    let event = device.start(&attr, How::on_cpu(1))?;
    let mut ring = Pages::map(&event, 64, READ_WRITE)?;
    let mut last = 0;
    while !over.load(Ordering::Relaxed) {
        ensure_eq!(event.flush(0)?, 0, "what the flush returns");
        for tick in ticks(ring.take()?, &attr)? {
            ensure!(last <= tick, "a tick at {tick} after one at {last}");
            last = tick;
        }
        thread::sleep(BETWEEN_FLUSHES);
    }
    ensure!(last > 0, "no tick was recorded");
    Ok(())
}

fn clock(device: &Device) -> perf_event_attr {
    let clock = device.attr(KIND_SOFTWARE, SW_CPU_CLOCK);
    silent(sampling(clock, TICK, TIME))
}

/// The times of a clock's records.
fn ticks(mut records: Vec<Record>, attr: &perf_event_attr) -> Result<Vec<u64>, String> {
    let storms = [fields::THROTTLE, fields::UNTHROTTLE];
    records.retain(|record| !storms.contains(&record.kind));
    let (ticks, _) = fields::samples(&records, attr)?;
    Ok(ticks.iter().filter_map(|tick| tick.time).collect())
}

/// Prints lines like [`lines`]. At each line, four programs place one mark each. Each program is measured by its own
/// tool.
pub(crate) fn tools() -> Outcome {
    let record = ["perf", "record", "-o", "lines", "-d", "-T", "-e", MARK_3, "-c", "1"];
    let own_record = ["vperf", "record", "-o", "lines.vperf", "-e", "mark=3", "-c", "1"];
    let commands = [
        &["perf", "stat", "-x,", "-e", MARK_3][..],
        &record,
        &["vperf", "stat", "--json", "-e", "mark=3"],
        &own_record,
    ];
    let tools = commands.into_iter().map(Tool::start);
    let mut tools = tools.collect::<Fallible<Vec<Tool>>>()?;
    let start = Instant::now();
    for number in 1..=LINES {
        for tool in &mut tools {
            tool.turn()?;
        }
        say(&format!("line {number} {}", start.elapsed().as_nanos()));
        thread::sleep(PAUSE);
    }
    let outputs = tools.into_iter().map(Tool::finish);
    let outputs = outputs.collect::<Fallible<Vec<Output>>>()?;
    let [counted, _, own_counted, _] = outputs.as_slice() else {
        return Err("not four tools".into());
    };
    let counted = text(&counted.stderr);
    let line = counted.lines().find(|line| line.contains(MARK_3));
    let line = line.ok_or_else(|| format!("no count in {counted}"))?;
    ensure!(
        line.starts_with(&format!("{LINES},")) && line.contains(",100.00,"),
        "perf stat did not count {LINES} marks all the time: {line}"
    );
    whole_recording(&script("lines", "time,addr,period")?)?;
    let own_counted = json(&own_counted.stdout)?;
    let value = count(&own_counted, "mark=3");
    ensure_eq!(value, Some(LINES.into()), "marks that vperf stat counted: {own_counted}");
    let report = vperf(&["report", "-i", "lines.vperf", "--json"])?;
    let report = &json(&report.stdout)?["events"][0];
    ensure!(
        report["samples"] == LINES && report["lost"] == 0,
        "vperf record did not sample {LINES} marks, or lost some: {report}"
    );
    ensure_none_of(&["Marking clocksource"], &[])?;
    say("whole");
    Ok(())
}

/// Checks the times, periods and values that perf prints for a recording. The recording must have each mark exactly
/// once, in order.
fn whole_recording(samples: &[String]) -> Outcome {
    ensure_eq!(samples.len(), LINES as usize, "samples of perf record");
    let mut times = Vec::new();
    for sample in samples {
        let words: Vec<&str> = sample.split_ascii_whitespace().collect();
        let [time, "1", "3"] = words.as_slice() else {
            return Err(format!("not a mark of the program: {sample}").into());
        };
        times.push(time.trim_end_matches(':').parse::<f64>()?);
    }
    ensure!(times.is_sorted_by(|one, next| one < next), "the times of the samples are not in order: {times:?}");
    Ok(())
}

/// A tool, which runs and measures a program. The program places one mark each time it gets a turn.
struct Tool(Child);

impl Tool {
    fn start(command: &[&str]) -> Fallible<Self> {
        let (program, arguments) = command.split_first().ok_or("no program")?;
        let lines = LINES.to_string();
        let child = Command::new(program)
            .args(arguments)
            .args(["--", "guest-tests", "mark", "3", &lines, "in-turn"])
            .current_dir("/tmp")
            .env("HOME", "/tmp")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self(child))
    }

    fn turn(&mut self) -> Outcome {
        let mut turn = [b'x'];
        self.0.stdin.as_mut().ok_or("no input")?.write_all(&turn)?;
        let output = self.0.stdout.as_mut().ok_or("no output")?;
        Ok(output.read_exact(&mut turn)?)
    }

    fn finish(self) -> Fallible<Output> {
        let output = self.0.wait_with_output()?;
        ensure!(output.status.success(), "the tool failed: {}", text(&output.stderr));
        Ok(output)
    }
}

/// One event of each sort on a vCPU.
struct Watch {
    cpu: i32,
    /// The values of all marks on the vCPU so far.
    made: Vec<u64>,
    counted: Event,
    /// An event whose records are read only at the end.
    sampled: (Event, Pages),
    /// An event whose records are read at each line, and whose ring wraps.
    followed: (Event, Pages),
    read: Vec<u64>,
    /// An event whose ring becomes full before the last save.
    narrow: (Event, Pages),
    narrow_attr: perf_event_attr,
    /// An event that samples every second mark.
    second: (Event, Pages),
    attr: perf_event_attr,
    region: Region,
    traced: Traced,
    /// Number of traced exits that were caused by this vCPU's marks.
    traced_marks: u64,
    clock: (Event, Pages),
    clock_attr: perf_event_attr,
    enabled: u64,
    /// The id of a persistent event whose ring is in the window. No process has the event open.
    kept: u64,
    newest: u64,
}

impl Watch {
    fn open(device: &Device, cpu: i32) -> Fallible<Self> {
        cpu::pin(usize::try_from(cpu)?)?;
        let how = How::on_cpu(cpu);
        let ring = |attr: &perf_event_attr, pages| -> std::io::Result<(Event, Pages)> {
            let event = device.start(attr, how)?;
            let ring = Pages::map(&event, pages, READ_WRITE)?;
            Ok((event, ring))
        };
        let attr = persisting::sequence(device);
        let mut counting = device.attr(KIND_MARK, MARK_ANY);
        counting.read_format = FORMAT_ENABLED | FORMAT_RUNNING;
        let trace = silent(device.attr(KIND_EXIT_TRACE, EXIT_MMIO));
        let traced = Traced::open(device, trace, how, 32, READ_WRITE)?;
        traced.event.enable(0)?;
        let clock_attr = clock(device);
        let narrow_attr = perf_event_attr {
            sample_type: TIME | ADDR | TID | CPU | ID | STREAM_ID | IDENTIFIER | PERIOD | IP,
            ..attr
        };
        let (kept, id) = persisting::persistent(device, &attr, cpu, &format!("kept-{cpu}"))?;
        drop(Pages::map(&kept, 8, READ_WRITE)?);
        drop(kept);
        let inside = device.attr(KIND_MARK, MARK_ANY);
        Ok(Self {
            cpu,
            made: Vec::new(),
            counted: device.start(&counting, how)?,
            sampled: ring(&attr, 8)?,
            followed: ring(&attr, 1)?,
            read: Vec::new(),
            narrow: ring(&narrow_attr, 1)?,
            narrow_attr,
            second: ring(&silent(device.any_marks(2, TIME | ADDR)), 8)?,
            attr,
            region: Region::of(device, &inside, how)?,
            traced,
            traced_marks: 0,
            clock: ring(&clock_attr, 64)?,
            clock_attr,
            enabled: 0,
            kept: id,
            newest: id,
        })
    }

    /// Places the marks of a line on this vCPU, and checks what the vCPU's events report about these marks.
    fn line(&mut self, device: &Device, bell: &Doorbell, value: u64) -> Outcome {
        let before = device.time_of(cpu::tsc());
        for mark in [START, u32::try_from(value)?, STOP] {
            bell.mark(mark);
            self.made.push(mark.into());
        }
        self.sampled.0.flush(0)?;
        let records = self.followed.1.take()?;
        let followed = values(&records, &self.attr)?;
        self.read.extend(&followed);
        ensure_eq!(followed.len() as u64, MARKS, "number of the records {followed:?}");
        let count = self.made.len() as u64;
        let counted = self.counted.read()?;
        ensure_eq!(counted[0], count, "marks counted");
        ensure!(
            counted[1] == counted[2] && counted[1] > self.enabled,
            "the times in {counted:?} differ, or did not grow from {} ns",
            self.enabled
        );
        self.enabled = counted[1];
        ensure!(before < device.time_of(cpu::tsc()), "the guest's clock goes back");
        // In each region, the target counts the line's mark and the mark that ends the region.
        let target = self.region.target.count()?;
        ensure_eq!(target, count / MARKS * 2, "marks in regions");
        self.traced.read()?;
        let exits = self.traced.take()?;
        self.traced_marks += exits.iter().filter(|exit| exit.flags & USER != 0).count() as u64;
        Ok(())
    }

    /// Checks that every event has seen every mark once.
    fn whole(&mut self, device: &Device) -> Outcome {
        cpu::pin(usize::try_from(self.cpu)?)?;
        ensure_eq!(self.read, self.made, "marks in the ring that is read at each line");
        let sampled = values(&self.sampled.1.take()?, &self.attr)?;
        ensure_eq!(sampled, self.made, "marks in the ring that is read at the end");
        let second = values(&self.second.1.take()?, &self.attr)?;
        let expected: Vec<u64> = self.made.iter().skip(1).step_by(2).copied().collect();
        ensure_eq!(second, expected, "marks in the ring of every second mark");
        ensure_eq!(self.traced_marks, self.made.len() as u64, "marks traced");
        let (count, lost) = self.traced.read()?;
        ensure!(count > 0 && lost == 0, "{count} bytes traced, {lost} lost");
        self.clock.0.flush(0)?;
        let times = ticks(self.clock.1.take()?, &self.clock_attr)?;
        // Ticks that the device finds at the same exit have the same time.
        ensure!(times.is_sorted(), "the ticks are not in order: {times:?}");
        let listed = device.entry(self.kept)?.ok_or("the event that was kept is gone")?;
        ensure_eq!(listed.name(), format!("kept-{}", self.cpu), "the persistent event's name");
        let kept = device.reopen(self.kept, self.cpu)?;
        let pages = listed.data_pages().ok_or("no ring")?;
        let mut ring = Pages::map(&kept, pages, READ_WRITE)?;
        ensure_eq!(values(&ring.take()?, &self.attr)?, self.made, "marks in the persistent event's ring");
        ensure_eq!(kept.count()?, self.made.len() as u64, "the persistent event's count");
        for event in [&self.counted, &self.sampled.0, &self.clock.0, &self.region.target] {
            self.newest = self.newest.max(event.id()?);
        }
        self.lost(device)
    }

    /// Checks the narrow ring, which became full. It must have the first marks, and the next record must report the
    /// others as lost.
    fn lost(&mut self, device: &Device) -> Outcome {
        let marks = |narrow: &mut (Event, Pages), attr| -> Fallible<(Vec<u64>, u64)> {
            let (samples, lost) = fields::samples(&narrow.1.take()?, attr)?;
            Ok((samples.iter().filter_map(|it| it.addr).collect(), lost))
        };
        let (first, none) = marks(&mut self.narrow, &self.narrow_attr)?;
        ensure_eq!(none, 0, "losses reported in a full ring");
        ensure!(
            first.len() < self.made.len() && self.made.starts_with(&first),
            "a full ring's marks {first:?} are not some of the first of {:?}",
            self.made
        );
        Doorbell::map(device)?.mark(START);
        self.made.push(START.into());
        let (next, lost) = marks(&mut self.narrow, &self.narrow_attr)?;
        ensure_eq!(next, [u64::from(START)], "marks after the loss");
        let reported = first.len() as u64 + lost + 1;
        ensure_eq!(reported, self.made.len() as u64, "marks recorded and lost");
        Ok(())
    }
}
