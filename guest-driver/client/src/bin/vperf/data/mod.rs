//! The output file of `vperf record` and `vperf exits record`. It contains one JSON object per
//! line, in the order of recording. Therefore, the lines that remain of a truncated file can still
//! be read.
//!
//! | line | contents |
//! |---|---|
//! | `header` | the format's version and the measured target |
//! | `event` | an event, numbered from 0 in the file's order |
//! | `process` | name and executable mappings of a process from `time` on |
//! | `task` | an action of a process at `time`: fork, exec, mmap, rename |
//! | `sample` | `[event, ip, pid, tid, time, cpu, period, user, [kernel, user]]`; the last element is the call chain's addresses, innermost first, and is left out if the sample has no chain |
//! | `lost` | number of an event's records that were lost because the ring was full |
//! | `trace` | a trace, numbered from 0 in the file's order |
//! | `aux` | packets of a trace: the given number of raw bytes follows the line, then a newline |
//! | `traced` | bytes that a trace produced on one CPU or thread, and its lost bytes |
//! | `throttle` | the event was throttled from `time` on |
//! | `kernel` | the kernel's functions at the recorded addresses |
//! | `end` | totals; a file without it is truncated |

mod file;

pub(crate) use file::{DataError, Writer, read};

use serde::{Deserialize, Serialize};
use vpmu_client::trace::Format;
use vpmu_symbols::Functions;

/// The current version of the format.
pub(crate) const VERSION: u32 = 3;
/// The oldest supported version. Its samples lack call chains. Version 3 added traces.
const OLDEST: u32 = 1;

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Line {
    Header(Header),
    Event(EventLine),
    Process(Process),
    Task(Task),
    Sample(Sample),
    Lost(Lost),
    Trace(TraceLine),
    Aux(Aux),
    Traced(Traced),
    Throttle(Throttle),
    Kernel(Kernel),
    End(End),
}

/// The first line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) target: String,
}

/// A sampled event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventLine {
    pub(crate) name: String,
    pub(crate) unit: String,
    /// Events between samples, or samples per second.
    pub(crate) period: u64,
    #[serde(default)]
    pub(crate) freq: bool,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
}

/// A process's name and mappings, valid for samples from `time` on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) time: u64,
    pub(crate) maps: Vec<Map>,
}

/// An executable mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Map {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Offset of `start` in the file.
    pub(crate) offset: u64,
    pub(crate) path: String,
}

/// A change of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) pid: u32,
    pub(crate) time: u64,
    #[serde(flatten)]
    pub(crate) action: Action,
}

/// The kind of change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Map(Map),
    /// The process executed a program: the new name of the process.
    Exec(String),
    Name(String),
    /// The parent process.
    Fork(u32),
}

/// The addresses of a call chain: first the list of kernel addresses, then the list of user-mode
/// addresses. Each list begins with the innermost address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Chain(pub(crate) Vec<u64>, pub(crate) Vec<u64>);

impl Chain {
    fn is_empty(&self) -> bool {
        self.0.is_empty() && self.1.is_empty()
    }

    /// Whether the chain has more than the sampled address.
    pub(crate) fn has_callers(&self) -> bool {
        self.0.len() + self.1.len() > 1
    }
}

/// A sample. Its fields are, in this order: event, ip, pid, tid, time, cpu, period, user mode, call
/// chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sample(
    pub(crate) usize,
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u32,
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u64,
    pub(crate) bool,
    #[serde(default, skip_serializing_if = "Chain::is_empty")] pub(crate) Chain,
);

/// Lost records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lost {
    pub(crate) event: usize,
    pub(crate) lost: u64,
}

/// A recorded trace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceLine {
    pub(crate) name: String,
    pub(crate) format: Format,
    /// For a trace of samples: units between them.
    pub(crate) period: u64,
    pub(crate) unit: String,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
    /// The host's virtualization extension, which defines the numbers of hardware exit reasons.
    pub(crate) processor: Processor,
    /// Whether only the newest packets were kept.
    pub(crate) snapshot: bool,
}

/// The virtualization extension of a processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Processor {
    Svm,
    Vmx,
    #[default]
    Unknown,
}

/// Packets of a trace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Aux {
    pub(crate) trace: usize,
    /// Index of the traced CPU or thread, from 0.
    pub(crate) place: usize,
    /// Bytes written to the AUX area before these.
    pub(crate) position: u64,
    /// Bytes that follow the line.
    pub(crate) bytes: u64,
    #[serde(skip)]
    pub(crate) data: Vec<u8>,
}

/// A trace's totals on one CPU or thread, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traced {
    pub(crate) trace: usize,
    pub(crate) place: usize,
    pub(crate) produced: u64,
    pub(crate) lost: u64,
    /// Produced bytes that are in the file.
    pub(crate) written: u64,
}

/// A throttled event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Throttle {
    pub(crate) event: usize,
    pub(crate) time: u64,
}

/// Functions of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    pub(crate) symbols: Vec<Symbol>,
    /// Whether the kernel hid its addresses from the user who made the recording.
    pub(crate) hidden: bool,
}

impl Kernel {
    /// Returns the functions, for look-ups by address. A forged file may list them in any order,
    /// and they may overlap.
    pub(crate) fn functions(&self) -> Functions<&str> {
        let symbols = self.symbols.iter().map(|symbol| vpmu_symbols::Symbol {
            address: symbol.start,
            size: Some(symbol.end.saturating_sub(symbol.start)),
            name: Some(symbol.name.as_str()),
        });
        symbols.collect()
    }
}

/// A function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Symbol {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) name: String,
}

/// The last line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct End {
    pub(crate) samples: u64,
    pub(crate) lost: u64,
    #[serde(default)]
    pub(crate) throttled: u64,
    pub(crate) wakeups: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) exit_code: u8,
}

#[cfg(test)]
mod tests;
