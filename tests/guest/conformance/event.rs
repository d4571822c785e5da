//! The events that the rows open, and work whose number of instructions is known.

use std::io;

use perf_event_open_sys::bindings::{self, perf_event_attr};

use crate::Fallible;
use crate::known_code;
use crate::raw::{Event, FORMAT_ENABLED, FORMAT_RUNNING, kernels_own, refused};

/// Instructions of one round of [`spin`].
pub(super) const PER_ROUND: u64 = 2;
/// Maximum number of instructions outside the loop that a count includes.
pub(super) const MOST_BORDER: u64 = 64;

/// An event of the CPU, given by perf's type and config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct What {
    pub(super) kind: u32,
    pub(super) config: u64,
}

const fn hardware(config: u32) -> What {
    What { kind: bindings::PERF_TYPE_HARDWARE, config: config as u64 }
}

pub(super) const CYCLES: What = hardware(bindings::PERF_COUNT_HW_CPU_CYCLES);
pub(super) const INSTRUCTIONS: What = hardware(bindings::PERF_COUNT_HW_INSTRUCTIONS);
pub(super) const BRANCHES: What = hardware(bindings::PERF_COUNT_HW_BRANCH_INSTRUCTIONS);
pub(super) const FRONTEND: What = hardware(bindings::PERF_COUNT_HW_STALLED_CYCLES_FRONTEND);
pub(super) const BACKEND: What = hardware(bindings::PERF_COUNT_HW_STALLED_CYCLES_BACKEND);

/// The modes that an event counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    User,
    Kernel,
    Both,
}

/// A reading with its times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) count: u64,
    pub(super) enabled: u64,
    pub(super) running: u64,
}

/// Returns the attr of an event that starts disabled. Its readings also contain the enabled time and the running time.
pub(super) fn attr(what: What, mode: Mode) -> perf_event_attr {
    let mut attr = perf_event_attr {
        type_: what.kind,
        size: u32::try_from(size_of::<perf_event_attr>()).unwrap_or(0),
        config: what.config,
        read_format: FORMAT_ENABLED | FORMAT_RUNNING,
        ..perf_event_attr::default()
    };
    attr.set_disabled(1);
    attr.set_exclude_hv(1);
    attr.set_exclude_user((mode == Mode::Kernel).into());
    attr.set_exclude_kernel((mode == Mode::User).into());
    attr
}

pub(super) fn open(what: What, mode: Mode) -> io::Result<Event> {
    kernels_own(&attr(what, mode))
}

/// Like [`open`], but returns `None` if the PMU has no such event.
pub(super) fn offered(what: What, mode: Mode) -> io::Result<Option<Event>> {
    let opened = open(what, mode);
    match opened.as_ref().map_err(io::Error::raw_os_error) {
        Err(Some(libc::ENOENT)) => Ok(None),
        _ => opened.map(Some),
    }
}

pub(super) fn read(event: &Event) -> Fallible<Reading> {
    match event.read()?.as_slice() {
        &[count, enabled, running] => Ok(Reading { count, enabled, running }),
        other => Err(format!("a reading of {} words", other.len()).into()),
    }
}

/// Counts `work`, starting from zero. Returns the event's reading.
pub(super) fn counted(event: &Event, work: impl FnOnce()) -> Fallible<Reading> {
    event.reset(0)?;
    event.enable(0)?;
    work();
    event.disable(0)?;
    read(event)
}

/// A loop of [`PER_ROUND`] instructions a round.
pub(super) fn spin(rounds: u64) {
    let [one, _] = known_code::loops();
    one.run(rounds);
}

/// The addresses of the loop.
pub(super) fn code() -> std::ops::Range<u64> {
    let [one, _] = known_code::loops();
    one.code
}

/// Tries to open an event with this attr. Returns the errno, or `None` if the event opens.
pub(super) fn refusal(attr: &perf_event_attr) -> Option<i32> {
    refused(kernels_own(attr))
}
