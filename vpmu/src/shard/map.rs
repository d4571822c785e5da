//! The events of one shard by id, and those that wait for a host counter.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::core::Core;
use super::waits::{Wait, Waits};
use crate::event::Event;
use crate::work;

/// Hashes event ids. The device assigns ids in order, so a guest cannot force collisions.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

/// A table by event id.
pub(super) type ById<T> = HashMap<u64, T, BuildHasherDefault<IdHasher>>;

/// The events of a shard.
#[derive(Debug, Default)]
pub(crate) struct EventMap {
    /// Each event by its own id.
    events: ById<Event>,
    /// Every event that waits for a counter has its current wait in this queue.
    waits: Waits,
}

impl EventMap {
    pub(crate) fn get(&self, id: u64) -> Option<&Event> {
        self.events.get(&id)
    }

    /// Only for changes that touch neither the event's state nor its hooks, unless the caller updates these.
    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Event> {
        self.events.get_mut(&id)
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.events.contains_key(&id)
    }

    pub(super) fn insert(&mut self, event: Event) {
        self.events.insert(event.spec.id, event);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Event> {
        self.events.remove(&id)
    }

    /// Ids of the selected events, ascending.
    pub(super) fn ids(&self, which: impl Fn(&Event) -> bool) -> Vec<u64> {
        work::charge_examined(self.events.len());
        let events = self.events.values().filter(|event| which(event));
        let mut ids: Vec<u64> = events.map(|event| event.spec.id).collect();
        ids.sort_unstable();
        ids
    }

    /// Ids of the selected events among those that the vCPU must visit, ascending.
    pub(super) fn watched(&self, core: &Core, which: impl Fn(&Event) -> bool) -> Vec<u64> {
        let watched = core.watched().iter().copied();
        watched.filter(|&id| self.get(id).is_some_and(&which)).collect()
    }

    /// Drops the counters that events have on the previous thread of `vcpu`.
    pub(super) fn forget_thread(&mut self, vcpu: u32) {
        for event in self.events.values_mut() {
            event.counting.forget_thread(vcpu);
        }
    }

    // Waits.

    pub(super) fn has_waits(&self) -> bool {
        !self.waits.is_empty()
    }

    /// Queues an event if it has begun to wait for a counter. Returns whether it has.
    pub(super) fn note_wait(&mut self, id: u64) -> bool {
        if !self.get(id).is_some_and(|event| event.counting.is_waiting()) {
            return false;
        }
        let events = &self.events;
        let number = self.waits.begin(id, events.len(), |wait| {
            let event = events.get(&wait.event);
            event.is_some_and(|event| event.counting.is_in_wait(wait.number))
        });
        if let Some(event) = self.events.get_mut(&id) {
            event.counting.begin_wait(number);
        }
        true
    }

    /// Takes all waits, oldest first. Some of them may have ended.
    pub(super) fn take_waits(&mut self) -> impl Iterator<Item = Wait> + use<> {
        self.waits.take().into_iter()
    }

    /// Returns the event of a wait. `None` if the wait has ended.
    pub(super) fn waiting(&mut self, wait: Wait) -> Option<&mut Event> {
        let event = self.events.get_mut(&wait.event);
        event.filter(|event| event.counting.is_in_wait(wait.number))
    }

    /// Puts back waits from [`EventMap::take_waits`] that have not ended.
    pub(super) fn put_back_waits(&mut self, waits: Vec<Wait>) {
        self.waits.put_back(waits.into_iter());
    }
}
