//! The consumer's side of a perf ring of the host. The ring's records contain addresses and times of the
//! host, so they are never copied to the guest unchanged.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vpmu_perf::Mapping;
use vpmu_perf::page::{DATA_HEAD, DATA_TAIL};

use super::clock::Clock;
use super::records::{self, Record};
use super::sys;
use crate::source::{Overflow, Overflows};

/// Data pages of a long ring for batched samples. They hold 2,048 samples, which the host writes in 20 ms at
/// its highest sampling rate.
pub(super) const BATCHED_PAGES: usize = 16;
/// Maximum number of data pages of all long rings ([`HostRing::long`]) together. A limit is needed because
/// the guest determines the number of rings, and the host cannot swap out the pages of rings.
const ALL_BATCHED_PAGES: usize = 2048;

/// Maximum number of pages of `rings` rings: a metadata page and one data page for each ring, and the data
/// pages that all long rings share.
pub(super) fn most_pages(rings: u64) -> u64 {
    ALL_BATCHED_PAGES as u64 + 2 * rings
}

/// The data pages that are still available for long rings.
#[derive(Debug)]
pub(super) struct Pool(AtomicUsize);

/// Pages of a [`Pool`], returned when dropped.
#[derive(Debug)]
struct Share {
    pool: Arc<Pool>,
    pages: usize,
}

impl Pool {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(ALL_BATCHED_PAGES))
    }

    /// Takes the pages of one long ring, if they are available.
    fn share(self: &Arc<Self>, pages: usize) -> Option<Share> {
        let take = |left: usize| left.checked_sub(pages);
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.is_ok().then(|| Share { pool: Arc::clone(self), pages })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.0.fetch_add(self.pages, Ordering::Relaxed);
    }
}

/// A mapped ring. It consists of one metadata page, followed by data pages.
#[derive(Debug)]
pub(super) struct HostRing {
    mapping: Mapping,
    page: usize,
    size: u64,
    /// For a long ring, the pages that it took from the pool.
    _share: Option<Share>,
}

impl HostRing {
    /// Creates a ring with one data page, for an event whose overflows make the run call return.
    pub(super) fn short(event: &File) -> io::Result<Self> {
        Self::map(event, 1, None)
    }

    /// Creates a ring with `pages` data pages, for an event whose ring is drained only occasionally. `pages` must be a
    /// power of two. The ring is shorter if `pool` is used up, or if the host's limit on locked memory is reached. The
    /// host may then drop records, but reports how many.
    pub(super) fn long(event: &File, pages: usize, pool: &Arc<Pool>) -> io::Result<Self> {
        let share = pool.share(pages);
        let pages = if share.is_some() { pages } else { 1 };
        Self::map(event, pages, share)
    }

    fn map(event: &File, mut pages: usize, share: Option<Share>) -> io::Result<Self> {
        let page = sys::page_size()?;
        loop {
            match Mapping::new(event.as_fd(), (1 + pages) * page) {
                Ok(mapping) => {
                    return Ok(Self { mapping, page, size: (pages * page) as u64, _share: share });
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied && pages > 1 => {
                    pages /= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes the unread records from the ring. Adds the samples, the number of lost samples and the number of
    /// throttles to `into`.
    pub(super) fn drain(&self, clock: &Clock, into: &mut Overflows) {
        let Some(stretch) = self.stretch() else {
            return;
        };
        let line = clock.line();
        records::take(
            |offset| stretch.word(offset),
            self.size,
            stretch.tail,
            stretch.head,
            |record| match record {
                Record::Sample { mode, ip, time, period } => {
                    into.samples.push(Overflow { tsc: line.tsc(time), ip, mode, period })
                }
                Record::Lost(lost) => into.lost = into.lost.saturating_add(lost),
                Record::Throttle => into.throttles += 1,
            },
        );
    }

    /// Bytes of data.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the unread records. `None` if there are no unread records.
    pub(super) fn stretch(&self) -> Option<Stretch<'_>> {
        // Pairs with the kernel's release, so that all records before this head can be read.
        let head = self.mapping.load(DATA_HEAD, Ordering::Acquire);
        let tail = self.mapping.load(DATA_TAIL, Ordering::Relaxed);
        (head != tail).then_some(Stretch { ring: self, tail, head })
    }
}

/// The unread records of a ring, from `tail` to `head`. When this value is dropped, the host may overwrite them.
#[derive(Debug)]
pub(super) struct Stretch<'a> {
    ring: &'a HostRing,
    pub(super) tail: u64,
    pub(super) head: u64,
}

impl Stretch<'_> {
    /// Returns the aligned word at `offset` in the data. Zero beyond the end of the data.
    pub(super) fn word(&self, offset: u64) -> u64 {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let offset = self.ring.page.saturating_add(offset);
        self.ring.mapping.load(offset, Ordering::Relaxed)
    }
}

impl Drop for Stretch<'_> {
    fn drop(&mut self) {
        // Pairs with the kernel's acquire, so that the words are read before the kernel overwrites them.
        let mapping = &self.ring.mapping;
        mapping.store(DATA_TAIL, self.head, Ordering::Release);
    }
}
