//! The profiles of a recording: for each event, the share of each function.

use std::collections::{BTreeMap, HashMap, HashSet};

use vpmu_client::Packet;
use vpmu_client::trace::{Format, Packets, TraceSample};

use crate::call_tree::{Call, Direction, Tree, share};
use crate::data::{Aux, Chain, EventLine, Kernel, Line, Lost, Process, Sample, Task, Throttle, TraceLine};
use crate::names::{Key, Names, Spot, name};
use crate::symbols::Programs;

/// Optional parts of a profile.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct View {
    /// Shares that include callees.
    pub(crate) children: bool,
    /// The call tree.
    pub(crate) calls: Option<Direction>,
}

/// The samples that have the same value for every key.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(crate) struct Row {
    /// The values of the keys, in the order of the keys.
    #[serde(skip)]
    pub(crate) cells: Vec<String>,
    #[serde(flatten)]
    pub(crate) named: BTreeMap<&'static str, String>,
    pub(crate) samples: u64,
    /// The sum of the samples' periods.
    pub(crate) period: u64,
    pub(crate) percent: f64,
    /// The share with callees included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) children_percent: Option<f64>,
}

/// The profile of one event.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Profile {
    pub(crate) event: String,
    pub(crate) unit: String,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
    /// The period, or samples per second with `freq`.
    pub(crate) every: u64,
    pub(crate) freq: bool,
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    /// How often the device throttled the event.
    pub(crate) throttled: u64,
    pub(crate) period: u64,
    pub(crate) rows: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calls: Option<Vec<Call>>,
}

/// A recorded trace's totals, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct TraceBytes {
    /// The event's index, for a trace of samples.
    #[serde(skip)]
    event: Option<usize>,
    pub(crate) trace: String,
    pub(crate) source: String,
    pub(crate) written: u64,
    pub(crate) lost: u64,
}

impl TraceBytes {
    /// Whether this is a trace of samples. Such a trace is shown as an event.
    pub(crate) fn is_event(&self) -> bool {
        self.event.is_some()
    }
}

/// The contents of a recording.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    pub(crate) target: String,
    events: Vec<EventLine>,
    samples: Vec<Sample>,
    lost: Vec<Lost>,
    throttles: Vec<Throttle>,
    processes: Vec<Process>,
    tasks: Vec<Task>,
    kernel: Kernel,
    traces: Vec<TraceBytes>,
    /// Whether the recording is complete, not truncated.
    pub(crate) complete: bool,
}

impl Recording {
    /// Adds the next line of the file.
    pub(crate) fn add(&mut self, line: Line) {
        match line {
            Line::Header(header) => self.target = header.target,
            Line::Event(event) => self.events.push(event),
            Line::Process(process) => self.processes.push(process),
            Line::Task(task) => self.tasks.push(task),
            Line::Sample(sample) => self.samples.push(sample),
            Line::Lost(lost) => self.lost.push(lost),
            Line::Throttle(throttle) => self.throttles.push(throttle),
            Line::Kernel(kernel) => self.kernel = kernel,
            Line::Trace(trace) => self.add_trace(trace),
            Line::Aux(aux) => self.add_packets(&aux),
            Line::Traced(traced) => {
                if let Some(trace) = self.traces.get_mut(traced.trace) {
                    trace.lost = trace.lost.saturating_add(traced.lost);
                    let lost = traced.lost / size_of::<TraceSample>() as u64;
                    let event = trace.event;
                    self.lost.extend(event.map(|event| Lost { event, lost }));
                }
            }
            Line::End(_) => self.complete = true,
        }
    }

    /// Adds a trace. A trace of samples is also added as an event.
    fn add_trace(&mut self, line: TraceLine) {
        let samples = line.format == Format::Samples;
        self.traces.push(TraceBytes {
            event: samples.then_some(self.events.len()),
            trace: line.name.clone(),
            source: line.source.clone(),
            ..TraceBytes::default()
        });
        if samples {
            self.events.push(EventLine {
                name: line.name,
                unit: line.unit,
                period: line.period,
                freq: false,
                source: line.source,
                guest_only: line.guest_only,
            });
        }
    }

    fn add_packets(&mut self, aux: &Aux) {
        let Some(trace) = self.traces.get_mut(aux.trace) else {
            return;
        };
        trace.written = trace.written.saturating_add(aux.bytes);
        let Some(event) = trace.event else {
            return;
        };
        for packet in Packets::new(aux.position, &aux.data) {
            if let Ok(Packet::Sample(sample)) = packet {
                self.samples.push(Sample(
                    event,
                    sample.ip().unwrap_or(0),
                    sample.pid(),
                    sample.tid(),
                    sample.time(),
                    sample.vcpu(),
                    sample.period(),
                    sample.user(),
                    Chain::default(),
                ));
            }
        }
    }

    /// Totals of the AUX data.
    pub(crate) fn traces(&self) -> &[TraceBytes] {
        &self.traces
    }

