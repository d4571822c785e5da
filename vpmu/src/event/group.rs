//! Groups. The events of a group count only while the group's leader is enabled, and are read together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The events of a group. All events of the group share one `Group`. When an event joins or leaves the group, the
/// events get a new `Group`.
#[derive(Debug)]
pub(crate) struct Group {
    /// The leader's id.
    pub(crate) leader: u64,
    /// Whether the leader is enabled, and not in the error state.
    pub(crate) on: Arc<AtomicBool>,
    /// The leader, then its members, oldest first.
    pub(crate) events: Vec<GroupEvent>,
}

/// One event of a group.
#[derive(Debug, Clone)]
pub(crate) struct GroupEvent {
    pub(crate) id: u64,
    /// The id of the owner of the event's family. Readings of the group identify the event by this id.
    pub(crate) owner: u64,
    pub(crate) counts: Arc<LastCounts>,
}

/// The count and losses of an event at its last update. A vCPU that reads the group uses these numbers for the
/// group's events on other vCPUs.
#[derive(Debug, Default)]
pub(crate) struct LastCounts {
    value: AtomicU64,
    lost: AtomicU64,
}

/// An event's place in its group.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// The event.
    id: u64,
    /// `None` if the event has no group.
    group: Option<Arc<Group>>,
    /// The event's own entry among the counts of the group. Has the count of the last update.
    counts: Option<Arc<LastCounts>>,
}

impl Membership {
    /// The event `id`, without a group.
    pub(super) fn new(id: u64) -> Self {
        Self { id, ..Self::default() }
    }

    /// The group, if there is one.
    pub(crate) fn group(&self) -> Option<&Arc<Group>> {
        self.group.as_ref()
    }

    /// Whether the event has no leader, or its leader is enabled and not in the error state.
    pub(crate) fn is_led_on(&self) -> bool {
        let led = self.group.as_ref().filter(|_| !self.leads());
        led.is_none_or(|group| group.is_on())
    }

    /// Whether the event leads its group.
    pub(crate) fn leads(&self) -> bool {
        let group = self.group.as_ref();
        group.is_some_and(|group| group.leader == self.id)
    }

    pub(super) fn join(&mut self, group: Option<Arc<Group>>) {
        let events = group.iter().flat_map(|group| &group.events);
        let mut own = events.filter(|event| event.id == self.id);
        self.counts = own.next().map(|event| Arc::clone(&event.counts));
        self.group = group;
    }

    /// If the event leads its group, publishes to the group whether its events may count.
    pub(super) fn publish_on(&self, on: bool) {
        if let Some(group) = self.group.as_ref().filter(|_| self.leads()) {
            group.on.store(on, Ordering::Relaxed);
        }
    }

    /// Publishes the event's count and losses to readers of its group on other vCPUs.
    pub(super) fn publish_counts(&self, value: u64, lost: u64) {
        if let Some(counts) = &self.counts {
            counts.set(value, lost);
        }
    }
}

impl Group {
    /// Ids of all events of the group except the leader.
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

    /// The count, and the number of overflows without a record. For a trace, the latter is the number of lost bytes.
    pub(crate) fn get(&self) -> (u64, u64) {
        let load = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        (load(&self.value), load(&self.lost))
    }
}
