//! The order of the events of a vCPU that wait for room.
//!
//! An event can stop waiting in many ways (it is stopped, paused, closed), and the code of each way would
//! have to search the queue for the event's entry. Instead, an entry names one wait of the event, not the
//! event itself. An entry whose wait is over stays in the queue until the queue is next taken or, at the
//! latest, has twice as many entries as there are events. Such entries are then dropped, so a guest cannot
//! make the queue grow without limit.

use std::collections::VecDeque;

/// One wait of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) event: u64,
    /// Unique among the waits of the vCPU.
    pub(crate) number: u64,
}

/// Waits, the first begun first. Some may be over.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    queue: VecDeque<Wait>,
    begun: u64,
}

impl Waits {
    /// Begins a wait of `event`, and returns its number. `events` is the number of the vCPU's events. `lasts`
    /// must return whether the wait that it is given is not over.
    pub(crate) fn begin(&mut self, event: u64, events: usize, lasts: impl Fn(Wait) -> bool) -> u64 {
        if self.queue.len() >= events.saturating_mul(2) {
            self.queue.retain(|&wait| lasts(wait));
        }
        self.begun += 1;
        let number = self.begun;
        self.queue.push_back(Wait { event, number });
        number
    }

    /// Takes all waits, the first begun first, and leaves the queue empty.
    pub(crate) fn take(&mut self) -> VecDeque<Wait> {
        std::mem::take(&mut self.queue)
    }

    /// Puts the waits back that are not over, in the order of [`Waits::take`], before those that began since.
    pub(crate) fn put_back(&mut self, waits: impl DoubleEndedIterator<Item = Wait>) {
        for wait in waits.rev() {
            self.queue.push_front(wait);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn waits_that_are_over_do_not_pile_up() {
        let mut waits = Waits::default();
        let mut current = HashMap::new();
        for round in 0..1000 {
            let event = round % 3;
            let lasts = |wait: Wait| current.get(&wait.event) == Some(&wait.number);
            let number = waits.begin(event, 3, lasts);
            current.insert(event, number);
            assert!(waits.queue.len() <= 6, "{waits:?}");
        }
        let mut order = waits.take();
        order.retain(|wait| current.get(&wait.event) == Some(&wait.number));
        let order: Vec<u64> = order.iter().map(|wait| wait.event).collect();
        assert_eq!(order, [1, 2, 0]);
        assert!(waits.is_empty());
    }
}
