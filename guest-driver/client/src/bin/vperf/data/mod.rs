//! The file of `vperf record`: one JSON object per line, in the order in which things were
//! seen, so that a recording that was cut off can be read as far as it goes.
//!
//! | line | says |
//! |---|---|
//! | `header` | the format's version, what was measured |
//! | `event` | an event, numbered from 0 in the file's order |
//! | `process` | name and executable mappings of a process, from `time` on |
//! | `task` | what a process does at `time`: fork, exec, map, change its name |
//! | `sample` | `[event, ip, pid, tid, time, cpu, period, user, [kernel, user]]`, the last the call chain's addresses, the innermost first; left out if there is none |
//! | `lost` | records of an event that the ring had no room for |
//! | `trace` | a trace, numbered from 0 in the file's order |
//! | `aux` | packets of a trace: so many bytes follow the line as they are, and a line's end |
//! | `traced` | what a trace produced at one of the places where it was taken, and what it lost |
//! | `throttle` | from `time` on an event was not sampled, for it overflowed too often |
//! | `kernel` | the kernel's functions in which samples lie |
//! | `end` | sums; a file without it was cut off |

mod file;

pub(crate) use file::{DataError, Writer, read};

use serde::{Deserialize, Serialize};
use vpmu_client::trace::Format;

/// Of this format.
pub(crate) const VERSION: u32 = 3;
/// The oldest that is read: its samples have no chains. Before 3 there were no traces.
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

/// First line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) target: String,
}

/// An event that was sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventLine {
    pub(crate) name: String,
    pub(crate) unit: String,
    /// A sample every so many, or so many a second.
    pub(crate) period: u64,
    #[serde(default)]
    pub(crate) freq: bool,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
}

/// A process, as it was when samples from `time` on were read.
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
    /// In the file, of `start`.
    pub(crate) offset: u64,
    pub(crate) path: String,
}

/// Something that changes what a process is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) pid: u32,
    pub(crate) time: u64,
    #[serde(flatten)]
    pub(crate) action: Action,
}

/// What it is that it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Map(Map),
    /// Its new name.
    Exec(String),
    Name(String),
    /// Its parent.
    Fork(u32),
}

/// The addresses of a call chain, those of each mode with the innermost first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Chain(pub(crate) Vec<u64>, pub(crate) Vec<u64>);

impl Chain {
    fn is_empty(&self) -> bool {
        self.0.is_empty() && self.1.is_empty()
    }

    /// There is more than where the sample was.
    pub(crate) fn has_callers(&self) -> bool {
        self.0.len() + self.1.len() > 1
    }
}

/// Event, ip, pid, tid, time, cpu, period, user mode, call chain.
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

/// A loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lost {
    pub(crate) event: usize,
    pub(crate) lost: u64,
}

/// What was traced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceLine {
    pub(crate) name: String,
    pub(crate) format: Format,
    /// Of a trace of samples: one every so many of a unit.
    pub(crate) period: u64,
    pub(crate) unit: String,
    pub(crate) source: String,
    pub(crate) guest_only: bool,
    /// Whose numbers the hardware's reasons are.
    pub(crate) processor: Processor,
    /// Newest data alone were kept.
    pub(crate) snapshot: bool,
}

/// How a processor runs guests.
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
    /// Of the trace: the CPU or the thread that was traced, numbered from 0.
    pub(crate) place: usize,
    /// Bytes that its AUX area had got before these.
    pub(crate) position: u64,
    /// How many follow.
    pub(crate) bytes: u64,
    #[serde(skip)]
    pub(crate) data: Vec<u8>,
}

/// A trace's own account of one place, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Traced {
    pub(crate) trace: usize,
    pub(crate) place: usize,
    pub(crate) produced: u64,
    pub(crate) lost: u64,
    /// Of those in the file.
    pub(crate) written: u64,
}

/// An event that was not sampled any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Throttle {
    pub(crate) event: usize,
    pub(crate) time: u64,
}

/// Functions of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kernel {
    pub(crate) symbols: Vec<Symbol>,
    /// The kernel shows this user no addresses.
    pub(crate) hidden: bool,
}

/// A function: from `start` up to the next one's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Symbol {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) name: String,
}

/// Last line.
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
