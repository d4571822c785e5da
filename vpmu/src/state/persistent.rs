//! Persistent events: how an event becomes one and ceases to be, whose it is, and which there are.

use super::State;
use crate::abi::{
    CONTEXT_TASK, MAP_WINDOW, MAP_WRITABLE, OPEN_ENABLED, OPEN_FREQ, OPEN_PERSISTENT, OpenRequest,
    PERSISTENT_NAME, PERSISTENT_OPERATOR, PersistentEvent,
};
use crate::errno::Errno;
use crate::event::{Context, Event};
use crate::persistent::{Name, Persistence};
use crate::ring::{Ring, Wakeup};
use crate::source::Rate;

impl State {
    /// Whether an event is the operator's: the guest reads it, and changes nothing about it.
    pub(crate) fn is_operators(&self, id: u64) -> bool {
        let event = self.events.get(&id);
        event.is_some_and(Event::is_operators)
    }

    /// Makes an event of the guest's persistent. `None` keeps the name that it has, or gives it one of
    /// its own.
    pub(crate) fn detach(&mut self, id: u64, name: Option<Name>) -> Result<(), Errno> {
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if event.is_operators() {
            return Err(Errno::EPERM);
        }
        let alone = event.leader.is_none() && self.members(id).is_empty();
        let fits = alone && !event.facts.is_child() && !self.output.is_redirected(id);
        if !matches!(event.context, Context::Vcpu(_)) || !fits || event.has_failed() {
            return Err(Errno::EINVAL);
        }
        let before = event.persistence.as_ref();
        let name = name.or_else(|| before.map(|before| before.name.clone()));
        let fresh = before.is_none();
        let name = self.free_name(id, name)?;
        if fresh {
            self.check_persistent()?;
        }
        if let Some(event) = self.events.get_mut(&id) {
            event.persistence = Some(Persistence {
                name,
                operator: false,
            });
        }
        Ok(())
    }

    /// What makes the guest's event `id`, which is yet to be, persistent.
    pub(crate) fn persistence(&self, id: u64) -> Result<Persistence, Errno> {
        self.check_persistent()?;
        Ok(Persistence {
            name: self.free_name(id, None)?,
            operator: false,
        })
    }

    /// Makes it an event that can be closed again.
    pub(crate) fn reattach(&mut self, id: u64) -> Result<(), Errno> {
        let event = self.events.get_mut(&id).ok_or(Errno::ENOENT)?;
        event.persistence.take().map(drop).ok_or(Errno::EINVAL)
    }

    /// The name of the event `id` to be, if no other persistent event has it; `None`: one of its own.
    pub(crate) fn free_name(&self, id: u64, name: Option<Name>) -> Result<Name, Errno> {
        let name = name.unwrap_or_else(|| Name::of(id));
        let mut others = self.persistent_events().filter(|(other, _)| *other != id);
        match others.any(|(_, event)| event.is_named(&name)) {
            true => Err(Errno::EEXIST),
            false => Ok(name),
        }
    }

    /// Whether the operator lets the guest have one more persistent event.
    fn check_persistent(&self) -> Result<(), Errno> {
        let guests = self.persistent_events();
        let guests = guests.filter(|(_, event)| !event.is_operators()).count();
        match guests < self.settings.limits.max_persistent as usize {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    /// At most `most` persistent events with ids above `after`, by ascending id.
    pub(crate) fn list(&self, after: u64, most: usize) -> Vec<PersistentEvent> {
        let later = self.persistent_events().filter(|(id, _)| *id > after);
        later
            .take(most)
            .map(|(id, event)| self.listed(id, event))
            .collect()
    }

    /// By ascending id.
    pub(crate) fn persistent_events(&self) -> impl Iterator<Item = (u64, &Event)> {
        let events = self.events.iter();
        events
            .filter(|(_, event)| event.persistence.is_some())
            .map(|(&id, event)| (id, event))
    }

    fn listed(&self, id: u64, event: &Event) -> PersistentEvent {
        let ring = self.output.ring(id);
        let page = ring.and_then(|ring| self.output.window_page(ring));
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let map = flag(ring.is_some_and(Ring::is_writable), MAP_WRITABLE)
            | flag(page.is_some(), MAP_WINDOW);
        let known = event.persistence.as_ref();
        let name = known.map(|known| known.name.to_wire());
        PersistentEvent {
            id: id.into(),
            open: opened(event),
            pages: ring.map_or(0, ring_pages).into(),
            map: map.into(),
            window_page: page.unwrap_or(0).into(),
            flags: flag(event.is_operators(), PERSISTENT_OPERATOR).into(),
            name: name.unwrap_or([0; PERSISTENT_NAME]),
        }
    }
}

/// Pages of a ring, the metadata page included.
fn ring_pages(ring: &Ring) -> u32 {
    // Bounded by a limit of 32 bits.
    u32::try_from(ring.pages()).unwrap_or(u32::MAX)
}

/// What a persistent event would be opened with.
fn opened(event: &Event) -> OpenRequest {
    let facts = &event.facts;
    let flag = |on: bool, flag| if on { flag } else { 0 };
    let rate = event.period.map(|period| period.rate());
    let flags = facts.flags & !(OPEN_ENABLED | OPEN_FREQ)
        | flag(event.enabled, OPEN_ENABLED)
        | flag(matches!(rate, Some(Rate::Frequency(_))), OPEN_FREQ)
        | OPEN_PERSISTENT;
    OpenRequest {
        kind: facts.kind.into(),
        context: match event.context {
            Context::Vcpu(vcpu) => vcpu,
            Context::Task(_) => CONTEXT_TASK,
        }
        .into(),
        config: facts.config.into(),
        period: match rate {
            Some(Rate::Period(rate) | Rate::Frequency(rate)) => rate,
            None => 0,
        }
        .into(),
        sample_type: facts.layout.sample_type.into(),
        flags: flags.into(),
        wakeup: match facts.wakeup {
            Wakeup::Page => 0,
            Wakeup::Records(every) | Wakeup::Bytes(every) => every,
        }
        .into(),
        engine: facts.engine.into(),
        max_stack: facts.max_stack.into(),
        read_format: facts.layout.read_format.into(),
        regs_user: facts.layout.regs_user.into(),
        regs_intr: facts.layout.regs_intr.into(),
        stack_user: facts.layout.stack_user.into(),
        aux_watermark: facts.aux_watermark.into(),
        ..OpenRequest::default()
    }
}
