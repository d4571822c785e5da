//! The messages of the control socket: one line of JSON each way. This module does not depend on the `socket` and
//! `table` modules.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vpmu::PersistentStatus;
use vpmu::abi::{PAGE_SIZE, STATE_ACTIVE, STATE_INACTIVE, STATE_OFF};
use vpmu::source::Rate;

use crate::snapshot::{Base, Id, Taken};

/// Maximum size of a request in bytes, including its newline. The longest request consists of a path and a few words.
pub(super) const MAX_REQUEST: usize = 16 << 10;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// List every persistent event.
    List {},
    /// Write the recording.
    Dump {
        /// Path of the file to write. A descriptor of this file accompanies the request (`SCM_RIGHTS`), because the
        /// machine may be unable to open paths. `None` means the file of `--recording`.
        file: Option<PathBuf>,
    },
    /// Write pending samples to the rings.
    Flush {
        /// Name or id of the event. `None` means all events.
        event: Option<String>,
    },
    /// Start persistent events.
    Start {
        /// The syntax of `--persistent`.
        spec: String,
    },
    /// End an event.
    End {
        /// Name or id of the event.
        event: String,
    },
    /// Save the machine. Two empty files accompany the request: one for the machine's memory, and one for its state.
    /// Both are on disk before the machine replies.
    Snapshot {
        /// The snapshot's name.
        id: Id,
        /// If true, the machine stays stopped until both files are on disk, and its run then ends. If they cannot be
        /// written, the machine continues.
        then_exit: bool,
        /// The base of a diff snapshot, which has only the pages written since the base. `None` for a full snapshot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<Base>,
    },
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reply {
    /// Success.
    Ok(Answer),
    /// Failure, with the reason.
    Error(String),
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// Listed or started events.
    Events(Vec<Entry>),
    /// A recording was written.
    Recording(Recorded),
    /// The machine was saved.
    Snapshot(Taken),
    /// Success without a result.
    Done,
}

/// A recording that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The path.
    pub file: PathBuf,
    /// Number of events that sample.
    pub events: u64,
    /// Number of samples.
    pub samples: u64,
    /// Overflows without a sample.
    pub lost: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        write!(f, "{file}: {} events, {} samples, {} lost", self.events, self.samples, self.lost)
    }
}

/// One persistent event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its id.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// The counted event, by its catalogue name.
    pub event: String,
    /// The vCPU.
    pub vcpu: u32,
    /// Its owner: `operator` or `guest`.
    pub owner: String,
    /// `active`, `inactive`, `off` or `error`.
    pub state: String,
    /// The count.
    pub count: u64,
    /// Guest time in nanoseconds for which the event was enabled.
    pub time_enabled: u64,
    /// Guest time in nanoseconds for which the event ran.
    pub time_running: u64,
    /// Overflows without a record.
    pub lost: u64,
    /// The sampling period in events. `None` if the event only counts, or samples at a frequency.
    pub period: Option<u64>,
    /// Samples per second.
    pub freq: Option<u64>,
    /// Its ring.
    pub ring: Option<Ring>,
}

/// The ring of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Size of its data pages in bytes.
    pub bytes: u64,
    /// Whether the ring is in the window. Such a ring survives a reset.
    pub window: bool,
}

impl From<PersistentStatus> for Entry {
    fn from(event: PersistentStatus) -> Self {
        let (period, freq) = match event.rate {
            Some(Rate::Period(period)) => (Some(period), None),
            Some(Rate::Frequency(freq)) => (None, Some(freq)),
            None => (None, None),
        };
        Self {
            id: event.id,
            name: event.name,
            event: event.event,
            vcpu: event.vcpu,
            owner: if event.operator { "operator" } else { "guest" }.to_owned(),
            state: state(event.state).to_owned(),
            count: event.count,
            time_enabled: event.time_enabled,
            time_running: event.time_running,
            lost: event.lost,
            period,
            freq,
            ring: event.pages.map(|pages| Ring { bytes: u64::from(pages) * PAGE_SIZE as u64, window: event.window }),
        }
    }
}

fn state(state: i32) -> &'static str {
    match state {
        STATE_ACTIVE => "active",
        STATE_INACTIVE => "inactive",
        STATE_OFF => "off",
        _ => "error",
    }
}
