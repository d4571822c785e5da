//! The events that an operator permits a guest to open, in the syntax of `vmm run --help`: a tier, and lists that add
//! or remove events.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Deserializer, Serialize};
use vpmu::abi::{KIND_EXITS, KIND_HARDWARE, KIND_HW_CACHE, KIND_MARK, KIND_RAW, KIND_SOFTWARE, KIND_VMM_TRACE};
use vpmu::{EventMatch, Policy};

use crate::raw_events::RawEvents;

/// Names and numbers of the event kinds, for entries such as `raw:0x11/0xff`.
const KINDS: [(&str, u32); 7] = [
    ("hardware", KIND_HARDWARE),
    ("hw-cache", KIND_HW_CACHE),
    ("raw", KIND_RAW),
    ("software", KIND_SOFTWARE),
    ("exits", KIND_EXITS),
    ("mark", KIND_MARK),
    ("vmm-traces", KIND_VMM_TRACE),
];
/// Minimum similarity of a suggested name.
const ALIKE: f64 = 0.8;

/// The events of a guest's PMU, before lists add or remove events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The machine has no paravirtual PMU
    Off,
    /// Clocks, marks, and exits that the VMM counts
    Clocks,
    /// Every event of the clocks tier; also hardware and cache events, traces, and the host's software events
    /// and statistics
    #[default]
    Standard,
    /// Every event of the standard tier; also every raw event of the host's CPU
    Full,
}

impl Tier {
    /// The events that a guest with this tier may open.
    fn events(self) -> Vec<EventMatch> {
        match self {
            Self::Off => Vec::new(),
            Self::Clocks => vpmu::Tier::Clocks.events(),
            Self::Standard => vpmu::Tier::Standard.events(),
            Self::Full => vpmu::Tier::Full.events(),
        }
    }
}

/// The policy as flags.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Events that the guest may have")]
pub struct PolicyArgs {
    /// Tier of events that the guest may open, before the options below add or remove events: off (the
    /// machine has no PMU), clocks, standard or full. See below [default: standard]
    #[arg(long, value_enum, value_name = "TIER", hide_possible_values = true)]
    pub pmu: Option<Tier>,

    /// Add events to the tier of --pmu. Without --pmu, the guest has only the added events. Can be repeated.
    /// See below for names and other ways to select events
    #[arg(long = "allow-event", value_name = "EVENT[,...]", value_delimiter = ',')]
    pub allow_events: Vec<Events>,

    /// Remove events that the guest could otherwise open. The guest then cannot see that the host has them.
    /// Can be repeated
    #[arg(long = "deny-event", value_name = "EVENT[,...]", value_delimiter = ',')]
    pub deny_events: Vec<Events>,

    /// Also let the guest open these raw hardware events: hexadecimal numbers and ranges of them, or all.
    /// See below [default: none]
    #[arg(long, value_name = "LIST|all")]
    pub raw_events: Option<RawEvents>,

    /// Open hardware events even if the host's KVM gives VMs a mediated PMU. While a hardware event is open,
    /// Linux starts no VM with a mediated PMU. By default hardware events are not opened on such a host,
    /// unless the tier is full, --raw-events is given, or --allow-event or --persistent names a hardware
    /// event
    #[arg(long, conflicts_with = "no_hardware_events")]
    pub hardware_events: bool,

    /// Open no event that hardware counts: not for the guest, not for --persistent, and not to probe the host.
    /// While such an event is open, Linux starts no VM with a mediated PMU on this host
    #[arg(long)]
    pub no_hardware_events: bool,
}

/// The policy in a configuration file.
#[derive(Debug, Default)]
pub(crate) struct PolicyFile {
    pub(crate) vpmu: Option<bool>,
    pub(crate) pmu: Option<Tier>,
    pub(crate) allow_events: Vec<Events>,
    pub(crate) deny_events: Vec<Events>,
    pub(crate) raw_events: Option<RawEvents>,
    pub(crate) hardware_events: Option<bool>,
}

