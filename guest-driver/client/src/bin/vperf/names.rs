//! What a sample is shown as: its process, its file, its function.

use clap::ValueEnum;

use crate::data::{Kernel, Map, Process, Sample, Task};
use crate::histories::Histories;
use crate::symbols::Programs;

/// What samples are told apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Key {
    /// The process's name.
    Comm,
    /// The program's or library's file.
    #[value(alias = "dso")]
    Object,
    /// The function.
    #[value(alias = "sym")]
    Symbol,
    /// The CPU.
    Cpu,
    /// The process's id.
    Pid,
}

/// As in options, heads and JSON.
pub(crate) fn name(key: Key) -> &'static str {
    match key {
        Key::Comm => "comm",
        Key::Object => "object",
        Key::Symbol => "symbol",
        Key::Cpu => "cpu",
        Key::Pid => "pid",
    }
}

/// Gives names to what a recording holds as numbers.
#[derive(Debug)]
pub(crate) struct Names<'a> {
    histories: Histories,
    kernel: &'a Kernel,
    programs: Programs,
}

impl<'a> Names<'a> {
    /// Of the kernel's symbols, in order.
    pub(crate) fn new(processes: &[Process], tasks: &[Task], kernel: &'a Kernel) -> Self {
        Self {
            histories: Histories::new(processes, tasks),
            kernel,
            programs: Programs::default(),
        }
    }

    /// The sample's name in the sense of `key`.
    pub(crate) fn of(&mut self, sample: &Sample, key: Key) -> String {
        match key {
            Key::Comm => match self.process(sample) {
                Some(process) => process.comm.clone(),
                None if sample.2 == 0 => "[idle]".into(),
                None => format!("[pid {}]", sample.2),
            },
            Key::Object if !sample.7 => "[kernel]".into(),
            Key::Object => match map(self.process(sample), sample) {
                Some(map) => map.path.clone(),
                None => "[unknown]".into(),
            },
            Key::Symbol if !sample.7 => format!("[k] {}", self.kernel_function(sample.1)),
            Key::Symbol => {
                let process = self.histories.at(sample.2, sample.4);
                let function =
                    map(process, sample).and_then(|map| self.programs.function(map, sample.1));
                format!("[.] {}", function.unwrap_or_else(|| page(sample.1)))
            }
            Key::Cpu => sample.5.to_string(),
            Key::Pid => sample.2.to_string(),
        }
    }

    fn process(&self, sample: &Sample) -> Option<&Process> {
        self.histories.at(sample.2, sample.4)
    }

    fn kernel_function(&self, ip: u64) -> String {
        let symbols = &self.kernel.symbols;
        let after = symbols.partition_point(|symbol| symbol.start <= ip);
        let symbol = after.checked_sub(1).and_then(|index| symbols.get(index));
        let symbol = symbol.filter(|symbol| ip < symbol.end);
        symbol.map_or_else(|| page(ip), |symbol| symbol.name.clone())
    }
}

fn map<'a>(process: Option<&'a Process>, sample: &Sample) -> Option<&'a Map> {
    let maps = &process?.maps;
    maps.iter()
        .find(|map| (map.start..map.end).contains(&sample.1))
}

/// For what has no name: the page it lies in.
fn page(ip: u64) -> String {
    format!("{:#x}-{:#x}", ip & !0xfff, ip | 0xfff)
}
