//! How many active events of a vCPU want each hook, and which of them its thread has to visit.

use crate::event::Event;
use crate::vcpu::{HOOKS, Hook, Hooks, Vcpu};

/// Hooks by number of events, and the active events that are visited at exits, marks and drains.
#[derive(Debug, Default)]
pub(super) struct HookCounts {
    counts: [u32; HOOKS],
    hooks: Hooks,
    /// By ascending id: those opened earlier come first.
    watched: Vec<u64>,
}

impl HookCounts {
    /// An event has become active.
    pub(super) fn add(&mut self, event: &Event, vcpu: &Vcpu) {
        if !event.is_watched() {
            return;
        }
        if let Err(at) = self.watched.binary_search(&event.spec.id) {
            self.watched.insert(at, event.spec.id);
        }
        self.want(event.hooks(), vcpu);
    }

    /// An event ceases to be active.
    pub(super) fn remove(&mut self, event: &Event, vcpu: &Vcpu) {
        if !event.is_watched() {
            return;
        }
        if let Ok(at) = self.watched.binary_search(&event.spec.id) {
            self.watched.remove(at);
        }
        self.drop(event.hooks(), vcpu);
    }

    /// An active event wants these hooks from now on.
    pub(super) fn want(&mut self, hooks: impl Iterator<Item = Hook>, vcpu: &Vcpu) {
        for hook in hooks {
            self.counts[hook as usize] += 1;
            self.hooks = self.hooks.with(hook);
        }
        vcpu.set_hooks(self.hooks);
    }

    /// An active event wants these hooks no more.
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

    /// The active events that are visited, by ascending id.
    pub(super) fn watched(&self) -> &[u64] {
        &self.watched
    }
}
