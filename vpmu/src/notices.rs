//! Notices to the driver. A notice stays pending until the event queue has a buffer for it. The device then delivers
//! the notice, and raises an interrupt if the driver wants one.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::abi::{
    NOTICE_AUX, NOTICE_COUNT, NOTICE_ERROR, NOTICE_LIMIT, NOTICE_PERSISTENT, NOTICE_WAKEUP, Notice, QUEUE_EVENT,
};
use crate::locks::{Held, Lock, NOTICES};
use crate::machine::Interrupt;
use crate::queues::SavedQueue;
use crate::queues::{BadChain, Chain, DeviceQueue, QueueState, put};
use crate::refusal::{self, Refusal};
use crate::saved::{Fault, saved};
use crate::work;

/// The notices of one device, and the event queue and the interrupt that deliver them.
#[derive(Debug)]
pub(crate) struct Notices {
    /// Whether there may be a notice that can be delivered. [`Notices::deliver`] looks for pending notices only if this
    /// flag is set, and then clears the flag.
    ready: AtomicBool,
    interrupts: AtomicU64,
    state: Lock<State, NOTICES>,
}

#[derive(Debug, Default)]
struct State {
    pending: Pending,
    queue: DeviceQueue,
    /// Raises the driver's interrupts. `None` if there is no driver.
    interrupt: Option<Arc<dyn Interrupt>>,
    delivered: u64,
    bad_buffers: u64,
}

saved! {
    /// A notice that has not been delivered.
    pub(crate) struct SavedNotice {
        /// `NOTICE_*`.
        pub(crate) kind: u32,
        pub(crate) event: u64,
        /// For wakeups or reached limits, their number. For an error, one of `REFUSED_*`.
        pub(crate) value: u64,
    }
}

impl Notices {
    pub(crate) fn new() -> Self {
        Self { ready: AtomicBool::new(false), interrupts: AtomicU64::new(0), state: Lock::new(State::default()) }
    }

    /// Sets the event queue and the interrupt of a new driver, and discards pending notices. Keeps the names of the
    /// rings, because the rings of persistent events outlive a driver.
    pub(crate) fn activate(&self, queue: DeviceQueue, interrupt: Option<Arc<dyn Interrupt>>) {
        let mut state = self.state.lock();
        state.pending.discard();
        state.queue = queue;
        state.interrupt = interrupt;
    }

    /// The device's position in the event queue. `None` if there is no driver.
    pub(crate) fn save_queue(&self) -> Option<SavedQueue> {
        self.state.lock().queue.save()
    }

    /// Continues the event queue where it was saved.
    pub(crate) fn restore_queue(&self, saved: &SavedQueue) {
        self.state.lock().queue.restore(saved);
    }

    /// Removes the driver, and discards pending notices and the names of the rings.
    pub(crate) fn reset(&self) {
        self.activate(DeviceQueue::default(), None);
        self.state.lock().pending.rings.clear();
    }

