//! The state that a vCPU's thread accesses without a lock at every entry and exit: counts, the open exit, and the hooks
//! of active events. The open exit is the last exit, until the vCPU enters the guest again.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::abi::{EXIT_HLT, EXIT_IO, EXIT_MMIO, EXIT_SIGNAL};
use crate::kind::Reported;
use crate::machine::{Access, Exit, ExitReason, GuestRegs};
use crate::metrics::ExitCounts;
use crate::source::Source;
use crate::work::{Turn, Work};

/// The work that active events need on the thread of their vCPU at each exit or entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Reads the thread's CPU time before and after the run call.
    GuestTime,
    /// Passes each exit to exit events.
    Exits,
    /// Records each exit, and the time from the exit to the next entry, in traces.
    Traced,
    /// Looks for overflows of host counters.
    HostSamples,
    /// Set if [`Vpmu::drain`](crate::Vpmu::drain) must collect the records that the host writes for an event. Causes no
    /// work at exits and entries.
    Collecting,
    /// Set if an event is throttled. Each exit then checks whether the event may sample again.
    Throttled,
    /// Set if records at an exit or mark need the instruction pointer and the mode. Causes no work by itself.
    Registers,
    /// Set if records of overflows need the vCPU's whole state. Causes no work by itself.
    State,
}

/// Number of hooks.
pub(crate) const HOOKS: usize = Hook::State as usize + 1;

/// A set of hooks that is read with a single load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Hooks(u32);

impl Hooks {
    pub(crate) fn has(self, hook: Hook) -> bool {
        self.0 & 1 << hook as u32 != 0
    }

    /// Whether an exit needs the shard. It does if an event counts exits, if host counters may have overflowed, or if
    /// an event is throttled.
    pub(crate) fn needs_shard(self) -> bool {
        self.has(Hook::Exits) || self.has(Hook::HostSamples) || self.has(Hook::Throttled)
    }

    #[must_use]
    pub(crate) fn with(self, hook: Hook) -> Self {
        Self(self.0 | 1 << hook as u32)
    }

    #[must_use]
    pub(crate) fn without(self, hook: Hook) -> Self {
        Self(self.0 & !(1 << hook as u32))
    }
}

/// One vCPU, updated by its own thread and readable by any thread.
///
/// Accesses are relaxed, except accesses to `taken`, `visits` and `open_exit`. The other fields do not depend on one
/// another, and a vCPU's thread always reads its own latest writes. A vCPU has its own cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Vcpu {
    /// Whether the vCPU has a session.
    taken: AtomicBool,
    /// Whether the vCPU's session has begun to execute the commands of a notification, but has not finished.
    unserved: AtomicBool,
    thread: AtomicI32,
    tsc_offset: AtomicU64,
    exits: [AtomicU64; 5],
    hooks: AtomicU32,
    guest_time: AtomicU64,
    entered: AtomicU64,
    /// The thread's CPU time and the host's TSC at the last entry. They are updated only while host counters
    /// sample. The CPU time is zero if it is unknown.
    entered_at: AtomicU64,
    entered_tsc: AtomicU64,
    /// Ticks from the last entry to the overflow that caused the open exit, plus one. Zero if no overflow caused the
    /// exit.
    sampled_after: AtomicU64,
    /// The cost of the last sample, until [`Vcpu::take_sample`] returns it. The cost consists of the CPU time from the
    /// entry before the overflow to the entry after it, and the ticks from the first of these entries to the overflow.
    sample_spent: AtomicU64,
    sample_guest: AtomicU64,
    inside: AtomicBool,
    /// Odd from a guest entry until the next exit is handled. Values never repeat.
    visits: AtomicU64,
    open_exit: OpenExitCell,
    kicks: AtomicU64,
    marks: AtomicU64,
    work: WorkCell,
    largest_turn: WorkCell,
    unfinished: AtomicU64,
}

/// [`Work`] with one writer and any readers.
#[derive(Debug, Default)]
struct WorkCell {
    operations: AtomicU64,
    host_calls: AtomicU64,
}

impl WorkCell {
    fn get(&self) -> Work {
        Work {
            operations: self.operations.load(Ordering::Relaxed),
            host_calls: self.host_calls.load(Ordering::Relaxed),
        }
    }

    fn set(&self, work: Work) {
        self.operations.store(work.operations, Ordering::Relaxed);
        self.host_calls.store(work.host_calls, Ordering::Relaxed);
    }
}

