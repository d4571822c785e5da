//! Rings and areas: which pages they may use, which sink each family writes to, and whose wakeups a sink has.

use std::collections::BTreeSet;
use std::sync::Arc;

use vm_memory::GuestAddress;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use super::placement::Placement;
use super::sinks::{Extinct, Moved, Sinks};
use super::{Features, parse};
use crate::abi::{
    MAP_DRIVER_OWNED, MAP_WINDOW, MAP_WRITABLE, MapRequest, OPEN_BACKWARD, PauseRequest, RedirectRequest,
    SignalRequest, WAKEUP_BYTES, WAKEUP_RECORDS, WakeupRequest,
};
use crate::area::Area;
use crate::backend::Backend;
use crate::errno::Errno;
use crate::kind::Kind;
use crate::memory::Memory;
use crate::notices::{Notices, Pending, Woken};
use crate::ring::{Ring, RingMode, Wakeup};
use crate::shard::Core;
use crate::sink::Sink;
use crate::spec::EventSpec;
use crate::window::{Holder, Run};
use crate::work;

/// The sinks of a device, and the memory that they may use.
#[derive(Debug)]
pub(super) struct Mapping {
    backend: Arc<Backend>,
    notices: Arc<Notices>,
    /// Every change is published to the events that it affects ([`Moved`]), and then to the pending wakeups
    /// ([`Mapping::settle_wakeups`]).
    sinks: Sinks,
    /// The guest's RAM, as passed at activation. Empty without a driver.
    guest: Memory,
}

impl Mapping {
    pub(super) fn new(backend: &Arc<Backend>, notices: &Arc<Notices>) -> Self {
        Self {
            backend: Arc::clone(backend),
            notices: Arc::clone(notices),
            sinks: Sinks::default(),
            guest: Memory::default(),
        }
    }

    pub(super) fn sinks(&self) -> &Sinks {
        &self.sinks
    }

    /// Only for changes that affect no event and no pending wakeup.
    pub(super) fn sinks_mut(&mut self) -> &mut Sinks {
        &mut self.sinks
    }

    pub(super) fn has_window(&self) -> bool {
        self.sinks.window().is_some()
    }

    pub(super) fn guest(&self) -> &Memory {
        &self.guest
    }

    pub(super) fn set_guest(&mut self, guest: Memory) {
        self.guest = guest;
    }

    /// Drops guest memory and every sink without a writer in `kept`.
    pub(super) fn reset(&mut self, kept: &BTreeSet<u64>) {
        self.sinks.retain(kept);
        self.notices.reset();
        self.name_rings();
        self.guest = Memory::default();
    }

    /// Whether an event can keep its ring across a reset: the event has no ring, or its ring is in the window and has no
    /// AUX area.
    pub(super) fn survives_reset(&self, id: u64) -> bool {
        let in_window = self.sinks.window_page(id).is_some();
        let shape = self.sinks.shape(id);
        shape.is_none_or(|shape| in_window && !shape.has_area)
    }

    // Wakeups.

    /// Removes an ended event from the family of `owner`. If it was the family's last event, the family's
    /// pending wakeups pass to another family that writes to the sink.
    pub(super) fn retire(&mut self, id: u64, owner: u64) {
        if let Some(Extinct { sink }) = self.sinks.leave(owner, id) {
            self.settle_wakeups(owner, sink);
        }
    }

    /// Keeps the pending wakeups after a change to the family of `owner`: it has a new sink, has notices of its own or
    /// no longer, or has ended. `before` is the sink to which the family wrote before the change, and which may be gone.
    /// The shards must already know the change, so that they do not add wakeups as before the change.
    fn settle_wakeups(&self, owner: u64, before: Option<u64>) {
        let sinks = &self.sinks;
        let lasts = sinks.has_family(owner);
        let now = sinks.of_family(owner).map(|sink| sink.id());
        let mut pending = self.notices.pending();
        let wake = |pending: &mut Pending, of: Option<Woken>, wakeups: u64| match of {
            Some(of) if wakeups > 0 => pending.wake(of, wakeups),
            // Either there are no wakeups, or nobody is left who could be woken.
            _ => {}
        };
        // The readers of a sink that the family has left.
        let others = |sink: u64| match sinks.named(sink) {
            Some(_) => Some(Woken::Ring(sink)),
            None => sinks.writing_family(sink).map(Woken::Family),
        };
        for sink in [before, now].into_iter().flatten() {
            if let Some(family) = sinks.named(sink) {
                pending.name_ring(sink, family);
            } else {
                let wakeups = pending.forget_ring(sink);
                let own = lasts.then_some(Woken::Family(owner));
                wake(&mut pending, others(sink).or(own), wakeups);
            }
        }
        let of = if lasts { Some(sinks.woken(owner)) } else { before.and_then(others) };
        if of != Some(Woken::Family(owner)) {
            let wakeups = pending.take_wakeups(Woken::Family(owner));
            wake(&mut pending, of, wakeups);
        }
    }

