//! AUX areas: guest pages that hold trace data. Records in a separate ring report which chunks of an area were
//! written. The guest owns the pages and may write anything to them, so the device keeps its own copy of the
//! positions. This module identifies events only by their ids, and does not interpret the data.

mod device_owned;
mod driver_owned;
mod writer;

use vm_memory::GuestAddress;

use self::device_owned::DeviceOwned;
use self::driver_owned::DriverOwned;
use self::writer::Writer;
pub(crate) use self::writer::{Refused, Window};
use crate::abi::PAGE_SIZE;
use crate::memory::View;
use crate::pages::{self, GuestPages};
use crate::record::Chunk;
use crate::saved::{Fault, saved};

/// perf's `PERF_AUX_FLAG_TRUNCATED`: the chunk ended because there was no more room.
pub(crate) const TRUNCATED: u64 = 1 << 0;
/// perf's `PERF_AUX_FLAG_OVERWRITE`: the chunk overwrote older data.
pub(crate) const OVERWRITE: u64 = 1 << 1;
/// perf's `PERF_AUX_FLAG_PARTIAL`: data is missing before or in the chunk.
pub(crate) const PARTIAL: u64 = 1 << 2;
/// perf's `PERF_AUX_FLAG_COLLISION`: an entry in the chunk represents several overflows.
pub(crate) const COLLISION: u64 = 1 << 3;

/// Data that is written completely or not at all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<'a> {
    /// Number of bytes to skip before the data, a multiple of 8.
    pub(crate) skip: u64,
    /// The data, in two consecutive parts.
    pub(crate) parts: [&'a [u64]; 2],
    /// Whether the data represents several overflows.
    pub(crate) collision: bool,
}

impl Entry<'_> {
    fn len(&self) -> u64 {
        let parts = self.parts.iter().map(|part| size_of_val(*part) as u64);
        self.skip + parts.sum::<u64>()
    }
}

/// The result of appending an [`Entry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Appended {
    /// Whether the entry is in the area.
    pub(crate) whole: bool,
    /// Number of bytes by which the area's head has advanced.
    pub(crate) written: u64,
    /// The chunk that the entry ended, if any.
    pub(crate) chunk: Option<Chunk>,
    /// If true, a wakeup is due: the reader is woken or, if the driver manages the area, the driver is notified.
    pub(crate) wake: bool,
}

/// Which side manages an area. This side determines the available room and notifies the reader.
#[derive(Debug)]
enum Keeper {
    /// The device, with the ring's metadata page.
    Device(GuestAddress, DeviceOwned),
    Driver(DriverOwned),
}

/// An AUX area.
#[derive(Debug)]
pub(crate) struct Area {
    /// 2^n pages.
    pages: Vec<GuestAddress>,
    keeper: Keeper,
}

saved! {
    /// An AUX area.
    pub(crate) struct SavedArea {
        /// Addresses of the pages.
        pub(crate) pages: Vec<u64>,
        pub(crate) overwrite: bool,
        pub(crate) watermark: u64,
        pub(crate) head: u64,
        pub(crate) tail: u64,
        /// Start of the chunk that has not ended yet.
        pub(crate) begun: Option<u64>,
        pub(crate) keeper: SavedKeeper,
    }

    /// The side that manages an AUX area.
    pub(crate) enum SavedKeeper {
        Device {
            /// perf's `PERF_AUX_FLAG_*` of the open chunk.
            flags: u64,
            full: bool,
        },
        Driver {
            span: Option<SavedSpan>,
        },
    }

    /// A trace with an open span (`COMMAND_AUX_BEGIN`) in an area that the driver manages.
    pub(crate) struct SavedSpan {
        pub(crate) event: u64,
        pub(crate) room: u64,
        pub(crate) lost: u64,
        pub(crate) told: bool,
    }
}

