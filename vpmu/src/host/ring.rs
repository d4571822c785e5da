//! The consumer's side of a host ring: what stands there, taken out. What the records say is the
//! host's and goes no further than the device.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use perf_event_open_sys::bindings::perf_event_mmap_page;

use super::clock::Clock;
use super::records::{self, Record};
use super::sys::{self, Mapping};
use crate::source::{Engine, Overflow, Overflows};

const DATA_HEAD: usize = offset_of!(perf_event_mmap_page, data_head);
const DATA_TAIL: usize = offset_of!(perf_event_mmap_page, data_tail);
/// Data pages of a batched ring: 2,048 samples, which is 20 ms at the host's highest rate.
const BATCHED_PAGES: usize = 16;
/// Data pages of all long rings together: how many there are, the guest decides, and the host can
/// swap none of them out.
const ALL_BATCHED_PAGES: usize = 2048;

/// What is left of the pages for long rings.
#[derive(Debug)]
pub(super) struct Pool(AtomicUsize);

/// Pages of a [`Pool`], given back when dropped.
#[derive(Debug)]
struct Share(Arc<Pool>);

impl Pool {
    pub(super) fn new() -> Self {
        Self(AtomicUsize::new(ALL_BATCHED_PAGES))
    }

    /// The pages of one long ring, if there are as many.
    fn share(self: &Arc<Self>) -> Option<Share> {
        let take = |left: usize| left.checked_sub(BATCHED_PAGES);
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        taken.is_ok().then(|| Share(Arc::clone(self)))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.0.fetch_add(BATCHED_PAGES, Ordering::Relaxed);
    }
}

/// One metadata page, then data pages.
#[derive(Debug)]
pub(super) struct HostRing {
    mapping: Mapping,
    page: usize,
    size: u64,
    /// Of a long ring, held while the pages are.
    _share: Option<Share>,
}

impl HostRing {
    /// A ring as long as `engine` needs: one page where the run call ends at each overflow. When
    /// `pool` is used up, or the host allows less locked memory, it is shorter, and the host may
    /// have to drop samples, which it tells.
    pub(super) fn new(event: &File, engine: Engine, pool: &Arc<Pool>) -> io::Result<Self> {
        let page = sys::page_size()?;
        let share = match engine {
            Engine::Exit => None,
            Engine::Batched => pool.share(),
        };
        let mut pages = share.as_ref().map_or(1, |_| BATCHED_PAGES);
        loop {
            match Mapping::new(event, (1 + pages) * page) {
                Ok(mapping) => {
                    return Ok(Self {
                        mapping,
                        page,
                        size: (pages * page) as u64,
                        _share: share,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied && pages > 1 => {
                    pages /= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes every record that stands there.
    pub(super) fn drain(&self, clock: &Clock, into: &mut Overflows) {
        // Pairs with the kernel's release: the records stand before the head moves.
        let head = self.mapping.load(DATA_HEAD, Ordering::Acquire);
        let tail = self.mapping.load(DATA_TAIL, Ordering::Relaxed);
        if head == tail {
            return;
        }
        let line = clock.line();
        records::take(
            |offset| {
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                self.mapping
                    .load(self.page.saturating_add(offset), Ordering::Relaxed)
            },
            self.size,
            tail,
            head,
            |record| match record {
                Record::Sample {
                    mode,
                    ip,
                    time,
                    period,
                } => into.samples.push(Overflow {
                    tsc: line.tsc(time),
                    ip,
                    mode,
                    period,
                }),
                Record::Lost(lost) => into.lost = into.lost.saturating_add(lost),
                Record::Throttle => into.throttles += 1,
            },
        );
        // Pairs with the kernel's acquire: the words above were read before they are reused.
        self.mapping.store(DATA_TAIL, head, Ordering::Release);
    }
}
