//! The end of a throttle: which events wait for it, and how they come to sample again.

use super::State;
use crate::event::{Event, Host};
use crate::output::Note;
use crate::record::Origin;

impl State {
    /// Lets the events of a vCPU sample again that were throttled in a window that is over by now;
    /// not those whose overflows of that window may have to be collected yet.
    pub(super) fn lift_all(&mut self, host: &Host<'_>, vcpu: u32) {
        for id in self.throttled(vcpu, false) {
            self.lift(host, id);
        }
    }

    /// The throttled events of a vCPU, those of the batched engine or the others.
    pub(super) fn throttled(&self, vcpu: u32, batched: bool) -> Vec<u64> {
        let throttled = |id: &u64| {
            let event = self.events.get(id);
            event.is_some_and(|event| event.is_throttled() && event.is_batched() == batched)
        };
        let active = self.active[vcpu as usize].iter().copied();
        active.filter(throttled).collect()
    }

    /// Lets an event sample again if it was throttled in a window that is over by now.
    pub(crate) fn lift(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.get(&id).filter(|event| event.is_throttled()) else {
            return;
        };
        let time = self.now(host, event.placed_on().unwrap_or(event.last_vcpu));
        self.lift_at(host, id, time);
    }

    /// As [`State::lift`], at a moment of the event's vCPU in guest nanoseconds.
    pub(super) fn lift_at(&mut self, host: &Host<'_>, id: u64, time: u64) {
        let allowance = self.allowance;
        let throttled = self.events.get(&id).is_some_and(Event::is_throttled);
        if !throttled {
            return;
        }
        match self.with_needs(host, id, |event| event.lift(allowance, time)) {
            Some(Ok(true)) => {
                let origin = self.events.get(&id).map(|event| Origin {
                    time,
                    ..self.origin(host, event)
                });
                if let Some(origin) = origin {
                    self.note(id, &origin, &Note::Unthrottle);
                }
            }
            Some(Err(error)) => {
                self.fail(host, id, error);
            }
            Some(Ok(false)) | None => {}
        }
    }
}
