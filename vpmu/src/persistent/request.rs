//! Converts an operator's request to an open request.

use super::{Persist, PersistError};
use crate::abi::{
    CONTROL_OPEN, KIND_MARK, OPEN_BACKWARD, OPEN_EXCLUDE_KERNEL, OPEN_EXCLUDE_USER, OPEN_FREQ, OPEN_SAMPLE_ID_ALL,
    OpenRequest,
};
use crate::catalogue::{Catalogue, Entry};
use crate::record::MASKS;
use crate::source::Rate;

/// perf's `PERF_FORMAT_*` for the counts in a sample: TOTAL_TIME_ENABLED, TOTAL_TIME_RUNNING and ID.
const READ_FORMAT: u64 = 0x7;
/// Supported sample fields of an operator's events. Registers and stacks are not supported, because they would need
/// further parameters.
const SAMPLE_TYPE: u64 = MASKS.all & !MASKS.described;

/// Checks `asked` against the catalogue, and returns a request of the type `CONTROL_OPEN`. The request opens the event
/// without enabling it. `highest` is the maximum sampling frequency.
pub(crate) fn open_request(asked: &Persist, catalogue: &Catalogue, highest: u32) -> Result<OpenRequest, PersistError> {
    let refused = |why| PersistError::Refused { event: asked.event.clone(), why };
    let (entry, config, modes) = counted(asked, catalogue)?;
    if entry.format.is_some() {
        return Err(refused("a trace needs an area in the guest's memory"));
    }
    if modes != 0 && !entry.excludes {
        return Err(refused("it cannot separate user and kernel mode"));
    }
    if asked.sample_type & !SAMPLE_TYPE != 0 {
        return Err(refused("its samples cannot contain all requested fields"));
    }
    match (asked.rate, asked.pages) {
        (None, 0) => {}
        (None, _) => return Err(refused("a ring stays empty without a period or frequency")),
        (Some(_), 0) => return Err(refused("its samples need a ring")),
        (Some(rate), _) => check_rate(entry, rate, highest).map_err(refused)?,
    }
    let (period, freq) = match asked.rate {
        None => (0, 0),
        Some(Rate::Period(period)) => (period, 0),
        Some(Rate::Frequency(hertz)) => (hertz, OPEN_FREQ),
    };
    let mut request = OpenRequest {
        kind: entry.kind.into(),
        context: asked.vcpu.into(),
        config: config.into(),
        period: period.into(),
        sample_type: asked.sample_type.into(),
        flags: (OPEN_BACKWARD | OPEN_SAMPLE_ID_ALL | freq | modes).into(),
        read_format: READ_FORMAT.into(),
        ..OpenRequest::default()
    };
    request.header.op = CONTROL_OPEN.into();
    Ok(request)
}

/// Returns the catalogue entry of the event that `asked` names, the event's config, and its `OPEN_EXCLUDE_*` flags.
fn counted<'a>(asked: &Persist, catalogue: &'a Catalogue) -> Result<(&'a Entry, u64, u32), PersistError> {
    let unknown = || PersistError::NoEvent(asked.event.clone());
    let (rest, modes) = match asked.event.split_once(':') {
        None => (asked.event.as_str(), 0),
        Some((rest, "u")) => (rest, OPEN_EXCLUDE_KERNEL),
        Some((rest, "k")) => (rest, OPEN_EXCLUDE_USER),
        Some((rest, "uk" | "ku")) => (rest, 0),
        Some(_) => return Err(unknown()),
    };
    let (name, value) = match rest.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (rest, None),
    };
    let entry = catalogue.named(name).ok_or_else(unknown)?;
    let config = match value {
        None => entry.config,
        Some(value) if entry.any_config => {
            let fits = |&value: &u64| entry.kind != KIND_MARK || u32::try_from(value).is_ok();
            number(value).filter(fits).ok_or_else(unknown)?
        }
        Some(_) => return Err(unknown()),
    };
    Ok((entry, config, modes))
}

/// Returns the event in the format of [`Persist::event`]. The string is empty if the catalogue lacks the event.
pub(crate) fn spelled(catalogue: &Catalogue, kind: u32, config: u64, flags: u32) -> String {
    let modes = match flags & (OPEN_EXCLUDE_USER | OPEN_EXCLUDE_KERNEL) {
        0 => "",
        OPEN_EXCLUDE_KERNEL => ":u",
        OPEN_EXCLUDE_USER => ":k",
        _ => "",
    };
    match catalogue.find(kind, config) {
        Some(entry) if entry.any_config => format!("{}={config}{modes}", entry.name()),
        Some(entry) => format!("{}{modes}", entry.name()),
        None => String::new(),
    }
}

fn check_rate(entry: &Entry, rate: Rate, highest: u32) -> Result<(), &'static str> {
    let shortest = entry.shortest_period.ok_or("it cannot be sampled")?;
    match rate {
        Rate::Period(period) if period < shortest => Err("its period is shorter than its counter supports"),
        Rate::Period(period) if period >> 63 != 0 => Err("its period is too long"),
        Rate::Frequency(hertz) if !(1..=u64::from(highest)).contains(&hertz) => {
            Err("its frequency is zero, or above the limit on samples per second")
        }
        _ => Ok(()),
    }
}

/// Parses a value, decimal or hexadecimal with `0x`.
fn number(text: &str) -> Option<u64> {
    let value = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.ok()
}
