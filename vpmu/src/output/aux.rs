//! Where traces go: the area beside the ring that an event's family writes to, or one that the driver
//! keeps for it; and the records that tell of it.

use super::Output;
use crate::aux::{Area, Chunk, Refused};
use crate::event::Facts;
use crate::record::{Layout, Origin};
use crate::ring::{Author, Outcome};
use crate::trace::{Packet, Trace};

/// A piece of an area that has ended, and that no record tells of yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Untold {
    chunk: Chunk,
    /// Whose record it is: that of the event that ended it last.
    layout: Layout,
    origin: Origin,
}

impl Output {
    /// Writes the next packet of a trace, with the sync packet and the padding that have to stand
    /// before it, or counts it as lost; whether it was written.
    ///
    /// `packet` is complete but for its number. `origin` is its origin: the vCPU, the task, and its
    /// time, of which `tsc` is the guest's TSC. `trace` is the event's own. The reader sees the packet
    /// when a watermark is crossed, or with [`Output::aux_commit`].
    pub(crate) fn aux_produce(
        &mut self,
        facts: &Facts,
        origin: &Origin,
        tsc: u64,
        trace: &mut Trace,
        packet: Packet<'_>,
    ) -> bool {
        let lost = packet.len();
        let Some(key) = self.area_of(facts.owner) else {
            self.aux_lose(facts, trace, 1, lost);
            return false;
        };
        let placed = self.areas.get_mut(&key).and_then(|area| {
            let position = area.position(facts.id)?;
            let laid = trace.lay(facts, origin, tsc, packet, position);
            Some((
                area.append(&self.memory, facts.id, &laid.entry()),
                area.is_driven(),
            ))
        });
        let Some((appended, driven)) = placed else {
            self.aux_lose(facts, trace, 1, lost);
            return false;
        };
        trace.account(packet, &appended);
        self.tally.aux_written += appended.written;
        if !appended.whole {
            self.tally.aux_lost = self.tally.aux_lost.saturating_add(lost);
        }
        if driven {
            if appended.wake {
                self.notices.aux(facts.id);
            }
        } else if appended.chunk.is_some() || appended.wake {
            self.tell(key, facts, origin, appended.chunk, appended.wake);
        }
        appended.whole
    }

    /// Counts packets of a trace that were lost before they could be written, of `bytes` together.
    pub(crate) fn aux_lose(&mut self, facts: &Facts, trace: &mut Trace, packets: u64, bytes: u64) {
        trace.lose(packets, bytes);
        self.tally.aux_lost = self.tally.aux_lost.saturating_add(bytes);
        let area = self.area_of(facts.owner);
        if let Some(area) = area.and_then(|area| self.areas.get_mut(&area)) {
            area.miss();
        }
    }

    /// Shows the reader what a trace has written, and tells of it in the ring as far as that has room;
    /// `origin` is the moment. Nothing in an area that the driver keeps. Whether it showed anything.
    pub(crate) fn aux_commit(&mut self, facts: &Facts, origin: &Origin) -> bool {
        let Some(key) = self.area_of(facts.owner) else {
            return false;
        };
        let ended = match self.areas.get_mut(&key) {
            Some(area) if area.is_begun() => area.end(&self.memory),
            _ => None,
        };
        if ended.is_some() || self.untold.contains_key(&key) {
            self.tell(key, facts, origin, ended, false);
        }
        ended.is_some()
    }

    /// Says in the ring of a trace, once, that it has begun; if there is an area, and room.
    pub(crate) fn aux_announce(&mut self, facts: &Facts, origin: &Origin, trace: &mut Trace) {
        let area = self.area_of(facts.owner);
        let kept = area.and_then(|area| self.areas.get(&area));
        if trace.announced || kept.is_none_or(Area::is_driven) {
            return;
        }
        trace.announced = self.write(facts, origin, |ring, memory, record, author| {
            ring.note(memory, record.itrace_start(author.layout, origin), author)
        });
    }

