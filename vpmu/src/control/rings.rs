//! Control requests about rings: where their pages lie, who writes to them, and whether.

use std::collections::BTreeSet;

use vm_memory::{GuestAddress, GuestMemory, Permissions};
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

use crate::abi::{
    MAP_WRITABLE, MapRequest, OPEN_BACKWARD, PAGE_SIZE, PauseRequest, RedirectRequest,
};
use crate::errno::Errno;
use crate::event::Host;
use crate::ring::{Manner, Ring};
use crate::state::State;

impl State {
    /// Lays a ring over pages of the guest.
    pub(super) fn map(&mut self, host: &Host<'_>, request: &[u8]) -> Result<(), Errno> {
        if !self.has_rings() {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, rest) = MapRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let facts = self.events.get(&id).ok_or(Errno::ENOENT)?.facts;
        if request.flags.get() & !MAP_WRITABLE != 0
            || facts.is_child()
            || self.output.is_redirected(id)
            || self.output.is_driven(id)
        {
            return Err(Errno::EINVAL);
        }
        let pages = self.check_pages(request.pages.get(), rest)?;
        if self.output.has_ring(id) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let writable = request.flags.get() & MAP_WRITABLE != 0;
        let memory = self.output.memory();
        let manner = Manner {
            writable,
            backward: facts.has(OPEN_BACKWARD),
        };
        let ring = Ring::new(memory, &pages, manner, self.clock).map_err(|_| Errno::EINVAL)?;
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
        let event = self.events.get(&id).ok_or(Errno::ENOENT)?;
        let mapped = self.output.has_ring(id);
        let ring = match request.target.get() {
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
        if mapped || event.facts.is_child() || self.output.is_driven(id) {
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

    /// As [`State::check_addresses`], of as many pages as a ring can have.
    fn check_pages(&self, count: u32, addresses: &[u8]) -> Result<Vec<GuestAddress>, Errno> {
        let data = count.checked_sub(1).ok_or(Errno::EINVAL)?;
        if data != 0 && !data.is_power_of_two() || data > self.settings.limits.max_ring_pages {
            return Err(Errno::EINVAL);
        }
        self.check_addresses(count, addresses)
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
                .memory()
                .check_range(address, PAGE_SIZE, Permissions::ReadWrite)
    }
}
