//! Notices to the driver. A notice stays pending until the event queue has a buffer for it. The device then delivers
//! the notice, and raises an interrupt if the driver wants one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::abi::{
    NOTICE_AUX, NOTICE_COUNT, NOTICE_ERROR, NOTICE_LIMIT, NOTICE_PERSISTENT, NOTICE_WAKEUP, Notice,
    QUEUE_EVENT,
};
use crate::locks::{Held, Lock, NOTICES};
use crate::machine::Interrupt;
use crate::queues::{BadChain, Chain, DeviceQueue, QueueState, put};
use crate::refusal::{self, Refusal};
use crate::save::{Fault, SavedNotice, SavedQueue};

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

impl Notices {
    pub(crate) fn new() -> Self {
        Self {
            ready: AtomicBool::new(false),
            interrupts: AtomicU64::new(0),
            state: Lock::new(State::default()),
        }
    }

    /// Sets the event queue and the interrupt of a new driver, and discards pending notices.
    pub(crate) fn activate(&self, queue: DeviceQueue, interrupt: Option<Arc<dyn Interrupt>>) {
        let mut state = self.state.lock();
        state.pending = Pending::default();
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

    /// Removes the driver, and discards pending notices.
    pub(crate) fn reset(&self) {
        self.activate(DeviceQueue::default(), None);
    }

    /// Locks the pending notices, so that the caller can add or remove notices.
    pub(crate) fn pending(&self) -> PendingNotices<'_> {
        PendingNotices {
            state: self.state.lock(),
            ready: &self.ready,
        }
    }

