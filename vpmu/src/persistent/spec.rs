//! Parses persistent events in the operator's syntax, and fills in defaults. The catalogue, not this module,
//! decides whether the host can count an event.

use std::str::FromStr;

use super::Persist;
use crate::abi;
use crate::size::parse_bytes;
use crate::source::Rate;

/// perf's `PERF_SAMPLE_*` for the identifier, the instruction pointer, the task, the time, the address (the value of a
/// mark), the CPU and the period. Such a record is 64 bytes long.
const SAMPLE_TYPE: u64 = 1 << 16 | 1 << 0 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 7 | 1 << 8;
/// perf's `PERF_SAMPLE_CALLCHAIN`.
const CALL_CHAIN: u64 = 1 << 5;
const DEFAULT_FREQUENCY: u64 = 1000;
/// 64 KiB.
const DEFAULT_PAGES: u32 = 16;
const PAGE: u64 = abi::PAGE_SIZE as u64;
/// Events that no host can sample. The catalogue lists them without `CATALOGUE_SAMPLES`.
const COUNTED: [&str; 7] = ["tsc", "exits", "halts", "guest-time", "page-faults", "context-switches", "cpu-migrations"];

/// One persistent event, or one per vCPU, in the operator's syntax: a catalogue name, then options.
///
/// ```
/// let each: vpmu::PersistSpec = "cpu-clock,freq=100,size=64K,name=flight".parse()?;
/// assert_eq!(each.events(2)[1].name.as_deref(), Some("flight-1"));
/// let first: vpmu::Persist = "mark=7,cpu=0".parse()?;
/// assert_eq!(first.name.as_deref(), Some("mark-7"));
/// # Ok::<(), vpmu::PersistSpecError>(())
/// ```
///
/// The options are:
/// - `period` or `freq`: the sampling rate
/// - `cpu`: a vCPU's number, or `all`
/// - `size`: the size of the event's ring, in bytes or with K or M
/// - `name`: the event's name
/// - `call-graph`: samples with call chains, each of which costs an exit
///
/// If neither `period` nor `freq` is given, the rate depends on the event. An event that counts marks is sampled
/// at each mark, and an event `exits-...` is sampled at each exit that it counts. Clocks and hardware events are
/// sampled 1000 times a second. Events that cannot be sampled, and events with `size=0`, only count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PersistSpec {
    event: String,
    rate: Option<Rate>,
    /// `None`: all vCPUs.
    cpu: Option<u32>,
    /// Data pages of its ring.
    pages: u32,
    name: Option<String>,
    call_graph: bool,
}

/// Errors in the text of a [`PersistSpec`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PersistSpecError {
    /// The event's name is missing.
    #[error("the event is missing: begin with its name, as in marks,size=1M")]
    NoEvent,
    /// An unknown option.
    #[error("`{0}` is not an option of a persistent event: use period, freq, cpu, size, name or call-graph")]
    Option(String),
    /// A repeated option.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// An invalid value.
    #[error("{option}={value}: must be {wanted}")]
    Value {
        /// The option.
        option: &'static str,
        /// The given value.
        value: String,
        /// Description of valid values.
        wanted: &'static str,
    },
    /// Both period and freq.
    #[error("period and freq: omit one of them")]
    TwoRates,
    /// A size or call chains for an event without samples.
    #[error("`{0}` only counts and has no samples: omit size and call-graph")]
    OnlyCounts(String),
    /// Samples without a ring.
    #[error("samples need a ring: omit size=0, or omit period, freq and call-graph")]
    NoRoom,
}

impl FromStr for PersistSpec {
    type Err = PersistSpecError;

