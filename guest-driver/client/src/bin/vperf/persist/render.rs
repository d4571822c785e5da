//! Records of persistent events, as lines of text or as a file for `vperf report`. Only processes that still run have
//! names, because no program recorded the names of the others.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use vpmu_client::attr::SAMPLE_ADDR;
use vpmu_client::history::RingSnapshot;
use vpmu_client::tasks::Clocks;
use vpmu_client::{Persistent, Record, Vpmu};

use super::PersistError;
use crate::data::{DataError, End, EventLine, Kernel, Line, Lost, Process, Sample, Throttle, Writer};
use crate::names::{Key, Names, Spot};
use crate::processes::Processes;
use crate::recording::sample_line;
use crate::symbols::{KALLSYMS, KernelFunctions, Programs};

/// Records to be shown, from one or more events.
#[derive(Debug)]
pub(super) struct Rendering {
    events: Vec<EventLine>,
    /// For each event, whether its samples have the address field, which holds an address or a
    /// mark's value.
    with_values: Vec<bool>,
    processes: Processes,
    known: Vec<Process>,
    /// The samples in the order in which they were added, each with its address field.
    samples: Vec<(Sample, u64)>,
    losses: Vec<Lost>,
    throttles: Vec<Throttle>,
    kernel_ips: BTreeSet<u64>,
    end: End,
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
            events: events.iter().map(|event| line(vpmu, event)).collect(),
            with_values: events.iter().map(|event| event.attr.sample_type & SAMPLE_ADDR != 0).collect(),
            processes: Processes::new(Path::new("/proc"), Vec::new()),
            known: Vec::new(),
            samples: Vec::new(),
            losses: Vec::new(),
            throttles: Vec::new(),
            kernel_ips: BTreeSet::new(),
            end: End::default(),
        }
    }

    pub(super) fn sums(&self) -> Sums {
        Sums { samples: self.end.samples, lost: self.end.lost }
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
                let line = sample_line(event, sample);
                if !sample.user {
                    self.kernel_ips.insert(sample.ip);
                }
                self.kernel_ips.extend(&line.8.0);
                self.end.samples += 1;
                self.samples.push((line, sample.addr));
            }
            Record::Lost { lost, .. } => {
                let lost = *lost;
                self.end.lost = self.end.lost.saturating_add(lost);
                self.losses.push(Lost { event, lost });
            }
            Record::Throttle(throttle) => {
                self.end.throttled += 1;
                let time = throttle.time;
                self.throttles.push(Throttle { event, time });
            }
            _ => {}
        }
    }

    /// Looks up the processes seen since the last call.
    fn look(&mut self, vpmu: &Vpmu) -> Result<(), PersistError> {
        let clocks = Clocks::read(vpmu.info());
        let lines = self.processes.news(&clocks);
        let lines = lines.map_err(|error| PersistError::Client(error.into()))?;
        self.known.extend(lines.into_iter().filter_map(|line| match line {
            Line::Process(process) => Some(process),
            _ => None,
        }));
        Ok(())
    }

    /// Removes the samples and returns them as text, in order of time. The last lines report how
    /// many samples were lost.
    pub(super) fn take_text(
        &mut self,
        vpmu: &Vpmu,
        functions: &KernelFunctions,
        programs: &mut Programs,
    ) -> Result<String, PersistError> {
        self.look(vpmu)?;
        let kernel = self.take_kernel(functions);
        let mut names = Names::new(&self.known, &[], &kernel, programs);
        let mut samples = std::mem::take(&mut self.samples);
        samples.sort_by_key(|(sample, _)| sample.4);
        let mut text = String::new();
        for (sample, value) in &samples {
            let has_value = self.with_values.get(sample.0) == Some(&true);
            let value = has_value.then_some(*value);
            let name = self.events.get(sample.0).map_or("", |event| &event.name);
            text += &sample_text(&mut names, name, sample, value);
        }
        for Lost { event, lost } in std::mem::take(&mut self.losses) {
            let name = self.events.get(event).map_or("", |event| &event.name);
            let _ = writeln!(text, "{name}: {lost} samples lost");
        }
        self.throttles.clear();
        Ok(text)
    }

    fn take_kernel(&mut self, functions: &KernelFunctions) -> Kernel {
        let ips: Vec<u64> = std::mem::take(&mut self.kernel_ips).into_iter().collect();
        functions.of(&ips)
    }

    /// Writes everything to a file for `vperf report`.
    pub(super) fn write(mut self, vpmu: &Vpmu, path: &Path, heading: &str) -> Result<(), PersistError> {
        self.look(vpmu)?;
        let kernel = self.take_kernel(&KernelFunctions::read(Path::new(KALLSYMS)));
        self.samples.sort_by_key(|(sample, _)| sample.4);
        let samples = self.samples.into_iter();
        let lines = self
            .events
            .into_iter()
            .map(Line::Event)
            .chain(self.known.into_iter().map(Line::Process))
            .chain(samples.map(|(sample, _)| Line::Sample(sample)))
            .chain(self.losses.into_iter().map(Line::Lost))
            .chain(self.throttles.into_iter().map(Line::Throttle))
            .chain([Line::Kernel(kernel), Line::End(self.end)]);
        let write = || -> Result<(), DataError> {
            let mut writer = Writer::create(path, heading)?;
            for line in lines {
                writer.line(&line)?;
            }
            writer.flush()
        };
        write().map_err(|source| PersistError::Data { path: path.display().to_string(), source })
    }
}