/// When this machine uses hardware counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HardwareUse {
    /// Never: hardware events are not opened.
    Never,
    /// Unless the host's KVM is known to have mediated PMUs.
    UnlessMediated,
    /// Always, even if that prevents other VMs from starting.
    Always,
}

impl HardwareUse {
    /// Whether this machine uses hardware counters. `mediated` is true if the host's KVM has mediated PMUs, and `None`
    /// if this is unknown.
    #[must_use]
    pub fn on(self, mediated: Option<bool>) -> bool {
        match self {
            Self::Never => false,
            Self::UnlessMediated => mediated != Some(true),
            Self::Always => true,
        }
    }
}

/// The events that a guest may open: the tier's events, plus the events that the lists add, minus the events that the
/// lists remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The tier from which the lists start. `None` if the guest has only the events that the lists add.
    pub tier: Option<Tier>,
    /// The events that the guest may open.
    pub policy: Policy,
    /// Raw events that may be opened on the host.
    pub raw: vpmu::RawEvents,
    /// When hardware events may be opened.
    pub hardware: HardwareUse,
}

/// Errors in a policy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PolicyError {
    /// Events for a machine without a PMU.
    #[error("{0} has no effect without the PMU: omit '--pmu off' or '--no-vpmu'")]
    Off(&'static str),
    /// Contradictory flags for the PMU.
    #[error("--no-vpmu conflicts with --pmu {0}: omit one of them")]
    NoVpmu(&'static str),
    /// An entry without an effect.
    #[error("--allow-event {allowed} has no effect, as --deny-event {denied} denies it: remove one of them")]
    Contradiction {
        /// The allowed event.
        allowed: String,
        /// The entry that denies it.
        denied: String,
    },
    /// Hardware events both requested and disabled.
    #[error("{0} requests hardware events, which --no-hardware-events disables: remove one of the two")]
    HardwareDisabled(String),
}

/// One entry of a list of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Events {
    text: String,
    matches: Vec<EventMatch>,
}

/// Errors in an entry.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EventsError {
    /// An unknown name.
    #[error("there is no event `{name}`{suggestion}; 'vmm check --pmu full' lists this host's events")]
    Unknown {
        /// The given name.
        name: String,
        /// Text that suggests a similar name, or an empty text.
        suggestion: String,
    },
    /// A pattern that matches no name.
    #[error("no event name matches `{0}`")]
    Pattern(String),
    /// An invalid number.
    #[error("`{0}`: must be KIND:CONFIG or KIND:CONFIG/MASK, as in raw:0x11/0xff")]
    Number(String),
}

impl Display for Events {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Events {
    type Err = EventsError;

    fn from_str(text: &str) -> Result<Self, EventsError> {
        Ok(Self { matches: matches(text)?, text: text.to_owned() })
    }
}

impl<'de> Deserialize<'de> for Events {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

fn matches(text: &str) -> Result<Vec<EventMatch>, EventsError> {
    if let Some((kind, numbers)) = text.split_once(':') {
        return Ok(vec![numbered(kind, numbers).ok_or_else(|| EventsError::Number(text.to_owned()))?]);
    }
    let named = EventMatch::named();
    if text.contains('*') {
        let fit = named.iter().filter(|(name, _)| fits(text, name));
        let fit: Vec<EventMatch> = fit.map(|&(_, event)| event).collect();
        return if fit.is_empty() { Err(EventsError::Pattern(text.to_owned())) } else { Ok(fit) };
    }
    if let Some((_, event)) = named.iter().find(|(name, _)| name == text) {
        return Ok(vec![*event]);
    }
    if let Some(&(_, kind)) = KINDS.iter().find(|(name, _)| *name == text) {
        return Ok(vec![EventMatch::kind(kind)]);
    }
    if let Some(config) = text.strip_prefix("raw-").and_then(number) {
        return Ok(vec![EventMatch::one(KIND_RAW, config)]);
    }
    let known = named.iter().map(|(name, _)| name.as_str());
    let known = known.chain(KINDS.iter().map(|&(name, _)| name));
    Err(EventsError::Unknown { name: text.to_owned(), suggestion: nearest(text, known) })
}

/// Text that suggests the most similar known name, or an empty text if no name is similar enough.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let ranked = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = ranked.max_by(|(one, _), (other, _)| one.total_cmp(other));
    match best.filter(|&(likeness, _)| likeness >= ALIKE) {
        Some((_, known)) => format!(": did you mean {known}?"),
        None => String::new(),
    }
}

/// Whether `name` matches `pattern`. Each `*` in the pattern matches any number of characters.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let (Some(first), Some(last)) = (parts.next(), parts.next_back()) else {
        return pattern == name;
    };
    let Some(rest) = name.strip_prefix(first) else {
        return false;
    };
    let rest = parts.try_fold(rest, |rest, part| rest.find(part).map(|at| &rest[at + part.len()..]));
    rest.is_some_and(|rest| rest.ends_with(last))
}

