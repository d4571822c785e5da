//! Persistent events, which outlive their handles: listing, reopening and ending them.

use std::io;
use std::os::fd::AsFd;

use vpmu_abi::uapi::{PERSISTENT_OVERWRITE, PERSISTENT_WINDOW, PersistentEntry};
use vpmu_abi::{PERSISTENT_NAME, PERSISTENT_OPERATOR};
use zerocopy::FromZeros;

use crate::Error;
use crate::attr::{Engine, EventAttr};
use crate::catalogue::text;
use crate::device::Vpmu;
use crate::event::Event;
use crate::suggest::{near, suggestion};
use crate::sys;

/// Most entries read at once.
const CHUNK: usize = 32;

/// Most bytes of a name without its terminating zero.
const MOST_LETTERS: usize = PERSISTENT_NAME - 1;

/// An error of a persistent event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistentError {
    /// The list cannot be read.
    #[error("listing persistent events")]
    List(#[source] io::Error),
    /// The event does not exist, or has ended.
    #[error("no persistent event {name:?}{}; `vperf persist ls` shows all", suggestion(.near))]
    Unknown {
        /// The requested name.
        name: String,
        /// Similar names.
        near: Vec<String>,
    },
    /// The event cannot be reopened.
    #[error("opening the persistent event {name:?}{}", open_hint(.source))]
    Open {
        /// The name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// An invalid name.
    #[error(
        "{0:?} is not a valid name for a persistent event: use lower-case letters, digits, - and _, a letter first, {MOST_LETTERS} at most"
    )]
    Name(String),
    /// The event cannot be made persistent.
    #[error("making the event persistent{}", detach_hint(.0))]
    Detach(#[source] io::Error),
    /// The event cannot be made non-persistent.
    #[error("making the event end with its last handle{}", attach_hint(.0))]
    Attach(#[source] io::Error),
}

fn open_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => NEEDS_CAPABILITY,
        Some(libc::ENOENT) => " (it has ended)",
        _ => "",
    }
}

fn detach_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => NEEDS_CAPABILITY,
        Some(libc::EEXIST) => " (another event has this name)",
        Some(libc::ENOSPC) => {
            " (the machine's limit is reached: end unneeded ones with `vperf persist rm`)"
        }
        Some(libc::EINVAL) => " (only an event of a whole CPU, in no group and with its own ring)",
        _ => "",
    }
}

fn attach_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            " (CAP_PERFMON is needed for it, and only `vmm ctl` on the host ends the operator's events)"
        }
        Some(libc::EINVAL) => " (it is not persistent)",
        _ => "",
    }
}

const NEEDS_CAPABILITY: &str =
    " (CAP_PERFMON is needed for it: run as root, or apply `setcap cap_perfmon+ep` to the program)";

/// A persistent event as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persistent {
    /// The id that reopens it; not reused while the machine lives.
    pub id: u64,
    /// Its name in sysfs.
    pub name: String,
    /// The CPU that it counts on; `u32::MAX` while it is unknown.
    pub cpu: u32,
    /// Data pages of its ring; `None` before the ring is made.
    pub data_pages: Option<u32>,
    /// Whether the host's operator owns it: the guest can only read, flush and map it read-only.
    pub is_operators: bool,
    /// Whether its ring outlives a guest reset.
    pub outlives_reset: bool,
    /// Whether its ring keeps the newest records; otherwise it keeps unread records.
    pub overwrites: bool,
    /// The event's attributes; `disabled`, `period` and `engine` are the current ones.
    pub attr: EventAttr,
}

impl Persistent {
    fn from_raw(raw: &PersistentEntry) -> Self {
        let engine = Engine::of(raw.engine).unwrap_or_default();
        let cpu = i32::try_from(raw.cpu).unwrap_or(i32::MAX);
        Self {
            id: raw.id,
            name: text(&raw.name),
            cpu: raw.cpu,
            data_pages: raw.pages.checked_sub(1),
            is_operators: raw.flags & PERSISTENT_OPERATOR != 0,
            outlives_reset: raw.flags & PERSISTENT_WINDOW != 0,
            overwrites: raw.flags & PERSISTENT_OVERWRITE != 0,
            attr: EventAttr::from_bytes(&raw.attr, cpu, engine),
        }
    }

    /// Whether `name` is its name or its id in decimal.
    fn is_called(&self, name: &str) -> bool {
        self.name == name || name.parse() == Ok(self.id)
    }
}

impl Vpmu {
    /// Lists persistent events by ascending id.
    ///
    /// # Errors
    /// [`PersistentError::List`].
    pub fn persistent(&self) -> Result<Vec<Persistent>, PersistentError> {
        let mut events: Vec<Persistent> = Vec::new();
        loop {
            let after = events.last().map_or(0, |event| event.id);
            let mut raw = [PersistentEntry::new_zeroed(); CHUNK];
            let filled =
                sys::persistent(self.as_fd(), after, &mut raw).map_err(PersistentError::List)?;
            // Skip ids that do not ascend: such a list would never end.
            let further = raw[..filled].iter().filter(|entry| entry.id > after);
            events.extend(further.map(Persistent::from_raw));
            if filled == 0 || events.last().map_or(0, |event| event.id) == after {
                return Ok(events);
            }
        }
    }

