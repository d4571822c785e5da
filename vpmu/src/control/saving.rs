//! Saves and restores the whole device through its control plane.

use super::restoring::{Driver, Restore};
use super::{Control, Features};
use crate::error::{RestoreError, SaveError};
use crate::event::Event;
use crate::links::SavedLink;
use crate::metrics::{ExitCounts, Metrics};
use crate::persistent::SavedPersistence;
use crate::save::{FORMAT, SavedDriver, SavedEvent, SavedState, SavedVcpu};
use crate::shard::{Shard, State};
use crate::spec::SavedSpec;

impl Control {
    /// Updates all events and writes their pending samples. No vCPU may be in the guest.
    pub(crate) fn quiesce(&mut self) {
        for shard in (0..).take(self.placement.shards().len()) {
            self.placement.on(shard, State::quiesce);
        }
    }

    /// Saves the device. `totals` are the device's metrics. The caller must call [`Control::quiesce`] before it reads
    /// them.
    ///
    /// # Errors
    /// [`SaveError::Producing`]: a producer in the VMM is writing to an area.
    pub(crate) fn save(&mut self, totals: Metrics) -> Result<SavedState, SaveError> {
        let events = self.placement.ids().into_iter().filter_map(|id| self.save_event(id));
        let events = events.collect();
        let mut queues = vec![self.queue.save(), self.notices.save_queue()];
        let mut vcpus = Vec::new();
        for shard in (0..).take(self.placement.shards().len()) {
            let (task_page, queue) = self.placement.on(shard, |state| state.save_driver());
            queues.push(queue);
            let vcpu = &self.placement.shards()[shard as usize].vcpu;
            vcpus.push(SavedVcpu { task_page, exits: vcpu.exits() });
        }
        let queues: Option<Vec<_>> = queues.into_iter().collect();
        let links = self.links.asked();
        let driver = queues.map(|queues| SavedDriver { features: self.features.0, queues });
        Ok(SavedState {
            format: FORMAT,
            tsc_khz: self.backend.settings.tsc_khz,
            next_id: self.placement.next_id(),
            vcpus,
            events,
            sinks: self.mapping.sinks().save()?,
            families: self.mapping.sinks().save_families(),
            links: links.map(|(trigger, target, role)| SavedLink { trigger, target, role }).collect(),
            // Without a driver, pending notices need not be saved, because they are discarded when a driver activates
            // the device.
            notices: match driver {
                Some(_) => self.notices.pending().save(),
                None => Vec::new(),
            },
            driver,
            totals,
        })
    }

    fn save_event(&mut self, id: u64) -> Option<SavedEvent> {
        let life = self.placement.with_event(id, |state| state.event(id).map(Event::save))??;
        // For a task event, this context contains the vCPU that runs the task. The context in `self.events` does not.
        let context = self.placement.with_event(id, |state| state.event(id).map(|event| event.schedule.context))??;
        let entry = self.placement.get(id)?;
        let spec = &entry.spec;
        let wakeups = self.mapping.sinks().wakeups(spec.owner);
        Some(SavedEvent {
            spec: SavedSpec {
                id,
                owner: spec.owner,
                request: spec.request.clone(),
                wakeup: wakeups.every,
                own_notices: wakeups.own_notices,
            },
            context,
            shard: entry.shard,
            leader: entry.leader,
            persistence: entry
                .persistence
                .as_ref()
                .map(|known| SavedPersistence { name: known.name.to_string(), operator: known.operator }),
            life,
        })
    }

    /// Returns whether the device is unused. On an unused device, no event has been opened, there is no driver, and no
    /// vCPU has a thread.
    pub(crate) fn is_new(&self) -> bool {
        let attached = |shard: &Shard| shard.vcpu.is_taken();
        self.placement.next_id() == 1
            && self.features == Features::default()
            && !self.placement.shards().iter().any(attached)
    }

    /// Restores a saved device into this device. The caller must have checked that this device is unused
    /// ([`Control::is_new`]) and that `driver` is valid.
    ///
    /// # Errors
    /// [`RestoreError`]: the state does not fit this device, which stays unused.
    pub(crate) fn restore(&mut self, state: &SavedState, driver: Option<Driver<'_>>) -> Result<(), RestoreError> {
        let restored = Restore { control: self, state }.rebuild(driver);
        if restored.is_err() {
            // A reset keeps the events in the list of persistent events. Clear the list first, so that the reset
            // removes these events, too.
            self.persistent.clear();
            self.reset();
            self.placement.set_next_id(1);
            self.before = Metrics::default();
            for shard in self.placement.shards().iter() {
                shard.vcpu.restore_exits(&ExitCounts::default());
            }
        }
        restored
    }
}
