//! Persistent events: those that live on without a handle. What there is, who made it, how it
//! is opened again, and how it ends.

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

/// The last byte of a name is zero.
const MOST_LETTERS: usize = PERSISTENT_NAME - 1;

/// What was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistentError {
    /// The list cannot be read.
    #[error("listing persistent events")]
    List(#[source] io::Error),
    /// No such event, or none any more.
    #[error("no persistent event {name:?}{}; `vperf persist ls` shows all", suggestion(.near))]
    Unknown {
        /// As asked for.
        name: String,
        /// Names like it.
        near: Vec<String>,
    },
    /// It cannot be opened again.
    #[error("opening the persistent event {name:?}{}", open_hint(.source))]
    Open {
        /// Which.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// A name that cannot be one.
    #[error(
        "{0:?} is no name for a persistent event: lower-case letters, digits, - and _, a letter first, {MOST_LETTERS} at most"
    )]
    Name(String),
    /// The event cannot be made persistent.
    #[error("making the event persistent{}", detach_hint(.0))]
    Detach(#[source] io::Error),
    /// The event cannot be made one that ends.
    #[error("having the event end with its last reader{}", attach_hint(.0))]
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
        Some(libc::EEXIST) => " (another has this name)",
        Some(libc::ENOSPC) => {
            " (this machine may have no more of them: `vperf persist rm` ends those nobody needs)"
        }
        Some(libc::EINVAL) => " (only an event of a whole CPU, in no group and with its own ring)",
        _ => "",
    }
}

fn attach_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            " (CAP_PERFMON is needed for it; and the operator's events end on the host alone, by `vmm ctl`)"
        }
        Some(libc::EINVAL) => " (it is not persistent)",
        _ => "",
    }
}

const NEEDS_CAPABILITY: &str =
    " (CAP_PERFMON is needed for it: be root, or have `setcap cap_perfmon+ep` on the program)";

/// A persistent event as it was when listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persistent {
    /// What it is opened with again; never another's while the machine lives.
    pub id: u64,
    /// Under which sysfs lists it.
    pub name: String,
    /// Whose work it counts.
    pub cpu: u32,
    /// Data pages of its ring; `None`: it has no ring yet.
    pub data_pages: Option<u32>,
    /// The host's own: to be read and flushed alone.
    pub is_operators: bool,
    /// Its ring outlives a reset of this machine.
    pub outlives_reset: bool,
    /// Its ring holds the newest records; else it holds what nobody has taken out yet.
    pub overwrites: bool,
    /// What it counts and what its records hold; `disabled` as it was.
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

    /// Its records name the id `id`, or its name is that.
    fn is_called(&self, name: &str) -> bool {
        self.name == name || name.parse() == Ok(self.id)
    }
}

impl Vpmu {
    /// Every persistent event, by ascending id.
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
            // A list that does not go on would be read for ever.
            let further = raw[..filled].iter().filter(|entry| entry.id > after);
            events.extend(further.map(Persistent::from_raw));
            if filled == 0 || events.last().map_or(0, |event| event.id) == after {
                return Ok(events);
            }
        }
    }

    /// The persistent event of this name, or of this id in decimal digits.
    ///
    /// # Errors
    /// [`PersistentError::Unknown`] names those that are called alike.
    pub fn find_persistent(&self, name: &str) -> Result<Persistent, PersistentError> {
        find(self.persistent()?, name)
    }

    /// Another handle of a persistent event: the same event, the same ring, its history
    /// included.
    ///
    /// # Errors
    /// [`PersistentError::Open`], with `ENOENT` if it has ended.
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

    /// As [`Vpmu::reopen`], of whatever the list calls so.
    ///
    /// # Errors
    /// As [`Vpmu::find_persistent`] and [`Vpmu::reopen`].
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

/// As the driver takes it; the device looks at the letters.
fn name_bytes(name: &str) -> Option<[u8; PERSISTENT_NAME]> {
    let mut bytes = [0; PERSISTENT_NAME];
    let taken = bytes[..MOST_LETTERS].get_mut(..name.len())?;
    taken.copy_from_slice(name.as_bytes());
    (!name.contains('\0')).then_some(bytes)
}

impl Event {
    /// Has the event live on when its handles are closed; returns the id to open it again
    /// with, once more the same if it was so already. With an empty name it keeps the one that
    /// it has, or is called `event` and its id.
    ///
    /// # Errors
    /// [`PersistentError::Detach`], with `EINVAL` for an event of a task; without CAP_PERFMON
    /// `EPERM`. [`PersistentError::Name`].
    pub fn detach(&self, name: &str) -> Result<u64, PersistentError> {
        detach(name, |bytes| sys::detach(self.as_fd(), bytes))
    }

    /// Has the event end when its last handle is closed.
    ///
    /// # Errors
    /// [`PersistentError::Attach`], with `EINVAL` if it was not persistent and `EPERM` if it is
    /// the operator's.
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

/// Perf core gives a PMU no calls of its own: for an event of [`crate::perf::PerfPmu`] the device
/// makes them.
impl Vpmu {
    /// As [`Event::detach`], of an event of `perf_event_open(2)`. Its descriptor is a view from
    /// then on, as those that open it again: it reads the event's count, and takes the samples of
    /// its ring; enabling and disabling it changes the view alone.
    ///
    /// # Errors
    /// As [`Event::detach`]; `EBADF` if it is not an event of the vPMU that
    /// `perf_event_open(2)` opened, `EOPNOTSUPP` if its samples hold counts, or the registers or
    /// the stack of the user, or if it is a trace.
    pub fn detach_perf(&self, event: &Event, name: &str) -> Result<u64, PersistentError> {
        detach(name, |bytes| {
            sys::detach_perf(self.as_fd(), event.as_fd(), bytes)
        })
    }

    /// As [`Event::attach`], of an event of `perf_event_open(2)`.
    ///
    /// # Errors
    /// As there; `EBADF` as [`Vpmu::detach_perf`].
    pub fn attach_perf(&self, event: &Event) -> Result<(), PersistentError> {
        sys::attach_perf(self.as_fd(), event.as_fd()).map_err(PersistentError::Attach)
    }
}

/// What the device takes: to tell which of two things was wrong.
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