    /// Finds the persistent event with this name, or this id in decimal digits.
    ///
    /// # Errors
    /// [`PersistentError::Unknown`] suggests similar names.
    pub fn find_persistent(&self, name: &str) -> Result<Persistent, PersistentError> {
        find(self.persistent()?, name)
    }

    /// Opens another handle of a persistent event, with the same ring and its history.
    ///
    /// # Errors
    /// [`PersistentError::Open`], with `ENOENT` if it has ended and `EPERM` without CAP_PERFMON.
    pub fn reopen(&self, event: &Persistent) -> Result<Event, Error> {
        let by_id = EventAttr {
            disabled: false,
            read_format: 0,
            ..EventAttr::new(self.info().persistent_type, event.id).on_cpu(event.attr.cpu)
        };
        let fd = sys::open(self.as_fd(), &mut by_id.to_raw(), by_id.place(None), 0, 0).map_err(
            |source| PersistentError::Open {
                name: event.name.clone(),
                source,
            },
        )?;
        Ok(Event::new(fd, &event.attr))
    }

    /// Reopens the listed event with this name or id.
    ///
    /// # Errors
    /// See [`Vpmu::find_persistent`] and [`Vpmu::reopen`].
    pub fn reopen_named(&self, name: &str) -> Result<Event, Error> {
        self.reopen(&self.find_persistent(name)?)
    }
}

fn find(events: Vec<Persistent>, name: &str) -> Result<Persistent, PersistentError> {
    let like = near(name, events.iter().map(|event| event.name.as_str()));
    let found = events.into_iter().find(|event| event.is_called(name));
    found.ok_or_else(|| PersistentError::Unknown {
        name: name.into(),
        near: like,
    })
}

/// The name in the driver's form; the device checks the letters.
fn name_bytes(name: &str) -> Option<[u8; PERSISTENT_NAME]> {
    let mut bytes = [0; PERSISTENT_NAME];
    let taken = bytes[..MOST_LETTERS].get_mut(..name.len())?;
    taken.copy_from_slice(name.as_bytes());
    (!name.contains('\0')).then_some(bytes)
}

impl Event {
    /// Makes the event outlive its handles and returns the id that reopens it: the same id as before
    /// if the event was persistent already. An empty name keeps the current name, or assigns
    /// `event` followed by the id.
    ///
    /// # Errors
    /// [`PersistentError::Detach`], with `EINVAL` for an event of a task, in a group or redirected,
    /// and `EPERM` without CAP_PERFMON; [`PersistentError::Name`].
    pub fn detach(&self, name: &str) -> Result<u64, PersistentError> {
        detach(name, |bytes| sys::detach(self.as_fd(), bytes))
    }

    /// Makes the event end with its last handle.
    ///
    /// # Errors
    /// [`PersistentError::Attach`], with `EINVAL` if it was not persistent and `EPERM` for an event
    /// of the operator or without CAP_PERFMON.
    pub fn attach(&self) -> Result<(), PersistentError> {
        sys::attach(self.as_fd()).map_err(PersistentError::Attach)
    }
}

fn detach(
    name: &str,
    call: impl FnOnce([u8; PERSISTENT_NAME]) -> io::Result<u64>,
) -> Result<u64, PersistentError> {
    let bytes = name_bytes(name).ok_or_else(|| PersistentError::Name(name.into()))?;
    call(bytes).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) if !is_name(name) => PersistentError::Name(name.into()),
        _ => PersistentError::Detach(error),
    })
}

/// Calls on events of [`crate::perf::PerfPmu`]. They go through the device, since perf core does
/// not let a PMU add ioctls.
impl Vpmu {
    /// Like [`Event::detach`], for an event opened with `perf_event_open(2)`. Its descriptor
    /// becomes a view of the persistent event, like a reopened descriptor: it reads the event's
    /// count and takes samples from the event's ring. Enabling and disabling affect only the view.
    ///
    /// # Errors
    /// See [`Event::detach`]; `EBADF` if the event was not opened on the vPMU with
    /// `perf_event_open(2)`, `EOPNOTSUPP` if it is a trace or its samples hold counts, user
    /// registers or the user stack.
    pub fn detach_perf(&self, event: &Event, name: &str) -> Result<u64, PersistentError> {
        detach(name, |bytes| {
            sys::detach_perf(self.as_fd(), event.as_fd(), bytes)
        })
    }

    /// Like [`Event::attach`], for an event opened with `perf_event_open(2)`.
    ///
    /// # Errors
    /// See [`Event::attach`]; `EBADF` as for [`Vpmu::detach_perf`].
    pub fn attach_perf(&self, event: &Event) -> Result<(), PersistentError> {
        sys::attach_perf(self.as_fd(), event.as_fd()).map_err(PersistentError::Attach)
    }
}

/// The device's rule for names, to distinguish two causes of `EINVAL`.
fn is_name(name: &str) -> bool {
    let mut letters = name.bytes();
    let rest =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    letters
        .next()
        .is_none_or(|first| first.is_ascii_lowercase() && letters.all(rest))
}

#[cfg(test)]
#[path = "persistent_tests.rs"]
mod tests;
