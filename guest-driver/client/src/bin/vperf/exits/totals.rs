//! Totals of exits: their number, and the time that the guest was stopped for them.

use std::collections::{BTreeMap, HashMap};

use clap::ValueEnum;
use vpmu_client::trace::Exit;

use super::reasons::{self, Processor};
use super::recorded::NamedExit;
use crate::call_tree::share;

/// A field by which exits are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Key {
    /// The exit reason.
    Reason,
    /// The accessed port or address, with the direction.
    What,
    /// The running process.
    Task,
    /// The running function.
    Symbol,
    /// The CPU.
    Cpu,
}

/// The name in options, table heads and JSON.
pub(super) fn name(key: Key) -> &'static str {
    match key {
        Key::Reason => "reason",
        Key::What => "what",
        Key::Task => "task",
        Key::Symbol => "symbol",
        Key::Cpu => "cpu",
    }
}

/// The value of an exit's field `key`.
fn cell(key: Key, of: &NamedExit<'_>, processor: Processor) -> String {
    match key {
        Key::Reason => reasons::reason(of.exit, processor),
        Key::What => reasons::what(of.exit, processor),
        Key::Task => of.task.to_owned(),
        Key::Symbol => of.symbol.clone(),
        Key::Cpu => of.exit.vcpu().to_string(),
    }
}

/// Totals of some exits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) exits: u64,
    pub(super) total_ns: u64,
    pub(super) worst_ns: u64,
    /// Exits whose time is incomplete: see [`Exit::is_cut`].
    pub(super) cut: u64,
}

impl Sum {
    fn add(&mut self, exit: &Exit) {
        self.exits += 1;
        self.total_ns = self.total_ns.saturating_add(exit.outside());
        self.worst_ns = self.worst_ns.max(exit.outside());
        self.cut += u64::from(exit.is_cut());
    }
}

/// The exits that have the same value for every key.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub(super) struct Row {
    /// The values of the keys, in the order of the keys.
    #[serde(skip)]
    pub(super) cells: Vec<String>,
    #[serde(flatten)]
    named: BTreeMap<&'static str, String>,
    pub(super) exits: u64,
    pub(super) exits_percent: f64,
    pub(super) total_ns: u64,
    pub(super) time_percent: f64,
    pub(super) mean_ns: u64,
    pub(super) worst_ns: u64,
}

/// Totals by keys.
#[derive(Debug)]
pub(super) struct Totals {
    keys: Vec<Key>,
    totals: HashMap<Vec<String>, Sum>,
    pub(super) all: Sum,
}

impl Totals {
    pub(super) fn by(keys: &[Key]) -> Self {
        Self { keys: keys.to_vec(), totals: HashMap::new(), all: Sum::default() }
    }

    pub(super) fn add(&mut self, exit: &NamedExit<'_>, processor: Processor) {
        let cells = self.keys.iter().map(|&key| cell(key, exit, processor));
        self.totals.entry(cells.collect()).or_default().add(exit.exit);
        self.all.add(exit.exit);
    }

    /// Rows by descending time.
    pub(super) fn rows(&self) -> Vec<Row> {
        let heads: Vec<&'static str> = self.keys.iter().map(|&key| name(key)).collect();
        let mut rows: Vec<Row> = self
            .totals
            .iter()
            .map(|(cells, sum)| Row {
                cells: cells.clone(),
                named: heads.iter().copied().zip(cells.iter().cloned()).collect(),
                exits: sum.exits,
                exits_percent: share(sum.exits, self.all.exits),
                total_ns: sum.total_ns,
                time_percent: share(sum.total_ns, self.all.total_ns),
                mean_ns: sum.total_ns / sum.exits.max(1),
                worst_ns: sum.worst_ns,
            })
            .collect();
        rows.sort_by(|a, b| (b.total_ns, b.exits, &a.cells).cmp(&(a.total_ns, a.exits, &b.cells)));
        rows
    }
}
