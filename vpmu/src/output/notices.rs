//! What the driver is to be told, until it has posted room for it.

use std::collections::{BTreeSet, VecDeque};

use crate::abi::{
    NOTICE_AUX, NOTICE_ERROR, NOTICE_LIMIT, NOTICE_PERSISTENT, NOTICE_WAKEUP, Notice,
};

/// Notices that are due, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    due: VecDeque<Notice>,
    /// Events whose wakeup is among `due`.
    waking: BTreeSet<u64>,
    /// Events whose limit is among `due`.
    limited: BTreeSet<u64>,
    /// Events of which the driver is to fetch what they wrote, among `due`.
    fetched: BTreeSet<u64>,
    /// One of persistent events is among `due`.
    listing: bool,
}

impl Notices {
    /// An event's record calls for a wakeup; one notice stands for all that are not delivered.
    pub(crate) fn wake(&mut self, event: u64) {
        if self.waking.insert(event) {
            self.push(NOTICE_WAKEUP, event);
        }
    }

    /// Takes back the wakeup that is due for a family that is gone; whether there was one.
    pub(crate) fn take_wakeup(&mut self, owner: u64) -> bool {
        let waking = self.waking.remove(&owner);
        self.retract(owner, |kind| kind == NOTICE_WAKEUP);
        waking
    }

    /// An event is in error; once in its life.
    pub(crate) fn fail(&mut self, event: u64) {
        self.push(NOTICE_ERROR, event);
    }

    /// An event has used its overflows up; one notice stands for all that are not delivered. It
    /// is a wakeup too, and stands for the one that the last record called for: a program that
    /// counts signals gets one for each overflow.
    pub(crate) fn limit(&mut self, event: u64) {
        if self.waking.remove(&event) {
            let wakeup =
                |notice: &Notice| notice.kind.get() == NOTICE_WAKEUP && notice.event.get() == event;
            self.due.retain(|notice| !wakeup(notice));
        }
        if self.limited.insert(event) {
            self.push(NOTICE_LIMIT, event);
        }
    }

    /// The driver is to look at the area that it keeps for an event; one notice stands for all that
    /// are not delivered.
    pub(crate) fn aux(&mut self, event: u64) {
        if self.fetched.insert(event) {
            self.push(NOTICE_AUX, event);
        }
    }

    /// The host has started or ended the persistent event `event`; one notice stands for all that are
    /// not delivered.
    pub(crate) fn list(&mut self, event: u64) {
        if !std::mem::replace(&mut self.listing, true) {
            self.push(NOTICE_PERSISTENT, event);
        }
    }

    /// Forgets what is due for an event that is gone, but for its family's wakeup.
    pub(crate) fn forget(&mut self, event: u64) {
        self.limited.remove(&event);
        self.fetched.remove(&event);
        self.retract(event, |kind| {
            kind != NOTICE_WAKEUP && kind != NOTICE_PERSISTENT
        });
    }

    /// The oldest that is due.
    pub(crate) fn next(&self) -> Option<Notice> {
        self.due.front().copied()
    }

    /// It has been delivered.
    pub(crate) fn delivered(&mut self) {
        let Some(notice) = self.due.pop_front() else {
            return;
        };
        let event = notice.event.get();
        match notice.kind.get() {
            NOTICE_WAKEUP => self.waking.remove(&event),
            NOTICE_LIMIT => self.limited.remove(&event),
            NOTICE_AUX => self.fetched.remove(&event),
            NOTICE_PERSISTENT => std::mem::take(&mut self.listing),
            _ => false,
        };
    }

    fn retract(&mut self, event: u64, which: impl Fn(u32) -> bool) {
        self.due
            .retain(|notice| notice.event.get() != event || !which(notice.kind.get()));
    }

    fn push(&mut self, kind: u32, event: u64) {
        self.due.push_back(Notice {
            kind: kind.into(),
            event: event.into(),
            ..Notice::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(notices: &mut Notices) -> Vec<(u32, u64)> {
        let mut all = Vec::new();
        while let Some(notice) = notices.next() {
            all.push((notice.kind.get(), notice.event.get()));
            notices.delivered();
        }
        all
    }

    #[test]
    fn the_last_overflow_is_told_once() {
        let mut notices = Notices::default();
        notices.wake(1);
        notices.wake(2);
        notices.limit(1);
        notices.limit(1);
        let told = drained(&mut notices);
        assert_eq!(told, [(NOTICE_WAKEUP, 2), (NOTICE_LIMIT, 1)]);
        // Enabled again, it can wake and end as before.
        notices.wake(1);
        assert_eq!(drained(&mut notices), [(NOTICE_WAKEUP, 1)]);
    }

    #[test]
    fn one_notice_stands_for_all_persistent_events() {
        let mut notices = Notices::default();
        notices.list(1);
        notices.list(2);
        notices.forget(1);
        assert_eq!(drained(&mut notices), [(NOTICE_PERSISTENT, 1)]);
        notices.list(2);
        assert_eq!(drained(&mut notices), [(NOTICE_PERSISTENT, 2)]);
    }
}
