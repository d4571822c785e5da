//! A profile: events, tasks, and samples with their stacks.

use std::io::{Read, Seek};

use crate::names::Names;
use crate::read::{self, ReadError};
use crate::stacks::{StackId, Stacks};

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Its samples say where time, or something else, was spent.
    Sampled,
    /// The guest's programs place its samples, each with a value.
    Mark,
    /// Each sample is an exit of the guest.
    Exit,
}

/// An event, of all vCPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The name, without the number of the vCPU.
    pub name: String,
    /// The kind.
    pub kind: EventKind,
    /// How often the event was sampled; `None` if the recording does not say so.
    pub rate: Option<Rate>,
    /// Whether the period of a sample is a time in nanoseconds.
    pub is_time: bool,
    /// Whether the host's work is left out.
    pub is_guest_only: bool,
    /// Whether only the newest samples were kept.
    pub is_newest_only: bool,
    /// Whether the samples have packets of the device, which describe exits.
    pub has_packets: bool,
    /// Number of samples.
    pub samples: u64,
    /// Number of overflows without a sample.
    pub lost: u64,
    /// Number of times that sampling paused, because the event overflowed too often.
    pub throttled: u64,
}

impl Event {
    /// Returns the time between two samples in nanoseconds, if the rate says so.
    #[must_use]
    pub fn interval(&self) -> Option<u64> {
        match self.rate? {
            Rate::Frequency(hertz) => 1_000_000_000_u64.checked_div(hertz),
            Rate::Period(period) => Some(period).filter(|_| self.is_time),
        }
    }
}

/// How often an event is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Once in this many counts.
    Period(u64),
    /// About this many times a second.
    Frequency(u64),
}

/// A task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The process; `None` if the samples have none.
    pub pid: Option<u32>,
    /// The thread; `None` if the samples have none.
    pub tid: Option<u32>,
    /// The vCPU of an idle task, which all have the number zero, or of samples without a task.
    pub cpu: Option<u32>,
    /// The name. If the recording does not have it, the name of the idle task, or the number as perf prints it.
    pub name: String,
}

impl Task {
    /// Creates a task. `name` is the name in the recording.
    pub(crate) fn new(pid: Option<u32>, tid: Option<u32>, cpu: Option<u32>, name: Option<&str>) -> Self {
        let name = match (name, tid, cpu) {
            (Some(name), ..) => name.to_owned(),
            (None, Some(0), Some(cpu)) => format!("swapper/{cpu}"),
            (None, Some(tid), _) => format!(":{tid}"),
            (None, None, _) => "[unknown task]".to_owned(),
        };
        Self { pid, tid, cpu, name }
    }
}

/// A sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The event, as an index of [`Profile::events`].
    pub event: usize,
    /// The task, as an index of [`Profile::tasks`].
    pub task: usize,
    /// The vCPU.
    pub cpu: Option<u32>,
    /// The time in nanoseconds.
    pub time: u64,
    /// The period: how much the event counted since its last sample.
    pub period: u64,
    /// The address: a mark's value.
    pub value: u64,
    /// The stack; `None` if the recording has neither address nor call chain.
    pub stack: Option<StackId>,
    /// The packet that describes an exit; see [`Profile::packet`].
    pub packet: Option<Packet>,
}

/// The position of a packet in the memory of a [`Profile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    pub(crate) at: usize,
    pub(crate) size: usize,
}

/// The contents of a recording.
#[derive(Debug, Default)]
pub struct Profile {
    /// Events, in the order of the file. The events of several vCPUs are one.
    pub events: Vec<Event>,
    /// Tasks, in the order of their first samples.
    pub tasks: Vec<Task>,
    /// Samples, in order of time.
    pub samples: Vec<Sample>,
    /// Frames and stacks.
    pub stacks: Stacks,
    /// Whether the recording describes a guest: its processors are vCPUs.
    pub is_guest: bool,
    /// Number of frames without a function's name: in the kernel, and in programs.
    pub nameless: (u64, u64),
    /// Overflows without a sample whose event is unknown.
    pub lost: u64,
    /// The first sample in the kernel's `panic`, as an index of `samples`.
    pub panic: Option<usize>,
    /// The command that made the recording; empty if the recording does not say so.
    pub command: String,
    /// The processor, as perf describes it: on x86, it begins with the vendor.
    pub cpu_id: String,
    pub(crate) packets: Vec<u8>,
}

impl Profile {
    /// Reads a `perf.data` file. `names` finds the names that the file does not contain.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn read(file: impl Read + Seek, names: Names) -> Result<Self, ReadError> {
        read::read(file, names)
    }

    /// Returns the packet of a sample, as the device wrote it; empty if the sample has none.
    #[must_use]
    pub fn packet(&self, sample: &Sample) -> &[u8] {
        let bytes = sample.packet.and_then(|packet| self.packets.get(packet.at..)?.get(..packet.size));
        bytes.unwrap_or_default()
    }

    /// Returns the name of a processor.
    pub(crate) fn cpu_name(&self, cpu: Option<u32>) -> String {
        let kind = if self.is_guest { "vCPU" } else { "CPU" };
        match cpu {
            Some(cpu) => format!("{kind} {cpu}"),
            None => format!("unknown {kind}"),
        }
    }
}