    /// Locks the pending notices, so that the caller can add or remove notices.
    pub(crate) fn pending(&self) -> PendingNotices<'_> {
        PendingNotices { state: self.state.lock(), ready: &self.ready }
    }

    /// Adds or retracts the notices in `all`. No notice is delivered before the whole list has been applied.
    pub(crate) fn apply(&self, all: impl Iterator<Item = NoticeChange>) {
        let mut pending = self.pending();
        for change in all {
            match change {
                NoticeChange::Wake { of, wakeups } => pending.wake(of, wakeups),
                NoticeChange::Aux(event) => pending.aux(event),
                NoticeChange::Fail(event, refused) => pending.fail(event, refused),
                NoticeChange::Limit { event, of, woke } => pending.limit(event, of, woke),
                NoticeChange::Forget(event) => pending.forget(event),
            }
        }
    }

    /// Handles the driver's notification that it has posted buffers to the event queue.
    pub(crate) fn posted(&self) {
        // Set `ready` while the lock is held. Otherwise, a delivery that has just found no buffer could clear the flag
        // afterwards.
        let state = self.state.lock();
        self.ready.store(true, Ordering::Relaxed);
        drop(state);
        self.deliver(None);
    }

    /// Delivers pending notices. If the driver wants an interrupt for another queue, `served` is the index of that
    /// queue. A single call raises the interrupt for that queue, if any, and the interrupt for the notices, if the
    /// driver wants it. The caller must not hold any of the device's locks, because the transport has locks of its own.
    pub(crate) fn deliver(&self, served: Option<u16>) {
        let event = self.deliver_pending().then_some(QUEUE_EVENT);
        let (queues, len) = match (served, event) {
            (None, None) => return,
            (Some(served), Some(event)) => ([served, event], 2),
            (Some(only), None) | (None, Some(only)) => ([only; 2], 1),
        };
        let interrupt = self.state.lock().interrupt.clone();
        let Some(interrupt) = interrupt else {
            // The driver is gone.
            return;
        };
        self.interrupts.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = interrupt.used(&queues[..len]) {
            log::warn!("cannot raise the interrupt: {error}");
        }
    }

    /// The current state of the event queue.
    pub(crate) fn queue_state(&self) -> QueueState {
        self.state.lock().queue.state()
    }

    /// Number of interrupts raised since the device was created.
    pub(crate) fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    /// Returns how many notices were delivered, and how many unusable buffers were found, since the device was created.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.delivered, state.bad_buffers)
    }

    /// Delivers notices until the queue's buffers are used up. The remaining notices stay pending until the driver
    /// posts more buffers. Returns whether the driver wants an interrupt for the delivered notices.
    fn deliver_pending(&self) -> bool {
        if !self.ready.load(Ordering::Relaxed) {
            return false;
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut given = false;
        state.queue.notified();
        for _ in 0..state.queue.bound() {
            let Some(notice) = state.pending.next() else {
                break;
            };
            let Some(chain) = state.queue.take() else {
                break;
            };
            let len = match write(&chain, &notice) {
                Ok(len) => {
                    state.pending.delivered();
                    state.delivered += 1;
                    len
                }
                Err(BadChain) => {
                    state.bad_buffers += 1;
                    0
                }
            };
            state.queue.give_back(chain, len);
            given = true;
        }
        // Notices without a buffer wait until the driver posts some.
        self.ready.store(false, Ordering::Relaxed);
        given && state.queue.wants_interrupt()
    }
}

fn write(chain: &Chain, notice: &Notice) -> Result<u32, BadChain> {
    let (_, mut writer) = chain.writer()?;
    put(&mut writer, notice)?;
    u32::try_from(size_of::<Notice>()).map_err(|_| BadChain)
}

/// The readers for whom wakeups are counted together. A single notice reports their pending wakeups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Woken {
    /// The readers of a sink: a ring, an AUX area or both. The number is the sink's id. The notice names one of the
    /// families that write to the sink (see [`Pending::name_ring`]).
    Ring(u64),
    /// The readers of a family of events: an owner and the events inherited from it. The number is the owner's id, which
    /// the notice contains.
    Family(u64),
}

/// A notice that a shard adds or retracts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoticeChange {
    /// Report `wakeups` wakeups.
    Wake { of: Woken, wakeups: u64 },
    /// Make the driver look at the AUX area that it manages for an event.
    Aux(u64),
    /// Report an event in the error state, with the host's reason.
    Fail(u64, Option<Refusal>),
    /// Report that an event has reached its limit of overflows. The last overflow caused `woke` wakeups, which are
    /// reported for `of`.
    Limit { event: u64, of: Woken, woke: u64 },
    /// Discard the notices of a closed event.
    Forget(u64),
}

/// The pending notices of a device, locked.
pub(crate) struct PendingNotices<'a> {
    state: Held<'a, State, NOTICES>,
    ready: &'a AtomicBool,
}

impl Drop for PendingNotices<'_> {
    fn drop(&mut self) {
        if std::mem::take(&mut self.state.pending.grown) {
            self.ready.store(true, Ordering::Relaxed);
        }
    }
}

impl std::ops::Deref for PendingNotices<'_> {
    type Target = Pending;

    fn deref(&self) -> &Pending {
        &self.state.pending
    }
}

impl std::ops::DerefMut for PendingNotices<'_> {
    fn deref_mut(&mut self) -> &mut Pending {
        &mut self.state.pending
    }
}

/// Pending notices, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    queue: VecDeque<Queued>,
    /// The number of wakeups to report. The number is zero if a `NOTICE_LIMIT` has replaced all of them. Their notice is
    /// then dropped when it is the oldest one.
    waking: BTreeMap<Woken, u64>,
    /// The event of each pending `NOTICE_LIMIT`, and how many times the event reached its limit.
    limited: BTreeMap<u64, u64>,
    /// Events with a pending `NOTICE_AUX`.
    fetched: BTreeSet<u64>,
    /// Whether a `NOTICE_PERSISTENT` is pending.
    listing: bool,
    /// Whether a notice was added since this flag was last cleared.
    grown: bool,
    /// For each sink, the family that its wakeups are reported for.
    rings: BTreeMap<u64, u64>,
}