    /// Names the wakeups of each sink.
    pub(super) fn name_rings(&self) {
        let mut pending = self.notices.pending();
        for (sink, _) in self.sinks.sinks() {
            if let Some(family) = self.sinks.named(sink) {
                pending.name_ring(sink, family);
            }
        }
    }

    // Sinks.

    /// Sets the new sink of each event in `moved`.
    fn publish_sink(&self, placement: &mut Placement, moved: &Moved) {
        for &id in &moved.events {
            let sink = moved.sink.clone();
            placement.on_event(id, |core, event| core.set_sink(event, sink));
        }
    }

    /// Removes a sink. Afterwards, events no longer write to its pages.
    fn remove_sink(&mut self, placement: &mut Placement, id: u64) {
        let named = self.sinks.named(id);
        let moved = self.sinks.abandon(id);
        self.publish_sink(placement, &moved);
        self.sinks.remove(id);
        if let Some(family) = named {
            self.settle_wakeups(family, Some(id));
        }
    }

    /// Maps a ring in guest RAM or in the window. Returns the number of the ring's first page in the window, or 0 if
    /// the ring is in guest RAM.
    pub(super) fn map(&mut self, placement: &mut Placement, features: Features, bytes: &[u8]) -> Result<u32, Errno> {
        let (request, rest) = MapRequest::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
        let flags = request.flags.get();
        let in_window = flags & MAP_WINDOW != 0;
        if flags & !(MAP_WRITABLE | MAP_WINDOW) != 0 {
            return Err(Errno::EINVAL);
        }
        if !features.has_rings() || in_window && !features.has_window() {
            return Err(Errno::EOPNOTSUPP);
        }
        let id = request.header.event.get();
        let entry = placement.get(id).ok_or(Errno::ENOENT)?;
        let (spec, persistent) = (Arc::clone(&entry.spec), entry.persistence.is_some());
        if in_window && !persistent || spec.is_child() || self.sinks.is_redirected(id) || self.sinks.is_driven(id) {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        self.check_size(count)?;
        let writable = flags & MAP_WRITABLE != 0;
        if in_window {
            if self.sinks.has_ring(id) {
                return Err(Errno::EBUSY);
            }
            return self.lay_in_window(placement, &spec, count, writable, Holder::Guest);
        }
        let pages = self.check_addresses(count, rest)?;
        if self.sinks.has_ring(id) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let memory = self.guest.clone();
        self.lay(placement, &spec, &memory, &pages, writable, None)?;
        Ok(0)
    }

    /// Creates an event's ring in the window with `count` pages, including the metadata page. Returns the number of the
    /// first page.
    pub(super) fn lay_in_window(
        &mut self,
        placement: &mut Placement,
        spec: &EventSpec,
        count: u32,
        writable: bool,
        holder: Holder,
    ) -> Result<u32, Errno> {
        let run = self.sinks.take_pages(count, holder).ok_or(Errno::ENOSPC)?;
        let window = self.sinks.window().ok_or(Errno::ENOSPC)?;
        let memory = window.memory().clone();
        let first = run.first();
        let pages: Vec<GuestAddress> = run.addresses().collect();
        self.lay(placement, spec, &memory, &pages, writable, Some(run))?;
        Ok(first)
    }

    /// Creates an event's ring in `pages` of `memory`. The caller must check the pages first. If they are in
    /// the window, `run` keeps them allocated.
    fn lay(
        &mut self,
        placement: &mut Placement,
        spec: &EventSpec,
        memory: &Memory,
        pages: &[GuestAddress],
        writable: bool,
        run: Option<Run>,
    ) -> Result<(), Errno> {
        let mode = RingMode { writable, backward: spec.has(OPEN_BACKWARD) };
        let ring = Ring::new(&memory.view(), pages, mode, self.backend.clock);
        let ring = ring.map_err(|_| Errno::EINVAL)?;
        let sink = Sink::new(spec.id);
        sink.set_ring(ring, memory);
        let moved = self.sinks.add(sink, run);
        self.publish_sink(placement, &moved);
        self.settle_wakeups(spec.id, None);
        // Mapping succeeds even if this update puts the event in the error state.
        placement.with_event(spec.id, |state| state.events.update(spec.id));
        Ok(())
    }

    /// Unmaps the ring that was mapped for an event. First writes the pending records that fit in the ring.
    pub(super) fn unmap(&mut self, placement: &mut Placement, id: u64) -> Result<(), Errno> {
        if !self.sinks.has_ring(id) {
            return Err(placement.not_mapped(id));
        }
        self.cut_traces(placement, id);
        self.remove_sink(placement, id);
        Ok(())
    }

    /// In each trace that writes to a sink, records the current exit of the trace's vCPU as cut. Returns an event that
    /// writes to the sink, so that the caller can close the sink's area through this event. Prefers a trace, then the
    /// event for which the sink was mapped. `None` if no event writes to the sink.
    fn cut_traces(&self, placement: &mut Placement, id: u64) -> Option<u64> {
        let writers = self.sinks.writers(id);
        let is_trace = |id: &u64| {
            let entry = placement.get(*id);
            entry.is_some_and(|entry| entry.spec.is_trace())
        };
        let traces: Vec<u64> = writers.iter().copied().filter(is_trace).collect();
        for &id in &traces {
            placement.with_event(id, |state| state.events.cut(id));
        }
        let own = writers.iter().find(|&&writer| writer == id);
        traces.first().or(own).or_else(|| writers.first()).copied()
    }

    /// Redirects the records of an event and its children to the ring of another event.
    pub(super) fn redirect(&mut self, placement: &mut Placement, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<RedirectRequest>(request)?;
        let id = request.header.event.get();
        let target = request.target.get();
        let event = placement.get(id).ok_or(Errno::ENOENT)?;
        if placement.is_operators(target) {
            return Err(Errno::EPERM);
        }
        let ring = match target {
            0 => None,
            target => {
                let target = placement.get(target).ok_or(Errno::ENOENT)?;
                if target.spec.id == id
                    || target.spec.is_child()
                    || !target.context.is_like(event.context)
                    || target.spec.has(OPEN_BACKWARD) != event.spec.has(OPEN_BACKWARD)
                {
                    return Err(Errno::EINVAL);
                }
                let sink = self.sinks.of_family(target.spec.owner);
                let sink = sink.map(|sink| sink.id());
                let ring = sink.filter(|&sink| self.sinks.has_ring(sink));
                Some(ring.ok_or(Errno::EINVAL)?)
            }
        };
        if self.sinks.has_ring(id) || event.persistence.is_some() || event.spec.is_child() || self.sinks.is_driven(id) {
            return Err(Errno::EINVAL);
        }
        self.reroute(placement, id, ring);
        Ok(())
    }

    /// Redirects the family of `owner` to the ring that was mapped for the event `ring`. If `ring` is `None`, leaves
    /// the family without a ring.
    fn reroute(&mut self, placement: &mut Placement, owner: u64, ring: Option<u64>) {
        let before = self.sinks.of_family(owner).map(|sink| sink.id());
        let events = self.sinks.family(owner);
        let moved = self.sinks.move_family(owner, ring);
        self.publish_sink(placement, &moved);
        for id in events {
            placement.on_event(id, Core::begin_area);
        }
        if let Some(before) = before {
            self.sinks.remove_unused(before);
        }
        self.settle_wakeups(owner, before);
    }

    /// Pauses or resumes writing to the ring of an event.
    pub(super) fn pause(&self, placement: &Placement, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<PauseRequest>(request)?;
        let paused = switch(request.paused.get())?;
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let event = placement.get(id).ok_or(Errno::ENOENT)?;
        let sink = self.sinks.of_family(event.spec.owner);
        let sink = sink.ok_or(Errno::EINVAL)?;
        if sink.shape().data_pages.unwrap_or(0) == 0 {
            return Err(Errno::EINVAL);
        }
        sink.pause(paused);
        Ok(())
    }

    /// Sets the wakeup interval of a family. The first interval begins now.
    pub(super) fn set_wakeup(&mut self, placement: &mut Placement, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<WakeupRequest>(request)?;
        let every = u32::try_from(request.every.get()).map_err(|_| Errno::EINVAL)?;
        let wakeup = match request.unit.get() {
            WAKEUP_RECORDS => Wakeup::Records(every),
            WAKEUP_BYTES => Wakeup::Bytes(every),
            _ => return Err(Errno::EINVAL),
        };
        if every == 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let entry = placement.get(id).ok_or(Errno::ENOENT)?;
        if entry.spec.is_child() || !entry.makes_records() {
            return Err(Errno::EINVAL);
        }
        for member in self.sinks.family(id) {
            placement.on_event(member, |_, event| event.output.wakeups.every = wakeup);
        }
        self.sinks.set_wakeup(id, wakeup);
        if let Some(sink) = self.sinks.of_family(id) {
            sink.restart_wakeups();
        }
        Ok(())
    }

    /// Gives the wakeups of a family notices of their own, or lets them share the notices of the family's sink.
    pub(super) fn set_notices(&mut self, placement: &mut Placement, request: &[u8]) -> Result<(), Errno> {
        let request = parse::<SignalRequest>(request)?;
        let own = switch(request.own.get())?;
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.header.event.get();
        let entry = placement.get(id).ok_or(Errno::ENOENT)?;
        if entry.spec.is_child() || !entry.makes_records() {
            return Err(Errno::EINVAL);
        }
        if self.sinks.has_own_notices(id) == own {
            return Ok(());
        }
        for member in self.sinks.family(id) {
            placement.on_event(member, |_, event| event.output.wakeups.own_notices = own);
        }
        self.sinks.set_own_notices(id, own);
        let sink = self.sinks.of_family(id).map(|sink| sink.id());
        self.settle_wakeups(id, sink);
        Ok(())
    }

    /// Maps an AUX area in guest RAM for a trace. The trace must have a ring, unless the driver manages the area.
    pub(super) fn map_aux(&mut self, placement: &mut Placement, features: Features, bytes: &[u8]) -> Result<(), Errno> {
        let (request, rest) = MapRequest::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
        let flags = request.flags.get();
        if flags & !(MAP_WRITABLE | MAP_DRIVER_OWNED) != 0 {
            return Err(Errno::EINVAL);
        }
        if !features.has_areas() {
            return Err(Errno::EOPNOTSUPP);
        }
        let id = request.header.event.get();
        let spec = Arc::clone(&placement.get(id).ok_or(Errno::ENOENT)?.spec);
        if !spec.is_trace() {
            return Err(Errno::EOPNOTSUPP);
        }
        let driven = flags & MAP_DRIVER_OWNED != 0;
        if driven && matches!(spec.kind, Kind::VmmTrace(_)) {
            // A producer in the VMM cannot wait until the driver makes room in the area.
            return Err(Errno::EOPNOTSUPP);
        }
        let ring = self.sinks.has_ring(id);
        // If the driver manages the area, it also writes the records, so the event must not have a ring.
        let fits = if driven { !self.sinks.is_redirected(id) && !ring } else { ring };
        if spec.is_child() || !fits {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        if !count.is_power_of_two() || count > self.backend.settings.limits.max_aux_pages {
            return Err(Errno::EINVAL);
        }
        let pages = self.check_addresses(count, rest)?;
        let taken = self.sinks.get(id).map(|sink| sink.ring_addresses());
        let taken: BTreeSet<GuestAddress> = taken.into_iter().flatten().collect();
        work::charge_pages(taken.len());
        if pages.iter().any(|page| taken.contains(page)) {
            return Err(Errno::EINVAL);
        }
        let shape = self.sinks.shape(id);
        if shape.is_some_and(|shape| shape.has_area) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let writable = flags & MAP_WRITABLE != 0;
        let metadata = shape.and_then(|shape| shape.metadata);
        let memory = self.area_memory(id);
        let area = Area::new(&memory.view(), pages, metadata, writable, spec.request.aux_watermark);
        let area = area.map_err(|_| Errno::EINVAL)?;
        match self.sinks.get(id) {
            Some(sink) => sink.set_area(area, &memory),
            None => {
                let sink = Sink::new(id);
                sink.set_area(area, &memory);
                let moved = self.sinks.add(sink, None);
                self.publish_sink(placement, &moved);
                self.settle_wakeups(id, None);
            }
        }
        for id in self.sinks.writers(id) {
            placement.on_event(id, Core::begin_area);
        }
        Ok(())
    }

    /// The memory that contains an area and its ring's metadata page: guest RAM, plus the window if the ring is in
    /// the window.
    pub(super) fn area_memory(&self, id: u64) -> Memory {
        let in_window = self.sinks.window_page(id).is_some();
        let window = self.sinks.window().filter(|_| in_window);
        window.map_or_else(|| self.guest.clone(), |window| window.beside(&self.guest))
    }

    /// Unmaps the area that was mapped for an event. First publishes the data that was written so far, and reports it
    /// in the ring if the records fit.
    pub(super) fn unmap_aux(&mut self, placement: &mut Placement, id: u64) -> Result<(), Errno> {
        let shape = self.sinks.shape(id).filter(|shape| shape.has_area);
        let shape = shape.ok_or_else(|| placement.not_mapped(id))?;
        if let Some(writer) = self.cut_traces(placement, id) {
            placement.on_event(writer, |core, event| core.close_area(event));
        }
        if shape.metadata.is_none() {
            self.remove_sink(placement, id);
        }
        Ok(())
    }

    /// Finds the events that write to the same sink as the event `id`, and writes all pending batched samples of these
    /// events' vCPUs. If the event `id` is closed or has no sink, uses the sink that was mapped for `id` instead.
    pub(super) fn flush_sink(&self, placement: &mut Placement, id: u64) {
        if !self.backend.is_draining() {
            return;
        }
        let entry = placement.get(id);
        let own = entry.and_then(|entry| self.sinks.of_family(entry.spec.owner));
        let writers = self.sinks.writers(own.map_or(id, |sink| sink.id()));
        let ids = writers.into_iter().chain([id]);
        let entries = ids.filter_map(|id| placement.get(id));
        let shards: BTreeSet<u32> = entries.map(|entry| entry.shard).collect();
        for shard in shards {
            placement.on(shard, |state| state.events.flush_batched());
        }
    }

    // Pages.

    /// Checks that `more` additional pages of guest RAM stay within the operator's limit for rings and areas.
    pub(super) fn check_room(&self, more: usize) -> Result<(), Errno> {
        let pages = self.sinks.guest_pages() + more;
        if pages > self.backend.settings.limits.max_pages as usize { Err(Errno::ENOSPC) } else { Ok(()) }
    }

    /// Checks that a ring may have `count` pages, including the metadata page.
    pub(super) fn check_size(&self, count: u32) -> Result<(), Errno> {
        let data = count.checked_sub(1).ok_or(Errno::EINVAL)?;
        let most = self.backend.settings.limits.max_ring_pages;
        if data != 0 && !data.is_power_of_two() || data > most {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// Parses the addresses of `count` pages. Checks that each page is aligned, is in memory and is listed only once.
    pub(super) fn check_addresses(&self, count: u32, addresses: &[u8]) -> Result<Vec<GuestAddress>, Errno> {
        let (addresses, _) =
            <[U64]>::ref_from_prefix_with_elems(addresses, count as usize).map_err(|_| Errno::EINVAL)?;
        work::charge_pages(addresses.len());
        let pages: Vec<GuestAddress> = addresses.iter().map(|a| GuestAddress(a.get())).collect();
        if self.are_pages(&pages) { Ok(pages) } else { Err(Errno::EINVAL) }
    }

    /// Returns whether all of `pages` are pages of guest memory, and each is listed only once.
    pub(super) fn are_pages(&self, pages: &[GuestAddress]) -> bool {
        let distinct: BTreeSet<_> = pages.iter().collect();
        let memory = self.guest.view();
        let usable = pages.iter().all(|&page| memory.is_page(page));
        distinct.len() == pages.len() && usable
    }
}

/// Returns the value of a field that switches something on or off.
fn switch(value: u32) -> Result<bool, Errno> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Errno::EINVAL),
    }
}