    fn from_str(text: &str) -> Result<Self, PersistSpecError> {
        let (event, options) = text.split_once(',').unwrap_or((text, ""));
        if event.is_empty() {
            return Err(PersistSpecError::NoEvent);
        }
        let (mut period, mut freq, mut cpu, mut size, mut name, mut call_graph) = (None, None, None, None, None, None);
        for option in options.split(',').filter(|option| !option.is_empty()) {
            let unknown = || PersistSpecError::Option(option.to_owned());
            if option == "call-graph" {
                once("call-graph", &mut call_graph, ())?;
                continue;
            }
            let (key, value) = option.split_once('=').ok_or_else(unknown)?;
            match key {
                "period" => once("period", &mut period, positive("period", value)?)?,
                "freq" => once("freq", &mut freq, positive("freq", value)?)?,
                "cpu" => once("cpu", &mut cpu, vcpu(value)?)?,
                "size" => once("size", &mut size, pages(value)?)?,
                "name" => once("name", &mut name, value.to_owned())?,
                _ => return Err(unknown()),
            }
        }
        let given = match (period, freq) {
            (Some(_), Some(_)) => return Err(PersistSpecError::TwoRates),
            (Some(period), None) => Some(Rate::Period(period)),
            (None, Some(freq)) => Some(Rate::Frequency(freq)),
            (None, None) => None,
        };
        let rate = match size {
            Some(0) if given.is_some() || call_graph.is_some() => return Err(PersistSpecError::NoRoom),
            Some(0) => None,
            _ => given.or_else(|| usual_rate(event)),
        };
        let pages = match (rate, size) {
            (Some(_), size) => size.unwrap_or(DEFAULT_PAGES),
            (None, None | Some(0)) if call_graph.is_none() => 0,
            (None, _) => return Err(PersistSpecError::OnlyCounts(event.to_owned())),
        };
        Ok(Self { event: event.to_owned(), rate, cpu: cpu.flatten(), pages, name, call_graph: call_graph.is_some() })
    }
}

impl PersistSpec {
    /// Catalogue name of the counted event.
    #[must_use]
    pub fn event_name(&self) -> &str {
        let end = self.event.find(['=', ':']);
        &self.event[..end.unwrap_or(self.event.len())]
    }

    /// Whether the event's samples have call chains.
    #[must_use]
    pub fn has_call_graph(&self) -> bool {
        self.call_graph
    }

    /// Returns the requests for the device of a machine with `vcpus` vCPUs.
    #[must_use]
    pub fn events(&self, vcpus: u32) -> Vec<Persist> {
        match self.cpu {
            Some(vcpu) => vec![self.on(vcpu, false)],
            None => (0..vcpus).map(|vcpu| self.on(vcpu, vcpus > 1)).collect(),
        }
    }

    /// Returns the request for `vcpu`. If `several` is set, other vCPUs also get the event, so the vCPU's number is
    /// appended to the name.
    fn on(&self, vcpu: u32, several: bool) -> Persist {
        let name = self.name.clone().unwrap_or_else(|| name(&self.event));
        Persist {
            name: Some(if several { format!("{name}-{vcpu}") } else { name }),
            event: self.event.clone(),
            vcpu,
            rate: self.rate,
            sample_type: SAMPLE_TYPE | if self.call_graph { CALL_CHAIN } else { 0 },
            pages: self.pages,
        }
    }
}

/// Parses one event, for the vCPU in the option `cpu`, or for vCPU 0 if that option is missing or `all`.
impl FromStr for Persist {
    type Err = PersistSpecError;

