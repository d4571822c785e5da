//! Persistent events as their operator sees them: what is asked for, and what is told. Knows nothing
//! of rings, queues or the device's lock.

mod history;
mod name;
mod request;

pub(crate) use self::history::whole;
pub(crate) use self::name::Name;
pub(crate) use self::request::{open_request, spelled};
use crate::source::Rate;

/// What an event has that lives on without a handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Persistence {
    pub(crate) name: Name,
    /// The operator's: the guest changes nothing about it.
    pub(crate) operator: bool,
}

/// A persistent event of the operator's: the guest reads it, and changes nothing about it.
///
/// It counts and samples from the first instruction of its vCPU on, over every reset, until
/// [`Vpmu::end`](crate::Vpmu::end). What makes its samples, the device chooses. Its ring lies in the
/// window, is written backwards and overwrites its oldest records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persist {
    /// Lower-case letters, digits, `-` and `_`, a letter first, at most 39 bytes; `None`: `event` and
    /// its id.
    pub name: Option<String>,
    /// As the catalogue names it, with `=` and a value where it takes one (`mark=7`), and `:u` or `:k`
    /// for user or kernel mode alone.
    pub event: String,
    /// On which vCPU.
    pub vcpu: u32,
    /// When it samples; `None`: it only counts.
    pub rate: Option<Rate>,
    /// perf's `PERF_SAMPLE_*`: what its samples hold.
    pub sample_type: u64,
    /// Data pages of its ring, a power of two; zero: it has none, and then it only counts.
    pub pages: u32,
}

/// One persistent event as it is at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistentStatus {
    /// Its id.
    pub id: u64,
    /// Its name: no other persistent event has it.
    pub name: String,
    /// As [`Persist::event`] names it.
    pub event: String,
    /// Whether it is the operator's; else the guest made it.
    pub operator: bool,
    /// On which vCPU.
    pub vcpu: u32,
    /// One of `KIND_*`.
    pub kind: u32,
    /// Which event of the kind.
    pub config: u64,
    /// When it samples; `None`: it only counts.
    pub rate: Option<Rate>,
    /// `OPEN_*`, of which `OPEN_ENABLED` says whether it is enabled now.
    pub flags: u32,
    /// `ENGINE_*`: what makes its samples.
    pub engine: u32,
    /// perf's `PERF_SAMPLE_*`.
    pub sample_type: u64,
    /// perf's `PERF_FORMAT_*` of the counts in its samples.
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
    /// Guest nanoseconds enabled.
    pub time_enabled: u64,
    /// Guest nanoseconds of those in which it really counted.
    pub time_running: u64,
    /// Overflows of it that no record was written of.
    pub lost: u64,
    /// Data pages of its ring; `None`: it has no ring.
    pub pages: Option<u32>,
    /// Whether the ring lies in the window, so that both outlive a reset.
    pub window: bool,
}

/// A persistent event, and the records in its ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// The event.
    pub event: PersistentStatus,
    /// Whole records of the event as perf lays them out, one after another, the oldest first. The guest
    /// can write to the ring: a record that cannot be one of the event's is left out, and one whose
    /// size makes no sense ends the history.
    pub records: Vec<u8>,
}

impl History {
    /// The records one by one, headers included.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.records.as_slice();
        std::iter::from_fn(move || {
            let size = rest.get(6..8)?;
            let size = usize::from(u16::from_le_bytes([size[0], size[1]]));
            let (record, after) = rest.split_at_checked(size.max(8))?;
            rest = after;
            Some(record)
        })
    }
}

/// Why a persistent event cannot be started, ended or read.
#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    /// There is no such vCPU.
    #[error("there is no vCPU {vcpu}: the guest has {vcpus}")]
    NoVcpu {
        /// The one that was asked for.
        vcpu: u32,
        /// How many there are.
        vcpus: u32,
    },
    /// The catalogue has no such event.
    #[error("this host has no event `{0}`")]
    NoEvent(String),
    /// The event cannot be had that way.
    #[error("the event `{event}` cannot be had so: {why}")]
    Refused {
        /// What was asked for.
        event: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The name is none.
    #[error(
        "`{0}` is no name of a persistent event: lower-case letters, digits, `-` and `_`, a letter \
         first, at most 39 bytes"
    )]
    BadName(String),
    /// The name is for the event with the id that it ends with.
    #[error("`{0}` is the name of the event with this id: choose another")]
    ReservedName(String),
    /// Another event of the operator's has the name. A guest's event loses it to the operator's.
    #[error("there is a persistent event `{0}` already")]
    NameTaken(String),
    /// The size of the ring is none.
    #[error("a ring has a power of two of data pages, at most {most}, not {pages}")]
    Pages {
        /// What was asked for.
        pages: u32,
        /// The most that a ring may have.
        most: u32,
    },
    /// The VMM has no window.
    #[error("there is no window for its ring")]
    NoWindow,
    /// The window has no room for the ring.
    #[error("the window has no room for {0} pages more")]
    NoRoom(u32),
    /// The host gave it up.
    #[error("the host does not count it")]
    Host(#[source] std::io::Error),
    /// There is no persistent event with this id.
    #[error("there is no persistent event {0}")]
    NoSuch(u64),
    /// It has no ring to read.
    #[error("the event {0} has no ring")]
    NoRing(u64),
    /// Its ring does not tell where a record begins.
    #[error("the ring of event {0} is overwritten forwards, so its records cannot be told apart")]
    Unreadable(u64),
}
