//! Groups: events that count while their leader is enabled, and are read together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The events of a group, shared by all of them: rebuilt when one joins or leaves.
#[derive(Debug)]
pub(crate) struct Group {
    /// The leader's id.
    pub(crate) leader: u64,
    /// Whether the leader is enabled, and not in error.
    pub(crate) on: Arc<AtomicBool>,
    /// The leader, then its members, oldest first.
    pub(crate) events: Vec<GroupEvent>,
}

/// One event of a group.
#[derive(Debug, Clone)]
pub(crate) struct GroupEvent {
    pub(crate) id: u64,
    /// The family's id, which identifies the event in readings.
    pub(crate) owner: u64,
    pub(crate) counts: Arc<LastCounts>,
}

/// The count and losses of an event at its last update. A reading of the group uses them for an
/// event that counts on another vCPU.
#[derive(Debug, Default)]
pub(crate) struct LastCounts {
    value: AtomicU64,
    lost: AtomicU64,
}

impl Group {
    /// Ids of the members without the leader.
    pub(crate) fn members(&self) -> impl Iterator<Item = u64> {
        let ids = self.events.iter().map(|event| event.id);
        ids.filter(|&id| id != self.leader)
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }
}

impl LastCounts {
    pub(crate) fn set(&self, value: u64, lost: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.lost.store(lost, Ordering::Relaxed);
    }

    /// The count, and the overflows without a record; for a trace, the lost bytes.
    pub(crate) fn get(&self) -> (u64, u64) {
        let load = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        (load(&self.value), load(&self.lost))
    }
}