    /// The area that the events of `owner` write to, by the event it was mapped with.
    pub(crate) fn area_of(&self, owner: u64) -> Option<u64> {
        let ring = self.ring_of(owner).unwrap_or(owner);
        self.areas.contains_key(&ring).then_some(ring)
    }

    /// Whether an area was mapped with `event`, be it that the event is closed by now.
    pub(crate) fn has_area(&self, event: u64) -> bool {
        self.areas.contains_key(&event)
    }

    /// Whether the driver keeps an area for `event`.
    pub(crate) fn is_driven(&self, event: u64) -> bool {
        self.areas.get(&event).is_some_and(Area::is_driven)
    }

    pub(crate) fn add_area(&mut self, event: u64, area: Area) {
        self.areas.insert(event, area);
    }

    /// Takes an area away. What no record tells of yet, none will.
    pub(crate) fn remove_area(&mut self, event: u64) {
        self.areas.remove(&event);
        self.untold.remove(&event);
    }

    /// The driver lets an event write to its area from `head` on.
    ///
    /// # Errors
    /// As [`Area::begin`]; [`Refused::NotBegun`] without an area.
    pub(crate) fn aux_begin(&mut self, facts: &Facts, head: u64, room: u64) -> Result<(), Refused> {
        let area = self.area_of(facts.owner);
        let area = area.and_then(|area| self.areas.get_mut(&area));
        area.ok_or(Refused::NotBegun)?.begin(facts.id, head, room)
    }

    /// The driver lets an event write no longer: how far it came, and what found no room.
    ///
    /// # Errors
    /// [`Refused::NotBegun`].
    pub(crate) fn aux_finish(&mut self, facts: &Facts) -> Result<(u64, u64), Refused> {
        let area = self.area_of(facts.owner);
        let area = area.and_then(|area| self.areas.get_mut(&area));
        area.ok_or(Refused::NotBegun)?.finish(facts.id)
    }

    /// An event is gone that the driver may have let write to its area: others of its family can be let
    /// then.
    pub(crate) fn aux_abandon(&mut self, facts: &Facts) {
        // Most write to no such area.
        let _ = self.aux_finish(facts);
    }

    /// Whether the area of an event's ring owes that ring a record, or its reader a head.
    pub(super) fn owes_aux(&self, facts: &Facts) -> bool {
        let Some(key) = self.area_of(facts.owner) else {
            return false;
        };
        let begun = self.areas.get(&key).is_some_and(Area::is_begun);
        self.untold.contains_key(&key) || begun && facts.is_trace()
    }

    /// Writes the record of a piece that has `ended` and of those that found no room before, if it
    /// fits, and wakes the reader if it is to be woken.
    pub(super) fn tell(
        &mut self,
        key: u64,
        facts: &Facts,
        origin: &Origin,
        ended: Option<Chunk>,
        mut wake: bool,
    ) {
        let before = self.untold.remove(&key);
        let untold = match (before, ended) {
            (before, None) => before,
            (before, Some(chunk)) => Some(Untold {
                chunk: before.map_or(chunk, |before| before.chunk.with(chunk)),
                layout: facts.layout,
                origin: *origin,
            }),
        };
        if let (Some(untold), Some(ring)) = (untold, self.rings.get_mut(&key)) {
            let author = Author {
                layout: &untold.layout,
                origin: &untold.origin,
                wakeup: facts.wakeup,
            };
            let record = self
                .record
                .aux(&untold.layout, &untold.origin, &untold.chunk);
            let Outcome {
                written,
                wake: marked,
            } = ring.note(&self.memory, record, &author);
            wake |= marked;
            if written {
                self.tally.aux_records += 1;
            } else {
                self.untold.insert(key, untold);
            }
        }
        if wake {
            self.tally.wakeups += 1;
            self.notices.wake(facts.owner);
        }
    }
}
