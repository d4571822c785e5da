//! Restores a saved device into an unused one. A saved state comes from a file that anyone may have written, so every
//! number in it is checked as if it came from a guest's request.

use std::sync::Arc;

use vm_memory::GuestAddress;

use super::request::{Opening, STEERS, Terms, needs_guest_ips};
use super::{Control, Entry, Features, Overlap};
use crate::abi::{
    ENGINE_BATCHED, ENGINE_EXIT, NOTICE_AUX, NOTICE_ERROR, NOTICE_LIMIT, NOTICE_PERSISTENT, NOTICE_WAKEUP,
    OPEN_BACKWARD, OPEN_FREQ, OPEN_SAMPLE_ID_ALL, OpenRequest, QUEUE_CONTROL, QUEUE_EVENT, QUEUE_VCPU, READ_ALLOWED,
    SAMPLE_ALLOWED,
};
use crate::area::{Area, SavedArea, SavedKeeper};
use crate::errno::Errno;
use crate::error::{Error, RestoreError};
use crate::event::Event;
use crate::kind::Kind;
use crate::links::{Refused, SavedLink};
use crate::machine::Interrupt;
use crate::memory::Memory;
use crate::notices::{SavedNotice, Woken};
use crate::period::Period;
use crate::persistent::{Name, Persistence};
use crate::queues::QueueState;
use crate::record::{Layout, SAMPLE_READ};
use crate::refusal::Refusal;
use crate::ring::{Ring, SavedRing};
use crate::save::{SavedEvent, SavedState};
use crate::saved::Fault;
use crate::settings::Engines;
use crate::sink::{SavedSink, Sink};
use crate::spec::{Context, EventRequest, Wakeups};
use crate::tasks::Tasks;
use crate::window::{Holder, Run};

/// Upper bound (exclusive) for the next id and for the sum of exits in a saved state. No device reaches this bound,
/// and a device that continues from a smaller number never overflows a `u64`.
const UNREACHED: u64 = 1 << 62;

/// The part of a restore that the driver's transport provides.
pub(crate) struct Driver<'a> {
    pub(crate) memory: Memory,
    pub(crate) features: u64,
    pub(crate) queues: &'a [QueueState],
    pub(crate) interrupt: Arc<dyn Interrupt>,
}

/// A restore of a saved device. If it fails, the control plane has parts of the state.
pub(super) struct Restore<'a> {
    pub(super) control: &'a mut Control,
    pub(super) state: &'a SavedState,
}

