//! The persistent events: their names, their number, and what the driver and the operator see of them.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::mapping::Mapping;
use super::parse;
use super::placement::{Entry, Placement};
use crate::abi::{
    DetachRequest, MAP_WINDOW, MAP_WRITABLE, OPEN_ENABLED, OPEN_FREQ, OPEN_PERSISTENT, OPEN_WATERMARK, OpenRequest,
    PERSISTENT_NAME, PERSISTENT_OPERATOR, PersistentEvent, PersistentRequest,
};
use crate::backend::Backend;
use crate::errno::Errno;
use crate::event::Persistent;
use crate::persistent::{History, Name, PersistError, Persistence, PersistentStatus, spelled, whole};
use crate::record::{Layout, admits};
use crate::ring::Wakeup;
use crate::shard::View;
use crate::sink::HeldBytes;
use crate::source::Rate;
use crate::spec::Context;
use crate::work;

/// A copy of an event's ring. It is parsed after the locks are released.
#[derive(Debug)]
pub(crate) struct HeldRecords {
    event: PersistentStatus,
    layout: Layout,
    bytes: Vec<u8>,
    newest_first: bool,
}

impl HeldRecords {
    /// Parses the copy into whole records.
    pub(crate) fn history(self) -> History {
        let is_own = |record: &[u8]| admits(&self.layout, record, self.event.id);
        History { records: whole(&self.bytes, self.newest_first, is_own), event: self.event }
    }
}

/// The persistent events of a device.
#[derive(Debug)]
pub(super) struct PersistentEvents {
    backend: Arc<Backend>,
    /// Exactly the events whose entry has a [`Persistence`]. No two of them have the same name.
    ids: BTreeSet<u64>,
}

impl PersistentEvents {
    pub(super) fn new(backend: &Arc<Backend>) -> Self {
        Self { backend: Arc::clone(backend), ids: BTreeSet::new() }
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.ids.contains(&id)
    }

    /// Adds an event whose entry has a [`Persistence`].
    pub(super) fn insert(&mut self, id: u64) {
        self.ids.insert(id);
    }

    /// Removes an event that has ended.
    pub(super) fn remove(&mut self, id: u64) {
        self.ids.remove(&id);
    }

    /// Forgets all persistent events, which then do not survive a reset.
    pub(super) fn clear(&mut self) {
        self.ids.clear();
    }

