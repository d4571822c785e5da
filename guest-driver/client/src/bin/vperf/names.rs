//! Names for samples: process, file, function.

use clap::ValueEnum;
use vpmu_symbols::Functions;

use crate::data::{Kernel, Map, Process, Sample, Task};
use crate::process_history::ProcessHistory;
use crate::symbols::Programs;

/// A field by which samples are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
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

/// The name in options, table heads and JSON.
pub(crate) fn name(key: Key) -> &'static str {
    match key {
        Key::Comm => "comm",
        Key::Object => "object",
        Key::Symbol => "symbol",
        Key::Cpu => "cpu",
        Key::Pid => "pid",
    }
}

/// An instruction address with its task, CPU and time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spot {
    pub(crate) pid: u32,
    pub(crate) time: u64,
    pub(crate) cpu: u32,
    pub(crate) ip: u64,
    pub(crate) user: bool,
}

impl From<&Sample> for Spot {
    fn from(sample: &Sample) -> Self {
        Self { pid: sample.2, time: sample.4, cpu: sample.5, ip: sample.1, user: sample.7 }
    }
}

/// Resolves a recording's numbers to names.
#[derive(Debug)]
pub(crate) struct Names<'a> {
    history: ProcessHistory,
    kernel: Functions<&'a str>,
    programs: &'a mut Programs,
}

impl<'a> Names<'a> {
    pub(crate) fn new(processes: &[Process], tasks: &[Task], kernel: &'a Kernel, programs: &'a mut Programs) -> Self {
        Self { history: ProcessHistory::new(processes, tasks), kernel: kernel.functions(), programs }
    }

    /// Returns the positions of a sample's call chain, innermost first; without a chain, the
    /// sample's own position. The result ends before the first user-mode address that the process
    /// cannot execute. Such an address means that a function kept no frame pointer, so this address
    /// and all later ones are not return addresses.
    pub(crate) fn chain(&self, sample: &Sample) -> Vec<Spot> {
        let here = Spot::from(sample);
        let mut spots = Vec::new();
        for (addresses, user) in [(&sample.8.0, false), (&sample.8.1, true)] {
            for (index, &address) in addresses.iter().enumerate() {
                // A caller's address is the return address. Use the byte before it, which is part of the call: if the
                // call is the last instruction of a function, the return address is in the next function.
                let ip = address.saturating_sub(u64::from(index > 0));
                let spot = Spot { ip, user, ..here };
                if index > 0 && user && !self.can_be_code(&spot) {
                    break;
                }
                spots.push(spot);
            }
        }
        if spots.is_empty() {
            spots.push(here);
        }
        spots
    }

    /// False if the process's mappings are known and none contains the address.
    fn can_be_code(&self, spot: &Spot) -> bool {
        let process = self.process(spot);
        process.is_none_or(|process| process.maps.is_empty()) || map(process, spot).is_some()
    }

    /// Index of the process's state at `time`: samples with the same index have the same names.
    pub(crate) fn version(&self, pid: u32, time: u64) -> usize {
        self.history.version(pid, time)
    }

    /// Returns the value of the sample's field `key`.
    pub(crate) fn of(&mut self, spot: &Spot, key: Key) -> String {
        match key {
            Key::Comm => match self.process(spot) {
                Some(process) => process.comm.clone(),
                None if spot.pid == 0 => "[idle]".into(),
                None => format!("[pid {}]", spot.pid),
            },
            Key::Object if !spot.user => "[kernel]".into(),
            Key::Object => match map(self.process(spot), spot) {
                Some(map) => map.path.clone(),
                None => "[unknown]".into(),
            },
            Key::Symbol if !spot.user => format!("[k] {}", self.kernel_function(spot.ip)),
            Key::Symbol => {
                let process = self.history.at(spot.pid, spot.time);
                let function = map(process, spot).and_then(|map| self.programs.function(map, spot.ip));
                format!("[.] {}", function.unwrap_or_else(|| page(spot.ip)))
            }
            Key::Cpu => spot.cpu.to_string(),
            Key::Pid => spot.pid.to_string(),
        }
    }

    fn process(&self, spot: &Spot) -> Option<&Process> {
        self.history.at(spot.pid, spot.time)
    }

    fn kernel_function(&self, ip: u64) -> String {
        let function = self.kernel.at(ip);
        function.map_or_else(|| page(ip), |(&name, _)| name.to_owned())
    }
}

fn map<'a>(process: Option<&'a Process>, spot: &Spot) -> Option<&'a Map> {
    let maps = &process?.maps;
    maps.iter().find(|map| (map.start..map.end).contains(&spot.ip))
}

/// Label for an address without a name: its page.
fn page(ip: u64) -> String {
    format!("{:#x}-{:#x}", ip & !0xfff, ip | 0xfff)
}
