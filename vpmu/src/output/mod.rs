//! Where records go: which event writes to which ring, what became of its records, and the
//! notices that are due. Knows events by their facts alone.

mod aux;
mod notices;

use std::collections::BTreeMap;
use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionCollectionError};

use self::aux::Untold;
use self::notices::Notices;
use crate::aux::Area;
use crate::event::Facts;
use crate::record::{Origin, Reading, Record, Sample};
use crate::ring::{Author, Face, Outcome, Ring};
use crate::tasks::{History, Task, Tasks};
use crate::window::Window;

/// Rings, and notices of one activation.
///
/// A ring goes by the event that it was mapped with. Events write to it by family: an event and
/// its children go by the id of the first, their owner.
#[derive(Debug)]
pub(crate) struct Output {
    /// The guest's RAM, as the driver brought it.
    guest: Arc<GuestMemoryMmap>,
    /// All that rings and areas lie in: the guest's RAM, and the window.
    memory: Arc<GuestMemoryMmap>,
    window: Option<Window>,
    rings: BTreeMap<u64, Ring>,
    /// The area beside a ring, or one that the driver keeps, by the event it was mapped with.
    areas: BTreeMap<u64, Area>,
    /// What the rings of areas have yet to be told.
    untold: BTreeMap<u64, Untold>,
    /// The ring of each family that does not write to its own.
    routes: BTreeMap<u64, u64>,
    tasks: Tasks,
    pub(crate) notices: Notices,
    record: Record,
    pub(crate) tally: Tally,
}

/// What became of samples since the start.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) written: u64,
    pub(crate) lost: u64,
    pub(crate) throttled: u64,
    pub(crate) wakeups: u64,
    /// Bytes.
    pub(crate) aux_written: u64,
    /// Bytes.
    pub(crate) aux_lost: u64,
    pub(crate) aux_records: u64,
}

/// A record that is no sample.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Note<'a> {
    Throttle,
    Unthrottle,
    /// The counts of an event that closes.
    Read(Reading<'a>),
}