    /// The ids of all persistent events, ascending. Charges the examination of all of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        work::charge_examined(self.ids.len());
        self.ids.iter().copied()
    }

    /// The persistence of a guest's event with its default name.
    pub(super) fn guests(id: u64) -> Persistence {
        Persistence { name: Name::of(id), operator: false }
    }

    // Limits.

    /// Checks that the guest is below the operator's limit on events.
    pub(super) fn check_events(&self, placement: &Placement) -> Result<(), Errno> {
        let operators = self.iter().filter(|&id| placement.is_operators(id));
        let guests = placement.len() - operators.count();
        if guests < self.backend.settings.limits.max_events as usize { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    /// Checks that the guest is below the operator's limit on persistent events.
    pub(super) fn check_room(&self, placement: &Placement) -> Result<(), Errno> {
        let guests = self.iter().filter(|&id| !placement.is_operators(id));
        if guests.count() < self.backend.settings.limits.max_persistent as usize { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    /// Checks that the guest may have one more persistent event. Returns the [`Persistence`] of the guest's new event
    /// `id`, with the default name.
    pub(super) fn begin(&self, placement: &Placement, id: u64) -> Result<Persistence, Errno> {
        self.check_room(placement)?;
        Ok(Self::guests(id))
    }

    // Names.

    /// Checks that event `id` can have the name `name`. The name must not be reserved for another event or in use by
    /// another event.
    pub(super) fn check_name(&self, placement: &Placement, id: u64, name: &Name) -> Result<(), Errno> {
        if name.is_reserved() && *name != Name::of(id) {
            return Err(Errno::EINVAL);
        }
        if self.named(placement, name).is_some_and(|other| other != id) { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// The persistent event with a name.
    pub(super) fn named(&self, placement: &Placement, name: &Name) -> Option<u64> {
        self.iter().find(|id| {
            let entry = placement.get(*id);
            let known = entry.and_then(|entry| entry.persistence.as_ref());
            known.is_some_and(|known| known.name == *name)
        })
    }

    /// Returns the name that the operator requested, or the default name of the next event. Checks that the name is
    /// valid and not reserved, and that no other event of the operator has it.
    pub(super) fn operators_name(&self, placement: &Placement, asked: Option<&str>) -> Result<Name, PersistError> {
        let Some(text) = asked else {
            return Ok(Name::of(placement.next_id()));
        };
        let name = Name::new(text).ok_or_else(|| PersistError::BadName(text.to_owned()))?;
        if name.is_reserved() {
            return Err(PersistError::ReservedName(text.to_owned()));
        }
        if self.named(placement, &name).is_some_and(|other| placement.is_operators(other)) {
            Err(PersistError::NameTaken(text.to_owned()))
        } else {
            Ok(name)
        }
    }

    // Requests.

    /// Makes a guest event persistent under the name in the request. If the request has no name, an event that is
    /// already persistent keeps its name, and any other event gets its default name.
    pub(super) fn detach(&mut self, placement: &mut Placement, mapping: &Mapping, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<DetachRequest>(request)?;
        let name = if request.name.iter().all(|&byte| byte == 0) {
            None
        } else {
            Some(Name::from_wire(&request.name).ok_or(Errno::EINVAL)?)
        };
        let id = request.header.event.get();
        let entry = placement.get(id).ok_or(Errno::ENOENT)?;
        if entry.is_operators() {
            return Err(Errno::EPERM);
        }
        let alone = entry.leader.is_none() && entry.members.is_empty();
        let fits = alone && !entry.spec.is_child() && !mapping.sinks().is_redirected(id);
        let of_vcpu = matches!(entry.context, Context::Vcpu(_));
        let before = entry.persistence.as_ref().map(|known| known.name.clone());
        let fresh = before.is_none();
        let failed = placement.on_event(id, |_, event| event.has_failed());
        if !of_vcpu || !fits || failed == Some(true) {
            return Err(Errno::EINVAL);
        }
        let name = name.or(before).unwrap_or_else(|| Name::of(id));
        self.check_name(placement, id, &name)?;
        if fresh {
            self.check_room(placement)?;
        }
        self.set(placement, id, Some(Persistence { name, operator: false }));
        Ok(())
    }

    /// Makes a persistent event an ordinary event again, so that it can be closed.
    pub(super) fn reattach(&mut self, placement: &mut Placement, id: u64) -> Result<(), Errno> {
        let entry = placement.get(id).ok_or(Errno::ENOENT)?;
        if entry.persistence.is_none() {
            return Err(Errno::EINVAL);
        }
        self.set(placement, id, None);
        Ok(())
    }

    /// Sets or clears the persistence of a guest event.
    pub(super) fn set(&mut self, placement: &mut Placement, id: u64, persistence: Option<Persistence>) {
        let persistent = persistence.as_ref().map(|_| Persistent::Guest);
        if persistent.is_some() {
            self.ids.insert(id);
        } else {
            self.ids.remove(&id);
        }
        if let Some(entry) = placement.get_mut(id) {
            entry.persistence = persistence;
        }
        placement.on_event(id, |_, event| event.persistent = persistent);
    }

    /// Returns the requested persistent events, by ascending id. Returns at most `fit` events.
    pub(super) fn list(
        &self,
        placement: &mut Placement,
        mapping: &Mapping,
        request: &[u8],
        fit: usize,
    ) -> Result<Vec<PersistentEvent>, Errno> {
        let request = parse::<PersistentRequest>(request)?;
        if request.header.event.get() != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let most = fit.min(request.count.get() as usize);
        let after = request.after.get().saturating_add(1);
        let later = self.ids.range(after..).copied();
        let ids: Vec<u64> = later.take(most).collect();
        let listed = ids.into_iter().filter_map(|id| {
            let view = placement.with_event(id, |state| state.glance(id))??;
            listed(placement, mapping, id, &view)
        });
        Ok(listed.collect())
    }

    // Status.

    pub(super) fn check_exists(&self, id: u64) -> Result<(), PersistError> {
        if self.ids.contains(&id) { Ok(()) } else { Err(PersistError::NoSuch(id)) }
    }

    /// The current status of every persistent event.
    pub(super) fn statuses(&self, placement: &mut Placement, mapping: &Mapping) -> Vec<PersistentStatus> {
        let ids: Vec<u64> = self.iter().collect();
        let statuses = ids.into_iter().filter_map(|id| self.status(placement, mapping, id));
        statuses.collect()
    }

    /// Returns the current status of a persistent event, and a copy of its ring.
    pub(super) fn held(
        &self,
        placement: &mut Placement,
        mapping: &Mapping,
        id: u64,
    ) -> Result<HeldRecords, PersistError> {
        self.check_exists(id)?;
        mapping.flush_sink(placement, id);
        let event = self.status(placement, mapping, id).ok_or(PersistError::NoSuch(id))?;
        let entry = placement.get(id).ok_or(PersistError::NoSuch(id))?;
        let held = mapping.sinks().get(id).and_then(|sink| sink.held());
        let HeldBytes { bytes, newest_first } = held.ok_or(PersistError::NoRing(id))?;
        Ok(HeldRecords {
            event,
            layout: entry.spec.request.layout,
            bytes: bytes.ok_or(PersistError::Unreadable(id))?,
            newest_first,
        })
    }

    fn status(&self, placement: &mut Placement, mapping: &Mapping, id: u64) -> Option<PersistentStatus> {
        let view = placement.with_event(id, |state| state.view(id))??;
        let entry = placement.get(id)?;
        let spec = &entry.spec;
        let enabled = if view.enabled { OPEN_ENABLED } else { 0 };
        let known = entry.persistence.as_ref();
        Some(PersistentStatus {
            id,
            name: known.map_or_else(String::new, |known| known.name.to_string()),
            event: spelled(self.backend.catalogue(), spec.request.kind, spec.request.config, spec.request.flags),
            operator: entry.is_operators(),
            vcpu: match entry.context {
                Context::Vcpu(vcpu) => vcpu,
                Context::Task(_) => entry.shard,
            },
            kind: spec.request.kind,
            config: spec.request.config,
            rate: view.rate,
            flags: spec.request.flags & !OPEN_ENABLED | enabled | OPEN_PERSISTENT,
            engine: spec.request.engine,
            sample_type: spec.request.layout.sample_type,
            read_format: spec.request.layout.read_format,
            regs_user: spec.request.layout.regs_user,
            regs_intr: spec.request.layout.regs_intr,
            stack_user: spec.request.layout.stack_user,
            state: view.state,
            count: view.counts.count,
            time_enabled: view.counts.time_enabled,
            time_running: view.counts.time_running,
            lost: view.lost,
            pages: mapping.sinks().shape(id).and_then(|shape| shape.data_pages),
            window: mapping.sinks().window_page(id).is_some(),
        })
    }
}

/// Describes a persistent event to the driver.
fn listed(placement: &Placement, mapping: &Mapping, id: u64, view: &View) -> Option<PersistentEvent> {
    let entry = placement.get(id)?;
    let (shape, page) = (mapping.sinks().shape(id), mapping.sinks().window_page(id));
    let flag = |on: bool, flag| if on { flag } else { 0 };
    let map = flag(shape.is_some_and(|shape| shape.writable), MAP_WRITABLE) | flag(page.is_some(), MAP_WINDOW);
    // The limit on ring pages is a u32.
    let pages = shape.and_then(|shape| u32::try_from(shape.ring_pages).ok());
    let name = entry.persistence.as_ref().map(|known| known.name.to_wire());
    Some(PersistentEvent {
        id: id.into(),
        open: open_request(entry, view, mapping.sinks().wakeups(entry.spec.owner).every),
        pages: pages.unwrap_or(0).into(),
        map: map.into(),
        window_page: page.unwrap_or(0).into(),
        flags: flag(entry.is_operators(), PERSISTENT_OPERATOR).into(),
        name: name.unwrap_or([0; PERSISTENT_NAME]),
    })
}

/// Describes the current settings of a persistent event as an open request. `every` is its family's wakeup interval.
fn open_request(entry: &Entry, view: &View, every: Wakeup) -> OpenRequest {
    let request = &entry.spec.request;
    let flag = |on: bool, flag| if on { flag } else { 0 };
    let flags = request.flags & !(OPEN_ENABLED | OPEN_FREQ | OPEN_WATERMARK)
        | flag(view.enabled, OPEN_ENABLED)
        | flag(matches!(view.rate, Some(Rate::Frequency(_))), OPEN_FREQ)
        | flag(matches!(every, Wakeup::Bytes(_)), OPEN_WATERMARK)
        | OPEN_PERSISTENT;
    let rate = view.rate.map(|rate| match rate {
        Rate::Period(rate) | Rate::Frequency(rate) => rate,
    });
    let wakeup = match every {
        Wakeup::Page => 0,
        Wakeup::Records(every) | Wakeup::Bytes(every) => every,
    };
    OpenRequest { flags: flags.into(), wakeup: wakeup.into(), ..request.open(entry.context, rate) }
}