    fn from_str(text: &str) -> Result<Self, PersistSpecError> {
        let spec: PersistSpec = text.parse()?;
        Ok(spec.on(spec.cpu.unwrap_or(0), false))
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for PersistSpec {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Returns a name made from an event. Characters that a name cannot contain become dashes.
fn name(event: &str) -> String {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let dash = |c| if allowed(c) { c } else { '-' };
    event.chars().map(dash).collect()
}

fn usual_rate(event: &str) -> Option<Rate> {
    let name = event.split(['=', ':']).next().unwrap_or(event);
    if COUNTED.contains(&name) {
        None
    } else if ["mark", "marks"].contains(&name) || name.starts_with("exits-") {
        Some(Rate::Period(1))
    } else {
        Some(Rate::Frequency(DEFAULT_FREQUENCY))
    }
}

fn once<T>(option: &'static str, place: &mut Option<T>, value: T) -> Result<(), PersistSpecError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(PersistSpecError::Twice(option)),
    }
}

fn wrong(option: &'static str, value: &str, wanted: &'static str) -> PersistSpecError {
    PersistSpecError::Value { option, value: value.to_owned(), wanted }
}

fn positive(option: &'static str, value: &str) -> Result<u64, PersistSpecError> {
    let number = value.parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| wrong(option, value, "a number of 1 or more"))
}

fn vcpu(value: &str) -> Result<Option<u32>, PersistSpecError> {
    match value {
        "all" => Ok(None),
        number => number.parse().map(Some).map_err(|_| wrong("cpu", value, "the number of a vCPU, or all")),
    }
}

fn pages(value: &str) -> Result<u32, PersistSpecError> {
    let bytes = parse_bytes(value).ok();
    let whole = bytes.filter(|bytes| bytes.is_multiple_of(PAGE));
    whole
        .and_then(|bytes| u32::try_from(bytes / PAGE).ok())
        .filter(|&pages| pages == 0 || pages.is_power_of_two())
        .ok_or_else(|| wrong("size", value, "4K, 8K, 16K and so on, or 0"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

    use super::*;

    fn events(text: &str) -> Vec<(String, u32, Option<Rate>, u32)> {
        let spec: PersistSpec = text.parse().unwrap();
        spec.events(2).into_iter().map(|event| (event.name.unwrap(), event.vcpu, event.rate, event.pages)).collect()
    }

    #[test]
    fn omitted_option_is_chosen_by_the_event() {
        let each = Some(Rate::Period(1));
        let clock = Some(Rate::Frequency(1000));
        for (text, name, rate, pages) in [
            ("marks", "marks", each, 16),
            ("mark=7", "mark-7", each, 16),
            ("exits-io:k", "exits-io-k", each, 16),
            ("cpu-clock", "cpu-clock", clock, 16),
            ("instructions:u", "instructions-u", clock, 16),
            ("tsc", "tsc", None, 0),
            ("exits", "exits", None, 0),
            ("halts,size=0", "halts", None, 0),
            ("marks,size=0", "marks", None, 0),
        ] {
            let of = |vcpu| (format!("{name}-{vcpu}"), vcpu, rate, pages);
            assert_eq!(events(text), [of(0), of(1)], "{text}");
        }
    }

    #[test]
    fn given_option_is_taken() {
        let expected = [("io".to_owned(), 1, Some(Rate::Period(10)), 256)];
        assert_eq!(events("exits-io,cpu=1,period=10,size=1M,name=io"), expected);
        let expected = [("cycles".to_owned(), 0, Some(Rate::Frequency(99)), 1)];
        assert_eq!(events("cycles,freq=99,size=4096,cpu=0"), expected);
        assert_eq!(events("marks,cpu=all,name=m")[1].0, "m-1");
        let event = |text: &str| text.parse::<PersistSpec>().unwrap().events(1)[0].clone();
        assert_eq!(event("mark=7:u").event, "mark=7:u");
        assert_eq!(event("marks").name.as_deref(), Some("marks"));
        assert_eq!(event("marks").sample_type, 0x1_018f);
        assert_eq!(event("cpu-clock,call-graph,freq=9").sample_type, 0x1_01af);
        // Parsing accepts the number of a vCPU that does not exist, because the device reports that error.
        assert_eq!(event("marks,cpu=4294967295").vcpu, u32::MAX);
    }

    #[test]
    fn single_event_defaults_to_the_first_vcpu() {
        let one = |text: &str| text.parse::<Persist>().unwrap();
        let event = one("cpu-clock,freq=100");
        assert_eq!((event.vcpu, event.name.as_deref()), (0, Some("cpu-clock")));
        assert_eq!((one("marks,cpu=3").vcpu, one("marks,cpu=all").vcpu), (3, 0));
        assert_eq!(one("marks,size=2m").pages, 512);
        assert!("marks,cpu=first".parse::<Persist>().is_err());
    }

    #[test]
    fn mistake_is_reported_with_the_right_form() {
        for (text, words) in [
            ("", "begin with its name"),
            (",size=4K", "begin with its name"),
            ("marks,speed=1", "`speed=1`"),
            ("marks,1M", "`1M`"),
            ("marks,period=0", "1 or more"),
            ("marks,period=-1", "1 or more"),
            ("cycles,freq=fast", "1 or more"),
            ("cycles,freq=1,period=1", "one of them"),
            ("marks,cpu=first", "or all"),
            ("marks,cpu=-1", "or all"),
            ("marks,size=3K", "4K, 8K"),
            ("marks,size=12K", "4K, 8K"),
            ("marks,size=99999999M", "4K, 8K"),
            ("marks,size=big", "4K, 8K"),
            ("marks,size=4K,size=4K", "size is given twice"),
            ("marks,period=2,size=0", "size=0"),
            ("tsc,size=4K", "only counts"),
            ("tsc,call-graph", "omit size and call-graph"),
            ("marks,call-graph,size=0", "omit size=0"),
            ("marks,call-graph,call-graph", "given twice"),
            ("marks,call-graph=fp", "`call-graph=fp`"),
        ] {
            let error = text.parse::<PersistSpec>().unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
