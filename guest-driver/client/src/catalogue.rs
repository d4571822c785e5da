//! The catalogue of the events that this host can count. Finds events by name, but does not open them.

use vpmu_abi::uapi::{self, CONFIG_KIND_SHIFT};
use vpmu_abi::{
    CATALOGUE_ANY_CONFIG, CATALOGUE_AUX, CATALOGUE_EXCLUDES, CATALOGUE_FORMAT_SHIFT, CATALOGUE_GUEST_ONLY,
    CATALOGUE_SAMPLES, KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW,
};

use crate::attr::{AttrError, EventAttr};
use crate::suggest::{near, suggestion};
use crate::trace::Format;

const CONFIG_MASK: u64 = (1 << CONFIG_KIND_SHIFT) - 1;

/// An invalid event name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// The catalogue lacks this name.
    #[error("no event {name:?} on this host{}; `vperf list` shows all", suggestion(.near))]
    Unknown {
        /// The requested name.
        name: String,
        /// Similar names.
        near: Vec<String>,
    },
    /// A value was given for an event that accepts none.
    #[error("event {0:?} takes no value: write it without \"=\"")]
    NoValue(String),
    /// The value is not a number, or is too large.
    #[error(
        "{value:?} is not a value for event {name:?}: use a number below 2^48, in decimal or, with the prefix 0x, in hexadecimal"
    )]
    Value {
        /// The event.
        name: String,
        /// The value as given.
        value: String,
    },
    /// A modifier was given for an event that cannot separate user and kernel mode.
    #[error("event {0:?} cannot separate user and kernel mode on this host: write it without \":\"")]
    NoExclude(String),
    /// An unknown modifier.
    #[error("event {name:?}")]
    Modifier {
        /// The event.
        name: String,
        /// The error.
        source: AttrError,
    },
}

/// One event that this host can count.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Entry {
    /// The name for `-e`.
    pub name: String,
    /// Unit of the count: `ns`, `ticks`, `bytes` for a trace, or empty for a plain number.
    pub unit: String,
    /// Description of the counted events.
    pub counts: String,
    /// The counter behind the event, such as `device` or `host perf: task-clock`.
    pub source: String,
    /// The event can sample.
    pub samples: bool,
    /// Both counts and samples exclude the host's work for the vCPU.
    pub guest_only: bool,
    /// The event can be written as `name=value`. The value selects a variant of the event; for
    /// marks, it selects the marks with this value.
    pub takes_value: bool,
    /// `exclude_user` and `exclude_kernel` are supported.
    pub excludes: bool,
    /// Format of the packets in the AUX area, for a trace.
    pub trace: Option<Format>,
    /// Kind of event, by the device's number.
    pub kind: u32,
    /// The event within the kind.
    pub config: u64,
}

impl Entry {
    /// Whether samples exclude the host's work for the vCPU. Samples of hardware events always exclude it, even if the
    /// events' counts include it.
    #[must_use]
    pub fn samples_guest_only(&self) -> bool {
        self.guest_only || [KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW].contains(&self.kind)
    }

    pub(crate) fn from_raw(raw: &uapi::CatalogueEntry) -> Self {
        Self {
            name: text(&raw.name),
            unit: text(&raw.unit),
            counts: text(&raw.counts),
            source: text(&raw.source),
            samples: raw.flags & CATALOGUE_SAMPLES != 0,
            guest_only: raw.flags & CATALOGUE_GUEST_ONLY != 0,
            takes_value: raw.flags & CATALOGUE_ANY_CONFIG != 0,
            excludes: raw.flags & CATALOGUE_EXCLUDES != 0,
            trace: (raw.flags & CATALOGUE_AUX != 0).then(|| Format::of(raw.flags >> CATALOGUE_FORMAT_SHIFT & 0xff)),
            kind: raw.kind,
            config: raw.config,
        }
    }
}

/// Returns the text up to the first zero byte; invalid UTF-8 becomes replacement characters.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Every event that this host can count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalogue {
    entries: Vec<Entry>,
}

impl Catalogue {
    pub(crate) fn new(entries: Vec<Entry>) -> Self {
        Self { entries }
    }

    /// Whether `attr`, of the PMU with the type `pmu_type`, describes a trace.
    pub(crate) fn is_trace(&self, pmu_type: u32, attr: &EventAttr) -> bool {
        let kind = attr.config >> CONFIG_KIND_SHIFT;
        let traces = || self.entries.iter().filter(|entry| entry.trace.is_some());
        attr.pmu_type == pmu_type && traces().any(|entry| u64::from(entry.kind) == kind)
    }

