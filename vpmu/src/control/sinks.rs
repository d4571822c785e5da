//! Tracks families of events, their sinks (each a ring, an AUX area, or both), and the window pages of the sinks. This
//! module does not modify the events themselves. The caller must apply each change to the affected events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::clock::Clock;
use crate::error::SaveError;
use crate::notices::Woken;
use crate::ring::Wakeup;
use crate::save::SavedFamily;
use crate::sink::{SavedSink, Shape, Sink};
use crate::spec::Wakeups;
use crate::window::{Holder, Run, Window};
use crate::work;

/// An event and its children. All of them write to the same sink, if any.
#[derive(Debug, Default)]
struct Family {
    events: BTreeSet<u64>,
    /// The id of the event for which the sink was mapped. `None` if the family has no sink.
    sink: Option<u64>,
    /// Whether the sink belongs to another family.
    redirected: bool,
    /// Whether the family's wakeups have notices of their own (`CONTROL_SIGNAL`).
    own_notices: bool,
    wakeup: Wakeup,
}

/// A sink, and the families that write to it.
#[derive(Debug)]
struct Entry {
    sink: Arc<Sink>,
    families: BTreeSet<u64>,
    /// Those of the families whose wakeups share the sink's notices.
    sharing: BTreeSet<u64>,
    /// The ring's pages in the window. `None` if the ring is in guest RAM.
    run: Option<Run>,
}

impl Entry {
    /// The number of the ring's first page in the window. `None` if the ring is in guest RAM.
    fn window_page(&self) -> Option<u32> {
        self.run.as_ref().map(Run::first)
    }

    fn add(&mut self, owner: u64, own_notices: bool) {
        self.families.insert(owner);
        if own_notices {
            self.sharing.remove(&owner)
        } else {
            self.sharing.insert(owner)
        };
    }

    fn remove(&mut self, owner: u64) {
        self.families.remove(&owner);
        self.sharing.remove(&owner);
    }
}

/// The events whose sink changed, and the new sink.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) events: Vec<u64>,
    pub(super) sink: Option<Arc<Sink>>,
}

/// The result of removing the last event of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extinct {
    /// The sink to which the family wrote. It is gone if no other family writes to it.
    pub(super) sink: Option<u64>,
}

/// The families, the sinks, and the window.
#[derive(Debug, Default)]
pub(super) struct Sinks {
    /// Keyed by owner, which is the id of the family's first event.
    families: BTreeMap<u64, Family>,
    /// Keyed by the id of the event for which the sink was mapped. That event may already be closed.
    sinks: BTreeMap<u64, Entry>,
    window: Option<Window>,
}

impl Sinks {
    pub(super) fn set_window(&mut self, window: Window) {
        self.window = Some(window);
    }

    pub(super) fn window(&self) -> Option<&Window> {
        self.window.as_ref()
    }

    /// Allocates `count` contiguous pages of the window. Returns `None` if the device has no window, or if the window
    /// does not have that many contiguous free pages.
    pub(super) fn take_pages(&mut self, count: u32, holder: Holder) -> Option<Run> {
        self.window.as_mut()?.take(count, holder)
    }

    /// The settings of a family's wakeups. The defaults if there is no such family.
    pub(super) fn wakeups(&self, owner: u64) -> Wakeups {
        let family = self.families.get(&owner);
        Wakeups {
            own_notices: self.has_own_notices(owner),
            ..family.map_or(Wakeup::Page, |family| family.wakeup).into()
        }
    }

    /// Sets the wakeup interval of a family.
    pub(super) fn set_wakeup(&mut self, owner: u64, wakeup: Wakeup) {
        if let Some(family) = self.families.get_mut(&owner) {
            family.wakeup = wakeup;
        }
    }

    // Save and restore.

    /// Saves every sink, in ascending order of id.
    ///
    /// # Errors
    /// [`SaveError::Producing`]: a producer in the VMM is writing to a sink.
    pub(super) fn save(&self) -> Result<Vec<SavedSink>, SaveError> {
        let entries = self.sinks.values();
        let saved = entries.map(|entry| entry.sink.save(entry.window_page()));
        saved.collect()
    }

    /// Returns the families that write to a sink, in ascending order of their owners.
    pub(super) fn save_families(&self) -> Vec<SavedFamily> {
        let families =
            self.families.iter().filter_map(|(&owner, family)| family.sink.map(|sink| SavedFamily { owner, sink }));
        families.collect()
    }

