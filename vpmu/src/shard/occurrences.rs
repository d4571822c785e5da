//! Counts exits and marks in the events that the device itself counts.

use super::core::Core;
use super::counts::Revoked;
use super::map::EventMap;
use super::moment::{ExitView, Periods};
use crate::kind::Kind;

/// The result of counting one exit or mark.
#[derive(Debug, Default)]
pub(super) struct Occurred {
    /// The events whose period has elapsed, by ascending id.
    pub(super) completed: Vec<Elapsed>,
    /// The caller must put these events in the error state.
    pub(super) revoked: Revoked,
    /// The events that cannot tell whether they exclude the occurrence, because the registers are unknown. The caller
    /// must put them in the error state.
    pub(super) blind: Vec<u64>,
}

/// An event whose period has elapsed, perhaps several times.
#[derive(Debug)]
pub(super) struct Elapsed {
    pub(super) event: u64,
    pub(super) of_trace: bool,
    pub(super) periods: Periods,
}

/// Counts an exit or a mark in each event for whose kind `matches` returns true. Then updates the counts of all of these
/// events, so that a record of one event contains the new counts of the others.
pub(super) fn count(
    core: &mut Core,
    map: &mut EventMap,
    exit: &mut ExitView<'_>,
    matches: impl Fn(Kind) -> bool,
) -> Occurred {
    let mut occurred = Occurred::default();
    let mut grown = Vec::new();
    let clock = core.cpu.backend.clock;
    for &id in core.watched() {
        let Some(event) = map.get_mut(id) else {
            continue;
        };
        if !event.counting.is_kept() || event.counting.is_paused() || !matches(event.spec.kind) {
            continue;
        }
        if event.spec.excludes_any() {
            match exit.regs() {
                Some(regs) if event.spec.excludes(regs.user) => continue,
                Some(_) => {}
                None => {
                    occurred.blind.push(id);
                    continue;
                }
            }
        }
        let done = event.count_one(|| clock.nanoseconds(exit.tsc(&core.cpu)));
        occurred.completed.extend(done.map(|done| Elapsed {
            event: id,
            of_trace: event.spec.is_trace(),
            periods: Periods::Equal { overflows: done.overflows, length: done.length },
        }));
        // The new count must be visible immediately to readers of the event's metadata page, and to other vCPUs
        // that read the event's group.
        let seen = event.is_shown() || event.membership.group().is_some();
        grown.extend(seen.then_some(id));
    }
    for id in grown {
        if let Some(event) = map.get_mut(id) {
            let updated = event.update(&mut core.cpu);
            core.show(event);
            occurred.revoked.extend(updated.err().map(|error| (id, error)));
        }
    }
    occurred
}