/// A pending notice. The counts of wakeups and limits are elsewhere in [`Pending`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queued {
    Wakeup(Woken),
    /// `NOTICE_LIMIT` of an event.
    Limit(u64),
    /// `NOTICE_AUX` of an event.
    Aux(u64),
    /// `NOTICE_ERROR` of an event, with one of `REFUSED_*`.
    Error(u64, u8),
    /// `NOTICE_PERSISTENT`, with one of the persistent events that changed.
    Persistent(u64),
}

impl Pending {
    /// All pending notices, oldest first.
    pub(crate) fn save(&self) -> Vec<SavedNotice> {
        let notices = self.queue.iter().filter_map(|&queued| {
            let (kind, event, value) = self.described(queued)?;
            Some(SavedNotice { kind, event, value })
        });
        notices.collect()
    }

    /// Restores a notice that was pending when the state was saved. The caller must have checked that the notice's
    /// event exists. `woken` are the readers whose wakeups name this event.
    ///
    /// # Errors
    /// The saved notice is not valid, or an equivalent notice is already pending.
    pub(crate) fn restore(&mut self, saved: &SavedNotice, woken: Woken) -> Result<(), Fault> {
        let SavedNotice { kind, event, value } = *saved;
        let counts = matches!(kind, NOTICE_WAKEUP | NOTICE_LIMIT);
        let refusal = u8::try_from(value).ok();
        let refusal = refusal.filter(|&refusal| refusal <= refusal::LAST);
        if counts && value == 0 || kind == NOTICE_ERROR && refusal.is_none() {
            return Err("its value is not valid");
        }
        if matches!(kind, NOTICE_AUX | NOTICE_PERSISTENT) && value != 0 {
            return Err("its value is not valid");
        }
        let (fresh, queued) = match kind {
            NOTICE_WAKEUP => (self.waking.insert(woken, value).is_none(), Queued::Wakeup(woken)),
            NOTICE_LIMIT => (self.limited.insert(event, value).is_none(), Queued::Limit(event)),
            NOTICE_AUX => (self.fetched.insert(event), Queued::Aux(event)),
            NOTICE_PERSISTENT => (!std::mem::replace(&mut self.listing, true), Queued::Persistent(event)),
            NOTICE_ERROR => {
                let same = |one: &Queued| matches!(one, Queued::Error(of, _) if *of == event);
                let fresh = !self.queue.iter().any(same);
                (fresh, Queued::Error(event, refusal.unwrap_or(0)))
            }
            _ => return Err("its kind is unknown"),
        };
        if !fresh {
            return Err("it is already pending");
        }
        self.push(queued);
        Ok(())
    }

    /// Discards all notices. The names of the rings remain.
    fn discard(&mut self) {
        *self = Self { rings: std::mem::take(&mut self.rings), ..Self::default() };
    }

    /// Makes the wakeups of the sink `ring` be reported for `family`, which must write to this sink and must not have
    /// notices of its own.
    pub(crate) fn name_ring(&mut self, ring: u64, family: u64) {
        self.rings.insert(ring, family);
    }

    /// Forgets the sink `ring`, after which no wakeups of the sink are added. Returns how many of them were pending.
    pub(crate) fn forget_ring(&mut self, ring: u64) -> u64 {
        self.rings.remove(&ring);
        self.take_wakeups(Woken::Ring(ring))
    }

    /// Adds `wakeups` wakeups. A single notice reports all wakeups of the same readers that have not been reported yet.
    pub(crate) fn wake(&mut self, of: Woken, wakeups: u64) {
        match self.waking.entry(of) {
            Entry::Occupied(mut waking) => {
                // If a `NOTICE_LIMIT` has replaced the earlier wakeups, there was nothing to deliver.
                self.grown |= *waking.get() == 0;
                *waking.get_mut() = waking.get().saturating_add(wakeups);
            }
            Entry::Vacant(waking) => {
                waking.insert(wakeups);
                self.push(Queued::Wakeup(of));
            }
        }
    }

    /// Retracts pending wakeups. Returns how many were pending.
    pub(crate) fn take_wakeups(&mut self, of: Woken) -> u64 {
        let Some(waking) = self.waking.remove(&of) else {
            return 0;
        };
        self.retain(|queued| queued != Queued::Wakeup(of));
        waking
    }

    /// Adds the `NOTICE_ERROR` for an event. Called at most once in the event's life.
    pub(crate) fn fail(&mut self, event: u64, refused: Option<Refusal>) {
        self.push(Queued::Error(event, Refusal::wire(refused)));
    }

