//! The order in which a vCPU's waiting events get a [`RunSlot`](crate::slots::RunSlot).
//!
//! A wait ends when the event gets a slot, or when the event is stopped, paused or closed. A stop, pause or close
//! leaves the wait's entry in the queue, because finding it would need a search. An entry therefore identifies one
//! wait, not just an event, and a reader of the queue must check whether that wait has ended. Entries of ended waits
//! are dropped when the queue is next taken. They are also dropped when a wait begins while the queue has twice as many
//! entries as there are events. A guest therefore cannot make the queue grow without limit.

use std::collections::VecDeque;

/// One wait of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) event: u64,
    /// Unique among the waits of the vCPU.
    pub(crate) number: u64,
}

/// Waits, in the order in which they began. Some of them may already have ended.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    queue: VecDeque<Wait>,
    begun: u64,
}

impl Waits {
    /// Begins a wait of `event`, and returns the number of the wait. First drops ended waits if the queue has at least
    /// twice as many entries as the vCPU has events (`events`). `lasts` must return whether a given wait still lasts.
    pub(crate) fn begin(&mut self, event: u64, events: usize, lasts: impl Fn(Wait) -> bool) -> u64 {
        if self.queue.len() >= events.saturating_mul(2) {
            self.queue.retain(|&wait| lasts(wait));
        }
        self.begun += 1;
        let number = self.begun;
        self.queue.push_back(Wait { event, number });
        number
    }

    /// Takes all waits, in the order in which they began, and leaves the queue empty.
    pub(crate) fn take(&mut self) -> VecDeque<Wait> {
        std::mem::take(&mut self.queue)
    }

    /// Puts back waits that have not ended, in the order in which [`Waits::take`] returned them, ahead of any waits
    /// that have begun since.
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
