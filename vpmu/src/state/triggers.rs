//! What overflows do to other events: those that they start and stop, before the guest runs on.

use std::collections::VecDeque;

use super::State;
use super::overflow::{Moment, Periods};
use crate::event::{Event, Host};
use crate::links::Effect;

/// Overflows that were found, and what is still to become of them.
#[derive(Debug, Default)]
pub(super) struct Pending {
    overflows: VecDeque<Found>,
    /// Someone further up acts upon them, one after the other.
    acting: bool,
}

/// Overflows of one event that were found at one moment.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) id: u64,
    pub(super) periods: Periods,
    pub(super) moment: Moment,
}

impl State {
    /// Has `find` find overflows; then all of them act, in the order in which they were found. What
    /// their acting finds comes after them, so that a chain of events is no chain of calls.
    pub(super) fn acting(&mut self, host: &Host<'_>, find: impl FnOnce(&mut Self)) {
        let outermost = !std::mem::replace(&mut self.pending.acting, true);
        find(self);
        if !outermost {
            return;
        }
        while let Some(found) = self.pending.overflows.pop_front() {
            self.overflows(host, found);
        }
        self.pending.acting = false;
    }

    /// Overflows are to act, within [`State::acting`].
    pub(super) fn found(&mut self, found: Found) {
        self.pending.overflows.push_back(found);
    }

    /// An event overflowed: of those that it starts and stops, the active ones start and stop.
    pub(super) fn trigger(&mut self, host: &Host<'_>, id: u64) {
        let effects: Vec<(u64, Effect)> = self.links.effects(id).collect();
        for (target, effect) in effects {
            let target = self.events.get(&target);
            let Some(target) = target.filter(|target| target.active_on().is_some()) else {
                continue;
            };
            let paused = match effect {
                Effect::Start => false,
                Effect::Stop => true,
                Effect::Toggle => !target.is_paused(),
            };
            if target.is_paused() != paused {
                self.set_paused(host, target.facts.id, paused);
            }
        }
    }

    /// Pauses or resumes an active event. What it overflowed up to a pause is written.
    fn set_paused(&mut self, host: &Host<'_>, id: u64, paused: bool) {
        let Some(changed) = self.with_needs(host, id, |event| event.pause(host, paused)) else {
            return;
        };
        let sampled = |event: &&Event| paused && event.is_sampled_by_host();
        let sampled = self.events.get(&id).filter(sampled);
        if let Some((vcpu, batched)) =
            sampled.and_then(|event| Some((event.active_on()?, event.is_batched())))
        {
            match batched {
                true => self.settle_last(host, id, vcpu),
                false => {
                    self.acting(host, |state| {
                        state.find(host, id, vcpu);
                    });
                }
            }
        }
        // That a target is in error is told with a notice.
        let _ = self.refresh(host, id, changed);
    }
}