    /// The entries, in the device's order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.name.as_str())
    }

    /// The entry with exactly this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// Parses `spec`: a name from the catalogue, `=value` if the event accepts one, and `:u`, `:k`
    /// or `:uk` if the event supports them. `pmu_type` is [`crate::Info::pmu_type`].
    ///
    /// # Errors
    /// [`CatalogueError`] names the invalid part and says what is valid.
    pub fn attr(&self, pmu_type: u32, spec: &str) -> Result<EventAttr, CatalogueError> {
        let (entry, value, modifiers) = self.split(spec)?;
        let config = match value {
            None => entry.config,
            Some(value) => {
                number(value).ok_or_else(|| CatalogueError::Value { name: entry.name.clone(), value: value.into() })?
            }
        };
        let attr = EventAttr::new(pmu_type, u64::from(entry.kind) << CONFIG_KIND_SHIFT | config);
        let Some(modifiers) = modifiers else {
            return Ok(attr);
        };
        let attr =
            attr.modified(modifiers).map_err(|source| CatalogueError::Modifier { name: entry.name.clone(), source })?;
        if !entry.excludes && (attr.exclude_user || attr.exclude_kernel) {
            return Err(CatalogueError::NoExclude(entry.name.clone()));
        }
        Ok(attr)
    }

    /// Returns the text for `-e` that selects the event in `attr`. The type in `attr` is either
    /// `pmu_type` or one of perf's own types, such as `PERF_TYPE_HARDWARE`. If the catalogue lacks the
    /// event, the text is the event's kind and config in hexadecimal.
    #[must_use]
    pub fn spec(&self, pmu_type: u32, attr: &EventAttr) -> String {
        let (kind, config) = if attr.pmu_type == pmu_type {
            (attr.config >> CONFIG_KIND_SHIFT, attr.config & CONFIG_MASK)
        } else {
            (attr.pmu_type.into(), attr.config)
        };
        let of_kind = || {
            let entries = self.entries.iter();
            entries.filter(|entry| u64::from(entry.kind) == kind)
        };
        let mut spec = if let Some(entry) = of_kind().find(|entry| entry.config == config) {
            // If the event takes a value, write the value even if it is zero.
            let value = if entry.takes_value { "=0" } else { "" };
            format!("{}{value}", entry.name)
        } else if let Some(entry) = of_kind().find(|entry| entry.takes_value) {
            format!("{}={config}", entry.name)
        } else {
            format!("{kind:#x}/{config:#x}")
        };
        match (attr.exclude_user, attr.exclude_kernel) {
            (false, true) => spec.push_str(":u"),
            (true, false) => spec.push_str(":k"),
            _ => {}
        }
        spec
    }

    /// Looks up the entry that `spec` names.
    ///
    /// # Errors
    /// [`CatalogueError::Unknown`]; [`CatalogueError::NoValue`].
    pub fn entry(&self, spec: &str) -> Result<&Entry, CatalogueError> {
        self.split(spec).map(|(entry, ..)| entry)
    }

    /// Splits `spec` into entry, value and modifiers.
    fn split<'a>(&self, spec: &'a str) -> Result<(&Entry, Option<&'a str>, Option<&'a str>), CatalogueError> {
        let (rest, modifiers) = match spec.split_once(':') {
            Some((rest, modifiers)) => (rest, Some(modifiers)),
            None => (spec, None),
        };
        let (name, value) = match rest.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (rest, None),
        };
        let entry = self
            .get(name)
            .ok_or_else(|| CatalogueError::Unknown { name: name.into(), near: near(name, self.names()) })?;
        if value.is_some() && !entry.takes_value {
            return Err(CatalogueError::NoValue(name.into()));
        }
        Ok((entry, value, modifiers))
    }
}