pub(super) fn kernel_functions() -> KernelFunctions {
    KernelFunctions::read(Path::new(KALLSYMS))
}

/// The line that describes an event in the file. The line has the persistent event's own name, such
/// as `flight-0`, to distinguish it from events that count the same thing on other CPUs.
fn line(vpmu: &Vpmu, event: &Persistent) -> EventLine {
    let spec = vpmu.catalogue().spec(vpmu.info().pmu_type, &event.attr);
    let entry = vpmu.catalogue().entry(&spec).ok();
    EventLine {
        name: event.name.clone(),
        unit: entry.map_or_else(String::new, |entry| entry.unit.clone()),
        period: event.attr.period,
        freq: event.attr.freq,
        source: entry.map_or_else(String::new, |entry| entry.source.clone()),
        guest_only: entry.is_some_and(vpmu_client::Entry::samples_guest_only),
    }
}

/// One sample as a line, with its callers on the lines below.
fn sample_text(names: &mut Names<'_>, event: &str, sample: &Sample, value: Option<u64>) -> String {
    let spot = Spot::from(sample);
    let (comm, symbol) = (names.of(&spot, Key::Comm), names.of(&spot, Key::Symbol));
    let object = names.of(&spot, Key::Object);
    let &Sample(_, ip, _, tid, time, cpu, period, ..) = sample;
    let (seconds, micros) = (time / 1_000_000_000, time / 1_000 % 1_000_000);
    let value = value.map_or_else(String::new, |value| format!(" {value:#x}"));
    let mut text = format!(
        "{comm:>16} {tid:>7} [{cpu:03}] {seconds:>6}.{micros:06}: {period:>9} {event}:{value} {ip:16x} {symbol} ({object})\n"
    );
    if sample.8.has_callers() {
        for caller in names.chain(sample).iter().skip(1) {
            let symbol = names.of(caller, Key::Symbol);
            let _ = writeln!(text, "{:>26}{:16x} {symbol}", "", caller.ip);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Chain, Symbol};

    #[test]
    fn sample_is_one_line_with_callers_below() {
        let kernel = Kernel {
            symbols: vec![Symbol { start: 0xffff_0000, end: 0xffff_1000, name: "do_work".into() }],
            hidden: false,
        };
        let shell = Process { pid: 7, comm: "sh".into(), time: 0, maps: Vec::new() };
        let mut programs = Programs::default();
        let shells = [shell];
        let mut names = Names::new(&shells, &[], &kernel, &mut programs);
        let chain = Chain(vec![0xffff_0010, 0xffff_0020], Vec::new());
        let sample = Sample(0, 0xffff_0010, 7, 8, 12_003_456_789, 1, 1000, false, chain);
        assert_eq!(
            sample_text(&mut names, "flight-1", &sample, Some(42)),
            "              sh       8 [001]     12.003456:      1000 flight-1: 0x2a         \
             ffff0010 [k] do_work ([kernel])\n\
             \u{20}                                 ffff001f [k] do_work\n"
        );
        let nobody = Sample(0, 0x40_1000, 9, 9, 5, 0, 1, true, Chain::default());
        assert_eq!(
            sample_text(&mut names, "flight-0", &nobody, None),
            "         [pid 9]       9 [000]      0.000000:         1 flight-0:           401000 \
             [.] 0x401000-0x401fff ([unknown])\n"
        );
    }
}