impl Restore<'_> {
    pub(super) fn rebuild(&mut self, driver: Option<Driver<'_>>) -> Result<(), RestoreError> {
        let state = self.state;
        if state.tsc_khz == 0 {
            return Err(RestoreError::Figure("TSC frequency"));
        }
        if !(1..UNREACHED).contains(&state.next_id) {
            return Err(RestoreError::Figure("next id"));
        }
        if state.totals.kicks.len() != self.control.placement.shards().len() {
            return Err(RestoreError::Figure("list of notification counts"));
        }
        self.restore_driver(driver)?;
        self.restore_vcpus()?;
        let mut last = 0;
        for saved in &state.events {
            let (id, owner) = (saved.spec.id, saved.spec.owner);
            if id <= last || id >= state.next_id || owner == 0 || owner > id {
                return Err(event(id, "its id, or the id of its parent, is not valid"));
            }
            last = id;
            let own = saved.spec.own_notices;
            if self.control.mapping.sinks().has_family(owner)
                && self.control.mapping.sinks().has_own_notices(owner) != own
            {
                return Err(event(id, "its notices contradict those of its family"));
            }
            self.control.mapping.sinks_mut().join(owner, id);
            let sinks = self.control.mapping.sinks_mut();
            sinks.set_own_notices(owner, own);
            sinks.set_wakeup(owner, saved.spec.wakeup);
        }
        self.restore_sinks()?;
        self.control.mapping.name_rings();
        let mut failed = Vec::new();
        for saved in &state.events {
            let id = saved.spec.id;
            let restored = self.restore_event(state.tsc_khz, saved);
            let refusal = restored.map_err(|what| event(id, what))?;
            failed.extend(refusal.map(|refusal| (id, refusal)));
        }
        self.check_sinks()?;
        for saved in &state.links {
            self.restore_link(saved)?;
        }
        self.restore_notices()?;
        for (id, refusal) in failed {
            log::warn!("the restore put event {id} in the error state: {refusal}");
            self.control.notices.pending().fail(id, Some(refusal));
        }
        self.control.placement.set_next_id(state.next_id);
        self.control.before = state.totals.clone();
        self.control.mapping.sinks().retime(self.control.backend.clock);
        for saved in &state.events {
            let id = saved.spec.id;
            self.control.placement.on_event(id, |core, event| core.show(event));
        }
        Ok(())
    }

    fn restore_driver(&mut self, driver: Option<Driver<'_>>) -> Result<(), RestoreError> {
        let state = self.state;
        let (Some(saved), Some(driver)) = (&state.driver, driver) else {
            return Ok(());
        };
        let Driver { memory, features, queues, interrupt } = driver;
        // The transport's features do not include those that the driver accepted with CONTROL_FEATURES.
        let accepted = saved.features & !features;
        if features & !saved.features != 0 || accepted & !self.control.offered() != 0 {
            return Err(RestoreError::Features { saved: saved.features, given: features });
        }
        if saved.queues.len() != queues.len() {
            return Err(RestoreError::Figure("number of queues"));
        }
        let activated = self.control.activate(memory, features, queues, interrupt);
        activated.map_err(|Overlap| Error::WindowOverlaps)?;
        self.control.features.0 |= accepted;
        for (index, saved) in saved.queues.iter().enumerate() {
            if index == usize::from(QUEUE_CONTROL) {
                self.control.queue.restore(saved);
            } else if index == usize::from(QUEUE_EVENT) {
                self.control.notices.restore_queue(saved);
            } else if let Some(shard) = self.control.placement.shards().get(index - usize::from(QUEUE_VCPU)) {
                shard.with(|state| state.restore_queue(saved));
            }
        }
        Ok(())
    }

    fn restore_vcpus(&mut self) -> Result<(), RestoreError> {
        let state = self.state;
        if state.vcpus.len() != self.control.placement.shards().len() {
            return Err(RestoreError::Vcpus { saved: state.vcpus.len(), here: self.control.placement.shards().len() });
        }
        let mut sum = 0_u64;
        for (vcpu, saved) in (0..).zip(&state.vcpus) {
            let fault = |what| RestoreError::Vcpu { vcpu, what };
            let exits = &saved.exits;
            for more in [exits.io, exits.mmio, exits.hlt, exits.signal, exits.other] {
                sum = sum.saturating_add(more);
            }
            if sum >= UNREACHED {
                return Err(fault("its number of exits is too large"));
            }
            self.control.placement.shards()[vcpu as usize].vcpu.restore_exits(exits);
            let Some(page) = saved.task_page.map(GuestAddress) else {
                continue;
            };
            if !self.control.features.has_task_page()
                || page.0 == 0
                || !self.control.mapping.guest().view().is_page(page)
            {
                return Err(fault("its task page is not valid"));
            }
            self.control.placement.on(vcpu, |state| state.set_tasks(Tasks::new(Some(page))));
        }
        Ok(())
    }

    // Rings and areas.

    fn restore_sinks(&mut self) -> Result<(), RestoreError> {
        let state = self.state;
        let mut last = 0;
        for saved in &state.sinks {
            let id = saved.id;
            let fault = |what| RestoreError::Sink { id, what };
            if id <= last || id >= state.next_id {
                return Err(fault("its id is not valid"));
            }
            last = id;
            let found = state.events.binary_search_by_key(&id, |event| event.spec.id);
            let event = found.ok().and_then(|at| state.events.get(at));
            self.restore_sink(saved, event).map_err(fault)?;
        }
        let mut last = 0;
        for saved in &state.families {
            let owner = saved.owner;
            let fault = |what| RestoreError::Family { owner, what };
            if owner <= last || !self.control.mapping.sinks().has_family(owner) {
                return Err(fault("it does not exist, or is listed twice"));
            }
            if self.control.mapping.sinks().get(saved.sink).is_none() {
                return Err(fault("its ring or area does not exist"));
            }
            if owner != saved.sink
                && (self.control.mapping.sinks().get(owner).is_some()
                    || !self.control.mapping.sinks().has_ring(saved.sink))
            {
                return Err(fault("it has a ring of its own, or is redirected to an event without a ring"));
            }
            last = owner;
            self.control.mapping.sinks_mut().move_family(owner, Some(saved.sink));
        }
        Ok(())
    }

    /// Restores the ring and the area that were mapped for an event. `event` is `None` if that event is closed.
    fn restore_sink(&mut self, saved: &SavedSink, event: Option<&SavedEvent>) -> Result<(), Fault> {
        if saved.ring.is_none() && saved.area.is_none() {
            return Err("it has neither a ring nor an area");
        }
        if saved.ring.is_none() && (saved.pending.is_some() || saved.window_page.is_some()) {
            return Err("it has a pending record or a window page, but no ring");
        }
        let operators = event.and_then(|event| event.persistence.as_ref()).is_some_and(|known| known.operator);
        if operators && (saved.window_page.is_none() || saved.area.is_some()) {
            return Err("an operator's event has an area, or a ring outside the window");
        }
        if event.is_some_and(|event| event.spec.owner != event.spec.id) {
            return Err("an inherited event cannot have a ring or an area");
        }
        let holder = if operators { Holder::Operator } else { Holder::Guest };
        let taken = match &saved.ring {
            Some(ring) => addresses(&ring.pages),
            None => Vec::new(),
        };
        let (ring, run) = match &saved.ring {
            Some(ring) => {
                let (memory, run) = self.ring_memory(saved, ring, &taken, holder)?;
                (Some((ring, memory)), run)
            }
            None => (None, None),
        };
        self.control.mapping.sinks_mut().adopt(Sink::new(saved.id), run);
        if let (Some((ring, memory)), Some(sink)) = (ring, self.control.mapping.sinks().get(saved.id)) {
            sink.set_ring(Ring::restore(&memory.view(), &taken, ring)?, &memory);
        }
        let metadata = taken.first().copied();
        let Some(area) = &saved.area else {
            return match saved.pending {
                Some(_) => Err("a pending record reports an area, but there is no area"),
                None => Ok(()),
            };
        };
        let pages = self.area_pages(area, &taken)?;
        let memory = self.control.mapping.area_memory(saved.id);
        let area = Area::restore(&memory.view(), pages, metadata, area)?;
        let sink = self.control.mapping.sinks().get(saved.id).ok_or("its sink does not exist")?;
        sink.set_area(area, &memory);
        if let Some(pending) = &saved.pending {
            if !is_allowed(&pending.layout) {
                return Err("a pending record has unknown fields");
            }
            sink.set_pending(pending);
        }
        Ok(())
    }

    /// Checks and allocates the pages of a ring. Returns the memory that contains the pages and, if they are in the
    /// window, their run.
    fn ring_memory(
        &mut self,
        saved: &SavedSink,
        ring: &SavedRing,
        pages: &[GuestAddress],
        holder: Holder,
    ) -> Result<(Memory, Option<Run>), Fault> {
        let count = u32::try_from(ring.pages.len()).map_err(|_| "it has too many pages")?;
        let sized = self.control.mapping.check_size(count);
        sized.map_err(|_| "the number of pages of its ring is not valid")?;
        if let Some(first) = saved.window_page {
            let run = self.control.mapping.sinks_mut().retake_pages(first, count, holder);
            let run = run.ok_or("its window pages do not exist, or are in use")?;
            if !run.addresses().eq(pages.iter().copied()) {
                return Err("its pages do not match the window");
            }
            let window = self.control.mapping.sinks().window().ok_or("there is no window")?;
            return Ok((window.memory().clone(), Some(run)));
        }
        if !self.control.features.has_rings() {
            return Err("the driver has not negotiated rings");
        }
        self.check_pages(pages)?;
        Ok((self.control.mapping.guest().clone(), None))
    }

    /// Checks the pages of an area, and returns them. `taken` contains the pages of the sink's ring, which
    /// the area must not use.
    fn area_pages(&self, area: &SavedArea, taken: &[GuestAddress]) -> Result<Vec<GuestAddress>, Fault> {
        if !self.control.features.has_areas() {
            return Err("the driver has not negotiated areas");
        }
        let most = self.control.backend.settings.limits.max_aux_pages as usize;
        if !area.pages.len().is_power_of_two() || area.pages.len() > most {
            return Err("the number of pages of its area is not valid");
        }
        let pages = addresses(&area.pages);
        self.check_pages(&pages)?;
        if pages.iter().any(|page| taken.contains(page)) {
            return Err("the ring and the area share a page");
        }
        Ok(pages)
    }

    /// Checks that rings and areas may use these pages.
    fn check_pages(&self, pages: &[GuestAddress]) -> Result<(), Fault> {
        if !self.control.mapping.are_pages(pages) {
            return Err("a page is not guest memory, or it is listed twice");
        }
        let room = self.control.mapping.check_room(pages.len());
        room.map_err(|_| "rings and areas would exceed their page limit")
    }

    /// Checks that each sink has at least one writer, and that all of its writers may write to it.
    fn check_sinks(&self) -> Result<(), RestoreError> {
        let state = self.state;
        for (saved, (id, families)) in state.sinks.iter().zip(self.control.mapping.sinks().sinks()) {
            let fault = |what| RestoreError::Sink { id, what };
            let Some(first) = families.first() else {
                return Err(fault("no event writes to it"));
            };
            let own = self.control.placement.get(id);
            if own.is_some() && !families.contains(&id) {
                return Err(fault("its own event writes to another ring"));
            }
            let one = own.or_else(|| self.control.placement.get(*first));
            for owner in &families {
                let Some(entry) = self.control.placement.get(*owner) else {
                    // The owner is closed, but some of its children are still open.
                    continue;
                };
                let spec = &entry.spec;
                let backward = saved.ring.as_ref().map(|ring| ring.backward);
                if spec.is_child()
                    || one.is_some_and(|one| !one.context.is_like(entry.context))
                    || backward.is_some_and(|backward| backward != spec.has(OPEN_BACKWARD))
                    || *owner != id && entry.persistence.is_some()
                {
                    return Err(fault("one of its events may not write to it"));
                }
            }
            let Some(area) = &saved.area else {
                continue;
            };
            let driven = matches!(area.keeper, SavedKeeper::Driver { .. });
            if let Some(own) = own
                && (!own.spec.is_trace() || driven && matches!(own.spec.kind, Kind::VmmTrace(_)))
            {
                return Err(fault("its event does not match the area"));
            }
            if let SavedKeeper::Driver { span: Some(span) } = &area.keeper
                && !self.control.mapping.sinks().writers(id).contains(&span.event)
            {
                return Err(fault("the trace with an open span in the area does not write to the sink"));
            }
        }
        Ok(())
    }

    // Events.

    /// Restores an event. If the restore put the event in the error state, returns the reason.
    fn restore_event(&mut self, khz: u32, saved: &SavedEvent) -> Result<Option<Refusal>, Fault> {
        let SavedEvent { spec, life, .. } = saved;
        let operators = saved.persistence.as_ref();
        let operators = operators.is_some_and(|known| known.operator);
        if !operators {
            let room = self.control.persistent.check_events(&self.control.placement);
            room.map_err(|_| "the number of events exceeds the limit")?;
        }
        self.check_place(saved)?;
        let (opening, refused) = self.reopen(saved)?;
        let request = request(saved);
        let engine = opening.engine;
        let own = opening.spec_of(EventRequest { engine, ..spec.request.clone() }, spec.id, spec.owner);
        let persistence = self.repersist(saved)?;
        let mut life = life.clone();
        let here = self.control.backend.settings.tsc_khz;
        for ticks in [&mut life.enabled_ticks, &mut life.running_ticks] {
            *ticks = rescaled(*ticks, khz, here);
        }
        life.failed |= refused.is_some();
        let engines = self.control.backend.settings.engines;
        let wakeups = Wakeups { own_notices: spec.own_notices, ..spec.wakeup.into() };
        let mut event = Event::restore(Arc::new(own), wakeups, saved.context, &life, engines)?;
        let makes_records = event.overflows.period().is_some() || event.spec.is_trace();
        let is_child = event.spec.is_child();
        if operators && (spec.own_notices || life.prompt) || spec.own_notices && !is_child && !makes_records {
            return Err("the settings of its wakeups are not valid");
        }
        event.persistent = persistence.as_ref().map(Persistence::owner);
        let leader = self.control.placement.leader(&request, saved.context);
        let leader = leader.map_err(|_| "it cannot join the group of its leader")?;
        event.output.sink = self.control.mapping.sinks().of_family(spec.owner).cloned();
        if let Some(leader) = leader {
            for role in opening.steers() {
                self.control.links.steer(spec.id, leader, role);
            }
        }
        event.effects = self.control.links.effects(spec.id).collect();
        if persistence.is_some() {
            self.control.persistent.insert(spec.id);
        }
        let entry = Entry::new(&event, saved.shard, leader, persistence);
        self.control.placement.insert(spec.id, entry);
        if let Some(leader) = leader {
            event.join(self.control.placement.grow_group(leader, spec.id));
        }
        self.control.placement.on(saved.shard, |state| state.receive(event));
        Ok(refused.filter(|_| !saved.life.failed))
    }

    /// Checks the vCPU and the family of an event.
    fn check_place(&self, saved: &SavedEvent) -> Result<(), Fault> {
        let vcpus = self.control.backend.settings.vcpus;
        let placed = match saved.context {
            Context::Vcpu(vcpu) | Context::Task(Some(vcpu)) => vcpu == saved.shard,
            Context::Task(None) => true,
        };
        if !placed || saved.shard >= vcpus || saved.life.last_vcpu >= vcpus {
            return Err("its vCPU does not exist, or does not match its context");
        }
        let spec = &saved.spec;
        if spec.owner == spec.id {
            return Ok(());
        }
        let parent = self.control.placement.get(spec.owner);
        if parent.is_some_and(|parent| parent.is_operators() || parent.spec.is_child())
            || saved.persistence.is_some()
            || spec.request.layout.has(SAMPLE_READ)
        {
            return Err("it cannot be inherited from its parent");
        }
        Ok(())
    }

    /// Checks the request with which an event was opened. If the host can no longer count the event, or if the
    /// operator's policy denies it, also returns the reason, together with the [`Opening`].
    fn reopen(&self, saved: &SavedEvent) -> Result<(Opening, Option<Refusal>), Fault> {
        let (spec, mut request) = (&saved.spec, request(saved));
        let kind = Kind::parse(spec.request.kind, spec.request.config).ok_or("its kind is not known")?;
        let backend = &self.control.backend;
        let operators = saved.persistence.as_ref();
        let operators = operators.is_some_and(|known| known.operator);
        let policy = (!operators).then_some(&backend.settings.policy);
        let terms = Terms {
            catalogue: backend.catalogue(),
            policy,
            settings: &backend.settings,
            // These are the features of the driver that opened the event. That driver may no longer exist.
            has_rings: true,
            has_areas: true,
            guest_ips: backend.guest_ips(),
        };
        let period = saved.life.period.as_ref();
        if period.is_some_and(|period| Period::restore(period).is_none()) {
            return Err("its period is not valid");
        }
        let context = terms.check_context(&request);
        context.map_err(|_| "its request is not valid")?;
        let frequency = period.is_some_and(|period| period.frequency.is_some());
        if frequency != (spec.request.flags & OPEN_FREQ != 0)
            || spec.request.layout.sample_id_all != (spec.request.flags & OPEN_SAMPLE_ID_ALL != 0)
            || !is_allowed(&spec.request.layout)
        {
            return Err("its flags or fields are unknown, or contradict each other");
        }
        // If this host does not report guest IPs, or its operator chose the exit engine, a batched event falls back to
        // the exit engine, and each of its samples costs an exit.
        let engines = backend.settings.engines;
        let lacks_batched = match engines {
            Engines::Auto => needs_guest_ips(&request, engines) && backend.guest_ips() != Some(true),
            Engines::Batched => false,
            Engines::Exit => true,
        };
        let falls_back = spec.request.engine == ENGINE_BATCHED && lacks_batched;
        if falls_back {
            request.engine = ENGINE_EXIT.into();
        }
        match terms.check(&request) {
            Ok(opening) if opening.engine == request.engine.get() => Ok((opening, None)),
            Ok(_) => Err("its engine does not match its request"),
            Err(Errno::EINVAL) => Err("its request is not valid"),
            Err(_) if matches!(kind, Kind::SampleTrace(_)) && period.is_none() => Err("its request is not valid"),
            Err(_) => {
                let denied = policy.is_some_and(|policy| !policy.allows(spec.request.kind, spec.request.config));
                let refusal = if denied {
                    Refusal::Policy
                } else {
                    backend.refusal(spec.request.kind).unwrap_or(Refusal::Absent)
                };
                Ok((Opening::lost(kind, spec.request.engine, spec.request.flags), Some(refusal)))
            }
        }
    }

    /// Returns the name and the owner of a persistent event. `None` for other events.
    fn repersist(&self, saved: &SavedEvent) -> Result<Option<Persistence>, Fault> {
        let id = saved.spec.id;
        let Some(known) = &saved.persistence else {
            return Ok(None);
        };
        let name = Name::new(&known.name).ok_or("its name is not valid")?;
        let alone = saved.leader.is_none() && !self.control.mapping.sinks().is_redirected(id);
        if !alone || !matches!(saved.context, Context::Vcpu(_)) {
            return Err("it cannot be persistent");
        }
        let named = self.control.persistent.check_name(&self.control.placement, id, &name);
        named.map_err(|_| "its name is not allowed")?;
        if !known.operator {
            let room = self.control.persistent.check_room(&self.control.placement);
            room.map_err(|_| "the number of persistent events exceeds the limit")?;
        }
        Ok(Some(Persistence { name, operator: known.operator }))
    }

    fn restore_link(&mut self, saved: &SavedLink) -> Result<(), RestoreError> {
        let SavedLink { trigger, target, role } = *saved;
        let fault = |what| RestoreError::Link { trigger, target, what };
        let allowed = self.control.placement.check_link(trigger, target);
        allowed.map_err(|_| fault("the two events cannot be linked"))?;
        let linked = self.control.links.link(trigger, target, role);
        linked.map_err(|refused| match refused {
            Refused::Linked => fault("they are linked already"),
            Refused::Taken => fault("the target already has an event in the same role (starter or stopper)"),
        })?;
        self.control.publish_links(trigger);
        Ok(())
    }

    fn restore_notices(&mut self) -> Result<(), RestoreError> {
        let state = self.state;
        if self.control.features == Features::default() && !state.notices.is_empty() {
            return Err(RestoreError::Figure("list of notices for a missing driver"));
        }
        for saved in &state.notices {
            self.restore_notice(state.next_id, saved)
                .map_err(|what| RestoreError::Notice { event: saved.event, what })?;
        }
        Ok(())
    }

    fn restore_notice(&self, next_id: u64, saved: &SavedNotice) -> Result<(), Fault> {
        let entry = self.control.placement.get(saved.event);
        let failed = entry.is_some_and(|entry| {
            let shard = &self.control.placement.shards()[entry.shard as usize];
            let failed = shard.with(|state| state.event(saved.event).is_some_and(Event::has_failed));
            failed.0
        });
        let woken = self.control.mapping.sinks().woken(saved.event);
        let known = match saved.kind {
            NOTICE_WAKEUP => match woken {
                Woken::Ring(ring) => self.control.mapping.sinks().named(ring) == Some(saved.event),
                Woken::Family(owner) => self.control.mapping.sinks().has_family(owner),
            },
            NOTICE_LIMIT => entry.is_some_and(|entry| entry.samples),
            NOTICE_AUX => entry.is_some_and(|entry| entry.spec.is_trace()),
            NOTICE_ERROR => failed,
            NOTICE_PERSISTENT => saved.event < next_id,
            _ => true,
        };
        if known {
            self.control.notices.pending().restore(saved, woken)
        } else {
            Err("the event does not exist, or cannot have such a notice")
        }
    }
}