    /// Allocates the pages that a restored ring had in the window, and keeps their contents.
    pub(super) fn retake_pages(&mut self, first: u32, count: u32, holder: Holder) -> Option<Run> {
        self.window.as_mut()?.retake(first, count, holder)
    }

    /// Adds a sink without families. `run` holds the ring's pages in the window.
    pub(super) fn adopt(&mut self, sink: Sink, run: Option<Run>) {
        let entry = Entry { sink: Arc::new(sink), families: BTreeSet::new(), sharing: BTreeSet::new(), run };
        self.sinks.insert(entry.sink.id(), entry);
    }

    /// Whether the family of `owner` exists.
    pub(super) fn has_family(&self, owner: u64) -> bool {
        self.families.contains_key(&owner)
    }

    /// Returns the id of each sink, and the families that write to it.
    pub(super) fn sinks(&self) -> Vec<(u64, Vec<u64>)> {
        let entries = self.sinks.iter();
        let all = entries.map(|(&id, entry)| (id, entry.families.iter().copied().collect()));
        all.collect()
    }

    /// Writes the parameters of `clock` to the metadata page of every ring. These parameters convert TSC ticks to
    /// nanoseconds.
    pub(super) fn retime(&self, clock: Clock) {
        for entry in self.sinks.values() {
            entry.sink.retime(clock);
        }
    }

    // Families.

    /// Adds an event to the family of `owner`.
    pub(super) fn join(&mut self, owner: u64, id: u64) {
        self.families.entry(owner).or_default().events.insert(id);
    }

    /// Removes an event from the family of `owner`. If it was the family's last event, removes the family. If no other
    /// family writes to the sink, also removes the sink. Returns `Some` if the family was removed.
    pub(super) fn leave(&mut self, owner: u64, id: u64) -> Option<Extinct> {
        let family = self.families.get_mut(&owner)?;
        family.events.remove(&id);
        if !family.events.is_empty() {
            return None;
        }
        let sink = family.sink;
        self.families.remove(&owner);
        if let Some(sink) = sink
            && let Some(entry) = self.sinks.get_mut(&sink)
        {
            entry.remove(owner);
            self.remove_unused(sink);
        }
        Some(Extinct { sink })
    }

    /// Returns the events of the family of `owner`, by ascending id. Charges the examination of all of them.
    pub(super) fn family(&self, owner: u64) -> Vec<u64> {
        let family = self.families.get(&owner).into_iter();
        let events: Vec<u64> = family.flat_map(|family| &family.events).copied().collect();
        work::charge_examined(events.len());
        events
    }

    /// Returns the sink to which the family of `owner` writes.
    pub(super) fn of_family(&self, owner: u64) -> Option<&Arc<Sink>> {
        self.get(self.families.get(&owner)?.sink?)
    }

    /// Whether the wakeups of the family of `owner` have notices of their own.
    pub(super) fn has_own_notices(&self, owner: u64) -> bool {
        let family = self.families.get(&owner);
        family.is_some_and(|family| family.own_notices)
    }

    /// Sets whether the wakeups of the family of `owner` have notices of their own.
    pub(super) fn set_own_notices(&mut self, owner: u64, own: bool) {
        let Some(family) = self.families.get_mut(&owner) else {
            return;
        };
        family.own_notices = own;
        let sink = family.sink.and_then(|sink| self.sinks.get_mut(&sink));
        if let Some(entry) = sink {
            entry.add(owner, own);
        }
    }

    /// Returns the readers for whom the wakeups of the family of `owner` are counted.
    pub(super) fn woken(&self, owner: u64) -> Woken {
        let family = self.families.get(&owner);
        let sharing = family.filter(|family| !family.own_notices);
        match sharing.and_then(|family| family.sink) {
            Some(sink) => Woken::Ring(sink),
            None => Woken::Family(owner),
        }
    }

    /// Returns the family for which a sink's wakeups are reported: the family for which the sink was mapped or, if that
    /// family no longer writes to the sink or has notices of its own, another one. `None` if every family that writes
    /// to the sink has notices of its own.
    pub(super) fn named(&self, sink: u64) -> Option<u64> {
        self.sinks.get(&sink).and_then(|entry| first(&entry.sharing, sink))
    }

