//! The profiles of a recording: for each event, the share of each function.

use std::collections::{BTreeMap, HashMap, HashSet};

use vpmu_profile::{Event, EventKind, Frame, Profile, Rate, Sample};

use crate::call_tree::{Call, Direction, Tree, share};
use crate::labels::{self, Key, UNKNOWN, name};

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
pub(crate) struct EventProfile {
    pub(crate) event: String,
    pub(crate) unit: &'static str,
    pub(crate) guest_only: bool,
    /// The period, or samples per second with `freq`; 0 if the recording does not say so.
    pub(crate) every: u64,
    pub(crate) freq: bool,
    /// Whether `vperf exits report` shows more about the samples.
    #[serde(skip)]
    pub(crate) are_exits: bool,
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    /// How often the event was throttled.
    pub(crate) throttled: u64,
    pub(crate) period: u64,
    pub(crate) rows: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calls: Option<Vec<Call>>,
}

/// Whether samples have call chains.
pub(crate) fn has_chains(profile: &Profile) -> bool {
    profile.samples.iter().any(|sample| profile.stacks.frames(sample.stack).nth(1).is_some())
}

/// Each event's profile, with its rows by descending share.
pub(crate) fn profiles(profile: &Profile, keys: &[Key], view: View) -> Vec<EventProfile> {
    let events = profile.events.iter().enumerate();
    events.map(|(index, event)| of_event(profile, index, event, keys, view)).collect()
}

fn of_event(profile: &Profile, index: usize, event: &Event, keys: &[Key], view: View) -> EventProfile {
    let mut sums = Sums::default();
    let mut tree = Tree::default();
    for sample in profile.samples.iter().filter(|sample| sample.event == index) {
        let frames = labels::callers(profile.stacks.frames(sample.stack));
        let cells = |frame: Option<&&Frame>| -> Vec<String> {
            keys.iter().map(|&key| cell(profile, sample, frame.copied(), key)).collect()
        };
        sums.add(cells(frames.first()), sample.period);
        if view.children {
            sums.add_callers(frames.iter().map(|frame| cells(Some(frame))).collect(), sample.period);
        }
        if let Some(direction) = view.calls {
            let path = path(profile, sample, &frames, direction);
            let own = match direction {
                Direction::Down => path.len().saturating_sub(1),
                // `path` begins with the process and the sampled function.
                Direction::Up => 1,
            };
            tree.add(path, own, sample.period);
        }
    }
    let (every, freq) = match event.rate {
        Some(Rate::Period(period)) => (period, false),
        Some(Rate::Frequency(hertz)) => (hertz, true),
        None => (0, false),
    };
    EventProfile {
        event: event.name.clone(),
        unit: if event.is_time { "ns" } else { "" },
        guest_only: event.is_guest_only,
        every,
        freq,
        are_exits: event.kind == EventKind::Exit && event.has_packets,
        samples: event.samples,
        lost: event.lost,
        throttled: event.throttled,
        period: sums.total,
        rows: sums.rows(keys, view.children),
        calls: view.calls.map(|_| tree.calls()),
    }
}

/// The value of a sample's field `key`, in the function `frame`.
fn cell(profile: &Profile, sample: &Sample, frame: Option<&Frame>, key: Key) -> String {
    let task = profile.tasks.get(sample.task);
    let number = |number: Option<u32>| number.map_or_else(|| UNKNOWN.to_owned(), |number| number.to_string());
    match key {
        Key::Comm => task.map_or_else(String::new, |task| task.name.clone()),
        Key::Object => frame.map_or(UNKNOWN, labels::object).to_owned(),
        Key::Symbol => frame.map_or_else(|| UNKNOWN.to_owned(), labels::symbol),
        Key::Cpu => number(sample.cpu),
        Key::Pid => number(task.and_then(|task| task.pid)),
    }
}

/// Returns the process's name and the chain's functions, from the outermost to the sampled function or, for
/// [`Direction::Up`], in the opposite order.
fn path(profile: &Profile, sample: &Sample, frames: &[&Frame], direction: Direction) -> Vec<String> {
    let mut functions: Vec<String> = frames.iter().map(|frame| labels::symbol(frame)).collect();
    if functions.is_empty() {
        functions.push(UNKNOWN.to_owned());
    }
    if direction == Direction::Down {
        functions.reverse();
    }
    [cell(profile, sample, None, Key::Comm)].into_iter().chain(functions).collect()
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