/// Returns the request with which an event was opened. If the event's leader no longer exists, omits the `STEERS`
/// flags.
fn request(saved: &SavedEvent) -> OpenRequest {
    let request = &saved.spec.request;
    let steers = if saved.leader.is_some() { 0 } else { STEERS };
    let period = saved.life.period.as_ref();
    let rate = period.map(|period| period.frequency.unwrap_or(period.length));
    OpenRequest {
        flags: (request.flags & !steers).into(),
        leader: saved.leader.unwrap_or(0).into(),
        ..request.open(saved.context, rate)
    }
}

fn event(id: u64, what: Fault) -> RestoreError {
    RestoreError::Event { id, what }
}

fn addresses(pages: &[u64]) -> Vec<GuestAddress> {
    pages.iter().map(|&page| GuestAddress(page)).collect()
}

/// Whether all fields of the layout are known.
fn is_allowed(layout: &Layout) -> bool {
    layout.sample_type & !SAMPLE_ALLOWED == 0 && layout.read_format & !READ_ALLOWED == 0
}

/// Converts ticks of a TSC of `from` kHz to ticks of a TSC of `to` kHz.
fn rescaled(ticks: u64, from: u32, to: u32) -> u64 {
    let scaled = u128::from(ticks) * u128::from(to) / u128::from(from.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}