    /// Whether the kernel hid its addresses during the recording.
    pub(crate) fn kernel_is_hidden(&self) -> bool {
        self.kernel.hidden
    }

    /// Number of samples of all events.
    pub(crate) fn sample_count(&self) -> usize {
        self.samples.len()
    }

    /// Whether samples have call chains.
    pub(crate) fn has_chains(&self) -> bool {
        self.samples.iter().any(|sample| sample.8.has_callers())
    }

    /// Each event's profile, with its rows by descending share.
    pub(crate) fn profiles(&self, keys: &[Key], view: View) -> Vec<Profile> {
        let mut programs = Programs::default();
        let mut names = Names::new(&self.processes, &self.tasks, &self.kernel, &mut programs);
        let events = self.events.iter().enumerate();
        events.map(|(index, event)| self.profile(index, event, keys, view, &mut names)).collect()
    }

    fn profile(&self, index: usize, event: &EventLine, keys: &[Key], view: View, names: &mut Names<'_>) -> Profile {
        let mut sums = Sums::default();
        let mut tree = Tree::default();
        let samples = || self.samples.iter().filter(|sample| sample.0 == index);
        for sample in samples() {
            let spots = names.chain(sample);
            let mut cells = |spot: &Spot| -> Vec<String> { keys.iter().map(|&key| names.of(spot, key)).collect() };
            sums.add(cells(&Spot::from(sample)), sample.6);
            if view.children {
                sums.add_callers(spots.iter().map(&mut cells).collect(), sample.6);
            }
            if let Some(direction) = view.calls {
                let path = path(spots, direction, names);
                let own = match direction {
                    Direction::Down => path.len().saturating_sub(1),
                    // `path` begins with the process and the sampled function.
                    Direction::Up => 1,
                };
                tree.add(path, own, sample.6);
            }
        }
        let lost = self.lost.iter().filter(|lost| lost.event == index);
        let throttles = self.throttles.iter().filter(|line| line.event == index);
        Profile {
            event: event.name.clone(),
            unit: event.unit.clone(),
            source: event.source.clone(),
            guest_only: event.guest_only,
            every: event.period,
            freq: event.freq,
            samples: samples().count() as u64,
            lost: lost.fold(0, |sum, lost| sum.saturating_add(lost.lost)),
            throttled: throttles.count() as u64,
            period: sums.total,
            rows: sums.rows(keys, view.children),
            calls: view.calls.map(|_| tree.calls()),
        }
    }
}

/// Returns the process's name and the chain's functions, from the outermost to the sampled function or, for
/// [`Direction::Up`], in the opposite order.
fn path(mut spots: Vec<Spot>, direction: Direction, names: &mut Names<'_>) -> Vec<String> {
    if direction == Direction::Down {
        spots.reverse();
    }
    let process = spots.first().map(|spot| names.of(spot, Key::Comm));
    let functions = spots.iter().map(|spot| names.of(spot, Key::Symbol));
    process.into_iter().chain(functions).collect()
}

/// Totals by combination of names.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    sums: HashMap<Vec<String>, Sum>,
    total: u64,
}

#[derive(Debug, Default)]
struct Sum {
    samples: u64,
    period: u64,
    with_children: u64,
}

impl Sums {
    /// Adds a sample of `period`.
    pub(crate) fn add(&mut self, cells: Vec<String>, period: u64) {
        self.add_many(cells, 1, period);
    }

    /// Adds `samples` with a total of `period`.
    pub(crate) fn add_many(&mut self, cells: Vec<String>, samples: u64, period: u64) {
        let sum = self.sums.entry(cells).or_default();
        sum.samples = sum.samples.saturating_add(samples);
        sum.period = sum.period.saturating_add(period);
        self.total = self.total.saturating_add(period);
    }

    /// Adds the sample's period to each distinct function on its chain.
    fn add_callers(&mut self, callers: HashSet<Vec<String>>, period: u64) {
        for cells in callers {
            let sum = self.sums.entry(cells).or_default();
            sum.with_children = sum.with_children.saturating_add(period);
        }
    }

    /// Returns the rows by descending share. With `children`, the share includes callees.
    pub(crate) fn rows(self, keys: &[Key], children: bool) -> Vec<Row> {
        let total = self.total;
        let heads: Vec<&'static str> = keys.iter().map(|&key| name(key)).collect();
        let mut rows: Vec<(u64, Row)> = self
            .sums
            .into_iter()
            .map(|(cells, sum)| {
                let named = heads.iter().copied().zip(cells.iter().cloned()).collect();
                let row = Row {
                    named,
                    cells,
                    samples: sum.samples,
                    period: sum.period,
                    percent: share(sum.period, total),
                    children_percent: children.then(|| share(sum.with_children, total)),
                };
                (sum.with_children, row)
            })
            .collect();
        rows.sort_by(|(a_with, a), (b_with, b)| (b_with, b.period, &a.cells).cmp(&(a_with, a.period, &b.cells)));
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

#[cfg(test)]
#[path = "profile_tests.rs"]
mod tests;