    /// Adds a `NOTICE_LIMIT` for an event. The driver also wakes readers when it receives this notice, so the notice
    /// replaces the `woke` wakeups of the last overflow, which were added for `of`. A program that counts signals then
    /// gets exactly one signal per overflow.
    pub(crate) fn limit(&mut self, event: u64, of: Woken, woke: u64) {
        if let Some(waking) = self.waking.get_mut(&of) {
            // If nothing is left, the notice stays queued until it is the oldest one. To find it now would take time
            // for each event that reaches its limit.
            *waking = waking.saturating_sub(woke);
        }
        let limited = self.limited.entry(event).or_default();
        let first = *limited == 0;
        *limited = limited.saturating_add(1);
        if first {
            self.push(Queued::Limit(event));
        }
    }

    /// Adds a `NOTICE_AUX` for an event, unless one is already pending. The notice tells the driver to check the AUX
    /// area that it manages for the event.
    pub(crate) fn aux(&mut self, event: u64) {
        if self.fetched.insert(event) {
            self.push(Queued::Aux(event));
        }
    }

    /// Adds a `NOTICE_PERSISTENT` after the host has started, ended or renamed the persistent event `event`. Does
    /// nothing if such a notice is already pending, for this or another event.
    pub(crate) fn list(&mut self, event: u64) {
        if !std::mem::replace(&mut self.listing, true) {
            self.push(Queued::Persistent(event));
        }
    }

    /// Discards a closed event's pending notices, except two kinds: `NOTICE_PERSISTENT`, and `NOTICE_WAKEUP`, which
    /// applies to all families that write to the same sink, or to the event's whole family.
    pub(crate) fn forget(&mut self, event: u64) {
        self.limited.remove(&event);
        self.fetched.remove(&event);
        self.retain(|queued| match queued {
            Queued::Limit(of) | Queued::Aux(of) | Queued::Error(of, _) => of != event,
            Queued::Wakeup(_) | Queued::Persistent(_) => true,
        });
    }

    /// The oldest pending notice, with its count.
    pub(crate) fn next(&mut self) -> Option<Notice> {
        loop {
            let &queued = self.queue.front()?;
            let Some((kind, event, value)) = self.described(queued) else {
                // A `NOTICE_LIMIT` has replaced its wakeups.
                self.delivered();
                continue;
            };
            let value = u32::try_from(value).unwrap_or(u32::MAX).min(NOTICE_COUNT);
            return Some(Notice { kind: kind.into(), value: value.into(), event: event.into() });
        }
    }

    /// Removes the oldest notice after its delivery. If its count exceeds `NOTICE_COUNT`, the maximum that one notice
    /// can report, the rest stays pending.
    pub(crate) fn delivered(&mut self) {
        let Some(&queued) = self.queue.front() else {
            return;
        };
        let rest = match queued {
            Queued::Wakeup(of) => subtract(&mut self.waking, of),
            Queued::Limit(event) => subtract(&mut self.limited, event),
            Queued::Aux(event) => {
                self.fetched.remove(&event);
                false
            }
            Queued::Persistent(_) => {
                self.listing = false;
                false
            }
            Queued::Error(..) => false,
        };
        if !rest {
            self.queue.pop_front();
        }
    }

    /// Returns the kind, the event and the whole value of a notice. `None` if the notice reports no wakeups.
    fn described(&self, queued: Queued) -> Option<(u32, u64, u64)> {
        Some(match queued {
            Queued::Wakeup(of) => {
                let event = match of {
                    Woken::Ring(ring) => self.rings.get(&ring).copied().unwrap_or(ring),
                    Woken::Family(owner) => owner,
                };
                let waking = self.waking.get(&of).copied();
                (NOTICE_WAKEUP, event, waking.filter(|&waking| waking > 0)?)
            }
            Queued::Limit(event) => {
                let limited = self.limited.get(&event).copied();
                (NOTICE_LIMIT, event, limited.unwrap_or(0))
            }
            Queued::Aux(event) => (NOTICE_AUX, event, 0),
            Queued::Error(event, refusal) => (NOTICE_ERROR, event, refusal.into()),
            Queued::Persistent(event) => (NOTICE_PERSISTENT, event, 0),
        })
    }

    /// Keeps only the notices that `which` selects.
    fn retain(&mut self, which: impl Fn(Queued) -> bool) {
        work::charge_examined(self.queue.len());
        self.queue.retain(|&queued| which(queued));
    }

    fn push(&mut self, queued: Queued) {
        self.grown = true;
        self.queue.push_back(queued);
    }
}