impl Output {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            guest: Arc::default(),
            memory: Arc::default(),
            window: None,
            rings: BTreeMap::new(),
            areas: BTreeMap::new(),
            untold: BTreeMap::new(),
            routes: BTreeMap::new(),
            tasks: Tasks::new(vcpus),
            notices: Notices::default(),
            record: Record::default(),
            tally: Tally::default(),
        }
    }

    /// There is memory that outlives a reset.
    pub(crate) fn set_window(&mut self, window: Window) {
        self.window = Some(window);
    }

    pub(crate) fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// A driver is there, with guest memory.
    ///
    /// # Errors
    /// The window lies in it.
    pub(crate) fn activate(
        &mut self,
        guest: Arc<GuestMemoryMmap>,
    ) -> Result<(), GuestRegionCollectionError> {
        self.memory = match &self.window {
            Some(window) => Arc::new(guest.insert_region(window.region())?),
            None => Arc::clone(&guest),
        };
        self.guest = guest;
        Ok(())
    }

    /// Forgets the driver and its memory, and with that every ring but those of the events that `stays`.
    pub(crate) fn reset(&mut self, stays: impl Fn(u64) -> bool) {
        let rings = self.rings.keys().copied().filter(|&ring| !stays(ring));
        for ring in rings.collect::<Vec<_>>() {
            self.remove_ring(ring);
        }
        self.areas.clear();
        self.untold.clear();
        self.routes.clear();
        self.tasks.clear();
        self.notices = Notices::default();
        let window = self.window.iter();
        let window = window.map(|window| window.region());
        // The window alone is one region, or none: they do not overlap.
        let window = GuestMemoryMmap::from_arc_regions(window.collect());
        self.memory = Arc::new(window.unwrap_or_default());
        self.guest = Arc::default();
    }

    /// The guest's RAM.
    pub(crate) fn guest(&self) -> &GuestMemoryMmap {
        &self.guest
    }

    /// All that rings and areas lie in.
    pub(crate) fn memory(&self) -> &Arc<GuestMemoryMmap> {
        &self.memory
    }

    /// `vcpu` is in range, the address checked.
    pub(crate) fn set_task_page(&mut self, vcpu: u32, page: Option<GuestAddress>) {
        self.tasks.set_page(vcpu, page);
    }

    /// The ring that the events of `owner` write to, by the event it was mapped with.
    pub(crate) fn ring_of(&self, owner: u64) -> Option<u64> {
        let ring = self.routes.get(&owner).copied().unwrap_or(owner);
        self.rings.contains_key(&ring).then_some(ring)
    }

    /// Whether a ring was mapped with `event`, be it that the event is closed by now.
    pub(crate) fn has_ring(&self, event: u64) -> bool {
        self.rings.contains_key(&event)
    }

    /// Whether the events of `owner` write to another's ring.
    pub(crate) fn is_redirected(&self, owner: u64) -> bool {
        self.routes.contains_key(&owner)
    }

    /// Guest pages that rings and areas hold; the window's are bounded by its size.
    pub(crate) fn pages(&self) -> usize {
        let rings = self.rings.values();
        let rings = rings.filter(|ring| self.window_page(ring).is_none());
        rings
            .map(Ring::pages)
            .chain(self.areas.values().map(Area::pages))
            .sum()
    }

    pub(crate) fn add_ring(&mut self, event: u64, ring: Ring) {
        self.rings.insert(event, ring);
    }

    /// Takes a ring away, and the area beside it; those who were redirected to it have none then.
    pub(crate) fn remove_ring(&mut self, ring: u64) {
        let removed = self.rings.remove(&ring);
        let page = removed.and_then(|ring| self.window_page(&ring));
        if let (Some(page), Some(window)) = (page, &mut self.window) {
            window.give_back(page);
        }
        self.remove_area(ring);
        self.routes.retain(|_, route| *route != ring);
    }

    /// Pages of the window for a ring, all zero; `None`: it has no such room.
    pub(crate) fn take_window(&mut self, pages: u32) -> Option<Vec<GuestAddress>> {
        self.window.as_mut()?.take(pages)
    }

    /// The number of a ring's first page in the window, if it lies there.
    pub(crate) fn window_page(&self, ring: &Ring) -> Option<u32> {
        self.window.as_ref()?.page(ring.metadata())
    }

    pub(crate) fn ring(&self, ring: u64) -> Option<&Ring> {
        self.rings.get(&ring)
    }

    /// The events of `owner` write to `ring` from now on; `None`: to their own.
    pub(crate) fn route(&mut self, owner: u64, ring: Option<u64>) {
        match ring {
            Some(ring) => self.routes.insert(owner, ring),
            None => self.routes.remove(&owner),
        };
    }

    /// Stops or resumes writing to a ring.
    pub(crate) fn pause(&mut self, ring: u64, paused: bool) {
        if let Some(ring) = self.rings.get_mut(&ring) {
            ring.pause(paused);
        }
    }

    /// Writes a sample of an event; whether it could.
    pub(crate) fn sample(&mut self, facts: &Facts, origin: &Origin, sample: &Sample<'_>) -> bool {
        let written = self.write(facts, origin, |ring, memory, record, author| {
            match record.sample(&facts.layout, origin, sample) {
                Ok(sample) => ring.write(memory, sample, author),
                Err(_) => ring.lose(1),
            }
        });
        if written {
            self.tally.written += 1;
        } else {
            self.tally.lost += 1;
        }
        written
    }

    /// Counts overflows that no record can be made of.
    pub(crate) fn lose(&mut self, facts: &Facts, overflows: u64) {
        self.tally.lost = self.tally.lost.saturating_add(overflows);
        self.write(facts, &Origin::default(), |ring, _, _, _| {
            ring.lose(overflows)
        });
    }

    /// Writes a record that is no sample, if it fits.
    pub(crate) fn note(&mut self, facts: &Facts, origin: &Origin, note: &Note<'_>) {
        self.write(facts, origin, |ring, memory, record, author| {
            let built = match note {
                Note::Throttle => Ok(record.throttle(&facts.layout, origin)),
                Note::Unthrottle => Ok(record.unthrottle(&facts.layout, origin)),
                Note::Read(reading) => record.read(&facts.layout, origin, reading),
            };
            built.map_or_else(
                |_| Outcome::default(),
                |bytes| ring.note(memory, bytes, author),
            )
        });
    }

    /// Whether the ring of an event owes its reader a record of a loss, or of what a trace wrote.
    pub(crate) fn owes(&self, facts: &Facts) -> bool {
        let ring = self
            .ring_of(facts.owner)
            .and_then(|ring| self.rings.get(&ring));
        ring.is_some_and(Ring::has_loss) || self.owes_aux(facts)
    }

    /// Writes what the ring of an event owes, as far as it fits.
    pub(crate) fn flush(&mut self, facts: &Facts, origin: &Origin) {
        if self.owes_aux(facts) {
            self.aux_commit(facts, origin);
        }
        self.write(facts, origin, |ring, memory, _, author| Outcome {
            written: false,
            wake: ring.flush(memory, author),
        });
    }

    /// As [`Output::flush`], and wakes the reader if anything stands there that it was not woken for.
    pub(crate) fn flush_and_wake(&mut self, facts: &Facts, origin: &Origin) {
        let shown = self.owes_aux(facts) && self.aux_commit(facts, origin);
        self.write(facts, origin, |ring, memory, _, author| {
            let marked = ring.flush(memory, author);
            Outcome {
                written: false,
                wake: ring.rouse() || marked || shown,
            }
        });
    }

    /// Shows an event's figures in its own metadata page, if it has one.
    pub(crate) fn show(&mut self, event: u64, face: &Face) {
        if let Some(ring) = self.rings.get_mut(&event) {
            ring.show(&self.memory, face);
        }
    }

    /// The last event of `owner` is gone; a wakeup that is due for it is handed on to `heir`,
    /// another that writes to the same ring.
    pub(crate) fn forget_family(&mut self, owner: u64, heir: Option<u64>) {
        self.routes.remove(&owner);
        if self.is_driven(owner) {
            self.remove_area(owner);
        }
        let waking = self.notices.take_wakeup(owner);
        if let Some(heir) = heir.filter(|_| waking) {
            self.notices.wake(heir);
        }
    }

    /// Where the kernel keeps the user registers of the task that runs on `vcpu`, unchecked.
    pub(crate) fn user_regs(&self, vcpu: u32) -> u64 {
        self.tasks.user_regs(&self.guest, vcpu)
    }

    /// Who has run on `vcpu`, as its task page has it.
    pub(crate) fn history(&self, vcpu: u32) -> History {
        self.tasks.history(&self.guest, vcpu)
    }

    /// Who runs on `vcpu`, as its task page has it.
    pub(crate) fn running(&self, vcpu: u32) -> Task {
        self.tasks.running(&self.guest, vcpu)
    }

    /// Lets `act` write to the ring of an event, if it has one, and wakes who waits for it.
    fn write(
        &mut self,
        facts: &Facts,
        origin: &Origin,
        act: impl FnOnce(&mut Ring, &GuestMemoryMmap, &mut Record, &Author<'_>) -> Outcome,
    ) -> bool {
        let ring = self.ring_of(facts.owner);
        let Some(ring) = ring.and_then(|ring| self.rings.get_mut(&ring)) else {
            return false;
        };
        let author = Author {
            layout: &facts.layout,
            origin,
            wakeup: facts.wakeup,
        };
        let outcome = act(ring, &self.memory, &mut self.record, &author);
        if outcome.wake {
            self.tally.wakeups += 1;
            self.notices.wake(facts.owner);
        }
        outcome.written
    }
}
