//! The driver's PMU as sysfs describes it, like any other PMU. The driver replays samples of events opened here to perf
//! core, which writes them to the events' rings.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::attr::EventAttr;
use crate::event::Event;

/// The PMU's directory in sysfs.
pub const SYSFS: &str = "/sys/bus/event_source/devices/vpmu";

/// An error of sysfs or of `perf_event_open(2)`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PerfError {
    /// The PMU is missing.
    #[error("no PMU at {}: load the driver with `modprobe virtio_pmu`, and mount sysfs", .0.display())]
    Missing(PathBuf),
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The type is not a number.
    #[error("{} contains {text:?}, which is not a PMU's type", path.display())]
    Type {
        /// The path.
        path: PathBuf,
        /// The file's contents.
        text: String,
    },
    /// An unknown event name.
    #[error("the PMU has no event {name:?}, only: {}", known.join(", "))]
    Unknown {
        /// The requested name.
        name: String,
        /// All event names.
        known: Vec<String>,
    },
    /// A format other than bit ranges of `config`.
    #[error("the format {format:?} of {term:?} does not consist of bit ranges of config")]
    Format {
        /// The term.
        term: String,
        /// The format in sysfs.
        format: String,
    },
    /// A term of an event that is neither `name` nor `name=number`, or whose number does not fit the
    /// term's bits.
    #[error("the term {0:?} is not `name` or `name=number` with a number that fits the term's bits")]
    Term(String),
    /// The kernel refused the event.
    #[error("perf_event_open")]
    Open(#[source] io::Error),
}

/// The PMU as described in sysfs.
#[derive(Debug)]
pub struct PerfPmu {
    path: PathBuf,
    pmu_type: u32,
}

impl PerfPmu {
    /// Reads the PMU's type from [`SYSFS`].
    ///
    /// # Errors
    /// [`PerfError`]: most often, the driver is not loaded.
    pub fn open() -> Result<Self, PerfError> {
        Self::open_at(Path::new(SYSFS))
    }

    /// Reads the PMU's type from the directory `path` instead of [`SYSFS`].
    ///
    /// # Errors
    /// See [`PerfPmu::open`].
    pub fn open_at(path: &Path) -> Result<Self, PerfError> {
        let file = path.join("type");
        let text = match read(&file) {
            Err(PerfError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(PerfError::Missing(path.into()));
            }
            text => text?,
        };
        let pmu_type = text.parse().map_err(|_| PerfError::Type { path: file, text })?;
        Ok(Self { path: path.into(), pmu_type })
    }

    /// `perf_event_attr::type` of the PMU's events.
    #[must_use]
    pub fn pmu_type(&self) -> u32 {
        self.pmu_type
    }

    /// The names of the PMU's events, sorted.
    ///
    /// # Errors
    /// [`PerfError::Read`].
    pub fn events(&self) -> Result<Vec<String>, PerfError> {
        let path = self.path.join("events");
        let error = |source| PerfError::Read { path: path.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&path).map_err(error)? {
            names.push(entry.map_err(error)?.file_name().to_string_lossy().into_owned());
        }
        // Skip the files with an event's unit and scale.
        names.retain(|name| !name.contains('.'));
        names.sort_unstable();
        Ok(names)
    }

    /// Returns attributes for the event with this name in sysfs. An event opened with them counts the
    /// calling thread, and is disabled at first.
    ///
    /// # Errors
    /// [`PerfError::Unknown`]; see also [`PerfPmu::events`] and [`PerfPmu::attr_of_terms`].
    pub fn attr(&self, name: &str) -> Result<EventAttr, PerfError> {
        let known = self.events()?;
        if !known.iter().any(|known| known == name) {
            return Err(PerfError::Unknown { name: name.into(), known });
        }
        self.attr_of_terms(&read(&self.path.join("events").join(name))?)
    }

    /// Like [`PerfPmu::attr`], for an event in perf's terms: the text between the slashes of
    /// `vpmu/kind=0x101,event=2/`.
    ///
    /// # Errors
    /// [`PerfError::Term`]; [`PerfError::Format`]; [`PerfError::Read`] for a term without a format
    /// in sysfs.
    pub fn attr_of_terms(&self, terms: &str) -> Result<EventAttr, PerfError> {
        let mut config = 0;
        for term in terms.split(',') {
            let wrong = || PerfError::Term(term.into());
            let (name, value) = term.split_once('=').unwrap_or((term, "1"));
            let value = number(value).ok_or_else(wrong)?;
            if name == "config" {
                config |= value;
                continue;
            }
            // Refuse paths: the name must be a file in the format directory.
            if name.is_empty() || name.contains('/') || name.starts_with('.') {
                return Err(wrong());
            }
            let format = read(&self.path.join("format").join(name))?;
            let bits = bits(&format).ok_or_else(|| PerfError::Format { term: name.into(), format: format.clone() })?;
            config |= spread(value, &bits).ok_or_else(wrong)?;
        }
        Ok(EventAttr::new(self.pmu_type, config))
    }

    /// Opens an event with `perf_event_open(2)`.
    ///
    /// # Errors
    /// [`PerfError::Open`] with the kernel's error number as its source.
    pub fn open_event(&self, attr: &EventAttr) -> Result<Event, PerfError> {
        open(attr, None)
    }

    /// Opens an event in the group that `leader` leads; `leader` must be an event of this PMU.
    ///
    /// # Errors
    /// See [`PerfPmu::open_event`].
    pub fn open_member(&self, attr: &EventAttr, leader: &Event) -> Result<Event, PerfError> {
        open(attr, Some(leader))
    }
}

fn open(attr: &EventAttr, leader: Option<&Event>) -> Result<Event, PerfError> {
    let place = attr.place(leader.map(Event::perf_fd));
    let fd = vpmu_perf::call::open(&attr.to_raw(false), place).map_err(PerfError::Open)?;
    Ok(Event::of_perf(fd, attr))
}

fn read(path: &Path) -> Result<String, PerfError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim_end().to_owned()),
        Err(source) => Err(PerfError::Read { path: path.into(), source }),
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The bits of `config` that a format such as `config:0-7,32-35` lists. The first bit in the list holds
/// the lowest bit of a value.
fn bits(format: &str) -> Option<Vec<u32>> {
    let mut bits = Vec::new();
    for range in format.strip_prefix("config:")?.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last > 63 {
            return None;
        }
        bits.extend(first..=last);
    }
    Some(bits)
}

/// Returns a config with the bits of `value` at the positions `bits`; `None` if `value` does not fit
/// into that many bits.
fn spread(value: u64, bits: &[u32]) -> Option<u64> {
    if bits.len() < 64 && value >> bits.len() != 0 {
        return None;
    }
    let set = bits.iter().enumerate().filter(|&(index, _)| index < 64 && value >> index & 1 != 0);
    Some(set.fold(0, |config, (_, bit)| config | 1 << bit))
}

#[cfg(test)]
#[path = "perf_tests.rs"]
mod tests;
