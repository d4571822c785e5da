//! What a ring holds, for its operator: the bytes of its records, as the guest left them.

use super::{PAGE, Ring};
use crate::abi::PAGE_SIZE;
use crate::pages::{self, Unwritable};
use vm_memory::GuestMemoryMmap;

impl Ring {
    /// Whether its newest record is the first of [`Ring::held`].
    pub(crate) fn is_backward(&self) -> bool {
        self.producer.manner().backward
    }

    /// The bytes of the records that its reader has not taken, as far as the device knows; without a
    /// writable map, of all that have not been overwritten. They begin with a whole record, which is
    /// the newest of a ring that is written backwards and else the oldest, and go on from there.
    ///
    /// `None`: where a record begins, nobody knows.
    pub(crate) fn held(&self, memory: &GuestMemoryMmap) -> Option<Vec<u8>> {
        let (start, len) = self.producer.held()?;
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        let copied = self.copy(memory, start, &mut bytes);
        if let Err(error) = copied {
            log::warn!("a ring cannot be read: {error}");
            return None;
        }
        Some(bytes)
    }

    /// Copies what lies from `position` on, modulo the size of the data.
    fn copy(
        &self,
        memory: &GuestMemoryMmap,
        mut position: u64,
        bytes: &mut [u8],
    ) -> Result<(), Unwritable> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let page = (position / PAGE).checked_rem(self.data.len() as u64);
            let page = page
                .and_then(|page| usize::try_from(page).ok())
                .and_then(|page| self.data.get(page))
                .ok_or(Unwritable::NoPage)?;
            let offset = usize::try_from(position % PAGE).map_err(|_| Unwritable::NoPage)?;
            let (now, later) = rest.split_at_mut(rest.len().min(PAGE_SIZE - offset));
            let slice = pages::page(memory, *page)?;
            let slice = slice.offset(offset).map_err(Unwritable::Beyond)?;
            slice.copy_to(now);
            position = position.wrapping_add(now.len() as u64);
            rest = later;
        }
        Ok(())
    }
}
