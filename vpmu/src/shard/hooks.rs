//! Counts the active events of a vCPU for each hook, and lists the events that the vCPU's thread must visit.

use crate::event::Event;
use crate::vcpu::{HOOKS, Hook, Hooks, Vcpu};
use crate::work;

/// The number of active events per hook, and the active events to visit at exits, marks and drains.
#[derive(Debug, Default)]
pub(super) struct HookCounts {
    counts: [u32; HOOKS],
    hooks: Hooks,
    /// Ids of the events to visit, in ascending order, which is the order in which the events were opened.
    watched: Vec<u64>,
}

impl HookCounts {
    /// Adds an event that became active.
    pub(super) fn add(&mut self, event: &Event, vcpu: &Vcpu) {
        if !event.is_watched() {
            return;
        }
        if let Err(at) = self.watched.binary_search(&event.spec.id) {
            self.watched.insert(at, event.spec.id);
        }
        self.want(event.hooks(), vcpu);
    }

    /// Removes an event that is no longer active.
    pub(super) fn remove(&mut self, event: &Event, vcpu: &Vcpu) {
        if !event.is_watched() {
            return;
        }
        if let Ok(at) = self.watched.binary_search(&event.spec.id) {
            self.watched.remove(at);
        }
        self.drop(event.hooks(), vcpu);
    }

    /// Adds hooks of an active event.
    pub(super) fn want(&mut self, hooks: impl Iterator<Item = Hook>, vcpu: &Vcpu) {
        for hook in hooks {
            self.counts[hook as usize] += 1;
            self.hooks = self.hooks.with(hook);
        }
        vcpu.set_hooks(self.hooks);
    }

    /// Removes hooks of an active event.
    pub(super) fn drop(&mut self, hooks: impl Iterator<Item = Hook>, vcpu: &Vcpu) {
        for hook in hooks {
            let count = &mut self.counts[hook as usize];
            *count -= 1;
            if *count == 0 {
                self.hooks = self.hooks.without(hook);
            }
        }
        vcpu.set_hooks(self.hooks);
    }

    pub(super) fn has(&self, hook: Hook) -> bool {
        self.hooks.has(hook)
    }

    /// The active events to visit, by ascending id. Charges the examination of all of them.
    pub(super) fn watched(&self) -> &[u64] {
        work::charge_examined(self.watched.len());
        &self.watched
    }
}