/// Subtracts the count that one notice reports from a pending count. Returns whether a pending count is left.
fn subtract<K: Ord + Copy>(pending: &mut BTreeMap<K, u64>, of: K) -> bool {
    let rest = pending.remove(&of).unwrap_or(0);
    let rest = rest.saturating_sub(NOTICE_COUNT.into());
    if rest > 0 {
        pending.insert(of, rest);
    }
    rest > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(notices: &mut Pending) -> Vec<(u32, u64, u32)> {
        let mut all = Vec::new();
        while let Some(notice) = notices.next() {
            all.push((notice.kind.get(), notice.event.get(), notice.value.get()));
            notices.delivered();
        }
        all
    }

    #[test]
    fn limit_replaces_only_the_wakeup_of_its_overflow() {
        let mut notices = Pending::default();
        notices.wake(Woken::Family(1), 1);
        notices.wake(Woken::Family(2), 1);
        notices.limit(1, Woken::Family(1), 1);
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 2, 1), (NOTICE_LIMIT, 1, 1)]);
        // When the event is enabled again, it can cause wakeups and reach its limit as before.
        notices.wake(Woken::Family(1), 1);
        assert_eq!(drained(&mut notices), [(NOTICE_WAKEUP, 1, 1)]);
        // Each of the two rounds stands for three overflows, each of which causes a wakeup. The third overflow reaches
        // the limit, so the NOTICE_LIMIT replaces the third wakeup.
        for _ in 0..2 {
            notices.wake(Woken::Family(1), 3);
            notices.limit(1, Woken::Family(1), 1);
        }
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 1, 4), (NOTICE_LIMIT, 1, 2)]);
        // The overflow that reaches the limit causes no wakeup.
        notices.wake(Woken::Family(1), 1);
        notices.limit(1, Woken::Family(1), 0);
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 1, 1), (NOTICE_LIMIT, 1, 1)]);
    }

    #[test]
    fn notices_count_every_wakeup() {
        let mut notices = Pending::default();
        for _ in 0..600 {
            notices.wake(Woken::Family(1), 1);
            notices.wake(Woken::Family(2), 1);
        }
        let reported = drained(&mut notices);
        let each = [256, 256, 88];
        let of = |event| each.map(|count| (NOTICE_WAKEUP, event, count));
        assert_eq!(reported, [of(1), of(2)].concat());
        assert!(notices.waking.is_empty());
    }

    #[test]
    fn taken_wakeups_go_to_the_heir() {
        let mut notices = Pending::default();
        notices.wake(Woken::Family(1), 300);
        notices.delivered();
        assert_eq!(notices.take_wakeups(Woken::Family(1)), 44);
        assert_eq!(notices.take_wakeups(Woken::Family(1)), 0);
        assert_eq!(drained(&mut notices), []);
    }

    #[test]
    fn notice_of_a_ring_names_the_family_that_the_ring_has_at_the_delivery() {
        let mut notices = Pending::default();
        let ring = Woken::Ring(7);
        notices.name_ring(7, 7);
        notices.wake(ring, 300);
        assert_eq!(notices.save()[0].event, 7);
        notices.delivered();
        notices.name_ring(7, 9);
        notices.wake(Woken::Family(7), 1);
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 9, 44), (NOTICE_WAKEUP, 7, 1)]);
        notices.wake(ring, 2);
        assert_eq!(notices.forget_ring(7), 2);
        assert_eq!(drained(&mut notices), []);
    }

    #[test]
    fn replaced_wakeups_leave_one_entry_until_they_are_the_oldest() {
        let mut notices = Pending::default();
        let ring = Woken::Ring(1);
        for event in 1..=100 {
            notices.wake(ring, 1);
            notices.limit(event, ring, 1);
        }
        assert_eq!(notices.queue.len(), 101);
        assert_eq!(notices.save().len(), 100);
        notices.grown = false;
        notices.wake(ring, 1);
        assert!(notices.grown);
        assert_eq!(notices.next().map(|notice| notice.kind.get()), Some(NOTICE_WAKEUP));
        notices.limit(1, ring, 1);
        assert_eq!(drained(&mut notices).len(), 100);
        assert!(notices.waking.is_empty());
    }

    #[test]
    fn one_notice_represents_all_persistent_events() {
        let mut notices = Pending::default();
        notices.list(1);
        notices.list(2);
        notices.forget(1);
        assert_eq!(drained(&mut notices), [(NOTICE_PERSISTENT, 1, 0)]);
        notices.list(2);
        assert_eq!(drained(&mut notices), [(NOTICE_PERSISTENT, 2, 0)]);
    }
}
