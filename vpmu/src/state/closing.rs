//! How events and rings end.

use super::State;
use crate::abi::{OPEN_INHERIT_STAT, SYNC_START};
use crate::errno::Errno;
use crate::event::{Event, Host};
use crate::output::Note;

impl State {
    /// Closes an event; its ring goes with the last event that writes to it.
    pub(crate) fn close(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if event.persistence.is_some() {
            return Err(Errno::EBUSY);
        }
        self.end(host, id);
        Ok(())
    }

    /// Ends an event, persistent or not.
    pub(crate) fn end(&mut self, host: &Host<'_>, id: u64) {
        // One that cannot be stopped is in error, and ends all the same.
        let _ = self.stop(host, id);
        self.write_counts(host, id);
        self.flush(host, id);
        self.disband(host, id);
        let Some(event) = self.events.remove(&id) else {
            return;
        };
        self.links.forget(id);
        self.output.notices.forget(id);
        self.output.aux_abandon(&event.facts);
        self.retire(event.facts.owner);
    }

    /// Takes the ring away that was mapped with an event, its pending loss written if it fits.
    pub(crate) fn unmap(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        if !self.output.has_ring(id) {
            return Err(match self.events.contains_key(&id) {
                true => Errno::EINVAL,
                false => Errno::ENOENT,
            });
        }
        self.cut_all(host, id);
        self.flush_ring(host, id);
        self.with_needs(host, id, |event| event.shown = false);
        self.output.remove_ring(id);
        Ok(())
    }

    /// The events of `owner` write elsewhere from now on: to `ring`, or to their own.
    pub(crate) fn reroute(&mut self, host: &Host<'_>, owner: u64, ring: Option<u64>) {
        let before = self.output.ring_of(owner);
        let writers = self
            .events
            .values()
            .filter(|event| event.facts.owner == owner);
        let family: Vec<u64> = writers.map(|event| event.facts.id).collect();
        for &id in &family {
            self.flush(host, id);
        }
        self.output.route(owner, ring);
        for id in family {
            let trace = self.events.get_mut(&id);
            if let Some(trace) = trace.and_then(|event| event.trace.as_mut()) {
                // Who reads the other area has to learn who it is.
                trace.sync(SYNC_START);
            }
            self.announce(host, id);
        }
        if let Some(before) = before.filter(|&before| self.writer(before).is_none()) {
            self.output.remove_ring(before);
        }
    }

    /// Writes what a ring and the area beside it owe their reader, as far as it fits.
    pub(crate) fn flush_ring(&mut self, host: &Host<'_>, ring: u64) {
        let traces = self.events.values().find(|event| {
            event.facts.is_trace() && self.output.ring_of(event.facts.owner) == Some(ring)
        });
        let writer = traces.map(|event| event.facts.id);
        if let Some(writer) = writer.or_else(|| self.writer(ring)) {
            self.flush(host, writer);
        }
    }

    /// An event that writes to `ring`: the one that it was mapped with, if that is one.
    fn writer(&self, ring: u64) -> Option<u64> {
        let writes = |event: &&Event| self.output.ring_of(event.facts.owner) == Some(ring);
        let own = self.events.get(&ring).filter(writes);
        let event = own.or_else(|| self.events.values().find(writes));
        event.map(|event| event.facts.id)
    }

    /// An event of `owner` is gone: what only it kept goes too.
    fn retire(&mut self, owner: u64) {
        let ring = self.output.ring_of(owner);
        let heir = ring.and_then(|ring| self.writer(ring));
        if !self.events.values().any(|event| event.facts.owner == owner) {
            let heir = heir.and_then(|heir| self.events.get(&heir));
            self.output
                .forget_family(owner, heir.map(|event| event.facts.owner));
        }
        if let Some(ring) = ring.filter(|_| heir.is_none()) {
            self.output.remove_ring(ring);
        }
    }

    /// Writes the counts of an inherited event that is about to close, if they are asked for.
    fn write_counts(&mut self, host: &Host<'_>, id: u64) {
        let Some(event) = self.events.get(&id) else {
            return;
        };
        if !event.facts.is_child() || !event.facts.has(OPEN_INHERIT_STAT) {
            return;
        }
        let (facts, origin) = (event.facts, self.origin(host, event));
        let snapshot = self.snapshot(host, id);
        self.output
            .note(&facts, &origin, &Note::Read(snapshot.reading()));
    }
}
