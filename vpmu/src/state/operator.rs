//! Persistent events from the host's side: what an operator starts, ends and reads.

use std::io;

use super::State;
use crate::abi::{OPEN_ENABLED, OPEN_PERSISTENT, OpenRequest};
use crate::catalogue::Catalogue;
use crate::control::Maker;
use crate::errno::Errno;
use crate::event::{Event, Host};
use crate::persistent::{
    History, Name, Persist, PersistError, Persistence, PersistentStatus, spelled, whole,
};
use crate::record::Layout;
use crate::ring::Ring;

/// The bytes of an event's ring, to be looked at when vCPUs need not wait for it.
#[derive(Debug)]
pub(crate) struct Held {
    event: PersistentStatus,
    layout: Layout,
    bytes: Vec<u8>,
    newest_first: bool,
}

impl Held {
    /// The records among them.
    pub(crate) fn history(self) -> History {
        let is_own = |record: &[u8]| self.layout.admits(record, self.event.id);
        History {
            records: whole(&self.bytes, self.newest_first, is_own),
            event: self.event,
        }
    }
}

impl State {
    /// Starts an event for the operator, with a `request` that is what was `asked` for: its id.
    pub(crate) fn persist(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        asked: &Persist,
        request: &OpenRequest,
    ) -> Result<u64, PersistError> {
        let (name, pages) = (asked.name.as_deref(), asked.pages);
        let name = match name {
            Some(text) => Name::new(text).ok_or_else(|| PersistError::BadName(text.to_owned()))?,
            None => Name::of(self.next_id),
        };
        let persistence = Persistence {
            name: self
                .free_name(self.next_id, Some(name.clone()))
                .map_err(|_| PersistError::NameTaken(name.to_string()))?,
            operator: true,
        };
        let most = self.settings.limits.max_ring_pages;
        if pages != 0 && (!pages.is_power_of_two() || pages > most) {
            return Err(PersistError::Pages { pages, most });
        }
        if pages != 0 && !self.output.has_window() {
            return Err(PersistError::NoWindow);
        }
        let opened = self.open_for(host, catalogue, request, Maker::Operator(persistence));
        let (_, id) = opened.map_err(|errno| refused(asked, errno))?;
        if pages != 0 && self.lay_in_window(host, id, pages + 1, false).is_err() {
            self.end(host, id);
            return Err(PersistError::NoRoom(pages + 1));
        }
        if let Err(errno) = self.enable(host, id) {
            self.end(host, id);
            return Err(refused(asked, errno));
        }
        self.output.notices.list(id);
        Ok(id)
    }

    /// Ends a persistent event, whoever made it.
    pub(crate) fn end_persistent(&mut self, host: &Host<'_>, id: u64) -> Result<(), PersistError> {
        self.persistent_event(id)?;
        self.settle(host);
        self.end(host, id);
        self.output.notices.list(id);
        Ok(())
    }

    /// Every persistent event as it is now.
    pub(crate) fn statuses(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
    ) -> Vec<PersistentStatus> {
        let ids: Vec<u64> = self.persistent_events().map(|(id, _)| id).collect();
        for &id in &ids {
            // One that its host gave up is in error, and that is how it is.
            let _ = self.update(host, id);
        }
        let events = self.persistent_events();
        events
            .map(|(_, event)| self.status(event, catalogue))
            .collect()
    }

    /// A persistent event as it is now, with what its ring holds.
    pub(crate) fn held(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        id: u64,
    ) -> Result<Held, PersistError> {
        self.persistent_event(id)?;
        self.settle(host);
        // As above.
        let _ = self.update(host, id);
        let event = self.persistent_event(id)?;
        let ring = self.output.ring(id).ok_or(PersistError::NoRing(id))?;
        let bytes = ring.held(self.output.memory());
        let bytes = bytes.ok_or(PersistError::Unreadable(id))?;
        Ok(Held {
            event: self.status(event, catalogue),
            layout: event.facts.layout,
            bytes,
            newest_first: ring.is_backward(),
        })
    }

    fn persistent_event(&self, id: u64) -> Result<&Event, PersistError> {
        let event = self.events.get(&id);
        event
            .filter(|event| event.persistence.is_some())
            .ok_or(PersistError::NoSuch(id))
    }

    fn status(&self, event: &Event, catalogue: &Catalogue) -> PersistentStatus {
        let facts = &event.facts;
        let ring = self.output.ring(facts.id);
        let face = event.face(self.clock);
        let enabled = if event.enabled { OPEN_ENABLED } else { 0 };
        let name = event.persistence.as_ref();
        PersistentStatus {
            id: facts.id,
            name: name.map_or_else(String::new, |known| known.name.to_string()),
            event: spelled(catalogue, facts.kind, facts.config, facts.flags),
            operator: event.is_operators(),
            vcpu: event.placed_on().unwrap_or(event.last_vcpu),
            kind: facts.kind,
            config: facts.config,
            rate: event.period.map(|period| period.rate()),
            flags: facts.flags & !OPEN_ENABLED | enabled | OPEN_PERSISTENT,
            engine: facts.engine,
            sample_type: facts.layout.sample_type,
            read_format: facts.layout.read_format,
            regs_user: facts.layout.regs_user,
            regs_intr: facts.layout.regs_intr,
            stack_user: facts.layout.stack_user,
            state: event.state(),
            count: face.count,
            time_enabled: face.time_enabled,
            time_running: face.time_running,
            lost: event.lost(),
            pages: ring.map(Ring::data_pages),
            window: ring.is_some_and(|ring| self.output.window_page(ring).is_some()),
        }
    }
}

fn refused(asked: &Persist, errno: Errno) -> PersistError {
    match errno {
        Errno::EOPNOTSUPP => PersistError::Refused {
            event: asked.event.clone(),
            why: "the engine that this device was given does not make such samples",
        },
        errno => PersistError::Host(io::Error::from(errno)),
    }
}
