//! Finds the events that the host opens but never counts.
//!
//! Linux assumes that a processor has all events of its family. An emulated processor has only some of them, and a
//! hypervisor may hide events from a virtual one (`KVM_SET_PMU_EVENT_FILTER`). All others open, and read zero. So an
//! event counts for a moment while this thread does work that must raise it.

use std::collections::BTreeMap;
use std::io;

use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use super::counter::{attr, reading};
use super::pmus::CpuPmu;
use super::sys;
use crate::abi::{KIND_HARDWARE, KIND_HW_CACHE};
use crate::source::Request;

/// Pages of memory that the work touches first.
const PAGES: usize = 4;

/// The trials of one PMU's events on the calling thread.
#[derive(Debug)]
pub(super) struct Trials {
    pmu: CpuPmu,
    /// By kind and config: whether the event counted, or `None` if it did not run.
    done: BTreeMap<(u32, u64), Option<bool>>,
}

impl Trials {
    pub(super) fn new(pmu: CpuPmu) -> Self {
        Self { pmu, done: BTreeMap::new() }
    }

    /// Whether the host opens the event but never counts it. The rule is in SPEC.md, 6.2.
    pub(super) fn is_silent(&mut self, kind: u32, config: u64) -> bool {
        match kind {
            KIND_HARDWARE => self.counts(kind, superset(config)) == Some(false),
            KIND_HW_CACHE => {
                let mut ran = false;
                for config in of_cache(config & 0xff) {
                    match self.counts(kind, config) {
                        Some(true) => return false,
                        Some(false) => ran = true,
                        None => {}
                    }
                }
                ran
            }
            _ => false,
        }
    }

    fn counts(&mut self, kind: u32, config: u64) -> Option<bool> {
        let pmu = self.pmu;
        *self.done.entry((kind, config)).or_insert_with(|| trial(kind, config, pmu).ok().flatten())
    }
}

/// Returns the event by whose trial `config` is judged: the one of which it counts a part, because a short trial may be
/// without misses and stalls.
fn superset(config: u64) -> u64 {
    const CYCLES: u64 = 0;
    const CACHE_REFERENCES: u64 = 2;
    const CACHE_MISSES: u64 = 3;
    const BRANCHES: u64 = 4;
    const BRANCH_MISSES: u64 = 5;
    const STALLED_FRONTEND: u64 = 7;
    const STALLED_BACKEND: u64 = 8;
    match config {
        CACHE_MISSES => CACHE_REFERENCES,
        BRANCH_MISSES => BRANCHES,
        STALLED_FRONTEND | STALLED_BACKEND => CYCLES,
        config => config,
    }
}

/// Returns the configs of a cache's events: loads, stores and prefetches, each followed by its misses.
fn of_cache(cache: u64) -> impl Iterator<Item = u64> {
    (0..3).flat_map(move |operation| (0..2).map(move |result| cache | operation << 8 | result << 16))
}

/// Returns whether the event counts this thread's work, or `None` if the event did not run, because others use the
/// counters.
///
/// # Errors
/// The host does not open the event.
fn trial(kind: u32, config: u64, pmu: CpuPmu) -> io::Result<Option<bool>> {
    let request = Request { kind, config, ..Request::default() };
    let mut attr = attr(&request, pmu);
    attr.set_disabled(0);
    let event = sys::open(&attr, 0)?;
    work();
    let reading = reading(&event)?;
    Ok((reading.running > 0).then_some(reading.value > 0))
}

/// Executes branches, and writes and reads memory that this thread has not used before, which also takes page faults
/// and flushes TLB entries.
fn work() {
    const PAGE: usize = 4096;
    // Without memory, the work consists of system calls.
    let Ok(region) = MmapRegion::<()>::new(PAGES * PAGE) else {
        return;
    };
    let memory = region.as_volatile_slice();
    for page in 0..PAGES {
        let _ = memory.write_obj(page, page * PAGE);
        let _ = std::hint::black_box(memory.read_obj::<usize>(page * PAGE));
    }
}
