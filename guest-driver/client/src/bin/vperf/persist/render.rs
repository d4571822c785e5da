//! Records of persistent events, as lines of text or as a file. Only processes that still run have names, because no
//! program recorded the names of the others.

use std::fmt::Write as _;
use std::path::Path;

use vpmu_client::attr::SAMPLE_ADDR;
use vpmu_client::history::RingSnapshot;
use vpmu_client::tasks::Clocks;
use vpmu_client::{Persistent, Record, Sample, Vpmu};
use vpmu_perfdata::Event;
use vpmu_profile::{Frame, Mode, Names, Resolver};

use super::PersistError;
use crate::labels::{callers, object, symbol};
use crate::processes::{Change, Processes};
use crate::recording::{Output, event};

/// Records to be shown, from one or more events.
#[derive(Debug)]
pub(super) struct Rendering {
    events: Vec<Event>,
    /// For each event, whether its samples have the address field, which holds an address or a
    /// mark's value.
    with_values: Vec<bool>,
    processes: Processes,
    resolver: Resolver,
    /// The samples in the order in which they were added, each with its event's index.
    samples: Vec<(usize, Sample)>,
    /// Each event's index with a number of lost samples.
    losses: Vec<(usize, u64)>,
    /// Each event's index with the time at which it was throttled.
    throttles: Vec<(usize, u64)>,
    sums: Sums,
}

/// Totals of the added records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) samples: u64,
    pub(super) lost: u64,
}

impl Rendering {
    /// Makes an empty set of records of `events`; records refer to them by index.
    pub(super) fn new(vpmu: &Vpmu, events: &[Persistent]) -> Self {
        Self {
            events: events.iter().enumerate().map(|(index, event)| described(vpmu, index, event)).collect(),
            with_values: events.iter().map(|event| event.attr.sample_type & SAMPLE_ADDR != 0).collect(),
            processes: Processes::new(Path::new("/proc"), Vec::new()),
            resolver: Resolver::new(Names::here()),
            samples: Vec::new(),
            losses: Vec::new(),
            throttles: Vec::new(),
            sums: Sums::default(),
        }
    }

    pub(super) fn sums(&self) -> Sums {
        self.sums
    }

    pub(super) fn add_snapshot(&mut self, event: usize, snapshot: &RingSnapshot) {
        for record in &snapshot.records {
            self.add(event, record);
        }
    }

    pub(super) fn add(&mut self, event: usize, record: &Record) {
        match record {
            Record::Sample(sample) => {
                self.processes.saw(sample.pid, sample.time);
                self.sums.samples += 1;
                self.samples.push((event, sample.clone()));
            }
            Record::Lost { lost, .. } => {
                self.sums.lost = self.sums.lost.saturating_add(*lost);
                self.losses.push((event, *lost));
            }
            Record::Throttle(throttle) => self.throttles.push((event, throttle.time)),
            _ => {}
        }
    }

    /// Looks up the processes seen since the last call.
    fn look(&mut self, vpmu: &Vpmu) -> Result<Vec<Change>, PersistError> {
        let clocks = Clocks::read(vpmu.info());
        self.processes.news(&clocks).map_err(|error| PersistError::Client(error.into()))
    }

    /// Removes the samples and returns them as text, in order of time. The last lines report how
    /// many samples were lost.
    pub(super) fn take_text(&mut self, vpmu: &Vpmu) -> Result<String, PersistError> {
        for change in self.look(vpmu)? {
            if let Change::State(process, _) = change {
                process.apply(&mut self.resolver);
            }
        }
        let mut samples = std::mem::take(&mut self.samples);
        samples.sort_by_key(|(_, sample)| sample.time);
        let mut text = String::new();
        for (event, sample) in &samples {
            let value = (self.with_values.get(*event) == Some(&true)).then_some(sample.addr);
            let name = self.events.get(*event).map_or("", |event| &event.name);
            text += &sample_text(&mut self.resolver, name, sample, value);
        }
        for (event, lost) in std::mem::take(&mut self.losses) {
            let name = self.events.get(event).map_or("", |event| &event.name);
            let _ = writeln!(text, "{name}: {lost} samples lost");
        }
        self.throttles.clear();
        Ok(text)
    }

