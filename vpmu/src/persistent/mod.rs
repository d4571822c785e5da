//! Persistent events as the operator sees them: requests and their results. This module does not use the
//! device's rings, queues or locks.

mod history;
mod name;
mod request;
mod spec;

pub(crate) use self::history::whole;
pub(crate) use self::name::Name;
pub(crate) use self::request::{open_request, spelled};
pub use self::spec::{PersistSpec, PersistSpecError};
use crate::event::Persistent;
use crate::saved::saved;
use crate::source::Rate;

/// The properties that only a persistent event has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Persistence {
    pub(crate) name: Name,
    /// Whether the operator owns the event. The guest cannot change an event of the operator.
    pub(crate) operator: bool,
}

impl Persistence {
    pub(crate) fn owner(&self) -> Persistent {
        if self.operator { Persistent::Operator } else { Persistent::Guest }
    }
}

/// A request for a persistent event of the operator. The guest can read the event, but not change it.
///
/// The event counts and samples as soon as it is open and its vCPU has started. It continues across resets, until
/// [`Vpmu::end`](crate::Vpmu::end) ends it. The device chooses the event's engine. The event's ring is in the window.
/// The device writes the ring backwards, and overwrites the oldest records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persist {
    /// At most 39 bytes: lower-case letters, digits, `-` and `_`, beginning with a letter. If `None`, the event gets
    /// the default name: `event` followed by its id.
    pub name: Option<String>,
    /// The event's catalogue name, followed by `=` and a value if the event needs one (`mark=7`), and by `:u` or `:k`
    /// to count only in user or kernel mode.
    pub event: String,
    /// The vCPU.
    pub vcpu: u32,
    /// The sampling rate; `None` for an event that only counts.
    pub rate: Option<Rate>,
    /// perf's `PERF_SAMPLE_*`: the fields of the event's samples.
    pub sample_type: u64,
    /// Number of data pages of the event's ring, a power of two. If it is zero, the event has no ring and only counts.
    pub pages: u32,
}

/// The state of a persistent event at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistentStatus {
    /// Its id.
    pub id: u64,
    /// Its name, unique among persistent events.
    pub name: String,
    /// The counted event, in the format of [`Persist::event`].
    pub event: String,
    /// Whether the operator, not the guest, owns the event.
    pub operator: bool,
    /// The vCPU.
    pub vcpu: u32,
    /// One of `KIND_*`.
    pub kind: u32,
    /// The event within the kind.
    pub config: u64,
    /// The sampling rate; `None` for an event that only counts.
    pub rate: Option<Rate>,
    /// `OPEN_*`. `OPEN_ENABLED` is set if the event is currently enabled.
    pub flags: u32,
    /// `ENGINE_*`: its sampling engine.
    pub engine: u32,
    /// perf's `PERF_SAMPLE_*`.
    pub sample_type: u64,
    /// perf's `PERF_FORMAT_*` for the counts in its samples.
    pub read_format: u64,
    /// Mask of the registers of `PERF_SAMPLE_REGS_USER`.
    pub regs_user: u64,
    /// Mask of the registers of `PERF_SAMPLE_REGS_INTR`.
    pub regs_intr: u64,
    /// Bytes of `PERF_SAMPLE_STACK_USER`.
    pub stack_user: u32,
    /// `STATE_*`.
    pub state: i32,
    /// The count.
    pub count: u64,
    /// Guest nanoseconds during which the event was enabled.
    pub time_enabled: u64,
    /// Guest nanoseconds during which the event counted.
    pub time_running: u64,
    /// Number of overflows without a record. For a trace, number of lost bytes.
    pub lost: u64,
    /// Number of data pages of the event's ring. `None` if the event has no ring.
    pub pages: Option<u32>,
    /// Whether the ring is in the window. The event and its ring then survive a reset, unless the event has
    /// an AUX area.
    pub window: bool,
}

/// A persistent event with the records in its ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// The event.
    pub event: PersistentStatus,
    /// Complete records of the event in perf's layout, concatenated, oldest first. The guest can write to the ring, so
    /// the device checks the records. It omits a record that cannot belong to the event. It stops reading the ring at a
    /// record whose size is invalid.
    pub records: Vec<u8>,
}

impl History {
    /// Iterates over the records, headers included.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        vpmu_perf::record::in_bytes(&self.records).map(|(_, record)| record)
    }
}

saved! {
    /// Persistence of an event.
    pub(crate) struct SavedPersistence {
        pub(crate) name: String,
        pub(crate) operator: bool,
    }
}

/// Errors of persistent events.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    /// The vCPU does not exist.
    #[error("there is no vCPU {vcpu}: the guest has {vcpus} vCPUs, counted from 0")]
    NoVcpu {
        /// The requested vCPU.
        vcpu: u32,
        /// The number of vCPUs.
        vcpus: u32,
    },
    /// The catalogue lacks the event, or the event does not accept this value or suffix.
    #[error("this host has no event `{0}`")]
    NoEvent(String),
    /// The request is not supported.
    #[error("event `{event}`: unsupported request: {why}")]
    Refused {
        /// The requested event.
        event: String,
        /// The cause.
        why: &'static str,
    },
    /// The name is invalid.
    #[error(
        "`{0}` is not a valid name of a persistent event: use at most 39 lower-case letters, digits, \
         `-` and `_`, and begin with a letter"
    )]
    BadName(String),
    /// The name is reserved for the event whose id it contains.
    #[error("`{0}` is reserved as the default name of the event whose id it contains: choose a different name")]
    ReservedName(String),
    /// Another event of the operator has the name. If an event of the guest has the name, the request succeeds and the
    /// guest's event is renamed.
    #[error("a persistent event `{0}` already exists")]
    NameTaken(String),
    /// The size of the ring is invalid.
    #[error("the number of data pages of a ring must be a power of two, at most {most}, not {pages}")]
    Pages {
        /// The requested size.
        pages: u32,
        /// The limit.
        most: u32,
    },
    /// The VMM has no window.
    #[error("the VMM has no window for the ring")]
    NoWindow,
    /// The window does not have enough free pages for the ring.
    #[error("the window has no room for {0} more pages")]
    NoRoom(u32),
    /// The host refused or revoked the event's counter.
    #[error("the host does not count the event")]
    Host(#[source] std::io::Error),
    /// The id does not name a persistent event.
    #[error("there is no persistent event {0}")]
    NoSuch(u64),
    /// The event has no ring.
    #[error("event {0} has no ring")]
    NoRing(u64),
    /// The start of the oldest record in the event's ring is unknown.
    #[error("the start of the oldest record in the ring of event {0} is unknown: older records were overwritten")]
    Unreadable(u64),
}