    /// Returns a family that writes to a sink, preferably the family for which the sink was mapped.
    pub(super) fn writing_family(&self, sink: u64) -> Option<u64> {
        self.sinks.get(&sink).and_then(|entry| first(&entry.families, sink))
    }

    /// Whether the family of `owner` writes to the ring of another family.
    pub(super) fn is_redirected(&self, owner: u64) -> bool {
        let family = self.families.get(&owner);
        family.is_some_and(|family| family.redirected)
    }

    /// Moves the family of `owner` to the sink that was mapped for the event `sink`. If `sink` is `None`, detaches the
    /// family from its sink.
    pub(super) fn move_family(&mut self, owner: u64, sink: Option<u64>) -> Moved {
        let Some(family) = self.families.get_mut(&owner) else {
            return Moved { events: Vec::new(), sink: None };
        };
        let before = std::mem::replace(&mut family.sink, sink);
        family.redirected = sink.is_some_and(|sink| sink != owner);
        let own_notices = family.own_notices;
        let events: Vec<u64> = family.events.iter().copied().collect();
        work::charge_examined(events.len());
        if let Some(entry) = before.and_then(|before| self.sinks.get_mut(&before)) {
            entry.remove(owner);
        }
        let target = sink.and_then(|sink| self.sinks.get_mut(&sink));
        let sink = target.map(|entry| {
            entry.add(owner, own_notices);
            Arc::clone(&entry.sink)
        });
        Moved { events, sink }
    }

    // Sinks.

    /// Returns the sink that was mapped for an event.
    pub(super) fn get(&self, id: u64) -> Option<&Arc<Sink>> {
        self.sinks.get(&id).map(|entry| &entry.sink)
    }

    /// Returns the parts of the sink that was mapped for an event.
    pub(super) fn shape(&self, id: u64) -> Option<Shape> {
        self.get(id).map(|sink| sink.shape())
    }

    pub(super) fn has_ring(&self, id: u64) -> bool {
        self.shape(id).is_some_and(|shape| shape.metadata.is_some())
    }

    /// Whether the driver manages the event's area.
    pub(super) fn is_driven(&self, id: u64) -> bool {
        self.shape(id).is_some_and(|shape| shape.driven)
    }

    /// Returns the number of the first window page of the ring that was mapped for the event. `None` if there is no
    /// such ring in the window.
    pub(super) fn window_page(&self, id: u64) -> Option<u32> {
        self.sinks.get(&id)?.window_page()
    }

    /// Returns the events that write to a sink, one family after the other. Charges the examination of all of them.
    pub(super) fn writers(&self, sink: u64) -> Vec<u64> {
        let entry = self.sinks.get(&sink).into_iter();
        let families = entry.flat_map(|entry| &entry.families);
        let families = families.filter_map(|owner| self.families.get(owner));
        let writers: Vec<u64> = families.flat_map(|family| &family.events).copied().collect();
        work::charge_examined(writers.len());
        writers
    }

    /// Number of guest RAM pages that rings and areas use. Window pages do not count, because the window's
    /// size already limits them.
    pub(super) fn guest_pages(&self) -> usize {
        work::charge_examined(self.sinks.len());
        let pages = self.sinks.values().map(|entry| {
            let shape = entry.sink.shape();
            let ring = entry.run.as_ref().map_or(shape.ring_pages, |_| 0);
            ring + shape.area_pages
        });
        pages.sum()
    }

    /// Adds a sink, and moves a family to it: the family of the event for which the sink was mapped. `run` holds the
    /// ring's pages in the window.
    pub(super) fn add(&mut self, sink: Sink, run: Option<Run>) -> Moved {
        let id = sink.id();
        self.adopt(sink, run);
        self.move_family(id, Some(id))
    }

    /// Detaches all families from a sink.
    pub(super) fn abandon(&mut self, id: u64) -> Moved {
        let entry = self.sinks.get(&id).into_iter();
        let families: Vec<u64> = entry.flat_map(|entry| &entry.families).copied().collect();
        let mut moved = Moved { events: Vec::new(), sink: None };
        for owner in families {
            moved.events.extend(self.move_family(owner, None).events);
        }
        moved
    }

    /// Removes a sink that no event writes to, and frees its pages.
    pub(super) fn remove(&mut self, id: u64) {
        if let Some(entry) = self.sinks.remove(&id) {
            entry.sink.close();
        }
    }

