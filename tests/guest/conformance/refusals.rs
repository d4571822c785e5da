//! Tests which requests open an event, and which are refused.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;

use perf_event_open_sys::bindings;

use super::event::{INSTRUCTIONS, Mode, What, attr, counted, offered, refusal, spin};
use super::{Row, RowResult, absent, holds};
use crate::ensure::ensure_eq;

pub(super) const ROWS: &[Row] = &[
    ("generic_event_counts_or_is_enoent", generic),
    ("generic_events_that_open_are_listed", listed),
    ("reserved_bit_is_refused", reserved),
];

/// perf's names for the generic events, by config.
const GENERIC: [&str; 10] = [
    "cycles",
    "instructions",
    "cache-references",
    "cache-misses",
    "branches",
    "branch-misses",
    "bus-cycles",
    "stalled-cycles-frontend",
    "stalled-cycles-backend",
    "ref-cycles",
];

/// Events that may never occur on an emulated PMU: branch misses and stalls.
const MAY_BE_ZERO: [&str; 3] = ["branch-misses", "stalled-cycles-frontend", "stalled-cycles-backend"];

fn generic_events() -> impl Iterator<Item = (&'static str, What)> {
    let kind = bindings::PERF_TYPE_HARDWARE;
    (0..).zip(GENERIC).map(move |(config, name)| (name, What { kind, config }))
}

fn cache_events() -> impl Iterator<Item = What> {
    let kind = bindings::PERF_TYPE_HW_CACHE;
    let configs = (0..7_u64).flat_map(|cache| {
        (0..3).flat_map(move |operation| (0..2).map(move |result| cache | operation << 8 | result << 16))
    });
    configs.map(move |config| What { kind, config })
}

/// Reads and writes memory, and executes branches. Some of the branches are taken, and some are not.
fn work() {
    let mut words = vec![1_u64; 1 << 17];
    for round in 0..8 {
        for at in (round..words.len()).step_by(9) {
            words[at] = if words[at].is_multiple_of(3) { at as u64 } else { words[at] + round as u64 };
        }
    }
    spin(std::hint::black_box(words)[0].max(100_000));
}

fn generic() -> RowResult {
    let (mut opened, mut zero) = (0, Vec::new());
    for (name, what) in generic_events() {
        let Some(event) = offered(what, Mode::Both)? else {
            continue;
        };
        opened += 1;
        if counted(&event, work)?.count == 0 {
            zero.push(name);
        }
    }
    let strange = zero.iter().find(|name| !MAY_BE_ZERO.contains(name));
    ensure_eq!(strange, None, "a generic event that counts nothing");
    let mut caches = 0;
    for what in cache_events() {
        if let Some(event) = offered(what, Mode::Both)? {
            caches += 1;
            // Prefetches and misses may be rare.
            counted(&event, work)?;
        }
    }
    let zero = match zero.as_slice() {
        [] => String::new(),
        zero => format!("; zero: {}", zero.join(", ")),
    };
    holds(format!("{opened} of 10 generic and {caches} of 42 cache events open{zero}"))
}

fn listed() -> RowResult {
    let Ok(entries) = fs::read_dir("/sys/bus/event_source/devices/vpmu/events") else {
        return absent("only the PMU vpmu lists the generic events by name");
    };
    let names: Vec<String> = entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_, Box<dyn Error>>>()?;
    let listed: BTreeSet<&str> =
        GENERIC.into_iter().filter(|generic| names.iter().any(|name| name == generic)).collect();
    let mut opens = BTreeSet::new();
    for (name, what) in generic_events() {
        if offered(what, Mode::Both)?.is_some() {
            opens.insert(name);
        }
    }
    ensure_eq!(opens, listed, "events that open");
    holds(opens.into_iter().collect::<Vec<_>>().join(", "))
}

/// In the attr's flags, the first bit that is reserved in all kernels.
const FIRST_FLAG: u32 = 48;
/// The first bit of `sample_type` that is refused.
const FIRST_FIELD: u32 = 26;
/// The first bit of `read_format` that is refused.
const FIRST_FORMAT: u32 = 6;
/// The first bit without a meaning in a generic event's config.
const FIRST_CONFIG: u32 = 4;

fn reserved() -> RowResult {
    let mut refused = 0;
    let plain = attr(INSTRUCTIONS, Mode::User);
    let mut check = |what: &str, bit: u32, attr, allowed: &[i32]| {
        let errno = refusal(&attr);
        refused += 1;
        match errno.is_some_and(|errno| allowed.contains(&errno)) {
            true => Ok(()),
            false => Err(format!("bit {bit} of {what}: {errno:?}")),
        }
    };
    for bit in FIRST_FLAG..64 {
        let mut attr = plain;
        let flags = attr._bitfield_1.get(0, 64) | 1 << bit;
        attr._bitfield_1.set(0, 64, flags);
        check("the flags", bit, attr, &[libc::EINVAL])?;
    }
    for bit in FIRST_FIELD..64 {
        let mut attr = plain;
        attr.sample_type = 1 << bit;
        check("sample_type", bit, attr, &[libc::EINVAL])?;
    }
    for bit in FIRST_FORMAT..64 {
        let mut attr = plain;
        attr.read_format |= 1 << bit;
        check("read_format", bit, attr, &[libc::EINVAL])?;
    }
    for bit in FIRST_CONFIG..32 {
        let mut attr = plain;
        attr.config |= 1 << bit;
        check("config", bit, attr, &[libc::EINVAL, libc::ENOENT])?;
    }
    holds(format!("{refused} bits"))
}