impl Area {
    /// Creates an area that consists of `pages`. If `metadata` is the address of a metadata page, the device manages
    /// the area. If `metadata` is `None`, the driver manages it. The caller must have checked that there are 2^n pages,
    /// and that each page is aligned and listed only once. `watermark` is in bytes, and zero means half of the area.
    ///
    /// # Errors
    /// A page that is not guest memory.
    pub(crate) fn new(
        memory: &View<'_>,
        pages: Vec<GuestAddress>,
        metadata: Option<GuestAddress>,
        writable: bool,
        watermark: u32,
    ) -> Result<Self, pages::Unwritable> {
        for &page in &pages {
            pages::page(memory, page)?;
        }
        let size = pages.len() as u64 * PAGE_SIZE as u64;
        let watermark = match u64::from(watermark) {
            0 => size / 2,
            bytes => bytes,
        };
        let keeper = match metadata {
            Some(metadata) => {
                let kept = DeviceOwned::new(size, !writable, watermark);
                kept.clear(&GuestPages::new(memory, metadata, &pages)?)?;
                Keeper::Device(metadata, kept)
            }
            None => Keeper::Driver(DriverOwned::new(size, !writable, watermark)),
        };
        Ok(Self { pages, keeper })
    }

    /// Returns the current state for saving. `None` while a producer in the VMM writes.
    pub(crate) fn save(&self) -> Option<SavedArea> {
        let (writer, watermark, keeper) = match &self.keeper {
            Keeper::Device(_, kept) => (kept.writer(), kept.watermark(), kept.save()?),
            Keeper::Driver(driven) => (driven.writer(), driven.watermark(), driven.save()),
        };
        Some(SavedArea {
            pages: self.pages.iter().map(|page| page.0).collect(),
            overwrite: writer.overwrites(),
            watermark,
            head: writer.head(),
            tail: writer.tail(),
            begun: writer.begun(),
            keeper,
        })
    }

    /// Restores a saved area over `pages`, whose contents do not change. The caller must have checked `pages` as for
    /// [`Area::new`].
    ///
    /// # Errors
    /// The saved state is not valid.
    pub(crate) fn restore(
        memory: &View<'_>,
        pages: Vec<GuestAddress>,
        metadata: Option<GuestAddress>,
        saved: &SavedArea,
    ) -> Result<Self, Fault> {
        for &page in &pages {
            pages::page(memory, page).map_err(|_| "a page of the area is not memory")?;
        }
        let size = pages.len() as u64 * PAGE_SIZE as u64;
        if saved.watermark == 0 || saved.watermark > size.max(u32::MAX.into()) {
            return Err("the watermark is not valid");
        }
        let writer = Writer::restore(size, saved)?;
        let watermark = saved.watermark;
        let keeper = match (&saved.keeper, metadata) {
            (&SavedKeeper::Device { flags, full }, Some(metadata)) => {
                let kept = DeviceOwned::restore(writer, watermark, flags, full)?;
                Keeper::Device(metadata, kept)
            }
            (SavedKeeper::Driver { span }, None) => {
                Keeper::Driver(DriverOwned::restore(writer, watermark, span.as_ref())?)
            }
            (SavedKeeper::Device { .. }, None) => return Err("the area has no ring"),
            (SavedKeeper::Driver { .. }, Some(_)) => {
                return Err("an area that the driver manages has a ring");
            }
        };
        Ok(Self { pages, keeper })
    }

    /// Number of guest pages held.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Whether the driver manages the area.
    pub(crate) fn is_driven(&self) -> bool {
        matches!(self.keeper, Keeper::Driver(_))
    }

    /// Returns the position of the next entry of `event`. `None` if the driver manages the area and has not granted
    /// space to `event`.
    pub(crate) fn position(&self, event: u64) -> Option<u64> {
        match &self.keeper {
            Keeper::Device(_, kept) => Some(kept.head()),
            Keeper::Driver(driven) => driven.position(event),
        }
    }

    /// Writes an entry of `event`. The entry must have been made for the current [`Area::position`].
    pub(crate) fn append(&mut self, memory: &View<'_>, event: u64, entry: &Entry<'_>) -> Appended {
        let appended = match &mut self.keeper {
            Keeper::Device(metadata, kept) => {
                GuestPages::new(memory, *metadata, &self.pages).map(|mut pages| kept.append(&mut pages, entry))
            }
            Keeper::Driver(driven) => {
                let mut pages = GuestPages::of_data(memory, &self.pages);
                Ok(driven.append(&mut pages, event, entry))
            }
        };
        appended.unwrap_or_else(|error| {
            log::debug!("metadata page of an AUX area: {error}");
            Appended::default()
        })
    }

