//! Flushes: what events have produced stands where its reader finds it, and the reader is woken.

use super::State;
use crate::errno::Errno;
use crate::event::{Event, Host};

impl State {
    /// The driver flushes an event on `vcpu`, or with zero every persistent one of that vCPU.
    pub(crate) fn flush_on(&mut self, host: &Host<'_>, id: u64, vcpu: u32) -> Result<(), Errno> {
        let ids = match id {
            0 => {
                let all = self.persistent_events();
                let here = all.filter(|(_, event)| event.placed_on() == Some(vcpu));
                here.map(|(id, _)| id).collect()
            }
            id => {
                let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
                if event.active_on().is_some_and(|on| on != vcpu) {
                    // What it holds there is found when that vCPU stands still.
                    return Err(Errno::EXDEV);
                }
                vec![id]
            }
        };
        let mut flushed = Ok(());
        for id in ids {
            self.hand_over(host, id);
            let shown = self.show_all(host, id);
            flushed = flushed.and(shown);
        }
        flushed
    }

    /// Writes the overflows that the host holds of an event, whose vCPU stands still.
    pub(crate) fn hand_over(&mut self, host: &Host<'_>, id: u64) {
        let Some(vcpu) = self.holds(id) else {
            return;
        };
        self.acting(host, |state| {
            state.find(host, id, vcpu);
        });
    }

    /// The vCPU on which the host may hold overflows of an event until that vCPU stands still.
    pub(crate) fn holds(&self, id: u64) -> Option<u32> {
        let event = self.events.get(&id);
        let sampled = event.filter(|event| event.is_sampled_by_host() && !event.is_batched());
        sampled.and_then(Event::active_on)
    }

    /// Shows what is written of an event, with its figures, and wakes its reader for what it was not
    /// woken for yet.
    pub(crate) fn show_all(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let updated = self.update(host, id);
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let origin = self.origin(host, event);
        self.output.flush_and_wake(&event.facts, &origin);
        match event.has_failed() {
            true => Err(Errno::EIO),
            false => updated,
        }
    }
}