impl Vcpu {
    /// Takes the vCPU for a session. Returns `false` if the vCPU already has a session.
    pub(crate) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::Acquire)
    }

    /// Ends the session.
    pub(crate) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    /// Whether the vCPU has a session.
    pub(crate) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Relaxed)
    }

    /// Sets whether a notification by this vCPU has unfinished commands.
    pub(crate) fn set_unserved(&self, unserved: bool) {
        self.unserved.store(unserved, Ordering::Relaxed);
    }

    /// Whether a notification by this vCPU has unfinished commands.
    pub(crate) fn is_unserved(&self) -> bool {
        self.unserved.load(Ordering::Relaxed)
    }

    /// Restores the exit counts of a saved state. Call this before the first thread attaches.
    pub(crate) fn restore_exits(&self, before: &ExitCounts) {
        for (reason, count) in [
            (ExitReason::Io, before.io),
            (ExitReason::Mmio, before.mmio),
            (ExitReason::Hlt, before.hlt),
            (ExitReason::Signal, before.signal),
            (ExitReason::Other, before.other),
        ] {
            self.exits[reason as usize].store(count, Ordering::Relaxed);
        }
    }

    /// Attaches `thread`, which has not entered the guest yet.
    pub(crate) fn attach(&self, thread: i32, tsc_offset: u64) {
        self.inside.store(false, Ordering::Relaxed);
        self.entered.store(0, Ordering::Relaxed);
        self.entered_at.store(0, Ordering::Relaxed);
        self.sampled_after.store(0, Ordering::Relaxed);
        self.sample_spent.store(0, Ordering::Relaxed);
        self.tsc_offset.store(tsc_offset, Ordering::Relaxed);
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Detaches the thread. Afterwards, the system may reuse the thread's id.
    pub(crate) fn detach(&self) {
        self.thread.store(0, Ordering::Relaxed);
    }

    /// The attached thread.
    pub(crate) fn thread(&self) -> Option<i32> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|&thread| thread != 0)
    }

    /// The guest's TSC on this vCPU.
    pub(crate) fn guest_tsc(&self, source: &dyn Source) -> u64 {
        self.to_guest(source.tsc())
    }

    /// The guest's TSC on this vCPU at the host's `tsc`.
    pub(crate) fn to_guest(&self, tsc: u64) -> u64 {
        tsc.wrapping_add(self.tsc_offset.load(Ordering::Relaxed))
    }

    pub(crate) fn hooks(&self) -> Hooks {
        Hooks(self.hooks.load(Ordering::Relaxed))
    }

    /// Sets the hooks. The shard calls this while its lock is held.
    pub(crate) fn set_hooks(&self, hooks: Hooks) {
        self.hooks.store(hooks.0, Ordering::Relaxed);
    }

    /// The open exit. Other threads read it when they end a trace during the exit.
    pub(crate) fn open_exit(&self) -> &OpenExitCell {
        &self.open_exit
    }

    pub(crate) fn count_kick(&self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a mark. Called on the vCPU's thread.
    pub(crate) fn count_mark(&self) {
        // Single writer: no read-modify-write needed.
        let marks = self.marks.load(Ordering::Relaxed);
        self.marks.store(marks + 1, Ordering::Relaxed);
    }

    /// Adds the work of one turn of the vCPU's thread.
    pub(crate) fn count_work(&self, work: Work, turn: Turn) {
        self.work.set(self.work.get() + work);
        self.largest_turn.set(self.largest_turn.get().max(work));
        if turn == Turn::Unfinished {
            self.unfinished.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The total work of the vCPU's thread, the work of its largest turn, and the number of turns that ended before
    /// all requests and commands were served.
    pub(crate) fn work(&self) -> (Work, Work, u64) {
        let unfinished = self.unfinished.load(Ordering::Relaxed);
        (self.work.get(), self.largest_turn.get(), unfinished)
    }

    pub(crate) fn marks(&self) -> u64 {
        self.marks.load(Ordering::Relaxed)
    }

    pub(crate) fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// Records that the run call begins. Called on the vCPU's thread.
    pub(crate) fn enter(&self, source: &dyn Source) {
        self.inside.store(true, Ordering::Relaxed);
        // Only the vCPU's thread writes `visits`. Another thread may be about to wait for the vCPU to leave.
        // Because of SeqCst, either this thread sees that the other thread is waiting, or the other thread sees
        // this visit.
        let visits = self.visits.load(Ordering::Relaxed);
        self.visits.store((visits + 1) | 1, Ordering::SeqCst);
        let hooks = self.hooks();
        let guest_ticks = self.sampled_after.swap(0, Ordering::Relaxed);
        let sampled = guest_ticks.checked_sub(1);
        let samples = sampled.is_some() || hooks.has(Hook::HostSamples);
        if !samples && !hooks.has(Hook::GuestTime) {
            return;
        }
        let now = source.thread_time().unwrap_or(0);
        if hooks.has(Hook::GuestTime) {
            self.entered.store(now, Ordering::Relaxed);
        }
        if samples {
            let before = self.entered_at.swap(now, Ordering::Relaxed);
            self.entered_tsc.store(source.tsc(), Ordering::Relaxed);
            if let Some(ticks) = sampled.filter(|_| before != 0) {
                let spent = now.saturating_sub(before);
                self.sample_spent.store(spent, Ordering::Relaxed);
                self.sample_guest.store(ticks, Ordering::Relaxed);
            }
        } else {
            self.entered_at.store(0, Ordering::Relaxed);
        }
    }

    /// Records that an overflow at the host's TSC `first` caused the open exit. The vCPU's time from the
    /// overflow to the next entry is charged to the sample. Called on the vCPU's thread.
    pub(crate) fn begin_sample(&self, first: u64) {
        // A counter can overflow during host work, before the entry. Its signal then ends the run call
        // immediately, so the vCPU spends no ticks in the guest.
        let entered = self.entered_tsc.load(Ordering::Relaxed);
        let ticks = first.saturating_sub(entered);
        self.sampled_after.store(ticks.saturating_add(1), Ordering::Relaxed);
    }

    /// Returns the cost of the last sample. `None` if there was no sample, or if its cost was already taken. The cost
    /// has two parts: the thread's CPU time in nanoseconds from the entry before the overflow to the entry after it,
    /// and the ticks from the first of these entries to the overflow. Called on the vCPU's thread.
    pub(crate) fn take_sample(&self) -> Option<(u64, u64)> {
        let spent = self.sample_spent.swap(0, Ordering::Relaxed);
        let ticks = self.sample_guest.load(Ordering::Relaxed);
        (spent != 0).then_some((spent, ticks))
    }

    /// Records that the run call has ended. Called on the vCPU's thread.
    pub(crate) fn leave(&self, reason: ExitReason, source: &dyn Source) {
        self.inside.store(false, Ordering::Relaxed);
        let exits = &self.exits[reason as usize];
        // Single writer: no read-modify-write needed.
        exits.store(exits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let entered = self.entered.load(Ordering::Relaxed);
        if entered != 0 {
            self.entered.store(0, Ordering::Relaxed);
            let spent = source.thread_time().unwrap_or(0).saturating_sub(entered);
            let before = self.guest_time.load(Ordering::Relaxed);
            self.guest_time.store(before + spent, Ordering::Relaxed);
        }
    }

    /// Marks the exit as handled. Called on the vCPU's thread.
    pub(crate) fn exit_done(&self) {
        let visits = self.visits.load(Ordering::Relaxed);
        self.visits.store((visits + 1) & !1, Ordering::SeqCst);
    }

    /// The number of the vCPU's current visit to the guest, which lasts from the entry until the exit is handled;
    /// `None` between visits.
    pub(crate) fn visit(&self) -> Option<u64> {
        let visits = self.visits.load(Ordering::SeqCst);
        Some(visits).filter(|visits| visits % 2 == 1)
    }

    /// Returns whether the vCPU is in its run call, or about to make it. If so, the vCPU's instruction pointer is
    /// unknown.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside.load(Ordering::Relaxed)
    }

    /// Total time in nanoseconds that the thread spent inside the run call up to the last exit. This time is measured
    /// only while an event needs it.
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

    /// Number of these exits.
    pub(crate) fn exits_of(&self, which: Reported) -> u64 {
        let exits = self.exits();
        match which {
            Reported::Any => exits.total(),
            Reported::Only(ExitReason::Io) => exits.io,
            Reported::Only(ExitReason::Mmio) => exits.mmio,
            Reported::Only(ExitReason::Hlt) => exits.hlt,
            Reported::Only(ExitReason::Signal) => exits.signal,
            Reported::Only(ExitReason::Other) => exits.other,
        }
    }
}

/// An open exit: its start, reason and registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExitStamp {
    pub(crate) exit: Exit,
    /// The guest's TSC at the start of the exit.
    pub(crate) tsc: u64,
    /// The registers at the exit; `None` if the hypervisor does not provide them.
    pub(crate) regs: Option<GuestRegs>,
}

/// The open exit of a vCPU's session. Other threads can read it, because a thread that ends a trace writes the packet
/// of the open exit.
///
/// Only the session writes the cell. It publishes an exit without a lock and withdraws it under the shard's
/// lock. A thread that holds the shard's lock therefore reads either a complete stamp or, while the session publishes
/// an exit, `None`.
#[derive(Debug, Default)]
pub(crate) struct OpenExitCell {
    /// Number of the open exit. Zero if there is no open exit.
    number: AtomicU64,
    /// The number of the last published exit.
    next: AtomicU64,
    words: [AtomicU64; 6],
}

const HAS_REGS: u64 = 1 << 8;
const IS_USER: u64 = 1 << 9;
const HAS_ACCESS: u64 = 1 << 10;
const IS_WRITE: u64 = 1 << 11;

impl OpenExitCell {
    /// Publishes a new exit. Called on the vCPU's thread, after the previous exit was withdrawn.
    pub(crate) fn publish(&self, stamp: &ExitStamp) {
        let access = stamp.exit.access;
        let flag = |on: bool, flag| if on { flag } else { 0 };
        let flags = Reported::Only(stamp.exit.reason).config()
            | flag(stamp.regs.is_some(), HAS_REGS)
            | flag(stamp.regs.is_some_and(|regs| regs.user), IS_USER)
            | flag(access.is_some(), HAS_ACCESS)
            | flag(access.is_some_and(|access| access.write), IS_WRITE);
        let words = [
            flags,
            stamp.tsc,
            stamp.regs.map_or(0, |regs| regs.ip),
            access.map_or(0, |access| access.address),
            access.map_or(0, |access| access.size.into()),
            access.map_or(0, |access| access.count.into()),
        ];
        for (to, word) in self.words.iter().zip(words) {
            to.store(word, Ordering::Relaxed);
        }
        let number = self.next.load(Ordering::Relaxed) + 1;
        self.next.store(number, Ordering::Relaxed);
        // Pairs with the load in `get`, so that the words are stored before the number.
        self.number.store(number, Ordering::Release);
    }

    /// Withdraws the exit. Called on the vCPU's thread, which must hold the shard's lock.
    pub(crate) fn withdraw(&self) {
        self.number.store(0, Ordering::Relaxed);
    }

    /// The number of the open exit, and its stamp. The caller must hold the shard's lock.
    pub(crate) fn get(&self) -> Option<(u64, ExitStamp)> {
        let number = self.number.load(Ordering::Acquire);
        if number == 0 {
            return None;
        }
        let word = |index: usize| self.words[index].load(Ordering::Relaxed);
        let flags = word(0);
        let small = |word: u64| u32::try_from(word).unwrap_or(u32::MAX);
        let access = (flags & HAS_ACCESS != 0).then(|| Access {
            address: word(3),
            size: u8::try_from(word(4)).unwrap_or(u8::MAX),
            write: flags & IS_WRITE != 0,
            count: small(word(5)),
        });
        let regs = (flags & HAS_REGS != 0).then(|| GuestRegs { ip: word(2), user: flags & IS_USER != 0 });
        let exit = Exit { reason: exit_reason(flags & 0xff), access };
        let stamp = ExitStamp { exit, tsc: word(1), regs };
        Some((number, stamp))
    }
}

/// The reason that the `EXIT_*` value `config` selects.
fn exit_reason(config: u64) -> ExitReason {
    match config {
        EXIT_IO => ExitReason::Io,
        EXIT_MMIO => ExitReason::Mmio,
        EXIT_HLT => ExitReason::Hlt,
        EXIT_SIGNAL => ExitReason::Signal,
        _ => ExitReason::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_exit_is_read_as_published() {
        let cell = OpenExitCell::default();
        assert_eq!(cell.get(), None);
        let access = Access { address: 0x3f8, size: 2, write: true, count: 7 };
        let reasons = [ExitReason::Io, ExitReason::Mmio, ExitReason::Hlt, ExitReason::Signal, ExitReason::Other];
        let mut number = 0;
        for reason in reasons {
            for access in [None, Some(access)] {
                for regs in [None, Some(GuestRegs { ip: 5, user: true })] {
                    let exit = Exit { reason, access };
                    let stamp = ExitStamp { exit, tsc: 9, regs };
                    cell.publish(&stamp);
                    number += 1;
                    assert_eq!(cell.get(), Some((number, stamp)));
                    cell.withdraw();
                    assert_eq!(cell.get(), None);
                }
            }
        }
    }

    #[test]
    fn hooks_are_a_set() {
        let hooks = Hooks::default().with(Hook::Traced).with(Hook::State);
        assert!(hooks.has(Hook::Traced) && hooks.has(Hook::State));
        assert!(!hooks.has(Hook::GuestTime) && !hooks.needs_shard());
        assert_eq!(hooks.without(Hook::Traced).without(Hook::State), Hooks::default());
    }
}