    /// Records that data before the next entry is missing.
    pub(crate) fn miss(&mut self) {
        if let Keeper::Device(_, kept) = &mut self.keeper {
            kept.miss();
        }
    }

    /// Whether the area has an open chunk that the device may end. Always `false` if the driver manages the area.
    pub(crate) fn is_begun(&self) -> bool {
        matches!(&self.keeper, Keeper::Device(_, kept) if kept.is_begun())
    }

    /// If the device manages the area, publishes the written data and returns the chunk.
    pub(crate) fn end(&mut self, memory: &View<'_>) -> Option<Chunk> {
        let Keeper::Device(metadata, kept) = &mut self.keeper else {
            return None;
        };
        let pages = GuestPages::new(memory, *metadata, &self.pages).ok()?;
        kept.end(&pages, 0)
    }

    /// Gives a producer in the VMM exclusive use of the area, until it calls [`Area::release`] with this `token`.
    /// If a chunk was open, ends and returns it.
    ///
    /// # Errors
    /// [`Refused::Nested`]; [`Refused::NotBegun`] if the driver manages the area;
    /// [`Refused::Unwritable`].
    pub(crate) fn claim(&mut self, memory: &View<'_>, token: u64) -> Result<Option<Chunk>, Refused> {
        let (kept, pages) = self.kept(memory)?;
        kept.claim(&pages, token)
    }

    /// Returns the position at which the producer writes next, and the remaining room. `None` if the producer no longer
    /// writes.
    pub(crate) fn claimed(&self, token: u64) -> Option<Window> {
        match &self.keeper {
            Keeper::Device(_, kept) => kept.claimed(token),
            Keeper::Driver(_) => None,
        }
    }

    /// Skips `skip` bytes, then writes the producer's words.
    ///
    /// # Errors
    /// [`Refused::NotBegun`]; [`Refused::NoRoom`]: nothing was written; [`Refused::Unwritable`]: skipped
    /// bytes may remain.
    pub(crate) fn put(&mut self, memory: &View<'_>, token: u64, skip: u64, words: &[u64]) -> Result<(), Refused> {
        let (kept, mut pages) = self.kept(memory)?;
        kept.put(&mut pages, token, skip, words)
    }

    /// Ends the producer's write, and publishes its first `size` bytes.
    ///
    /// # Errors
    /// [`Refused::NotBegun`]; [`Refused::NoRoom`] if the producer has written less than `size`, or if `size` is not a
    /// multiple of 8; [`Refused::Unwritable`].
    pub(crate) fn release(&mut self, memory: &View<'_>, token: u64, size: u64) -> Result<Appended, Refused> {
        let (kept, pages) = self.kept(memory)?;
        kept.release(&pages, token, size)
    }

    /// Discards the producer's data.
    pub(crate) fn give_up(&mut self, token: u64) {
        if let Keeper::Device(_, kept) = &mut self.keeper {
            kept.give_up(token);
        }
    }

    fn kept<'a>(&'a mut self, memory: &'a View<'a>) -> Result<(&'a mut DeviceOwned, GuestPages<'a>), Refused> {
        let Keeper::Device(metadata, kept) = &mut self.keeper else {
            return Err(Refused::NotBegun);
        };
        let pages = GuestPages::new(memory, *metadata, &self.pages);
        Ok((kept, pages.map_err(Refused::Unwritable)?))
    }

    /// Grants `event` `room` bytes of space, starting at `head`.
    ///
    /// # Errors
    /// [`Refused::Nested`]; [`Refused::NotBegun`] if the device manages the area; [`Refused::NoRoom`] if `room`
    /// is more than the area's size.
    pub(crate) fn begin(&mut self, event: u64, head: u64, room: u64) -> Result<(), Refused> {
        match &mut self.keeper {
            Keeper::Device(..) => Err(Refused::NotBegun),
            Keeper::Driver(driven) => driven.begin(event, head, room),
        }
    }

    /// Withdraws the space granted to `event`. Returns the head after the last entry, and the number of lost
    /// bytes.
    ///
    /// # Errors
    /// [`Refused::NotBegun`].
    pub(crate) fn finish(&mut self, event: u64) -> Result<(u64, u64), Refused> {
        match &mut self.keeper {
            Keeper::Device(..) => Err(Refused::NotBegun),
            Keeper::Driver(driven) => driven.finish(event),
        }
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod model;