fn number(text: &str) -> Option<u64> {
    let value = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.ok().filter(|value| value >> CONFIG_KIND_SHIFT == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(name: &str, kind: u32, config: u64, flags: u32) -> Entry {
        let mut bytes = [0; 40];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        let (unit, source, counts) = ([0; 16], [b's'; 56], [0xff; 128]);
        Entry::from_raw(&uapi::CatalogueEntry { kind, flags, config, name: bytes, unit, source, counts })
    }

    fn catalogue() -> Catalogue {
        Catalogue::new(vec![
            raw("task-clock", 1, 1, CATALOGUE_SAMPLES),
            raw("cycles", 0, 0, CATALOGUE_SAMPLES | CATALOGUE_EXCLUDES | CATALOGUE_GUEST_ONLY),
            raw("exits-io", 0x101, 2, 0),
            raw("mark", 0x104, 0, CATALOGUE_SAMPLES | CATALOGUE_ANY_CONFIG),
        ])
    }

    #[test]
    fn samples_of_hardware_are_of_the_guest_alone_in_every_count_mode() {
        let only = |kind, flags| raw("event", kind, 0, flags).samples_guest_only();
        assert!([KIND_HARDWARE, KIND_HW_CACHE, KIND_RAW].iter().all(|&kind| only(kind, CATALOGUE_SAMPLES)));
        assert!(!only(1, CATALOGUE_SAMPLES), "a host clock");
        assert!(only(1, CATALOGUE_SAMPLES | CATALOGUE_GUEST_ONLY));
    }

    #[test]
    fn entries_end_at_their_zero_or_their_room() {
        let entry = raw("cycles", 0, 0, 0);
        assert_eq!((entry.name.as_str(), entry.unit.as_str()), ("cycles", ""));
        assert_eq!(entry.source.len(), 56);
        assert_eq!(entry.counts.chars().count(), 128);
    }

    #[test]
    fn traces_name_their_format() {
        let trace = |flags| raw("exit-trace", 0x105, 0, flags).trace;
        assert_eq!(trace(CATALOGUE_SAMPLES | 1 << 16), None);
        assert_eq!(trace(CATALOGUE_AUX | 1 << 16), Some(Format::Exits));
        assert_eq!(trace(CATALOGUE_AUX | 2 << 16), Some(Format::Samples));
        assert_eq!(trace(CATALOGUE_AUX | 0xff << 16 | 1 << 24), Some(Format::Unknown));
    }

    #[test]
    fn names_values_and_modifiers_become_configs() {
        let catalogue = catalogue();
        let config = |spec| catalogue.attr(9, spec).map(|attr| attr.config);
        assert_eq!(config("exits-io"), Ok(0x101 << 48 | 2));
        assert_eq!(config("mark"), Ok(0x104 << 48));
        assert_eq!(config("mark=7"), Ok(0x104 << 48 | 7));
        assert_eq!(config("mark=0xffffffffffff"), Ok(0x104 << 48 | 0xffff_ffff_ffff));
        let attr = catalogue.attr(9, "cycles:u").unwrap();
        assert!(attr.exclude_kernel && !attr.exclude_user && attr.pmu_type == 9);
        assert!(catalogue.attr(9, "task-clock:uk").is_ok());
    }

    #[test]
    fn event_keeps_its_requested_name() {
        let catalogue = catalogue();
        for spec in ["task-clock", "cycles", "cycles:u", "cycles:k", "mark=0", "mark=7"] {
            let attr = catalogue.attr(9, spec).unwrap();
            assert_eq!(catalogue.spec(9, &attr), spec);
        }
        // perf's own numbers.
        assert_eq!(catalogue.spec(9, &EventAttr::new(1, 1)), "task-clock");
        assert_eq!(catalogue.spec(9, &EventAttr::new(4, 0x3c)), "0x4/0x3c");
    }

    #[test]
    fn catalogue_error_names_event_and_value() {
        let catalogue = catalogue();
        let error = |spec: &str| catalogue.attr(9, spec).unwrap_err();
        assert_eq!(error("cycles=1"), CatalogueError::NoValue("cycles".into()));
        assert_eq!(error("task-clock:u"), CatalogueError::NoExclude("task-clock".into()));
        for value in ["", "x", "-1", "0x1000000000000"] {
            let expected = CatalogueError::Value { name: "mark".into(), value: value.into() };
            assert_eq!(error(&format!("mark={value}")), expected);
        }
        assert!(matches!(error("cycles:z"), CatalogueError::Modifier { .. }));
        assert_eq!(
            error("cycels").to_string(),
            "no event \"cycels\" on this host: did you mean cycles?; `vperf list` shows all"
        );
        assert_eq!(
            error("exits").to_string(),
            "no event \"exits\" on this host: did you mean exits-io?; `vperf list` shows all"
        );
        assert_eq!(error("llc-misses").to_string(), "no event \"llc-misses\" on this host; `vperf list` shows all");
    }
}
