//! What vCPU threads touch on every entry and exit, without a lock: counts that only the vCPU's
//! own thread writes, and how many events want what there.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::abi::{EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_OTHER, EXIT_SIGNAL, EXIT_USER};
use crate::machine::ExitReason;
use crate::metrics::ExitCounts;
use crate::source::Source;

/// What an active event makes its vCPU's thread do at each exit or entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Thread CPU time round the run call.
    GuestTime,
    /// Lets exit events see it.
    Exits,
    /// Has traces hold it, with the time until the next entry.
    Traced,
    /// Looks for overflows of host counters.
    HostSamples,
    /// Nothing: what the host records is collected by others.
    Collecting,
    /// Looks whether a throttled event may sample again.
    Throttled,
    /// Nothing but that registers will be asked for.
    Registers,
    /// All of the state will be, where an overflow is found.
    State,
}

/// One vCPU, as seen by its own thread and, for reading, by any.
///
/// Everything but its visits is relaxed: each figure stands for itself, and what a thread reads of its
/// own vCPU it wrote itself.
#[derive(Debug, Default)]
pub(crate) struct Vcpu {
    thread: AtomicI32,
    tsc_offset: AtomicU64,
    exits: [AtomicU64; 5],
    needs: [AtomicU32; Need::State as usize + 1],
    guest_time: AtomicU64,
    entered: AtomicU64,
    inside: AtomicBool,
    /// Odd while the vCPU visits the guest, until its exit is handled; never the same again.
    visits: AtomicU64,
    /// A trace waits for the end of the exit.
    traced: AtomicBool,
    kicks: AtomicU64,
}

impl Vcpu {
    /// `thread` runs it from now on; it has not been in the guest yet.
    pub(crate) fn attach(&self, thread: i32, tsc_offset: u64) {
        self.inside.store(false, Ordering::Relaxed);
        self.entered.store(0, Ordering::Relaxed);
        self.tsc_offset.store(tsc_offset, Ordering::Relaxed);
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Its thread ends, and its number may be another's from then on.
    pub(crate) fn detach(&self) {
        self.thread.store(0, Ordering::Relaxed);
    }

    /// The vCPU's thread once it has introduced itself, until it ends.
    pub(crate) fn thread(&self) -> Option<i32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|&thread| thread != 0)
    }

    /// The guest's TSC on this vCPU.
    pub(crate) fn guest_tsc(&self, source: &dyn Source) -> u64 {
        self.to_guest(source.tsc())
    }

    /// The guest's TSC on this vCPU when the host's showed `tsc`.
    pub(crate) fn to_guest(&self, tsc: u64) -> u64 {
        tsc.wrapping_add(self.tsc_offset.load(Ordering::Relaxed))
    }

    pub(crate) fn needs(&self, need: Need) -> bool {
        self.needs[need as usize].load(Ordering::Relaxed) != 0
    }

    pub(crate) fn add_needs(&self, needs: impl Iterator<Item = Need>) {
        needs.for_each(|need| {
            self.needs[need as usize].fetch_add(1, Ordering::Relaxed);
        });
    }

    pub(crate) fn drop_needs(&self, needs: impl Iterator<Item = Need>) {
        needs.for_each(|need| {
            self.needs[need as usize].fetch_sub(1, Ordering::Relaxed);
        });
    }

    pub(crate) fn count_kick(&self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// The run call begins; on the vCPU's thread.
    pub(crate) fn enter(&self, source: &dyn Source) {
        self.inside.store(true, Ordering::Relaxed);
        // The only writer. Ordered with those who wait for the vCPU to leave: either it sees them, or
        // they see it.
        let visits = self.visits.load(Ordering::Relaxed);
        self.visits.store((visits + 1) | 1, Ordering::SeqCst);
        if self.needs(Need::GuestTime) {
            let now = source.thread_time().unwrap_or(0);
            self.entered.store(now, Ordering::Relaxed);
        }
    }

    /// The run call has ended; on the vCPU's thread.
    pub(crate) fn leave(&self, reason: ExitReason, source: &dyn Source) {
        self.inside.store(false, Ordering::Relaxed);
        let exits = &self.exits[reason as usize];
        // The only writer: no read-modify-write needed.
        exits.store(exits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let entered = self.entered.load(Ordering::Relaxed);
        if entered != 0 {
            self.entered.store(0, Ordering::Relaxed);
            let spent = source.thread_time().unwrap_or(0).saturating_sub(entered);
            let before = self.guest_time.load(Ordering::Relaxed);
            self.guest_time.store(before + spent, Ordering::Relaxed);
        }
    }

    /// A trace is to know when the vCPU enters again; on the vCPU's thread.
    pub(crate) fn await_entry(&self) {
        self.traced.store(true, Ordering::Relaxed);
    }

    /// Whether a trace waits for this entry, which it then does no longer; on the vCPU's thread.
    pub(crate) fn take_awaited(&self) -> bool {
        let awaited = self.traced.load(Ordering::Relaxed);
        if awaited {
            self.traced.store(false, Ordering::Relaxed);
        }
        awaited
    }

    /// The exit is handled; on the vCPU's thread.
    pub(crate) fn handled(&self) {
        let visits = self.visits.load(Ordering::Relaxed);
        self.visits.store((visits + 1) & !1, Ordering::SeqCst);
    }

    /// Which visit to the guest the vCPU is on, from its entry until its exit is handled.
    pub(crate) fn visit(&self) -> Option<u64> {
        let visits = self.visits.load(Ordering::SeqCst);
        Some(visits).filter(|visits| visits % 2 == 1)
    }

    /// Whether the vCPU is in its run call, or about to be: it stands nowhere.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Relaxed)
    }

    /// Nanoseconds inside the run call, as of the last exit, gathered while anyone needed them.
    pub(crate) fn guest_time(&self) -> u64 {
        self.guest_time.load(Ordering::Relaxed)
    }

    pub(crate) fn exits(&self) -> ExitCounts {
        let of = |reason: ExitReason| self.exits[reason as usize].load(Ordering::Relaxed);
        ExitCounts {
            io: of(ExitReason::Io),
            mmio: of(ExitReason::Mmio),
            hlt: of(ExitReason::Hlt),
            signal: of(ExitReason::Signal),
            other: of(ExitReason::Other),
        }
    }

    /// Exits that the `EXIT_*` value `config` means.
    pub(crate) fn exits_of(&self, config: u64) -> u64 {
        let exits = self.exits();
        match config {
            EXIT_IO => exits.io,
            EXIT_MMIO => exits.mmio,
            EXIT_HLT => exits.hlt,
            EXIT_SIGNAL => exits.signal,
            EXIT_OTHER => exits.other,
            _ => exits.total(),
        }
    }
}

/// Whether the `EXIT_*` value `config` means exits for `reason`.
pub(crate) fn exit_matches(config: u64, reason: ExitReason) -> bool {
    config == exit_config(reason) || config == EXIT_USER
}

/// The `EXIT_*` value that means exits for `reason` alone.
pub(crate) fn exit_config(reason: ExitReason) -> u64 {
    match reason {
        ExitReason::Io => EXIT_IO,
        ExitReason::Mmio => EXIT_MMIO,
        ExitReason::Hlt => EXIT_HLT,
        ExitReason::Signal => EXIT_SIGNAL,
        ExitReason::Other => EXIT_OTHER,
    }
}
