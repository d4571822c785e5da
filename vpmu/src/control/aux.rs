//! Control requests about AUX areas: which pages a trace may write to, and for how long.

use std::collections::BTreeSet;

use vm_memory::GuestAddress;
use zerocopy::FromBytes;

use crate::abi::{MAP_DRIVEN, MAP_WRITABLE, MapRequest};
use crate::aux::Area;
use crate::errno::Errno;
use crate::event::Host;
use crate::state::State;

impl State {
    /// Lays an AUX area over pages of the guest, beside the ring of a trace or for the driver to keep.
    pub(super) fn map_aux(&mut self, host: &Host<'_>, request: &[u8]) -> Result<(), Errno> {
        if !self.has_areas() {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, rest) = MapRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let id = request.header.event.get();
        let flags = request.flags.get();
        let facts = self.events.get(&id).ok_or(Errno::ENOENT)?.facts;
        if !facts.is_trace() {
            return Err(Errno::EOPNOTSUPP);
        }
        let driven = flags & MAP_DRIVEN != 0;
        let ring = self.output.ring(id).map(|ring| ring.addresses());
        // A driver that keeps the area writes the records too: there is no ring to write them to.
        let fits = match driven {
            true => !self.output.is_redirected(id) && ring.is_none(),
            false => ring.is_some(),
        };
        if flags & !(MAP_WRITABLE | MAP_DRIVEN) != 0 || facts.is_child() || !fits {
            return Err(Errno::EINVAL);
        }
        let count = request.pages.get();
        if !count.is_power_of_two() || count > self.settings.limits.max_aux_pages {
            return Err(Errno::EINVAL);
        }
        let taken: BTreeSet<GuestAddress> = ring.into_iter().flatten().collect();
        let metadata = self.output.ring(id).map(|ring| ring.metadata());
        let pages = self.check_addresses(count, rest)?;
        if pages.iter().any(|page| taken.contains(page)) {
            return Err(Errno::EINVAL);
        }
        if self.output.has_area(id) {
            return Err(Errno::EBUSY);
        }
        self.check_room(pages.len())?;
        let writable = flags & MAP_WRITABLE != 0;
        let memory = self.output.memory();
        let area = Area::new(memory, pages, metadata, writable, facts.aux_watermark)
            .map_err(|_| Errno::EINVAL)?;
        self.output.add_area(id, area);
        self.begin_in(id);
        self.announce_all(host, id);
        Ok(())
    }

    /// Takes the area away that was mapped with an event, what was written to it shown and told of as
    /// far as that fits.
    pub(super) fn unmap_aux(&mut self, host: &Host<'_>, id: u64) -> Result<(), Errno> {
        if !self.output.has_area(id) {
            return Err(match self.events.contains_key(&id) {
                true => Errno::EINVAL,
                false => Errno::ENOENT,
            });
        }
        self.cut_all(host, id);
        self.flush_ring(host, id);
        self.output.remove_area(id);
        Ok(())
    }
}
