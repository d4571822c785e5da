//! Traces and their areas, as events that begin, end and are asked.

use super::State;
use crate::abi::{PACKET_ALIGN, SYNC_START};
use crate::aux::Refused;
use crate::errno::Errno;
use crate::event::Host;

impl State {
    /// Tells the ring of an active trace, once, that the trace has begun, if it has an area there.
    pub(crate) fn announce(&mut self, host: &Host<'_>, id: u64) {
        let active = |id| {
            self.events
                .get(id)
                .filter(|event| event.active_on().is_some())
        };
        let Some(origin) = active(&id)
            .filter(|event| event.trace.as_ref().is_some_and(|trace| !trace.announced))
            .map(|event| self.origin(host, event))
        else {
            return;
        };
        if let Some(event) = self.events.get_mut(&id)
            && let Some(trace) = &mut event.trace
        {
            self.output.aux_announce(&event.facts, &origin, trace);
        }
    }

    /// As [`State::announce`], for every trace that writes to the area mapped with `area`.
    pub(crate) fn announce_all(&mut self, host: &Host<'_>, area: u64) {
        let writes = |owner| self.output.area_of(owner) == Some(area);
        let events = self.events.values();
        let writers = events.filter(|event| event.facts.is_trace() && writes(event.facts.owner));
        let ids: Vec<u64> = writers.map(|event| event.facts.id).collect();
        for id in ids {
            self.announce(host, id);
        }
    }

    /// The traces that write to the area mapped with `area` have not written there yet: whoever reads
    /// it has to learn who they are.
    pub(crate) fn begin_in(&mut self, area: u64) {
        for event in self.events.values_mut() {
            if self.output.area_of(event.facts.owner) == Some(area)
                && let Some(trace) = &mut event.trace
            {
                trace.sync(SYNC_START);
            }
        }
    }

    /// The driver lets a trace write to the area that it keeps for it.
    pub(crate) fn aux_begin(&mut self, id: u64, head: u64, room: u64) -> Result<(), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if !head.is_multiple_of(PACKET_ALIGN as u64) {
            return Err(Errno::EINVAL);
        }
        let begun = self.output.aux_begin(&event.facts, head, room);
        begun.map_err(|_: Refused| Errno::EINVAL)
    }

    /// The driver lets it write no longer: the head that it reached and the bytes it lost.
    pub(crate) fn aux_end(&mut self, id: u64) -> Result<(u64, u64), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let finished = self.output.aux_finish(&event.facts);
        finished.map_err(|_: Refused| Errno::EINVAL)
    }
}