    /// Removes a sink unless a family still writes to it.
    pub(super) fn remove_unused(&mut self, id: u64) {
        let entry = self.sinks.get(&id);
        if entry.is_some_and(|entry| entry.families.is_empty()) {
            self.remove(id);
        }
    }

    /// Keeps only the events in `kept` and the sinks that were mapped for them. Does not write to any ring.
    pub(super) fn retain(&mut self, kept: &BTreeSet<u64>) {
        for family in self.families.values_mut() {
            family.events.retain(|id| kept.contains(id));
        }
        self.families.retain(|_, family| !family.events.is_empty());
        for family in self.families.values_mut() {
            // The next driver has not asked for notices of a family's own.
            family.own_notices = false;
        }
        for entry in self.sinks.values_mut() {
            entry.families.retain(|owner| self.families.contains_key(owner));
            entry.sharing.clone_from(&entry.families);
        }
        let sinks: Vec<u64> = self.sinks.keys().copied().collect();
        for id in sinks.into_iter().filter(|id| !kept.contains(id)) {
            self.abandon(id);
            self.remove(id);
        }
    }
}

/// Returns `preferred` if the set contains it, otherwise the first number in the set.
fn first(set: &BTreeSet<u64>, preferred: u64) -> Option<u64> {
    set.get(&preferred).or_else(|| set.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates one family per owner. The owner is the family's only event. Only the first family has a sink.
    fn sinks(owners: &[u64]) -> Sinks {
        let mut sinks = Sinks::default();
        for &owner in owners {
            sinks.join(owner, owner);
        }
        sinks.add(Sink::new(owners[0]), None);
        sinks
    }

    #[test]
    fn sink_ends_with_its_last_family() {
        let mut sinks = sinks(&[1, 2, 3]);
        sinks.move_family(2, Some(1));
        sinks.move_family(3, Some(1));
        assert!(sinks.is_redirected(2) && !sinks.is_redirected(1));
        assert_eq!(sinks.writers(1), [1, 2, 3]);
        let gone = Some(Extinct { sink: Some(1) });
        assert_eq!((sinks.leave(1, 1), sinks.named(1)), (gone, Some(2)));
        assert_eq!((sinks.leave(2, 2), sinks.named(1)), (gone, Some(3)));
        assert!(sinks.get(1).is_some());
        assert_eq!((sinks.leave(3, 3), sinks.named(1)), (gone, None));
        assert!(sinks.get(1).is_none());
    }

    #[test]
    fn sink_is_named_after_a_family_without_notices_of_its_own() {
        let mut sinks = sinks(&[1, 2, 3]);
        sinks.set_own_notices(3, true);
        sinks.move_family(2, Some(1));
        sinks.move_family(3, Some(1));
        assert_eq!((sinks.named(1), sinks.writing_family(1)), (Some(1), Some(1)));
        let woken = |sinks: &Sinks| [1, 2, 3].map(|owner| sinks.woken(owner));
        let ring = Woken::Ring(1);
        assert_eq!(woken(&sinks), [ring, ring, Woken::Family(3)]);
        sinks.set_own_notices(1, true);
        assert_eq!((sinks.named(1), sinks.writing_family(1)), (Some(2), Some(1)));
        sinks.move_family(2, None);
        assert_eq!((sinks.named(1), sinks.writing_family(1)), (None, Some(1)));
        assert_eq!(woken(&sinks), [1, 2, 3].map(Woken::Family));
        sinks.set_own_notices(3, false);
        assert_eq!((sinks.named(1), sinks.woken(3)), (Some(3), ring));
        sinks.retain(&BTreeSet::from([1, 3]));
        assert_eq!((sinks.named(1), sinks.woken(1)), (Some(1), ring));
    }

    #[test]
    fn family_survives_while_it_has_children() {
        let mut sinks = sinks(&[1]);
        sinks.join(1, 4);
        assert_eq!(sinks.leave(1, 1), None);
        assert_eq!(sinks.writers(1), [4]);
        assert!(sinks.of_family(1).is_some_and(|sink| sink.id() == 1));
    }

    #[test]
    fn removed_sink_leaves_its_writers_without_one() {
        let mut sinks = sinks(&[1, 2]);
        sinks.move_family(2, Some(1));
        let moved = sinks.abandon(1);
        sinks.remove(1);
        assert_eq!(moved.events, [1, 2]);
        assert!(moved.sink.is_none());
        assert!(sinks.of_family(2).is_none() && !sinks.is_redirected(2));
    }
}