/// Parses `KIND:CONFIG[/MASK]`.
fn numbered(kind: &str, numbers: &str) -> Option<EventMatch> {
    let &(_, kind) = KINDS.iter().find(|(name, _)| *name == kind)?;
    let (config, mask) = match numbers.split_once('/') {
        Some((config, mask)) => (number(config)?, number(mask)?),
        None => (number(numbers)?, u64::MAX),
    };
    // A config with bits outside the mask is a mistake.
    (config & !mask == 0).then_some(EventMatch { kind, config, mask })
}

fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let plain = digits.chars().all(|digit| digit.is_digit(radix));
    plain.then(|| u64::from_str_radix(digits, radix).ok())?
}

fn of_hardware(event: &EventMatch) -> bool {
    Policy::new(vec![*event], Vec::new()).allows_hardware()
}

/// Whether `name` is an event that hardware counts. `name` is an event name from the catalogue or from --persistent.
pub(crate) fn is_hardware(name: &str) -> bool {
    matches(name).is_ok_and(|events| events.iter().any(of_hardware))
}

/// The config of the raw event that has this catalogue name, such as `raw-0x11`.
fn raw_config(name: &str) -> Option<u64> {
    name.strip_prefix("raw-").and_then(number)
}

impl PolicyArgs {
    /// Decides which events the guest may open. For flags that are not given, the settings come from `file`.
    /// `persistent` has the names of the operator's own events. `no_vpmu` means that the machine has no PMU, because
    /// `--no-vpmu` was given or the snapshot has no PMU.
    ///
    /// # Errors
    /// [`PolicyError`], if the settings contradict each other.
    pub(crate) fn decide<'a>(
        self,
        file: PolicyFile,
        no_vpmu: bool,
        persistent: impl Iterator<Item = &'a str>,
    ) -> Result<Decision, PolicyError> {
        let wanted = |given: Vec<Events>, file| if given.is_empty() { file } else { given };
        let allow = wanted(self.allow_events, file.allow_events);
        let deny = wanted(self.deny_events, file.deny_events);
        let raw_events = self.raw_events.or(file.raw_events);
        let hardware = match (self.hardware_events, self.no_hardware_events) {
            (_, true) => Some(false),
            (true, _) => Some(true),
            _ => file.hardware_events,
        };
        let tier = self.pmu.or(file.pmu);
        let without = no_vpmu || self.pmu.is_none() && file.vpmu == Some(false);
        if let (true, Some(tier)) = (without, tier.filter(|&tier| tier != Tier::Off)) {
            return Err(PolicyError::NoVpmu(name(tier)));
        }
        if without || tier == Some(Tier::Off) {
            for (given, option) in [
                (!allow.is_empty(), "--allow-event"),
                (!deny.is_empty(), "--deny-event"),
                (raw_events.is_some(), "--raw-events"),
                (hardware == Some(true), "--hardware-events"),
            ] {
                if given {
                    return Err(PolicyError::Off(option));
                }
            }
            return Ok(Decision {
                tier: Some(Tier::Off),
                policy: Policy::new(Vec::new(), Vec::new()),
                raw: vpmu::RawEvents::default(),
                hardware: HardwareUse::Never,
            });
        }
        for allowed in &allow {
            let covers = |event: &EventMatch| {
                let mut denied = deny.iter().flat_map(|denied| &denied.matches);
                denied.any(|denied| denied.covers(event))
            };
            if allowed.matches.iter().all(covers) {
                let by = deny.iter().find(|denied| {
                    let mut matches = denied.matches.iter();
                    matches.any(|denied| allowed.matches.iter().any(|event| denied.covers(event)))
                });
                return Err(PolicyError::Contradiction {
                    allowed: allowed.to_string(),
                    denied: by.map(ToString::to_string).unwrap_or_default(),
                });
            }
        }
        let tier = match (tier, allow.is_empty()) {
            (None, true) => Some(Tier::default()),
            (tier, _) => tier,
        };
        let mut allowed = tier.map(Tier::events).unwrap_or_default();
        allowed.extend(allow.iter().flat_map(|events| events.matches.iter().copied()));
        let listed = raw_events.unwrap_or_default().into();
        allowed.extend(raw_matches(&listed));
        let denied = deny.iter().flat_map(|events| events.matches.clone());
        let policy = Policy::new(allowed.clone(), denied.collect());

        let (mut persists_hardware, mut own_raw) = (false, BTreeSet::new());
        for event in persistent {
            persists_hardware |= is_hardware(event);
            own_raw.extend(raw_config(event));
        }
        let named = allow.iter().find(|events| events.matches.iter().any(of_hardware));
        let asked = match (tier, named) {
            (Some(Tier::Full), _) => Some("--pmu full".to_owned()),
            (_, Some(events)) => Some(format!("--allow-event {events}")),
            _ if listed != vpmu::RawEvents::default() => Some("--raw-events".to_owned()),
            _ => None,
        };
        let hardware = match (hardware, asked) {
            (Some(false), Some(option)) => return Err(PolicyError::HardwareDisabled(option)),
            (Some(false), None) => HardwareUse::Never,
            (Some(true), _) | (None, Some(_)) => HardwareUse::Always,
            (None, None) if persists_hardware => HardwareUse::Always,
            (None, None) if !policy.allows_hardware() => HardwareUse::Never,
            (None, None) => HardwareUse::UnlessMediated,
        };
        Ok(Decision { tier, raw: raw(&allowed, own_raw), policy, hardware })
    }
}

impl Decision {
    /// The tier's name, or `list` if there is no tier.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.tier.map_or("list", name)
    }
}

fn name(tier: Tier) -> &'static str {
    match tier {
        Tier::Off => "off",
        Tier::Clocks => "clocks",
        Tier::Standard => "standard",
        Tier::Full => "full",
    }
}

fn raw_matches(raw: &vpmu::RawEvents) -> Vec<EventMatch> {
    match raw {
        vpmu::RawEvents::All => vec![EventMatch::kind(KIND_RAW)],
        vpmu::RawEvents::Listed(configs) => {
            let one = |&config| EventMatch::one(KIND_RAW, config);
            configs.iter().map(one).collect()
        }
    }
}

/// The raw events that may be opened on the host: the raw events in `allowed`, for the guest, and the events in `own`,
/// for the operator.
fn raw(allowed: &[EventMatch], own: BTreeSet<u64>) -> vpmu::RawEvents {
    let mut configs = own;
    for event in allowed.iter().filter(|event| event.kind == KIND_RAW) {
        if event.mask != u64::MAX {
            return vpmu::RawEvents::All;
        }
        configs.insert(event.config);
    }
    vpmu::RawEvents::Listed(configs)
}

#[cfg(test)]
mod tests;