    /// Adds or retracts the notices in `all`. No notice is delivered before the whole list has been applied.
    pub(crate) fn apply(&self, all: impl Iterator<Item = NoticeChange>) {
        let mut pending = self.pending();
        for change in all {
            match change {
                NoticeChange::Wake(owner) => pending.wake(owner, 1),
                NoticeChange::Aux(event) => pending.aux(event),
                NoticeChange::Fail(event, refused) => pending.fail(event, refused),
                NoticeChange::Limit { event, woke } => pending.limit(event, woke),
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

/// A notice that a shard adds or retracts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoticeChange {
    /// Wake the readers of a family of events: an owner and the events inherited from it.
    Wake(u64),
    /// Make the driver look at the AUX area that it manages for an event.
    Aux(u64),
    /// Report an event in the error state, with the host's reason.
    Fail(u64, Option<Refusal>),
    /// Report that an event has reached its limit of overflows. The last overflow caused `woke` wakeups.
    Limit { event: u64, woke: u64 },
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
    queue: VecDeque<Notice>,
    /// The event of each pending `NOTICE_WAKEUP`, and the number of wakeups to report.
    waking: BTreeMap<u64, u64>,
    /// The event of each pending `NOTICE_LIMIT`, and how many times the event reached its limit.
    limited: BTreeMap<u64, u64>,
    /// Events with a pending `NOTICE_AUX`.
    fetched: BTreeSet<u64>,
    /// Whether a `NOTICE_PERSISTENT` is pending.
    listing: bool,
    /// Whether a notice was added since this flag was last cleared.
    grown: bool,
}

impl Pending {
    /// All pending notices, oldest first.
    pub(crate) fn save(&self) -> Vec<SavedNotice> {
        let notices = self.queue.iter().map(|notice| {
            let (kind, event) = (notice.kind.get(), notice.event.get());
            let count = |of: &BTreeMap<u64, u64>| of.get(&event).copied().unwrap_or(0);
            SavedNotice {
                kind,
                event,
                value: match kind {
                    NOTICE_WAKEUP => count(&self.waking),
                    NOTICE_LIMIT => count(&self.limited),
                    _ => notice.value.get().into(),
                },
            }
        });
        notices.collect()
    }

    /// Restores a notice that was pending when the state was saved. The caller must have checked that the notice's
    /// event exists.
    ///
    /// # Errors
    /// The saved notice is not valid, or an equivalent notice is already pending.
    pub(crate) fn restore(&mut self, saved: &SavedNotice) -> Result<(), Fault> {
        let SavedNotice { kind, event, value } = *saved;
        let counts = matches!(kind, NOTICE_WAKEUP | NOTICE_LIMIT);
        let (most, fresh) = match kind {
            NOTICE_WAKEUP => (u64::MAX, self.waking.insert(event, value).is_none()),
            NOTICE_LIMIT => (u64::MAX, self.limited.insert(event, value).is_none()),
            NOTICE_AUX => (0, self.fetched.insert(event)),
            NOTICE_PERSISTENT => (0, !std::mem::replace(&mut self.listing, true)),
            NOTICE_ERROR => (refusal::LAST.into(), {
                let mut errors = self.queue.iter();
                !errors.any(|one| (one.kind.get(), one.event.get()) == (kind, event))
            }),
            _ => return Err("its kind is unknown"),
        };
        if value > most || counts && value == 0 {
            return Err("its value is not valid");
        }
        if !fresh {
            return Err("it is already pending");
        }
        // Later, `next` replaces the value of a `NOTICE_WAKEUP` or a `NOTICE_LIMIT` by the pending count, so the value
        // that is passed here does not matter. The value of any other notice fits in a byte.
        self.push_with(kind, event, u8::try_from(value).unwrap_or(0));
        Ok(())
    }

    /// Adds `wakeups` wakeups of an event. A single notice reports all wakeups of the event that have not been reported
    /// yet.
    pub(crate) fn wake(&mut self, event: u64, wakeups: u64) {
        let waking = self.waking.entry(event).or_default();
        let first = *waking == 0;
        *waking = waking.saturating_add(wakeups);
        if first {
            self.push(NOTICE_WAKEUP, event);
        }
    }

    /// Retracts the pending wakeups of the family of events with this owner. Returns how many wakeups were pending.
    pub(crate) fn take_wakeups(&mut self, owner: u64) -> u64 {
        let waking = self.waking.remove(&owner).unwrap_or(0);
        self.retract(owner, |kind| kind == NOTICE_WAKEUP);
        waking
    }

    /// Adds the `NOTICE_ERROR` for an event. Called at most once in the event's life.
    pub(crate) fn fail(&mut self, event: u64, refused: Option<Refusal>) {
        self.push_with(NOTICE_ERROR, event, Refusal::wire(refused));
    }

    /// Adds a `NOTICE_LIMIT` for an event. The driver also wakes readers when it receives this notice, so the notice
    /// replaces the `woke` wakeups of the last overflow. A program that counts signals then gets exactly one signal per
    /// overflow.
    pub(crate) fn limit(&mut self, event: u64, woke: u64) {
        if let Some(waking) = self.waking.get_mut(&event) {
            *waking = waking.saturating_sub(woke);
            if *waking == 0 {
                self.take_wakeups(event);
            }
        }
        let limited = self.limited.entry(event).or_default();
        let first = *limited == 0;
        *limited = limited.saturating_add(1);
        if first {
            self.push(NOTICE_LIMIT, event);
        }
    }

    /// Adds a `NOTICE_AUX` for an event, unless one is already pending. The notice tells the driver to check the AUX
    /// area that it manages for the event.
    pub(crate) fn aux(&mut self, event: u64) {
        if self.fetched.insert(event) {
            self.push(NOTICE_AUX, event);
        }
    }

    /// Adds a `NOTICE_PERSISTENT` after the host has started, ended or renamed the persistent event `event`. Does
    /// nothing if such a notice is already pending, for this or another event.
    pub(crate) fn list(&mut self, event: u64) {
        if !std::mem::replace(&mut self.listing, true) {
            self.push(NOTICE_PERSISTENT, event);
        }
    }

    /// Discards a closed event's pending notices, except two kinds: `NOTICE_PERSISTENT`, and `NOTICE_WAKEUP`, which
    /// applies to the event's whole family.
    pub(crate) fn forget(&mut self, event: u64) {
        self.limited.remove(&event);
        self.fetched.remove(&event);
        self.retract(event, |kind| {
            kind != NOTICE_WAKEUP && kind != NOTICE_PERSISTENT
        });
    }

    /// The oldest pending notice, with its count.
    pub(crate) fn next(&self) -> Option<Notice> {
        let notice = self.queue.front()?;
        let event = notice.event.get();
        let pending = match notice.kind.get() {
            NOTICE_WAKEUP => self.waking.get(&event),
            NOTICE_LIMIT => self.limited.get(&event),
            _ => None,
        };
        let Some(&pending) = pending else {
            return Some(*notice);
        };
        let count = u32::try_from(pending).unwrap_or(u32::MAX).min(NOTICE_COUNT);
        Some(Notice {
            value: count.into(),
            ..*notice
        })
    }

    /// Removes the oldest notice after its delivery. If its count exceeds `NOTICE_COUNT`, the maximum that one notice
    /// can report, the rest stays pending.
    pub(crate) fn delivered(&mut self) {
        let Some(notice) = self.next() else {
            return;
        };
        let (event, count) = (notice.event.get(), u64::from(notice.value.get()));
        let rest = match notice.kind.get() {
            NOTICE_WAKEUP => subtract(&mut self.waking, event, count),
            NOTICE_LIMIT => subtract(&mut self.limited, event, count),
            NOTICE_AUX => {
                self.fetched.remove(&event);
                false
            }
            NOTICE_PERSISTENT => {
                self.listing = false;
                false
            }
            _ => false,
        };
        if !rest {
            self.queue.pop_front();
        }
    }

    fn retract(&mut self, event: u64, which: impl Fn(u32) -> bool) {
        self.queue
            .retain(|notice| notice.event.get() != event || !which(notice.kind.get()));
    }

    fn push(&mut self, kind: u32, event: u64) {
        self.push_with(kind, event, 0);
    }

    fn push_with(&mut self, kind: u32, event: u64, value: u8) {
        self.grown = true;
        self.queue.push_back(Notice {
            kind: kind.into(),
            value: u32::from(value).into(),
            event: event.into(),
        });
    }
}

/// Subtracts `count` from the pending count of an event. Returns whether the event still has a pending count.
fn subtract(pending: &mut BTreeMap<u64, u64>, event: u64, count: u64) -> bool {
    let rest = pending.remove(&event).unwrap_or(0).saturating_sub(count);
    if rest > 0 {
        pending.insert(event, rest);
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
        notices.wake(1, 1);
        notices.wake(2, 1);
        notices.limit(1, 1);
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 2, 1), (NOTICE_LIMIT, 1, 1)]);
        // When the event is enabled again, it can cause wakeups and reach its limit as before.
        notices.wake(1, 1);
        assert_eq!(drained(&mut notices), [(NOTICE_WAKEUP, 1, 1)]);
        // Each of the two rounds stands for three overflows, each of which causes a wakeup. The third overflow reaches
        // the limit, so the NOTICE_LIMIT replaces the third wakeup.
        for _ in 0..2 {
            notices.wake(1, 3);
            notices.limit(1, 1);
        }
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 1, 4), (NOTICE_LIMIT, 1, 2)]);
        // The overflow that reaches the limit causes no wakeup.
        notices.wake(1, 1);
        notices.limit(1, 0);
        let reported = drained(&mut notices);
        assert_eq!(reported, [(NOTICE_WAKEUP, 1, 1), (NOTICE_LIMIT, 1, 1)]);
    }

    #[test]
    fn notices_count_every_wakeup() {
        let mut notices = Pending::default();
        for _ in 0..600 {
            notices.wake(1, 1);
            notices.wake(2, 1);
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
        notices.wake(1, 300);
        notices.delivered();
        assert_eq!(notices.take_wakeups(1), 44);
        assert_eq!(notices.take_wakeups(1), 0);
        assert_eq!(drained(&mut notices), []);
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