    /// Writes everything to a file.
    pub(super) fn write(mut self, vpmu: &Vpmu, path: &Path) -> Result<(), PersistError> {
        let changes = self.look(vpmu)?;
        let mut output = Output::create(path, self.events)?;
        for change in &changes {
            output.change(change)?;
        }
        let last = self.samples.iter().map(|(_, sample)| sample.time).max().unwrap_or(0);
        for (event, sample) in &self.samples {
            output.sample(*event, sample, &[])?;
        }
        for (event, lost) in self.losses {
            output.lost(event, lost, last)?;
        }
        for (event, time) in self.throttles {
            output.throttle(event, time)?;
        }
        Ok(output.finish()?)
    }
}

/// Describes an event for the file, by the persistent event's own name, such as `flight-0`, to distinguish it from
/// events that count the same thing on other CPUs.
fn described(vpmu: &Vpmu, index: usize, persistent: &Persistent) -> Event {
    let spec = vpmu.catalogue().spec(vpmu.info().pmu_type, &persistent.attr);
    let entry = vpmu.catalogue().entry(&spec).ok();
    event(index, &persistent.name, entry, &persistent.attr, persistent.overwrites)
}

/// One sample as a line, with its callers on the lines below.
fn sample_text(resolver: &mut Resolver, event: &str, sample: &Sample, value: Option<u64>) -> String {
    let frames: Vec<(u64, Frame)> = sample
        .frames()
        .into_iter()
        .enumerate()
        .map(|(index, frame)| {
            // A caller's address is the return address. Use the byte before it, which is part of the call: if the
            // call is the last instruction of a function, the return address is in the next function.
            let ip = frame.ip.saturating_sub(u64::from(index > 0));
            let mode = if frame.user { Mode::User } else { Mode::Kernel };
            (ip, resolver.frame(sample.pid.cast_signed(), mode, ip))
        })
        .collect();
    let &Sample { pid, tid, cpu, time, period, ip, .. } = sample;
    let comm = resolver.task_name(pid, tid, cpu);
    let (seconds, micros) = (time / 1_000_000_000, time / 1_000 % 1_000_000);
    let value = value.map_or_else(String::new, |value| format!(" {value:#x}"));
    let (symbol_of, object_of) =
        frames.first().map_or_else(Default::default, |(_, frame)| (symbol(frame), object(frame)));
    let mut text = format!(
        "{comm:>16} {tid:>7} [{cpu:03}] {seconds:>6}.{micros:06}: {period:>9} {event}:{value} {ip:16x} {symbol_of} ({object_of})\n"
    );
    let shown = callers(frames.iter().map(|(_, frame)| frame)).len();
    for (ip, frame) in frames.iter().take(shown).skip(1) {
        let _ = writeln!(text, "{:>26}{ip:16x} {}", "", symbol(frame));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::{Map, Process};

    const CONTEXT_USER: u64 = 512_u64.wrapping_neg();

    #[test]
    fn sample_is_one_line_with_callers_below() {
        let map = |start: u64, path: &str| Map { start, end: start + 0x1000, offset: 0, path: path.into() };
        let maps = vec![map(0x1000, "/nonexistent/work"), map(0x2000, "[vdso]")];
        let mut resolver = Resolver::new(Names::none());
        Process { pid: 7, threads: vec![(7, "work".into()), (8, "helper".into())], maps }.apply(&mut resolver);
        let sample = Sample {
            ip: 0x1010,
            pid: 7,
            tid: 8,
            time: 12_003_456_789,
            cpu: 1,
            period: 1000,
            user: true,
            // The call of the second frame is the last instruction of its mapping. No file is at the last frame.
            chain: vec![CONTEXT_USER, 0x1010, 0x2000, 0x2010, 0x9000],
            ..Sample::default()
        };
        assert_eq!(
            sample_text(&mut resolver, "flight-1", &sample, Some(42)),
            "          helper       8 [001]     12.003456:      1000 flight-1: 0x2a             1010 [.] [work] \
             (/nonexistent/work)\n\
             \u{20}                                     1fff [.] [work]\n\
             \u{20}                                     200f [.] [vdso]\n"
        );
        let nobody = Sample { ip: 0x40_1000, pid: 9, tid: 9, time: 5, period: 1, user: true, ..Sample::default() };
        assert_eq!(
            sample_text(&mut resolver, "flight-0", &nobody, None),
            "              :9       9 [000]      0.000000:         1 flight-0:           401000 [.] [unknown] \
             ([unknown])\n"
        );
    }
}
