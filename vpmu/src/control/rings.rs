//! Control requests about rings: where their pages lie, who writes to them, and whether.

use std::collections::BTreeSet;

use vm_memory::{GuestAddress, GuestMemory, Permissions};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::abi::{
    F_WINDOW, MAP_WINDOW, MAP_WRITABLE, MapRequest, OPEN_BACKWARD, PAGE_SIZE, PauseRequest,
    RedirectRequest,
};
use crate::errno::Errno;
use crate::event::Host;
use crate::ring::{Manner, Ring};
use crate::state::State;

impl State {
    /// Lays a ring over pages of the guest, or of the window: then the number of the first of these.
    pub(super) fn map(&mut self, host: &Host<'_>, request: &[u8]) -> Result<u32, Errno> {
        if !self.has_rings() {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, rest) = MapRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let (facts, persistent) = (event.facts, event.persistence.is_some());
        let flags = request.flags.get();
        let in_window = flags & MAP_WINDOW != 0;
        if in_window && self.features & 1 << F_WINDOW == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if flags & !(MAP_WRITABLE | MAP_WINDOW) != 0
            || in_window && !persistent
            || facts.is_child()
            || self.output.is_redirected(id)
            || self.output.is_driven(id)
        {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        self.check_size(count)?;
        let writable = flags & MAP_WRITABLE != 0;
        if in_window {
            if self.output.has_ring(id) {
                return Err(Errno::EBUSY);
            }
            return self.lay_in_window(host, id, count, writable);
        }
        let pages = self.check_addresses(count, rest)?;
        if self.output.has_ring(id) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        self.lay(host, id, &pages, writable)?;
        Ok(0)
    }

    /// Lays the ring of an event that has none into the window, `count` pages in all: the number of the
    /// first.
    pub(crate) fn lay_in_window(
        &mut self,
        host: &Host<'_>,
        id: u64,
        count: u32,
        writable: bool,
    ) -> Result<u32, Errno> {
        let pages = self.output.take_window(count).ok_or(Errno::ENOSPC)?;
        self.lay(host, id, &pages, writable)?;
        let ring = self.output.ring(id).ok_or(Errno::EINVAL)?;
        self.output.window_page(ring).ok_or(Errno::EINVAL)
    }

    /// Lays the ring of an event that has none over `pages`, which have been checked.
    fn lay(
        &mut self,
        host: &Host<'_>,
        id: u64,
        pages: &[GuestAddress],
        writable: bool,
    ) -> Result<(), Errno> {
        let facts = self.events.get(&id).ok_or(Errno::ENOENT)?.facts;
        let memory = self.output.memory();
        let manner = Manner {
            writable,
            backward: facts.has(OPEN_BACKWARD),
        };
        let ring = Ring::new(memory, pages, manner, self.clock).map_err(|_| Errno::EINVAL)?;
        self.output.add_ring(id, ring);
        self.with_needs(host, id, |event| event.shown = true);
        // The ring is there, also for an event that turns out to be in error.
        let _ = self.update(host, id);
        Ok(())
    }

    /// Sends the records of an event, and of its children, to the ring of another.
    pub(super) fn redirect(&mut self, host: &Host<'_>, request: &[u8]) -> Result<(), Errno> {
        let (request, _) = RedirectRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let target = request.target.get();
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        if self.is_operators(target) {
            return Err(Errno::EPERM);
        }
        let mapped = self.output.has_ring(id);
        let ring = match target {
            0 => None,
            target => {
                let target = self.events.get(&target).ok_or(Errno::ENOENT)?;
                if target.facts.id == id
                    || target.facts.is_child()
                    || !target.context.is_like(event.context)
                    || target.facts.has(OPEN_BACKWARD) != event.facts.has(OPEN_BACKWARD)
                {
                    return Err(Errno::EINVAL);
                }
                let ring = self.output.ring_of(target.facts.owner);
                Some(ring.ok_or(Errno::EINVAL)?)
            }
        };
        if mapped
            || event.persistence.is_some()
            || event.facts.is_child()
            || self.output.is_driven(id)
        {
            return Err(Errno::EINVAL);
        }
        self.reroute(host, id, ring);
        Ok(())
    }

    /// Stops or resumes writing to the ring of an event.
    pub(super) fn pause(&mut self, request: &[u8]) -> Result<(), Errno> {
        let (request, _) = PauseRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let paused = match request.paused.get() {
            0 => false,
            1 => true,
            _ => return Err(Errno::EINVAL),
        };
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let ring = self.output.ring_of(event.facts.owner);
        let ring = ring
            .filter(|&ring| self.output.ring(ring).is_some_and(Ring::has_data))
            .ok_or(Errno::EINVAL)?;
        self.output.pause(ring, paused);
        Ok(())
    }

    /// Whether the operator lets rings and areas hold `more` pages.
    pub(super) fn check_room(&self, more: usize) -> Result<(), Errno> {
        if self.output.pages() + more > self.settings.limits.max_pages as usize {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// Whether a ring can have `count` pages.
    fn check_size(&self, count: u32) -> Result<(), Errno> {
        let data = count.checked_sub(1).ok_or(Errno::EINVAL)?;
        if data != 0 && !data.is_power_of_two() || data > self.settings.limits.max_ring_pages {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// The addresses of `count` pages: aligned, in memory, each named once.
    pub(super) fn check_addresses(
        &self,
        count: u32,
        addresses: &[u8],
    ) -> Result<Vec<GuestAddress>, Errno> {
        let (addresses, _) = <[U64]>::ref_from_prefix_with_elems(addresses, count as usize)
            .map_err(|_| Errno::EINVAL)?;
        let pages: Vec<GuestAddress> = addresses.iter().map(|a| GuestAddress(a.get())).collect();
        let distinct: BTreeSet<_> = pages.iter().collect();
        let usable = pages.iter().all(|&page| self.is_page(page));
        if distinct.len() == pages.len() && usable {
            Ok(pages)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// Whether a page of guest memory begins at `address`.
    pub(super) fn is_page(&self, address: GuestAddress) -> bool {
        address.0.is_multiple_of(PAGE_SIZE as u64)
            && self
                .output
                .guest()
                .check_range(address, PAGE_SIZE, Permissions::ReadWrite)
    }
}
