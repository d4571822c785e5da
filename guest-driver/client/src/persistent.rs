//! Persistent events, which outlive their handles: listing, reopening and ending them.

use std::io;
use std::os::fd::BorrowedFd;

use vpmu_abi::uapi::{PERSISTENT_OVERWRITE, PERSISTENT_WINDOW, PersistentEntry};
use vpmu_abi::{PERSISTENT_NAME, PERSISTENT_OPERATOR};
use zerocopy::FromZeros;

use crate::attr::{Engine, EventAttr};
use crate::catalogue::text;
use crate::suggest::{near, suggestion};
use crate::sys;

/// Maximum number of entries per call.
const CHUNK: usize = 32;

/// Maximum length of a name in bytes, without the terminating zero.
const MOST_LETTERS: usize = PERSISTENT_NAME - 1;

/// An error of a persistent event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistentError {
    /// The list cannot be read.
    #[error("cannot list persistent events")]
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
    #[error("cannot open the persistent event {name:?}{}", open_hint(.source))]
    Open {
        /// The name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// An invalid name.
    #[error(
        "{0:?} is not a valid name for a persistent event: use at most {MOST_LETTERS} lower-case letters, digits, - and _, beginning with a letter"
    )]
    Name(String),
    /// The event cannot be made persistent.
    #[error("cannot make the event persistent{}", detach_hint(.0))]
    Detach(#[source] io::Error),
    /// The event cannot be made non-persistent.
    #[error("cannot make the event non-persistent{}", attach_hint(.0))]
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
            " (this machine's limit of persistent events is reached: end some with `vperf persist rm`)"
        }
        Some(libc::EINVAL) => {
            " (only an event of a whole CPU, in no group and with its own ring, can be made persistent)"
        }
        _ => "",
    }
}

fn attach_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            " (CAP_PERFMON is needed; the operator's events can be ended only with `vmm ctl` on the host)"
        }
        Some(libc::EINVAL) => " (it is not persistent)",
        _ => "",
    }
}

const NEEDS_CAPABILITY: &str = " (CAP_PERFMON is needed: run as root, or apply `setcap cap_perfmon+ep` to the program)";

/// A persistent event as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Persistent {
    /// The id that reopens the event. The device never reuses an id while the machine runs.
    pub id: u64,
    /// Its name in sysfs.
    pub name: String,
    /// The CPU that the event counts on; `u32::MAX` while that CPU is unknown.
    pub cpu: u32,
    /// Data pages of its ring; `None` while it has no ring.
    pub data_pages: Option<u32>,
    /// Whether the host's operator owns it. If so, the guest can only read it, flush it, and map
    /// its ring read-only.
    pub is_operators: bool,
    /// Whether its ring outlives a guest reset.
    pub outlives_reset: bool,
    /// Whether its ring overwrites the oldest records. If not, the ring keeps unread records.
    pub overwrites: bool,
    /// The event's attributes; `disabled`, `period` and `engine` have their current values.
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

    /// Whether `name` is the event's name, or its id in decimal.
    fn is_called(&self, name: &str) -> bool {
        self.name == name || name.parse() == Ok(self.id)
    }
}

/// Lists the persistent events of a device by ascending id.
pub(crate) fn list(device: BorrowedFd<'_>) -> Result<Vec<Persistent>, PersistentError> {
    let mut events: Vec<Persistent> = Vec::new();
    loop {
        let after = events.last().map_or(0, |event| event.id);
        let mut raw = [PersistentEntry::new_zeroed(); CHUNK];
        let filled = sys::persistent(device, after, &mut raw).map_err(PersistentError::List)?;
        // Skip ids that do not ascend: otherwise this loop could run forever.
        let further = raw[..filled].iter().filter(|entry| entry.id > after);
        events.extend(further.map(Persistent::from_raw));
        if filled == 0 || events.last().map_or(0, |event| event.id) == after {
            return Ok(events);
        }
    }
}

pub(crate) fn find(events: Vec<Persistent>, name: &str) -> Result<Persistent, PersistentError> {
    let like = near(name, events.iter().map(|event| event.name.as_str()));
    let found = events.into_iter().find(|event| event.is_called(name));
    found.ok_or_else(|| PersistentError::Unknown { name: name.into(), near: like })
}

/// Returns `name` padded with zero bytes, as the driver expects it; `None` if `name` is too long or
/// contains a zero byte. The device checks the characters.
fn name_bytes(name: &str) -> Option<[u8; PERSISTENT_NAME]> {
    let mut bytes = [0; PERSISTENT_NAME];
    let taken = bytes[..MOST_LETTERS].get_mut(..name.len())?;
    taken.copy_from_slice(name.as_bytes());
    (!name.contains('\0')).then_some(bytes)
}

/// Calls `call` with the bytes of the event's new name.
pub(crate) fn detach(
    name: &str,
    call: impl FnOnce([u8; PERSISTENT_NAME]) -> io::Result<u64>,
) -> Result<u64, PersistentError> {
    let bytes = name_bytes(name).ok_or_else(|| PersistentError::Name(name.into()))?;
    call(bytes).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) if !is_name(name) => PersistentError::Name(name.into()),
        _ => PersistentError::Detach(error),
    })
}

/// Whether the device accepts `name`: empty, or a lower-case letter followed by lower-case letters,
/// digits, `-` and `_`. The device refuses any other name with `EINVAL`.
fn is_name(name: &str) -> bool {
    let mut letters = name.bytes();
    let rest = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    letters.next().is_none_or(|first| first.is_ascii_lowercase() && letters.all(rest))
}

#[cfg(test)]
#[path = "persistent_tests.rs"]
mod tests;
